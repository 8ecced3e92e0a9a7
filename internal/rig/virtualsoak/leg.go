package virtualsoak

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/rig/virtualsoak/voice"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers/health"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// legTimeout is how long a leg may be without its first output.
const legTimeout = 400 * time.Millisecond

// leg is one call of an engine.
type leg struct {
	q     *request
	n     *node
	from  *node // the prefill whose KV a decode leg pulls
	phase selector.Phase
	id    string
	inc   int
	life  string        // the engine's id when the leg reached it
	delay time.Duration // one way
	over  bool
	heard bool // an output has come
	cutAt int  // tokens after which the answer is cut, -1 for never
	// before is how many tokens of the answer came from other legs.
	before int
	// diesAt is after how many tokens its engine dies, -1 for never.
	diesAt int
	// pull names the transfer whose KV it fetches.
	pull string
	// struck says that it is cut for nobody's fault.
	struck bool
	on     func(o engine.Output)
}

// call sends a leg to its engine.
func (q *request) call(l *leg, r engine.Request) {
	s := q.s
	l.q, l.cutAt, l.diesAt, l.delay = q, -1, -1, s.between(50*time.Microsecond, time.Millisecond)
	q.current = append(q.current, l)
	fail := func(reason attempt.Reason) {
		if !l.over {
			l.over = true
			if reason == attempt.Overloaded && l.phase == selector.Decode && l.from != nil {
				q.refused = q.transfer
				delete(s.used, l.pull) // it was not read
			}
			q.failed(l.phase, l.n, l.from, reason)
		}
	}
	s.w.At(s.w.Now()+legTimeout, func() {
		if !l.over && !l.heard {
			l.abort()
			l.over = false
			fail(attempt.Timeout)
		}
	})
	s.w.At(s.w.Now()+l.delay, func() {
		switch {
		case l.over:
			return
		case !l.n.up:
			s.w.At(s.w.Now()+l.delay, func() { fail(attempt.Connect) })
			return
		case l.n.hang:
			return
		case s.chance(l.n.full):
			s.w.At(s.w.Now()+l.delay, func() { fail(attempt.Overloaded) })
			return
		case q.kind == poison:
			s.w.At(s.w.Now()+l.delay, func() { fail(attempt.Status5xx) })
			return
		case s.script == nil && s.chance(0.01): // an idle connection is closed as the request comes
			reason := attempt.Reset
			if q.run.History.MayBeStale(l.phase) {
				reason = attempt.Stale
			} else {
				q.struck = append(q.struck, l.n)
			}
			s.w.At(s.w.Now()+l.delay, func() { fail(reason) })
			return
		case q.kind == deadly && s.script != nil:
			l.diesAt = s.script.cut
		case q.kind == deadly:
			l.diesAt = s.rng.IntN(3)
		case s.chance(l.n.errors):
			s.w.At(s.w.Now()+l.delay, func() { fail(attempt.Status5xx) })
			return
		case s.chance(l.n.die):
			l.cutAt = s.rng.IntN(4)
		case s.script != nil:
			if l.phase == selector.Decode && !s.script.struck {
				s.script.struck, l.struck, l.cutAt = true, true, s.script.cut
			}
		case q.mayGoOn() && l.phase == selector.Decode && s.chance(0.1): // and nobody need be to blame
			l.struck = true
			l.cutAt = 1 + s.rng.IntN(max(1, len(q.want.Tokens)-l.before)) // before the first token it would be tried again
		}
		l.inc, l.life = l.n.inc, l.n.v.EngineID()
		r.ID = l.id
		r.Sink = func(o engine.Output) {
			s.w.At(s.w.Now()+l.delay, func() { l.output(o) })
		}
		if err := l.n.v.Submit(r); err != nil {
			s.w.At(s.w.Now()+l.delay, func() { fail(attempt.Status5xx) })
			return
		}
		if l.diesAt == 0 {
			s.w.At(s.w.Now()+s.between(0, time.Millisecond), l.dies)
		}
	})
}

// output is what the engine says.
func (l *leg) output(o engine.Output) {
	if l.over {
		return
	}
	switch {
	case (o.Finish == engine.FinishError || o.Finish == engine.FinishAbort) && l.n.inc != l.inc: // its process is gone
		l.over = true
		reason := attempt.Reset
		if l.diesAt == 0 && !l.heard && l.q.run.History.MayBeStale(l.phase) && l.q.s.chance(0.5) {
			reason = attempt.Stale // on a reused connection it looks the same
		}
		l.q.lost(l, reason, fmt.Sprint(o.Err))
		return
	case o.Finish == engine.FinishError || o.Finish == engine.FinishAbort:
		l.over = true
		l.q.lost(l, attempt.Status5xx, fmt.Sprint(o.Err))
		return
	case o.HasToken && l.cutAt == 0:
		l.abort()
		l.q.lost(l, attempt.Reset, "the answer was cut")
		return
	}
	l.cutAt--
	if o.HasToken {
		if l.diesAt--; l.diesAt == 0 {
			l.q.s.w.At(l.q.s.w.Now(), l.dies)
		}
	}
	if !l.heard && l.phase == selector.Decode {
		if l.q.s.repeats.Watches(len(l.q.whole), l.q.s.now()) {
			l.q.s.repeats.Served(l.q.key())
		}
		l.q.report(l.phase, health.Success)
	}
	l.heard = true
	if o.Finish != engine.Running {
		l.over = true
	}
	l.on(o)
}

// lost is a leg that broke while the engine worked on it.
func (q *request) lost(l *leg, reason attempt.Reason, why string) {
	s := q.s
	if l.phase == selector.Prefill || !l.heard || q.stream != nil && q.stream.silent() {
		if l.phase == selector.Decode {
			q.got = q.got[:l.before]
		}
		if l.struck {
			q.struck = append(q.struck, l.n)
		}
		q.failed(l.phase, l.n, l.from, reason)
		return
	}
	l.n.faulted = true
	// The client has a part of the answer.
	q.prefix()
	if q.goesOn(l, why) || len(s.out.Violations) > 0 {
		return
	}
	if !l.struck && l.n.since <= q.arrived && (l.from == nil || l.from.since <= q.arrived) {
		s.violate("%s was cut although %s is well: %s", q.id, l.n.name, why)
	}
	s.out.Cut++
	q.report(l.phase, health.ServerError)
	q.stop()
	q.end("cut in the middle: " + why)
}

// abort gives up a leg.
func (l *leg) abort() {
	if l.over {
		return
	}
	l.over = true
	s := l.q.s
	s.w.At(s.w.Now()+l.delay, func() {
		if l.n.up && l.n.inc == l.inc {
			l.n.v.Abort(l.id)
		}
	})
}

// prefill sends the first leg of a remote plan.
func (q *request) prefill(t *disagg.Transfer, p *node, claim ledger.Claim, d *node, held *hold) {
	s := q.s
	mine := q.reserve(p, claim)
	l := &leg{n: p, phase: selector.Prefill, id: "cmpl-" + q.transferID() + "p"}
	l.on = func(o engine.Output) {
		if o.Finish == engine.Running {
			return
		}
		mine.Release()
		p.holds--
		q.held = slices.DeleteFunc(q.held, func(r *hold) bool { return r == mine })
		body := voice.PrefillAnswer("cmpl-"+q.transferID(), l.id, l.life, len(q.tokens), o)
		if err := t.CheckPrefill(body); err != nil {
			s.violate("%s: the answer of %s was refused: %v", q.id, p.name, err)
			return
		}
		q.report(selector.Prefill, health.Success)
		q.run.History.Answered(p.worker.State)
		edits, err := t.DecodeEdits()
		if err != nil {
			s.violate("%s: %v", q.id, err)
			return
		}
		if _, err := t.DecodeEdits(); !errors.Is(err, disagg.ErrUsed) {
			s.violate("%s: the parameters of a transfer were given twice", q.id)
			return
		}
		q.aliveBy = s.w.Now() + s.group.Lease*4/5
		if s.doomed > 0 && p.up && p.well() {
			s.doom(p)
		}
		q.transfer, q.holder = t, p
		q.decode(d, p, edits, held)
	}
	q.call(l, engine.Request{Tokens: q.tokens, MaxTokens: 1, Pin: true})
}

// decode sends the leg whose answer the client gets.
func (q *request) decode(d, p *node, edits []api.Edit, held *hold) {
	s := q.s
	l := &leg{n: d, from: p, phase: selector.Decode, id: fmt.Sprintf("cmpl-%sd", q.transferID()), before: len(q.got)}
	r := engine.Request{Tokens: q.tokens, MaxTokens: q.limit, IgnoreEOS: s.script != nil && s.script.on}
	if q.stream != nil {
		q.listen()
	}
	if p != nil {
		var err error
		if r.Pull, err = voice.Pull(edits); err != nil {
			s.violate("%s: %v", q.id, err)
			return
		}
		if s.plant == reuseTransfer && s.old != nil && len(s.old.Blocks) >= len(r.Pull.Blocks) && s.chance(0.2) {
			s.note("PLANTED: %s gets the transfer parameters of %s", q.id, s.old.RequestID)
			r.Pull = s.old
		} else {
			s.old = r.Pull
			name := r.Pull.EngineID + " " + r.Pull.RequestID
			if who, ok := s.used[name]; ok {
				s.violate("the transfer %s feeds %s, but has fed %s", name, q.id, who)
				return
			}
			s.used[name] = q.id
			l.pull = name
		}
	}
	l.on = func(o engine.Output) {
		if o.HasToken {
			q.leaveMove()
			if len(q.got) == 0 {
				held.FirstToken()
			}
			q.got = append(q.got, o.Token)
			if len(q.got)%16 == 0 {
				held.Progress(len(q.got))
			}
			if q.stream != nil {
				if o.Finish = q.speak(l, o); o.Finish != engine.Running {
					l.abort() // a stop string has ended it
				}
			}
		}
		if o.Finish == engine.Running {
			return
		}
		if !slices.Equal(q.got, q.want.Tokens) || o.Finish != q.want.Finish {
			s.violate("%s got %v (%s) from %s, the answer is %v (%s)", q.id, q.got, o.Finish, d.name, q.want.Tokens, q.want.Finish)
		}
		if q.stream != nil {
			q.heard(true)
		}
		s.out.Completed++
		q.end("complete")
	}
	q.call(l, r)
}
