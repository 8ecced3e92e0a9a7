package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings"
)

var names = [numberOfKinds]string{
	"arrived", "refused", "waited", "tokenized", "aborted", "ended",
	"introduced", "decided", "chosen", "retried", "sent", "head", "facts", "prefilled", "first", "streams", "runs", "piece",
	"unkept", "leg", "failed", "continued", "not-continued", "blamed", "noted", "answered", "finished",
}

func (k Kind) String() string { return names[k] }

// TestKindsOfRequests: the events of requests, in their order.
func TestKindsOfRequests(t *testing.T) {
	t.Parallel()
	now := time.Now()
	gone := &api.Error{Status: api.StatusClientClosed, Code: api.CodeUpstreamError, Message: "gone"}
	stream := func(s *stand) {
		l := s.BeginLeg(route.Decode, s.peer, nil, time.Now())
		s.Answer.Of(l)
		l.Head(http.StatusOK)
		l.Streams(now, true)
		l.Runs(1, now)
		s.Answer.Piece(now, 1)
		l.End(nil, now)
	}
	for _, c := range []struct {
		name string
		do   func(*stand)
		want string
	}{
		{"refused", func(s *stand) {
			s.Arrived()
			s.Refused("path")
			s.Ended(Outcome{Status: 404, Err: &api.Error{Status: 404}})
		}, "arrived refused ended finished"},
		{"waits in vain", func(s *stand) {
			s.Tokenized(route.FromIDs)
			s.Waited("queue", time.Second)
			s.Undecided()
			s.Ended(Outcome{Status: gone.Status, Err: gone})
		}, "tokenized waited introduced aborted ended finished"},
		{"local stream", func(s *stand) {
			s.Decided()
			s.Chosen()
			stream(s)
			s.Ended(Outcome{Status: 200})
		}, "decided chosen sent head first streams runs piece leg ended answered finished"},
		{"after a failure", func(s *stand) {
			s.Decided()
			s.BeginLeg(route.Decode, s.peer, nil, time.Now()).End(errors.New("gone"), now)
			s.Failed(route.Decode, s.peer.Worker, attempt.Reset, errors.New("gone"))
			s.Routing.Run.Attempt++
			s.Decided()
			s.Retried(route.Decode, attempt.Reset)
			stream(s)
		}, "decided sent leg failed decided retried sent head first streams runs piece leg"},
		{"prefill", func(s *stand) {
			l := s.BeginLeg(route.Prefill, s.peer, nil, time.Now())
			l.Head(http.StatusOK)
			l.Facts(disagg.Checked{})
			s.Prefilled(s.peer.Worker, &disagg.Checked{}, nil)
			l.End(nil, now)
			l.End(nil, now)
		}, "sent head facts prefilled first leg"},
		{"cut stream", func(s *stand) {
			s.Unkept("no memory")
			s.Continued(&attempt.Failure{Name: "a", Reason: attempt.Reset}, s.peer.Rank, 5, 2)
			s.NotContinued("policy", "enough is enough")
			s.EngineError("out of memory")
			s.Ended(Outcome{Status: 200, Err: &api.Error{Status: 502}, Cut: true})
			s.Finish(Outcome{})
		}, "unkept continued not-continued noted aborted ended finished"},
	} {
		s := newStand(t, decide.Plan{Path: route.Local, PrefillIndex: -1})
		c.do(s)
		if got := strings.Trim(fmt.Sprint(s.kinds), "[]"); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestSubscribers: a subscriber is one argument more, gets the kinds that it handles and no
// others, after those that come before it; a nil stream has none.
func TestSubscribers(t *testing.T) {
	t.Parallel()
	var got []string
	hear := func(name string, kinds ...Kind) Subscriber {
		s := Subscriber{}
		for _, k := range kinds {
			s[k] = func(e *Event) { got = append(got, name+":"+e.Kind.String()+":"+e.Text) }
		}
		return s
	}
	r := Record{To: NewStream(hear("a", Noted, Unkept), hear("b", Piece), hear("c", Piece, Noted), Subscriber{Noted: func(*Event) { got = append(got, "d") }})}
	l := &LegRecord{of: &r}
	r.Answer.Of(l)
	r.Answer.Piece(time.Now(), 1)
	r.Note("x")
	r.Refused("path")
	if want := []string{"b:piece:", "c:piece:", "a:noted:x", "c:noted:x", "d"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	(&Record{}).Note("to nobody")
}

// TestWithoutReceipt: a request that ends before it has a receipt is counted.
func TestWithoutReceipt(t *testing.T) {
	t.Parallel()
	s := newStand(t, decide.Plan{})
	r := Record{To: s.To}
	r.Arrived()
	r.Refused("path")
	r.Ended(Outcome{Status: 404, Err: &api.Error{Status: 404}, Path: "none"})
	r = Record{To: s.To, Model: "secret", Routing: s.Routing}
	r.Arrived()
	r.Ended(Outcome{Status: api.StatusClientClosed, Path: "none"})
	page := s.page()
	for _, want := range []string{
		`dynctl_rejections_total{reason="path"} 1`, `dynctl_aborts_total{reason="client_gone"} 1`,
		`dynctl_requests_total{code="404",endpoint="unknown",model="",path="none"} 1`, `dynctl_requests_total{code="499",endpoint="unknown",model="unknown",path="none"} 1`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	if f := s.traffic.Figures(); f.Requests != 2 || f.Rejected != 1 || f.Cancelled != 1 {
		t.Errorf("%+v", f)
	}
}

// TestCounted: retries, waiting, and streams that are given up are counted.
func TestCounted(t *testing.T) {
	t.Parallel()
	s := newStand(t, decide.Plan{Path: route.Local})
	s.Tokenized(route.FromIDs)
	s.Waited("move", time.Second)
	s.Retried(route.Decode, attempt.Reset)
	s.Unkept("no memory")
	s.RequestFaulty("it is at fault")
	s.Ended(Outcome{Status: 200, Err: &api.Error{Status: 502}, Cut: true, Path: "local"})
	page := s.page()
	for _, want := range []string{
		`dynctl_tokenize_total{source="ids"} 1`, `dynctl_stage_seconds_count{stage="move"} 1`, `dynctl_retries_total{leg="decode",reason="reset"} 1`,
		`dynctl_streams_without_memory_total 1`, `dynctl_requests_broke_engines_total 1`, `dynctl_aborts_total{reason="upstream_broke"} 1`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	if f := s.traffic.Figures(); f.Retries != 1 || f.Failed != 1 {
		t.Errorf("%+v", f)
	}
	if n := s.receipt(t).Notes; len(n) != 2 || n[0] != "from here on it could not be continued elsewhere: no memory" {
		t.Errorf("%q", n)
	}
}

// steps keeps the progress that it gets.
type steps []int

func (s *steps) Progress(tokens int) { *s = append(*s, tokens) }

// TestProgress: what a leg holds gets the tokens of its stream once in 16.
func TestProgress(t *testing.T) {
	t.Parallel()
	s, got := newStand(t, decide.Plan{Path: route.Local}), steps{}
	l := s.BeginLeg(route.Decode, s.peer, nil, time.Now())
	s.Answer.Of(l)
	l.Held = &got
	l.Runs(2, time.Now())
	for range 20 {
		s.Answer.Piece(time.Now(), 3)
	}
	if want := (steps{17, 35, 53}); !slices.Equal(got, want) || l.Tokens != 62 {
		t.Errorf("%v and %d in all, want %v", got, l.Tokens, want)
	}
}

// TestCosts: the legs of a plan that was chosen report what they took, whatever the threshold.
func TestCosts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ auto, chosen, teaches bool }{{true, true, true}, {false, true, true}, {true, false, false}} {
		s := newStand(t, decide.Plan{Path: route.Remote, Paths: cost.Paths{Prefill: cost.Work{Tokens: 1000, Context: 1000}, Transfer: cost.Work{Tokens: 1000}}})
		s.Routing.Settings.Decisions.Rule.Auto = c.auto
		if c.chosen {
			s.Chosen()
		}
		now := time.Now()
		s.BeginLeg(route.Prefill, s.peer, nil, time.Now()).End(nil, now.Add(time.Second))
		l := s.BeginLeg(route.Decode, s.peer, nil, time.Now())
		s.Answer.Of(l)
		l.Streams(now.Add(2*time.Second), true)
		l.Runs(1, now.Add(2*time.Second))
		s.Answer.Piece(now.Add(3*time.Second), 1)
		s.Ended(Outcome{Status: 200})
		if k := s.costs.Known()["m"]; (k.Prefill == 1 && k.Transfer == 1) != c.teaches || !c.teaches && k.Prefill+k.Transfer != 0 {
			t.Errorf("%+v: known is %+v", c, k)
		}
	}
}

// TestSpans: a collector gets the span of the request and that of its leg, which is passed
// to the engine.
func TestSpans(t *testing.T) {
	t.Parallel()
	bodies := make(chan string, 8)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		b, _ := io.ReadAll(q.Body)
		bodies <- string(b)
	}))
	t.Cleanup(collector.Close)
	tracer, err := telemetry.NewTracer(t.Context(), &settings.Trace{Endpoint: collector.URL + "/v1/traces", Sample: 1}, "v0")
	if err != nil {
		t.Fatal(err)
	}
	s := newStand(t, decide.Plan{Path: route.Local})
	s.Span = tracer.Server(t.Context(), http.Header{}, "request")
	header := http.Header{"X-Other": {"1"}}
	call := &upstream.Leg{Header: header}
	s.BeginLeg(route.Decode, s.peer, call, time.Now()).End(nil, time.Now())
	s.Ended(Outcome{Status: 200, Path: "local", Cause: errors.New("the cause")})
	if call.Header.Get("Traceparent") == "" || call.Header.Get("X-Other") != "1" || len(header) != 1 {
		t.Errorf("the engine gets %v, and the header of before is %v", call.Header, header)
	}
	if err := tracer.Close(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
	spans := <-bodies
	for _, want := range []string{"request", "decode leg", "dynctl.worker", "dynctl.decision", s.Live.ID(), "dynctl.path", "the cause"} {
		if !strings.Contains(spans, want) {
			t.Errorf("the spans lack %q", want)
		}
	}
}
