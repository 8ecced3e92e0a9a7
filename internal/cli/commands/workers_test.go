package commands

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/rig/hostile"
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
