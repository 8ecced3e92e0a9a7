package traffic

import (
	"context"
	"math"
	"math/rand/v2"
	"sort"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestWindowQuantilesAreWithinNinePercent(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var w Window
	var all []float64
	for range 20_000 {
		d := time.Duration(math.Exp(rng.Float64()*16) * 1000)
		w.Add(d)
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
	w.rotate()
	if q := w.quantiles(time.Nanosecond); q == nil || q.Count != 20_000 {
		t.Fatalf("after one turn: %+v", q)
	}
	w.rotate()
	if q := w.quantiles(time.Nanosecond); q != nil {
		t.Fatalf("after two turns: %+v", q)
	}
	for d := time.Duration(0); d < time.Hour; d = d*3/2 + 1 {
		if i := Bucket(d); d > BucketTop(i) || (i > 0 && d <= BucketTop(i-1)-128) {
			t.Fatalf("%v is in bucket %d up to %v", d, i, BucketTop(i))
		}
	}
}

// TestGaps: the figures of a stream's pace are those of its pieces.
func TestGaps(t *testing.T) {
	var g Gaps
	now := time.Unix(100, 0)
	for g.Tick(now); g.Count() < 100; g.Tick(now) {
		d := 10 * time.Millisecond
		if g.Count() == 42 {
			d = time.Second
		}
		now = now.Add(d)
	}
	if g.Mean() != 19900*time.Microsecond || g.Max() != time.Second {
		t.Errorf("mean %v, max %v", g.Mean(), g.Max())
	}
	if p50, p99 := g.Quantile(.5), g.Quantile(.995); p50 < 10*time.Millisecond || p50 > 15*time.Millisecond || p99 != time.Second {
		t.Errorf("p50 %v, p99.5 %v", p50, p99)
	}
}

func TestFigures(t *testing.T) {
	var c Traffic
	if f := c.Figures(); f.TTFT != nil || c.HitShare() != nil {
		t.Errorf("figures of nothing: %+v", f)
	}
	c.Requests.Add(3)
	c.Predicted.Add(25)
	c.Planned.Add(100)
	c.Overhead.Add(20 * time.Microsecond)
	f := c.Figures()
	want := f
	want.Requests, want.PredictedTokens = 3, 25
	if d := cmp.Diff(want, f); d != "" || f.Overhead.Max != 20 {
		t.Errorf("figures with an overhead of at most %v (-want +got):\n%s", f.Overhead.Max, d)
	}
	if d := cmp.Diff(new(.25), c.HitShare()); d != "" {
		t.Errorf("the share of hits (-want +got):\n%s", d)
	}
}

// TestEnded: a request counts once: as cancelled by whoever left, failed, rejected or
// completed, and only then with its time.
func TestEnded(t *testing.T) {
	var f Traffic
	for _, c := range []struct {
		status    int
		cut, gone bool
	}{{200, false, false}, {499, true, true}, {200, true, false}, {502, false, false}, {429, false, false}, {301, false, false}} {
		f.Ended(c.status, c.cut, c.gone, time.Second)
	}
	a := f.Figures()
	want := a
	want.Completed, want.Cancelled, want.Failed, want.Rejected = 2, 1, 2, 1
	if d := cmp.Diff(want, a); d != "" {
		t.Errorf("the figures (-want +got):\n%s", d)
	}
	if a.E2E == nil || a.E2E.Count != 2 {
		t.Errorf("times of requests: %+v", a.E2E)
	}
}

// TestRun: what is older than a minute at most leaves the quantiles.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f Traffic
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go f.Run(ctx)
		f.TTFT.Add(time.Second)
		<-time.After(31 * time.Second)
		synctest.Wait()
		if n := f.Figures().TTFT; n == nil || n.Count != 1 {
			t.Errorf("after half a minute: %+v", n)
		}
		<-time.After(30 * time.Second)
		synctest.Wait()
		if n := f.Figures().TTFT; n != nil {
			t.Errorf("after a minute: %+v", n)
		}
	})
}
