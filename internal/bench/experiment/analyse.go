package experiment

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/table"
)

// analyse turns the cells into the result.
func (r *Runner) analyse(partial string) *Result {
	res := &Result{
		Schema: Schema, Spec: r.Spec, Partial: partial, Warmup: r.warmup, Cells: r.cells, Voided: r.voided, Skipped: r.skipped,
		Seconds: r.now().Seconds(), Groups: []GroupResult{}, Gates: []Gate{}, Cautions: []string{},
	}
	if res.Cells == nil {
		res.Cells = []CellResult{}
	}
	if res.Warmup.Drifts == nil {
		res.Warmup.Drifts = []float64{}
	}
	for _, g := range r.Spec.Groups() {
		if gr := r.group(g); len(gr.Points) > 0 {
			res.Groups = append(res.Groups, gr)
		}
	}
	if n := r.skipped; n > 0 {
		res.Cautions = append(res.Cautions, fmt.Sprintf("%d cell(s) were skipped by hand: their pairs are missing, and what was chosen to be skipped may bend the result", n))
	}
	if len(r.cells) == 0 {
		res.Sentence = "nothing was measured"
		return res
	}
	res.Gates, res.AA = r.gates(res)
	res.Valid = true
	for _, g := range res.Gates {
		res.Valid = res.Valid && (g.Passed == nil || *g.Passed)
	}
	r.conclude(res)
	return res
}

func (r *Runner) group(g plan.Group) GroupResult {
	eff, cached, arms := r.points(g)
	c, pts, cv := r.cross(g)
	out := GroupResult{Group: g, CV: cv, Points: []PointResult{}, Crossings: []Crossing{}}
	k := 0
	for i, e := range eff {
		l, m := arms[e][plan.Local], arms[e][plan.Remote]
		p := PointResult{EffISL: e, Cached: cached[e], Local: armPoint(l, r.Spec.Level), Remote: armPoint(m, r.Spec.Level), Verdict: "tie"}
		n := 0
		for _, d := range pts[i].D {
			if !math.IsNaN(d) && !math.IsInf(d, 0) {
				n++
			}
		}
		p.Repeats = n
		if n > 0 && k < len(c.Diff) {
			d := c.Diff[k]
			p.Fit = c.Fit[k]
			k++
			p.LogRatio = bounds(d.Value, d.Low, d.High)
			// The log ratio is local over remote; the difference is remote
			// against local.
			p.Diff = bounds(math.Expm1(-d.Value), math.Expm1(-d.High), math.Expm1(-d.Low))
			if d.Excludes(0) {
				p.Verdict = "local"
				if d.Value > 0 {
					p.Verdict = "remote"
				}
			}
		}
		out.Points = append(out.Points, p)
	}
	out.Crossings = append(out.Crossings, r.crossing("ttft", c, cv, eff))
	if slo := r.Spec.SLO.ITL; slo > 0 {
		limit := float64(slo) / 1e6
		itl := stats.Cross(series(eff, arms, func(l, _ *CellResult) float64 { return math.Log(l.Measure.ITL.Tail() / limit) }), stats.CrossOptions{Level: r.Spec.Level, Seed: r.Spec.Seed})
		out.Crossings = append(out.Crossings, r.crossing("itl", itl, 0, eff))
	}
	if r.Spec.SLO.Any() {
		pts := series(eff, arms, func(l, m *CellResult) float64 {
			return math.Log((float64(m.Measure.Good) + 0.5) / (float64(l.Measure.Good) + 0.5) * float64(l.Measure.Requests+1) / float64(m.Measure.Requests+1))
		})
		good := stats.Cross(pts, stats.CrossOptions{Level: r.Spec.Level, Seed: r.Spec.Seed})
		same := true
		for _, d := range good.Diff {
			same = same && math.Abs(d.Value) < 0.02
		}
		if same {
			good.Answer = Tie
		}
		out.Crossings = append(out.Crossings, r.crossing("goodput", good, 0, eff))
	}
	return out
}

func armPoint(cells []*CellResult, level float64) ArmPoint {
	pick := func(f func(*CellResult) float64) []float64 {
		var xs []float64
		for _, c := range cells {
			if c != nil {
				xs = append(xs, f(c))
			}
		}
		return xs
	}
	med := func(f func(*CellResult) float64) float64 {
		if v := stats.Median(pick(f)); !math.IsNaN(v) {
			return v
		}
		return 0
	}
	stage := func(f func(*Stages) *float64) *float64 {
		var xs []float64
		for _, c := range cells {
			if c != nil && f(&c.Measure.Stages) != nil {
				xs = append(xs, *f(&c.Measure.Stages))
			}
		}
		return Known(stats.Median(xs))
	}
	a := ArmPoint{
		TTFTP50:  med(ttft),
		TTFTP99:  med(func(c *CellResult) float64 { return c.TTFT().Tail() }),
		ITLP50:   med(func(c *CellResult) float64 { return c.Measure.ITL.P50 }),
		ITLP99:   med(func(c *CellResult) float64 { return c.Measure.ITL.Tail() }),
		TPOTP50:  med(func(c *CellResult) float64 { return c.Measure.TPOT.P50 }),
		E2EP50:   med(func(c *CellResult) float64 { return c.Measure.E2E.P50 }),
		GoodPct:  med(func(c *CellResult) float64 { return 100 * share(c.Measure.Good, c.Measure.Requests+c.Measure.Failed) }),
		GoodRate: med(func(c *CellResult) float64 { return c.Measure.GoodPerSecond }),
		Rate:     med(func(c *CellResult) float64 { return c.Measure.RequestsPerSecond }),
		Tokens:   med(func(c *CellResult) float64 { return c.Measure.TokensPerSecond }),
		Stages: Stages{
			Router:       stage(func(s *Stages) *float64 { return s.Router }),
			PrefillQueue: stage(func(s *Stages) *float64 { return s.PrefillQueue }),
			Prefill:      stage(func(s *Stages) *float64 { return s.Prefill }),
			Transfer:     stage(func(s *Stages) *float64 { return s.Transfer }),
			FirstDecode:  stage(func(s *Stages) *float64 { return s.FirstDecode }),
		},
	}
	if cv := stats.CV(pick(ttft)); !math.IsNaN(cv) {
		a.CV = cv
	}
	// The band of the curve: the mean of the logs, back from the logs.
	logs := pick(func(c *CellResult) float64 { return math.Log(ttft(c)) })
	if i := stats.MeanInterval(logs, level); len(logs) > 1 && !math.IsInf(i.High, 0) && !math.IsNaN(i.Low) {
		a.Low, a.High = math.Exp(i.Low), math.Exp(i.High)
	} else {
		a.Low, a.High = a.TTFTP50, a.TTFTP50
	}
	return a
}

func share(n, of int) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

// crossing puts a crossover into words.
func (r *Runner) crossing(objective string, c stats.Crossover, cv float64, eff []int) Crossing {
	out := Crossing{Objective: objective, Answer: c.Answer, Step: c.Step, Margin: c.Margin}
	low, high := c.Low, c.High
	if low <= 0 {
		low = math.NaN()
	}
	out.At = bounds(c.At, low, high)
	first, last := 0, 0
	if len(eff) > 0 {
		first, last = eff[0], eff[len(eff)-1]
	}
	ends := func() string {
		switch {
		case out.At.Low == nil && out.At.High == nil:
			return "no bound on either side"
		case out.At.Low == nil:
			return fmt.Sprintf("below %s", table.Count(int(high)))
		case out.At.High == nil:
			return fmt.Sprintf("above %s", table.Count(int(low)))
		}
		return fmt.Sprintf("%s..%s", table.Count(int(low)), table.Count(int(math.Ceil(high))))
	}
	what := map[string]string{"ttft": "the lower ttft p50", "goodput": "the higher goodput"}[objective]
	switch c.Answer {
	case stats.Crosses:
		out.Sentence = fmt.Sprintf("remote prefill has %s above about %s effective tokens (%.0f%% CI %s)", what, table.Count(int(math.Round(c.At))), r.Spec.Level*100, ends())
		if objective == "itl" {
			out.Sentence = fmt.Sprintf("local prefill breaks the itl target (p99 %s) from about %s effective tokens (%s)", r.Spec.SLO.ITL, table.Count(int(math.Round(c.At))), ends())
		}
	case stats.FirstWins:
		out.Sentence = wins(objective, "local", "up to "+table.Count(last), c)
		if objective == "itl" {
			out.Sentence = "local prefill never breaks the itl target"
		}
	case stats.SecondWins:
		out.Sentence = wins(objective, "remote", "from "+table.Count(first), c)
		if objective == "itl" {
			out.Sentence = fmt.Sprintf("local prefill breaks the itl target at every length from %s", table.Count(first))
		}
	case stats.Cliff:
		out.Sentence = fmt.Sprintf("the arms change places in one jump between %s: something in the engines switches there", ends())
	case stats.Bracket:
		why := "it may be outside the measured lengths, too"
		if objective == "ttft" && cv > noisyCV {
			why = fmt.Sprintf("repeats vary by %.0f%% (limit %.0f%%)", cv*100, noisyCV*100)
		}
		where := ends() + " tokens"
		switch {
		case out.At.Low == nil && out.At.High == nil:
			where = "anywhere"
		case out.At.Low != nil && out.At.High != nil:
			where = "in " + where
		}
		out.Sentence = fmt.Sprintf("too noisy for a number: the crossing is %s (%s). What to do: measure on quieter machines, or with a higher --repeat or a wider --isl", where, why)
	case Tie:
		out.Sentence = "the arms do not differ"
	default:
		out.Sentence = "not enough was measured"
	}
	return out
}

// wins says that one arm is the better one over the whole range, and no more than
// the intervals of the single lengths grant: with a tie among them there is no
// margin. The margin is in the figures of the table, remote against local.
func wins(objective, winner, where string, c stats.Crossover) string {
	if c.Margin > 0 {
		margin := fmt.Sprintf("remote's ttft p50 is longer by at least %.0f%%", math.Floor(c.Margin*100))
		switch {
		case objective == "goodput":
			margin = fmt.Sprintf("its goodput is higher by at least %.0f%%", math.Floor(c.Margin*100))
		case winner == "remote":
			margin = fmt.Sprintf("its ttft p50 is shorter by at least %.0f%%", math.Floor(100*c.Margin/(1+c.Margin)))
		}
		return fmt.Sprintf("%s prefill wins everywhere %s (%s)", winner, where, margin)
	}
	won, lost := 0, 0
	for _, d := range c.Diff {
		if d.Excludes(0) {
			if d.Value > 0 == (winner == "remote") {
				won++
			} else {
				lost++
			}
		}
	}
	text := fmt.Sprintf("%s prefill is better at %d of %d lengths %s, %d tie", winner, won, len(c.Diff), where, len(c.Diff)-won-lost)
	if lost > 0 {
		text += fmt.Sprintf(", at %d it is worse", lost)
	}
	return text
}

// Review judges a finished run by the rules of this version: everything but the cells and
// what the router had learned is recomputed from the cells.
func Review(res *Result) *Result {
	if res.Target == nil || len(res.Cells) == 0 {
		return res
	}
	r := &Runner{
		Spec: res.Spec, Block: res.Target.Block, Now: func() time.Duration { return time.Duration(res.Seconds * float64(time.Second)) },
		cells: res.Cells, warmup: res.Warmup, voided: res.Voided, skipped: res.Skipped,
	}
	out := r.analyse(res.Partial)
	out.Name, out.Version, out.Created, out.Command, out.Target, out.Hardware, out.Simulated, out.Learned = res.Name, res.Version, res.Created, res.Command, res.Target, res.Hardware, res.Simulated, res.Learned
	return out
}

// conclude writes the sentence, the cautions and the recommendation.
func (r *Runner) conclude(res *Result) {
	if len(res.Groups) == 0 {
		res.Sentence = "nothing was measured"
		return
	}
	g := res.Headline()
	c := g.Crossing(r.Spec.Objective)
	if c == nil {
		c = &g.Crossings[0]
	}
	res.Sentence = fmt.Sprintf("%s: %s", g.Group, c.Sentence)
	failed := slices.DeleteFunc(slices.Clone(res.Gates), func(g Gate) bool { return g.Passed == nil || *g.Passed })
	if len(failed) > 0 {
		res.Sentence = fmt.Sprintf("not valid: %s. What to do: %s", failed[0].Text, failed[0].Next)
		if more := len(failed) - 1; more > 0 {
			res.Sentence += fmt.Sprintf(" (gates that also failed: %d, see below)", more)
		}
		return
	}
	if res.Partial != "" {
		res.Sentence = "partial (" + res.Partial + "): " + res.Sentence
		return
	}
	if c.Answer != stats.Crosses && c.Answer != stats.Cliff {
		return
	}
	at := *c.At.Value
	eff := max(round(int(math.Round(at)), max(r.Block, 1)), max(r.Block, 1))
	res.Recommend = &Recommendation{
		EffISL: eff, Objective: c.Objective, Group: g.Group,
		Because: fmt.Sprintf("multiple of block %d nearest to %s", max(r.Block, 1), table.Count(int(math.Round(at)))),
		Configs: configs(eff),
	}
	for _, o := range res.Groups {
		oc := o.Crossing(c.Objective)
		if o.Group == g.Group || oc == nil || oc.Answer != stats.Crosses {
			continue
		}
		if low, high := val(oc.At.Low), val(oc.At.High); float64(eff) < low || float64(eff) > high {
			res.Cautions = append(res.Cautions, fmt.Sprintf("at %s the crossing is elsewhere: about %s effective tokens", o.Group, table.Count(int(*oc.At.Value))))
		}
	}
}

// configs are the settings that make a router use a threshold.
func configs(eff int) []Config {
	return []Config{
		{System: "dynctl", Text: fmt.Sprintf("routing: {threshold: %d, threshold_on: eff_isl}", eff), Note: fmt.Sprintf("or serve --routing-threshold %d", eff)},
		{
			System: "dynamo", Text: fmt.Sprintf(`--router-conditional-disagg-config '{"policy": "isl_or_load", "eff_isl_threshold": %d, "eff_isl_ratio_threshold": 1.0}'`, eff),
			Note: "it stays local only when eff_isl/isl is below the ratio too, so a cold prompt (ratio 1) goes remote whatever the threshold",
		},
		{System: "llm-d", Text: fmt.Sprintf("- type: prefix-based-pd-decider\n  parameters: {nonCachedTokens: %d}", eff), Note: "counts uncached input tokens, as eff_isl does"},
		{System: "production-stack", Text: fmt.Sprintf("--routing-logic disaggregated_prefill_orchestrated --routing-threshold %d", eff), Note: "where the router has this flag it counts the whole prompt; dynctl serve takes it in its place"},
	}
}
