package replicas

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Publisher decides what a router publishes, and when. It is for one goroutine at a time.
type Publisher struct {
	self               Identity
	seq                uint64
	looked, sent, full time.Time
	asked              bool
	was, now           []Row // sorted, without idle ranks
	facts              func(full bool, f *Facts)
}

// NewPublisher returns the publisher of a router. The router's first message is a full
// state.
func NewPublisher(self Identity) *Publisher { return &Publisher{self: self, asked: true} }

// SetSettings changes the digest of the settings, at most [MaxText] bytes, from the next
// full state on.
func (p *Publisher) SetSettings(digest string) { p.self.Settings = digest }

// RequestFull has the next call of Publish return a full state, at most one each [Pace].
func (p *Publisher) RequestFull() { p.asked = true }

// Next is when Publish must be called at the latest.
func (p *Publisher) Next() time.Time {
	next := p.looked.Add(Pace)
	for _, t := range []time.Time{p.sent.Add(Heartbeat), p.full.Add(FullEvery)} {
		if t.Before(next) {
			next = t
		}
	}
	if t := p.full.Add(Pace); p.asked && t.Before(next) {
		next = t
	}
	return next
}

// Publish returns the messages that are due, which all other routers should get in this
// order. own has the load of the router's own requests, in any order; ranks that are not
// in it are idle. A call before [Publisher.Next] is allowed: it publishes a change earlier
// if [Pace] permits it.
func (p *Publisher) Publish(now time.Time, own []Row) [][]byte {
	full := now.Sub(p.full) >= FullEvery || p.asked && now.Sub(p.full) >= Pace
	if !full && now.Sub(p.sent) < Pace {
		return nil
	}
	p.looked = now
	p.take(own)
	var list []Row
	switch {
	case full:
		list = p.now
		p.full, p.asked = now, false
	default:
		if list = p.changes(); len(list) == 0 && now.Sub(p.sent) < Heartbeat {
			return nil
		}
	}
	p.sent = now
	out := p.split(list, full)
	p.was, p.now = p.now, p.was
	return out
}

// take keeps the busy ranks of own in p.now, sorted. Rows of one rank are added up, as two
// workers may have one URL.
func (p *Publisher) take(own []Row) {
	p.now = p.now[:0]
	for _, r := range own {
		if r.limit(); r.Load != (Load{}) {
			p.now = append(p.now, r)
		}
	}
	slices.SortFunc(p.now, func(a, b Row) int { return cmp.Compare(a.Rank, b.Rank) })
	kept := p.now[:0]
	for _, r := range p.now {
		if n := len(kept); n > 0 && kept[n-1].Rank == r.Rank {
			kept[n-1].add(&r.Load)
			kept[n-1].limit()
		} else {
			kept = append(kept, r)
		}
	}
	p.now = kept
}

// changes are the rows that differ from what was published last; a rank that became idle
// is among them with no load.
func (p *Publisher) changes() (out []Row) {
	was := p.was
	for _, r := range p.now {
		for len(was) > 0 && was[0].Rank < r.Rank {
			out = append(out, Row{Rank: was[0].Rank})
			was = was[1:]
		}
		if len(was) > 0 && was[0].Rank == r.Rank {
			if was[0] != r {
				out = append(out, r)
			}
			was = was[1:]
		} else {
			out = append(out, r)
		}
	}
	for _, r := range was {
		out = append(out, Row{Rank: r.Rank})
	}
	return out
}

// split encodes rows, in as many messages as they need, and in one if there are no rows.
// The messages of a full state cover all ranks together.
func (p *Publisher) split(rows []Row, full bool) (out [][]byte) {
	from := Rank(0)
	for {
		p.seq++
		m := Message{Identity: p.self, Seq: p.seq, Rows: rows[:min(len(rows), MaxRows)]}
		rows = rows[len(m.Rows):]
		if full {
			m.Full, m.From, m.To = true, from, math.MaxUint64
			if len(rows) > 0 {
				m.To = rows[0].Rank - 1
				from = rows[0].Rank
			}
		} else {
			m.Version, m.Settings = "", ""
		}
		if p.facts != nil && len(out) == 0 {
			p.facts(full, &m.Facts)
		}
		out = append(out, m.Append(nil))
		if len(rows) == 0 {
			return out
		}
	}
}

// leave returns the last message: a full state without load.
func (p *Publisher) leave() []byte {
	p.seq++
	m := Message{Identity: p.self, Seq: p.seq, Full: true, To: math.MaxUint64, Facts: Facts{Gone: true}}
	return m.Append(nil)
}
