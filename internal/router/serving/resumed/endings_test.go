package resumed_test

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestRoutersEndIsNoGap: an engine hangs after the last token and before [DONE]. The end mark
// is the router's, so it is no piece of the engine's leg, which has ended, and no gap of tokens.
func TestRoutersEndIsNoGap(t *testing.T) {
	run(t, "idle", "2a", plain, func(t *testing.T, r *fakeengine.Router) {
		r.Serves = func(q *fakeengine.Request) fakeengine.Answer {
			a := r.Model.Answer(q)
			return a.Then(len(a.Pieces)-1, fakeengine.Piece{Wait: fakeengine.Never}) // all but [DONE]
		}
		got := r.Send(t.Context(), completion(""))
		if got.Err != nil || read(got.Body).done != 1 {
			t.Fatalf("%s", got)
		}
		if m := got.Receipt.Outcome.ITL; m.MaxMS > 100 {
			t.Errorf("tokens came every 10 ms, and the receipt's ITL is %+v: the timeout counts as a gap between tokens", m)
		}
	})
}

// TestLooksAreNoRequests: a stream that looks for a place elsewhere and finds none is not
// tokenized again and again.
func TestLooksAreNoRequests(t *testing.T) {
	run(t, "looks", "2a", func(s *settings.Config) { s.Routing.Busy.Requests, s.Timeouts.Response = 1, 2*time.Hour }, func(t *testing.T, r *fakeengine.Router) {
		r.Pace = 60 * ms
		r.Next("aggregated-0", fakeengine.Hangs())
		ctx, leave := context.WithCancel(t.Context())
		other := make(chan struct{})
		go func() { defer close(other); r.Send(ctx, completion("")) }()
		synctest.Wait()
		n := 0
		q := completion("")
		q.Piece = func([]byte) error {
			if n++; n == 5 {
				r.Worker("aggregated-1").State.SetMoving()
			}
			return nil
		}
		got := r.Send(t.Context(), q)
		leave()
		<-other
		if got.Err != nil || len(got.Receipt.Continued) != 0 {
			t.Fatalf("%s %+v", got, got.Receipt.Continued)
		}
		tok := 0.0
		for _, src := range []string{"ids", "local", "engine", "estimate", "nothing"} {
			tok += metric(t, r, `dynctl_tokenize_total{source="`+src+`"}`)
		}
		t.Log("tokenized", tok)
		if tok > 2 {
			t.Errorf("two requests, and %v prompts were tokenized", tok)
		}
	})
}

// TestReasonWithoutUsage: docs/life-of-a-request.md says that where the answer is no,
// notContinued writes why into receipt, metric, event and the stream's error.
func TestReasonWithoutUsage(t *testing.T) {
	long := strings.Repeat("a", 2000)
	run(t, "usage", "2a", plain, func(t *testing.T, r *fakeengine.Router) {
		r.Bodies.SetLimit(2200)
		r.Serves = func(q *fakeengine.Request) fakeengine.Answer {
			a := r.Model.Answer(q)
			if i := strings.Index(a.Pieces[0].Text, `"prompt_token_ids":`); i >= 0 {
				a.Pieces[0].Text = strings.Replace(a.Pieces[0].Text, "[1000,1001,1002,1003]", "["+strings.TrimSuffix(strings.Repeat("1000,", 2000), ",")+"]", 1)
			}
			return a.Then(len(a.Pieces)-2, reset) // after the finish reason, before usage and [DONE]
		}
		got := r.Send(t.Context(), fakeengine.Ask{Path: "/v1/completions", Body: `{"model":"m","prompt":"` + long + `","max_tokens":100,"stream":true` + usage + `}`})
		if got.Err == nil {
			t.Fatalf("%s", got)
		}
		if got.Receipt.Outcome.NotContinued == "" || !strings.Contains(got.Err.Message, "not continued elsewhere") {
			t.Errorf("no reason: %s, receipt %q", got.Err.Message, got.Receipt.Outcome.NotContinued)
		}
	})
}

// TestSlowReaderHoldsNoTurn: the same for a stream whose engine has died.
func TestSlowReaderHoldsNoTurn(t *testing.T) {
	run(t, "slow", "2a", func(c *settings.Config) { c.Continue.PerRank = 1 }, func(t *testing.T, r *fakeengine.Router) {
		r.Worker("aggregated-1").State.SetDraining(true)
		slow, n := completion(""), 0
		slow.Piece = func([]byte) error {
			if n++; n == 5 {
				r.Worker("aggregated-1").State.SetDraining(false)
				r.Worker("aggregated-0").State.SetMoving()
			}
			if n == 6 {
				<-time.After(2 * time.Minute)
			}
			return nil
		}
		calls := 0
		r.Always("aggregated-0", func(q *fakeengine.Request) fakeengine.Answer {
			if calls++; calls == 1 {
				return r.Model.Answer(q)
			}
			return r.Model.Answer(q).Then(10, reset)
		})
		done := make(chan *fakeengine.Got)
		go func() { done <- r.Send(t.Context(), slow) }()
		synctest.Wait()
		began := time.Now()
		got := r.Send(t.Context(), completion(",\"seed\":null"))
		took := time.Since(began)
		<-done
		if got.Err != nil || took > 5*time.Second {
			t.Errorf("a stream whose engine died waited %v for its turn, which a client that does not read held: %v", took, got.Err)
		}
	})
}

// TestClientTakesNoComment: a client that does not take the comment of a stream that waits
// for its turn has left; no engine failed to continue it.
func TestClientTakesNoComment(t *testing.T) {
	run(t, "beat", "2a", func(c *settings.Config) { c.Continue.PerRank = 1 }, func(t *testing.T, r *fakeengine.Router) {
		cut(r, 5, reset)
		slots := []uint32{r.Worker("aggregated-0").Ranks[0].Slot, r.Worker("aggregated-1").Ranks[0].Slot}
		if !r.Moves.Try(slots, 1) {
			t.Fatal("taken")
		}
		defer r.Moves.Leave(slots)
		q := completion("")
		q.Beat = func(string) error { return &upstream.ClientError{Err: os.ErrDeadlineExceeded} }
		got := r.Send(t.Context(), q)
		if got.Err == nil || got.Err.Code != "client_closed" || metric(t, r, `dynctl_streams_not_continued_total{why="failed"}`) != 0 {
			t.Errorf("%v, not continued: %q", got.Err, got.Receipt.Outcome.NotContinued)
		}
	})
}

// TestNextEngineClosesAtOnce: the engine that should continue a stream closes its connection
// instead of answering. The client gets an error event, and no stream that seems to be whole.
func TestNextEngineClosesAtOnce(t *testing.T) {
	run(t, "eof", "2a", plain, func(t *testing.T, r *fakeengine.Router) {
		done := cut(r, 5, reset)
		first := r.Serves
		r.Serves = func(q *fakeengine.Request) fakeengine.Answer {
			if !*done {
				return first(q)
			}
			return fakeengine.Answer{Fail: &upstream.Failure{Kind: upstream.Reset, Op: "wait for the answer", Sent: true, Err: io.EOF}}
		}
		if got := r.Send(t.Context(), completion("")); got.Err == nil || read(got.Body).done != 0 || got.Receipt.Outcome.ErrorCode == "" {
			t.Errorf("%s: %+v", got, got.Receipt.Outcome)
		}
	})
}
