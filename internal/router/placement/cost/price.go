package cost

import "math"

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

// Price is what a request costs on one path, by term, in ms of one request's time. The first
// terms are its own time, the others the delay that it causes to others, by its weight.
type Price struct {
	// Wait is the time before its prompt is computed, Compute that of its uncached tokens,
	// Transfer that of moving their KV, Answer that of its tokens after the first.
	Wait, Compute, Transfer, Answer float64
	// Late is the expected loss because the request itself is late.
	Late float64
	// Stall is the answers there that pause while its prompt is computed, Behind the prompts
	// that will wait behind it, Slower the answers there whose steps take longer, Spoilt the
	// expected loss because they are late, Evict the prompts whose KV leaves the cache for it.
	Stall, Behind, Slower, Spoilt, Evict float64
}

// Sum is the whole price.
func (p *Price) Sum() float64 {
	return p.Wait + p.Compute + p.Transfer + p.Answer + p.Late + p.Stall + p.Behind + p.Slower + p.Spoilt + p.Evict
}

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
func (m *Model) Compare(r *Request, p *Paths) Costs {
	if !m.Timed() {
		return m.Of(p)
	}
	q := m.Quote(r)
	prefill, a := q.Prefill(&p.Prefill), q.answer(&p.Local)
	local, remote := q.local(&p.Local, &a), q.remote(&prefill, &p.Local, &a)
	return Costs{Local: local.Sum(), Remote: remote.Sum()}
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
	// before and after are how long a token takes there without it and with it.
	before, after float64
	// price has the terms that both paths share; early is the chance that answers there are
	// late without it.
	price Price
	early float64
}

// step is how long a token of an answer takes on a rank with a load, while no prompt is computed
// there.
func (m *Model) step(running, held, cached float64) float64 {
	return m.Step[stepOne] + float64(m.Step[stepRunning]*running) + float64(m.Step[stepHeld]*(held*0.001)) + float64(m.Step[stepCached]*(cached*0.001))
}

// evict is what it costs that tokens which were not cached take the place of others on a rank
// that computes by a model.
func (q *Quote) evict(l *LegModel, tokens int) float64 {
	return float64(q.weight * q.m.Constants.Keep * l[termCompute] * (float64(tokens) * 0.001))
}

// answer is what the answer costs on the rank of w, whose Tokens it does not have.
func (q *Quote) answer(w *Work) (a onRank) {
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
	a.price.Answer = float64(m.Answer * q.tokens * a.after)
	a.price.Slower = float64(q.weight * running * q.tokens * (a.after - a.before))
	a.price.Evict = q.evict(&m.Local, w.Tokens)
	if m.Loss > 0 {
		a.price.Late, a.early = float64(m.Loss*q.late(float64(a.after*q.gap))), q.late(float64(a.before*q.gap))
	}
	return a
}

// add adds the answer's terms to those up to its first token, where computing the prompt stalls
// the answers of its rank for so many ms.
func (q *Quote) add(p *Price, a *onRank, stall float64) {
	m := q.m
	p.Answer, p.Slower, p.Late = a.price.Answer, a.price.Slower, a.price.Late
	p.Evict += a.price.Evict
	if m.Loss > 0 {
		p.Late += float64(m.Loss * q.late(float64((p.Wait+p.Compute+p.Transfer)*q.limit)))
		// The others get so much slower for as much of their answers as this one lasts.
		slower := a.before + float64((a.after-a.before)*q.share) + float64(stall*q.each)
		p.Spoilt = float64(q.weight * a.running * m.Loss * (q.late(float64(slower*q.gap)) - a.early))
	}
}

// Prefill is what it costs that a prefill rank computes the prompt.
func (q *Quote) Prefill(w *Work) (p Price) {
	p.Wait, p.Compute = q.leg(&q.m.Prefill, w, w.times())
	p.Behind = float64(q.weight * q.m.Constants.Behind * float64(w.Running) * p.Compute)
	p.Evict = q.evict(&q.m.Prefill, w.Tokens)
	return p
}

// local is what it costs that the rank which answers computes the prompt, too.
func (q *Quote) local(w *Work, a *onRank) (p Price) {
	p.Wait, p.Compute = q.leg(&q.m.Local, w, a.times)
	p.Behind = float64(q.weight * q.m.Constants.Behind * float64(max(w.Running-int(w.Answering), 0)) * p.Compute)
	stall := 0.0
	if w.Tokens > 0 {
		stall = float64((q.m.Step[stepPrompt] + float64(q.m.Step[stepTokens]*(float64(w.Tokens)*0.001))) * a.times)
	}
	p.Stall = float64(q.weight * float64(w.Answering) * stall)
	q.add(&p, a, stall)
	return p
}

// remote is what it costs that a rank answers whose KV comes from a prefill rank; prefill is the
// price there. KV is not computed: it takes no longer to a slow rank.
func (q *Quote) remote(prefill *Price, w *Work, a *onRank) Price {
	p, l := *prefill, &q.m.Transfer
	p.Transfer = l[termOne] + float64(l[termCompute]*(float64(w.Tokens)*0.001)) + float64(l[termQueued]*(float64(w.Queued)*0.001)) + float64(l[termRunning]*float64(w.Running))
	q.add(&p, a, 0)
	return p
}

// Local is what it costs that the rank which answers computes the prompt, too.
func (q *Quote) Local(w *Work) Price {
	a := q.answer(w)
	return q.local(w, &a)
}

// Remote is what it costs that a rank answers whose KV comes from a prefill rank; prefill is the
// price there.
func (q *Quote) Remote(prefill *Price, w *Work) Price {
	a := q.answer(w)
	return q.remote(prefill, w, &a)
}

// Cheaper is the price of the path that costs less.
func (q *Quote) Cheaper(prefill *Price, w *Work) Price {
	a := q.answer(w)
	local, remote := q.local(w, &a), q.remote(prefill, w, &a)
	if q.m.RemoteCheaper(local.Sum(), remote.Sum()) {
		return remote
	}
	return local
}
