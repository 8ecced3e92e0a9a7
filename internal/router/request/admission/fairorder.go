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

// Claim is whose request wants a slot, and what it is worth.
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

	// Of Queue, guarded by its mu:
	ready chan struct{} // holds a token when the waiter may try, or err is set
	err   error
}

// FairOrder returns the waiter that tries next. It is pure: it knows no clock, no goroutine
// and no slot; its caller reports the outcome of each try. What a waiter did not find,
// others with the same needs do not try again until something has changed. So no waiter
// stays that could go, as long as every change is reported.
//
// In one queue the band comes first, and in a band the tenant that has been given less
// than its share: start-time fair queueing over tokens by weight. Between queues the
// highest band, and then the longest wait, tries first.
type FairOrder struct {
	// Limit is how many may wait.
	Limit int

	queues map[string]*modelQueue
	n      int
	seq    uint64
	change uint64
	none   map[string]struct{} // needs of which there was none since the last change
}

// modelQueue is that of one model.
type modelQueue struct {
	waiters []*Waiter // oldest first
	// clock is the tag of what was admitted last, given the tag at which each tenant's
	// next request begins, in tokens by weight. A tenant whose tag the clock has passed
	// needs none.
	clock float64
	given map[string]float64
	// took are the times at which waiters got their slots, the oldest at tookAt once
	// all are in use.
	took   [64]time.Time
	tookAt int
}

// maxQueues bounds the queues without waiters that are remembered for how fast they
// went.
const maxQueues = 256

// Waiting is how many wait.
func (o *FairOrder) Waiting() int { return o.n }

// Change is the number of the newest change.
func (o *FairOrder) Change() uint64 { return o.change }

// Changed reports that something may have come free: all may try again.
func (o *FairOrder) Changed() {
	o.change++
	clear(o.none)
}

func (o *FairOrder) queue(name string) *modelQueue {
	if q := o.queues[name]; q != nil {
		return q
	}
	if o.queues == nil {
		o.queues = map[string]*modelQueue{}
	}
	if len(o.queues) >= maxQueues {
		for k, q := range o.queues {
			if len(q.waiters) == 0 {
				delete(o.queues, k)
			}
		}
	}
	q := &modelQueue{given: map[string]float64{}}
	o.queues[name] = q
	return q
}

// Push puts w into its queue, or reports that there is no room for it. Where the queue is
// full of another's requests, the newest of those leaves it for w.
func (o *FairOrder) Push(w *Waiter, now time.Time) (evicted *Waiter, ok bool) {
	if o.n >= o.Limit {
		if evicted = o.makeRoom(w); evicted == nil {
			return nil, false
		}
		o.Remove(evicted)
	}
	q := o.queue(w.Queue)
	w.Since, w.Ahead, w.in = now, len(q.waiters), true
	o.seq++
	w.seq = o.seq
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
	o.n++
	return evicted, true
}

func (w *Waiter) share() float64 { return float64(max(1, w.Tokens)) / float64(max(1, w.Weight)) }

// makeRoom finds the tenant with the most waiters in one queue and returns its newest one
// of its lowest band, if it has more than w's tenant in w's queue has with w: no tenant
// fills the queue for all.
func (o *FairOrder) makeRoom(w *Waiter) *Waiter {
	type owner struct{ queue, tenant string }
	mine, most, count := owner{w.Queue, w.Tenant}, owner{}, map[owner]int{}
	for _, q := range o.queues {
		for _, other := range q.waiters {
			count[owner{other.Queue, other.Tenant}]++
		}
	}
	n := 0
	for who, k := range count {
		if k > n || k == n && (who.queue < most.queue || who.queue == most.queue && who.tenant < most.tenant) {
			most, n = who, k
		}
	}
	if n == 0 || most == mine || n <= count[mine]+1 {
		return nil
	}
	var last *Waiter
	for _, other := range o.queues[most.queue].waiters {
		if other.Tenant == most.tenant && !other.trying && (last == nil || other.Band >= last.Band) {
			last = other
		}
	}
	return last
}

// Next is the waiter that tries next; nil for none, until something changes.
func (o *FairOrder) Next() *Waiter {
	var next *Waiter
	for _, q := range o.queues {
		var first *Waiter
		for _, w := range q.waiters {
			if first != nil && (w.Band > first.Band || w.Band == first.Band && w.begin >= first.begin) {
				continue
			}
			if _, nothing := o.none[w.needs]; w.needs == "" || !nothing {
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
func (o *FairOrder) Failed(w *Waiter, needs string, change uint64) {
	w.needs = w.Queue + "\x00" + needs
	if change == o.change {
		if o.none == nil {
			o.none = map[string]struct{}{}
		}
		o.none[w.needs] = struct{}{}
	}
}

// Admit takes a waiter out that has got its slot.
func (o *FairOrder) Admit(w *Waiter, now time.Time) {
	q := o.queues[w.Queue]
	q.took[q.tookAt%len(q.took)] = now
	q.tookAt++
	q.clock = max(q.clock, w.begin)
	o.out(q, w)
}

// Remove takes a waiter out that gives up or is turned away: it was given nothing.
func (o *FairOrder) Remove(w *Waiter) {
	if !w.in {
		return
	}
	q := o.queues[w.Queue]
	if q.given[w.Tenant] == w.begin+w.share() { // no other of its tenant came after it
		q.given[w.Tenant] = w.begin
	}
	o.out(q, w)
}

func (o *FairOrder) out(q *modelQueue, w *Waiter) {
	w.in = false
	q.waiters = slices.DeleteFunc(q.waiters, func(other *Waiter) bool { return other == w })
	o.n--
	if len(q.waiters) == 0 { // all begin alike
		q.waiters, q.clock = nil, 0
		clear(q.given)
	}
}

// lookBack is how far back slots that were got count for how fast a queue goes.
const lookBack = 30 * time.Second

// EstimateWait is how long a request of a band that came to a queue now would wait, by the rate
// at which waiters recently got their slots; false where that is not known.
func (o *FairOrder) EstimateWait(name string, band Band, now time.Time) (time.Duration, bool) {
	q := o.queues[name]
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
	// Wait is what FairOrder.EstimateWait returns; -1 where it is not known.
	Wait time.Duration
}

// States are the queues in which requests wait, by name.
func (o *FairOrder) States(now time.Time) (list []QueueState) {
	for name, q := range o.queues {
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
		if d, known := o.EstimateWait(name, Low, now); known {
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
