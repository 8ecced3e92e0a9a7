package front

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/api"
)

type completionRequest struct {
	sampling
	Prompt   json.RawMessage `json:"prompt"`
	Echo     bool            `json:"echo"`
	Logprobs *int            `json:"logprobs"`
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
func (s *Server) completions(w http.ResponseWriter, r *http.Request, q *completionRequest) *apiError {
	prompts, err := s.promptsOf(q.Prompt)
	if err != nil {
		return err
	}
	if q.MaxTokens == nil { // OpenAI's default for completions
		n := 16
		if len(prompts) > 0 {
			n = max(1, min(n, s.cfg.MaxModelLen-len(prompts[0])))
		}
		q.MaxTokens = &n
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
	writeJSON(w, http.StatusOK, a)
	return nil
}

// handBack is the answer's kv_transfer_params.
func (s *Server) handBack(j *job, all []*choice) any {
	c := all[0]
	switch {
	case j.spec != nil && j.spec.first && len(c.tokens) > 0:
		return map[string]any{"first_tok": c.tokens[0]}
	case j.pin && c.pinned != nil:
		return s.paramsOf(c)
	}
	return nil
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
	head := `data: {"id":` + string(api.AppendString(nil, base)) + `,"object":"text_completion","created":` + unix() + `,"model":` + string(api.AppendString(nil, j.shown)) + `,"choices":[`
	offsets := make([]int, len(j.prompts)*j.n)
	echoed := make([]bool, len(offsets))
	s.streaming(w, r, base, j, e, nil, func(c *choice, d delta) error {
		if q.Echo && !echoed[c.index] {
			echoed[c.index] = true
			d.text = s.cfg.Vocab.Decode(c.prompt, true) + d.text
		}
		e.str(head)
		e.str(`{"index":`)
		e.num(c.index)
		e.str(`,"text":`)
		e.json(d.text)
		e.str(`,"logprobs":`)
		if q.Logprobs != nil {
			if err := e.value(s.completionLogprobs(d.tokens, offsets[c.index])); err != nil {
				return err
			}
			offsets[c.index] += len(d.text)
		} else {
			e.str("null")
		}
		s.tail(e, j, c, d)
		return e.send()
	}, func(u usage) {
		e.str(strings.TrimSuffix(head, "["))
		e.str(`[],"usage":`)
		e.usage(u)
		e.str(`,"system_fingerprint":"` + fingerprint + "\"}\n\n")
	})
}

// tail writes the end of a chunk: reasons, ids, and the usage if every chunk has it.
func (s *Server) tail(e *events, j *job, c *choice, d delta) {
	if c.finish == "" {
		e.str(`,"finish_reason":null`)
	} else {
		e.str(`,"finish_reason":`)
		e.json(c.finish)
	}
	e.str(`,"stop_reason":`)
	if word, ok := c.stop.(string); ok {
		e.json(word)
	} else {
		e.str("null")
	}
	e.str(`,"token_ids":`)
	if j.ReturnTokenIDs {
		e.ids(d.tokens)
	} else {
		e.str("null")
	}
	e.str(`}]`)
	if j.everyUsage {
		e.str(`,"usage":`)
		e.usage(usage{PromptTokens: len(c.prompt), CompletionTokens: len(c.tokens), TotalTokens: len(c.prompt) + len(c.tokens)})
	}
	e.str("}\n\n")
}

func unix() string { return strconv.FormatInt(time.Now().Unix(), 10) }

// streaming runs a job and streams it: start once the engine took it, emit
// for each piece, last for the usage if it was asked for, then [DONE].
func (s *Server) streaming(w http.ResponseWriter, r *http.Request, base string, j *job, e *events, start func(all []*choice) error, emit func(*choice, delta) error, last func(usage)) {
	s.inflight.Add(1)
	defer s.inflight.Add(-1)
	ctx, done := s.mergeDead(r)
	defer done()
	defer s.leaveRooms(j)
	var all []*choice
	err := s.awaitRooms(ctx, j)
	if err == nil {
		all, err = s.submit(base, j)
	}
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
	// A streamed prefill answer has no kv_transfer_params: its blocks wait for
	// the end of their lease, as in vLLM.
	if j.usage && last != nil {
		last(usageOf(j, all))
	}
	if last != nil {
		e.str("data: [DONE]\n\n")
	}
	_ = e.send() // the client may be gone
}
