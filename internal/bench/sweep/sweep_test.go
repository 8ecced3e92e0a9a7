package sweep

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/rig/hostile"
)

func measure(rate, ttft float64) *experiment.Measure {
	return &experiment.Measure{Requests: 10, Good: 9, RequestsPerSecond: rate, GoodPerSecond: rate * 0.9, Achieved: 1, TTFT: loadgen.Dist{N: 10, P50: ttft, Max: 2 * ttft}, TTFTIntended: loadgen.Dist{N: 10, P50: ttft, Max: 2 * ttft}}
}

func TestClimbEndsAtSaturation(t *testing.T) {
	var order []string
	r, err := Run(t.Context(), Options{
		Loads: []plan.Load{{Rate: 1}, {Rate: 2}, {Rate: 4}, {Rate: 8}}, Repeats: 2, Level: 0.95, StopSaturated: true,
		Measure: func(_ context.Context, c plan.Cell) (*experiment.Measure, error) {
			order = append(order, c.Load.Key())
			return measure(min(c.Load.Rate, 2.5), 10*c.Load.Rate), nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(order, " "); got != "r1 r2 r4 r4 r2 r1" {
		t.Errorf("order %s", got)
	}
	if len(r.Rows) != 3 || !r.Rows[2].Saturated || r.Rows[1].Saturated || !strings.Contains(r.Stopped, "rate 4/s") {
		t.Errorf("%+v %s", r.Rows, r.Stopped)
	}
	var b bytes.Buffer
	if err := Text(&b, r); err != nil || !strings.Contains(b.String(), "rate 4/s (saturated)") || !strings.Contains(b.String(), "20.00 +-0.00") {
		t.Errorf("%v\n%s", err, b.String())
	}
}

func TestThresholdsAreSetOnce(t *testing.T) {
	var sets []int
	r, err := Run(t.Context(), Options{
		Loads: []plan.Load{{Concurrency: 2}}, Thresholds: []int{512, 1024}, Repeats: 2, Level: 0.95,
		SetThreshold: func(_ context.Context, n int) error { sets = append(sets, n); return nil },
		Measure: func(_ context.Context, c plan.Cell) (*experiment.Measure, error) {
			return measure(1, float64(c.Threshold)), nil
		},
	})
	if err != nil || !slices.Equal(sets, []int{512, 1024, 512}) {
		t.Errorf("%v %v", sets, err)
	}
	if best := best(r); !strings.Contains(best, "threshold 512") {
		t.Error(best)
	}
}

func TestVoidAndFailure(t *testing.T) {
	n := 0
	o := Options{Loads: []plan.Load{{Concurrency: 1}}, Repeats: 1, Level: 0.95, Measure: func(context.Context, plan.Cell) (*experiment.Measure, error) {
		if n++; n < 3 {
			return nil, &experiment.VoidError{Reason: "lost d0"}
		}
		return measure(1, 1), nil
	}}
	r, err := Run(t.Context(), o)
	if err != nil || len(r.Cells) != 1 || len(r.Cells[0].Voids) != 2 {
		t.Errorf("%v %+v", err, r.Cells)
	}
	o.Measure = func(context.Context, plan.Cell) (*experiment.Measure, error) { return nil, errors.New("broken") }
	if _, err := Run(t.Context(), o); err == nil {
		t.Error("a failure passed")
	}
}

// TestTextIsPrintable: a sweep names what it measured.
func TestTextIsPrintable(t *testing.T) {
	var r Result
	hostile.Fill(&r)
	var b strings.Builder
	if err := Text(&b, &r); err != nil {
		t.Fatal(err)
	}
	hostile.Check(t, "sweep", b.String())
}
