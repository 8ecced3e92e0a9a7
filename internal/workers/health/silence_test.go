package health

import (
	"context"
	"net"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

// slow sets how long the engines of a fleet take to answer.
func (f *fleet) slow(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.delay = d
}

// TestSignsOfLife: probes that get no answer count only against a worker that shows no other
// sign of life, and the first sign makes a silent worker usable.
func TestSignsOfLife(t *testing.T) {
	monitored(t, Options{}, 0, vllmPages(1, ""), func(t *testing.T, f scene) {
		w, events := f.w, f.events
		expect(t, w, workers.Healthy, "")
		events.take()

		f.slow(time.Hour)
		for range 200 {
			w.State.Life().Sign(time.Now())
			elapse(100 * time.Millisecond)
		}
		expect(t, w, workers.Healthy, "")
		if lines := events.take(); slices.ContainsFunc(lines, func(s string) bool { return strings.HasPrefix(s, "health_changed") }) {
			t.Errorf("events %q", lines)
		}
		elapse(6 * time.Second)
		expect(t, w, workers.Unhealthy, "GET /health: no answer within 2s")
		if !w.State.Silent() || usable(w) {
			t.Errorf("silent: %v, usable: %v", w.State.Silent(), usable(w))
		}

		w.State.Life().Sign(time.Now())
		if w.State.Silent() || !usable(w) || w.State.Condition().Health != workers.Healthy {
			t.Error("a sign of life does not make the worker usable")
		}
		elapse(2 * time.Second)
		if p := w.State.Probed(); p.Health != workers.Healthy {
			t.Errorf("the prober does not notice the sign: %+v", p)
		}
		elapse(6 * time.Second)
		if usable(w) {
			t.Error("the worker is silent again, and usable")
		}

		// A probe waits at a silent engine, and is answered as the engine continues.
		probes := f.count("a:1/health")
		elapse(time.Minute)
		if n := f.count("a:1/health") - probes; n < 30 {
			t.Errorf("%d probes of 2 s in a minute", n)
		}
	})
}

// TestNoSilence: a worker that refuses connections or answers with an error is no silent
// one, whatever else it shows.
func TestNoSilence(t *testing.T) {
	monitored(t, Options{}, 0, vllmPages(1, ""), func(t *testing.T, f scene) {
		w := f.w
		expect(t, w, workers.Healthy, "")
		for _, pages := range []map[string]string{nil, {"/health": "status 503"}} {
			f.set("a:1", pages)
			for range 40 {
				w.State.Life().Sign(time.Now())
				elapse(100 * time.Millisecond)
			}
			if c := w.State.Condition(); c.Health != workers.Unhealthy || c.Silent {
				t.Errorf("pages %v: condition %+v", pages, c)
			}
		}
		// What it showed before it fell silent is no sign of life since.
		f.slow(time.Hour)
		elapse(10 * time.Second)
		if !w.State.Silent() || usable(w) {
			t.Errorf("silent: %v, usable: %v", w.State.Silent(), usable(w))
		}
		w.State.SetDraining(true)
		if w.State.Silent() {
			t.Error("a request may try a worker that drains")
		}
	})
}

// TestDeadPort: a port that takes no connection in time makes no silent worker.
func TestDeadPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := registry(t, nil, "http://a:1,name=a")
		w := get(t, reg, "a")
		dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
			httptrace.ContextClientTrace(ctx).ConnectStart("tcp", "a:1")
			<-ctx.Done()
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: ctx.Err()}
		}
		background(t, NewMonitor(reg, Options{Transport: &http.Transport{DialContext: dial}}, nil).Run)
		elapse(10 * time.Second)
		if c := w.State.Probed(); c.Health != workers.Unhealthy || c.Silent || c.Reason == "" {
			t.Errorf("%+v", c)
		}
	})
}

// TestSilentTriedOnce: the event that requests try a silent worker comes once for each time
// of silence.
func TestSilentTriedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := &log{}
		reg := registry(t, nil, "http://a:1,name=a")
		w, o := get(t, reg, "a"), NewOutliers(reg, OutlierOptions{}, events.sink)
		for range 2 {
			elapse(time.Second)
			w.State.SetCondition(workers.Condition{Health: workers.Unhealthy, Since: time.Now(), Silent: true})
			for range 3 {
				a, ok := o.Admit(w)
				if !ok {
					t.Fatal("a silent worker is not admitted")
				}
				o.Report(a, Success)
			}
			if lines := events.take(); len(lines) != 1 || !strings.HasPrefix(lines[0], "silent_worker_used: ") {
				t.Errorf("events %q", lines)
			}
		}
	})
}
