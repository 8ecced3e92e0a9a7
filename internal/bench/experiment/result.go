package experiment

import (
	"math"
	"time"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// Schema is the version of result.json.
const Schema = "dynctl.bench/v1"

// Stages splits the time to the first token, in ms, means over a cell. A stage that is
// not known is null.
type Stages struct {
	// Router is from the request's arrival to the first leg's dispatch.
	Router *float64 `json:"router_ms"`
	// PrefillQueue and Prefill are the engine's own histograms where it has
	// them; without them the whole prefill leg is in Prefill.
	PrefillQueue *float64 `json:"prefill_queue_ms"`
	Prefill      *float64 `json:"prefill_ms"`
	Transfer     *float64 `json:"transfer_ms"`
	// FirstDecode is the rest of the decode leg up to its first byte.
	FirstDecode *float64 `json:"first_decode_ms"`
}

// Measure is what one cell measured.
type Measure struct {
	Requests int            `json:"requests"`
	Failed   int            `json:"failed"`
	Errors   map[string]int `json:"errors,omitempty"`

	TTFT         loadgen.Dist `json:"ttft"`
	TTFTIntended loadgen.Dist `json:"ttft_intended"`
	TPOT         loadgen.Dist `json:"tpot"`
	ITL          loadgen.Dist `json:"itl"`
	E2E          loadgen.Dist `json:"e2e"`
	Dispatch     loadgen.Dist `json:"dispatch"`

	Good              int     `json:"good"`
	GoodPerSecond     float64 `json:"goodput_requests_per_second"`
	RequestsPerSecond float64 `json:"requests_per_second"`
	// Tokens of all requests, ramp included, from the first send to the last
	// token; and while the wanted number was in flight.
	TokensPerSecond       float64 `json:"output_tokens_per_second"`
	SteadyTokensPerSecond float64 `json:"steady_output_tokens_per_second"`

	// ClientStopped is the share of the cell's time in which the client itself stood
	// still; ClientWake and ClientRead are the latest, in ms, that one of its timers
	// fired and that it read an event. Null when that was not measured.
	ClientStopped *float64 `json:"client_stopped_share"`
	ClientWake    *float64 `json:"client_wake_late_max_ms"`
	ClientRead    *float64 `json:"client_read_late_max_ms"`

	// Late sends were more than 10 ms after their intended time.
	Late     int     `json:"late_sends"`
	InFlight float64 `json:"in_flight_share"`
	// Achieved is the rate of sends against the planned, Growth what was in
	// flight at the end against the middle of an open loop; 0 in a closed one.
	Achieved float64 `json:"achieved_rate_share,omitempty"`
	Growth   float64 `json:"in_flight_growth,omitempty"`
	// Ended is how fast the middle half of an open loop's answers ended, as a share of
	// how fast the middle half of its requests was due: 1 for a target that keeps up,
	// however long its answers take. 0 when too few ended.
	Ended float64 `json:"ended_rate_share,omitempty"`

	// Of the measured requests: the engine counted exactly the requested prompt and answer,
	// and the router took the arm's path.
	ExactISL int `json:"exact_isl"`
	ExactOSL int `json:"exact_osl"`
	PathOK   int `json:"path_ok"`

	// HitShare is what the engines' own counters say of prompt tokens found in
	// the cache of those that prefilled, ExpectedHit what should have been.
	HitShare    *float64 `json:"cache_hit_share"`
	ExpectedHit float64  `json:"expected_cache_hit_share"`
	// TransferTokens is what decode engines say came from elsewhere.
	TransferTokens         *float64 `json:"transfer_tokens"`
	ExpectedTransferTokens float64  `json:"expected_transfer_tokens"`
	TransferBytes          *float64 `json:"transfer_bytes"`
	Recomputes             int      `json:"silent_recomputes"`
	Fallbacks              int      `json:"fallbacks"`
	Preemptions            float64  `json:"preemptions"`

	Stages  Stages  `json:"stages"`
	Seconds float64 `json:"seconds"`
}

// Watch takes over how the client fared; s may be nil.
func (m *Measure) Watch(s *loadgen.Starvation) {
	if s == nil || s.Watched <= 0 {
		return
	}
	m.ClientStopped, m.ClientWake, m.ClientRead = Known(s.Share()), Known(s.Wake.Seconds()*1000), Known(s.Read.Seconds()*1000)
}

// CellResult is a cell with its result.
type CellResult struct {
	Cell    plan.Cell `json:"cell"`
	Measure *Measure  `json:"measure"`
	// Start and End count from the start of the run.
	Start time.Duration `json:"start_ns"`
	End   time.Duration `json:"end_ns"`
	// Voids are the reasons why earlier attempts were thrown away.
	Voids []string `json:"voids,omitempty"`
}

// TTFT is the time that counts for the cell's load: an open loop's from the planned
// time, a closed loop's from the send.
func (c *CellResult) TTFT() loadgen.Dist {
	if c.Cell.Load.Rate > 0 {
		return c.Measure.TTFTIntended
	}
	return c.Measure.TTFT
}

func ttft(c *CellResult) float64 { return c.TTFT().P50 }

// ArmPoint is one arm at one point: medians over the repeats.
type ArmPoint struct {
	TTFTP50  float64 `json:"ttft_p50_ms"`
	TTFTP99  float64 `json:"ttft_p99_ms"`
	ITLP50   float64 `json:"itl_p50_ms"`
	ITLP99   float64 `json:"itl_p99_ms"`
	TPOTP50  float64 `json:"tpot_p50_ms"`
	E2EP50   float64 `json:"e2e_p50_ms"`
	GoodPct  float64 `json:"goodput_percent"`
	GoodRate float64 `json:"goodput_requests_per_second"`
	Rate     float64 `json:"requests_per_second"`
	Tokens   float64 `json:"output_tokens_per_second"`
	CV       float64 `json:"ttft_p50_cv"`
	// Low and High bound the mean of ttft p50 over the repeats.
	Low    float64 `json:"ttft_p50_low_ms"`
	High   float64 `json:"ttft_p50_high_ms"`
	Stages Stages  `json:"stages"`
}

// PointResult compares the arms at one point.
type PointResult struct {
	EffISL  int      `json:"eff_isl_tokens"`
	Cached  int      `json:"cached_tokens"`
	Repeats int      `json:"repeats"`
	Local   ArmPoint `json:"local"`
	Remote  ArmPoint `json:"remote"`
	// Diff is how much longer the remote arm's ttft p50 is: 0.31 for +31 %.
	Diff     Bounds  `json:"ttft_p50_diff"`
	LogRatio Bounds  `json:"log_ratio"`
	Fit      float64 `json:"isotonic_log_ratio"`
	// Verdict is "local", "remote" or "tie".
	Verdict string `json:"verdict"`
}

// Bounds is an interval for JSON: an open end is null.
type Bounds struct {
	Value *float64 `json:"value"`
	Low   *float64 `json:"low"`
	High  *float64 `json:"high"`
}

func bounds(v, low, high float64) Bounds { return Bounds{Known(v), Known(low), Known(high)} }

// Known is a number, nil for one that is not finite.
func Known(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// val is a number or NaN.
func val(p *float64) float64 {
	if p == nil {
		return math.NaN()
	}
	return *p
}

// Crossing is a crossover in words and numbers.
type Crossing struct {
	Objective string       `json:"objective"`
	Answer    stats.Answer `json:"answer"`
	// At is in effective tokens; Low and High are null when open.
	At       Bounds  `json:"at_tokens"`
	Step     float64 `json:"step_tokens,omitempty"`
	Margin   float64 `json:"margin,omitempty"`
	Sentence string  `json:"sentence"`
}

// Tie says that the arms do not differ at all.
const Tie stats.Answer = "tie"

// GroupResult is the answer at one load and cached share.
type GroupResult struct {
	Group  plan.Group    `json:"group"`
	Points []PointResult `json:"points"`
	// Crossings by objective: "ttft", and with an SLO "itl" and "goodput".
	Crossings []Crossing `json:"crossings"`
	CV        float64    `json:"median_cv"`
}

// Crossing is the one for an objective, nil if it was not asked for.
func (g *GroupResult) Crossing(objective string) *Crossing {
	for i := range g.Crossings {
		if g.Crossings[i].Objective == objective {
			return &g.Crossings[i]
		}
	}
	return nil
}

// Gate is one condition for a result to be trusted.
type Gate struct {
	Name string `json:"name"`
	// Passed is null when there was nothing to judge by.
	Passed *bool  `json:"passed"`
	Text   string `json:"text"`
	// Next is what to do about a gate that failed.
	Next string `json:"next,omitempty"`
	// Cells that are at fault, at most 10.
	Cells []string `json:"cells,omitempty"`
}

// Recommendation is the number to take home.
type Recommendation struct {
	EffISL    int        `json:"eff_isl_tokens"`
	Objective string     `json:"objective"`
	Group     plan.Group `json:"group"`
	Because   string     `json:"because"`
	// Configs to paste, by system.
	Configs []Config `json:"configs"`
}

// Config is a setting to paste.
type Config struct {
	System string `json:"system"`
	Text   string `json:"text"`
	Note   string `json:"note,omitempty"`
}

// Result is a whole run.
type Result struct {
	Schema  string    `json:"schema"`
	Name    string    `json:"name"`
	Version string    `json:"dynctl_version"`
	Created time.Time `json:"created"`
	Command []string  `json:"command,omitempty"`
	// Valid is whether every gate passed; Partial whether the run ended early.
	Valid   bool   `json:"valid"`
	Partial string `json:"partial,omitempty"`

	Target   *fleet.Facts `json:"target,omitempty"`
	Hardware string       `json:"hardware,omitempty"`
	// Simulated names the simulated fleet and its profiles; empty for real engines.
	Simulated []string        `json:"simulated,omitempty"`
	Spec      plan.Spec       `json:"spec"`
	Warmup    Warmup          `json:"warmup"`
	AA        Bounds          `json:"aa_ttft_p50_diff"`
	Groups    []GroupResult   `json:"groups"`
	Gates     []Gate          `json:"gates"`
	Sentence  string          `json:"sentence"`
	Recommend *Recommendation `json:"recommend"`
	// Learned are the crossings that the router had learned when the run ended.
	Learned  []admin.Crossing `json:"learned_crossings,omitempty"`
	Cautions []string         `json:"cautions"`
	Voided   int              `json:"voided_cells"`
	Skipped  int              `json:"skipped_cells,omitempty"`
	Seconds  float64          `json:"seconds"`
	Cells    []CellResult     `json:"cells"`
}

// Headline is the group whose answer comes first: without cached prefix if there is one,
// at the highest load; nil without groups.
func (r *Result) Headline() *GroupResult {
	var best *GroupResult
	for i := range r.Groups {
		g := &r.Groups[i]
		if best == nil || g.Group.Cached < best.Group.Cached || g.Group.Cached == best.Group.Cached && (g.Group.Load.Concurrency > best.Group.Load.Concurrency || g.Group.Load.Rate > best.Group.Load.Rate) {
			best = g
		}
	}
	return best
}

// Warmup is what was thrown away before the first cell.
type Warmup struct {
	Cells    int  `json:"cells"`
	Requests int  `json:"requests"`
	Steady   bool `json:"steady"`
	// Drifts are the changes of ttft p50 between the rounds.
	Drifts []float64 `json:"drifts"`
}
