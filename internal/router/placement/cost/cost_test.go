package cost

import (
	"bytes"
	"math"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// engine is how long a closed-form engine takes to compute n tokens, in ms.
type engine func(n, context float64) float64

// engines have laws that a fit's terms cannot say exactly, the last but one in part.
var engines = map[string]engine{
	// Chunks of 2,048 tokens, each with an overhead and dearer than the one before.
	"chunks": func(n, _ float64) float64 {
		ms := 0.0
		for k := 1.0; n > 0; k++ {
			part := min(n, 2048)
			ms += 9 + part*(0.011+0.0008*k)
			n -= part
		}
		return ms
	},
	// Under-used when little is asked of it.
	"roofline": func(n, _ float64) float64 { return 6 + max(35, 0.022*n) },
	// A power that is none of the terms.
	"power": func(n, _ float64) float64 { return 11 + 0.0009*math.Pow(n, 1.33) },
	// The square of the whole.
	"square": func(n, context float64) float64 { return 4 + 0.012*n + 2e-7*(context*context-(context-n)*(context-n)) },
}

// outcome makes work at random, and how long it takes by an engine, with noise.
func outcome(rng *rand.Rand, e engine, most int) (Work, float64) {
	w := Work{Tokens: 16 + int(float64(most)*math.Pow(rng.Float64(), 2)), Queued: rng.IntN(3) * rng.IntN(8000), Running: rng.IntN(24)}
	w.Context = w.Tokens + rng.IntN(8000)
	ms := e(float64(w.Tokens), float64(w.Context)) + 0.7*e(float64(w.Queued), float64(w.Queued)) + 0.4*float64(w.Running)
	return w, ms * math.Exp(0.1*rng.NormFloat64())
}

// taught is a learner that has seen outcomes of an engine and of transfers.
func taught(rng *rand.Rand, e engine, n int) *Learner {
	l := NewLearner(Objective{For: ForTTFT})
	for i := range n {
		now := time.Duration(i) * time.Second
		for _, leg := range []LegKind{LocalLeg, PrefillLeg} {
			w, ms := outcome(rng, e, 24000)
			l.Took(leg, &w, time.Duration(ms*float64(time.Millisecond)), now)
		}
		w := Work{Tokens: rng.IntN(24000), Queued: rng.IntN(2) * rng.IntN(8000), Running: rng.IntN(24)}
		ms := (3 + 0.004*float64(w.Tokens) + 0.015*float64(w.Queued)) * math.Exp(0.1*rng.NormFloat64())
		l.Took(TransferLeg, &w, time.Duration(ms*float64(time.Millisecond)), now)
	}
	return l
}

// TestTakesTheCheaperPath: on engines whose law is not that of the fit, the path that
// a model says is cheaper is the cheaper one, or nearly: over many requests it loses
// little to who knows the law.
func TestTakesTheCheaperPath(t *testing.T) {
	for name, e := range engines {
		for seed := range uint64(10) {
			rng := rand.New(rand.NewPCG(seed, 7))
			m := taught(rng, e, 200).Model()
			if m == nil {
				t.Fatalf("%s: nothing is known", name)
			}
			var got, best, local, remote float64
			for range 500 {
				a, _ := outcome(rng, e, 24000)
				q := Paths{Local: a, Prefill: a, Transfer: Work{Tokens: a.Tokens, Queued: a.Queued, Running: a.Running}}
				q.Prefill.Queued, q.Prefill.Running = rng.IntN(3)*rng.IntN(8000), rng.IntN(24)
				took := func(w *Work) float64 {
					return e(float64(w.Tokens), float64(w.Context)) + 0.7*e(float64(w.Queued), float64(w.Queued)) + 0.4*float64(w.Running)
				}
				l := took(&q.Local)
				r := took(&q.Prefill) + 3 + 0.004*float64(q.Transfer.Tokens) + 0.015*float64(q.Transfer.Queued)
				if c := m.Of(&q); c.Remote < c.Local {
					got += r
				} else {
					got += l
				}
				best, local, remote = best+min(l, r), local+l, remote+r
			}
			if got > 1.05*best {
				t.Errorf("%s, seed %d: %.0f ms, best %.0f, all local %.0f, all remote %.0f", name, seed, got, best, local, remote)
			}
		}
	}
}

// TestStartValuesDoNotMatter: with all of what is assumed wrong by a factor of three
// the model is nearly the same after some outcomes.
func TestStartValuesDoNotMatter(t *testing.T) {
	right := start
	defer func() { start = right }()
	for name, e := range engines {
		model := func(factor float64) *Model {
			for i := range start {
				for k := range start[i] {
					start[i][k] = factor * right[i][k]
				}
			}
			return taught(rand.New(rand.NewPCG(3, 3)), e, 60).Model()
		}
		rng := rand.New(rand.NewPCG(4, 4))
		want, low, high := model(1), model(1./3), model(3)
		for range 200 {
			w, _ := outcome(rng, e, 24000)
			q := Paths{Local: w, Prefill: w, Transfer: Work{Tokens: w.Tokens, Queued: w.Queued, Running: w.Running}}
			c := want.Of(&q)
			for _, m := range []*Model{low, high} {
				o := m.Of(&q)
				if math.Abs(o.Local-c.Local) > 0.05*c.Local+1 || math.Abs(o.Remote-c.Remote) > 0.05*c.Remote+1 {
					t.Fatalf("%s: %+v costs %+v, with other start values %+v", name, q, c, o)
				}
			}
		}
	}
}

// TestModelProperties: more work never costs less, costs are numbers, and the same
// inputs give the same costs without an allocation.
func TestModelProperties(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		l := NewLearner(Objective{For: Aim(rapid.SampledFrom(Aims()).Draw(t, "aim")), TTFT: time.Second, ITL: 20 * time.Millisecond})
		for i := range rapid.IntRange(12, 80).Draw(t, "outcomes") {
			for leg := range legKinds {
				w := Work{Tokens: rng.IntN(1 << rng.IntN(20)), Context: 1 << 20 * rng.IntN(2), Queued: rng.IntN(1 << rng.IntN(22)), Running: rng.IntN(300)}
				l.Took(leg, &w, time.Duration(rng.ExpFloat64()*float64(time.Second)), time.Duration(i)*time.Second)
			}
			answer(l, rng.IntN(3000), time.Duration(rng.IntN(1e8)))
		}
		m := l.Model()
		if m == nil {
			t.Fatal("nothing is known")
		}
		work := func(name string) Work {
			n := rapid.IntRange(0, 1<<20).Draw(t, name)
			return Work{Tokens: n, Context: n + rapid.IntRange(0, 1<<20).Draw(t, name), Queued: rapid.IntRange(0, 1<<24).Draw(t, name), Running: rapid.IntRange(0, 1<<12).Draw(t, name)}
		}
		q := Paths{Local: work("local"), Prefill: work("prefill"), Transfer: work("transfer")}
		c := m.Of(&q)
		if !(c.Local >= 0 && c.Remote >= 0) || math.IsInf(c.Local, 0) || math.IsInf(c.Remote, 0) {
			t.Fatalf("%+v of %+v by %+v", c, q, m)
		}
		if again := m.Of(&q); again != c {
			t.Fatalf("%v, then %v", c, again)
		}
		more := q
		more.Local.Queued += 4096
		more.Local.Running++
		more.Prefill.Queued += 4096
		more.Transfer.Running++
		if o := m.Of(&more); o.Local < c.Local || o.Remote < c.Remote {
			t.Fatalf("more work costs less: %v after %v by %+v", o, c, m)
		}
		if n := testing.AllocsPerRun(3, func() { c = m.Of(&q) }); n != 0 {
			t.Fatalf("%v allocations", n)
		}
	})
}

// answer reports an answer whose tokens come so long after each other.
func answer(l *Learner, tokens int, gap time.Duration) (a Running) {
	for n := range tokens {
		l.Ran(&a, n+1, time.Duration(n)*gap, Decoding{})
	}
	l.Ended(&a)
	return a
}

// TestRunningAnswersCount: what answers wait for their tokens is known while they run,
// and each token counts as much whether its answer has ended or not.
func TestRunningAnswersCount(t *testing.T) {
	gaps := func(ended bool, tokens int, ms int) float64 {
		l := NewLearner(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
		for range 40 * typical / tokens {
			var a Running
			for n := range tokens + 1 {
				l.Ran(&a, n+1, time.Duration(n*ms)*time.Millisecond, Decoding{})
			}
			if ended {
				l.Ended(&a)
				l.answers = typical // of one length: what a token counts is asked
			}
		}
		return l.gaps
	}
	start, whole := tight*25, gaps(true, typical, 40)
	if whole < start+0.5*(40-start) || whole > 40 {
		t.Fatalf("after 40 answers with 40 ms between tokens there are %.1f, began with %.1f", whole, start)
	}
	for what, got := range map[string]float64{
		"running": gaps(false, typical, 40), "short": gaps(true, 10, 40), "shorter than what is counted at once": gaps(true, 5, 40),
	} {
		if math.Abs(got-whole) > 1 {
			t.Errorf("%s: %.1f ms, answers that have ended gave %.1f", what, got, whole)
		}
	}
	if low := gaps(false, typical, 5); low > start-0.5*(start-5) {
		t.Errorf("answers run with 5 ms between tokens, and %.1f are known", low)
	}
	l := NewLearner(Objective{For: ForGoodput, TTFT: time.Second, ITL: 20 * time.Millisecond})
	a := answer(l, 1, time.Second)
	if l.gaps != tight*20 || l.answers != typical {
		t.Errorf("an answer of one token has gaps: %+v", a)
	}
}

// TestKnownKeepsNobodyWaiting: while what is known of each model is read, a request may
// ask for a new one.
func TestKnownKeepsNobodyWaiting(t *testing.T) {
	all := NewLearners(Objective{For: ForE2E})
	a := all.Of("a")
	a.mu.Lock() // Known gets no further than to this one
	known := make(chan map[string]Known)
	go func() { known <- all.Known(0) }()
	for buf := make([]byte, 1<<20); !bytes.Contains(buf[:runtime.Stack(buf, true)], []byte("cost.(*Learner).Known(")); {
		runtime.Gosched()
	}
	free := all.mu.TryLock()
	if free {
		all.mu.Unlock()
	}
	a.mu.Unlock()
	if k := <-known; !free || len(k) != 1 {
		t.Errorf("others wait: %v, known %+v", !free, k)
	}
}

// teach reports as many outcomes of a path over a prefill rank as make a model. It returns
// how often the first model was reported.
func teach(l *Learner, now time.Duration) (firsts int) {
	w := Work{Tokens: 1000, Context: 1000}
	for range EnoughComputed {
		if l.Took(PrefillLeg, &w, 30*time.Millisecond, now) == Learned {
			firsts++
		}
		if l.Took(TransferLeg, &w, 5*time.Millisecond, now) == Learned {
			firsts++
		}
	}
	return firsts
}

// TestRevisions: a model comes when enough is known, never changes, and follows
// another at most once a second; revisions of a router's models are all different.
func TestRevisions(t *testing.T) {
	all := NewLearners(Objective{For: ForGoodput, TTFT: time.Second, ITL: 20 * time.Millisecond})
	a, b := all.Of("a"), all.Of("b")
	if all.Of("a") != a || a == b {
		t.Error("one learner a model")
	}
	w := Work{Tokens: 1000, Context: 1000}
	for range EnoughComputed {
		a.Took(PrefillLeg, &w, time.Second, 0)
	}
	if a.Model() != nil {
		t.Error("a model without a transfer")
	}
	if teach(a, 0) != 1 || teach(b, 0) != 1 {
		t.Error("the first model is not reported exactly once")
	}
	first, kept := a.Model(), *a.Model()
	if teach(a, every-1); a.Model() != first {
		t.Error("two revisions within a second")
	}
	all.Aim(Objective{For: ForE2E})
	teach(a, every)
	if m := a.Model(); m == first || m.Revision <= b.Model().Revision || m.Stall != 1 || !reflect.DeepEqual(*first, kept) {
		t.Errorf("after a second: %+v, first %+v", m, first)
	}
	if k := all.Known(0)["b"]; k.Model != b.Model() || k.Prefill < EnoughComputed-1 || k.Local != 0 {
		t.Errorf("known of b: %+v", k)
	}
	for i := range MaxModels + 1 {
		all.Of(string(rune('A' + i)))
	}
	if all.Of("one too many") != nil || all.Of("a") != a {
		t.Error("the bound on models")
	}
}

// TestModelsThatLeaveMakeRoom: a decision takes no place and waits for nobody, what finds no
// room is counted, and there is room again when nobody has served a model, or answered a
// request for it, for a while.
func TestModelsThatLeaveMakeRoom(t *testing.T) {
	all := NewLearners(Objective{For: ForE2E})
	var full []string
	all.Full = func(model string) { full = append(full, model) }
	name := func(i int) string { return string(rune('A' + i)) }
	if all.Model(name(0)) != nil || len(all.All()) != 0 {
		t.Error("a decision takes a place")
	}
	w := Work{Tokens: 1000, Context: 1000}
	for i := range MaxModels {
		all.Of(name(i)).Took(LocalLeg, &w, time.Second, time.Second)
	}
	none := make(chan bool)
	all.mu.RLock() // as other decisions do
	go func() { none <- all.Of("new") == nil }()
	select {
	case ok := <-none:
		if !ok || all.Refused() != 1 || !slices.Equal(full, []string{"new"}) {
			t.Errorf("no room: %v, %d refused, told of %q", ok, all.Refused(), full)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a model that there is no room for waits for the others")
	}
	all.mu.RUnlock()
	const since = 10 * time.Second
	served := func(model string) bool { return model == name(0) }
	all.Forget(served, since, 0)
	if len(all.All()) != MaxModels {
		t.Errorf("%d are left, and all were of use", len(all.All()))
	}
	all.Of(name(1)).Took(PrefillLeg, &w, time.Second, since)
	all.Of(name(2)).Ran(&Running{}, 1, since, Decoding{})
	all.Forget(func(string) bool { return false }, 2*since, since)
	for i := range 5 {
		if kept := all.byModel[name(i)] != nil; kept != (i < 3) {
			t.Errorf("model %d is kept: %v", i, kept)
		}
	}
	one := all.Of("new")
	if one == nil || all.Refused() != 1 {
		t.Fatal("no room for another")
	}
	if all.Forget(served, 3*since, 3*since); all.byModel["new"] != one || len(all.All()) != 2 {
		t.Errorf("%d are left; one that has just begun must be among them", len(all.All()))
	}
}

func TestParseSLO(t *testing.T) {
	if ttft, itl, err := ParseSLO("itl=20ms, ttft=1.5s"); err != nil || ttft != 1500*time.Millisecond || itl != 20*time.Millisecond {
		t.Errorf("%v %v %v", ttft, itl, err)
	}
	for _, text := range []string{"", "ttft=2s", "itl=25ms", "ttft=2s,itl=0", "ttft=2s,itl=-1s", "ttft=2s,itl=x", "ttft=2s,itl=25ms,e2e=1s", "ttft=2h,itl=1ms"} {
		if _, _, err := ParseSLO(text); err == nil {
			t.Errorf("%q is read", text)
		}
	}
}

// TestGoodputWithoutLimits: where no limit tells good requests, time is what counts; all costs
// are numbers.
func TestGoodputWithoutLimits(t *testing.T) {
	whole := Objective{For: ForGoodput, TTFT: time.Second, ITL: 20 * time.Millisecond}
	for _, o := range []Objective{
		{For: ForGoodput}, {For: ForGoodput, TTFT: time.Second}, {For: ForGoodput, ITL: 20 * time.Millisecond}, {For: ForGoodput, TTFT: -time.Second, ITL: -1},
	} {
		aimed := NewLearner(whole)
		aimed.aim(o)
		for _, l := range []*Learner{NewLearner(o), aimed} {
			teach(l, 0)
			m := l.Model()
			q := Paths{Local: Work{Tokens: 1000, Context: 1000, Running: 5}, Prefill: Work{Tokens: 1000, Context: 1000}, Transfer: Work{Tokens: 1000}}
			if m.Stall != 1 || m.Beyond != 1 || m.Limit != 0 || m.Lost != 0 {
				t.Errorf("%+v: %+v", o, m)
			}
			if c := m.Of(&q); !(c.Local > 0 && c.Remote > 0) {
				t.Errorf("%+v: costs %+v", o, c)
			}
		}
	}
}

// TestGoodput: what costs with ForGoodput is requests that are lost.
func TestGoodput(t *testing.T) {
	o := Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond}
	last := 0.0
	for gap := 1.0; gap < 25; gap++ {
		if m := o.model(250, gap); m.Stall <= last {
			t.Errorf("%v ms between tokens: a stall costs %v, with a ms less %v", gap, m.Stall, last)
		} else {
			last = m.Stall
		}
	}
	if at, over := o.model(250, 25), o.model(250, 80); over.Stall != at.Stall || at.Stall <= last {
		t.Errorf("a stall costs %v at the limit, %v beyond", at.Stall, over.Stall)
	}
	if one, long := o.model(250, 20), o.model(1000, 20); math.Abs(one.Stall/long.Stall-4) > 1e-9 {
		t.Errorf("a stall costs %v of answers of 250 tokens, %v of those of 1,000", one.Stall, long.Stall)
	}
	// A first token that is late for certain costs a request; near the limit, a part of one.
	m := o.model(250, 20)
	for ms, want := range map[float64]float64{0: 0, 1000: 1000, 1500: 1500, 2000: 2000 + 1000, 2500: 2000 + .05*500 + 2000, 4000: 2000 + .05*2000 + 2000} {
		if got := m.ttftCost(ms); math.Abs(got-want) > 1e-9 {
			t.Errorf("%v ms to the first token cost %v, want %v", ms, got, want)
		}
	}
	for ms := 0.0; ms < 5000; ms += 10 {
		if slope := (m.ttftCost(ms+10) - m.ttftCost(ms)) / 10; slope <= 0 || slope > 1+m.Lost/(2*doubtful*m.Limit)+1e-9 {
			t.Errorf("a ms costs %v from %v ms on", slope, ms)
		}
	}
	// While the answers on a decode rank are near their limit, a short prompt stays there
	// all the same where it would be late elsewhere, and a long one, which many would be
	// lost for, goes.
	m = o.model(250, 25)
	m.Local, m.Prefill, m.Transfer = LegModel{20, 30, 0, 30, 0}, LegModel{20, 30, 0, 30, 0}, LegModel{5, 1, 0, 0, 0}
	paths := func(tokens, queued int) Costs {
		return m.Of(&Paths{
			Local:   Work{Tokens: tokens, Context: tokens, Running: 16},
			Prefill: Work{Tokens: tokens, Context: tokens, Queued: queued}, Transfer: Work{Tokens: tokens},
		})
	}
	for _, c := range []struct {
		tokens, queued int
		remote         bool
	}{{1000, 0, true}, {1000, 100_000, false}, {32_000, 100_000, true}} {
		if got := paths(c.tokens, c.queued); got.Remote < got.Local != c.remote {
			t.Errorf("%d tokens behind %d: %+v", c.tokens, c.queued, got)
		}
	}
}
