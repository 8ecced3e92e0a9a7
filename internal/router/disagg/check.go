package disagg

import (
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/router/api"
)

// answer is what the router reads of a prefill's answer (vLLM 0.32
// /v1/chat/completions and /v1/completions, not streamed):
//
//	{"id": …, "choices": [{"finish_reason": …, "text": …}],
//	 "usage": {"prompt_tokens": …, "prompt_tokens_details": {"cached_tokens": …}},
//	 "kv_transfer_params": {…} | null}
type answer struct {
	id, finish, text           string
	promptTokens, cachedTokens int // -1 when not told
	params                     json.RawMessage
}

// Limits on a prefill's parameters.
const (
	maxParamsBytes = 4 << 20
	maxNameBytes   = 512
	maxBlockID     = math.MaxInt32
)

// parseAnswer reads an answer. Member names are taken exactly, of duplicates
// the last one, as the engines' own parser does.
func parseAnswer(body []byte) (*answer, error) {
	a := &answer{promptTokens: -1, cachedTokens: -1}
	top, err := object(body)
	if err != nil {
		return nil, fmt.Errorf("%w: the answer is not a JSON object", ErrPrefillFailed)
	}
	if raw, ok := top["error"]; ok && string(raw) != "null" {
		return nil, fmt.Errorf("%w: the answer is an error: %s", ErrPrefillFailed, clip(raw))
	}
	a.id, _ = text(top["id"])
	var choices []json.RawMessage
	if json.Unmarshal(top["choices"], &choices) == nil && len(choices) > 0 {
		if c, err := object(choices[0]); err == nil {
			a.finish, _ = text(c["finish_reason"])
			a.text, _ = text(c["text"])
		}
	}
	switch a.finish {
	case "error", "abort", "cancelled":
		return nil, fmt.Errorf("%w: finish_reason is %q", ErrPrefillFailed, a.finish)
	}
	if u, err := object(top["usage"]); err == nil {
		if n, ok := integer(u["prompt_tokens"]); ok {
			a.promptTokens = n
		}
		if d, err := object(u["prompt_tokens_details"]); err == nil {
			if n, ok := integer(d["cached_tokens"]); ok {
				a.cachedTokens = n
			}
		}
	}
	if p := top[transferParams]; len(p) > 0 && string(p) != "null" {
		a.params = p
	}
	return a, nil
}

// checkNIXL judges the parameters row by row as the table of what a vLLM
// 0.32 decode engine does with wrong ones: whatever would give another prompt's
// text, hang, or make the engine exit is refused here. What passes is handed
// on byte for byte.
func checkNIXL(t *Transfer, a *answer, now time.Time) error {
	if a.params == nil {
		return ErrMissingParams
	}
	if len(a.params) > maxParamsBytes {
		return &ParamsError{transferParams, fmt.Sprintf("%d bytes, at most %d", len(a.params), maxParamsBytes)}
	}
	m, err := object(a.params)
	if err != nil {
		return &ParamsError{transferParams, "not an object"}
	}
	if len(m) == 0 {
		return ErrMissingParams
	}
	p := params{m: m}
	p.flag("do_remote_prefill", true)
	p.flag("do_remote_decode", false)
	f := &t.facts
	f.EngineID = p.name("remote_engine_id")
	f.RequestID = p.name("remote_request_id")
	f.Host = p.name("remote_host")
	f.Port = p.between("remote_port", true, 1, 65535)
	for _, k := range [...]string{"tp_size", "pp_size", "dcp_size", "pcp_size"} {
		p.between(k, false, 1, 1<<16)
	}
	if p.err != nil {
		return p.err
	}
	d := &t.dispatch
	if err := checkRequestID(f.RequestID, d.RequestID, a.id); err != nil {
		return err
	}
	if err := checkHost(f.Host, workerURL(d.Prefill), workerURL(d.Decode)); err != nil {
		return err
	}
	tokens, err := promptTokens(a, &p, &d.Facts)
	if err != nil {
		return err
	}
	if err := checkBlocks(f, &p, tokens, d); err != nil {
		return err
	}
	if err := checkExpiry(m["remote_blocks_expiry_time"], now); err != nil {
		return err
	}
	t.decode = append(t.decode, api.Set(transferParams, a.params))
	return nil
}

// checkRequestID refuses parameters of another request. vLLM makes its
// internal id from the header X-Request-Id, which both legs carry, and answers
// with an id that the internal one begins with.
func checkRequestID(remote, sent, answered string) error {
	if sent != "" && !strings.Contains(remote, sent) {
		return &ParamsError{"remote_request_id", fmt.Sprintf("%q is not of request %q", clipString(remote), clipString(sent))}
	}
	if sent == "" && answered != "" && !strings.HasPrefix(remote, answered) {
		return &ParamsError{"remote_request_id", fmt.Sprintf("%q is not of answer %q", clipString(remote), clipString(answered))}
	}
	return nil
}

// checkHost refuses an address that cannot lead from the decode engine to the
// prefill engine: vLLM's default, "localhost", is right only where both run on
// one machine, and elsewhere makes the decode engine wait and then exit.
func checkHost(host string, prefill, decode *url.URL) error {
	if strings.ContainsAny(host, " /?#@\\") || host == "0.0.0.0" || host == "::" {
		return &ParamsError{"remote_host", fmt.Sprintf("%q is not a host", clipString(host))}
	}
	p, d := hostname(prefill), hostname(decode)
	if p != "" && d != "" && p != d && isLoopback(host) && (!isLoopback(p) || !isLoopback(d)) {
		return &ParamsError{"remote_host", fmt.Sprintf("%q, but the prefill worker is on %s and the decode worker on %s: set VLLM_NIXL_SIDE_CHANNEL_HOST", host, p, d)}
	}
	return nil
}

// promptTokens is the prompt's length as the prefill engine has it; every
// source that tells it must agree.
func promptTokens(a *answer, p *params, f *Facts) (int, error) {
	n := a.promptTokens
	if raw, ok := p.m["remote_num_tokens"]; ok && string(raw) != "null" {
		v, ok := integer(raw)
		if !ok || v < 1 {
			return 0, &ParamsError{"remote_num_tokens", "not a positive whole number"}
		}
		if n >= 0 && v != n {
			return 0, &ParamsError{"remote_num_tokens", fmt.Sprintf("%d, but the prompt has %d tokens", v, n)}
		}
		n = v
	}
	if f.Source.exact() && f.ISL > 0 {
		if n >= 0 && n != f.ISL {
			return 0, &ParamsError{"prompt_tokens", fmt.Sprintf("the prefill engine counts %d tokens, the prompt has %d", n, f.ISL)}
		}
		n = f.ISL
	}
	if n < 1 {
		return 0, &ParamsError{"prompt_tokens", "the answer does not tell the prompt's length, so its blocks cannot be checked"}
	}
	return n, nil
}

// checkBlocks wants exactly the blocks of the prompt: with fewer of them the
// decode engine exits, with more it answers with another prompt's text.
//
// A list of lists holds one list per KV-cache group; at least one group covers
// the prompt in full and none has more (sliding windows may have fewer). vLLM
// 0.9 and 0.10 gave a flat list and left the last partial block out; engines
// of that age tell none of the newer members, which is how they are told apart,
// since a flat list makes a newer decode engine exit.
func checkBlocks(f *Checked, p *params, tokens int, d *Dispatch) error {
	const field = "remote_block_ids"
	bad := func(format string, a ...any) error { return &ParamsError{field, fmt.Sprintf(format, a...)} }
	raw := p.m[field]
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil || list == nil {
		return bad("not a list")
	}
	if len(list) == 0 {
		return bad("empty")
	}
	size := 0
	if v, ok := integer(p.m["remote_block_size"]); ok && v > 0 {
		size = v
	} else if w := d.Prefill.Worker; w != nil {
		size = w.BlockSize
	}
	_, hasTokens := p.m["remote_num_tokens"]
	flat := list[0][0] != '['
	if flat {
		for _, k := range [...]string{"transfer_mode", "pp_size", "dcp_size", "pcp_size", "remote_block_size"} {
			if _, newer := p.m[k]; newer {
				return bad("a flat list, but an engine that tells %s gives a list for every KV-cache group", k)
			}
		}
		list = []json.RawMessage{raw}
	}
	want := 0
	if size > 0 {
		want = (tokens + size - 1) / size
	}
	full := false
	for _, group := range list {
		n, err := countBlocks(group)
		if err != nil {
			return bad("%v", err)
		}
		f.Blocks = max(f.Blocks, n)
		switch {
		case want > 0 && n > want:
			return bad("%d blocks, but %d tokens fill %d blocks of %d", n, tokens, want, size)
		case want == 0 && n > tokens:
			return bad("%d blocks for %d tokens", n, tokens)
		case n == want, want == 0 && n > 0, flat && !hasTokens && n > 0 && n == tokens/max(size, 1):
			full = true
		}
	}
	if !full {
		return bad("%d blocks, but %d tokens fill %d blocks of %d", f.Blocks, tokens, want, size)
	}
	return nil
}

// countBlocks counts the ids of one group; each must be a whole number from 0
// on and stand once.
func countBlocks(raw json.RawMessage) (int, error) {
	var ids []json.RawMessage
	if err := json.Unmarshal(raw, &ids); err != nil || ids == nil {
		return 0, fmt.Errorf("a group is not a list")
	}
	seen := make(map[uint64]struct{}, len(ids))
	for _, r := range ids {
		id, err := strconv.ParseUint(string(r), 10, 63)
		if err != nil || id > maxBlockID {
			return 0, fmt.Errorf("%s is not a block id", clip(r))
		}
		if _, twice := seen[id]; twice && id != 0 { // 0 is vLLM's null block
			return 0, fmt.Errorf("block %d stands twice", id)
		}
		seen[id] = struct{}{}
	}
	return len(ids), nil
}

// checkExpiry refuses blocks whose lease has ended. The time is null in pull
// mode; a figure of the size of Unix seconds is one, smaller ones are of the
// engine's own clock and tell nothing here.
func checkExpiry(raw json.RawMessage, now time.Time) error {
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	at, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || at < 0 || math.IsInf(at, 0) {
		return &ParamsError{"remote_blocks_expiry_time", "not a time"}
	}
	if unix := float64(now.UnixMilli()) / 1000; at > 1e9 && at <= unix {
		return fmt.Errorf("%w %.1f s ago", ErrExpired, unix-at)
	}
	return nil
}

func workerURL(p Peer) *url.URL {
	if p.Worker == nil {
		return nil
	}
	return p.Worker.URL
}

// params reads members and keeps the first problem.
type params struct {
	m   map[string]json.RawMessage
	err error
}

func (p *params) bad(field, format string, a ...any) {
	if p.err == nil {
		p.err = &ParamsError{field, fmt.Sprintf(format, a...)}
	}
}

func (p *params) flag(field string, want bool) {
	if string(p.m[field]) != strconv.FormatBool(want) {
		p.bad(field, "must be %v", want)
	}
}

// name is a member that must be a short, not empty, printable string.
func (p *params) name(field string) string {
	s, ok := text(p.m[field])
	if !ok || s == "" {
		p.bad(field, "not told")
		return ""
	}
	if len(s) > maxNameBytes || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
		p.bad(field, "not a name")
		return ""
	}
	return s
}

func (p *params) between(field string, needed bool, lo, hi int) int {
	raw, ok := p.m[field]
	if !ok || string(raw) == "null" {
		if needed {
			p.bad(field, "not told")
		}
		return 0
	}
	n, ok := integer(raw)
	if !ok || n < lo || n > hi {
		p.bad(field, "%s is not a whole number from %d to %d", clip(raw), lo, hi)
		return 0
	}
	return n
}

func object(raw []byte) (map[string]json.RawMessage, error) {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, err
	}
	if m == nil {
		return nil, fmt.Errorf("null")
	}
	return m, nil
}

func text(raw json.RawMessage) (string, bool) {
	if len(raw) == 0 || raw[0] != '"' {
		return "", false
	}
	var s string
	err := json.Unmarshal(raw, &s)
	return s, err == nil
}

// integer is a JSON number without fraction or exponent.
func integer(raw json.RawMessage) (int, bool) {
	n, err := strconv.ParseInt(string(raw), 10, 64)
	return int(n), err == nil
}

func clip(raw []byte) string { return clipString(string(raw)) }

func clipString(s string) string {
	if len(s) > 120 {
		return s[:117] + "..."
	}
	return s
}
