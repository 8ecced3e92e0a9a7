// Package cost is what the two paths of a request would cost, in time. A Model has
// a model for each leg, which a Learner fits to the outcomes of earlier requests; it
// never changes, has a number, and is an input of a decision. It is
// pure: the same model and work give the same costs, to the last bit and on every processor,
// so that recorded decisions can be made again.
package cost

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
	_ // of a StepModel only
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
	// Answering is how many of its requests have their first token. Held is the tokens of the
	// contexts that it decodes, HeldCached those that it had before, which requests may share.
	// They are for prices only.
	Answering, Held, HeldCached int32
	// Room is how many tokens its cache has room for; 0 is unknown. It is for prices only, too.
	Room int32
	// Found is how many tokens of the prompt the rank that has most of them holds. It is for what
	// is learned only.
	Found int32
	// Times is how many times as long as its peers the rank takes; 0 is as long.
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
	// the prefill rank, Transfer that of the decode rank when it gets the KV. A rank is called
	// slow for what it computes, and KV is not computed: a transfer does not take longer.
	Local, Prefill, Transfer Work
}

// Model is a revision of the cost model. It never changes.
type Model struct {
	// Revision numbers the models of a router, from 1 on.
	Revision uint64
	// Local, Prefill and Transfer are the models of the legs.
	Local, Prefill, Transfer LegModel
	// Stall is the cost of each millisecond that a local prefill delays one running
	// answer, in milliseconds of time to first token. It follows from the objective.
	Stall float64
	// A millisecond of time to first token beyond Limit (in ms, 0 for none) costs
	// Beyond: who is late is late.
	Limit, Beyond float64
	// Lost is what it costs, in ms of time to first token, that a request is late. An
	// expected time is no certain one: the cost grows from 0 to all of it between
	// doubtful of Limit before it and as much behind it.
	Lost float64
	Prices
}

// Prices are what a model has to price candidates by ([Price]). The zero value is of a router
// that did not, or that does not know enough for it: see [Model.Timed].
type Prices struct {
	// Step is how long a step of answers takes.
	Step StepModel
	// Others is what a ms of delay of another request costs, Answer what one of the own answer
	// does after its first token.
	Others, Answer float64
	// Loss is what a late request costs, in ms, and GapLimit the limit of the mean time between
	// tokens; without a Loss nothing is late.
	Loss, GapLimit float64
	// LateOnce counts a request that misses both limits once. Without it, as in recordings of before,
	// it counts twice.
	LateOnce bool
	// Rooms counts the wait for room in the cache of the rank that answers. Recordings of before have
	// models without it.
	Rooms bool
	// Length is the mean tokens of answers, Stalled by how many ms the computing of prompts
	// lengthens each of them on average.
	Length, Stalled float64
	// Fresh is the share of prompt tokens that no rank held. As many of those that leave a cache are
	// not needed again. 0 is unknown, and all are needed.
	Fresh float64
	// Error is by what share of itself a price may be off, as a standard error. Candidates that
	// are no further apart are equal.
	Error float64
	// NoRemote says that too little is known of transfers to compare paths.
	NoRemote bool
	// Lacks are the legs with few samples, or no new ones.
	Lacks     Legs
	Constants Constants
}

// Legs is a set of legs.
type Legs uint8

// Has reports whether a leg is in the set.
func (l Legs) Has(leg LegKind) bool { return l&(1<<leg) != 0 }

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

// doubtful is by what share of the limit an expected time to first token may be off.
const doubtful = 0.25

// Costs are those of both paths, in ms.
type Costs struct{ Local, Remote float64 }

// transfer is how long w takes to move, on whichever rank: KV is not computed.
func (m *Model) transfer(w *Work) float64 {
	moved := *w
	moved.Times = 0
	return m.Transfer.Time(&moved)
}

// Of is what both paths of a request cost, where prices are not known: their times to the
// first token, and what a local prefill stalls.
func (m *Model) Of(q *Paths) Costs {
	stalled := float64(m.Stall * float64(q.Local.Running))
	return Costs{
		Local:  m.ttftCost(m.Local.Time(&q.Local)) + float64(stalled*m.Local.compute(&q.Local)),
		Remote: m.ttftCost(m.Prefill.Time(&q.Prefill) + m.transfer(&q.Transfer)),
	}
}
