package pace_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// fleet is eight ranks of one group under load on the virtual clock, or two.
type fleet struct {
	pair    bool
	brief   bool // answers of a few tokens
	seed    uint64
	prefill bool    // prompts only; otherwise whole answers
	mixed   bool    // every other rank is of hardware three times as slow
	rate    float64 // requests per second
	slow    float64 // what one rank is slowed by after half a minute; 0 for none
	begin   bool    // it is slow from the start
	alike   bool    // that all hardware is the same is stated
	two     bool    // two are slowed
	stall   stall   // what one rank does again and again after half a minute
}

// stall is a time in which nothing comes from a rank.
type stall struct {
	lasts, every time.Duration // 0 for never
	stopped      bool          // the engine stands still; otherwise what it makes is held back
	apart        time.Duration // how far apart the events that were held back come
	avoided      time.Duration // for how long from its middle on no requests go there
}

// wire passes what comes from a rank on, and holds it back in a stall.
type wire struct {
	w           *virtual.World
	stall       stall
	until, next time.Duration
	from        time.Duration // when requests begin to avoid the rank
}

// avoided reports whether requests avoid the rank.
func (v *wire) avoided() bool {
	return v.from > 0 && v.w.Now() >= v.from && v.w.Now() < v.from+v.stall.avoided
}

func (v *wire) pass(at time.Duration, do func(at time.Duration)) {
	if at >= v.until && at >= v.next {
		do(at)
		return
	}
	v.next = max(v.until, v.next+v.stall.apart)
	v.w.At(v.next, func() { do(v.w.Now()) })
}

// begin has a stall begin now, and the next one later.
func (v *wire) begin(r *virtual.Rank) {
	now := v.w.Now()
	v.from = now + v.stall.lasts/2
	if v.w.At(now+v.stall.every, func() { v.begin(r) }); !v.stall.stopped {
		v.until = now + v.stall.lasts
		return
	}
	// One step of the engine takes as long as all of the stall.
	const step = 10 * time.Millisecond
	r.Core().SetSlow(float64(v.stall.lasts / step))
	v.w.At(now+3*step, func() { r.Core().SetSlow(1) })
}

const (
	slowAt = 30 * time.Second
	ends   = 75 * time.Second
	factor = 2
)

type call struct {
	rank int
	at   time.Duration
	pace.Change[int]
}

// play runs a fleet and gives what was judged, and which rank was slowed.
func play(t *testing.T, f fleet) (calls []call, victim int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(f.seed, 77))
	w := virtual.NewWorld()
	var ranks []*virtual.Rank
	size := 8
	if f.pair {
		size = 2
	}
	meters := make([]pace.Meter, size)
	active, waiting := make([]int, size), make([]int, size)
	for i := range size {
		cfg := engine.Config{
			BlockSize: 16, Blocks: 20_000, MaxSeqs: 64, MaxBatchedTokens: 2048, Model: "m", Seed: 1, NameSeed: uint64(i), NoiseSeed: f.seed + uint64(i),
			Timing: engine.Mocker{}, Noise: .05, Next: func(_ []uint32, draw uint64) uint32 { return uint32(300 + draw%100) }, EOS: 2, OSL: 150,
		}
		if f.mixed && i%2 == 1 {
			cfg.Speed = 1. / 3
		}
		r, err := w.Add(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ranks = append(ranks, r)
	}
	victim = rng.IntN(size)
	// The rank that stalls is not the one that is slow.
	stalls, line := (victim+1)%size, wire{w: w, stall: f.stall}
	if f.stall.every > 0 {
		w.At(slowAt, func() { line.begin(ranks[stalls]) })
	}
	if f.slow > 0 {
		at := slowAt
		if f.begin {
			at = 0
		}
		w.At(at, func() {
			ranks[victim].Core().SetSlow(f.slow)
			ranks[victim].Touch()
			if f.two {
				ranks[(victim+1)%8].Core().SetSlow(f.slow)
			}
		})
	}
	n := 0
	var arrive func()
	arrive = func() {
		n++
		now := w.Now()
		// The rank with the least work, as the router chooses it.
		at, best := 0, math.Inf(1)
		for i := range ranks {
			if c := float64(active[i]) + float64(waiting[i])/2000 + rng.Float64()/2; c < best && !(i == stalls && line.avoided()) {
				at, best = i, c
			}
		}
		isl := int(200 * math.Exp(rng.Float64()*3)) // 200 to 4,000
		q := engine.Request{ID: fmt.Sprint(n), Tokens: make([]uint32, isl), MaxTokens: 1, IgnoreEOS: true}
		switch {
		case f.prefill:
		case f.brief:
			q.MaxTokens = 2 + rng.IntN(20)
		default:
			q.MaxTokens = 50 + rng.IntN(250)
		}
		for i := range q.Tokens {
			q.Tokens[i] = uint32(1000 + (n*7919+i*31)%5000)
		}
		active[at]++
		waiting[at] += isl
		m := &meters[at]
		m.Begin(now)
		answer, tokens := pace.NewAnswer(m, now), 0
		q.Sink = func(o engine.Output) {
			come := func(when time.Duration) {
				if o.HasToken {
					if tokens++; tokens == 1 {
						m.End(now)
						m.First(when-now, isl)
						waiting[at] -= isl
					}
					answer.Came(when, 1)
				}
				if o.Finish != engine.Running {
					active[at]--
				}
			}
			if at == stalls {
				line.pass(o.At, come)
			} else {
				come(o.At)
			}
		}
		if err := ranks[at].Submit(q); err != nil {
			t.Fatal(err)
		}
		w.At(w.Now()+time.Duration(rng.ExpFloat64()/f.rate*1e9), arrive)
	}
	w.At(0, arrive)
	j := pace.NewJudge[int]()
	in := make([]pace.Input[int], size)
	for at := time.Second; at <= ends; at += time.Second {
		w.Run(at)
		for i := range in {
			in[i].Key, in[i].Group, in[i].Alike = i, "g", f.alike
			meters[i].Read(at, waiting[i], &in[i].Reading)
		}
		for _, c := range j.Step(time.Unix(1000, 0).Add(at), factor, in) {
			calls = append(calls, call{c.Key, at, c})
		}
	}
	if s := j.Speed(0); testing.Verbose() && f.seed == 1 {
		t.Logf("%+v: rank 0: %+v, active %v", f, s, active)
	}
	return calls, victim
}

// seeds is how many random fleets of each kind are played.
func seeds() uint64 {
	if testing.Short() {
		return 4
	}
	return 20
}

// TestSlowRanks: one rank of eight that becomes slower is named within ten
// seconds, and no other one is. Among hardware of two kinds it may take twelve: an answer
// that was fast so far must have some slow tokens, of which such a rank makes few.
func TestSlowRanks(t *testing.T) {
	for _, f := range []fleet{{rate: 12}, {rate: 12, mixed: true}, {rate: 60, prefill: true}, {rate: 40, prefill: true, mixed: true}} {
		for _, f.slow = range []float64{3, 10, 20} {
			if f.mixed && f.slow < 10 {
				continue // hardware that differs by the same factor hides it
			}
			t.Run(fmt.Sprintf("prefill=%t,mixed=%t,slow=%g", f.prefill, f.mixed, f.slow), func(t *testing.T) {
				slowest, by := time.Duration(0), 10*time.Second
				if f.mixed {
					by = 12 * time.Second
				}
				for f.seed = 1; f.seed <= seeds(); f.seed++ {
					calls, victim := play(t, f)
					first := time.Duration(0)
					for _, c := range calls {
						switch {
						case c.rank != victim || c.at <= slowAt || !c.Slow && c.End == pace.Recovered:
							t.Errorf("seed %d, victim %d: %+v", f.seed, victim, c)
						case first == 0 && c.Slow:
							first = c.at - slowAt
						}
					}
					if slowest = max(slowest, first); first == 0 || first > by {
						t.Errorf("seed %d: named after %s", f.seed, first)
					}
				}
				t.Logf("named within %s, %d seeds", slowest, seeds())
			})
		}
	}
}

// TestSlowFromTheStart: one rank of eight that was never fast is named within ten
// seconds of the start, and no other one is; among hardware of two kinds that nobody stated
// it takes the samples of the slower kind, too. Two of them may be hardware of their own,
// and are named where that is ruled out.
func TestSlowFromTheStart(t *testing.T) {
	for _, f := range []fleet{
		{rate: 16}, {rate: 60, prefill: true}, {rate: 16, mixed: true}, {rate: 60, prefill: true, mixed: true},
		{rate: 16, two: true}, {rate: 60, prefill: true, two: true}, {rate: 16, two: true, alike: true}, {rate: 60, prefill: true, two: true, alike: true},
	} {
		f.begin = true
		for _, f.slow = range []float64{3, 10, 20} {
			if f.mixed && f.slow < 10 {
				continue // hardware that differs by the same factor hides it
			}
			t.Run(fmt.Sprintf("prefill=%t,mixed=%t,two=%t,alike=%t,slow=%g", f.prefill, f.mixed, f.two, f.alike, f.slow), func(t *testing.T) {
				slowest, want, by := time.Duration(0), 1, 10*time.Second
				switch {
				case f.two && f.alike:
					want = 2
				case f.two:
					want = 0
				case f.mixed:
					by = 30 * time.Second
				}
				for f.seed = 1; f.seed <= seeds(); f.seed++ {
					calls, victim := play(t, f)
					first := map[int]time.Duration{}
					for _, c := range calls {
						mine := c.rank == victim || f.two && c.rank == (victim+1)%8
						switch {
						case !mine || want > 0 && (!c.Slow && c.End == pace.Recovered || c.Slow && !c.Always):
							t.Errorf("seed %d, victim %d: %+v", f.seed, victim, c)
						case c.Slow && !c.Always: // it has become slower still
						case first[c.rank] == 0 && c.Slow:
							first[c.rank] = c.at
						}
					}
					if len(first) != want {
						t.Errorf("seed %d: named are %v", f.seed, first)
					}
					for _, at := range first {
						if slowest = max(slowest, at); at > by {
							t.Errorf("seed %d: named after %s", f.seed, at)
						}
					}
				}
				t.Logf("named within %s, %d seeds", slowest, seeds())
			})
		}
	}
}

// TestHealthyFleets: nobody is named where nobody has become slower, on one kind of
// hardware or on two.
func TestHealthyFleets(t *testing.T) {
	for _, f := range []fleet{
		{rate: 12}, {rate: 2}, {rate: 30}, {rate: 12, mixed: true}, {rate: 60, prefill: true}, {rate: 5, prefill: true}, {rate: 100, prefill: true}, {rate: 40, prefill: true, mixed: true},
		{rate: 12, alike: true}, {rate: 30, alike: true}, {rate: 60, prefill: true, alike: true}, {rate: 5, prefill: true, alike: true}, {rate: 100, prefill: true, alike: true},
	} {
		for f.seed = 1; f.seed <= seeds(); f.seed++ {
			if calls, _ := play(t, f); len(calls) > 0 {
				t.Errorf("%+v: %+v", f, calls)
			}
		}
	}
}

// TestStalls: no rank is named for the stalls of another, whether the engine stood still or what
// it made was held back and came at once, or nearly so; and one that is really slow is named as soon as
// without stalls. The rank that stalls may be named itself: its answers do take so much longer.
func TestStalls(t *testing.T) {
	for _, s := range []stall{
		{lasts: 5 * time.Second, every: time.Hour},
		{lasts: 5 * time.Second, every: time.Hour, avoided: 30 * time.Second},
		{lasts: 2 * time.Second, every: 10 * time.Second},
		{lasts: time.Second, every: 2 * time.Second},
	} {
		for _, kind := range []stall{{stopped: true}, {}, {apart: 200 * time.Microsecond}} {
			s.stopped, s.apart = kind.stopped, kind.apart
			for _, f := range []fleet{
				{rate: 12}, {rate: 3, pair: true}, {rate: 4, brief: true, pair: true}, {rate: 3, pair: true, alike: true}, {rate: 12, slow: 3},
			} {
				f.stall = s
				t.Run(fmt.Sprintf("stall=%+v,pair=%t,brief=%t,alike=%t,slow=%g", s, f.pair, f.brief, f.alike, f.slow), func(t *testing.T) {
					slowest, wrong, own := time.Duration(0), 0, 0
					for f.seed = 1; f.seed <= 4; f.seed++ {
						calls, victim := play(t, f)
						first := time.Duration(0)
						for _, c := range calls {
							switch {
							case c.rank == (victim+1)%8 && !f.pair || f.pair && c.rank == 1-victim:
								if c.Slow {
									own++
								}
							case c.rank != victim || f.slow == 0:
								wrong++
								t.Errorf("seed %d, victim %d: %+v", f.seed, victim, c)
							case first == 0 && c.Slow:
								first = c.at - slowAt
							}
						}
						if slowest = max(slowest, first); f.slow > 0 && (first == 0 || first > 10*time.Second) {
							t.Errorf("seed %d: named after %s", f.seed, first)
						}
					}
					t.Logf("%d false alarms, the rank itself %d times; the slow one within %s", wrong, own, slowest)
				})
			}
		}
	}
}

// spread fills a reading with gaps about d.
func spread(rng *rand.Rand, r *pace.Reading, n int, d time.Duration) {
	var m pace.Meter
	for range n {
		m.Gap(time.Duration(float64(d)*(.9+.2*rng.Float64())), 1)
	}
	m.Read(0, 0, r)
}

// TestJudgeProperties: who is named is slower than its peers and than it was, by
// the factor and on enough samples; others are not; and the order of ranks does not
// matter.
func TestJudgeProperties(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 12).Draw(t, "ranks")
		factor := rapid.Float64Range(1.5, 5).Draw(t, "factor")
		victim := rapid.IntRange(0, n-1).Draw(t, "victim")
		times := rapid.Float64Range(1, 20).Draw(t, "times")
		everybody := rapid.Bool().Draw(t, "everybody")
		samples := rapid.SampledFrom([]int{1, 200}).Draw(t, "samples")
		var own []time.Duration
		for range n {
			own = append(own, time.Duration(rapid.IntRange(10, 40).Draw(t, "ms"))*time.Millisecond)
		}
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		j, twin := pace.NewJudge[int](), pace.NewJudge[int]()
		named := map[int]bool{}
		for s := range 40 {
			in := make([]pace.Input[int], n)
			for i := range in {
				d := own[i]
				if s >= 30 && (i == victim || everybody) {
					d = time.Duration(times * float64(d))
				}
				in[i] = pace.Input[int]{Key: i, Group: "g"}
				spread(rng, &in[i].Reading, samples, d)
			}
			at := time.Unix(int64(s), 0)
			changes := j.Step(at, factor, in)
			slices.Reverse(in)
			again := twin.Step(at, factor, in)
			if len(changes) != len(again) {
				t.Fatalf("in another order %d ranks change, not %d", len(again), len(changes))
			}
			for _, c := range changes {
				named[c.Key] = true
				if s < 30 && (c.Slow && !c.Always || !alone(own, c.Key, factor)) {
					t.Fatalf("rank %d before anything was slow: %+v", c.Key, c)
				}
			}
		}
		var peers []float64
		for i, d := range own {
			if i != victim {
				peers = append(peers, float64(d))
			}
		}
		slices.Sort(peers)
		median := (peers[(len(peers)-1)/2] + peers[len(peers)/2]) / 2
		ratio := times * float64(own[victim]) / median
		slowed := slices.Clone(own)
		slowed[victim] = time.Duration(times * float64(own[victim]))
		switch {
		case samples < pace.MinSamples/2 || times < factor*.85 || everybody && ratio < factor*.85:
			// Whatever its past: one that is slower than each of its peers is named.
			if named[victim] && !alone(own, victim, factor) && (everybody || !alone(slowed, victim, factor)) {
				t.Fatalf("named at %.2f times its past, factor %.2f, %d samples", times, factor, samples)
			}
		case !everybody && times > factor*1.25 && ratio > factor*1.25:
			if !named[victim] {
				t.Fatalf("not named at %.2f times its past and %.2f times its peers, factor %.2f", times, ratio, factor)
			}
		}
		for i := range named {
			if i != victim && !everybody && !alone(own, i, factor) {
				t.Fatalf("rank %d is named for rank %d", i, victim)
			}
		}
	})
}

// alone reports whether a rank may count as slow by its peers alone, with the noise of
// spread and the width of buckets.
func alone(own []time.Duration, i int, factor float64) bool {
	for j, d := range own {
		if j != i && float64(own[i]) < .75*factor*float64(d) {
			return false
		}
	}
	return len(own) > 3
}

// TestRecovery: a rank that is fast again is reported as such, one that shows nothing
// any more is forgotten, and a factor of 0 judges nobody.
func TestRecovery(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	j := pace.NewJudge[string]()
	second := 0
	step := func(a, b int, factor float64) []pace.Change[string] { // ms, 0 for nothing
		second++
		in := make([]pace.Input[string], 3)
		for i, ms := range []int{a, b, b} {
			in[i] = pace.Input[string]{Key: fmt.Sprint("r", i), Group: "g"}
			if ms > 0 {
				spread(rng, &in[i].Reading, 50, time.Duration(ms)*time.Millisecond)
			}
		}
		return j.Step(time.Unix(int64(second), 0), factor, in)
	}
	until := func(a int, factor float64, want bool, within int) pace.Change[string] {
		t.Helper()
		for range within {
			if c := step(a, 10, factor); len(c) > 0 {
				if len(c) != 1 || c[0].Key != "r0" || c[0].Slow != want {
					t.Fatalf("%+v", c)
				}
				return c[0]
			}
		}
		t.Fatalf("nothing is reported within %d s", within)
		return pace.Change[string]{}
	}
	for range 30 {
		if c := step(10, 10, 2); c != nil {
			t.Fatalf("healthy: %+v", c)
		}
	}
	s := j.Speed("r0")
	if s.Slow != nil || !math.IsNaN(s.TTFT) {
		t.Errorf("healthy: slow %+v, TTFT %v, want neither", s.Slow, s.TTFT)
	}
	if s.ITL < .009 || s.ITL > .011 {
		t.Errorf("healthy: ITL %v s, want about 0.01", s.ITL)
	}
	if s.TokensPerSecond < 45 || s.TokensPerSecond > 55 {
		t.Errorf("healthy: %v tokens a second, want about 50", s.TokensPerSecond)
	}
	c := until(90, 2, true, 8)
	if s := j.Speed("r0").Slow; s == nil || s.Figure != pace.ITL || c.Times < 2 {
		t.Errorf("slow: %+v, %+v", s, c)
	}
	for range 20 {
		step(90, 10, 2)
	}
	if s := j.Speed("r0").Slow; s == nil || s.Times < 8 || s.Times > 10 {
		t.Errorf("it is %+v", s)
	}
	if c := until(10, 2, false, 20); j.Speed("r0").Slow != nil || c.End != pace.Recovered {
		t.Errorf("it stays slow: %+v", c)
	}
	until(90, 2, true, 10)
	measured := second
	c = until(0, 2, false, 100)
	if c.End != pace.Silent {
		t.Errorf("silence: %+v", c)
	}
	// Costs forget it little by little from then on.
	for range 2 {
		want := c.Times
		for range (second - measured) / 30 {
			want = math.Sqrt(want)
		}
		if got := j.Times("r0"); math.Abs(got-want) > 1e-9 || c.Times < 5 {
			t.Errorf("%d s after it was measured it counts %v times, want %v; it was %v", second-measured, got, want, c.Times)
		}
		step(0, 10, 2)
	}
	for range 300 {
		step(0, 10, 2)
	}
	if got := j.Times("r0"); got != 1 {
		t.Errorf("after minutes of silence it counts %v times", got)
	}
	for range 60 {
		step(10, 10, 2)
	}
	until(90, 2, true, 10)
	until(0, 2, false, 100)
	for range 60 {
		step(10, 10, 2)
	}
	if got := j.Times("r0"); got != 1 {
		t.Errorf("it is as fast as the others and counts %v times", got)
	}
	until(90, 2, true, 10)
	until(0, 2, false, 100)
	if step(0, 10, 0); j.Times("r0") != 1 {
		t.Errorf("turned off after silence, it counts %v times", j.Times("r0"))
	}
	for range 60 {
		step(10, 10, 2)
	}
	until(90, 2, true, 10)
	if c := until(90, 0, false, 5); c.End != pace.Unjudged || j.Times("r0") != 1 {
		t.Errorf("turned off: %+v, and it counts %v times", c, j.Times("r0"))
	}
}

// TestTimes: costs count a rank by what its answers take longer than those of its peer, beyond what
// the number of them explains. Without measurements they forget it little by little, however many
// samples there were, and count it again as soon as something is measured.
func TestTimes(t *testing.T) {
	for _, c := range []struct {
		answers, peers int // at a time
		ms             int // between tokens; 10 at the peer
		slow           bool
	}{
		{4, 4, 60, true}, {1, 7, 60, true}, {4, 4, 15, false}, {0, 0, 60, true},
		{5, 3, 60, true}, {6, 2, 50, false}, {6, 2, 90, true}, {8, 0, 90, false},
	} {
		rng := rand.New(rand.NewPCG(1, 1))
		j := pace.NewJudge[int]()
		second := 0
		times := func(seconds, ms int) float64 { // ms 0 is no answer
			for range seconds {
				second++
				in := []pace.Input[int]{{Key: 0, Group: "g", Answering: c.answers}, {Key: 1, Group: "g", Answering: c.peers}}
				if spread(rng, &in[1].Reading, 1000, 10*time.Millisecond); ms > 0 {
					spread(rng, &in[0].Reading, 1000, time.Duration(ms)*time.Millisecond)
				}
				if out := j.Step(time.Unix(int64(second), 0), factor, in); len(out) > 0 {
					t.Errorf("%+v: %+v, of two ranks of unknown hardware that were always so", c, out)
				}
			}
			return j.Times(0)
		}
		slow := float64(c.ms) / 10
		if !c.slow {
			slow = 1
		}
		for _, step := range []struct {
			seconds, ms int
			want        float64
		}{
			{20, c.ms, slow}, {29, 0, slow}, {1, 0, math.Sqrt(slow)}, {30, 0, math.Sqrt(math.Sqrt(slow))},
			{1, c.ms, slow}, {200, 0, 1}, {1, c.ms, slow}, {10, 10, 1},
		} {
			if got := times(step.seconds, step.ms); got < .9*step.want || got > 1.1*step.want {
				t.Errorf("%+v: after %d s it takes %.2f times as long, want %.2f", c, second, got, step.want)
			}
		}
	}
}
