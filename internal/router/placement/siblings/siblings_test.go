package siblings_test

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/rig/virtualnet"
	"github.com/dynctl/dynctl/internal/router/placement/affinity"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stage is routers with the same engines, under a virtual clock.
type stage struct {
	t       *testing.T
	world   *virtual.World
	net     *virtualnet.Net
	ranks   int
	routers []*router
	rates   *access.Store // of the next router
}

// router is one of them. It is its own FleetView: all caches are empty.
type router struct {
	s        *stage
	registry *workers.Registry
	ledger   *ledger.Ledger
	siblings *siblings.Siblings
	port     *virtualnet.Port
	exchange *replicas.Exchange
	learned  []string
	events   []eventlog.Event
	turn     uint64
	down     bool
}

func newStage(t *testing.T, ranks, routers int) *stage {
	s := &stage{t: t, world: virtual.NewWorld(), ranks: ranks}
	s.net = &virtualnet.Net{World: s.world, Rand: rand.New(rand.NewPCG(44, 1)), Least: time.Millisecond, Most: 3 * time.Millisecond}
	for range routers {
		s.boot(replicas.Identity{Fleet: "a", Origin: fmt.Sprint("router-", len(s.routers)), Settings: siblings.Digest([]siblings.Section{{"routing", "kv"}, {"limits", "1"}})})
	}
	return s
}

func (s *stage) now() time.Time { return time.Unix(1_800_000_000, 0).Add(s.world.Now()) }

// boot starts another router.
func (s *stage) boot(self replicas.Identity) *router {
	r := &router{s: s, ledger: ledger.New(), registry: workers.NewRegistry(func(eventlog.Event) {})}
	var specs []workers.Spec
	for i := range s.ranks {
		specs = append(specs, workers.Spec{Name: fmt.Sprintf("w%02d", i), URL: &url.URL{Scheme: "http", Host: fmt.Sprintf("10.0.0.%d:8000", i)}})
	}
	if _, err := r.registry.Apply("test", specs); err != nil {
		s.t.Fatal(err)
	}
	for _, w := range r.registry.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	self.Epoch = s.now()
	r.siblings = siblings.New(siblings.Options{
		Self: self, Fleet: r.registry.Snapshot, Ledger: r.ledger, Clock: s.now, Rates: s.rates, Event: func(e eventlog.Event) { r.events = append(r.events, e) },
		Learned: func(id, worker, tenant string) {
			if k := id + " " + worker + " " + tenant; !slices.Contains(r.learned, k) {
				r.learned = append(r.learned, k)
			}
		},
	})
	r.port = s.net.Port()
	x, err := r.siblings.Join(r.port)
	if err != nil {
		s.t.Fatal(err)
	}
	r.exchange = x
	var step, watch func()
	step = func() {
		if !r.down {
			s.world.At(s.world.Now()+x.Step().Sub(s.now()), step)
		}
	}
	watch = func() {
		if !r.down {
			r.siblings.Watch()
			s.world.At(s.world.Now()+replicas.Heartbeat, watch)
		}
	}
	step()
	watch()
	s.routers = append(s.routers, r)
	return r
}

// kill ends a router as kill -9 does.
func (r *router) kill() {
	r.down = true
	_ = r.port.Close()
}

func (s *stage) run(d time.Duration) { s.world.Run(s.world.Now() + d) }

func (r *router) Overlap(*workers.Worker, *workers.Rank, *route.Tiers) int { return 0 }
func (r *router) Resident(*workers.Rank) int                               { return 0 }
func (r *router) Ledger() *ledger.Ledger                                   { return r.ledger }
func (r *router) Homes(string, uint64) affinity.Homes                      { return affinity.Homes{} }

var options = &decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights(), Attempts: 1}

// decide decides a cold prompt. The caller releases the run.
func (r *router) decide(alone bool) *decide.Run {
	r.s.t.Helper()
	run := r.tryDecide(alone)
	if run.Plan.Err != nil {
		r.s.t.Fatal(run.Plan.Err)
	}
	return run
}

func (r *router) tryDecide(alone bool) *decide.Run { return r.tryPrompt(2000, alone) }

// tryPrompt decides a cold prompt of some tokens.
func (r *router) tryPrompt(tokens int, alone bool) *decide.Run {
	q := decide.Criteria{Facts: api.Facts{Kind: api.Completion, ISL: tokens, Source: route.FromIDs, MaxTokens: 100}}
	q.Chances[0].Turn = r.turn
	r.turn++
	if !alone {
		q.Siblings = r.siblings.Look(r.s.now())
	}
	var run decide.Run
	run.Begin(q)
	run.NextPlan(options, r.registry.Snapshot().Workers, 16, r)
	return &run
}

// serve decides a cold prompt and reserves its rank.
func (r *router) serve(alone bool) (rank *workers.Rank, v *ledger.Reservation) {
	run := r.decide(alone)
	defer run.Release()
	rank = run.In.DecodePeers[run.Plan.DecodeIndex].Rank
	claim, _ := run.Claims()
	return rank, r.ledger.Reserve(rank, claim)
}

// sees is the candidate for a rank in a router's next decision.
func (r *router) sees(label string) decision.Candidate {
	run := r.decide(false)
	defer run.Release()
	i := slices.IndexFunc(run.In.Decode.Candidates, func(c decision.Candidate) bool { return c.Rank == label })
	return run.In.Decode.Candidates[i]
}

func (r *router) kinds() (list []string) {
	for _, e := range r.events {
		list = append(list, e.Kind)
	}
	return list
}

// TestDecisionsSeeSiblings: what one router has in flight is in another's candidates within
// the rhythm, with its age, and ends with the request. What a receipt shows of it is there.
func TestDecisionsSeeSiblings(t *testing.T) {
	s := newStage(t, 4, 3)
	a, b := s.routers[0], s.routers[1]
	s.run(2 * time.Second)
	rank, v := a.serve(false)
	if c := b.sees(rank.Label); c.ActiveRequests != 0 {
		t.Fatalf("before any message: %+v", c)
	}
	s.run(replicas.Pace + 3*time.Millisecond)
	c := b.sees(rank.Label)
	own := a.ledger.Load(rank)
	want := decision.Siblings{SiblingRequests: 1, SiblingPrefillTokens: 2000, SiblingDecodeBlocks: int32(own.DecodeBlocks), SiblingFreshTokens: int32(own.Fresh), SiblingAgeMS: c.SiblingAgeMS}
	if c.Siblings != want || c.ActiveRequests != 1 || c.PrefillTokens != 2000 || c.DecodeBlocks != own.DecodeBlocks || c.CachedBlocks != own.CachedBlocks || c.FreshTokens != own.Fresh {
		t.Errorf("%+v, want %+v in it", c, want)
	}
	if age := time.Duration(c.SiblingAgeMS) * time.Millisecond; age < time.Millisecond || age > replicas.Heartbeat+4*time.Millisecond {
		t.Errorf("age %v", age)
	}
	if c := a.sees(rank.Label); c.SiblingRequests != 0 || c.ActiveRequests != 1 {
		t.Errorf("the router's own work comes back to it: %+v", c)
	}
	run := b.decide(false)
	defer run.Release()
	var d decision.Decision
	run.Plan.Fill(&d, &run.In, decision.Kept)
	if len(d.Decode.Candidates) != 4 || !slices.ContainsFunc(d.Decode.Candidates, func(c decision.Candidate) bool { return c.SiblingRequests == 1 }) {
		t.Errorf("the receipt shows %+v", d.Decode.Candidates)
	}
	v.Release()
	s.run(replicas.Pace + 3*time.Millisecond)
	if c := b.sees(rank.Label); c.ActiveRequests != 0 || c.SiblingAgeMS == 0 {
		t.Errorf("after the end: %+v", c)
	}
}

// TestKilledRouter: the work of a router that died is gone within the lifetime, also for
// decisions that no message wakes, and a router without others decides as one alone.
func TestKilledRouter(t *testing.T) {
	s := newStage(t, 4, 2)
	a, b := s.routers[0], s.routers[1]
	s.run(2 * time.Second)
	rank, _ := a.serve(false)
	s.run(2 * replicas.Pace)
	a.kill()
	if c := b.sees(rank.Label); c.SiblingRequests != 1 {
		t.Fatalf("%+v", c)
	}
	s.run(replicas.Lifetime)
	if c := b.sees(rank.Label); c.ActiveRequests != 0 || c.Siblings != (decision.Siblings{}) {
		t.Errorf("after its lifetime: %+v", c)
	}
	run := b.decide(false)
	defer run.Release()
	if run.In.Decode.Siblings != nil {
		t.Errorf("alone: %+v", run.In.Decode.Siblings)
	}
	s.run(time.Second)
	if got := b.kinds(); !slices.Contains(got, "replica_found") || !slices.Contains(got, "replica_lost") {
		t.Errorf("events %q", got)
	}
	s.boot(replicas.Identity{Fleet: "a", Origin: "router-0"})
	s.run(time.Second)
	if got := b.kinds(); !slices.Contains(got, "replica_back") {
		t.Errorf("events %q", got)
	}
}

// TestHerding: four routers with equal views that decide one cold prompt each at one moment
// spread them over idle ranks as a random choice does; each for itself, all take the same
// rank.
func TestHerding(t *testing.T) {
	for _, c := range []struct {
		alone       bool
		least, most float64
	}{{alone: true, least: 4, most: 4}, {least: 1, most: 1.4}} {
		s := newStage(t, 16, 4)
		s.run(2 * time.Second)
		const rounds = 1000
		sum := 0
		for range rounds {
			piles, largest := map[string]int{}, 0
			for _, r := range s.routers {
				run := r.decide(c.alone)
				label := run.In.DecodePeers[run.Plan.DecodeIndex].Rank.Label
				run.Release()
				piles[label]++
				largest = max(largest, piles[label])
			}
			sum += largest
		}
		mean := float64(sum) / rounds
		t.Logf("alone %v: the largest pile is %.3f on average", c.alone, mean)
		if mean < c.least || mean > c.most {
			t.Errorf("alone %v: the largest pile is %.3f on average, want %v to %v", c.alone, mean, c.least, c.most)
		}
	}
}

// TestOnlySiblingsBusy: a sibling that claims that every rank is busy is not believed where
// engines report that they are idle, and is again when they are not.
func TestOnlySiblingsBusy(t *testing.T) {
	s := newStage(t, 4, 1)
	b := s.routers[0]
	liar, err := replicas.NewExchange(replicas.Identity{Fleet: "a", Origin: "liar", Epoch: s.now()}, s.net.Port(), s.now, func(into []replicas.Row) []replicas.Row {
		for i := range s.ranks {
			into = append(into, replicas.Row{Rank: replicas.RankOf(fmt.Sprintf("http://10.0.0.%d:8000", i), 0), Load: replicas.Load{Requests: replicas.MaxAmount, Answering: 7, PrefillTokens: replicas.MaxAmount}})
		}
		return into
	}, replicas.More{})
	if err != nil {
		t.Fatal(err)
	}
	var step func()
	step = func() { s.world.At(s.world.Now()+liar.Step().Sub(s.now()), step) }
	step()
	ranks := b.registry.Snapshot().Ranks
	report := func(running int) {
		for _, k := range ranks {
			l := workers.UnknownLoad(s.now())
			l.Running, l.Waiting = running, 0
			k.SetLoad(&l)
		}
	}
	report(0)
	s.run(time.Second)
	if c := b.sees("w00/dp0"); c.ActiveRequests != replicas.MaxAmount {
		t.Fatalf("one report is not enough to disbelieve: %+v", c)
	}
	for range 4 {
		report(0)
		s.run(time.Second)
	}
	if c := b.sees("w00/dp0"); c.ActiveRequests != 0 || c.Siblings != (decision.Siblings{}) {
		t.Errorf("an idle engine: %+v", c)
	}
	if n := len(slices.DeleteFunc(b.kinds(), func(k string) bool { return k != "replica_disagrees" })); n != 4 || len(b.siblings.Status().Ignored) != 4 {
		t.Errorf("events %q, status %+v", b.kinds(), b.siblings.Status())
	}
	report(5)
	s.run(time.Second)
	if c := b.sees("w00/dp0"); c.ActiveRequests != replicas.MaxAmount || !slices.Contains(b.kinds(), "replica_agrees") {
		t.Errorf("a busy engine: %+v, events %q", c, b.kinds())
	}
}

// TestWaitingForPrefill: requests that wait on a rank while their prompt is computed
// elsewhere count although the engine knows nothing of them yet.
func TestWaitingForPrefill(t *testing.T) {
	s := newStage(t, 2, 2)
	a, b := s.routers[0], s.routers[1]
	s.run(2 * time.Second)
	rank := a.registry.Snapshot().Ranks[1]
	defer a.ledger.Reserve(rank, ledger.Claim{LoadTokens: 4000, ContextTokens: 4000, BlockSize: 16}).Release()
	for range 10 {
		s.run(time.Second)
		l := workers.UnknownLoad(s.now())
		l.Running, l.Waiting = 0, 0
		b.registry.Snapshot().Ranks[1].SetLoad(&l)
	}
	if c := b.sees(rank.Label); c.SiblingRequests != 1 || c.DecodeBlocks != 250 {
		t.Errorf("%+v", c)
	}
}

// TestStrangers: a router of another fleet, one with the same name, and one with other
// settings are reported once each; only the last one's work counts.
func TestStrangers(t *testing.T) {
	s := newStage(t, 4, 1)
	b := s.routers[0]
	foreign := s.boot(replicas.Identity{Fleet: "b", Origin: "elsewhere"})
	s.run(time.Millisecond)
	twin := s.boot(replicas.Identity{Fleet: "a", Origin: "router-0"})
	other := s.boot(replicas.Identity{Fleet: "a", Origin: "other", Settings: siblings.Digest([]siblings.Section{{"routing", "random"}, {"limits", "1"}})})
	for _, r := range []*router{foreign, twin, other} {
		r.serve(true)
	}
	s.run(3 * time.Second)
	kinds := b.kinds()
	for _, k := range []string{"replica_other_fleet", "replica_same_name", "replica_settings_differ", "replica_found"} {
		if n := len(slices.DeleteFunc(slices.Clone(kinds), func(s string) bool { return s != k })); n != 1 {
			t.Errorf("%d events %s in %q", n, k, kinds)
		}
	}
	if c := b.sees("w00/dp0"); c.SiblingRequests != 1 {
		t.Errorf("%+v", c)
	}
	other.siblings.SetSettings(siblings.Digest([]siblings.Section{{Name: "routing", Text: "kv"}, {Name: "limits", Text: "1"}}))
	s.run(2 * replicas.FullEvery)
	if st := b.siblings.Status(); st.Differs[0] != "" {
		t.Errorf("after a reload: %+v", st)
	}
	b.siblings.SetSettings(siblings.Digest([]siblings.Section{{Name: "routing", Text: "random"}, {Name: "limits", Text: "1"}}))
	st := b.siblings.Status()
	if st.Live() != 1 || len(st.Differs) != 1 || st.Differs[0] != "routing" || st.Foreign == 0 || st.SameOrigin == 0 {
		t.Errorf("%+v", st)
	}
}

// TestFleetChanges: the work on a rank is seen when the rank joins, and forgotten with it;
// ranks that a router does not know count nothing.
func TestFleetChanges(t *testing.T) {
	s := newStage(t, 2, 1)
	b := s.routers[0]
	s.ranks = 5
	a := s.boot(replicas.Identity{Fleet: "a", Origin: "bigger"})
	for _, k := range a.registry.Snapshot().Ranks {
		defer a.ledger.Reserve(k, ledger.Claim{PrefillTokens: 10}).Release()
	}
	s.run(3 * time.Second)
	if c := b.sees("w01/dp0"); c.SiblingRequests != 1 {
		t.Errorf("a rank that both know: %+v", c)
	}
	if st := b.siblings.Status(); st.Origins[0].Strange != 3 {
		t.Errorf("%+v", st.Origins[0])
	}
	if _, err := b.registry.Apply("more", []workers.Spec{{Name: "late", URL: &url.URL{Scheme: "http", Host: "10.0.0.4:8000"}}}); err != nil {
		t.Fatal(err)
	}
	s.run(2 * replicas.FullEvery)
	if c := b.sees("late/dp0"); c.SiblingRequests != 1 || c.SiblingPrefillTokens != 10 {
		t.Errorf("a rank that joined, under another name: %+v", c)
	}
}

// TestNoSiblingsCostNothing: a router without others allocates nothing for them, and one with
// others two values.
func TestNoSiblingsCostNothing(t *testing.T) {
	var none *siblings.Siblings
	now := time.Now()
	var c decision.Candidate
	if n := testing.AllocsPerRun(100, func() { _ = none.Look(now) }); n != 0 {
		t.Errorf("%v allocations without siblings", n)
	}
	s := newStage(t, 4, 2)
	s.run(time.Second)
	b := s.routers[1]
	k := b.registry.Snapshot().Ranks[0]
	now = s.now()
	b.siblings.Look(now)
	if n := testing.AllocsPerRun(100, func() { s := b.siblings.Look(now); s.Add(&c, k, 8); _ = s.Choice() }); n > 2 {
		t.Errorf("%v allocations with siblings", n)
	}
}

// TestLimitOfRanks: four routers that all have more requests than the ranks may take exceed the
// limit of a rank by three at most, and use all of it; one alone may use all of it, too.
func TestLimitOfRanks(t *testing.T) {
	was := options.Busy
	options.Busy.Requests = 10
	defer func() { options.Busy = was }()
	for _, busy := range []int{4, 1} {
		s := newStage(t, 2, 4)
		s.run(2 * time.Second)
		most := map[string]int{}
		count := func() {
			for _, k := range s.routers[0].registry.Snapshot().Ranks {
				sum := 0
				for _, r := range s.routers {
					for _, own := range r.registry.Snapshot().Ranks {
						if own.Label == k.Label {
							sum += r.ledger.Load(own).Requests
						}
					}
				}
				most[k.Label] = max(most[k.Label], sum)
			}
		}
		for range 3000 {
			for _, r := range s.routers[:busy] {
				if run := r.tryDecide(false); run.Plan.Err == nil {
					claim, _ := run.Claims()
					r.ledger.Reserve(run.In.DecodePeers[run.Plan.DecodeIndex].Rank, claim)
				}
			}
			count()
			s.run(time.Millisecond)
		}
		for label, n := range most {
			if n < 10 || n > 10+busy-1 {
				t.Errorf("%d routers: %d requests on %s, limit 10", busy, n, label)
			}
		}
		t.Logf("%d routers: %v", busy, most)
	}
}

// drain is what the admin API does.
func (r *router) drain(name string, drain int) {
	w, _ := r.registry.Snapshot().Worker(name)
	w.State.SetDraining(drain != replicas.Resumed)
	r.siblings.Order(w, drain)
}

func (r *router) draining(name string) bool {
	w, _ := r.registry.Snapshot().Worker(name)
	return w.State.Draining()
}

// TestOrders: an operator's drain is obeyed by all routers, the latest word counts whatever
// the clock of the router that it came to, it outlives that router, and a router that starts
// obeys it, too. A worker that left and came back is another one.
func TestOrders(t *testing.T) {
	s := newStage(t, 3, 3)
	s.run(time.Second)
	a, b, c := s.routers[0], s.routers[1], s.routers[2]
	soon := replicas.Pace + 3*time.Millisecond
	a.drain("w01", replicas.Drained)
	s.run(soon)
	if !b.draining("w01") || !c.draining("w01") || b.draining("w00") {
		t.Fatal("a drain is not obeyed")
	}
	if b.sees("w01/dp0").KeptOut == "" {
		t.Error("a rank that drains can be chosen")
	}
	a.kill()
	s.run(5 * time.Second)
	d := s.boot(replicas.Identity{Fleet: "a", Origin: "late"})
	s.run(time.Second)
	if !b.draining("w01") || !d.draining("w01") {
		t.Error("the drain ended with the router that it came to, or a new one does not know it")
	}
	c.drain("w01", replicas.Resumed)
	s.run(soon)
	if b.draining("w01") || d.draining("w01") {
		t.Error("the worker takes no requests again")
	}
	s.run(3 * time.Second)
	if b.draining("w01") || c.draining("w01") || d.draining("w01") {
		t.Error("the older word came back")
	}
	if n := len(slices.DeleteFunc(b.kinds(), func(k string) bool { return k != "worker_draining" && k != "worker_resumed" })); n != 2 {
		t.Errorf("events %q", b.kinds())
	}
}

// TestOrderUnderLoss: with half of all messages lost, doubled and late, every router obeys the
// last of many words within a few full states.
func TestOrderUnderLoss(t *testing.T) {
	s := newStage(t, 2, 3)
	s.net.Loss, s.net.Double, s.net.Most = 0.5, 0.3, 200*time.Millisecond
	for i := range 20 {
		s.routers[i%3].drain("w00", i%2)
		s.run(130 * time.Millisecond)
	}
	s.run(12 * replicas.FullEvery)
	for _, r := range s.routers {
		if !r.draining("w00") {
			t.Errorf("%+v does not obey the last word", r.siblings.Status().Self)
		}
	}
}

// TestStored: other routers learn which worker has a response and whose it is, also one
// that missed the first message; ids of workers that it does not know mean nothing to it.
func TestStored(t *testing.T) {
	s := newStage(t, 2, 2)
	s.run(time.Second)
	a, b := s.routers[0], s.routers[1]
	a.siblings.Keeps("resp_1", "w01", "team")
	a.siblings.Keeps("resp_2", "nobody", "team")
	s.run(replicas.Heartbeat + 3*time.Millisecond)
	s.net.Loss = 1
	a.siblings.Keeps("resp_3", "w00", "")
	s.run(replicas.FullEvery)
	s.net.Loss = 0
	s.run(2 * replicas.FullEvery)
	if want := []string{"resp_1 w01 team", "resp_3 w00 "}; !slices.Equal(b.learned, want) || len(a.learned) > 0 {
		t.Errorf("%q and %q, want %q and none", b.learned, a.learned, want)
	}
	for i := range 5000 {
		a.siblings.Keeps(fmt.Sprint("many_", i), "w01", "t")
	}
	s.run(10 * time.Second)
	if n := len(b.learned); n < 1000 || n > 1100 {
		t.Errorf("%d learned of a flood, want those that are kept for siblings", n)
	}
}

// TestEjected: an ejection at one router is a hint at the others while it lasts, and their own
// state of the worker stays.
func TestEjected(t *testing.T) {
	s := newStage(t, 2, 2)
	s.run(time.Second)
	a, b := s.routers[0], s.routers[1]
	at := func(r *router, name string) *workers.Worker { w, _ := r.registry.Snapshot().Worker(name); return w }
	at(a, "w01").State.SetEjection(&workers.Ejection{Since: s.now(), Until: s.now().Add(time.Minute)})
	s.run(replicas.FullEvery + replicas.Pace)
	if !b.siblings.Ejected(at(b, "w01")) || b.siblings.Ejected(at(b, "w00")) || a.siblings.Ejected(at(a, "w01")) {
		t.Error("no hint, or one of another worker or of the router's own ejection")
	}
	if ok, _ := at(b, "w01").State.Usable(); !ok {
		t.Error("it is ejected on hearsay")
	}
	at(a, "w01").State.SetEjection(nil)
	s.run(replicas.FullEvery + replicas.Pace)
	if b.siblings.Ejected(at(b, "w01")) {
		t.Error("the hint stays")
	}
}

// TestRates: what a key lets through at one router is taken out of its rate at the others, once,
// however often the message arrives, and not what it let through before this router started.
func TestRates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.yaml")
	secret := "dynctl_key-0123456789abcdef0123456789"
	if err := os.WriteFile(path, fmt.Appendf(nil, "keys:\n  - {name: k, sha256: %x, rate: 600}\n", sha256.Sum256([]byte(secret))), 0o600); err != nil {
		t.Fatal(err)
	}
	s := newStage(t, 1, 0)
	s.net.Double = 0.5
	boot := func(name string) (*router, func() int) {
		store, err := access.NewStore(access.Options{Path: path, Event: func(eventlog.Event) {}, Loaded: func(string) {}})
		if err != nil {
			t.Fatal(err)
		}
		s.rates = store
		r := s.boot(replicas.Identity{Fleet: "a", Origin: name})
		return r, func() (n int) { // takes all that there is, in a second
			for range 20 {
				for store.Find(secret).Take(s.now()) == 0 {
					n++
				}
				s.run(50 * time.Millisecond)
			}
			return n
		}
	}
	_, takeA := boot("a")
	_, takeB := boot("b")
	s.run(2 * time.Second)
	if got := takeA(); got < 100 || got > 112 {
		t.Errorf("%d requests of a key that is used here only, want its burst of 100 and the rate of a second", got)
	}
	if got := takeB(); got > 12 {
		t.Errorf("%d requests at the other router, want what the rate brings back in a second", got)
	}
	s.run(30 * time.Second)
	_, takeC := boot("c")
	s.run(2 * time.Second)
	if got := takeC(); got < 100 {
		t.Errorf("%d requests at a router that started later, want the burst", got)
	}
}

// TestLeave: a router that ends says so, and counts no longer from then on.
func TestLeave(t *testing.T) {
	s := newStage(t, 2, 2)
	s.run(time.Second)
	a, b := s.routers[0], s.routers[1]
	a.serve(false)
	s.run(100 * time.Millisecond)
	a.exchange.Leave()
	a.kill()
	s.run(replicas.Heartbeat + 3*time.Millisecond)
	if st := b.siblings.Status(); st.Live() != 0 || !st.Origins[0].Left {
		t.Errorf("%+v", st.Origins)
	}
	if e := b.events[len(b.events)-1]; e.Kind != "replica_lost" || e.Severity == eventlog.Warn {
		t.Errorf("%+v", e)
	}
}

func TestDiffering(t *testing.T) {
	d := func(s ...siblings.Section) string { return siblings.Digest(s) }
	a := d(siblings.Section{"routing", "kv"}, siblings.Section{"limits", "1"}, siblings.Section{"retry", "2"})
	for b, want := range map[string]string{
		a: "", "": "", d(siblings.Section{"routing", "kv"}, siblings.Section{"limits", "2"}, siblings.Section{"retry", "2"}): "limits",
		d(siblings.Section{"routing", "kv"}, siblings.Section{"limits", "1"}, siblings.Section{"new", "2"}): "new, retry", "what is this": "what, is, this, routing, limits, retry",
	} {
		if got := siblings.Differing(a, b); got != want {
			t.Errorf("%q: %q, want %q", b, got, want)
		}
	}
}
