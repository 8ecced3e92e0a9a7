package doctor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/doctor"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/loopbacktest"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

func examine(t *testing.T, o loopback.Options, passive bool) *doctor.Report {
	t.Helper()
	return examineAfter(t, o, passive, func(context.Context, *loopback.Rig) {})
}

// examineAfter examines a fleet to which something happens once it is ready.
func examineAfter(t *testing.T, o loopback.Options, passive bool, happen func(context.Context, *loopback.Rig)) *doctor.Report {
	t.Helper()
	configure := o.Configure
	o.Configure = func(c *settings.Config) {
		c.Routing.AllowHeaders, c.Tokens.Tokenizer = true, "engine"
		if configure != nil {
			configure(c)
		}
	}
	g := loopbacktest.Start(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	wait, stop := context.WithTimeout(ctx, 3*time.Second)
	_ = g.Ready(wait) // broken fleets never are
	stop()
	happen(ctx, g)
	tgt, err := fleet.New(ctx, g.Admin, fleet.Options{URL: g.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer tgt.Close()
	r, err := doctor.Run(ctx, doctor.Options{Target: tgt, Passive: passive})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func states(r *doctor.Report, check string) map[doctor.State][]string {
	out := map[doctor.State][]string{}
	for _, f := range r.Findings {
		if f.Check == check {
			out[f.State] = append(out[f.State], f.Subject+": "+f.Text)
		}
	}
	return out
}

func TestHealthyFleet(t *testing.T) {
	r := examine(t, loopback.Options{Fleet: "1p1d:dp=2,profile=instant"}, false)
	if r.Failed > 0 || r.Warned > 0 {
		var b bytes.Buffer
		_ = doctor.Text(&b, r)
		t.Fatalf("a healthy fleet has faults:\n%s", b.String())
	}
	for check, n := range map[string]int{"cache probe": 2, "transfer": 1, "tokenizer": 1, "events": 1, "contradictions": 1, "clock": 1, "data plane": 1} {
		if got := len(states(r, check)[doctor.OK]); got != n {
			t.Errorf("%s: %d ok, want %d: %v", check, got, n, states(r, check))
		}
	}
}

// TestRouterThatMayNotBeSteered: pairs that no probe could be sent to are neither good
// nor bad.
func TestRouterThatMayNotBeSteered(t *testing.T) {
	r := examine(t, loopback.Options{Fleet: "2p2d:profile=instant", Configure: func(c *settings.Config) {
		c.Routing.AllowHeaders, c.Routing.Threshold.Tokens = false, 0
	}}, false)
	got := states(r, "transfer")
	if r.Failed > 0 || r.Warned > 0 || len(got[doctor.Skip]) == 0 || !strings.Contains(strings.Join(got[doctor.Skip], " "), "steer") {
		var b bytes.Buffer
		_ = doctor.Text(&b, r)
		t.Error(b.String())
	}
}

// TestDrainedWorker: a drain is no failure, and its finding names what ends it.
func TestDrainedWorker(t *testing.T) {
	r := examineAfter(t, loopback.Options{Fleet: "1p2d:profile=instant"}, false, func(ctx context.Context, g *loopback.Rig) {
		if _, err := g.Admin.DrainWorker(ctx, "decode-1"); err != nil {
			t.Fatal(err)
		}
	})
	if got := states(r, "engine")[doctor.Warn]; r.Failed > 0 || len(got) != 1 || !strings.HasPrefix(got[0], "decode-1: draining") || !strings.Contains(r.Verdict, "decode-1 is draining") {
		t.Errorf("%q %+v", r.Verdict, r.Findings)
	}
}

// TestEngineThatHasJustDied: its death is the one finding, also where the router has not seen
// it yet when the examination begins.
func TestEngineThatHasJustDied(t *testing.T) {
	r := examineAfter(t, loopback.Options{Fleet: "1p2d:profile=instant", Configure: func(c *settings.Config) { c.Health.Interval = time.Second }}, true, func(_ context.Context, g *loopback.Rig) {
		g.Sim.Named("decode-1").Kill()
	})
	if got := states(r, "engine")[doctor.Fail]; len(got) != 1 || !strings.HasPrefix(got[0], "decode-1: down") || !strings.HasPrefix(r.Verdict, "decode-1 is down") || r.Failed > 1 {
		t.Errorf("%q %+v", r.Verdict, r.Findings)
	}
}

// TestLockedDataPlane: without an API key where one is required there is one finding, which
// names the flag, and no probe.
func TestLockedDataPlane(t *testing.T) {
	g := loopbacktest.Start(t, loopback.Options{Fleet: "1p1d:profile=instant"})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := g.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	locked := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }))
	defer locked.Close()
	for key, want := range map[string]string{"": "requires an API key", "wrong": "does not accept the API key"} {
		tgt, err := fleet.New(ctx, g.Admin, fleet.Options{URL: locked.URL, APIKey: key})
		if err != nil {
			t.Fatal(err)
		}
		r, err := doctor.Run(ctx, doctor.Options{Target: tgt})
		tgt.Close()
		if err != nil {
			t.Fatal(err)
		}
		if failed := states(r, "data plane")[doctor.Fail]; r.Failed != 1 || len(failed) != 1 || !strings.Contains(r.Verdict, want) || len(states(r, "probes")[doctor.Skip]) != 1 {
			t.Errorf("%q %+v", r.Verdict, r.Findings)
		}
	}
}

func TestBlockSizesContradict(t *testing.T) {
	r := examine(t, loopback.Options{Fleet: "1p:block=16,profile=instant+1d:block=32,profile=instant"}, true)
	if got := states(r, "block size")[doctor.Fail]; len(got) != 1 || !strings.Contains(got[0], "block size") {
		t.Errorf("block sizes 16 and 32 pass: %v", r.Findings)
	}
}

func TestNoEvents(t *testing.T) {
	r := examine(t, loopback.Options{Fleet: "1a:events=off,profile=instant"}, true)
	if len(states(r, "events")[doctor.Warn]) != 1 {
		t.Errorf("%v", r.Findings)
	}
}

// Without a connector on the engines nothing moves; the decode engine's own
// counters say so.
func TestSilentRecomputeIsFound(t *testing.T) {
	r := examine(t, loopback.Options{
		Fleet: "1p1d:connector=none,profile=instant",
		Specs: func(s []workers.Spec) []workers.Spec {
			for i := range s {
				s[i].Connector = workers.ConnectorSharedStorage
			}
			return s
		},
	}, false)
	if got := states(r, "transfer"); len(got[doctor.Fail]) != 1 {
		t.Errorf("%v", got)
	}
}

func TestUnreachableEngine(t *testing.T) {
	u, err := workers.ParseSpec(workers.Decode, "http://127.0.0.1:1,name=ghost")
	if err != nil {
		t.Fatal(err)
	}
	r := examine(t, loopback.Options{Fleet: "1a:profile=instant", Specs: func(s []workers.Spec) []workers.Spec { return append(s, u) }}, true)
	if r.Failed != 1 || len(states(r, "engine")[doctor.Fail]) != 1 || !strings.HasPrefix(r.Verdict, "ghost is down: ") {
		t.Errorf("%q %v", r.Verdict, r.Findings)
	}
}

// TestTwoWorkersAreProbed: both, where clients may steer; where they may not,
// whichever the router chooses, and what was left out is named.
func TestTwoWorkersAreProbed(t *testing.T) {
	for steer, least := range map[bool]int{true: 2, false: 1} {
		r := examine(t, loopback.Options{Fleet: "2a:profile=instant", Configure: func(c *settings.Config) { c.Routing.AllowHeaders = steer }}, false)
		got := states(r, "cache probe")
		probed, skipped := len(got[doctor.OK]), len(got[doctor.Skip])
		if probed < least || probed+skipped != 2 || len(got) > 2 {
			t.Errorf("steer %v: %d probed and %d skipped of 2: %v", steer, probed, skipped, got)
		}
	}
}

// TestPredictionThatDoesNotFit: an engine that keeps the last block of a hit finds one
// more than the router expects, to which it was stated that the block is dropped.
func TestPredictionThatDoesNotFit(t *testing.T) {
	r := examine(t, loopback.Options{Fleet: "1a:profile=instant", Specs: func(s []workers.Spec) []workers.Spec {
		s[0].LastBlock = workers.LastBlockDropped
		return s
	}}, false)
	for _, f := range r.Findings {
		if f.Check == "cache probe" && f.State == doctor.Warn && strings.Contains(f.Text, "tokens cached, the router expected") && strings.Contains(f.Advice, "kv_last_block=kept") {
			return
		}
	}
	t.Errorf("%+v", r.Findings)
}

// TestPrefillWithoutConnector: whether the router gives up or falls back to
// local prefill, the finding names the engine and what it lacks.
func TestPrefillWithoutConnector(t *testing.T) {
	for _, policy := range []string{"error", "local"} {
		r := examine(t, loopback.Options{
			Fleet:     "1p:connector=none,profile=instant+1d:profile=instant",
			Configure: func(c *settings.Config) { c.Routing.MissingParams = policy },
			Specs: func(s []workers.Spec) []workers.Spec {
				for i := range s {
					s[i].Connector = workers.ConnectorNIXL
				}
				return s
			},
		}, false)
		failsOne(t, r, "--kv-transfer-config")
	}
}

// failsOne wants one finding of transfers: that prefill-0 fails, and not that the router cannot
// be steered, with such advice.
func failsOne(t *testing.T, r *doctor.Report, advice string) {
	t.Helper()
	found := slices.DeleteFunc(slices.Clone(r.Findings), func(f doctor.Finding) bool { return f.Check != "transfer" })
	if len(found) != 1 || found[0].State != doctor.Fail {
		t.Fatalf("want one failure: %+v", found)
	}
	if text := found[0].Text; strings.Contains(text, "steer") || !strings.Contains(text, "prefill-0") {
		t.Errorf("text %q", text)
	}
	if got := found[0].Advice; !strings.Contains(got, advice) {
		t.Errorf("advice %q lacks %q", got, advice)
	}
}

// TestBadParameters: parameters that do not fit are reported as that, for the engine
// that gave them, and not as a router that cannot be steered.
func TestBadParameters(t *testing.T) {
	r := examine(t, loopback.Options{
		Fleet: "1p1d:profile=instant",
		Specs: func(s []workers.Spec) []workers.Spec {
			for i := range s {
				if s[i].Role == workers.Prefill {
					s[i].URL = wrongLength(t, s[i].URL)
				}
			}
			return s
		},
	}, false)
	failsOne(t, r, "block size")
}

// wrongLength is an engine whose transfer parameters are of another prompt.
func wrongLength(t *testing.T, engine *url.URL) *url.URL {
	proxy := httputil.NewSingleHostReverseProxy(engine)
	proxy.ModifyResponse = func(resp *http.Response) error {
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		var v map[string]any
		_ = json.Unmarshal(body, &v) // what is no JSON goes on as it is
		if params, ok := v["kv_transfer_params"].(map[string]any); ok {
			params["remote_num_tokens"] = 7
			body, err = json.Marshal(v)
			resp.ContentLength = int64(len(body))
			resp.Header.Del("Content-Length")
		}
		resp.Body = io.NopCloser(bytes.NewReader(body))
		return err
	}
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u
}
