package front

import (
	"encoding/json"
	"net/http"
	"time"
)

type chatRequest struct {
	sampling
	Messages            []chatMessage   `json:"messages"`
	Tools               json.RawMessage `json:"tools"`
	ToolChoice          json.RawMessage `json:"tool_choice"`
	Logprobs            bool            `json:"logprobs"`
	TopLogprobs         int             `json:"top_logprobs"`
	AddGenerationPrompt *bool           `json:"add_generation_prompt"`
}

type toolCall struct {
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function toolFunction `json:"function"`
}

type toolFunction struct {
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments"`
}

type chatAnswerMessage struct {
	Role         string     `json:"role"`
	Content      *string    `json:"content"`
	Refusal      *string    `json:"refusal"`
	Annotations  *string    `json:"annotations"`
	Audio        *string    `json:"audio"`
	FunctionCall *string    `json:"function_call"`
	ToolCalls    []toolCall `json:"tool_calls,omitempty"`
	Reasoning    *string    `json:"reasoning"`
}

type chatChoice struct {
	Index         int               `json:"index"`
	Message       chatAnswerMessage `json:"message"`
	Logprobs      any               `json:"logprobs"`
	FinishReason  string            `json:"finish_reason"`
	StopReason    any               `json:"stop_reason"`
	TokenIDs      []uint32          `json:"token_ids"`
	RoutedExperts any               `json:"routed_experts"`
}

type chatAnswer struct {
	ID                string       `json:"id"`
	Object            string       `json:"object"`
	Created           int64        `json:"created"`
	Model             string       `json:"model"`
	Choices           []chatChoice `json:"choices"`
	ServiceTier       *string      `json:"service_tier"`
	SystemFingerprint string       `json:"system_fingerprint"`
	Usage             usage        `json:"usage"`
	PromptLogprobs    any          `json:"prompt_logprobs"`
	PromptTokenIDs    []uint32     `json:"prompt_token_ids"`
	PromptText        any          `json:"prompt_text"`
	KVTransferParams  any          `json:"kv_transfer_params"`
	ECTransferParams  any          `json:"ec_transfer_params"`
	Metrics           any          `json:"metrics"`
}

// chat is POST /v1/chat/completions.
func (s *Server) chat(w http.ResponseWriter, r *http.Request, q *chatRequest) *Error {
	msgs, err := renderChat(q.Messages)
	if err != nil {
		return err
	}
	call, err := readForcedCall(q.Tools, q.ToolChoice)
	if err != nil {
		return err
	}
	if q.TopLogprobs < 0 || q.TopLogprobs > 20 || q.TopLogprobs > 0 && !q.Logprobs {
		return badRequest("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true and top_logprobs be between 0 and 20.")
	}
	prompt := s.cfg.Vocab.Chat(nil, templateTools(q.Tools), msgs, q.AddGenerationPrompt == nil || *q.AddGenerationPrompt)
	j, err := s.check(r, q.sampling, [][]uint32{prompt})
	if err != nil {
		return err
	}
	base := "chatcmpl-" + s.requestID(r)
	if j.stream {
		s.streamChat(w, r, base, j, q, call)
		return nil
	}
	all, ok := s.whole(w, r, base, j)
	if !ok {
		return nil
	}
	a := chatAnswer{
		ID: base, Object: "chat.completion", Created: time.Now().Unix(), Model: j.shown,
		SystemFingerprint: fingerprint, Usage: usageOf(j, all), KVTransferParams: s.handBack(j, all),
	}
	if j.ReturnTokenIDs {
		a.PromptTokenIDs = prompt
	}
	for _, c := range all {
		out := chatChoice{Index: c.index, FinishReason: c.finish, StopReason: c.stop, Message: chatAnswerMessage{Role: "assistant"}}
		text := c.text.String()
		if call != nil {
			out.Message.ToolCalls = []toolCall{{"chatcmpl-tool-" + s.id(), "function", toolFunction{call.Name, call.Before + call.Text(text) + call.After}}}
			out.FinishReason = call.Finish(c.finish)
			text = ""
		}
		out.Message.Content = &text
		if j.ReturnTokenIDs {
			out.TokenIDs = c.tokens
		}
		if q.Logprobs {
			out.Logprobs = s.chatLogprobs(c.tokens, q.TopLogprobs)
		}
		a.Choices = append(a.Choices, out)
	}
	WriteJSON(w, http.StatusOK, a)
	return nil
}

type chatLogprob struct {
	Token       string        `json:"token"`
	Logprob     float64       `json:"logprob"`
	Bytes       []int         `json:"bytes"`
	TopLogprobs []chatLogprob `json:"top_logprobs,omitempty"`
}

func (s *Server) chatLogprobs(tokens []uint32, top int) map[string]any {
	list := make([]chatLogprob, len(tokens))
	for i, t := range tokens {
		text := s.cfg.Vocab.Text(t)
		list[i] = chatLogprob{Token: text, Logprob: logprob, Bytes: []int{}}
		for _, b := range []byte(text) {
			list[i].Bytes = append(list[i].Bytes, int(b))
		}
		if top > 0 {
			list[i].TopLogprobs = []chatLogprob{list[i]}
		}
	}
	return map[string]any{"content": list}
}

func (s *Server) streamChat(w http.ResponseWriter, r *http.Request, base string, j *job, q *chatRequest, call *forcedCall) {
	e := newEvents(w)
	e.params = s.endsWith(j)
	head := newChunk(base, "chat.completion.chunk", j)
	begun := make([]bool, j.n)
	e.prelude = func() { _ = e.chatRole(head, 0, j) } // the error is what follows
	s.streaming(w, r, base, j, e, nil, func(c *choice, d delta) error {
		if !begun[c.index] {
			begun[c.index] = true
			if err := e.chatRole(head, c.index, j); err != nil {
				return err
			}
			if call != nil {
				part := toolCallDelta{ID: "chatcmpl-tool-" + s.id(), Type: "function", Function: toolFunction{call.Name, call.Before}}
				if err := e.chunk(head, chunkChoice{Index: c.index, Delta: chatDelta{ToolCalls: []toolCallDelta{part}}, chunkEnd: &chunkEnd{}}); err != nil {
					return err
				}
			}
		}
		out := chunkChoice{Delta: chatDelta{Content: &d.text}}
		if call != nil {
			text := call.Text(d.text)
			if c.finish != "" {
				text += call.After
				c.finish = call.Finish(c.finish)
			}
			out.Delta = chatDelta{ToolCalls: []toolCallDelta{{Function: toolFunction{Arguments: text}}}}
		}
		if q.Logprobs {
			out.Logprobs = s.chatLogprobs(d.tokens, q.TopLogprobs)
		}
		return e.piece(head, out, j, c, d)
	}, e.last(head))
}

type chatDelta struct {
	Role      string          `json:"role,omitempty"`
	Content   *string         `json:"content,omitempty"`
	ToolCalls []toolCallDelta `json:"tool_calls,omitempty"`
}

type toolCallDelta struct {
	ID       string       `json:"id,omitempty"`
	Type     string       `json:"type,omitempty"`
	Index    int          `json:"index"`
	Function toolFunction `json:"function"`
}

// chatRole writes the first chunk of a choice. vLLM 0.32 sends it when the
// first token is there; after a failed KV load it comes before the error.
func (e *events) chatRole(head chunk, index int, j *job) error {
	head.Choices = []chunkChoice{{Index: index, Delta: chatDelta{Role: "assistant", Content: new("")}}}
	if j.everyUsage {
		n := len(j.prompts[0])
		head.Usage = &usage{PromptTokens: n, TotalTokens: n}
	}
	first := struct {
		chunk
		PromptTokenIDs []uint32 `json:"prompt_token_ids"`
		PromptText     any      `json:"prompt_text"`
	}{chunk: head}
	if j.ReturnTokenIDs {
		first.PromptTokenIDs = j.prompts[0]
	}
	return e.Add("", first)
}
