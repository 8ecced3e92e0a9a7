// Package cost is what the two paths of a request would cost, in time. A Model has
// a model for each leg, which a Learner fits to the outcomes of earlier requests; it
// never changes, has a number, and is an input of a decision. Model.Of is pure: the
// same model and work give the same costs, to the last bit and on every processor,
// so that recorded decisions can be made again.
package cost

import (
	"cmp"
	"slices"
)

// Terms of a leg's model. Figures are scaled so that coefficients are of one size: tokens in
// thousands.
const (
	termOne = iota
	// termCompute is the tokens to compute, termAttention those times what stands
	// before them on average.
	termCompute
	termAttention
	// termQueued is the tokens that wait on the rank for their first token, of
	// other requests.
	termQueued
	// termRunning is the requests on the rank.
	termRunning
	terms
)

// LegModel is a time in milliseconds as a sum of terms: of how long a rank of one kind
// takes to the first token of a prompt, or to take over the KV of one.
type LegModel [terms]float64

// Work is what one leg of a request asks of its rank, and what stands before it.
type Work struct {
	// Tokens are computed, or taken over from another rank. Context is the length
	// of the prompt, or 0 where nothing is computed.
	Tokens, Context int
	// Queued is the prompt tokens of others that wait on the rank for their first
	// token, Running its requests.
	Queued, Running int
	// Times is how many times as long as its peers the rank takes (Model.Times); 0 is as
	// long.
	Times float64
}

// times is Times of a rank of which nothing is said, too.
func (w *Work) times() float64 {
	if w.Times > 0 {
		return w.Times
	}
	return 1
}

// values are the terms' values for w.
func (w *Work) values() [terms]float64 {
	n := float64(w.Tokens) / 1000
	attention := 0.0
	if w.Context > 0 {
		before := float64(w.Context)/1000 - n/2
		attention = float64(n*before) / 100
	}
	return [terms]float64{
		termOne: 1, termCompute: n, termAttention: attention,
		termQueued: float64(w.Queued) / 1000, termRunning: float64(w.Running),
	}
}

// Time is the model's time for w in ms.
func (l *LegModel) Time(w *Work) float64 {
	v := w.values()
	sum := 0.0
	for i := range v {
		sum += float64(l[i] * v[i])
	}
	return float64(max(sum, 0) * w.times())
}

// compute is the part of the time that w's own tokens take, in ms: for so long the
// rank does nothing else.
func (l *LegModel) compute(w *Work) float64 {
	v := w.values()
	own := max(float64(l[termCompute]*v[termCompute])+float64(l[termAttention]*v[termAttention]), 0)
	return float64(own * w.times())
}

// Paths is the work of both paths of a request.
type Paths struct {
	// Local is that of the decode rank when it computes the prompt, Prefill that of
	// the prefill rank, Transfer that of the decode rank when it gets the KV. The last
	// has no Times: a rank is called slow for what it computes, and KV is not computed.
	Local, Prefill, Transfer Work
}

// Model is a revision of the cost model. It never changes.
type Model struct {
	// Revision numbers the models of a router, from 1 on.
	Revision uint64
	// Local, Prefill and Transfer are the models of the legs.
	Local, Prefill, Transfer LegModel
	// Stall is what a millisecond costs for which a local prefill keeps one running
	// answer waiting, in milliseconds of time to first token. It follows from the
	// objective.
	Stall float64
	// A millisecond of time to first token beyond Limit (in ms, 0 for none) costs
	// Beyond: who is late is late.
	Limit, Beyond float64
	// Lost is what it costs, in ms of time to first token, that a request is late. An
	// expected time is no certain one: the cost grows from 0 to all of it between
	// doubtful of Limit before it and as much behind it.
	Lost float64
	// Slow are the ranks that take longer than their peers, by slot in rising order.
	Slow []Slow
}

// Slow is a rank that takes longer than its peers: the models' times are its own as often as
// Times says.
type Slow struct {
	Slot  uint32
	Times float64
}

// Times is how many times as long as its peers a rank takes, 1 for one of which nothing is
// said.
func (m *Model) Times(slot uint32) float64 {
	if i, ok := slices.BinarySearchFunc(m.Slow, slot, bySlot); ok {
		return m.Slow[i].Times
	}
	return 1
}

func bySlot(s Slow, slot uint32) int { return cmp.Compare(s.Slot, slot) }

// ttftCost is what a time to first token costs.
func (m *Model) ttftCost(ms float64) float64 {
	if m.Limit <= 0 {
		return ms
	}
	share := (ms/m.Limit - (1 - doubtful)) / (2 * doubtful)
	late := float64(m.Lost * min(max(share, 0), 1))
	if ms > m.Limit {
		ms = m.Limit + float64(m.Beyond*(ms-m.Limit))
	}
	return ms + late
}

// steepest is what a ms costs at most at an expected time to first token that may be off by
// err ms.
func (m *Model) steepest(ms, err float64) float64 {
	if m.Lost <= 0 || m.Limit <= 0 || ms+err < (1-doubtful)*m.Limit || ms-err > (1+doubtful)*m.Limit {
		return 1
	}
	return 1 + m.Lost/(2*doubtful*m.Limit)
}

// doubtful is by what share of the limit an expected time to first token may be off.
const doubtful = 0.25

// Costs are those of both paths, in ms.
type Costs struct{ Local, Remote float64 }

// Of is what both paths of a request cost.
func (m *Model) Of(q *Paths) Costs {
	stalled := float64(m.Stall * float64(q.Local.Running))
	return Costs{
		Local:  m.ttftCost(m.Local.Time(&q.Local)) + float64(stalled*m.Local.compute(&q.Local)),
		Remote: m.ttftCost(m.Prefill.Time(&q.Prefill) + m.Transfer.Time(&q.Transfer)),
	}
}
