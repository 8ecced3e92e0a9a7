// Package ledger counts the work that the router has in flight: per rank, how
// many requests it runs, how many prompt tokens it has still to prefill and how
// many KV blocks its requests hold.
//
// Work is entered by Reserve when a request is routed and leaves through its
// Reservation: FirstToken ends the prefill, Progress grows the blocks, Release
// ends it all, once. There are no timers: an entry lives exactly as long as
// its stream. After a drain the ledger is zero, and Balanced names every rank
// where it is not.
//
// A load belongs to a *workers.Rank, not to its slot: when a slot is used
// again by another rank, reservations on the old rank, late ones included, still
// count against the old load and leave the new one alone.
//
// Blocks are counted per request, also where running requests share a prompt
// prefix: a decode step reads the whole context of every sequence, so this is
// the load that decoding feels. It is an upper bound of the memory in use; the
// engine's own KV usage, scraped beside it, is the measure of that.
package ledger

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/dynctl/dynctl/internal/workers"
)

// HalfLifeTokens is how fast Load.Fresh fades: it halves each time the ledger's
// ranks were given this many uncached prompt tokens each, on average.
const HalfLifeTokens = 512 * 512

// Amounts is work in flight on a rank.
type Amounts struct {
	// Requests is the number of reservations, Answering how many of them have their
	// first token.
	Requests, Answering int
	// PrefillTokens is the uncached prompt tokens without a first token yet.
	PrefillTokens int
	// DecodeBlocks is the KV blocks that the requests hold, CachedBlocks how many of them the
	// rank had before: requests may share those.
	DecodeBlocks, CachedBlocks int
}

// zero reports whether nothing is in flight.
func (a Amounts) zero() bool { return a == Amounts{} }

// Load is a rank's state for a decision.
type Load struct {
	Amounts
	// Fresh is the uncached prompt tokens that the rank was recently given, to
	// compute or to load, see HalfLifeTokens. FreshLong is the part that is of long
	// prompts ([Claim.Long]).
	Fresh, FreshLong int
	// LastTurn is the number of the rank's newest reservation among all of the
	// ledger's, 0 for none.
	LastTurn uint64
}

// Claim is what one request will take of a rank.
type Claim struct {
	// PrefillTokens is the uncached prompt tokens that this rank computes; 0
	// on the decode rank of a remote prefill.
	PrefillTokens int
	// LoadTokens is the uncached prompt tokens whose KV this rank is sent: on
	// the decode rank of a remote prefill. They are no work, but they take
	// their place in its cache.
	LoadTokens int
	// ContextTokens is the prompt's length, if the rank holds its KV while it
	// decodes; 0 on a prefill leg.
	ContextTokens int
	// CachedTokens is how many of them the rank has in its cache already.
	CachedTokens int
	// BlockSize is the router's block in tokens; without one no blocks are
	// counted.
	BlockSize int
	// Long says that the windows of other ranks are too small for the prompt.
	Long bool
}

// blocks is how many blocks the claim's context fills after generated tokens.
func (c *Claim) blocks(generated int) int {
	if c.BlockSize <= 0 || c.ContextTokens <= 0 {
		return 0
	}
	return (c.ContextTokens + generated + c.BlockSize - 1) / c.BlockSize
}

// cachedBlocks is how many of the claim's blocks the rank has already.
func (c *Claim) cachedBlocks() int {
	if c.BlockSize <= 0 || c.ContextTokens <= 0 {
		return 0
	}
	return min(c.CachedTokens, c.ContextTokens) / c.BlockSize
}

// rankLoad is one rank's figures. The counters are read without a lock; a
// reader may see one of them before and another after a concurrent change.
type rankLoad struct {
	rank      *workers.Rank
	requests  atomic.Int64
	answering atomic.Int64
	prefill   atomic.Int64
	blocks    atomic.Int64
	cached    atomic.Int64
	lastTurn  atomic.Uint64
	fresh     atomic.Pointer[fresh]
	// What was computed so far: prompts that have their first token, and their uncached tokens.
	prompts, computed atomic.Uint64
}

// fresh is two fading sums, of all prompts and of the long ones, and the ledger's clock at the
// time they were right.
type fresh struct{ tokens, long, at float64 }

func (a *rankLoad) amounts() (n Amounts) {
	a.read(&n)
	return n
}

// read writes the amounts where they are needed: the processor waits where words that were just
// written are copied in longer pieces.
func (a *rankLoad) read(n *Amounts) {
	n.Requests, n.Answering = int(a.requests.Load()), int(a.answering.Load())
	n.PrefillTokens, n.DecodeBlocks, n.CachedBlocks = int(a.prefill.Load()), int(a.blocks.Load()), int(a.cached.Load())
}

// Ledger has the loads of a fleet's ranks. It is safe for concurrent use.
type Ledger struct {
	// slots is indexed by Rank.Slot and copied on write.
	slots atomic.Pointer[[]*rankLoad]
	// clock is the uncached tokens given to all ranks so far.
	clock atomic.Uint64
	turn  atomic.Uint64
	ranks atomic.Int64 // rank loads in slots

	doubles atomic.Uint64
	// eased is called when work has left a rank; nil for nobody.
	eased func()

	mu sync.Mutex // guards writes of slots, and:
	// retired are loads without a slot that have work in flight: it went to
	// another rank, or theirs left the fleet. Those without work are dropped at the
	// next change.
	retired []*rankLoad
	// gone are the numbers of the last ranks that were forgotten, by slot.
	gone []uint64
}

// New is an empty ledger.
func New() *Ledger {
	l := &Ledger{}
	l.slots.Store(new([]*rankLoad))
	return l
}

// OnEase has f called, on the goroutine that released it, each time that work has left a rank.
// It is called before the ledger is used, and f must not call it.
func (l *Ledger) OnEase(f func()) { l.eased = f }

func (l *Ledger) ease() {
	if l.eased != nil {
		l.eased()
	}
}

// find is the rank's load, or nil if it has none.
func (l *Ledger) find(r *workers.Rank) *rankLoad {
	s := *l.slots.Load()
	if int(r.Slot) < len(s) {
		if a := s[r.Slot]; a != nil && a.rank == r {
			return a
		}
	}
	return nil
}

// open is the rank's load, made if needed.
func (l *Ledger) open(r *workers.Rank) *rankLoad {
	if a := l.find(r); a != nil {
		return a
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.find(r); a != nil {
		return a
	}
	l.dropRetired()
	// A rank that lost its slot may still get work from a decision made
	// before; it keeps its load.
	for _, a := range l.retired {
		if a.rank == r {
			return a
		}
	}
	a := &rankLoad{rank: r}
	if l.left(r) {
		l.retired = append(l.retired, a)
		return a
	}
	old := *l.slots.Load()
	s := make([]*rankLoad, max(len(old), int(r.Slot)+1))
	copy(s, old)
	was := s[r.Slot]
	s[r.Slot] = a
	l.slots.Store(&s)
	if was == nil {
		l.ranks.Add(1)
	} else if !was.amounts().zero() { // looked at after the store, see Reserve
		l.retired = append(l.retired, was)
	}
	return a
}

// left reports whether a rank has left the fleet: it was forgotten, or a later
// one has its slot. The caller holds mu.
func (l *Ledger) left(r *workers.Rank) bool {
	if s := *l.slots.Load(); int(r.Slot) < len(s) && s[r.Slot] != nil && s[r.Slot].rank.Number > r.Number {
		return true
	}
	return int(r.Slot) < len(l.gone) && l.gone[r.Slot] >= r.Number
}

// relist keeps the load of a rank that has lost its slot.
func (l *Ledger) relist(a *rankLoad) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.find(a.rank) != a && !slices.Contains(l.retired, a) {
		l.retired = append(l.retired, a)
	}
}

// dropRetired drops retired loads without work. The caller holds mu.
func (l *Ledger) dropRetired() {
	kept := l.retired[:0]
	for _, a := range l.retired {
		if !a.amounts().zero() {
			kept = append(kept, a)
		}
	}
	clear(l.retired[len(kept):])
	l.retired = kept
}

// Reserve enters the work of one request on a rank. The reservation must be
// released, whatever becomes of the request.
func (l *Ledger) Reserve(r *workers.Rank, c Claim) *Reservation {
	a := l.open(r)
	c.PrefillTokens, c.LoadTokens = max(c.PrefillTokens, 0), max(c.LoadTokens, 0)
	v := &Reservation{ledger: l, load: a, claim: c, prefill: c.PrefillTokens, blocks: c.blocks(0)}
	a.requests.Add(1)
	a.prefill.Add(int64(v.prefill))
	a.blocks.Add(int64(v.blocks))
	a.cached.Add(int64(c.cachedBlocks()))
	if l.find(r) != a {
		// The rank left between open and here; whoever took its slot either
		// saw the work above, or is seen here.
		l.relist(a)
	}
	a.lastTurn.Store(l.turn.Add(1))
	if given := c.PrefillTokens + c.LoadTokens; given > 0 {
		now := float64(l.clock.Add(uint64(given)))
		for {
			old := a.fresh.Load()
			sum := l.faded(old, now)
			sum.tokens += float64(given)
			if c.Long {
				sum.long += float64(given)
			}
			if a.fresh.CompareAndSwap(old, &sum) {
				break
			}
		}
	}
	return v
}

// faded is what is left of f at a time of the ledger's clock.
func (l *Ledger) faded(f *fresh, now float64) fresh {
	if f == nil {
		return fresh{at: now}
	}
	left := halved(max(now-f.at, 0) / (HalfLifeTokens * float64(max(l.ranks.Load(), 1))))
	return fresh{f.tokens * left, f.long * left, now}
}

// halved is 2 to the power of -x for x of 0 or more, off by less than 1e-8 of itself. It is the
// same on every processor, and a decision needs it for every rank: math.Exp2 takes twice as long.
func halved(x float64) float64 {
	if !(x < 1000) {
		return 0
	}
	n := int(x + 0.5)
	y := float64((float64(n) - x) * math.Ln2) // within 0.35 of 0
	// The powers of y in e^y by their factors 1/k!, even and odd ones apart: two short chains take
	// less time than a long one.
	yy := float64(y * y)
	even := 1 + float64(yy*(1.0/2+float64(yy*(1.0/24+float64(yy*(1.0/720))))))
	odd := 1 + float64(yy*(1.0/6+float64(yy*(1.0/120+float64(yy*(1.0/5040))))))
	sum := even + float64(y*odd)
	return sum * math.Float64frombits(uint64(1023-n)<<52)
}

// Load is the rank's present state. It takes no lock.
func (l *Ledger) Load(r *workers.Rank) (now Load) {
	l.Read(r, &now)
	now.Fresh, now.FreshLong = l.Fresh(r)
	return now
}

// Computed is how many prompts a rank has computed since it joined, and how many uncached
// tokens they had.
func (l *Ledger) Computed(r *workers.Rank) (prompts, tokens uint64) {
	if a := l.find(r); a != nil {
		return a.prompts.Load(), a.computed.Load()
	}
	return 0, 0
}

// Read writes all of a rank's state but Fresh and FreshLong, which stay as they are.
func (l *Ledger) Read(r *workers.Rank, now *Load) {
	a := l.find(r)
	if a == nil {
		*now = Load{Fresh: now.Fresh, FreshLong: now.FreshLong}
		return
	}
	a.read(&now.Amounts)
	now.LastTurn = a.lastTurn.Load()
}

// Fresh is Load.Fresh and Load.FreshLong. One fades in a long chain of sums: who needs those of many
// ranks calls it for one after the other, so that the processor works on several chains.
func (l *Ledger) Fresh(r *workers.Rank) (all, long int) {
	a := l.find(r)
	if a == nil {
		return 0, 0
	}
	sum := l.faded(a.fresh.Load(), float64(l.clock.Load()))
	return int(sum.tokens), int(sum.long)
}

// Given counts the reservations so far, and the uncached prompt tokens of their claims.
func (l *Ledger) Given() (reservations, tokens uint64) { return l.turn.Load(), l.clock.Load() }

// Forget drops the load of a rank that left the fleet. Work still in flight
// on it stays in the ledger until it is released.
func (l *Ledger) Forget(r *workers.Rank) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropRetired()
	if more := int(r.Slot) + 1 - len(l.gone); more > 0 {
		l.gone = append(l.gone, make([]uint64, more)...)
	}
	l.gone[r.Slot] = max(l.gone[r.Slot], r.Number)
	a := l.find(r)
	if a == nil {
		return
	}
	s := append([]*rankLoad(nil), *l.slots.Load()...)
	s[r.Slot] = nil
	l.slots.Store(&s)
	l.ranks.Add(-1)
	if !a.amounts().zero() {
		l.retired = append(l.retired, a)
	}
}

// each calls on for the load of every rank.
func (l *Ledger) each(on func(a *rankLoad)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range *l.slots.Load() {
		if a != nil {
			on(a)
		}
	}
	for _, a := range l.retired {
		on(a)
	}
}

// Total is the work in flight on all ranks.
func (l *Ledger) Total() Amounts {
	var t Amounts
	l.each(func(a *rankLoad) {
		v := a.amounts()
		t.Requests += v.Requests
		t.Answering += v.Answering
		t.PrefillTokens += v.PrefillTokens
		t.DecodeBlocks += v.DecodeBlocks
		t.CachedBlocks += v.CachedBlocks
	})
	return t
}

// DoubleReleases counts calls of Release on reservations that were released
// before: each is a bug in the caller, harmless to the figures.
func (l *Ledger) DoubleReleases() uint64 { return l.doubles.Load() }

// Balanced is nil when nothing is in flight; else it names every rank that has
// work in the ledger. It is meant for after a drain.
func (l *Ledger) Balanced() error {
	var errs []error
	l.each(func(a *rankLoad) {
		if v := a.amounts(); !v.zero() {
			errs = append(errs, fmt.Errorf("ledger: %s holds %d requests, %d of them answering, %d prefill tokens, %d decode blocks",
				a.rank.Label, v.Requests, v.Answering, v.PrefillTokens, v.DecodeBlocks))
		}
	})
	return errors.Join(errs...)
}

// Reservation is the work of one request on one rank. Its methods are safe for
// concurrent use, in any order and number; after Release they do nothing.
type Reservation struct {
	ledger *Ledger
	load   *rankLoad
	claim  Claim

	mu        sync.Mutex // guards the fields below
	released  bool
	answering bool
	prefill   int // tokens still in the ledger
	blocks    int // blocks in the ledger
}

// FirstToken ends the prefill: its tokens leave the ledger, and the request counts as
// answering. Calls after the first do nothing.
func (v *Reservation) FirstToken() {
	v.mu.Lock()
	had := v.prefill
	v.load.prefill.Add(-int64(had))
	v.prefill = 0
	if had > 0 {
		v.load.prompts.Add(1)
		v.load.computed.Add(uint64(had))
	}
	if !v.answering && !v.released {
		v.answering = true
		v.load.answering.Add(1)
	}
	v.mu.Unlock()
	if had > 0 {
		v.ledger.ease()
	}
}

// Progress says how many tokens were generated so far; the blocks in the ledger
// grow when another is begun, and never shrink.
func (v *Reservation) Progress(generated int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.released {
		return
	}
	if n := v.claim.blocks(generated); n > v.blocks {
		v.load.blocks.Add(int64(n - v.blocks))
		v.blocks = n
	}
}

// Release takes everything out of the ledger. It reports whether this call did;
// a second one is counted as a bug and changes nothing.
func (v *Reservation) Release() bool {
	v.mu.Lock()
	if v.released {
		v.mu.Unlock()
		v.ledger.doubles.Add(1)
		return false
	}
	v.released = true
	a := v.load
	a.prefill.Add(-int64(v.prefill))
	a.blocks.Add(-int64(v.blocks))
	a.cached.Add(-int64(v.claim.cachedBlocks()))
	if v.answering {
		a.answering.Add(-1)
	}
	a.requests.Add(-1)
	v.prefill, v.blocks = 0, 0
	v.mu.Unlock()
	v.ledger.ease()
	return true
}
