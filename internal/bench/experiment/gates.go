package experiment

import (
	"fmt"
	"math"
	"strings"

	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
)

// Limits of the gates.
const (
	// LateLimit is what counts as a late send, in ms; at most LateShare may be.
	LateLimit = 10.0
	LateShare = 0.01
	// stopLimit is the share of the time in which the client may stand still.
	stopLimit = 0.01
	rateLimit = 0.01
	hitLimit  = 0.01
	errLimit  = 0.001
	// lengthLimit is the share of requests that may differ in length.
	lengthLimit    = 0
	aaLimit        = 0.02
	driftLimit     = 0.10
	flightLimit    = 0.95
	growthLimit    = 1.5
	transferLimit  = 0.95
	recomputeShare = 0.01
)

// remedies are what to do about a gate that fails, by its name.
var remedies = map[string]string{
	"client":     "run dynctl bench on a machine, or on cores, that nothing else uses; or lower --concurrency or --rate",
	"cache":      "stop other traffic and run again; dynctl doctor checks whether the engines find repeated prompts as the router expects",
	"errors":     "look for the errors in requests.jsonl.zst and in the engines' logs, then run again",
	"lengths":    "make sure that the engines honour max_tokens and ignore_eos, and that they serve the model that was named",
	"path":       "look at these requests with dynctl explain: the router has to honour routing headers, and every engine has to stay usable",
	"repeats":    "stop other work on these machines, or raise --requests, and run again",
	"a/a":        "stop other traffic, raise --requests, and run again: equal cells have to measure the same",
	"saturation": "lower the highest --rate or --concurrency; dynctl bench --sweep finds what the target can take",
	"transfer":   "run dynctl doctor, which checks whether KV moves between each pair of engines",
	"drift":      "let the engines warm up, stop other traffic, and run again",
}

// judged is a gate that passed or failed, with at most ten of the cells at fault.
func judged(name string, passed bool, cells []string, format string, a ...any) Gate {
	g := Gate{Name: name, Passed: &passed, Text: fmt.Sprintf(format, a...), Cells: cells[:min(len(cells), 10)]}
	if !passed {
		g.Next = remedies[name]
	}
	return g
}

// Starved reports whether the load generator itself was late or stood still in a
// cell, so that the cell's figures are not the target's alone.
func (m *Measure) Starved() bool {
	return share(m.Late, m.Requests) > LateShare || val(m.ClientStopped) > stopLimit
}

// ClientGate judges the load generator over all cells. maxInFlight is the bound on what
// an open loop had in flight, 0 for none. When the gate fails, its text names only the
// limits that were broken.
func ClientGate(cells []CellResult, maxInFlight int) Gate {
	var n, late int
	var bad []string
	var watched, stood, worstStop, worstRate, worstDispatch float64 // seconds, seconds, ms, share, ms
	openLoop := false
	for i := range cells {
		c := &cells[i]
		m := c.Measure
		n += m.Requests
		late += m.Late
		worstDispatch = math.Max(worstDispatch, math.Max(m.Dispatch.P95, m.Dispatch.P99))
		if stopped := val(m.ClientStopped); stopped >= 0 {
			watched += m.Seconds
			stood += stopped * m.Seconds
			worstStop = math.Max(worstStop, math.Max(val(m.ClientWake), val(m.ClientRead)))
		}
		if m.Starved() {
			bad = append(bad, c.Cell.ID)
		}
		if c.Cell.Load.Rate > 0 {
			openLoop = true
			if m.Achieved > 0 {
				worstRate = math.Max(worstRate, math.Abs(1-m.Achieved))
			}
		}
	}
	stopped, still := 0.0, "whether it stood still was not measured"
	if watched > 0 {
		stopped = stood / watched
		still = fmt.Sprintf("it stood still for %.2f%% of the time (limit %.0f%%), for up to %.1f ms", stopped*100, stopLimit*100, worstStop)
	}
	lateOf := share(late, n)
	sent := fmt.Sprintf("it sent %.2f%% of requests more than %.0f ms late (limit %.0f%%)", lateOf*100, LateLimit, LateShare*100)
	rate := fmt.Sprintf("its rate was off by up to %.2f%% (limit %.0f%%)", worstRate*100, rateLimit*100)
	var broken []string
	if stopped > stopLimit {
		broken = append(broken, still)
	}
	if lateOf > LateShare {
		broken = append(broken, sent)
	}
	if worstRate > rateLimit {
		broken = append(broken, rate)
	}
	switch {
	case len(broken) > 0 && maxInFlight > 0 && stopped <= stopLimit:
		g := judged("client", false, bad, "the target is slow, or --max-in-flight %d is too low, so the load generator had to wait: %s", maxInFlight, strings.Join(broken, ", "))
		g.Next = "lower --rate, or raise --max-in-flight"
		return g
	case len(broken) > 0:
		return judged("client", false, bad, "the load generator was starved: %s", strings.Join(broken, ", "))
	case openLoop:
		return judged("client", true, nil, "the load generator kept its schedule: %s, %s, %s", sent, rate, still)
	}
	return judged("client", true, nil, "the load generator was not starved: %s, worst cell p95 %.1f ms, %s", sent, worstDispatch, still)
}

// gates judges the whole run.
func (r *Runner) gates(res *Result) ([]Gate, Bounds) {
	var gates []Gate
	add := func(name string, passed bool, cells []string, format string, a ...any) {
		gates = append(gates, judged(name, passed, cells, format, a...))
	}
	unknown := func(name, text string) { gates = append(gates, Gate{Name: name, Text: text}) }

	var n, failed, exactI, exactO, pathOK int
	var hitCells, errCells, lenCells, pathCells, satCells, moveCells []string
	worstHit, worstFlight, worstGrowth := 0.0, 1.0, 0.0
	hitKnown, openLoop := false, false
	var moved, expected float64
	moveKnown, remoteCells, recomputes, remoteN := false, 0, 0, 0
	for i := range r.cells {
		c := &r.cells[i]
		m := c.Measure
		id := c.Cell.ID
		n += m.Requests
		failed += m.Failed
		exactI += m.ExactISL
		exactO += m.ExactOSL
		pathOK += m.PathOK
		if c.Cell.Load.Rate > 0 {
			openLoop = true
			worstGrowth = math.Max(worstGrowth, m.Growth)
			if m.Growth > growthLimit {
				satCells = append(satCells, id)
			}
		} else {
			worstFlight = math.Min(worstFlight, m.InFlight)
			if m.InFlight < flightLimit {
				satCells = append(satCells, id)
			}
		}
		if m.HitShare != nil {
			hitKnown = true
			d := math.Abs(*m.HitShare - m.ExpectedHit)
			worstHit = math.Max(worstHit, d)
			if d > hitLimit+hitSlack(c.Cell, r.Block) {
				hitCells = append(hitCells, id)
			}
		}
		if m.Failed > 0 {
			errCells = append(errCells, id)
		}
		if m.ExactISL < m.Requests || m.ExactOSL < m.Requests {
			lenCells = append(lenCells, id)
		}
		if m.PathOK < m.Requests {
			pathCells = append(pathCells, id)
		}
		if c.Cell.Arm == plan.Remote {
			remoteCells++
			remoteN += m.Requests
			recomputes += m.Recomputes + m.Fallbacks
			if m.TransferTokens != nil {
				moveKnown = true
				moved += *m.TransferTokens
				expected += m.ExpectedTransferTokens
				if *m.TransferTokens < transferLimit*m.ExpectedTransferTokens {
					moveCells = append(moveCells, id)
				}
			}
		}
	}
	gates = append(gates, ClientGate(r.cells, r.Spec.Cap))
	if hitKnown {
		add("cache", len(hitCells) == 0, hitCells, "prefix cache hits differ from what they should be by up to %.1f%%, in %d cells by more than the limit of %.0f%%", worstHit*100, len(hitCells), hitLimit*100)
	} else {
		unknown("cache", "no engine reports its prefix cache hits")
	}
	errOf := share(failed, n+failed)
	add("errors", errOf <= errLimit, errCells, "errors %.2f%% (%d of %d, limit %.1f%%)", errOf*100, failed, n+failed, errLimit*100)
	add("lengths", n > 0 && share(n-exactI, n) <= lengthLimit && share(n-exactO, n) <= lengthLimit, lenCells, "exact isl %.1f%%, exact osl %.1f%% of requests (all must be)", share(exactI, n)*100, share(exactO, n)*100)
	add("path", n > 0 && pathOK == n, pathCells, "the forced path was taken by %.1f%% of requests (all must)", share(pathOK, n)*100)
	if len(res.Groups) > 0 {
		worst := 0.0
		for _, g := range res.Groups {
			worst = math.Max(worst, g.CV)
		}
		if r.Spec.Repeats > 1 {
			add("repeats", worst <= noisyCV, nil, "repeats vary by %.1f%% in the median cell of the noisiest load (limit %.0f%%)", worst*100, noisyCV*100)
		} else {
			unknown("repeats", "one repeat shows no variation")
		}
	}
	aa := r.aa()
	switch {
	case aa.N >= 2 && !r.aaFails(aa) && wide(aa):
		unknown("a/a", fmt.Sprintf("local against local differs by %+.1f%% [%+.1f, %+.1f] over %d pairs: too noisy to judge", pct(aa.Value), pct(aa.Low), pct(aa.High), aa.N))
	case aa.N >= 2:
		add("a/a", !r.aaFails(aa), nil, "local against local differs by %+.1f%% [%+.1f, %+.1f] over %d pairs (limit %.0f%%)", pct(aa.Value), pct(aa.Low), pct(aa.High), aa.N, aaLimit*100)
	default:
		unknown("a/a", "too few pairs of local against local")
	}
	if openLoop {
		text := "in flight at the end against the middle up to %.2f times (limit %.1f)"
		if len(satCells) > 0 {
			text = "the target is slow: requests in flight grew %.2f times from the middle to the end of a cell (limit %.1f)"
		}
		add("saturation", len(satCells) == 0, satCells, text, worstGrowth, growthLimit)
	} else {
		add("saturation", len(satCells) == 0, satCells, "in flight %.1f%% of what was wanted in the worst cell (limit %.0f%%)", worstFlight*100, flightLimit*100)
	}
	switch {
	case remoteCells == 0:
		unknown("transfer", "no remote cell")
	case moveKnown:
		ok := len(moveCells) == 0 && share(recomputes, remoteN) <= recomputeShare
		add("transfer", ok, moveCells, "decode engines counted %.1f%% of the KV that had to move (limit %.0f%%), recomputed or fell back %d times in %d requests (limit %.0f%%)", 100*moved/math.Max(expected, 1), transferLimit*100, recomputes, remoteN, recomputeShare*100)
	default:
		if share(recomputes, remoteN) > recomputeShare {
			add("transfer", false, moveCells, "recomputed or fell back %d times in %d requests (limit %.0f%%)", recomputes, remoteN, recomputeShare*100)
		} else {
			unknown("transfer", "no decode engine counts what came from elsewhere")
		}
	}
	d := r.drift()
	bad := d.N >= 8 && d.Excludes(0) && math.Abs(d.Value) > driftLimit
	switch {
	case d.N >= 8 && !bad && wide(d):
		unknown("drift", fmt.Sprintf("ttft of equal cells changed by %+.1f%% [%+.1f, %+.1f] over the run: too noisy to judge", pct(d.Value), pct(d.Low), pct(d.High)))
	case d.N >= 8:
		add("drift", !bad, nil, "ttft of equal cells changed by %+.1f%% [%+.1f, %+.1f] over the run (limit %.0f%%)", pct(d.Value), pct(d.Low), pct(d.High), driftLimit*100)
	default:
		unknown("drift", "too few cells to see a drift")
	}
	return gates, bounds(math.Expm1(aa.Value), math.Expm1(aa.Low), math.Expm1(aa.High))
}

// hitSlack is what a hit share may differ by for the partial last block: an
// engine finds whole blocks only, and never the last token.
func hitSlack(c plan.Cell, block int) float64 {
	if c.CachedTokens == 0 {
		return 0
	}
	return float64(block) / float64(c.ISL())
}

// wide reports whether an interval of a log ratio is too wide to clear anything.
func wide(i stats.Interval) bool { return i.High-i.Low > 2*math.Log(1.5) }

func pct(logv float64) float64 { return 100 * math.Expm1(logv) }

func (r *Runner) aaFails(aa stats.Interval) bool {
	return aa.N >= 2 && aa.Excludes(0) && math.Abs(aa.Value) > aaLimit
}

// aa is the log ratio of the A/A pairs.
func (r *Runner) aa() stats.Interval {
	type key struct {
		load   plan.Load
		repeat int
	}
	first, second := map[key]float64{}, map[key]float64{}
	var keys []key
	for i := range r.cells {
		c := &r.cells[i]
		if c.Cell.Phase != "aa" {
			continue
		}
		k := key{c.Cell.Load, c.Cell.Repeat}
		if c.Cell.Second {
			second[k] = ttft(c)
		} else {
			first[k] = ttft(c)
			keys = append(keys, k)
		}
	}
	var d []float64
	for _, k := range keys {
		if a, b := first[k], second[k]; a > 0 && b > 0 {
			d = append(d, math.Log(b/a))
		}
	}
	return stats.MeanInterval(d, 0.99)
}

// drift is how the log of ttft changed over the run, once every cell's own
// level is taken out.
func (r *Runner) drift() stats.Interval {
	type key struct {
		load   plan.Load
		eff    int
		cached float64
		arm    plan.Arm
	}
	sum, count := map[key]float64{}, map[key]float64{}
	at := func(c *CellResult) key { return key{c.Cell.Load, c.Cell.EffISL, c.Cell.CachedShare, c.Cell.Arm} }
	for i := range r.cells {
		if v := ttft(&r.cells[i]); v > 0 {
			sum[at(&r.cells[i])] += math.Log(v)
			count[at(&r.cells[i])]++
		}
	}
	var x, y []float64
	for i := range r.cells {
		c := &r.cells[i]
		k := at(c)
		if v := ttft(c); v > 0 && count[k] > 1 {
			x = append(x, c.Start.Seconds())
			y = append(y, math.Log(v)-sum[k]/count[k])
		}
	}
	return stats.Line(x, y, 0.99)
}
