package front

import (
	"cmp"
	"encoding/json"
	"net/http"
	"time"
)

type tokensRequest struct {
	RequestID      string          `json:"request_id"`
	TokenIDs       []uint32        `json:"token_ids"`
	Model          string          `json:"model"`
	Stream         bool            `json:"stream"`
	StreamOptions  *streamOptions  `json:"stream_options"`
	CacheSalt      string          `json:"cache_salt"`
	KVTransfer     json.RawMessage `json:"kv_transfer_params"`
	OutputMode     string          `json:"output_mode"`
	SamplingParams struct {
		MaxTokens *int            `json:"max_tokens"`
		MinTokens int             `json:"min_tokens"`
		IgnoreEOS bool            `json:"ignore_eos"`
		Stop      json.RawMessage `json:"stop"`
		N         *int            `json:"n"`
	} `json:"sampling_params"`
}

// generateTokens is POST /inference/v1/generate: tokens in, tokens out.
func (s *Server) generateTokens(w http.ResponseWriter, r *http.Request, q *tokensRequest) *Error {
	p := q.SamplingParams
	j, err := s.check(r, sampling{
		common:        common{Model: q.Model, Stream: q.Stream, IgnoreEOS: p.IgnoreEOS, CacheSalt: q.CacheSalt, KVTransferParams: q.KVTransfer},
		StreamOptions: q.StreamOptions, MaxTokens: cmp.Or(p.MaxTokens, new(16)), MinTokens: p.MinTokens, Stop: p.Stop, N: p.N,
	}, [][]uint32{q.TokenIDs})
	if err != nil {
		return err
	}
	base := q.RequestID
	if base == "" {
		base = s.requestID(r)
	}
	base = "generate-tokens-" + base
	type outChoice struct {
		Index        int      `json:"index"`
		TokenIDs     []uint32 `json:"token_ids"`
		Text         *string  `json:"text,omitempty"`
		FinishReason *string  `json:"finish_reason"`
		Logprobs     any      `json:"logprobs"`
	}
	shape := func(c *choice, ids []uint32, text string) outChoice {
		o := outChoice{Index: c.index, TokenIDs: ids}
		if c.finish != "" {
			o.FinishReason = &c.finish
		}
		if q.OutputMode == "text" {
			o.Text = &text
		}
		return o
	}
	if j.stream {
		e := newEvents(w)
		s.streaming(w, r, base, j, e, nil, func(c *choice, d delta) error {
			if err := e.Add("", map[string]any{"request_id": base, "choices": []outChoice{shape(c, d.tokens, d.text)}}); err != nil {
				return err
			}
			return e.Send()
		}, func(u usage) {
			_ = e.Add("", map[string]any{"request_id": base, "choices": []outChoice{}, "usage": u}) // plain values marshal
		})
		return nil
	}
	all, ok := s.whole(w, r, base, j)
	if !ok {
		return nil
	}
	var choices []outChoice
	for _, c := range all {
		choices = append(choices, shape(c, c.tokens, c.text.String()))
	}
	WriteJSON(w, http.StatusOK, map[string]any{"request_id": base, "model": j.shown, "created": time.Now().Unix(), "choices": choices, "usage": usageOf(j, all), "prompt_logprobs": nil, "kv_transfer_params": s.handBack(j, all)})
	return nil
}
