package live

import (
	"math"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/plan"
)

func TestEstimate(t *testing.T) {
	line := timingOf(100, 1100, 20, 120, 5) // 10 ms and 0.1 ms for each token
	for _, c := range []struct {
		name  string
		t     timing
		cell  plan.Cell
		ranks int
		want  float64
	}{
		{"one at a time", line, plan.Cell{EffISL: 600, OSL: 10, Load: plan.Load{Concurrency: 1}, Requests: 8, Ramp: 2}, 1, 10*(0.070+0.05*1.02) + between},
		{"prefills wait for their one rank", line, plan.Cell{EffISL: 600, OSL: 10, Load: plan.Load{Concurrency: 4}, Requests: 8}, 1, 8*0.070 + 2*0.05*1.08 + between},
		{"two ranks", line, plan.Cell{EffISL: 600, OSL: 10, Load: plan.Load{Concurrency: 4}, Requests: 8}, 2, 4*0.070 + 2*0.05*1.08 + between},
		{"a rate is kept", line, plan.Cell{EffISL: 600, OSL: 10, Load: plan.Load{Rate: 4}, Requests: 8}, 1, 2 + between},
		{"noise has no slope", timingOf(100, 1100, 30, 20, 0), plan.Cell{EffISL: 9999, Load: plan.Load{Concurrency: 1}, Requests: 1}, 1, 0.020 + between},
		{"one length", timingOf(100, 100, 20, 20, 0), plan.Cell{EffISL: 100, Load: plan.Load{Concurrency: 1}, Requests: 1}, 1, 0.020 + between},
		{"steeper than a line from 0", timingOf(100, 200, 1, 100, 0), plan.Cell{EffISL: 200, Load: plan.Load{Concurrency: 1}, Requests: 1}, 1, 0.198 + between},
	} {
		if got := c.t.seconds(c.cell, c.ranks); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %v s, want %v", c.name, got, c.want)
		}
	}
}
