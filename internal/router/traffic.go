package router

import (
	"context"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/admin"
)

// traffic counts what the status page shows. Counters only grow; quantiles are
// over the last one to two half minutes.
type traffic struct {
	requests, completed, failed, cancelled, rejected atomic.Uint64
	local, remote, fallbacks, retries, recomputes    atomic.Uint64
	prompt, cached, predicted, completion            atomic.Uint64
	// guessed is the prompt tokens of requests that had a prediction, the
	// divisor of the hit share.
	planned atomic.Uint64

	ttft, itl, e2e, overhead window
}

// run turns the windows until ctx ends.
func (t *traffic) run(ctx context.Context) error {
	tick := time.NewTicker(30 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			for _, w := range []*window{&t.ttft, &t.itl, &t.e2e, &t.overhead} {
				w.turn()
			}
		}
	}
}

// window is a histogram of durations over the present and the last half
// minute, with eight buckets to a power of two: quantiles are within 9 %.
type window struct {
	mu   sync.Mutex
	half [2]histogram
	at   int
}

type histogram struct {
	count  uint64
	max    time.Duration
	bucket [42 * 8]uint32
}

func bucketOf(d time.Duration) int {
	n := uint64(max(d, 0)) >> 7 // steps of 128 ns
	if n < 8 {
		return int(n)
	}
	e := bits.Len64(n) - 4
	return min((e+1)*8+int(n>>e)-8, 42*8-1)
}

// bucketTop is the greatest duration of a bucket.
func bucketTop(i int) time.Duration {
	if i < 8 {
		return time.Duration((i + 1) << 7)
	}
	e, m := i/8-1, i%8
	return time.Duration(uint64(m+9) << e << 7)
}

// add counts a duration.
func (w *window) add(d time.Duration) {
	i := bucketOf(d)
	w.mu.Lock()
	h := &w.half[w.at]
	h.count++
	h.bucket[i]++
	h.max = max(h.max, d)
	w.mu.Unlock()
}

func (w *window) turn() {
	w.mu.Lock()
	w.at ^= 1
	w.half[w.at] = histogram{}
	w.mu.Unlock()
}

// quantiles are nil without samples; unit is the duration that counts as 1.
func (w *window) quantiles(unit time.Duration) *admin.Quantiles {
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
				return float64(min(bucketTop(i), sum.max)) / float64(unit)
			}
		}
		return float64(sum.max) / float64(unit)
	}
	return &admin.Quantiles{Count: sum.count, P50: value(.5), P90: value(.9), P99: value(.99), Max: float64(sum.max) / float64(unit)}
}

// retryBudget keeps retries a bounded share of the traffic, so that a fleet in
// trouble is not hit by a multiple of its load. A floor lets a quiet router
// retry at all.
type retryBudget struct {
	mu     sync.Mutex
	window [2]budgetCount // the present and the last ten seconds
	turned time.Time
}

type budgetCount struct{ requests, retries float64 }

const (
	budgetWindow = 10 * time.Second
	budgetFloor  = 10
)

func (b *retryBudget) rotate(now time.Time) {
	if d := now.Sub(b.turned); d >= budgetWindow {
		b.window[1] = b.window[0]
		if d >= 2*budgetWindow {
			b.window[1] = budgetCount{}
		}
		b.window[0] = budgetCount{}
		b.turned = now
	}
}

// request counts a request.
func (b *retryBudget) request(now time.Time) {
	b.mu.Lock()
	b.rotate(now)
	b.window[0].requests++
	b.mu.Unlock()
}

// take asks for a retry and counts it when it is granted.
func (b *retryBudget) take(now time.Time, share float64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rotate(now)
	requests := b.window[0].requests + b.window[1].requests
	retries := b.window[0].retries + b.window[1].retries
	if retries >= budgetFloor+share*requests {
		return false
	}
	b.window[0].retries++
	return true
}

// stickyResponses remembers which worker holds the state of a response of the
// Responses API. When it is full, the entry that was stored first goes.
type stickyResponses struct {
	mu    sync.Mutex
	max   int
	byID  map[string]string
	order []string
	head  int
}

func newStickyResponses(limit int) *stickyResponses {
	return &stickyResponses{max: limit, byID: map[string]string{}}
}

func (s *stickyResponses) put(id, worker string) {
	if id == "" || len(id) > 256 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.byID[id]; !known {
		if len(s.byID) >= s.max {
			delete(s.byID, s.order[s.head])
			s.order[s.head] = id
			s.head = (s.head + 1) % s.max
		} else {
			s.order = append(s.order, id)
		}
	}
	s.byID[id] = worker
}

func (s *stickyResponses) get(id string) (worker string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	worker, ok = s.byID[id]
	return worker, ok
}
