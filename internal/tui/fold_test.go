package tui

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestFolds: h folds the worker under the cursor and l unfolds it, v does all; the
// cursor stays with the worker, a filter says how many ranks it leaves, and a rank that
// is looked for is unfolded.
func TestFolds(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2}
	a := newStage(t, g, 120, 40, 20, plainOptions)
	rank := regexp.MustCompile(`^▶?\s*((?:decode|prefill)-(?:\S*/\S*|\S* +\(\S*))\s`)
	rows := func() (out []string) {
		a.dirty = true
		for l := range strings.Lines(screen(a)) {
			if row := rank.FindStringSubmatch(l); row != nil {
				out = append(out, row[1])
			}
		}
		return out
	}
	press(a, "2")
	a.command("sort rank")
	if got := rows(); len(got) != 12 {
		t.Fatalf("rows %q", got)
	}
	press(a, "j", "j", "j", "h") // decode-1/dp1
	if got, want := rows()[:4], []string{"decode-0/dp0", "decode-0/dp1", "decode-1 (2)", "decode-2/dp0"}; !slices.Equal(got, want) {
		t.Errorf("folded: %q, want %q", got, want)
	}
	if got := a.workerHere(); got != "decode-1" {
		t.Errorf("the cursor is on %q", got)
	}
	press(a, "j", "v")
	if got, want := rows(), []string{"decode-0 (2)", "decode-1 (2)", "decode-2 (2)", "decode-3 (2)", "prefill-0 (2)", "prefill-1 (2)"}; !slices.Equal(got, want) {
		t.Errorf("all folded: %q", got)
	}
	if got := a.workerHere(); got != "decode-2" {
		t.Errorf("the cursor is on %q", got)
	}
	sendSample(a, g, 21)
	if len(rows()) != 6 || a.workerHere() != "decode-2" {
		t.Errorf("after another answer: %q, cursor on %q", rows(), a.workerHere())
	}
	a.command("filter dp1")
	if got := rows(); len(got) != 6 || !strings.Contains(screen(a), "decode-0 (1 of 2)") {
		t.Errorf("filtered: %q", got)
	}
	a.command("filter")
	press(a, "l")
	if got := rows(); len(got) != 7 || got[2] != "decode-2/dp0" || got[3] != "decode-2/dp1" {
		t.Errorf("one unfolded: %q", got)
	}
	if cmd := a.pages[1].Focus(a.page(), "prefill-1/dp1"); cmd != nil || len(rows()) != 8 || a.workerHere() != "prefill-1" {
		t.Errorf("looked for: %q, cursor on %q", rows(), a.workerHere())
	}
	press(a, "v")
	if got := rows(); len(got) != 6 {
		t.Errorf("all folded again: %q", got)
	}
	press(a, "v")
	if got := rows(); len(got) != 12 {
		t.Errorf("none folded: %q", got)
	}
}
