package main

import (
	"cmp"
	"math"
	"slices"

	"github.com/dynctl/dynctl/internal/bench/stats"
)

// subject is the column that is judged.
const subject = "kv"

// figures are the results of one run.
type figures struct {
	Requests uint64 `json:"requests"`
	Failed   uint64 `json:"failed"`
	// Good is the share of requests within the limits.
	Good float64 `json:"good_ratio"`
	// Seconds is the time from the first arrival to the last answer's end.
	Seconds float64 `json:"seconds"`
	// Tokens are completed tokens of answers in a second.
	Tokens float64 `json:"output_tokens_per_s"`
	P50    float64 `json:"e2e_p50_ms"`
	P99    float64 `json:"e2e_p99_ms"`
	Hit    float64 `json:"hit_ratio"`
}

// goodRate is good requests a second. Half a request is added, so that a run without any
// has a logarithm.
func (f *figures) goodRate() float64 { return (f.Good*float64(f.Requests) + 0.5) / f.Seconds }

// cell is one workload on one fleet under one load.
type cell struct {
	Workload string  `json:"workload"`
	Fleet    string  `json:"fleet"`
	Padded   bool    `json:"padded"`
	Load     float64 `json:"load"`
	// Speed is how many times faster than its own pace the workload arrives.
	Speed float64 `json:"arrival_speedup"`
	// ByTokens says that the cell is judged by completed tokens a second, since the best
	// policy has too few good requests.
	ByTokens bool `json:"by_tokens"`
	// Runs are the figures of each column, one for each seed in the same order.
	Runs map[string][]figures `json:"runs"`
}

// A metric is one of the figures that policies are compared by.
type metric struct {
	Name string
	// less says that less is better.
	less bool
	of   func(c *cell, f *figures) float64
}

var metrics = []metric{
	{Name: "good/s", of: (*cell).served},
	{Name: "E2E p50", less: true, of: func(_ *cell, f *figures) float64 { return f.P50 }},
	{Name: "E2E p99", less: true, of: func(_ *cell, f *figures) float64 { return f.P99 }},
}

// fewGood is the share of good requests of the best policy below which a cell is judged by
// completed tokens.
const fewGood = 0.3

// share is the mean share of good requests of a column.
func (c *cell) share(column string) float64 {
	sum := 0.0
	for i := range c.Runs[column] {
		sum += c.Runs[column][i].Good
	}
	return sum / float64(len(c.Runs[column]))
}

// served is what the cell counts of a run: good requests a second, or completed tokens.
func (c *cell) served(f *figures) float64 {
	if c.ByTokens {
		return f.Tokens
	}
	return f.goodRate()
}

// gains are the logarithms of by how many times column a is better than column b, one for
// each seed.
func (m *metric) gains(c *cell, a, b string) []float64 {
	out := make([]float64, len(c.Runs[a]))
	for i := range out {
		out[i] = math.Log(m.of(c, &c.Runs[a][i]) / m.of(c, &c.Runs[b][i]))
		if m.less {
			out[i] = -out[i]
		}
	}
	return out
}

// level is that of intervals. They are Student's for the mean of paired differences: mean ±
// t(0.975, n-1) · s / √n, with the n differences' standard deviation s. Source: NIST/SEMATECH
// e-Handbook of Statistical Methods, sections 7.2.2.1 and 7.3.1.1.
const level = 0.95

// best is the column that serves most, by the mean of the logarithms over the seeds.
func (c *cell) best(columns []string) string {
	return slices.MaxFunc(columns, func(a, b string) int {
		return cmp.Compare(stats.Mean(metrics[0].gains(c, a, b)), 0)
	})
}

// A comparison is the judged policy against another one over all cells: by how many times it
// is better, as a geometric mean over cells, each cell counting once.
type comparison struct {
	Other  string         `json:"other"`
	Metric string         `json:"metric"`
	Times  stats.Interval `json:"times_better"`
}

// better reports whether the other policy has the better mean.
func (c *comparison) better() bool { return c.Times.Value < 1 }

// A standing is the judged policy against the best policy of a cell.
type standing struct {
	Cell *cell  `json:"cell"`
	Best string `json:"best"`
	// Times is by how many times it serves what the best policy serves, at most 1.
	Times stats.Interval `json:"times_best"`
	// Worse says that it counts as worse.
	Worse bool `json:"worse"`
}

// A verdict is the rule of judgement applied to some cells.
type verdict struct {
	Comparisons []comparison `json:"comparisons"`
	// Standings are those of all cells, the worst first.
	Standings []standing `json:"standings"`
	// Worse is in how many cells the policy is worse than the best, Allowed in how many it
	// may be.
	Worse   int `json:"worse_cells"`
	Allowed int `json:"allowed_cells"`
	// Better are the comparisons in which another policy has the better mean.
	Better []comparison `json:"better_others,omitempty"`
}

// passed reports whether both parts of the rule hold.
func (v *verdict) passed() bool { return len(v.Better) == 0 && v.Worse <= v.Allowed }

// margin is the share of what the best policy serves by which another one must be worse to
// count as worse.
const margin = 0.05

// judge applies the rule to cells, each of which has runs of all columns:
//
//   - no other column has a better mean over the cells, by any of the metrics;
//   - in at most one cell of ten the judged column serves less than the best one by more
//     than 5 %, where the paired interval excludes that they serve the same.
//
// It sets ByTokens of the cells.
func judge(cells []*cell, columns []string) *verdict {
	v := &verdict{Allowed: len(cells) / 10}
	for _, c := range cells {
		c.ByTokens = !slices.ContainsFunc(columns, func(column string) bool { return c.share(column) >= fewGood })
	}
	for _, other := range columns {
		if other == subject {
			continue
		}
		for i := range metrics {
			c := comparison{Other: other, Metric: metrics[i].Name, Times: metrics[i].over(cells, subject, other)}
			v.Comparisons = append(v.Comparisons, c)
			if c.better() {
				v.Better = append(v.Better, c)
			}
		}
	}
	v.Standings = standings(cells, subject, columns)
	v.Worse = worse(v.Standings)
	return v
}

// standings are those of a column against the best of some columns, the worst first.
func standings(cells []*cell, who string, columns []string) []standing {
	var out []standing
	for _, c := range cells {
		s := standing{Cell: c, Best: c.best(columns)}
		s.Times = stats.MeanInterval(metrics[0].gains(c, who, s.Best), level).Map(math.Exp)
		s.Worse = s.Times.Value < 1-margin && s.Times.Excludes(1)
		out = append(out, s)
	}
	slices.SortStableFunc(out, func(a, b standing) int { return cmp.Compare(a.Times.Value, b.Times.Value) })
	return out
}

// worse counts the cells in which a column counts as worse than the best.
func worse(list []standing) (n int) {
	for _, s := range list {
		if s.Worse {
			n++
		}
	}
	return n
}

// over is by how many times one column is better than another over cells, by a metric.
func (m *metric) over(cells []*cell, a, b string) stats.Interval {
	means := make([]float64, len(cells))
	for i, c := range cells {
		means[i] = stats.Mean(m.gains(c, a, b))
	}
	return stats.MeanInterval(means, level).Map(math.Exp)
}
