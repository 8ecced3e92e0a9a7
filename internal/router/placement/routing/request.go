// Package routing decides requests. A [Request] has what its decisions are made from: its
// prompt, the names of its blocks, the ranks that hold them, its turns and random numbers.
// [Decider] finds these and has [decide.Run] make the plans.
package routing

import (
	"iter"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/placement/affinity"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// hashes are the block names of one prompt at one block size, and who holds
// them.
type hashes struct {
	blockSize   int
	naming      naming
	locals, seq []uint64
	// extra are the digests of the blocks that media stand in; empty without any.
	extra []uint64
	// whole are the chunks that have another number of tokens than blockSize.
	whole []whole
}

// naming is how an engine names blocks: how many tokens after a block its name covers, and of how
// many router blocks one of its blocks is, where that matters.
type naming struct{ ahead, parts int }

// whole is a chunk that stands for an image or the like: the number of chunks up to it, and its
// tokens.
type whole struct{ chunks, tokens int }

// tokens is how many tokens the first n blocks have.
func (h *hashes) tokens(n int) int {
	sum := n * h.blockSize
	for _, w := range h.whole {
		if w.chunks <= n {
			sum += w.tokens - h.blockSize
		}
	}
	return sum
}

// overlaps is who holds the blocks of a prompt at one block size.
type overlaps struct {
	exact     kvindex.Query // from KV events
	predicted kvindex.Query // from what was sent
}

// Request is everything that the decisions of a request are made from. Reset makes one
// ready; its owner releases it.
type Request struct {
	Details
	Run decide.Run
}

// Details is what a routing request has beside the run of its decisions.
type Details struct {
	Settings *effective.Settings
	Model    string // by the engines' name; empty where the endpoint has none
	// ModelNote says how the model was found, where the request does not name it; empty
	// otherwise.
	ModelNote string
	Tenant    string // of the client's API key; empty without one
	Named     string // the adapter that the request itself names; empty for none
	// Look sets these, from one fleet.
	Fleet *workers.Snapshot
	List  []*workers.Worker // who serves the model
	LoRA  string            // the adapter that the prompt's blocks belong to; empty for none

	Prompt prompt.Prompt
	// IDs is memory for the prompt's ids, from AcquireHashes on.
	IDs []uint32
	// Chunked says that blocks are text chunks, not tokens.
	Chunked bool
	// At is when the index was about to be queried.
	At time.Time
	// Took is the router's own time.
	Took StageTimes
	// Unread says that the prompt is only estimated so far: it is tokenized once the model has
	// a usable worker (limits.wait_for_worker).
	Unread bool
	// Dry asks without changing anything.
	Dry bool

	decider *Decider
	views   []hashes
	used    int
	// The memory in which IDs and views stand, and who holds the views' blocks; nil
	// while it is not held.
	hashed  *hashed
	holders *holders
	// drawn says that the request has its turns and random numbers.
	drawn bool
}

// StageTimes is the router's own time in its stages.
type StageTimes struct {
	Read, Parse, Queue, Tokenize, Hash, Overlap, Plan time.Duration
	// Of Queue: how many waited before, and for what, in words.
	Ahead int
	Why   string
}

// view finds or makes the hashes of a block size, named in one way.
func (q *Request) view(blockSize int, named naming) *hashes {
	for i := range q.views[:q.used] {
		if q.views[i].blockSize == blockSize && q.views[i].naming == named {
			return &q.views[i]
		}
	}
	if q.used == len(q.views) {
		q.views = append(q.views, hashes{})
	}
	h := &q.views[q.used]
	q.used++
	h.blockSize, h.naming, h.locals, h.seq, h.extra, h.whole = blockSize, named, h.locals[:0], h.seq[:0], h.extra[:0], h.whole[:0]
	return h
}

// Blocks are the local names of the prompt's blocks at the first of the candidates' block
// sizes, in tokens; none where none were named. They stand in memory that is given back.
func (q *Request) Blocks() (locals []uint64, blockSize int) {
	if q.used == 0 {
		return nil, 0
	}
	return q.views[0].locals, q.views[0].blockSize
}

// UseFleet takes a fleet's workers that serve the request's model, and the blocks of the
// adapter that the model is to them, unless the request names one itself.
func (q *Request) UseFleet(fleet *workers.Snapshot) {
	q.Fleet, q.LoRA, q.Run.Criteria.Model = fleet, q.Named, q.Model
	var unlisted bool
	q.List, unlisted = fleet.Candidates(q.Model)
	adapter := func(w *workers.Worker) bool { return slices.Contains(w.LoRAs, q.Model) }
	if q.LoRA == "" && (unlisted || slices.ContainsFunc(q.List, adapter)) {
		q.LoRA = q.Model
	}
}

// Notes are plain words for the receipt about what the decisions were made from.
func (q *Request) Notes() iter.Seq[string] {
	return func(yield func(string) bool) {
		if q.ModelNote != "" && !yield(q.ModelNote) || q.Prompt.Note == "" {
			return
		}
		yield(q.Prompt.Note)
	}
}

// CopyForRest makes rest, which is empty, the routing request for the rest of this
// request's stream, on a fleet.
func (q *Request) CopyForRest(rest *Request, fleet *workers.Snapshot) {
	rest.Settings, rest.Model, rest.Tenant, rest.Named, rest.drawn, rest.Took = q.Settings, q.Model, q.Tenant, q.Named, q.drawn, q.Took
	rest.UseFleet(fleet)
	q.Run.CopyTo(&rest.Run)
}

// Resident is for decide.FleetView.
func (q *Request) Resident(k *workers.Rank) int {
	return q.decider.from.Index.Blocks(kvindex.Rank(k.Slot))
}

// Ledger is for decide.FleetView.
func (q *Request) Ledger() *ledger.Ledger { return q.decider.from.Ledger }

// Homes is for decide.FleetView.
func (q *Request) Homes(model string, session uint64) affinity.Homes {
	return q.decider.sessions.Homes(model, session, q.At)
}

// Overlap is for decide.FleetView: how many leading tokens of the prompt a rank is known, or
// where its engine publishes no events is predicted, to hold, and what its other tiers
// hold behind them.
func (q *Request) Overlap(w *workers.Worker, k *workers.Rank, beyond *route.Tiers) int {
	slot := kvindex.Rank(k.Slot)
	if q.Chunked {
		if q.used == 0 {
			return 0
		}
		return q.views[0].tokens(q.holders.views[0].predicted.Depth(slot))
	}
	i := 0
	if q.used != 1 { // else it is that of all workers, as Hash has found
		if i = q.viewOf(w); i < 0 {
			return 0
		}
	}
	h, o := &q.views[i], &q.holders.views[i]
	if !q.decider.from.Fleet.Fed(k) {
		return o.predicted.Depth(slot) * h.blockSize
	}
	p := kvgroup.Prompt{Seq: h.seq, Tokens: q.Prompt.ISL, Block: h.blockSize, Text: &q.hashed.text}
	n := q.decider.from.Feeds.Usable(slot, o.exact.Depth(slot), &p, beyond)
	if *beyond != (route.Tiers{}) {
		*beyond = beyond.Scale(h.blockSize, 1)
	}
	return n * h.blockSize
}

// viewOf is the index of the hashes by which a worker of the list names blocks; -1 for none.
func (q *Request) viewOf(w *workers.Worker) int {
	size, named := q.Settings.BlockOf(w), q.decider.naming(q, w)
	return slices.IndexFunc(q.views[:q.used], func(h hashes) bool { return h.blockSize == size && h.naming == named })
}
