package admission

import (
	"slices"
	"time"
)

// Band is the priority of a request. Requests in a higher band come before all of
// their queue in lower ones.
type Band int8

// The bands, the highest first. A request is Normal unless it says otherwise.
const (
	High Band = iota - 1
	Normal
	Low
)

// Bands are the names of all, the highest first.
var Bands = [...]string{"high", "normal", "low"}

// String is the band's name.
func (b Band) String() string { return Bands[b-High] }

// ParseBand finds a band by its name.
func ParseBand(name string) (Band, bool) {
	i := slices.Index(Bands[:], name)
	if i < 0 {
		return Normal, false
	}
	return High + Band(i), true
}

// Claim is whose request wants a place, and what it is worth.
type Claim struct {
	// Queue is where it waits: the model's name. Queues do not wait for each other.
	Queue string
	// Band is its priority in that queue.
	Band Band
	// Tenant takes turns with others; requests of one are served in their order.
	Tenant string
	// Tokens is what the request will take, Weight the tenant's share against that
	// of others; less than 1 counts as 1.
	Tokens, Weight int
	// Patience is the longest wait; 0 is as long as all may wait.
	Patience time.Duration
}

// Waiter is a request that waits.
type Waiter struct {
	Claim
	// Since is when it came, Ahead how many waited in its queue then.
	Since time.Time
	Ahead int

	seq   uint64
	begin float64 // the tag that orders the waiters of one queue and band
	needs string  // what it found none of; waiters with the same needs can go or not alike
	in    bool
	// trying says that it tries at this moment: it is not turned away then.
	trying bool

	// Of Line, guarded by its mu:
	turn chan struct{} // holds a token when it is the waiter's turn, or err is set
	err  error
}

// Turns says whose turn it is to try. It is pure: it knows no clock, no goroutine and
// no place; its caller reports what came of each try. Each waiter tries in its
// turn; what it found none of is not tried again by others with the same needs until
// something has changed. So no waiter stays that could go, as long as every change is
// reported.
//
// In one queue the band comes first, and in a band the tenant that has been given less
// than its share: start-time fair queueing over tokens by weight. Between queues the
// highest band, and then the longest wait, tries first.
type Turns struct {
	// Limit is how many may wait.
	Limit int

	queues map[string]*queue
	n      int
	seq    uint64
	change uint64
	none   map[string]struct{} // needs of which there was none since the last change
}

// queue is that of one model.
type queue struct {
	waiters []*Waiter // oldest first
	// clock is the tag of what was admitted last, given the tag at which each tenant's
	// next request begins, in tokens by weight. A tenant whose tag the clock has passed
	// needs none.
	clock float64
	given map[string]float64
	// took are the times at which waiters got their places, the oldest at tookAt once
	// all are in use.
	took   [64]time.Time
	tookAt int
}

// maxQueues bounds the queues without waiters that are remembered for how fast they
// went.
const maxQueues = 256

// Waiting is how many wait.
func (t *Turns) Waiting() int { return t.n }

// Change is the number of the newest change.
func (t *Turns) Change() uint64 { return t.change }

// Changed reports that something may have come free: all may try again.
func (t *Turns) Changed() {
	t.change++
	clear(t.none)
}

func (t *Turns) queue(name string) *queue {
	if q := t.queues[name]; q != nil {
		return q
	}
	if t.queues == nil {
		t.queues = map[string]*queue{}
	}
	if len(t.queues) >= maxQueues {
		for k, q := range t.queues {
			if len(q.waiters) == 0 {
				delete(t.queues, k)
			}
		}
	}
	q := &queue{given: map[string]float64{}}
	t.queues[name] = q
	return q
}

// Push puts w at its place, or says that there is no room for it. Where the queue is
// full of another's requests, the newest of those leaves it for w.
func (t *Turns) Push(w *Waiter, now time.Time) (evicted *Waiter, ok bool) {
	if t.n >= t.Limit {
		if evicted = t.makeRoom(w); evicted == nil {
			return nil, false
		}
		t.Remove(evicted)
	}
	q := t.queue(w.Queue)
	w.Since, w.Ahead, w.in = now, len(q.waiters), true
	t.seq++
	w.seq = t.seq
	w.begin = max(q.clock, q.given[w.Tenant])
	q.given[w.Tenant] = w.begin + w.share()
	if len(q.given) > 4*(len(q.waiters)+16) {
		for k, tag := range q.given {
			if tag <= q.clock {
				delete(q.given, k)
			}
		}
	}
	q.waiters = append(q.waiters, w)
	t.n++
	return evicted, true
}

func (w *Waiter) share() float64 { return float64(max(1, w.Tokens)) / float64(max(1, w.Weight)) }

// makeRoom finds the tenant with the most waiters in one queue and returns its newest one
// of its lowest band, if it has more than w's tenant in w's queue has with w: no tenant
// fills the queue for all.
func (t *Turns) makeRoom(w *Waiter) *Waiter {
	type owner struct{ queue, tenant string }
	mine, most, count := owner{w.Queue, w.Tenant}, owner{}, map[owner]int{}
	for _, q := range t.queues {
		for _, o := range q.waiters {
			count[owner{o.Queue, o.Tenant}]++
		}
	}
	n := 0
	for o, k := range count {
		if k > n || k == n && (o.queue < most.queue || o.queue == most.queue && o.tenant < most.tenant) {
			most, n = o, k
		}
	}
	if n == 0 || most == mine || n <= count[mine]+1 {
		return nil
	}
	var last *Waiter
	for _, o := range t.queues[most.queue].waiters {
		if o.Tenant == most.tenant && !o.trying && (last == nil || o.Band >= last.Band) {
			last = o
		}
	}
	return last
}

// Next is the waiter whose turn it is to try; nil for none, until something changes.
func (t *Turns) Next() *Waiter {
	var next *Waiter
	for _, q := range t.queues {
		var first *Waiter
		for _, w := range q.waiters {
			if first != nil && (w.Band > first.Band || w.Band == first.Band && w.begin >= first.begin) {
				continue
			}
			if _, nothing := t.none[w.needs]; w.needs == "" || !nothing {
				first = w
			}
		}
		if first != nil && (next == nil || first.Band < next.Band || first.Band == next.Band && first.seq < next.seq) {
			next = first
		}
	}
	return next
}

// Failed reports that w, which began to try when change was the newest one, found none
// of what it needs. The caller chooses the text of needs; it is never empty.
func (t *Turns) Failed(w *Waiter, needs string, change uint64) {
	w.needs = w.Queue + "\x00" + needs
	if change == t.change {
		if t.none == nil {
			t.none = map[string]struct{}{}
		}
		t.none[w.needs] = struct{}{}
	}
}

// Admit takes a waiter out that has got its place.
func (t *Turns) Admit(w *Waiter, now time.Time) {
	q := t.queues[w.Queue]
	q.took[q.tookAt%len(q.took)] = now
	q.tookAt++
	q.clock = max(q.clock, w.begin)
	t.out(q, w)
}

// Remove takes a waiter out that gives up or is turned away: it was given nothing.
func (t *Turns) Remove(w *Waiter) {
	if !w.in {
		return
	}
	q := t.queues[w.Queue]
	if q.given[w.Tenant] == w.begin+w.share() { // no other of its tenant came after it
		q.given[w.Tenant] = w.begin
	}
	t.out(q, w)
}

func (t *Turns) out(q *queue, w *Waiter) {
	w.in = false
	q.waiters = slices.DeleteFunc(q.waiters, func(o *Waiter) bool { return o == w })
	t.n--
	if len(q.waiters) == 0 { // all begin alike
		q.waiters, q.clock = nil, 0
		clear(q.given)
	}
}

// lookBack is how far back places that were got count for how fast a queue goes.
const lookBack = 30 * time.Second

// Wait is how long a request of a band that came to a queue now would wait, by the rate
// at which waiters recently got their places; false where that is not known.
func (t *Turns) Wait(name string, band Band, now time.Time) (time.Duration, bool) {
	q := t.queues[name]
	if q == nil {
		return 0, false
	}
	n, oldest := 0, now
	for _, at := range q.took[:min(q.tookAt, len(q.took))] {
		if now.Sub(at) <= lookBack {
			n++
			if at.Before(oldest) {
				oldest = at
			}
		}
	}
	if n < 2 || !now.After(oldest) {
		return 0, false
	}
	before := 0
	for _, w := range q.waiters {
		if w.Band <= band {
			before++
		}
	}
	return now.Sub(oldest) / time.Duration(n) * time.Duration(before+1), true
}

// QueueState is what waits in one queue.
type QueueState struct {
	Queue string
	// Waiting is by band, in the order of Bands.
	Waiting [len(Bands)]int
	// Tenants is how many different ones wait, Oldest when the one came that has waited
	// longest.
	Tenants int
	Oldest  time.Time
	// Wait is what Turns.Wait says; -1 where it is not known.
	Wait time.Duration
}

// States are the queues in which requests wait, by name.
func (t *Turns) States(now time.Time) (list []QueueState) {
	for name, q := range t.queues {
		if len(q.waiters) == 0 {
			continue
		}
		s := QueueState{Queue: name, Oldest: q.waiters[0].Since, Wait: -1}
		tenants := map[string]struct{}{}
		for _, w := range q.waiters {
			s.Waiting[w.Band-High]++
			tenants[w.Tenant] = struct{}{}
		}
		s.Tenants = len(tenants)
		if d, known := t.Wait(name, Low, now); known {
			s.Wait = d
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b QueueState) int {
		if a.Queue < b.Queue {
			return -1
		}
		return 1
	})
	return list
}
