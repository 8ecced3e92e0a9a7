package report

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/table"
)

// metric is something that two runs can be compared by.
type metric struct {
	name string
	// lower says that less is better.
	lower bool
	of    func(*experiment.CellResult) float64
}

var metrics = []metric{
	{"ttft_p50", true, func(c *experiment.CellResult) float64 { return c.TTFT().P50 }},
	{"ttft_p95", true, func(c *experiment.CellResult) float64 { return c.TTFT().P95 }},
	{"tpot_p50", true, func(c *experiment.CellResult) float64 { return c.Measure.TPOT.P50 }},
	{"itl_p50", true, func(c *experiment.CellResult) float64 { return c.Measure.ITL.P50 }},
	{"itl_p95", true, func(c *experiment.CellResult) float64 { return c.Measure.ITL.P95 }},
	{"e2e_p50", true, func(c *experiment.CellResult) float64 { return c.Measure.E2E.P50 }},
	{"output_tokens_per_second", false, func(c *experiment.CellResult) float64 { return c.Measure.TokensPerSecond }},
	{"goodput", false, func(c *experiment.CellResult) float64 { return c.Measure.GoodPerSecond }},
}

// Metrics names what can be compared.
func Metrics() []string {
	var out []string
	for _, m := range metrics {
		out = append(out, m.name)
	}
	return out
}

// Change is how much a metric of run B differs from run A at one load and arm,
// over all points that both measured.
type Change struct {
	Metric string         `json:"metric"`
	Group  plan.Group     `json:"group"`
	Arm    plan.Arm       `json:"arm"`
	Change stats.Interval `json:"change"` // 0.12 is 12 % more
	Points int            `json:"points"`
	// Verdict is "better", "worse" or "same".
	Verdict string `json:"verdict"`
}

// Compare compares two runs.
func Compare(a, b *experiment.Result) []Change {
	type key struct {
		group plan.Group
		arm   plan.Arm
	}
	type point struct {
		key
		eff int
	}
	gather := func(r *experiment.Result) map[point][]*experiment.CellResult {
		out := map[point][]*experiment.CellResult{}
		for i := range r.Cells {
			c := &r.Cells[i]
			if c.Cell.Phase == "aa" || c.Measure.Requests == 0 {
				continue
			}
			k := point{key{plan.Group{Load: c.Cell.Load, Cached: c.Cell.CachedShare}, c.Cell.Arm}, c.Cell.EffISL}
			out[k] = append(out[k], c)
		}
		return out
	}
	ca, cb := gather(a), gather(b)
	var keys []key
	points := map[key][]point{}
	for p := range ca {
		if len(cb[p]) > 0 {
			if points[p.key] == nil {
				keys = append(keys, p.key)
			}
			points[p.key] = append(points[p.key], p)
		}
	}
	slices.SortFunc(keys, func(x, y key) int { return strings.Compare(x.group.Key()+string(x.arm), y.group.Key()+string(y.arm)) })
	var out []Change
	for _, k := range keys {
		for _, m := range metrics {
			// The mean over points of the difference of mean logs; its variance
			// from the repeats within each point.
			var sum, variance, n, df float64
			for _, p := range points[k] {
				la, lb := logs(ca[p], m), logs(cb[p], m)
				if len(la) == 0 || len(lb) == 0 {
					continue
				}
				sum += stats.Mean(lb) - stats.Mean(la)
				if len(la) > 1 && len(lb) > 1 {
					variance += stats.Variance(la)/float64(len(la)) + stats.Variance(lb)/float64(len(lb))
					df += float64(len(la) + len(lb) - 2)
				}
				n++
			}
			if n == 0 {
				continue
			}
			iv := stats.Interval{Value: sum / n, Low: math.Inf(-1), High: math.Inf(1), N: int(n)}
			if df > 0 {
				h := stats.StudentQuantile(0.975, df) * math.Sqrt(variance) / n
				iv.Low, iv.High = iv.Value-h, iv.Value+h
			}
			c := Change{Metric: m.name, Group: k.group, Arm: k.arm, Change: iv.Map(math.Expm1), Points: int(n), Verdict: "same"}
			if iv.Excludes(0) {
				c.Verdict = "worse"
				if iv.Value < 0 == m.lower {
					c.Verdict = "better"
				}
			}
			out = append(out, c)
		}
	}
	return out
}

func logs(cells []*experiment.CellResult, m metric) []float64 {
	var out []float64
	for _, c := range cells {
		if v := m.of(c); v > 0 {
			out = append(out, math.Log(v))
		}
	}
	return out
}

// missingGroups names the groups of a that b lacks.
func missingGroups(a, b *experiment.Result) []string {
	var names []string
	for i := range a.Groups {
		g := a.Groups[i].Group
		if !slices.ContainsFunc(b.Groups, func(o experiment.GroupResult) bool { return o.Group == g }) {
			names = append(names, g.String())
		}
	}
	return names
}

// CompareText writes the comparison for a terminal.
func CompareText(w io.Writer, a, b *experiment.Result, changes []Change) error {
	out := &strings.Builder{}
	differ, worse := 0, 0
	for _, c := range changes {
		if c.Verdict != "same" {
			differ++
		}
		if c.Verdict == "worse" {
			worse++
		}
	}
	printable.Fprintf(out, "COMPARE  %s (A) with %s (B): %d of %d differences exclude zero, %d for the worse\n", a.Name, b.Name, differ, len(changes), worse)
	for _, r := range []*experiment.Result{a, b} {
		if !r.Valid {
			printable.Fprintf(out, "  CAUTION  %s is not valid: %s\n", r.Name, r.Sentence)
		}
		if r.Partial != "" {
			printable.Fprintf(out, "  CAUTION  %s is partial: %s\n", r.Name, r.Partial)
		}
	}
	for _, only := range [][2]*experiment.Result{{a, b}, {b, a}} {
		if names := missingGroups(only[0], only[1]); len(names) > 0 {
			printable.Fprintf(out, "  CAUTION  not compared, because only %s has it: %s\n", only[0].Name, strings.Join(names, ", "))
		}
	}
	if a.Spec.OSL != b.Spec.OSL {
		printable.Fprintf(out, "  CAUTION  the runs' answers differ in length (osl %d and %d)\n", a.Spec.OSL, b.Spec.OSL)
	}
	fmt.Fprintln(out)
	var rows [][]string
	for _, c := range changes {
		iv := "one repeat: none"
		if !math.IsInf(c.Change.High, 0) {
			iv = fmt.Sprintf("%+.1f%% .. %+.1f%%", c.Change.Low*100, c.Change.High*100)
		}
		rows = append(rows, []string{c.Group.String(), string(c.Arm), c.Metric, fmt.Sprintf("%+.1f%%", c.Change.Value*100), iv, strconv.Itoa(c.Points), c.Verdict})
	}
	if err := table.Figures(out, []string{"LOAD", "ARM", "METRIC", "B vs A", "95% interval", "POINTS", "VERDICT"}, rows, 0, 1, 2, 4, 6); err != nil {
		return err
	}
	for i := range a.Groups {
		ga := &a.Groups[i]
		for j := range b.Groups {
			gb := &b.Groups[j]
			if ga.Group != gb.Group {
				continue
			}
			for _, x := range ga.Crossings {
				if y := gb.Crossing(x.Objective); y != nil {
					printable.Fprintf(out, "\n  %s, crossover by %s\n    A  %s\n    B  %s\n", ga.Group, x.Objective, x.Sentence, y.Sentence)
				}
			}
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// Condition is a --fail-if: a metric that may not rise or fall by more.
type Condition struct {
	Metric string
	// Above is whether it fails when the change is above Limit, else below.
	Above bool
	Limit float64
	text  string
}

// ParseCondition reads "ttft_p50>5%" or "goodput<-3%".
func ParseCondition(s string) (Condition, error) {
	i := strings.IndexAny(s, "<>")
	c := Condition{text: s}
	if i < 0 {
		return c, fmt.Errorf("--fail-if %q is not METRIC>PERCENT%% or METRIC<PERCENT%%", s)
	}
	c.Metric, c.Above = strings.TrimSpace(s[:i]), s[i] == '>'
	if !slices.Contains(Metrics(), c.Metric) {
		return c, fmt.Errorf("--fail-if %q: the metric is not one of %s", s, strings.Join(Metrics(), ", "))
	}
	v, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(s[i+1:]), "%"), 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		return c, fmt.Errorf("--fail-if %q: the limit is not a number of percent", s)
	}
	c.Limit = v / 100
	return c, nil
}

// Failed lists the changes that break a condition: the estimate is beyond the
// limit and the interval excludes that nothing changed.
func (c Condition) Failed(changes []Change) []string {
	var out []string
	for _, x := range changes {
		if x.Metric != c.Metric || x.Verdict == "same" {
			continue
		}
		if c.Above && x.Change.Value > c.Limit || !c.Above && x.Change.Value < c.Limit {
			out = append(out, fmt.Sprintf("%s: %s, %s changed by %+.1f%% [%+.1f, %+.1f]", c.text, x.Group, x.Arm, x.Change.Value*100, x.Change.Low*100, x.Change.High*100))
		}
	}
	return out
}

// Finite replaces open ends by the estimate's own value, for JSON; such a change
// has the verdict "same".
func Finite(changes []Change) []Change {
	out := slices.Clone(changes)
	for i := range out {
		if c := &out[i].Change; math.IsInf(c.High, 0) || math.IsInf(c.Low, 0) {
			c.Low, c.High = c.Value, c.Value
		}
	}
	return out
}
