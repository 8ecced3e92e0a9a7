package attempt

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxRepeats bounds the requests that are remembered; the oldest makes room.
	maxRepeats = 1024
	// maxRepeatFailures bounds what is remembered of one request.
	maxRepeatFailures = 16
	// repeatFor is how long after its last failure a request is remembered.
	repeatFor = 10 * time.Minute
)

// Repeats finds requests that fail wherever they are sent: if two engines broke on the same
// bytes, and none has answered them, the request is as likely at fault as the engines, and its
// failures count against no engine. It remembers requests from one to the next, because a client
// that sends the same prompt again and again soon has no retries left, and each of its requests
// then meets one engine.
//
// The zero value is ready. It is safe for concurrent use.
type Repeats struct {
	any   atomic.Bool // whether list has entries
	mu    sync.Mutex
	list  []repeat    // the one that failed longest ago first
	sizes map[int]int // how many of them have bodies of a size
}

// RequestKey identifies a request by its bytes.
type RequestKey struct {
	// Size is the length of the body in bytes: requests of another size need no hash.
	Size int
	// Hash is that of the body, by a function of the caller's choice.
	Hash uint64
}

type repeat struct {
	key       RequestKey
	at        time.Time // of the last failure
	failures  []Failure // that count against their engines so far
	uncounted bool
}

// Failed takes the failures of a request that has failed, and returns those that count
// against no engine: none while one engine alone broke on the request.
func (r *Repeats) Failed(key RequestKey, h *History, now time.Time) (uncounted []Failure) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forget(now)
	i := r.find(key)
	for _, f := range h.Failures {
		if !f.broke() {
			continue
		}
		if i < 0 {
			if len(r.list) == maxRepeats {
				r.drop(0)
			}
			if r.sizes == nil {
				r.sizes = map[int]int{}
			}
			r.sizes[key.Size]++
			r.list = append(r.list, repeat{key: key})
			i = len(r.list) - 1
		}
		if e := &r.list[i]; len(e.failures) < maxRepeatFailures {
			e.failures = append(e.failures, f)
		} else {
			e.failures[maxRepeatFailures-1] = f
		}
	}
	if i < 0 {
		return nil
	}
	e := r.list[i]
	e.at = now
	if e.uncounted = e.uncounted || slices.ContainsFunc(e.failures, func(f Failure) bool { return f.Worker != e.failures[0].Worker }); e.uncounted {
		uncounted = slices.Clone(e.failures)
		e.failures = e.failures[:0]
	}
	r.list = append(slices.Delete(r.list, i, i+1), e)
	r.any.Store(true)
	return uncounted
}

// Watches reports whether a request with a body of this size is remembered: only then is
// the hash for Served worth its time.
func (r *Repeats) Watches(size int, now time.Time) bool {
	if !r.any.Load() {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forget(now)
	return r.sizes[size] > 0
}

// Served forgets a request: an engine has answered it, so that engines that broke on it
// did so for reasons of their own.
func (r *Repeats) Served(key RequestKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := r.find(key); i >= 0 {
		r.drop(i)
	}
}

// drop forgets a request.
func (r *Repeats) drop(i int) {
	size := r.list[i].key.Size
	if r.sizes[size]--; r.sizes[size] == 0 {
		delete(r.sizes, size)
	}
	r.list = slices.Delete(r.list, i, i+1)
	r.any.Store(len(r.list) > 0)
}

func (r *Repeats) find(key RequestKey) int {
	return slices.IndexFunc(r.list, func(e repeat) bool { return e.key == key })
}

// forget drops requests that have not failed for long.
func (r *Repeats) forget(now time.Time) {
	for len(r.list) > 0 && now.Sub(r.list[0].at) >= repeatFor {
		r.drop(0)
	}
}

// WhyUncounted returns in words why failures count against no engine.
func WhyUncounted(uncounted []Failure) string {
	var names []string
	for i := range uncounted {
		if !slices.Contains(names, uncounted[i].Name) {
			names = append(names, uncounted[i].Name)
		}
	}
	return strings.Join(names, ", ") + " broke while working on this request; it failed wherever it was sent, and counts against no engine"
}
