package front

import (
	"encoding/json"
	"net/http"
	"time"
)

type responsesRequest struct {
	Model           string          `json:"model"`
	Input           json.RawMessage `json:"input"`
	Instructions    string          `json:"instructions"`
	MaxOutputTokens *int            `json:"max_output_tokens"`
	Stream          bool            `json:"stream"`
	Temperature     *float64        `json:"temperature"`
	TopP            *float64        `json:"top_p"`
	CacheSalt       string          `json:"cache_salt"`
	IgnoreEOS       bool            `json:"ignore_eos"`
	Tools           json.RawMessage `json:"tools"`
}

// responses is POST /v1/responses, without stored state.
func (s *Server) responses(w http.ResponseWriter, r *http.Request) {
	var q responsesRequest
	if err := s.readJSON(r, &q); err != nil {
		s.refuse(w, err)
		return
	}
	var msgs []chatMessage
	var text string
	switch {
	case json.Unmarshal(q.Input, &text) == nil && text != "":
		msgs = []chatMessage{{Role: "user", Content: q.Input}}
	case json.Unmarshal(q.Input, &msgs) != nil:
		s.refuse(w, badRequest("input", "input must be a string or a list of messages."))
		return
	}
	if q.Instructions != "" {
		msgs = append([]chatMessage{{Role: "system", Content: appendJSON(nil, q.Instructions)}}, msgs...)
	}
	flat, err := render(msgs)
	if err != nil {
		s.refuse(w, err)
		return
	}
	prompt := s.cfg.Vocab.Chat(nil, compactTools(q.Tools), flat, true)
	j, err := s.check(r, sampling{Model: q.Model, Stream: q.Stream, MaxTokens: q.MaxOutputTokens, Temperature: q.Temperature, TopP: q.TopP, CacheSalt: q.CacheSalt, IgnoreEOS: q.IgnoreEOS}, [][]uint32{prompt})
	if err != nil {
		s.refuse(w, err)
		return
	}
	id := "resp_" + s.requestID(r)
	item := "msg_" + s.id()
	created := time.Now().Unix()
	body := func(status, text string, c *choice) map[string]any {
		m := map[string]any{
			"id": id, "object": "response", "created_at": created, "status": status, "model": j.shown,
			"output": []any{}, "instructions": nil, "parallel_tool_calls": true, "tool_choice": "auto", "tools": []any{},
			"temperature": q.Temperature, "top_p": q.TopP, "max_output_tokens": q.MaxOutputTokens, "error": nil, "incomplete_details": nil, "usage": nil,
		}
		if c == nil {
			return m
		}
		m["output"] = []any{map[string]any{
			"id": item, "type": "message", "role": "assistant", "status": "completed",
			"content": []any{map[string]any{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": nil}},
		}}
		m["usage"] = map[string]any{
			"input_tokens": len(c.prompt), "output_tokens": len(c.tokens), "total_tokens": len(c.prompt) + len(c.tokens),
			"input_tokens_details": map[string]int{"cached_tokens": c.cached}, "output_tokens_details": map[string]int{"reasoning_tokens": 0},
		}
		if c.finish == "length" {
			m["status"] = "incomplete"
			m["incomplete_details"] = map[string]string{"reason": "max_output_tokens"}
		}
		return m
	}
	if !j.stream {
		if all, ok := s.whole(w, r, id, j); ok {
			writeJSON(w, http.StatusOK, body("completed", all[0].text.String(), all[0]))
		}
		return
	}
	e := newEvents(w)
	n := 0
	event := func(kind string, fields map[string]any) error {
		fields["type"], fields["sequence_number"] = kind, n
		n++
		b, err := json.Marshal(fields)
		if err != nil {
			return err
		}
		e.str("event: " + kind + "\ndata: ")
		e.buf = append(e.buf, b...)
		e.str("\n\n")
		return nil
	}
	e.failed = func(message string) {
		_ = event("error", map[string]any{"code": "server_error", "message": message, "param": nil}) // plain values marshal
	}
	at := map[string]any{"item_id": item, "output_index": 0, "content_index": 0}
	with := func(extra map[string]any) map[string]any {
		m := make(map[string]any, len(at)+len(extra)+2)
		for k, v := range at {
			m[k] = v
		}
		for k, v := range extra {
			m[k] = v
		}
		return m
	}
	s.streaming(w, r, id, j, e, func([]*choice) error {
		if err := event("response.created", map[string]any{"response": body("in_progress", "", nil)}); err != nil {
			return err
		}
		if err := event("response.in_progress", map[string]any{"response": body("in_progress", "", nil)}); err != nil {
			return err
		}
		return e.send()
	}, func(c *choice, d delta) error {
		if len(c.tokens) == len(d.tokens) {
			if err := event("response.output_item.added", map[string]any{"output_index": 0, "item": map[string]any{"id": item, "type": "message", "role": "assistant", "status": "in_progress", "content": []any{}}}); err != nil {
				return err
			}
			if err := event("response.content_part.added", with(map[string]any{"part": map[string]any{"type": "output_text", "text": "", "annotations": []any{}}})); err != nil {
				return err
			}
		}
		if err := event("response.output_text.delta", with(map[string]any{"delta": d.text, "logprobs": []any{}})); err != nil {
			return err
		}
		if c.finish != "" {
			text := c.text.String()
			done := body("completed", text, c)
			for _, x := range []struct {
				kind   string
				fields map[string]any
			}{
				{"response.output_text.done", with(map[string]any{"text": text, "logprobs": []any{}})},
				{"response.content_part.done", with(map[string]any{"part": map[string]any{"type": "output_text", "text": text, "annotations": []any{}}})},
				{"response.output_item.done", map[string]any{"output_index": 0, "item": done["output"].([]any)[0]}},
				{"response.completed", map[string]any{"response": done}},
			} {
				if err := event(x.kind, x.fields); err != nil {
					return err
				}
			}
		}
		return e.send()
	}, nil)
}

// messages is POST /v1/messages, Anthropic's API.
func (s *Server) messages(w http.ResponseWriter, r *http.Request) {
	q, prompt, call, err := s.anthropic(r)
	if err != nil {
		s.refuseAnthropic(w, err)
		return
	}
	if q.MaxTokens == nil {
		s.refuseAnthropic(w, badRequest("max_tokens", "max_tokens: Field required"))
		return
	}
	f := sampling{Model: q.Model, Stream: q.Stream, MaxTokens: q.MaxTokens, Temperature: q.Temperature, TopP: q.TopP, Stop: q.StopSequences, IgnoreEOS: q.IgnoreEOS}
	j, err := s.check(r, f, [][]uint32{prompt})
	if err != nil {
		s.refuseAnthropic(w, err)
		return
	}
	id := "msg_" + s.requestID(r)
	reason := func(c *choice) (string, any) {
		switch {
		case c.stop != nil:
			return "stop_sequence", c.stop
		case c.finish == "length":
			return "max_tokens", nil
		case call != nil:
			return "tool_use", nil
		}
		return "end_turn", nil
	}
	counts := func(c *choice) map[string]any {
		return map[string]any{"input_tokens": len(c.prompt) - c.cached, "cache_read_input_tokens": c.cached, "cache_creation_input_tokens": nil, "output_tokens": len(c.tokens)}
	}
	if !j.stream {
		all, ok := s.whole(w, r, id, j)
		if !ok {
			return
		}
		c := all[0]
		content := map[string]any{"type": "text", "text": c.text.String()}
		if call != nil {
			content = map[string]any{"type": "tool_use", "id": "toolu_" + s.id(), "name": call.name, "input": json.RawMessage(call.before + call.text(c.text.String()) + call.after)}
		}
		why, word := reason(c)
		writeJSON(w, http.StatusOK, map[string]any{"id": id, "type": "message", "role": "assistant", "model": j.shown, "content": []any{content}, "stop_reason": why, "stop_sequence": word, "usage": counts(c)})
		return
	}
	e := newEvents(w)
	event := func(kind string, fields map[string]any) {
		fields["type"] = kind
		b, err := json.Marshal(fields)
		if err != nil {
			return // maps of plain values marshal
		}
		e.str("event: " + kind + "\ndata: ")
		e.buf = append(e.buf, b...)
		e.str("\n\n")
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
				block = map[string]any{"type": "tool_use", "id": "toolu_" + s.id(), "name": call.name, "input": map[string]any{}}
			}
			event("content_block_start", map[string]any{"index": 0, "content_block": block})
			if call != nil {
				event("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "input_json_delta", "partial_json": call.before}})
			}
		}
		if call != nil {
			part := call.text(d.text)
			if c.finish != "" {
				part += call.after
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
		return e.send()
	}, nil)
}

type anthropicRequest struct {
	Model         string          `json:"model"`
	System        json.RawMessage `json:"system"`
	Messages      []chatMessage   `json:"messages"`
	MaxTokens     *int            `json:"max_tokens"`
	Stream        bool            `json:"stream"`
	Temperature   *float64        `json:"temperature"`
	TopP          *float64        `json:"top_p"`
	StopSequences json.RawMessage `json:"stop_sequences"`
	Tools         json.RawMessage `json:"tools"`
	ToolChoice    json.RawMessage `json:"tool_choice"`
	IgnoreEOS     bool            `json:"ignore_eos"`
}

func (s *Server) anthropic(r *http.Request) (*anthropicRequest, []uint32, *forced, *apiError) {
	var q anthropicRequest
	if err := s.readJSON(r, &q); err != nil {
		return nil, nil, nil, err
	}
	system, err := contentText(q.System)
	if err != nil {
		return nil, nil, nil, err
	}
	msgs, err := render(q.Messages)
	if err != nil {
		return nil, nil, nil, err
	}
	if system != "" {
		first := msgs[0]
		first.Role, first.Content = "system", system
		msgs = append(msgs[:0:0], append(append(msgs[:0:0], first), msgs...)...)
	}
	choice := q.ToolChoice
	call, err := forcedCall(q.Tools, choice)
	if err != nil {
		return nil, nil, nil, err
	}
	return &q, s.cfg.Vocab.Chat(nil, compactTools(q.Tools), msgs, true), call, nil
}

func (s *Server) refuseAnthropic(w http.ResponseWriter, err *apiError) {
	kind := "invalid_request_error"
	switch err.status {
	case http.StatusNotFound:
		kind = "not_found_error"
	case http.StatusRequestEntityTooLarge:
		kind = "request_too_large"
	}
	writeJSON(w, err.status, map[string]any{"type": "error", "error": map[string]string{"type": kind, "message": err.message}})
}

func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) {
	q, prompt, _, err := s.anthropic(r)
	if err == nil {
		_, _, err = s.model(q.Model)
	}
	if err != nil {
		s.refuseAnthropic(w, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]int{"input_tokens": len(prompt)})
}

// generateTokens is POST /inference/v1/generate: tokens in, tokens out.
func (s *Server) generateTokens(w http.ResponseWriter, r *http.Request) {
	var q struct {
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
	if err := s.readJSON(r, &q); err != nil {
		s.refuse(w, err)
		return
	}
	p := q.SamplingParams
	if p.MaxTokens == nil {
		n := 16
		p.MaxTokens = &n
	}
	j, err := s.check(r, sampling{Model: q.Model, Stream: q.Stream, StreamOptions: q.StreamOptions, MaxTokens: p.MaxTokens, MinTokens: p.MinTokens, IgnoreEOS: p.IgnoreEOS, Stop: p.Stop, N: p.N, CacheSalt: q.CacheSalt, KVTransferParams: q.KVTransfer}, [][]uint32{q.TokenIDs})
	if err != nil {
		s.refuse(w, err)
		return
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
			b, err := json.Marshal(map[string]any{"request_id": base, "choices": []outChoice{shape(c, d.tokens, d.text)}})
			if err != nil {
				return err
			}
			e.str("data: ")
			e.buf = append(e.buf, b...)
			e.str("\n\n")
			return e.send()
		}, func(u usage) {
			e.str(`data: {"request_id":` + string(appendJSON(nil, base)) + `,"choices":[],"usage":`)
			e.usage(u)
			e.str("}\n\n")
		})
		return
	}
	all, ok := s.whole(w, r, base, j)
	if !ok {
		return
	}
	var choices []outChoice
	for _, c := range all {
		choices = append(choices, shape(c, c.tokens, c.text.String()))
	}
	writeJSON(w, http.StatusOK, map[string]any{"request_id": base, "model": j.shown, "created": time.Now().Unix(), "choices": choices, "usage": usageOf(j, all), "prompt_logprobs": nil, "kv_transfer_params": s.handBack(j, all)})
}
