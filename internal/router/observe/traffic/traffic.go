// Package traffic counts what a router's requests came to and how long they
// took, in fixed memory: a request adds a few numbers, and the admin API reads
// them.
package traffic

import (
	"context"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/wait"
)

// Traffic is what a router's requests came to. Counters only grow; quantiles
// are over the last one to two half minutes. The zero value is ready.
type Traffic struct {
	// Requests as the client sees them.
	Requests, Completed, Failed, Cancelled, Rejected atomic.Uint64
	// Plans, and how they ended.
	Local, Remote, Fallbacks, Retries, Recomputes atomic.Uint64
	// Tokens of good requests: as the engines report, and as was predicted.
	Prompt, Cached, Predicted, Completion atomic.Uint64
	// Planned is the prompt tokens of requests that had a prediction, the
	// divisor of the hit share.
	Planned atomic.Uint64

	TTFT, ITL, E2E, Overhead Window
}

// HitShare is the share of prompt tokens that were predicted to be cached, nil
// before the first prompt.
func (t *Traffic) HitShare() *float64 {
	planned := t.Planned.Load()
	if planned == 0 {
		return nil
	}
	return new(float64(t.Predicted.Load()) / float64(planned))
}

// Figures are the counters and quantiles as the admin API shows them.
func (t *Traffic) Figures() admin.Traffic {
	return admin.Traffic{
		Requests: t.Requests.Load(), Completed: t.Completed.Load(), Failed: t.Failed.Load(), Cancelled: t.Cancelled.Load(), Rejected: t.Rejected.Load(),
		Local: t.Local.Load(), Remote: t.Remote.Load(), Fallbacks: t.Fallbacks.Load(), Retries: t.Retries.Load(), Recomputes: t.Recomputes.Load(),
		PromptTokens: t.Prompt.Load(), CachedTokens: t.Cached.Load(), PredictedTokens: t.Predicted.Load(), CompletionTokens: t.Completion.Load(),
		TTFT: t.TTFT.quantiles(time.Millisecond), ITL: t.ITL.quantiles(time.Millisecond), E2E: t.E2E.quantiles(time.Millisecond), Overhead: t.Overhead.quantiles(time.Microsecond),
	}
}

// Ended counts a request that has ended with a status. cut says that its answer had
// begun and broke off, gone that it was the client who left.
func (t *Traffic) Ended(status int, cut, gone bool, took time.Duration) {
	switch {
	case gone:
		t.Cancelled.Add(1)
	case status >= 500 || cut:
		t.Failed.Add(1)
	case status >= 400:
		t.Rejected.Add(1)
	default:
		t.Completed.Add(1)
		t.E2E.Add(took)
	}
}

// Run turns the windows until ctx ends.
func (t *Traffic) Run(ctx context.Context) error {
	for range wait.Every(ctx, 30*time.Second) {
		t.Rotate()
	}
	return nil
}

// Rotate begins another half minute of the windows.
func (t *Traffic) Rotate() {
	for _, w := range []*Window{&t.TTFT, &t.ITL, &t.E2E, &t.Overhead} {
		w.rotate()
	}
}

// Window is a histogram of durations over the present and the last half
// minute, with eight buckets to a power of two: quantiles are within 9 %. It is not of the
// HDR module, which the benchmark's reports use, because pace counts every token in the
// same buckets by one atomic operation, which that has none for.
type Window struct {
	mu   sync.Mutex
	half [2]histogram
	at   int
}

type histogram struct {
	count  uint64
	max    time.Duration
	bucket [Buckets]uint32
}

// Buckets is the number of buckets of durations, eight to a power of two.
const Buckets = 42 * 8

// Bucket is the one that a duration falls into.
func Bucket(d time.Duration) int {
	n := uint64(max(d, 0)) >> 7 // steps of 128 ns
	if n < 8 {
		return int(n)
	}
	e := bits.Len64(n) - 4
	return min((e+1)*8+int(n>>e)-8, Buckets-1)
}

// BucketTop is the greatest duration of a bucket.
func BucketTop(i int) time.Duration {
	if i < 8 {
		return time.Duration((i + 1) << 7)
	}
	e, m := i/8-1, i%8
	return time.Duration(uint64(m+9) << e << 7)
}

// Add counts a duration.
func (w *Window) Add(d time.Duration) {
	i := Bucket(d)
	w.mu.Lock()
	h := &w.half[w.at]
	h.count++
	h.bucket[i]++
	h.max = max(h.max, d)
	w.mu.Unlock()
}

func (w *Window) rotate() {
	w.mu.Lock()
	w.at ^= 1
	w.half[w.at] = histogram{}
	w.mu.Unlock()
}

// quantiles are nil without samples; unit is the duration that counts as 1.
func (w *Window) quantiles(unit time.Duration) *admin.Quantiles {
	w.mu.Lock()
	sum := w.half[0]
	other := &w.half[1]
	sum.count += other.count
	sum.max = max(sum.max, other.max)
	for i, n := range other.bucket {
		sum.bucket[i] += n
	}
	w.mu.Unlock()
	if sum.count == 0 {
		return nil
	}
	value := func(q float64) float64 {
		rank := uint64(math.Ceil(q * float64(sum.count)))
		var seen uint64
		for i, n := range sum.bucket {
			if seen += uint64(n); seen >= rank {
				return float64(min(BucketTop(i), sum.max)) / float64(unit)
			}
		}
		return float64(sum.max) / float64(unit)
	}
	return &admin.Quantiles{Count: sum.count, P50: value(.5), P90: value(.9), P99: value(.99), Max: float64(sum.max) / float64(unit)}
}

// Gaps sums up the time between the pieces of a stream.
type Gaps struct {
	last  time.Time
	count int
	sum   time.Duration
	max   time.Duration
	hist  histogramLite
}

// histogramLite counts gaps in 32 buckets, two to a power of two from 128 µs.
type histogramLite [32]uint16

// Tick notes that a piece has come, and gives the gap before it: 0 for the first.
func (g *Gaps) Tick(now time.Time) (d time.Duration) {
	if !g.last.IsZero() {
		d = now.Sub(g.last)
		g.count++
		g.sum += d
		g.max = max(g.max, d)
		i := min(Bucket(d)/4, 63) - 20
		if h := &g.hist[max(0, min(i, 31))]; *h < 65535 {
			*h++
		}
	}
	g.last = now
	return d
}

// Count is the number of gaps.
func (g *Gaps) Count() int { return g.count }

// Mean is the mean gap; there must be one.
func (g *Gaps) Mean() time.Duration { return g.sum / time.Duration(g.count) }

// Max is the longest gap.
func (g *Gaps) Max() time.Duration { return g.max }

// Quantile is within a half of the exact one; there must be a gap.
func (g *Gaps) Quantile(q float64) time.Duration {
	total := 0
	for _, n := range g.hist {
		total += int(n)
	}
	rank, seen := int(q*float64(total)+0.999999), 0
	for i, n := range g.hist {
		if seen += int(n); seen >= rank && n > 0 {
			return min(BucketTop((i+20)*4+3), g.max)
		}
	}
	return g.max
}
