// Package simulate runs recorded requests through the router's stages and
// simulated engines under a virtual clock, and measures what a policy, a
// threshold or another fleet would have made of them.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"net/url"
	"strconv"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/placement/affinity"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// Setup is what a simulated run is made of, apart from the requests.
type Setup struct {
	Fleet sim.Fleet
	decide.Options
	// Speedup makes requests arrive this many times faster (0 means 1). In a closed loop it
	// also divides thinking times.
	Speedup float64
	// ClosedLoop has each turn of a session wait for the answer to the turn before it, and
	// then for its thinking time. A trace without thinking times has the gap between the
	// two arrivals instead. A turn also follows one that failed. The first turn of a
	// session, and what has no session, arrives at its own time. The run keeps all
	// requests in memory.
	ClosedLoop bool
	Seed       uint64
	// Scrape is how old the engines' own load figures may be (default 1 s).
	Scrape time.Duration
	// From and To cut the trace; 0 is open.
	From, To time.Duration
	// Faults are what happens to the engines meanwhile.
	Faults []Fault
	// CountFrom leaves requests out of the result that arrive sooner after the first,
	// under the run's clock.
	CountFrom time.Duration
	// Assume is how many times as long everything is taken to last at the start, before the
	// router has learned (0 means 1).
	Assume float64
	// Constants are the router's; nil are those that were tuned. Objective is what costs are
	// for; with an empty one ForGoodput.
	Constants *cost.Constants
	Objective cost.Aim
	// SlowFactor is the router's health.slow_factor: from how many times as long as its
	// peers on a rank is slow, which then costs more; 0 judges none.
	SlowFactor float64
	// SLO is what a good request keeps.
	TTFT, ITL time.Duration
	// Limits are those of the router, whose Inflight, Queue and Timeout are in force;
	// with those of Busy they make requests wait.
	Limits admission.Limits
	// Tenant says in whose name a request takes turns, and with what weight; nil is one
	// for all. Placed hears of each that has got its place.
	Tenant func(*arrivals.Request) (name string, weight int)
	Placed func(q *arrivals.Request, at time.Duration)
	// routers makes the routers that take requests in turn, for tests; nil for one router.
	routers func(world *virtual.World, fleet []*workers.Worker) routers
}

// router is one of several.
type router interface {
	Ledger() *ledger.Ledger
	// Decoding adds what answers of other routers do on a rank whose blocks have so many
	// tokens.
	Decoding(on *cost.Decoding, k *workers.Rank, blockSize int, now time.Time)
}

// routers are several routers of one fleet. They share the index, which is the same at all of
// them, and what is learned.
type routers interface {
	// take has the next router take a request: it adds what that router knows of the others.
	take(q *decide.Criteria) router
	// tick is called each 10 ms.
	tick()
	// balanced reports whether no ledger has work.
	balanced() error
}

// maxFailures ends a run in which nothing works.
const maxFailures = 1 << 20

// Run runs the requests of a source through the router's stages and
// simulated engines under a virtual clock. The same setup and requests give the
// same result, but for WallS.
func Run(ctx context.Context, src arrivals.Source, s Setup) (*Result, error) {
	_, res, err := play(ctx, src, s)
	return res, err
}

// play is Run, with what ran.
func play(ctx context.Context, src arrivals.Source, s Setup) (*run, *Result, error) {
	began := time.Now()
	r, err := newRun(s)
	if err != nil {
		return nil, nil, err
	}
	defer r.close()
	stop, err := r.begin(src)
	if err != nil {
		return nil, nil, err
	}
	defer stop()
	for ; r.world.Step(); r.steps++ {
		if r.err != nil {
			return nil, nil, r.err
		}
		if r.steps&0xfff == 0 && ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
	}
	if r.err != nil {
		return nil, nil, r.err
	}
	err = r.ledger.Balanced()
	if r.routers != nil {
		err = errors.Join(err, r.routers.balanced())
	}
	if err != nil {
		return nil, nil, fmt.Errorf("simulation ended with work in flight: %w", err)
	}
	res := r.result()
	res.WallS = time.Since(began).Seconds()
	return r, res, nil
}

// begin has the first request arrive, the faults happen, and the router do what it does at times.
// stop ends the reading of the source.
func (r *run) begin(src arrivals.Source) (stop func(), err error) {
	if r.s.ClosedLoop {
		if src, err = r.turns.hold(src, &r.s); err != nil {
			return nil, err
		}
	}
	r.next, stop = iter.Pull2(src)
	if err = r.arrive(); err == nil {
		err = r.expect()
	}
	if err != nil {
		stop()
		return nil, err
	}
	r.every(r.s.Scrape, 0, r.scrape)
	r.every(renewed, settled, func() { r.costs.Renew(r.world.Now()) })
	if r.paces != nil {
		r.every(paced, settled, r.pace)
	}
	if r.routers != nil {
		r.every(10*time.Millisecond, 0, r.routers.tick)
	}
	return stop, nil
}

// run is one simulation in progress.
type run struct {
	s      Setup
	world  *virtual.World
	index  *kvindex.Index
	ledger *ledger.Ledger // of the router that decides
	// routers are the others that take requests in turn; nil for none.
	routers routers
	rng     *rand.PCG
	ranks   []*simRank
	block   int
	split   bool // there are prefill ranks
	list    []*workers.Worker
	// models are the workers of a model. Requests for others go to all: a fleet of one model
	// stands for that of a recording.
	models map[string][]*workers.Worker

	next  func() (*arrivals.Request, error, bool)
	ended bool
	base  time.Duration
	based bool
	open  int
	// coming is when the source's next request arrives; quiet is since when none is open.
	coming, quiet time.Duration
	turns         turns
	steps         int // that the world took
	err           error
	robin         [2]uint64 // sequences of round_robin, of the decode and of the prefill phase
	locals        []uint64
	query         kvindex.Query
	// offloads says that engines have blocks outside their devices; looked is then the
	// prompt that is decided on.
	offloads bool
	looked   kvgroup.Prompt
	decide   decide.Run
	sessions *affinity.Table
	costs    *cost.Learner
	lengths  *outputs.Lengths
	wire     float64 // how many times longer transfers take
	paces    *pace.Judge[*simRank]

	res             Result
	prompt, hits    uint64
	predicted, lost uint64
	regret          float64
	decisions       uint64
	output          uint64
	good            uint64
	last            time.Duration
	ttft, itl, e2e  *hdrhistogram.Histogram
	line            line
}

// simRank is one rank with the router's view of it.
type simRank struct {
	worker *workers.Worker
	rank   *workers.Rank
	eng    *virtual.Rank
	stream *kvstream.Stream
	batch  kvevent.Batch

	meter    *pace.Meter // nil where nobody asks
	computed uint64
	requests uint64
}

func newRun(s Setup) (*run, error) {
	s.Speedup = cmp.Or(max(s.Speedup, 0), 1)
	s.Scrape = cmp.Or(max(s.Scrape, 0), time.Second)
	if len(s.Fleet.Groups) == 0 {
		return nil, errors.New("simulation without engines")
	}
	r := &run{
		s: s, world: virtual.NewWorld(), index: kvindex.New(kvindex.Options{}), ledger: ledger.New(),
		wire: 1, models: map[string][]*workers.Worker{}, sessions: affinity.New(),
		lengths: outputs.New(), costs: cost.NewLearner(cost.Objective{For: cmp.Or(s.Objective, cost.ForGoodput), TTFT: s.TTFT, ITL: s.ITL}),
		rng: rand.NewPCG(s.Seed, 0x9e3779b97f4a7c15), block: s.Fleet.Groups[0].BlockSize,
		// 1 µs to 3 h.
		ttft: hdrhistogram.New(1, 1e10, 3), itl: hdrhistogram.New(1, 1e10, 3), e2e: hdrhistogram.New(1, 1e10, 3),
	}
	if s.SlowFactor > 0 {
		r.paces = pace.NewJudge[*simRank]()
	}
	r.costs.Assume(cmp.Or(max(s.Assume, 0), 1))
	if s.Constants != nil {
		r.costs.Set(*s.Constants)
	}
	r.openLine()
	v := vocab.New()
	number, engines := map[workers.Role]int{}, 0
	for _, g := range s.Fleet.Groups {
		if g.BlockSize != r.block {
			r.close()
			return nil, fmt.Errorf("simulation of engines with blocks of %d and %d tokens: want one size", r.block, g.BlockSize)
		}
		for range g.Count {
			name := string(g.Role) + "-" + strconv.Itoa(number[g.Role])
			w := &workers.Worker{
				Facts: workers.Facts{
					Engine: workers.Sim, Dialect: g.Engine, Role: g.Role,
					Connector: g.Connector, BlockSize: g.BlockSize, KVBlocks: g.Blocks, Models: g.Models(),
				},
				Name: name, URL: &url.URL{Scheme: "http", Host: name}, LoRAs: g.LoRAs, State: &workers.State{},
			}
			w.State.SetCondition(workers.Condition{Health: workers.Healthy})
			r.list = append(r.list, w)
			for _, m := range w.Models {
				r.models[m] = append(r.models[m], w)
			}
			for dp := range g.DP {
				if err := r.add(&g, v, w, engines, dp); err != nil {
					r.close()
					return nil, err
				}
			}
			number[g.Role]++
			engines++
			r.split = r.split || g.Role.CanPrefill()
			r.offloads = r.offloads || g.HostBlocks > 0
		}
	}
	if s.routers != nil {
		r.routers = s.routers(r.world, r.list)
	}
	return r, nil
}

// close frees the index; it is memory only.
func (r *run) close() { _ = r.index.Close() }

func (r *run) add(g *sim.Group, v *vocab.Vocab, w *workers.Worker, index, dp int) error {
	cfg, err := g.RankConfig(v, index, dp, 0)
	if err != nil {
		return err
	}
	slot := uint32(len(r.ranks))
	k := &simRank{
		worker: w, stream: kvstream.New(r.index, kvindex.Rank(slot), r.block),
		rank: &workers.Rank{Slot: slot, WorkerName: w.Name, DP: dp, Label: route.RankLabel(w.Name, dp)},
	}
	if r.paces != nil {
		k.meter = &pace.Meter{}
	}
	cfg.Timing = wire{cfg.Timing, &r.wire}
	cfg.Publish = func(_ engine.Time, events []cache.Event) { r.publish(k, events) }
	if k.eng, err = r.world.Add(cfg); err != nil {
		return err
	}
	w.Ranks = append(w.Ranks, k.rank)
	r.ranks = append(r.ranks, k)
	return r.index.AddRank(kvindex.Rank(slot), k.rank.Label)
}

// publish brings a rank's cache events to the index, as its feed would.
func (r *run) publish(k *simRank, events []cache.Event) {
	b := &k.batch
	b.Events, b.Rank = b.Events[:0], -1
	for _, e := range events {
		if e.Kind == cache.Removed && e.Tier == cache.Device {
			r.res.Evictions += uint64(len(e.Names))
		}
		b.Events = append(b.Events, sockets.Convert(e, r.block))
	}
	k.stream.ApplyUnnumbered(b)
}

// settled is how long no request must be open until judging and learning again changes
// nothing that matters: they forget within minutes.
const settled = 10 * time.Minute

// longGap is from when on a time without requests is worth a word in the result.
const longGap = time.Hour

// every calls f now and each time that a period has passed, until the last request has
// ended, as the router does some things. While no request is open, and has not been for the
// time of rest, it skips to the last call before the next arrival: what a run takes does
// not depend on how long nothing happens.
func (r *run) every(period, rest time.Duration, f func()) {
	f()
	upcoming, ok := r.upcoming()
	if !ok && r.open == 0 {
		return
	}
	now := r.world.Now()
	next := now + period
	if r.open == 0 && now-r.quiet >= rest && upcoming > next {
		next += (upcoming - next - 1) / period * period
	}
	r.world.At(next, func() { r.every(period, rest, f) })
}

// scrape reads the engines' own load figures.
func (r *run) scrape() {
	for _, k := range r.ranks {
		if c := k.eng.Core(); c != nil {
			l := workers.UnknownLoad(time.Time{})
			l.Running, l.Waiting, l.KVUsage = c.Load()
			k.rank.SetLoad(&l)
		} else {
			k.worker.State.SetCondition(workers.Condition{Health: workers.Unhealthy, Reason: "gone"})
		}
	}
	r.line.order.Changed()
	r.turn()
}

// paced is how often ranks' speed is judged.
const paced = time.Second

// pace judges how fast ranks are by what requests show of them, as the router's watch does.
func (r *run) pace() {
	in := make([]pace.Input[*simRank], len(r.ranks))
	for i, k := range r.ranks {
		load := r.ledger.Load(k.rank)
		in[i].Key, in[i].Group, in[i].Answering = k, string(k.worker.Role), load.Answering
		k.meter.Read(r.world.Now(), load.PrefillTokens, &in[i].Reading)
	}
	r.paces.Step(time.Unix(0, 0).Add(r.world.Now()), r.s.SlowFactor, in)
	for _, k := range r.ranks {
		k.rank.SetTimes(r.paces.Times(k))
	}
}

// renewed is how often what was learned is put in force.
const renewed = time.Second

// lastArrival is the latest arrival, with room for what the request takes.
const (
	year        = 365 * 24 * time.Hour
	lastArrival = 250 * year
)

// arrive has the next request of the source arrive at its time.
func (r *run) arrive() error {
	var q *arrivals.Request
	for {
		next, err, ok := r.next()
		if !ok {
			r.ended = true
			return nil
		}
		if err != nil {
			return err
		}
		if q = next; r.s.simulates(q) {
			break
		}
	}
	if !r.based {
		r.base, r.based = q.At, true
	}
	at, err := r.due(q, 0, q.At-r.base)
	if err != nil {
		return err
	}
	r.coming = max(at, r.world.Now())
	r.world.At(r.coming, func() {
		r.route(q)
		if err := r.arrive(); err != nil {
			r.err = err
		}
	})
	return nil
}

// due is when a request arrives that comes so long after a time of the run, before
// Speedup.
func (r *run) due(q *arrivals.Request, since, after time.Duration) (time.Duration, error) {
	at := float64(since) + float64(after)/r.s.Speedup
	if at > float64(lastArrival) {
		return 0, fmt.Errorf("request %d arrives %.0f years after the first; this can simulate %.0f: cut the trace with --from and --to, or raise --arrival-speedup", q.Number+1, at/float64(year), float64(lastArrival)/float64(year))
	}
	return time.Duration(at), nil
}

// simulates reports whether a request of the trace is part of the run.
func (s *Setup) simulates(q *arrivals.Request) bool {
	return q.ISL > 0 && q.At >= s.From && (s.To == 0 || q.At < s.To)
}

// flight is one request on its way.
type flight struct {
	r       *run
	q       *arrivals.Request
	id      string
	model   string // by which it was decided
	tokens  []uint32
	start   time.Duration
	first   time.Duration
	last    time.Duration
	decode  *simRank
	router  router // one of several, else nil
	ledger  *ledger.Ledger
	held    *ledger.Reservation
	made    int
	ran     cost.Running
	counted bool
	chances [2]decide.Chance
	waiter  *admission.Waiter // while it waits
	// asked is what the paths asked of their ranks, and sent when the newest leg was sent;
	// local says that it computes the prompt on the decode rank.
	asked cost.Paths
	sent  time.Duration
	pace  pace.Answer
	local bool
	// compute is the prompt tokens that have to be computed, wherever.
	compute int
	// early requests are not counted.
	early bool
}

// route decides on a request and sends it off.
func (r *run) route(q *arrivals.Request) {
	if gap := r.world.Now() - r.quiet; r.open == 0 && gap > longGap {
		r.res.Gaps++
		if gap.Seconds() > r.res.LongestGapS {
			r.res.LongestGapS, r.res.GapBefore = gap.Seconds(), q.Number+1
		}
	}
	r.open++
	f := &flight{r: r, q: q, id: strconv.Itoa(q.Number), tokens: q.Expand(nil), start: r.world.Now()}
	if f.early = f.start < r.s.CountFrom; !f.early {
		r.res.Requests++
	}
	for i := range f.chances {
		f.chances[i] = decide.Chance{Turn: r.robin[i], Draw: r.rng.Uint64()}
		r.robin[i]++
	}
	if r.line.limited {
		f.wait()
		return
	}
	f.carryOut(f.choose())
}

// choose decides on a request.
func (f *flight) choose() decide.Effects {
	r, q := f.r, f.q
	r.locals = blockhash.Locals(r.locals[:0], f.tokens, r.block, blockhash.Key{})
	r.index.Overlap(r.locals, &r.query)
	if r.offloads {
		r.looked = kvgroup.Prompt{Seq: blockhash.Chain(r.looked.Seq[:0], r.locals), Tokens: len(f.tokens)}
	}
	list := r.models[q.Model]
	if f.model = q.Model; list == nil {
		f.model, list = "", r.list
	}
	facts := api.Facts{Kind: api.Completion, Splittable: true, ISL: q.ISL, Source: route.FromIDs, N: 1, Prompts: 1, MaxTokens: int64(max(q.OSL, 1)), MinTokens: -1}
	facts.ExpectOutput(r.lengths.Expect(f.model, ""))
	criteria := decide.Criteria{
		Model: f.model, Session: q.SessionKey, Chances: f.chances, Costs: r.model(), Waited: r.world.Now() > f.start,
		Facts: facts,
	}
	if r.routers != nil {
		f.router = r.routers.take(&criteria)
		r.ledger = f.router.Ledger()
	}
	f.ledger = r.ledger
	r.decide.Begin(criteria)
	return r.decide.NextPlan(&r.s.Options, list, r.block, r)
}

// model is the cost model in force. Until one is, a run with constants of its own has a model that
// knows nothing else.
func (r *run) model() *cost.Model {
	if m := r.costs.Model(); m != nil || r.s.Constants == nil {
		return m
	}
	return cost.Unknown(*r.s.Constants)
}

// carryOut carries out the newest decision, which is f's.
func (f *flight) carryOut(e decide.Effects) {
	r, d := f.r, &f.r.decide
	d.Move(&e, r.sessions, r.clock())
	if e.ReturnTurn && r.robin[1] == f.chances[1].Turn+1 {
		r.robin[1]--
	}
	p := &d.Plan
	if p.Err != nil {
		f.fail()
		return
	}
	f.asked = p.Paths
	if !f.early {
		r.judge()
	}
	f.decode = r.ranks[d.In.DecodePeers[p.DecodeIndex].Rank.Slot]
	if p.Reason.Degraded() && r.split && !f.early {
		r.res.Degraded++
	}
	claim, prefill := d.Claims()
	f.compute = claim.PrefillTokens + prefill.PrefillTokens // one of them is 0
	f.held = f.ledger.Reserve(f.decode.rank, claim)
	if r.s.Placed != nil {
		r.s.Placed(f.q, r.world.Now())
	}
	if p.Path == route.Local {
		f.answer(nil)
		return
	}
	if !f.early {
		r.res.Remote++
	}
	f.prefill(r.ranks[d.In.PrefillPeers[p.PrefillIndex].Rank.Slot], prefill)
}

// Overlap is for decide.FleetView.
func (r *run) Overlap(_ *workers.Worker, k *workers.Rank, beyond *route.Tiers) int {
	n := r.query.Depth(kvindex.Rank(k.Slot))
	if r.offloads {
		var there route.Tiers
		n, there = r.ranks[k.Slot].stream.Usable(n, r.looked)
		*beyond = there.Scale(r.block, 1)
	}
	return n * r.block
}

// Homes is for decide.FleetView.
func (r *run) Homes(model string, session uint64) affinity.Homes {
	return r.sessions.Homes(model, session, r.clock())
}

// Resident is for decide.FleetView.
func (r *run) Resident(k *workers.Rank) int { return r.index.Blocks(kvindex.Rank(k.Slot)) }

// Ledger is for decide.FleetView.
func (r *run) Ledger() *ledger.Ledger { return r.ledger }

// judge counts what the choice of the rank that computes the prompt was worth.
func (r *run) judge() {
	j, ok := r.decide.Judge()
	if !ok {
		return
	}
	r.decisions++
	r.regret += j.RegretBlocks
	r.lost += uint64(j.MostTokens - j.CachedTokens)
	r.predicted += uint64(j.CachedTokens)
}

// prefill sends the prompt to a prefill rank first.
func (f *flight) prefill(k *simRank, claim ledger.Claim) {
	r := f.r
	held := f.ledger.Reserve(k.rank, claim)
	f.sent = r.world.Now()
	k.meter.Begin(f.sent)
	err := k.eng.Submit(engine.Request{ID: f.id, Tokens: f.tokens, MaxTokens: 1, Pin: true, IgnoreEOS: true, Sink: func(o engine.Output) {
		if o.Finish == engine.Running {
			return
		}
		held.Release()
		k.meter.End(f.sent)
		r.world.At(r.world.Now(), func() {
			if o.Finish != engine.FinishLength {
				f.fail()
				return
			}
			f.count(k, o.Cached+o.External)
			k.meter.First(r.world.Now()-f.sent, f.compute)
			r.took(cost.PrefillLeg, &f.asked.Prefill, r.world.Now()-f.sent)
			f.answer(k.eng.Pull(f.id, o.Pinned))
		})
	}})
	if err != nil {
		held.Release()
		k.meter.End(f.sent)
		f.fail()
	}
}

// count notes who computed the prompt, and how much of it was cached.
func (f *flight) count(k *simRank, cached int) {
	if f.counted || f.early {
		return
	}
	f.counted = true
	f.r.prompt += uint64(f.q.ISL)
	f.r.hits += uint64(cached)
	k.computed += uint64(f.q.ISL - cached)
}

// answer sends the prompt to the decode rank.
func (f *flight) answer(pull *engine.Pull) {
	f.sent, f.local = f.r.world.Now(), pull == nil
	f.pace = pace.NewAnswer(f.decode.meter, f.sent)
	if f.local {
		f.decode.meter.Begin(f.sent)
	}
	err := f.decode.eng.Submit(engine.Request{ID: f.id, Tokens: f.tokens, MaxTokens: max(f.q.OSL, 1), IgnoreEOS: true, Pull: pull, Sink: f.token})
	if err != nil {
		f.unserved()
	}
}

// unserved ends a request of whose answer there was nothing, or not all.
func (f *flight) unserved() {
	if f.local && f.made == 0 {
		f.decode.meter.End(f.sent)
	}
	f.fail()
}

// token takes the decode rank's outputs.
func (f *flight) token(o engine.Output) {
	r := f.r
	if o.HasToken {
		f.made++
		if f.made == 1 {
			f.first = o.At
			f.held.FirstToken()
			f.ran = cost.Running{}
			cached := o.Cached
			if f.local { // else it is what prefill has sent
				cached += o.External
			}
			f.count(f.decode, cached)
			f.record(r.ttft, o.At-f.start)
			if f.local {
				f.decode.meter.End(f.sent)
				f.decode.meter.First(o.At-f.sent, f.compute)
				r.took(cost.LocalLeg, &f.asked.Local, o.At-f.sent)
			} else {
				r.took(cost.TransferLeg, &f.asked.Transfer, o.At-f.sent)
			}
		} else {
			f.record(r.itl, o.At-f.last)
		}
		f.pace.Came(o.At, 1)
		var on cost.Decoding
		if f.ran.Due(f.made) {
			on = decide.DecodingOn(f.ledger, f.decode.rank, r.block)
			if f.router != nil {
				f.router.Decoding(&on, f.decode.rank, r.block, r.clock())
			}
		}
		r.costs.Ran(&f.ran, f.made, o.At, on)
		f.held.Progress(f.made)
		f.last = o.At
	}
	if o.Finish == engine.Running {
		return
	}
	if o.Finish != engine.FinishLength && o.Finish != engine.FinishStop {
		f.unserved()
		return
	}
	f.held.Release()
	f.ended()
	r.costs.Ended(&f.ran)
	r.lengths.Learn(f.model, "", f.made)
	if f.early {
		return
	}
	f.decode.requests++
	r.res.Completed++
	r.output += uint64(f.made)
	r.last = max(r.last, o.At)
	f.record(r.e2e, o.At-f.start)
	mean := time.Duration(0)
	if f.made > 1 {
		mean = (f.last - f.first) / time.Duration(f.made-1)
	}
	if (r.s.TTFT == 0 || f.first-f.start <= r.s.TTFT) && (r.s.ITL == 0 || mean <= r.s.ITL) {
		r.good++
	}
}

// took reports what a leg took to the learner.
func (r *run) took(leg cost.LegKind, w *cost.Work, took time.Duration) {
	if w.Tokens > 0 {
		r.costs.Took(leg, w, took, r.world.Now())
	}
}

func (f *flight) fail() {
	r := f.r
	if f.held != nil {
		f.held.Release()
	}
	f.ended()
	if f.early {
		return
	}
	if r.res.Failed++; r.res.Failed > maxFailures {
		r.err = fmt.Errorf("simulation stopped: %d requests failed", r.res.Failed)
	}
}
