package experiment

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/bench/workload"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// profile is a prefill and a decode engine whose arms cross at a length that
// can be computed with pencil and paper.
type profile struct {
	name            string
	prefill, decode engine.Profile
}

// Times in ms. The decode engine prefills more slowly than the prefill engine,
// as engines do that are tuned for different things.
var profiles = []profile{
	{
		"linear",
		engine.Profile{Prefill: [3]float64{30, 0.055, 0}, Transfers: [2]float64{0, 0}},
		engine.Profile{Prefill: [3]float64{20, 0.09, 0}, Decode: [3]float64{10, 0, 0}, Transfers: [2]float64{50, 0}},
	},
	{
		"quadratic",
		engine.Profile{Prefill: [3]float64{12, 0.03, 0}},
		engine.Profile{Prefill: [3]float64{8, 0.03, 6e-6}, Decode: [3]float64{8, 0, 0}, Transfers: [2]float64{30, 0.008}},
	},
	{
		"shallow",
		engine.Profile{Prefill: [3]float64{12, 0.030, 0}},
		engine.Profile{Prefill: [3]float64{12, 0.05, 0}, Decode: [3]float64{6, 0, 0}, Transfers: [2]float64{18, 0.002}},
	},
}

// truth solves local(n) = remote(n):
//
//	local(n)  = d0 + d1·n + d2·n²
//	remote(n) = p0 + p1·n + p2·n² + t0 + t1·n + decode
func (p profile) truth() float64 {
	d, q, t := p.decode.Prefill, p.prefill.Prefill, p.decode.Transfers
	a, b, c := d[2]-q[2], d[1]-q[1]-t[1], d[0]-q[0]-t[0]-p.decode.Decode[0]
	if a == 0 {
		return -c / b
	}
	return (-b + math.Sqrt(b*b-4*a*c)) / (2 * a)
}

// world is a Bench of two simulated ranks under a virtual clock.
type world struct {
	w     *virtual.World
	p, d  *virtual.Rank
	pool  workload.Pool
	rng   *rand.Rand
	noise float64 // of a cell as a whole, beside the engine's own
	n     int
	warm  bool          // all prompts are the same
	late  time.Duration // the client sends so much too late
	drift float64       // log per virtual second
	lost  bool          // remote KV does not move
	void  int           // first cells that are void
	errs  int           // requests of each cell that fail
	short bool          // the engine answers one token less
	// runs gives the time at which a client that is wanted at another one runs.
	runs     func(wanted time.Duration) time.Duration
	measured int
}

func newWorld(t testing.TB, p profile, noise float64, seed uint64) *world {
	t.Helper()
	cfg := engine.Config{
		BlockSize: 16, Blocks: 8192, MaxSeqs: 64, MaxBatchedTokens: 1 << 20, Model: "m", Seed: 1, NameSeed: seed, NoiseSeed: seed,
		Next: func(_ []uint32, draw uint64) uint32 { return uint32(300 + draw%500) }, EOS: 2, OSL: 4, Noise: noise, Connector: true,
	}
	b := &world{w: virtual.NewWorld(), pool: workload.DefaultPool(), rng: rand.New(rand.NewPCG(seed, 99)), noise: noise}
	var err error
	pc, dc := cfg, cfg
	pc.Timing, dc.Timing = p.prefill, p.decode
	dc.NameSeed, dc.NoiseSeed = seed+1e6, seed+1e6
	if b.p, err = b.w.Add(pc); err != nil {
		t.Fatal(err)
	}
	if b.d, err = b.w.Add(dc); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *world) now() time.Duration { return b.w.Now() }

// one runs one request and gives its time to the first token.
func (b *world) one(c plan.Cell, prompt []uint32) (ttft, last time.Duration, tokens int, err error) {
	b.n++
	id := strconv.Itoa(b.n)
	start := b.w.Now()
	var first, end time.Duration
	fail := func(o engine.Output) {
		if o.Finish == engine.FinishError {
			err = o.Err
		}
	}
	osl := c.OSL
	if b.short {
		osl--
	}
	decode := engine.Request{ID: id, Tokens: prompt, MaxTokens: osl, MinTokens: osl, IgnoreEOS: true, Sink: func(o engine.Output) {
		if o.HasToken {
			if tokens++; first == 0 {
				first = o.At
			}
			end = o.At
		}
		fail(o)
	}}
	if c.Arm == plan.Remote {
		var pinned []int
		sub := b.p.Submit(engine.Request{ID: id, Tokens: prompt, MaxTokens: 1, Pin: true, Sink: func(o engine.Output) {
			if o.Finish != engine.Running {
				pinned = o.Pinned
			}
			fail(o)
		}})
		if sub != nil {
			return 0, 0, 0, sub
		}
		for pinned == nil && err == nil && b.w.Step() {
		}
		if !b.lost {
			decode.Pull = b.p.Pull(id, pinned)
		}
	}
	if sub := b.d.Submit(decode); sub != nil {
		return 0, 0, 0, sub
	}
	for tokens < osl && err == nil && b.w.Step() {
	}
	return first - start, end - start, tokens, err
}

// Measure runs a cell with one request in flight.
func (b *world) Measure(ctx context.Context, c plan.Cell) (*Measure, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if b.measured++; b.measured <= b.void {
		return nil, &VoidError{"a worker was lost"}
	}
	factor := math.Exp(b.noise*b.rng.NormFloat64() + b.drift*b.w.Now().Seconds())
	b.p.Core().SetSlow(factor)
	b.d.Core().SetSlow(factor)
	before := [2]engine.Stats{b.p.Core().Stats(b.w.Now()), b.d.Core().Stats(b.w.Now())}
	m := &Measure{InFlight: 1}
	start := b.w.Now()
	var ttfts, e2es []float64
	rng := rand.New(rand.NewPCG(workload.Seed(c.ID), 1))
	if b.warm {
		rng = rand.New(rand.NewPCG(1, 1))
	}
	var prompt []uint32
	for i := range c.Requests {
		if !b.warm || i == 0 {
			prompt = b.pool.Tokens(nil, rng, c.ISL())
		}
		sent := b.w.Now()
		t, e, n, err := b.one(c, prompt)
		if err != nil {
			return nil, err
		}
		if b.runs != nil { // it reads late
			t, e = b.runs(sent+t)-sent, b.runs(sent+e)-sent
		}
		if i < b.errs {
			m.Failed++
			continue
		}
		m.Requests++
		m.PathOK++
		m.ExactISL++
		if n == c.OSL {
			m.ExactOSL++
		}
		if b.late > LateLimit*time.Millisecond {
			m.Late++
		}
		ttfts, e2es = append(ttfts, t.Seconds()*1000), append(e2es, e.Seconds()*1000)
	}
	dist := func(xs []float64) loadgen.Dist {
		return loadgen.Dist{N: int64(len(xs)), Mean: stats.Mean(xs), P50: stats.Median(xs), P90: stats.Quantile(xs, 0.9), P95: stats.Quantile(xs, 0.95), Max: stats.Quantile(xs, 1)}
	}
	m.TTFT, m.TTFTIntended, m.E2E = dist(ttfts), dist(ttfts), dist(e2es)
	m.ITL = loadgen.Dist{N: 1, P50: 10, P99: 10, Max: 10}
	m.Dispatch = dist([]float64{b.late.Seconds() * 1000})
	m.Good = m.Requests
	m.Seconds = (b.w.Now() - start).Seconds()
	if b.runs != nil {
		m.Watch(b.watch(start, b.w.Now()))
	}
	after := [2]engine.Stats{b.p.Core().Stats(b.w.Now()), b.d.Core().Stats(b.w.Now())}
	who := 1
	if c.Arm == plan.Remote {
		who = 0
		m.TransferTokens = Known(float64(after[1].ExternalHits - before[1].ExternalHits))
		m.ExpectedTransferTokens = float64(m.Requests * (c.ISL() / 16 * 16))
	}
	m.HitShare = Known(float64(after[who].PrefixHits-before[who].PrefixHits) / float64(after[who].PrefixQueries-before[who].PrefixQueries))
	return m, nil
}

func testSpec(seed uint64) plan.Spec {
	return plan.Spec{
		Schema: plan.Schema, ISL: []int{256, 512, 1024, 2048, 4096, 8192, 16384}, OSL: 3, Loads: []plan.Load{{Concurrency: 1}},
		Cached: []float64{0}, Repeats: 5, MaxRepeats: 30, Requests: 3, Level: 0.95, Objective: "ttft", Seed: seed, Salt: fmt.Sprint(seed),
	}
}

func runner(b *world, s plan.Spec) *Runner {
	return &Runner{Spec: s, Block: 16, Measure: b.Measure, Now: b.now}
}

// Against engines whose crossing is known the interval holds the truth, and
// the recommendation is within one refinement step of it. DYNCTL_BENCH_SEEDS
// sets how many runs each of the nine settings gets; 93 of 100 must hold.
func TestIntervalHoldsTheTruth(t *testing.T) {
	seeds := 4
	if n, err := strconv.Atoi(os.Getenv("DYNCTL_BENCH_SEEDS")); err == nil && n > 0 {
		seeds = n
	} else if testing.Short() {
		seeds = 1
	}
	for _, p := range profiles {
		for _, noise := range []float64{0.02, 0.05, 0.10} {
			t.Run(fmt.Sprintf("%s/%g%%", p.name, noise*100), func(t *testing.T) {
				t.Parallel()
				truth := p.truth()
				holds, near, cells := 0, 0, 0
				width := 0.0
				for seed := range uint64(seeds) {
					r := runner(newWorld(t, p, noise, seed+1), testSpec(seed+1))
					res, err := r.Run(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					c := res.Groups[0].Crossing("ttft")
					if c.Answer != stats.Crosses || c.At.Low == nil || c.At.High == nil {
						t.Logf("seed %d: %s", seed, c.Sentence)
						continue
					}
					cells += len(res.Cells)
					width += (*c.At.High - *c.At.Low) / truth
					if *c.At.Low <= truth && truth <= *c.At.High {
						holds++
					}
					if res.Recommend == nil {
						t.Logf("seed %d gives no recommendation: %s", seed, res.Sentence)
						continue
					}
					if step := refinement(r.adaptive(res.Groups[0].Group), truth); math.Abs(float64(res.Recommend.EffISL)-truth) <= step {
						near++
					}
				}
				t.Logf("truth %.0f: %d of %d intervals hold it, %d recommendations within a step, mean width %.0f%%, %d cells", truth, holds, seeds, near, 100*width/float64(seeds), cells/seeds)
				if need := int(math.Floor(0.93 * float64(seeds))); holds < need || near < need {
					t.Errorf("%d and %d of %d, want at least %d", holds, near, seeds, need)
				}
			})
		}
	}
}

// watch is what the load client's witness sees between two times.
func (b *world) watch(from, to time.Duration) *loadgen.Starvation {
	s := new(loadgen.Starvation)
	for now := from; now < to; {
		planned := now + loadgen.WitnessTick
		woke := b.runs(planned)
		now = b.runs(woke)
		s.Note(planned, woke, now)
	}
	return s
}

// starved is a client that is stopped for 20 to 60 ms, 80 to 200 ms after it went on.
func starved(rng *rand.Rand) func(time.Duration) time.Duration {
	type stop struct{ from, to time.Duration }
	var stops []stop
	return func(wanted time.Duration) time.Duration {
		for len(stops) == 0 || stops[len(stops)-1].to <= wanted {
			at := time.Duration(0)
			if n := len(stops); n > 0 {
				at = stops[n-1].to
			}
			at += 80*time.Millisecond + time.Duration(rng.Int64N(int64(120*time.Millisecond)))
			stops = append(stops, stop{at, at + 20*time.Millisecond + time.Duration(rng.Int64N(int64(40*time.Millisecond)))})
		}
		// Times come nearly in order: the stop is one of the last.
		i := len(stops) - 1
		for i > 0 && stops[i-1].to > wanted {
			i--
		}
		if stops[i].from <= wanted {
			return stops[i].to
		}
		return wanted
	}
}

// healthy is a client as it is on a machine that does a little beside: timers that
// fire half a millisecond late, and one in 300 by up to 9 ms.
func healthy(rng *rand.Rand) func(time.Duration) time.Duration {
	return func(wanted time.Duration) time.Duration {
		late := time.Duration(rng.ExpFloat64() * 0.25 * float64(time.Millisecond))
		if rng.IntN(300) == 0 {
			late += time.Duration(rng.Int64N(int64(9 * time.Millisecond)))
		}
		return wanted + late
	}
}

// TestStarvedClients: a client that does not get to run fails its gate in a closed
// and in an open loop, a healthy one in neither.
func TestStarvedClients(t *testing.T) {
	const runs = 100
	for _, load := range []plan.Load{{Concurrency: 1}, {Rate: 2}} {
		for name, c := range map[string]struct {
			client func(*rand.Rand) func(time.Duration) time.Duration
			want   int
		}{"starved": {starved, runs}, "healthy": {healthy, 0}} {
			t.Run(load.Key()+"/"+name, func(t *testing.T) {
				t.Parallel()
				caught, other := 0, map[string]int{}
				for seed := range uint64(runs) {
					b := newWorld(t, profiles[0], 0.02, seed+1)
					b.runs = c.client(rand.New(rand.NewPCG(seed, 5)))
					s := testSpec(seed + 1)
					s.NoRefine, s.Loads, s.ISL, s.Repeats = true, []plan.Load{load}, []int{512, 2048, 8192}, 3
					res, err := runner(b, s).Run(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					for _, gate := range failing(res) {
						if other[gate]++; gate == "client" {
							caught++
						}
					}
				}
				t.Logf("gates that failed, of %d runs: %v", runs, other)
				if caught != c.want {
					t.Errorf("the gate of the client failed in %d of %d runs, want %d", caught, runs, c.want)
				}
			})
		}
	}
}

// failing names the gates that did not pass.
func failing(r *Result) []string {
	var out []string
	for _, g := range r.Gates {
		if g.Passed != nil && !*g.Passed {
			out = append(out, g.Name)
		}
	}
	return out
}

// Each broken set-up fails its own gate and gives no recommendation.
func TestBrokenSetUpsFailTheirGate(t *testing.T) {
	for _, c := range []struct {
		name, gate string
		breakIt    func(*world)
	}{
		{"nothing broken", "", func(*world) {}},
		{"warm cache", "cache", func(b *world) { b.warm = true }},
		{"saturated client", "client", func(b *world) { b.late = 40 * time.Millisecond }},
		{"drifting engine", "drift", func(b *world) { b.drift = 0.002 }},
		{"missing transfer", "transfer", func(b *world) { b.lost = true }},
		{"errors", "errors", func(b *world) { b.errs = 1 }},
		{"short answers", "lengths", func(b *world) { b.short = true }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newWorld(t, profiles[0], 0.02, 7)
			c.breakIt(b)
			s := testSpec(7)
			s.NoRefine = true
			res, err := runner(b, s).Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			bad := failing(res)
			if c.gate == "" {
				if len(bad) != 0 || !res.Valid || res.Recommend == nil {
					t.Errorf("gates %v failed, recommendation %v", bad, res.Recommend)
				}
				return
			}
			has := false
			for _, g := range bad {
				has = has || g == c.gate
			}
			if !has || res.Valid || res.Recommend != nil {
				t.Errorf("gates %v failed, want %s; recommendation %v", bad, c.gate, res.Recommend)
			}
		})
	}
}

// Too much noise gives a bracket in the place of a number.
func TestNoiseIsAdmitted(t *testing.T) {
	res, err := runner(newWorld(t, profiles[0], 0.3, 3), testSpec(3)).Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if c := res.Groups[0].Crossing("ttft"); c.Answer != stats.Bracket || res.Recommend != nil || res.Valid || !strings.HasPrefix(c.Sentence, "too noisy for a number: the crossing is ") || !strings.Contains(c.Sentence, "What to do: ") {
		t.Errorf("%s; recommendation %v, valid %v", c.Sentence, res.Recommend, res.Valid)
	}
}

func TestNoCrossingInRange(t *testing.T) {
	for _, c := range []struct {
		isl  []int
		want stats.Answer
	}{{[]int{64, 128, 256, 512}, stats.FirstWins}, {[]int{8192, 12288, 16384}, stats.SecondWins}} {
		s := testSpec(5)
		s.ISL = c.isl
		res, err := runner(newWorld(t, profiles[0], 0.02, 5), s).Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := res.Groups[0].Crossing("ttft"); got.Answer != c.want || res.Recommend != nil || !res.Valid {
			t.Errorf("%v: %s (valid %v)", c.isl, got.Sentence, res.Valid)
		}
		res.Learned = []admin.Crossing{{Running: 8}}
		if again := Review(res); again.Sentence != res.Sentence || len(again.Learned) != 1 {
			t.Errorf("judged again: %s, was %s; learned %v", again.Sentence, res.Sentence, again.Learned)
		}
	}
}

// What the sentence claims of every length, every row of the table shows.
func TestWinsNoMoreThanTheRows(t *testing.T) {
	at := func(v, low, high float64) stats.Interval { return stats.Interval{Value: v, Low: low, High: high, N: 5} }
	for _, c := range []struct {
		objective, winner string
		margin            float64
		diff              []stats.Interval
		want              string
	}{
		{"ttft", "remote", math.Expm1(0.10), []stats.Interval{at(0.24, 0.2, 0.28), at(0.11, 0.10, 0.12)}, "remote prefill wins everywhere from 256 (its ttft p50 is shorter by at least 9%)"},
		{"ttft", "local", 0.55, nil, "local prefill wins everywhere from 256 (remote's ttft p50 is longer by at least 55%)"},
		{"goodput", "local", 0.55, nil, "local prefill wins everywhere from 256 (its goodput is higher by at least 55%)"},
		{"ttft", "remote", 0, []stats.Interval{at(0.5, 0.4, 0.6), at(0.43, 0.3, 0.5), at(0.1, -0.08, 0.29)}, "remote prefill is better at 2 of 3 lengths from 256, 1 tie"},
		{"ttft", "local", 0, []stats.Interval{at(-0.5, -0.6, -0.4), at(0.2, 0.1, 0.3)}, "local prefill is better at 1 of 2 lengths from 256, 0 tie, at 1 it is worse"},
	} {
		if got := wins(c.objective, c.winner, "from 256", stats.Crossover{Margin: c.margin, Diff: c.diff}); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}

// A run that is cut and resumed ends with the very cells of one that was not.
func TestResume(t *testing.T) {
	s := testSpec(9)
	s.MaxRepeats = 5
	kept := map[string]CellResult{}
	b := newWorld(t, profiles[1], 0.05, 9)
	r := runner(b, s)
	r.OnCell = func(c CellResult) error { kept[c.Cell.ID] = c; return nil }
	r.Stop = func() bool { return len(kept) >= 30 }
	part, err := r.Run(t.Context())
	if err != nil || part.Partial == "" || part.Recommend != nil {
		t.Fatalf("%v, partial %q", err, part.Partial)
	}
	again := runner(b, s)
	again.Done = maps.Clone(kept)
	fresh, warm := 0, 0
	again.OnCell = func(c CellResult) error {
		if c.Cell.Phase == "warmup" { // the engines may be cold again
			warm++
			return nil
		}
		if _, twice := kept[c.Cell.ID]; twice {
			t.Errorf("%s was measured again", c.Cell.ID)
		}
		fresh++
		return nil
	}
	full, err := again.Run(t.Context())
	if err != nil || full.Partial != "" || fresh == 0 || warm == 0 {
		t.Fatalf("%v, partial %q, %d fresh, %d of a warm-up", err, full.Partial, fresh, warm)
	}
	for i, c := range part.Cells {
		if full.Cells[i].Cell.ID != c.Cell.ID || full.Cells[i].Measure.TTFT.P50 != c.Measure.TTFT.P50 {
			t.Fatalf("cell %d differs", i)
		}
	}
}

func TestVoidCellsAreRedone(t *testing.T) {
	b := newWorld(t, profiles[0], 0.02, 2)
	b.void = 2
	s := testSpec(2)
	s.NoRefine = true
	res, err := runner(b, s).Run(t.Context())
	if err != nil || res.Voided != 2 || !res.Valid {
		t.Errorf("%v: %d void, valid %v", err, res.Voided, res.Valid)
	}
	b = newWorld(t, profiles[0], 0.02, 2)
	b.void = 1 << 30
	if _, err := runner(b, s).Run(t.Context()); err == nil {
		t.Error("a fleet that is never well passed")
	}
}

// A cell that is skipped by hand is void and said to be; its pair is left out
// of everything, the rest is judged as always.
func TestSkippedCells(t *testing.T) {
	for _, second := range []bool{false, true} {
		b := newWorld(t, profiles[0], 0.02, 2)
		s := testSpec(2)
		s.NoRefine = true
		r := runner(b, s)
		var skip context.CancelFunc
		r.Enter = func(run context.Context) (context.Context, func()) {
			var cell context.Context
			cell, skip = context.WithCancel(run)
			return cell, skip
		}
		starts, skips, last := 0, 0, Event{}
		r.OnEvent = func(e Event) {
			switch e.Kind {
			case "start":
				if e.Cell.Phase == "grid" {
					if starts++; starts == 5 && !second || starts == 6 && second {
						skip()
					}
				}
			case "skip":
				skips++
			case "cell":
				last = e
			}
		}
		res, err := r.Run(t.Context())
		pairs := len(s.ISL)*s.Repeats + len(s.AAPairs(0))
		want := 2*pairs - 2
		if second {
			want++
		}
		if err != nil || !res.Valid || res.Recommend == nil {
			t.Errorf("second=%v: %v, valid %v: %s", second, err, res.Valid, res.Sentence)
		}
		type counts struct{ Events, Skipped, Cells, Done int }
		if d := cmp.Diff(counts{1, 1, want, last.Total}, counts{skips, res.Skipped, len(res.Cells), last.Done}); d != "" {
			t.Errorf("second=%v (-want +got):\n%s", second, d)
		}
		n := 0
		for _, p := range res.Groups[0].Points {
			n += p.Repeats
		}
		if n != len(s.ISL)*s.Repeats-1 || !strings.Contains(strings.Join(res.Cautions, " "), "skipped by hand") {
			t.Errorf("second=%v: %d pairs, cautions %q", second, n, res.Cautions)
		}
	}
}

// Also where nothing else was measured: the run ends right after.
func TestOnlySkipped(t *testing.T) {
	b := newWorld(t, profiles[0], 0.02, 2)
	s := testSpec(2)
	s.NoRefine = true
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	r := runner(b, s)
	var skip context.CancelFunc
	r.Enter = func(run context.Context) (context.Context, func()) {
		var cell context.Context
		cell, skip = context.WithCancel(run)
		return cell, skip
	}
	r.OnEvent = func(e Event) {
		switch {
		case e.Kind == "start" && e.Cell.Phase == "aa":
			skip()
		case e.Kind == "skip":
			stop()
		}
	}
	res, _ := r.Run(ctx)
	if res == nil || res.Skipped != 1 || len(res.Cells) != 0 || !strings.Contains(strings.Join(res.Cautions, " "), "skipped by hand") {
		t.Fatalf("%+v", res)
	}
}

func TestSkippedWarmUp(t *testing.T) {
	s := testSpec(2)
	s.NoRefine = true
	r := runner(newWorld(t, profiles[0], 0.02, 2), s)
	first := true
	r.Enter = func(run context.Context) (context.Context, func()) {
		cell, cancel := context.WithCancel(run)
		if first {
			first = false
			cancel()
		}
		return cell, cancel
	}
	res, err := r.Run(t.Context())
	if err != nil || res.Skipped != 0 || len(res.Cells) == 0 {
		t.Errorf("%v, %d cells, %d skipped", err, len(res.Cells), res.Skipped)
	}
	if res.Warmup.Cells != 0 || res.Warmup.Steady {
		t.Errorf("warm-up of %d cells, steady %v", res.Warmup.Cells, res.Warmup.Steady)
	}
}

func TestCancelKeepsWhatWasDone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r := runner(newWorld(t, profiles[0], 0.02, 2), testSpec(2))
	n := 0
	r.OnCell = func(CellResult) error {
		if n++; n == 20 {
			cancel()
		}
		return nil
	}
	res, err := r.Run(ctx)
	if err == nil || res.Partial != "interrupted" || len(res.Cells) < 10 || res.Recommend != nil {
		t.Errorf("%v, partial %q, %d cells", err, res.Partial, len(res.Cells))
	}
}

// refinement is the distance in tokens of the points that are measured around x:
// a quarter of the coarse bracket.
func refinement(a Adaptive, x float64) float64 {
	if len(a.Coarse) < 2 {
		return math.Inf(1)
	}
	i := a.bracket(x)
	return float64(a.Coarse[i+1]-a.Coarse[i]) / 4
}
