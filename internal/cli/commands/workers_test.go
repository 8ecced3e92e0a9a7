package commands

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/rig/hostile"
	"github.com/dynctl/dynctl/internal/rig/soak"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

func TestListWorkers(t *testing.T) {
	three, half := 3, 0.5
	l := &admin.WorkerList{Schema: admin.Schema, Workers: []admin.Worker{
		{Name: "d0", Role: "decode", Engine: "vllm", Health: "healthy", Models: []string{"a", "b|c"}, URL: "http://h:1", BlockSizeTokens: 16, Revision: "pair/5d1c", Slice: "1", From: map[string]string{"role": "label a=b", "dp": "default"}, Ranks: []admin.Rank{
			{Label: "d0/dp0", ActiveRequests: 2, PrefillTokens: 30, DecodeBlocks: 4, IndexBlocks: 5, Moves: &admin.Moves{Away: 3, Onto: 12, Waiting: new(7)}, Feed: admin.Feed{State: "live", Replay: new("")}, TTFT: new(210.), ITL: new(14.1), OutputRate: new(320.), Slow: &admin.Slow{Figure: "ITL", Times: 9.2}, Engine: &admin.EngineLoad{Running: &three, KVUsage: &half}},
			{Label: "d0/dp1", Feed: admin.Feed{State: "none"}},
		}},
		{Name: "p0", Role: "prefill", Draining: true, Ranks: []admin.Rank{{Label: "p0/dp0", Feed: admin.Feed{State: "gap", Replay: new("tcp://p0:5657")}}, {Label: "p0/dp1", Feed: admin.Feed{State: "gap"}}}},
	}}
	out := func(format string) string {
		t.Helper()
		var b strings.Builder
		if err := listWorkers(&b, format, l); err != nil {
			t.Fatalf("%s: %v", format, err)
		}
		return b.String()
	}
	got := clitest.Squeeze(out("markdown"))
	for _, want := range []string{
		"| d0/dp0 | decode | vllm | healthy | 2 | 30 | 4 | 5 | live, no replay | 210.0 ms | 14.1 ms | 320 | ITL 9.2 times its peers' |\n", "| gap |", "| none |", "| gap, replay unknown |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("markdown lacks %q:\n%s", want, got)
		}
	}
	if n := strings.Count(got, "\n"); n != 6 {
		t.Errorf("markdown has %d lines, want 6:\n%s", n, got)
	}
	if got := out("table"); !strings.Contains(got, "RANK    ROLE") || !strings.Contains(got, "draining") || strings.Contains(got, "URL") {
		t.Errorf("table\n%s", got)
	}
	if got := out("wide"); !strings.Contains(got, "URL") || !strings.Contains(got, "50%") {
		t.Errorf("wide\n%s", got)
	}
	rows, err := csv.NewReader(strings.NewReader(out("csv"))).ReadAll()
	if err != nil || len(rows) != 5 || len(rows[0]) != 26 {
		t.Fatalf("csv: want 5 rows of 26 cells, not %q, %v", rows, err)
	}
	cells := func(row int, columns ...int) (list []string) {
		for _, i := range columns {
			list = append(list, fmt.Sprintf("%s: %s", rows[0][i], rows[row][i]))
		}
		return list
	}
	first := []string{"RUNNING: 3", "MODELS: a,b|c", "REVISION: pair/5d1c slice 1", "FROM: dp: default; role: label a=b", "MOVED AWAY: 3", "MOVED HERE: 12", "WAIT TO MOVE: 7"}
	if d := cmp.Diff(first, cells(1, 9, 14, 17, 18, 19, 20, 21)); d != "" {
		t.Errorf("csv of the first rank (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"RUNNING: -", "MOVED AWAY: -"}, cells(2, 9, 19)); d != "" {
		t.Errorf("csv of the second rank (-want +got):\n%s", d)
	}
	lines := strings.Split(strings.TrimSpace(out("jsonl")), "\n")
	var w admin.Worker
	if len(lines) != 2 || json.Unmarshal([]byte(lines[1]), &w) != nil || w.Name != "p0" {
		t.Errorf("jsonl %q", lines)
	}
	var whole map[string]any
	if err := yaml.Unmarshal([]byte(out("yaml")), &whole); err != nil || whole["schema"] != admin.Schema {
		t.Errorf("yaml %v, %v", whole, err)
	}
	l = &admin.WorkerList{}
	if got := out("table"); !strings.Contains(got, "(no workers)") {
		t.Errorf("no workers:\n%s", got)
	}
	if got := out("csv"); strings.Count(got, "\n") != 1 {
		t.Errorf("no workers as csv:\n%s", got)
	}
}

// TestListIsPrintable: engines report models and versions, pods carry annotations.
func TestListIsPrintable(t *testing.T) {
	var l admin.WorkerList
	hostile.Fill(&l)
	for _, format := range []string{"table", "wide", "csv", "markdown", "json", "jsonl", "yaml"} {
		var b strings.Builder
		if err := listWorkers(&b, format, &l); err != nil {
			t.Fatal(err)
		}
		hostile.Check(t, "workers list -o "+format, b.String())
	}
}

// TestCallWorkers: one command has all engines, or those named, do something, and shows what each
// one answered; decisions follow when the command has ended.
func TestCallWorkers(t *testing.T) {
	g := readyRouter(t, loopback.Options{Fleet: "2a:profile=instant"})
	prompt := make([]int, 640)
	cached := func() string {
		t.Helper()
		status, header, answer, err := g.Post(t.Context(), "/v1/completions", map[string]any{"model": "sim", "prompt": prompt, "max_tokens": 2})
		if err != nil || status != 200 {
			t.Fatalf("%d %s: %v", status, answer, err)
		}
		return header.Get("X-Dynctl-Cached-Tokens")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cached()
	if err := soak.IndexSynced(ctx, g); err != nil {
		t.Fatal(err)
	}
	if n := cached(); n != "624" {
		t.Errorf("%s tokens are cached before", n)
	}
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"reset_prefix_cache", cli.ExitOK, "aggregated-0 true 200, aggregated-1 true 200"},
		{"reset_prefix_cache aggregated-1", cli.ExitOK, "aggregated-1 true 200"},
		{"load_lora_adapter --adapter a --path /a", cli.ExitRuntime, "aggregated-0 false 404, aggregated-1 false 404"},
	} {
		code, out, stderr := typed(append(strings.Fields("workers call "+c.args), "--router", g.AdminURL, "-o", "json")...)
		var a admin.ControlAnswer
		if err := json.Unmarshal([]byte(out), &a); err != nil || code != c.code {
			t.Errorf("%s: exit code %d, %v\n%s%s", c.args, code, err, out, stderr)
		}
		var got []string
		for _, w := range a.Workers {
			got = append(got, fmt.Sprint(w.Worker, " ", w.OK, " ", w.Status))
		}
		if d := cmp.Diff(c.want, strings.Join(got, ", ")); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.args, d)
		}
		if n := cached(); len(a.Workers) == 2 && a.Failed == 0 && n != "0" {
			t.Errorf("%s: %s tokens are cached after it", c.args, n)
		}
	}
}
