package routing

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
	"github.com/dynctl/dynctl/internal/router/placement/affinity"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// Sources are what decisions are made from. All but Answers and Media are needed.
type Sources struct {
	Index     *kvindex.Index
	Predicted *approx.Index
	// Feeds say how much of what the index has of a rank can be used, as kvfeed.Manager
	// does, and how its engine names blocks; Fleet says which ranks are fed, as
	// follower.Follower does.
	Feeds interface {
		Naming(id kvindex.Rank) (ahead, parts int)
		Usable(id kvindex.Rank, overlap int, p *kvgroup.Prompt, beyond *route.Tiers) int
	}
	Fleet    interface{ Fed(k *workers.Rank) bool }
	Ledger   *ledger.Ledger
	Learners *cost.Learners   // of the costs of ranks and paths
	Answers  *outputs.Lengths // nil knows nothing
	// Media is what is known of images, sounds and videos; nil knows nothing.
	Media *media.Table
	// Prompts find the ids of prompts, as [prompt.Stage] does.
	Prompts interface {
		Find(ctx context.Context, v *api.View, model string, list []*workers.Worker, dst []uint32) prompt.Prompt
	}
	// Now are the settings and the fleet as they are.
	Now func() (*effective.Settings, *workers.Snapshot)
	// Siblings are the other routers; nil for none.
	Siblings *siblings.Siblings
	// Readmit is called with ejected workers that are used because no other is left.
	Readmit func(*workers.Worker)
}

// Decider decides requests. It is safe for concurrent use, a [Request] is not.
type Decider struct {
	from  Sources
	turns [2]atomic.Uint64 // round-robin turns of the decode and prefill phase
	rng   *drawer
	// sessions is where policy session has put sessions. A restart forgets them.
	sessions *affinity.Table
}

// New makes a decider. The seed is that of the random numbers; 0 takes one of its own.
func New(s Sources, seed uint64) *Decider {
	return &Decider{from: s, rng: newDrawer(seed), sessions: affinity.New()}
}

// Hash names the prompt's blocks at every block size of the candidates. It is timed
// from start on.
func (d *Decider) Hash(q *Request, v *api.View, start time.Time) {
	key := blockhash.Key{LoRA: q.LoRA, Salt: v.CacheSalt}
	q.AcquireHashes()
	q.used = 0
	q.Chunked = q.Prompt.IDs == nil && q.Prompt.Source == route.FromEstimate
	named := q.Prompt.IDs
	if q.LoRA != "" { // its path is in the engine's names of blocks, too, and not known
		named = nil
	}
	if m := q.Prompt.Media; len(m) > 0 { // so are media, and with them all blocks behind
		named = named[:min(m[0].Offset, len(named))]
	}
	q.hashed.text.Set(named, v.CacheSalt)
	switch {
	case q.Chunked && q.Settings.Decisions.Blind():
		// Predictions that nobody asks for are not worth reading the prompt.
	case q.Chunked:
		q.hashChunks(v, key)
	default:
		var h *hashes
		for _, w := range q.List {
			size, named := q.Settings.BlockOf(w), d.naming(q, w)
			if h != nil && h.blockSize == size && h.naming == named {
				continue // as the one before
			}
			if h = q.view(size, named); len(h.locals) == 0 {
				ids := q.Prompt.IDs
				if named != (naming{parts: 1}) || len(q.Prompt.Media) > 0 {
					h.extra = blockhash.Extras(h.extra, ids, q.Prompt.Media, size*named.parts, named.ahead, named.parts)
					ids = ids[:max(0, len(ids)-named.ahead)] // a block without that many behind it has no name
				}
				h.locals = blockhash.LocalsAt(h.locals, ids, size, 0, h.extra, key)
				h.seq = blockhash.Chain(h.seq, h.locals)
			}
		}
	}
	q.Took.Hash = time.Since(start)
}

// naming is how a worker's engine names the blocks of the prompt, as far as it matters.
func (d *Decider) naming(q *Request, w *workers.Worker) naming {
	n := naming{parts: 1}
	if len(w.Ranks) > 0 && d.from.Feeds != nil {
		var parts int
		if n.ahead, parts = d.from.Feeds.Naming(kvindex.Rank(w.Ranks[0].Slot)); n.ahead > 0 || len(q.Prompt.Media) > 0 {
			n.parts = max(parts, 1)
		}
	}
	return n
}

// hashChunks names chunks of the prompt's text, each of which stands for the tokens that it is
// estimated to have, and each of its media as one that has theirs.
func (q *Request) hashChunks(v *api.View, key blockhash.Key) {
	bytes := q.Settings.Tokens.ChunkBytes
	h := q.view(max(1, bytes/4), naming{parts: 1})
	c := blockhash.NewChunker(bytes, key)
	h.locals = c.Text(h.locals, v.Tools())
	text := v.PromptValue
	for i, tokens := range q.Prompt.Each {
		m := &v.Media[i]
		if m.Value.Len() == 0 || m.Value.Start < text.Start || m.Value.End > text.End {
			continue // its name stands in the text
		}
		h.locals = c.Whole(c.Text(h.locals, v.Body[text.Start:m.Value.Start]), v.MediaName(m))
		h.whole = append(h.whole, whole{len(h.locals), tokens})
		text.Start = m.Value.End
	}
	h.locals = c.Text(h.locals, text.Of(v.Body))
	h.seq = blockhash.Chain(h.seq, h.locals)
}

// findHolders finds the ranks that hold the prompt's blocks, and returns when it was done.
func (d *Decider) findHolders(q *Request) (now time.Time) {
	q.At = time.Now()
	for i := range q.views[:q.used] {
		locals, o := q.views[i].locals, &q.holders.views[i]
		if !q.Chunked {
			d.from.Index.Overlap(locals, &o.exact)
		}
		d.from.Predicted.Overlap(locals, &o.predicted)
	}
	if q.used == 0 {
		return q.At
	}
	now = time.Now()
	q.Took.Overlap += now.Sub(q.At)
	return now
}

// Decide decides the request: it proposes a plan and applies its effects. It may be called
// again after ranks were banned.
func (d *Decider) Decide(q *Request) { d.Apply(q, d.Propose(q)) }

// Propose makes the request's next plan and returns its effects, for Apply.
func (d *Decider) Propose(q *Request) decide.Effects {
	q.decider = d
	q.acquireHolders()
	defer q.releaseHolders()
	start := d.findHolders(q)
	unit := math.MaxInt
	for i := range q.views[:q.used] {
		unit = min(unit, q.views[i].blockSize)
	}
	if unit == math.MaxInt {
		unit = effective.DefaultBlock
	}
	d.drawChances(q)
	q.Run.Criteria.Siblings = d.from.Siblings.Look(q.At)
	if q.Settings.Decisions.Priced() {
		c := &q.Run.Criteria
		c.Costs, c.Waited = d.from.Learners.Model(q.Model), c.Waited || q.Took.Queue > 0
	}
	effects := q.Run.NextPlan(&q.Settings.Decisions, q.List, unit, q)
	q.Took.Plan += time.Since(start)
	return effects
}

// Apply does what a decision asks of the router.
func (d *Decider) Apply(q *Request, e decide.Effects) {
	if q.Dry {
		return
	}
	for _, w := range e.Readmit {
		d.from.Readmit(w)
	}
	if e.ReturnTurn {
		turn := q.Run.Criteria.Chances[1].Turn
		d.turns[1].CompareAndSwap(turn+1, turn)
	}
	q.Run.Move(&e, d.sessions, q.At)
}

// drawChances gives a request its turns and random numbers, once. A dry run sees those of
// the next request and takes none.
func (d *Decider) drawChances(q *Request) {
	c := &q.Run.Criteria.Chances
	switch {
	case q.drawn:
		return
	case q.Dry:
		c[0].Turn, c[1].Turn = d.turns[0].Load(), d.turns[1].Load()
	default:
		c[0].Turn, c[1].Turn = d.turns[0].Add(1)-1, d.turns[1].Add(1)-1
	}
	c[0].Draw, c[1].Draw = d.rng.pair(!q.Dry)
	q.drawn = true
}

// Sent notes for approximate routing that a prompt went to a rank.
func (d *Decider) Sent(q *Request, w *workers.Worker, k *workers.Rank, now time.Time) {
	if h := d.predicted(q, w, k); h != nil {
		d.from.Predicted.Sent(kvindex.Rank(k.Slot), k.Number, h.locals, h.seq, now)
	}
}

// Refused takes back what Sent noted at a time: the engine had no room for the prompt.
func (d *Decider) Refused(q *Request, w *workers.Worker, k *workers.Rank, sent time.Time) {
	if h := d.predicted(q, w, k); h != nil {
		d.from.Predicted.Refused(kvindex.Rank(k.Slot), k.Number, h.seq, sent)
	}
}

// predicted is the prompt as it is predicted for a rank; nil for one whose events are known.
func (d *Decider) predicted(q *Request, w *workers.Worker, k *workers.Rank) *hashes {
	if !q.Chunked && d.from.Fleet.Fed(k) {
		return nil
	}
	size, named := q.Settings.BlockOf(w), d.naming(q, w)
	for i := range q.views[:q.used] {
		if h := &q.views[i]; q.Chunked || h.blockSize == size && h.naming == named {
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
