package front

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// messages is POST /v1/messages, Anthropic's API.
func (s *Server) messages(w http.ResponseWriter, r *http.Request, q *anthropicRequest) *Error {
	prompt, call, err := s.anthropic(q)
	if err != nil {
		return err
	}
	if q.MaxTokens == nil {
		return badRequest("max_tokens", "max_tokens: Field required")
	}
	if q.Thinking.Type == "enabled" && q.Thinking.Budget >= *q.MaxTokens && !asksRemoteDecode(q.KVTransferParams) {
		return badRequest("thinking", "thinking.budget_tokens must be less than max_tokens")
	}
	j, err := s.check(r, sampling{common: q.common, MaxTokens: q.MaxTokens, Stop: q.StopSequences}, [][]uint32{prompt})
	if err != nil {
		return err
	}
	id := "chatcmpl-" + s.requestID(r)
	reason := func(c *choice) (any, any) {
		switch {
		case c.stop != nil:
			return "stop_sequence", c.stop
		case c.finish == "length":
			return "max_tokens", nil
		case c.finish != "stop":
			return nil, nil // there is no word for it
		case call != nil:
			return "tool_use", nil
		}
		return "end_turn", nil
	}
	counts := func(c *choice) map[string]any {
		return map[string]any{"input_tokens": len(c.prompt) - c.cached, "cache_read_input_tokens": c.cached, "output_tokens": len(c.tokens)}
	}
	if !j.stream {
		all, ok := s.whole(w, r, id, j)
		if !ok {
			return nil
		}
		c := all[0]
		content := map[string]any{"type": "text", "text": c.text.String()}
		if call != nil {
			content = map[string]any{"type": "tool_use", "id": "toolu_" + s.id(), "name": call.Name, "input": json.RawMessage(call.Before + call.Text(c.text.String()) + call.After)}
		}
		why, word := reason(c)
		m := map[string]any{"id": id, "type": "message", "role": "assistant", "model": j.shown, "content": []any{content}, "stop_reason": why, "stop_sequence": word, "usage": counts(c), "kv_transfer_params": s.handBack(j, all)}
		if p, ok := m["kv_transfer_params"].(*transferParams); ok {
			m["kv_transfer_params"] = p.WithoutNulls()
		}
		maps.DeleteFunc(m, func(_ string, v any) bool { return v == nil })
		WriteJSON(w, http.StatusOK, m)
		return nil
	}
	e := newEvents(w)
	event := func(kind string, fields map[string]any) {
		fields["type"] = kind
		_ = e.Add(kind, fields) // maps of plain values marshal
	}
	e.failed = func(message string) {
		event("error", map[string]any{"error": map[string]string{"type": "api_error", "message": message}})
	}
	s.streaming(w, r, id, j, e, nil, func(c *choice, d delta) error {
		if len(c.tokens) == len(d.tokens) {
			u := counts(c)
			u["output_tokens"] = 0
			event("message_start", map[string]any{"message": map[string]any{"id": id, "type": "message", "role": "assistant", "model": j.shown, "content": []any{}, "stop_reason": nil, "stop_sequence": nil, "usage": u}})
			block := map[string]any{"type": "text", "text": ""}
			if call != nil {
				block = map[string]any{"type": "tool_use", "id": "toolu_" + s.id(), "name": call.Name, "input": map[string]any{}}
			}
			event("content_block_start", map[string]any{"index": 0, "content_block": block})
			if call != nil {
				event("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "input_json_delta", "partial_json": call.Before}})
			}
		}
		if call != nil {
			part := call.Text(d.text)
			if c.finish != "" {
				part += call.After
			}
			event("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "input_json_delta", "partial_json": part}})
		} else if d.text != "" {
			event("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "text_delta", "text": d.text}})
		}
		if c.finish != "" {
			why, word := reason(c)
			event("content_block_stop", map[string]any{"index": 0})
			event("message_delta", map[string]any{"delta": map[string]any{"stop_reason": why, "stop_sequence": word}, "usage": counts(c)})
			event("message_stop", map[string]any{})
		}
		return e.Send()
	}, nil)
	return nil
}

type anthropicRequest struct {
	common
	System        json.RawMessage    `json:"system"`
	Messages      []anthropicMessage `json:"messages"`
	MaxTokens     *int               `json:"max_tokens"`
	StopSequences json.RawMessage    `json:"stop_sequences"`
	Tools         json.RawMessage    `json:"tools"`
	ToolChoice    json.RawMessage    `json:"tool_choice"`
	Thinking      struct {
		Type   string `json:"type"`
		Budget int    `json:"budget_tokens"`
	} `json:"thinking"`
}

func (s *Server) anthropic(q *anthropicRequest) ([]uint32, *forcedCall, *Error) {
	var blocks []anthropicBlock
	if json.Unmarshal(q.System, &blocks) == nil {
		// A client's bill is other in each request and no part of the prompt.
		q.System = rawJSON(slices.DeleteFunc(blocks, func(b anthropicBlock) bool { return strings.HasPrefix(b.Text, "x-anthropic-billing-header") }))
	}
	system, err := contentText(q.System)
	if err != nil {
		return nil, nil, err
	}
	turns, err := chatOfAnthropic(q.Messages)
	if err != nil {
		return nil, nil, err
	}
	if system != "" {
		turns = append([]chatMessage{{Role: "system", Content: rawjson.AppendString(nil, system)}}, turns...)
	}
	msgs, err := renderChat(turns)
	if err != nil {
		return nil, nil, err
	}
	tools, err := anthropicTools(q.Tools)
	if err != nil {
		return nil, nil, err
	}
	call, err := readForcedCall(q.Tools, q.ToolChoice)
	if err != nil {
		return nil, nil, err
	}
	return s.cfg.Vocab.Chat(nil, templateTools(tools), msgs, true), call, nil
}

func (s *Server) refuseAnthropic(w http.ResponseWriter, err *Error) {
	kind := "invalid_request_error"
	switch err.Status {
	case http.StatusNotFound:
		kind = "not_found_error"
	case http.StatusRequestEntityTooLarge:
		kind = "request_too_large"
	}
	WriteJSON(w, err.Status, map[string]any{"type": "error", "error": map[string]string{"type": kind, "message": err.Message}})
}

func (s *Server) countTokens(w http.ResponseWriter, _ *http.Request, q *anthropicRequest) *Error {
	prompt, _, err := s.anthropic(q)
	if err != nil {
		return err
	}
	if _, _, err = s.model(q.Model); err != nil {
		return err
	}
	WriteJSON(w, http.StatusOK, map[string]int{"input_tokens": len(prompt)})
	return nil
}
