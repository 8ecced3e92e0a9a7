package lifecycle

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// ranks keeps what it is called with.
type ranks struct{ calls []string }

func (r *ranks) Began(k *workers.Rank)  { r.calls = append(r.calls, "began "+k.Label) }
func (r *ranks) Failed(k *workers.Rank) { r.calls = append(r.calls, "failed "+k.Label) }
func (r *ranks) Left(k *workers.Rank)   { r.calls = append(r.calls, "left "+k.Label) }
func (r *ranks) Took(k *workers.Rank)   { r.calls = append(r.calls, "took "+k.Label) }

// stand is a request, and the subscribers that a router has.
type stand struct {
	Record
	ring    *receipt.Ring
	ranks   ranks
	events  []eventlog.Event
	peer    workers.Peer
	metrics *telemetry.Metrics
	traffic traffic.Traffic
	costs   *outcome.Collector
	kinds   []Kind // of the events that were sent
}

// newStand begins a request with a plan. Subscribers that are added come last.
func newStand(t *testing.T, p decide.Plan, added ...Subscriber) *stand {
	t.Helper()
	w := &workers.Worker{State: new(workers.State)}
	w.Name = "a"
	s := &stand{ring: receipt.NewRing(receipt.Options{}), peer: workers.Peer{Worker: w, Rank: &workers.Rank{Label: "a/dp0"}}}
	q := &routing.Request{}
	q.Reset()
	q.Settings = &effective.Settings{Revision: 7}
	q.Run.Attempt, q.Run.Plan = 1, p
	q.Run.In.DecodePeers = []workers.Peer{s.peer}
	s.metrics = telemetry.New("", "", func(string) bool { return true })
	log := func(e eventlog.Event) { s.events = append(s.events, e) }
	s.costs = outcome.New(outcome.Options{
		Ledger: ledger.New(), Decisions: func() *decide.Options { return &decide.Options{} },
		Fleet: workers.NewRegistry(log).Snapshot, Event: log,
	})
	seen := Subscriber{}
	for k := range numberOfKinds {
		seen[Kind(k)] = func(e *Event) { s.kinds = append(s.kinds, e.Kind) }
	}
	s.Record = Record{
		To: NewStream(append([]Subscriber{
			Pace(watch.NewSlow(watch.SlowOptions{})), Receipts(func(uint32) bool { return false }), Ranks(&s.ranks), Traffic(&s.traffic), Metrics(s.metrics), Spans(),
			Recompute(watch.NewRecompute(watch.RecomputeOptions{})), Failures(&watch.Failures{}, log), Costs(s.costs), Progress(), seen,
		}, added...)...),
		Live: s.ring.Begin(time.Now()), Routing: q, Endpoint: &api.Endpoint{Kind: api.Completion, Streamable: true}, Model: "m", ID: "id", Start: time.Now(),
	}
	return s
}

// page is the page of metrics.
func (s *stand) page() string {
	w := httptest.NewRecorder()
	s.metrics.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return w.Body.String()
}

// receipt is the receipt as it stands.
func (s *stand) receipt(t *testing.T) *receipt.Receipt {
	t.Helper()
	c, ok := s.ring.Find(s.Live.ID())
	if !ok {
		t.Fatal("there is no receipt")
	}
	return c
}

// TestLegOutcomes: a leg is closed once, its rank is blamed for what is its fault, and the
// receipt and the metrics name what came of it.
func TestLegOutcomes(t *testing.T) {
	t.Parallel()
	reset := &upstream.Failure{Kind: upstream.Reset, Err: errors.New("gone")}
	w := &workers.Worker{}
	for _, c := range []struct {
		err     error
		outcome string
		blamed  bool
	}{
		{nil, "", false},
		{reset, "reset", true},
		{&upstream.ClientError{Err: reset}, "canceled", false},
		{attempt.NewError(route.Decode, w, attempt.Status4xx, true, errors.New("bad request")), "status_4xx", false},
		{attempt.NewError(route.Decode, w, attempt.Status5xx, true, reset), "status_5xx", true},
		{fmt.Errorf("a panic"), "failed", false},
	} {
		s := newStand(t, decide.Plan{Path: route.Local, DecodeIndex: 0, PrefillIndex: -1})
		l := s.BeginLeg(route.Decode, s.peer, nil, time.Now())
		l.Head(http.StatusOK)
		if first, again := l.End(c.err, time.Now()), l.End(errors.New("again"), time.Now()); !first || again {
			t.Errorf("%v: ended %v, and again %v", c.err, first, again)
		}
		leg := s.receipt(t).Legs[0]
		if leg.RetryReason != c.outcome || leg.Status != http.StatusOK || leg.EndMS < 0 || (leg.Error != "") != (c.err != nil) {
			t.Errorf("%v: %+v, want %q", c.err, leg, c.outcome)
		}
		if blamed := slices.Contains(s.ranks.calls, "failed a/dp0"); blamed != c.blamed || s.ranks.calls[0] != "began a/dp0" {
			t.Errorf("%v: calls for the rank: %v", c.err, s.ranks.calls)
		}
	}
}

// TestWhatARankComputes: a decode rank that gets KV computes nothing of the prompt.
func TestWhatARankComputes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		phase route.Phase
		path  route.Path
		want  int
	}{{route.Prefill, route.Remote, 60}, {route.Decode, route.Remote, -1}, {route.Decode, route.Local, 30}} {
		s := newStand(t, decide.Plan{Path: c.path, PrefillCached: 40, EffISL: 30})
		s.Routing.Prompt.ISL = 100
		if got := s.toCompute(c.phase); got != c.want {
			t.Errorf("%s of a %s plan computes %d tokens, want %d", c.phase, c.path, got, c.want)
		}
	}
}

// TestFinish: a good request's figures are added up, those of a failed one are not; KV that
// was moved and computed again is reported where the engine's usage shows it.
func TestFinish(t *testing.T) {
	t.Parallel()
	moved := decide.Plan{Path: route.Remote, Connector: workers.ConnectorNIXLPush, CachedTokens: 32}
	moved.Remote.Transfer = 96
	if !disagg.CountsTransfers(moved.Connector) {
		t.Fatal("not the connector to test")
	}
	for _, c := range []struct {
		name   string
		plan   decide.Plan
		cached int64
		own    int // the decode engine's count, where the other one is the prefill's
		end    Outcome
		silent bool
		prompt uint64
	}{
		{"local", decide.Plan{Path: route.Local}, 0, 0, Outcome{Status: 200, Path: "local"}, false, 100},
		{"moved", moved, 96, 0, Outcome{Status: 200, Path: "remote"}, false, 100},
		{"computed again", moved, 0, 0, Outcome{Status: 200, Path: "remote"}, true, 100},
		{"moved, with the prefill's count", moved, 32, 96, Outcome{Status: 200, Path: "remote"}, false, 100},
		{"computed again, with the prefill's count", moved, 96, 1, Outcome{Status: 200, Path: "remote"}, true, 100},
		{"not reported", moved, -1, 0, Outcome{Status: 200, Path: "remote"}, false, 100},
		{"failed", moved, 0, 0, Outcome{Status: 502, Path: "remote", Err: &api.Error{Code: api.CodeUpstreamError, Message: "gone"}}, false, 0},
	} {
		var final *receipt.Receipt
		s := newStand(t, c.plan, Recording(nil, func(c *receipt.Receipt) { o := *c; final = &o }))
		s.Decided()
		l := s.BeginLeg(route.Decode, s.peer, nil, time.Now())
		s.Answer.Of(l)
		l.Streams(time.Now(), true)
		s.Answer.Piece(time.Now(), 1)
		s.Answer.Learn(sse.Summary{FinishReason: "stop", Usage: sse.Usage{PromptTokens: 100, CompletionTokens: 2, CachedTokens: c.cached}})
		s.Answer.FromPrefill, s.Answer.Decode = c.own > 0, c.own
		s.Finish(c.end)
		o := s.receipt(t).Outcome
		if o.SilentRecompute != c.silent || s.traffic.Recomputes.Load() != map[bool]uint64{true: 1}[c.silent] || s.traffic.Prompt.Load() != c.prompt {
			t.Errorf("%s: %+v, %d recomputed, %d prompt tokens", c.name, o, s.traffic.Recomputes.Load(), s.traffic.Prompt.Load())
		}
		if o.Status != c.end.Status || (o.ErrorCode != "") != (c.end.Err != nil) {
			t.Errorf("%s: %d %s, want %d %v", c.name, o.Status, o.ErrorCode, c.end.Status, c.end.Err)
		}
		if o.TTFTMS < 0 || o.ITL.Count != 1 || o.Finish != "stop" {
			t.Errorf("%s: TTFT %v ms, ITL %+v, finish %q", c.name, o.TTFTMS, o.ITL, o.Finish)
		}
		if final == nil || final.Outcome.Status != c.end.Status {
			t.Errorf("%s: the recording got %+v", c.name, final)
		}
	}
}

// TestDecided: the receipt, the traffic and a recording learn of a decision, and of a
// request that ends before any.
func TestDecided(t *testing.T) {
	t.Parallel()
	var got trace.Decision
	s := newStand(t, decide.Plan{Path: route.Remote, Reason: route.ReasonForcedRemote, DecodeIndex: -1, PrefillIndex: -1},
		Recording(func(_ time.Time, d *trace.Decision) { got = *d }, nil))
	s.Key, s.Tenant = "k", "t"
	s.Decided()
	c := s.receipt(t)
	want := *c
	want.RequestID, want.Model, want.ConfigRevision, want.Key, want.Tenant, want.Path, want.Attempt = "id", "m", 7, "k", "t", "remote", 1
	if d := cmp.Diff(want, *c, cmpopts.IgnoreUnexported(receipt.Receipt{})); d != "" {
		t.Errorf("the receipt (-want +got):\n%s", d)
	}
	type recorded struct {
		id, request, path string
		revision, remote  uint64
	}
	if d := cmp.Diff(recorded{s.Live.ID(), "id", "remote", 7, 1}, recorded{got.ID, got.RequestID, got.Path, got.Revision, s.traffic.Remote.Load()}, cmp.AllowUnexported(recorded{})); d != "" {
		t.Errorf("the recording (-want +got):\n%s", d)
	}
	s = newStand(t, decide.Plan{})
	s.Undecided()
	if c := s.receipt(t); c.RequestID != "id" || c.Attempt != 0 || c.Path != "" {
		t.Errorf("%+v", c)
	}
}

// TestContinuedAndNot: a stream that breaks off is an event with the decision's id, whether
// it goes on or not.
func TestContinuedAndNot(t *testing.T) {
	t.Parallel()
	s := newStand(t, decide.Plan{Path: route.Local})
	s.Continued(&attempt.Failure{Name: "a", Reason: attempt.Reset}, s.peer.Rank, 5, 2)
	s.NotContinued("policy", "enough is enough")
	c := s.receipt(t)
	if len(c.Continued) != 1 || len(s.events) != 2 {
		t.Fatalf("want one continuation and two events: %+v, %+v", c.Continued, s.events)
	}
	want := c.Continued[0]
	want.From, want.Tokens, want.Dropped = "a", 5, 2
	if d := cmp.Diff(want, c.Continued[0]); d != "" {
		t.Errorf("the receipt (-want +got):\n%s", d)
	}
	if c.Outcome.NotContinued != "enough is enough" {
		t.Errorf("%+v", c.Outcome)
	}
	said := []string{s.events[0].Kind, s.events[0].Request, s.events[1].Kind, s.ranks.calls[0]}
	if d := cmp.Diff([]string{"stream_continued", s.Live.ID(), "stream_not_continued", "left a/dp0"}, said); d != "" {
		t.Errorf("the events and the first call for a rank (-want +got):\n%s", d)
	}
	s.RequestFaulty("the request is at fault")
	if len(s.events) != 3 || s.events[2].Kind != "request_broke_engines" || s.events[2].Request != s.Live.ID() || len(s.receipt(t).Notes) != 1 {
		t.Errorf("%+v, %q", s.events[2:], s.receipt(t).Notes)
	}
}

// TestPrefilled: what is wrong with transfer parameters is an event of the request.
func TestPrefilled(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		facts disagg.Checked
		err   error
		want  string
		notes int
	}{
		{disagg.Checked{Groups: 1}, nil, "[]", 0},
		{disagg.Checked{Odd: []string{"a", "b"}}, nil, "[prefill_unexpected_params]", 1},
		{disagg.Checked{Groups: 2}, nil, "[hybrid_over_nixl]", 0},
		{disagg.Checked{}, disagg.ErrEnded, "[]", 0},
		{disagg.Checked{}, disagg.ErrRestarted, "[]", 0},
		{disagg.Checked{}, fmt.Errorf("%w: an error", disagg.ErrPrefillFailed), "[]", 0},
		{disagg.Checked{}, fmt.Errorf("%w: none", disagg.ErrMissingParams), "[prefill_without_params]", 0},
		{disagg.Checked{}, errors.New("other"), "[prefill_bad_params]", 0},
	} {
		s := newStand(t, decide.Plan{Path: route.Remote})
		s.Prefilled(s.peer.Worker, &c.facts, c.err)
		kinds := []string{}
		for _, e := range s.events {
			kinds = append(kinds, e.Kind)
			if e.Request != s.Live.ID() || e.Worker != "a" {
				t.Errorf("%+v", e)
			}
		}
		if fmt.Sprint(kinds) != c.want || len(s.receipt(t).Notes) != c.notes {
			t.Errorf("%+v, %v: %v and %d notes", c.facts, c.err, kinds, len(s.receipt(t).Notes))
		}
	}
}

// TestAccessLog: a line for each request has what is known of it, and nothing else.
func TestAccessLog(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	sub := AccessLog(slog.New(slog.NewJSONHandler(&out, nil)))
	line := func() map[string]any {
		t.Helper()
		var got map[string]any
		if err := json.Unmarshal(out.Bytes(), &got); err != nil {
			t.Fatalf("%v: %s", err, out.Bytes())
		}
		out.Reset()
		delete(got, "time")
		delete(got, "level")
		return got
	}
	s := newStand(t, decide.Plan{Path: route.Remote}, sub)
	s.Routing.Run.In.PrefillPeers = []workers.Peer{{Worker: s.peer.Worker, Rank: &workers.Rank{Label: "p/dp1"}}}
	s.Routing.Prompt.ISL, s.Routing.Prompt.Source = 18, route.FromEstimate
	s.Client, s.Stream, s.Key, s.Tenant = httptest.NewRequest(http.MethodPost, "/v1/completions?a=secret", nil), true, "k", "t"
	s.Decided()
	l := s.BeginLeg(route.Decode, s.peer, nil, time.Now())
	s.Answer.Of(l)
	s.Answer.Prompt, s.Answer.Cached, s.Answer.Completion, s.Answer.FirstToken = 17, -1, 3, s.Start.Add(2*time.Millisecond)
	s.Ended(Outcome{Status: 200, Took: 5 * time.Millisecond})
	want := map[string]any{
		"msg": "request", "id": "id", "decision": s.Live.ID(), "client": "192.0.2.1:1234", "method": "POST", "url": "/v1/completions", "status": 200., "model": "m", "path": "remote",
		"worker": "a/dp0", "prefill_worker": "p/dp1", "stream": true, "prompt_tokens": 17., "completion_tokens": 3., "ttft_ms": 2., "duration_ms": 5., "key": "k", "tenant": "t", "isl": 18., "isl_source": "estimate",
	}
	if d := cmp.Diff(want, line()); d != "" {
		t.Errorf("a stream (-want +got):\n%s", d)
	}
	r := Record{To: NewStream(sub), ID: "x", RequestedModel: strings.Repeat("m", 1000)}
	r.Refused("model")
	r.Ended(Outcome{Status: 404, Err: &api.Error{Status: 404, Code: api.CodeModelNotFound}})
	if d := cmp.Diff(map[string]any{
		"msg": "request", "id": "x", "status": 404., "model": api.Clip(r.RequestedModel), "stream": false, "duration_ms": 0., "error": "model_not_found",
	}, line()); d != "" {
		t.Errorf("a refused request (-want +got):\n%s", d)
	}
	NewStream(AccessLog(nil)).send(&Event{Kind: Ended, Request: &r})
}

// TestUncomputed: what a decode engine need not compute of a prompt is known where the prompt was
// counted, and the connector moves all of it.
func TestUncomputed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		source    route.Source
		connector workers.Connector
		want      int
	}{
		{route.FromIDs, workers.ConnectorNIXL, 84}, {route.FromEngine, workers.ConnectorNIXLOffload, 84}, {route.FromLocal, workers.ConnectorNIXL, 84},
		{route.FromEstimate, workers.ConnectorNIXL, 0}, {route.FromIDs, workers.ConnectorLMCache, 0},
	} {
		s := newStand(t, decide.Plan{Path: route.Remote, Connector: c.connector})
		s.Routing.Prompt.ISL, s.Routing.Prompt.Source, s.Routing.Run.In.Decode.BlockSize = 100, c.source, 16
		if got := s.uncomputed(); got != c.want {
			t.Errorf("%s over %s: %d, want %d", c.source, c.connector, got, c.want)
		}
	}
}
