package front

import (
	"bytes"
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/rooms"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// common are the fields that chat, completions, responses and messages share.
type common struct {
	Model            string          `json:"model"`
	Stream           bool            `json:"stream"`
	Temperature      *float64        `json:"temperature"`
	TopP             *float64        `json:"top_p"`
	IgnoreEOS        bool            `json:"ignore_eos"`
	CacheSalt        string          `json:"cache_salt"`
	KVTransferParams json.RawMessage `json:"kv_transfer_params"`
}

// sampling are the fields that chat and completions share.
type sampling struct {
	common
	StreamOptions       *streamOptions  `json:"stream_options"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           int             `json:"min_tokens"`
	Stop                json.RawMessage `json:"stop"`
	N                   *int            `json:"n"`
	ReturnTokenIDs      bool            `json:"return_token_ids"`
	Truncate            *int            `json:"truncate_prompt_tokens"`

	// SGLang
	BootstrapHost json.RawMessage `json:"bootstrap_host"`
	BootstrapPort json.RawMessage `json:"bootstrap_port"`
	BootstrapRoom json.RawMessage `json:"bootstrap_room"`
	RoutedRank    *int            `json:"routed_dp_rank"`
	DPRank        *int            `json:"data_parallel_rank"`
}

type streamOptions struct {
	IncludeUsage         bool `json:"include_usage"`
	ContinuousUsageStats bool `json:"continuous_usage_stats"`
}

// job is a generation request after all checks.
type job struct {
	sampling
	shown, lora string
	prompts     [][]uint32
	max         int // 0 = to the model's length
	n           int
	stops       []string
	stream      bool
	usage       bool // a last chunk with the usage
	everyUsage  bool // usage in every chunk
	rank        int
	pin         bool
	pulls       []*engine.Pull // per prompt, or none
	rooms       []*rooms.Room  // per prompt, or none: SGLang prefill
	spec        *lmcacheSpec
	// offer is the name under which the prompt's full blocks are kept for a decode.
	offer string
	embed bool
}

// check turns the shared fields into a job.
func (s *Server) check(r *http.Request, f sampling, prompts [][]uint32) (*job, *apiError) {
	shown, lora, aerr := s.model(f.Model)
	if aerr != nil {
		return nil, aerr
	}
	j := &job{sampling: f, shown: shown, lora: lora, prompts: prompts, n: 1, stream: f.Stream}
	if f.StreamOptions != nil {
		if !f.Stream {
			return nil, badRequest("stream_options", "Stream options can only be defined when `stream=True`.")
		}
		j.usage, j.everyUsage = f.StreamOptions.IncludeUsage, f.StreamOptions.IncludeUsage && f.StreamOptions.ContinuousUsageStats
	}
	if f.N != nil {
		j.n = *f.N
	}
	if j.n < 1 || j.n > 128 {
		return nil, badRequest("n", "n must be between 1 and 128, got %d.", j.n)
	}
	if f.Temperature != nil && (*f.Temperature < 0 || *f.Temperature > 2) {
		return nil, badRequest("temperature", "temperature must be between 0 and 2, got %v.", *f.Temperature)
	}
	if f.TopP != nil && (*f.TopP <= 0 || *f.TopP > 1) {
		return nil, badRequest("top_p", "top_p must be in (0, 1], got %v.", *f.TopP)
	}
	max := f.MaxTokens
	if f.MaxCompletionTokens != nil {
		max = f.MaxCompletionTokens
	}
	if max != nil {
		if *max < 1 {
			return nil, badRequest("max_tokens", "max_tokens must be at least 1, got %d.", *max)
		}
		j.max = *max
	}
	if f.MinTokens < 0 || j.max > 0 && f.MinTokens > j.max {
		return nil, badRequest("min_tokens", "min_tokens must be greater than or equal to 0 and less than or equal to max_tokens=%d, got %d.", j.max, f.MinTokens)
	}
	var ok bool
	if j.stops, ok = oneOrMany(f.Stop); !ok {
		return nil, badRequest("stop", "stop must be a string or a list of strings.")
	}
	if len(prompts) == 0 {
		return nil, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	}
	if len(prompts) > 256 {
		return nil, badRequest("prompt", "at most 256 prompts in one request, got %d.", len(prompts))
	}
	for i, p := range prompts {
		if f.Truncate != nil { // the end stays, as much as fits the model for -1
			keep := *f.Truncate
			if keep < 0 {
				keep = s.cfg.MaxModelLen - j.max
			}
			if cut := len(p) - keep; cut > 0 {
				prompts[i] = p[cut:]
			}
		}
		if err := s.fits(prompts[i], max); err != nil {
			return nil, err
		}
	}
	if j.rank, aerr = s.pickRank(r); aerr != nil {
		return nil, aerr
	}
	if s.sglang() {
		return j, s.bootstrap(j)
	}
	return j, s.transfer(j)
}

// fits checks a prompt against the vocabulary and the model's length.
func (s *Server) fits(p []uint32, max *int) *apiError {
	limit := s.cfg.MaxModelLen
	if len(p) == 0 {
		return badRequest("prompt", "The decoder prompt cannot be empty")
	}
	if len(p) > limit || len(p) == limit && max != nil {
		return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)", limit, min(len(p), limit+1), min(len(p), limit+1))
	}
	if max != nil && *max > limit-len(p) {
		return badRequest("max_tokens", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains %d input tokens, for a total of %d tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=max_tokens, value=%d)", limit, *max, len(p), len(p)+*max, *max)
	}
	for _, t := range p {
		if t >= vocab.Size {
			return badRequest("prompt", "Token id %d is out of vocabulary", t)
		}
	}
	return nil
}

// oneOrMany reads a string, a list of strings, or nothing, without empty ones.
func oneOrMany(raw json.RawMessage) ([]string, bool) {
	if absent(raw) {
		return nil, true
	}
	list := make([]string, 1)
	if json.Unmarshal(raw, &list[0]) != nil && json.Unmarshal(raw, &list) != nil {
		return nil, false
	}
	return slices.DeleteFunc(list, func(s string) bool { return s == "" }), true
}

func absent(raw json.RawMessage) bool {
	return len(raw) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}

// prompts reads the prompt of a completion: text, texts, ids, or lists of ids.
func (s *Server) promptsOf(raw json.RawMessage) ([][]uint32, *apiError) {
	bad := badRequest("prompt", "prompt must be a string, array of strings, array of tokens, or array of token arrays.")
	if absent(raw) {
		return nil, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	}
	switch raw[0] {
	case '"':
		var text string
		if json.Unmarshal(raw, &text) != nil {
			return nil, bad
		}
		return [][]uint32{s.cfg.Vocab.Encode(nil, text)}, nil
	case '[':
		var ids []uint32
		if json.Unmarshal(raw, &ids) == nil && len(ids) > 0 {
			return [][]uint32{ids}, nil
		}
		var many [][]uint32
		if json.Unmarshal(raw, &many) == nil && len(many) > 0 {
			return many, nil
		}
		var texts []string
		if json.Unmarshal(raw, &texts) == nil && len(texts) > 0 {
			out := make([][]uint32, len(texts))
			for i, t := range texts {
				out[i] = s.cfg.Vocab.Encode(nil, t)
			}
			return out, nil
		}
	}
	return nil, bad
}

// chatMessage is one message of a chat request.
type chatMessage struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCalls  json.RawMessage `json:"tool_calls"`
	ToolCallID string          `json:"tool_call_id"`
	Name       string          `json:"name"`
}

// render flattens messages to what the template takes.
func render(in []chatMessage) ([]vocab.Message, *apiError) {
	if len(in) == 0 {
		return nil, badRequest("messages", "messages must not be empty.")
	}
	out := make([]vocab.Message, len(in))
	for i, m := range in {
		if m.Role == "" {
			return nil, badRequest("messages", "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages.%d.role', 'msg': 'Field required'}", i)
		}
		text, err := contentText(m.Content)
		if err != nil {
			return nil, err
		}
		text += canonical(m.ToolCalls)
		out[i] = vocab.Message{Role: m.Role, Content: text}
	}
	return out, nil
}

// contentText is the text of a message's content: a string, or text parts.
func contentText(raw json.RawMessage) (string, *apiError) {
	if absent(raw) {
		return "", nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if json.Unmarshal(raw, &parts) != nil {
		return "", badRequest("messages", "message content must be a string or a list of parts.")
	}
	var b strings.Builder
	for _, p := range parts {
		switch p.Type {
		case "text", "input_text", "output_text":
			b.WriteString(p.Text)
		default:
			return "", badRequest("messages", "At most 0 %s(s) may be provided in one prompt.", strings.TrimSuffix(p.Type, "_url"))
		}
	}
	return b.String(), nil
}

// compactTools is the compact JSON of tools for the template; empty for none.
func compactTools(raw json.RawMessage) string {
	if c := canonical(raw); c != "[]" {
		return c
	}
	return ""
}

// canonical is the compact JSON of a value whatever its spelling: templates see
// parsed values, in which arguments of calls are objects and null is as good as
// absent.
func canonical(raw json.RawMessage) string {
	var v any
	if absent(raw) || json.Unmarshal(raw, &v) != nil {
		return ""
	}
	return string(jsonOf(plain(v)))
}

func plain(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = plain(v[i])
		}
	case map[string]any:
		for k, x := range v {
			if text, ok := x.(string); ok && k == "arguments" {
				var parsed any
				if json.Unmarshal([]byte(text), &parsed) != nil {
					parsed = map[string]any{}
				}
				x = parsed
			}
			if x = plain(x); x == nil {
				delete(v, k)
			} else {
				v[k] = x
			}
		}
	}
	return v
}
