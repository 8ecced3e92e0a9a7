package front

import (
	"encoding/json"
	"net/http"
	"slices"

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
	transferAsked
	rooms []*Room // per prompt, or none: SGLang prefill
	embed bool
}

// check turns the shared fields into a job.
func (s *Server) check(r *http.Request, f sampling, prompts [][]uint32) (*job, *Error) {
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
	j.transferAsked, aerr = readTransfer(s.cfg.Connector, f.KVTransferParams, len(prompts))
	return j, aerr
}

// fits checks a prompt against the vocabulary and the model's length.
func (s *Server) fits(p []uint32, max *int) *Error {
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

// prompts reads the prompt of a completion: text, texts, ids, or lists of ids.
func (s *Server) promptsOf(raw json.RawMessage) ([][]uint32, *Error) {
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
