package experiment

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
)

// VoidError is a cell whose figures mean nothing: the fleet changed under it.
type VoidError struct{ Reason string }

// Error is the reason.
func (e *VoidError) Error() string { return "cell is void: " + e.Reason }

// ErrStopped ends a run early with what is done so far.
var ErrStopped = errors.New("stopped")

// ErrSkipped is a cell that was left out by hand.
var ErrSkipped = errors.New("skipped by hand")

// Event is what a run reports while it lasts.
type Event struct {
	// Kind is "phase", "start", "cell", "void" or "skip".
	Kind string
	Text string
	Cell plan.Cell
	// Result is set in a "cell".
	Result *CellResult
	// Done and Total count cells; Total grows when refinement adds some.
	Done, Total int
	Elapsed     time.Duration
	// Remaining is an estimate; 0 while nothing is known, and when nothing is left.
	Remaining time.Duration
}

// Runner is one experiment.
type Runner struct {
	Spec  plan.Spec
	Block int
	// Measure measures a cell. A *VoidError asks for the cell to be measured again.
	Measure func(ctx context.Context, c plan.Cell) (*Measure, error)
	// Now counts from the start of the run, or from its resumption.
	Now func() time.Duration
	// Done has the cells of a run that is resumed, by id. Times continue from the end of
	// the last of them.
	Done map[string]CellResult
	// OnEvent and OnCell are called with what happens; OnCell keeps finished cells. Each
	// may be nil.
	OnEvent func(Event)
	OnCell  func(CellResult) error
	// Stop, when it answers true, ends the run after the present cell.
	Stop func() bool
	// Enter, when set, is called before a cell and may wait. The cell is measured with the
	// context that it gives, until done; when that ends before the run's, the cell is void,
	// and what is left of its pair is left out too.
	Enter func(run context.Context) (cell context.Context, done func())

	cells   []CellResult
	before  time.Duration // what the run that is resumed took
	total   int
	spent   float64 // seconds of fresh cells
	weight  float64 // their tokens
	left    float64 // tokens still to come
	voided  int
	skipped int
	warmup  Warmup
}

// maxVoids is how often a cell is tried again.
const maxVoids = 3

// warmupRounds bounds the warm-up.
const warmupRounds = 8

// steadyDrift is the change between rounds at which a warm-up ends.
const steadyDrift = 0.05

// Run measures everything and gives the result. When ctx ends, or Stop says
// so, the result is of what was measured and says that it is partial.
func (r *Runner) Run(ctx context.Context) (*Result, error) {
	cause := r.run(ctx)
	if cause != nil && !errors.Is(cause, ErrStopped) && ctx.Err() == nil {
		return r.analyse(cause.Error()), cause
	}
	partial := ""
	switch {
	case ctx.Err() != nil:
		partial = "interrupted"
	case errors.Is(cause, ErrStopped):
		partial = "stopped by hand"
	}
	return r.analyse(partial), ctx.Err()
}

// now is the time of measurement since the run began; breaks before resumptions are left
// out.
func (r *Runner) now() time.Duration { return r.before + r.Now() }

func (r *Runner) run(ctx context.Context) error {
	for _, c := range r.Done {
		r.before = max(r.before, c.End)
	}
	if err := r.warm(ctx); err != nil {
		return err
	}
	groups := r.Spec.Groups()
	var want []plan.Wanted
	for _, g := range groups {
		want = append(want, r.Spec.Grid(g, r.Block)...)
	}
	pairs := interleave(r.Spec.Pairs("grid", want), r.Spec.AAPairs(0))
	r.event(Event{Kind: "phase", Text: fmt.Sprintf("grid of %d cells", 2*len(pairs))})
	if err := r.pairs(ctx, pairs); err != nil {
		return err
	}
	// One alarm in a hundred is chance: an A/A check that fails is repeated with
	// as many pairs again, and judged by all of them.
	for more := 1; more <= 2 && r.aaFails(r.aa()); more++ {
		r.event(Event{Kind: "phase", Text: "local against local differs: measured again with more pairs"})
		if err := r.pairs(ctx, r.Spec.AAPairs(more)); err != nil {
			return err
		}
	}
	if r.Spec.NoRefine {
		return nil
	}
	// Refinement goes over all groups at once, so that they stay interleaved.
	for round := range 12 {
		want = want[:0]
		for _, g := range groups {
			want = append(want, r.refine(g)...)
		}
		if len(want) == 0 {
			return nil
		}
		phase := "refine"
		if round > 0 {
			phase = "repeat"
		}
		pairs := r.Spec.Pairs(phase, want)
		r.event(Event{Kind: "phase", Text: fmt.Sprintf("%s: %d cells around the crossing", phase, 2*len(pairs))})
		if err := r.pairs(ctx, pairs); err != nil {
			return err
		}
	}
	return nil
}

func (r *Runner) event(e Event) {
	if r.OnEvent != nil {
		r.OnEvent(e)
	}
}

// warm sends load until its figures stop drifting.
func (r *Runner) warm(ctx context.Context) error {
	s := r.Spec
	load := s.Loads[0]
	for _, l := range s.Loads {
		if l.Concurrency > load.Concurrency || l.Rate > load.Rate {
			load = l
		}
	}
	isl := s.ISL[len(s.ISL)/2]
	r.event(Event{Kind: "phase", Text: fmt.Sprintf("warm-up, 2 to %d rounds, until ttft changes by less than %.0f%%", warmupRounds, steadyDrift*100)})
	last := map[plan.Arm]float64{}
	for round := range warmupRounds {
		worst := 0.0
		for _, arm := range []plan.Arm{plan.Local, plan.Remote} {
			c := s.NewCell("warmup", load, 0, isl, 0, arm, round)
			c.ID = "warmup/" + c.ID
			// A cold fleet must not be hit by all slots at once for long.
			c.Requests = min(c.Requests, 32)
			res, err := r.Cell(ctx, c)
			if errors.Is(err, ErrSkipped) {
				r.event(Event{Kind: "phase", Text: "the warm-up was ended by hand"})
				return nil
			}
			if err != nil {
				return err
			}
			r.warmup.Cells++
			r.warmup.Requests += res.Measure.Requests
			now := ttft(res)
			if last[arm] > 0 && now > 0 {
				worst = math.Max(worst, math.Abs(math.Log(now/last[arm])))
			} else {
				worst = math.Inf(1)
			}
			last[arm] = now
		}
		r.event(Event{Kind: "phase", Text: fmt.Sprintf("warm-up round %d: ttft p50 local %.1f ms, remote %.1f ms", round+1, last[plan.Local], last[plan.Remote])})
		if round == 0 {
			continue
		}
		r.warmup.Drifts = append(r.warmup.Drifts, math.Min(math.Expm1(worst), 1e6))
		if worst < math.Log1p(steadyDrift) {
			r.warmup.Steady = true
			break
		}
	}
	r.event(Event{Kind: "phase", Text: fmt.Sprintf("warm-up over after %d cells: %s", r.warmup.Cells, r.warmup.text())})
	return nil
}

func (w Warmup) text() string {
	if len(w.Drifts) == 0 {
		return "no drift measured"
	}
	last := w.Drifts[len(w.Drifts)-1]
	if w.Steady {
		return fmt.Sprintf("ttft drift %.1f%%: steady", last*100)
	}
	return fmt.Sprintf("ttft still drifts by %.1f%% between rounds", last*100)
}

// interleave spreads the A/A pairs evenly over the grid.
func interleave(grid, aa []plan.Pair) []plan.Pair {
	out := make([]plan.Pair, 0, len(grid)+len(aa))
	k := 0
	for i, p := range grid {
		for k < len(aa) && k*len(grid) <= i*len(aa) {
			out = append(out, aa[k])
			k++
		}
		out = append(out, p)
	}
	return append(out, aa[k:]...)
}

func weight(c plan.Cell) float64 {
	return float64(c.Requests+c.Ramp) * (float64(c.ISL()) + 20*float64(c.OSL)) / math.Max(1, math.Sqrt(float64(c.Load.Concurrency)))
}

func (r *Runner) pairs(ctx context.Context, pairs []plan.Pair) error {
	r.total += 2 * len(pairs)
	for _, p := range pairs {
		for _, c := range p {
			if _, ok := r.Done[c.ID]; !ok {
				r.left += weight(c)
			}
		}
	}
	for _, p := range pairs {
		for i, c := range p {
			res, err := r.Cell(ctx, c)
			if errors.Is(err, ErrSkipped) {
				r.skipped++
				for _, c := range p[i:] {
					r.total--
					r.left -= weight(c)
				}
				break
			}
			if err != nil {
				return err
			}
			r.cells = append(r.cells, *res)
			e := Event{Kind: "cell", Cell: c, Result: res, Done: len(r.cells), Total: r.total, Elapsed: r.now()}
			if r.weight > 0 {
				e.Remaining = time.Duration(r.left * r.spent / r.weight * float64(time.Second))
			}
			r.event(e)
		}
	}
	return nil
}

// Cell measures a cell, again when it is void, or takes it from the run that
// is resumed. ErrStopped and ErrSkipped say what a person wanted instead.
func (r *Runner) Cell(ctx context.Context, c plan.Cell) (*CellResult, error) {
	// A warm-up warms the engines of now.
	if res, ok := r.Done[c.ID]; ok && res.Measure != nil && c.Phase != "warmup" {
		return &res, nil
	}
	res := &CellResult{Cell: c}
	for res.Measure == nil {
		err := r.try(ctx, res)
		var void *VoidError
		switch {
		case err == nil:
		case ctx.Err() == nil && errors.As(err, &void):
			res.Voids = append(res.Voids, void.Reason)
			r.voided++
			r.event(Event{Kind: "void", Cell: c, Text: void.Reason})
			if len(res.Voids) > maxVoids {
				return nil, fmt.Errorf("cell %s was void %d times: %s", c.ID, len(res.Voids), void.Reason)
			}
		default:
			return nil, err
		}
	}
	if c.Phase != "warmup" {
		r.spent += (res.End - res.Start).Seconds()
		r.weight += weight(c)
		r.left -= weight(c)
	}
	if r.OnCell != nil {
		if err := r.OnCell(*res); err != nil {
			return nil, err
		}
	}
	return res, nil
}

// try measures a cell once.
func (r *Runner) try(ctx context.Context, res *CellResult) error {
	cell := ctx
	if r.Enter != nil {
		var done func()
		cell, done = r.Enter(ctx)
		defer done()
	}
	if r.Stop != nil && r.Stop() {
		return ErrStopped
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// A cell that is tried again must not meet the prompts of the first try.
	c := res.Cell
	if n := len(res.Voids); n > 0 {
		c.ID = fmt.Sprintf("%s#%d", c.ID, n)
	}
	r.event(Event{Kind: "start", Cell: res.Cell, Done: len(r.cells), Total: r.total, Elapsed: r.now()})
	res.Start = r.now()
	m, err := r.Measure(cell, c)
	res.End = r.now()
	if cell.Err() != nil && ctx.Err() == nil { // also when it came too late to cut anything
		r.event(Event{Kind: "skip", Cell: res.Cell, Text: ErrSkipped.Error()})
		return ErrSkipped
	}
	if err != nil {
		return err
	}
	res.Measure = m
	return nil
}

// points gathers what a group has: for each effective length the log ratios of
// its repeats.
func (r *Runner) points(g plan.Group) (eff []int, cached map[int]int, arms map[int]map[plan.Arm][]*CellResult) {
	cached, arms = map[int]int{}, map[int]map[plan.Arm][]*CellResult{}
	for i := range r.cells {
		c := &r.cells[i]
		if c.Cell.Phase == "aa" || c.Cell.Phase == "warmup" || c.Cell.Load != g.Load || c.Cell.CachedShare != g.Cached || c.Measure == nil {
			continue
		}
		e := c.Cell.EffISL
		if arms[e] == nil {
			arms[e] = map[plan.Arm][]*CellResult{}
			eff = append(eff, e)
		}
		cached[e] = c.Cell.CachedTokens
		list := arms[e][c.Cell.Arm]
		for len(list) <= c.Cell.Repeat {
			list = append(list, nil)
		}
		list[c.Cell.Repeat] = c
		arms[e][c.Cell.Arm] = list
	}
	slices.Sort(eff)
	return eff, cached, arms
}

// series is a figure of the paired cells: f gets a local and a remote cell of
// the same repeat.
func series(eff []int, arms map[int]map[plan.Arm][]*CellResult, f func(l, m *CellResult) float64) []stats.Point {
	var out []stats.Point
	for _, e := range eff {
		l, m := arms[e][plan.Local], arms[e][plan.Remote]
		p := stats.Point{X: float64(e)}
		for i := range min(len(l), len(m)) {
			v := math.NaN()
			if l[i] != nil && m[i] != nil {
				v = f(l[i], m[i])
			}
			p.D = append(p.D, v)
		}
		out = append(out, p)
	}
	return out
}

func ttftRatio(l, m *CellResult) float64 { return math.Log(ttft(l) / ttft(m)) }

// noisyCV is the repeat CV above which no number is given.
const noisyCV = 0.15

func (r *Runner) cross(g plan.Group) (stats.Crossover, []stats.Point, float64) {
	eff, _, arms := r.points(g)
	pts := series(eff, arms, ttftRatio)
	cv := medianCV(eff, arms)
	return stats.Cross(pts, stats.CrossOptions{Level: r.Spec.Level, Seed: r.Spec.Seed, Noisy: cv > noisyCV}), pts, cv
}

// medianCV is the median over points and arms of the repeats' variation.
func medianCV(eff []int, arms map[int]map[plan.Arm][]*CellResult) float64 {
	var cvs []float64
	for _, e := range eff {
		for _, arm := range []plan.Arm{plan.Local, plan.Remote} {
			var xs []float64
			for _, c := range arms[e][arm] {
				if c != nil {
					xs = append(xs, ttft(c))
				}
			}
			if cv := stats.CV(xs); !math.IsNaN(cv) {
				cvs = append(cvs, cv)
			}
		}
	}
	if len(cvs) == 0 {
		return 0
	}
	return stats.Median(cvs)
}

// refine is what would sharpen a group's answer.
func (r *Runner) refine(g plan.Group) []plan.Wanted {
	c, pts, cv := r.cross(g)
	if cv > noisyCV {
		return nil
	}
	a := r.adaptive(g)
	have := map[int]int{}
	for _, p := range pts {
		have[int(p.X)] = len(p.D)
	}
	var out []plan.Wanted
	for _, w := range a.Next(have, c) {
		cached := plan.CachedFor(w.X, g.Cached, r.Block)
		out = append(out, plan.Wanted{Group: g, EffISL: w.X, Cached: cached, From: have[w.X], To: w.Repeats})
	}
	return out
}

func (r *Runner) adaptive(g plan.Group) Adaptive {
	a := Adaptive{Grain: max(r.Block, 1), Repeats: r.Spec.Repeats, MaxRepeats: r.Spec.MaxRepeats}
	for _, isl := range r.Spec.ISL {
		e, _ := plan.Point(isl, g.Cached, r.Block)
		a.Coarse = append(a.Coarse, e)
	}
	slices.Sort(a.Coarse)
	a.Coarse = slices.Compact(a.Coarse)
	return a
}
