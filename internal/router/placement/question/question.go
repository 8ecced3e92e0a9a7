// Package question has what the decisions of one request are made from: its prompt, the
// names of its blocks, who holds them, its turns and random numbers. [Asker] finds these
// and has [decide.Run] decide.
package question

import (
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
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
	locals, seq []uint64
}

// overlaps is who holds the blocks of a prompt at one block size.
type overlaps struct {
	exact     kvindex.Query // from KV events
	predicted kvindex.Query // from what was sent
}

// Question is everything that the decisions of a request are made from. Reset makes one
// ready; whoever has it releases it.
type Question struct {
	Asked
	Run decide.Run
}

// Asked is what a question has beside the run of its decisions.
type Asked struct {
	Settings *effective.Settings
	Model    string // by the engines' name; empty where the endpoint has none
	// ModelNote says how the model was found, where the request does not name it; empty
	// otherwise.
	ModelNote string
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
	// At is when the index was about to be asked.
	At time.Time
	// Took is the router's own time.
	Took StageTimes
	// Dry asks without changing anything.
	Dry bool

	asker *Asker
	views []hashes
	used  int
	// The memory in which IDs and views stand, and who holds the views' blocks; nil
	// while it is not held.
	hashed  *hashed
	holders *holders
	// taken says that the request has its turns and random numbers.
	taken bool
}

// StageTimes is the router's own time in its stages.
type StageTimes struct {
	Read, Parse, Queue, Tokenize, Hash, Overlap, Plan time.Duration
	// Of Queue: how many waited before, and for what, in words.
	Ahead int
	Why   string
}

// view finds or makes the hashes of a block size.
func (d *Question) view(blockSize int) *hashes {
	for i := range d.views[:d.used] {
		if d.views[i].blockSize == blockSize {
			return &d.views[i]
		}
	}
	if d.used == len(d.views) {
		d.views = append(d.views, hashes{})
	}
	h := &d.views[d.used]
	d.used++
	h.blockSize, h.locals, h.seq = blockSize, h.locals[:0], h.seq[:0]
	return h
}

// Blocks are the local names of the prompt's blocks at the first of the candidates' block
// sizes, in tokens; none where none were named. They stand in memory that is given back.
func (d *Question) Blocks() (locals []uint64, blockSize int) {
	if d.used == 0 {
		return nil, 0
	}
	return d.views[0].locals, d.views[0].blockSize
}

// Look has the question asked of a fleet: of those who serve its model there, and with the
// blocks of the adapter that the model is to them, unless the request names one itself.
func (d *Question) Look(fleet *workers.Snapshot) {
	d.Fleet, d.List, d.LoRA, d.Run.Request.Model = fleet, fleet.Model(d.Model), d.Named, d.Model
	adapter := func(w *workers.Worker) bool { return slices.Contains(w.LoRAs, d.Model) }
	if d.LoRA == "" && slices.ContainsFunc(d.List, adapter) {
		d.LoRA = d.Model
	}
}

// Notes are plain words for the receipt about what the question was made from.
func (d *Question) Notes() []string {
	return slices.DeleteFunc([]string{d.ModelNote, d.Prompt.Note}, func(n string) bool { return n == "" })
}

// Rest makes rest, which is empty, the question who takes the rest of this request's
// stream from a fleet.
func (d *Question) Rest(rest *Question, fleet *workers.Snapshot) {
	rest.Settings, rest.Model, rest.Named, rest.taken, rest.Took = d.Settings, d.Model, d.Named, d.taken, d.Took
	rest.Look(fleet)
	d.Run.Ahead(&rest.Run)
}

// Resident is for decide.Seen.
func (d *Question) Resident(k *workers.Rank) int {
	return d.asker.from.Index.Blocks(kvindex.Rank(k.Slot))
}

// Ledger is for decide.Seen.
func (d *Question) Ledger() *ledger.Ledger { return d.asker.from.Ledger }

// Overlap is for decide.Seen: how many leading tokens of the prompt a rank is known, or
// where its engine publishes no events is predicted, to hold, and what its other tiers
// hold behind them.
func (d *Question) Overlap(w *workers.Worker, k *workers.Rank, beyond *route.Tiers) int {
	slot := kvindex.Rank(k.Slot)
	if d.Chunked {
		if d.used == 0 {
			return 0
		}
		return d.holders.views[0].predicted.Depth(slot) * d.views[0].blockSize
	}
	size := d.Settings.BlockOf(w)
	for i := range d.views[:d.used] {
		if d.views[i].blockSize != size {
			continue
		}
		o := &d.holders.views[i]
		if d.asker.from.Fleet.Fed(k) {
			p := kvgroup.Prompt{Seq: d.views[i].seq, Tokens: d.Prompt.ISL, Block: size, Text: &d.hashed.text}
			n := d.asker.from.Feeds.Usable(slot, o.exact.Depth(slot), &p, beyond)
			if *beyond != (route.Tiers{}) {
				*beyond = beyond.Scale(size, 1)
			}
			return n * size
		}
		return o.predicted.Depth(slot) * size
	}
	return 0
}
