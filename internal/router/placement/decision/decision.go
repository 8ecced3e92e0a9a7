// Package decision is one routing decision as plain data: what was known of every
// candidate, what each would have cost, what was excluded and why, what was chosen
// and what was predicted. The selector ranks over it, receipts and recordings
// keep it, screens show it. Of the router it imports only the vocabulary.
//
// In JSON numbers are numbers, units are in the keys, a figure that is not known is -1
// or absent.
package decision

import (
	"math"

	"github.com/dynctl/dynctl/internal/router/route"
)

// Decision is what one attempt was made from.
type Decision struct {
	// Attempt is its number from 1 on, 0 before there is one. The legs have theirs.
	Attempt int    `json:"attempt,omitempty"`
	Inputs  Inputs `json:"inputs"`
	// Path is "local" or "remote", empty when nothing could be done; Reason
	// is its code and ReasonText the same in plain words.
	Path       string `json:"path"`
	Reason     string `json:"reason"`
	ReasonText string `json:"reason_text"`
	EffISL     int    `json:"eff_isl_tokens"`
	Connector  string `json:"connector,omitempty"`

	Decode  Phase `json:"decode"`
	Prefill Phase `json:"prefill"`

	Predicted Prediction `json:"predicted"`
}

// Inputs are the figures that the decision depends on, in addition to the candidates.
type Inputs struct {
	ISL int `json:"isl_tokens"`
	// ISLSource is "ids", "engine", "local", "estimate" or "none".
	ISLSource string `json:"isl_source"`
	// Multimodal says that the prompt holds more than text, which an estimate does not count.
	Multimodal bool `json:"multimodal,omitempty"`
	// Output is how many tokens each answer was expected to have; absent where nothing was
	// known.
	Output       int `json:"expected_output_tokens,omitempty"`
	BlockSize    int `json:"block_size_tokens"`
	HashedBlocks int `json:"hashed_blocks"`
	// Approximate says that overlaps come from text chunks, not from blocks.
	Approximate bool   `json:"approximate,omitempty"`
	SessionKey  uint64 `json:"session_key_hash,omitempty,string"`
	Threshold   int    `json:"threshold_tokens"`
	// ThresholdOn is "eff_isl" or "isl".
	ThresholdOn string `json:"threshold_on"`
	// Force is the path that the client asked for, if any.
	Force string `json:"force,omitempty"`
	// Draw and the turns are the decision's random number and its places in
	// the round-robin sequences. Draw and SessionKey use all 64 bits and are
	// strings in JSON, where many readers round large numbers.
	Draw        uint64 `json:"draw,string"`
	DecodeTurn  uint64 `json:"decode_turn"`
	PrefillTurn uint64 `json:"prefill_turn"`
}

// Kept is how many candidates of each phase a receipt keeps: with 4096 receipts and
// larger fleets, about 60 MB. The order of the ranks beyond is never asked for.
const Kept = 32

// Phase is the choice of one rank.
type Phase struct {
	// Policy is the one that was applied; empty when the phase was not
	// ranked.
	Policy string `json:"policy,omitempty"`
	// Verdict is "chosen", "no_candidates", "all_excluded" or "all_busy".
	Verdict string `json:"verdict,omitempty"`
	// Chosen and RunnerUp are rank labels.
	Chosen   string `json:"chosen,omitempty"`
	RunnerUp string `json:"runner_up,omitempty"`
	// Unit is "ms" where costs are times; absent where they are not.
	Unit string `json:"cost_unit,omitempty"`
	// MarginBlocks is by how much the runner-up costs more. Where several ranks count as equal
	// it may be less than 0.
	MarginBlocks float64 `json:"margin_blocks"`
	Eligible     int     `json:"eligible_ranks"`
	// Unseen is how many decisions of other routers were expected that this one did not see.
	Unseen float64 `json:"unseen_decisions,omitempty"`
	// Tied ranks shared the best cost; TieBreak is what chose among them.
	Tied     int    `json:"tied_ranks,omitempty"`
	TieBreak string `json:"tie_break,omitempty"`
	Sampled  bool   `json:"sampled,omitempty"`
	// Home is the rank where policy session had the session before, or "new"; empty where
	// it was not looked for.
	Home string `json:"session_home,omitempty"`
	// Candidates are in the order of the ranking, excluded ones last; Omitted
	// counts those that did not fit.
	Candidates []Candidate `json:"candidates"`
	Omitted    int         `json:"candidates_omitted,omitempty"`
}

// Candidate is one rank as the decision saw it, and what the policy made of it.
type Candidate struct {
	// Rank is its name, "worker/dpN"; Slot its number in the fleet.
	Rank string `json:"rank"`
	Slot uint32 `json:"slot"`
	// Tiers are the blocks of the prompt behind OverlapBlocks that it holds outside its
	// device.
	route.Tiers
	// OverlapBlocks is how many leading full blocks of the prompt it holds on its
	// device.
	OverlapBlocks int `json:"overlap_blocks"`

	// Cost is what the policy compared, lower is better: ms where [Phase.Unit] says so, else
	// blocks for the kv policies and requests for the load policies, 0 where nothing is compared.
	Cost float64 `json:"cost_blocks"`
	Terms

	// KeptOut, when not empty, is why the caller keeps the rank out, whatever it
	// would cost ("draining"). It stands here with what every choice reads of every rank.
	KeptOut string `json:"-"`

	// ActiveRequests, PrefillTokens and DecodeBlocks are the router's own
	// account of work in flight on the rank (see package ledger), and that of its Siblings.
	ActiveRequests int `json:"active_requests"`
	// Answering is how many of these requests have their first token.
	Answering     int `json:"answering_requests,omitempty"`
	PrefillTokens int `json:"active_prefill_tokens"`
	DecodeBlocks  int `json:"active_decode_blocks"`
	// CachedBlocks is how many of DecodeBlocks the rank had before their requests came, so that
	// several may share them.
	CachedBlocks int `json:"active_cached_blocks,omitempty"`
	// FreshTokens is how many uncached prompt tokens the rank was recently
	// given, fading as the fleet gets more (ledger.Load): how fast its cache
	// turns over. 0 when not known.
	FreshTokens int `json:"fresh_tokens"`
	Siblings
	// LastTurn is the ledger's number of the newest reservation on the rank,
	// 0 for none: the last tie-break but one.
	LastTurn uint64 `json:"last_turn"`
	// ResidentBlocks is how many blocks the index says the rank holds.
	ResidentBlocks int `json:"resident_blocks"`
	// KVBlocks is the rank's KV capacity in router blocks; 0 when unknown.
	KVBlocks int `json:"kv_blocks,omitempty"`

	// HasLoad says that the engine reported Running and Waiting. KVUsage is negative or
	// NaN when it did not report that.
	HasLoad bool `json:"has_load"`
	// Tried says that the rank is kept out (KeptOut) because it had its turn in
	// this request: it keeps its place in the round-robin order, so that a retry
	// goes to the one after it. It stands here because it takes no room here.
	Tried bool `json:"-"`
	// CacheUnknown says that the rank's KV events are not trusted now: OverlapBlocks is
	// 0 and means nothing. Only receipts have it; recordings have records of their own
	// for it.
	CacheUnknown bool `json:"cache_unknown,omitempty"`

	Running int     `json:"running_requests"`
	Waiting int     `json:"waiting_requests"`
	KVUsage float64 `json:"kv_usage_ratio"`

	// Times is how many times as long as its peers the rank takes; absent for one that is not
	// slow, as far as is known.
	Times float64 `json:"slow_times,omitempty"`

	// Excluded says in words why the rank could not be chosen; ExcludedCode is
	// "given", or the metric that was over its limit. Both are empty for one
	// that could.
	Excluded     string `json:"excluded,omitempty"`
	ExcludedCode string `json:"excluded_code,omitempty"`
}

// Siblings is the part of a candidate's work that other routers gave the rank, as they
// publish it. It is zero where no other router has published its work there.
type Siblings struct {
	SiblingRequests      int32 `json:"sibling_requests,omitempty"`
	SiblingPrefillTokens int32 `json:"sibling_prefill_tokens,omitempty"`
	SiblingDecodeBlocks  int32 `json:"sibling_decode_blocks,omitempty"`
	SiblingFreshTokens   int32 `json:"sibling_fresh_tokens,omitempty"`
	// SiblingAgeMS is the age of the oldest part of it in milliseconds, at least 1.
	SiblingAgeMS int32 `json:"sibling_age_ms,omitempty"`
	// SiblingHeld is how many of the rank's free places, by the limit of its requests, are left
	// to others, which may take them unseen.
	SiblingHeld int32 `json:"held_for_siblings,omitempty"`
}

// Speed is Times, and 1 where nothing is known of the rank.
func (c *Candidate) Speed() float64 { return max(c.Times, 1) }

// Tiers are the greatest figures of any candidate: a tier without a block on any rank has no
// column in a table.
func (p *Phase) Tiers() (any route.Tiers) {
	for i := range p.Candidates {
		any = any.Or(p.Candidates[i].Tiers)
	}
	return any
}

// Work is what a path would cost.
type Work struct {
	Compute  int `json:"compute_tokens"`
	Queued   int `json:"queued_tokens"`
	Transfer int `json:"transfer_tokens"`
}

// Prediction is what the plan expected.
type Prediction struct {
	// CachedTokens is what the decode rank should find in its cache,
	// PrefillCachedTokens what the prefill rank should; RemoteTokens is how
	// many tokens' KV should move.
	CachedTokens        int `json:"cached_tokens"`
	PrefillCachedTokens int `json:"prefill_cached_tokens"`
	RemoteTokens        int `json:"remote_tokens"`
	// Local and Remote are both paths' work; HasRemote says whether remote was
	// possible. The path that was not taken is the what-if.
	Local     Work `json:"local"`
	Remote    Work `json:"remote"`
	HasRemote bool `json:"has_remote"`
	// CostRevision names the cost models by which the paths would cost LocalMS and RemoteMS;
	// 0 where costs were not asked for or not known.
	CostRevision uint64  `json:"cost_revision,omitempty"`
	LocalMS      float64 `json:"local_cost_ms,omitempty"`
	RemoteMS     float64 `json:"remote_cost_ms,omitempty"`
}

// Add keeps a candidate if there are fewer than limit, and counts it if not. Add
// the ranked ones first, best first.
func (p *Phase) Add(c *Candidate, limit int) {
	if len(p.Candidates) >= limit {
		p.Omitted++
		return
	}
	p.Candidates = append(p.Candidates, *c)
}

// Keep makes the candidates a copy of the first n; the others are counted.
func (p *Phase) Keep(n int) {
	if more := len(p.Candidates) - n; more > 0 {
		p.Omitted += more
		p.Candidates = p.Candidates[:n]
	}
	p.Candidates = append([]Candidate{}, p.Candidates...)
}

// Clone is a deep copy that is fit for JSON, which has no number for NaN and
// infinities: they are -1.
func (d Decision) Clone() Decision {
	for _, p := range [...]*Phase{&d.Decode, &d.Prefill} {
		p.MarginBlocks = finite(p.MarginBlocks)
		p.Candidates = append([]Candidate{}, p.Candidates...)
		for i := range p.Candidates {
			c := &p.Candidates[i]
			c.Cost, c.KVUsage = finite(c.Cost), finite(c.KVUsage)
			for t := range terms {
				v := terms[t].At(&c.Terms)
				*v = finite(*v)
			}
		}
	}
	return d
}

func finite(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return -1
	}
	return v
}
