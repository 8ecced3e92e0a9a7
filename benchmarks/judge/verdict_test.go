package main

import (
	"math"
	"slices"
	"strconv"
	"testing"
)

// even is the figures of a run in which nothing is special.
func even() figures {
	return figures{Requests: 1000, Good: 0.9, Seconds: 100, Tokens: 3000, P50: 1000, P99: 4000}
}

// made is a table of n cells with four seeds, in which both kv and a are even but for what
// change does to the runs of a column.
func made(n int, change func(cell, seed int, column string, f *figures)) []*cell {
	var cells []*cell
	for i := range n {
		c := &cell{Load: float64(i), Runs: map[string][]figures{}}
		for _, column := range []string{subject, "a"} {
			for seed := range 4 {
				f := even()
				if change != nil {
					change(i, seed, column, &f)
				}
				c.Runs[column] = append(c.Runs[column], f)
			}
		}
		cells = append(cells, c)
	}
	return cells
}

// TestJudge: each part of the rule is held and missed by made-up tables.
func TestJudge(t *testing.T) {
	columns := []string{subject, "a"}
	for _, tt := range []struct {
		name   string
		change func(cell, seed int, column string, f *figures)
		better []string // metrics in which a has the better mean
		worse  int
		passed bool
	}{
		{name: "all the same", passed: true},
		{name: "kv is better", passed: true, change: func(_, _ int, column string, f *figures) {
			if column == subject {
				f.Good, f.P50, f.P99 = 0.95, 900, 3000
			}
		}},
		{name: "the other serves a little more everywhere", better: []string{"good/s"}, change: func(_, _ int, column string, f *figures) {
			if column == "a" {
				f.Good = 0.901
			}
		}},
		{name: "the other has lower medians", better: []string{"E2E p50"}, change: func(_, _ int, column string, f *figures) {
			if column == "a" {
				f.P50 = 999
			}
		}},
		{name: "the other has lower tails", better: []string{"E2E p99"}, change: func(_, _ int, column string, f *figures) {
			if column == "a" {
				f.P99 = 3999
			}
		}},
		{name: "each is better in half of the cells, the other by less", passed: true, change: func(cell, _ int, column string, f *figures) {
			if cell%2 == 0 && column == "a" {
				f.P50 = 950
			}
			if cell%2 == 1 && column == subject {
				f.P50 = 900
			}
		}},
		{name: "worse in as many cells as may be", worse: 2, passed: true, change: func(cell, _ int, column string, f *figures) {
			switch {
			case cell < 2 && column == subject:
				f.Good = 0.8
			case cell >= 2 && column == "a":
				f.Good = 0.85
			}
		}},
		{name: "worse in one cell more", worse: 3, change: func(cell, _ int, column string, f *figures) {
			switch {
			case cell < 3 && column == subject:
				f.Good = 0.8
			case cell >= 3 && column == "a":
				f.Good = 0.85
			}
		}},
		{name: "worse by less than the margin", passed: true, change: func(cell, _ int, column string, f *figures) {
			switch {
			case cell < 3 && column == subject:
				f.Good = 0.86
			case cell >= 3 && column == "a":
				f.Good = 0.85
			}
		}},
		{name: "worse by more, with seeds that differ as much", passed: true, change: func(cell, seed int, column string, f *figures) {
			switch {
			case cell < 3 && column == subject:
				f.Good = []float64{0.5, 0.95, 0.95, 0.9}[seed]
			case cell >= 3 && column == "a":
				f.Good = 0.85
			}
		}},
		{name: "few good requests, fewer of kv, and more tokens", passed: true, change: func(_, _ int, column string, f *figures) {
			f.Good = 0.29
			if column == subject {
				f.Good, f.Tokens = 0.1, 3100
			}
		}},
		{name: "few good requests, more of kv, and fewer tokens", better: []string{"good/s"}, worse: 20, change: func(_, _ int, column string, f *figures) {
			f.Good = 0.1
			if column == subject {
				f.Good, f.Tokens = 0.29, 2800
			}
		}},
		{name: "no good request at all of kv", better: []string{"good/s"}, worse: 20, change: func(_, _ int, column string, f *figures) {
			if column == subject {
				f.Good = 0
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := judge(made(20, tt.change), columns)
			var better []string
			for _, c := range v.Better {
				better = append(better, c.Metric)
			}
			if !slices.Equal(better, tt.better) || v.Worse != tt.worse || v.Allowed != 2 || v.passed() != tt.passed {
				t.Errorf("a better in %v, worse in %d of %d allowed, passed %t; want %v, %d, %t\n%+v", better, v.Worse, v.Allowed, v.passed(), tt.better, tt.worse, tt.passed, v.Comparisons)
			}
		})
	}
}

// TestJudgeLooksAtJudgedColumns: what is only printed changes no verdict.
func TestJudgeLooksAtJudgedColumns(t *testing.T) {
	cells := made(10, nil)
	for _, c := range cells {
		c.Runs["more"] = slices.Clone(c.Runs["a"])
		for i := range c.Runs["more"] {
			c.Runs["more"][i].Good, c.Runs["more"][i].P50 = 1, 1
		}
	}
	v := judge(cells, []string{subject, "a"})
	if !v.passed() || len(v.Comparisons) != len(metrics) || v.Standings[0].Best != subject {
		t.Errorf("%+v", v)
	}
}

// TestInterval: the paired interval is that of the formula, worked by hand: differences of
// ln 1.1 and 0 twice each have the mean (ln 1.1)/2 and the standard deviation (ln 1.1)/√3,
// and t(0.975, 3) is 3.182.
func TestInterval(t *testing.T) {
	cells := made(1, func(_, seed int, column string, f *figures) {
		if column == subject && seed%2 == 0 {
			f.P99 /= 1.1
		}
		if column == "a" {
			f.Good = 0.95
		}
		if column == subject && seed >= 2 {
			f.Good = 0.95 / 1.1
			f.Good += (1/1.1 - 1) * 0.5 / float64(f.Requests) // the half request
		} else if column == subject {
			f.Good = 0.95
		}
	})
	s := judge(cells, []string{subject, "a"}).Standings[0]
	d := math.Log(1.1)
	half := 3.182 * d / math.Sqrt(3) / 2
	for _, p := range [][2]float64{{s.Times.Value, math.Exp(-d / 2)}, {s.Times.Low, math.Exp(-d/2 - half)}, {s.Times.High, math.Exp(-d/2 + half)}} {
		if math.Abs(p[0]-p[1]) > 1e-4 {
			t.Errorf("interval %+v: %v, want %v", s.Times, p[0], p[1])
		}
	}
	if s.Best != "a" || s.Worse {
		t.Errorf("%s is best, worse %t", s.Best, s.Worse)
	}
}

// TestWorstFirst: standings begin with the worst cell.
func TestWorstFirst(t *testing.T) {
	v := judge(made(6, func(cell, _ int, column string, f *figures) {
		if column == subject {
			f.Good = 0.3 + float64((cell*5)%6)/10
		}
	}), []string{subject, "a"})
	for i := range v.Standings[1:] {
		if v.Standings[i].Times.Value > v.Standings[i+1].Times.Value {
			t.Errorf("standing %d is %v, the next %v", i, v.Standings[i].Times, v.Standings[i+1].Times)
		}
	}
	if v.Standings[0].Cell.Load != 0 {
		t.Errorf("the worst is cell %v", v.Standings[0].Cell.Load)
	}
}

// TestEffects: a variant is compared with the shipped constants seed by seed, and loses cells to the
// best of the other policies.
func TestEffects(t *testing.T) {
	list, err := variants()
	if err != nil || len(list) != 20 {
		t.Fatal(len(list), err)
	}
	worse, same := list[3].name, list[4].name
	cells := made(10, nil)
	for i, c := range cells {
		for _, v := range list {
			c.Runs[v.name] = append([]figures(nil), c.Runs[subject]...)
		}
		if i < 5 {
			for k := range c.Runs[worse] {
				c.Runs[worse][k].Good, c.Runs[worse][k].P99 = 0.45, 8000
			}
		}
	}
	judge(cells, []string{subject, "a"})
	for _, e := range effects(cells, []string{subject, "a"}, list) {
		name := subject + " " + e.Constant + "=" + strconv.FormatFloat(e.Value, 'g', -1, 64)
		lost, good, p99 := 0, 1.0, 1.0
		if name == worse {
			lost, good, p99 = 5, math.Sqrt(0.5), math.Sqrt(0.5)
		}
		if math.Abs(e.Times[0].Value-good) > 1e-3 || e.Times[1].Value != 1 || math.Abs(e.Times[2].Value-p99) > 1e-9 || e.losses != (losses{lost, lost}) || e.Unit == "" || e.Value == e.Shipped {
			t.Errorf("%s (worse is %s, %s is not): %+v", name, worse, same, e)
		}
	}
}
