package disagg

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// answer is what the router reads of a prefill's answer that is not streamed
// (vLLM 0.32). /v1/chat/completions and /v1/completions:
//
//	{"id": …, "choices": [{"finish_reason": …, "text": …}],
//	 "usage": {"prompt_tokens": …, "prompt_tokens_details": {"cached_tokens": …}},
//	 "kv_transfer_params": {…} | null}
//
// /v1/messages, where input_tokens are those that the two counts beside it leave:
//
//	{"id": …, "type": "message", "stop_reason": "max_tokens" | …,
//	 "usage": {"input_tokens": …, "cache_read_input_tokens": …, "cache_creation_input_tokens": …},
//	 "kv_transfer_params": {…}}
//
// /v1/responses:
//
//	{"id": …, "object": "response", "status": "completed" | "incomplete" | …,
//	 "usage": {"input_tokens": …, "input_tokens_details": {"cached_tokens": …}},
//	 "kv_transfer_params": {…} | null}
type answer struct {
	id, finish, text           string
	promptTokens, cachedTokens int           // -1 when missing
	params                     rawjson.Value // empty when absent or null
}

// Limits on a prefill's answer.
const (
	maxDepth       = 128
	maxParamsBytes = 4 << 20
	maxNameBytes   = 512
	maxBlockID     = math.MaxInt32
)

// parseAnswer reads an answer. Member names are taken exactly, of duplicates
// the last one, as the engines' own parser does.
func parseAnswer(body []byte) (*answer, error) {
	a := &answer{promptTokens: -1, cachedTokens: -1}
	var wrong, choice, usage, object, stop, status rawjson.Value
	isObject := rawjson.ReadObject(body, maxDepth, func(key, value []byte) {
		v := rawjson.Value(value)
		switch string(key) {
		case "error":
			wrong = v
		case "id":
			a.id = word(v)
		case "choices":
			if choice = nil; rawjson.IsArray(v) {
				choice = v.Get("0")
			}
		case "usage":
			usage = v
		case "object", "type":
			object = v
		case "stop_reason":
			stop = v
		case "status":
			status = v
		case transferParams:
			a.params = v
		}
	})
	if !isObject {
		return nil, fmt.Errorf("%w: the answer is not a JSON object", ErrPrefillFailed)
	}
	if present(wrong) {
		return nil, fmt.Errorf("%w: the answer is an error: %s", ErrPrefillFailed, clip(string(wrong)))
	}
	for key, v := range choice.Members() {
		switch string(key) {
		case "finish_reason":
			a.finish = word(v)
		case "text":
			a.text = word(v)
		}
	}
	message := word(object) == "message"
	switch {
	case message:
		// Anthropic's API may have no word for this end.
		a.finish = cmp.Or(word(stop), "unnamed")
		if a.finish == "max_tokens" {
			a.finish = "length"
		}
	case word(object) == "response":
		if a.finish = word(status); a.finish == "incomplete" {
			a.finish = "length"
		}
	}
	switch a.finish {
	case "error", "abort", "cancelled", "failed", "queued", "in_progress":
		return nil, fmt.Errorf("%w: finish_reason is %q", ErrPrefillFailed, a.finish)
	}
	count := func(v rawjson.Value) int {
		if n, ok := v.Int(); ok && n >= 0 {
			return n
		}
		return -1
	}
	created := 0
	for key, v := range usage.Members() {
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			a.promptTokens = count(v)
		case "cache_read_input_tokens":
			a.cachedTokens = count(v)
		case "cache_creation_input_tokens":
			created = max(0, count(v))
		case "prompt_tokens_details", "input_tokens_details":
			for key, v := range v.Members() {
				if string(key) == "cached_tokens" {
					a.cachedTokens = count(v)
				}
			}
		}
	}
	if message && a.promptTokens >= 0 {
		a.promptTokens += max(0, a.cachedTokens) + created
	}
	if !present(a.params) {
		a.params = nil
	}
	if a.cachedTokens < 0 { // the engine may keep details out of its usage
		a.cachedTokens = count(a.params.Get("remote_prefill_cached_tokens"))
	}
	return a, nil
}

// ended reports whether the answer ended by itself, not by the one token that a
// prefill leg may have.
func (a *answer) ended() bool { return a.finish != "" && a.finish != "length" }

// missing is what an answer without transfer parameters means.
func (a *answer) missing() error {
	if a.ended() {
		return fmt.Errorf("%w (finish_reason %q)", ErrEnded, clip(a.finish))
	}
	return ErrMissingParams
}

// checkDiscarded looks for a failure in an answer of which nothing is used: an
// object, or the event stream that the client has asked for, since SGLang's
// prefill leg carries the client's own "stream".
func checkDiscarded(body []byte) error {
	if rest := bytes.TrimLeft(body, " \t\r\n"); bytes.HasPrefix(rest, []byte("{")) {
		_, err := parseAnswer(body)
		return err
	} else if bytes.HasPrefix(rest, []byte("[")) { // of several prompts
		var answers []json.RawMessage
		if err := json.Unmarshal(rest, &answers); err != nil {
			return fmt.Errorf("%w: %w", ErrPrefillFailed, err)
		}
		for _, a := range answers {
			if _, err := parseAnswer(a); err != nil {
				return err
			}
		}
		return nil
	}
	// The lines are read here, and not by sse.Scanner, which stops at no error and keeps no
	// event's data: each must be judged as an answer.
	events := 0
	for line := range bytes.Lines(body) {
		data, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data:"))
		if data = bytes.TrimSpace(data); !ok || len(data) == 0 {
			continue
		}
		events++
		if string(data) == "[DONE]" {
			continue
		}
		if _, err := parseAnswer(data); err != nil {
			return err
		}
	}
	if events == 0 {
		return fmt.Errorf("%w: the answer is neither a JSON object nor an event stream", ErrPrefillFailed)
	}
	return nil
}

// The members of kv_transfer_params that are looked at.
const (
	fieldRemotePrefill = iota
	fieldRemoteDecode
	fieldBlockIDs
	fieldEngineID
	fieldRequestID
	fieldHost
	fieldPort
	fieldTP
	fieldPP
	fieldDCP
	fieldPCP
	fieldTokens
	fieldBlockSize
	fieldExpiry
	fieldMode
	fieldGeneration
	fieldCount
)

var fieldNames = [fieldCount]string{
	"do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port",
	"tp_size", "pp_size", "dcp_size", "pcp_size", "remote_num_tokens", "remote_block_size", "remote_blocks_expiry_time", "transfer_mode", "remote_registration_generation",
}

// params are the members by field; the first problem is kept.
type params struct {
	m     [fieldCount]rawjson.Value
	count int // members, unknown ones included
	err   error
	// report lets harmless oddities pass into odd.
	report bool
	// hybrid says that there are several cache groups, with which nothing is harmless.
	hybrid bool
	odd    []string
}

// harmless notes a problem that no known decode engine comes to harm by: vLLM
// 0.32 answers right whatever these members say, or at worst (a size that it
// needs for its first contact with the prefill engine) with an error.
func (p *params) harmless(field int, format string, a ...any) {
	e := &ParamsError{Field: fieldNames[field], Problem: fmt.Sprintf(format, a...), Harmless: !p.hybrid}
	if p.report {
		p.odd = append(p.odd, e.Field+": "+e.Problem)
	} else {
		p.fail(e)
	}
}

// fail keeps the first problem, one that does harm before one that does none.
func (p *params) fail(e *ParamsError) {
	var was *ParamsError
	if p.err == nil || errors.As(p.err, &was) && was.Harmless && !e.Harmless {
		p.err = e
	}
}

// checkNIXL judges the parameters row by row as the table of what a vLLM
// 0.32 decode engine does with wrong ones: whatever would give another prompt's
// text, hang, or make the engine exit is refused here. What passes is handed
// on byte for byte.
//
// Some members harm nobody, whatever they say. With TransferReport a problem with one
// of those is reported and the parameters are used all the same, so that an engine of a
// newer version does not turn every remote prefill into a local one.
func checkNIXL(t *Transfer, a *answer) error {
	p, err := readParams(t, a)
	if err != nil {
		return err
	}
	if word(p.m[fieldMode]) == modePush {
		return &ParamsError{Field: fieldNames[fieldMode], Problem: "the engine pushes its KV: state connector=nixl-push on its worker and on the decode workers beside it"}
	}
	p.time(fieldExpiry)
	p.generation(fieldGeneration)
	d, f := &t.dispatch, &t.facts
	tokens := promptTokens(a, p, &d.Facts)
	if p.err != nil {
		return p.err
	}
	if err := checkBlocks(f, p, tokens, d); err != nil {
		return err
	}
	f.Odd = p.odd
	return nil
}

// readParams reads the transfer parameters of a NIXL prefill's answer and judges
// what its two forms have in common: that the engine kept the KV of this request,
// and where it is.
func readParams(t *Transfer, a *answer) (*params, error) {
	if !a.params.Exists() {
		return nil, a.missing()
	}
	if len(a.params) > maxParamsBytes {
		return nil, &ParamsError{Field: transferParams, Problem: fmt.Sprintf("%d bytes, at most %d", len(a.params), maxParamsBytes)}
	}
	if !rawjson.IsObject(a.params) {
		return nil, &ParamsError{Field: transferParams, Problem: "not an object"}
	}
	p := &params{report: t.dispatch.Check == workers.TransferReport}
	for key, v := range a.params.Members() {
		p.count++
		if i := slices.Index(fieldNames[:], string(key)); i >= 0 {
			p.m[i] = v
		}
	}
	if p.count == 0 {
		return nil, a.missing()
	}
	if t.facts.Groups = cacheGroups(p.m[fieldBlockIDs]); t.facts.Groups > 1 {
		p.hybrid, p.report = true, false
	}
	p.flag(fieldRemotePrefill, "true")
	p.flag(fieldRemoteDecode, "false")
	f := &t.facts
	f.EngineID = p.name(fieldEngineID)
	f.RequestID = p.name(fieldRequestID)
	f.Host = p.name(fieldHost)
	f.Port = p.port(fieldPort)
	for k := fieldTP; k <= fieldPCP; k++ {
		p.size(k)
	}
	if p.err != nil {
		return nil, p.err
	}
	d := &t.dispatch
	sent := cmp.Or(t.requestID, d.RequestID)
	if d.Facts.Kind == api.Responses {
		sent = "" // this endpoint does not look at the header
	}
	if err := checkRequestID(f.RequestID, sent, a.id); err != nil {
		return nil, err
	}
	if err := checkHost(f.Host, workerURL(d.Prefill), workerURL(d.Decode)); err != nil {
		return nil, err
	}
	return p, nil
}

// cacheGroups is how many groups a list of blocks has, 0 when it has none or is flat.
// Lists within groups count as groups, which no engine has.
func cacheGroups(list rawjson.Value) int {
	if !rawjson.IsArray(list) {
		return 0
	}
	return bytes.Count(list, []byte("[")) - 1 // a list has as many blocks as the prompt
}

// checkRequestID refuses parameters of another request. vLLM makes its
// internal id from the header X-Request-Id, which both legs carry, and answers
// with an id that the internal one begins with.
func checkRequestID(remote, sent, answered string) error {
	if sent != "" && !strings.Contains(remote, sent) {
		return &ParamsError{Field: "remote_request_id", Problem: fmt.Sprintf("%q is not of request %q", clip(remote), clip(sent))}
	}
	if sent == "" && answered != "" && !strings.HasPrefix(remote, answered) {
		return &ParamsError{Field: "remote_request_id", Problem: fmt.Sprintf("%q is not of answer %q", clip(remote), clip(answered))}
	}
	return nil
}

// checkHost refuses an address that cannot lead from the decode engine to the
// prefill engine: vLLM's default, "localhost", is right only where both run on
// one machine, and elsewhere makes the decode engine wait and then exit.
func checkHost(host string, prefill, decode *url.URL) error {
	if strings.ContainsAny(host, " /?#@\\") || host == "0.0.0.0" || host == "::" {
		return &ParamsError{Field: "remote_host", Problem: fmt.Sprintf("%q is not a host", clip(host))}
	}
	p, d := hostname(prefill), hostname(decode)
	if p != "" && d != "" && p != d && isLoopback(host) && (!isLoopback(p) || !isLoopback(d)) {
		return &ParamsError{Field: "remote_host", Problem: fmt.Sprintf("%q, but the prefill worker is on %s and the decode worker on %s: set VLLM_NIXL_SIDE_CHANNEL_HOST", host, p, d)}
	}
	return nil
}

// exact reports whether an engine must count ISL tokens. Only ids of the client
// are counted alike by everybody: /tokenize is not asked with all that a
// request's own template may look at (the choice of a tool, a format for the
// answer), and some models do not use a template for it at all.
func exact(f *api.Facts) bool { return f.Source == route.FromIDs && !f.Truncated && f.ISL > 0 }

// promptTokens is the prompt's length as the prefill engine has it; every source that
// states it must agree. remote_num_tokens alone may differ: it is not what a decode
// engine goes by.
func promptTokens(a *answer, p *params, f *api.Facts) int {
	n := a.promptTokens
	if raw := p.m[fieldTokens]; present(raw) {
		v, ok := raw.Int()
		switch {
		case !ok || v < 1:
			p.harmless(fieldTokens, "not a positive whole number")
		case n >= 0 && v != n:
			p.harmless(fieldTokens, "%d, but the prompt has %d tokens", v, n)
		default:
			n = v
		}
	}
	wrong := func(format string, a ...any) {
		p.fail(&ParamsError{Field: "prompt_tokens", Problem: fmt.Sprintf(format, a...)})
	}
	if exact(f) {
		if n >= 0 && n != f.ISL {
			wrong("the prefill engine counts %d tokens, the prompt has %d", n, f.ISL)
		}
		n = f.ISL
	}
	if n < 1 {
		wrong("the answer does not state the prompt's length, so its blocks cannot be checked")
	}
	return n
}

// checkBlocks wants exactly the blocks of the prompt: with fewer of them the
// decode engine exits, with more it answers with another prompt's text.
//
// A list of lists holds one list per KV-cache group; at least one group covers
// the prompt in full and none has more (sliding windows may have fewer). vLLM
// 0.9 and 0.10 gave a flat list and left the last partial block out; engines of that
// age are recognised by having none of the newer members, since a flat list makes a
// newer decode engine exit.
func checkBlocks(f *Checked, p *params, tokens int, d *Dispatch) error {
	const field = "remote_block_ids"
	bad := func(format string, a ...any) error {
		return &ParamsError{Field: field, Problem: fmt.Sprintf(format, a...)}
	}
	list := p.m[fieldBlockIDs]
	if !rawjson.IsArray(list) {
		return bad("not a list")
	}
	size := 0
	if v, ok := p.m[fieldBlockSize].Int(); ok && v > 0 {
		size = v
	} else if w := d.Prefill.Worker; w != nil {
		size = w.BlockSize
	}
	first := rawjson.Walk(list)
	if !first.Open('[') {
		return bad("empty")
	}
	flat := !first.At('[')
	if flat {
		for _, k := range [...]int{fieldMode, fieldPP, fieldDCP, fieldPCP, fieldBlockSize} {
			if p.m[k].Exists() {
				return bad("a flat list, but an engine that states %s gives a list for every KV-cache group", fieldNames[k])
			}
		}
	}
	want := 0
	if size > 0 {
		want = (tokens + size - 1) / size
	}
	full := false
	var problem error
	group := func(v rawjson.Value) bool {
		n, err := countBlocks(v)
		if err != nil {
			problem = bad("%v", err)
			return false
		}
		f.Blocks = max(f.Blocks, n)
		switch {
		case want > 0 && n > want:
			problem = bad("%d blocks, but %d tokens fill %d blocks of %d", n, tokens, want, size)
		case want == 0 && n > tokens:
			problem = bad("%d blocks for %d tokens", n, tokens)
		case n == want, want == 0 && n > 0, flat && !p.m[fieldTokens].Exists() && n > 0 && n == tokens/max(size, 1):
			full = true
		}
		return problem == nil
	}
	if flat {
		group(list)
	} else {
		for v := range list.Elements() {
			if !group(v) {
				break
			}
		}
	}
	if problem == nil && !full {
		problem = bad("%d blocks, but %d tokens fill %d blocks of %d", f.Blocks, tokens, want, size)
	}
	return problem
}

// countBlocks counts the ids of one group; each must be a whole number from 0
// on and stand once.
func countBlocks(list rawjson.Value) (int, error) {
	if !rawjson.IsArray(list) {
		return 0, fmt.Errorf("a group is not a list")
	}
	if n, ok := countRising(list); ok {
		return n, nil
	}
	var few [512]int
	ids := few[:0]
	for v := range list.Elements() {
		id, ok := v.Int()
		if !ok || id < 0 || id > maxBlockID {
			return 0, fmt.Errorf("%s is not a block id", clip(string(v)))
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for i := 1; i < len(ids); i++ {
		if ids[i] == ids[i-1] && ids[i] != 0 { // 0 is vLLM's null block
			return 0, fmt.Errorf("block %d appears twice", ids[i])
		}
	}
	return len(ids), nil
}

// countRising counts the ids of a valid JSON list in which each is greater than
// the one before, as an engine gives them that has room: a long prompt has
// thousands, and this needs neither memory nor a sort. Of any other list it
// reports false.
func countRising(raw []byte) (n int, ok bool) {
	last, end := -1, len(raw)-1
	if end < 1 || raw[0] != '[' || raw[end] != ']' {
		return 0, false
	}
	for i := 1; i < end; n++ {
		id, from := 0, i
		for ; i < end && raw[i]-'0' <= 9 && id <= maxBlockID; i++ {
			id = 10*id + int(raw[i]-'0')
		}
		if i == from || id > maxBlockID || id <= last {
			return 0, false
		}
		last = id
		if i == end {
			continue
		}
		if raw[i] != ',' {
			return 0, false
		}
		if i++; raw[i] == ' ' { // as Python writes lists
			i++
		}
	}
	return n, true
}

func workerURL(p workers.Peer) *url.URL {
	if p.Worker == nil {
		return nil
	}
	return p.Worker.URL
}

func (p *params) bad(field int, format string, a ...any) {
	p.fail(&ParamsError{Field: fieldNames[field], Problem: fmt.Sprintf(format, a...)})
}

func (p *params) flag(field int, want string) {
	if string(p.m[field]) != want {
		p.bad(field, "must be %s", want)
	}
}

// name is a member that must be a short, not empty, printable string.
func (p *params) name(field int) string {
	s := word(p.m[field])
	if s == "" {
		p.bad(field, "missing")
		return ""
	}
	if len(s) > maxNameBytes || !printable(s) {
		p.bad(field, "not a name")
		return ""
	}
	return s
}

// printable reports whether a text is valid and without control characters.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] == 0x7f {
			return false
		}
	}
	return utf8.ValidString(s)
}

// port is a member that must be there.
func (p *params) port(field int) int {
	n, ok := p.m[field].Int()
	switch {
	case !present(p.m[field]):
		p.bad(field, "missing")
	case !ok || n < 1 || n > 65535:
		p.bad(field, "%s is not a whole number from 1 to 65535", clip(string(p.m[field])))
	}
	return n
}

// size is a member that may be left out.
func (p *params) size(field int) {
	v := p.m[field]
	if n, ok := v.Int(); present(v) && (!ok || n < 1 || n > 1<<16) {
		p.harmless(field, "%s is not a whole number from 1 to %d", clip(string(v)), 1<<16)
	}
}

// time is a member that may be null. It is on the engine's own clock (vLLM takes
// it from a counter that has nothing to do with the time of day), which the
// decode engine knows from its handshake; whether it has passed cannot be judged
// here.
func (p *params) time(field int) {
	v := p.m[field]
	if at, err := strconv.ParseFloat(string(v), 64); present(v) && (err != nil || at < 0 || math.IsInf(at, 0)) {
		p.harmless(field, "not a time")
	}
}

// generation is a member that may be left out, as vLLM 0.32 does. The decode engine of 0.33
// compares it as a number whatever it is, and exits over any other.
func (p *params) generation(field int) {
	v := p.m[field]
	if n, ok := v.Int(); v.Exists() && (!ok || n < 0) {
		p.bad(field, "%s is not a whole number from 0 on", clip(string(v)))
	}
}

// present reports whether a member is there and not null.
func present(v rawjson.Value) bool { return v.Exists() && !rawjson.IsNull(v) }

// word is a string, or "" for any other value.
func word(v rawjson.Value) string {
	if !rawjson.IsString(v) {
		return ""
	}
	return v.String()
}

func clip(s string) string {
	if len(s) > 120 {
		return s[:117] + "..."
	}
	return s
}
