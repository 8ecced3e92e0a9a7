package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/report"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/bench/workload"
	"github.com/dynctl/dynctl/internal/rig/repository"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/profiles"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// pair measures the cells of dynctl bench on one prefill and one decode engine, under the
// virtual clock and without a router.
type pair struct {
	prefill, decode engine.Timing
	now             time.Duration
	random          *rand.Rand
}

// newPair makes the engines of two profiles; the decode engine receives KV by a transfer.
func newPair(t *testing.T, prefill, decode, transfer string) *pair {
	t.Helper()
	p, ok := profiles.Find(prefill)
	d, ok2 := profiles.Find(decode)
	x, ok3 := profiles.FindTransfer(transfer)
	if !ok || !ok2 || !ok3 {
		t.Fatalf("%s, %s or %s is not shipped", prefill, decode, transfer)
	}
	seed := workload.Seed(decode + transfer)
	return &pair{prefill: engine.WithTransfer(p.Timing, x.Millis), decode: engine.WithTransfer(d.Timing, x.Millis), random: rand.New(rand.NewPCG(seed, 1))}
}

// run is the result of an experiment, which must be valid.
func (b *pair) run(t *testing.T, spec plan.Spec) *experiment.Result {
	t.Helper()
	spec.Schema, spec.ISL, spec.Cached, spec.Repeats, spec.MaxRepeats = plan.Schema, []int{256, 512, 1024, 2048, 4096, 8192}, []float64{0}, 5, 10
	spec.Level, spec.Objective, spec.Seed, spec.Salt = 0.95, "ttft", 1, "1"
	r := &experiment.Runner{Block: block, Measure: b.Measure, Now: func() time.Duration { return b.now }, Spec: spec}
	res, err := r.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range res.Gates {
		if g.Passed != nil && !*g.Passed {
			t.Errorf("gate %s: %s", g.Name, g.Text)
		}
	}
	return res
}

// cellNoise is the relative deviation of a cell's times: engines are never the same twice.
const cellNoise = 0.02

// Measure runs a cell in a closed loop.
func (b *pair) Measure(_ context.Context, c plan.Cell) (*experiment.Measure, error) {
	prefills := 0
	if c.Arm == plan.Remote {
		prefills = 1
	}
	g, err := newRig(b.prefill, b.decode, prefills, 1, c.ISL()+c.OSL, c.Load.Concurrency)
	if err != nil {
		return nil, err
	}
	slow := math.Exp(cellNoise * b.random.NormFloat64())
	for _, r := range g.world.Ranks() {
		r.Core().SetSlow(slow)
	}
	m := &experiment.Measure{InFlight: 1}
	var ttfts, tpots, itls, e2es []float64
	var failed error
	left, ramp := c.Ramp+c.Requests, c.Ramp
	var client func()
	client = func() {
		if left == 0 || failed != nil {
			return
		}
		left--
		counts := ramp == 0
		ramp = max(ramp-1, 0)
		g.send(g.prompt(c.ISL()), c.OSL, func(at []virtual.Time, err error) {
			if err != nil || len(at) != c.OSL {
				failed = fmt.Errorf("%d tokens of %d: %w", len(at), c.OSL, errors.Join(err))
				return
			}
			if counts {
				ttft, last := at[0].Seconds()*1000, at[len(at)-1].Seconds()*1000
				ttfts, e2es, tpots = append(ttfts, ttft), append(e2es, last), append(tpots, (last-ttft)/float64(len(at)-1))
				for i := range at[1:] {
					itls = append(itls, (at[i+1]-at[i]).Seconds()*1000)
				}
			}
			client()
		})
	}
	for range c.Load.Concurrency {
		client()
	}
	if err := errors.Join(g.world.Drain(1<<30), failed); err != nil {
		return nil, err
	}
	b.now += g.world.Now()
	dist := func(v []float64) loadgen.Dist {
		return loadgen.Dist{N: int64(len(v)), Mean: stats.Mean(v), P50: stats.Median(v), P90: stats.Quantile(v, 0.9), P95: stats.Quantile(v, 0.95), P99: stats.Quantile(v, 0.99), Max: stats.Quantile(v, 1)}
	}
	m.TTFT, m.TTFTIntended, m.TPOT, m.ITL, m.E2E = dist(ttfts), dist(ttfts), dist(tpots), dist(itls), dist(e2es)
	m.Requests, m.PathOK, m.ExactISL, m.ExactOSL, m.Good = len(ttfts), len(ttfts), len(ttfts), len(ttfts), len(ttfts)
	m.Seconds = g.world.Now().Seconds()
	zero := 0.0
	m.HitShare = &zero
	if prefills > 0 {
		// Every request, as the engine counts them: those of the ramp are no part of either.
		moved := float64(g.decode[0].Core().Stats(g.world.Now()).ExternalHits) * float64(c.Requests) / float64(c.Requests+c.Ramp)
		m.TransferTokens, m.ExpectedTransferTokens = &moved, float64(c.Requests*(c.ISL()/block*block))
	}
	return m, nil
}

// Where remote prefill begins to pay in each model, with the experiment of dynctl bench.
func TestCrossings(t *testing.T) {
	if testing.Short() {
		t.Skip("runs a whole experiment for each profile")
	}
	t.Chdir("../..")
	doc := &strings.Builder{}
	doc.WriteString("| profile | transfer | TTFT of 4,096 tokens alone, ms: local, remote | lower TTFT, 1 at a time | lower TTFT, 32 at a time | local prefill breaks a p99 of 50 ms between tokens, 32 at a time |\n|---|---|---|---|---|---|\n")
	for _, p := range profiles.All() {
		for _, transfer := range []string{"mooncake", "nixl-64"} {
			res := newPair(t, p.Timing.Name, p.Timing.Name, transfer).run(t, plan.Spec{
				OSL: 128, Loads: []plan.Load{{Concurrency: 1}, {Concurrency: 32}}, SLO: plan.SLO{ITL: 50 * time.Millisecond},
			})
			ttft := map[stats.Answer]string{stats.Crosses: "remote from %.0f tokens", stats.FirstWins: "local", stats.SecondWins: "remote", experiment.Tie: "equal"}
			itl := map[stats.Answer]string{stats.Crosses: "from %.0f tokens", stats.FirstWins: "never", stats.SecondWins: "always"}
			var alone experiment.PointResult
			for _, point := range res.Groups[0].Points {
				if point.EffISL == 4096 {
					alone = point
				}
			}
			fmt.Fprintf(doc, "| `%s` | `%s` | %.0f, %.0f | %s | %s | %s |\n", p.Timing.Name, transfer, alone.Local.TTFTP50, alone.Remote.TTFTP50, answer(&res.Groups[0], "ttft", ttft), answer(&res.Groups[1], "ttft", ttft), answer(&res.Groups[1], "itl", itl))
		}
	}
	document(t, "docs/lab/profiles.md", "crossings", doc.String())
}

// TestPicture keeps the plot in README.md equal to an experiment that has a crossing: a
// prefill engine on four GPUs beside a decode engine on one, by their profiles.
func TestPicture(t *testing.T) {
	t.Chdir("../..")
	const prefill, decode, transfer = "h200-70b-fp8-tp4", "h200-70b-fp8-tp1", "nixl-64"
	res := newPair(t, prefill, decode, transfer).run(t, plan.Spec{OSL: 16, Loads: []plan.Load{{Concurrency: 1}}})
	if c := res.Groups[0].Crossing("ttft"); c == nil || c.Answer != stats.Crosses || c.At.Low == nil || c.At.High == nil {
		t.Fatalf("no crossing with an interval: %+v", c)
	}
	var page bytes.Buffer
	if err := report.HTML(&page, res); err != nil {
		t.Fatal(err)
	}
	drawn := regexp.MustCompile(`(?s)(<svg[^>]* aria-label="Time to first token[^>]*>)(.*?)</svg>`).FindStringSubmatch(page.String())
	if drawn == nil {
		t.Fatal("the report has no plot of the time to the first token")
	}
	const mark = `<text x="64" y="62" fill="#b91c1c">A model, not a measurement: profiles ` + prefill + " prefills, " + decode + " decodes, transfer " + transfer + "</text>"
	repository.File(t, "docs/pictures/bench.svg", drawn[1]+`<rect width="100%" height="100%" fill="#fff"/>`+drawn[2]+mark+"</svg>\n", "go test ./benchmarks/profiles -update", *update)
}

// answer is a crossing in few words.
func answer(g *experiment.GroupResult, objective string, words map[stats.Answer]string) string {
	c := g.Crossing(objective)
	if c == nil {
		return "not judged"
	}
	word, ok := words[c.Answer]
	switch {
	case ok && strings.Contains(word, "%"):
		return fmt.Sprintf(word, math.Round(*c.At.Value/10)*10)
	case ok:
		return word
	case c.At.Low != nil && c.At.High != nil:
		return fmt.Sprintf("between %.0f and %.0f tokens", *c.At.Low, *c.At.High)
	}
	return "not clear"
}
