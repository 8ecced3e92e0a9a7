package topcmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/rig/loopbacktest"
	"github.com/dynctl/dynctl/internal/rig/soak"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/tui"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// typed runs a command line without a terminal.
func typed(args ...string) (code int, stdout, stderr string) {
	return clitest.Run(cli.Root(New()), "", args...)
}

// TestTopLegend: the columns are explained without a screen and without a router.
func TestTopLegend(t *testing.T) {
	code, stdout, stderr := typed("top", "--legend")
	for _, title := range []string{"COLUMNS OF RANKS", "  DECBLK ", "  EVICT/s ", "  MARGIN "} {
		if code != 0 || !strings.Contains(stdout, title) {
			t.Errorf("code %d, %q, %q lacks %q", code, stderr, stdout, title)
		}
	}
}

func TestTopFlags(t *testing.T) {
	t.Setenv("DYNCTL_CONTEXTS", filepath.Join(t.TempDir(), "none.yaml"))
	t.Setenv("DYNCTL_ROUTER", "")
	closed := httptest.NewServer(http.NotFoundHandler())
	guarded := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"error":{"message":"the admin API needs the bearer token of --admin-token-file"}}`)
	}))
	defer guarded.Close()
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/v1/models" {
			http.NotFound(w, q)
			return
		}
		_, _ = io.WriteString(w, `{"data":[{"id":"m"}]}`)
	}))
	defer engine.Close()
	closed.Close() // not before, or its port might be the other one's
	for _, c := range []struct {
		name string
		args []string
		code int
		text string
	}{
		{"no terminal", []string{"--router", closed.URL}, cli.ExitUsage, "needs a terminal"},
		{"an engine", []string{"--once", "--router", engine.URL}, cli.ExitUsage, "is an engine (it serves m), not a router"},
		{"unreachable", []string{"--once", "--router", closed.URL}, cli.ExitUnreachable, "no router answers"},
		{"wrong token", []string{"--once", "--router", guarded.URL}, cli.ExitRuntime, "--token-file"},
		{"token file", []string{"--once", "--router", guarded.URL, "--token-file", "/nosuch/file"}, cli.ExitUsage, "token file"},
		{"URL", []string{"--once", "--router", "ftp://x"}, cli.ExitUsage, "is not a URL"},
		{"format", []string{"-o", "xml"}, cli.ExitUsage, "not one of table, json, jsonl"},
		{"both", []string{"--once", "--watch", "1s"}, cli.ExitUsage, "once"},
		{"profile", []string{"--once", "--profile", "cpu"}, cli.ExitUsage, "--profile is for the engines of --demo"},
		{"view", []string{"--view", "nosuch"}, cli.ExitUsage, "--view nosuch"},
		{"view without a screen", []string{"--once", "--view", "radix"}, cli.ExitUsage, "--view is for the screen"},
		{"theme without a screen", []string{"-o", "json", "--theme", "light"}, cli.ExitUsage, "--theme is for the screen"},
		{"theme", []string{"--theme", "pink"}, cli.ExitUsage, "--theme pink"},
		{"color", []string{"--color", "often"}, cli.ExitUsage, "--color often"},
		{"watch", []string{"--watch", "1ms"}, cli.ExitUsage, "--watch 1ms"},
		{"count", []string{"--count", "3"}, cli.ExitUsage, "--count needs --watch"},
		{"rate", []string{"--rate", "1h"}, cli.ExitUsage, "--rate"},
		{"filter", []string{"--once", "--filter", "nosuch>1"}, cli.ExitUsage, `no field "nosuch"`},
		{"sort", []string{"--once", "--sort", "nosuch"}, cli.ExitUsage, "--sort nosuch"},
		{"context", []string{"--once", "--context", "prod"}, cli.ExitUsage, `no context "prod"`},
		{"argument", []string{"now"}, cli.ExitUsage, "now"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := typed(append([]string{"top"}, c.args...)...)
			if code != c.code || !strings.Contains(stderr, c.text) {
				t.Errorf("code %d, want %d; stderr %q lacks %q", code, c.code, stderr, c.text)
			}
			if strings.Contains(stdout+stderr, "\x1b") {
				t.Errorf("escapes without a terminal: %q", stdout+stderr)
			}
		})
	}
}

func TestContexts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "contexts.yaml")
	t.Setenv("DYNCTL_CONTEXTS", path)
	t.Setenv("DYNCTL_ROUTER", "")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	resolve := func(f topFlags) (string, []string, string, error) {
		name, err := f.resolve()
		return name, f.routers, f.access.TokenFile, err
	}
	if _, routers, _, err := resolve(topFlags{}); err != nil || routers[0] != cli.DefaultRouter {
		t.Errorf("no file: %v %v", routers, err)
	}
	write("current: prod\ncontexts:\n  - name: prod\n    routers: [http://a:1, http://b:1]\n    token_file: /t\n  - name: lab\n    routers: [http://c:1]\n")
	if name, routers, token, err := resolve(topFlags{}); err != nil || name != "prod" || len(routers) != 2 || token != "/t" {
		t.Errorf("current: %s %v %s %v", name, routers, token, err)
	}
	if name, routers, token, err := resolve(topFlags{context: "lab", access: cli.AccessFlags{TokenFile: "/mine"}}); err != nil || name != "lab" || routers[0] != "http://c:1" || token != "/mine" {
		t.Errorf("lab: %s %v %s %v", name, routers, token, err)
	}
	if name, routers, _, err := resolve(topFlags{routers: []string{"http://x:1"}}); err != nil || name != "" || routers[0] != "http://x:1" {
		t.Errorf("flag: %s %v %v", name, routers, err)
	}
	t.Setenv("DYNCTL_ROUTER", "http://env:1")
	if _, routers, _, err := resolve(topFlags{}); err != nil || routers[0] != "http://env:1" {
		t.Errorf("environment: %v %v", routers, err)
	}
	if _, _, _, err := resolve(topFlags{context: "prd"}); err == nil || !strings.Contains(err.Error(), `did you mean "prod"`) {
		t.Errorf("typo: %v", err)
	}
	for _, bad := range []string{"contexts: 7", "nosuch: 1", "contexts:\n  - routers: [a]", "contexts:\n  - name: a", "contexts:\n  - {name: a, routers: [b]}\n  - {name: a, routers: [b]}"} {
		write(bad)
		if _, _, _, err := resolve(topFlags{context: "a"}); err == nil || !strings.Contains(err.Error(), "contexts") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// stand is a router with simulated engines and the means to load it.
type stand struct {
	*loopback.Rig
	c *tui.Collector
}

func newStand(t *testing.T, ctx context.Context, fleet string) *stand {
	t.Helper()
	if testing.Short() {
		t.Skip("starts engines")
	}
	rig, err := loopback.Start(ctx, loopback.Options{Fleet: fleet, Configure: func(c *settings.Config) {
		c.Health.Interval, c.Health.Scrape = 100*time.Millisecond, 100*time.Millisecond
		c.Index.StaleAfter = time.Second
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = rig.Close(ctx) // requests that a test left are cut
	})
	if err := rig.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	return &stand{rig, tui.NewCollector(tui.Options{Clients: []*admin.Client{rig.Admin}, Rate: 100 * time.Millisecond, Timeout: 5 * time.Second})}
}

// complete asks for a completion and waits for its end.
func (s *stand) complete(ctx context.Context, prompt []int, out int) error {
	status, _, answer, err := s.Post(ctx, "/v1/completions", map[string]any{"model": sim.DefaultModel, "prompt": prompt, "max_tokens": out, "ignore_eos": true})
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%d: %s", status, answer)
	}
	return err
}

// sees waits until the overview's attention has a line with a code and words.
func (s *stand) sees(t *testing.T, ctx context.Context, code, words string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	err := loopback.Wait(ctx, code, func() error {
		v, err := s.c.Collect(ctx)
		if err != nil {
			return err
		}
		for _, a := range v.Routers[0].Attention {
			if a.Code == code && strings.Contains(a.Text, words) {
				return nil
			}
		}
		return fmt.Errorf("attention is %v", v.Routers[0].Attention)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func prompt(seed, n int) []int {
	p := make([]int, n)
	for i := range p {
		p[i] = 100 + (seed*7919+i*31)%20000
	}
	return p
}

// TestTopEqualsTheEngines compares what top shows with the engines' own
// /metrics and with the admin API, after requests have come to rest.
func TestTopEqualsTheEngines(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s := newStand(t, ctx, "1p2d:dp=2,speed=50")
	if _, err := s.c.Collect(ctx); err != nil {
		t.Fatal(err)
	}
	for i := range 24 {
		if err := s.complete(ctx, prompt(i%6, 400+40*(i%3)), 8); err != nil {
			t.Fatal(err)
		}
	}
	if err := soak.IndexSynced(ctx, s.Rig); err != nil {
		t.Fatal(err)
	}
	err := loopback.Wait(ctx, "equal figures", func() error {
		v, err := s.c.Collect(ctx)
		if err != nil {
			return err
		}
		status, err := s.Admin.Status(ctx)
		if err != nil {
			return err
		}
		r := &v.Routers[0]
		type figures struct{ requests, blocks, memberships any }
		top := figures{r.Traffic.Requests, r.Index.Blocks, r.Index.Memberships}
		api := figures{status.Traffic.Requests, status.Index.Blocks, status.Index.Memberships}
		if top != api || r.Traffic.Requests != 24 || r.Traffic.Inflight != 0 {
			return fmt.Errorf("top: %+v, %d in flight; admin API: %+v", top, r.Traffic.Inflight, api)
		}
		if len(r.Ranks) != 6 {
			return fmt.Errorf("%d ranks", len(r.Ranks))
		}
		var problems []error
		pages := map[string]map[string]float64{}
		for i := range r.Ranks {
			k := &r.Ranks[i]
			e := s.Sim.Named(k.Worker)
			if pages[k.Worker] == nil {
				if pages[k.Worker], err = scrape(ctx, s.Client, e.URL()); err != nil {
					return err
				}
			}
			engine := func(name string) float64 { return pages[k.Worker][fmt.Sprintf("%s/%d", name, k.DP)] }
			cached, err := e.Cached(k.DP)
			if err != nil {
				return err
			}
			queries, hits := engine("vllm:prefix_cache_queries_total"), engine("vllm:prefix_cache_hits_total")
			life := math.NaN()
			if queries > 0 {
				life = hits / queries
			}
			for _, c := range []struct {
				what      string
				got, want float64
			}{
				{"running", k.Running().F(), engine("vllm:num_requests_running")},
				{"waiting", k.Waiting().F(), engine("vllm:num_requests_waiting")},
				{"kv usage", k.KVUsage().F(), engine("vllm:kv_cache_usage_perc")},
				{"lifetime hit share", k.LifeHit.F(), life},
				{"indexed blocks", float64(k.IndexBlocks), float64(len(cached))},
			} {
				if math.Abs(c.got-c.want) > 1e-9 || math.IsNaN(c.got) != math.IsNaN(c.want) {
					problems = append(problems, fmt.Errorf("%s: %s is %v, the engine says %v", k.Label, c.what, c.got, c.want))
				}
			}
		}
		return errors.Join(problems...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// scrape reads an engine's metrics page by name and rank.
func scrape(ctx context.Context, client *http.Client, url string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{}
	for l := range strings.Lines(string(raw)) {
		l = strings.TrimSpace(l)
		name, rest, ok := strings.Cut(l, "{")
		labels, value, ok2 := strings.Cut(rest, "} ")
		if !ok || !ok2 || strings.HasPrefix(l, "#") {
			continue
		}
		v, err := strconv.ParseFloat(strings.Fields(value)[0], 64)
		if err != nil {
			return nil, err
		}
		_, rank, _ := strings.Cut(labels, `engine="`)
		rank, _, _ = strings.Cut(rank, `"`)
		out[name+"/"+rank] += v
	}
	return out, nil
}

// TestTopShowsTroubles breaks a running fleet in the ways that the overview must show.
func TestTopShowsTroubles(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s := newStand(t, ctx, "1p3d:dp=1,speed=20,kv_blocks=200,max_seqs=4")
	if _, err := s.c.Collect(ctx); err != nil {
		t.Fatal(err)
	}
	load, stop := context.WithCancel(ctx)
	done := make(chan struct{}, 16)
	loops := 0
	run := func(f func()) {
		loops++
		go func() {
			for load.Err() == nil {
				f()
			}
			done <- struct{}{}
		}()
	}
	t.Cleanup(func() {
		stop()
		for range loops {
			<-done
		}
	})
	// Everybody asks for the same prefix: it is hot.
	run(func() { _ = s.complete(load, prompt(1, 330), 4) })
	s.sees(t, ctx, feed.CodeHotPrefix, "hot prefix")

	// Lost events: a gap.
	for _, e := range s.Sim.Engines() {
		if err := e.SetFaults(fault.Set{DropEvents: .5}); err != nil {
			t.Fatal(err)
		}
	}
	n := 100
	run(func() { n++; _ = s.complete(load, prompt(n, 200), 20) })
	s.sees(t, ctx, feed.CodeGap, "event gap")
	for _, e := range s.Sim.Engines() {
		if err := e.SetFaults(fault.Set{}); err != nil {
			t.Fatal(err)
		}
	}

	// More than a decode engine can run: it is saturated.
	for i := range 12 {
		run(func() { _ = s.complete(load, prompt(1000+i, 600), 400) })
	}
	s.sees(t, ctx, feed.CodeSaturated, "saturated: ")

	// A dead engine.
	s.Sim.Engine(3).Kill()
	s.sees(t, ctx, feed.CodeWorkerDown, "engine down: ")
}

// TestTopShowsStaleRank cuts the way of an engine's events, not the engine.
func TestTopShowsStaleRank(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s := newStand(t, ctx, "1d")
	far, err := sim.ParseFleet("1d")
	if err != nil {
		t.Fatal(err)
	}
	engines, err := sim.Start(ctx, far)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engines.Close() })
	w := engines.Workers()[0]
	way := newPipe(t, strings.TrimPrefix(w.Events[0].Endpoint, "tcp://"))
	if _, err := s.Admin.AddWorker(ctx, admin.AddWorker{Role: "decode", Spec: fmt.Sprintf("%s,name=far,events=tcp://%s", w.URL, way.addr())}); err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	way.cut()
	s.sees(t, ctx, feed.CodeFeed, "stale: its KV events are cut off") // index.stale_after is 1 s here
}

// pipe forwards TCP connections to an address until it is cut.
type pipe struct {
	ln    net.Listener
	mu    sync.Mutex
	conns []net.Conn
	wg    sync.WaitGroup
}

func newPipe(t *testing.T, to string) *pipe {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &pipe{ln: ln}
	p.wg.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, in, out)
			p.mu.Unlock()
			p.wg.Go(func() { _, _ = io.Copy(out, in); out.Close() })
			p.wg.Go(func() { _, _ = io.Copy(in, out); in.Close() })
		}
	})
	t.Cleanup(p.cut)
	return p
}

func (p *pipe) addr() string { return p.ln.Addr().String() }

func (p *pipe) cut() {
	p.ln.Close()
	p.mu.Lock()
	for _, c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

func TestTopWatch(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	t.Setenv("DYNCTL_CONTEXTS", filepath.Join(t.TempDir(), "none.yaml"))
	s := newStand(t, ctx, "2a")
	code, stdout, stderr := typed("top", "--router", s.AdminURL, "--watch", "100ms", "--count", "3", "-o", "jsonl")
	if code != 0 || strings.Count(stdout, "\n") != 3 {
		t.Errorf("code %d, %q %s", code, stdout, stderr)
	}
	for l := range strings.Lines(stdout) {
		var v feed.View
		if err := json.Unmarshal([]byte(l), &v); err != nil || v.Schema != feed.Schema || !v.Routers[0].RequestRate.Known() {
			t.Errorf("%v: %s", err, l)
		}
	}
	code, stdout, stderr = typed("top", "--router", s.AdminURL, "--once", "--ascii")
	if code != 0 || !strings.Contains(stdout, "aggregated-0/dp0") && !strings.Contains(stdout, "WORKER/RANK") {
		t.Errorf("code %d, %q %s", code, stdout, stderr)
	}
}

// TestTopIsCheap asks a router of 64 ranks for what the screen asks for, at the
// handler, without network or client. What a question costs is counted in
// allocations and bytes, which are the same on a busy machine; the time of the
// fastest of many tries is only logged.
func TestTopIsCheap(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s := newStand(t, ctx, "8p8d:dp=4,speed=50")
	for i := range 100 {
		if err := s.complete(ctx, prompt(i%50, 600), 4); err != nil {
			t.Fatal(err)
		}
	}
	h, err := s.Router.AdminHandler(router.AdminOptions{Name: "r"})
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range []struct {
		path          string
		allocs, bytes int
	}{
		{"/admin/v1/snapshot?decisions=20&events=200&after=1000000&brief=true", 4_000, 200_000},
		{"/admin/v1/index/children?sort=hits&limit=8", 200, 4_000},
		{"/admin/v1/decisions?limit=200&brief=true", 1_000, 300_000},
	} {
		best, size := time.Hour, 0
		ask := func() {
			w := httptest.NewRecorder()
			began := time.Now()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://localhost"+q.path, nil))
			best, size = min(best, time.Since(began)), w.Body.Len()
			if w.Code != http.StatusOK {
				t.Fatalf("%s: %d %s", q.path, w.Code, w.Body)
			}
		}
		// The router behind the handler allocates meanwhile, more the longer the
		// machine takes: the least of many is the handler's own.
		allocs := math.MaxInt
		for range 60 {
			allocs = min(allocs, int(testing.AllocsPerRun(1, ask)))
		}
		t.Logf("%s: %d allocations, %d bytes, %s at best", q.path, allocs, size, best)
		if allocs > q.allocs || size > q.bytes {
			t.Errorf("%s costs %d allocations and %d bytes, more than %d and %d", q.path, allocs, size, q.allocs, q.bytes)
		}
	}
}

func TestTopDemo(t *testing.T) {
	if testing.Short() {
		t.Skip("starts engines")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	d, err := startDemo(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	client, err := admin.NewClient(d.URL, admin.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	clients := []*admin.Client{client}
	err = loopback.Wait(ctx, "traffic", func() error {
		s, err := clients[0].Status(ctx)
		if err == nil && s.Traffic.Completed < 5 {
			err = fmt.Errorf("%d requests", s.Traffic.Completed)
		}
		return err
	})
	if err = errors.Join(err, d.Close()); err != nil {
		t.Error(err)
	}
}

// TestTopDemoOfAModel: figures of a simulated GPU are printed with the words that they are a
// model's.
func TestTopDemoOfAModel(t *testing.T) {
	if testing.Short() {
		t.Skip("starts engines")
	}
	code, stdout, stderr := typed("top", "--demo", "--once", "--profile", "h100-8b")
	if code != cli.ExitOK || stdout == "" || !strings.Contains(stderr, "not a measurement of your engines") {
		t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
	}
}

// TestTopOnceWaitsForABigRouter: a router that takes three seconds to answer is one
// that answers.
func TestTopOnceWaitsForABigRouter(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for three seconds")
	}
	g := loopbacktest.Start(t, loopback.Options{Fleet: "1a:profile=instant"})
	u, err := url.Parse(g.AdminURL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(u)
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if strings.HasPrefix(q.URL.Path, "/admin/v1/snapshot") {
			select {
			case <-time.After(3 * time.Second):
			case <-q.Context().Done():
			}
		}
		proxy.ServeHTTP(w, q)
	}))
	t.Cleanup(slow.Close)
	if code, stdout, stderr := typed("top", "--once", "--router", slow.URL); code != cli.ExitOK || !strings.Contains(stdout, "aggregated-0") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
	if code, _, _ := typed("top", "--once", "--timeout", "200ms", "--router", slow.URL); code != cli.ExitUnreachable {
		t.Errorf("a wait that was asked for: code %d", code)
	}
}
