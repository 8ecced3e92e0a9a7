package simulate

import (
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
)

// name gives requests of [sessions] their sessions, and all later turns a thinking time
// unless it is negative.
func name(all []arrivals.Request, n int, think time.Duration) []arrivals.Request {
	us := think.Microseconds()
	for i := range all {
		q := &all[i]
		q.SessionKey = selector.HashSession(fmt.Sprint("session ", i%n))
		if i >= n && think >= 0 {
			q.ThinkUS = &us
		}
	}
	return all
}

func closedSetup(t *testing.T, on string) Setup {
	return Setup{
		Fleet: fleet(t, on), Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()},
		Seed: 1, ClosedLoop: true, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond,
	}
}

// TestThinkingTime: a turn begins when the thinking time after the last answer is over, and
// not before; Speedup divides that time and leaves the answer's.
func TestThinkingTime(t *testing.T) {
	const think = 3 * time.Second
	starts := func(all []arrivals.Request, speedup float64) (at []time.Duration, res *Result) {
		t.Helper()
		s := closedSetup(t, "1a:block=16,kv_blocks=4096")
		s.Speedup = speedup
		s.Placed = func(_ *arrivals.Request, now time.Duration) { at = append(at, now) }
		res, err := Run(t.Context(), arrivals.FromSlice(all), s)
		if err != nil || res.Completed != uint64(len(all)) || !res.ClosedLoop {
			t.Fatalf("%+v, %v", res, err)
		}
		return at, res
	}
	at, res := starts(name(sessions(1, 5), 1, think), 1)
	answers := time.Duration(0)
	for i := range at[1:] {
		if at[i+1]-at[i] <= think {
			t.Errorf("turn %d begins %s after the one before, with a thinking time of %s", i+2, at[i+1]-at[i], think)
		}
		answers += at[i+1] - at[i] - think
	}
	// The mean of a histogram of three digits, over five answers of about the same length.
	if mean := answers.Seconds() * 1000 / 4; math.Abs(mean/res.E2E.Mean-1) > 0.1 {
		t.Errorf("turns begin a thinking time after %.2f ms, answers take %.2f", mean, res.E2E.Mean)
	}
	fast, _ := starts(name(sessions(1, 5), 1, think), 2)
	for i := range at {
		if saved, want := at[i]-fast[i], time.Duration(i)*think/2; saved != want {
			t.Errorf("twice as fast: turn %d begins %s earlier, want %s", i+1, saved, want)
		}
	}
	// Without a thinking time it is the gap between the arrivals.
	gap, _ := starts(name(sessions(1, 5), 1, -1), 1)
	same, _ := starts(name(sessions(1, 5), 1, 100*time.Millisecond), 1)
	if !slices.Equal(gap, same) {
		t.Errorf("turns begin at %v without thinking times, at %v with the same ones", gap, same)
	}
	// What has no session arrives at its own time.
	own, _ := starts(sessions(2, 5), 2)
	for i := range own {
		if want := time.Duration(i) * 50 * time.Millisecond; own[i] != want {
			t.Errorf("request %d without a session arrives at %s, want %s", i+1, own[i], want)
		}
	}
}

// TestClosedLoopIsNotFlooded: however slow the engines are, a session has one request at a
// time. The same requests in an open loop pile up.
func TestClosedLoopIsNotFlooded(t *testing.T) {
	const n, turns = 6, 8
	most := func(closed bool) (most int) {
		t.Helper()
		s := closedSetup(t, "1a:block=16,kv_blocks=4096")
		s.Speedup = 100
		r, err := newRun(s)
		if err != nil {
			t.Fatal(err)
		}
		defer r.close()
		src := arrivals.FromSlice(name(sessions(n, turns), n, 0))
		if closed {
			if src, err = r.turns.hold(src, &r.s); err != nil {
				t.Fatal(err)
			}
		}
		next, stop := iter.Pull2(src)
		defer stop()
		r.next = next
		if err := r.arrive(); err != nil {
			t.Fatal(err)
		}
		for r.world.Step() {
			most = max(most, r.open)
		}
		if r.res.Completed != n*turns || r.err != nil {
			t.Errorf("closed %v: %d requests completed (%v)", closed, r.res.Completed, r.err)
		}
		return most
	}
	if closed, open := most(true), most(false); closed > n || open < 3*n {
		t.Errorf("%d sessions have up to %d requests at a time in a closed loop, %d in an open one", n, closed, open)
	}
}

// TestClosedLoopGoesOn: a session continues after a turn that was refused; a run cut by From
// begins its sessions there; long thinking costs no steps, and too long a one is an error.
func TestClosedLoopGoesOn(t *testing.T) {
	const n, turns = 10, 4
	all := name(sessions(n, turns), n, 0)
	s := closedSetup(t, "1a:block=16,kv_blocks=4096")
	s.Speedup = 1e6
	s.Limits = admission.Limits{Inflight: 2}
	res, err := Run(t.Context(), arrivals.FromSlice(all), s)
	if err != nil || res.Refused == 0 || res.Requests != n*turns || res.Completed+res.Failed != n*turns {
		t.Errorf("with refusals: %+v, %v", res, err)
	}
	s = closedSetup(t, "1a:block=16,kv_blocks=4096")
	s.From, s.To = 2*time.Second, 3500*time.Millisecond
	if res, err := Run(t.Context(), arrivals.FromSlice(all), s); err != nil || res.Completed != 15 {
		t.Errorf("a window of the trace: %+v, %v", res, err)
	}
	s = closedSetup(t, "1a:block=16,kv_blocks=4096")
	run := func(think time.Duration) (*Result, int) {
		t.Helper()
		r, res, err := play(t.Context(), arrivals.FromSlice(name(sessions(1, turns), 1, think)), s)
		if err != nil || res.Completed != turns || res.Gaps != turns-1 {
			t.Fatalf("thinking for %s: %+v, %v", think, res, err)
		}
		return res, r.steps
	}
	day, steps := run(24 * time.Hour)
	long, more := run(50 * year)
	if steps != more {
		t.Errorf("%d steps with days of thinking, %d with years", steps, more)
	}
	if d := cmp.Diff(day, long, cmpopts.IgnoreFields(Result{}, "WallS", "VirtualS", "Goodput", "TokensPS", "LongestGapS")); d != "" {
		t.Errorf("days and years of thinking:\n%s", d)
	}
	if _, err := Run(t.Context(), arrivals.FromSlice(name(sessions(1, turns), 1, 90*year)), s); err == nil || !strings.Contains(err.Error(), "request 4 arrives 270 years after the first") {
		t.Error(err)
	}
}
