package front

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// choice is one answer in the making.
type choice struct {
	index  int
	id     string
	rank   int
	prompt []uint32
	stream *Stream

	tokens []uint32
	raw    string          // from the last text on to a character that is not whole yet
	text   strings.Builder // what may be shown of the answer
	held   string          // the end of the text, which may be a stop string's head
	finish string          // "" while running
	stop   any             // stop_reason: the stop string, or nil
	cached int
	pinned []int
	die    int // tokens after which the connection dies; -1 = never
}

// delta is what one step adds to a choice.
type delta struct {
	text   string
	tokens []uint32
}

// errPull is a failed KV load under the policy "fail".
var errPull = errors.New("KV load failed")

// begin starts all choices of a job once the decodes of a prefill are there. On
// an error none is left running.
func (s *Server) begin(ctx context.Context, base string, j *job) ([]*choice, error) {
	if err := s.awaitRooms(ctx, j); err != nil {
		return nil, err
	}
	set, _ := s.cfg.Faults.Set()
	var all []*choice
	for pi, p := range j.prompts {
		for n := range j.n {
			c := &choice{index: pi*j.n + n, rank: j.rank, prompt: p, die: -1}
			s.listen(c)
			if s.cfg.Faults.Hit(set.DieRate) {
				c.die = set.DieAfter
			}
			// vLLM names the engine's request after the answer and adds a
			// random suffix.
			c.id = fmt.Sprintf("%s-%s", base, s.id()[:8])
			if len(j.prompts)*j.n > 1 || strings.HasPrefix(base, "cmpl-") {
				c.id = fmt.Sprintf("%s-%d-%s", base, c.index, s.id()[:8])
			}
			q := engine.Request{
				ID: c.id, Tokens: p, MaxTokens: j.max, MinTokens: j.MinTokens, IgnoreEOS: j.IgnoreEOS,
				Key: blockhash.Key{LoRA: j.lora, Salt: j.CacheSalt}, Choice: n, Embed: j.embed,
				Transfer: j.Transfer,
				Pin:      j.Pin || j.Offer != "" || j.rooms != nil || j.LMCache != nil && j.LMCache.Host != "",
			}
			if j.Pulls != nil {
				q.Pull = j.Pulls[pi]
			}
			if j.embed {
				q.MaxTokens = 1
			}
			st, err := s.cfg.Ranks[c.rank].Submit(q)
			if err != nil {
				abort(all)
				if errors.Is(err, engine.ErrTooLong) {
					return nil, badRequest("input_tokens", "%s", err.Error())
				}
				return nil, err
			}
			c.stream = st
			all = append(all, c)
		}
	}
	return all, nil
}

func abort(all []*choice) {
	for _, c := range all {
		if c.finish == "" {
			c.stream.Abort()
		}
	}
}

// run follows all choices to their end and calls emit for each piece, never
// from two goroutines at a time. An error of emit, or the end of ctx, aborts
// what still runs.
func (s *Server) run(ctx context.Context, j *job, all []*choice, emit func(*choice, delta) error) error {
	defer abort(all)
	if len(all) == 1 {
		return s.follow(ctx, j, all[0], emit)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	var first error
	for _, c := range all {
		wg.Go(func() {
			err := s.follow(ctx, j, c, func(c *choice, d delta) error {
				mu.Lock()
				defer mu.Unlock()
				return emit(c, d)
			})
			if err != nil {
				mu.Lock()
				if first == nil {
					first = err
				}
				mu.Unlock()
				cancel()
			}
		})
	}
	wg.Wait()
	return first
}

// errDie is the fault that cuts an answer off.
var errDie = errors.New("connection cut by fault injection")

func (s *Server) follow(ctx context.Context, j *job, c *choice, emit func(*choice, delta) error) error {
	hold := 0 // characters
	for _, w := range j.stops {
		hold = max(hold, utf8.RuneCountInString(w)-1)
	}
	var buf []engine.Output
	var d delta
	for {
		var err error
		if buf, err = c.stream.Next(ctx, buf); err != nil {
			return err
		}
		for _, o := range buf {
			// vLLM counts what a synchronous store brought as cached, but not
			// the tokens that NIXL pulls; those that are pushed it counts.
			if c.cached = o.Cached; j.Pulls == nil || j.Pulls[0].Push || j.Pulls[0].Offer {
				c.cached += o.External
			}
			if o.HasToken {
				c.tokens = append(c.tokens, o.Token)
				d.tokens = append(d.tokens, o.Token)
				if o.Token != vocab.End {
					c.raw += s.cfg.Vocab.Text(o.Token)
				}
				s.speak(c, o.Finish != engine.Running)
				if c.die >= 0 && len(c.tokens) > c.die {
					return errDie
				}
			}
			if cut, word := stopAt(c.held, j.stops); cut >= 0 && len(c.tokens) >= j.MinTokens {
				c.held, c.stop, c.finish = c.held[:cut], word, string(engine.FinishStop)
				if o.Finish == engine.Running {
					c.stream.Stop()
				} else { // it has ended by itself with this token
					c.pinned = o.Pinned
				}
				break
			}
			switch o.Finish {
			case engine.Running:
			case engine.FinishError:
				c.finish = string(o.Finish)
				return fmt.Errorf("%w: %w", errPull, o.Err)
			case engine.FinishStop, engine.FinishLength, engine.FinishAbort:
				c.finish, c.pinned = string(o.Finish), o.Pinned
			}
		}
		show := c.held
		switch {
		case c.finish != "":
		case s.sglang(): // it holds back the whole event
			if begins(show, j.stops) {
				if c.raw == "" {
					continue
				}
				show = "" // not within a character, whose text waits
			}
		default:
			for range hold {
				_, n := utf8.DecodeLastRuneInString(show)
				show = show[:len(show)-n]
			}
		}
		c.held = c.held[len(show):]
		c.text.WriteString(show)
		d.text = show
		if err := emit(c, d); err != nil {
			return err
		}
		d = delta{}
		if c.finish != "" {
			return nil
		}
	}
}

// speak makes text of the tokens that came, but for a character that is not whole
// yet. One that never becomes whole is lost with vLLM and U+FFFD with SGLang.
func (s *Server) speak(c *choice, last bool) {
	text := vocab.Printable(c.raw)
	if strings.HasSuffix(text, "\uFFFD") && !(last && s.sglang()) {
		return
	}
	c.held += text
	c.raw = ""
}

// listen makes a choice's text begin where its prompt's ends. vLLM 0.32 repeats a
// prompt that ends within a character, all of it, once that is whole
// (vllm-project/vllm#48853). Here SGLang only goes on with the character.
func (s *Server) listen(c *choice) {
	tail := s.cfg.Vocab.Decode(c.prompt[max(0, len(c.prompt)-utf8.UTFMax):], true)
	if utf8.ValidString(tail) || !strings.HasSuffix(vocab.Printable(tail), "\uFFFD") {
		return
	}
	if !s.sglang() {
		tail = s.cfg.Vocab.Decode(c.prompt, true)
	} else if i := strings.LastIndexFunc(tail, func(r rune) bool { return r != utf8.RuneError }); i >= 0 {
		_, n := utf8.DecodeRuneInString(tail[i:])
		tail = tail[i+n:]
	}
	c.raw = tail
}

// stopAt finds the first stop string in text.
func stopAt(text string, stops []string) (int, string) {
	at, word := -1, ""
	for _, w := range stops {
		if i := strings.Index(text, w); i >= 0 && (at < 0 || i < at) {
			at, word = i, w
		}
	}
	return at, word
}

// begins reports whether a stop string may begin in a text and end behind it.
func begins(text string, stops []string) bool {
	for _, w := range stops {
		for n := min(len(w)-1, len(text)); n > 0; n-- {
			if strings.HasSuffix(text, w[:n]) {
				return true
			}
		}
	}
	return false
}

// whole runs a job to its end without streaming and returns its choices.
func (s *Server) whole(w http.ResponseWriter, r *http.Request, base string, j *job) ([]*choice, bool) {
	s.inflight.Add(1)
	defer s.inflight.Add(-1)
	ctx, done := s.mergeDead(r)
	defer done()
	defer s.leaveRooms(j)
	all, err := s.begin(ctx, base, j)
	if err == nil {
		err = s.run(ctx, j, all, func(*choice, delta) error { return nil })
	}
	if err == nil {
		err = s.handOver(ctx, j, all)
	}
	if err != nil {
		s.release(all)
		s.giveUp(w, r, err)
		return nil, false
	}
	s.endEarly(j, all)
	if j.Pin && len(all) > 1 { // parameters are returned for one choice only
		s.release(all[1:])
	}
	s.orca(w, r, j.rank)
	return all, true
}

// release frees the pinned blocks of answers that nobody will get.
func (s *Server) release(all []*choice) {
	for _, c := range all {
		if c.pinned != nil {
			s.cfg.Ranks[c.rank].Do(func(core *engine.Rank, now engine.Time) { core.Noted(now, c.id, engine.NoteDone) })
			c.pinned = nil
		}
	}
}

// endEarly is the fault by which the first token of a prefill ends the answer.
func (s *Server) endEarly(j *job, all []*choice) {
	if set, _ := s.cfg.Faults.Set(); j.Pin && s.cfg.Faults.Hit(set.EndRate) {
		s.release(all)
		for _, c := range all {
			c.finish = cmp.Or(set.EndReason, string(engine.FinishStop))
		}
	}
}

// giveUp answers a request that failed before its first byte.
func (s *Server) giveUp(w http.ResponseWriter, r *http.Request, err error) {
	if errors.Is(err, errDie) || r.Context().Err() != nil && !errors.Is(err, ErrDead) {
		panic(http.ErrAbortHandler)
	}
	s.refuse(w, err)
}

// usageOf sums the tokens of the choices; a prompt counts once.
func usageOf(j *job, all []*choice) usage {
	u := poolUsage(j)
	cached := 0
	for _, c := range all {
		u.CompletionTokens += len(c.tokens)
		if c.index%j.n == 0 {
			cached += c.cached
		}
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	u.PromptTokensDetails = &promptDetails{CachedTokens: cached}
	return u
}

type usage struct {
	PromptTokens        int            `json:"prompt_tokens"`
	TotalTokens         int            `json:"total_tokens"`
	CompletionTokens    int            `json:"completion_tokens"`
	PromptTokensDetails *promptDetails `json:"prompt_tokens_details,omitempty"`
}

type promptDetails struct {
	CachedTokens int `json:"cached_tokens"`
}
