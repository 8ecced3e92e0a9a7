// Package report shows a benchmark's result: a table and a forest plot for a
// terminal, one self-contained HTML file, CSV, and the comparison of two runs.
package report

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/table"
)

// TextOptions shape the terminal's form.
type TextOptions struct {
	// Width of the terminal in columns; 0 means 120.
	Width int
	// Wide shows every column whatever the width.
	Wide bool
	// Folder is named at the end; may be empty.
	Folder string
	// Live is how many requests the router had under way before the run.
	Live int
}

// Text writes the result for a terminal, in ASCII.
func Text(w io.Writer, r *experiment.Result, o TextOptions) error {
	o.Width = cmp.Or(max(o.Width, 0), 120)
	b := &strings.Builder{}
	head := "RESULT"
	if !r.Valid {
		head = "RESULT (no recommendation)"
	}
	list(b, o.Width, head, r.Sentence)
	printable.Fprintf(b, "        osl %d, %d repeats per cell, %.0f%% intervals; * = interval excludes zero\n", r.Spec.OSL, r.Spec.Repeats, r.Spec.Level*100)
	for _, line := range r.Simulated {
		_ = table.List(b, "        ", o.Width, [][]string{{line}})
	}
	for i := range r.Groups {
		group(b, r, &r.Groups[i], o)
	}
	if g := r.Headline(); g != nil {
		forest(b, g, o.Width)
	}
	crossings(b, r, o.Width)
	if rec := r.Recommend; rec != nil {
		printable.Fprintf(b, "\n  RECOMMEND  eff_isl %d   (%s; at %s, objective %s)\n", rec.EffISL, rec.Because, rec.Group, rec.Objective)
		var rows [][]string
		for _, c := range rec.Configs {
			name := c.System
			for line := range strings.SplitSeq(c.Text, "\n") {
				rows, name = append(rows, []string{name, line}), ""
			}
			if c.Note != "" {
				rows = append(rows, []string{"", "(" + c.Note + ")"})
			}
		}
		_ = table.List(b, "    ", 0, rows) // to be copied: not folded
	}
	for _, c := range cautions(r, o.Live) {
		list(b, o.Width, "  CAUTION  ", c)
	}
	gates(b, r, o.Width)
	if r.Partial != "" {
		printable.Fprintf(b, "  PARTIAL    %s after %d cells; dynctl bench --resume %s continues\n", r.Partial, len(r.Cells), cmp.Or(o.Folder, "FOLDER"))
	}
	if o.Folder != "" {
		list(b, o.Width, "  FILES    ", o.Folder+"/ report.html result.json cells.csv requests.jsonl.zst plot.svg plan.yaml")
		if r.Recommend != nil {
			printable.Fprintf(b, "  NEXT       dynctl bench apply %s   shows the difference and sets the threshold of a running router\n", o.Folder)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// cautions are the run's and those of the load that was live before it.
func cautions(r *experiment.Result, live int) []string {
	out := append([]string{}, r.Cautions...)
	most := 0
	for _, l := range r.Spec.Loads {
		most = max(most, l.Concurrency)
	}
	if live > most && most > 0 {
		out = append(out, fmt.Sprintf("live load (%d running) is above the highest level tested (%d): add --concurrency %d", live, most, 1<<bits.Len(uint(live-1))))
	}
	if live > 0 {
		out = append(out, fmt.Sprintf("%d other requests were running: their tokens are in the engines' counters", live))
	}
	return out
}

func group(b *strings.Builder, r *experiment.Result, g *experiment.GroupResult, o TextOptions) {
	narrow := o.Width < 118 && !o.Wide
	printable.Fprintf(b, "\n  %s\n", strings.ToUpper(g.Group.String()))
	slo := r.Spec.SLO.Any()
	head := []string{"EFF_ISL", "LOCAL p50", "REMOTE p50", "DIFF p50", "VERDICT"}
	if !narrow {
		head = []string{"EFF_ISL", "LOCAL ttft p50/tail", "REMOTE ttft p50/tail", "DIFF p50 [interval]", "ITL tail L/R", "XFER", "VERDICT"}
		if slo {
			head = slices.Insert(head, 5, "GOOD% L/R")
		}
	}
	var rows [][]string
	for i := range g.Points {
		p := &g.Points[i]
		star := " "
		if p.Verdict != "tie" {
			star = "*"
		}
		diff := "-"
		if p.Diff.Value != nil {
			diff = fmt.Sprintf("%+.0f%% [%s,%s] %s", *p.Diff.Value*100, percent(p.Diff.Low), percent(p.Diff.High), star)
		}
		if narrow {
			rows = append(rows, []string{strconv.Itoa(p.EffISL), table.Figure(p.Local.TTFTP50) + " ms", table.Figure(p.Remote.TTFTP50) + " ms", diff, p.Verdict})
			continue
		}
		xfer := "-"
		if t := p.Remote.Stages.Transfer; t != nil {
			xfer = table.Figure(*t) + " ms"
		}
		row := []string{
			strconv.Itoa(p.EffISL), table.Figure(p.Local.TTFTP50) + " / " + table.Figure(p.Local.TTFTP99) + " ms", table.Figure(p.Remote.TTFTP50) + " / " + table.Figure(p.Remote.TTFTP99) + " ms",
			diff, table.Figure(p.Local.ITLP99) + " / " + table.Figure(p.Remote.ITLP99), xfer, p.Verdict,
		}
		if slo {
			row = slices.Insert(row, 5, fmt.Sprintf("%.0f / %.0f", p.Local.GoodPct, p.Remote.GoodPct))
		}
		rows = append(rows, row)
	}
	_ = table.Figures(b, head, rows, len(head)-1) // a strings.Builder takes everything
}

func percent(p *float64) string {
	if p == nil {
		return "?"
	}
	return fmt.Sprintf("%+.0f", *p*100)
}

// forest draws each point's difference with its interval around zero. It is a drawing, whose
// columns are a scale, and no table.
func forest(b *strings.Builder, g *experiment.GroupResult, width int) {
	most := 0.05
	for i := range g.Points {
		d := g.Points[i].Diff
		for _, v := range []*float64{d.Low, d.Value, d.High} {
			if v != nil {
				most = math.Max(most, math.Abs(*v))
			}
		}
	}
	most = math.Min(most, 0.6)
	cols := max(31, (width-24)/2*2+1)
	at := func(v float64) int {
		x := int(math.Round((math.Max(-most, math.Min(most, v))/most + 1) / 2 * float64(cols-1)))
		return min(max(x, 0), cols-1)
	}
	axis := fmt.Sprintf("%+.0f%%", -most*100)
	printable.Fprintf(b, "\n  DIFF in ttft p50, remote against local, %s\n  %10s %s%*s%*s\n", g.Group, "", axis, cols/2-len(axis)+1, "0", cols/2, fmt.Sprintf("%+.0f%%", most*100))
	for i := range g.Points {
		p := &g.Points[i]
		if p.Diff.Value == nil {
			continue
		}
		row := []byte(strings.Repeat(" ", cols))
		row[cols/2] = '|'
		lo, hi := math.Inf(-1), math.Inf(1)
		if p.Diff.Low != nil {
			lo = *p.Diff.Low
		}
		if p.Diff.High != nil {
			hi = *p.Diff.High
		}
		for x := at(lo); x <= at(hi); x++ {
			row[x] = '='
		}
		row[at(lo)], row[at(hi)] = '[', ']'
		row[at(*p.Diff.Value)] = '*'
		// What goes on beyond the axis ends in an arrow.
		if lo < -most {
			row[0] = '<'
		}
		if hi > most {
			row[cols-1] = '>'
		}
		printable.Fprintf(b, "  %10d %s\n", p.EffISL, strings.TrimRight(string(row), " "))
	}
}

func crossings(b *strings.Builder, r *experiment.Result, width int) {
	if len(r.Groups) == 0 {
		return
	}
	b.WriteString("\n  CROSSOVER BY LOAD\n")
	var rows [][]string
	for i := range r.Groups {
		g := &r.Groups[i]
		for _, c := range g.Crossings {
			name := c.Objective
			switch {
			case name == "itl":
				name = fmt.Sprintf("itl p99 <= %s", r.Spec.SLO.ITL)
			case name == "ttft":
				name = "ttft p50"
			}
			rows = append(rows, []string{g.Group.String(), name, short(&c)})
		}
	}
	for i := range r.Learned {
		c := &r.Learned[i]
		rows = append(rows, []string{"router learned", "expected", c.Sentence() + besides(r, c)})
	}
	_ = table.List(b, "    ", width, rows)
}

// besides says whether a learned crossing is that of the run, where both are of the same
// load: one request at a time, and no answer that runs.
func besides(r *experiment.Result, c *admin.Crossing) string {
	if c.Running > 0 {
		return ""
	}
	for i := range r.Groups {
		g := &r.Groups[i]
		m := g.Crossing("ttft")
		if g.Group != (plan.Group{Load: plan.Load{Concurrency: 1}}) || m == nil || m.Answer != stats.Crosses || m.At.Low == nil || m.At.High == nil {
			continue
		}
		if c.Low != nil && float64(*c.Low) <= *m.At.High && (c.High == nil || float64(*c.High) >= *m.At.Low) {
			return "; agrees with concurrency 1"
		}
		return "; differs from concurrency 1: the intervals are apart"
	}
	return ""
}

// short is a crossing in a few characters.
func short(c *experiment.Crossing) string {
	ends := func() string {
		end := func(p *float64) string {
			if p == nil {
				return "?"
			}
			return fmt.Sprintf("%.0f", *p)
		}
		return "[" + end(c.At.Low) + ", " + end(c.At.High) + "]"
	}
	switch c.Answer {
	case stats.Crosses:
		return fmt.Sprintf("%.0f  %s", *c.At.Value, ends())
	case stats.Bracket:
		return "too noisy for a number " + ends()
	case stats.Cliff:
		return "cliff " + ends()
	}
	return "none: " + c.Sentence
}

// list writes a text after a head, its further lines below its first one.
func list(b *strings.Builder, width int, head, text string) {
	_ = table.List(b, "", width, [][]string{{head, text}}) // a strings.Builder takes everything
}

func gates(b *strings.Builder, r *experiment.Result, width int) {
	passed, total := 0, 0
	for _, g := range r.Gates {
		if g.Passed != nil {
			total++
			if *g.Passed {
				passed++
			}
		}
	}
	name := "VALID"
	if !r.Valid {
		name = "NOT VALID"
	}
	printable.Fprintf(b, "\n  %s %d/%d\n", name, passed, total)
	var rows [][]string
	for _, g := range r.Gates {
		mark := "?"
		if g.Passed != nil {
			mark = map[bool]string{true: "ok", false: "FAIL"}[*g.Passed]
		}
		rows = append(rows, []string{mark, g.Name, g.Text})
		if g.Passed != nil && !*g.Passed && len(g.Cells) > 0 {
			in := "in " + strings.Join(g.Cells[:min(len(g.Cells), 3)], " ")
			if len(g.Cells) > 3 {
				in += " and more" // result.json has ten
			}
			rows = append(rows, []string{"", "", in})
		}
		if g.Next != "" {
			rows = append(rows, []string{"", "", "what to do: " + g.Next})
		}
	}
	_ = table.List(b, "    ", width, rows)
}

// CellLine is one finished cell on one line. The lines are written one by one while a run
// lasts, so that the widths stand before the rows are known: no table can be made of them.
func CellLine(c *experiment.CellResult) string {
	m := c.Measure
	t := c.TTFT()
	name := string(c.Cell.Arm)
	if c.Cell.Phase == "aa" {
		name = "a/a"
	}
	s := fmt.Sprintf("%-8s isl %6d %-14s %-6s rep %d  ttft p50 %s p95 %s ms  itl p50 %s ms  %d req", c.Cell.Phase, c.Cell.ISL(), c.Cell.Load, name, c.Cell.Repeat+1, table.Figure(t.P50), table.Figure(t.P95), table.Figure(m.ITL.P50), m.Requests)
	if m.Failed > 0 {
		s += fmt.Sprintf("  %d failed", m.Failed)
	}
	if len(c.Voids) > 0 {
		s += fmt.Sprintf("  redone %d times", len(c.Voids))
	}
	return s
}

// PlanText is the plan with its cost.
func PlanText(s *plan.Spec, base, aa plan.Cost, eta string) string {
	refine := "refinement follows"
	if s.NoRefine {
		refine = "no refinement"
	}
	return fmt.Sprintf("%d isl x %d load(s) x %d cached x 2 arms x %d repeat(s) = %d cells + %d A/A | ABBA order, seed %d | %s req, %s tokens in | est %s, %s",
		len(s.ISL), len(s.Loads), len(s.Cached), s.Repeats, base.Cells, aa.Cells, s.Seed, si(float64(base.Requests+aa.Requests)), si(float64(base.InputTokens+aa.InputTokens)), eta, refine)
}

func si(v float64) string {
	switch {
	case v >= 1e9:
		return fmt.Sprintf("%.1fG", v/1e9)
	case v >= 1e6:
		return fmt.Sprintf("%.1fM", v/1e6)
	case v >= 1e4:
		return fmt.Sprintf("%.0fk", v/1e3)
	}
	return fmt.Sprintf("%.0f", v)
}
