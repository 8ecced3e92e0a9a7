package receipt

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// Options set up a Ring.
type Options struct {
	// Capacity is how many decisions are kept; default 4096. Up to as many
	// finished ones are kept in addition, so that the outcome of a long request
	// is not lost when newer decisions push it out.
	Capacity int
	// Candidates is how many candidates of each phase are kept; default
	// decision.Kept.
	Candidates int
	// Epoch begins the ids of this ring; 0 draws one. Two routers with
	// different epochs do not share ids.
	Epoch uint32
	// OnFinish, when not nil, sees every finished receipt, which it must not
	// keep or change. It is called by the one who finishes.
	OnFinish func(*Receipt)
}

// Ring keeps the newest receipts. It is safe for concurrent use; a write takes
// a lock for the time of a pointer swap, and no request waits for a reader longer
// than it takes to copy one receipt.
type Ring struct {
	options Options
	epoch   uint32
	seq     atomic.Uint64
	live    atomic.Int64

	mu     sync.Mutex // guards the fields below; never held with an entry's
	recent []*entry   // by sequence number
	done   []*entry   // by order of finishing
	dones  uint64
	free   []*entry
	pushed uint64 // decisions pushed out of recent while they ran
}

// entry holds one receipt. Its memory is used again when nothing refers to it.
type entry struct {
	// Guarded by Ring.mu: one reference each for the owner, recent and done,
	// and whether the owner still has it.
	refs    int
	running bool

	mu   sync.Mutex // guards the fields below
	seq  uint64
	live bool
	rec  Receipt
}

// Stats are a ring's figures.
type Stats struct {
	// Total counts decisions since the start, Live those that still run.
	Total uint64 `json:"decisions"`
	Live  int64  `json:"live"`
	// Capacity is how many are kept.
	Capacity int `json:"capacity"`
	// PushedOut counts decisions that were pushed out while they ran; they
	// come back when they finish.
	PushedOut uint64 `json:"pushed_out"`
}

// NewRing makes an empty ring.
func NewRing(o Options) *Ring {
	o.Capacity = cmp.Or(max(o.Capacity, 0), 4096)
	o.Candidates = cmp.Or(max(o.Candidates, 0), decision.Kept)
	r := &Ring{options: o, epoch: o.Epoch, recent: make([]*entry, o.Capacity), done: make([]*entry, o.Capacity)}
	for r.epoch == 0 {
		var b [4]byte
		rand.Read(b[:]) // never fails
		r.epoch = binary.BigEndian.Uint32(b[:])
	}
	return r
}

// Live is the handle of a running request's receipt.
type Live struct {
	ring *Ring
	e    *entry
	seq  uint64
	id   string
}

// Begin makes the receipt of a new decision. It must be finished.
func (r *Ring) Begin(now time.Time) Live {
	seq := r.seq.Add(1)
	id := r.id(seq)
	r.live.Add(1)
	r.mu.Lock()
	var e *entry
	if n := len(r.free); n > 0 {
		e, r.free = r.free[n-1], r.free[:n-1]
	}
	r.mu.Unlock()
	if e == nil {
		e = &entry{}
	}
	e.mu.Lock()
	e.seq, e.live = seq, true
	e.rec.reset(id, now, r.options.Candidates)
	e.mu.Unlock()

	r.mu.Lock()
	e.refs, e.running = 2, true
	at := &r.recent[seq%uint64(len(r.recent))]
	if *at != nil {
		if (*at).running {
			r.pushed++
		}
		r.drop(*at)
	}
	*at = e
	r.mu.Unlock()
	return Live{ring: r, e: e, seq: seq, id: id}
}

// drop takes one reference off e. The caller holds mu.
func (r *Ring) drop(e *entry) {
	if e.refs--; e.refs == 0 && len(r.free) < len(r.recent) {
		r.free = append(r.free, e)
	}
}

// ID is the decision's id; "" for the zero Live.
func (l Live) ID() string { return l.id }

// Update changes the receipt of a running request and reports whether it
// could: a finished receipt does not change. The function must not keep the
// pointer.
func (l Live) Update(change func(*Receipt)) bool {
	if l.e == nil {
		return false
	}
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	if l.e.seq != l.seq || !l.e.live {
		return false
	}
	change(&l.e.rec)
	return true
}

// Finish makes the last change, which may be nil, and closes the receipt. It
// reports whether this call did.
func (l Live) Finish(change func(*Receipt)) bool {
	if l.e == nil {
		return false
	}
	if !l.close(change) {
		return false
	}
	r := l.ring
	r.live.Add(-1)
	r.mu.Lock()
	defer r.mu.Unlock()
	at := &r.done[r.dones%uint64(len(r.done))]
	r.dones++
	if *at != nil {
		r.drop(*at)
	}
	*at = l.e // takes over the owner's reference
	l.e.running = false
	return true
}

func (l Live) close(change func(*Receipt)) bool {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	if l.e.seq != l.seq || !l.e.live {
		return false
	}
	if change != nil {
		change(&l.e.rec)
	}
	l.e.live, l.e.rec.Live = false, false
	if l.ring.options.OnFinish != nil {
		l.ring.options.OnFinish(&l.e.rec)
	}
	return true
}

// id is 8 hex digits of epoch and 12 of sequence number.
func (r *Ring) id(seq uint64) string {
	var b [8 + 2]byte
	var out [20]byte
	binary.BigEndian.PutUint32(b[:4], r.epoch)
	b[4], b[5] = byte(seq>>40), byte(seq>>32)
	binary.BigEndian.PutUint32(b[6:], uint32(seq))
	hex.Encode(out[:], b[:])
	return string(out[:])
}

func (r *Ring) parse(id string) (uint64, bool) {
	b, err := hex.DecodeString(id)
	if err != nil || len(b) != 10 || binary.BigEndian.Uint32(b) != r.epoch {
		return 0, false
	}
	return uint64(b[4])<<40 | uint64(b[5])<<32 | uint64(binary.BigEndian.Uint32(b[6:])), true
}

// at is the entry at a place of a list of entries.
func (r *Ring) at(list []*entry, i uint64) *entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	return list[i%uint64(len(list))]
}

// read copies the entry's receipt if it is the wanted one.
func (e *entry) read(want func(seq uint64, r *Receipt) bool) *Receipt {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !want(e.seq, &e.rec) {
		return nil
	}
	return e.rec.clone()
}

// Find is a copy of the receipt of a decision, or of the newest one of a request
// id. For an id that is not one of its own, it looks through the whole ring.
func (r *Ring) Find(id string) (*Receipt, bool) {
	last := r.seq.Load()
	if seq, ok := r.parse(id); ok {
		same := func(s uint64, _ *Receipt) bool { return s == seq }
		if c := r.at(r.recent, seq).read(same); c != nil {
			return c, true
		}
		if c, ok := r.scanDone(same); ok {
			return c, true
		}
	}
	same := func(_ uint64, c *Receipt) bool { return c.ID == id || c.RequestID == id }
	for i := range min(last, uint64(len(r.recent))) {
		if c := r.at(r.recent, last-i).read(same); c != nil {
			return c, true
		}
	}
	return r.scanDone(same)
}

func (r *Ring) scanDone(want func(uint64, *Receipt) bool) (*Receipt, bool) {
	r.mu.Lock()
	n := r.dones
	r.mu.Unlock()
	for i := range min(n, uint64(len(r.done))) {
		if c := r.at(r.done, n-1-i).read(want); c != nil {
			return c, true
		}
	}
	return nil, false
}

// Query picks receipts; empty fields pick all.
type Query struct {
	// Limit is how many at most; default 100, at most 1000.
	Limit int
	// Before is the cursor that List gave, or the id that Begin gave to a
	// receipt: only older decisions are listed.
	Before string
	// Path, Reason, Model and State pick by equality; State is "live" or
	// "done".
	Path, Reason, Model, State string
	// Worker picks decisions whose chosen decode or prefill rank has this
	// name or begins with it and a slash.
	Worker string
	// MinStatus picks outcomes with at least this HTTP status.
	MinStatus int
	// Text picks receipts whose id, request id, ranks, reason or error
	// contain it.
	Text string
}

const maxList = 1000

// List copies matching receipts, newest decision first. The cursor continues
// the list and is empty at its end. An unknown Before is an error.
func (r *Ring) List(q Query) (list []*Receipt, cursor string, err error) {
	limit := cmp.Or(max(q.Limit, 0), 100)
	limit = min(limit, maxList)
	from := r.seq.Load()
	oldest := uint64(1)
	if n := uint64(len(r.recent)); from > n {
		oldest = from - n + 1
	}
	if q.Before != "" {
		seq, ok := r.parse(q.Before)
		if !ok {
			return nil, "", fmt.Errorf("receipt: %q is not a cursor of this router", clip(q.Before))
		}
		from = min(from, seq-1)
		if seq == 0 {
			from = 0
		}
	}
	last := from // of those in the list
	for seq := from; seq >= oldest && seq > 0; seq-- {
		c := r.at(r.recent, seq).read(func(s uint64, c *Receipt) bool { return s == seq && q.match(c) })
		if c == nil {
			continue
		}
		if len(list) == limit {
			return list, r.id(last), nil
		}
		list, last = append(list, c), seq
	}
	return list, "", nil
}

func (q *Query) match(r *Receipt) bool {
	switch {
	case q.Path != "" && r.Path != q.Path,
		q.Reason != "" && r.Reason != q.Reason,
		q.Model != "" && r.Model != q.Model,
		q.State == "live" && !r.Live,
		q.State == "done" && r.Live,
		q.MinStatus > 0 && r.Outcome.Status < q.MinStatus,
		q.Worker != "" && !isOn(r.Decode.Chosen, q.Worker) && !isOn(r.Prefill.Chosen, q.Worker):
		return false
	}
	if q.Text == "" {
		return true
	}
	texts := []string{r.ID, r.RequestID, r.Decode.Chosen, r.Prefill.Chosen, r.Reason, r.Outcome.ErrorCode, r.Outcome.Error}
	return slices.ContainsFunc(texts, func(s string) bool { return strings.Contains(s, q.Text) })
}

func isOn(rank, worker string) bool {
	return rank == worker || strings.HasPrefix(rank, worker) && strings.HasPrefix(rank[len(worker):], "/")
}

// Stats are the ring's figures.
func (r *Ring) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Stats{Total: r.seq.Load(), Live: r.live.Load(), Capacity: len(r.recent), PushedOut: r.pushed}
}
