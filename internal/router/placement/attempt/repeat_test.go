package attempt

import (
	"fmt"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestRepeats: a request that broke two engines counts against none, in one try or over
// many, in both phases, until an engine answers it.
func TestRepeats(t *testing.T) {
	states := map[string]*workers.State{"a": {}, "b": {}, "c": {}}
	broke := func(name string, p route.Phase, r Reason) Failure {
		return Failure{Worker: states[name], Name: name, Phase: p, Reason: r, Sent: true}
	}
	poison, fine := RequestKey{Size: 5, Hash: 1}, RequestKey{Size: 5, Hash: 2}
	type step struct {
		key       RequestKey
		failures  []Failure
		served    bool
		after     time.Duration
		uncounted string // the workers, "[]" for none
	}
	for name, steps := range map[string][]step{
		"two engines in one try": {
			{key: poison, failures: []Failure{broke("a", decode, Status5xx), broke("b", decode, Status5xx)}, uncounted: "[a b]"},
		},
		"two engines in two requests": {
			{key: poison, failures: []Failure{broke("a", decode, Status5xx)}, uncounted: "[]"},
			{key: poison, failures: []Failure{broke("b", decode, Timeout)}, uncounted: "[a b]"},
			{key: poison, failures: []Failure{broke("a", decode, StreamError)}, uncounted: "[a]"},
			{key: poison, failures: []Failure{broke("c", decode, Status5xx)}, uncounted: "[c]"},
		},
		"prefill and decode": {
			{key: poison, failures: []Failure{broke("a", prefill, Status5xx), broke("b", decode, Reset)}, uncounted: "[a b]"},
		},
		"one engine, often": {
			{key: poison, failures: []Failure{broke("a", decode, Status5xx)}, uncounted: "[]"},
			{key: poison, failures: []Failure{broke("a", decode, Status5xx), broke("a", decode, Status5xx)}, uncounted: "[]"},
		},
		"two requests": {
			{key: poison, failures: []Failure{broke("a", decode, Status5xx)}, uncounted: "[]"},
			{key: fine, failures: []Failure{broke("b", decode, Status5xx)}, uncounted: "[]"},
		},
		"an engine answers it": {
			{key: poison, failures: []Failure{broke("a", decode, Status5xx)}, uncounted: "[]"},
			{key: poison, served: true},
			{key: poison, failures: []Failure{broke("b", decode, Status5xx)}, uncounted: "[]"},
		},
		"an engine answers another": {
			{key: poison, failures: []Failure{broke("a", decode, Status5xx)}, uncounted: "[]"},
			{key: fine, served: true},
			{key: poison, failures: []Failure{broke("b", decode, Status5xx)}, uncounted: "[a b]"},
		},
		"long ago": {
			{key: poison, failures: []Failure{broke("a", decode, Status5xx)}, uncounted: "[]"},
			{key: poison, after: repeatFor, failures: []Failure{broke("b", decode, Status5xx)}, uncounted: "[]"},
		},
		"what is no fault of an engine": {
			{key: poison, failures: []Failure{broke("a", decode, Overloaded), broke("b", decode, Status4xx), {Worker: states["c"], Name: "c", Reason: Connect}}, uncounted: "[]"},
			{key: poison, failures: []Failure{broke("a", decode, Status5xx), {Worker: states["c"], Name: "c", Reason: Reset}}, uncounted: "[]"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var r Repeats
			now := time.Unix(1_700_000_000, 0)
			for i, s := range steps {
				now = now.Add(s.after)
				if s.served {
					if !r.Watches(s.key.Size, now) {
						t.Errorf("step %d: requests of %d bytes are not watched", i, s.key.Size)
					}
					r.Served(s.key)
					continue
				}
				names := []string{}
				for _, f := range r.Failed(s.key, &History{Failures: s.failures}, now) {
					names = append(names, f.Name)
				}
				if got := fmt.Sprint(names); got != s.uncounted {
					t.Errorf("step %d: uncounted %s, want %s", i, got, s.uncounted)
				}
			}
		})
	}
}

// TestRepeatsIsBounded: the request that failed longest ago makes room, and of one request
// not everything is kept.
func TestRepeatsIsBounded(t *testing.T) {
	a, b := &workers.State{}, &workers.State{}
	var r Repeats
	if r.Watches(0, time.Now()) {
		t.Error("watches without a failure")
	}
	now := time.Unix(1_700_000_000, 0)
	fail := func(n int, w *workers.State) int {
		return len(r.Failed(RequestKey{Size: n}, &History{Failures: []Failure{{Worker: w, Reason: Reset, Sent: true}}}, now))
	}
	for n := range maxRepeats {
		fail(n, a)
	}
	fail(0, a) // is not the oldest now
	fail(maxRepeats, a)
	if r.Watches(1, now) || !r.Watches(0, now) || len(r.list) != maxRepeats {
		t.Errorf("%d requests are remembered, the first %v, the second %v", len(r.list), r.Watches(0, now), r.Watches(1, now))
	}
	for range 2 * maxRepeatFailures {
		fail(0, a)
	}
	if n := fail(0, b); n != maxRepeatFailures {
		t.Errorf("%d failures of one request, want %d", n, maxRepeatFailures)
	}
	if now = now.Add(repeatFor); r.Watches(0, now) || len(r.list)+len(r.sizes) > 0 {
		t.Errorf("after %v %d requests are remembered, of %d sizes", repeatFor, len(r.list), len(r.sizes))
	}
}
