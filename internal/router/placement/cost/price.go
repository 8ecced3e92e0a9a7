package cost

import (
	"math"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// The terms of a StepModel.
const (
	stepOne     = iota // a step
	stepRunning        // each answer that runs
	stepHeld           // each thousand tokens of the answers' contexts
	stepCached         // each thousand of those that were cached there before
	stepTokens         // each thousand tokens of prompts that are computed in the step
	stepPrompt         // each prompt that is computed in the step
)

// StepModel is how long a step takes that makes one token of every answer on a rank, in ms.
type StepModel [terms]float64

// Timed reports whether prices are known: how long prompts take and steps of answers.
func (m *Model) Timed() bool { return m != nil && m.Step != StepModel{} }

// Compares reports whether enough is known to compare the two paths.
func (m *Model) Compares() bool { return m != nil && !m.NoRemote }

// Equal is up to which price candidates count as equal, where the best of them has this one.
func (m *Model) Equal(best float64) float64 { return best + float64(best*m.Error) }

// RemoteCheaper reports whether the remote path costs less than the local one, and by more than
// prices are not sure of.
func (m *Model) RemoteCheaper(local, remote float64) bool { return m.Equal(remote) < local }

// Compare is what both paths of a request cost, by prices where they are known.
func (m *Model) Compare(r *Request, p *Paths) (c Costs) {
	if !m.Timed() {
		return m.Of(p)
	}
	q := m.Quote(r)
	var prefill, t decision.Times
	var a onRank
	q.Prefill(&p.Prefill, &prefill)
	q.answer(&p.Local, &a)
	c.Local = q.local(&p.Local, &a, &t)
	c.Remote = q.remote(&prefill, &p.Local, &a, &t)
	return c
}

// Request is what prices depend on beside the rank.
type Request struct {
	// ISL is the tokens of the prompt, Output those of each answer, 0 for unknown.
	ISL, Output int
	// Others is what the weight of delays of others is multiplied by.
	Others float64
	// Usual is the load of a rank that answers, on average over those that the request could
	// go to; the zero value is unknown.
	Usual Load
}

// Load is what a rank that answers has to do: its requests, and the tokens of their contexts as
// in Work.
type Load struct{ Running, Held, HeldCached float64 }

// Quote makes the prices of one request: it holds what of them does not depend on the rank.
type Quote struct {
	m                         *Model
	isl, tokens, usual        float64 // usual is 0 where the usual load is not known
	load                      Load    // the usual one's part in what is expected
	weight, share             float64 // of others; of their answers that this one lasts
	limit, gap, scatter, each float64 // 1 by the limits, by Scatter and by Length
	// keep is what it costs of others that a token takes another one's place, in times to compute it.
	keep float64
}

// Quote makes the quote of a request.
func (m *Model) Quote(r *Request) Quote {
	q := Quote{m: m, isl: float64(r.ISL), tokens: float64(r.Output), weight: m.Others * r.Others, each: 1 / m.Length}
	if r.Output <= 0 {
		q.tokens = m.Length
	}
	q.share = min(q.tokens*q.each, 1)
	if r.Usual != (Load{}) {
		q.usual = 1 - m.Constants.Stays
		q.load = Load{float64(q.usual * r.Usual.Running), float64(q.usual * r.Usual.Held), float64(q.usual * r.Usual.HeldCached)}
	}
	q.keep = float64(q.weight*m.Constants.Keep) * (1 - m.Fresh)
	if m.Loss > 0 {
		q.limit, q.gap, q.scatter = 1/m.Limit, 1/m.GapLimit, 1/m.Constants.Scatter
	}
	return q
}

// late is the chance that something is late which is expected to take a share of its limit. It
// is a ratio, not an exponential: it is the same on every processor, and however late answers
// are already, fewer of them are less late.
func (q *Quote) late(share float64) float64 {
	z := (share - 1) * q.scatter
	return 0.5 + float64(0.5*(z/(1+math.Abs(z))))
}

// leg is how long w takes by a leg's model until its prompt is computed, and to compute it.
func (q *Quote) leg(l *LegModel, w *Work, times float64) (wait, compute float64) {
	n := float64(w.Tokens) * 0.001
	attention := float64(n*(float64(q.isl*0.001)-float64(n*0.5))) * 0.01
	compute = float64((float64(l[termCompute]*n) + float64(l[termAttention]*attention)) * times)
	wait = float64((l[termOne] + float64(l[termQueued]*(float64(w.Queued)*0.001)) + float64(l[termRunning]*float64(w.Running))) * times)
	return wait, compute
}

// onRank is what a request's answer costs on a rank.
type onRank struct {
	running, times float64
	// room is how long the request waits there for room in its cache.
	room float64
	// before and after are how long a token takes there without it and with it.
	before, after float64
	// answer, slower and evict are terms of both paths. late is the chance that answers there are
	// late with it, early without it.
	answer, slower, evict, late, early float64
}

// step is how long a token of an answer takes on a rank with a load, while no prompt is computed
// there.
func (m *Model) step(running, held, cached float64) float64 {
	return m.Step[stepOne] + float64(m.Step[stepRunning]*running) + float64(m.Step[stepHeld]*(held*0.001)) + float64(m.Step[stepCached]*(cached*0.001))
}

// evict is what it costs that tokens which were not cached take the place of others on a rank
// that computes by a model.
func (q *Quote) evict(l *LegModel, tokens int) float64 {
	return float64(q.keep * l[termCompute] * (float64(tokens) * 0.001))
}

// answer writes what the answer costs on the rank of w, whose Tokens it does not have.
func (q *Quote) answer(w *Work, a *onRank) {
	m := q.m
	a.times = w.times()
	running, held, cached := float64(w.Running), float64(w.Held), float64(w.HeldCached)
	if q.usual > 0 {
		// Requests that come go where there is less to do: a rank's load does not stay as far
		// from the usual one as it is.
		stays := m.Constants.Stays
		running, held, cached = q.load.Running+float64(stays*running), q.load.Held+float64(stays*held), q.load.HeldCached+float64(stays*cached)
	}
	n := float64(w.Tokens)
	a.running = running
	a.before = float64(m.step(running, held, cached)*a.times) + m.Stalled
	a.after = float64(m.step(running+1, held+n+float64(q.tokens*0.5), cached+q.isl-n)*a.times) + m.Stalled
	a.room = 0
	if over := int(w.Held) + w.Tokens - int(w.Room); over > 0 && w.Room > 0 && m.Rooms {
		// A full cache has room for as much again once its answers have ended, which takes as long
		// as a mean one.
		a.room = float64(float64(over) / float64(w.Room) * float64(m.Length*a.before))
	}
	a.answer = float64(m.Answer * q.tokens * a.after)
	a.slower = float64(q.weight * running * q.tokens * (a.after - a.before))
	a.evict = q.evict(&m.Local, w.Tokens)
	if m.Loss > 0 {
		a.late, a.early = q.late(float64(a.after*q.gap)), q.late(float64(a.before*q.gap))
	}
}

// add adds the answer's terms to those up to its first token, where computing the prompt stalls
// the answers of its rank for so many ms, and returns the sum.
func (q *Quote) add(t *decision.Times, a *onRank, stall float64) float64 {
	m := q.m
	t.Wait += a.room
	t.Answer, t.Slower = a.answer, a.slower
	t.Evict += a.evict
	if m.Loss > 0 {
		first, answer := q.late(float64((t.Wait+t.Compute+t.Transfer)*q.limit)), a.late
		if m.LateOnce {
			answer = float64((1 - first) * answer)
		}
		t.Late = float64(m.Loss*first) + float64(m.Loss*answer)
		// The others get so much slower for as much of their answers as this one lasts.
		slower := a.before + float64((a.after-a.before)*q.share) + float64(stall*q.each)
		t.Spoil = float64(q.weight * a.running * m.Loss * (q.late(float64(slower*q.gap)) - a.early))
	}
	return t.Sum()
}

// Prefill writes what it costs that a prefill rank computes the prompt, and returns the sum.
func (q *Quote) Prefill(w *Work, t *decision.Times) float64 {
	*t = decision.Times{}
	t.Wait, t.Compute = q.leg(&q.m.Prefill, w, w.times())
	t.Behind = float64(q.weight * q.m.Constants.Behind * float64(w.Running) * t.Compute)
	t.Evict = q.evict(&q.m.Prefill, w.Tokens)
	return t.Wait + t.Compute + t.Behind + t.Evict // as Sum, whose other terms are 0 here
}

// local is Local for an answer.
func (q *Quote) local(w *Work, a *onRank, t *decision.Times) float64 {
	*t = decision.Times{}
	t.Wait, t.Compute = q.leg(&q.m.Local, w, a.times)
	t.Behind = float64(q.weight * q.m.Constants.Behind * float64(max(w.Running-int(w.Answering), 0)) * t.Compute)
	stall := 0.0
	if w.Tokens > 0 {
		stall = float64((q.m.Step[stepPrompt] + float64(q.m.Step[stepTokens]*(float64(w.Tokens)*0.001))) * a.times)
	}
	t.Pause = float64(q.weight * float64(w.Answering) * stall)
	return q.add(t, a, stall)
}

// remote is Remote for an answer. KV is not computed: it takes no longer to a slow rank.
func (q *Quote) remote(prefill *decision.Times, w *Work, a *onRank, t *decision.Times) float64 {
	*t = *prefill
	l := &q.m.Transfer
	t.Transfer = l[termOne] + float64(l[termCompute]*(float64(w.Tokens)*0.001)) + float64(l[termQueued]*(float64(w.Queued)*0.001)) + float64(l[termRunning]*float64(w.Running))
	return q.add(t, a, 0)
}

// Local writes what it costs that the rank which answers computes the prompt, too, and returns
// the sum.
func (q *Quote) Local(w *Work, t *decision.Times) float64 {
	var a onRank
	q.answer(w, &a)
	return q.local(w, &a, t)
}

// Remote writes what it costs that a rank answers whose KV comes from a prefill rank, and returns
// the sum; prefill is the cost there.
func (q *Quote) Remote(prefill *decision.Times, w *Work, t *decision.Times) float64 {
	var a onRank
	q.answer(w, &a)
	return q.remote(prefill, w, &a, t)
}

// Cheaper writes the cost of the path that costs less, and returns the sum.
func (q *Quote) Cheaper(prefill *decision.Times, w *Work, t *decision.Times) float64 {
	var a onRank
	var there decision.Times
	q.answer(w, &a)
	local, remote := q.local(w, &a, t), q.remote(prefill, w, &a, &there)
	if q.m.RemoteCheaper(local, remote) {
		*t = there
		return remote
	}
	return local
}
