package report

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/bench/sweep"
)

// An interval that goes on beyond the axis, or has no end, must not look as if
// it ended there.
func TestForestShowsWhatGoesOn(t *testing.T) {
	g := &experiment.GroupResult{Points: []experiment.PointResult{
		{EffISL: 1, Diff: experiment.Bounds{Value: new(0.1), Low: new(-0.9), High: new(0.2)}},
		{EffISL: 2, Diff: experiment.Bounds{Value: new(0.3), Low: new(0.2), High: new(0.9)}},
		{EffISL: 3, Diff: experiment.Bounds{Value: new(0.1)}},
		{EffISL: 4, Diff: experiment.Bounds{Value: new(0.0), Low: new(-0.1), High: new(0.1)}},
	}}
	b := &strings.Builder{}
	forest(b, g, 80)
	rows := strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
	rows = rows[len(rows)-4:]
	for i, want := range []struct{ has, not string }{{"<]", ">["}, {"[>", "<]"}, {"<>", "[]"}, {"[]", "<>"}} {
		for _, c := range want.has {
			if !strings.ContainsRune(rows[i], c) {
				t.Errorf("%q lacks %q", rows[i], c)
			}
		}
		if strings.ContainsAny(rows[i], want.not) {
			t.Errorf("%q has one of %q", rows[i], want.not)
		}
	}
}

// TestPicturesHaveAScale: values that lie close together can be read from the axis.
func TestPicturesHaveAScale(t *testing.T) {
	for _, r := range [][2]float64{{22, 45}, {31, 33}, {5, 9000}} {
		y := scale{r[0], r[1], 285, 30, true}
		at := y.decades()
		if len(at) < 3 {
			t.Errorf("%v has %v", r, at)
		}
		for _, v := range at {
			if p := y.at(v); p < 29.9 || p > 285.1 {
				t.Errorf("%v of %v is at %v", v, r, p)
			}
		}
	}
}

// TestSweepHTML: the report of a sweep has its figures, its pictures and what the load
// generator did.
func TestSweepHTML(t *testing.T) {
	i := func(v float64) stats.Interval { return stats.Interval{Value: v, N: 2} }
	r := &sweep.Result{
		Name: "s<script>", Workload: "isl 256, osl 4", Stopped: "the climb ended at rate 8/s: x",
		Rows: []sweep.Row{
			{Load: plan.Load{Rate: 4}, Requests: 40, TTFTP50: i(20), TTFTP99: i(40), Tokens: i(16)},
			{Load: plan.Load{Rate: 8}, Requests: 40, TTFTP50: i(90), TTFTP99: i(190), Tokens: i(20), Starved: true},
		},
		Client: experiment.Gate{Name: "client", Passed: new(false), Text: "the load generator was starved: y", Next: "do z"},
	}
	var b strings.Builder
	if err := SweepHTML(&b, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Not valid.", "isl 256, osl 4", "the climb ended at rate 8/s: x", "the load generator was starved: y", "do z", "rate 8/s (starved)", "s&lt;script&gt;"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	if n := strings.Count(b.String(), "<svg"); n != 2 {
		t.Errorf("%d pictures", n)
	}
}
