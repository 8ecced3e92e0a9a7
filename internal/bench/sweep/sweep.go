// Package sweep measures a target by load, without comparing arms: a line of
// loads, of routing thresholds, or one trace, each repeated, in an order that
// goes forth and back so that drift favours none.
package sweep

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/table"
)

// Schema is the version of the JSON form.
const Schema = "dynctl.bench-sweep/v1"

// Options are what is swept.
type Options struct {
	Loads []plan.Load
	// Thresholds are set on the router in turn; empty leaves it alone.
	Thresholds []int
	Repeats    int
	Requests   int // of a cell; 0 derives it from the load
	// ISL is the mean length of prompts, which cells are shown with.
	ISL int
	// MaxInFlight is the bound on what an open loop has in flight, 0 for none.
	MaxInFlight int
	Arm         plan.Arm
	Level       float64
	// Measure runs one cell; SetThreshold changes the router.
	Measure      func(ctx context.Context, c plan.Cell) (*experiment.Measure, error)
	SetThreshold func(ctx context.Context, tokens int) error
	// StopSaturated ends the climb to higher loads once answers fall behind.
	StopSaturated bool
	OnCell        func(experiment.CellResult, int, int)
	Stop          func() bool
	// Enter is called before a cell; see [experiment.Runner].
	Enter func(run context.Context) (cell context.Context, done func())
	// OnSkip is called with a cell that was skipped by hand; may be nil.
	OnSkip func(c plan.Cell)
}

// Row is what one load, and threshold, came to: means over the repeats with
// intervals.
type Row struct {
	Load      plan.Load `json:"load"`
	Threshold int       `json:"threshold_tokens,omitempty"`
	Repeats   int       `json:"repeats"`
	Requests  int       `json:"requests"`
	Failed    int       `json:"failed"`
	// TTFT counts from the planned time of an open loop.
	TTFTP50  stats.Interval `json:"ttft_p50_ms"`
	TTFTP99  stats.Interval `json:"ttft_tail_ms"`
	TPOTP50  stats.Interval `json:"tpot_p50_ms"`
	ITLP50   stats.Interval `json:"itl_p50_ms"`
	ITLTail  stats.Interval `json:"itl_tail_ms"`
	Rate     stats.Interval `json:"requests_per_second"`
	Tokens   stats.Interval `json:"output_tokens_per_second"`
	Good     stats.Interval `json:"goodput_requests_per_second"`
	GoodPct  float64        `json:"goodput_percent"`
	Late     float64        `json:"late_send_share"`
	HitShare *float64       `json:"cache_hit_share"`
	// Saturated says that the target did not keep up, or failed more than a tenth of the
	// requests. Starved says that the load generator was late or stood still, so that the row
	// does not show whether the target kept up.
	Saturated bool `json:"saturated"`
	Starved   bool `json:"client_starved"`
}

// Result is a whole sweep.
type Result struct {
	Schema   string       `json:"schema"`
	Name     string       `json:"name"`
	Version  string       `json:"dynctl_version"`
	Created  time.Time    `json:"created"`
	Workload string       `json:"workload"`
	Target   *fleet.Facts `json:"target,omitempty"`
	// Simulated names the simulated fleet and its profiles; empty for real engines.
	Simulated []string `json:"simulated,omitempty"`
	Level     float64  `json:"level"`
	SLO       plan.SLO `json:"slo"`
	Partial   string   `json:"partial,omitempty"`
	Stopped   string   `json:"stopped,omitempty"`
	Skipped   int      `json:"skipped_cells,omitempty"`
	// Client is the gate of the load generator; without cells it has no name.
	Client experiment.Gate         `json:"client_gate"`
	Rows   []Row                   `json:"rows"`
	Cells  []experiment.CellResult `json:"cells"`
}

// Run measures every cell.
func Run(ctx context.Context, o Options) (*Result, error) {
	res := &Result{Schema: Schema, Level: o.Level, Rows: []Row{}, Cells: []experiment.CellResult{}}
	thresholds := o.Thresholds
	if len(thresholds) == 0 {
		thresholds = []int{-1}
	}
	type step struct {
		load      plan.Load
		threshold int
	}
	var steps []step
	for _, t := range thresholds {
		for _, l := range o.Loads {
			steps = append(steps, step{l, t})
		}
	}
	total := len(steps) * o.Repeats
	start := time.Now()
	spec := plan.Spec{Requests: o.Requests}
	limit := len(steps)
	var at step
	set := -2 // the threshold that the router has
	runner := &experiment.Runner{
		Now: func() time.Duration { return time.Since(start) }, Stop: o.Stop, Enter: o.Enter,
		Measure: func(ctx context.Context, c plan.Cell) (*experiment.Measure, error) {
			if at.threshold >= 0 && at.threshold != set {
				if err := o.SetThreshold(ctx, at.threshold); err != nil {
					return nil, err
				}
				set = at.threshold
			}
			return o.Measure(ctx, c)
		},
	}
	var cause error
measure:
	for r := range o.Repeats {
		order := slices.Clone(steps[:limit])
		if r%2 == 1 {
			slices.Reverse(order)
		}
		for i, s := range order {
			at = s
			c := spec.NewCell("sweep", s.load, 0, o.ISL, 0, o.Arm, r)
			c.Threshold = max(s.threshold, 0)
			c.ID = fmt.Sprintf("sweep/%s/t%d/r%d", s.load.Key(), s.threshold, r)
			cell, err := runner.Cell(ctx, c)
			switch {
			case errors.Is(err, experiment.ErrSkipped):
				res.Skipped++
				total--
				if o.OnSkip != nil {
					o.OnSkip(c)
				}
				continue
			case errors.Is(err, experiment.ErrStopped):
				res.Partial = "stopped by hand"
				break measure
			case err != nil:
				cause = err
				break measure
			}
			res.Cells = append(res.Cells, *cell)
			if o.OnCell != nil {
				o.OnCell(*cell, len(res.Cells), total)
			}
			if o.StopSaturated && r == 0 && len(o.Thresholds) == 0 && behind(cell) && i+1 < limit {
				limit = i + 1
				total = limit * o.Repeats
				res.Stopped = fmt.Sprintf("the climb ended at %s: %s", s.load, why(cell))
				break
			}
		}
	}
	if ctx.Err() != nil {
		res.Partial = "interrupted"
	}
	res.Rows = rows(res.Cells, o.Level)
	if len(res.Cells) > 0 {
		res.Client = experiment.ClientGate(res.Cells, o.MaxInFlight)
	}
	return res, cause
}

// keepsUp is the least share of the rate of requests at which answers end.
const keepsUp = 0.8

// behind reports whether a target failed requests, or its answers fell behind.
func behind(c *experiment.CellResult) bool {
	m := c.Measure
	return failing(m) || c.Cell.Load.Rate > 0 && m.Ended > 0 && m.Ended < keepsUp
}

// saturated reports whether that was the target's doing: answers that fall behind while the
// load generator is starved do not show it.
func saturated(c *experiment.CellResult) bool {
	return behind(c) && (failing(c.Measure) || !c.Measure.Starved())
}

func failing(m *experiment.Measure) bool { return m.Failed*10 > m.Requests+m.Failed }

// why says what a cell that ended the climb showed.
func why(c *experiment.CellResult) string {
	m := c.Measure
	switch {
	case failing(m):
		return fmt.Sprintf("the target failed %d of %d requests", m.Failed, m.Failed+m.Requests)
	case m.Starved():
		return "answers fell behind while the load generator was starved, so this does not show whether the target keeps up"
	}
	return fmt.Sprintf("the target does not keep up: answers ended at %.0f%% of the rate of requests (limit %.0f%%)", m.Ended*100, keepsUp*100)
}

func rows(cells []experiment.CellResult, level float64) []Row {
	type key struct {
		load      plan.Load
		threshold int
	}
	by := map[key][]*experiment.CellResult{}
	var keys []key
	for i := range cells {
		k := key{cells[i].Cell.Load, cells[i].Cell.Threshold}
		if by[k] == nil {
			keys = append(keys, k)
		}
		by[k] = append(by[k], &cells[i])
	}
	slices.SortStableFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(a.threshold, b.threshold), cmp.Compare(a.load.Concurrency, b.load.Concurrency), cmp.Compare(a.load.Rate, b.load.Rate))
	})
	var out []Row
	for _, k := range keys {
		list := by[k]
		r := Row{Load: k.load, Threshold: k.threshold, Repeats: len(list)}
		over := func(f func(*experiment.CellResult) float64) stats.Interval {
			var xs []float64
			for _, c := range list {
				if c.Measure.Requests > 0 {
					xs = append(xs, f(c))
				}
			}
			i := stats.MeanInterval(xs, level)
			if len(xs) < 2 { // JSON has no infinity
				i.Low, i.High = i.Value, i.Value
			}
			if math.IsNaN(i.Value) {
				i = stats.Interval{}
			}
			return i
		}
		r.TTFTP50 = over(func(c *experiment.CellResult) float64 { return c.TTFT().P50 })
		r.TTFTP99 = over(func(c *experiment.CellResult) float64 { return c.TTFT().Tail() })
		r.TPOTP50 = over(func(c *experiment.CellResult) float64 { return c.Measure.TPOT.P50 })
		r.ITLP50 = over(func(c *experiment.CellResult) float64 { return c.Measure.ITL.P50 })
		r.ITLTail = over(func(c *experiment.CellResult) float64 { return c.Measure.ITL.Tail() })
		r.Rate = over(func(c *experiment.CellResult) float64 { return c.Measure.RequestsPerSecond })
		r.Tokens = over(func(c *experiment.CellResult) float64 { return c.Measure.TokensPerSecond })
		r.Good = over(func(c *experiment.CellResult) float64 { return c.Measure.GoodPerSecond })
		good, late := 0, 0
		var hits []float64
		for _, c := range list {
			r.Requests += c.Measure.Requests
			r.Failed += c.Measure.Failed
			good += c.Measure.Good
			late += c.Measure.Late
			r.Saturated = r.Saturated || saturated(c)
			r.Starved = r.Starved || c.Measure.Starved()
			if c.Measure.HitShare != nil {
				hits = append(hits, *c.Measure.HitShare)
			}
		}
		if n := r.Requests + r.Failed; n > 0 {
			r.GoodPct = 100 * float64(good) / float64(n)
		}
		if r.Requests > 0 {
			r.Late = float64(late) / float64(r.Requests)
		}
		if len(hits) > 0 {
			h := stats.Mean(hits)
			r.HitShare = &h
		}
		out = append(out, r)
	}
	return out
}

// Table is the head and the rows of the figures, as text. Times are in ms, rates a second.
func (r *Result) Table() (head []string, rows [][]string) {
	name := "LOAD"
	for _, row := range r.Rows {
		if row.Threshold > 0 {
			name = "THRESHOLD, LOAD"
		}
	}
	for _, row := range r.Rows {
		label := row.Load.String()
		if row.Threshold > 0 {
			label = fmt.Sprintf("%d, %s", row.Threshold, label)
		}
		switch {
		case row.Saturated: // by a cell whose load generator was not starved
			label += " (saturated)"
		case row.Starved:
			label += " (starved)"
		}
		pm := func(i stats.Interval) string {
			if i.N < 2 {
				return table.Figure(i.Value)
			}
			return table.Figure(i.Value) + " +-" + table.Figure((i.High-i.Low)/2)
		}
		hit, good := "-", "-"
		if row.HitShare != nil {
			hit = fmt.Sprintf("%.1f", *row.HitShare*100)
		}
		if r.SLO.Any() {
			good = fmt.Sprintf("%.1f", row.GoodPct)
		}
		rows = append(rows, []string{label, strconv.Itoa(row.Requests), strconv.Itoa(row.Failed), pm(row.TTFTP50), table.Figure(row.TTFTP99.Value), pm(row.ITLP50), table.Figure(row.ITLTail.Value), table.Figure(row.Rate.Value), pm(row.Tokens), good, hit})
	}
	return []string{name, "REQ", "FAIL", "TTFT p50", "TTFT tail", "ITL p50", "ITL tail", "REQ/S", "TOK/S", "GOOD%", "HIT%"}, rows
}

// Valid reports whether the load generator kept up, so that the figures are the target's.
func (r *Result) Valid() bool { return r.Client.Passed == nil || *r.Client.Passed }

// Text writes the sweep for a terminal of width columns; 0 means 120.
func Text(w io.Writer, r *Result, width int) error {
	width = cmp.Or(width, 120)
	b := &strings.Builder{}
	printable.Fprintf(b, "SWEEP  %s\n", r.Workload)
	printable.Fprintf(b, "       mean of the repeats with its %.0f%% interval (half width); times in ms, tails are p99 or the largest of a small cell\n", r.Level*100)
	for _, line := range r.Simulated {
		printable.Fprintf(b, "       %s\n", line)
	}
	b.WriteByte('\n')
	head, rows := r.Table()
	if err := table.Figures(b, head, rows, 0); err != nil {
		return err
	}
	b.WriteByte('\n')
	if g := r.Client; g.Passed != nil {
		mark := "ok"
		if !*g.Passed {
			mark = "FAIL"
		}
		_ = table.List(b, "  ", width, [][]string{{"client", mark, g.Text}}) // a strings.Builder takes everything
		if g.Next != "" {
			_ = table.List(b, "  ", width, [][]string{{"NEXT", g.Next}})
		}
	}
	if r.Stopped != "" {
		_ = table.List(b, "  ", width, [][]string{{"stopped", r.Stopped}})
	}
	if r.Skipped > 0 {
		printable.Fprintf(b, "  CAUTION  %d cell(s) were skipped by hand\n", r.Skipped)
	}
	if r.Partial != "" {
		printable.Fprintf(b, "  PARTIAL  %s after %d cells\n", r.Partial, len(r.Cells))
	}
	if text := r.Best(); text != "" {
		printable.Fprintf(b, "  best     %s\n", text)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Best names the row with the most goodput (or, without a target, the lowest
// ttft p50 of a threshold sweep); empty when there is nothing to choose.
func (r *Result) Best() string {
	if len(r.Rows) < 2 {
		return ""
	}
	if r.SLO.Any() {
		best := slices.MaxFunc(r.Rows, func(a, b Row) int { return cmp.Compare(a.Good.Value, b.Good.Value) })
		return fmt.Sprintf("%s has the most goodput: %.2f requests/s (%.0f%%)", best.Name(), best.Good.Value, best.GoodPct)
	}
	if r.Rows[0].Threshold > 0 || r.Rows[len(r.Rows)-1].Threshold > 0 {
		best := slices.MinFunc(r.Rows, func(a, b Row) int { return cmp.Compare(a.TTFTP50.Value, b.TTFTP50.Value) })
		return fmt.Sprintf("%s has the lowest ttft p50: %.1f ms", best.Name(), best.TTFTP50.Value)
	}
	return ""
}

// Name is the row's load, with its threshold where one was set.
func (r *Row) Name() string {
	if r.Threshold > 0 {
		return fmt.Sprintf("threshold %d at %s", r.Threshold, r.Load)
	}
	return r.Load.String()
}
