package router_test

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
)

// accepted names every item of the acceptance list for disaggregated prefill
// and the restated tests of conditional routing, with the tests that prove it.
// A test is a function of this package, or package:function.
var accepted = []struct{ item, what, tests string }{
	{"A1", "the prefill body, with min_tokens made safe", "disagg:TestA1PrefillBody"},
	{"A2", "the decode body is the client's but for the transfer parameters", "TestInvariant03BytesInBytesOut"},
	{"A3", "a failed prefill never reaches decode", "serving:TestInvariant04BrokenPrefills serving:TestReasons"},
	{"A4", "missing parameters: error or counted fallback", "serving:TestInvariant04BrokenPrefills serving:TestReasons"},
	{"A5", "503 with codes of their own for no prefill and no decode worker", "TestAcceptanceOnePair"},
	{"A6", "round robin of prefill, independent of decode", "selector:TestRoundRobinPhasesAreIndependent TestTurnsOfRoundRobin"},
	{"A7", "Authorization and traceparent on both legs", "TestInvariant03BytesInBytesOut"},
	{"A8", "IPv6 and https URLs", "TestFleetByAdminAPI upstream:TestTLSAndIPv6"},
	{"A9", "the stream begins before decode ends", "TestInvariant09FirstByteEarly"},
	{"A10", "a long stream is not cut", "TestInvariant09LiveStreamsAreNotCut upstream:TestNoTotalTimeout"},
	{"A11", "disconnect cancels both legs within a bound", "TestInvariant08CancelReachesEveryone"},
	{"A12", "embeddings and rerank are never split", "TestEndpoints"},
	{"A13", "sleeping and unhealthy workers are left out", "TestSessionsAndSleepers"},
	{"A14", "only workers of the model", "TestPairsServeOneModel"},
	{"A15", "metrics and spans of each leg", "TestAcceptanceOnePair telemetry:TestSpansFollowTheClientsTrace"},
	{"1", "a prompt of 400 characters counts 100", "api:TestEstimateTokens"},
	{"2", "500 ids count 500", "api:TestEstimateTokens"},
	{"3", "two messages of 800 and 1200 characters count 500", "api:TestEstimateTokens"},
	{"4", "parts: 400 characters and an image count 100", "api:TestEstimateTokens"},
	{"5", "an empty body counts 0", "api:TestEstimateTokens"},
	{"6", "threshold 0 is always remote", "decide:TestPath"},
	{"7", "5000 at 4096 is remote", "decide:TestPath"},
	{"8", "100 at 4096 is local", "decide:TestPath"},
	{"9", "the threshold itself is remote", "decide:TestPath"},
	{"10", "a negative threshold is always remote", "decide:TestPath"},
	{"11", "three prefill workers in two full cycles", "selector:TestRoundRobinSortedCycles"},
	{"12", "two decode workers alternate", "selector:TestRoundRobinPhasesAreIndependent"},
	{"13", "a single worker is always chosen", "selector:TestRoundRobinPhasesAreIndependent"},
	{"14", "no prefill worker is an error of its own", "TestAcceptanceOnePair"},
	{"15", "no decode worker is an error of its own", "TestAcceptanceOnePair"},
	{"16", "prefill rotates in its pool", "selector:TestRoundRobinSortedCycles TestTurnsOfRoundRobin"},
	{"17", "decode rotates in its pool", "selector:TestRoundRobinSpreadsEvenly TestTurnsOfRoundRobin"},
	{"18", "threshold 0 with one of each is always both", "decide:TestPath TestAcceptanceOnePair"},
	{"19", "the least loaded is chosen", "TestFleetByAdminAPI"},
	{"20", "without a figure: round robin", "TestFleetByAdminAPI"},
	{"21", "round robin looks at no figures", "TestFleetByAdminAPI"},
	{"22", "nixl has no LMCache spec", "TestInvariant01OnePrefillOneDecode TestAcceptanceDecoderSpecs"},
	{"23", "LMCache without registry: the worker's own spec", "TestAcceptanceDecoderSpecs"},
	{"24", "registry: that decoder's spec", "TestAcceptanceDecoderSpecs"},
	{"25", "the registry's values are copies", "TestAcceptanceDecoderSpecs disagg:TestLMCacheSpec"},
	{"26", "unknown decoder: the static spec", "disagg:TestLMCacheSpec"},
	{"27", "2P4D round robin spreads evenly", "selector:TestRoundRobinSpreadsEvenly"},
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
			t.Errorf("%s appears twice", a.item)
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

func (r *rig) drainWorker(name string) {
	r.t.Helper()
	if _, err := r.Admin.DrainWorker(r.t.Context(), name); err != nil {
		r.t.Fatal(err)
	}
}

// TestAcceptanceOnePair: both legs of a request are in the metrics and in its receipt.
func TestAcceptanceOnePair(t *testing.T) {
	t.Parallel()
	rec := recorded{ended: make(chan struct{})}
	rec.Store(&admin.Recorder{Path: "t.jsonl", Records: 3})
	close(rec.ended)
	r := startWith(t, loopback.Options{Fleet: "1p1d:profile=instant", Recording: &rec})
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
	// A recording that ended as it should is no trouble.
	if n := r.metric("dynctl_recording_failed"); n != 0 {
		t.Errorf("dynctl_recording_failed is %v", n)
	}
	if st := r.status(); st.State != "ready" || st.Recorder == nil || len(r.events("recording_failed")) != 0 {
		t.Errorf("recorder %+v, state %s %q", st.Recorder, st.State, st.Reasons)
	}
	// Every answer's decision is found by its id and by the request's own.
	a, _ := r.complete(ids(100, 1), "X-Request-Id", "my-own-id")
	if a.header.Get("X-Request-Id") != "my-own-id" {
		t.Errorf("id %q", a.header.Get("X-Request-Id"))
	}
	one, err := r.Admin.Decision(t.Context(), a.header.Get("X-Dynctl-Decision"))
	if err != nil {
		t.Fatal(err)
	}
	two, err := r.Admin.Decision(t.Context(), "my-own-id")
	if err != nil || rawjson.Value(one).Get("id").String() != rawjson.Value(two).Get("id").String() || !json.Valid(one) {
		t.Errorf("%s %s %v", one, two, err)
	}
	if len(slices.Collect(rawjson.Value(one).Get("legs").Elements())) != 2 {
		t.Errorf("legs: %s", rawjson.Value(one).Get("legs"))
	}
	t.Run("no workers", func(t *testing.T) { noWorkers(t, r.in(t)) })
}

// noWorkers: which of the two kinds is missing is an error of its own.
func noWorkers(t *testing.T, r *rig) {
	body := []byte(`{"model":"sim","prompt":"x"}`)
	r.set(func(c *settings.Config) { c.Routing.PrefillFallback = "error" })
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

func TestAcceptanceDecoderSpecs(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p2d:profile=instant,connector=lmcache", func(c *settings.Config) { c.Routing.DecodePolicy = "round_robin" })
	carries(t, r)
	spec := func(b []byte) rawjson.Value { return rawjson.Value(b).Get("kv_transfer_params.disagg_spec") }
	own := map[string]string{}
	for i := range 4 {
		p.reset()
		a, _ := r.complete(ids(100, i))
		s := spec(p.legsOf("prefill")[0].body)
		name, _, _ := strings.Cut(a.header.Get("X-Dynctl-Worker"), "/")
		port := s.Get("receiver_init_port.0").String()
		if want := strconv.Itoa(r.Sim.Named(name).Worker().LMCache.InitPorts[0]); port != want {
			t.Errorf("the spec names port %s, %s receives on %s", port, name, want)
		}
		own[name] = port
		if id := s.Get("req_id").String(); id == "" {
			t.Errorf("no req_id: %s", s)
		}
	}
	// A registry for one of them, under the URL by which the router knows it.
	url0 := r.worker("decode-0").URL
	registry := fmt.Sprintf(`{%q:{"receiver_host":"127.0.0.1","receiver_init_port":[%s],"receiver_alloc_port":[%s]}}`, url0, own["decode-0"], own["decode-0"])
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
		if s.Get("receiver_init_port.0").String() != own[name] {
			t.Errorf("%s: %s", name, s)
		}
		if id := s.Get("req_id").String(); seen[id] {
			t.Errorf("req_id %s leaked into the next request", id)
		} else {
			seen[id] = true
		}
	}
}
