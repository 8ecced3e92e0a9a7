package cost

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// known is a learner that knows prompts, transfers and steps of run.
func known(o Objective) *Learner {
	l := NewLearner(o)
	for i := range 400 {
		now := time.Duration(i) * time.Second
		w := Work{Tokens: 100 + i%9*400, Context: 100 + i%9*400, Queued: i % 5 * 500, Running: i % 7}
		took := time.Duration((10 + float64(w.Tokens)/50 + float64(w.Queued)/60) * float64(time.Millisecond))
		l.Took(LocalLeg, &w, took, now)
		l.Took(PrefillLeg, &w, took, now)
		l.Took(TransferLeg, &Work{Tokens: w.Tokens}, time.Duration(3+w.Tokens/1000)*time.Millisecond, now)
		run(l, 1+i%8, 1000*(1+i%11), 1, now)
		answer(l, 100, 10*time.Millisecond)
	}
	return l
}

// localPrice is what the rank of w costs that computes the prompt, too.
func localPrice(m *Model, r *Request, w *Work) (t decision.Times) {
	q := m.Quote(r)
	q.Local(w, &t)
	return t
}

// TestLearnsSteps: how long steps take follows from stretches of answers: by the answers that
// run, their contexts, and the prompts that are computed meanwhile.
func TestLearnsSteps(t *testing.T) {
	m := known(Objective{For: ForE2E}).Model()
	for _, c := range []struct{ running, context, want float64 }{{1, 1000, 5.7}, {8, 4000, 9.8}, {4, 11000, 9.2}} {
		if got := m.step(c.running, c.context, 0); math.Abs(got-c.want) > 0.1*c.want {
			t.Errorf("a step of %v answers of %v tokens takes %.2f ms, want %.2f", c.running, c.context, got, c.want)
		}
	}
	one := Request{ISL: 500, Output: 100, Others: 1}
	w := Work{Tokens: 500, Context: 500, Running: 1, Answering: 1}
	if p := localPrice(m, &one, &w); p.Pause < 16 || p.Pause > 24 {
		t.Errorf("a prompt of 500 tokens stalls an answer for %.1f ms, want about 20", p.Pause)
	}
}

// TestKnowsWithoutTransfers: a fleet without prefill ranks has prices, too, which say that paths
// cannot be compared; and the change is reported once.
func TestKnowsWithoutTransfers(t *testing.T) {
	l := NewLearner(Objective{For: ForE2E})
	var changes []Change
	for i := range 40 {
		now := time.Duration(i) * time.Second
		w := Work{Tokens: 1000, Context: 1000}
		run(l, 1+i%8, 2000, 1, now)
		if c := l.Took(LocalLeg, &w, 30*time.Millisecond, now); c != 0 {
			changes = append(changes, c)
		}
	}
	if m := l.Model(); !m.Timed() || m.Compares() || len(changes) != 1 || changes[0] != Timed {
		t.Errorf("%+v, changes %v", m, changes)
	}
	if k := l.Known(0); l.Crossings(1) != nil || k.Stretches < 30 {
		t.Errorf("known %+v", k)
	}
	teach(l, time.Minute)
	l.Renew(2 * time.Minute)
	if m := l.Model(); !m.Compares() {
		t.Errorf("with transfers %+v", m)
	}
}

// TestObjectives: what a price counts follows from the objective.
func TestObjectives(t *testing.T) {
	one := Request{ISL: 2000, Output: 200, Others: 1}
	w := Work{Tokens: 2000, Context: 2000, Running: 6, Answering: 6, Held: 9000}
	price := func(o Objective) decision.Times { return localPrice(known(o).Model(), &one, &w) }
	limits := Objective{TTFT: 2 * time.Second, ITL: 12 * time.Millisecond}
	first, whole, gaps := price(Objective{For: ForTTFT}), price(Objective{For: ForE2E}), price(Objective{For: ForITL})
	limits.For = ForGoodput
	good := price(limits)
	if first.Answer != 0 || first.Pause != 0 || first.Slower != 0 || first.Behind != 0 || first.Compute <= 0 || first.Sum() != first.Wait+first.Compute {
		t.Errorf("for the first token: %+v", first)
	}
	if whole.Answer <= 0 || whole.Pause <= 0 || whole.Slower <= 0 || whole.Late != 0 || whole.Spoil != 0 {
		t.Errorf("for all times: %+v", whole)
	}
	if gaps.Pause < 19*whole.Pause || gaps.Slower < 19*whole.Slower || gaps.Answer != whole.Answer {
		t.Errorf("for the time between tokens: %+v, for all times %+v", gaps, whole)
	}
	if good.Late <= 0 || good.Spoil <= 0 || good.Answer != whole.Answer {
		t.Errorf("for good requests: %+v", good)
	}
	one.Others = 0.5
	if half := price(Objective{For: ForE2E}); math.Abs(half.Pause-whole.Pause/2) > 1e-9 || half.Answer != whole.Answer {
		t.Errorf("half the weight of others: %+v, before %+v", half, whole)
	}
}

// TestLateOnce: a request that misses both limits is lost once. Where its answer will be late anyway,
// a late first token costs little more, and the other way round.
func TestLateOnce(t *testing.T) {
	m := known(Objective{For: ForGoodput, TTFT: time.Second, ITL: 12 * time.Millisecond}).Model()
	one := Request{ISL: 500, Output: 100, Others: 1}
	late := func(waits, answers int) float64 {
		p := localPrice(m, &one, &Work{Tokens: 500, Context: 500, Queued: waits, Running: answers, Answering: int32(answers)})
		return p.Late / m.Loss
	}
	none, first, answer, both := late(0, 0), late(1e6, 0), late(0, 100), late(1e6, 100)
	if none > 0.5 || first < 0.9 || answer < 0.9 || both < max(first, answer) || both > 1 {
		t.Errorf("late by neither limit %v, by the first token's %v, by the answer's %v, by both %v", none, first, answer, both)
	}
	older := *m
	older.LateOnce, m = false, &older
	if twice := late(1e6, 100); twice < 1.8 {
		t.Errorf("a model of an older recording counts %v of both", twice)
	}
}

// TestLatePastAShortLimit: a prompt goes where its first token is in time, although two answers pause
// there, which stay well within their limit. The times are those of a fleet in benchmarks/judge whose
// network got slow.
func TestLatePastAShortLimit(t *testing.T) {
	m := &Model{
		Local: LegModel{16, 16, 60, 20, 2.5}, Prefill: LegModel{16, 15, 60, 20, 0}, Transfer: LegModel{14, 20, 0, 0, 0},
		Prices: Prices{Step: StepModel{6.6, 0.25, 0.35, 0, 17, 8}, Length: 40, Stalled: 1, Fresh: 1, Constants: Tuned},
	}
	o := Objective{For: ForGoodput, TTFT: 120 * time.Millisecond, ITL: 16 * time.Millisecond}
	o.price(m)
	if m.Loss != Tuned.Loss*(120+40*16) {
		t.Errorf("a late request costs %v ms", m.Loss)
	}
	const tokens = 3400
	one := Request{ISL: tokens, Output: 40, Others: 1}
	paths := Paths{
		Local:   Work{Tokens: tokens, Context: tokens, Running: 2, Answering: 2, Held: 4000},
		Prefill: Work{Tokens: tokens, Context: tokens}, Transfer: Work{Tokens: tokens, Running: 2},
	}
	q := m.Quote(&one)
	var prefill, there decision.Times
	q.Prefill(&paths.Prefill, &prefill)
	q.Remote(&prefill, &paths.Local, &there)
	here := localPrice(m, &one, &paths.Local)
	first := func(t *decision.Times) float64 { return t.Wait + t.Compute + t.Transfer }
	if first(&here) > 100 || first(&there) < 140 || here.Pause < first(&there)-first(&here) {
		t.Fatalf("locally %+v, remotely %+v", here, there)
	}
	if c := m.Compare(&one, &paths); m.RemoteCheaper(c.Local, c.Remote) {
		t.Errorf("late for certain there, and here no answer is: %+v; locally %+v, remotely %+v", c, here, there)
	}
	m.Loss = 2 * m.Limit // as it was
	if c := m.Compare(&one, &paths); !m.RemoteCheaper(c.Local, c.Remote) {
		t.Errorf("the pauses cost less than twice the limit: %+v; %+v; %+v", c, here, there)
	}
}

// TestWaitsForRoom: where a cache is full a request waits until answers there have ended, on either
// path; how much room there is may be unknown, and models of older recordings do not ask.
func TestWaitsForRoom(t *testing.T) {
	m := *known(Objective{For: ForE2E}).Model()
	one := Request{ISL: 2000, Output: 100, Others: 1}
	wait := func(w Work) [2]float64 {
		var none, here, there decision.Times
		q := m.Quote(&one)
		q.Local(&w, &here)
		q.Remote(&none, &w, &there)
		return [2]float64{here.Wait, there.Wait}
	}
	w := Work{Tokens: 2000, Context: 2000, Running: 8, Answering: 8, Held: 30000}
	free, answers := wait(w), float64(m.Length*(m.step(8, 30000, 0)+m.Stalled))
	for room, times := range map[int32]float64{32000: 0, 31999: 1. / 31999, 16000: 1, 8000: 3} {
		w.Room = room
		for i, got := range wait(w) {
			if want := free[i] + float64(times*answers); math.Abs(got-want) > 1e-9*want {
				t.Errorf("room for %d tokens of 32000, path %d: waits %v ms, want %v", room, i, got, want)
			}
		}
	}
	if m.Rooms = false; wait(w) != free {
		t.Errorf("by a model of an older recording it waits %v ms, in a cache with room %v", wait(w), free)
	}
}

// TestEvictsWhatIsNeeded: what leaves a cache costs as much as prompts find in caches. Prompts that share
// nothing lose nothing; a model of an older recording, which does not know, charges for all.
func TestEvictsWhatIsNeeded(t *testing.T) {
	l := known(Objective{For: ForE2E})
	one, w := Request{ISL: 2000, Output: 100, Others: 1}, Work{Tokens: 2000, Context: 2000}
	if p := localPrice(l.Model(), &one, &w); l.Model().Fresh != 1 || p.Evict != 0 || p.Compute <= 0 {
		t.Errorf("of prompts that share nothing %v are fresh: %+v", l.Model().Fresh, p)
	}
	for i := range 4 * memory {
		now := time.Duration(400+i) * time.Second
		w := Work{Tokens: 1000, Context: 4000}
		if i%2 == 1 { // what another rank holds is computed again
			w = Work{Tokens: 4000, Context: 4000, Found: 3000}
		}
		l.Took(PrefillLeg, &w, 30*time.Millisecond, now)
		l.Took(TransferLeg, &Work{Tokens: 4000}, 7*time.Millisecond, now) // nothing is computed
	}
	m := *l.Model()
	if math.Abs(m.Fresh-0.25) > 0.02 {
		t.Errorf("no rank held a quarter, and %v are fresh", m.Fresh)
	}
	some := localPrice(&m, &one, &w)
	m.Fresh = 0
	if all := localPrice(&m, &one, &w); math.Abs(some.Evict-0.75*all.Evict) > 0.02*all.Evict || math.Abs(all.Evict-float64(m.Constants.Keep*m.Local[termCompute]*2)) > 1e-9 {
		t.Errorf("three quarters are needed again: %+v, of all %+v", some, all)
	}
}

// TestPriceProperties: whatever was learned, prices are numbers; more waiting, more answers on a
// rank, a longer answer or a slower rank never cost less; the same inputs give the same price
// without an allocation.
func TestPriceProperties(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 2))
		l := NewLearner(Objective{For: Aim(rapid.SampledFrom(Aims()).Draw(t, "aim")), TTFT: time.Second, ITL: 20 * time.Millisecond})
		for i := range rapid.IntRange(12, 60).Draw(t, "outcomes") {
			now := time.Duration(i) * time.Second
			for leg := range legKinds {
				w := Work{Tokens: rng.IntN(1 << rng.IntN(20)), Context: 1 << 20 * rng.IntN(2), Queued: rng.IntN(1 << rng.IntN(22)), Running: rng.IntN(300)}
				l.Took(leg, &w, time.Duration(rng.ExpFloat64()*float64(time.Second)), now)
			}
			var a Running
			on := Decoding{Running: 1 + rng.Int32N(200), Held: rng.Int32N(1 << rng.IntN(24)), HeldCached: rng.Int32N(1 << 20), Times: float32(rng.IntN(4))}
			l.Ran(&a, 1, now, on)
			on.Prompts, on.Computed = rng.Uint32N(9), rng.Uint32N(90000)
			l.Ran(&a, 1+stretch+rng.IntN(40), now+time.Duration(rng.ExpFloat64()*float64(time.Second)), on)
		}
		l.Renew(time.Hour)
		m := l.Model()
		if !m.Timed() {
			t.Fatal("nothing is known")
		}
		one := Request{ISL: rapid.IntRange(0, 1<<20).Draw(t, "isl"), Output: rapid.IntRange(0, 1<<16).Draw(t, "output"), Others: rapid.Float64Range(0, 4).Draw(t, "others")}
		w := Work{Tokens: one.ISL - rng.IntN(one.ISL+1), Context: one.ISL, Queued: rng.IntN(1 << 22), Running: rng.IntN(500), Held: rng.Int32N(1 << 24), Times: float64(rng.IntN(5))}
		w.Answering = rng.Int32N(int32(w.Running) + 1)
		all := func(q Request, w Work) [3]float64 {
			quote := m.Quote(&q)
			var prefill, t decision.Times
			return [3]float64{quote.Local(&w, &t), quote.Prefill(&w, &prefill), quote.Remote(&prefill, &w, &t)}
		}
		was := all(one, w)
		for i, v := range was {
			if !(v >= 0) || math.IsInf(v, 0) {
				t.Fatalf("price %d is %v of %+v by %+v", i, v, w, m)
			}
		}
		if again := all(one, w); again != was {
			t.Fatalf("%v, then %v", was, again)
		}
		for what, change := range map[string]func(q *Request, w *Work){
			"waiting": func(_ *Request, w *Work) { w.Queued += 4096 },
			"answers": func(_ *Request, w *Work) { w.Running++; w.Answering++ },
			"output":  func(q *Request, _ *Work) { q.Output = max(q.Output, int(m.Length)) + 100 },
			"slower":  func(_ *Request, w *Work) { w.Times = 2 * w.times() },
		} {
			q, more := one, w
			change(&q, &more)
			for i, v := range all(q, more) {
				if was[i] > v+1e-9*math.Abs(v) && !(what == "slower" && m.Loss > 0) {
					t.Fatalf("%s: price %d is %v, before %v, of %+v by %+v", what, i, v, was[i], w, m)
				}
			}
		}
		if n := testing.AllocsPerRun(3, func() { all(one, w) }); n != 0 {
			t.Fatalf("%v allocations", n)
		}
	})
}
