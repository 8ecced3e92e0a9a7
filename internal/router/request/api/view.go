package api

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Span is the bytes [Start, End) of a body.
type Span struct{ Start, End int }

// Of is the bytes of the span.
func (s Span) Of(body []byte) []byte { return body[s.Start:s.End] }

// Len is the number of bytes.
func (s Span) Len() int { return s.End - s.Start }

// Field is one top-level member of a body.
type Field struct {
	// Key is what stands between the quotes, escapes not resolved.
	Key Span
	// Value is the raw JSON value, without white space around it.
	Value Span
	// name is the key with its escapes resolved; "" when there were none.
	name string
	id   keyID
}

// Limits bound what one body may hold. A zero field means its default.
type Limits struct {
	// Depth is how deep values may nest; default 128.
	Depth int
	// Members is the number of top-level members; default 1024.
	Members int
	// Texts is the number of separate texts or token lists in a prompt;
	// default 65536.
	Texts int
	// MaxTokens is the largest output length that may be requested, in
	// tokens; default 2^31-1.
	MaxTokens int64
}

// Defaults of Limits.
const (
	DefaultDepth     = 128
	DefaultMembers   = 1024
	DefaultTexts     = 65536
	DefaultMaxTokens = math.MaxInt32
	maxNameBytes     = 512
	maxNumberBytes   = 64
)

func (l Limits) withDefaults() Limits {
	l.Depth = cmp.Or(max(l.Depth, 0), DefaultDepth)
	l.Members = cmp.Or(max(l.Members, 0), DefaultMembers)
	l.Texts = cmp.Or(max(l.Texts, 0), DefaultTexts)
	l.MaxTokens = cmp.Or(max(l.MaxTokens, 0), DefaultMaxTokens)
	return l
}

// View is what the router knows of a request body after one pass over its
// bytes. The spans point into Body, which must not change while the View is
// used. A View may be parsed again and again; it is not safe for concurrent
// writes.
type View struct {
	Body []byte
	Kind Kind
	// Fields are the top-level members in the order of the body.
	Fields []Field

	// Model is the asked model; "" when absent or null.
	Model string
	// Stream is whether the answer is to be an event stream.
	Stream bool
	// IncludeUsage is stream_options.include_usage.
	IncludeUsage bool
	// OtherStreamOptions is whether stream_options has members that are not about usage.
	OtherStreamOptions bool
	// MaxTokens is the longest answer asked for, in tokens; -1 when absent.
	// With more than one member that sets it, the one of the newer name wins.
	MaxTokens int64
	// MaxTokensKey is the member that set MaxTokens, as a key of an Edit.
	MaxTokensKey string
	// MinTokens is min_tokens or min_completion_tokens; -1 when absent.
	MinTokens int64
	// OutputHint is how many tokens the client expects of each answer
	// (nvext.agent_hints.osl, as Dynamo's clients send it); 0 when absent.
	OutputHint int
	// N is the number of answers to each prompt: the larger of n and
	// best_of; 1 when absent.
	N int64
	// Logprobs is whether log probabilities are requested, PromptLogprobs
	// whether they are for the prompt's tokens too.
	Logprobs, PromptLogprobs bool
	// RoutedExperts is whether the answer has the experts of each token, the prompt's too.
	RoutedExperts bool
	// Echo is whether an answer repeats its prompt.
	Echo bool
	// CacheSalt separates the prefix caches of tenants.
	CacheSalt string
	// LoRA is lora_path, SGLang's way to ask for an adapter; "" for the list of a batch.
	LoRA string
	// Withheld are members of the body that do not reach engines.
	Withheld []string
	// PreviousResponseID is the response that the prompt continues.
	PreviousResponseID string

	// Prompt says in which form the prompt came, PromptKey in which member,
	// and PromptValue where that member's value stands.
	Prompt      PromptKind
	PromptKey   string
	PromptValue Span
	// Texts are the prompt's texts in the order in which a template uses
	// them, as they are between the quotes, escapes not resolved. Roles, tools
	// and calls of tools are not among them.
	Texts []Span
	// Lists are the token id lists of the prompt, brackets included.
	Lists []Span
	// IDs is the number of token ids in Lists together.
	IDs int
	// Multimodal is whether the prompt holds anything but text and ids.
	Multimodal bool
	// Media are the images, sounds and videos of the prompt in the order of its parts. Opaque is
	// whether the prompt holds something else that is not text, such as embeddings.
	Media  []Media
	Opaque bool

	limits Limits
	scan   rawjson.Scanner
	// bad, when set, is an error about valid JSON of the wrong shape.
	bad  *Error
	seen [keyCount]int32 // 1 + index into Fields
	// system is the part of Texts that came from system or instructions.
	system     Span
	points     int    // code points of Texts, and of tools and their calls as JSON
	hasNested  bool   // transfer fields may hide in sampling_params or vllm_xargs
	maxFrom    keyID  // member that gave MaxTokens
	transferIn uint32 // number of top-level transfer fields
}

// Forget drops the reference to the body. What was parsed stays, but for the values
// that are read from the body.
func (v *View) Forget() { v.Body, v.scan = nil, rawjson.Scanner{} }

// reset forgets the last body but keeps the memory of the lists.
func (v *View) reset() {
	clear(v.Media) // names are strings
	*v = View{Fields: v.Fields[:0], Texts: v.Texts[:0], Lists: v.Lists[:0], Media: v.Media[:0]}
	v.MaxTokens, v.MinTokens, v.N = -1, -1, 1
}

// Release drops what the View holds of a body, and lists that grew beyond
// what most requests need, so that it can be kept for the next one.
func (v *View) Release() {
	if cap(v.Fields) > 256 {
		v.Fields = nil
	}
	if cap(v.Texts) > 4096 {
		v.Texts = nil
	}
	if cap(v.Lists) > 4096 {
		v.Lists = nil
	}
	if cap(v.Media) > 256 {
		v.Media = nil
	}
	clear(v.Fields[:cap(v.Fields)]) // names are strings
	v.reset()
}

// Parse reads a body as the request of an endpoint of the given kind. The
// error is always an [*Error] with status 400.
func (v *View) Parse(body []byte, kind Kind, limits Limits) error {
	v.reset()
	v.Body, v.Kind, v.limits = body, kind, limits.withDefaults()
	v.scan = rawjson.NewScanner(body, v.limits.Depth)
	if err := v.parse(); err != nil {
		return err
	}
	return nil
}

func (v *View) parse() *Error {
	s := &v.scan
	i := s.Space(0)
	if i >= len(v.Body) {
		return &Error{Status: http.StatusBadRequest, Code: CodeInvalidJSON, Message: "the request body is empty; a JSON object is expected"}
	}
	if v.Body[i] != '{' {
		if len(v.Body) >= 3 && string(v.Body[:3]) == "\xef\xbb\xbf" {
			s.Fail(0, "a byte order mark is not allowed before the JSON object")
		} else {
			s.Fail(i, "expected a JSON object")
		}
		return v.syntax()
	}
	if i = s.Object(i, v.member); i < 0 {
		return v.syntax()
	}
	if i = s.Space(i); i < len(v.Body) {
		s.Fail(i, "nothing may follow the JSON object")
		return v.syntax()
	}
	v.systemFirst()
	return nil
}

// reject stops the walk with an error that is not one of syntax.
func (v *View) reject(e *Error) int {
	v.bad = e
	return -1
}

// syntax is the error of a walk that stopped.
func (v *View) syntax() *Error {
	if v.bad != nil {
		return v.bad
	}
	return &Error{
		Status: http.StatusBadRequest, Code: CodeInvalidJSON,
		Message: "the request body is not valid JSON: " + problem(&v.scan, v.Body, ""),
	}
}

// problem is what a scanner found wrong with b, whose bytes a message calls those of whose.
func problem(s *rawjson.Scanner, b []byte, whose string) string {
	at, what := s.Problem()
	found := "the end of the body"
	if at < len(b) {
		if c := b[at]; c >= 0x20 && c < 0x7f {
			found = fmt.Sprintf("%q", c)
		} else {
			found = fmt.Sprintf("byte 0x%02x", c)
		}
	}
	return fmt.Sprintf("%s, found %s at %sbyte %d", what, found, whose, at)
}

// member reads one top-level member.
func (v *View) member(key, keyEnd int, escaped bool, i int) int {
	if len(v.Fields) >= v.limits.Members {
		return v.reject(BadRequest("", "the request has more than %d members", v.limits.Members))
	}
	f := Field{Key: Span{key, keyEnd}}
	if escaped {
		f.name = unquote(v.Body[key-1 : keyEnd+1])
		f.id = lookupKey([]byte(f.name))
	} else {
		f.id = lookupKey(v.Body[key:keyEnd])
	}
	switch f.id {
	case keyOther:
	case keyTransfer:
		name := v.keyName(&f)
		for k := range v.Fields {
			if v.Fields[k].id == keyTransfer && v.keyName(&v.Fields[k]) == name {
				return v.reject(v.duplicate(&f, &v.Fields[k]))
			}
		}
		v.transferIn++
	default:
		if k := v.seen[f.id]; k != 0 {
			return v.reject(v.duplicate(&f, &v.Fields[k-1]))
		}
		v.seen[f.id] = int32(len(v.Fields) + 1)
	}
	end := v.read(f.id, i)
	if end < 0 {
		return -1
	}
	f.Value = Span{i, end}
	v.Fields = append(v.Fields, f)
	if !v.isPrompt(f.id) {
		if e := v.note(f.id, f.Value); e != nil {
			return v.reject(e)
		}
	}
	return end
}

func (v *View) duplicate(f, first *Field) *Error {
	name := v.keyName(f)
	return &Error{
		Status: http.StatusBadRequest, Code: CodeDuplicateKey, Param: name,
		Message: fmt.Sprintf("%q is given twice, at byte %d and at byte %d; give it once", name, first.Key.Start, f.Key.Start),
	}
}

// keyName is the member's key with its escapes resolved.
func (v *View) keyName(f *Field) string {
	if f.name != "" {
		return f.name
	}
	return string(f.Key.Of(v.Body))
}

// is reports whether a member has a name, without allocating.
func (v *View) is(f *Field, name string) bool { return named(v.Body, f, name) }

// Member is the name and the raw value of Fields[i].
func (v *View) Member(i int) (name string, value []byte) {
	f := &v.Fields[i]
	return v.keyName(f), f.Value.Of(v.Body)
}

// Get is the raw value of a top-level member.
func (v *View) Get(name string) (value []byte, ok bool) {
	for i := range v.Fields {
		if v.is(&v.Fields[i], name) {
			return v.Fields[i].Value.Of(v.Body), true
		}
	}
	return nil, false
}

// String is the value of a top-level member that is a JSON string.
func (v *View) String(name string) (value string, ok bool) {
	b, ok := v.Get(name)
	if !ok || b[0] != '"' {
		return "", false
	}
	return unquote(b), true
}

// TruncateTo is to how many tokens the client lets the engine cut its prompt: -1
// for as many as fit the model. cut is false when it does not.
func (v *View) TruncateTo() (tokens int, cut bool) {
	switch v.Kind {
	case Chat, Completion:
		b, ok := v.Get("truncate_prompt_tokens")
		if !ok || b[0] == 'n' {
			return 0, false
		}
		n, err := strconv.Atoi(string(laxNumber(b)))
		if err != nil || n < 0 {
			n = -1
		}
		return n, true
	case Responses:
		b, ok := v.Get("truncation")
		return -1, ok && string(b) != `"disabled"`
	}
	return 0, false
}

// Adapters are the names in lora_path: one, or those of a batch.
func (v *View) Adapters() (names []string) {
	k := v.seen[keyLoRAPath]
	if k == 0 {
		return nil
	}
	at := v.Fields[k-1].Value
	if v.LoRA != "" {
		return []string{v.LoRA}
	}
	if v.Body[at.Start] == '[' {
		eachElement(v.Body, at, func(_ int, el Span) bool {
			if v.Body[el.Start] == '"' {
				names = append(names, unquote(el.Of(v.Body)))
			}
			return true
		})
	}
	return names
}

// Continues reports whether the prompt continues from an earlier response.
func (v *View) Continues() bool { return v.Kind == Responses && v.PreviousResponseID != "" }

// ServerTools reports whether the request names tools that the engine may
// run: those of the Responses API that are neither functions nor custom.
func (v *View) ServerTools() bool {
	if v.Kind != Responses {
		return false
	}
	found := false
	if k := v.seen[keyTools]; k != 0 && v.Body[v.Fields[k-1].Value.Start] == '[' {
		eachElement(v.Body, v.Fields[k-1].Value, func(_ int, el Span) bool {
			kind := ""
			if v.Body[el.Start] == '{' {
				eachMember(v.Body, el, func(name []byte, value Span) bool {
					if string(name) == "type" && v.Body[value.Start] == '"' {
						kind = unquote(value.Of(v.Body))
					}
					return true
				})
			}
			found = found || kind != "function" && kind != "custom" && kind != "namespace"
			return !found
		})
	}
	return found
}

// ThinkingBudget reports whether the client asks for thinking with a number of
// tokens that its limit of the answer must be above (Anthropic's API).
func (v *View) ThinkingBudget() bool {
	if v.Kind != Messages {
		return false
	}
	enabled := false
	for i := range v.Fields {
		if f := &v.Fields[i]; v.is(f, "thinking") && v.Body[f.Value.Start] == '{' {
			eachMember(v.Body, f.Value, func(name []byte, value Span) bool {
				enabled = enabled || string(name) == "type" && string(value.Of(v.Body)) == `"enabled"`
				return true
			})
		}
	}
	return enabled
}

// note keeps the value of a member that the router reads.
func (v *View) note(id keyID, at Span) *Error {
	raw := at.Of(v.Body)
	if raw[0] == 'n' { // null is the same as absent everywhere
		return nil
	}
	var e *Error
	switch id {
	case keyModel:
		v.Model, e = v.text("model", raw, at)
	case keyStream:
		v.Stream, e = v.boolean("stream", raw, at)
	case keyStreamOptions:
		e = v.streamOptions(raw, at)
	case keyMaxTokens, keyMaxCompletionTokens, keyMaxOutputTokens:
		e = v.maxTokens(id, keyNames[id], raw, at)
	case keyMinTokens, keyMinCompletionTokens:
		e = v.minTokens(keyNames[id], raw, at)
	case keyN, keyBestOf:
		e = v.count(keyNames[id], raw, at)
	case keyLogprobs:
		// A boolean in chat, a number in completions.
		if on, ok := laxBool(raw); on || !ok {
			v.Logprobs = true
		}
	case keyPromptLogprobs:
		v.Logprobs, v.PromptLogprobs = true, true
	case keyReturnLogprob:
		if on, ok := laxBool(raw); on || !ok {
			v.Logprobs, v.PromptLogprobs = true, true
		}
	case keyReturnExperts:
		v.RoutedExperts = raw[0] != 'f'
	case keyEcho:
		v.Echo, e = v.boolean("echo", raw, at)
	case keyCacheSalt:
		v.CacheSalt, e = v.text("cache_salt", raw, at)
	case keyPreviousResponseID:
		v.PreviousResponseID, e = v.text("previous_response_id", raw, at)
	case keyLoRAPath:
		if raw[0] == '[' { // of a batch
			eachElement(v.Body, at, func(i int, el Span) bool {
				if v.Body[el.Start] != 'n' {
					_, e = v.text(fmt.Sprintf("lora_path[%d]", i), el.Of(v.Body), el)
				}
				return e == nil
			})
		} else {
			v.LoRA, e = v.text("lora_path", raw, at)
		}
	case keySamplingParams:
		e = v.samplingParams(raw, at)
	case keyXArgs:
		if raw[0] != '{' {
			return v.wrong("vllm_xargs", "an object", raw, at)
		}
		v.hasNested = true
	case keyPromptEmbeds, keyFeatures:
		v.Multimodal, v.Opaque = true, true
	case keyTools:
		if v.hasTools() {
			v.points += rawjson.CodePoints(raw)
		}
	case keyNvext:
		v.OutputHint = outputHint(raw)
	}
	return e
}

// outputHint is agent_hints.osl of an nvext member; 0 where there is no positive number.
func outputHint(nvext rawjson.Value) int {
	n, ok := nvext.Get("agent_hints.osl").Int()
	if !ok {
		return 0
	}
	return min(max(n, 0), DefaultMaxTokens)
}

func (v *View) wrong(param, want string, raw []byte, at Span) *Error {
	got := kindOf(raw)
	if len(raw) <= 32 && raw[0] != '"' && raw[0] != '{' && raw[0] != '[' {
		got = string(raw)
	}
	return BadRequest(param, "%q must be %s, got %s (byte %d)", param, want, got, at.Start)
}

// text reads a short string: names, salts, ids.
func (v *View) text(param string, raw []byte, at Span) (string, *Error) {
	if raw[0] != '"' {
		return "", v.wrong(param, "a string", raw, at)
	}
	if len(raw) > maxNameBytes+2 {
		return "", BadRequest(param, "%q is longer than %d bytes (byte %d)", param, maxNameBytes, at.Start)
	}
	return unquote(raw), nil
}

func (v *View) boolean(param string, raw []byte, at Span) (bool, *Error) {
	on, ok := laxBool(raw)
	if !ok {
		return false, v.wrong(param, "true or false", raw, at)
	}
	return on, nil
}

// laxBool reads a boolean as engines do (Pydantic's lax mode): also a number that is 0 or 1,
// and a word for either. ok is false for anything else.
func laxBool(raw []byte) (on, ok bool) {
	text := string(raw)
	switch raw[0] {
	case 't', 'f':
		return raw[0] == 't', true
	case '"':
		text = strings.ToLower(unquote(raw))
	default:
		f, err := strconv.ParseFloat(text, 64)
		return f == 1, err == nil && (f == 0 || f == 1)
	}
	switch text {
	case "true", "t", "yes", "y", "on", "1":
		return true, true
	case "false", "f", "no", "n", "off", "0":
		return false, true
	}
	return false, false
}

// laxNumber is the text of a JSON number that engines read here: a number, or a string of one.
// It is empty for anything else.
func laxNumber(raw []byte) []byte {
	text := raw
	if raw[0] == '"' {
		if len(raw) > maxNumberBytes {
			return nil
		}
		text = []byte(strings.TrimPrefix(strings.TrimSpace(unquote(raw)), "+"))
	}
	for i, c := range text {
		if c-'0' > 9 && (i == 0 || c != '.' && c != 'e' && c != 'E' && c != '+') && c != '-' {
			return nil
		}
	}
	return text
}

// integer reads a whole number, also one that is written as 16.0, 1e3 or "16", which
// engines accept.
func (v *View) integer(param string, raw []byte, at Span, low, high int64) (int64, *Error) {
	text := laxNumber(raw)
	if len(text) == 0 {
		return 0, v.wrong(param, "a whole number", raw, at)
	}
	n, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		f, ferr := strconv.ParseFloat(string(text), 64)
		switch {
		case errors.Is(ferr, strconv.ErrSyntax), ferr == nil && f != math.Trunc(f):
			return 0, v.wrong(param, "a whole number", raw, at)
		case f > math.MaxInt32*2:
			n = math.MaxInt64
		case f < math.MinInt32*2:
			n = math.MinInt64
		default:
			n = int64(f)
		}
	}
	if n < low || n > high {
		return 0, BadRequest(param, "%q must be from %d to %d, got %s (byte %d)", param, low, high, clip(string(raw), 40), at.Start)
	}
	return n, nil
}

// maxTokensRank orders the members that bound the output by which one wins.
func maxTokensRank(id keyID) int {
	switch id {
	case keyMaxCompletionTokens, keyMaxOutputTokens:
		return 2
	case keyMaxTokens, keySamplingParams:
		return 1
	}
	return 0
}

func (v *View) maxTokens(id keyID, param string, raw []byte, at Span) *Error {
	n, e := v.integer(param, raw, at, 0, v.limits.MaxTokens)
	if e != nil {
		return e
	}
	if v.MaxTokens < 0 || maxTokensRank(id) > maxTokensRank(v.maxFrom) {
		v.MaxTokens, v.MaxTokensKey, v.maxFrom = n, param, id
	}
	return nil
}

func (v *View) minTokens(param string, raw []byte, at Span) *Error {
	n, e := v.integer(param, raw, at, 0, v.limits.MaxTokens)
	if e == nil {
		v.MinTokens = max(v.MinTokens, n)
	}
	return e
}

func (v *View) count(param string, raw []byte, at Span) *Error {
	n, e := v.integer(param, raw, at, 1, math.MaxInt16)
	if e == nil {
		v.N = max(v.N, n)
	}
	return e
}

func (v *View) streamOptions(raw []byte, at Span) *Error {
	if raw[0] != '{' {
		return v.wrong("stream_options", "an object", raw, at)
	}
	var bad *Error
	eachMember(v.Body, at, func(name []byte, value Span) bool {
		if string(name) == "include_usage" && v.Body[value.Start] != 'n' {
			v.IncludeUsage, bad = v.boolean("stream_options.include_usage", value.Of(v.Body), value)
		}
		if string(name) != "include_usage" && string(name) != "continuous_usage_stats" {
			v.OtherStreamOptions = true
		}
		return bad == nil
	})
	return bad
}

// samplingParams reads what SGLang's and vLLM's token endpoints nest: one
// object, or in an SGLang batch a list with one object for each prompt.
func (v *View) samplingParams(raw []byte, at Span) *Error {
	v.hasNested = true
	var bad *Error
	read := func(name []byte, value Span) bool {
		raw := value.Of(v.Body)
		if raw[0] == 'n' {
			return true
		}
		switch string(name) {
		case "max_tokens":
			bad = v.nestedMax("sampling_params.max_tokens", raw, value)
		case "max_new_tokens":
			bad = v.nestedMax("sampling_params.max_new_tokens", raw, value)
		case "min_tokens":
			bad = v.minTokens("sampling_params.min_tokens", raw, value)
		case "min_new_tokens":
			bad = v.minTokens("sampling_params.min_new_tokens", raw, value)
		case "n":
			bad = v.count("sampling_params.n", raw, value)
		case "logprobs":
			v.Logprobs = true
		case "prompt_logprobs":
			v.Logprobs, v.PromptLogprobs = true, true
		}
		return bad == nil
	}
	switch raw[0] {
	case '{':
		eachMember(v.Body, at, read)
	case '[':
		eachElement(v.Body, at, func(i int, el Span) bool {
			if v.Body[el.Start] != '{' {
				bad = v.wrong(fmt.Sprintf("sampling_params[%d]", i), "an object", el.Of(v.Body), el)
				return false
			}
			eachMember(v.Body, el, read)
			return bad == nil
		})
	default:
		return v.wrong("sampling_params", "an object", raw, at)
	}
	return bad
}

func (v *View) nestedMax(param string, raw []byte, at Span) *Error {
	n, e := v.integer(param, raw, at, 0, v.limits.MaxTokens)
	if e != nil {
		return e
	}
	if v.maxFrom == keySamplingParams { // a batch: the longest counts
		v.MaxTokens = max(v.MaxTokens, n)
		return nil
	}
	if v.MaxTokens < 0 {
		v.MaxTokens, v.MaxTokensKey, v.maxFrom = n, param, keySamplingParams
	}
	return nil
}

// unquote is the text of a valid JSON string, its quotes included.
func unquote(raw []byte) string { return rawjson.Value(raw).String() }

// Text is text number i of the prompt, its escapes resolved.
func (v *View) Text(i int) string {
	t := v.Texts[i]
	return unquote(v.Body[t.Start-1 : t.End+1])
}

// eachMember walks the members of a valid object. Names come with their
// escapes resolved.
func eachMember(body []byte, at Span, on func(name []byte, value Span) bool) {
	s := rawjson.NewScanner(body[:at.End], math.MaxInt)
	s.Object(at.Start, func(key, keyEnd int, escaped bool, i int) int {
		end := s.Value(i)
		name := body[key:keyEnd]
		if escaped {
			name = []byte(unquote(body[key-1 : keyEnd+1]))
		}
		if end < 0 || !on(name, Span{i, end}) {
			return -1
		}
		return end
	})
}

// eachElement walks the elements of a valid list.
func eachElement(body []byte, at Span, on func(n int, value Span) bool) {
	s := rawjson.NewScanner(body[:at.End], math.MaxInt)
	n := 0
	s.Array(at.Start, func(i int) int {
		end := s.Value(i)
		if end < 0 || !on(n, Span{i, end}) {
			return -1
		}
		n++
		return end
	})
}

// kindOf names the JSON type of a valid value for messages.
func kindOf(v []byte) string {
	if len(v) == 0 {
		return "nothing"
	}
	switch v[0] {
	case '"':
		return "a string"
	case '{':
		return "an object"
	case '[':
		return "a list"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	default:
		return "a number"
	}
}
