package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
)

// add makes a router a worker of another, and waits until that has probed it.
func (r *rig) add(name string, of *rig) {
	r.t.Helper()
	if _, err := r.Admin.AddWorker(r.t.Context(), admin.AddWorker{Spec: of.URL + ",name=" + name}); err != nil {
		r.t.Fatal(err)
	}
	r.eventually("a probe of "+name, func() error {
		if w := r.worker(name); w.Health == "unknown" {
			return fmt.Errorf("%s", w.Health)
		}
		return nil
	})
}

// TestRoutersThatHaveEachOther: a request that comes back is refused with the cause and
// answered by an engine where there is one; it counts against no worker. One router before
// another is no loop.
func TestRoutersThatHaveEachOther(t *testing.T) {
	t.Parallel()
	a := start(t, "1a:profile=instant", func(c *settings.Config) { c.Routing.AllowHeaders = true })
	b := start(t, "1a:profile=instant", func(c *settings.Config) { c.Routing.Policy, c.Retry.Budget = string(selector.RoundRobin), 0 })
	b.add("me", b)
	t.Run("a router is its own worker", func(t *testing.T) { ownWorker(t, b.in(t)) })
	a.add("b", b)
	for i := range 4 { // more of them than the least budget of retries
		if got, _ := a.complete(ids(20, i), "X-Dynctl-Worker", "b"); got.status != 200 {
			t.Fatalf("a router before a router: %s", got)
		}
	}
	b.add("a", a)
	for i := range 40 {
		if got, _ := a.complete(ids(20, 10+i), "X-Dynctl-Worker", "b"); got.status != 200 {
			t.Fatalf("with an engine beside the loop: %s", got)
		}
	}
	refused := a.metric(`dynctl_rejections_total{reason="loop"}`)
	if retries := b.metric(`dynctl_retries_total{leg="decode",reason="loop"}`); refused < 11 || retries != refused {
		t.Errorf("%v requests came back, %v were sent to an engine then", refused, retries)
	}
	if e := a.events("request_looped"); len(e) == 0 || !strings.Contains(e[0].Text, "came back from 127.0.0.1") {
		t.Errorf("%+v", e)
	}
	if w := b.worker("a"); !w.Usable || w.Ranks[0].Failures != 0 {
		t.Errorf("the loop counts against a worker: %+v", w)
	}
	if _, err := b.Admin.DrainWorker(t.Context(), "aggregated-0"); err != nil {
		t.Fatal(err)
	}
	const loops = `dynctl_legs_total{leg="decode",outcome="loop",worker="`
	got := a.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(20, 99), "max_tokens": 1}), "X-Dynctl-Worker", "b")
	got.refused(t, http.StatusLoopDetected, "loop_detected")
	if !strings.Contains(string(got.body), "take that worker out") || a.metric(loops+`b"}`) != 1 || b.metric(loops+`a"}`) != refused+1 {
		t.Errorf("%s after %v and %v legs", got, a.metric(loops+`b"}`), b.metric(loops+`a"}`))
	}
	if w := a.worker("b"); !w.Usable || w.Ranks[0].Failures != 0 {
		t.Errorf("the loop counts against a worker: %+v", w)
	}
	// The lists of models ask each other once, too.
	for _, r := range []*rig{a, b} {
		if list := r.send(http.MethodGet, "/v1/models", nil); list.status != 200 || !strings.Contains(string(list.body), `"sim"`) {
			t.Errorf("%s", list)
		}
	}
}

// ownWorker: a router that is its own worker, "me", is never healthy, with the reason, and no request
// goes to it.
func ownWorker(t *testing.T, r *rig) {
	if w := r.worker("me"); w.Usable || w.Health != "unhealthy" || !strings.Contains(w.Reason, "the worker is this router itself") {
		t.Errorf("%+v", w)
	}
	for i := range 4 {
		if a, _ := r.complete(ids(20, 700+i)); a.status != 200 {
			t.Errorf("%s", a)
		}
	}
	if n := r.metric(`dynctl_rejections_total{reason="loop"}`); n > 0 {
		t.Errorf("%v requests came back", n)
	}
	// Nobody else's probe is refused, whatever it carries.
	if a := r.send(http.MethodGet, "/health", nil, "X-Dynctl-Hop", strings.Repeat("A", 26)); a.status != 200 {
		t.Errorf("%s", a)
	}
	if err := r.Admin.RemoveWorker(t.Context(), "me"); err != nil {
		t.Fatal(err)
	}
}

// legsAreBounded: what is one too many is refused at once, with the reason, and what
// ends makes room again, on both paths.
func legsAreBounded(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Limits.Legs = 2 })
	if a, _ := r.complete(ids(200, 501)); a.status != 200 || a.header.Get("X-Dynctl-Path") != "remote" {
		t.Fatalf("two legs of one request: %s", a)
	}
	hold := make(chan struct{})
	p.set(func(_ string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if strings.HasPrefix(q.URL.Path, "/v1/completions") {
			<-hold
		}
		return false
	})
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			if a, err := r.try(r.wait(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(20, 510+i), "max_tokens": 2, "stream": i == 0})); err != nil || a.status != 200 {
				t.Errorf("%v, %v", a, err)
			}
		})
	}
	r.eventually("two legs", func() error {
		if n := r.metric("dynctl_legs_in_progress"); n != 2 {
			return fmt.Errorf("%v legs", n)
		}
		return nil
	})
	for _, tokens := range []int{20, 200} {
		a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(tokens, 509), "max_tokens": 2}))
		a.refused(t, http.StatusServiceUnavailable, "overloaded")
		if !strings.Contains(string(a.body), "limits.legs") || a.header.Get("Retry-After") != "1" {
			t.Errorf("%s %v", a, a.header)
		}
	}
	if n := r.metric(`dynctl_rejections_total{reason="legs"}`); n != 2 || len(r.events("legs_full")) != 1 || r.metric("dynctl_legs_limit") != 2 {
		t.Errorf("%v refused, events %+v", n, r.events("legs_full"))
	}
	close(hold)
	wg.Wait()
	if a, _ := r.complete(ids(200, 502)); a.status != 200 {
		t.Errorf("%s", a)
	}
}
