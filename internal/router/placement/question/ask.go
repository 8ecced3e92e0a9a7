package question

import (
	"context"
	"math"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// Sources are what questions are answered from. All are needed.
type Sources struct {
	Index     *kvindex.Index
	Predicted *approx.Index
	// Feeds say how much of what the index has of a rank can be used, as kvfeed.Manager
	// does, and Fleet which ranks are fed, as follower.Follower does.
	Feeds interface {
		Usable(id kvindex.Rank, overlap int, p *kvgroup.Prompt, beyond *route.Tiers) int
	}
	Fleet    interface{ Fed(k *workers.Rank) bool }
	Ledger   *ledger.Ledger
	Learners *cost.Learners // of the costs of both paths, for a threshold that is auto
	// Prompts find the ids of prompts, as [prompt.Stage] does.
	Prompts interface {
		Find(ctx context.Context, v *api.View, model string, list []*workers.Worker, dst []uint32) prompt.Prompt
	}
	// Now are the settings and the fleet as they are.
	Now func() (*effective.Settings, *workers.Snapshot)
	// Last hears of workers that are ejected and yet asked, since nobody else is left.
	Last func(*workers.Worker)
}

// Asker asks and decides. It is safe for concurrent use, a question is not.
type Asker struct {
	from  Sources
	turns [2]atomic.Uint64 // round-robin turns of the decode and prefill phase
	rng   *drawer
}

// New makes an asker. The seed is that of the random numbers; 0 takes one of its own.
func New(s Sources, seed uint64) *Asker { return &Asker{from: s, rng: newDrawer(seed)} }

// Hash names the prompt's blocks at every block size of the candidates. It is timed
// from start on.
func (a *Asker) Hash(d *Question, v *api.View, start time.Time) {
	key := blockhash.Key{LoRA: d.LoRA, Salt: v.CacheSalt}
	d.AcquireHashes()
	d.used = 0
	d.Chunked = d.Prompt.IDs == nil && d.Prompt.Source == route.FromEstimate
	named := d.Prompt.IDs
	if d.LoRA != "" { // its path is in the engine's names of blocks, too, and not known
		named = nil
	}
	d.hashed.text.Set(named, v.CacheSalt)
	switch {
	case d.Chunked && d.Settings.Decisions.Blind():
		// Predictions that nobody asks for are not worth reading the prompt.
	case d.Chunked:
		// A text chunk stands for the tokens it is estimated to have.
		bytes := d.Settings.Tokens.ChunkBytes
		h := d.view(max(1, bytes/4))
		h.locals = blockhash.TextChunks(h.locals, v.PromptValue.Of(v.Body), bytes, key)
		h.seq = blockhash.Chain(h.seq, h.locals)
	default:
		for _, w := range d.List {
			size := d.Settings.BlockOf(w)
			if h := d.view(size); len(h.locals) == 0 {
				h.locals = blockhash.Locals(h.locals, d.Prompt.IDs, size, key)
				h.seq = blockhash.Chain(h.seq, h.locals)
			}
		}
	}
	d.Took.Hash = time.Since(start)
}

// ask finds who holds the prompt's blocks, and says when it was done.
func (a *Asker) ask(d *Question) (now time.Time) {
	d.At = time.Now()
	for i := range d.views[:d.used] {
		locals, o := d.views[i].locals, &d.holders.views[i]
		if !d.Chunked {
			a.from.Index.Overlap(locals, &o.exact)
		}
		a.from.Predicted.Overlap(locals, &o.predicted)
	}
	now = time.Now()
	d.Took.Overlap += now.Sub(d.At)
	return now
}

// Decide asks the index and decides. It may be called again after ranks were
// banned.
func (a *Asker) Decide(d *Question) { a.Apply(d, a.Choose(d)) }

// Choose is Decide without its effects.
func (a *Asker) Choose(d *Question) decide.Effects {
	d.asker = a
	d.acquireHolders()
	defer d.releaseHolders()
	start := a.ask(d)
	unit := math.MaxInt
	for i := range d.views[:d.used] {
		unit = min(unit, d.views[i].blockSize)
	}
	if unit == math.MaxInt {
		unit = effective.DefaultBlock
	}
	a.take(d)
	if d.Settings.Decisions.Rule.Auto {
		q := &d.Run.Request
		q.Costs, q.Waited = a.from.Learners.Model(d.Model), q.Waited || d.Took.Queue > 0
	}
	effects := d.Run.Decide(&d.Settings.Decisions, d.List, unit, d)
	d.Took.Plan += time.Since(start)
	return effects
}

// Apply does what a decision asks of the router.
func (a *Asker) Apply(d *Question, e decide.Effects) {
	if d.Dry {
		return
	}
	for _, w := range e.Readmit {
		a.from.Last(w)
	}
	if e.ReturnTurn {
		turn := d.Run.Request.Chances[1].Turn
		a.turns[1].CompareAndSwap(turn+1, turn)
	}
}

// take gives a request its turns and random numbers, once. A dry run sees those of
// the next request and takes none.
func (a *Asker) take(d *Question) {
	c := &d.Run.Request.Chances
	switch {
	case d.taken:
		return
	case d.Dry:
		c[0].Turn, c[1].Turn = a.turns[0].Load(), a.turns[1].Load()
	default:
		c[0].Turn, c[1].Turn = a.turns[0].Add(1)-1, a.turns[1].Add(1)-1
	}
	c[0].Draw, c[1].Draw = a.rng.pair(!d.Dry)
	d.taken = true
}

// Sent notes for approximate routing that a prompt went to a rank.
func (a *Asker) Sent(d *Question, w *workers.Worker, k *workers.Rank, now time.Time) {
	if h := a.predicted(d, w, k); h != nil {
		a.from.Predicted.Sent(kvindex.Rank(k.Slot), k.Number, h.locals, h.seq, now)
	}
}

// Refused takes back what Sent noted at a time: the engine had no room for the prompt.
func (a *Asker) Refused(d *Question, w *workers.Worker, k *workers.Rank, sent time.Time) {
	if h := a.predicted(d, w, k); h != nil {
		a.from.Predicted.Refused(kvindex.Rank(k.Slot), k.Number, h.seq, sent)
	}
}

// predicted is the prompt as it is predicted for a rank; nil for one whose events are known.
func (a *Asker) predicted(d *Question, w *workers.Worker, k *workers.Rank) *hashes {
	if !d.Chunked && a.from.Fleet.Fed(k) {
		return nil
	}
	size := d.Settings.BlockOf(w)
	for i := range d.views[:d.used] {
		if h := &d.views[i]; d.Chunked || h.blockSize == size {
			return h
		}
	}
	return nil
}

// drawer gives the random numbers of decisions.
type drawer struct {
	mu  sync.Mutex
	rng *rand.PCG
}

func newDrawer(seed uint64) *drawer {
	if seed == 0 {
		seed = uint64(time.Now().UnixNano()) ^ uint64(os.Getpid())<<32
	}
	return &drawer{rng: rand.NewPCG(seed, 0x9e3779b97f4a7c15)}
}

// pair gives the next two; keep takes them out of the sequence.
func (d *drawer) pair(keep bool) (a, b uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	rng := *d.rng
	a, b = rng.Uint64(), rng.Uint64()
	if keep {
		*d.rng = rng
	}
	return a, b
}
