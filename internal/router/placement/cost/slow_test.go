package cost

import (
	"slices"
	"testing"
	"time"
)

// TestSlowRank: what the laws say is multiplied for a slow rank alone, what it takes teaches
// the laws as another's would, and a revision has the ranks of its time.
func TestSlowRank(t *testing.T) {
	const times = 3
	l := NewLearner(Objective{For: ForE2E})
	teach := func(from, n int) {
		for i := from; i < from+n; i++ {
			w := Work{Tokens: 100 + i%7*500, Context: 100 + i%7*500}
			kv := Work{Tokens: w.Tokens}
			ms := 10 + float64(w.Tokens)/100
			if i%2 == 0 {
				w.Times = times
				ms *= times
			}
			now := time.Duration(i) * time.Second
			took := time.Duration(ms * float64(time.Millisecond))
			l.Took(LocalLeg, &w, took, now)
			l.Took(PrefillLeg, &w, took, now)
			l.Took(TransferLeg, &kv, 5*time.Millisecond, now)
		}
	}
	slow := []Slow{{Slot: 2, Times: times}, {Slot: 9, Times: 1.5}}
	l.Slow(slow)
	teach(0, 200)
	m := l.Model()
	for slot, want := range map[uint32]float64{0: 1, 2: times, 3: 1, 9: 1.5, 10: 1} {
		if got := m.Times(slot); got != want {
			t.Errorf("rank %d takes %v times as long, want %v", slot, got, want)
		}
	}
	w := Work{Tokens: 2000, Context: 2000}
	alike := m.Prefill.Time(&w)
	if alike < 27 || alike > 33 {
		t.Errorf("a rank like most takes %.1f ms, want about 30", alike)
	}
	q := Paths{Local: w, Prefill: w, Transfer: w}
	before := m.Of(&q)
	w.Times = times
	if got := m.Prefill.Time(&w); got != times*alike {
		t.Errorf("the slow one takes %v ms, the others %v", got, alike)
	}
	q.Prefill.Times = times
	if after := m.Of(&q); after.Local != before.Local || after.Remote <= before.Remote {
		t.Errorf("with a slow prefill rank %+v, before %+v", after, before)
	}
	q.Prefill.Times, q.Local.Times, q.Local.Running = 0, times, 4
	stalls := q
	stalls.Local.Times = 0
	if a, b := m.Of(&q), m.Of(&stalls); a.Local <= 2.9*b.Local || a.Remote != b.Remote {
		t.Errorf("with a slow decode rank, whose answers are stalled for as much longer, %+v, else %+v", a, b)
	}
	// Little more or less is the same; another rank is news, and the old revision stays.
	l.Slow([]Slow{{Slot: 2, Times: times * 1.05}, {Slot: 9, Times: 1.5}})
	teach(200, 1)
	if got := l.Model().Times(2); got != times {
		t.Errorf("a measure that changed by a twentieth: %v times", got)
	}
	l.Slow(nil)
	teach(201, 1)
	if got := l.Model(); len(got.Slow) != 0 || got.Revision <= m.Revision || m.Times(2) != times {
		t.Errorf("none is slow any more: %+v, before %+v", got, m)
	}
}

// TestSlowRankOfAllModels: models that are learned of later have the same ranks.
func TestSlowRankOfAllModels(t *testing.T) {
	all := NewLearners(Objective{For: ForE2E})
	all.Of("a")
	all.Slow([]Slow{{Slot: 1, Times: 2}})
	for _, name := range []string{"a", "b"} {
		l, w := all.Of(name), Work{Tokens: 1000, Context: 1000}
		for range EnoughComputed {
			l.Took(PrefillLeg, &w, 30*time.Millisecond, 0)
			l.Took(TransferLeg, &w, 5*time.Millisecond, 0)
		}
		if m := l.Model(); m == nil || m.Times(1) != 2 {
			t.Errorf("%s: %+v", name, m)
		}
	}
}

// TestRenew: where no outcomes come, a revision still follows where ranks become slow or well,
// or something else is aimed at, and at most once a second.
func TestRenew(t *testing.T) {
	l := NewLearner(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
	slow := []Slow{{Slot: 2, Times: 3}}
	l.Slow(slow)
	if l.Renew(0); l.Model() != nil {
		t.Error("a revision of nothing")
	}
	now := time.Second
	teach(l, now)
	if m := l.Model(); m == nil || !slices.Equal(m.Slow, slow) || m.Stall <= 0 {
		t.Fatalf("learned %+v", m)
	}
	now += every
	l.Renew(now) // of the outcomes after the first revision
	for _, step := range []struct {
		do   func()
		slow []Slow
		news bool
	}{
		{func() { l.Slow(nil) }, nil, true},
		{func() { l.Slow(slow) }, slow, true},
		{func() { l.aim(Objective{For: ForTTFT}) }, slow, true},
		{func() {}, slow, false},
	} {
		before := l.Model()
		step.do()
		l.Renew(now + every/2)
		if l.Model() != before {
			t.Error("two revisions within a second")
		}
		now += every
		if c := l.Renew(now); c != NoChange {
			t.Errorf("a change: %v", c)
		}
		if m := l.Model(); (m != before) != step.news || !slices.Equal(m.Slow, step.slow) {
			t.Errorf("%+v follows %+v; the slow ones are %v", m, before, step.slow)
		}
	}
	if m := l.Model(); m.Stall != 0 {
		t.Errorf("another objective is not followed: %+v", m)
	}
}
