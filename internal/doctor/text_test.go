package doctor

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rig/hostile"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestEngineText: whatever is not reported is left out, with its comma.
func TestEngineText(t *testing.T) {
	fresh := admin.Rank{Engine: &admin.EngineLoad{Unused: true}}
	for bits := range 1 << 5 {
		w := admin.Worker{DP: 2}
		set := func(bit int, do func()) {
			if bits>>bit&1 == 1 {
				do()
			}
		}
		set(0, func() { w.Engine = "vllm" })
		set(1, func() { w.Version = "0.32.0" })
		set(2, func() { w.Role = "aggregated" })
		set(3, func() { w.BlockSizeTokens = 32 })
		set(4, func() { w.Ranks = []admin.Rank{fresh, fresh} })
		got := engineText(&w)
		if regexp.MustCompile(`^ | $|  | ,|, ?,|,$|block 0`).MatchString(got) {
			t.Errorf("%+v: %q has empty words", w, got)
		}
	}
	w := admin.Worker{Engine: "vllm", Role: "aggregated", DP: 2, BlockSizeTokens: 32, Ranks: []admin.Rank{fresh, fresh}}
	if got, want := engineText(&w), "vllm, aggregated, dp 2, block 32, idle (no load series yet, and its counters say that it has served nothing)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	w.Ranks[1].Engine = nil
	if got, want := engineText(&w), "vllm, aggregated, dp 2, block 32"; got != want {
		t.Errorf("with a rank that reports nothing: %q", got)
	}
}

// TestTextIsPrintable: engines report models and versions.
func TestTextIsPrintable(t *testing.T) {
	var r Report
	hostile.Fill(&r)
	m := r.Transfer // a matrix of one cell is not shown
	m.Prefill, m.Cells = append(m.Prefill, "p1"), append(m.Cells, m.Cells[0])
	var b strings.Builder
	if err := Text(&b, &r); err != nil {
		t.Fatal(err)
	}
	hostile.Check(t, "doctor", b.String())
}

// TestTextWritesAFindingOnce: what is found of several subjects is one finding with all of
// them, and of many that are well one is named.
func TestTextWritesAFindingOnce(t *testing.T) {
	r := &Report{Verdict: "v"}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		r.Findings = append(r.Findings, Finding{Check: "reachable", Subject: name, State: OK, Text: "vllm"})
	}
	for _, name := range []string{"f", "g", "h"} {
		r.Findings = append(r.Findings, Finding{Check: "block size", Subject: name, State: Warn, Text: "blocks of 16", Advice: "64"})
	}
	var b strings.Builder
	if err := Text(&b, r); err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(b.String()) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	want := []string{"v", "", "STATE CHECK SUBJECT FINDING", "OK reachable a vllm", "and 4 more", "WARN block size f blocks of 16", "g -> 64", "h", "8 checks, 0 failed, 0 warnings"}
	if !slices.Equal(lines, want) {
		t.Errorf("%q", lines)
	}
}
