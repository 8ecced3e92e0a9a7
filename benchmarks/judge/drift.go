package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/replay/simulate"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/table"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// driftFleet is what the loads of drift run on.
const driftFleet = "2p2d:block=16,kv_blocks=4096"

// When engines change, and what is counted: the five minutes from then on, and the three after
// them.
const (
	driftBegin = 3 * time.Minute
	driftLater = 8 * time.Minute
	driftEnd   = 11 * time.Minute
)

// driftFaults are what becomes of the engines.
var driftFaults = []simulate.Fault{{At: driftBegin, Kind: simulate.SlowPrefill, By: 3}, {At: driftBegin, Kind: simulate.SlowNetwork, By: 10}, {At: driftBegin, Kind: simulate.PrefillGone, By: 0.5}}

// driftSpans are when what is counted begins and ends.
var driftSpans = [][2]time.Duration{{driftBegin, driftLater}, {driftLater, driftEnd}}

// driftRules are auto, and the fixed thresholds that it is compared with.
var driftRules = []decide.Threshold{{Auto: true, Tokens: 512}, {Tokens: 0}, {Tokens: 512}, {Tokens: 2048}, {Tokens: never}}

// A driftLoad is requests, and the limits of a good one.
type driftLoad struct {
	sessions  bool
	rate      int // requests a second
	ttft, itl time.Duration
}

// driftLoads are nine of them: prompts of 200 to 4,000 tokens that share nothing, and sessions of
// six turns whose prompts grow from 266 to 1,226 tokens.
var driftLoads = []driftLoad{
	{false, 12, 120 * time.Millisecond, 12 * time.Millisecond},
	{false, 16, 120 * time.Millisecond, 12 * time.Millisecond},
	{false, 20, 120 * time.Millisecond, 12 * time.Millisecond},
	{false, 12, 500 * time.Millisecond, 12 * time.Millisecond},
	{false, 12, 120 * time.Millisecond, 9 * time.Millisecond},
	{false, 12, 120 * time.Millisecond, 16 * time.Millisecond},
	{false, 16, 500 * time.Millisecond, 25 * time.Millisecond},
	{true, 30, 100 * time.Millisecond, 10 * time.Millisecond},
	{true, 30, 200 * time.Millisecond, 15 * time.Millisecond},
}

func (l *driftLoad) String() string {
	kind := "prompts that share nothing"
	if l.sessions {
		kind = "sessions"
	}
	return fmt.Sprintf("%s, %d a second, %d and %d ms", kind, l.rate, l.ttft.Milliseconds(), l.itl.Milliseconds())
}

// requests are those up to a time, for a seed.
func (l *driftLoad) requests(end time.Duration, seed uint64) []arrivals.Request {
	all := make([]arrivals.Request, int(driftEnd.Seconds())*l.rate)
	rng := rand.New(rand.NewPCG(seed, 5))
	const turns = 6
	for i := range all {
		q := arrivals.Request{Number: i, At: time.Duration(i) * time.Second / time.Duration(l.rate)}
		q.BlockSize, q.IDs = 64, trace.LocalIDs
		if l.sessions {
			n := len(all) / turns
			turn, session := i/n, i%n
			q.ISL, q.OSL = 64*(4+3*turn)+10, 5+session%7
			for b := range q.ISL / 64 {
				q.Blocks = append(q.Blocks, uint64(session)<<32|uint64(b))
			}
			q.Blocks = append(q.Blocks, uint64(session)<<48|1<<47|uint64(turn))
		} else {
			q.OSL, q.ISL = 20+rng.IntN(40), int(200*math.Pow(20, rng.Float64()))
			for b := range q.ISL/64 + 1 {
				q.Blocks = append(q.Blocks, uint64(i)<<16|uint64(b))
			}
		}
		all[i] = q
	}
	if l.sessions { // no length of theirs is random
		all = arrivals.Moved(all, seed)
	}
	n, _ := slices.BinarySearchFunc(all, end, func(q arrivals.Request, at time.Duration) int { return cmp.Compare(q.At, at) })
	return all[:n]
}

// A driftRow is one load, fault and span.
type driftRow struct {
	Load  string  `json:"load"`
	Fault string  `json:"fault"`
	From  float64 `json:"from_s"`
	To    float64 `json:"to_s"`
	// Best is the fixed threshold with the most good requests over the seeds, by their mean.
	Best     string  `json:"best_threshold"`
	BestGood float64 `json:"best_good_ratio"`
	AutoGood float64 `json:"auto_good_ratio"`
	// Shares are what auto has of the best threshold's good requests, one for each seed.
	Shares []float64 `json:"shares_of_best"`
}

// The row keeps what was asked for when its median is at least wantedMedian, and every seed at
// least wantedLeast.
const (
	wantedMedian = 0.9
	wantedLeast  = 0.8
)

// driftRun is the share of good requests of one run, made now or before.
func (b *bench) driftRun(ctx context.Context, l *driftLoad, f simulate.Fault, span [2]time.Duration, rule decide.Threshold, seed uint64) (float64, error) {
	key := fmt.Sprintf("drift %s %s=%g %s to %s %s seed=%d", l, f.Kind, f.By, span[0], span[1], rule, seed)
	if f, ok := b.store.run(key); ok {
		return f.Good, nil
	}
	fleet, err := sim.ParseFleet(driftFleet)
	if err != nil {
		return 0, err
	}
	res, err := simulate.Run(ctx, arrivals.FromSlice(l.requests(span[1], seed)), simulate.Setup{
		Fleet: fleet, Options: simulate.Decisions(subject, rule), Seed: seed, TTFT: l.ttft, ITL: l.itl,
		Faults: []simulate.Fault{f}, CountFrom: span[0], SlowFactor: settings.Default().Health.SlowFactor,
	})
	if err != nil {
		return 0, fmt.Errorf("%s: %w", key, err)
	}
	return res.Good, b.store.addRun(key, figures{Requests: res.Requests, Failed: res.Failed, Good: res.Good, Seconds: res.VirtualS, P50: res.E2E.P50, P99: res.E2E.P99, Hit: res.HitRatio})
}

// driftRow runs one row.
func (b *bench) driftRow(ctx context.Context, l *driftLoad, f simulate.Fault, span [2]time.Duration, seeds int) (*driftRow, error) {
	row := &driftRow{Load: l.String(), Fault: fmt.Sprintf("%s=%g", f.Kind, f.By), From: span[0].Seconds(), To: span[1].Seconds()}
	good := make([][]float64, len(driftRules))
	for seed := range seeds {
		for i, rule := range driftRules {
			share, err := b.driftRun(ctx, l, f, span, rule, uint64(seed)+1)
			if err != nil {
				return nil, err
			}
			good[i] = append(good[i], share)
		}
	}
	best := 1
	for i := 2; i < len(driftRules); i++ {
		if stats.Mean(good[i]) > stats.Mean(good[best]) {
			best = i
		}
	}
	row.Best, row.BestGood, row.AutoGood = driftRules[best].String(), stats.Mean(good[best]), stats.Mean(good[0])
	if driftRules[best].Tokens == never {
		row.Best = "never"
	}
	for seed, of := range good[best] {
		share := 1.0 // of no good request
		if of > 0 {
			share = good[0][seed] / of
		}
		row.Shares = append(row.Shares, share)
	}
	return row, nil
}

// drift runs all rows and prints them.
func drift(ctx context.Context, o *options, out, log io.Writer) (err error) {
	b := &bench{log: log}
	if b.store, err = o.open(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.store.close()) }()
	b.start()
	g, each := errgroup.WithContext(ctx)
	g.SetLimit(o.jobs)
	total := len(driftLoads) * len(driftFaults) * len(driftSpans)
	rows := make([]*driftRow, total)
	i := 0
	for _, span := range driftSpans {
		for l := range driftLoads {
			for _, f := range driftFaults {
				at := &rows[i]
				i++
				g.Go(func() (err error) {
					if *at, err = b.driftRow(each, &driftLoads[l], f, span, o.seeds); err == nil {
						b.report("rows", total)
					}
					return err
				})
			}
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if o.output == "json" {
		return cli.WriteData(out, "json", rows)
	}
	return writeDrift(out, rows)
}

// writeDrift writes rows as Markdown, with what they keep of what was asked for.
func writeDrift(out io.Writer, rows []*driftRow) error {
	head := []string{"load", "fault", "minutes", "best threshold", "good", "auto", "median share", "least share"}
	var cells [][]string
	percent := func(v float64) string { return strconv.FormatFloat(100*v, 'f', 1, 64) }
	type span struct{ from, to float64 }
	shares := map[span][]float64{} // the medians of rows
	var spans []span
	runs, low := 0, 0
	for _, r := range rows {
		median, least := stats.Median(r.Shares), slices.Min(r.Shares)
		cells = append(cells, []string{
			r.Load, r.Fault, fmt.Sprintf("%g to %g", r.From/60, r.To/60), r.Best, percent(r.BestGood), percent(r.AutoGood), percent(median), percent(least),
		})
		at := span{r.From / 60, r.To / 60}
		if shares[at] == nil {
			spans = append(spans, at)
		}
		shares[at] = append(shares[at], median)
		for _, s := range r.Shares {
			if runs++; s < wantedLeast {
				low++
			}
		}
	}
	fmt.Fprintf(out, "Good requests in %% on %s, policy %s, means of %d seeds; share: what auto has of the good requests of the best fixed threshold.\n\n", driftFleet, subject, len(rows[0].Shares))
	if err := table.Write(out, "markdown", head, cells); err != nil {
		return err
	}
	fmt.Fprintln(out)
	for _, at := range spans {
		of := shares[at]
		fmt.Fprintf(out, "- Minutes %g to %g: the median row has %s %%, the least %s %%; %d of %d have %.0f %% or more.\n",
			at.from, at.to, percent(stats.Median(of)), percent(slices.Min(of)), count(of, wantedMedian), len(of), 100*wantedMedian)
	}
	_, err := fmt.Fprintf(out, "- %d of %d runs are below %.0f %%.\n", low, runs, 100*wantedLeast)
	return err
}

// count is how many shares are at least so much.
func count(shares []float64, least float64) (n int) {
	for _, s := range shares {
		if s >= least {
			n++
		}
	}
	return n
}
