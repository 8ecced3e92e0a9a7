package serving_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// cold is a fleet whose workers are all unhealthy, and whose requests wait for one.
func cold(t *testing.T, fleet string, configure ...func(*settings.Config)) *fakeengine.Router {
	t.Helper()
	r := fakeengine.New(t, fleet, append(configure, func(c *settings.Config) {
		c.Limits.WaitForWorker, c.Limits.QueueTimeout = true, 10*time.Second
	})...)
	setHealth(r, workers.Unhealthy)
	return r
}

// setHealth gives all workers a health. The queue looks at it as it does by the clock.
func setHealth(r *fakeengine.Router, h workers.Health) {
	for _, w := range r.Registry.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: h})
	}
	r.Queue.Wake()
}

// TestFirstWorkerComes: a request waits while its model has no usable worker, and is read and
// served once one comes: the same one, or a new one.
func TestFirstWorkerComes(t *testing.T) {
	busy := func(c *settings.Config) { c.Routing.Busy.Requests = 1 }
	none := func(*settings.Config) {}
	specs := fakeengine.Specs(t, "1a")
	for _, c := range []struct {
		name, fleet string
		configure   func(*settings.Config)
		comes       func(r *fakeengine.Router)
	}{
		{"healthy again", "1a", none, func(r *fakeengine.Router) { setHealth(r, workers.Healthy) }},
		{"with limits", "1a", busy, func(r *fakeengine.Router) { setHealth(r, workers.Healthy) }},
		{"pair", "1p1d", none, func(r *fakeengine.Router) { setHealth(r, workers.Healthy) }},
		{"new", "0a", none, func(r *fakeengine.Router) {
			r.Apply(specs)
			r.Queue.Wake()
		}},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(c.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := cold(t, c.fleet, c.configure)
					time.AfterFunc(3*time.Second, func() {
						if q := r.Queue.States(); len(q) != 1 || q[0].Queue != "m" {
							t.Errorf("queues %+v, want that of m", q)
						}
						c.comes(r)
					})
					got := r.Send(t.Context(), ask(stream, ""))
					if !whole(got, stream) {
						t.Errorf("%s", got)
					}
					if n := len(got.Receipt.Earlier); got.Receipt.QueuedMS != 3000 || !strings.Contains(got.Receipt.QueuedFor, "no usable decode worker") || n != 0 {
						t.Errorf("waited %v ms for %q, after %d decisions", got.Receipt.QueuedMS, got.Receipt.QueuedFor, n)
					}
					if s := notes(got); strings.Contains(s, "not tokenized") {
						t.Errorf("it was not read again: %s", s)
					}
					noFailure(t, r)
				})
			})
		}
	}
}

// TestNoWorkerComes: after its limit of time a request is refused, as it is immediately where
// the queue is full, or the setting is off.
func TestNoWorkerComes(t *testing.T) {
	for _, c := range []struct {
		name, words string
		configure   func(*settings.Config)
		header      http.Header
		took        time.Duration
	}{
		{"limit", "waited too long in the queue; m had no usable decode worker", func(*settings.Config) {}, nil, 10 * time.Second},
		{"patience", "waited too long", func(*settings.Config) {}, http.Header{"X-Dynctl-Max-Wait": {"2"}}, 2 * time.Second},
		{"full", "queue is full", func(c *settings.Config) { c.Limits.Queue = 0 }, nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := cold(t, "1a", c.configure)
				q, began := ask(false, ""), time.Now()
				q.Header = c.header
				got := r.Send(t.Context(), q)
				if got.Status != http.StatusServiceUnavailable || got.Err == nil || got.Err.Code != "no_decode_worker" || !strings.Contains(got.Err.Message, c.words) || got.Err.RetryAfter <= 0 {
					t.Errorf("%s", got)
				}
				if took := time.Since(began); took != c.took {
					t.Errorf("refused after %v, want %v", took, c.took)
				}
				if n := r.Queue.Waiting(); n > 0 {
					t.Errorf("%d requests wait", n)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		r := fakeengine.New(t, "1a")
		setHealth(r, workers.Unhealthy)
		began := time.Now()
		if got := r.Send(t.Context(), ask(false, "")); got.Status != http.StatusServiceUnavailable || time.Since(began) > 0 {
			t.Errorf("%s after %v without the setting", got, time.Since(began))
		}
	})
}

// TestClientLeavesColdQueue: a client that leaves frees its place.
func TestClientLeavesColdQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := cold(t, "1a")
		ctx, leave := context.WithTimeout(t.Context(), 2*time.Second)
		defer leave()
		if got := r.Send(ctx, ask(false, "")); got.Status != 499 {
			t.Errorf("%s", got)
		}
		if n := r.Queue.Waiting(); n > 0 {
			t.Errorf("%d requests wait", n)
		}
	})
}

// TestColdQueueHasPriorities: when a worker comes, requests of a higher priority go first.
func TestColdQueueHasPriorities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := cold(t, "1a", func(c *settings.Config) { c.Routing.Busy.Requests = 1 })
		var wg sync.WaitGroup
		for _, band := range []string{"low", "normal"} {
			wg.Go(func() {
				q := ask(false, `,"user":"`+band+`"`)
				q.Header = http.Header{"X-Dynctl-Priority": {band}}
				if got := r.Send(t.Context(), q); !whole(got, false) {
					t.Errorf("%s", got)
				}
			})
			synctest.Wait()
		}
		setHealth(r, workers.Healthy)
		wg.Wait()
		if list := r.Requests(""); len(list) != 2 || !strings.Contains(string(list[0].Body), "normal") {
			t.Errorf("%d requests, the first one %s", len(list), list[0].Body)
		}
	})
}

// TestWorkerDiesWhileTheyWait: of requests that wait, a worker that comes and dies at once costs
// only the one that had reached it; the others keep their places until it is back.
func TestWorkerDiesWhileTheyWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := cold(t, "1a", func(c *settings.Config) { c.Routing.Busy.Requests = 1 })
		r.Always("aggregated-0", func(*fakeengine.Request) fakeengine.Answer {
			r.Always("aggregated-0", r.Serves)
			setHealth(r, workers.Unhealthy)
			return fakeengine.Fails(upstream.Connect, false).After(time.Second)
		})
		for _, at := range []time.Duration{2 * time.Second, 6 * time.Second} {
			time.AfterFunc(at, func() { setHealth(r, workers.Healthy) })
		}
		var wg sync.WaitGroup
		var served atomic.Int64
		for range 3 {
			wg.Go(func() {
				switch got := r.Send(t.Context(), ask(false, "")); {
				case got.Receipt.QueuedMS < 6000: // it had reached the worker
				case whole(got, false):
					served.Add(1)
				default:
					t.Errorf("%s", got)
				}
			})
		}
		wg.Wait()
		if n := served.Load(); n != 2 {
			t.Errorf("%d requests were served when the worker was back, want 2", n)
		}
	})
}
