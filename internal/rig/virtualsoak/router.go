package virtualsoak

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/router/serving/resumed"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// metrics are those of all seeds: what they count is not looked at.
var metrics = sync.OnceValue(func() *telemetry.Metrics {
	return telemetry.New("", "", func(string) bool { return true })
})

// router is what the router is made of besides what it knows of caches: package router's
// newServed, with this world under it.
type router struct {
	answers  serving.Engine
	decider  *routing.Decider
	legs     *admission.Memory // in progress
	stream   *lifecycle.Stream
	receipts *receipt.Ring
	traffic  traffic.Traffic
	failures watch.Failures
	bodies   *admission.Memory
	outliers *health.Outliers
}

// drawSettings draws what an operator has set.
func (s *stage) drawSettings() {
	c := settings.Default()
	c.Timeouts.Prefill, c.Timeouts.Response, c.Timeouts.Idle = legTimeout, legTimeout, idleTimeout
	c.Timeouts.KVLease = s.group.Lease
	var err error
	if s.settings, err = effective.New(c, nil, 1); err != nil {
		panic(err) // the defaults are good
	}
	for _, k := range []workers.Connector{workers.ConnectorNIXL, workers.ConnectorNIXLPush, workers.ConnectorMooncake} {
		if s.settings.Connectors[k], err = disagg.NewConnector(k, disagg.Options{Rand: s.rng.Uint64, Query: s.query}); err != nil {
			panic(err) // a connector that exists
		}
	}
	policy := func() selector.Policy { return selector.Policies()[s.rng.IntN(len(selector.Policies()))] }
	d := &s.settings.Decisions
	*d = decide.Options{
		Decode: policy(), Prefill: policy(), Weights: selector.DefaultWeights(),
		Rule:     decide.Rule{Threshold: []int{0, 0, 24, 64}[s.rng.IntN(4)], Fallback: decide.FallbackLocal},
		Attempts: 8,
	}
	if s.chance(0.1) {
		d.Attempts = 1 + s.rng.IntN(3)
	}
	budget := plenty
	if s.chance(0.1) {
		budget = s.rng.IntN(5)
	}
	s.allow(budget)
	d.Continuations = []int{0, 1, 4, 4}[s.rng.IntN(4)]
	if s.chance(0.2) {
		d.Weights.Temperature = 0.5
	}
	s.limit()
}

// plenty is a budget for retries that is never used up.
const plenty = 1000

// allow lets so many attempts be retried, ten at most unless there are plenty.
func (s *stage) allow(retries int) {
	s.budget = attempt.Budget{}
	if s.settings.Retry.Budget = plenty; retries < plenty {
		s.settings.Retry.Budget = 0
		for s.budget.Take(s.now(), 0) {
		}
		for range retries {
			s.budget.Return(s.now())
		}
	}
}

// openRouter makes a router that knows nothing.
func (s *stage) openRouter() {
	s.index = kvindex.New(kvindex.Options{MaxRanks: 32})
	s.approx = approx.New(approx.Options{TTL: time.Second, MaxRanks: 32})
	r := &router{bodies: admission.NewMemory(64<<20, nil)}
	s.router = r
	r.outliers = health.NewOutliers(s.registry, s.limits, s.healthEvent)
	r.receipts = receipt.NewRing(receipt.Options{Capacity: 16, Epoch: 1, OnFinish: func(c *receipt.Receipt) { s.running.q.audit(c) }})
	event := func(eventlog.Event) {}
	costs := outcome.New(outcome.Options{Event: event, Fleet: s.registry.Snapshot, Ledger: s.ledger, Decisions: func() *decide.Options { return &s.settings.Decisions }})
	lengths := outputs.New()
	r.stream = (&lifecycle.Consumers{
		Slow: watch.NewSlow(watch.SlowOptions{}), Untrusted: func(uint32) bool { return false }, Ranks: counts{s}, Traffic: &r.traffic, Metrics: metrics(),
		Recompute: watch.NewRecompute(watch.RecomputeOptions{}), Failures: &r.failures, Event: event, Costs: costs, Lengths: lengths,
		Outcome: func(*receipt.Receipt) { s.running.q.outcomes++ },
	}).Stream(lifecycle.Subscriber{lifecycle.Chosen: func(*lifecycle.Event) {
		q := s.running.q
		q.hold(q.call)
		q.sent, q.ready = true, 0
	}})
	r.decider = routing.New(routing.Sources{
		Index: s.index, Predicted: s.approx, Feeds: feeds{s}, Fleet: feeds{s}, Ledger: s.ledger, Learners: costs.Learners, Answers: lengths, Prompts: tokens{s},
		Now:     func() (*effective.Settings, *workers.Snapshot) { return s.settings, s.registry.Snapshot() },
		Readmit: s.last,
	}, 1+s.rng.Uint64()>>1)
	excused := r.outliers
	if s.plant == blameEngines { // what is taken back is taken back elsewhere
		excused = health.NewOutliers(s.registry, s.limits, func(eventlog.Event) {})
	}
	r.legs = admission.NewMemory(1000, nil)
	answers := resumed.New(resumed.Parts{
		Decider: r.decider, Fleet: s.registry.Snapshot, Queue: &s.queue, DoorQueue: admission.NewQueue(0, 0, 0),
		Watched: func(p serving.Planner) serving.Planner { return watched{s, p} },
		Legs: &serving.Legs{
			Transport: engines{s}, Beside: beside{s}, Open: r.legs, Ledger: s.ledger, Outliers: r.outliers,
			Answers: func(_ context.Context, w *workers.Worker) bool { n := s.nodeOf(w); return n.up && !n.hang },
			Repeats: new(attempt.Repeats), Stored: stored.New(1),
			Panicked: func(_ *serving.Call, p any) { s.violate("a leg panics: %v", p) },
		},
		Budget: &s.budget, Outliers: excused, Failures: &r.failures, Tokens: tokens{s}, Bodies: r.bodies, Moves: &s.moves,
	})
	answers.Next = moving{answers.Next, s}
	r.answers = answers
}

// closeRouter ends what it knows.
func (s *stage) closeRouter() {
	_ = s.index.Close() // nothing is mapped that could fail to be given back
	_ = s.approx.Close()
}

// last is for routing.Sources.
func (s *stage) last(w *workers.Worker) {
	if s.plant != leaveEjected {
		s.out.Readmitted++
		s.router.outliers.Last(w)
	}
}

// feeds are what the router knows of caches, by the soak's own feeds.
type feeds struct{ s *stage }

func (f feeds) of(slot uint32) *node {
	for _, n := range f.s.nodes {
		if n.member && n.rank.Slot == slot {
			return n
		}
	}
	return nil
}

// Fed is for routing.Sources.
func (f feeds) Fed(k *workers.Rank) bool {
	n := f.of(k.Slot)
	return n != nil && n.rank == k && !n.silent
}

// Usable is for routing.Sources.
func (f feeds) Usable(id kvindex.Rank, overlap int, p *kvgroup.Prompt, beyond *route.Tiers) (n int) {
	if at := f.of(uint32(id)); at != nil {
		n, *beyond = at.feed.stream.Usable(overlap, *p)
	}
	return n
}

// Naming is for routing.Sources.
func (f feeds) Naming(id kvindex.Rank) (ahead, parts int) {
	if at := f.of(uint32(id)); at != nil {
		ahead = at.feed.stream.Shape().Ahead
	}
	return ahead, 0 // its prompts are text
}

// tokens are those of prompts and texts, by the simulator's tokenizer.
type tokens struct{ s *stage }

// Find is for routing.Sources. A chat's prompt is not in its text.
func (t tokens) Find(_ context.Context, v *api.View, _ string, _ []*workers.Worker, dst []uint32) prompt.Prompt {
	if v.Prompt == api.PromptIDs {
		ids := v.AppendIDs(dst[:0], 0)
		return prompt.Prompt{IDs: ids, ISL: len(ids), Source: route.FromIDs}
	}
	ids := t.s.running.q.whole
	return prompt.Prompt{IDs: ids, ISL: len(ids), Source: route.FromLocal}
}

// Decoder and Text are for resumed.Tokens.
func (tokens) Decoder() func(dst []byte, id uint32) ([]byte, bool) { return decodeToken }

func (tokens) Text(_ context.Context, _ string, _ []*workers.Worker, ids []uint32) (string, error) {
	return tokenizer().Decode(ids, true), nil
}

// counts is what the account counts of ranks.
type counts struct{ s *stage }

func (c counts) Began(k *workers.Rank) {
	q := c.s.running.q
	times := 1
	switch {
	case c.s.plant == loseEvent && c.s.chance(0.05):
		times = 0
	case c.s.plant == doubleEvent && c.s.chance(0.05):
		times = 2
	}
	for range times {
		q.began = append(q.began, k)
	}
}
func (c counts) Failed(*workers.Rank) {}
func (c counts) Left(*workers.Rank)   { c.s.running.q.left++ }
func (c counts) Took(*workers.Rank)   { c.s.running.q.took++ }

// watched looks at what the router decides, and at what comes of it.
type watched struct {
	s    *stage
	next serving.Planner
}

// Plan is for serving.Planner.
func (p watched) Plan(ctx context.Context, c *serving.Call) (serving.Engine, error) {
	s, q := p.s, p.s.running.q
	q.call, q.next, q.noChoice = c, attempt.GiveUp, false
	s.out.Attempts++
	q.tries++
	e, err := p.next.Plan(ctx, c)
	run := &c.Routing.Run
	if g := s.going; g != nil && run.Plan.Err == nil && err == nil && q.chose(g) {
		s.replace()
	}
	if err != nil {
		q.noChoice = true
		if s.plant == keepOut && err == serving.ErrAgain { //nolint:errorlint // as it is
			err = run.Refusal()
		}
		return nil, err
	}
	if s.settings.Bounded || q.ahead {
		q.hold(c)
	}
	if q.ahead {
		if q.ready = 1; run.Plan.Path != route.Local {
			q.ready = 2
		}
	}
	q.ahead = false
	q.resent()
	return planned{s, q, e}, nil
}

// moving is what serves the parts of streams.
type moving struct {
	resumed.Next
	s *stage
}

// Hold is for resumed.Next.
func (m moving) Hold(c *serving.Call, take func(*decide.Run) bool) bool {
	ok := m.Next.Hold(c, take)
	m.s.running.q.ahead = ok
	return ok
}

// planned is an engine that is watched.
type planned struct {
	s    *stage
	q    *request
	next serving.Engine
}

// Do is for serving.Engine.
func (p planned) Do(ctx context.Context, c *serving.Call) (*serving.Answer, error) {
	s, q, run := p.s, p.q, &c.Routing.Run
	q.late = false
	if s.chance(0.3) { // others come between
		q.late = true
		s.pause(ctx, s.between(0, 2*time.Millisecond))
	}
	claim, _ := run.Claims()
	decode := run.In.DecodePeers[run.Plan.DecodeIndex]
	if run.Plan.Path == route.Local {
		s.note("%s: try %d, local on %s (%s), %d cached", q.id, q.tries, decode.Worker.Name, run.Plan.Reason, run.Plan.CachedTokens)
	} else {
		s.out.Remote++
		s.note("%s: try %d, prefill on %s, decode on %s (%s)", q.id, q.tries, run.In.PrefillPeers[run.Plan.PrefillIndex].Worker.Name, decode.Worker.Name, run.Plan.Reason)
	}
	leak := func() {
		if s.plant == skipRelease && s.chance(0.05) {
			s.note("PLANTED: a reservation of %s is not released", q.id)
			s.ledger.Reserve(decode.Rank, claim)
		}
	}
	q.decoding = nil
	a, err := p.next.Do(ctx, c)
	s.judge = true
	if err != nil {
		q.letGo()
		leak()
		q.failed(ctx, err)
		return nil, err
	}
	l := q.decoding
	l.begun = true
	return &serving.Answer{Head: a.Head, Before: a.Before, Whole: a.Whole, Body: held{a.Body, func() {
		s.judge = true
		q.letGo()
		leak()
	}}}, nil
}

// held is a body whose end is watched.
type held struct {
	serving.Body
	end func()
}

func (h held) Close(err error) error {
	err = h.Body.Close(err)
	h.end()
	return err
}

// after is the router's policy, with the bugs that are planted in it.
func (s *stage) after(h *attempt.History, a attempt.Allowance, prefills []*workers.State) attempt.Next {
	next := attempt.AfterFailure(h, a, prefills)
	switch {
	case s.plant == giveUpFallBack && next.Step == attempt.FallBack:
		next.Step = attempt.GiveUp
	case s.plant == keepOut:
		next.Bans = slices.Clone(next.Bans)
		for i := range next.Bans {
			next.Bans[i].Suspect = false
		}
	case s.plant == forgetFailed:
		next.Bans = nil
	case s.plant == resendElsewhere:
		next.Stays = nil
	case s.plant == forgetLost && next.Why == attempt.NoMoreLost:
		forgot := *h
		forgot.Lost = nil
		next = attempt.AfterFailure(&forgot, a, prefills)
	}
	q := s.running.q
	q.lost, q.moves = len(h.Lost), h.Continued
	if q.next, q.why = next.Step, next.Why; next.Step == attempt.FallBack {
		s.out.Fallbacks++
	}
	return next
}

// step ends penalties when they are due, as Outliers.Run does.
func (s *stage) step() {
	if !s.judge {
		return
	}
	s.judge = false
	s.endPenalties()
}

func (s *stage) endPenalties() {
	next, ok := s.router.outliers.Step()
	if at := next.Sub(s.began); ok && (s.due <= s.w.Now() || at < s.due) {
		s.due = at
		s.w.At(at, s.endPenalties)
	}
}

// accounts wants every rank of the fleet to be booked with exactly the requests
// that hold a reservation on it, and so many legs to count as in progress as are: the decode
// leg of a plan from when that begins, a prefill leg while it lasts, and both from before that
// where a stream moves.
func (s *stage) accounts() {
	legs := int64(0)
	for _, n := range s.nodes {
		legs += int64(n.prefills)
		if got := s.ledger.Load(n.rank).Requests; n.member && got != n.decodes+n.prefills {
			s.violate("ledger: %s is booked with %d requests and has %d", n.name, got, n.decodes+n.prefills)
			return
		}
	}
	for q := range s.open {
		if legs += q.ready; q.sent {
			legs++
		}
	}
	if n := s.router.legs.Used(); n != legs {
		s.violate("%d legs count as in progress, there are %d", n, legs)
	}
}

// hold books that the request has a place on the decode rank of its newest plan.
func (q *request) hold(c *serving.Call) {
	if q.holding == nil {
		run := &c.Routing.Run
		q.holding = q.s.nodeOf(run.In.DecodePeers[run.Plan.DecodeIndex].Worker)
		q.holding.decodes++
	}
}

func (q *request) letGo() {
	if q.sent, q.ready = false, 0; q.holding != nil {
		q.holding.decodes--
		q.holding = nil
	}
}

func (s *stage) nodeOf(w *workers.Worker) *node {
	for _, n := range s.nodes {
		if n.worker.State == w.State {
			return n
		}
	}
	panic(fmt.Sprintf("nobody is %s", w.Name))
}
