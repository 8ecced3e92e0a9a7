package prompt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/request/tokenize"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	// failuresToRest are failures in a row after which an engine gets no prompts to
	// tokenize.
	failuresToRest = 3
	// The pause before an engine at rest is tried again doubles between these.
	restMin, restMax = time.Second, 30 * time.Second
	// maxTrials bounds the engines that are tried at one time.
	maxTrials = 16
)

// rests are the engines of one model whose /tokenize failed recently. A request
// would wait for a hanging one up to the time limit, so after some failures in
// a row only trials go to it, which no request waits for.
type rests struct {
	mu     sync.Mutex
	engine map[string]*rest // by worker
}

// rest is what is known of one engine's failures.
type rest struct {
	failures int // in a row
	why      string
	// until is when a trial is due; zero for an engine in use.
	until  time.Time
	pause  time.Duration
	trying bool
}

// failed notes a failure and reports whether the engine is at rest from now on.
func (r *rests) failed(worker, why string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.engine[worker]
	if e == nil {
		if r.engine == nil {
			r.engine = map[string]*rest{}
		}
		e = &rest{}
		r.engine[worker] = e
	}
	e.failures, e.why = e.failures+1, why
	if e.failures < failuresToRest || !e.until.IsZero() {
		return false
	}
	e.sleep(now)
	return true
}

// absent notes that an engine lacks an endpoint, and lets it rest for the longest pause.
func (r *rests) absent(worker, why string, now time.Time) {
	r.failed(worker, why, now)
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.engine[worker]; e != nil {
		e.trying, e.pause, e.until = false, restMax, now.Add(restMax)
	}
}

// sleep begins the next pause.
func (e *rest) sleep(now time.Time) {
	e.pause = min(max(2*e.pause, restMin), restMax)
	e.until = now.Add(e.pause)
}

// answered forgets the failures of an engine, and reports whether it was at
// rest.
func (r *rests) answered(worker string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.engine[worker]
	delete(r.engine, worker)
	return e != nil && !e.until.IsZero()
}

// tried ends a trial. After a good one the engine is used again, but one more
// failure is enough for a longer pause: a trial is a short prompt, and long ones
// may have failed.
func (r *rests) tried(worker string, err error, now time.Time) (awake bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.engine[worker]
	if e == nil || e.until.IsZero() {
		return false
	}
	e.trying = false
	if err != nil {
		e.why = reason(err)
		e.sleep(now)
		return false
	}
	e.until, e.failures = time.Time{}, failuresToRest-1
	return true
}

// at is why an engine is at rest; empty when it is not.
func (r *rests) at(worker string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.engine[worker]; e != nil && !e.until.IsZero() {
		return e.why
	}
	return ""
}

// due reports whether an engine at rest is to be tried, and takes the trial.
func (r *rests) due(worker string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.engine[worker]
	if e == nil || e.until.IsZero() || e.trying || now.Before(e.until) {
		return false
	}
	e.trying = true
	return true
}

// keep forgets the engines that are not of the list.
func (r *rests) keep(list []*workers.Worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.engine, func(name string, _ *rest) bool {
		return !slices.ContainsFunc(list, func(w *workers.Worker) bool { return w.Name == name })
	})
}

// names lists the engines at rest.
func (r *rests) names() (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, e := range r.engine {
		if !e.until.IsZero() {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// trouble is a failure of an engine's /tokenize.
type trouble struct {
	text string
	err  error
}

func (e *trouble) Error() string { return e.text }
func (e *trouble) Unwrap() error { return e.err }

// troubleOf puts a failed exchange in words; a timeout reads differently from a refusal.
func troubleOf(w *workers.Worker, err error) *trouble {
	timeout, ok := errors.AsType[net.Error](err)
	if errors.Is(err, context.DeadlineExceeded) || ok && timeout.Timeout() {
		return &trouble{w.Name + " did not answer /tokenize in time", err}
	}
	return &trouble{fmt.Sprintf("%s: /tokenize: %s", w.Name, oneLine(err)), err}
}

// reason is the shortest text for why there are no ids.
func reason(err error) string {
	if t, ok := errors.AsType[*trouble](err); ok {
		return t.text
	}
	return oneLine(err)
}

// watchedBody is an answer's body that calls done once: with nil at its end, else with the
// error that cut it off.
type watchedBody struct {
	io.ReadCloser
	done func(error) error
}

func (h *watchedBody) Read(p []byte) (int, error) {
	n, err := h.ReadCloser.Read(p)
	if err != nil && h.done != nil {
		done := h.done
		h.done = nil
		if err != io.EOF {
			return n, done(err)
		}
		_ = done(nil)
	}
	return n, err
}

// put sends a request to one engine.
func (t *Stage) put(req *http.Request, w *workers.Worker) (*http.Response, error) {
	try := req.Clone(req.Context())
	if req.GetBody != nil {
		body, err := req.GetBody()
		if err != nil {
			return nil, err
		}
		try.Body = body
	}
	try.URL.Scheme, try.URL.Host = w.URL.Scheme, w.URL.Host
	try.URL.Path = w.URL.Path + req.URL.Path
	try.Host = ""
	maps.Copy(try.Header, t.o.Header)
	if w.APIKey != "" {
		try.Header.Set("Authorization", "Bearer "+w.APIKey)
	}
	return t.transport.RoundTrip(try)
}

// cannot reports whether a status says that the engine cannot tokenize at all, rather
// than that it refuses this prompt.
func cannot(status int) bool { return status >= 400 && !tokenize.Refuses(status) }

// failed notes a failure of a worker's tokenizer.
func (t *Stage) failed(m *modelTokens, model string, w *workers.Worker, why error) {
	if m.rests.failed(w.Name, reason(why), time.Now()) {
		t.o.Event(eventlog.Event{
			Kind: "tokenizer_degraded", Severity: eventlog.Warn, Worker: w.Name,
			Text: fmt.Sprintf("%s gets no prompts of %s to tokenize until a trial succeeds: %s, %d times in a row", w.Name, model, reason(why), failuresToRest),
		})
	}
}

// awake reports that a worker's tokenizer is used again.
func (t *Stage) awake(model string, w *workers.Worker) {
	t.o.Event(eventlog.Event{Kind: "tokenizer_recovered", Worker: w.Name, Text: fmt.Sprintf("%s tokenizes prompts of %s again", w.Name, model)})
}

// AtRest reports whether a worker's /tokenize gets no prompts of some model,
// because it failed recently.
func (t *Stage) AtRest(worker string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.models {
		if m.rests.at(worker) != "" {
			return true
		}
	}
	return false
}

// oneWorker sends a trial to one worker; it ends with ctx.
type oneWorker struct {
	t   *Stage
	w   *workers.Worker
	ctx context.Context
}

// RoundTrip implements http.RoundTripper.
func (o oneWorker) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := o.t.put(req.WithContext(o.ctx), o.w)
	if err != nil {
		return nil, troubleOf(o.w, err)
	}
	return resp, nil
}

// try has one engine tokenize a short prompt.
func (t *Stage) try(ctx context.Context, model string, w *workers.Worker) error {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	e := tokenize.NewEngine(tokenize.EngineOptions{
		Client: &http.Client{Transport: oneWorker{t, w, ctx}}, BaseURL: "http://engine", Model: model, Timeout: t.timeout,
	})
	defer e.Close()
	_, err := e.Prompt(ctx, "a", true)
	if errors.Is(err, tokenize.ErrRefused) {
		return nil // it answers
	}
	return err
}

// trials begins the trials that are due: of engines at rest, and, for models
// whose prompts are estimated, of one other engine, so that the state
// is right before the next request.
func (t *Stage) trials(ctx context.Context, g *errgroup.Group, now time.Time) {
	t.mu.Lock()
	models := maps.Clone(t.models)
	t.mu.Unlock()
	fleet := t.o.Registry.Snapshot()
	for name, m := range models {
		list := fleet.Model(name)
		m.rests.keep(list)
		m.renders.keep(list)
		for _, w := range list {
			if ok, _ := w.State.Usable(); !ok {
				continue
			}
			switch {
			case m.rests.due(w.Name, now):
				if !g.TryGo(func() error {
					err := t.try(ctx, name, w)
					if m.rests.tried(w.Name, err, time.Now()) {
						t.awake(name, w)
						t.recover(m, name)
					}
					return nil
				}) {
					m.rests.untried(w.Name)
				}
			case m.degraded.Load() != nil && m.rests.at(w.Name) == "" && m.trying.CompareAndSwap(false, true):
				if !g.TryGo(func() error {
					defer m.trying.Store(false)
					if err := t.try(ctx, name, w); err == nil {
						t.recover(m, name)
					} else if ctx.Err() == nil {
						t.failed(m, name, w, err)
					}
					return nil
				}) {
					m.trying.Store(false)
				}
			}
		}
	}
}

// untried takes back a trial that did not begin.
func (r *rests) untried(worker string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.engine[worker]; e != nil {
		e.trying = false
	}
}
