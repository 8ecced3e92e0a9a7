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
	"github.com/dynctl/dynctl/internal/bench/stats"
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
			m := measure(min(c.Load.Rate, 2.5), 10*c.Load.Rate)
			m.Ended = min(c.Load.Rate, 2.5) / c.Load.Rate
			return m, nil
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
	r.Rows[2].Starved, r.Rows[2].TTFTP50 = true, stats.Interval{Value: 12345, Low: 10000, High: 14000, N: 2}
	var b bytes.Buffer
	if err := Text(&b, r, 0); err != nil || !strings.Contains(b.String(), "rate 4/s (saturated)") || !strings.Contains(b.String(), "20.0 +-0.00") {
		t.Errorf("%v\n%s", err, b.String())
	}
	for line := range strings.Lines(b.String()) {
		if len(line) > 121 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
}

// TestClimbTellsWhoIsSlow: a climb ends where the target fails requests or is slow, or where
// the load generator is starved, and says which. Long answers alone end no climb.
func TestClimbTellsWhoIsSlow(t *testing.T) {
	for _, c := range []struct {
		name      string
		change    func(*experiment.Measure)
		saturated bool
		starved   bool
		stopped   string
	}{
		{"long answers", func(m *experiment.Measure) { m.RequestsPerSecond, m.Growth, m.Ended = 0.5, 1.8, 0.97 }, false, false, ""},
		{"a slow target", func(m *experiment.Measure) { m.Ended = 0.7 }, true, false, "the target does not keep up: answers ended at 70% of the rate of requests (limit 80%)"},
		{"a failing target", func(m *experiment.Measure) { m.Requests, m.Failed = 8, 2 }, true, false, "the target failed 2 of 10 requests"},
		{"a starved client", func(m *experiment.Measure) { m.Ended, m.Seconds, m.ClientStopped = 0.7, 2, new(0.05) }, false, true, "answers fell behind while the load generator was starved"},
		{"a client that was starved for a moment", func(m *experiment.Measure) { m.Ended, m.Seconds, m.ClientStopped = 0.98, 2, new(0.05) }, false, true, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := Run(t.Context(), Options{
				Loads: []plan.Load{{Rate: 1}, {Rate: 2}}, Repeats: 1, Level: 0.95, StopSaturated: true,
				Measure: func(context.Context, plan.Cell) (*experiment.Measure, error) {
					m := measure(1, 10)
					c.change(m)
					return m, nil
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			if row := r.Rows[0]; row.Saturated != c.saturated || row.Starved != c.starved || r.Valid() == c.starved {
				t.Errorf("%+v, valid %v", row, r.Valid())
			}
			if (r.Stopped == "") != (c.stopped == "") || !strings.Contains(r.Stopped, c.stopped) {
				t.Errorf("stopped %q, want %q", r.Stopped, c.stopped)
			}
			var b strings.Builder
			if err := Text(&b, r, 0); err != nil || strings.Contains(b.String(), "client  FAIL  the load generator was starved: it stood still for 5.00%") != c.starved {
				t.Errorf("%v\n%s", err, b.String())
			}
		})
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
	if best := r.Best(); !strings.Contains(best, "threshold 512") {
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
	if err := Text(&b, &r, 0); err != nil {
		t.Fatal(err)
	}
	hostile.Check(t, "sweep", b.String())
}
