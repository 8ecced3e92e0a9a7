package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/replay/simulate"
)

// bench runs cells.
type bench struct {
	store    *store
	requests int
	seeds    int
	jobs     int
	// columns are all that are run, of which the first ones are judged.
	columns []column
	judged  int
	loads   []float64
	// profile is the file that says how engines pad.
	profile  string
	recorded []arrivals.Request
	log      io.Writer

	mu     sync.Mutex
	traces map[string][]arrivals.Request
	made   int // runs since began
	began  time.Time
	spoke  time.Time
}

// names are those of the judged columns.
func (b *bench) names() []string {
	var out []string
	for _, c := range b.columns[:b.judged] {
		out = append(out, c.name)
	}
	return out
}

// trace is the requests of a workload for a seed, which all runs share.
func (b *bench) trace(w *workload, seed int) ([]arrivals.Request, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := fmt.Sprint(w.name, " ", seed)
	if t, ok := b.traces[key]; ok {
		return t, nil
	}
	t, err := w.requests(b.requests, seed, b.seeds, b.recorded)
	if err == nil {
		b.traces[key] = t
	}
	return t, err
}

// run is one run, made now or before.
func (b *bench) run(ctx context.Context, w *workload, fleet string, c column, speed float64, seed int) (figures, error) {
	engines, err := w.fleet(fleet, b.profile)
	if err != nil {
		return figures{}, err
	}
	key := fmt.Sprintf("%s %s %s speed=%.6g requests=%d seed=%d/%d%s", w.name, fleet, c.name, speed, b.requests, seed+1, b.seeds, c.key())
	if f, ok := b.store.run(key); ok {
		return f, nil
	}
	requests, err := b.trace(w, seed)
	if err != nil {
		return figures{}, err
	}
	res, err := simulate.Run(ctx, arrivals.FromSlice(requests), setup(w, engines, &c, speed, uint64(seed)+1))
	if err != nil {
		return figures{}, fmt.Errorf("%s: %w", key, err)
	}
	if res.Completed == 0 {
		return figures{}, fmt.Errorf("%s: no request was completed, %d failed", key, res.Failed)
	}
	f := figures{
		Requests: res.Requests, Failed: res.Failed, Good: res.Good, Seconds: res.VirtualS, Tokens: res.TokensPS,
		P50: res.E2E.P50, P99: res.E2E.P99, Hit: res.HitRatio,
	}
	return f, b.store.addRun(key, f)
}

// key is what of a column is not the default, as a part of a run's key.
func (c *column) key() string {
	if len(c.changes) == 0 {
		return ""
	}
	return " " + setting(c.changes)
}

// setting is changes as text.
func setting(changes []replay.Change) string {
	var parts []string
	for _, c := range changes {
		parts = append(parts, c.String())
	}
	return strings.Join(parts, " ")
}

// What a fleet serves: the speed up to which some judged column keeps this share of requests
// within the limits, as the mean over so many seeds, and the search's precision. 90 % is the
// attainment that DistServe (OSDI '24) measures goodput at.
const (
	attainment = 0.9
	trialSeeds = 2
	precision  = 0.05
)

// firstSpeed is where the search begins.
const firstSpeed = 4

// limit finds how many times faster than its own pace a fleet serves a workload by its best
// policy.
func (b *bench) limit(ctx context.Context, w *workload, fleet string) (float64, error) {
	key := fmt.Sprintf("%s %s requests=%d seeds=%d kv_blocks=%d engines=%s", w.name, fleet, b.requests, b.seeds, w.blocks, w.engines(fleet))
	if v, ok := b.store.limit(key); ok {
		return v, nil
	}
	seeds := min(trialSeeds, b.seeds)
	order := slices.Clone(b.columns[:b.judged])
	serves := func(speed float64) (bool, error) {
		for i, c := range order {
			missing := attainment * float64(seeds)
			for seed := 0; seed < seeds && missing <= float64(seeds-seed); seed++ {
				f, err := b.run(ctx, w, fleet, c, speed, seed)
				if err != nil {
					return false, err
				}
				missing -= f.Good
			}
			if missing <= 0 {
				// It is likely the one that serves more, too.
				order = slices.Insert(slices.Delete(order, i, i+1), 0, c)
				return true, nil
			}
		}
		return false, nil
	}
	v, err := capacity(firstSpeed, precision, serves)
	if err != nil {
		return 0, fmt.Errorf("capacity of %s under %s: %w", fleet, w.name, err)
	}
	return v, b.store.addLimit(key, v)
}

// cells runs all cells of the workloads and fleets.
func (b *bench) cells(ctx context.Context, list []*workload, fleets []string) ([]*cell, error) {
	var all []*cell
	b.start()
	g, each := errgroup.WithContext(ctx)
	g.SetLimit(b.jobs)
	for _, w := range list {
		for _, fleet := range fleets {
			group := make([]*cell, len(b.loads))
			for i, load := range b.loads {
				group[i] = &cell{Workload: w.name, Fleet: fleet, Padded: w.padded == fleet, Load: load, Runs: map[string][]figures{}}
			}
			all = append(all, group...)
			g.Go(func() error {
				v, err := b.limit(each, w, fleet)
				for _, c := range group {
					c.Speed = c.Load * v
				}
				if err == nil {
					b.report("capacities", len(list)*len(fleets))
				}
				return err
			})
		}
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	b.start()
	g, each = errgroup.WithContext(ctx)
	g.SetLimit(b.jobs)
	for _, c := range all {
		w := list[slices.IndexFunc(list, func(w *workload) bool { return w.name == c.Workload })]
		for i := range b.columns {
			runs := make([]figures, b.seeds)
			c.Runs[b.columns[i].name] = runs
			for seed := range runs {
				g.Go(func() (err error) {
					runs[seed], err = b.run(each, w, c.Fleet, b.columns[i], c.Speed, seed)
					if err == nil {
						b.report("runs", len(all)*len(b.columns)*b.seeds)
					}
					return err
				})
			}
		}
	}
	return all, g.Wait()
}

// start begins to count.
func (b *bench) start() { b.made, b.began, b.spoke = 0, time.Now(), time.Now() }

// report counts one more of so many, and writes every ten seconds how far it is.
func (b *bench) report(what string, of int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.made++
	now := time.Now()
	if now.Sub(b.spoke) < 10*time.Second && b.made < of {
		return
	}
	b.spoke = now
	took := now.Sub(b.began)
	left := time.Duration(float64(took) / float64(b.made) * float64(of-b.made))
	fmt.Fprintf(b.log, "%d of %d %s after %s, about %s left\n", b.made, of, what, took.Round(time.Second), left.Round(time.Second))
}
