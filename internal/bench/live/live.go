// Package live measures cells against a router and its engines over HTTP.
package live

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/bench/workload"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/wait"
)

// Bench measures cells on one target.
type Bench struct {
	Target *fleet.Target
	Facts  *fleet.Facts
	Spec   plan.Spec
	Pool   workload.Pool
	// Timeout of one request; 0 means the load client's.
	Timeout time.Duration
	// Progress is of the cell under way.
	Progress *loadgen.Progress
	// OnResult is called with every request; may be nil.
	OnResult func(c plan.Cell, r *loadgen.Result)
	// Patience is how long a lost worker is waited for; 0 means 2 minutes.
	Patience time.Duration
}

// keep is how many results of a cell are held for exact quantiles and
// receipts.
const keep = 20000

// maxReceipts is how many receipts are looked at after a cell: what the
// router's ring holds.
const maxReceipts = 4096

// maxEvents is how many of the router's events of a cell are looked at.
const maxEvents = 10000

// Measure runs a threshold cell.
func (b *Bench) Measure(ctx context.Context, c plan.Cell) (*experiment.Measure, error) {
	src := &workload.Cell{
		Series: workload.Series{Pool: b.Pool, Model: b.Facts.Model, Header: c.Arm.Header(), Name: c.ID, Salt: b.Spec.Salt, Ramp: c.Ramp, N: c.Requests},
		Fresh:  c.EffISL, OSL: c.OSL,
	}
	if c.CachedTokens > 0 {
		src.Prefix = b.Pool.Tokens(nil, rand.New(rand.NewPCG(workload.Seed("prefix", b.Spec.Salt, c.ID), 1)), c.CachedTokens)
		if err := b.prime(ctx, src.Prefix); err != nil {
			return nil, err
		}
	}
	return b.Run(ctx, c, src, nil)
}

// prime puts a prefix into the cache of every rank, directly at its engine.
func (b *Bench) prime(ctx context.Context, prefix []uint32) error {
	// One token more: an engine never takes the last one from its cache.
	body := workload.Body(nil, b.Facts.Model, append(slices.Clone(prefix), b.Pool[0]), 1)
	for i := range b.Facts.Workers {
		w := &b.Facts.Workers[i]
		for dp := range max(w.DP, 1) {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimRight(w.URL, "/")+"/v1/completions", bytes.NewReader(body))
			if err != nil {
				return err
			}
			req.Header.Set("Content-Type", "application/json")
			if w.DP > 1 {
				req.Header.Set("X-data-parallel-rank", fmt.Sprint(dp))
			}
			if _, err := b.Target.Do(req); err != nil {
				return &experiment.VoidError{Reason: fmt.Sprintf("prefix of %s: %v", w.Name, err)}
			}
		}
	}
	return nil
}

// Run sends what a source makes, as the cell's load says or at the times of a
// schedule, and reads the engines' counters around it.
func (b *Bench) Run(ctx context.Context, c plan.Cell, src loadgen.Source, schedule []time.Duration) (*experiment.Measure, error) {
	mark, err := b.Target.Admin.Events(ctx, 0, 1, 0)
	if err != nil {
		return nil, b.lost(ctx, err)
	}
	before, err := b.Target.IdleCounters(ctx, b.Facts, 2*time.Second)
	if err != nil {
		return nil, b.lost(ctx, err)
	}
	o := loadgen.Options{
		Base: b.Target.URL, TLS: b.Target.TLS, APIKey: b.Target.APIKey, Concurrency: c.Load.Concurrency, Cap: b.Spec.Cap, Timeout: b.Timeout, Keep: keep,
		SLO: b.Spec.SLO, Progress: b.Progress, Schedule: schedule,
	}
	if c.Load.Rate > 0 && schedule == nil {
		if o.Schedule, err = loadgen.Schedule(c.Requests+c.Ramp, c.Load.Rate, loadgen.Arrival(b.Spec.Arrival), b.Spec.Burstiness, workload.Seed(fmt.Sprint(b.Spec.Seed), c.ID)); err != nil {
			return nil, err
		}
	}
	late := 0
	o.OnResult = func(r *loadgen.Result) {
		if !r.Warm && r.Err == "" && r.Sent-r.Intended > experiment.LateLimit*time.Millisecond {
			late++
		}
		if b.OnResult != nil {
			b.OnResult(c, r)
		}
	}
	sum, err := loadgen.Run(ctx, o, src)
	if err != nil {
		return nil, err
	}
	after, err := b.Target.IdleCounters(ctx, b.Facts, 2*time.Second)
	if err != nil {
		return nil, b.lost(ctx, err)
	}
	// Only now, because a worker that was away and answers again has by then
	// left its trace: in the router's events, or in counters that were reset.
	if name := after.Restarted(before); name != "" {
		return nil, b.lost(ctx, fmt.Errorf("%s was restarted", name))
	}
	if err := b.steady(ctx, mark.Newest); err != nil {
		return nil, err
	}
	m := measureOf(sum, late)
	if sum.Requests == 0 {
		return m, nil
	}
	b.lengths(m, sum, c)
	b.counters(m, c, before, after)
	b.receipts(ctx, m, c, sum, after, before)
	if len(o.Schedule) > 1 {
		m.Growth, m.Ended = growth(sum.Kept, o.Schedule[len(o.Schedule)-1]), ended(sum.Kept)
	}
	return m, nil
}

func measureOf(s *loadgen.Summary, late int) *experiment.Measure {
	m := &experiment.Measure{
		Requests: s.Requests, Failed: s.Failed, Errors: s.Errors,
		TTFT: s.TTFT, TTFTIntended: s.TTFTIntended, TPOT: s.TPOT, ITL: s.ITL, E2E: s.E2E, Dispatch: s.Dispatch,
		Good: s.Good, GoodPerSecond: s.GoodPerSecond(), RequestsPerSecond: s.PerSecond(), TokensPerSecond: s.TokensPerSecond(), SteadyTokensPerSecond: s.SteadyTokensPerSecond(),
		Late: late, InFlight: s.InFlight, Achieved: s.Achieved, Seconds: s.Wall.Seconds(),
	}
	m.Watch(s.Client)
	return m
}

// lengths counts the requests that were what they should have been. What an
// engine does not count cannot be wrong.
func (b *Bench) lengths(m *experiment.Measure, s *loadgen.Summary, c plan.Cell) {
	seen := 0
	for i := range s.Kept {
		r := &s.Kept[i]
		if r.Warm || r.Err != "" {
			continue
		}
		seen++
		if r.PromptTokens < 0 || r.PromptTokens == r.ISL {
			m.ExactISL++
		}
		if r.OutputTokens == r.OSL {
			m.ExactOSL++
		}
		if c.Arm == plan.Auto || r.Path == string(c.Arm) {
			m.PathOK++
		}
	}
	if rest := s.Requests - seen; rest > 0 { // beyond what was kept: as the kept ones
		m.ExactISL += rest * m.ExactISL / max(seen, 1)
		m.ExactOSL += rest * m.ExactOSL / max(seen, 1)
		m.PathOK += rest * m.PathOK / max(seen, 1)
	}
}

// counters judges the cell by what the engines counted themselves.
func (b *Bench) counters(m *experiment.Measure, c plan.Cell, before, after fleet.Counters) {
	p, d := after.Prefill.Minus(before.Prefill), after.Decode.Minus(before.Decode)
	who := d
	if c.Arm == plan.Remote {
		who = p
	}
	if c.Arm != plan.Auto {
		if who.Queries > 0 && !math.IsNaN(who.Hits) {
			m.HitShare = experiment.Known(who.Hits / who.Queries)
		}
		m.ExpectedHit = float64(c.CachedTokens) / float64(c.ISL())
	} else if q := d.Queries; q > 0 && !math.IsNaN(d.Hits) {
		m.HitShare = experiment.Known(d.Hits / q)
	}
	moved := d.ExternalHits
	if math.IsNaN(moved) {
		moved = d.External
	}
	if c.Arm == plan.Remote && !math.IsNaN(moved) {
		m.TransferTokens = experiment.Known(moved)
		block := max(b.Facts.Block, 1)
		m.ExpectedTransferTokens = float64(m.Requests+c.Ramp) * float64(c.EffISL/block*block)
	}
	if !math.IsNaN(d.TransferBytes) {
		m.TransferBytes = experiment.Known(d.TransferBytes)
	}
	for _, n := range []float64{p.Preemptions, d.Preemptions} {
		if !math.IsNaN(n) {
			m.Preemptions += n
		}
	}
}

// receipts splits the time to the first token by the router's receipts and the
// engines' histograms.
func (b *Bench) receipts(ctx context.Context, m *experiment.Measure, c plan.Cell, s *loadgen.Summary, after, before fleet.Counters) {
	mine := make(map[string]bool, len(s.Kept))
	for i := range s.Kept {
		if r := &s.Kept[i]; !r.Warm && r.Err == "" {
			mine[r.ID] = true
		}
	}
	// A receipt is complete a little after its stream; one that is missing or
	// still runs is left out of the means.
	found, err := b.Target.Receipts(ctx, min(maxReceipts, len(s.Kept)+256), func(id string) bool { return mine[id] })
	if err != nil && len(found) == 0 {
		return
	}
	var router, prefill, decode, local []float64
	for _, r := range found {
		if r.Outcome.SilentRecompute {
			m.Recomputes++
		}
		if r.Path == string(plan.Local) && c.Arm == plan.Remote {
			m.Fallbacks++
		}
		var p, d *receipt.LegEntry
		for i := range r.Legs {
			l := &r.Legs[i]
			if l.Kind == "prefill" {
				p = l
			} else {
				d = l
			}
		}
		if d == nil || d.DispatchMS < 0 || r.Outcome.TTFTMS < 0 {
			continue
		}
		if p != nil && p.DispatchMS >= 0 && p.EndMS >= 0 {
			router = append(router, p.DispatchMS)
			prefill = append(prefill, p.EndMS-p.DispatchMS)
			decode = append(decode, r.Outcome.TTFTMS-d.DispatchMS)
		} else {
			router = append(router, d.DispatchMS)
			local = append(local, r.Outcome.TTFTMS-d.DispatchMS)
		}
	}
	st := &m.Stages
	st.Router = experiment.Known(stats.Mean(router))
	pool, leg := after.Decode.Minus(before.Decode), stats.Mean(local)
	if len(prefill) > len(local) {
		pool, leg = after.Prefill.Minus(before.Prefill), stats.Mean(prefill)
	}
	queue := math.NaN()
	if pool.QueueCount > 0 {
		queue = min(1000*pool.QueueSum/pool.QueueCount, leg)
	}
	st.PrefillQueue = experiment.Known(queue)
	if math.IsNaN(queue) {
		queue = 0
	}
	st.Prefill = experiment.Known(leg - queue)
	if len(prefill) > len(local) {
		rest := stats.Mean(decode)
		d := after.Decode.Minus(before.Decode)
		if d.TransferCount > 0 {
			t := min(1000*d.TransferSum/d.TransferCount, rest)
			st.Transfer = experiment.Known(t)
			rest -= t
		}
		st.FirstDecode = experiment.Known(rest)
	}
}

// growth is how many were in flight at the end of the schedule against its
// middle; about 1 when the target keeps up.
func growth(rs []loadgen.Result, span time.Duration) float64 {
	at := func(t time.Duration) float64 {
		n := 0
		for i := range rs {
			if r := &rs[i]; r.Intended <= t && (r.End == 0 || r.End > t) {
				n++
			}
		}
		return float64(n)
	}
	// Averages over a tenth of the schedule around both, against luck.
	mean := func(from, to float64) float64 {
		var sum float64
		for i := range 10 {
			sum += at(time.Duration(float64(span) * (from + (to-from)*float64(i)/9)))
		}
		return sum / 10
	}
	mid, end := mean(0.4, 0.6), mean(0.8, 1)
	return (end + 2) / (mid + 2) // small numbers say little
}

// ended is [experiment.Measure.Ended] of the requests that did not fail. The first and the
// last quarter are left out, because an open loop begins and ends with few in flight.
func ended(rs []loadgen.Result) float64 {
	var due, ends []time.Duration
	for i := range rs {
		if rs[i].Err == "" {
			due, ends = append(due, rs[i].Intended), append(ends, rs[i].Last)
		}
	}
	if len(due) < 8 {
		return 0
	}
	middle := func(at []time.Duration) time.Duration {
		slices.Sort(at)
		return at[len(at)*3/4] - at[len(at)/4]
	}
	d, e := middle(due), middle(ends)
	if d <= 0 || e <= 0 {
		return 0
	}
	return float64(d) / float64(e)
}

// ErrLost says that a part of the fleet went away and stayed away.
var ErrLost = errors.New("the fleet did not come back")

// lost turns an error of the counters into a void cell, after the fleet is
// whole again.
func (b *Bench) lost(ctx context.Context, cause error) error {
	patience := cmp.Or(max(b.Patience, 0), 2*time.Minute)
	ctx2, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var err error
	if wait.Until(ctx2, 200*time.Millisecond, func() bool {
		// The router may not have noticed yet, so the engines are asked first.
		if _, err = b.Target.Counters(ctx2, b.Facts); err == nil {
			err = b.missing(ctx2)
		}
		return err == nil
	}) {
		return &experiment.VoidError{Reason: cause.Error()}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("%w within %s: %w: %w", ErrLost, patience, cause, err)
}

// steady reports a void cell when the router has lost a worker since an event,
// whether it is back or not, after it is.
func (b *Bench) steady(ctx context.Context, since uint64) error {
	l, err := b.Target.Admin.Events(ctx, since, maxEvents, 0)
	if err != nil {
		return b.lost(ctx, err)
	}
	for i := range l.Events {
		e := &l.Events[i]
		if b.concerns(e) {
			return b.lost(ctx, errors.New(e.Text))
		}
	}
	if err := b.missing(ctx); err != nil {
		return b.lost(ctx, err)
	}
	return nil
}

// concerns reports whether an event says that a worker which was usable at the
// start could not be used any more.
func (b *Bench) concerns(e *admin.Event) bool {
	switch e.Kind {
	case "health_changed", "outlier_ejected":
		if e.Severity != "error" {
			return false
		}
	case "worker_restarted", "worker_removed":
	default:
		return false
	}
	return slices.ContainsFunc(b.Facts.Workers, func(w admin.Worker) bool { return w.Usable && w.Name == e.Worker })
}

// missing is an error unless every worker that was there at the start is usable.
func (b *Bench) missing(ctx context.Context) error {
	l, err := b.Target.Admin.Workers(ctx)
	if err != nil {
		return fmt.Errorf("the router does not answer: %w", err)
	}
	usable := map[string]string{}
	for _, w := range l.Workers {
		usable[w.Name] = "is not usable: " + w.Reason
		if w.Usable {
			usable[w.Name] = ""
		}
	}
	for _, w := range b.Facts.Workers {
		if !w.Usable {
			continue
		}
		why, there := usable[w.Name]
		switch {
		case !there:
			return errors.New(w.Name + " is gone")
		case why != "":
			return errors.New(w.Name + " " + why)
		}
	}
	return nil
}

// Check is one line of what is looked at before a run.
type Check struct {
	Name string `json:"name"`
	OK   bool   `json:"ok"`
	Text string `json:"text"`
	// Code is the exit code when it fails: "usage" or "runtime".
	Fatal bool `json:"fatal"`
}

// ErrNotForced says that the router does not take the path header.
var ErrNotForced = errors.New("the router does not honour X-Dynctl-Path: start it with --allow-routing-headers")

// Preflight sends a few small requests and finds out whether the experiment is
// possible: paths can be forced, lengths are exact, a fresh prompt finds
// nothing cached. It also times requests of either arm at both ends of the
// grid, for the estimate.
func (b *Bench) Preflight(ctx context.Context) (checks []Check, seconds func(plan.Cell) float64, err error) {
	times := map[plan.Arm]timing{}
	lo, hi := slices.Min(b.Spec.ISL), slices.Max(b.Spec.ISL)
	for _, arm := range []plan.Arm{plan.Local, plan.Remote} {
		var ends [2]*experiment.Measure
		for i, isl := range []int{lo, hi} {
			if i > 0 && hi == lo {
				ends[1] = ends[0] // a second one of the same length would be found cached
				break
			}
			c := plan.Cell{ID: fmt.Sprintf("check/%d/%s", isl, arm), Phase: "check", EffISL: isl, OSL: min(b.Spec.OSL, 16), Load: plan.Load{Concurrency: 1}, Arm: arm, Requests: 1, Ramp: 1}
			m, err := b.Measure(ctx, c)
			if err != nil {
				return checks, nil, err
			}
			if m.Requests == 0 {
				why := strings.TrimPrefix(firstError(m.Errors), "failed: ")
				if strings.HasPrefix(why, "status 401") {
					why += " (--api-key-file FILE gives the bench a key)"
				}
				return checks, nil, fmt.Errorf("a first request (%d tokens, %s) failed: %s", isl, arm, why)
			}
			if m.PathOK == 0 {
				return checks, nil, ErrNotForced
			}
			if m.ExactOSL == 0 || m.ExactISL == 0 {
				return checks, nil, fmt.Errorf("the engine does not keep to the requested lengths (prompt of %d tokens, answer of %d): does it know ignore_eos and min_tokens?", isl, c.OSL)
			}
			if m.HitShare != nil {
				checks = append(checks, Check{Name: "cache", OK: *m.HitShare < 0.01, Text: fmt.Sprintf("fresh prompt of %d tokens, %s: %.1f%% found cached", isl, arm, *m.HitShare*100)})
			}
			ends[i] = m
		}
		times[arm] = timingOf(lo, hi, ends[0].TTFT.P50, ends[1].TTFT.P50, ends[1].TPOT.P50)
	}
	return checks, func(c plan.Cell) float64 {
		ranks := b.Facts.DecodeRanks
		if c.Arm == plan.Remote {
			ranks = b.Facts.PrefillRanks
		}
		return times[c.Arm].seconds(c, ranks)
	}, nil
}

// timing is what single requests of an arm take, in ms: base + slope for each
// token to the first one of the answer, then itl for each.
type timing struct{ base, slope, itl float64 }

// timingOf lays a line through the times at both ends of the grid. A slope
// that noise made negative is none.
func timingOf(lo, hi int, atLo, atHi, itl float64) timing {
	t := timing{itl: itl}
	if hi > lo {
		t.slope = max(0, (atHi-atLo)/float64(hi-lo))
	}
	t.base = max(0, atHi-t.slope*float64(hi))
	return t
}

// between is what a cell costs besides its requests, in seconds: counters,
// receipts and the wait until the engines are idle.
const between = 0.3

// seconds estimates a cell on an arm with so many ranks that prefill.
func (t timing) seconds(c plan.Cell, ranks int) float64 {
	n := float64(c.Requests + c.Ramp)
	if c.Load.Rate > 0 {
		return n/c.Load.Rate + between
	}
	// Prefills share their engines, decodes run side by side.
	k := float64(c.Load.Concurrency)
	prefill := n / min(float64(max(ranks, 1)), k) * (t.base + t.slope*float64(c.EffISL))
	decode := n / k * t.itl * float64(c.OSL) * (1 + 0.02*k)
	return (prefill+decode)/1000 + between
}

func firstError(errs map[string]int) string {
	for e := range errs {
		return e
	}
	return "no reason given"
}
