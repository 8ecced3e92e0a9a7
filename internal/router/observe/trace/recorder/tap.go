// Package recorder records a running router: a Tap makes trace lines of what
// the router observes, a File keeps them.
package recorder

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/wait"
)

// Limits of a Tap.
const (
	// DefaultBuffer is how many bytes of lines wait for a slow listener.
	DefaultBuffer = 64 << 20
	streamBuffer  = 16 << 20
	maxListeners  = 16
	maxRanks      = 1 << 16
	// fileBatch is how many bytes wake a File; fewer wait for its next flush.
	fileBatch = 64 << 10
)

// ErrListeners is a Tap with as many listeners as it takes.
var ErrListeners = errors.New("too many listeners to the recording")

// ErrClosed ends a Subscription.
var ErrClosed = errors.New("the recording has ended")

// Tap turns what a router observes into lines of a trace and hands them to
// those who listen: a file, a stream of the admin API. Its methods never block
// on a listener: each has a bounded buffer, beyond which the newest lines are
// dropped for it, counted, and reported in its recording. Without a listener a
// call costs an atomic load. It is safe for concurrent use.
type Tap struct {
	// Tokens says that decisions have the prompts' token ids, not only their
	// hashes. It is set before there are any.
	Tokens bool

	header trace.Header
	active atomic.Bool
	pool   sync.Pool // *scratch

	mu         sync.Mutex // guards the fields below; before Subscription.mu
	references *trace.References
	text       []byte
	subs       []*Subscription
	ranks      map[string]*tapRank
	order      []string
}

type tapRank struct {
	info    trace.RankInfo
	trusted bool
}

// scratch is the memory in which a line is made.
type scratch struct {
	line []byte
	refs []uint64
}

// NewTap makes a Tap for a recording that begins now.
func NewTap(h trace.Header) *Tap {
	if h.Start.IsZero() {
		h.Start = time.Now()
	}
	h.Schema = trace.Schema
	return &Tap{header: h, references: trace.NewReferences(), ranks: map[string]*tapRank{}, pool: sync.Pool{New: func() any { return new(scratch) }}}
}

func (t *Tap) since(at time.Time) time.Duration { return at.Sub(t.header.Start) }

// Rank records a rank of the fleet. It is repeated for every new listener.
func (t *Tap) Rank(rank string, info trace.RankInfo) {
	t.mu.Lock()
	k := t.ranks[rank]
	if k == nil && len(t.ranks) < maxRanks {
		k = &tapRank{}
		t.ranks[rank] = k
		t.order = append(t.order, rank)
	}
	if k != nil {
		// A listener to come finds the rank in the middle of its life.
		k.info, k.trusted = info, false
		k.info.New, k.info.Kept = false, false
	}
	t.mu.Unlock()
	t.put(&trace.Record{Kind: trace.KindRank, Rank: rank, RankInfo: info})
}

// Batch records a batch that was applied to the index. Call it in the order in
// which a rank's batches are applied, after the index has changed.
func (t *Tap) Batch(rank string, seq uint64, received time.Time, replayed bool, payload []byte) {
	if t.active.Load() {
		t.put(&trace.Record{Kind: trace.KindBatch, Rank: rank, Batch: trace.Batch{Seq: seq, Received: t.since(received), Replayed: replayed, Payload: payload}})
	}
}

// Clear records that a rank's entries were dropped.
func (t *Tap) Clear(rank string, forgotPublisher bool, reason string) {
	if t.active.Load() {
		t.put(&trace.Record{Kind: trace.KindClear, Rank: rank, Clear: trace.Clear{ForgotPublisher: forgotPublisher, Reason: reason}})
	}
}

// Feed records that a rank's entries are trusted from now on, or are not.
func (t *Tap) Feed(rank string, trusted bool) {
	t.mu.Lock()
	if k := t.ranks[rank]; k != nil {
		k.trusted = trusted
	}
	t.mu.Unlock()
	if t.active.Load() {
		t.put(&trace.Record{Kind: trace.KindFeed, Rank: rank, Trusted: trusted})
	}
}

// Decision records a decision that queried the index at a time. It sets BeganUS and
// keeps nothing of d but pointers to its settings and workers.
func (t *Tap) Decision(queried time.Time, d *trace.Decision) {
	if !t.active.Load() {
		return
	}
	d.BeganUS = t.since(queried).Microseconds()
	if !t.Tokens {
		d.Tokens = nil
	}
	b := t.pool.Get().(*scratch)
	t.mu.Lock()
	b.refs = t.references.Refer(d, b.refs[:0])
	t.mu.Unlock()
	b.line = trace.AppendDecision(b.line[:0], t.since(time.Now()).Microseconds(), d, b.refs)
	t.give(b, true)
}

// Outcome records a receipt that is final. It keeps nothing of it.
func (t *Tap) Outcome(r *receipt.Receipt) {
	if !t.active.Load() {
		return
	}
	x := trace.Outcome{
		ID: r.ID, ReceivedUS: t.since(r.Time).Microseconds(), Stream: r.Stream,
		Result: r.Outcome, Legs: r.Legs, LegsOmitted: r.LegsOmitted, Notes: r.Notes, Continued: r.Continued,
	}
	b := t.pool.Get().(*scratch)
	b.line = trace.AppendOutcome(b.line[:0], t.since(time.Now()), &x)
	t.give(b, false)
}

// put makes the line of a record and gives it to the listeners.
func (t *Tap) put(r *trace.Record) {
	if !t.active.Load() {
		return
	}
	r.Time = t.since(time.Now())
	b := t.pool.Get().(*scratch)
	// It can be written: it is of a kind that has a line, and has no figures.
	b.line, _ = trace.AppendRecord(b.line[:0], r)
	t.give(b, false)
}

// give hands a line to the listeners, and before a decision what it refers to.
func (t *Tap) give(b *scratch, decision bool) {
	t.mu.Lock()
	for _, s := range t.subs {
		if decision && !s.describe(t) {
			s.drop() // nobody could find out what it was made from
			continue
		}
		s.add(b.line)
	}
	t.mu.Unlock()
	if cap(b.line) < 1<<20 {
		t.pool.Put(b)
	}
}

// describe gives a listener the settings and workers that it has not had, and reports
// whether it has all of them. The caller holds the tap's mu.
func (s *Subscription) describe(t *Tap) bool {
	if s.full != t.references.Full() {
		s.described, s.full = 0, t.references.Full()
	}
	for ; s.described < t.references.Len(); s.described++ {
		t.text = t.references.AppendLine(t.text[:0], s.described, t.since(time.Now()))
		if !s.add(t.text) {
			return false
		}
	}
	return true
}

// opening is the header and what is known of settings, workers and ranks. The caller
// holds mu.
func (t *Tap) opening() []byte {
	p, err := trace.AppendHeader(nil, t.header)
	if err != nil {
		p, _ = trace.AppendHeader(nil, trace.Header{Start: t.header.Start}) // cannot fail
	}
	now := t.since(time.Now())
	for i := range t.references.Len() {
		p = t.references.AppendLine(p, i, now)
	}
	for _, name := range t.order {
		k := t.ranks[name]
		p, _ = trace.AppendRecord(p, &trace.Record{Kind: trace.KindRank, Time: now, Rank: name, RankInfo: k.info})
		p, _ = trace.AppendRecord(p, &trace.Record{Kind: trace.KindFeed, Time: now, Rank: name, Trusted: k.trusted})
	}
	return p
}

// Subscribe begins a recording with at most buffer bytes that wait to be taken
// (0 means DefaultBuffer). Its first lines are a header, the settings and workers that
// decisions referred to, and the ranks.
func (t *Tap) Subscribe(buffer int) (*Subscription, error) {
	buffer = cmp.Or(max(buffer, 0), DefaultBuffer)
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.subs) >= maxListeners {
		return nil, ErrListeners
	}
	s := &Subscription{max: buffer, batch: 1, wake: make(chan struct{}, 1)}
	s.leave = func() { t.leave(s) }
	s.buf, s.described, s.full = t.opening(), t.references.Len(), t.references.Full()
	s.wake <- struct{}{}
	t.subs = append(t.subs, s)
	t.active.Store(true)
	return s, nil
}

// ServeHTTP streams a recording (GET /admin/v1/stream): newline-delimited JSON
// until the client or the server ends it.
func (t *Tap) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	s, err := t.Subscribe(streamBuffer)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer s.Close()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	flush := http.NewResponseController(w)
	for {
		p, err := s.Next(q.Context())
		if err != nil {
			return
		}
		if _, err := w.Write(p); err != nil {
			return
		}
		if err := flush.Flush(); err != nil {
			return
		}
	}
}

// Subscription is one listener's part of a recording. Next and Close may be
// called by different goroutines; Next by one at a time.
type Subscription struct {
	max  int
	wake chan struct{}
	out  []byte // what Next gave last; its own
	// How many of the lines of the Tap's references it has been given, since it was full so often.
	described, full int
	leave           func() // the Tap

	mu      sync.Mutex // guards the fields below
	buf     []byte
	batch   int    // as many waiting bytes wake the listener
	lost    uint64 // dropped and not reported yet
	dropped uint64
	records uint64
	closed  bool
}

// add appends a line and reports whether there was room for it.
func (s *Subscription) add(line []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return true
	}
	if len(s.buf)+len(line) > s.max {
		s.lost++
		s.dropped++
		s.signal() // though there may be less than a batch
		return false
	}
	if s.lost > 0 {
		// 60 bytes beyond the limit at most, at the time of the line after it.
		at := time.Duration(split(line).time(line)) * time.Microsecond
		s.buf, _ = trace.AppendRecord(s.buf, &trace.Record{Kind: trace.KindDropped, Time: at, Dropped: s.lost})
		s.lost = 0
	}
	before := len(s.buf)
	s.buf = append(s.buf, line...)
	s.records++
	if before < s.batch && len(s.buf) >= s.batch {
		s.signal()
	}
	return true
}

// signal wakes the listener, now or when it comes to wait.
func (s *Subscription) signal() { wait.Poke(s.wake) }

// collect makes the listener's wake-ups rare, for one that takes what waits at
// times of its own: waking a thread costs more than making a line.
func (s *Subscription) collect(batch int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.batch = max(1, min(batch, s.max/2))
}

// drop counts a record of which there is no line for this listener.
func (s *Subscription) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost++
	s.dropped++
}

// Next waits for lines and returns all there are; they are valid until the next
// call. The error is the context's, or ErrClosed.
func (s *Subscription) Next(ctx context.Context) ([]byte, error) {
	for {
		if p := s.take(); len(p) > 0 {
			return p, nil
		}
		s.mu.Lock()
		closed := s.closed
		s.mu.Unlock()
		if closed {
			return nil, ErrClosed
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.wake:
		}
	}
}

// take returns what waits, without waiting.
func (s *Subscription) take() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	reused := s.out[:0]
	if cap(reused) > 4<<20 && cap(reused) > 8*len(s.buf) {
		reused = nil // the memory of a burst
	}
	s.out, s.buf = s.buf, reused
	return s.out
}

// Counts are the records that were taken or wait, and those that were dropped.
func (s *Subscription) Counts() (records, dropped uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.records, s.dropped
}

// Close ends the subscription; what waits can still be taken.
func (s *Subscription) Close() {
	s.leave()
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.signal()
}

func (t *Tap) leave(s *Subscription) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.subs, s); i >= 0 {
		t.subs = slices.Delete(t.subs, i, i+1)
	}
	t.active.Store(len(t.subs) > 0)
}
