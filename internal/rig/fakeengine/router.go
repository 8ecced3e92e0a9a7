package fakeengine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/follower"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/router/serving/resumed"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Router is the parts of a router that serve calls, as package router puts them together,
// in front of a fleet of fake engines.
type Router struct {
	Fleet
	Model
	Registry *workers.Registry
	Settings *effective.Settings
	Ledger   *ledger.Ledger
	Open     *admission.Memory // limits.legs
	Bodies   *admission.Memory // limits.body_memory
	Budget   attempt.Budget
	Moves    admission.Moves
	Queue    *admission.Queue
	Outliers *health.Outliers
	// Predicted is what ranks are predicted to hold.
	Predicted *approx.Index
	Stored    *stored.Responses
	Traffic   traffic.Traffic
	Metrics   *telemetry.Metrics
	Engine    serving.Engine
	// Decided, where it is set, is called after each decision, before a leg is sent.
	Decided func(c *serving.Call)
	// Legs are how it sends requests; their Silence is 0.
	Legs *serving.Legs
	// Bootstrap answers GET /query of the bootstrap server of a worker, with connector mooncake.
	Bootstrap func(ctx context.Context, worker string) (string, error)
	// Distrusted, where it is set, is called with a rank that reports less than it is predicted to
	// hold, too often; see [watch.Contradictions].
	Distrusted func(k *workers.Rank)
	// Alive says whether a worker gives a sign of life when the router asks for one.
	Alive func(w *workers.Worker) bool

	t       *testing.T
	decider *routing.Decider
	stream  *lifecycle.Stream
	ring    *receipt.Ring

	mu       sync.Mutex
	events   []eventlog.Event
	outcomes []string
	admitted map[health.Admission]*workers.Worker
	ids      int
}

// New makes a router in front of a fleet such as "2p1d": that many workers to prefill and to
// decode, or aggregated ones ("2a"), all healthy. A word behind that is the connector. When
// the test ends, all must have been given back. It must be called in a synctest bubble, or
// without waiting for anything.
func New(t *testing.T, fleet string, configure ...func(*settings.Config)) *Router {
	t.Helper()
	c := settings.Default()
	c.Routing.Threshold.Tokens, c.Routing.Policy = 1, "round_robin"
	c.Timeouts.Prefill, c.Timeouts.Idle, c.Timeouts.Response = time.Second, 2*time.Second, 5*time.Second
	c.Tokens.Tokenizer = "auto"
	for _, f := range configure {
		f(&c)
	}
	s, err := effective.New(c, nil, 1)
	if err != nil {
		t.Fatal(err)
	}
	r := &Router{
		Model: Model{Text: "Flüsse fließen, and on it goes.", Pace: 10 * time.Millisecond}, Settings: s, t: t,
		Ledger: ledger.New(), Open: admission.NewMemory(admission.LegLimit(c.Limits.Legs), nil), Bodies: admission.NewMemory(c.Limits.BodyMemory, nil),
		Queue: admission.NewQueue(c.Limits.Queue, c.Limits.QueueTimeout, 0), Stored: stored.New(64), Alive: func(*workers.Worker) bool { return true },
		admitted: map[health.Admission]*workers.Worker{},
	}
	r.Serves = r.Model.Answer
	s.Connectors[workers.ConnectorMooncake], err = disagg.NewConnector(workers.ConnectorMooncake, disagg.Options{Query: func(ctx context.Context, server string) ([]byte, error) {
		worker, _, err := net.SplitHostPort(strings.TrimPrefix(server, "http://"))
		if err != nil {
			return nil, err
		}
		text, err := r.Bootstrap(ctx, worker)
		return []byte(text), err
	}})
	if err != nil {
		t.Fatal(err)
	}
	r.Registry = workers.NewRegistry(r.event)
	r.Ledger.OnEase(r.Queue.Wake)
	r.build()
	r.Apply(Specs(t, fleet))
	return r
}

// Specs are the workers of a fleet in words, as New takes it.
func Specs(t *testing.T, fleet string) (specs []workers.Spec) {
	t.Helper()
	fleet, connector, _ := strings.Cut(fleet, " ")
	for _, role := range []struct {
		letter string
		role   workers.Role
	}{{"p", workers.Prefill}, {"d", workers.Decode}, {"a", workers.Aggregated}} {
		number, rest, ok := strings.Cut(fleet, role.letter)
		if !ok {
			continue
		}
		fleet = rest
		n := 0
		if _, err := fmt.Sscan(number, &n); err != nil {
			t.Fatalf("fleet %q: %v", fleet, err)
		}
		for i := range n {
			w := workers.Spec{Facts: workers.Facts{Engine: workers.VLLM, Role: role.role, Models: []string{"m"}, BlockSize: 16, MaxModelLen: 1 << 17}, Name: fmt.Sprintf("%s-%d", role.role, i), DP: 1}
			w.URL = &url.URL{Scheme: "http", Host: w.Name}
			if role.role != workers.Aggregated {
				w.Connector = workers.ConnectorNIXL
			}
			switch connector {
			case "sglang":
				w.Engine, w.Connector, w.Bootstrap = workers.SGLang, workers.ConnectorSGLang, &workers.Bootstrap{Host: w.Name, Port: 8998}
			case "nixl-push":
				w.Connector = workers.ConnectorNIXLPush
			case "mooncake":
				w.Connector = workers.ConnectorMooncake
			case "lmcache":
				w.Connector, w.LMCache = workers.ConnectorLMCache, &workers.LMCacheDecoder{Host: w.Name, InitPorts: []int{1}, AllocPorts: []int{2}}
			}
			specs = append(specs, w)
		}
	}
	return specs
}

// Apply makes specs the fleet. Newcomers are healthy, and serve the model.
func (r *Router) Apply(specs []workers.Spec) {
	r.t.Helper()
	if _, err := r.Registry.Apply("test", specs); err != nil {
		r.t.Fatal(err)
	}
	for _, w := range r.Registry.Snapshot().Workers {
		if w.State.Probed().Health != workers.Healthy {
			w.State.SetCondition(workers.Condition{Health: workers.Healthy})
			_, err := r.Registry.Update(w, workers.Learned{Facts: workers.Facts{Models: []string{"m"}}})
			if k := w.Ranks[0]; err == nil {
				err = r.Predicted.AddRank(kvindex.Rank(k.Slot), k.Number, k.Label)
			}
			if err != nil {
				r.t.Fatal(err)
			}
		}
	}
}

// build puts the parts together, as package router does.
func (r *Router) build() {
	r.Metrics = telemetry.New("test", "", func(string) bool { return true })
	index, predicted := kvindex.New(kvindex.Options{MaxRanks: 64}), approx.New(approx.Options{MaxRanks: 64})
	r.Predicted = predicted
	block := func(w *workers.Worker) int { return r.Settings.BlockOf(w) }
	fleet, err := follower.New(follower.Options{
		Registry: r.Registry, Index: index, Predicted: predicted, Ledger: r.Ledger, BlockOf: block, Event: r.event,
		Feeds: kvfeed.Options{BlockSize: 16, Events: r.event}, Learn: func(context.Context, *workers.Worker) error { return nil }, Gone: func(string) {},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	tokens, err := prompt.New(prompt.Options{Mode: r.Settings.Tokens.Tokenizer, Path: r.Settings.Tokens.Path, Registry: r.Registry, Event: r.event})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		r.Balanced()
		tokens.Close()
		if err := errors.Join(index.Close(), predicted.Close()); err != nil {
			r.t.Error(err)
		}
	})
	r.Outliers = health.NewOutliers(r.Registry, health.OutlierOptions{}, r.event)
	costs := outcome.New(outcome.Options{Objective: r.Settings.Routing.Aim(), Event: r.event, Fleet: r.Registry.Snapshot, Ledger: r.Ledger, Decisions: func() *decide.Options { return &r.Settings.Decisions }})
	lengths := outputs.New()
	r.decider = routing.New(routing.Sources{
		Index: index, Predicted: predicted, Feeds: fleet.Feeds(), Fleet: fleet, Ledger: r.Ledger, Learners: costs.Learners, Answers: lengths, Prompts: tokens, Readmit: r.Outliers.Last,
		Now: func() (*effective.Settings, *workers.Snapshot) { return r.Settings, r.Registry.Snapshot() },
	}, 1)
	failures := new(watch.Failures)
	r.ring = receipt.NewRing(receipt.Options{Capacity: 1 << 10})
	r.stream = (&lifecycle.Consumers{
		Slow: watch.NewSlow(watch.SlowOptions{Fleet: r.Registry.Snapshot}), Untrusted: func(uint32) bool { return false }, Ranks: fleet,
		Traffic: &r.Traffic, Metrics: r.Metrics, Recompute: watch.NewRecompute(watch.RecomputeOptions{Event: r.event}),
		Contradictions: watch.NewContradictions(watch.ContradictionsOptions{
			Removed: func(*workers.Rank) (uint64, bool) { return 0, r.Distrusted != nil }, Distrust: func(k *workers.Rank, _ string) { r.Distrusted(k) },
		}),
		Failures: failures, Event: r.event, Costs: costs, Lengths: lengths,
	}).Stream()
	r.Legs = &serving.Legs{
		Transport: &r.Fleet, Open: r.Open, Ledger: r.Ledger, Outliers: r, Repeats: new(attempt.Repeats), Stored: r.Stored,
		Budget:   &r.Budget,
		Answers:  func(_ context.Context, w *workers.Worker) bool { return r.Alive(w) },
		Panicked: func(_ *serving.Call, p any) { r.event(eventlog.Event{Kind: "panic", Text: fmt.Sprint(p)}) },
	}
	r.Engine = resumed.New(resumed.Parts{
		Decider: r.decider, Fleet: r.Registry.Snapshot, Queue: r.Queue, DoorQueue: admission.NewQueue(0, 0, 0),
		Watched: func(p serving.Planner) serving.Planner { return decided{p, r} },
		Legs:    r.Legs,
		Budget:  &r.Budget, Outliers: r.Outliers, Failures: failures, Tokens: tokens, Bodies: r.Bodies, Moves: &r.Moves,
	})
}

// decided calls Router.Decided.
type decided struct {
	serving.Planner
	r *Router
}

func (d decided) Plan(ctx context.Context, c *serving.Call) (serving.Engine, error) {
	e, err := d.Planner.Plan(ctx, c)
	if f := d.r.Decided; f != nil && err == nil {
		f(c)
	}
	return e, err
}

// Admit is [serving.Health.Admit].
func (r *Router) Admit(w *workers.Worker) (health.Admission, bool) {
	a, ok := r.Outliers.Admit(w)
	if ok {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.admitted[a] = w
	}
	return a, ok
}

// Report is [serving.Health.Report].
func (r *Router) Report(a health.Admission, out health.Outcome) health.Admission {
	again := r.Outliers.Report(a, out)
	if a == (health.Admission{}) { // nothing was admitted
		return again
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.admitted[a]
	if w == nil {
		r.t.Errorf("%s is reported of a worker to which nothing was admitted", out)
		return again
	}
	r.admitted[again] = w
	r.outcomes = append(r.outcomes, fmt.Sprintf("%s: %s", w.Name, out))
	return again
}

// Outcomes are how legs ended for the health of their workers, as "worker: outcome", since
// the last call. Where two legs run beside each other the order is that of the names.
func (r *Router) Outcomes() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.outcomes
	r.outcomes = nil
	slices.Sort(list)
	return strings.Join(list, ", ")
}

func (r *Router) event(e eventlog.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// Events are the texts of the events of a kind so far.
func (r *Router) Events(kind string) (texts []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Kind == kind {
			texts = append(texts, e.Text)
		}
	}
	return texts
}

// Worker is a worker of the fleet.
func (r *Router) Worker(name string) *workers.Worker {
	r.t.Helper()
	w, ok := r.Registry.Snapshot().Worker(name)
	if !ok {
		r.t.Fatalf("there is no worker %s", name)
	}
	return w
}

// Retries is how many retries the budget has granted within its window and not got back. It
// uses the budget up.
func (r *Router) Retries() (n int) {
	for r.Budget.Take(time.Now(), 0) {
		n++
	}
	return 10 - n // the floor
}

// Balanced fails the test unless all that requests held has been given back.
func (r *Router) Balanced() {
	r.t.Helper()
	if err := r.Ledger.Balanced(); err != nil {
		r.t.Errorf("the ledger: %v", err)
	}
	if n := r.Ledger.DoubleReleases(); n > 0 {
		r.t.Errorf("%d reservations were released twice", n)
	}
	if legs, bodies := r.Open.Used(), r.Bodies.Used(); legs != 0 || bodies != 0 {
		r.t.Errorf("%d legs are in progress and %d bytes of bodies are taken", legs, bodies)
	}
	for _, w := range r.Registry.Snapshot().Workers {
		if slot := w.Ranks[0].Slot; !r.Moves.Free(slot, 1) || r.Moves.Waiting(slot) > 0 {
			r.t.Errorf("a place for a continued stream on %s is taken", w.Name)
		}
	}
	for _, what := range r.Wrong() {
		r.t.Error(what)
	}
}

// Ask is a request.
type Ask struct {
	Method, Path, Body string // POST by default
	Header             http.Header
	// Piece, where it is set, is called for each piece before the next one; its error ends the
	// answer, as that of a client would. Beat is called with each comment of Idle, Comment with
	// those of engines before a first token.
	Piece   func(p []byte) error
	Beat    func(words string) error
	Comment func(p []byte)
}

// Got is what a client gets.
type Got struct {
	Status int
	// Body is all of it. Err is the router's own error, in the middle of the answer if Body is
	// not empty.
	Body string
	Err  *api.Error
	Head *upstream.Head // nil without an answer
	// Panic is what a panic was with, nil for none.
	Panic   any
	Receipt *receipt.Receipt
}

// String is the status and the body, or the error.
func (g *Got) String() string {
	text := fmt.Sprintf("%d %s", g.Status, g.Body)
	if g.Err != nil {
		text += fmt.Sprintf(" (%s: %s)", g.Err.Code, g.Err.Message)
	}
	if g.Panic != nil {
		text += fmt.Sprintf(" (panic: %v)", g.Panic)
	}
	return text
}

// Legs are the legs by the receipt, as "worker" or "worker: reason".
func (g *Got) Legs() string {
	var list []string
	for _, l := range g.Receipt.Legs {
		text := l.Worker
		if l.RetryReason != "" {
			text += ": " + l.RetryReason
		}
		list = append(list, text)
	}
	return strings.Join(list, ", ")
}

// Send has a request answered and reads the answer to its end, as the door of the router
// does.
func (r *Router) Send(ctx context.Context, q Ask) *Got {
	if q.Method == "" {
		q.Method = http.MethodPost
	}
	path, _, _ := strings.Cut(q.Path, "?")
	ep, err := api.Lookup(q.Method, path)
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	r.ids++
	id := fmt.Sprintf("r%d", r.ids)
	r.mu.Unlock()
	c := serving.New()
	req, err := http.NewRequest(q.Method, q.Path, http.NoBody)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header = q.Header
	if q.Header == nil {
		req.Header = http.Header{}
	}
	var record lifecycle.Record
	c.Details = serving.Details{
		ID: id, Start: time.Now(), From: rewrite.ClientOf(req), Path: q.Path, Endpoint: ep, Name: "m", Model: "m", Record: &record, Idle: idle{&q},
	}
	d := &c.Routing
	d.Settings, d.Model = r.Settings, "m"
	if q.Body != "" {
		body, ok := api.OwnBody([]byte(q.Body), r.Bodies)
		if !ok {
			r.t.Fatal("no memory for the body")
		}
		c.Body = body
		if err := c.View.Parse(c.Body.B, ep.Kind, api.Limits{}); err != nil {
			r.t.Fatal(err)
		}
	}
	d.UseFleet(r.Registry.Snapshot())
	r.decider.Read(ctx, d, ep, ep.Kind, &c.View)
	record = lifecycle.Record{To: r.stream, Live: r.ring.Begin(c.Start), Routing: d, ID: id, Endpoint: ep, Model: "m", Stream: c.View.Stream, Start: c.Start}
	got := &Got{}
	r.answer(ctx, c, &q, got)
	record.Ended(lifecycle.Outcome{Status: got.Status, Err: got.Err, Took: time.Since(c.Start)})
	got.Receipt, _ = r.ring.Find(record.Live.ID())
	c.Release()
	return got
}

// idle is what a client hears while its stream waits.
type idle struct{ *Ask }

func (i idle) Idle(words string) error {
	if i.Beat == nil {
		return nil
	}
	return i.Beat(words)
}

func (i idle) Comment(p []byte) {
	if i.Ask.Comment != nil {
		i.Ask.Comment(p)
	}
}

// answer serves the call.
func (r *Router) answer(ctx context.Context, c *serving.Call, q *Ask, got *Got) {
	var open *serving.Answer
	var body strings.Builder
	defer func() {
		if got.Panic = recover(); got.Panic != nil && open != nil {
			_ = open.Close(fmt.Errorf("panic: %v", got.Panic))
		}
		if got.Body == "" {
			got.Body = body.String()
		}
	}()
	a, err := r.Engine.Do(ctx, c)
	if err == nil {
		open = a
		got.Status, got.Head = a.Status, a.Head
		err = copied(c, a, q, &body)
		open = nil
		err = a.Close(err)
	} else if f, ok := errors.AsType[*upstream.Failure](err); ok && f.Answer != nil {
		got.Body = string(f.Answer.Body)
	}
	if err != nil {
		got.Err = api.FromError(err)
		if ctx.Err() != nil {
			got.Err = api.Ended(err, true, false, a != nil)
		}
		if f, ok := errors.AsType[*upstream.Failure](err); got.Head == nil && ok && f.Answer != nil {
			got.Status = f.Answer.Status
		} else if got.Head == nil {
			got.Status = got.Err.Status
		}
	}
}

// copied reads an answer.
func copied(c *serving.Call, a *serving.Answer, q *Ask, body *strings.Builder) error {
	if a.Whole != nil {
		body.Write(a.Whole)
		return nil
	}
	body.Write(a.Before)
	along := sse.AcquireHead()
	defer along.Release()
	for {
		p, head, err := a.Next()
		if upstream.AtEnd(err) {
			c.Record.Answer.Learn(along.Scanner.Summary())
			return nil
		}
		if err != nil {
			return err
		}
		if seen := along.Scanner.Feed(p); !head && seen.Events > 0 {
			c.Record.Answer.Piece(time.Now(), seen.Tokens)
		}
		body.Write(p)
		if q.Piece != nil {
			if err := q.Piece(p); err != nil {
				return err
			}
		}
	}
}
