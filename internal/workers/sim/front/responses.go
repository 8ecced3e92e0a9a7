package front

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
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

// maxStored bounds the responses that an engine remembers; the oldest goes first.
const maxStored = 1024

// stored are the responses that later ones may continue from, as vLLM keeps them
// with VLLM_ENABLE_RESPONSES_API_STORE=1.
type stored struct {
	mu    sync.Mutex
	byID  map[string]storedResponse
	order []string
}

// storedResponse is an answer, and the conversation that it ends.
type storedResponse struct {
	answer map[string]any
	chat   []chatMessage
}

func (s *stored) get(id string) (storedResponse, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.byID[id]
	return r, ok
}

func (s *stored) put(id string, r storedResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID == nil {
		s.byID = map[string]storedResponse{}
	}
	if len(s.order) >= maxStored {
		delete(s.byID, s.order[0])
		s.order = s.order[1:]
	}
	s.byID[id], s.order = r, append(s.order, id)
}

func noResponse(id string) *Error {
	return &Error{Status: http.StatusNotFound, Message: "Response with id '" + id + "' not found.", Kind: "invalid_request_error", Param: "response_id"}
}

// storedResponse is GET /v1/responses/{id}.
func (s *Server) storedResponse(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if known, ok := s.stored.get(id); ok {
		WriteJSON(w, http.StatusOK, known.answer)
		return
	}
	s.deny(w, noResponse(id))
}

// responses is POST /v1/responses.
func (s *Server) responses(w http.ResponseWriter, r *http.Request, q *responsesRequest) *Error {
	var msgs []chatMessage
	var items []inputItem
	var text string
	switch {
	case json.Unmarshal(q.Input, &text) == nil && text != "":
		msgs = []chatMessage{{Role: "user", Content: q.Input}}
	case json.Unmarshal(q.Input, &items) != nil:
		return badRequest("input", "input must be a string or a list of messages.")
	default:
		var err *Error
		if msgs, err = chatOfItems(items); err != nil {
			return err
		}
	}
	if q.Previous != "" {
		before, ok := s.stored.get(q.Previous)
		if !ok {
			return noResponse(q.Previous)
		}
		msgs = append(slices.Clone(before.chat), msgs...)
	}
	history := msgs
	if q.Instructions != "" {
		msgs = append([]chatMessage{{Role: "system", Content: rawjson.AppendString(nil, q.Instructions)}}, msgs...)
	}
	flat, err := renderChat(msgs)
	if err != nil {
		return err
	}
	prompt := s.cfg.Vocab.Chat(nil, templateTools(itemTools(q.Tools)), flat, true)
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
	remember := func(c *choice, answer map[string]any) {
		if q.Store == nil || *q.Store {
			s.stored.put(id, storedResponse{answer, append(slices.Clone(history), chatMessage{Role: "assistant", Content: rawjson.AppendString(nil, c.text.String())})})
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
			m := body("completed", all[0].text.String(), all[0])
			m["kv_transfer_params"] = s.handBack(j, all)
			remember(all[0], m)
			WriteJSON(w, http.StatusOK, m)
		}
		return nil
	}
	e := newEvents(w)
	n := 0
	event := func(kind string, fields map[string]any) {
		fields["type"], fields["sequence_number"] = kind, n
		n++
		_ = e.Add(kind, fields) // maps of plain values marshal
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
		return e.Send()
	}, func(c *choice, d delta) error {
		if len(c.tokens) == len(d.tokens) {
			event("response.output_item.added", map[string]any{"output_index": 0, "item": map[string]any{"id": item, "type": "message", "role": "assistant", "status": "in_progress", "content": []any{}}})
			event("response.content_part.added", with(map[string]any{"part": map[string]any{"type": "output_text", "text": "", "annotations": []any{}}}))
		}
		event("response.output_text.delta", with(map[string]any{"delta": d.text, "logprobs": []any{}}))
		if c.finish != "" {
			text := c.text.String()
			done := body("completed", text, c)
			remember(c, done)
			event("response.output_text.done", with(map[string]any{"text": text, "logprobs": []any{}}))
			event("response.content_part.done", with(map[string]any{"part": map[string]any{"type": "output_text", "text": text, "annotations": []any{}}}))
			event("response.output_item.done", map[string]any{"output_index": 0, "item": done["output"].([]any)[0]})
			event("response.completed", map[string]any{"response": done})
		}
		return e.Send()
	}, nil)
	return nil
}
