package report

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/experiment"
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
