package router_test

import (
	"bytes"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

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
	if got := rawjson.Value(dry.Receipt).Get("decode.chosen").String(); got != "aggregated-0/dp0" || len(r.events("outlier_reinstated")) != reinstated {
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
