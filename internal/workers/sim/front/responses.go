package front

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/api"
)

type responsesRequest struct {
	common
	Input           json.RawMessage `json:"input"`
	Instructions    string          `json:"instructions"`
	MaxOutputTokens *int            `json:"max_output_tokens"`
	Tools           json.RawMessage `json:"tools"`
	Stop            json.RawMessage `json:"stop"`
	RequestID       string          `json:"request_id"`
	Store           *bool           `json:"store"`
	Previous        string          `json:"previous_response_id"`
}

// responseItem is one item of the input: a message, or what an assistant did
// beside speaking.
type responseItem struct {
	Type      string          `json:"type"`
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	CallID    string          `json:"call_id"`
	Name      string          `json:"name"`
	Arguments string          `json:"arguments"`
	Output    json.RawMessage `json:"output"`
}

// responseMessages makes a chat of input items, as vLLM does: an assistant's
// words and calls in a row are one message.
func responseMessages(items []responseItem) ([]chatMessage, *apiError) {
	var out []chatMessage
	joinable := func() *chatMessage {
		if n := len(out); n > 0 && out[n-1].Role == "assistant" {
			return &out[n-1]
		}
		out = append(out, chatMessage{Role: "assistant"})
		return &out[len(out)-1]
	}
	for _, it := range items {
		switch {
		case it.Type == "function_call":
			m := joinable()
			var calls []json.RawMessage
			if !absent(m.ToolCalls) && json.Unmarshal(m.ToolCalls, &calls) != nil {
				return nil, badRequest("input", "tool calls are no list.")
			}
			m.ToolCalls = jsonOf(append(calls, jsonOf(map[string]any{"id": it.CallID, "type": "function", "function": map[string]string{"name": it.Name, "arguments": it.Arguments}})))
		case it.Type == "function_call_output":
			out = append(out, chatMessage{Role: "tool", ToolCallID: it.CallID, Content: it.Output})
		case it.Type == "reasoning":
			joinable() // the template does not show what was thought
		case it.Role == "assistant":
			// Of an answer's parts only the first is taken.
			content := it.Content
			var parts []struct {
				Text json.RawMessage `json:"text"`
			}
			if json.Unmarshal(content, &parts) == nil && len(parts) > 0 {
				content = parts[0].Text
			}
			if m := joinable(); m.Content == nil {
				m.Content = content
			} else {
				out = append(out, chatMessage{Role: "assistant", Content: content})
			}
		case it.Role != "":
			out = append(out, chatMessage{Role: it.Role, Content: it.Content})
		default:
			return nil, badRequest("input", "Unsupported input item type: %s", it.Type)
		}
	}
	return out, nil
}

func jsonOf(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		return nil // plain values marshal
	}
	return b
}

// maxStored bounds the responses that an engine remembers; the oldest goes first.
const maxStored = 1024

// stored are the responses that later ones may go on from, as vLLM keeps them
// with VLLM_ENABLE_RESPONSES_API_STORE=1.
type stored struct {
	mu    sync.Mutex
	chats map[string][]chatMessage
	order []string
}

func (s *stored) get(id string) ([]chatMessage, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.chats[id]
	return m, ok
}

func (s *stored) put(id string, m []chatMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.chats == nil {
		s.chats = map[string][]chatMessage{}
	}
	if len(s.order) >= maxStored {
		delete(s.chats, s.order[0])
		s.order = s.order[1:]
	}
	s.chats[id], s.order = m, append(s.order, id)
}

// responses is POST /v1/responses.
func (s *Server) responses(w http.ResponseWriter, r *http.Request, q *responsesRequest) *apiError {
	var msgs []chatMessage
	var items []responseItem
	var text string
	switch {
	case json.Unmarshal(q.Input, &text) == nil && text != "":
		msgs = []chatMessage{{Role: "user", Content: q.Input}}
	case json.Unmarshal(q.Input, &items) != nil:
		return badRequest("input", "input must be a string or a list of messages.")
	default:
		var err *apiError
		if msgs, err = responseMessages(items); err != nil {
			return err
		}
	}
	if q.Previous != "" {
		before, ok := s.stored.get(q.Previous)
		if !ok {
			return &apiError{http.StatusNotFound, "Response with id '" + q.Previous + "' not found.", "invalid_request_error", "response_id"}
		}
		msgs = append(slices.Clone(before), msgs...)
	}
	history := msgs
	if q.Instructions != "" {
		msgs = append([]chatMessage{{Role: "system", Content: api.AppendString(nil, q.Instructions)}}, msgs...)
	}
	flat, err := render(msgs)
	if err != nil {
		return err
	}
	prompt := s.cfg.Vocab.Chat(nil, compactTools(responseTools(q.Tools)), flat, true)
	j, err := s.check(r, sampling{common: q.common, MaxTokens: q.MaxOutputTokens, Stop: q.Stop}, [][]uint32{prompt})
	if err != nil {
		return err
	}
	// The id is the client's own or a new one, whatever X-Request-Id says.
	id := q.RequestID
	if id == "" {
		id = "resp_" + s.id()
	}
	// A request may ask its engine several times, when tools run in between.
	base := id + "_0"
	remember := func(c *choice) {
		if q.Store == nil || *q.Store {
			s.stored.put(id, append(slices.Clone(history), chatMessage{Role: "assistant", Content: api.AppendString(nil, c.text.String())}))
		}
	}
	item := "msg_" + s.id()
	created := time.Now().Unix()
	body := func(status, text string, c *choice) map[string]any {
		m := map[string]any{
			"id": id, "object": "response", "created_at": created, "status": status, "model": j.shown,
			"output": []any{}, "instructions": nil, "parallel_tool_calls": true, "tool_choice": "auto", "tools": []any{},
			"temperature": q.Temperature, "top_p": q.TopP, "max_output_tokens": q.MaxOutputTokens, "error": nil, "incomplete_details": nil, "usage": nil,
			"kv_transfer_params": nil, "previous_response_id": nil,
		}
		if q.Previous != "" {
			m["previous_response_id"] = q.Previous
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
		if all, ok := s.whole(w, r, base, j); ok {
			remember(all[0])
			m := body("completed", all[0].text.String(), all[0])
			m["kv_transfer_params"] = s.handBack(j, all)
			WriteJSON(w, http.StatusOK, m)
		}
		return nil
	}
	e := newEvents(w)
	n := 0
	event := func(kind string, fields map[string]any) {
		fields["type"], fields["sequence_number"] = kind, n
		n++
		_ = e.event(kind, fields) // maps of plain values marshal
	}
	e.failed = func(message string) {
		event("error", map[string]any{"code": "server_error", "message": message, "param": nil})
	}
	at := map[string]any{"item_id": item, "output_index": 0, "content_index": 0}
	with := func(extra map[string]any) map[string]any {
		maps.Copy(extra, at)
		return extra
	}
	s.streaming(w, r, base, j, e, func([]*choice) error {
		event("response.created", map[string]any{"response": body("in_progress", "", nil)})
		event("response.in_progress", map[string]any{"response": body("in_progress", "", nil)})
		return e.send()
	}, func(c *choice, d delta) error {
		if len(c.tokens) == len(d.tokens) {
			event("response.output_item.added", map[string]any{"output_index": 0, "item": map[string]any{"id": item, "type": "message", "role": "assistant", "status": "in_progress", "content": []any{}}})
			event("response.content_part.added", with(map[string]any{"part": map[string]any{"type": "output_text", "text": "", "annotations": []any{}}}))
		}
		event("response.output_text.delta", with(map[string]any{"delta": d.text, "logprobs": []any{}}))
		if c.finish != "" {
			text := c.text.String()
			remember(c)
			done := body("completed", text, c)
			event("response.output_text.done", with(map[string]any{"text": text, "logprobs": []any{}}))
			event("response.content_part.done", with(map[string]any{"part": map[string]any{"type": "output_text", "text": text, "annotations": []any{}}}))
			event("response.output_item.done", map[string]any{"output_index": 0, "item": done["output"].([]any)[0]})
			event("response.completed", map[string]any{"response": done})
		}
		return e.send()
	}, nil)
	return nil
}

// messages is POST /v1/messages, Anthropic's API.
func (s *Server) messages(w http.ResponseWriter, r *http.Request, q *anthropicRequest) *apiError {
	prompt, call, err := s.anthropic(q)
	if err != nil {
		return err
	}
	if q.MaxTokens == nil {
		return badRequest("max_tokens", "max_tokens: Field required")
	}
	if q.Thinking.Type == "enabled" && q.Thinking.Budget >= *q.MaxTokens && !remoteDecode(q.KVTransferParams) {
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
			content = map[string]any{"type": "tool_use", "id": "toolu_" + s.id(), "name": call.name, "input": json.RawMessage(call.before + call.text(c.text.String()) + call.after)}
		}
		why, word := reason(c)
		m := map[string]any{"id": id, "type": "message", "role": "assistant", "model": j.shown, "content": []any{content}, "stop_reason": why, "stop_sequence": word, "usage": counts(c), "kv_transfer_params": s.handBack(j, all)}
		if p, ok := m["kv_transfer_params"].(*transferParams); ok {
			m["kv_transfer_params"] = p.told()
		}
		WriteJSON(w, http.StatusOK, withoutNulls(m))
		return nil
	}
	e := newEvents(w)
	event := func(kind string, fields map[string]any) {
		fields["type"] = kind
		_ = e.event(kind, fields) // maps of plain values marshal
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

type anthropicMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

type anthropicBlock struct {
	Type    string          `json:"type"`
	Text    string          `json:"text"`
	ID      string          `json:"id"`
	UseID   string          `json:"tool_use_id"`
	Name    string          `json:"name"`
	Input   json.RawMessage `json:"input"`
	Content json.RawMessage `json:"content"`
}

// anthropicChat makes a chat of the messages, as vLLM does: what tools found are
// messages before the user's.
func anthropicChat(in []anthropicMessage) ([]chatMessage, *apiError) {
	var out []chatMessage
	for _, m := range in {
		var blocks []anthropicBlock
		if json.Unmarshal(m.Content, &blocks) != nil {
			out = append(out, chatMessage{Role: m.Role, Content: m.Content})
			continue
		}
		turn := chatMessage{Role: m.Role}
		var parts, calls []any
		for _, b := range blocks {
			switch b.Type {
			case "text":
				parts = append(parts, map[string]string{"type": "text", "text": b.Text})
			case "thinking", "redacted_thinking":
			case "tool_use":
				args := "{}"
				if !absent(b.Input) {
					args = string(b.Input)
				}
				calls = append(calls, map[string]any{"id": b.ID, "type": "function", "function": map[string]string{"name": b.Name, "arguments": args}})
			case "tool_result":
				text := ""
				var found []anthropicBlock
				if json.Unmarshal(b.Content, &found) == nil {
					for i, f := range found {
						if i > 0 {
							text += "\n"
						}
						text += f.Text
					}
				} else if !absent(b.Content) && json.Unmarshal(b.Content, &text) != nil {
					return nil, badRequest("messages", "the content of a tool_result must be a string or a list.")
				}
				out = append(out, chatMessage{Role: "tool", ToolCallID: b.UseID, Content: api.AppendString(nil, text)})
			default:
				return nil, badRequest("messages", "At most 0 %s(s) may be provided in one prompt.", b.Type)
			}
		}
		if calls != nil {
			turn.ToolCalls = jsonOf(calls)
		}
		if parts != nil {
			turn.Content = jsonOf(parts)
		}
		if parts != nil || m.Role != "user" {
			out = append(out, turn)
		}
	}
	return out, nil
}

// anthropicTools gives tools the shape of chat requests.
func anthropicTools(raw json.RawMessage) (json.RawMessage, *apiError) {
	if absent(raw) {
		return nil, nil
	}
	var in []struct {
		Name        string         `json:"name"`
		Description *string        `json:"description"`
		Schema      map[string]any `json:"input_schema"`
		Strict      *bool          `json:"strict"`
	}
	if json.Unmarshal(raw, &in) != nil {
		return nil, badRequest("tools", "tools must be a list of tools.")
	}
	out := make([]any, len(in))
	for i, t := range in {
		if t.Schema == nil {
			return nil, badRequest("tools", "tools.%d.input_schema: Field required", i)
		}
		if t.Schema["type"] == nil {
			t.Schema["type"] = "object"
		}
		out[i] = map[string]any{"type": "function", "function": map[string]any{"name": t.Name, "description": t.Description, "parameters": t.Schema, "strict": t.Strict}}
	}
	return jsonOf(out), nil
}

// responseTools gives the flat tools of the Responses API the shape of chat
// requests.
func responseTools(raw json.RawMessage) json.RawMessage {
	var in []map[string]any
	if absent(raw) || json.Unmarshal(raw, &in) != nil {
		return nil
	}
	var out []any
	for _, t := range in {
		if t["type"] == "function" {
			delete(t, "type")
			out = append(out, map[string]any{"type": "function", "function": t})
		}
	}
	return jsonOf(out)
}

// remoteDecode reports whether transfer parameters ask for a remote decode.
func remoteDecode(raw json.RawMessage) bool {
	var p map[string]json.RawMessage
	return json.Unmarshal(raw, &p) == nil && truthy(p["do_remote_decode"])
}

func (s *Server) anthropic(q *anthropicRequest) ([]uint32, *forced, *apiError) {
	var blocks []anthropicBlock
	if json.Unmarshal(q.System, &blocks) == nil {
		// A client's bill is other in each request and no part of the prompt.
		q.System = jsonOf(slices.DeleteFunc(blocks, func(b anthropicBlock) bool { return strings.HasPrefix(b.Text, "x-anthropic-billing-header") }))
	}
	system, err := contentText(q.System)
	if err != nil {
		return nil, nil, err
	}
	turns, err := anthropicChat(q.Messages)
	if err != nil {
		return nil, nil, err
	}
	if system != "" {
		turns = append([]chatMessage{{Role: "system", Content: api.AppendString(nil, system)}}, turns...)
	}
	msgs, err := render(turns)
	if err != nil {
		return nil, nil, err
	}
	tools, err := anthropicTools(q.Tools)
	if err != nil {
		return nil, nil, err
	}
	call, err := forcedCall(q.Tools, q.ToolChoice)
	if err != nil {
		return nil, nil, err
	}
	return s.cfg.Vocab.Chat(nil, compactTools(tools), msgs, true), call, nil
}

func (s *Server) refuseAnthropic(w http.ResponseWriter, err *apiError) {
	kind := "invalid_request_error"
	switch err.status {
	case http.StatusNotFound:
		kind = "not_found_error"
	case http.StatusRequestEntityTooLarge:
		kind = "request_too_large"
	}
	WriteJSON(w, err.status, map[string]any{"type": "error", "error": map[string]string{"type": kind, "message": err.message}})
}

func (s *Server) countTokens(w http.ResponseWriter, _ *http.Request, q *anthropicRequest) *apiError {
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
func (s *Server) generateTokens(w http.ResponseWriter, r *http.Request, q *tokensRequest) *apiError {
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
			if err := e.event("", map[string]any{"request_id": base, "choices": []outChoice{shape(c, d.tokens, d.text)}}); err != nil {
				return err
			}
			return e.send()
		}, func(u usage) {
			_ = e.event("", map[string]any{"request_id": base, "choices": []outChoice{}, "usage": u}) // plain values marshal
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
