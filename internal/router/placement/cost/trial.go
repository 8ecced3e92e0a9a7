package cost

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
	"time"
)

// Weights are multiples of what the objective says: of what a stall costs, its price, and of
// the limit to the first token. With a shorter limit fewer prompts wait for each other.
type Weights struct{ Price, Limit float64 }

// prices and limits are tried, each price with each limit.
var (
	prices = [...]float64{3, 1, 0.3, 0.1, 0.03, 0.01}
	limits = [...]float64{1, 0.1}
)

// choices is how many weights are tried.
const choices = len(prices) * len(limits)

// choice is the weights of an index.
func choice(i int) Weights { return Weights{prices[i%len(prices)], limits[i/len(prices)]} }

// What is kept for trials.
const (
	// historyKept is of how many requests what they asked is kept, lengthsKept of how many
	// answers their length.
	historyKept, lengthsKept = 1000, 256
	// sampled is how many ranks that answer a trial has at most, where there are as many
	// prefill ranks for each as in the fleet.
	sampled = 32
)

// What of a trial's results counts, in logarithms: what is lost of good requests, and of the
// p95 TTFT. They were chosen by the table of docs/policies.md.
const (
	// leastGood is the least share of good requests that is told from none, shortest the
	// shortest p95 TTFT in ms.
	leastGood, shortest = 0.05, 20
	// hurry is what the p95 TTFT counts beside the share of good requests. Where no price
	// has half of the requests good it counts less.
	hurry, half = 0.3, 0.5
	// Of each price newer trials count more: goodNew and ttftNew are the newest one's
	// share of the mean.
	goodNew, ttftNew = 0.6, 0.3
	// departs is what a factor of three counts that a price is off from the usual one, and
	// departsLimit the same of a limit and the objective's. stays is what a change of the
	// price counts, staysLimit one of the limit alone.
	departs, departsLimit = 0.01, 0.002
	stays, staysLimit     = 0.04, 0.005
	// leap is by how much a price must be better that is not next to the one in force.
	leap = 0.25
)

// Fleet is what the ranks that serve a model have in work.
type Fleet struct {
	// Decode are the ranks that answer, by slot in rising order.
	Decode []DecodeLoad
	// Prefill are the prompt tokens that wait on each of the ranks that compute prompts for
	// others.
	Prefill []int
}

// DecodeLoad is what a rank that answers has in work.
type DecodeLoad struct {
	Slot uint32
	Load
}

// sample is a part of a fleet that is like the whole. A rank that joins or leaves changes
// little of it.
func (f *Fleet) sample() *Fleet {
	each := min(len(f.Decode)/sampled, len(f.Prefill))
	if each < 2 {
		return f
	}
	part := &Fleet{Decode: slices.Clone(f.Decode)}
	// By a number that is as good as drawn, always the same for a slot.
	drawn := func(d *DecodeLoad) uint32 { return bits.Reverse32(d.Slot * 0x9e3779b1) }
	slices.SortFunc(part.Decode, func(a, b DecodeLoad) int { return cmp.Compare(drawn(&a), drawn(&b)) })
	part.Decode = part.Decode[:len(f.Decode)/each]
	slices.SortFunc(part.Decode, func(a, b DecodeLoad) int { return cmp.Compare(a.Slot, b.Slot) })
	for i := each / 2; i < len(f.Prefill); i += each {
		part.Prefill = append(part.Prefill, f.Prefill[i])
	}
	return part
}

// usual is the price to begin with. The more ranks answer for each prefill rank, the more
// requests wait behind a prompt that is sent there.
func (f *Fleet) usual() float64 {
	off := func(p float64) float64 {
		return math.Abs(math.Log(p * float64(len(f.Decode)) / float64(len(f.Prefill))))
	}
	best := prices[0]
	for _, p := range prices {
		if off(p) < off(best) {
			best = p
		}
	}
	return best
}

// Trial is what was found of weights: the share of the requests that keep the limits, and
// the 95th percentile of their time to first token in ms.
type Trial struct {
	Weights
	Good, TTFT float64
}

// weighing is how the weights are chosen.
type weighing struct {
	Weights         // in force; 0 before there was a fleet
	usual   float64 // price
	trials  [choices]Trial
	// good and ttft are of each choice the means of the logarithms; there are none before
	// the first trial.
	good, ttft [choices]float64
	tried      bool
}

// begin sets the usual price of a fleet, which is in force until something is tried.
func (w *weighing) begin(f *Fleet) {
	if w.usual = f.usual(); !w.tried {
		w.Weights = Weights{w.usual, 1}
	}
}

// choose takes the best weights by a trial's results. The price changes to the next one at
// most, since a trial knows least of one that is far from what is now, and arrivals that end
// look like ones that go on. Only where a price beyond is better by leap is it approached
// over one that is worse.
func (w *weighing) choose(trials *[choices]Trial, o *Objective) {
	most := 0.0
	for i := range trials {
		if t := &trials[i]; !(t.Good >= 0 && t.TTFT >= 0 && t.TTFT < math.Inf(1)) {
			return // by laws with which nothing can be said
		}
		most = max(most, trials[i].Good)
	}
	limit := float64(o.TTFT) / float64(time.Millisecond)
	now := slices.Index(prices[:], w.Price)
	best, top, beyond, topBeyond, toward := 0, math.Inf(-1), 0, math.Inf(-1), 0
	for i := range trials {
		t := &trials[i]
		good, ttft := math.Log(max(t.Good, leastGood)), math.Log(max(min(t.TTFT, limit), shortest))
		if !w.tried {
			w.good[i], w.ttft[i] = good, ttft
		}
		w.good[i] += goodNew * (good - w.good[i])
		w.ttft[i] += ttftNew * (ttft - w.ttft[i])
		score := w.good[i] - hurry*min(1, most/half)*w.ttft[i] -
			(departs*math.Abs(math.Log(t.Price/w.usual))+departsLimit*math.Abs(math.Log(t.Limit)))/math.Log(3)
		switch {
		case t.Price != w.Price:
			score -= stays
		case t.Limit != w.Limit:
			score -= staysLimit
		}
		off := i%len(prices) - now
		switch near := now < 0 || -1 <= off && off <= 1; {
		case near && score > top:
			best, top = i, score
		case !near && score > topBeyond:
			beyond, topBeyond, toward = i, score, off
		}
	}
	if topBeyond > top+leap {
		best = beyond - toward + cmp.Compare(toward, 0)
	}
	w.trials, w.tried, w.Weights = *trials, true, trials[best].Weights
}

// asked is a request on its way, as it was decided on.
type asked struct {
	request Request
	at      time.Duration
	remote  bool
}

// Chose learns that a request was sent on a path where both could be had.
func (l *Learner) Chose(q *Request, remote bool, now time.Duration) {
	if q.Local.Context <= 0 {
		return
	}
	one := asked{request: *q, at: now, remote: remote}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heard(now)
	if l.tried(&one) {
		l.history.add(one)
	}
}

// Renew publishes a revision of what was learned since the last one, with the weights that
// are best for the latest requests if they came again to the fleet as it is now. It is meant
// to be called once a second, by one goroutine; while nobody calls it, revisions come with
// outcomes and keep the weights.
func (l *Learner) Renew(fleet *Fleet, now time.Duration) Change {
	f := fleet.sample()
	l.mu.Lock()
	if len(fleet.Decode) == 0 || len(fleet.Prefill) == 0 {
		defer l.mu.Unlock()
		// There is nothing to try while only one path can be had, but which ranks are slow
		// counts there, too, and no outcomes may come that would publish it.
		return l.put(l.draft(now, every-slack))
	}
	l.renewed = now + 2*every
	l.triesOn(f, f != fleet)
	l.weighing.begin(fleet)
	m := l.draft(now, every-slack)
	if m == nil {
		l.mu.Unlock()
		return NoChange
	}
	o, t := l.objective, &l.tries
	tries := o.For == ForGoodput && l.doubt == 0 && t.prepare(l, m, f, now)
	l.mu.Unlock()

	var found [choices]Trial
	if tries { // nobody waits for that
		for i := range found {
			found[i] = t.run(choice(i))
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.objective != o:
		m = l.draft(now, 0) // the other one is for what was aimed at before
	case tries:
		l.weighing.choose(&found, &o)
	}
	return l.put(m)
}

// Expect has the price of a stall begin with the usual one of a fleet. Without it that is so
// from the first Renew on.
func (l *Learner) Expect(fleet *Fleet) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(fleet.Decode) > 0 && len(fleet.Prefill) > 0 {
		l.weighing.begin(fleet)
	}
}

// triesOn sets on which ranks the latest requests arrive again: on some of the fleet's, or on
// all. The caller holds mu.
func (l *Learner) triesOn(f *Fleet, some bool) {
	if !some {
		l.part = nil
		return
	}
	part := make([]uint32, len(f.Decode))
	for i := range f.Decode {
		part[i] = f.Decode[i].Slot
	}
	if slices.Equal(part, l.part) {
		return
	}
	l.part = part
	kept := ring[asked]{most: historyKept}
	for i := range l.history.all {
		if q := l.history.at(i); l.tried(q) {
			kept.add(*q)
		}
	}
	l.history = kept
}

// tried reports whether a request went to a rank that trials have. The caller holds mu.
func (l *Learner) tried(q *asked) bool {
	_, in := slices.BinarySearch(l.part, q.request.Local.Slot)
	return in || l.part == nil
}

// ring keeps the newest of what is added, so many as most says.
type ring[T any] struct {
	all  []T
	next int
	most int
}

func (r *ring[T]) add(v T) {
	if len(r.all) < r.most {
		r.all = append(r.all, v)
		return
	}
	r.all[r.next] = v
	r.next = (r.next + 1) % r.most
}

// at is the i-th oldest.
func (r *ring[T]) at(i int) *T { return &r.all[(r.next+i)%len(r.all)] }
