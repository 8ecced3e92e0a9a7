package control

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/wait"
)

// drainOf is a drain with terms, its limiter and its events.
func drainOf(leave, drain time.Duration) (*Drain, *admission.Limiter, *[]string) {
	limiter, events := admission.NewLimiter(admission.Limits{}), new([]string)
	return NewDrain(limiter, func() (time.Duration, time.Duration) { return leave, drain }, func(e eventlog.Event) { *events = append(*events, e.Kind+": "+e.Text) }), limiter, events
}

func arrive(t *testing.T, l *admission.Limiter) {
	t.Helper()
	if err := l.Arrive(); err != nil {
		t.Fatal(err)
	}
}

// TestBegin: whoever begins sets the time; nobody else changes it, and there is one event.
func TestBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, limiter, events := drainOf(5*time.Second, time.Minute)
		arrive(t, limiter)
		select {
		case <-d.Begun():
			t.Error("it has begun by itself")
		default:
		}
		if d.On() || d.State() != nil {
			t.Errorf("%+v", d.State())
		}
		began := time.Now()
		d.Begin(10 * time.Second)
		<-d.Begun()
		wait.For(t.Context(), time.Second)
		d.Begin(time.Hour)
		want := &admin.DrainState{Since: began, Closes: began.Add(5 * time.Second), Until: began.Add(15 * time.Second), Inflight: 1}
		if diff := cmp.Diff(want, d.State()); diff != "" || !d.On() {
			t.Errorf("it drains: %t (-want +got):\n%s", d.On(), diff)
		}
		if len(*events) != 1 || !strings.HasPrefix((*events)[0], "router_draining: the router drains: 1 request(s) in progress may finish within 10s, new ones are served for 5s before that") {
			t.Errorf("%q", *events)
		}
		arrive(t, limiter) // they are still served
	})
}

// TestAtOnce: without a time to leave, no request is let in after the beginning.
func TestAtOnce(t *testing.T) {
	d, limiter, events := drainOf(0, time.Minute)
	d.Begin(0)
	if err := limiter.Arrive(); !errors.Is(err, admission.ErrClosed) {
		t.Error(err)
	}
	if s := d.State(); !s.Closes.Equal(s.Since) || s.Until.Sub(s.Since) != time.Minute || !strings.Contains((*events)[0], "within 1m0s, new ones are refused") {
		t.Errorf("%+v, %q", s, *events)
	}
}

// TestEnd: new requests are served until Leave is over, and running ones have their time
// from then on.
func TestEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, limiter, _ := drainOf(5*time.Second, time.Minute)
		began := time.Now()
		d.Leave(t.Context())
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("left after %s", took)
		}
		d.Leave(t.Context()) // is over
		arrive(t, limiter)
		go func() {
			wait.For(t.Context(), 30*time.Second)
			limiter.Depart()
		}()
		if err := d.End(t.Context()); err != nil || time.Since(began) != 35*time.Second {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		if err := limiter.Arrive(); !errors.Is(err, admission.ErrClosed) {
			t.Error(err)
		}
		if err := d.End(t.Context()); err != nil {
			t.Errorf("once more: %v", err)
		}
	})
}

// TestCut: requests that take longer are counted, and a caller that gives up ends both
// waits.
func TestCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, limiter, _ := drainOf(5*time.Second, time.Minute)
		arrive(t, limiter)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		d.Leave(ended)
		if err := d.End(ended); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "1 request(s) still running") || time.Since(began) != 0 {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		if err := d.End(t.Context()); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 65*time.Second {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		limiter.Depart()
		if err := d.End(t.Context()); err != nil {
			t.Errorf("nothing runs any more: %v", err)
		}
	})
}
