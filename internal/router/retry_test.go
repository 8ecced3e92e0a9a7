package router_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// retrySeesTheFleetOfNow: a request whose first attempt takes long goes on
// with the workers that are there then, not with those that were.
func retrySeesTheFleetOfNow(t *testing.T, r *rig, p *tap, _ *onDecision) {
	r.set(func(c *settings.Config) { c.Routing.Policy, c.Retry.Budget = "round_robin", 1 })
	other := map[string]string{"aggregated-0": "aggregated-1", "aggregated-1": "aggregated-0"}
	at := map[string]string{"aggregated-0": r.worker("aggregated-0").URL, "aggregated-1": r.worker("aggregated-1").URL}
	removed := make(chan string, 1)
	more := engineAlone(t)
	changed := make(chan error, 1)
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		removed <- other[engine]
		ctx := q.Context()
		err := r.Admin.RemoveWorker(ctx, other[engine])
		if err == nil {
			_, err = r.Admin.AddWorker(ctx, admin.AddWorker{Spec: more.URL() + ",name=newcomer"})
		}
		if err == nil {
			err = loopback.Wait(ctx, "the newcomer", func() error {
				list, err := r.Admin.Workers(ctx)
				if err != nil {
					return err
				}
				for _, k := range list.Workers {
					if k.Name == "newcomer" && k.Usable && len(k.Models) > 0 {
						return nil
					}
				}
				return errors.New("not usable yet")
			})
		}
		p.set(nil)
		changed <- err
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 1), "max_tokens": 2}))
	if err := <-changed; err != nil {
		t.Fatal(err)
	}
	if a.status != http.StatusOK || a.header.Get("X-Dynctl-Worker") != "newcomer/dp0" {
		t.Errorf("%s from %q", a, a.header.Get("X-Dynctl-Worker"))
	}
	gone := <-removed
	if n := len(p.legsOf(gone)); n != 0 {
		t.Errorf("%d legs went to a worker that had been removed", n)
	}
	if err := r.Admin.RemoveWorker(t.Context(), "newcomer"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Admin.AddWorker(t.Context(), admin.AddWorker{Spec: at[gone] + ",name=" + gone}); err != nil {
		t.Fatal(err)
	}
	r.eventually("the worker that was removed", func() error {
		if w := r.worker(gone); !w.Usable {
			return errors.New(w.Reason)
		}
		return nil
	})
}

// TestFailingRequests: whether a request or its engines are at fault.
func TestFailingRequests(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "5a:profile=instant", func(c *settings.Config) {
		c.Routing.Policy, c.Retry = "round_robin", settings.Retry{Attempts: 8, Budget: 1}
		c.Health.Interval = time.Minute // faults are felt by requests only
	})
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{
		{"one engine alone", realFailuresCount}, // before any request was blamed
		{"without a body", requestsWithoutBody}, // so is this
		{"that breaks engines", requestThatBreaksEngines},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.set(nil)
			r.set(func(*settings.Config) {})
			for _, e := range r.Sim.Engines() {
				r.Router.Heal(e.Name())
			}
			c.test(t, r.in(t), p)
		})
	}
}

// TestWhatBreaksEngines: an engine breaks on a request when it answers with an
// error, and may be lost to it when it breaks off or gives no answer in time: of those
// there are two at most. One that cannot be reached does not break, and the request is
// retried while it has attempts.
func TestWhatBreaksEngines(t *testing.T) {
	t.Parallel()
	const attempts = 8
	const counted = "dynctl_requests_blamed_total"
	r := start(t, "5a:profile=instant,model=error+5a:profile=instant,model=reset+5a:profile=instant,model=timeout+5a:profile=instant,model=refused", func(k *settings.Config) {
		k.Routing.Policy, k.Retry.Attempts, k.Retry.Budget = "round_robin", attempts, 1
		k.Health.Interval, k.Timeouts.Response = time.Minute, 500*time.Millisecond
	})
	for i, c := range []struct {
		name   string
		faults fault.Set
		legs   int
	}{
		{"error", fault.Set{ErrorRate: 1}, 3},
		{"reset", fault.Set{DieRate: 1}, 2},
		{"timeout", fault.Set{HangRate: 1}, 2},
		{"refused", fault.Set{Refuse: true}, attempts},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := r.in(t)
			before := max(0, r.metric(counted))
			for _, e := range r.Sim.Engines()[5*i:][:5] {
				if err := e.SetFaults(c.faults); err != nil {
					t.Fatal(err)
				}
			}
			a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": c.name, "prompt": ids(100, i), "max_tokens": 2}))
			got := r.receipt(a.header.Get("X-Dynctl-Decision"))
			blamed := r.metric(counted) == before+1 && strings.Contains(strings.Join(got.Notes, "\n"), "counts against none of them")
			if a.status < 500 || len(got.Legs) != c.legs || blamed != (c.name != "refused") {
				t.Errorf("%s: %d legs, want %d; the request is blamed: %v, %q", a, len(got.Legs), c.legs, blamed, got.Notes)
			}
		})
	}
}

// realFailuresCount: while one engine alone has broken on a request, nothing says
// that the request is at fault, and the failure counts.
func realFailuresCount(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Retry.Attempts = 1 })
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path == "/v1/completions" {
			w.WriteHeader(http.StatusInternalServerError)
			return true
		}
		return false
	})
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 310), "max_tokens": 2}))
	if c := r.receipt(a.header.Get("X-Dynctl-Decision")); a.status < 500 || len(c.Legs) != 1 || strings.Contains(strings.Join(c.Notes, "\n"), "counts against none") {
		t.Errorf("%s: %d legs, %q", a, len(c.Legs), c.Notes)
	}
	if n := len(r.events("request_blamed")); n != 0 {
		t.Errorf("%d events blame the request", n)
	}
}

// requestsWithoutBody: requests that have no body are not taken for the same request.
func requestsWithoutBody(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Retry.Attempts = 1 })
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/version" {
			return false
		}
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	for range 3 {
		if a := r.send(http.MethodGet, "/version", nil); a.status != http.StatusInternalServerError {
			t.Errorf("%s", a)
		}
	}
	for _, e := range r.events("request_blamed") {
		t.Error(e.Text)
	}
}

// requestThatBreaksEngines: a request that every engine breaks on is tried on
// three of them and ejects none; two engines that are really broken do not keep a
// request from a healthy third, and are ejected for it.
func requestThatBreaksEngines(t *testing.T, r *rig, p *tap) {
	var failing atomic.Value // engines that fail all requests
	failing.Store("")
	poison := ids(100, 66)
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if q.URL.Path != "/v1/completions" || !strings.Contains(failing.Load().(string), engine) && gjson.GetBytes(body, "prompt.1").Int() != int64(poison[1]) {
			return false
		}
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	body := encode(t, object{"model": "sim", "prompt": poison, "max_tokens": 2})
	const requests = 10 // six failures of each engine at least, where five in a row eject
	for range requests {
		a := r.send(http.MethodPost, "/v1/completions", body)
		c := r.receipt(a.header.Get("X-Dynctl-Decision"))
		if a.status < 500 || len(c.Legs) != 3 || len(c.Earlier) != 2 {
			t.Fatalf("%s after %d legs: %q", a, len(c.Legs), c.Notes)
		}
		if notes := strings.Join(c.Notes, "\n"); !strings.Contains(notes, "counts against none of them") || !strings.Contains(notes, "two engines had broken") {
			t.Errorf("the receipt does not say so: %q", c.Notes)
		}
	}
	if n := len(r.events("outlier_ejected")); n != 0 {
		t.Errorf("%d ejections", n)
	}
	if n := r.metric("dynctl_requests_blamed_total"); n != requests {
		t.Errorf("%v requests are counted, want %d", n, requests)
	}
	if len(r.events("request_blamed")) != 1 {
		t.Errorf("events %+v", r.events("request_blamed"))
	}

	// The failing ones are not those that come next in turn only.
	failing.Store("aggregated-0 aggregated-1")
	for i := 0; len(r.events("outlier_ejected")) < 2; i++ {
		if a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, i), "max_tokens": 2})); a.status != http.StatusOK {
			t.Fatalf("request %d: %s", i, a)
		}
		if i == 100 {
			t.Fatal("two failing engines beside three that are well are not ejected")
		}
	}
	for _, e := range r.events("outlier_ejected") {
		if !strings.Contains("aggregated-0 aggregated-1", e.Worker) {
			t.Errorf("%s is ejected", e.Worker)
		}
	}
}

// TestTroubleThatMoves: an engine fails a request, then so does the only other
// one, by when the first is well again.
func TestTroubleThatMoves(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "2a:profile=instant,model=one+1p2d:profile=instant,model=two+2p1d:profile=instant,engine=sglang,model=three+1p2d:profile=instant,engine=sglang,model=four",
		func(k *settings.Config) { k.Routing.Threshold.Tokens = 1 })
	for _, c := range []struct{ model, fails string }{{"one", "aggregated"}, {"two", "decode"}, {"three", "prefill"}, {"four", "decode"}} {
		t.Run(c.model, func(t *testing.T) {
			r := r.in(t)
			var mu sync.Mutex
			var asked []string
			p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
				if q.URL.Path != "/v1/completions" || !strings.HasPrefix(engine, c.fails) {
					return false
				}
				mu.Lock()
				defer mu.Unlock()
				if asked = append(asked, engine); len(asked) > 2 {
					return false
				}
				w.WriteHeader(http.StatusInternalServerError)
				return true
			})
			a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": c.model, "prompt": ids(100, 1), "max_tokens": 2}))
			mu.Lock()
			defer mu.Unlock()
			if a.status != http.StatusOK || len(asked) != 3 || asked[0] == asked[1] || asked[2] != asked[0] {
				t.Errorf("%s, by %q: %q", a, asked, r.receipt(a.header.Get("X-Dynctl-Decision")).Notes)
			}
		})
	}
}

// TestConnectionClosedAsItIsUsed: an engine closes a connection as idle while the
// next request is on its way. The request is sent again, and no failure is
// counted; an engine that breaks every request off is no such case.
func TestConnectionClosedAsItIsUsed(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant,model=one+1p1d:profile=instant,model=two+1p1d:profile=instant,engine=sglang,model=three", func(k *settings.Config) { k.Routing.Threshold.Tokens = 1 })
	for _, c := range []struct{ model, path string }{{"one", "local"}, {"two", "remote"}, {"three", "remote"}} {
		t.Run(c.model, func(t *testing.T) {
			r := r.in(t)
			before := len(r.events("worker_failing"))
			var mu sync.Mutex
			used, now, broken, always := map[string]int{}, 1, 0, false // connections, and the request that was their first
			p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
				mu.Lock()
				defer mu.Unlock()
				if first := used[q.RemoteAddr]; q.URL.Path != "/v1/completions" || (first == 0 || first == now) && !always {
					used[q.RemoteAddr] = now
					return false
				}
				broken++
				conn, _, err := w.(http.Hijacker).Hijack()
				if err != nil {
					t.Error(err)
					return false
				}
				_ = conn.(*net.TCPConn).SetLinger(0)
				_ = conn.Close()
				return true
			})
			// An answer may be out before its connection is there for the next one.
			for i, begun, enough := 0, time.Now(), false; !enough; i++ {
				a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": c.model, "prompt": ids(100, i), "max_tokens": 2}))
				if a.status != http.StatusOK || a.header.Get("X-Dynctl-Path") != c.path {
					t.Fatalf("request %d: %s", i, a)
				}
				mu.Lock()
				now++
				n := broken
				mu.Unlock()
				if enough = n >= 4; !enough && time.Since(begun) > patience {
					t.Fatalf("%d connections broke in %d requests", n, i+1)
				}
			}
			mu.Lock()
			always = true
			mu.Unlock()
			if n := len(r.events("worker_failing")) - before; n != 0 {
				t.Errorf("%d events", n)
			}
			a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": c.model, "prompt": ids(100, 99), "max_tokens": 2}))
			if a.status != http.StatusBadGateway || len(r.events("worker_failing")) == before {
				t.Errorf("%s, events %v", a, r.events("worker_failing"))
			}
		})
	}
}

// receiptKeepsEveryAttempt: when all attempts fail, the receipt shows what
// each of them was decided from, not only that no worker is left.
func receiptKeepsEveryAttempt(t *testing.T, r *rig, _ *tap, _ *onDecision) {
	r.set(func(c *settings.Config) {
		c.Routing.Policy, c.Retry.Attempts, c.Retry.Budget = "round_robin", 8, 1
	})
	for i := range 2 {
		if err := r.Sim.Named(fmt.Sprint("aggregated-", i)).SetFaults(fault.Set{ErrorRate: 1}); err != nil {
			t.Fatal(err)
		}
	}
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 1), "max_tokens": 2}))
	c := r.receipt(a.header.Get("X-Dynctl-Decision"))
	// The third decision finds that no worker is left, and the first engine comes back.
	if len(c.Earlier) != 3 || len(c.Legs) != 3 || c.Earlier[2].Decode.Verdict == "chosen" || c.Decode.Chosen != c.Legs[0].Rank || c.Legs[2].Rank != c.Legs[0].Rank {
		t.Fatalf("%d earlier decisions, %d legs, the last %+v", len(c.Earlier), len(c.Legs), c.Decode)
	}
	for i, d := range c.Earlier[:2] {
		if d.Attempt != i+1 || d.Decode.Chosen != c.Legs[i].Rank || d.Path != "local" || len(d.Decode.Candidates) != 2 || d.Decode.Eligible != 2-i {
			t.Errorf("attempt %d: %+v", i+1, d)
		}
	}
	var text strings.Builder
	if err := c.Explain(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"attempt 1\n", "attempt 2\n", "attempt 3\n", "2 decode     every rank is excluded", "attempt 4, the last\n", "failed in this request"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("explain says no %q:\n%s", want, text.String())
		}
	}
}

// passiveEjection: a worker whose probes are fine but whose answers fail is
// taken out, visibly, and comes back by a trial.
func passiveEjection(t *testing.T, r *rig, _ *tap, _ *onDecision) {
	r.set(func(c *settings.Config) { c.Retry.Budget = 1; c.Routing.Policy = "round_robin" })
	ejected, reinstated := len(r.events("outlier_ejected")), len(r.events("outlier_reinstated"))
	bad := r.Sim.Named("aggregated-0")
	if err := bad.SetFaults(fault.Set{ErrorRate: 1}); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		r.complete(ids(20, i)) // none of them fails
	}
	if w := r.worker("aggregated-0"); w.Health != "ejected" || w.Usable {
		t.Errorf("%s %s", w.Health, w.Reason)
	}
	if e := r.events("outlier_ejected")[ejected:]; len(e) != 1 || e[0].Worker != "aggregated-0" {
		t.Errorf("%+v", e)
	}
	before := r.touched("aggregated-1")
	r.complete(ids(20, 99))
	if r.touched("aggregated-1") != before+1 {
		t.Error("the good worker did not get the request")
	}
	// A dry run while the good one drains answers what a request would get, and
	// brings no worker back.
	if _, err := r.Admin.DrainWorker(t.Context(), "aggregated-1"); err != nil {
		t.Fatal(err)
	}
	dry, err := r.Admin.Route(t.Context(), adminRoute(ids(20, 98), ""))
	if err != nil {
		t.Fatal(err)
	}
	if got := gjson.GetBytes(dry.Receipt, "decode.chosen").String(); got != "aggregated-0/dp0" || len(r.events("outlier_reinstated")) != reinstated {
		t.Errorf("a dry run chooses %q; brought back: %+v", got, r.events("outlier_reinstated"))
	}
	if _, err := r.Admin.ResumeWorker(t.Context(), "aggregated-1"); err != nil {
		t.Fatal(err)
	}
	// The other one dies: a bad worker is better than none, and this one has
	// recovered meanwhile.
	if err := bad.SetFaults(fault.Set{}); err != nil {
		t.Fatal(err)
	}
	r.Sim.Named("aggregated-1").Kill()
	r.complete(ids(20, 100))
	if len(r.events("outlier_reinstated")) != reinstated+1 {
		t.Error("no event of the return")
	}
}

// TestRetryBeforeTheFirstByte: connections refused, resets and 5xx cost the
// client nothing while another worker is there.
func TestRetryBeforeTheFirstByte(t *testing.T) {
	t.Parallel()
	r := start(t, "2p2d:profile=instant", func(c *settings.Config) { c.Retry.Budget = 1; c.Routing.Policy = "round_robin" })
	prompt := 0
	for name, set := range map[string]fault.Set{
		"refused": {Refuse: true}, "500": {ErrorRate: 1}, "503": {ErrorRate: 1, ErrorStatus: 503}, "429": {ErrorRate: 1, ErrorStatus: 429},
		"cut before the first token": {DieRate: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := r.in(t)
			r.eventually("all engines", func() error {
				for _, e := range r.Sim.Engines() {
					r.Router.Heal(e.Name())
					if w := r.worker(e.Name()); !w.Usable {
						return fmt.Errorf("%s: %s", w.Name, w.Reason)
					}
				}
				return nil
			})
			for _, e := range []string{"prefill-1", "decode-0"} {
				if err := r.Sim.Named(e).SetFaults(set); err != nil {
					t.Fatal(err)
				}
			}
			for i := range 6 {
				prompt++
				a := r.post("/v1/completions", object{"model": "sim", "prompt": ids(100, prompt), "max_tokens": 3, "stream": i%2 == 0})
				if a.header.Get("X-Dynctl-Worker") != "decode-1/dp0" || a.header.Get("X-Dynctl-Prefill-Worker") != "prefill-0/dp0" {
					c := r.receipt(a.header.Get("X-Dynctl-Decision"))
					t.Errorf("answered by %q and %q because %s (%s), %q, legs %+v, prefill %+v", a.header.Get("X-Dynctl-Prefill-Worker"), a.header.Get("X-Dynctl-Worker"), c.Reason, c.ReasonText, c.Notes, c.Legs, c.Prefill.Candidates)
				}
			}
			for _, e := range []string{"prefill-1", "decode-0"} {
				if err := r.Sim.Named(e).SetFaults(fault.Set{}); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestIdleConnectionsOfEngines: what an engine writes after an answer is never
// the answer to the next request, and connections that it closes while they are
// idle cost no client anything, over TLS as over TCP.
func TestIdleConnectionsOfEngines(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant,late_rate=.5,tls=on,model=late-tls+1p1d:profile=instant,late_rate=.5,model=late+2p2d:profile=instant,close_idle=30ms,tls=on,model=closed-tls+2p2d:profile=instant,close_idle=30ms,model=closed")
	for _, c := range []struct {
		model    string
		attempts int
	}{
		{"late-tls", 1},
		{"late", 1},
		{"closed-tls", 4}, // it may come in the very moment of the next request: then another worker serves
		{"closed", 4},
	} {
		t.Run(c.model, func(t *testing.T) {
			r := r.in(t)
			r.set(func(conf *settings.Config) { conf.Retry.Attempts = c.attempts })
			for i := range 60 {
				for _, stream := range []bool{true, false} {
					a := r.post("/v1/completions", object{"model": c.model, "prompt": ids(20+i, i), "max_tokens": 3, "ignore_eos": true, "stream": stream})
					if stream != bytes.HasSuffix(a.body, []byte("data: [DONE]\n\n")) {
						t.Errorf("request %d: %s", i, a)
					}
				}
			}
			if n := len(r.events("outlier_ejected")); n > 0 {
				t.Errorf("%d ejections", n)
			}
		})
	}
}

// TestHangUpIsCanceled: whenever a client hangs up, before the first token or in
// the middle of a stream, its legs end as canceled; an engine that breaks off
// itself is another outcome.
func TestHangUpIsCanceled(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=cpu,osl=100000", func(c *settings.Config) { c.Routing.AllowHeaders = true })
	legs := func(outcome string) (n float64) {
		for _, leg := range []string{`leg="decode",outcome="` + outcome + `",worker="decode-0"`, `leg="prefill",outcome="` + outcome + `",worker="prefill-0"`} {
			n += max(0, r.metric("dynctl_legs_total{"+leg+"}")) // -1 is none
		}
		return n
	}
	const clients = 30
	for i := range clients {
		path := []string{"local", "remote"}[i/2%2]
		stream := i%2 == 0
		body := encode(t, map[string]any{"model": "sim", "prompt": ids(100, i), "max_tokens": 4000, "stream": stream})
		ctx, hangUp := context.WithCancel(t.Context())
		resp, failed := make(chan *http.Response, 1), make(chan error, 1)
		go func() {
			a, e := r.open(ctx, http.MethodPost, "/v1/completions", body, "X-Dynctl-Path", path)
			resp <- a
			failed <- e
		}()
		if stream {
			a, e := <-resp, <-failed
			if e != nil {
				t.Fatal(e)
			}
			if _, e := io.ReadFull(a.Body, make([]byte, 100+10*i)); e != nil {
				t.Fatal(e)
			}
			hangUp()
			_ = a.Body.Close()
		} else {
			r.eventually("the decode leg", func() error {
				if r.counters("decode-0").Running == 0 {
					return errors.New("decode runs nothing")
				}
				return nil
			})
			hangUp()
			if e := <-failed; e == nil {
				t.Fatal("an answer of 4000 tokens is there already")
			}
		}
		r.eventually("the end of the leg", func() error {
			if n := r.status().Traffic.Cancelled; n != uint64(i+1) || r.counters("decode-0").Running != 0 {
				return fmt.Errorf("%d requests cancelled, want %d", n, i+1)
			}
			return nil
		})
	}
	if n := legs("canceled"); n != clients {
		t.Errorf("%v legs are canceled, want %d", n, clients)
	}
	for _, outcome := range []string{"failed", "reset", "timeout"} {
		if n := legs(outcome); n != 0 {
			t.Errorf("%v legs are %s", n, outcome)
		}
	}
	for _, k := range r.worker("decode-0").Ranks {
		if k.Failures != 0 {
			t.Errorf("%d failures of %s", k.Failures, k.Label)
		}
	}
}
