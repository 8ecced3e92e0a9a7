// Package prompt finds the token ids of a request's prompt: from the client,
// from a local tokenizer.json, or from an engine's /tokenize. What it cannot
// find is left to an estimate of the length and to approximate routing over
// text.
package prompt

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/request/tokenize"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// maxTokenizers bounds the models that have a tokenizer of their own.
const maxTokenizers = 256

// Options are what a Stage works with.
type Options struct {
	// Mode is "auto", "local", "engine" or "estimate".
	Mode string
	// Path is the tokenizer.json, or the folder that holds it; may be empty.
	Path     string
	Registry *workers.Registry
	Event    func(eventlog.Event)
	// CacheBytes bounds the remembered answers of engines, for each model; 0 for
	// none.
	CacheBytes int64
	// DialTimeout bounds connecting to an engine.
	DialTimeout time.Duration
	// TLS is how https engines are spoken to, asked for by each connection; nil for the
	// system's roots.
	TLS func() *tls.Config
	// Header is what every request to an engine carries.
	Header http.Header
	// Media is what is known of images, sounds and videos; nil knows nothing, and learns
	// nothing.
	Media *media.Table
	// Placeholder returns the token that stands for media in the prompts of a worker's engine; ok
	// is false where that is not known. nil knows none.
	Placeholder func(w *workers.Worker) (token uint32, ok bool)
}

// Stage finds the token ids of prompts. Make it with New, run it with Run.
type Stage struct {
	o         Options
	local     *tokenize.Local // nil without tokenizer.json
	transport *http.Transport
	// timeout bounds one question to an engine.
	timeout time.Duration

	mu     sync.Mutex
	models map[string]*modelTokens
	// pairs are the workers whose chats differ, as last reported.
	pairs []string
}

// modelTokens is the tokenizer of one model.
type modelTokens struct {
	engine     *tokenize.Engine
	nextEngine atomic.Uint64
	// checked uses the local tokenizer for what it was found to agree on with
	// the engines, and for plain text until that is known; nil without one.
	checked atomic.Pointer[tokenize.SelfChecked]
	// agrees is what was found; nil while it is not known.
	agrees atomic.Pointer[tokenize.Agreement]
	// degraded is why the model's prompts are estimated instead of
	// tokenized; nil while they are not.
	degraded atomic.Pointer[degradation]
	rests    rests
	// renders are the engines that were asked in vain where media stand in prompts, and blind
	// says that none answers.
	renders rests
	blind   atomic.Bool
	// trying says that an engine is being asked whether degraded is over.
	trying atomic.Bool
}

// degradation is why prompts are estimated, and since when.
type degradation struct {
	since time.Time
	why   string
}

// New makes a stage. It reads the tokenizer and opens no sockets.
func New(o Options) (*Stage, error) {
	t := &Stage{o: o, timeout: 2 * time.Second, models: map[string]*modelTokens{}}
	// Questions to /tokenize are large bodies both ways; they share nothing
	// with the legs.
	dialer := &net.Dialer{Timeout: o.DialTimeout}
	t.transport = &http.Transport{
		DialContext: dialer.DialContext, DialTLSContext: workers.DialTLS(dialer, o.TLS), MaxIdleConnsPerHost: 64, IdleConnTimeout: 4 * time.Second,
		ResponseHeaderTimeout: 10 * time.Second, DisableCompression: true,
	}
	if o.Path != "" && o.Mode != "estimate" && o.Mode != "engine" {
		l, err := tokenize.Load(o.Path, tokenize.Options{})
		if err != nil {
			return nil, fmt.Errorf("tokens.path (--tokenizer-path): %w", err)
		}
		t.local = l
	}
	return t, nil
}

// Close closes idle connections.
func (t *Stage) Close() { t.transport.CloseIdleConnections() }

// model is the tokenizer of a model, nil when there are too many.
func (t *Stage) model(name string) *modelTokens {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.models[name]
	if m == nil {
		if len(t.models) >= maxTokenizers {
			return nil
		}
		m = &modelTokens{}
		m.engine = tokenize.NewEngine(tokenize.EngineOptions{
			Client: &http.Client{Transport: anyWorker{t, name, m}}, BaseURL: "http://engine", Model: name, Timeout: t.timeout, CacheBytes: t.o.CacheBytes,
		})
		if t.local != nil {
			m.checked.Store(tokenize.NewSelfChecked(t.local, m.engine, tokenize.Agreement{Agreed: []tokenize.Aspect{tokenize.AspectPrompt}}))
		}
		t.models[name] = m
	}
	return m
}

// anyWorker sends a request to a usable worker of a model, in turn.
type anyWorker struct {
	t     *Stage
	model string
	m     *modelTokens
}

// RoundTrip implements http.RoundTripper. A worker that fails or is at rest is no
// reason to go without ids while another one has them.
func (a anyWorker) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Path != "/tokenize" {
		return a.render(req)
	}
	list := a.t.o.Registry.Snapshot().Model(a.model)
	start := int(a.m.nextEngine.Add(1) % uint64(max(1, len(list))))
	last := fmt.Errorf("no usable worker for model %q", a.model)
	for i := range list {
		w := list[(start+i)%len(list)]
		if ok, _ := w.State.Usable(); !ok {
			continue
		}
		if why := a.m.rests.at(w.Name); why != "" {
			last = &trouble{why, tokenize.ErrUnavailable}
			continue
		}
		resp, err := a.t.put(req, w)
		switch {
		case err != nil:
			err = troubleOf(w, err)
		case cannot(resp.StatusCode):
			_ = resp.Body.Close()
			err = &trouble{fmt.Sprintf("%s answers /tokenize with %d", w.Name, resp.StatusCode), tokenize.ErrUnavailable}
		default:
			resp.Body = &watchedBody{resp.Body, func(err error) error {
				if err != nil {
					err = troubleOf(w, err)
					a.t.failed(a.m, a.model, w, err)
				} else if a.m.rests.answered(w.Name) {
					a.t.awake(a.model, w)
				}
				return err
			}}
			return resp, nil
		}
		a.t.failed(a.m, a.model, w, err)
		if req.Context().Err() != nil || req.GetBody == nil {
			return nil, err
		}
		last = err
	}
	return nil, last
}

// Prompt is what the stage found out.
type Prompt struct {
	IDs    []uint32 // nil when they are not known
	ISL    int      // tokens, from Source
	Source route.Source
	// Note says why there are no ids where some were wanted.
	Note string
	// Truncated says that the engine may cut the prompt.
	Truncated bool
	// Media are the images, sounds and videos among IDs, as the engine names them.
	Media []blockhash.Media
	// Has counts the media of the prompt. Where they are not in Media, its text is estimated to
	// have Text tokens, and each of its media the tokens of Each, in their order.
	Has  media.Counts
	Text int
	Each []int
}

// MediaTokens is how many tokens of an estimated prompt are those of media.
func (p *Prompt) MediaTokens() (sum int) {
	for _, n := range p.Each {
		sum += n
	}
	return sum
}

// Estimate is the prompt of a request without a tokenizer: its text by its length, and its media
// by what t has learned of the model's. note says why.
func Estimate(v *api.View, t *media.Table, model, note string) Prompt {
	p := Prompt{Text: v.EstimateTokens(), Source: route.FromEstimate, Note: note}
	p.ISL = p.Text
	if len(v.Media) > 0 {
		p.Has = media.Count(v)
		var sum int
		p.Each, sum = t.Tokens(nil, model, v)
		p.ISL += sum
	}
	return p
}

// Find finds the ids of the request's first prompt. dst is reused for ids that
// the client sent; other ids belong to a cache and must not be changed.
func (t *Stage) Find(ctx context.Context, v *api.View, model string, list []*workers.Worker, dst []uint32) Prompt {
	p := t.find(ctx, v, model, list, dst)
	limit, cut := v.TruncateTo()
	p.Truncated = cut && (limit < 0 || p.ISL > limit)
	if p.Truncated && limit >= 0 {
		// The engine chooses which end is cut, so the ids are of no use.
		return Prompt{ISL: limit, Source: route.FromEstimate, Truncated: true, Note: fmt.Sprintf("the engine cuts the prompt of %d tokens to %d", p.ISL, limit)}
	}
	return p
}

// find finds the ids as if the engine took the whole prompt.
func (t *Stage) find(ctx context.Context, v *api.View, model string, list []*workers.Worker, dst []uint32) Prompt {
	switch v.Prompt {
	case api.PromptIDs, api.PromptIDLists:
		ids := v.AppendIDs(dst[:0], 0)
		return Prompt{IDs: ids, ISL: v.IDs, Source: route.FromIDs}
	case api.PromptNone:
		return Prompt{Source: route.FromNothing}
	}
	estimate := func(note string) Prompt {
		return Estimate(v, t.o.Media, model, note)
	}
	if t.o.Mode == "estimate" {
		return estimate("")
	}
	m := t.model(model)
	if m == nil {
		return estimate(fmt.Sprintf("more than %d models", maxTokenizers))
	}
	if t.o.Mode == "auto" && t.local == nil && !anyFed(list) {
		return estimate("") // no worker publishes KV events: ids would name no block
	}
	if v.Multimodal {
		return t.findMedia(ctx, v, m, model, list)
	}
	ask, err := question(v, list)
	if err != nil {
		return estimate("not tokenized: " + oneLine(err))
	}
	var tk tokenize.Tokenizer = m.engine
	if t.local != nil {
		tk = m.checked.Load()
	}
	res, err := ask(ctx, tk)
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, tokenize.ErrRefused) && !errors.Is(err, tokenize.ErrBadRequest) && !errors.Is(err, tokenize.ErrTooLarge) {
			t.degrade(m, model, reason(err))
		}
		return estimate("tokenizer: " + reason(err))
	}
	if !res.Engine {
		return Prompt{IDs: res.IDs, ISL: res.Tokens, Source: route.FromLocal}
	}
	if !res.Cached { // a kept answer says nothing about the engines of now
		t.recover(m, model)
	}
	return Prompt{IDs: res.IDs, ISL: res.Tokens, Source: route.FromEngine}
}

// errKind: nothing says how an engine makes tokens of such a request.
var errKind = errors.New("this kind of request")

// question is how a prompt is put to a tokenizer.
func question(v *api.View, list []*workers.Worker) (func(context.Context, tokenize.Tokenizer) (tokenize.Result, error), error) {
	chat := v.Body
	switch v.Kind {
	case api.Chat:
	case api.Messages, api.Responses:
		// The engine makes a chat of it, each in its own way; vLLM's is known.
		if slices.ContainsFunc(list, func(w *workers.Worker) bool { return w.WireEngine() != workers.VLLM }) {
			return nil, errKind
		}
		convert := tokenize.ChatOfMessages
		if v.Kind == api.Responses {
			convert = tokenize.ChatOfResponses
		}
		var err error
		if chat, err = convert(v.Body); err != nil {
			return nil, err
		}
	default:
		if v.Prompt != api.PromptText && v.Prompt != api.PromptTexts || len(v.Texts) == 0 {
			return nil, errKind
		}
		return func(ctx context.Context, tk tokenize.Tokenizer) (tokenize.Result, error) {
			special := true
			if raw, ok := v.Get("add_special_tokens"); ok {
				special = string(raw) != "false"
			}
			return tk.Prompt(ctx, v.Text(0), special)
		}, nil
	}
	return func(ctx context.Context, tk tokenize.Tokenizer) (tokenize.Result, error) { return tk.Chat(ctx, chat) }, nil
}

// anyFed reports whether a worker of the list publishes KV events.
func anyFed(list []*workers.Worker) bool {
	return slices.ContainsFunc(list, func(w *workers.Worker) bool { return len(w.Events) > 0 })
}

func (t *Stage) degrade(m *modelTokens, model, why string) {
	was := m.degraded.Load()
	if was != nil && was.why == why {
		return
	}
	now := &degradation{since: time.Now(), why: why}
	if was != nil {
		now.since = was.since
	}
	if m.degraded.CompareAndSwap(was, now) && was == nil {
		t.o.Event(eventlog.Event{
			Kind: "tokenizer_degraded", Severity: eventlog.Warn,
			Text: fmt.Sprintf("prompts of %s are estimated and routed by text, because no engine has tokenized one: %s", model, why),
		})
	}
}

func (t *Stage) recover(m *modelTokens, model string) {
	if m.degraded.Load() == nil {
		return
	}
	if was := m.degraded.Swap(nil); was != nil {
		t.o.Event(eventlog.Event{
			Kind: "tokenizer_recovered",
			Text: fmt.Sprintf("prompts of %s are tokenized again, after %s", model, time.Since(was.since).Round(time.Millisecond)),
		})
	}
}

// Troubles are what is wrong with the stage.
func (t *Stage) Troubles() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []string
	if len(t.pairs) > 0 {
		out = append(out, "prefill and decode workers make different tokens of the same chat: "+strings.Join(t.pairs, "; "))
	}
	for name, m := range t.models {
		if d := m.degraded.Load(); d != nil {
			out = append(out, fmt.Sprintf("prompts of %s are estimated: %s", name, d.why))
		}
		if rest := m.rests.names(); len(rest) > 0 {
			out = append(out, fmt.Sprintf("engines that do not tokenize prompts of %s until a trial succeeds: %s", name, strings.Join(rest, ", ")))
		}
		if rest := m.renders.names(); len(rest) > 0 && m.blind.Load() {
			out = append(out, fmt.Sprintf("prompts of %s with images, sounds or videos are routed by predictions: no engine reports their positions and names (vLLM does with --enable-scale-out): %s", name, strings.Join(rest, ", ")))
		}
		if a := m.agrees.Load(); a != nil && !a.Has(tokenize.AspectPrompt) {
			out = append(out, fmt.Sprintf("the local tokenizer is not used for %s: %s", name, disagreement(a)))
		}
	}
	return out
}

// maxPairs bounds how many pairs of workers are named.
const maxPairs = 8

// differing names the prefill and decode workers of one model that are known to
// make different tokens of the same chat.
func differing(fleet *workers.Snapshot) (out []string) {
	for _, p := range fleet.Workers {
		if !p.Role.CanPrefill() || p.ChatTokens == "" {
			continue
		}
		for _, d := range fleet.Workers {
			if !d.Role.CanDecode() || !p.ChatDiffers(d) || !slices.ContainsFunc(p.Models, d.Serves) {
				continue
			}
			if len(out) == maxPairs {
				return append(out, "and more")
			}
			count := func(w *workers.Worker) string { n, _, _ := strings.Cut(w.ChatTokens, ":"); return n }
			out = append(out, fmt.Sprintf("%s (%s tokens) and %s (%s)", p.Name, count(p), d.Name, count(d)))
		}
	}
	return out
}

// compare reports the pairs of workers whose chats differ, when they change.
func (t *Stage) compare(fleet *workers.Snapshot) {
	now := differing(fleet)
	t.mu.Lock()
	was := t.pairs
	t.pairs = now
	t.mu.Unlock()
	switch {
	case slices.Equal(was, now):
	case len(now) == 0:
		t.o.Event(eventlog.Event{Kind: "chat_tokens_agree", Text: "prefill and decode workers make the same tokens of a chat again"})
	default:
		t.o.Event(eventlog.Event{
			Kind: "chat_tokens_differ", Severity: eventlog.Error,
			Text: "prefill and decode workers make different tokens of the same chat: " + strings.Join(now, "; ") + "; chats do not go from one to the other; give them the same model, --chat-template and engine version",
		})
	}
}

// Run compares the engines of every model with each other, and the local
// tokenizer with them, as they appear, until ctx ends.
func (t *Stage) Run(ctx context.Context) error {
	var g errgroup.Group
	g.SetLimit(4)
	var tried errgroup.Group
	tried.SetLimit(maxTrials)
	defer func() { _ = tried.Wait() }() // they end with ctx, and none has an error
	pending := sync.Map{}
	var seen *workers.Snapshot
	for lasts := true; lasts; lasts = wait.For(ctx, time.Second) {
		fleet := t.o.Registry.Snapshot()
		if fleet != seen {
			seen = fleet
			t.compare(fleet)
		}
		t.trials(ctx, &tried, time.Now())
		names := fleet.Models()
		if t.local == nil {
			names = nil
		}
		for _, name := range names {
			m := t.model(t.o.Registry.Snapshot().Canonical(name))
			if m == nil || m.agrees.Load() != nil {
				continue
			}
			if _, busy := pending.LoadOrStore(name, true); busy {
				continue
			}
			if !g.TryGo(func() error {
				defer pending.Delete(name)
				t.check(ctx, m, name)
				return nil
			}) {
				pending.Delete(name)
			}
		}
	}
	return g.Wait()
}

func (t *Stage) check(ctx context.Context, m *modelTokens, name string) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	a, err := tokenize.SelfCheck(ctx, t.local, m.engine, tokenize.DefaultProbes(name))
	if err != nil {
		return // no engine answers yet; asked again
	}
	m.checked.Store(tokenize.NewSelfChecked(t.local, m.engine, a))
	m.agrees.Store(&a)
	e := eventlog.Event{Kind: "tokenizer_checked", Text: fmt.Sprintf("the local tokenizer gives the ids of the engines of %s", name)}
	if why := disagreement(&a); why != "" {
		e.Severity = eventlog.Warn
		e.Text = fmt.Sprintf("the engines of %s tokenize what the local tokenizer gives other ids for: %s", name, why)
		if !a.Has(tokenize.AspectPrompt) {
			e.Severity, e.Text = eventlog.Error, fmt.Sprintf("the local tokenizer is not that of %s and is not used for it: %s", name, why)
		}
	}
	t.o.Event(e)
}

// disagreement names the probes that gave other ids; empty when none did.
func disagreement(a *tokenize.Agreement) string {
	var out []string
	for _, p := range a.Probes {
		if !p.Agree {
			out = append(out, fmt.Sprintf("%s: %s", p.Name, p.Reason))
		}
	}
	return strings.Join(out, "; ")
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
