package main

import (
	"fmt"
	"io"
	"math"
	"strconv"

	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/table"
)

// judgement is all that is found.
type judgement struct {
	// Judged are the columns that the rule looks at, Printed those that are only shown.
	Judged  []string `json:"judged"`
	Printed []string `json:"printed,omitempty"`
	// Set are settings of the judged policy that are not the defaults.
	Set   string  `json:"set,omitempty"`
	Cells []*cell `json:"cells"`
	// Tuning is the rule applied to the cells that weights may be chosen on, Judging to the
	// others; nil without such cells.
	Tuning  *verdict `json:"tuning,omitempty"`
	Judging *verdict `json:"judging,omitempty"`
	// Sensitivity is what half and one and a half times each constant change.
	Sensitivity []effect `json:"sensitivity,omitempty"`
	// NotJudged says why the cells give no judgement; empty when they do.
	NotJudged []string `json:"not_judged,omitempty"`
}

// mean is the mean of a figure over the seeds.
func mean(runs []figures, of func(f *figures) float64) float64 {
	v := make([]float64, len(runs))
	for i := range runs {
		v[i] = of(&runs[i])
	}
	return stats.Mean(v)
}

func (c *cell) place() []string {
	fleet := c.Fleet
	if c.Padded {
		fleet += " padded"
	}
	return []string{c.Workload, fleet, fmt.Sprintf("%g (×%.3g)", c.Load, c.Speed)}
}

// shown are a column's figures in a cell: good requests a second and their share, and the
// percentiles of E2E in ms.
func (c *cell) shown(column string) string {
	runs := c.Runs[column]
	served := fmt.Sprintf("%.2f", mean(runs, func(f *figures) float64 { return f.Good * float64(f.Requests) / f.Seconds }))
	if c.ByTokens {
		served = fmt.Sprintf("%s tokens", table.Count(uint64(mean(runs, func(f *figures) float64 { return f.Tokens }))))
	}
	ms := func(of func(f *figures) float64) string { return table.Count(uint64(math.Round(mean(runs, of)))) }
	return fmt.Sprintf("%s/s, %.1f %%, %s / %s", served, 100*c.share(column), ms(func(f *figures) float64 { return f.P50 }), ms(func(f *figures) float64 { return f.P99 }))
}

// times is an interval of a ratio.
func times(i stats.Interval) string {
	return fmt.Sprintf("%.3f (%.3f to %.3f)", i.Value, i.Low, i.High)
}

// write writes the judgement as Markdown.
func (j *judgement) write(out io.Writer) error {
	if j.Sensitivity != nil {
		return j.writeSensitivity(out)
	}
	columns := append(append([]string{}, j.Judged...), j.Printed...)
	rows := make([][]string, 0, len(j.Cells))
	for _, c := range j.Cells {
		row := c.place()
		for _, column := range columns {
			row = append(row, c.shown(column))
		}
		rows = append(rows, row)
	}
	fmt.Fprint(out, "Each policy: good requests a second, their share, E2E p50 / p99 in ms; means over the seeds.\n\n")
	if err := table.Write(out, "markdown", append([]string{"requests", "fleet", "load"}, columns...), rows); err != nil {
		return err
	}
	for _, part := range []struct {
		name string
		v    *verdict
	}{{"Tuning half", j.Tuning}, {"Judging half", j.Judging}} {
		if part.v == nil {
			continue
		}
		fmt.Fprintf(out, "\n## %s\n\n", part.name)
		if err := part.v.write(out, j.Judged); err != nil {
			return err
		}
	}
	fmt.Fprintln(out)
	for _, why := range j.NotJudged {
		fmt.Fprintln(out, "not judged:", why)
	}
	if len(j.NotJudged) > 0 {
		return nil
	}
	word := "missed"
	if j.Judging.passed() {
		word = "passed"
	}
	_, err := fmt.Fprintln(out, "judgement:", word)
	return err
}

// worstShown is how many of the worst cells are shown.
const worstShown = 5

func (v *verdict) write(out io.Writer, columns []string) error {
	fmt.Fprintf(out, "By how many times %s is better, as a geometric mean over %d cells with its 95 %% interval:\n\n", subject, len(v.Standings))
	head := []string{"than"}
	for i := range metrics {
		head = append(head, metrics[i].Name)
	}
	var rows [][]string
	for i := 0; i < len(v.Comparisons); i += len(metrics) {
		row := []string{v.Comparisons[i].Other}
		for k := range metrics {
			row = append(row, times(v.Comparisons[i+k].Times))
		}
		rows = append(rows, row)
	}
	if err := table.Write(out, "markdown", head, rows); err != nil {
		return err
	}
	fmt.Fprintln(out)
	for _, c := range v.Better {
		fmt.Fprintf(out, "- missed: %s has the better mean of %s.\n", c.Other, c.Metric)
	}
	if len(v.Better) == 0 {
		fmt.Fprint(out, "- held: no other policy has a better mean.\n")
	}
	word := "held"
	if v.Worse > v.Allowed {
		word = "missed"
	}
	fmt.Fprintf(out, "- %s: %s is worse than the best policy in %d of %d cells; %d may be.\n\n", word, subject, v.Worse, len(v.Standings), v.Allowed)
	fmt.Fprint(out, "The worst cells:\n\n")
	rows = nil
	for _, s := range v.Standings[:min(worstShown, len(v.Standings))] {
		worse := ""
		if s.Worse {
			worse = "worse"
		}
		hit := func(column string) string {
			return strconv.FormatFloat(100*mean(s.Cell.Runs[column], func(f *figures) float64 { return f.Hit }), 'f', 1, 64) + " % hits"
		}
		rows = append(rows, append(s.Cell.place(), s.Best, times(s.Times), worse, s.Cell.shown(subject)+", "+hit(subject), s.Cell.shown(s.Best)+", "+hit(s.Best)))
	}
	return table.Write(out, "markdown", []string{"requests", "fleet", "load", "best", "times the best", "counts as", subject, "the best"}, rows)
}
