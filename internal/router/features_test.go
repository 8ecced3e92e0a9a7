package router_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// TestConnectorsEndToEnd: with every connector, streamed and not, the text is
// that of a single engine, and the engines' counters show that KV moved.
func TestConnectorsEndToEnd(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, fleet string
		moved       bool // the decode side counts tokens from outside
	}{
		{"nixl", "2p2d:profile=instant", true},
		{"nixl with ranks", "1p1d:profile=instant,dp=2", true},
		{"nixl push", "2p2d:profile=instant,connector=nixl-push", true},
		{"nixl push with ranks", "1p1d:profile=instant,dp=2,connector=nixl-push", true},
		{"offload p2p", "2p2d:profile=instant,connector=offload-p2p", true},
		{"nixl and offload p2p", "2p2d:profile=instant,connector=nixl-offload-p2p", true},
		{"sglang", "2p2d:profile=instant,engine=sglang", true},
		{"sglang with prefill ranks", "1p:profile=instant,engine=sglang,dp=2+1d:profile=instant,engine=sglang", true},
		{"lmcache", "1p1d:profile=instant,connector=lmcache", true},
		{"shared storage", "1p1d:profile=instant,connector=shared-storage", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, c.fleet)
			engine := "vllm"
			if strings.Contains(c.fleet, "sglang") {
				engine = "sglang"
			}
			oracle := start(t, "1a:profile=instant,engine="+engine)
			for i := range 10 {
				prompt := ids(150+i, i)
				want := direct(t, oracle.Sim.Engine(0).URL(), prompt)
				a, got := r.complete(prompt)
				if got != want || a.header.Get("X-Dynctl-Path") != "remote" {
					t.Errorf("prompt %d: %q by %s, want %q", i, got, a.header.Get("X-Dynctl-Path"), want)
				}
				s := r.post("/v1/completions", object{"model": "sim", "prompt": ids(150+i, 100+i), "max_tokens": 12, "ignore_eos": true, "stream": true})
				if got, want := streamed(t, s.body), direct(t, oracle.Sim.Engine(0).URL(), ids(150+i, 100+i)); got != want {
					t.Errorf("prompt %d, streamed: %q, want %q", i, got, want)
				}
				chat := object{"model": "sim", "messages": []object{{"role": "user", "content": fmt.Sprintf("tell me about number %d %s", i, strings.Repeat("and some more words ", 20))}}, "max_tokens": 8, "ignore_eos": true}
				got = r.post("/v1/chat/completions", chat).completion(t).Choices[0].Message.Content
				if want := oracle.post("/v1/chat/completions", chat).completion(t).Choices[0].Message.Content; got != want {
					t.Errorf("chat %d: %q, want %q", i, got, want)
				}
			}
			var moved, computed uint64
			for _, e := range r.Sim.Engines() {
				s, err := e.Counters()
				if err != nil {
					t.Fatal(err)
				}
				for i := range s {
					if e.Group().Role == workers.Decode {
						moved += s[i].ExternalHits
						computed += s[i].Local
					}
					if s[i].FailedTransfers+s[i].Expired != 0 || s[i].Pinned != 0 {
						t.Errorf("%s: %d failed transfers, %d expired, %d still pinned", e.Name(), s[i].FailedTransfers, s[i].Expired, s[i].Pinned)
					}
				}
			}
			if c.moved && moved < 30*100 {
				t.Errorf("%d tokens came from outside, %d were computed by decode engines", moved, computed)
			}
			r.synced()
		})
	}
}

// TestPairIsChosen: of decode workers of two connectors only one has a prefill
// worker. What goes remote goes to that pair, whatever the policy says of the other,
// and explain tells why not there; without the prefill worker both answer.
func TestPairIsChosen(t *testing.T) {
	t.Parallel()
	for _, policy := range selector.Policies() {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			r := start(t, "1p:profile=instant+1d:profile=instant,connector=lmcache+1d:profile=instant", func(c *settings.Config) { c.Routing.Policy = string(policy) })
			oracle := start(t, "1a:profile=instant")
			vetoed := 0
			for i := range 6 {
				a, got := r.complete(ids(150+i, i))
				if want := direct(t, oracle.Sim.Engine(0).URL(), ids(150+i, i)); got != want {
					t.Errorf("prompt %d: %q, want %q", i, got, want)
				}
				if a.header.Get("X-Dynctl-Path") != "remote" || a.header.Get("X-Dynctl-Worker") != "decode-1/dp0" {
					t.Errorf("prompt %d went %s to %s", i, a.header.Get("X-Dynctl-Path"), a.header.Get("X-Dynctl-Worker"))
				}
				d := r.receipt(a.header.Get("X-Dynctl-Decision"))
				for _, c := range d.Decode.Candidates {
					if c.Rank == "decode-0/dp0" && c.Excluded == "no prefill worker with its connector" {
						vetoed++
					}
				}
			}
			if vetoed == 0 && policy != selector.Random && policy != selector.PowerOfTwo && policy != selector.Session {
				t.Error("nobody was told why the other decode worker is not used")
			}
			r.drainWorker("prefill-0")
			used := map[string]bool{}
			for i := range 12 {
				a, _ := r.complete(ids(150, 100+i))
				used[a.header.Get("X-Dynctl-Worker")] = true
				if d := r.receipt(a.header.Get("X-Dynctl-Decision")); d.Path != "local" || d.Reason != "prefill_all_excluded" {
					t.Errorf("without the prefill worker: %s because %s", d.Path, d.Reason)
				}
			}
			if policy == selector.RoundRobin && len(used) != 2 {
				t.Errorf("only %v answered", used)
			}
		})
	}
}

// streamed joins the texts of a stream of completions.
func streamed(t *testing.T, body []byte) string {
	t.Helper()
	var text strings.Builder
	for _, line := range bytes.Split(body, []byte("\n")) {
		data, ok := bytes.CutPrefix(line, []byte("data: "))
		if !ok || string(data) == "[DONE]" {
			continue
		}
		if e := gjson.GetBytes(data, "error"); e.Exists() {
			t.Errorf("the stream has an error: %s", data)
		}
		text.WriteString(gjson.GetBytes(data, "choices.0.text").String())
	}
	if !bytes.HasSuffix(body, []byte("data: [DONE]\n\n")) {
		t.Errorf("the stream has no end: %.200q", body)
	}
	return text.String()
}

// TestSGLangPrefillFailureCancelsDecode: with concurrent legs the failure of the
// prefill ends the decode leg at once, and the retry has a new room.
func TestSGLangPrefillFailureCancelsDecode(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant,engine=sglang,bootstrap_wait=10m", func(c *settings.Config) { c.Retry.Attempts = 1; c.Routing.PrefillFallback = "error" })
	if err := r.Sim.Named("prefill-0").SetFaults(fault.Set{ErrorRate: 1}); err != nil {
		t.Fatal(err)
	}
	// The rendezvous alone would wait ten minutes.
	a, err := r.try(r.wait(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(200, 1)}))
	if err != nil {
		t.Fatal(err)
	}
	a.refused(t, http.StatusBadGateway, "prefill_failed")
	r.eventually("an idle decode engine", func() error {
		if s := r.counters("decode-0"); s.Running+s.Waiting != 0 {
			return fmt.Errorf("%d requests", s.Running+s.Waiting)
		}
		return nil
	})
}

// TestPrefillThatEndsTheAnswer: a prefill whose first token ends the answer has
// no KV to move. The decode rank then answers by itself; no engine is blamed,
// banned or ejected. Only an answer cut by length must have parameters.
func TestPrefillThatEndsTheAnswer(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant", func(c *settings.Config) {
		c.Retry.Attempts = 1
		c.Routing.PrefillFallback = "error"
	})
	oracle := start(t, "1a:profile=instant")
	set := func(f fault.Set) {
		t.Helper()
		if err := r.Sim.Named("prefill-0").SetFaults(f); err != nil {
			t.Fatal(err)
		}
	}
	for i, reason := range []string{"stop", "repetition"} {
		set(fault.Set{EndRate: 1, EndReason: reason})
		for _, stream := range []bool{false, true} {
			prompt := ids(200, 10+2*i)
			body := object{"model": "sim", "prompt": prompt, "max_tokens": 12, "ignore_eos": true, "stream": stream}
			a := r.post("/v1/completions", body)
			got := ""
			if stream {
				got = streamed(t, a.body)
			} else {
				got = a.completion(t).Choices[0].Text
			}
			if want := direct(t, oracle.Sim.Engine(0).URL(), prompt); got != want {
				t.Errorf("%s: %q, want %q", reason, got, want)
			}
			c := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if a.header.Get("X-Dynctl-Path") != "local" || c.Reason != "prefill_ended" || len(c.Legs) != 2 || c.Legs[0].Error != "" || len(c.Notes) == 0 {
				t.Errorf("%s: path %s, receipt %+v", reason, a.header.Get("X-Dynctl-Path"), c)
			}
		}
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	for _, e := range r.allEvents() {
		if e.Severity == "warn" || e.Severity == "error" {
			t.Errorf("event %+v", e)
		}
	}
	if s := r.status().Traffic; s.Fallbacks != 0 {
		t.Errorf("%d fallbacks are counted", s.Fallbacks)
	}
	if n := r.metric(`dynctl_decisions_total{path="local",reason="prefill_ended"}`); n != 4 {
		t.Errorf("%v decisions are counted", n)
	}

	set(fault.Set{EndRate: 1, EndReason: "length"})
	r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(200, 99)})).refused(t, http.StatusBadGateway, "prefill_failed")
	if len(r.events("prefill_without_params")) != 1 {
		t.Errorf("events %+v", r.allEvents())
	}
}

// TestRoundRobinWithTwoAttempts: a request has one turn in each phase, however
// many attempts it takes. With a turn for each attempt two attempts go round a
// fleet of an even number of ranks in step with it, and half of the ranks get
// all the work.
func TestRoundRobinWithTwoAttempts(t *testing.T) {
	t.Parallel()
	r := start(t, "4p2d:profile=instant", func(c *settings.Config) {
		c.Routing.Policy, c.Routing.MissingParams = "round_robin", "local"
	})
	for i := range 4 {
		if err := r.Sim.Named(fmt.Sprint("prefill-", i)).SetFaults(fault.Set{EndRate: 1, EndReason: "length"}); err != nil {
			t.Fatal(err)
		}
	}
	n := map[string]int{}
	for i := range 24 {
		a, _ := r.complete(ids(100, i))
		for _, l := range r.receipt(a.header.Get("X-Dynctl-Decision")).Legs {
			n[l.Worker]++
		}
	}
	want := map[string]int{"prefill-0": 6, "prefill-1": 6, "prefill-2": 6, "prefill-3": 6, "decode-0": 12, "decode-1": 12}
	if d := cmp.Diff(want, n); d != "" {
		t.Errorf("legs by worker, -want +got:\n%s", d)
	}
}

// TestRoundRobinOfSomeRequests: a request that stays local takes no turn from the
// prefill ranks. If it did, requests that are local and remote in turns would
// load half of them only.
func TestRoundRobinOfSomeRequests(t *testing.T) {
	t.Parallel()
	r := start(t, "2p2d:profile=instant", func(c *settings.Config) {
		c.Routing.Policy, c.Routing.Threshold.Tokens, c.Routing.ThresholdOn = "round_robin", 50, "isl"
	})
	n := map[string]int{}
	for i := range 16 {
		a, _ := r.complete(ids(20+80*(i%2), i))
		for _, l := range r.receipt(a.header.Get("X-Dynctl-Decision")).Legs {
			n[l.Worker]++
		}
	}
	want := map[string]int{"prefill-0": 4, "prefill-1": 4, "decode-0": 8, "decode-1": 8}
	if d := cmp.Diff(want, n); d != "" {
		t.Errorf("legs by worker, -want +got:\n%s", d)
	}
}

// TestNoSeriesOfAWorkerThatLeftMeanwhile: a worker leaves while it answers, and
// what is counted of that at the end brings none of its series back.
func TestNoSeriesOfAWorkerThatLeftMeanwhile(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant")
	body := encode(t, object{"model": "sim", "prompt": ids(100, 1), "max_tokens": 2})
	if a := r.send(http.MethodPost, "/v1/completions", body); a.status != http.StatusOK {
		t.Fatal(a)
	}
	const series = `worker="aggregated-0"`
	r.eventually("its series", func() error {
		if page, err := r.adminPage(t.Context(), "/metrics"); err != nil || !strings.Contains(page, series) {
			return fmt.Errorf("no series of the worker (%s)", fmt.Sprint(err))
		}
		return nil
	})
	left := make(chan error, 1)
	p.set(func(_ string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		err := r.Admin.RemoveWorker(q.Context(), "aggregated-0")
		if err == nil {
			err = loopback.Wait(q.Context(), "the end of its series", func() error {
				page, err := r.adminPage(q.Context(), "/metrics")
				if err == nil && strings.Contains(page, series) {
					err = errors.New("there are series of it")
				}
				return err
			})
		}
		left <- err
		return false
	})
	a := r.send(http.MethodPost, "/v1/completions", body)
	if err := <-left; err != nil {
		t.Fatal(err)
	}
	if a.status != http.StatusOK {
		t.Errorf("the request that ran: %s", a)
	}
	r.eventually("the request's end", func() error {
		if st := r.status(); st.Traffic.Inflight != 0 || st.Traffic.Completed != 2 {
			return fmt.Errorf("%+v", st.Traffic)
		}
		return nil
	})
	page, err := r.adminPage(t.Context(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(page) {
		if strings.Contains(line, series) {
			t.Errorf("after its end: %s", line)
		}
	}
}

// TestRetrySeesTheFleetOfNow: a request whose first attempt takes long goes on
// with the workers that are there then, not with those that were.
func TestRetrySeesTheFleetOfNow(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "2a:profile=instant", func(c *settings.Config) { c.Routing.Policy, c.Retry.Budget = "round_robin", 1 })
	more := start(t, "1a:profile=instant")
	changed := make(chan error, 1)
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" || engine != "aggregated-0" {
			return false
		}
		ctx := q.Context()
		err := r.Admin.RemoveWorker(ctx, "aggregated-1")
		if err == nil {
			_, err = r.Admin.AddWorker(ctx, admin.AddWorker{Spec: more.Sim.Engine(0).URL() + ",name=newcomer"})
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
	if n := len(p.legsOf("aggregated-1")); n != 0 {
		t.Errorf("%d legs went to a worker that had been removed", n)
	}
}

// TestRequestThatBreaksEngines: a request that every engine breaks on is tried on
// three of them and ejects none; two engines that are really sick do not keep a
// request from a third that is well, and are ejected for it.
func TestRequestThatBreaksEngines(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "4a:profile=instant", func(c *settings.Config) {
		c.Routing.Policy, c.Retry.Attempts, c.Retry.Budget = "round_robin", 8, 1
	})
	var sick atomic.Value // engines that fail all requests
	sick.Store("")
	poison := ids(100, 66)
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if q.URL.Path != "/v1/completions" || !strings.Contains(sick.Load().(string), engine) && gjson.GetBytes(body, "prompt.1").Int() != int64(poison[1]) {
			return false
		}
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	body := encode(t, object{"model": "sim", "prompt": poison, "max_tokens": 2})
	const requests = 9 // six failures of each engine at least, where five in a row eject
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

	// The ones that are sick are not those that come next in turn only.
	sick.Store("aggregated-0 aggregated-1")
	for i := range 25 {
		if a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, i), "max_tokens": 2})); a.status != http.StatusOK {
			t.Fatalf("request %d: %s", i, a)
		}
	}
	if n := len(r.events("outlier_ejected")); n != 2 {
		t.Errorf("%d ejections, want those of both sick engines", n)
	}
}

// TestWhatBreaksEngines: an engine breaks on a request when it answers with an
// error, breaks off, or gives no answer in time; one that cannot be reached does
// not, and the request goes on while it has attempts.
func TestWhatBreaksEngines(t *testing.T) {
	t.Parallel()
	const engines, attempts = 5, 8
	for _, c := range []struct {
		name   string
		faults fault.Set
		legs   int
	}{
		{"error", fault.Set{ErrorRate: 1}, 3},
		{"reset", fault.Set{DieRate: 1}, 3},
		{"timeout", fault.Set{HangRate: 1}, 3},
		{"refused", fault.Set{Refuse: true}, attempts},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, fmt.Sprintf("%da:profile=instant", engines), func(k *settings.Config) {
				k.Routing.Policy, k.Retry.Attempts, k.Retry.Budget = "round_robin", attempts, 1
				k.Health.Interval, k.Timeouts.Response = time.Minute, 500*time.Millisecond
			})
			for _, e := range r.Sim.Engines() {
				if err := e.SetFaults(c.faults); err != nil {
					t.Fatal(err)
				}
			}
			a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 1), "max_tokens": 2}))
			got := r.receipt(a.header.Get("X-Dynctl-Decision"))
			blamed := len(r.events("request_blamed")) == 1 && strings.Contains(strings.Join(got.Notes, "\n"), "counts against none of them")
			if a.status < 500 || len(got.Legs) != c.legs || blamed != (c.legs == 3) {
				t.Errorf("%s: %d legs, want %d; the request is blamed: %v, %q", a, len(got.Legs), c.legs, blamed, got.Notes)
			}
		})
	}
}

// TestTroubleThatMoves: an engine fails a request, then so does the only other
// one, by when the first is well again.
func TestTroubleThatMoves(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ fleet, fails string }{
		{"2a:profile=instant", "aggregated"},
		{"1p2d:profile=instant", "decode"},
		{"2p1d:profile=instant,engine=sglang", "prefill"},
		{"1p2d:profile=instant,engine=sglang", "decode"},
	} {
		t.Run(c.fleet, func(t *testing.T) {
			t.Parallel()
			r, p := tappedRig(t, c.fleet, func(k *settings.Config) { k.Routing.Threshold.Tokens = 1 })
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
			a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 1), "max_tokens": 2}))
			mu.Lock()
			defer mu.Unlock()
			if a.status != http.StatusOK || len(asked) != 3 || asked[0] == asked[1] || asked[2] != asked[0] {
				t.Errorf("%s, by %q: %q", a, asked, r.receipt(a.header.Get("X-Dynctl-Decision")).Notes)
			}
		})
	}
}

// TestConnectionClosedAsItIsUsed: an engine closes a connection as idle while the
// next request is on its way. The request is sent again, and it is nobody's fault;
// an engine that breaks every request off is no such case.
func TestConnectionClosedAsItIsUsed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ fleet, path string }{{"1a:profile=instant", "local"}, {"1p1d:profile=instant", "remote"}, {"1p1d:profile=instant,engine=sglang", "remote"}} {
		t.Run(c.fleet, func(t *testing.T) {
			t.Parallel()
			r, p := tappedRig(t, c.fleet, func(k *settings.Config) { k.Routing.Threshold.Tokens = 1 })
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
				a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, i), "max_tokens": 2}))
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
			if n := len(r.events("worker_failing")); n != 0 {
				t.Errorf("%d events", n)
			}
			a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 99), "max_tokens": 2}))
			if a.status != http.StatusBadGateway || len(r.events("worker_failing")) == 0 {
				t.Errorf("%s, events %v", a, r.events("worker_failing"))
			}
		})
	}
}

// TestReceiptKeepsEveryAttempt: when all attempts fail, the receipt tells what
// each of them was decided from, not only that nobody is left.
func TestReceiptKeepsEveryAttempt(t *testing.T) {
	t.Parallel()
	r := start(t, "2a:profile=instant", func(c *settings.Config) {
		c.Routing.Policy, c.Retry.Attempts, c.Retry.Budget = "round_robin", 8, 1
	})
	for i := range 2 {
		if err := r.Sim.Named(fmt.Sprint("aggregated-", i)).SetFaults(fault.Set{ErrorRate: 1}); err != nil {
			t.Fatal(err)
		}
	}
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 1), "max_tokens": 2}))
	c := r.receipt(a.header.Get("X-Dynctl-Decision"))
	// The third decision finds that nobody is left, and the first engine comes back.
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

// TestModelsAliasesAndLoRA: several models behind one router, each on its own
// workers, under its own names.
func TestModelsAliasesAndLoRA(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant,model=red+2a:profile=instant,model=blue,loras=navy|sky", func(c *settings.Config) {
		c.Aliases = []settings.Alias{{Name: "gpt-x", Model: "red"}}
	})
	ask := func(model string) *answer {
		return r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": model, "prompt": ids(64, 1), "max_tokens": 2}))
	}
	for model, on := range map[string]string{"red": "decode-0", "gpt-x": "decode-0", "blue": "aggregated", "navy": "aggregated"} {
		p.reset()
		if a := ask(model); a.status != 200 || !strings.HasPrefix(a.header.Get("X-Dynctl-Worker"), on) {
			t.Errorf("%s: %s on %s", model, a, a.header.Get("X-Dynctl-Worker"))
		}
		for _, l := range p.legs() {
			if m := gjson.GetBytes(l.body, "model").String(); model == "gpt-x" && m != "red" {
				t.Errorf("the alias went to the engine as %q", m)
			}
		}
	}
	ask("green").refused(t, http.StatusNotFound, "model_not_found")
	var names []string
	for _, m := range gjson.GetBytes(r.send(http.MethodGet, "/v1/models", nil).body, "data.#.id").Array() {
		names = append(names, m.String())
	}
	slices.Sort(names)
	if got := strings.Join(names, " "); got != "blue gpt-x navy red sky" {
		t.Errorf("models: %s", got)
	}
	if a := r.send(http.MethodGet, "/v1/models/navy", nil); a.status != 200 || gjson.GetBytes(a.body, "id").String() != "navy" {
		t.Errorf("%s", a)
	}
	r.send(http.MethodGet, "/v1/models/nobody", nil).refused(t, http.StatusNotFound, "model_not_found")
	// An adapter's blocks are its own: the base model's cache is no use to it.
	r.synced()
	c := r.receipt(ask("blue").header.Get("X-Dynctl-Decision"))
	if c.Predicted.CachedTokens == 0 {
		t.Error("the base model finds nothing of its own prompt")
	}
	c = r.receipt(ask("sky").header.Get("X-Dynctl-Decision"))
	if c.Predicted.CachedTokens != 0 {
		t.Errorf("an adapter is promised %d tokens of another one's cache", c.Predicted.CachedTokens)
	}
}

// TestRanksOfOneWorkerHoldTheirOwn: with data-parallel ranks a prompt goes back
// to the rank that holds it, and the engine says so too.
func TestRanksOfOneWorkerHoldTheirOwn(t *testing.T) {
	t.Parallel()
	for _, engine := range []string{"vllm", "sglang"} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			r := start(t, "1a:profile=instant,dp=4,engine="+engine)
			home := map[int]string{}
			for round := range 3 {
				for i := range 8 {
					a, _ := r.complete(ids(320, i))
					rank := a.header.Get("X-Dynctl-Worker")
					cached := a.completion(t).Usage.PromptTokensDetails.CachedTokens
					if round == 0 {
						home[i] = rank
					} else if rank != home[i] || cached != 304 {
						t.Errorf("prompt %d went to %s with %d cached tokens, its home is %s", i, rank, cached, home[i])
					}
					r.synced()
				}
			}
			used := map[string]bool{}
			for _, k := range home {
				used[k] = true
			}
			if len(used) != 4 {
				t.Errorf("eight prompts live on %v of four ranks", used)
			}
		})
	}
}

// TestSessionPolicy: a session stays on its rank, by header or by body field,
// and most sessions stay when a worker comes.
func TestSessionPolicy(t *testing.T) {
	t.Parallel()
	r := start(t, "4a:profile=instant", func(c *settings.Config) { c.Routing.Policy = "session" })
	home := map[string]string{}
	for round := range 3 {
		for i := range 16 {
			s := fmt.Sprint("session-", i)
			body := object{"model": "sim", "prompt": ids(50, round*100+i), "max_tokens": 1}
			var a *answer
			if i%2 == 0 {
				a = r.post("/v1/completions", body, "X-Session-ID", s)
			} else {
				body["user"] = s
				a = r.post("/v1/completions", body)
			}
			rank := a.header.Get("X-Dynctl-Worker")
			if home[s] == "" {
				home[s] = rank
			}
			if home[s] != rank {
				t.Errorf("%s moved from %s to %s", s, home[s], rank)
			}
		}
	}
	used := map[string]bool{}
	for _, k := range home {
		used[k] = true
	}
	if len(used) < 3 {
		t.Errorf("16 sessions live on %d of 4 workers", len(used))
	}
}

// TestBusyThresholds: ranks over a limit get nothing; when all are and nobody
// may wait, the client is told to come back.
func TestBusyThresholds(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "2a:profile=instant", func(c *settings.Config) {
		c.Routing.Busy.PrefillTokens = 100
		c.Routing.Policy, c.Limits.Queue = "round_robin", 0
	})
	held := make(chan struct{})
	p.set(func(_ string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path == "/v1/completions" {
			select {
			case <-held:
			case <-q.Context().Done():
			}
		}
		return false
	})
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if a, err := r.try(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(200, i), "max_tokens": 1})); err != nil || a.status != 200 {
				t.Errorf("%v %v", a, err)
			}
		}()
		r.eventually("a busy rank", func() error {
			if n := len(p.callsOf("/v1/completions")); n != i+1 {
				return fmt.Errorf("%d calls", n)
			}
			return nil
		})
	}
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(200, 9), "max_tokens": 1}))
	a.refused(t, http.StatusTooManyRequests, "overloaded")
	if a.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	c := r.receipt(a.header.Get("X-Dynctl-Decision"))
	for _, k := range c.Decode.Candidates {
		if k.Excluded == "" {
			t.Errorf("%s stands in the receipt without a reason", k.Rank)
		}
	}
	close(held)
	wg.Wait()
	r.complete(ids(200, 10))
}

// callsOf are the calls to a path that have begun.
func (p *tap) callsOf(path string) (out []*tapped) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.calls {
		if c.path == path {
			out = append(out, c)
		}
	}
	return out
}

// TestFleetByAdminAPI: drain, resume, add and remove, with a stream in
// progress that is not disturbed.
func TestFleetByAdminAPI(t *testing.T) {
	t.Parallel()
	r := start(t, "2a:speed=2")
	more := start(t, "1a:profile=instant")
	ctx := t.Context()
	resp, err := r.open(ctx, http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(30, 1), "max_tokens": 60, "ignore_eos": true, "stream": true}))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	busy, _, _ := strings.Cut(resp.Header.Get("X-Dynctl-Worker"), "/")
	w, err := r.Admin.DrainWorker(ctx, busy)
	if err != nil || !w.Draining || w.Usable {
		t.Fatalf("%+v %v", w, err)
	}
	for i := range 6 {
		if a, _ := r.complete(ids(30, 1+i)); strings.HasPrefix(a.header.Get("X-Dynctl-Worker"), busy) {
			t.Errorf("a draining worker got a request")
		}
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.HasSuffix(body, []byte("data: [DONE]\n\n")) {
		t.Errorf("the running stream was disturbed: %.200q %v", body, err)
	}
	if w, err := r.Admin.ResumeWorker(ctx, busy); err != nil || !w.Usable {
		t.Fatalf("%+v %v", w, err)
	}
	added, err := r.Admin.AddWorker(ctx, admin.AddWorker{Spec: more.Sim.Engine(0).URL() + ",name=newcomer"})
	if err != nil || added.Name != "newcomer" {
		t.Fatalf("%+v %v", added, err)
	}
	if _, err := r.Admin.AddWorker(ctx, admin.AddWorker{Spec: more.Sim.Engine(0).URL() + ",name=newcomer"}); err == nil {
		t.Error("the same worker was added twice")
	}
	if _, err := r.Admin.AddWorker(ctx, admin.AddWorker{Spec: "http://127.0.0.1:1,engin=vllm"}); err == nil || !strings.Contains(err.Error(), "engine") {
		t.Errorf("a misspelt option: %v", err)
	}
	for _, name := range []string{"aggregated-0", "aggregated-1"} {
		if err := r.Admin.RemoveWorker(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Admin.RemoveWorker(ctx, "agregated-0"); err == nil {
		t.Error("a worker that is not there was removed")
	}
	r.eventually("the new worker", func() error {
		if w := r.worker("newcomer"); !w.Usable || w.Ranks[0].Feed.State != "live" {
			return fmt.Errorf("%s, feed %s", w.Reason, w.Ranks[0].Feed.State)
		}
		return nil
	})
	if a, _ := r.complete(ids(100, 77)); !strings.HasPrefix(a.header.Get("X-Dynctl-Worker"), "newcomer") {
		t.Errorf("went to %s", a.header.Get("X-Dynctl-Worker"))
	}
	for kind, n := range map[string]int{"worker_draining": 1, "worker_resumed": 1, "worker_added": 3, "worker_removed": 2} {
		if got := len(r.events(kind)); got != n {
			t.Errorf("%d events %s, want %d", got, kind, n)
		}
	}
	if err := r.Admin.RemoveWorker(ctx, "newcomer"); err != nil {
		t.Fatal(err)
	}
	a := r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"x"}`))
	if a.status != http.StatusServiceUnavailable {
		t.Errorf("a router without workers answers %s", a)
	}
}

// TestSnapshotAndRestart: a router that comes back knows at once what the
// engines hold, and takes the feeds up where it left them, although the engines
// remember their latest few batches only.
func TestSnapshotAndRestart(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "index.snapshot")
	r := start(t, "2a:profile=instant,steps=8", func(c *settings.Config) { c.Index.Snapshot = path })
	for i := range 40 {
		r.complete(ids(300, i))
	}
	r.synced()
	before := r.worker("aggregated-0").Ranks[0]
	if before.Feed.LastSeq == nil || *before.Feed.LastSeq < 2*8 || before.IndexBlocks == 0 {
		t.Fatalf("the replay reaches back to the start: %+v", before)
	}
	ctx := r.wait()
	if err := r.StopRouter(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	// While it is away one engine goes on, the other is replaced.
	direct(t, r.Sim.Engine(0).URL(), ids(200, 500))
	if err := r.Sim.Engine(1).Restart(); err != nil {
		t.Fatal(err)
	}
	direct(t, r.Sim.Engine(1).URL(), ids(200, 600))
	if err := r.StartRouter(ctx); err != nil {
		t.Fatal(err)
	}
	if err := r.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	r.synced()
	if len(r.events("snapshot_restored")) != 1 {
		t.Error("the restore is not told")
	}
	w := r.worker("aggregated-0").Ranks[0]
	if w.Feed.Restarts != 0 || w.Feed.Lost != 0 || w.IndexBlocks <= before.IndexBlocks {
		t.Errorf("the engine that went on was taken for a new one: %d blocks, %d before, %+v", w.IndexBlocks, before.IndexBlocks, w.Feed)
	}
	for i := range 10 {
		a, _ := r.complete(ids(300, i))
		c := r.receipt(a.header.Get("X-Dynctl-Decision"))
		if c.Predicted.CachedTokens != c.Outcome.CachedTokens {
			t.Errorf("prompt %d: %d cached tokens predicted, %d found", i, c.Predicted.CachedTokens, c.Outcome.CachedTokens)
		}
	}
	// A snapshot that was damaged is refused whole.
	if err := r.StopRouter(ctx); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)/2] ^= 0x40
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.StartRouter(ctx); err != nil {
		t.Fatal(err)
	}
	if err := r.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	if len(r.events("snapshot_refused")) != 1 {
		t.Error("a damaged snapshot is not told")
	}
	r.eventually("what the engines' replay still has", func() error {
		if w := r.worker("aggregated-0").Ranks[0]; !w.Feed.Trusted || w.IndexBlocks == 0 || w.IndexBlocks >= before.IndexBlocks {
			return fmt.Errorf("%d blocks, feed %+v", w.IndexBlocks, w.Feed)
		}
		return nil
	})
}

// TestSilentRecomputeIsDetected: a decode engine that answers well but does not
// use the KV that was computed for it is found out by its own counters.
func TestSilentRecomputeIsDetected(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant")
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if engine != "decode-0" || q.URL.Path != "/v1/completions" {
			return false
		}
		// As an engine without --kv-transfer-config does: the parameters are
		// not looked at.
		resp, err := http.Post(r.Sim.Named(engine).URL()+q.URL.Path, "application/json", bytes.NewReader(edit(body, "kv_transfer_params", nil)))
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		defer resp.Body.Close()
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.Copy(w, resp.Body)
		return true
	})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	r.eventually("the alarm", func() error {
		// What is sent before the counter has been read once proves nothing.
		r.complete(ids(200, int(time.Now().UnixNano()%1e6)))
		if n := len(r.events("silent_recompute")); n != 1 {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
	s := r.status()
	if s.Traffic.Recomputes == 0 || s.State != "degraded" || !strings.Contains(strings.Join(s.Reasons, " "), "decode-0/dp0") {
		t.Errorf("status does not tell: %+v", s)
	}
	if r.metric(`dynctl_silent_recompute_total{worker="decode-0"}`) < 3 {
		t.Error("not counted")
	}
	p.set(nil)
	fresh := 1000
	r.eventually("the all-clear", func() error {
		fresh++
		r.complete(ids(200, fresh))
		if len(r.events("silent_recompute_ended")) == 0 {
			return fmt.Errorf("still alarmed")
		}
		return nil
	})
}

// TestPassiveEjection: a worker whose probes are fine but whose answers fail is
// taken out, visibly, and comes back by a trial.
func TestPassiveEjection(t *testing.T) {
	t.Parallel()
	r := start(t, "2a:profile=instant", func(c *settings.Config) { c.Retry.Budget = 1; c.Routing.Policy = "round_robin" })
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
	if e := r.events("outlier_ejected"); len(e) != 1 || e[0].Worker != "aggregated-0" {
		t.Errorf("%+v", e)
	}
	before := r.touched("aggregated-1")
	r.complete(ids(20, 99))
	if r.touched("aggregated-1") != before+1 {
		t.Error("the good worker did not get the request")
	}
	// Whoever asks what would be done while the good one drains is told what a
	// request would get, and brings nobody back.
	if _, err := r.Admin.DrainWorker(t.Context(), "aggregated-1"); err != nil {
		t.Fatal(err)
	}
	dry, err := r.Admin.Route(t.Context(), adminRoute(ids(20, 98), ""))
	if err != nil {
		t.Fatal(err)
	}
	if got := gjson.GetBytes(dry.Receipt, "decode.chosen").String(); got != "aggregated-0/dp0" || len(r.events("outlier_reinstated")) != 0 {
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
	if len(r.events("outlier_reinstated")) != 1 {
		t.Error("the return is not told")
	}
}

// TestRetryBeforeTheFirstByte: connections refused, resets and 5xx cost the
// client nothing while another worker is there.
func TestRetryBeforeTheFirstByte(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]fault.Set{
		"refused": {Refuse: true}, "500": {ErrorRate: 1}, "503": {ErrorRate: 1, ErrorStatus: 503}, "429": {ErrorRate: 1, ErrorStatus: 429},
		"cut before the first token": {DieRate: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, "2p2d:profile=instant", func(c *settings.Config) { c.Retry.Budget = 1; c.Routing.Policy = "round_robin" })
			for _, e := range []string{"prefill-1", "decode-0"} {
				if err := r.Sim.Named(e).SetFaults(set); err != nil {
					t.Fatal(err)
				}
			}
			for i := range 6 {
				a := r.post("/v1/completions", object{"model": "sim", "prompt": ids(100, i), "max_tokens": 3, "stream": i%2 == 0})
				if a.header.Get("X-Dynctl-Worker") != "decode-1/dp0" || a.header.Get("X-Dynctl-Prefill-Worker") != "prefill-0/dp0" {
					c := r.receipt(a.header.Get("X-Dynctl-Decision"))
					t.Errorf("answered by %q and %q because %s (%s), %q, legs %+v, prefill %+v", a.header.Get("X-Dynctl-Prefill-Worker"), a.header.Get("X-Dynctl-Worker"), c.Reason, c.ReasonText, c.Notes, c.Legs, c.Prefill.Candidates)
				}
			}
		})
	}
}

// TestTokenizers: with engine tokens the prediction is exact; without events or
// tokens the router still brings a prompt back to where it went.
func TestTokenizers(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("shared words of a long system prompt that many requests have. ", 40)
	chat := func(tail string) object {
		return object{"model": "sim", "messages": []object{{"role": "system", "content": text}, {"role": "user", "content": tail}}, "max_tokens": 2}
	}
	t.Run("engine is exact", func(t *testing.T) {
		t.Parallel()
		r := start(t, "2a:profile=instant", func(c *settings.Config) { c.Tokens.Tokenizer = "engine" })
		for i := range 6 {
			a := r.post("/v1/chat/completions", chat(fmt.Sprint("question ", i)))
			c := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if c.Inputs.ISLSource != "engine" || c.Inputs.ISL != c.Outcome.PromptTokens || c.Predicted.CachedTokens != c.Outcome.CachedTokens {
				t.Errorf("isl %d by %s, the engine counts %d; %d cached tokens predicted, %d found", c.Inputs.ISL, c.Inputs.ISLSource, c.Outcome.PromptTokens, c.Predicted.CachedTokens, c.Outcome.CachedTokens)
			}
			if i > 0 && c.Outcome.CachedTokens == 0 {
				t.Error("no affinity")
			}
			r.synced()
		}
	})
	t.Run("approximate without events", func(t *testing.T) {
		t.Parallel()
		r := start(t, "3a:profile=instant,events=off", func(c *settings.Config) { c.Tokens.Tokenizer = "estimate" })
		first := r.post("/v1/chat/completions", chat("first")).header.Get("X-Dynctl-Worker")
		for i := range 6 {
			a := r.post("/v1/chat/completions", chat(fmt.Sprint("question ", i)))
			c := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if a.header.Get("X-Dynctl-Worker") != first || !c.Inputs.Approximate || c.Outcome.CachedTokens == 0 {
				t.Errorf("went to %s, the prefix is on %s; approximate %v, %d cached", a.header.Get("X-Dynctl-Worker"), first, c.Inputs.Approximate, c.Outcome.CachedTokens)
			}
		}
	})
	t.Run("ids without events", func(t *testing.T) {
		t.Parallel()
		r := start(t, "3a:profile=instant,events=off")
		a, _ := r.complete(append(ids(320, 1), 1, 2, 3))
		for i := range 5 {
			b, _ := r.complete(append(ids(320, 1), ids(30, 50+i)...))
			if b.header.Get("X-Dynctl-Worker") != a.header.Get("X-Dynctl-Worker") {
				t.Errorf("went to %s, not %s", b.header.Get("X-Dynctl-Worker"), a.header.Get("X-Dynctl-Worker"))
			}
		}
	})
	t.Run("local that disagrees is not used", func(t *testing.T) {
		t.Parallel()
		file := tokenizerFile(t)
		r := start(t, "1a:profile=instant", func(c *settings.Config) { c.Tokens.Tokenizer, c.Tokens.Path = "local", file })
		r.eventually("the self-check", func() error {
			if len(r.events("tokenizer_checked")) == 0 {
				return fmt.Errorf("not told")
			}
			return nil
		})
		a := r.post("/v1/chat/completions", chat("who counts"))
		c := r.receipt(a.header.Get("X-Dynctl-Decision"))
		if c.Inputs.ISLSource != "engine" || c.Inputs.ISL != c.Outcome.PromptTokens {
			t.Errorf("isl %d by %s, the engine counts %d", c.Inputs.ISL, c.Inputs.ISLSource, c.Outcome.PromptTokens)
		}
		if s := r.status(); !strings.Contains(strings.Join(s.Reasons, " "), "local tokenizer") {
			t.Errorf("status does not tell of the disagreement: %v", s.Reasons)
		}
	})
}

// tokenizerFile finds a tokenizer.json among the test data.
func tokenizerFile(t *testing.T) string {
	t.Helper()
	found := ""
	_ = filepath.WalkDir(filepath.Join("..", "..", "testdata", "tokenizer"), func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() == "tokenizer.json" && found == "" {
			found = p
		}
		return nil
	})
	if found == "" {
		t.Fatal("no tokenizer.json under testdata/tokenizer")
	}
	return found
}

// TestMessagesAndResponsesGoRemote: the other chat endpoints are tokenized as the
// engine does it, split like a chat, and answer as one engine alone does.
func TestMessagesAndResponsesGoRemote(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant", func(c *settings.Config) { c.Tokens.Tokenizer = "engine" })
	oracle := start(t, "1a:profile=instant")
	words := strings.Repeat("a good many words of context ", 30)
	schema := object{"properties": object{"city": object{"type": "string"}}}
	for name, c := range map[string]struct {
		path string
		body object
	}{
		"messages, text":   {"/v1/messages", object{"max_tokens": 8, "messages": []object{{"role": "user", "content": words + "1"}}}},
		"messages, stream": {"/v1/messages", object{"max_tokens": 8, "stream": true, "system": "be brief", "messages": []object{{"role": "user", "content": words + "2"}}}},
		"messages, tools": {"/v1/messages", object{"max_tokens": 8, "system": []object{{"type": "text", "text": "x-anthropic-billing-header: " + words}, {"type": "text", "text": words}, {"type": "text", "text": "<more>"}},
			"tools": []object{{"name": "weather", "description": "the weather", "input_schema": schema}},
			"messages": []object{
				{"role": "user", "content": []object{{"type": "text", "text": "how is it"}, {"type": "text", "text": "there"}}},
				{"role": "assistant", "content": []object{{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I look"}, {"type": "tool_use", "id": "t1", "name": "weather", "input": object{"city": "A & B", "n": 1.5}}}},
				{"role": "user", "content": []object{{"type": "tool_result", "tool_use_id": "t1", "content": []object{{"type": "text", "text": "rain"}, {"type": "text", "text": "cold"}}}, {"type": "text", "text": "so?"}}},
			}}},
		"messages, thinking": {"/v1/messages", object{"max_tokens": 2000, "stop_sequences": []string{"e"}, "thinking": object{"type": "enabled", "budget_tokens": 1024}, "messages": []object{{"role": "user", "content": words + "3"}}}},
		"responses, text":    {"/v1/responses", object{"max_output_tokens": 8, "input": words + "4", "instructions": "be brief", "store": true}},
		"responses, stream":  {"/v1/responses", object{"max_output_tokens": 8, "stream": true, "input": []object{{"role": "user", "content": []object{{"type": "input_text", "text": words}, {"type": "input_text", "text": "5"}}}}}},
		"responses, tools": {"/v1/responses", object{"max_output_tokens": 8, "tools": []object{{"type": "function", "name": "weather", "parameters": schema, "strict": nil}},
			"input": []object{
				{"role": "developer", "content": words + "6"}, {"role": "user", "content": "how is it"},
				{"type": "reasoning", "id": "r1", "summary": []object{}, "content": []object{{"type": "reasoning_text", "text": "hm"}}},
				{"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": []object{{"type": "output_text", "text": "I look", "annotations": []object{}}}},
				{"type": "function_call", "call_id": "c1", "name": "weather", "arguments": `{"city": "<X>"}`}, {"type": "function_call_output", "call_id": "c1", "output": "rain"},
			}}},
	} {
		t.Run(name, func(t *testing.T) {
			p.reset()
			c.body["model"] = "sim"
			a := r.post(c.path, c.body)
			rec := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if rec.Path != "remote" || rec.Inputs.ISLSource != "engine" || len(rec.Legs) != 2 || rec.Legs[0].PromptTokens != rec.Inputs.ISL || rec.Legs[0].Blocks == 0 {
				t.Fatalf("%s (%s): isl %d by %s, notes %q, legs %+v", rec.Path, rec.ReasonText, rec.Inputs.ISL, rec.Inputs.ISLSource, rec.Notes, rec.Legs)
			}
			if rec.Outcome.PromptTokens != rec.Inputs.ISL {
				t.Errorf("the answer counts %d tokens of %d", rec.Outcome.PromptTokens, rec.Inputs.ISL)
			}
			text := func(b []byte) string {
				if c.body["stream"] == true {
					var out strings.Builder
					for _, line := range bytes.Split(b, []byte("\n")) {
						if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
							out.WriteString(gjson.GetBytes(data, "delta.text").String())
							if d := gjson.GetBytes(data, "delta"); d.Type == gjson.String {
								out.WriteString(d.String())
							}
						}
					}
					return out.String()
				}
				return gjson.GetBytes(b, "content.0.text").String() + gjson.GetBytes(b, "output.0.content.0.text").String()
			}
			if got, want := text(a.body), text(oracle.post(c.path, c.body).body); got != want || got == "" && c.body["stop_sequences"] == nil {
				t.Errorf("%q, one engine alone %q", got, want)
			}
			leg := p.legsOf("prefill")[0].body
			if gjson.GetBytes(leg, "stream").Bool() || c.path == "/v1/responses" && (gjson.GetBytes(leg, "max_output_tokens").Int() != 1 || gjson.GetBytes(leg, "store").String() != "false") ||
				c.path == "/v1/messages" && gjson.GetBytes(leg, "max_tokens").Int() != 1 {
				t.Errorf("prefill leg %s", leg)
			}
			// The prompt is named as the engine names it: the next one like it hits.
			r.synced()
			again := r.receipt(r.post(c.path, c.body).header.Get("X-Dynctl-Decision"))
			if b := again.Inputs.BlockSize; again.Predicted.CachedTokens != (again.Inputs.ISL-1)/b*b {
				t.Errorf("the decode rank is thought to hold %d of %d tokens", again.Predicted.CachedTokens, again.Inputs.ISL)
			}
		})
	}
	first := r.post("/v1/responses", object{"model": "sim", "input": words, "max_output_tokens": 3})
	for reason, body := range map[string]object{
		"previous_response": {"model": "sim", "input": words, "max_output_tokens": 3, "previous_response_id": gjson.GetBytes(first.body, "id").String()},
		"server_tools":      {"model": "sim", "input": words, "max_output_tokens": 3, "tools": []object{{"type": "code_interpreter", "container": object{"type": "auto"}}}},
	} {
		a := r.post("/v1/responses", body)
		if c := r.receipt(a.header.Get("X-Dynctl-Decision")); c.Path != "local" || c.Reason != reason || c.Inputs.ISLSource != "estimate" {
			t.Errorf("%s: %s (%s), isl by %s", reason, c.Path, c.Reason, c.Inputs.ISLSource)
		}
	}
	// An engine that is too old to take transfer parameters there is not asked to.
	if n := len(r.events("prefill_without_params")); n != 0 {
		t.Errorf("%d prefills without parameters", n)
	}
}

// TestTransferCheck: parameters of a shape that is not expected and does no known
// harm are refused, or used and told, as the worker or else the router says.
func TestTransferCheck(t *testing.T) {
	t.Parallel()
	lax := settings.Default()
	lax.Routing.TransferCheck = "lax"
	if err := lax.Validate(); err == nil || !strings.Contains(err.Error(), `routing.transfer_check`) {
		t.Errorf("a word that says nothing: %v", err)
	}
	for _, c := range []struct {
		name   string
		config string // "" leaves what the router does by itself
		worker workers.TransferCheck
		used   bool
	}{
		{"nothing said", "", "", false},
		{"strict", "strict", "", false},
		{"report", "report", "", true},
		{"report for this worker", "strict", workers.TransferReport, true},
		{"strict for this worker", "report", workers.TransferStrict, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := &tap{}
			tapped := p.specs(t)
			r := startWith(t, loopback.Options{Fleet: "1p1d:profile=instant", Specs: func(list []workers.Spec) []workers.Spec {
				list = tapped(list)
				for i := range list {
					if list[i].Role == workers.Prefill {
						list[i].TransferCheck = c.worker
					}
				}
				return list
			}}, func(to *settings.Config) {
				if c.config != "" {
					to.Routing.TransferCheck = c.config
				}
			})
			p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
				if !strings.HasPrefix(engine, "prefill") || q.URL.Path != "/v1/completions" {
					return false
				}
				good := &recorder{ResponseWriter: &nowhere{}}
				leg, err := http.NewRequest(http.MethodPost, r.Sim.Named(engine).URL()+q.URL.Path, bytes.NewReader(body))
				if err != nil {
					return false
				}
				leg.Header, leg.Close = q.Header.Clone(), true
				resp, err := http.DefaultClient.Do(leg)
				if err != nil {
					return false
				}
				_, _ = io.Copy(good, resp.Body)
				resp.Body.Close()
				writeJSON(w, edit(good.body.Bytes(), "kv_transfer_params.remote_num_tokens", object{"prompt": 200}))
				return true
			})
			for i := range 3 {
				a, _ := r.complete(ids(200, 40+i))
				rec := r.receipt(a.header.Get("X-Dynctl-Decision"))
				told := strings.Contains(strings.Join(rec.Notes, " "), "remote_num_tokens")
				if c.used && (rec.Path != "remote" || !told) || !c.used && rec.Path != "local" {
					t.Errorf("%s (%s), notes %q", rec.Path, rec.ReasonText, rec.Notes)
				}
			}
			events, n := r.events("prefill_odd_params"), r.metric(`dynctl_transfer_params_odd_total{worker="prefill-0"}`)
			if c.used && (len(events) != 1 || n != 3 || !strings.Contains(events[0].Text, "remote_num_tokens")) || !c.used && (len(events) != 0 || n > 0) {
				t.Errorf("events %+v, %v counted", events, n)
			}
		})
	}
}

// TestTruncatedPromptsGoRemote: an engine that cuts the prompt counts fewer tokens
// than the client sent; that is no fault of the prefill.
func TestTruncatedPromptsGoRemote(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant")
	oracle := start(t, "1a:profile=instant")
	for _, limit := range []int{100, -1} {
		body := object{"model": "sim", "prompt": ids(400, 1), "truncate_prompt_tokens": limit, "max_tokens": 12, "ignore_eos": true}
		a := r.post("/v1/completions", body)
		c := r.receipt(a.header.Get("X-Dynctl-Decision"))
		if c.Path != "remote" || len(c.Legs) != 2 || c.Legs[0].PromptTokens != c.Outcome.PromptTokens || c.Inputs.ISL != c.Outcome.PromptTokens {
			t.Errorf("%d: %s (%s), isl %d, legs %+v", limit, c.Path, c.ReasonText, c.Inputs.ISL, c.Legs)
		}
		if got, want := a.completion(t).Choices[0].Text, oracle.post("/v1/completions", body).completion(t).Choices[0].Text; got != want {
			t.Errorf("%d: %q, one engine alone %q", limit, got, want)
		}
	}
	if e := r.events("prefill_bad_params"); len(e) != 0 {
		t.Errorf("events %+v", e)
	}
	// To its own limit an engine cuts a prompt of which the router has every id.
	small := start(t, "1p1d:profile=instant,max_model_len=200")
	a := small.post("/v1/completions", object{"model": "sim", "prompt": ids(400, 2), "truncate_prompt_tokens": -1, "max_tokens": 12, "ignore_eos": true})
	if c := small.receipt(a.header.Get("X-Dynctl-Decision")); c.Path != "remote" || c.Inputs.ISL != 400 || c.Outcome.PromptTokens >= 200 || c.Legs[0].PromptTokens >= 200 {
		t.Errorf("%s (%s), isl %d, prompt %d, legs %+v", c.Path, c.ReasonText, c.Inputs.ISL, c.Outcome.PromptTokens, c.Legs)
	}
}

// TestChatTemplatesThatDiffer: a prefill and a decode engine that make other tokens
// of a chat are found before the first request, and told; chats stay with the
// decode engine, and prompts of ids go on as they did.
func TestChatTemplatesThatDiffer(t *testing.T) {
	t.Parallel()
	p := &tap{}
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if engine != "prefill-0" || q.URL.Path != "/tokenize" {
			return false
		}
		writeJSON(w, []byte(`{"count":3,"max_model_len":4096,"tokens":[7,8,9]}`))
		return true
	})
	r := startWith(t, loopback.Options{Fleet: "1p1d:profile=instant", Specs: p.specs(t)}, func(c *settings.Config) { c.Tokens.Tokenizer = "estimate" })
	if err := loopback.Wait(r.wait(), "the event", func() error {
		e := r.events("chat_tokens_differ")
		if len(e) == 1 && strings.Contains(e[0].Text, "prefill-0 (3 tokens) and decode-0 (") {
			return nil
		}
		return fmt.Errorf("events %+v", e)
	}); err != nil {
		t.Fatal(err)
	}
	st, err := r.Admin.Status(t.Context())
	if err != nil || !strings.Contains(fmt.Sprintf("%+v", st), "make other tokens of the same chat: prefill-0 (3 tokens)") {
		t.Errorf("status %+v, %v", st, err)
	}
	for path, c := range map[string]struct {
		body object
		path string
	}{
		"/v1/chat/completions": {object{"model": "sim", "messages": []object{{"role": "user", "content": strings.Repeat("a chat ", 50)}}, "max_tokens": 2}, "local"},
		"/v1/completions":      {object{"model": "sim", "prompt": ids(200, 1), "max_tokens": 2}, "remote"},
	} {
		a := r.post(path, c.body)
		if rec := r.receipt(a.header.Get("X-Dynctl-Decision")); rec.Path != c.path {
			t.Errorf("%s: %s (%s)", path, rec.Path, rec.ReasonText)
		}
	}
}

// TestEndpoints: what is not generation is never split; responses stick to the
// worker that has them; other APIs pass.
func TestEndpoints(t *testing.T) {
	t.Parallel()
	r := start(t, "1p2d:profile=instant")
	for path, body := range map[string]object{
		"/v1/embeddings":            {"model": "sim", "input": []string{"one", "two"}},
		"/v1/rerank":                {"model": "sim", "query": "q", "documents": []string{"a", "b"}},
		"/rerank":                   {"model": "sim", "query": "q", "documents": []string{"a", "b"}},
		"/v1/score":                 {"model": "sim", "text_1": "a", "text_2": []string{"b", "c"}},
		"/tokenize":                 {"model": "sim", "prompt": "some words"},
		"/detokenize":               {"model": "sim", "tokens": ids(5, 1)},
		"/v1/messages":              {"model": "sim", "max_tokens": 4, "messages": []object{{"role": "user", "content": strings.Repeat("many words ", 100)}}},
		"/v1/messages/count_tokens": {"model": "sim", "messages": []object{{"role": "user", "content": "hello"}}},
		"/v1/responses":             {"model": "sim", "input": strings.Repeat("many words ", 100), "max_output_tokens": 4},
		"/inference/v1/generate":    {"model": "sim", "token_ids": ids(100, 3), "sampling_params": object{"max_tokens": 3}},
	} {
		a := r.post(path, body)
		split := path == "/inference/v1/generate" || path == "/v1/messages" || path == "/v1/responses"
		if got := a.header.Get("X-Dynctl-Path"); (got == "remote") != split {
			t.Errorf("%s went %s", path, got)
		}
	}
	if n := r.touched("prefill-0"); n != 3 {
		t.Errorf("the prefill worker got %d requests, want the three that generate", n)
	}
	// Anthropic's clients get errors in their own shape.
	a := r.send(http.MethodPost, "/v1/messages", []byte(`{"model":"nobody","max_tokens":1,"messages":[]}`))
	if a.status != 404 || gjson.GetBytes(a.body, "type").String() != "error" || gjson.GetBytes(a.body, "error.type").String() == "" {
		t.Errorf("%s", a)
	}

	for i := range 6 {
		first := r.post("/v1/responses", object{"model": "sim", "input": fmt.Sprint("conversation ", i), "max_output_tokens": 3, "store": true, "stream": i%2 == 1})
		id := gjson.GetBytes(first.body, "id").String()
		if i%2 == 1 {
			_, data, _ := bytes.Cut(first.body, []byte("data: "))
			line, _, _ := bytes.Cut(data, []byte("\n"))
			id = gjson.GetBytes(line, "response.id").String()
		}
		if id == "" {
			t.Fatalf("no id in %s", first)
		}
		turn := object{"model": "sim", "input": "and then", "max_output_tokens": 3, "previous_response_id": id}
		if d, err := r.Admin.Route(t.Context(), routeOf(t, "/v1/responses", turn)); err != nil || gjson.GetBytes(d.Receipt, "decode.chosen").String() != first.header.Get("X-Dynctl-Worker") || gjson.GetBytes(d.Receipt, "decode.eligible_ranks").Int() != 1 {
			t.Errorf("a dry run of the next turn, whose past is on %s: %v, %s", first.header.Get("X-Dynctl-Worker"), err, gjson.GetBytes(d.Receipt, "decode.chosen"))
		}
		next := r.send(http.MethodPost, "/v1/responses", encode(t, turn))
		if w := next.header.Get("X-Dynctl-Worker"); w != first.header.Get("X-Dynctl-Worker") {
			t.Errorf("the next turn went to %s, its past is on %s: %s", w, first.header.Get("X-Dynctl-Worker"), next)
		}
	}
	b := r.send(http.MethodPost, "/v1/responses", []byte(`{"model":"sim","input":"x","previous_response_id":"resp_nobody"}`))
	if b.status != 404 {
		t.Errorf("an unknown response: %s", b)
	}
	_, err := r.Admin.Route(t.Context(), routeOf(t, "/v1/responses", object{"model": "sim", "input": "x", "previous_response_id": "resp_nobody"}))
	if err == nil || !strings.Contains(err.Error(), "is not known here") {
		t.Errorf("a dry run after an unknown response: %v", err)
	}
}

// TestAdminAuth: with a token nothing but the probes answers without it, and
// without a token no web page can change anything.
func TestAdminAuth(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("a-long-enough-token-42\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := startCold(t, loopback.Options{Fleet: "1a:profile=instant", Admin: router.AdminOptions{TokenFile: file}})
	get := func(path, token string) int {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.AdminURL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			q.Header.Set("Authorization", token)
		}
		resp, err := r.Client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		return resp.StatusCode
	}
	for _, path := range []string{"/admin/v1/status", "/admin/v1/config", "/metrics", "/debug/pprof/cmdline", "/admin/v1/decisions/x"} {
		for _, token := range []string{"", "a-long-enough-token-42", "Bearer wrong", "Bearer a-long-enough-token-42x", "bearer"} {
			if got := get(path, token); got != http.StatusUnauthorized {
				t.Errorf("%s with %q: %d", path, token, got)
			}
		}
	}
	if get("/admin/v1/status", "Bearer a-long-enough-token-42") != 200 || get("/healthz", "") != 200 {
		t.Error("the right token, or a probe without one, is refused")
	}
	c, err := admin.NewClient(r.AdminURL, admin.Options{TokenFile: file})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Status(t.Context()); err != nil {
		t.Error(err)
	}

	open := start(t, "1a:profile=instant")
	for _, h := range []string{"Origin", "Sec-Fetch-Site"} {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, open.AdminURL+"/admin/v1/drain", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set(h, "http://evil.example")
		resp, err := open.Client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden {
			t.Errorf("a web page drained the router: %d", resp.StatusCode)
		}
	}
	if open.status().State == "draining" {
		t.Error("drained")
	}
}

// TestSteeringHeaders: where the operator allows it, clients choose path,
// workers and rank; a wrong choice is told.
func TestSteeringHeaders(t *testing.T) {
	t.Parallel()
	r := start(t, "2p2d:profile=instant,dp=2", func(c *settings.Config) { c.Routing.AllowHeaders = true; c.Routing.Threshold.Tokens = 100 })
	for i, c := range []struct{ path, decode, prefill, rank, wantPath string }{
		{"remote", "decode-1", "prefill-1", "1", "remote"}, {"local", "decode-0", "", "0", "local"}, {"auto", "decode-0", "prefill-0", "1", "remote"},
	} {
		a, _ := r.complete(ids(200, i), "X-Dynctl-Path", c.path, "X-Dynctl-Worker", c.decode, "X-Dynctl-Prefill-Worker", c.prefill, "X-data-parallel-rank", c.rank)
		if a.header.Get("X-Dynctl-Path") != c.wantPath || a.header.Get("X-Dynctl-Worker") != c.decode+"/dp"+c.rank || c.wantPath == "remote" && !strings.HasPrefix(a.header.Get("X-Dynctl-Prefill-Worker"), c.prefill) {
			t.Errorf("%+v went %s on %s from %s", c, a.header.Get("X-Dynctl-Path"), a.header.Get("X-Dynctl-Worker"), a.header.Get("X-Dynctl-Prefill-Worker"))
		}
	}
	body := []byte(`{"model":"sim","prompt":"x"}`)
	r.send(http.MethodPost, "/v1/completions", body, "X-Dynctl-Path", "sideways").refused(t, 400, "invalid_request")
	r.send(http.MethodPost, "/v1/completions", body, "X-Dynctl-Worker", "nobody").refused(t, 404, "worker_not_found")
	r.send(http.MethodPost, "/v1/completions", body, "X-data-parallel-rank", "minus").refused(t, 400, "invalid_request")
	if a := r.send(http.MethodPost, "/v1/completions", body, "X-data-parallel-rank", "9"); a.status != 503 {
		t.Errorf("a rank that is not there: %s", a)
	}
}

// TestDrainOfTheRouter: running streams finish, new requests are told to go
// elsewhere, and what does not finish is told so.
func TestDrainOfTheRouter(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant")
	reached, held := make(chan struct{}, 2), make(chan struct{})
	p.set(func(_ string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path == "/v1/completions" {
			reached <- struct{}{}
			select {
			case <-held:
			case <-q.Context().Done():
			}
		}
		return false
	})
	got := make(chan *answer, 2)
	ask := func() {
		a, err := r.try(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": "x", "max_tokens": 2}))
		if err != nil {
			t.Error(err)
		}
		got <- a
	}
	go ask()
	<-reached
	if err := r.Admin.Drain(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"x"}`)).refused(t, 503, "draining")
	if n, full := r.metric(`dynctl_rejections_total{reason="draining"}`), r.metric(`dynctl_rejections_total{reason="overload"}`); n != 1 || full > 0 {
		t.Errorf("%v requests refused by the drain, %v by overload", n, full)
	}
	q, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, r.AdminURL+"/readyz", nil)
	if resp, err := r.Client.Do(q); err != nil || resp.StatusCode != 503 {
		t.Errorf("readyz while draining: %v %v", resp, err)
	} else {
		resp.Body.Close()
	}
	r.Router.CancelRequests()
	if a := <-got; a != nil {
		a.refused(t, 503, "draining")
	}
}

// TestReceiptsAreFoundByBothIDs: every answer's decision is found by its id and by the request's own.
func TestReceiptsAreFoundByBothIDs(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant")
	a, _ := r.complete(ids(100, 1), "X-Request-Id", "my-own-id")
	if a.header.Get("X-Request-Id") != "my-own-id" {
		t.Errorf("id %q", a.header.Get("X-Request-Id"))
	}
	one, err := r.Admin.Decision(t.Context(), a.header.Get("X-Dynctl-Decision"))
	if err != nil {
		t.Fatal(err)
	}
	two, err := r.Admin.Decision(t.Context(), "my-own-id")
	if err != nil || gjson.GetBytes(one, "id").String() != gjson.GetBytes(two, "id").String() || !json.Valid(one) {
		t.Errorf("%s %s %v", one, two, err)
	}
	if len(gjson.GetBytes(one, "legs").Array()) != 2 {
		t.Errorf("legs: %s", gjson.GetBytes(one, "legs"))
	}
}

// TestIdleConnectionsOfEngines: what an engine writes after an answer is never
// the answer to the next request, and connections that it closes while they are
// idle cost no client anything, over TLS as over TCP.
func TestIdleConnectionsOfEngines(t *testing.T) {
	for _, c := range []struct {
		fleet    string
		attempts int
	}{
		{"1p1d:late_rate=.5", 1},
		{"2p2d:close_idle=30ms", 4}, // it may come in the very moment of the next request: then another worker serves
	} {
		for _, secure := range []string{"on", "off"} {
			t.Run(c.fleet+",tls="+secure, func(t *testing.T) {
				t.Parallel()
				r := start(t, c.fleet+",profile=instant,tls="+secure, func(conf *settings.Config) { conf.Retry.Attempts = c.attempts })
				for i := range 60 {
					for _, stream := range []bool{true, false} {
						a := r.post("/v1/completions", object{"model": "sim", "prompt": ids(20+i, i), "max_tokens": 3, "ignore_eos": true, "stream": stream})
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
