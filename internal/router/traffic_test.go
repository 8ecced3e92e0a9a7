package router

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sort"
	"testing"
	"time"
)

func TestWindowQuantilesAreWithinNinePercent(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var w window
	var all []float64
	for range 20_000 {
		d := time.Duration(math.Exp(rng.Float64()*16) * 1000)
		w.add(d)
		all = append(all, float64(d))
	}
	sort.Float64s(all)
	q := w.quantiles(time.Nanosecond)
	for _, c := range []struct {
		name      string
		got, want float64
	}{{"p50", q.P50, all[9_999]}, {"p90", q.P90, all[17_999]}, {"p99", q.P99, all[19_799]}, {"max", q.Max, all[19_999]}} {
		if r := c.got / c.want; r < 0.91 || r > 1.14 {
			t.Errorf("%s = %v, exact %v", c.name, c.got, c.want)
		}
	}
	w.turn()
	if q := w.quantiles(time.Nanosecond); q == nil || q.Count != 20_000 {
		t.Fatalf("after one turn: %+v", q)
	}
	w.turn()
	if q := w.quantiles(time.Nanosecond); q != nil {
		t.Fatalf("after two turns: %+v", q)
	}
	for d := time.Duration(0); d < time.Hour; d = d*3/2 + 1 {
		if i := bucketOf(d); d > bucketTop(i) || (i > 0 && d <= bucketTop(i-1)-128) {
			t.Fatalf("%v is in bucket %d up to %v", d, i, bucketTop(i))
		}
	}
}

func TestRetryBudgetIsAShareAboveAFloor(t *testing.T) {
	var b retryBudget
	now := time.Unix(100, 0)
	granted := func() (n int) {
		for range 1000 {
			if b.take(now, 0.2) {
				n++
			}
		}
		return n
	}
	if n := granted(); n != budgetFloor {
		t.Fatalf("a quiet router may retry %d times", n)
	}
	now = now.Add(budgetWindow)
	for range 100 {
		b.request(now)
	}
	if n := granted(); n != 20 {
		t.Fatalf("after 100 requests %d more retries", n)
	}
	now = now.Add(3 * budgetWindow)
	if n := granted(); n != budgetFloor {
		t.Fatalf("after a pause %d retries", n)
	}
}

func TestStickyResponsesAreBounded(t *testing.T) {
	s := newStickyResponses(3)
	for i := range 10 {
		s.put(fmt.Sprint(i), fmt.Sprint("w", i))
	}
	s.put("9", "other")
	if w, ok := s.get("9"); !ok || w != "other" || len(s.byID) != 3 || len(s.order) != 3 {
		t.Fatalf("%v %v, %d ids", w, ok, len(s.byID))
	}
	if _, ok := s.get("6"); ok {
		t.Fatal("the oldest id is still there")
	}
}
