package router_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// held is a fleet whose engines answer when the test lets them, one request at a time.
type held struct {
	*rig
	p       *tap
	arrived chan string // the tag of each request that has reached an engine
	free    chan struct{}
}

// holding has the engines of a fleet do that.
func holding(r *rig, p *tap, configure func(*settings.Config)) *held {
	r.t.Helper()
	r.set(configure)
	h := &held{rig: r, p: p, arrived: make(chan string, 100), free: make(chan struct{})}
	p.set(func(_ string, _ http.ResponseWriter, q *http.Request, body []byte) bool {
		if q.URL.Path == "/v1/completions" {
			tag := decode[object](r.t, body)["user"]
			h.arrived <- fmt.Sprint(tag)
			select {
			case <-h.free:
			case <-q.Context().Done():
			}
		}
		return false
	})
	return h
}

// come sends a request tagged tag, and gives its answer later.
func (h *held) come(tag string, header ...string) <-chan *answer {
	h.t.Helper()
	got := make(chan *answer, 1)
	body := encode(h.t, object{"model": "sim", "prompt": ids(40, 3), "max_tokens": 1, "user": tag})
	go func() {
		a, err := h.try(h.t.Context(), http.MethodPost, "/v1/completions", body, header...)
		if err != nil {
			h.t.Error(err)
		}
		got <- a
	}()
	return got
}

// queued waits until n requests wait.
func (h *held) inLine(n int) {
	h.t.Helper()
	h.eventually("requests in line", func() error {
		if got := h.status().Traffic.Queued; got != n {
			return fmt.Errorf("%d requests wait, want %d", got, n)
		}
		return nil
	})
}

// TestRequestsThatWait: requests wait for a place in progress, for memory or for a rank, and
// leave the queue.
func TestRequestsThatWait(t *testing.T) {
	t.Parallel()
	p, rec := &tap{}, &recorded{ended: make(chan struct{})}
	rec.Store(&admin.Recorder{Path: "t.jsonl", Bytes: 7, Records: 3, Dropped: 1})
	r := startWith(t, loopback.Options{Fleet: "1a:profile=instant", Specs: p.specs(t), Recording: rec}, func(c *settings.Config) { c.Limits.QueueTimeout = patience })
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{
		{"clients leave the queue", clientsThatLeaveTheQueue},
		{"so do clients of others", foreignClientsThatLeave},
		{"the body's time is not the queue's", bodyTimeIsNotQueueTime},
		{"the memory of bodies", bodyMemory},
		{"for a rank", requestsWaitForARank},
		{"the line has an end", theLineHasAnEnd},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := r.in(t)
			p.set(nil)
			p.reset()
			r.set(func(*settings.Config) {})
			c.test(t, r, p)
			r.eventually("an empty ledger", r.Router.Balanced)
		})
	}
	t.Run("the status shows the recorder", func(t *testing.T) { statusShowsTheRecorder(t, r.in(t), rec) })
}

// onDecision is called with each decision of a router.
type onDecision struct {
	f atomic.Pointer[func(*trace.Decision)]
}

func (o *onDecision) set(f func(*trace.Decision)) { o.f.Store(&f) }

func (o *onDecision) decided(_ time.Time, d *trace.Decision) {
	if f := o.f.Load(); f != nil {
		(*f)(d)
	}
}

// eject takes the worker that a decision chose out for an hour, after the decision.
func eject(d *trace.Decision) {
	at := slices.IndexFunc(d.Input.Decode.Candidates, func(c decision.Candidate) bool { return c.Rank == d.DecodeRank })
	d.Input.DecodePeers[at].Worker.State.SetEjection(&workers.Ejection{Since: time.Now(), Until: time.Now().Add(time.Hour), Reason: "by the test"})
}

// TestTwoEngines is what requests do that find one of two engines busy, ejected or broken.
func TestTwoEngines(t *testing.T) {
	t.Parallel()
	p, hook := &tap{}, &onDecision{}
	r := startWith(t, loopback.Options{Fleet: "2a:profile=instant", Specs: p.specs(t), Observer: router.Observer{Decision: hook.decided}}, func(c *settings.Config) { c.Limits.QueueTimeout = patience })
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap, *onDecision)
	}{
		{"a refused retry is no decision", refusedRetryIsNoDecision},
		{"nobody waits for another rank", nobodyWaitsForAnotherRank},
		{"busy thresholds", busyThresholds},
		{"decisions are numbered", decisionsAreNumbered},
		{"an answer outlives an ejection", answerOutlivesAnEjection},
		{"passive ejection", passiveEjection}, // the last: an engine dies
	} {
		t.Run(c.name, func(t *testing.T) {
			r := r.in(t)
			p.set(nil)
			p.reset()
			hook.f.Store(nil)
			r.set(func(*settings.Config) {})
			for _, e := range r.Sim.Engines() {
				if err := e.SetFaults(fault.Set{}); err != nil {
					t.Fatal(err)
				}
				r.Router.Heal(e.Name())
			}
			c.test(t, r, p, hook)
			r.eventually("an empty ledger", r.Router.Balanced)
		})
	}
}

// requestsWaitForARank: a rank takes no more than its limit. A request that comes
// then waits, by priority and then in turn with other tenants, and its receipt shows that.
func requestsWaitForARank(t *testing.T, r *rig, p *tap) {
	h := holding(r, p, func(c *settings.Config) { c.Routing.Busy.Requests, c.Limits.TenantHeader = 1, "X-Team" })
	answers := []<-chan *answer{h.come("first")}
	if got := <-h.arrived; got != "first" {
		t.Fatalf("%s reached the engine", got)
	}
	for i, c := range []struct{ tag, team, band string }{
		{"low", "z", "low"}, {"a1", "a", ""}, {"a2", "a", ""}, {"a3", "a", "normal"}, {"b1", "b", ""}, {"c1", "c", "high"},
	} {
		header := []string{"X-Team", c.team}
		if c.band != "" {
			header = append(header, "X-Dynctl-Priority", c.band)
		}
		answers = append(answers, h.come(c.tag, header...))
		h.inLine(i + 1)
	}
	q := h.status().Queues
	if d := cmp.Diff([]admin.Queue{{Model: "sim", Normal: 5, Low: 1, Tenants: 4}}, q, cmpopts.IgnoreFields(admin.Queue{}, "OldestMS")); d != "" {
		t.Fatalf("queues (-want +got):\n%s", d)
	}
	if q[0].OldestMS <= 0 {
		t.Errorf("the oldest has waited for %v ms", q[0].OldestMS)
	}
	if n := h.metric(`dynctl_queue_requests{model="sim",priority="normal"}`); n != 5 {
		t.Errorf("%v normal requests wait, by the metric", n)
	}
	if n, all := h.metric(`dynctl_model_active_requests{model="sim"}`), h.metric("dynctl_inflight_requests"); n < 1 || n > all {
		t.Errorf("%v requests are in engines that decode, by the metric, of %v", n, all)
	}
	dry, err := h.Admin.Route(t.Context(), adminRoute(ids(40, 3), ""))
	if err != nil || !strings.Contains(string(encode(t, dry)), "would wait in the queue of sim") || !strings.Contains(string(encode(t, dry)), "6 request(s) of 4 tenant(s)") {
		t.Errorf("a dry run says %s, %v", encode(t, dry), err)
	}
	var order []string
	for range len(answers) - 1 {
		h.free <- struct{}{}
		order = append(order, <-h.arrived)
	}
	h.free <- struct{}{}
	// c1 may not raise its priority by itself; b1 and c1 have had nothing, unlike a2.
	if want := []string{"a1", "b1", "c1", "a2", "a3", "low"}; !slices.Equal(order, want) {
		t.Errorf("served in the order %v, want %v", order, want)
	}
	for i, got := range answers {
		a := <-got
		if a == nil || a.status != http.StatusOK {
			t.Fatalf("request %d got %v", i, a)
		}
		c := h.receipt(a.header.Get("X-Dynctl-Decision"))
		if i == 0 {
			if c.QueuedFor != "" {
				t.Errorf("the first request waited for %q", c.QueuedFor)
			}
		} else if c.QueuedMS <= 0 || c.QueuedBehind != i-1 || !strings.Contains(c.QueuedFor, "1 requests in progress, limit 1") {
			t.Errorf("request %d waited %v ms behind %d for %q", i, c.QueuedMS, c.QueuedBehind, c.QueuedFor)
		}
		if c.Attempt != 1 || len(c.Earlier) != 0 {
			t.Errorf("request %d: attempt %d, %d decisions before it", i, c.Attempt, len(c.Earlier))
		}
	}
}

// theLineHasAnEnd: a request that finds no room, waits too long, or would, is answered
// with when to come back, and why; one whose client leaves is forgotten.
func theLineHasAnEnd(t *testing.T, r *rig, p *tap) {
	narrow := func(c *settings.Config) { c.Routing.Busy.Requests, c.Limits.Queue = 1, 1 }
	// Not the patience of one request: that may be refused at once, by how long others waited.
	h := holding(r, p, func(c *settings.Config) { narrow(c); c.Limits.QueueTimeout = 50 * time.Millisecond })
	first := h.come("first")
	<-h.arrived
	a := <-h.come("impatient")
	h.set(narrow)
	e := a.refused(t, http.StatusTooManyRequests, "overloaded")
	if !strings.Contains(e.Error.Message, "waited too long") || !strings.Contains(e.Error.Message, "limit 1") || a.header.Get("Retry-After") == "" {
		t.Errorf("%s, Retry-After %q", e.Error.Message, a.header.Get("Retry-After"))
	}
	if c := h.receipt(a.header.Get("X-Dynctl-Decision")); c.QueuedMS < 50 || len(c.Decode.Candidates) != 1 || c.Decode.Candidates[0].Excluded == "" {
		t.Errorf("its receipt: %v ms, %+v", c.QueuedMS, c.Decode.Candidates)
	}
	ctx, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if a, err := h.try(ctx, http.MethodPost, "/v1/completions", []byte(quickBody(1))); err == nil {
			t.Errorf("whoever left got %v", a)
		}
	})
	h.inLine(1)
	a = <-h.come("too many")
	e = a.refused(t, http.StatusTooManyRequests, "overloaded")
	if !strings.Contains(e.Error.Message, "queue is full") {
		t.Error(e.Error.Message)
	}
	if c := h.receipt(a.header.Get("X-Dynctl-Decision")); c.Model != "sim" || c.Outcome.Status != http.StatusTooManyRequests {
		t.Errorf("its receipt: %+v", c)
	}
	for name, value := range map[string]string{"X-Dynctl-Priority": "urgent", "X-Dynctl-Max-Wait": "soon"} {
		(<-h.come("odd", name, value)).refused(t, http.StatusBadRequest, "invalid_request")
	}
	leave()
	wg.Wait()
	h.inLine(0)
	h.free <- struct{}{}
	if a := <-first; a == nil || a.status != http.StatusOK {
		t.Fatalf("the first got %v", a)
	}
}

// refusedRetryIsNoDecision: a retry that the line turns away before it could look for
// a rank has decided nothing. The receipt and an observer have the first decision once,
// and the client gets what became of that.
func refusedRetryIsNoDecision(t *testing.T, r *rig, p *tap, hook *onDecision) {
	h := &held{rig: r, p: p, arrived: make(chan string, 10), free: make(chan struct{})}
	var decisions sync.Map // how often, by the request's id
	hook.set(func(d *trace.Decision) {
		n, _ := decisions.LoadOrStore(d.RequestID, new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
	})
	r.set(func(c *settings.Config) {
		c.Routing.Busy.Requests, c.Routing.AllowHeaders, c.Limits.Queue = 1, true, 1
		c.Retry = settings.Retry{Attempts: 3, Budget: 1}
	})
	const plans = `dynctl_stage_seconds_count{stage="plan"}`
	planned := max(0, r.metric(plans))
	fail := make(chan struct{})
	h.p.set(func(_ string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		tag := fmt.Sprint(decode[object](t, body)["user"])
		h.arrived <- tag
		if tag == "fails" {
			<-fail
			w.WriteHeader(http.StatusInternalServerError)
			return true
		}
		<-h.free
		return false
	})
	fleet, err := h.Admin.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	one := h.come("one", "X-Dynctl-Worker", fleet.Workers[0].Name)
	<-h.arrived
	failing := h.come("fails", "X-Request-Id", "fails")
	<-h.arrived
	two := h.come("two", "X-Dynctl-Worker", fleet.Workers[0].Name) // and the queue is full
	h.inLine(1)
	close(fail)
	a := <-failing
	if a == nil || a.status != http.StatusInternalServerError {
		t.Errorf("the client gets %v", a)
	}
	for range 2 {
		h.free <- struct{}{}
	}
	for _, got := range []<-chan *answer{one, two} {
		if a := <-got; a == nil || a.status != http.StatusOK {
			t.Errorf("another one got %v", a)
		}
	}
	n, ok := decisions.Load("fails")
	if !ok || n.(*atomic.Int64).Load() != 1 {
		t.Errorf("an observer hears of %v decisions", n)
	}
	if a != nil {
		c := h.receipt(a.header.Get("X-Dynctl-Decision"))
		if c.Attempt != 1 || len(c.Earlier) != 0 || len(c.Legs) != 1 {
			t.Errorf("the receipt has attempt %d after %+v, legs %+v", c.Attempt, c.Earlier, c.Legs)
		}
	}
	if n := h.metric(plans) - planned; n != 3 {
		t.Errorf("the stages of three requests are counted %v times", n)
	}
}

// nobodyWaitsForAnotherRank: a request for a rank that has room goes, although
// others wait for one that has none; a limit that is raised lets all go; and one that
// looks at a metric which no engine has holds nothing up.
func nobodyWaitsForAnotherRank(t *testing.T, r *rig, p *tap, _ *onDecision) {
	h := holding(r, p, func(c *settings.Config) { c.Routing.Busy.Requests, c.Routing.AllowHeaders = 1, true })
	fleet, err := h.Admin.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	names := []string{fleet.Workers[0].Name, fleet.Workers[1].Name}
	one := h.come("one", "X-Dynctl-Worker", names[0])
	<-h.arrived
	two := h.come("two", "X-Dynctl-Worker", names[0])
	h.inLine(1)
	other := h.come("other", "X-Dynctl-Worker", names[1])
	if got := <-h.arrived; got != "other" {
		t.Fatalf("%s reached an engine", got)
	}
	began := time.Now()
	if _, err := h.Admin.SetConfig(t.Context(), map[string]any{"routing.busy_requests": 2}); err != nil {
		t.Fatal(err)
	}
	if got := <-h.arrived; got != "two" {
		t.Fatalf("%s reached an engine", got)
	}
	t.Logf("a limit that was raised was in force after %v", time.Since(began))
	for range 3 {
		h.free <- struct{}{}
	}
	for _, got := range []<-chan *answer{one, two, other} {
		if a := <-got; a == nil || a.status != http.StatusOK {
			t.Fatalf("got %v", a)
		}
	}
}
