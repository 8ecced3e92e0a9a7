package router

import (
	"math"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/blockhash"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/effective"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
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
	exact kvindex.Query // from KV events
	guess kvindex.Query // from what was sent
}

// question is everything that the decisions of a request are made from.
type question struct {
	asking
	run decide.Run
}

// asking is what a question has besides.
type asking struct {
	r        *Router
	settings *effective.Settings
	fleet    *workers.Snapshot
	model    string
	lora     string
	list     []*workers.Worker

	prompt prompt.Prompt
	ids    []uint32
	// chunked says that blocks are text chunks, not tokens.
	chunked bool
	views   []hashes
	used    int

	asked time.Time // when the index was about to be asked
	// The memory in which ids and views stand, and who holds the views' blocks; nil
	// while it is not held.
	hashed  *hashed
	holders *holders

	// dry asks without changing anything.
	dry bool
	// taken says that the request has its turns and random numbers.
	taken bool
	took  stageTimes
}

// stageTimes is the router's own time in its stages.
type stageTimes struct {
	read, parse, queue, tokenize, hash, overlap, plan time.Duration
	// Of queue: how many waited before, and for what, in words.
	ahead int
	why   string
}

// view finds or makes the hashes of a block size.
func (d *question) view(blockSize int) *hashes {
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

// hash names the prompt's blocks at every block size of the candidates. It is timed
// from start on.
func (r *Router) hash(d *question, v *api.View, start time.Time) {
	key := blockhash.Key{LoRA: d.lora, Salt: v.CacheSalt}
	d.acquireHashes()
	d.used = 0
	d.chunked = d.prompt.IDs == nil && d.prompt.Source == disagg.FromEstimate
	if d.lora == "" { // an adapter's path is in the engine's names of blocks, too, and not known
		d.hashed.text.Set(d.prompt.IDs, v.CacheSalt)
	}
	switch {
	case d.chunked && d.settings.Decisions.Blind():
		// Guesses that nobody asks for are not worth reading the prompt.
	case d.chunked:
		// A text chunk stands for the tokens it is estimated to have.
		bytes := d.settings.Tokens.ChunkBytes
		h := d.view(max(1, bytes/4))
		h.locals = blockhash.TextChunks(h.locals, v.PromptValue.Of(v.Body), bytes, key)
		h.seq = blockhash.Chain(h.seq, h.locals)
	default:
		for _, w := range d.list {
			size := d.settings.BlockOf(w)
			if h := d.view(size); len(h.locals) == 0 {
				h.locals = blockhash.Locals(h.locals, d.prompt.IDs, size, key)
				h.seq = blockhash.Chain(h.seq, h.locals)
				if r.words != nil && !d.dry {
					r.words.Note(d.model, h.locals, d.prompt.IDs, size)
				}
			}
		}
	}
	d.took.hash = time.Since(start)
}

// ask finds who holds the prompt's blocks, and says when it was done.
func (r *Router) ask(d *question) (now time.Time) {
	d.asked = time.Now()
	for i := range d.views[:d.used] {
		locals, o := d.views[i].locals, &d.holders.views[i]
		if !d.chunked {
			r.index.Overlap(locals, &o.exact)
		}
		r.guesses.Overlap(locals, &o.guess)
	}
	now = time.Now()
	d.took.overlap += now.Sub(d.asked)
	return now
}

// decide asks the index and decides. It may be called again after ranks were
// banned.
func (r *Router) decide(d *question) { r.apply(d, r.choose(d)) }

// choose is decide without its effects.
func (r *Router) choose(d *question) decide.Effects {
	d.r = r
	d.acquireHolders()
	defer d.releaseHolders()
	start := r.ask(d)
	unit := math.MaxInt
	for i := range d.views[:d.used] {
		unit = min(unit, d.views[i].blockSize)
	}
	if unit == math.MaxInt {
		unit = effective.DefaultBlock
	}
	r.take(d)
	if d.settings.Decisions.Rule.Auto {
		q := &d.run.Request
		q.Costs, q.Waited = r.costs.model(d.model), q.Waited || d.took.queue > 0
	}
	effects := d.run.Decide(&d.settings.Decisions, d.list, unit, d)
	d.took.plan += time.Since(start)
	return effects
}

// apply does what a decision asks of the router.
func (r *Router) apply(d *question, e decide.Effects) {
	if d.dry {
		return
	}
	for _, w := range e.Readmit {
		r.outliers.Last(w)
	}
	if e.ReturnTurn {
		turn := d.run.Request.Chances[1].Turn
		r.turns[1].CompareAndSwap(turn+1, turn)
	}
}

// take gives a request its turns and random numbers, once. A dry run sees those of
// the next request and takes none.
func (r *Router) take(d *question) {
	c := &d.run.Request.Chances
	switch {
	case d.taken:
		return
	case d.dry:
		c[0].Turn, c[1].Turn = r.turns[0].Load(), r.turns[1].Load()
	default:
		c[0].Turn, c[1].Turn = r.turns[0].Add(1)-1, r.turns[1].Add(1)-1
	}
	c[0].Draw, c[1].Draw = r.rng.pair(!d.dry)
	d.taken = true
}

// Resident is for decide.Seen.
func (d *question) Resident(k *workers.Rank) int { return d.r.index.Blocks(kvindex.Rank(k.Slot)) }

// Ledger is for decide.Seen.
func (d *question) Ledger() *ledger.Ledger { return d.r.ledger }

// Overlap is for decide.Seen: how many leading tokens of the prompt a rank is
// known, or where its engine tells no events is guessed, to hold, and what its other
// tiers hold behind them.
func (d *question) Overlap(w *workers.Worker, k *workers.Rank, beyond *decision.Tiers) int {
	slot := kvindex.Rank(k.Slot)
	if d.chunked {
		if d.used == 0 {
			return 0
		}
		return d.holders.views[0].guess.Depth(slot) * d.views[0].blockSize
	}
	size := d.settings.BlockOf(w)
	for i := range d.views[:d.used] {
		if d.views[i].blockSize != size {
			continue
		}
		o := &d.holders.views[i]
		if d.r.fleet.Fed(k) {
			p := kvgroup.Prompt{Seq: d.views[i].seq, Tokens: d.prompt.ISL, Block: size, Text: &d.hashed.text}
			n := d.r.feeds.Usable(slot, o.exact.Depth(slot), &p, beyond)
			if *beyond != (decision.Tiers{}) {
				*beyond = beyond.Scale(size, 1)
			}
			return n * size
		}
		return o.guess.Depth(slot) * size
	}
	return 0
}

// sent notes for approximate routing that a prompt went to a rank.
func (r *Router) sent(d *question, w *workers.Worker, k *workers.Rank, now time.Time) {
	if !d.chunked && r.fleet.Fed(k) {
		return
	}
	size := d.settings.BlockOf(w)
	for i := range d.views[:d.used] {
		if h := &d.views[i]; d.chunked || h.blockSize == size {
			r.guesses.Sent(kvindex.Rank(k.Slot), k.Number, h.locals, h.seq, now)
			return
		}
	}
}

// loraOf is the model's name if it is an adapter on the workers that serve it.
func loraOf(model string, list []*workers.Worker) string {
	for _, w := range list {
		if slices.Contains(w.LoRAs, model) {
			return model
		}
	}
	return ""
}
