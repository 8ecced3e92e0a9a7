package experiment

import (
	"strings"
	"testing"
)

// TestCacheGateSaysWhatItFound: a gate that fails says by how much hits were off, in
// how many cells, and its limit, and promises no bound.
func TestCacheGateSaysWhatItFound(t *testing.T) {
	hit := func(share float64) CellResult {
		return CellResult{Measure: &Measure{Requests: 10, HitShare: &share, ExpectedHit: .5, ExactISL: 10, ExactOSL: 10, PathOK: 10, InFlight: 1}}
	}
	r := &Runner{cells: []CellResult{hit(.5), hit(.996), hit(.1)}}
	gates, _ := r.gates(&Result{})
	for _, g := range gates {
		if g.Name != "cache" {
			continue
		}
		if g.Passed == nil || *g.Passed || len(g.Cells) != 2 {
			t.Errorf("it passed, or %d cells are not 2", len(g.Cells))
		}
		if !strings.Contains(g.Text, "by up to 49.6%, in 2 cells by more than the limit of ") || strings.Contains(g.Text, "at most") {
			t.Error(g.Text)
		}
		return
	}
	t.Errorf("no gate of the cache in %+v", gates)
}
