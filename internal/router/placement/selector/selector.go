// Package selector is the choice: it ranks the candidates of one phase of one
// request by a policy and says why.
//
// Rank is a pure function. Everything that could differ between two runs (the
// random draw, the round-robin turn, every load figure) is part of the Input,
// by value, so that a recorded decision gives the same answer when it is
// replayed, explained or simulated. Rank allocates nothing when the Ranking is
// reused.
//
// Costs are in blocks of the router's block size; fractions are kept, as the
// terms are tokens divided by the block size. Policy kv compares times, in ms, once they are
// known.
package selector

import (
	"errors"
	"fmt"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Weights are the knobs of the kv cost functions. Start from DefaultWeights;
// the zero value ignores everything.
type Weights struct {
	// OverlapCredit is what one cached block takes off the prefill term.
	OverlapCredit float64 `json:"overlap_credit"`
	// CreditCPU, CreditDisk and CreditRemote are what a block in that tier counts,
	// as a share of one on the device.
	CreditCPU    float64 `json:"credit_cpu"`
	CreditDisk   float64 `json:"credit_disk"`
	CreditRemote float64 `json:"credit_remote"`
	// CreditDecay lowers the credit of ranks with more queued prefill work
	// than the least busy candidate: credit / (1 + CreditDecay × excess), the
	// excess counted in lengths of this prompt.
	CreditDecay float64 `json:"credit_decay"`
	// StepTokens is how many uncached tokens of a prompt an engine computes in about
	// the time of one step without any, in policy kv_blocks: cached blocks take no more off
	// the prefill term than what is above it. 0 counts every block.
	StepTokens float64 `json:"step_tokens,omitempty"`
	// PrefillLoadScale multiplies the prefill term.
	PrefillLoadScale float64 `json:"prefill_load_scale"`
	// Queue multiplies the prompt blocks that are queued or being prefilled on
	// the rank, in policy kv_blocks; kv_dynamo counts them in full.
	Queue float64 `json:"queue"`
	// DecodeLoad multiplies the rank's active decode blocks in policy kv_blocks;
	// kv_dynamo counts them in full.
	DecodeLoad float64 `json:"decode_load"`
	// Stall multiplies the prompt's uncached blocks for every active request of an
	// aggregated rank, in policy kv_blocks: each waits while they are computed.
	Stall float64 `json:"stall"`
	// Spread multiplies the blocks that were computed on the rank recently
	// (decision.Candidate.FreshTokens), in policy kv_blocks.
	Spread float64 `json:"spread"`
	// ActiveRequest is added for every active request, in blocks.
	ActiveRequest float64 `json:"active_request"`
	// Others is what a delay of other requests costs beside one of its own, in policy kv, as a
	// multiple of what the objective says.
	Others float64 `json:"others,omitempty"`
	// Temperature of the softmax over normalised costs; 0 takes the cheapest.
	Temperature float64 `json:"temperature"`
}

// DefaultWeights are the weights that the router starts with; see
// docs/adr/0004-cost-function.md for how Queue, Stall and Spread were chosen, and
// docs/lab/policies.md for DecodeLoad; StepTokens is from the ADR, too. OverlapCredit, PrefillLoadScale and the zeros are Dynamo's defaults.
func DefaultWeights() Weights {
	return Weights{OverlapCredit: 1, CreditCPU: 0.8, CreditDisk: 0.25, StepTokens: 256, PrefillLoadScale: 1, Queue: 1.0 / 4, DecodeLoad: 1.0 / 8, Stall: 1.0 / 16, Spread: 1.0 / 128, Others: cost.Tuned.Others}
}

// CachedTokens is how many tokens of a prompt a rank with overlap leading
// blocks takes from its cache. The last token is always computed, because its
// logits give the first token of the answer; as caches hold whole blocks, a
// prompt that is cached to its end loses its last block.
func CachedTokens(isl, overlapBlocks, blockSize int) int {
	if isl <= 0 || overlapBlocks <= 0 || blockSize <= 0 {
		return 0
	}
	if cached := overlapBlocks * blockSize; cached < isl {
		return cached // nearly always, and without a division
	}
	return (isl - 1) / blockSize * blockSize
}

// Held is how many blocks of the prompt a candidate holds: those on its device, and
// those of its other tiers by their credits.
func (w *Weights) Held(c *decision.Candidate) float64 {
	held := float64(c.OverlapBlocks)
	if t := &c.Tiers; *t != (route.Tiers{}) {
		held += float64(w.CreditCPU * float64(t.CPU))
		held += float64(w.CreditDisk * float64(t.Disk))
		held += float64(w.CreditRemote * float64(t.Remote))
	}
	return held
}

// Busy holds the limits beyond which a rank takes no new work. A limit of 0 is
// off; any one that is passed excludes the rank.
type Busy struct {
	// DecodeBlocksShare limits active decode blocks as a share of the rank's
	// KV blocks, 0 to 1.
	DecodeBlocksShare float64 `json:"decode_blocks_share"`
	// PrefillTokens limits the prompt tokens being prefilled or queued.
	PrefillTokens int `json:"prefill_tokens"`
	// Waiting limits the requests that the engine says are waiting.
	Waiting int `json:"waiting_requests"`
	// KVUsage limits the used share of the KV cache as the engine reports it.
	KVUsage float64 `json:"kv_usage"`
	// Requests limits the requests that the router has given to a rank that decodes
	// and that are not done.
	Requests int `json:"requests,omitempty"`
}

// Input is all that a choice depends on.
type Input struct {
	Phase   route.Phase
	Policy  Policy
	Weights Weights
	Busy    Busy
	// ISL is the prompt's length in tokens, BlockSize the router's block in
	// tokens (1 is assumed when it is not positive).
	ISL, BlockSize int
	// Candidates are the ranks of the phase. Order does not matter: every tie
	// ends at the label. Rank writes costs and exclusions into them, and reads
	// nothing that it writes.
	Candidates []decision.Candidate
	// Veto, when not nil, is parallel to Candidates; an entry that is not
	// empty keeps that rank out of this ranking, as Candidate.KeptOut does of
	// all.
	Veto []string
	// Pricing is what policy kv prices candidates by; nil where that is not known, and it ranks
	// as kv_blocks.
	Pricing *Pricing
	// SessionKey is HashSession of the session's name; 0 without one.
	SessionKey uint64
	// Home is the label of the rank where policy session has the session, or HomeNew. It is
	// empty in decisions that did not look for one: Rank goes by the session's hash alone
	// then, as all decisions did before there were homes.
	Home string
	// Draw is the request's random number in this phase, Turn its number in the
	// phase's round-robin sequence. Retries have those of the first attempt.
	Draw, Turn uint64
	// Siblings is nil without other routers.
	Siblings *Siblings
	// Limit is how many ranks need to be ordered; 0 orders all of them.
	Limit int
}

// HomeNew is the home of a session that has none yet. It is no rank's label: those end with
// the number of a data-parallel rank.
const HomeNew = "new"

// The codes of candidates that were excluded: "given" for the caller's own reasons,
// or the metric that is over its limit.
const (
	ExcludedGiven         = "given"
	ExcludedDecodeBlocks  = "decode_blocks_share"
	ExcludedPrefillTokens = "prefill_tokens"
	ExcludedWaiting       = "waiting_requests"
	ExcludedKVUsage       = "kv_usage"
	ExcludedRequests      = "requests"
)

// Eligible reports whether candidate i can be chosen.
func (in *Input) Eligible(i int) bool {
	code, _ := exclusion(in, i)
	return code == ""
}

// Why says in words what kept candidate i out of a ranking; empty for nothing.
func (in *Input) Why(i int) string {
	c, b := &in.Candidates[i], &in.Busy
	switch c.ExcludedCode {
	case ExcludedDecodeBlocks:
		return fmt.Sprintf("busy: %.0f%% of its KV blocks are decoding, limit %.0f%%", 100*decodeShare(c), 100*b.DecodeBlocksShare)
	case ExcludedPrefillTokens:
		return fmt.Sprintf("busy: %d prompt tokens in prefill, limit %d", c.PrefillTokens, b.PrefillTokens)
	case ExcludedWaiting:
		return fmt.Sprintf("busy: %d requests waiting, limit %d", c.Waiting, b.Waiting)
	case ExcludedKVUsage:
		return fmt.Sprintf("busy: kv %.0f%% > %.0f%%", 100*c.KVUsage, 100*b.KVUsage)
	case ExcludedRequests:
		held := ""
		if c.SiblingHeld > 0 {
			held = fmt.Sprintf(" and %d places left to other routers", c.SiblingHeld)
		}
		return fmt.Sprintf("busy: %d requests in progress%s, limit %d", c.ActiveRequests, held, b.Requests)
	}
	return c.Excluded
}

// Verdict says how a ranking ended.
type Verdict string

// The verdicts.
const (
	// Chosen: at least one rank is eligible.
	Chosen Verdict = "chosen"
	// NoCandidates: the phase has no ranks at all.
	NoCandidates Verdict = "no_candidates"
	// AllExcluded: every rank is excluded, at least one for another reason
	// than a busy limit.
	AllExcluded Verdict = "all_excluded"
	// AllBusy: every rank that was not excluded otherwise is over a limit.
	AllBusy Verdict = "all_busy"
)

// Errors that Ranking.Err returns.
var (
	ErrNoCandidates = errors.New("no rank serves this phase")
	ErrAllExcluded  = errors.New("every rank is excluded")
	ErrAllBusy      = errors.New("every eligible rank is busy")
)

// TieBreak says what decided between ranks of equal cost.
type TieBreak string

// The tie-breaks, in the order in which policy kv applies them.
const (
	TieNone     TieBreak = ""
	TieOverlap  TieBreak = "overlap"  // more cached blocks of this prompt
	TieRequests TieBreak = "requests" // fewer active requests
	TieDecode   TieBreak = "decode"   // fewer active decode blocks
	TieResident TieBreak = "resident" // fewer blocks in the cache
	TieSession  TieBreak = "session"  // first by the session's hash (session)
	TieTurn     TieBreak = "turn"     // least recently given work
	TieLabel    TieBreak = "label"    // first by name
	TieDraw     TieBreak = "draw"     // drawn among equals (kv_dynamo)
	TieRouter   TieBreak = "router"   // drawn by this router, beside others
)

// Ranking is the answer. Reuse one to avoid allocation.
type Ranking struct {
	Verdict Verdict
	// Policy is the policy that was applied in the end: session answers as least_loaded
	// without a session. Empty when nothing was ranked.
	Policy Policy
	// Order holds indices into Input.Candidates, best first: all eligible
	// ranks, or the best Input.Limit of them.
	Order []int
	// Eligible is how many ranks could have been chosen, Overlap the most blocks of the prompt
	// that any rank holds on its device.
	Eligible, Overlap int
	// InTime says that costs are in ms.
	InTime bool
	// Margin is by how much the runner-up costs more than the chosen rank; 0 without a
	// runner-up. Of ranks that count as equal it may cost less.
	Margin float64
	// Tied is how many ranks shared the best cost. It includes those within the uncertainty of
	// costs, and those near it that TieRouter draws among. TieBreak is what put the chosen one
	// before the runner-up.
	Tied     int
	TieBreak TieBreak
	// Sampled says that the first rank was drawn by temperature and need not
	// be the cheapest.
	Sampled bool

	costs []float64 // of the candidates that can be chosen, in time
}

// Best is the index of the chosen candidate; ok is false without one.
func (r *Ranking) Best() (i int, ok bool) {
	if len(r.Order) == 0 {
		return 0, false
	}
	return r.Order[0], true
}

// Err is nil when a rank was chosen, else one of the package's errors.
func (r *Ranking) Err() error {
	switch r.Verdict {
	case Chosen:
		return nil
	case NoCandidates:
		return ErrNoCandidates
	case AllBusy:
		return ErrAllBusy
	default:
		return ErrAllExcluded
	}
}

// HashSession turns a session's name into the key of policy session. It is the
// same on every router replica. The empty name gives 0, which means none.
func HashSession(name string) uint64 {
	if name == "" {
		return 0
	}
	if h := mix(fnv(name)); h != 0 {
		return h
	}
	return 1
}

// fnv is FNV-1a with 64 bits.
func fnv(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := 0; i < len(s); i++ {
		h ^= uint64(s[i])
		h *= 1099511628211
	}
	return h
}

// mix is the finaliser of splitmix64: it spreads every input bit over all
// output bits, which FNV does not.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Reset empties the ranking and keeps its memory.
func (r *Ranking) Reset() {
	*r = Ranking{Verdict: NoCandidates, Order: r.Order[:0], costs: r.costs[:0]}
}
