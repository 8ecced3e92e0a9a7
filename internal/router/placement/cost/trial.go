package cost

import (
	"math"
	"slices"
	"time"
)

// prices are those of a stall that are tried, as multiples of what the objective says.
var prices = [...]float64{3, 1, 0.3, 0.1, 0.03, 0.01}

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
	hurry, half = 0.2, 0.5
	// Of each price newer trials count more: goodNew and ttftNew are the newest one's
	// share of the mean.
	goodNew, ttftNew = 0.6, 0.3
	// departs is what a factor of three counts that a price is off from the usual one,
	// stays what a change of the price does.
	departs, stays = 0.01, 0.04
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

// sample is a part of a fleet that is like the whole.
func (f *Fleet) sample() *Fleet {
	each := min(len(f.Decode)/sampled, len(f.Prefill))
	if each < 2 {
		return f
	}
	part := &Fleet{}
	for i := 0; i < len(f.Decode); i += each {
		part.Decode = append(part.Decode, f.Decode[i])
	}
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

// Trial is what was found of a price: the share of the requests that keep the limits, and
// the 95th percentile of their time to first token in ms.
type Trial struct{ Price, Good, TTFT float64 }

// pricing is how the price of a stall is chosen.
type pricing struct {
	price, usual float64 // 0 before there was a fleet
	trials       [len(prices)]Trial
	// good and ttft are of each price the means of the logarithms; there are none before
	// the first trial.
	good, ttft [len(prices)]float64
	tried      bool
}

// choose takes the best price by a trial's results.
func (p *pricing) choose(trials *[len(prices)]Trial, o *Objective) {
	most := 0.0
	for i := range trials {
		most = max(most, trials[i].Good)
	}
	limit := float64(o.TTFT) / float64(time.Millisecond)
	best, top := 0, math.Inf(-1)
	for i := range trials {
		r := &trials[i]
		good, ttft := math.Log(max(r.Good, leastGood)), math.Log(max(min(r.TTFT, limit), shortest))
		if !p.tried {
			p.good[i], p.ttft[i] = good, ttft
		}
		p.good[i] += goodNew * (good - p.good[i])
		p.ttft[i] += ttftNew * (ttft - p.ttft[i])
		score := p.good[i] - hurry*min(1, most/half)*p.ttft[i] - departs*math.Abs(math.Log(r.Price/p.usual))/math.Log(3)
		if r.Price != p.price {
			score -= stays
		}
		if score > top {
			best, top = i, score
		}
	}
	p.trials, p.tried, p.price = *trials, true, trials[best].Price
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
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.part != nil {
		if _, in := slices.BinarySearch(l.part, q.Local.Slot); !in {
			return
		}
	}
	l.history.add(asked{request: *q, at: now, remote: remote})
}

// Renew publishes a revision of what was learned since the last one, with the price of a
// stall that is best for the latest requests if they came again to the fleet as it is now.
// It is meant to be called once a second, by one goroutine; while nobody calls it, revisions
// come with outcomes and keep the price.
func (l *Learner) Renew(fleet *Fleet, now time.Duration) Change {
	if len(fleet.Decode) == 0 || len(fleet.Prefill) == 0 {
		return NoChange
	}
	f := fleet.sample()
	l.mu.Lock()
	l.renewed = now + 2*every
	l.part = nil
	if f != fleet {
		for i := range f.Decode {
			l.part = append(l.part, f.Decode[i].Slot)
		}
	}
	p := &l.pricing
	if p.usual = fleet.usual(); !p.tried {
		p.price = p.usual
	}
	m := l.draft(now, every-slack)
	if m == nil {
		l.mu.Unlock()
		return NoChange
	}
	o, t := l.objective, &l.tries
	tries := o.For == ForGoodput && t.prepare(l, m, f, now)
	l.mu.Unlock()

	if tries { // nobody waits for that
		var found [len(prices)]Trial
		for i, price := range prices {
			found[i] = t.run(price)
		}
		l.mu.Lock()
		l.pricing.choose(&found, &o)
	} else {
		l.mu.Lock()
	}
	defer l.mu.Unlock()
	return l.put(m)
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
