package experiment

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/plan"
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

// TestHeadlineSaysWhatFailed: the sentence of a run that is not valid names the limit that
// was broken, and no other, and what to do.
func TestHeadlineSaysWhatFailed(t *testing.T) {
	cell := func(load plan.Load, change func(*Measure)) []CellResult {
		m := &Measure{Requests: 100, Seconds: 10, Achieved: 1, InFlight: 1, ClientStopped: new(0.0), ClientWake: new(0.0), ClientRead: new(0.0), ExactISL: 100, ExactOSL: 100, PathOK: 100}
		change(m)
		return []CellResult{{Cell: plan.Cell{ID: "c", Arm: plan.Local, EffISL: 256, Load: load}, Measure: m}}
	}
	closed, open := plan.Load{Concurrency: 4}, plan.Load{Rate: 10}
	for _, c := range []struct {
		name  string
		bound int
		cells []CellResult
		want  string
		more  string
	}{
		{
			"stood still", 0, cell(closed, func(m *Measure) { m.ClientStopped, m.ClientWake = new(0.0485), new(41.8) }),
			"not valid: the load generator was starved: it stood still for 4.85% of the time (limit 1%), for up to 41.8 ms. What to do: " + remedies["client"], "",
		},
		{
			"late", 0, cell(open, func(m *Measure) { m.Late = 3 }),
			"not valid: the load generator was starved: it sent 3.00% of requests more than 10 ms late (limit 1%). What to do: " + remedies["client"], "",
		},
		{
			"held back by its bound", 8, cell(open, func(m *Measure) { m.Late = 3 }),
			"not valid: the target is slow, or --max-in-flight 8 is too low, so the load generator had to wait: it sent 3.00% of requests more than 10 ms late (limit 1%). What to do: lower --rate, or raise --max-in-flight", "",
		},
		{
			"a slow target", 0, cell(open, func(m *Measure) { m.Growth = 2 }),
			"not valid: the target is slow: requests in flight grew 2.00 times from the middle to the end of a cell (limit 1.5). What to do: " + remedies["saturation"], "",
		},
		{
			"two gates", 0, cell(closed, func(m *Measure) { m.Failed, m.PathOK = 5, 90 }),
			"not valid: errors 4.76% (5 of 105, limit 0.1%). What to do: " + remedies["errors"], " (gates that also failed: 1, see below)",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			res := Review(&Result{
				Spec:  plan.Spec{ISL: []int{256}, Loads: []plan.Load{c.cells[0].Cell.Load}, Cached: []float64{0}, Repeats: 1, Cap: c.bound, Level: 0.95, Objective: "ttft"},
				Cells: c.cells, Target: &fleet.Facts{Block: 16},
			})
			if want := c.want + c.more; res.Sentence != want {
				t.Errorf("%q\nwant %q", res.Sentence, want)
			}
		})
	}
}

// TestEveryGateHasARemedy: a gate that fails says what to do.
func TestEveryGateHasARemedy(t *testing.T) {
	for name := range remedies {
		if g := judged(name, false, nil, "x"); g.Next == "" {
			t.Errorf("%s has none", name)
		}
		if g := judged(name, true, nil, "x"); g.Next != "" {
			t.Errorf("%s passed and says %q", name, g.Next)
		}
	}
}
