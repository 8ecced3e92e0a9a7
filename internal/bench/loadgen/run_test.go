package loadgen

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"
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
	sum, err := Run(t.Context(), Options{Base: url, Concurrency: 4, Keep: 100, SLO: SLO{TTFT: time.Minute}}, newFew(40))
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
	if r.Decision != "d-1" || r.Path != "local" || r.CachedTokens != 2 || r.PromptTokens != 7 || r.OutputTokens != 8 || r.Sent < r.Intended || r.First <= r.Sent || r.Last < r.First {
		t.Errorf("result %+v", r)
	}
	for _, want := range []string{"POST /v1/completions HTTP/1.1\r\n", "X-Request-Id: r-", "\r\n\r\n{\"model\""} {
		if !strings.Contains(s.seen[0], want) {
			t.Errorf("request %q lacks %q", s.seen[0], want)
		}
	}
}

// A piece of several tokens must not look like one slow token, and what came in
// the first piece must not make the rest look faster.
func TestTokensOfPieces(t *testing.T) {
	s := &stub{pause: 20 * time.Millisecond, parts: func(int, string) []string {
		return []string{okHead + chunk(counted("abc", 3)), chunk(counted("d", 4)), chunk(counted("efgh", 8)), chunk(tail(8)) + "0\r\n\r\n"}
	}}
	sum, err := Run(t.Context(), Options{Base: startStub(t, s), Concurrency: 1, Keep: 1}, newFew(1))
	if err != nil || sum.Requests != 1 {
		t.Fatal(err, sum.Errors)
	}
	r := sum.Kept[0]
	if r.FirstTokens != 3 || r.Pieces != 3 || sum.ITL.N != 5 {
		t.Errorf("%d tokens first, %d pieces, %d gaps", r.FirstTokens, r.Pieces, sum.ITL.N)
	}
	tpot, ok := r.TPOT()
	if want := (r.Last - r.First) / 5; !ok || tpot != want {
		t.Errorf("TPOT %v, want %v", tpot, want)
	}
	// One gap of 20 ms and four of 5 ms.
	if sum.ITL.Max < 18 || sum.ITL.P50 > 15 {
		t.Errorf("gaps %+v", sum.ITL)
	}
}

func TestUncountedPiecesAreSpreadEvenly(t *testing.T) {
	s := &stub{parts: func(int, string) []string {
		return []string{okHead + chunk(token("abc")), chunk(token("def")) + chunk(tail(6)) + "0\r\n\r\n"}
	}, pause: 5 * time.Millisecond}
	sum, err := Run(t.Context(), Options{Base: startStub(t, s), Concurrency: 1, Keep: 1}, newFew(1))
	if err != nil || sum.Requests != 1 {
		t.Fatal(err, sum.Errors)
	}
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

// A stall of the server delays no later send of an open loop, and shows in
// the times from the intended moment when a bound makes it wait.
func TestOpenLoopDoesNotWait(t *testing.T) {
	s := &stub{pause: 30 * time.Millisecond, parts: func(int, string) []string { return answer(3) }}
	url := startStub(t, s)
	plan, err := Schedule(50, 1000, Constant, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	sum, err := Run(t.Context(), Options{Base: url, Schedule: plan, Keep: 100}, newFew(50))
	if err != nil || sum.Requests != 50 {
		t.Fatal(err, sum.Errors)
	}
	most := 0
	for i := range sum.Kept {
		n := 0
		for j := range sum.Kept {
			if sum.Kept[j].Sent <= sum.Kept[i].Sent && sum.Kept[j].End > sum.Kept[i].Sent {
				n++
			}
		}
		most = max(most, n)
	}
	if most < 10 {
		t.Errorf("never more than %d in flight: sends wait for answers", most)
	}
	capped, err := Run(t.Context(), Options{Base: url, Schedule: plan, Cap: 2, Keep: 100}, newFew(50))
	if err != nil || capped.Requests != 50 {
		t.Fatal(err, capped.Errors)
	}
	if capped.TTFTIntended.Max < 2*capped.TTFT.P50 || capped.Dispatch.Max < 300 {
		t.Errorf("the time that requests waited for the bound is hidden: %+v against %+v", capped.TTFTIntended, capped.TTFT)
	}
}

func TestCancelEndsAtOnce(t *testing.T) {
	for _, open := range []bool{false, true} {
		s := &stub{parts: func(int, string) []string { return []string{okHead + chunk(token("a"))} }} // never ends
		o := Options{Base: startStub(t, s), Concurrency: 8, Keep: 100}
		if open {
			o.Schedule, _ = Schedule(100, 500, Constant, 0, 1)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Millisecond)
		began := time.Now()
		sum, err := Run(ctx, o, newFew(1000))
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 3*time.Second {
			t.Errorf("open=%v: %v after %v", open, err, time.Since(began))
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
			s := &stub{keep: true, parts: func(n int, _ string) []string {
				if n == 0 {
					return answer(3)
				}
				return hang
			}}
			o := Options{Base: startStub(t, s), Concurrency: 1, Timeout: 300 * time.Millisecond, Keep: 2}
			if open {
				o.Schedule = []time.Duration{time.Millisecond, 40 * time.Millisecond}
			}
			sum, err := Run(t.Context(), o, newFew(2))
			if err != nil || sum.Requests != 1 || sum.Failed != 1 || !strings.Contains(fmt.Sprint(sum.Errors), "timeout") {
				t.Errorf("open=%v %s: %v %d %d %v", open, name, err, sum.Requests, sum.Failed, sum.Errors)
			}
			s.mu.Lock()
			if len(s.seen) != 2 {
				t.Errorf("open=%v %s: %d requests arrived, want 2", open, name, len(s.seen))
			}
			s.mu.Unlock()
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
