package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestReport: the report has a row for each cell, both verdicts in words, and the figures
// that a cell is judged by.
func TestReport(t *testing.T) {
	columns := []string{subject, "a"}
	for _, tt := range []struct {
		name   string
		change func(cell, seed int, column string, f *figures)
		more   []string // why there is no judgement
		want   []string
	}{
		{name: "passed", want: []string{
			"| chats    | 4p12d padded | 0.5 (×2) | 9.00/s, 90.0 %, 1,000 / 4,000 |",
			"| a    | 1.000 (1.000 to 1.000) |", "- held: no other policy has a better mean.",
			"- held: kv is worse than the best policy in 0 of 6 cells; 0 may be.", "judgement: passed\n",
		}},
		{name: "missed", change: func(_, _ int, column string, f *figures) {
			if column == subject {
				f.Good, f.P99 = 0.45, 8000
			}
		}, want: []string{
			"- missed: a has the better mean of good/s.", "- missed: a has the better mean of E2E p99.", "0.500 (0.500 to 0.500)",
			"- missed: kv is worse than the best policy in 6 of 6 cells; 0 may be.", "| worse ", "judgement: missed\n",
		}},
		{name: "by tokens", change: func(_, _ int, _ string, f *figures) { f.Good = 0.2 }, want: []string{"3,000 tokens/s, 20.0 %"}},
		{name: "not judged", more: []string{"a part only"}, want: []string{"not judged: a part only\n"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cells := made(6, tt.change)
			for _, c := range cells {
				c.Workload, c.Fleet, c.Padded, c.Load, c.Speed = "chats", "4p12d", true, 0.5, 2
			}
			j := judgement{Judged: columns, Cells: cells, Judging: judge(cells, columns), NotJudged: tt.more}
			var out bytes.Buffer
			if err := j.write(&out); err != nil {
				t.Fatal(err)
			}
			for _, want := range tt.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("no %q in\n%s", want, out.String())
				}
			}
			if len(tt.more) > 0 && strings.Contains(out.String(), "judgement:") {
				t.Errorf("a judgement in\n%s", out.String())
			}
		})
	}
}
