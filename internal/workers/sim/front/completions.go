package front

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

type completionRequest struct {
	sampling
	Prompt   json.RawMessage `json:"prompt"`
	Echo     bool            `json:"echo"`
	Logprobs *int            `json:"logprobs"`
	// Limit is max_tokens: left out it is 16, and null as much as fits the model.
	Limit json.RawMessage `json:"max_tokens"`
}

type completionChoice struct {
	Index          int       `json:"index"`
	Text           string    `json:"text"`
	Logprobs       any       `json:"logprobs"`
	FinishReason   string    `json:"finish_reason"`
	StopReason     any       `json:"stop_reason"`
	TokenIDs       []uint32  `json:"token_ids"`
	PromptLogprobs any       `json:"prompt_logprobs"`
	PromptTokenIDs []uint32  `json:"prompt_token_ids"`
	RoutedExperts  *struct{} `json:"routed_experts"`
}

type completionAnswer struct {
	ID                string             `json:"id"`
	Object            string             `json:"object"`
	Created           int64              `json:"created"`
	Model             string             `json:"model"`
	Choices           []completionChoice `json:"choices"`
	ServiceTier       *string            `json:"service_tier"`
	SystemFingerprint string             `json:"system_fingerprint"`
	Usage             usage              `json:"usage"`
	KVTransferParams  any                `json:"kv_transfer_params"`
	ECTransferParams  any                `json:"ec_transfer_params"`
	Metrics           any                `json:"metrics"`
}

const fingerprint = "vllm-0.32.0-dynctl-sim"

// completions is POST /v1/completions.
func (s *Server) completions(w http.ResponseWriter, r *http.Request, q *completionRequest) *Error {
	prompts, err := s.promptsOf(q.Prompt)
	if err != nil {
		return err
	}
	if len(q.Limit) > 0 && json.Unmarshal(q.Limit, &q.MaxTokens) != nil {
		return badRequest("max_tokens", "Input should be a valid integer")
	}
	if len(q.Limit) == 0 { // OpenAI's default for completions
		q.MaxTokens = new(max(1, min(16, s.cfg.MaxModelLen-len(prompts[0]))))
	}
	if q.Logprobs != nil && (*q.Logprobs < 0 || *q.Logprobs > 20) {
		return badRequest("logprobs", "Requested sample logprobs of %d, which is greater than max allowed: 20", *q.Logprobs)
	}
	j, err := s.check(r, q.sampling, prompts)
	if err != nil {
		return err
	}
	base := "cmpl-" + s.requestID(r)
	if j.stream {
		s.streamCompletion(w, r, base, j, q)
		return nil
	}
	all, ok := s.whole(w, r, base, j)
	if !ok {
		return nil
	}
	a := completionAnswer{
		ID: base, Object: "text_completion", Created: time.Now().Unix(), Model: j.shown,
		SystemFingerprint: fingerprint, Usage: usageOf(j, all), KVTransferParams: s.handBack(j, all),
	}
	for _, c := range all {
		out := completionChoice{Index: c.index, Text: c.text.String(), FinishReason: c.finish, StopReason: c.stop}
		if q.Echo {
			out.Text = s.cfg.Vocab.Decode(c.prompt, true) + out.Text
		}
		if j.ReturnTokenIDs {
			out.TokenIDs, out.PromptTokenIDs = c.tokens, c.prompt
		}
		if q.Logprobs != nil {
			out.Logprobs = s.completionLogprobs(c.tokens, 0)
		}
		a.Choices = append(a.Choices, out)
	}
	WriteJSON(w, http.StatusOK, a)
	return nil
}

// handBack is the answer's kv_transfer_params.
func (s *Server) handBack(j *job, all []*choice) any {
	c := all[0]
	switch {
	case j.LMCache != nil && j.LMCache.First && len(c.tokens) > 0:
		return map[string]any{"first_tok": c.tokens[0]}
	case j.Pin && j.Transfer == "" && c.pinned != nil:
		return s.paramsOf(c)
	}
	return nil
}

func (s *Server) paramsOf(c *choice) *transferParams {
	l, mode := s.cfg.Links[c.rank], "pull"
	if s.cfg.Connector == workers.ConnectorNIXLPush {
		mode = "push"
	}
	return &transferParams{
		DoRemotePrefill: true, RemoteBlockIDs: [][]int{c.pinned},
		RemoteEngineID: l.EngineID, RemoteRequestID: c.id, RemoteHost: l.Host, RemotePort: l.Port,
		TPSize: 1, DCPSize: 1, PPSize: 1, RemoteNumTokens: len(c.prompt) + len(c.tokens) - 1,
		TransferMode: mode, RemotePrefillCachedTokens: c.cached, RemoteRegistrationGeneration: s.generation(),
	}
}

// generation is what vLLM adds to the parameters since 0.33, nil before.
func (s *Server) generation() *int {
	if !s.since033() {
		return nil
	}
	return new(0)
}

// since033 reports whether the engine claims to be vLLM 0.33 or later.
func (s *Server) since033() bool {
	w := workers.Worker{Facts: workers.Facts{Version: s.cfg.Version}}
	return w.VersionAtLeast(0, 33)
}

// endsWith are the members of the last piece of a choice's stream: since 0.33 its transfer
// parameters. Each piece has the member.
func (s *Server) endsWith(j *job) func(*choice) json.RawMessage {
	if !s.since033() {
		return nil
	}
	return func(c *choice) json.RawMessage {
		if c.finish == "" || !j.Pin || c.pinned == nil || j.Transfer != "" {
			return json.RawMessage("null")
		}
		return rawJSON(s.paramsOf(c))
	}
}

// logprob is the log probability that the model claims for every token.
const logprob = -0.25

type completionLogprobs struct {
	TextOffset    []int                `json:"text_offset"`
	TokenLogprobs []float64            `json:"token_logprobs"`
	Tokens        []string             `json:"tokens"`
	TopLogprobs   []map[string]float64 `json:"top_logprobs"`
}

func (s *Server) completionLogprobs(tokens []uint32, offset int) completionLogprobs {
	var l completionLogprobs
	for _, t := range tokens {
		text := s.cfg.Vocab.Text(t)
		l.TextOffset = append(l.TextOffset, offset)
		l.TokenLogprobs = append(l.TokenLogprobs, logprob)
		l.Tokens = append(l.Tokens, text)
		l.TopLogprobs = append(l.TopLogprobs, map[string]float64{text: logprob})
		offset += len(text)
	}
	return l
}

func (s *Server) streamCompletion(w http.ResponseWriter, r *http.Request, base string, j *job, q *completionRequest) {
	e := newEvents(w)
	e.params = s.endsWith(j)
	head := newChunk(base, "text_completion", j)
	offsets := make([]int, len(j.prompts)*j.n)
	echoed := make([]bool, len(offsets))
	sent := make([]bool, len(offsets))
	s.streaming(w, r, base, j, e, nil, func(c *choice, d delta) error {
		if q.Echo && !echoed[c.index] {
			echoed[c.index] = true
			d.text = s.cfg.Vocab.Decode(c.prompt, true) + d.text
		}
		out := chunkChoice{Text: &d.text, PromptTokenIDs: new([]uint32)}
		if j.ReturnTokenIDs && !sent[c.index] {
			sent[c.index] = true
			*out.PromptTokenIDs = c.prompt
		}
		if q.Logprobs != nil {
			out.Logprobs = s.completionLogprobs(d.tokens, offsets[c.index])
			offsets[c.index] += len(d.text)
		}
		return e.piece(head, out, j, c, d)
	}, e.last(head))
}

// chunk is an event of a stream of completions or of a chat.
type chunk struct {
	ID                string        `json:"id"`
	Object            string        `json:"object"`
	Created           int64         `json:"created"`
	Model             string        `json:"model"`
	Choices           []chunkChoice `json:"choices"`
	Usage             *usage        `json:"usage,omitempty"`
	SystemFingerprint string        `json:"system_fingerprint,omitempty"`
	// KVTransferParams are vLLM's since 0.33; nil before.
	KVTransferParams json.RawMessage `json:"kv_transfer_params,omitempty"`
}

type chunkChoice struct {
	Index        int     `json:"index"`
	Delta        any     `json:"delta,omitempty"` // chat
	Text         *string `json:"text,omitempty"`  // completions
	Logprobs     any     `json:"logprobs"`
	FinishReason any     `json:"finish_reason"`
	// PromptTokenIDs is a member of completions; only the first chunk has them.
	PromptTokenIDs *[]uint32 `json:"prompt_token_ids,omitempty"`
	*chunkEnd
}

// chunkEnd is what a chunk without content does not have.
type chunkEnd struct {
	StopReason any      `json:"stop_reason"`
	TokenIDs   []uint32 `json:"token_ids"`
}

// newChunk is what all chunks of an answer have.
func newChunk(base, object string, j *job) chunk {
	return chunk{ID: base, Object: object, Created: time.Now().Unix(), Model: j.shown}
}

func (e *events) chunk(c chunk, choices ...chunkChoice) error {
	c.Choices = append([]chunkChoice{}, choices...)
	return e.Add("", c)
}

// piece sends what a step has added to a choice.
func (e *events) piece(head chunk, out chunkChoice, j *job, c *choice, d delta) error {
	out.Index, out.chunkEnd = c.index, &chunkEnd{StopReason: c.stop}
	if c.finish != "" {
		out.FinishReason = c.finish
	}
	if j.ReturnTokenIDs {
		out.TokenIDs = append([]uint32{}, d.tokens...)
	}
	if j.everyUsage {
		head.Usage = &usage{PromptTokens: len(c.prompt), CompletionTokens: len(c.tokens), TotalTokens: len(c.prompt) + len(c.tokens)}
	}
	if e.params != nil {
		head.KVTransferParams = e.params(c)
	}
	if err := e.chunk(head, out); err != nil {
		return err
	}
	return e.Send()
}

// last writes the chunk with the usage.
func (e *events) last(head chunk) func(usage) {
	return func(u usage) {
		head.Usage, head.SystemFingerprint = &u, fingerprint
		_ = e.chunk(head) // plain values marshal
	}
}

// streaming runs a job and streams it: start once the engine took it, emit
// for each piece, last for the usage if it was requested, then [DONE].
func (s *Server) streaming(w http.ResponseWriter, r *http.Request, base string, j *job, e *events, start func(all []*choice) error, emit func(*choice, delta) error, last func(usage)) {
	s.inflight.Add(1)
	defer s.inflight.Add(-1)
	ctx, end := s.mergeDead(r)
	defer end()
	defer s.leaveRooms(j)
	all, err := s.begin(ctx, base, j)
	if err != nil {
		s.giveUp(w, r, err)
		return
	}
	s.orca(w, r, j.rank)
	if start != nil {
		err = start(all)
	}
	if err == nil {
		err = s.run(ctx, j, all, emit)
	} else {
		abort(all)
	}
	if err == nil {
		err = s.handOver(ctx, j, all)
	}
	if err != nil {
		s.release(all)
		e.failure(r, err)
		return
	}
	// A streamed prefill answer of vLLM 0.32 has no kv_transfer_params: its blocks wait for
	// the end of their lease, as in vLLM.
	if j.usage && last != nil {
		last(usageOf(j, all))
	}
	if last != nil {
		e.AddDone()
	}
	_ = e.Send() // the client may be gone
}
