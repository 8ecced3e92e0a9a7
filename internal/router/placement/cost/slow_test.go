package cost

import (
	"testing"
	"time"
)

// TestSlowRank: what the models predict is multiplied for a slow rank alone, and what it takes
// teaches them as another's would.
func TestSlowRank(t *testing.T) {
	const times = 3
	l := NewLearner(Objective{For: ForE2E})
	for i := range 200 {
		w := Work{Tokens: 100 + i%7*500, Context: 100 + i%7*500}
		kv := Work{Tokens: w.Tokens}
		ms := 10 + float64(w.Tokens)/100
		if i%2 == 0 {
			w.Times, kv.Times = times, times // of a transfer it counts for nothing
			ms *= times
		}
		now := time.Duration(i) * time.Second
		took := time.Duration(ms * float64(time.Millisecond))
		l.Took(LocalLeg, &w, took, now)
		l.Took(PrefillLeg, &w, took, now)
		l.Took(TransferLeg, &kv, 5*time.Millisecond, now)
		run(l, 1+i%8, 1000*(1+i%5), w.times(), now)
	}
	m := l.Model()
	w := Work{Tokens: 2000, Context: 2000, Running: 4, Answering: 4, Held: 3000}
	alike := m.Prefill.Time(&w)
	if alike < 27 || alike > 33 {
		t.Errorf("a rank like most takes %.1f ms, want about 30", alike)
	}
	one := Request{ISL: 2000, Output: 100, Others: 1}
	q := Paths{Local: w, Prefill: w, Transfer: w}
	before, fast := m.Compare(&one, &q), localPrice(m, &one, &w)
	if moves := m.transfer(&q.Transfer); moves < 4 || moves > 6 {
		t.Errorf("KV moves in %.1f ms, want about 5", moves)
	}
	w.Times = times
	if got := m.Prefill.Time(&w); got != times*alike {
		t.Errorf("the slow one takes %v ms, the others %v", got, alike)
	}
	q.Prefill.Times = times
	if after := m.Compare(&one, &q); after.Local != before.Local || after.Remote <= before.Remote {
		t.Errorf("with a slow prefill rank %+v, before %+v", after, before)
	}
	slow := localPrice(m, &one, &w)
	// What prompts stall on average is not the rank's.
	stalled := 100 * m.Stalled
	slow.Answer, fast.Answer = slow.Answer-stalled, fast.Answer-stalled
	for what, v := range map[string][2]float64{
		"to compute": {slow.Compute, fast.Compute}, "to answer": {slow.Answer, fast.Answer}, "that others pause": {slow.Pause, fast.Pause}, "that others are slower": {slow.Slower, fast.Slower},
	} {
		if v[1] <= 0 || v[0] < 2.9*v[1] || v[0] > 3.1*v[1] {
			t.Errorf("%s: %v ms on the slow one, %v on others", what, v[0], v[1])
		}
	}
	if a, b := m.transfer(&w), m.transfer(&q.Transfer); a != b {
		t.Errorf("KV moves to a slow rank in %v ms, to others in %v", a, b)
	}
}

// run reports a stretch of an answer on a rank with so many answers, whose contexts have so many
// tokens: a step takes 5 ms, 0.5 for each answer and 0.2 for each thousand tokens; a prompt of
// 500 tokens that is computed meanwhile takes 20 ms.
func run(l *Learner, answers, context int, times float64, now time.Duration) {
	var a Running
	on := Decoding{Running: int32(answers), Held: int32(context), Times: float32(times)}
	l.Ran(&a, 1, now, on)
	ms := 16 * (5 + 0.5*float64(answers) + 0.2*float64(context)/1000)
	if answers%2 == 0 {
		ms += 20
		on.Prompts, on.Computed = 1, 500
	}
	l.Ran(&a, 17, now+time.Duration(ms*times*float64(time.Millisecond)), on)
}

// TestRenew: where no outcomes come, a revision still follows where something else is aimed at, or
// a path was not taken for long, and at most once a second.
func TestRenew(t *testing.T) {
	l := NewLearner(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
	if l.Renew(0); l.Model() != nil {
		t.Error("a revision of nothing")
	}
	now := time.Second
	teach(l, now)
	if m := l.Model(); m == nil || m.Stall <= 0 || m.Lacks != 1<<LocalLeg {
		t.Fatalf("learned %+v", m)
	}
	now += every
	l.Renew(now) // of the outcomes after the first revision
	for _, step := range []struct {
		do    func()
		lacks Legs
		news  bool
	}{
		{func() { l.aim(Objective{For: ForTTFT}) }, 1 << LocalLeg, true},
		{func() {}, 1 << LocalLeg, false},
		{func() { now += Tuned.stale() }, 1<<LocalLeg | 1<<PrefillLeg | 1<<TransferLeg, true},
		{func() {}, 1<<LocalLeg | 1<<PrefillLeg | 1<<TransferLeg, false},
	} {
		before := l.Model()
		step.do()
		if step.lacks == 1<<LocalLeg {
			if l.Renew(now + every/2); l.Model() != before {
				t.Error("two revisions within a second")
			}
		}
		now += every
		if c := l.Renew(now); c != 0 {
			t.Errorf("a change: %v", c)
		}
		if m := l.Model(); (m != before) != step.news || m.Lacks != step.lacks {
			t.Errorf("%+v follows %+v; want lacks %b", m, before, step.lacks)
		}
	}
	if m := l.Model(); m.Stall != 0 {
		t.Errorf("another objective is not followed: %+v", m)
	}
}

// TestPromptsOfOtherRouters: a router's own prompts on a rank count for those of others, which it
// does not see.
func TestPromptsOfOtherRouters(t *testing.T) {
	steps := func(others, then float32) fit {
		l := NewLearner(Objective{For: ForE2E})
		for i := range uint32(40) {
			var a Running
			on := Decoding{Running: 4, Held: 4000, Others: others}
			l.Ran(&a, 1, 0, on)
			on.Prompts, on.Computed, on.Others = i%3*12/uint32(1+(others+then)/2), i%3*6000/uint32(1+(others+then)/2), then
			l.Ran(&a, 17, time.Duration(100+20*(i%3))*time.Millisecond, on)
		}
		return l.steps
	}
	alone := steps(0, 0)
	for _, others := range [][2]float32{{3, 3}, {2, 4}} {
		if fourth := steps(others[0], others[1]); alone.info != fourth.info || alone.count == 0 {
			t.Errorf("of four routers one learns %+v, and would alone learn %+v", fourth.info, alone.info)
		}
	}
}
