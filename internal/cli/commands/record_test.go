package commands

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// recorded runs a fleet and records what do asks of it, in parts of so many bytes; 0
// is one part. It returns their paths.
func recorded(t *testing.T, fleet string, configure func(*settings.Config), most int64, do func(g *loopback.Rig)) []string {
	t.Helper()
	if testing.Short() {
		t.Skip("a router with engines")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tap := newTap("serve", "")
	flags := &recordFlags{Path: filepath.Join(t.TempDir(), "t.jsonl")}
	flags.file.MaxBytes = most
	file, err := startRecording(tap, flags, cli.NewLogger(settings.Log{Level: "error", Format: "text"}, io.Discard))
	if err != nil {
		t.Fatal(err)
	}
	g, err := loopback.Start(ctx, loopback.Options{Fleet: fleet, Observer: recordingObserver(tap), Configure: configure})
	if err != nil {
		t.Fatal(errors.Join(err, file.Stop()))
	}
	if err := g.Ready(ctx); err != nil {
		t.Error(err)
	} else {
		do(g)
	}
	if err := errors.Join(g.Close(ctx), file.Stop()); err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob(filepath.Join(filepath.Dir(flags.Path), "t*.jsonl"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%v %v", paths, err)
	}
	slices.SortFunc(paths, func(a, b string) int {
		return strings.Compare(strings.TrimSuffix(a, ".jsonl"), strings.TrimSuffix(b, ".jsonl"))
	})
	return paths
}

// asked sends a request and returns the answer's body and its decision's id.
func asked(t *testing.T, g *loopback.Rig, path string, body map[string]any, headers ...string) (answer []byte, decision string) {
	t.Helper()
	body["model"] = orSim(body["model"])
	status, header, answer, err := g.Post(t.Context(), path, body, headers...)
	if err != nil || status != http.StatusOK {
		t.Fatalf("%s: %d %s %v", path, status, answer, err)
	}
	return answer, header.Get("X-Dynctl-Decision")
}

// metricsOf is the router's page of metrics.
func metricsOf(t *testing.T, g *loopback.Rig) string {
	t.Helper()
	resp, err := g.Client.Get(g.AdminURL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}

func orSim(model any) any {
	if model == nil {
		return "sim"
	}
	return model
}

// verified replays files and returns the report.
func verified(t *testing.T, paths ...string) *replay.Report {
	t.Helper()
	code, out, errs := typed(append([]string{"replay", "--verify", "--min-match", "0%", "-o", "json"}, paths...)...)
	var rep replay.Report
	if err := json.Unmarshal([]byte(out), &rep); err != nil || code != cli.ExitOK {
		t.Fatalf("exit %d: %s%s %v", code, out, errs, err)
	}
	return &rep
}

// proven fails unless every decision of a recording is proven, before and after a
// conversion.
func proven(t *testing.T, path string) {
	t.Helper()
	again := filepath.Join(t.TempDir(), "again.jsonl")
	if code, _, errs := typed("replay", "convert", path, "--to", "dynctl", "-w", again); code != cli.ExitOK {
		t.Fatalf("exit %d: %s", code, errs)
	}
	for _, p := range []string{path, again} {
		v := verified(t, p).Verify
		if v.Decisions == 0 || v.Proven != v.Decisions || v.Unverifiable != 0 || v.InputsDiffer != 0 {
			first, _ := json.MarshalIndent([]*replay.Divergence{v.First, v.FirstInput}, "", " ")
			t.Errorf("%s: %d of %d decisions proven, %d unverifiable (%s), %d of other inputs: %s", filepath.Base(p), v.Proven, v.Decisions, v.Unverifiable, v.FirstLack, v.InputsDiffer, first)
		}
	}
}

// decisions are those of a recording.
func decisions(t *testing.T, path string) (all []*trace.Decision) {
	t.Helper()
	r, err := trace.Open(path, nil, trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for {
		var rec trace.Record
		if err := r.Next(&rec); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if rec.Decision != nil {
			all = append(all, rec.Decision)
		}
	}
}

// TestRecordingsOfEveryKind: decisions of all kinds are reproduced, by the reason that
// they had.
func TestRecordingsOfEveryKind(t *testing.T) {
	words := strings.Repeat("a good many words of context ", 30)
	type object = map[string]any
	ids := func(seed, n int) (list []int) {
		for i := range n {
			list = append(list, 1000+seed*500+i)
		}
		return list
	}
	completion := func(seed, n int) object { return object{"prompt": ids(seed, n), "max_tokens": 2} }
	for _, c := range []struct {
		name, fleet string
		configure   func(*settings.Config)
		do          func(t *testing.T, g *loopback.Rig)
		reasons     []string // in the order of the decisions
	}{
		{
			name: "aggregated SGLang", fleet: "2a:profile=instant,engine=sglang",
			do: func(t *testing.T, g *loopback.Rig) {
				for i := range 6 {
					asked(t, g, "/v1/completions", completion(i%3, 200))
				}
			},
			reasons: slices.Repeat([]string{"no_connector"}, 6),
		},
		{
			name: "SGLang pairs beside an aggregated one", fleet: "1p:profile=instant,engine=sglang,dp=2+1d:profile=instant,engine=sglang+1a:profile=instant,engine=sglang",
			configure: func(c *settings.Config) { c.Routing.Threshold.Tokens = 100 },
			do: func(t *testing.T, g *loopback.Rig) {
				for i := range 12 {
					asked(t, g, "/v1/completions", completion(i%4, 40+60*(i%5)))
				}
			},
		},
		{
			name: "Messages and Responses over NIXL", fleet: "2p1d:profile=instant",
			configure: func(c *settings.Config) { c.Tokens.Tokenizer, c.Routing.AllowHeaders = "engine", true },
			do: func(t *testing.T, g *loopback.Rig) {
				asked(t, g, "/v1/messages", object{"max_tokens": 4, "messages": []object{{"role": "user", "content": words}}})
				first, _ := asked(t, g, "/v1/responses", object{"max_output_tokens": 4, "input": words})
				asked(t, g, "/v1/responses", object{"max_output_tokens": 4, "input": words, "previous_response_id": rawjson.Value(first).Get("id").String()})
				asked(t, g, "/v1/responses", object{"max_output_tokens": 4, "input": words, "tools": []object{{"type": "code_interpreter", "container": object{"type": "auto"}}}})
				asked(t, g, "/v1/chat/completions", object{"max_tokens": 4, "messages": []object{{"role": "user", "content": words}}})
				asked(t, g, "/v1/chat/completions", object{"max_tokens": 4, "messages": []object{{"role": "user", "content": words}}}, "X-Dynctl-Path", "local")
			},
			reasons: []string{"always_remote", "always_remote", "previous_response", "server_tools", "always_remote", "forced_local"},
		},
		{
			name: "a threshold that is auto", fleet: "1p2d:profile=cpu",
			configure: func(c *settings.Config) {
				c.Routing.Threshold = decide.Threshold{Tokens: 100, Auto: true}
			},
			do: func(t *testing.T, g *loopback.Rig) {
				for i := range 40 {
					body := completion(i, 60+40*(i%5))
					body["stream"] = true
					_, id := asked(t, g, "/v1/completions", body)
					r, err := g.Admin.Decision(t.Context(), id)
					if err != nil {
						t.Fatal(err)
					}
					reason, p := rawjson.Value(r).Get("reason").String(), rawjson.Value(r).Get("predicted")
					byCosts := strings.HasSuffix(reason, "_costs_less")
					for _, figure := range []string{"cost_revision", "local_cost_ms", "remote_cost_ms"} {
						if v := p.Get(figure).String(); byCosts != (v != "" && v != "0") {
							t.Errorf("%s: the receipt has %s", reason, p)
						}
					}
					if unknown := strings.Contains(rawjson.Value(r).Get("reason_text").String(), "costs are not known yet"); unknown == byCosts {
						t.Errorf("request %d: %s, costs unknown: %v", i, reason, unknown)
					}
					if i < 10 && byCosts || i == 39 && !byCosts {
						t.Errorf("request %d: %s", i, reason)
					}
				}
				list, err := g.Admin.Events(t.Context(), 0, 100, 0)
				if err != nil || !slices.ContainsFunc(list.Events, func(e eventlog.Event) bool { return e.Kind == "costs_known" }) {
					t.Errorf("no event says that the costs are known: %v", err)
				}
				st, err := g.Admin.Status(t.Context())
				if err != nil || len(st.Costs) != 1 || len(st.Costs[0].Crossings) != 3 || st.Costs[0].Crossings[1].Running != 8 {
					t.Errorf("the status has no crossings by load: %+v, %v", st.Costs, err)
				}
				// Answers that go on for a while change what is known of the time between tokens.
				for i := range 12 {
					body := completion(40+i, 60+40*(i%5))
					body["stream"], body["max_tokens"] = true, 24
					asked(t, g, "/v1/completions", body)
				}
				if s := metricsOf(t, g); strings.Contains(s, "dynctl_routing_threshold_tokens") || !strings.Contains(s, `dynctl_routing_crossing_tokens{bound="high",model="sim",running="32"}`) {
					t.Errorf("the metrics do not show what is in force:\n%s", s)
				}
			},
		},
		{
			name: "LoRA adapters", fleet: "2a:profile=instant,loras=navy|sky", configure: func(c *settings.Config) { c.Routing.DecodePolicy = "session" },
			do: func(t *testing.T, g *loopback.Rig) {
				for i := range 6 {
					body := completion(1, 200)
					body["model"], body["user"] = []string{"sim", "navy", "sky"}[i%3], fmt.Sprint("u", i%2)
					asked(t, g, "/v1/completions", body)
				}
			},
		},
		{
			name: "prefills that fail", fleet: "2p2d:profile=instant",
			do: func(t *testing.T, g *loopback.Rig) {
				asked(t, g, "/v1/completions", completion(1, 200))
				for i := range 2 {
					if err := g.Sim.Engine(i).SetFaults(fault.Set{ErrorRate: 1, ErrorStatus: 500}); err != nil {
						t.Fatal(err)
					}
				}
				_, id := asked(t, g, "/v1/completions", completion(2, 200))
				if r, err := g.Admin.Decision(t.Context(), id); err != nil || rawjson.Value(r).Get("reason").String() != "prefill_failed" {
					t.Errorf("%s: %v", r, err)
				}
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := recorded(t, c.fleet, c.configure, 0, func(g *loopback.Rig) { c.do(t, g) })[0]
			proven(t, path)
			var reasons []string
			gaveUp := false
			for _, d := range decisions(t, path) {
				reasons = append(reasons, d.Reason)
				gaveUp = gaveUp || d.Input.GaveUp != ""
			}
			if c.reasons != nil && !slices.Equal(reasons, c.reasons) {
				t.Errorf("reasons %q, want %q", reasons, c.reasons)
			}
			if gaveUp != slices.Contains(reasons, "prefill_failed") || strings.Contains(c.name, "fail") && !gaveUp {
				t.Errorf("what was given up is recorded: %v; reasons %q", gaveUp, reasons)
			}
		})
	}
}

// TestEveryPartVerifies: each file of a recording has what its decisions refer to,
// through a reload.
func TestEveryPartVerifies(t *testing.T) {
	paths := recorded(t, "1p2d:profile=instant", func(c *settings.Config) { c.Routing.Threshold.Tokens = 100 }, 12<<10, func(g *loopback.Rig) {
		for i := range 30 {
			if i == 15 {
				if err := g.Router.Settings().Change(func(c settings.Config, origin map[string]string) (settings.Config, map[string]string, error) {
					c.Routing.Threshold.Tokens = 300
					return c, origin, nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			var list []int
			for k := range 60 + 50*(i%7) {
				list = append(list, 1000+500*(i%3)+k)
			}
			asked(t, g, "/v1/completions", map[string]any{"prompt": list, "max_tokens": 2})
		}
	})
	if len(paths) < 4 {
		t.Fatalf("%d parts", len(paths))
	}
	whole := verified(t, paths...).Verify
	if whole.Decisions != 30 || whole.Proven != 30 {
		t.Errorf("all parts: %+v, first %+v", whole, whole.First)
	}
	var sum uint64
	revisions := map[uint64]int{}
	for _, p := range paths {
		v := verified(t, p).Verify
		sum += v.Decisions
		if v.Unverifiable != 0 || v.Divergent() != 0 || v.InputsDiffer != 0 {
			t.Errorf("%s: %+v, first %+v", p, v, v.First)
		}
		for _, d := range decisions(t, p) {
			revisions[d.Revision] = d.Settings.Rule.Threshold
		}
	}
	if sum != 30 || len(revisions) != 2 {
		t.Errorf("%d decisions in the parts, revisions %v", sum, revisions)
	}
}
