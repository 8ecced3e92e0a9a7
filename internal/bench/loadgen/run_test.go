package loadgen

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/bench/plan"

	"github.com/google/go-cmp/cmp"
)

// few makes n requests in all.
type few struct {
	left atomic.Int64
	size int
}

func newFew(n int) *few { f := &few{size: 100}; f.left.Store(int64(n)); return f }

func (f *few) Fill(_ int, q *Request) bool {
	n := f.left.Add(-1)
	if n < 0 {
		return false
	}
	q.ID = fmt.Sprint("r-", n)
	q.ISL, q.OSL = 7, 8
	q.Body = append(q.Body[:0], `{"model":"m","prompt":"`...)
	for range f.size {
		q.Body = append(q.Body, 'x')
	}
	q.Body = append(q.Body, `","stream":true}`...)
	return true
}

func TestClosedLoop(t *testing.T) {
	s := &stub{parts: func(int, string) []string { return answer(8) }, keep: true}
	url := startStub(t, s)
	sum, err := Run(t.Context(), Options{Base: url, Concurrency: 4, Keep: 100, SLO: plan.SLO{TTFT: time.Minute}}, newFew(40))
	if err != nil {
		t.Fatal(err)
	}
	if sum.Requests != 40 || sum.Failed != 0 || sum.Tokens != 320 || sum.Good != 40 {
		t.Errorf("%d requests, %d failed %v, %d tokens, %d good", sum.Requests, sum.Failed, sum.Errors, sum.Tokens, sum.Good)
	}
	if sum.TTFT.N != 40 || sum.TTFT.P50 <= 0 || sum.TTFT.P99 != 0 || sum.ITL.N > 40*7 {
		t.Errorf("ttft %+v itl %+v", sum.TTFT, sum.ITL)
	}
	r := sum.Kept[0]
	want := r
	want.Decision, want.Path, want.CachedTokens, want.PromptTokens, want.OutputTokens = "d-1", "local", 2, 7, 8
	if d := cmp.Diff(want, r, cmp.AllowUnexported(Result{})); d != "" {
		t.Errorf("the first result (-want +got):\n%s", d)
	}
	if r.Sent < r.Intended || r.First <= r.Sent || r.Last < r.First {
		t.Errorf("intended at %s, sent at %s, first token at %s, last at %s", r.Intended, r.Sent, r.First, r.Last)
	}
	for _, want := range []string{"POST /v1/completions HTTP/1.1\r\n", "X-Request-Id: r-", "\r\n\r\n{\"model\""} {
		if !strings.Contains(s.seen[0], want) {
			t.Errorf("request %q lacks %q", s.seen[0], want)
		}
	}
}

// pieces is a connection each of whose reads takes one part of an answer, at a
// time of its own clock: sockets may join what comes close together.
type pieces struct {
	net.Conn
	parts []string
	clock time.Duration
	every time.Duration
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.parts) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.parts[0])
	p.parts, p.clock = p.parts[1:], p.clock+p.every
	return n, nil
}

// measure is the summary of one request that is answered in parts.
func measure(t *testing.T, every time.Duration, parts ...string) *Summary {
	t.Helper()
	p := &pieces{parts: parts, every: every}
	c, q, rec, o := &conn{Conn: p, buf: make([]byte, readBuffer)}, &call{}, newRecorder(plan.SLO{}, 1), Options{Concurrency: 1}
	now := func() time.Duration { return p.clock }
	q.begin(0)
	rec.sent(0, 1)
	if _, err := c.answer(q, now); err != nil {
		t.Fatal(err)
	}
	rec.ended(&q.res, c.pieces, now(), o)
	return rec.summary(now(), o)
}

// A piece of several tokens must not look like one slow token, and what came in
// the first piece must not make the rest look faster.
func TestTokensOfPieces(t *testing.T) {
	const every = 20 * time.Millisecond
	sum := measure(t, every, okHead+chunk(counted("abc", 3)), chunk(counted("d", 4)), chunk(counted("efgh", 8)), chunk(tail(8))+"0\r\n\r\n")
	r := sum.Kept[0]
	if r.FirstTokens != 3 || r.Pieces != 3 || sum.ITL.N != 5 {
		t.Errorf("%d tokens first, %d pieces, %d gaps", r.FirstTokens, r.Pieces, sum.ITL.N)
	}
	if tpot, ok := r.TPOT(); !ok || tpot != 2*every/5 {
		t.Errorf("TPOT %v, want %v", tpot, 2*every/5)
	}
	// One gap of 20 ms and four of 5 ms, as well as the histogram knows them.
	if math.Abs(sum.ITL.Max-20) > .1 || math.Abs(sum.ITL.P50-5) > .1 {
		t.Errorf("gaps %+v", sum.ITL)
	}
}

func TestUncountedPiecesAreSpreadEvenly(t *testing.T) {
	sum := measure(t, 5*time.Millisecond, okHead+chunk(token("abc")), chunk(token("def"))+chunk(tail(6))+"0\r\n\r\n")
	if r := sum.Kept[0]; r.FirstTokens != 3 || sum.ITL.N != 3 {
		t.Errorf("%d tokens first, %d gaps", r.FirstTokens, sum.ITL.N)
	}
}

func TestFailuresHaveNoTimes(t *testing.T) {
	bad := []struct {
		name  string
		parts []string
		want  string
	}{
		{"status", []string{"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 21\r\nContent-Type: application/json\r\n\r\n{\"error\":\"no worker\"}"}, "no worker"},
		{"error event", []string{okHead + chunk(token("a")) + chunk("data: {\"error\":{\"message\":\"boom\"}}\n\n") + chunk("data: [DONE]\n\n") + "0\r\n\r\n"}, "boom"},
		{"cut", []string{okHead + chunk(token("a")), "CLOSE"}, "cut"},
		{"no done", []string{okHead + chunk(token("a")) + "0\r\n\r\n"}, "cut"},
		{"empty", []string{okHead + chunk(tail(0)) + "0\r\n\r\n"}, "no token"},
		{"not a stream", []string{"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"}, "not an event stream"},
		{"not http", []string{"SSH-2.0-OpenSSH_9.6\r\n\r\n"}, "not HTTP"},
		{"bad chunk", []string{okHead + "zz\r\n"}, "not HTTP"},
	}
	for _, open := range []bool{false, true} {
		for _, b := range bad {
			t.Run(fmt.Sprint(b.name, " open=", open), func(t *testing.T) {
				s := &stub{parts: func(int, string) []string { return b.parts }}
				o := Options{Base: startStub(t, s), Concurrency: 1, Keep: 1, Timeout: 5 * time.Second}
				if open {
					o.Schedule, _ = Schedule(1, 100, Constant, 0, 1)
				}
				sum, err := Run(t.Context(), o, newFew(1))
				if err != nil {
					t.Fatal(err)
				}
				if sum.Requests != 0 || sum.Failed != 1 || sum.TTFT.N != 0 || !strings.Contains(fmt.Sprint(sum.Errors), b.want) {
					t.Errorf("%d requests, %d failed, %v", sum.Requests, sum.Failed, sum.Errors)
				}
			})
		}
	}
}

func TestConnectionRefused(t *testing.T) {
	for _, schedule := range [][]time.Duration{nil, {time.Millisecond, 2 * time.Millisecond}} {
		sum, err := Run(t.Context(), Options{Base: "http://127.0.0.1:1", Concurrency: 1, Schedule: schedule, Keep: 10}, newFew(2))
		if err != nil || sum.Failed != 2 || sum.Requests != 0 {
			t.Errorf("%v: %d requests, %d failed", err, sum.Requests, sum.Failed)
		}
	}
}

// A server that closes idle connections must cost nothing but a dial.
func TestServerClosesConnections(t *testing.T) {
	for _, open := range []bool{false, true} {
		s := &stub{parts: func(int, string) []string { return answer(3) }, limit: 2}
		o := Options{Base: startStub(t, s), Concurrency: 2, Keep: 1000}
		if open {
			o.Schedule, _ = Schedule(200, 2000, Poisson, 0, 1)
		}
		sum, err := Run(t.Context(), o, newFew(200))
		if err != nil || sum.Requests != 200 || sum.Failed != 0 {
			t.Errorf("open=%v: %v, %d requests, %d failed %v", open, err, sum.Requests, sum.Failed, sum.Errors)
		}
	}
}

// patience is how long a test waits for what should come at once.
const patience = 20 * time.Second

// A stall of the server delays no later send of an open loop, and shows in
// the times from the intended moment when a bound makes it wait.
func TestOpenLoopDoesNotWait(t *testing.T) {
	const n = 50
	plan, err := Schedule(n, 1000, Constant, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	// Nothing is answered before everything has been sent.
	var arrived sync.WaitGroup
	arrived.Add(n)
	s := &stub{parts: func(int, string) []string { return answer(3) }, before: func(_, part int) {
		if part == 0 {
			arrived.Done()
			arrived.Wait()
		}
	}}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	sum, err := Run(ctx, Options{Base: startStub(t, s), Schedule: plan, Keep: n}, newFew(n))
	if err != nil || sum.Requests != n {
		s.mu.Lock()
		arrived.Add(s.number - n) // whoever waits at the server may go
		s.mu.Unlock()
		t.Fatalf("sends wait for answers: %v, %d answered, %v", err, sum.Requests, sum.Errors)
	}

	// The first two take the places, and stand still after their first token.
	const stall = 200 * time.Millisecond
	s = &stub{parts: func(int, string) []string { return answer(3) }, before: func(n, part int) {
		if n < 2 && part == 1 {
			<-time.After(stall)
		}
	}}
	capped, err := Run(t.Context(), Options{Base: startStub(t, s), Schedule: plan, Cap: 2, Keep: n}, newFew(n))
	if err != nil || capped.Requests != n {
		t.Fatal(err, capped.Errors)
	}
	// Planned two milliseconds after the first, the third waited for nearly all of it.
	wait := float64((stall - plan[2]).Milliseconds())
	var late time.Duration
	for i := range capped.Kept {
		late = max(late, capped.Kept[i].First-capped.Kept[i].Intended)
	}
	ms := float64(late.Microseconds()) / 1000
	if capped.Dispatch.Max < .99*wait || ms < .99*wait || math.Abs(capped.TTFTIntended.Max-ms) > .01*ms {
		t.Errorf("the time that requests waited for the bound is hidden: %+v against %+v, %+v from the sending", capped.TTFTIntended, capped.Dispatch, capped.TTFT)
	}
}

func TestCancelEndsAtOnce(t *testing.T) {
	for _, open := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		s := &stub{parts: func(n int, _ string) []string {
			if n == 7 {
				cancel() // in the middle of eight
			}
			return []string{okHead + chunk(token("a"))} // never ends
		}}
		o := Options{Base: startStub(t, s), Concurrency: 8, Keep: 100} // a request has ten minutes
		if open {
			o.Schedule, _ = Schedule(100, 500, Constant, 0, 1)
		}
		hung := time.AfterFunc(patience, func() { panic("the run does not end with its context") })
		sum, err := Run(ctx, o, newFew(1000))
		hung.Stop()
		if !errors.Is(err, context.Canceled) {
			t.Errorf("open=%v: %v", open, err)
		}
		if sum.Requests != 0 || sum.Failed != 0 {
			t.Errorf("open=%v: what was cancelled is neither good nor failed: %d, %v", open, sum.Requests, sum.Errors)
		}
	}
}

// A request that hangs is given up in either loop, and one that had its whole
// time is not sent again because its connection had been used before.
func TestTimeout(t *testing.T) {
	for _, open := range []bool{false, true} {
		for name, hang := range map[string][]string{"mid-stream": {okHead + chunk(token("a"))}, "silent": nil} {
			t.Run(fmt.Sprint(name, " open=", open), func(t *testing.T) {
				t.Parallel()
				s := &stub{keep: true, parts: func(n int, _ string) []string {
					if n == 0 {
						return answer(3)
					}
					return hang
				}}
				// The first request must have its answer within the same time.
				o := Options{Base: startStub(t, s), Concurrency: 1, Timeout: 2 * time.Second, Keep: 2}
				if open {
					o.Schedule, o.Cap = []time.Duration{time.Millisecond, 2 * time.Millisecond}, 1
				}
				sum, err := Run(t.Context(), o, newFew(2))
				if err != nil || sum.Requests != 1 || sum.Failed != 1 || !strings.Contains(fmt.Sprint(sum.Errors), "timeout") {
					t.Errorf("%v %d %d %v", err, sum.Requests, sum.Failed, sum.Errors)
				}
				s.mu.Lock()
				defer s.mu.Unlock()
				if len(s.seen) != 2 {
					t.Errorf("%d requests arrived, want 2", len(s.seen))
				}
			})
		}
	}
}

func TestSchedules(t *testing.T) {
	for _, c := range []struct {
		a     Arrival
		shape float64
		cv    float64 // of the gaps
	}{{Constant, 0, 0}, {Poisson, 0, 1}, {GammaGap, 0.25, 2}, {GammaGap, 4, 0.5}} {
		at, err := Schedule(20000, 100, c.a, c.shape, 7)
		if err != nil {
			t.Fatal(err)
		}
		if at[len(at)-1] != 200*time.Second {
			t.Errorf("%s: the last is at %v", c.a, at[len(at)-1])
		}
		var mean, sq float64
		for i := 1; i < len(at); i++ {
			g := (at[i] - at[i-1]).Seconds()
			mean += g
			sq += g * g
		}
		n := float64(len(at) - 1)
		mean /= n
		if cv := math.Sqrt(math.Max(0, sq/n-mean*mean)) / mean; math.Abs(cv-c.cv) > 0.06*max(1, c.cv) {
			t.Errorf("%s %v: CV of the gaps %.3f, want %v", c.a, c.shape, cv, c.cv)
		}
	}
	if _, err := Schedule(0, 1, Constant, 0, 1); err == nil {
		t.Error("an empty schedule passed")
	}
	if _, err := Schedule(1, 1, GammaGap, 0, 1); err == nil {
		t.Error("a gamma schedule without shape passed")
	}
}
