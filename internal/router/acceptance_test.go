package router_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// accepted names every item of the acceptance list for disaggregated prefill
// and the restated tests of conditional routing, with the tests that prove it.
// A test is a function of this package, or package:function.
var accepted = []struct{ item, what, tests string }{
	{"A1", "the prefill body, with min_tokens made safe", "TestAcceptancePrefillBody disagg:TestA1PrefillBody"},
	{"A2", "the decode body is the client's but for the transfer parameters", "TestInvariant03BytesInBytesOut"},
	{"A3", "a failed prefill never reaches decode", "TestInvariant04FailedPrefillNeverReachesDecodeSilently"},
	{"A4", "missing parameters: error or counted fallback", "TestInvariant04FailedPrefillNeverReachesDecodeSilently"},
	{"A5", "503 with codes of their own for no prefill and no decode worker", "TestAcceptanceNoWorkers"},
	{"A6", "round robin of prefill, independent of decode", "TestAcceptanceRoundRobin"},
	{"A7", "Authorization and traceparent on both legs", "TestAcceptanceHeadersOnBothLegs"},
	{"A8", "IPv6 and https URLs", "TestAcceptanceIPv6 upstream:TestTLSAndIPv6"},
	{"A9", "the stream begins before decode ends", "TestInvariant09FirstByteEarlyAndLiveStreamsAreNotCut"},
	{"A10", "a long stream is not cut", "TestInvariant09FirstByteEarlyAndLiveStreamsAreNotCut upstream:TestNoTotalTimeout"},
	{"A11", "disconnect cancels both legs within a bound", "TestInvariant08CancelReachesEveryone"},
	{"A12", "embeddings and rerank are never split", "TestEndpoints"},
	{"A13", "sleeping and unhealthy workers are left out", "TestAcceptanceSleepingAndUnhealthy"},
	{"A14", "only workers of the model", "TestModelsAliasesAndLoRA"},
	{"A15", "metrics and spans of each leg", "TestAcceptanceLegMetrics telemetry:TestSpansFollowTheClientsTrace"},
	{"1", "a prompt of 400 characters counts 100", "TestAcceptanceEstimates"},
	{"2", "500 ids count 500", "TestAcceptanceEstimates"},
	{"3", "two messages of 800 and 1200 characters count 500", "TestAcceptanceEstimates"},
	{"4", "parts: 400 characters and an image count 100", "TestAcceptanceEstimates"},
	{"5", "an empty body counts 0", "TestAcceptanceEstimates"},
	{"6", "threshold 0 is always remote", "decide:TestPath TestAcceptanceThresholds"},
	{"7", "5000 at 4096 is remote", "decide:TestPath TestAcceptanceThresholds"},
	{"8", "100 at 4096 is local", "decide:TestPath TestAcceptanceThresholds"},
	{"9", "the threshold itself is remote", "decide:TestPath TestAcceptanceThresholds"},
	{"10", "a negative threshold is always remote", "decide:TestPath TestAcceptanceThresholds"},
	{"11", "three prefill workers in two full cycles", "TestAcceptanceRoundRobin"},
	{"12", "two decode workers alternate", "TestAcceptanceRoundRobin"},
	{"13", "a single worker is always chosen", "TestAcceptanceRoundRobin"},
	{"14", "no prefill worker is an error of its own", "TestAcceptanceNoWorkers"},
	{"15", "no decode worker is an error of its own", "TestAcceptanceNoWorkers"},
	{"16", "prefill rotates in its pool", "TestAcceptanceRoundRobin"},
	{"17", "decode rotates in its pool", "TestAcceptanceRoundRobin"},
	{"18", "threshold 0 with one of each is always both", "TestAcceptanceThresholds"},
	{"19", "the least loaded is chosen", "TestAcceptanceLeastLoaded"},
	{"20", "without a figure: round robin", "TestAcceptanceLeastLoaded"},
	{"21", "round robin looks at no figures", "TestAcceptanceLeastLoaded"},
	{"22", "nixl has no LMCache spec", "TestInvariant01OnePrefillOneDecode TestAcceptanceDecoderSpecs"},
	{"23", "LMCache without registry: the worker's own spec", "TestAcceptanceDecoderSpecs"},
	{"24", "registry: that decoder's spec", "TestAcceptanceDecoderSpecs"},
	{"25", "the registry's values are copies", "TestAcceptanceDecoderSpecs disagg:TestLMCacheSpec"},
	{"26", "unknown decoder: the static spec", "disagg:TestLMCacheSpec"},
	{"27", "2P4D round robin spreads evenly", "TestAcceptanceRoundRobin"},
	{"28", "the spec is that of the decoder chosen", "TestAcceptanceDecoderSpecs"},
}

// TestAcceptanceListIsProven keeps the table honest: each item is there once,
// and each test that it names exists.
func TestAcceptanceListIsProven(t *testing.T) {
	t.Parallel()
	have := map[string]bool{}
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(p, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range f.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil {
				have[filepath.Base(filepath.Dir(p))+":"+fn.Name.Name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, a := range accepted {
		if seen[a.item] {
			t.Errorf("%s stands twice", a.item)
		}
		seen[a.item] = true
		for _, name := range strings.Fields(a.tests) {
			if !strings.Contains(name, ":") {
				name = ".:" + name
			}
			if !have[name] {
				t.Errorf("%s (%s) is said to be proven by %s, which does not exist", a.item, a.what, name)
			}
		}
	}
	for i := range 28 {
		if !seen[fmt.Sprint(i+1)] || i < 15 && !seen[fmt.Sprintf("A%d", i+1)] {
			t.Errorf("item %d is missing", i+1)
		}
	}
}

func TestAcceptancePrefillBody(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant")
	r.post("/v1/completions", object{
		"model": "sim", "prompt": ids(100, 1), "max_tokens": 9, "min_tokens": 5, "stream": true,
		"stream_options": object{"include_usage": true}, "custom": object{"kept": true}, "seed": 3,
	})
	pre, dec := p.legsOf("prefill"), p.legsOf("decode")
	if len(pre) != 1 || len(dec) != 1 {
		t.Fatalf("%d and %d legs", len(pre), len(dec))
	}
	b := gjson.ParseBytes(pre[0].body)
	if b.Get("max_tokens").Int() != 1 || b.Get("stream").Bool() || b.Get("stream_options").Exists() || b.Get("min_tokens").Int() > 1 ||
		!b.Get("kv_transfer_params.do_remote_decode").Bool() || b.Get("kv_transfer_params.do_remote_prefill").Bool() ||
		!b.Get("custom.kept").Bool() || b.Get("seed").Int() != 3 || b.Get("max_completion_tokens").Exists() {
		t.Errorf("prefill body: %s", pre[0].body)
	}
	b = gjson.ParseBytes(dec[0].body)
	if b.Get("max_tokens").Int() != 9 || b.Get("min_tokens").Int() != 5 || !b.Get("stream").Bool() || !b.Get("stream_options.include_usage").Bool() {
		t.Errorf("decode body: %s", dec[0].body)
	}
	// Without max_tokens the decode leg gets none either; the newer name alone
	// is capped under its own name.
	for _, key := range []string{"", "max_completion_tokens"} {
		p.reset()
		q := object{"model": "sim", "messages": []object{{"role": "user", "content": strings.Repeat("word ", 100)}}, "stop": []string{" the"}}
		if key != "" {
			q[key] = 7
		}
		r.post("/v1/chat/completions", q)
		pre, dec := gjson.ParseBytes(p.legsOf("prefill")[0].body), gjson.ParseBytes(p.legsOf("decode")[0].body)
		if key == "" && (pre.Get("max_tokens").Int() != 1 || dec.Get("max_tokens").Exists()) ||
			key != "" && (pre.Get(key).Int() != 1 || dec.Get(key).Int() != 7 || dec.Get("max_tokens").Exists()) {
			t.Errorf("%q: prefill %s, decode %s", key, pre, dec)
		}
	}
}

func TestAcceptanceNoWorkers(t *testing.T) {
	t.Parallel()
	body := []byte(`{"model":"sim","prompt":"x"}`)
	r := start(t, "1p1d:profile=instant", func(c *settings.Config) { c.Routing.PrefillFallback = "error" })
	r.drainWorker("prefill-0")
	e := r.send(http.MethodPost, "/v1/completions", body).refused(t, 503, "no_prefill_worker")
	if !strings.Contains(e.Error.Message, "no prefill worker") {
		t.Errorf("%q", e.Error.Message)
	}
	r.drainWorker("decode-0")
	e = r.send(http.MethodPost, "/v1/completions", body).refused(t, 503, "no_decode_worker")
	if !strings.Contains(e.Error.Message, "no decode worker") {
		t.Errorf("%q", e.Error.Message)
	}
}

func (r *rig) drainWorker(name string) {
	r.t.Helper()
	if _, err := r.Admin.DrainWorker(r.t.Context(), name); err != nil {
		r.t.Fatal(err)
	}
}

func TestAcceptanceRoundRobin(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		fleet           string
		prefill, decode int
		n               int
	}{{"3p2d:profile=instant", 3, 2, 12}, {"1p1d:profile=instant", 1, 1, 4}, {"2p4d:profile=instant", 2, 4, 16}} {
		t.Run(c.fleet, func(t *testing.T) {
			t.Parallel()
			r := start(t, c.fleet, func(c *settings.Config) { c.Routing.Policy = "round_robin" })
			count := map[string]int{}
			var first [2]int
			for i := range c.n {
				a, _ := r.complete(ids(40, i))
				var p, d int
				if _, err := fmt.Sscanf(a.header.Get("X-Dynctl-Prefill-Worker")+" "+a.header.Get("X-Dynctl-Worker"), "prefill-%d/dp0 decode-%d/dp0", &p, &d); err != nil {
					t.Fatal(err)
				}
				if i == 0 {
					first = [2]int{p, d}
				}
				if p != (first[0]+i)%c.prefill || d != (first[1]+i)%c.decode {
					t.Errorf("request %d went to prefill-%d and decode-%d", i, p, d)
				}
				count[fmt.Sprint("p", p)]++
				count[fmt.Sprint("d", d)]++
			}
			for i := range c.prefill {
				if n := count[fmt.Sprint("p", i)]; n != c.n/c.prefill {
					t.Errorf("prefill-%d got %d of %d", i, n, c.n)
				}
			}
		})
	}
}

func TestAcceptanceHeadersOnBothLegs(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant")
	r.complete(ids(100, 1), "Authorization", "Bearer tenant", "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Tenant", "t1")
	legs := p.legs()
	if len(legs) != 2 {
		t.Fatalf("%d legs", len(legs))
	}
	for _, l := range legs {
		if l.header.Get("Authorization") != "Bearer tenant" || !strings.HasPrefix(l.header.Get("Traceparent"), "00-0af7651916cd43dd8448eb211c80319c-") || l.header.Get("X-Tenant") != "t1" {
			t.Errorf("%s got %v", l.engine, l.header)
		}
	}
}

func TestAcceptanceIPv6(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	target := start(t, "1a:profile=instant")
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	proxy := &http.Server{Handler: proxyTo(target.Sim.Engine(0).Worker().URL, transport), ReadHeaderTimeout: 10 * time.Second, ErrorLog: quietLog}
	done := make(chan struct{})
	go func() { defer close(done); _ = proxy.Serve(ln) }() // ends with Close
	t.Cleanup(func() { proxy.Close(); <-done })
	u := &url.URL{Scheme: "http", Host: ln.Addr().String()}
	r := startCold(t, loopback.Options{Specs: func([]workers.Spec) []workers.Spec {
		return []workers.Spec{{Name: "six", URL: u, Role: workers.Aggregated, EventsOff: true, Origin: "test"}}
	}})
	r.eventually("the worker", func() error {
		if w := r.worker("six"); !w.Usable {
			return fmt.Errorf("%s", w.Reason)
		}
		return nil
	})
	if a, _ := r.complete(ids(20, 1)); a.header.Get("X-Dynctl-Worker") != "six/dp0" {
		t.Errorf("%v", a.header)
	}
}

func TestAcceptanceSleepingAndUnhealthy(t *testing.T) {
	t.Parallel()
	r := start(t, "3a:profile=instant", func(c *settings.Config) { c.Routing.Policy = "round_robin" })
	q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.Sim.Named("aggregated-0").URL()+"/sleep", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.Client.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if err := r.Sim.Named("aggregated-1").SetFaults(fault.Set{Hang: true}); err != nil {
		t.Fatal(err)
	}
	r.eventually("the probes to see it", func() error {
		a, b := r.worker("aggregated-0"), r.worker("aggregated-1")
		if a.Usable || b.Usable {
			return fmt.Errorf("%s and %s", a.Health, b.Health)
		}
		return nil
	})
	for i := range 6 {
		if a, _ := r.complete(ids(20, i)); a.header.Get("X-Dynctl-Worker") != "aggregated-2/dp0" {
			t.Errorf("went to %s", a.header.Get("X-Dynctl-Worker"))
		}
	}
}

func TestAcceptanceLegMetrics(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant")
	for i := range 3 {
		r.complete(ids(100, i))
	}
	r.eventually("the metrics", func() error {
		for series, want := range map[string]float64{
			`dynctl_legs_total{leg="prefill",outcome="ok",worker="prefill-0"}`:                  3,
			`dynctl_legs_total{leg="decode",outcome="ok",worker="decode-0"}`:                    3,
			`dynctl_leg_duration_seconds_count{leg="prefill",worker="prefill-0"}`:               3,
			`dynctl_leg_first_byte_seconds_count{leg="decode",worker="decode-0"}`:               3,
			`dynctl_decisions_total{path="remote",reason="always_remote"}`:                      3,
			`dynctl_requests_total{code="200",endpoint="completion",model="sim",path="remote"}`: 3,
		} {
			if got := r.metric(series); got != want {
				return fmt.Errorf("%s is %v, want %v", series, got, want)
			}
		}
		return nil
	})
}

func TestAcceptanceEstimates(t *testing.T) {
	t.Parallel()
	r := start(t, "1a:profile=instant,events=off", func(c *settings.Config) { c.Tokens.Tokenizer = "estimate" })
	a := func(n int) string { return strings.Repeat("a", n) }
	user := func(c any) object { return object{"role": "user", "content": c} }
	for name, c := range map[string]struct {
		endpoint string
		body     object
		want     int
	}{
		"1":              {"/v1/completions", object{"prompt": a(400)}, 100},
		"2":              {"/v1/completions", object{"prompt": ids(500, 1)}, 500},
		"3":              {"/v1/chat/completions", object{"messages": []object{user(a(800)), user(a(1200))}}, 500},
		"4":              {"/v1/chat/completions", object{"messages": []object{user([]object{{"type": "text", "text": a(400)}, {"type": "image_url", "image_url": object{"url": "http://x/y"}}})}}, 100},
		"3 characters":   {"/v1/completions", object{"prompt": a(3)}, 0},
		"4 characters":   {"/v1/completions", object{"prompt": a(4)}, 1},
		"7 characters":   {"/v1/completions", object{"prompt": a(7)}, 1},
		"code points":    {"/v1/completions", object{"prompt": "日本語テスト文字"}, 2},
		"emoji":          {"/v1/completions", object{"prompt": strings.Repeat("😀", 8)}, 2},
		"several texts":  {"/v1/completions", object{"prompt": []string{a(40), a(40)}}, 20},
		"null, messages": {"/v1/chat/completions", object{"prompt": nil, "messages": []object{user(a(80))}}, 20},
		"several lists":  {"/v1/completions", object{"prompt": [][]int{ids(30, 1), ids(30, 2)}}, 60},
	} {
		c.body["model"] = "sim"
		got, err := r.Admin.Route(t.Context(), routeOf(t, c.endpoint, c.body))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if isl := gjson.GetBytes(got.Receipt, "inputs.isl_tokens").Int(); isl != int64(c.want) {
			t.Errorf("%s: %d tokens, want %d", name, isl, c.want)
		}
	}
	// 5: nothing to count is no prompt; the engine says what it thinks of it.
	if a := r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim"}`)); a.status != 400 {
		t.Errorf("%s", a)
	}
}

func TestAcceptanceThresholds(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant,events=off", func(c *settings.Config) { c.Tokens.Tokenizer, c.Routing.ThresholdOn = "estimate", "isl" })
	for _, c := range []struct {
		threshold, chars int
		want             string
	}{
		{0, 20, "remote"}, {0, 100_000, "remote"}, {4096, 20_000, "remote"}, {4096, 400, "local"},
		{1000, 4000, "remote"}, {1000, 3999, "local"}, {1000, 4003, "remote"}, {-5, 20, "remote"},
	} {
		cfg := r.Config
		cfg.Routing.Threshold.Tokens = c.threshold
		if err := r.Router.Settings().Reload(cfg, nil); err != nil {
			t.Fatal(err)
		}
		a := r.post("/v1/completions", object{"model": "sim", "prompt": strings.Repeat("word ", c.chars/5+1)[:c.chars], "max_tokens": 1})
		if got := a.header.Get("X-Dynctl-Path"); got != c.want {
			t.Errorf("%d characters at %d went %s, want %s", c.chars, c.threshold, got, c.want)
		}
	}
}

func TestAcceptanceLeastLoaded(t *testing.T) {
	t.Parallel()
	r := start(t, "2a:speed=1", func(c *settings.Config) { c.Routing.Policy = "least_loaded" })
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
	r.eventually("the figure", func() error {
		if e := r.worker("aggregated-0").Ranks[0].Engine; e == nil || e.Running == nil || *e.Running < 4 {
			return fmt.Errorf("%+v", e)
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
	// Without a figure of one of them, least_loaded is round robin.
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
		for _, k := range gjson.GetBytes(dry.Receipt, "decode.candidates").Array() {
			if k.Get("rank").String() == "aggregated-1/dp0" && k.Get("has_load").Bool() {
				return errors.New("the scrape was faster")
			}
		}
		return nil
	})
	if tb := gjson.GetBytes(dry.Receipt, "decode.tie_break").String() + gjson.GetBytes(dry.Receipt, "decode.policy").String(); !strings.Contains(tb, "round_robin") {
		t.Errorf("without a figure: %s", gjson.GetBytes(dry.Receipt, "decode"))
	}
}

func TestAcceptanceDecoderSpecs(t *testing.T) {
	t.Parallel()
	p := &tap{}
	r := startWith(t, loopback.Options{Fleet: "1p2d:profile=instant,connector=lmcache", Specs: p.specs(t)}, func(c *settings.Config) { c.Routing.DecodePolicy = "round_robin" })
	spec := func(b []byte) gjson.Result { return gjson.GetBytes(b, "kv_transfer_params.disagg_spec") }
	own := map[string]int64{}
	for i := range 4 {
		p.reset()
		a, _ := r.complete(ids(100, i))
		s := spec(p.legsOf("prefill")[0].body)
		name, _, _ := strings.Cut(a.header.Get("X-Dynctl-Worker"), "/")
		port := s.Get("receiver_init_port.0").Int()
		if want := int64(r.Sim.Named(name).Worker().LMCache.InitPorts[0]); port != want {
			t.Errorf("the spec names port %d, %s receives on %d", port, name, want)
		}
		own[name] = port
		if id := s.Get("req_id").String(); id == "" {
			t.Errorf("no req_id: %s", s)
		}
	}
	// A registry for one of them, under the URL by which the router knows it.
	url0 := r.worker("decode-0").URL
	registry := fmt.Sprintf(`{%q:{"receiver_host":"127.0.0.1","receiver_init_port":[%d],"receiver_alloc_port":[%d]}}`, url0, own["decode-0"], own["decode-0"])
	cfg := r.Config
	cfg.Routing.DecoderRegistry = registry
	if err := r.Router.Settings().Reload(cfg, nil); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for i := range 4 {
		p.reset()
		a, _ := r.complete(ids(100, 50+i))
		s := spec(p.legsOf("prefill")[0].body)
		name, _, _ := strings.Cut(a.header.Get("X-Dynctl-Worker"), "/")
		if s.Get("receiver_init_port.0").Int() != own[name] {
			t.Errorf("%s: %s", name, s)
		}
		if id := s.Get("req_id").String(); seen[id] {
			t.Errorf("req_id %s leaked into the next request", id)
		} else {
			seen[id] = true
		}
	}
}
