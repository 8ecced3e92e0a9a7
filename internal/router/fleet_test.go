package router_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
)

// noSeriesOfAWorkerThatLeft: a worker leaves while it answers, and
// what is counted of that at the end brings none of its series back.
func noSeriesOfAWorkerThatLeft(t *testing.T, r *rig, p *tap) {
	before := r.status().Traffic
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
		if st := r.status(); st.Traffic.Inflight != 0 || st.Traffic.Completed != before.Completed+2 {
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

// TestFleetByAdminAPI: drain, resume, add and remove, with a stream in
// progress that is not disturbed.
func TestFleetByAdminAPI(t *testing.T) {
	t.Parallel()
	r := start(t, "2a:speed=2")
	t.Run("clients that leave count against no worker", func(t *testing.T) { clientsThatLeave(t, r.in(t)) })
	t.Run("least loaded", func(t *testing.T) { leastLoaded(t, r.in(t)) })
	r.eventually("idle engines", func() error {
		for _, w := range []string{"aggregated-0", "aggregated-1"} {
			if s := r.counters(w); s.Running+s.Waiting != 0 {
				return fmt.Errorf("%s works on %d requests", w, s.Running+s.Waiting)
			}
		}
		return nil
	})
	more := engineAlone(t, "sim")
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
	added, err := r.Admin.AddWorker(ctx, admin.AddWorker{Spec: more.URL() + ",name=newcomer"})
	if err != nil || added.Name != "newcomer" {
		t.Fatalf("%+v %v", added, err)
	}
	if _, err := r.Admin.AddWorker(ctx, admin.AddWorker{Spec: more.URL() + ",name=newcomer"}); err == nil {
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
	t.Run("over IPv6", func(t *testing.T) { workerOverIPv6(t, r.in(t), more.Worker().URL) })
	a := r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"x"}`))
	if a.status != http.StatusServiceUnavailable {
		t.Errorf("a router without workers answers %s", a)
	}
}

// leastLoaded: by the figures of the engines, and by round robin where one has none.
func leastLoaded(t *testing.T, r *rig) {
	r.set(func(c *settings.Config) { c.Routing.Policy = "least_loaded" })
	defer r.set(func(*settings.Config) {})
	// Load that the router did not send, seen only in the engine's figures.
	load := func(e string) {
		q, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, r.Sim.Named(e).URL()+"/v1/completions",
			strings.NewReader(`{"model":"sim","prompt":"x","max_tokens":4000,"ignore_eos":true,"stream":true}`))
		resp, err := r.Client.Do(q)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { resp.Body.Close() })
	}
	for range 4 {
		load("aggregated-0")
	}
	r.eventually("the figures", func() error {
		if e := r.worker("aggregated-0").Ranks[0].Engine; e == nil || e.Running == nil || *e.Running < 4 {
			return fmt.Errorf("%+v", e)
		}
		if e := r.worker("aggregated-1").Ranks[0].Engine; e == nil || e.Running == nil || e.Waiting == nil || *e.Running+*e.Waiting > 0 {
			return fmt.Errorf("%+v", e) // of requests before
		}
		return nil
	})
	for i := range 4 {
		if a, _ := r.complete(ids(20, i)); a.header.Get("X-Dynctl-Worker") != "aggregated-1/dp0" {
			t.Errorf("request %d went to the loaded worker", i)
		}
	}
	// Round robin does not look.
	cfg := r.Config
	cfg.Routing.Policy = "round_robin"
	if err := r.Router.Settings().Reload(cfg, nil); err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for i := range 4 {
		a, _ := r.complete(ids(20, 10+i))
		got[a.header.Get("X-Dynctl-Worker")]++
	}
	if got["aggregated-0/dp0"] != 2 {
		t.Errorf("round robin: %v", got)
	}
	// Without a figure of one of them, least_loaded counts the router's own requests of both.
	cfg.Routing.Policy = "least_loaded"
	if err := r.Router.Settings().Reload(cfg, nil); err != nil {
		t.Fatal(err)
	}
	var dry *admin.RouteAnswer
	r.eventually("a decision before the next scrape", func() (err error) {
		r.Router.ForgetLoad("aggregated-1")
		if dry, err = r.Admin.Route(t.Context(), adminRoute(ids(20, 1), "")); err != nil {
			return err
		}
		for k := range rawjson.Value(dry.Receipt).Get("decode.candidates").Elements() {
			if k.Get("rank").String() == "aggregated-1/dp0" && k.Get("has_load").Bool() {
				return errors.New("the scrape was faster")
			}
		}
		return nil
	})
	decode := rawjson.Value(dry.Receipt).Get("decode")
	if policy, tie := decode.Get("policy").String(), decode.Get("tie_break").String(); policy != "least_loaded" || tie != "turn" || decode.Get("tied_ranks").String() != "2" {
		t.Errorf("without a figure: %s", decode)
	}
}

// workerOverIPv6: a worker whose address is of IPv6 is probed, and serves.
func workerOverIPv6(t *testing.T, r *rig, to *url.URL) {
	ln, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	proxy := &http.Server{Handler: proxyTo(to, transport), ReadHeaderTimeout: 10 * time.Second, ErrorLog: quietLog}
	done := make(chan struct{})
	go func() { defer close(done); _ = proxy.Serve(ln) }() // ends with Close
	t.Cleanup(func() { proxy.Close(); <-done })
	if _, err := r.Admin.AddWorker(t.Context(), admin.AddWorker{Spec: "http://" + ln.Addr().String() + ",name=six,events=none"}); err != nil {
		t.Fatal(err)
	}
	r.eventually("the worker", func() error {
		if w := r.worker("six"); !w.Usable {
			return fmt.Errorf("%s", w.Reason)
		}
		return nil
	})
	if a, _ := r.complete(ids(20, 1)); a.header.Get("X-Dynctl-Worker") != "six/dp0" {
		t.Errorf("%v", a.header)
	}
	if err := r.Admin.RemoveWorker(t.Context(), "six"); err != nil {
		t.Fatal(err)
	}
}

// clientsThatLeave: a hundred clients that hang up count
// against no worker.
func clientsThatLeave(t *testing.T, r *rig) {
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%20)*time.Millisecond)
			defer cancel()
			_, _ = r.try(ctx, http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(300, i), "max_tokens": 200, "ignore_eos": true, "stream": i%2 == 0}))
		}()
	}
	wg.Wait()
	r.eventually("an empty ledger", r.Router.Balanced)
	for _, w := range []string{"aggregated-0", "aggregated-1"} {
		if x := r.worker(w); !x.Usable || x.Health != "healthy" {
			t.Errorf("%s is %s: %s", w, x.Health, x.Reason)
		}
	}
	if n := len(r.events("outlier_ejected")) + len(r.events("worker_failing")); n != 0 {
		t.Errorf("%d events blame workers for clients that left", n)
	}
	r.eventually("idle engines", func() error {
		for _, w := range []string{"aggregated-0", "aggregated-1"} {
			if s := r.counters(w); s.Running+s.Waiting != 0 {
				return fmt.Errorf("%s still works on %d request(s)", w, s.Running+s.Waiting)
			}
		}
		return nil
	})
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
		t.Error("no event of the restore")
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
		t.Error("no event of a damaged snapshot")
	}
	r.eventually("what the engines' replay still has", func() error {
		if w := r.worker("aggregated-0").Ranks[0]; !w.Feed.Trusted || w.IndexBlocks == 0 || w.IndexBlocks >= before.IndexBlocks {
			return fmt.Errorf("%d blocks, feed %+v", w.IndexBlocks, w.Feed)
		}
		return nil
	})
}

// drainOfTheRouter: running streams finish, new requests are sent
// elsewhere, and a stream that does not finish ends with an error.
func drainOfTheRouter(t *testing.T, r *rig, p *tap) {
	reached, _ := p.blockEngines()
	got := r.ask(`{"model":"sim","prompt":"x","max_tokens":2}`)
	<-reached
	if err := r.Admin.Drain(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"x"}`)).refused(t, 503, "draining")
	if n, full := r.metric(`dynctl_rejections_total{reason="draining"}`), r.metric(`dynctl_rejections_total{reason="overload"}`); n != 1 || full > 0 {
		t.Errorf("%v requests refused by the drain, %v by overload", n, full)
	}
	if status, page, err := r.askAdmin(t.Context(), "", http.MethodGet, "/readyz", ""); err != nil || status != 503 {
		t.Errorf("readyz while draining: %d %s %v", status, page, err)
	}
	r.Router.CancelRequests()
	if a := <-got; a != nil {
		a.refused(t, 503, "draining")
	}
}
