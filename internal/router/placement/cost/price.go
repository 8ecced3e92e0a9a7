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

// first is the time to the first token.
func (p *Price) first() float64 { return p.Wait + p.Compute + p.Transfer }

// Timed reports whether prices are known: how long prompts take and steps of answers.
func (m *Model) Timed() bool { return m != nil && m.Step != StepModel{} }

// Compares reports whether enough is known to compare the two paths.
func (m *Model) Compares() bool { return m != nil && !m.NoRemote }

// Equal is up to which price candidates count as equal, where the best of them has this one.
func (m *Model) Equal(best float64) float64 { return best + float64(best*m.Error) }

// RemoteCheaper reports whether the remote path costs less than the local one, and by more than
// prices are not sure of.
func (m *Model) RemoteCheaper(local, remote float64) bool { return m.Equal(remote) < local }

// step is how long a token of an answer takes on a rank with a load, while no prompt is computed
// there.
func (m *Model) step(l *Load) float64 {
	return m.Step[stepOne] + float64(m.Step[stepRunning]*l.Running) + float64(m.Step[stepHeld]*(l.Held/1000)) + float64(m.Step[stepCached]*(l.HeldCached/1000))
}

// late is the chance that something is late which is expected to take this share of its limit.
// It is a ratio, not an exponential: it is the same on every processor, and however late
// answers are already, fewer of them are less late.
func (m *Model) late(share float64) float64 {
	z := (share - 1) / m.Constants.Scatter
	return 0.5 + float64(0.5*(z/(1+math.Abs(z))))
}

// Compare is what both paths of a request cost, by prices where they are known.
func (m *Model) Compare(q *Request, p *Paths) Costs {
	if !m.Timed() {
		return m.Of(p)
	}
	local, prefill := m.LocalPrice(q, &p.Local), m.PrefillPrice(q, &p.Prefill)
	remote := m.RemotePrice(q, &prefill, &p.Transfer)
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

// expect is the load of w while the request's answer runs. Requests that come go where there is
// less to do, so that a rank's load does not stay as far from the usual one as it is.
func (m *Model) expect(q *Request, w *Work) Load {
	now := Load{float64(w.Running), float64(w.Held), float64(w.HeldCached)}
	if q.Usual == (Load{}) {
		return now
	}
	stays := func(now, usual float64) float64 {
		return usual + float64(m.Constants.Stays*(now-usual))
	}
	return Load{stays(now.Running, q.Usual.Running), stays(now.Held, q.Usual.Held), stays(now.HeldCached, q.Usual.HeldCached)}
}

// weight is what a ms of delay of another request costs.
func (m *Model) weight(q *Request) float64 { return m.Others * q.Others }

// PrefillPrice is what it costs that a prefill rank computes the prompt.
func (m *Model) PrefillPrice(q *Request, w *Work) (p Price) {
	p.Compute = m.Prefill.compute(w)
	p.Wait = max(m.Prefill.Time(w)-p.Compute, 0)
	p.Behind = m.weight(q) * m.Constants.Behind * float64(w.Running) * p.Compute
	p.Evict = m.evict(q, &m.Prefill, w)
	return p
}

// LocalPrice is what it costs that the rank which answers computes the prompt, too.
func (m *Model) LocalPrice(q *Request, w *Work) (p Price) {
	p.Compute = m.Local.compute(w)
	p.Wait = max(m.Local.Time(w)-p.Compute, 0)
	p.Behind = m.weight(q) * m.Constants.Behind * float64(w.Running-w.Answering) * p.Compute
	stall := 0.0
	if w.Tokens > 0 {
		stall = (m.Step[stepPrompt] + float64(m.Step[stepTokens]*(float64(w.Tokens)/1000))) * w.times()
	}
	m.answer(q, w, stall, &p)
	return p
}

// RemotePrice is what it costs that a rank answers whose KV comes from a prefill rank. prefill
// is the price there, w the transfer.
func (m *Model) RemotePrice(q *Request, prefill *Price, w *Work) Price {
	p := *prefill
	p.Transfer = m.transfer(w)
	m.answer(q, w, 0, &p)
	return p
}

// evict is what it costs that the uncached tokens of a prompt take the place of others in the
// cache of a rank that computes by a model.
func (m *Model) evict(q *Request, by *LegModel, w *Work) float64 {
	return m.weight(q) * m.Constants.Keep * by[termCompute] * float64(w.Tokens) / 1000
}

// answer adds what the answer costs on the rank of w, where computing the prompt stalls others
// for so many ms.
func (m *Model) answer(q *Request, w *Work, stall float64, p *Price) {
	tokens := float64(q.Output)
	if q.Output <= 0 {
		tokens = m.Length
	}
	load, times := m.expect(q, w), w.times()
	running := load.Running
	// w.Tokens are those of the prompt that the rank does not have.
	with := Load{running + 1, load.Held + float64(w.Tokens) + tokens/2, load.HeldCached + float64(q.ISL-w.Tokens)}
	before := float64(m.step(&load)*times) + m.Stalled
	after := float64(m.step(&with)*times) + m.Stalled
	weight := m.weight(q)
	p.Answer = m.Answer * tokens * after
	p.Evict += m.evict(q, &m.Local, w)
	p.Stall = weight * float64(w.Answering) * stall
	p.Slower = weight * running * tokens * (after - before)
	if m.Loss <= 0 {
		return
	}
	p.Late = m.Loss * (m.late(p.first()/m.Limit) + m.late(after/m.GapLimit))
	// The others get so much slower for as much of their answers as this one lasts.
	slower := before + float64((after-before)*min(tokens/m.Length, 1)) + stall/m.Length
	p.Spoilt = weight * running * m.Loss * (m.late(slower/m.GapLimit) - m.late(before/m.GapLimit))
}
