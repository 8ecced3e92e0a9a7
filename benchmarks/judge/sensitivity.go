package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/table"
)

// factors are what each constant is multiplied by.
var factors = []float64{0.5, 1.5}

// A variant is the judged policy with one constant changed.
type variant struct {
	column
	constant cost.Constant
	value    float64
}

// variants are those of all constants.
func variants() ([]variant, error) {
	var out []variant
	for _, c := range cost.List() {
		for _, factor := range factors {
			v := variant{constant: c, value: factor * shipped(&c)}
			change, err := replay.ParseChange(fmt.Sprintf("%s=%g", c.Key, v.value))
			if err != nil {
				return nil, err
			}
			if v.column, err = parseColumn(subject); err != nil {
				return nil, err
			}
			v.name, v.changes = subject+" "+change.String(), []replay.Change{change}
			out = append(out, v)
		}
	}
	return out, nil
}

// shipped is the value that the router has of a constant.
func shipped(c *cost.Constant) float64 {
	all := cost.Tuned
	return *c.At(&all)
}

// An effect is what another value of a constant changes.
type effect struct {
	Constant string  `json:"constant"`
	Unit     string  `json:"unit"`
	Shipped  float64 `json:"shipped"`
	Value    float64 `json:"value"`
	// Times is by how many times the value is better than the shipped one, by each metric in
	// their order, as a geometric mean over the cells.
	Times []stats.Interval `json:"times_better"`
	losses
}

// losses are in how many cells a policy serves over 5 % less than the best one, and in how many of
// them it counts as worse, since the paired interval excludes that they serve the same: with two
// seeds hardly any does.
type losses struct {
	Below int `json:"cells_below"`
	Lost  int `json:"lost_cells"`
}

func lossesOf(list []standing) (l losses) {
	for _, s := range list {
		if s.Times.Value < 1-margin {
			l.Below++
		}
	}
	l.Lost = worse(list)
	return l
}

// effects are those of variants over cells that have been judged. columns are the judged ones.
func effects(cells []*cell, columns []string, list []variant) []effect {
	var out []effect
	for i := range list {
		v := &list[i]
		e := effect{Constant: v.constant.Key, Unit: v.constant.Unit, Shipped: shipped(&v.constant), Value: v.value}
		for k := range metrics {
			e.Times = append(e.Times, metrics[k].over(cells, v.name, subject))
		}
		rivals := slices.Clone(columns)
		rivals[slices.Index(rivals, subject)] = v.name
		e.losses = lossesOf(standings(cells, v.name, rivals))
		out = append(out, e)
	}
	return out
}

// writeSensitivity writes the effects as Markdown.
func (j *judgement) writeSensitivity(out io.Writer) error {
	runs := j.Cells[0].Runs[subject]
	fmt.Fprintf(out, "By how many times %s is better with another value of one constant than as shipped, as a geometric mean over %s with its 95 %% interval, and in how many cells it serves over 5 %% less than the best policy: by the mean, and beyond the interval. %d seeds of %s requests.\n\n",
		subject, cli.Plural(len(j.Cells), "cell"), len(runs), table.Count(runs[0].Requests))
	head := []string{"constant", "unit", "shipped", "value"}
	for i := range metrics {
		head = append(head, metrics[i].Name)
	}
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }
	lost := func(l losses) []string { return []string{strconv.Itoa(l.Below), strconv.Itoa(l.Lost)} }
	rows := [][]string{append([]string{"as shipped", "", "", "", "", "", ""}, lost(lossesOf(j.Tuning.Standings))...)}
	for i := range j.Sensitivity {
		e := &j.Sensitivity[i]
		row := []string{e.Constant, e.Unit, number(e.Shipped), number(e.Value)}
		for _, t := range e.Times {
			row = append(row, times(t))
		}
		rows = append(rows, append(row, lost(e.losses)...))
	}
	if err := table.Write(out, "markdown", append(head, "5 % below", "and beyond"), rows); err != nil {
		return err
	}
	fmt.Fprintln(out, "\nThe cells:")
	fmt.Fprintln(out)
	rows = nil
	for _, c := range j.Cells {
		rows = append(rows, append(c.place(), c.shown(subject), c.best(j.Judged)))
	}
	if err := table.Write(out, "markdown", []string{"requests", "fleet", "load", subject, "best"}, rows); err != nil {
		return err
	}
	fmt.Fprintln(out)
	for _, why := range j.NotJudged {
		fmt.Fprintln(out, "not all of it:", why)
	}
	return nil
}
