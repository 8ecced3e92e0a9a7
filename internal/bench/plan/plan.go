// Package plan is what a benchmark run is going to do: the requested grid, checked against
// what is possible, and its cells in the order in which they are measured. It is pure; a plan
// and its seed give the same cells.
package plan

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Schema is the version of a plan's JSON and YAML form.
const Schema = "dynctl.bench-plan/v1"

// Arm is what a cell forces.
type Arm string

// The arms. Auto lets the router decide (load sweeps).
const (
	Local  Arm = "local"
	Remote Arm = "remote"
	Auto   Arm = "auto"
)

// Header is the line by which a request asks for the arm.
func (a Arm) Header() string {
	if a == Auto || a == "" {
		return ""
	}
	return "X-Dynctl-Path: " + string(a) + "\r\n"
}

// Load is how hard a cell pushes: a number in flight or a rate of arrivals.
type Load struct {
	Concurrency int     `json:"concurrency,omitempty" yaml:"concurrency,omitempty"`
	Rate        float64 `json:"rate_per_second,omitempty" yaml:"rate_per_second,omitempty"`
}

// String is "concurrency 16" or "rate 4/s".
func (l Load) String() string {
	if l.Rate > 0 {
		return "rate " + strconv.FormatFloat(l.Rate, 'g', 6, 64) + "/s"
	}
	return "concurrency " + strconv.Itoa(l.Concurrency)
}

// Key is short and fit for an identifier: "c16" or "r4".
func (l Load) Key() string {
	if l.Rate > 0 {
		return "r" + strconv.FormatFloat(l.Rate, 'g', 6, 64)
	}
	return "c" + strconv.Itoa(l.Concurrency)
}

// SLO is what a good request keeps to; 0 is not asked for.
type SLO struct {
	TTFT time.Duration `json:"ttft_ns,omitempty" yaml:"ttft,omitempty"`
	ITL  time.Duration `json:"itl_ns,omitempty" yaml:"itl,omitempty"`
	TPOT time.Duration `json:"tpot_ns,omitempty" yaml:"tpot,omitempty"`
	E2E  time.Duration `json:"e2e_ns,omitempty" yaml:"e2e,omitempty"`
}

// Any reports whether anything is requested.
func (s SLO) Any() bool { return s != SLO{} }

// Spec is the request.
type Spec struct {
	Schema string `json:"schema" yaml:"schema"`
	// ISL are the prompt lengths of the first pass in tokens, OSL is the answer's.
	ISL []int `json:"isl_tokens" yaml:"isl_tokens"`
	OSL int   `json:"osl_tokens" yaml:"osl_tokens"`
	// Loads and Cached (shares of the prompt that the decode rank holds) span
	// the grid with ISL.
	Loads  []Load    `json:"loads" yaml:"loads"`
	Cached []float64 `json:"cached_shares" yaml:"cached_shares"`
	// Repeats of each cell; MaxRepeats is the most that refinement adds up to.
	Repeats    int `json:"repeats" yaml:"repeats"`
	MaxRepeats int `json:"max_repeats" yaml:"max_repeats"`
	// Requests measured in a cell; 0 derives it from the load.
	Requests   int     `json:"requests,omitempty" yaml:"requests,omitempty"`
	SLO        SLO     `json:"slo" yaml:"slo"`
	Arrival    string  `json:"arrival" yaml:"arrival"`
	Burstiness float64 `json:"burstiness,omitempty" yaml:"burstiness,omitempty"`
	// Cap bounds what an open loop has in flight; 0 is no bound.
	Cap  int    `json:"cap,omitempty" yaml:"cap,omitempty"`
	Seed uint64 `json:"seed" yaml:"seed"`
	// Salt makes the prompts of this run unlike those of any other.
	Salt string `json:"salt" yaml:"salt"`
	// Level of the intervals.
	Level float64 `json:"level" yaml:"level"`
	// Objective names what the recommendation is for: "ttft", "itl" or
	// "goodput".
	Objective string `json:"objective" yaml:"objective"`
	// NoRefine leaves out the adaptive second pass.
	NoRefine bool `json:"no_refine,omitempty" yaml:"no_refine,omitempty"`
}

// Limits are the target's.
type Limits struct {
	MaxModelLen int // tokens of prompt and answer; 0 unknown
	KVTokens    int // tokens that the smallest rank's cache holds; 0 unknown
}

// Cell is one measurement: one arm at one point, once.
type Cell struct {
	ID string `json:"id"`
	// Phase is "warmup", "aa", "grid", "refine", "repeat" or "sweep".
	Phase string `json:"phase"`
	// EffISL is what must be computed, CachedTokens what the decode rank holds;
	// together they are the prompt.
	EffISL       int     `json:"eff_isl_tokens"`
	CachedTokens int     `json:"cached_tokens"`
	CachedShare  float64 `json:"cached_share"`
	OSL          int     `json:"osl_tokens"`
	Load         Load    `json:"load"`
	Arm          Arm     `json:"arm"`
	Repeat       int     `json:"repeat"`
	// Second distinguishes the two cells of an A/A pair.
	Second bool `json:"second,omitempty"`
	// Requests are measured; Ramp ones fill the slots before and are not.
	Requests int `json:"requests"`
	Ramp     int `json:"ramp"`
	// Threshold is set on the router before the cell, when it is positive
	// (threshold sweeps).
	Threshold int `json:"threshold_tokens,omitempty"`
}

// ISL is the prompt's length in tokens.
func (c Cell) ISL() int { return c.EffISL + c.CachedTokens }

// Pair is two cells that are compared with each other, in the order in which
// they are measured.
type Pair [2]Cell

// Validate reports everything that makes the spec impossible.
func (s *Spec) Validate(l Limits) error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if len(s.ISL) == 0 {
		bad("--isl: no prompt length")
	}
	for _, n := range s.ISL {
		if n < 1 || n > 1<<24 {
			bad("--isl: %d tokens is not between 1 and %d", n, 1<<24)
		}
	}
	if s.OSL < 1 || s.OSL > 1<<20 {
		bad("--osl: %d is not between 1 and %d", s.OSL, 1<<20)
	}
	if len(s.Loads) == 0 {
		bad("give --concurrency or --rate")
	}
	for _, x := range s.Loads {
		if x.Rate > 0 == (x.Concurrency > 0) || math.IsInf(x.Rate, 0) || math.IsNaN(x.Rate) || x.Concurrency > 1<<16 || x.Concurrency < 0 || x.Rate < 0 {
			bad("load %+v is neither a number in flight nor a rate", x)
		}
	}
	for _, c := range s.Cached {
		if !(c >= 0 && c < 1) {
			bad("--cached: %v is not a share from 0 to below 1", c)
		}
	}
	if s.Repeats < 1 || s.Repeats > 1000 {
		bad("--repeat: %d is not between 1 and 1000", s.Repeats)
	}
	if s.MaxRepeats < s.Repeats {
		bad("--max-repeat: %d is less than --repeat %d", s.MaxRepeats, s.Repeats)
	}
	if !(s.Level >= 0.5 && s.Level < 1) {
		bad("--level: %v is not between 0.5 and 1", s.Level)
	}
	if s.Requests < 0 || s.Requests > 1<<20 {
		bad("--requests: %d is not between 0 and %d", s.Requests, 1<<20)
	}
	switch s.Objective {
	case "ttft":
	case "itl":
		if s.SLO.ITL == 0 {
			bad("--objective itl needs --slo itl=…")
		}
	case "goodput":
		if !s.SLO.Any() {
			bad("--objective goodput needs --slo")
		}
	default:
		bad("--objective: %q is not one of ttft, itl, goodput", s.Objective)
	}
	if len(errs) == 0 {
		longest := slices.Max(s.ISL)
		if l.MaxModelLen > 0 && longest+s.OSL > l.MaxModelLen {
			bad("a prompt of %d tokens and an answer of %d do not fit the model's %d: lower the end of --isl to %d", longest, s.OSL, l.MaxModelLen, l.MaxModelLen-s.OSL)
		}
		if l.KVTokens > 0 {
			for _, x := range s.Loads {
				if x.Concurrency > 0 && longest+s.OSL > l.KVTokens {
					bad("one request of %d tokens does not fit a rank's cache of %d tokens", longest+s.OSL, l.KVTokens)
					break
				}
			}
		}
	}
	return errors.Join(errs...)
}

// Warnings are what makes a valid spec a poor one.
func (s *Spec) Warnings(l Limits) []string {
	var out []string
	longest := slices.Max(s.ISL)
	for _, x := range s.Loads {
		if need := x.Concurrency * (longest + s.OSL); l.KVTokens > 0 && need > l.KVTokens {
			out = append(out, fmt.Sprintf("%s with prompts of %d tokens needs %d tokens of cache, the fleet's decode ranks hold %d: requests will wait or be preempted; lower --concurrency or --isl, or enlarge the caches (kv_blocks= in --sim)", x, longest, need, l.KVTokens))
		}
	}
	if s.Repeats < 3 {
		out = append(out, fmt.Sprintf("%d repeats say little about noise; 5 is the default", s.Repeats))
	}
	if s.OSL < 2 {
		out = append(out, "with one output token there is no time between tokens")
	}
	return out
}

// Point gives the tokens of a point: how many are cached for a share of the
// prompt, in whole blocks, and how many must be computed.
func Point(isl int, share float64, block int) (eff, cached int) {
	cached = int(float64(isl)*share) / max(block, 1) * max(block, 1)
	if cached >= isl {
		cached -= max(block, 1)
	}
	cached = max(cached, 0)
	return isl - cached, cached
}

// CachedFor is how many tokens are cached beside those that must be computed, for a share of
// the whole prompt.
func CachedFor(eff int, share float64, block int) int {
	block = max(block, 1)
	return int(math.Round(float64(eff)*share/(1-share)/float64(block))) * block
}

// RequestsFor is how many requests a cell measures.
func (s *Spec) RequestsFor(l Load) int {
	switch {
	case s.Requests > 0:
		return s.Requests
	case l.Rate > 0:
		return max(20, int(math.Ceil(l.Rate*10)))
	default:
		return max(8, 2*l.Concurrency)
	}
}

// rampFor is how many go before: they meet a fleet that is not loaded yet.
func (s *Spec) rampFor(l Load) int {
	switch {
	case l.Rate > 0:
		return max(2, min(int(l.Rate), s.RequestsFor(l)))
	case l.Concurrency == 1:
		return 1
	default:
		return l.Concurrency
	}
}

// NewCell makes a cell of this spec.
func (s *Spec) NewCell(phase string, l Load, share float64, eff, cached int, arm Arm, repeat int) Cell {
	c := Cell{
		Phase: phase, EffISL: eff, CachedTokens: cached, CachedShare: share, OSL: s.OSL, Load: l, Arm: arm, Repeat: repeat,
		Requests: s.RequestsFor(l), Ramp: s.rampFor(l),
	}
	c.ID = fmt.Sprintf("%s/k%g/e%d/r%d/%s", l.Key(), share, eff, repeat, arm)
	return c
}

// Group is a line of the experiment: one load and one cached share.
type Group struct {
	Load   Load    `json:"load"`
	Cached float64 `json:"cached_share"`
}

// Key is fit for an identifier.
func (g Group) Key() string { return fmt.Sprintf("%s/k%g", g.Load.Key(), g.Cached) }

// String is the group in words.
func (g Group) String() string {
	if g.Cached == 0 {
		return g.Load.String()
	}
	return fmt.Sprintf("%s, %g%% cached", g.Load, g.Cached*100)
}

// Groups are all lines of the grid.
func (s *Spec) Groups() []Group {
	var out []Group
	for _, l := range s.Loads {
		for _, k := range s.Cached {
			out = append(out, Group{l, k})
		}
	}
	return out
}

// Pairs orders what is to be measured: repeat by repeat, the points of each
// repeat in an order of their own, and the arms of a point ABBA: whichever
// came first in one repeat comes second in the next, so that a slow drift of
// the fleet favours neither.
//
// want gives each point of each group the repeats from and up to (exclusive).
func (s *Spec) Pairs(phase string, want []Wanted) []Pair {
	most := 0
	for _, w := range want {
		most = max(most, w.To)
	}
	var out []Pair
	for r := range most {
		var round []Pair
		for i, w := range want {
			if r < w.From || r >= w.To {
				continue
			}
			a := s.NewCell(phase, w.Group.Load, w.Group.Cached, w.EffISL, w.Cached, Local, r)
			b := s.NewCell(phase, w.Group.Load, w.Group.Cached, w.EffISL, w.Cached, Remote, r)
			if (r+i)%2 == 1 {
				a, b = b, a
			}
			round = append(round, Pair{a, b})
		}
		rng := rand.New(rand.NewPCG(s.Seed, uint64(r)^0x706c616e))
		rng.Shuffle(len(round), func(i, j int) { round[i], round[j] = round[j], round[i] })
		out = append(out, round...)
	}
	return out
}

// Wanted asks for repeats From..To-1 of a point.
type Wanted struct {
	Group          Group
	EffISL, Cached int
	From, To       int
}

// Grid is the first pass of one group.
func (s *Spec) Grid(g Group, block int) []Wanted {
	var out []Wanted
	for _, isl := range s.ISL {
		eff, cached := Point(isl, g.Cached, block)
		out = append(out, Wanted{Group: g, EffISL: eff, Cached: cached, To: s.Repeats})
	}
	return out
}

// AAPairs are local against local at the middle of the grid for each load: what
// they differ by is the experiment's own bias. set counts further sets of them.
func (s *Spec) AAPairs(set int) []Pair {
	isl := s.ISL[len(s.ISL)/2]
	var out []Pair
	n := max(s.Repeats, 3)
	for r := set * n; r < (set+1)*n; r++ {
		for _, l := range s.Loads {
			a := s.NewCell("aa", l, 0, isl, 0, Local, r)
			b := a
			a.ID, b.ID = "aa/"+a.ID+"/a", "aa/"+b.ID+"/b"
			b.Second = true
			if r%2 == 1 {
				a, b = b, a
			}
			out = append(out, Pair{a, b})
		}
	}
	return out
}

// Cost sums up cells.
type Cost struct {
	Cells, Requests int
	InputTokens     int64
}

// CostOf adds up what pairs of cells send.
func CostOf(pairs []Pair) Cost {
	var c Cost
	for _, p := range pairs {
		for _, x := range p {
			n := x.Requests + x.Ramp
			c.Cells++
			c.Requests += n
			c.InputTokens += int64(n) * int64(x.ISL())
		}
	}
	return c
}

// ParseISL reads prompt lengths: "256:16384:x2" (times 2), "512:4096:+512",
// "300", or several of them with commas. The result is ascending and unique.
func ParseISL(text string) ([]int, error) {
	var out []int
	for _, part := range strings.Split(text, ",") {
		part = strings.TrimSpace(part)
		f := strings.Split(part, ":")
		n := make([]int, len(f))
		for i := range min(len(f), 2) {
			v, err := tokens(f[i])
			if err != nil {
				return nil, fmt.Errorf("%q: %w", part, err)
			}
			n[i] = v
		}
		switch len(f) {
		case 1:
			out = append(out, n[0])
		case 3:
			step := f[2]
			if n[0] > n[1] || n[0] < 1 {
				return nil, fmt.Errorf("%q: want LOW:HIGH with 0 < LOW ≤ HIGH", part)
			}
			switch {
			case strings.HasPrefix(step, "x"):
				by, err := strconv.ParseFloat(step[1:], 64)
				if err != nil || !(by > 1) || math.IsInf(by, 0) {
					return nil, fmt.Errorf("%q: %q is not a factor above 1 such as x2", part, step)
				}
				for v := float64(n[0]); v <= float64(n[1])*1.0001; v *= by {
					out = append(out, int(math.Round(v)))
					if len(out) > maxPoints {
						return nil, fmt.Errorf("%q: more than %d points", part, maxPoints)
					}
				}
			case strings.HasPrefix(step, "+"):
				by, err := tokens(step[1:])
				if err != nil || by < 1 {
					return nil, fmt.Errorf("%q: %q is not a step such as +512", part, step)
				}
				for v := n[0]; v <= n[1]; v += by {
					out = append(out, v)
					if len(out) > maxPoints {
						return nil, fmt.Errorf("%q: more than %d points", part, maxPoints)
					}
				}
			default:
				return nil, fmt.Errorf("%q: the step must be xFACTOR or +TOKENS", part)
			}
		default:
			return nil, fmt.Errorf("%q: want TOKENS or LOW:HIGH:xFACTOR or LOW:HIGH:+TOKENS", part)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

const maxPoints = 1000

func tokens(s string) (int, error) {
	s = strings.TrimSpace(s)
	mult := 1
	if v, ok := strings.CutSuffix(strings.ToLower(s), "k"); ok {
		s, mult = v, 1024
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 1<<24 {
		return 0, fmt.Errorf("%q is not a number of tokens", s)
	}
	return n * mult, nil
}

// ParseSLO reads "ttft=800ms,itl=40ms".
func ParseSLO(text string) (SLO, error) {
	var s SLO
	for _, part := range strings.Split(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		key, value, ok := strings.Cut(part, "=")
		d, err := time.ParseDuration(value)
		if !ok || err != nil || d <= 0 {
			return s, fmt.Errorf("%q is not KEY=DURATION such as ttft=800ms", part)
		}
		target := map[string]*time.Duration{"ttft": &s.TTFT, "itl": &s.ITL, "tpot": &s.TPOT, "e2e": &s.E2E}[key]
		if target == nil {
			return s, fmt.Errorf("%q is not one of ttft, itl, tpot, e2e", key)
		}
		*target = d
	}
	return s, nil
}
