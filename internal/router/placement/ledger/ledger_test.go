package ledger

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/workers"
)

var numbers atomic.Uint64

// newRank is a rank that joins after all others.
func newRank(slot uint32, label string) *workers.Rank {
	return &workers.Rank{Slot: slot, Label: label, Number: numbers.Add(1)}
}

func TestReservationLife(t *testing.T) {
	l, r := New(), newRank(3, "a/dp0")
	v := l.Reserve(r, Claim{PrefillTokens: 100, ContextTokens: 130, CachedTokens: 100, BlockSize: 64})
	for _, step := range []struct {
		name string
		do   func()
		want Amounts
	}{
		{"reserved", func() {}, Amounts{1, 0, 100, 3, 1}},
		{"first token", v.FirstToken, Amounts{1, 1, 0, 3, 1}},
		{"first token again", v.FirstToken, Amounts{1, 1, 0, 3, 1}},
		{"within the block", func() { v.Progress(62) }, Amounts{1, 1, 0, 3, 1}},
		{"next block", func() { v.Progress(63) }, Amounts{1, 1, 0, 4, 1}},
		{"three more", func() { v.Progress(63 + 3*64) }, Amounts{1, 1, 0, 7, 1}},
		{"never shrinks", func() { v.Progress(1) }, Amounts{1, 1, 0, 7, 1}},
		{"released", func() { v.Release() }, Amounts{}},
		{"nothing afterwards", func() { v.Progress(9999); v.FirstToken() }, Amounts{}},
	} {
		step.do()
		if d := cmp.Diff(step.want, l.Load(r).Amounts); d != "" {
			t.Fatalf("%s: (-want +got)\n%s", step.name, d)
		}
	}
	if err := l.Balanced(); err != nil {
		t.Error(err)
	}
	if prompts, tokens := l.Computed(r); prompts != 1 || tokens != 100 {
		t.Errorf("%d prompts with %d tokens were computed", prompts, tokens)
	}
}

func TestPrefillLegHoldsNoBlocks(t *testing.T) {
	l, r := New(), newRank(0, "p/dp0")
	v := l.Reserve(r, Claim{PrefillTokens: 500, BlockSize: 64})
	v.Progress(1)
	if d := cmp.Diff(Amounts{Requests: 1, PrefillTokens: 500}, l.Load(r).Amounts); d != "" {
		t.Error(d)
	}
	v.Release()
}

// Invariant 5: a reservation is released exactly once; a second release is
// counted and harmless, and a leak is named.
func TestReleaseExactlyOnce(t *testing.T) {
	l, a, b := New(), newRank(0, "a/dp0"), newRank(1, "b/dp1")
	v, w := l.Reserve(a, Claim{PrefillTokens: 7, ContextTokens: 1, BlockSize: 1}), l.Reserve(b, Claim{PrefillTokens: 9})
	if !v.Release() || v.Release() || v.Release() {
		t.Error("only the first Release must report true")
	}
	if got := l.DoubleReleases(); got != 2 {
		t.Errorf("%d double releases, want 2", got)
	}
	err := l.Balanced()
	if err == nil || !strings.Contains(err.Error(), "b/dp1 holds 1 requests, 0 of them answering, 9 prefill tokens") || strings.Contains(err.Error(), "a/dp0") {
		t.Errorf("Balanced() = %v, want the leak on b/dp1 and nothing of a/dp0", err)
	}
	w.Release()
	if err := l.Balanced(); err != nil {
		t.Error(err)
	}
}

// A slot that is used again by another rank does not mix the two up.
func TestSlotReuse(t *testing.T) {
	l, old, now := New(), newRank(2, "old/dp0"), newRank(2, "new/dp0")
	v := l.Reserve(old, Claim{PrefillTokens: 100})
	w := l.Reserve(now, Claim{PrefillTokens: 5})
	if d := cmp.Diff(Amounts{Requests: 1, PrefillTokens: 5}, l.Load(now).Amounts); d != "" {
		t.Errorf("new rank: %s", d)
	}
	if got := l.Load(old); got != (Load{}) {
		t.Errorf("the rank that lost its slot has load %+v", got)
	}
	if d := cmp.Diff(Amounts{Requests: 2, PrefillTokens: 105}, l.Total()); d != "" {
		t.Errorf("total: %s", d)
	}
	late := l.Reserve(old, Claim{PrefillTokens: 1}) // from a decision made before
	v.Release()
	if d := cmp.Diff(Amounts{Requests: 1, PrefillTokens: 5}, l.Load(now).Amounts); d != "" {
		t.Errorf("after a late reservation of the old rank: %s", d)
	}
	if err := l.Balanced(); err == nil || !strings.Contains(err.Error(), "old/dp0 holds 1 requests") {
		t.Errorf("Balanced() = %v, want old/dp0 and new/dp0", err)
	}
	late.Release()
	w.Release()
	if err := l.Balanced(); err != nil {
		t.Error(err)
	}
	l.Reserve(newRank(2, "third/dp0"), Claim{}).Release()
	if len(l.retired) != 0 {
		t.Errorf("%d accounts without work are kept", len(l.retired))
	}
}

func TestForget(t *testing.T) {
	l, r := New(), newRank(1, "gone/dp0")
	v := l.Reserve(r, Claim{PrefillTokens: 3})
	l.Forget(r)
	l.Forget(r)
	if got := l.Load(r); got != (Load{}) {
		t.Errorf("a forgotten rank has load %+v", got)
	}
	if got := l.Total().PrefillTokens; got != 3 {
		t.Errorf("the work in flight on it is %d tokens, want 3", got)
	}
	v.Release()
	if err := l.Balanced(); err != nil {
		t.Error(err)
	}
}

// TestLateReservation: work that is given to a rank after it has left the fleet
// is in the ledger, and in nobody's way.
func TestLateReservation(t *testing.T) {
	l, old, now := New(), newRank(1, "old/dp0"), newRank(1, "now/dp0")
	l.Reserve(old, Claim{}).Release()
	l.Forget(old)
	late := l.Reserve(old, Claim{PrefillTokens: 7})
	if n := l.ranks.Load(); n != 0 {
		t.Errorf("%d ranks have a place", n)
	}
	work := l.Reserve(now, Claim{PrefillTokens: 5})
	again := l.Reserve(old, Claim{PrefillTokens: 1})
	if got := l.Load(now).PrefillTokens; got != 5 {
		t.Errorf("the rank that works has %d tokens, want 5", got)
	}
	if got := l.Total(); got != (Amounts{Requests: 3, PrefillTokens: 13}) {
		t.Errorf("total %+v", got)
	}
	for _, v := range []*Reservation{late, work, again} {
		v.Release()
	}
	if err := l.Balanced(); err != nil {
		t.Error(err)
	}
}

func TestFreshFades(t *testing.T) {
	l, a, b := New(), newRank(0, "a"), newRank(1, "b")
	l.Reserve(b, Claim{}).Release() // both have accounts
	l.Reserve(a, Claim{PrefillTokens: 1000}).Release()
	if got := l.Load(a).Fresh; got != 1000 {
		t.Errorf("fresh %d at once, want 1000", got)
	}
	l.Reserve(b, Claim{PrefillTokens: 2 * HalfLifeTokens}).Release()
	if got := l.Load(a).Fresh; got != 500 {
		t.Errorf("fresh %d after one half-life of two ranks, want 500", got)
	}
	if la, lb := l.Load(a).LastTurn, l.Load(b).LastTurn; la != 2 || lb != 3 {
		t.Errorf("turns %d and %d, want 2 and 3", la, lb)
	}
}

// TestHalved: halved is math.Exp2 of the negative, exactly so for whole numbers.
func TestHalved(t *testing.T) {
	for _, x := range []float64{0, 1, 2, 40, 999} {
		if got, want := halved(x), math.Exp2(-x); got != want {
			t.Errorf("halved(%v) = %v, want %v", x, got, want)
		}
	}
	for x := 0.0; x < 60; x += 0.0137 {
		if got, want := halved(x), math.Exp2(-x); math.Abs(got-want) > 1e-8*want {
			t.Errorf("halved(%v) = %v, want %v", x, got, want)
		}
	}
	for _, x := range []float64{1000, math.Inf(1)} {
		if got := halved(x); got != 0 {
			t.Errorf("halved(%v) = %v", x, got)
		}
	}
}

// TestFreshOfLongPrompts: it is counted as a part, which fades with the whole.
func TestFreshOfLongPrompts(t *testing.T) {
	l, a := New(), newRank(0, "a")
	l.Reserve(a, Claim{PrefillTokens: 1000, Long: true}).Release()
	l.Reserve(a, Claim{PrefillTokens: 500}).Release()
	if got := l.Load(a); got.Fresh < 1495 || got.Fresh-got.FreshLong != 500 {
		t.Errorf("%d fresh tokens, %d of long prompts", got.Fresh, got.FreshLong)
	}
	l.Reserve(a, Claim{PrefillTokens: HalfLifeTokens}).Release()
	if got := l.Load(a); got.FreshLong != 499 && got.FreshLong != 500 {
		t.Errorf("%d of long prompts after a half-life", got.FreshLong)
	}
}

// TestLoadedTokensAreFresh: KV that is sent to a rank takes its place in the
// cache as computed KV does, but it is no prefill work.
func TestLoadedTokensAreFresh(t *testing.T) {
	l, a := New(), newRank(0, "a")
	v := l.Reserve(a, Claim{LoadTokens: 1000, ContextTokens: 1000, BlockSize: 16})
	if got := l.Load(a); got.Fresh != 1000 || got.PrefillTokens != 0 || got.DecodeBlocks != 63 {
		t.Errorf("%+v, want 1000 fresh tokens and no prefill", got)
	}
	v.Release()
	l.Reserve(a, Claim{PrefillTokens: -5, LoadTokens: -5}).Release()
	if got := l.Load(a); got.Fresh != 1000 {
		t.Errorf("%d fresh tokens after less than nothing came", got.Fresh)
	}
}

// The ledger agrees with a list of what is in flight, whatever is done in
// whatever order, slots used again included.
func TestModel(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		type entry struct {
			v        *Reservation
			r        *workers.Rank
			claim    Claim
			first    bool
			progress int
		}
		l := New()
		var ranks []*workers.Rank
		for i := range 4 {
			ranks = append(ranks, newRank(uint32(i), fmt.Sprintf("w%d/dp0", i)))
		}
		var live []*entry
		var left []*workers.Rank // their slots went to others
		pick := func(t *rapid.T) *entry {
			if len(live) == 0 {
				t.Skip("nothing in flight")
			}
			return live[rapid.IntRange(0, len(live)-1).Draw(t, "which")]
		}
		t.Repeat(map[string]func(*rapid.T){
			"reserve": func(t *rapid.T) {
				r := rapid.SampledFrom(ranks).Draw(t, "rank")
				if len(left) > 0 && rapid.IntRange(0, 3).Draw(t, "late") == 0 {
					r = rapid.SampledFrom(left).Draw(t, "left")
				}
				c := Claim{PrefillTokens: rapid.IntRange(0, 500).Draw(t, "prefill"), ContextTokens: rapid.IntRange(0, 500).Draw(t, "context"), BlockSize: rapid.SampledFrom([]int{0, 16, 64}).Draw(t, "bs")}
				live = append(live, &entry{v: l.Reserve(r, c), r: r, claim: c})
			},
			"first": func(t *rapid.T) { e := pick(t); e.v.FirstToken(); e.first = true },
			"progress": func(t *rapid.T) {
				e := pick(t)
				n := rapid.IntRange(0, 300).Draw(t, "n")
				e.v.Progress(n)
				e.progress = max(e.progress, n)
			},
			"release": func(t *rapid.T) {
				e := pick(t)
				e.v.Release()
				for i, x := range live {
					if x == e {
						live = append(live[:i], live[i+1:]...)
						break
					}
				}
			},
			"replace": func(t *rapid.T) {
				i := rapid.IntRange(0, len(ranks)-1).Draw(t, "slot")
				if rapid.Bool().Draw(t, "forget") {
					l.Forget(ranks[i])
				}
				left = append(left, ranks[i])
				ranks[i] = newRank(uint32(i), ranks[i].Label+"'")
			},
			"": func(t *rapid.T) {
				want, total := map[*workers.Rank]Amounts{}, Amounts{}
				for _, e := range live {
					a := want[e.r]
					a.Requests++
					total.Requests++
					if e.first {
						a.Answering++
						total.Answering++
					} else {
						a.PrefillTokens += e.claim.PrefillTokens
						total.PrefillTokens += e.claim.PrefillTokens
					}
					if e.claim.BlockSize > 0 && e.claim.ContextTokens > 0 {
						n := (e.claim.ContextTokens + e.progress + e.claim.BlockSize - 1) / e.claim.BlockSize
						a.DecodeBlocks += n
						total.DecodeBlocks += n
					}
					want[e.r] = a
				}
				for _, r := range ranks {
					if got := l.Load(r).Amounts; got != want[r] {
						t.Fatalf("%s: %+v, want %+v", r.Label, got, want[r])
					}
				}
				if got := l.Total(); got != total {
					t.Fatalf("total %+v, want %+v", got, total)
				}
				if (l.Balanced() == nil) != (total == Amounts{}) {
					t.Fatalf("Balanced() = %v with %+v in flight", l.Balanced(), total)
				}
			},
		})
	})
}

func TestConcurrent(t *testing.T) {
	l := New()
	const writers, rounds = 8, 300
	var wg sync.WaitGroup
	stop := make(chan struct{})
	shared := newRank(0, "shared")
	var readers sync.WaitGroup
	readers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if a := l.Load(shared); a.Requests < 0 || a.PrefillTokens < 0 || a.DecodeBlocks < 0 || a.Fresh < 0 {
					t.Errorf("negative load %+v", a)
					return
				}
				_ = l.Total()
			}
		}
	})
	for w := range writers {
		wg.Go(func() {
			own := newRank(1, fmt.Sprintf("w%d", w)) // all fight for slot 1
			for i := range rounds {
				for _, r := range []*workers.Rank{shared, own} {
					v := l.Reserve(r, Claim{PrefillTokens: i, ContextTokens: i, BlockSize: 16})
					var inner sync.WaitGroup
					inner.Go(v.FirstToken)
					inner.Go(func() { v.Progress(i) })
					inner.Go(func() { v.Release() })
					inner.Wait()
				}
				if i%17 == 0 {
					l.Forget(own)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	readers.Wait()
	if err := l.Balanced(); err != nil {
		t.Error(err)
	}
	if got := l.DoubleReleases(); got != 0 {
		t.Errorf("%d double releases", got)
	}
}

func TestLoadAllocatesNothing(t *testing.T) {
	l, r := New(), newRank(0, "a")
	v := l.Reserve(r, Claim{PrefillTokens: 9})
	if n := testing.AllocsPerRun(100, func() { _ = l.Load(r) }); n != 0 {
		t.Errorf("Load: %v allocations", n)
	}
	if n := testing.AllocsPerRun(100, func() { v.Progress(3) }); n != 0 {
		t.Errorf("Progress: %v allocations", n)
	}
	v.Release()
}

func BenchmarkReserveRelease(b *testing.B) {
	l, r := New(), newRank(0, "a")
	b.ReportAllocs()
	for b.Loop() {
		v := l.Reserve(r, Claim{PrefillTokens: 100, ContextTokens: 100, BlockSize: 16})
		v.FirstToken()
		v.Progress(16)
		v.Release()
	}
}

func BenchmarkLoad256(b *testing.B) {
	l := New()
	ranks := make([]*workers.Rank, 256)
	for i := range ranks {
		ranks[i] = newRank(uint32(i), "r")
		l.Reserve(ranks[i], Claim{PrefillTokens: i + 1})
	}
	b.ReportAllocs()
	for b.Loop() {
		for _, r := range ranks {
			_ = l.Load(r)
		}
	}
}
