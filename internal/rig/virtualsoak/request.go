package virtualsoak

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/rig/virtualsoak/reference"
	"github.com/dynctl/dynctl/internal/router/cache/blockhash"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// request is one client request and its way through the router.
type request struct {
	s       *stage
	no      int
	id      string
	tokens  []uint32
	limit   int
	arrived time.Duration
	// The prompt and the limit as the client gave them, and the right answer. Of a
	// stream that goes on elsewhere tokens and limit are those of the rest.
	whole  []uint32
	most   int
	want   reference.Answer
	stream *stream // nil where the answer is not streamed

	tries int // decisions
	run   decide.Run
	// The leave of the decode and of the prefill leg, and whether how it ended is still
	// to be reported.
	leave      [2]health.Admission
	unreported [2]bool
	exact      kvindex.Query
	predicted  kvindex.Query
	current    []*leg
	held       []*hold
	// In line: while it waits; whether it has tried; and the place that it got.
	waiter *admission.Waiter
	asked  bool
	placed *hold
	got    []uint32
	ended  int
	// Of a stream that goes on elsewhere: the places that it has on ranks, by slot, or
	// waits for.
	places []uint32
	wish   *admission.Wish
	// kind is what it does to engines, killed are those that died of it.
	kind   kind
	killed []*node
	// transfer is the newest one that was prefilled, holder the node that has its KV until
	// aliveBy, and refused the transfer if its decode rank had no room.
	transfer, refused *disagg.Transfer
	holder            *node
	aliveBy           time.Duration
	// idle is the node whose connection was closed as idle in the last try, in idlePhase.
	idle      *node
	idlePhase selector.Phase
	// struck are the engines that failed it before its client had a word, and are well.
	struck []*node
}

// request begins a request.
func (s *stage) request() {
	q := &request{s: s, no: s.started, id: fmt.Sprintf("r%d", s.started), arrived: s.w.Now(), limit: 1 + s.rng.IntN(12)}
	s.started++
	q.tokens = s.prompts[s.rng.IntN(len(s.prompts))]
	if s.chance(0.3) { // a turn of its own
		q.tokens = append(slices.Clone(q.tokens), uint32(5000+q.no), uint32(6000+q.no))
	}
	if s.chance(0.7) {
		q.stream = newStream(s.rng)
		if s.chance(0.3) {
			q.limit += s.rng.IntN(40)
		}
	}
	if c := s.script; c != nil {
		q.stream, q.limit = &stream{kind: c.kind, usage: c.kind != api.SGLangGenerate}, c.limit
		if c.whole {
			q.stream = nil
		}
	}
	q.kind = s.draw()
	q.whole, q.most, q.want = q.tokens, q.limit, s.ref.Answer(q.tokens, q.limit, s.script != nil && s.script.on)
	if q.stream != nil {
		q.ask(s.rng)
	}
	s.open[q] = true
	s.out.Requests++
	s.note("%s arrives with %d tokens, wants %d", q.id, len(q.tokens), q.limit)
	if s.script == nil && s.chance(0.1) {
		s.w.At(s.w.Now()+s.between(0, 100*time.Millisecond), func() {
			if q.ended == 0 {
				q.stop()
				q.prefix()
				s.out.Left++
				q.end("its client has left")
			}
		})
	}
	if s.away {
		s.out.cutFor("the router was restarted")
		s.out.Cut++
		q.end("the router is away")
		return
	}
	ask := decide.Request{Facts: disagg.Facts{
		Kind: api.Completion, Splittable: true, ISL: len(q.tokens), Source: disagg.FromIDs, N: 1, Prompts: 1,
		MaxTokens: int64(q.limit), MinTokens: -1,
	}}
	if s.chance(0.5) {
		ask.Session = selector.HashSession(fmt.Sprint("session ", s.rng.IntN(5)))
	}
	for i := range ask.Chances {
		ask.Chances[i] = decide.Chance{Turn: s.turns[i], Draw: s.rng.Uint64()}
		s.turns[i]++
	}
	q.run.After = s.after
	q.run.Begin(ask)
	q.try()
}

// try decides and carries out. What follows when it fails, the policy says that
// the router asks, too.
func (q *request) try() {
	s := q.s
	q.tries++
	s.out.Attempts++
	if s.line.limited {
		q.wait()
		return
	}
	q.apply(q.choose())
	q.decided()
}

// decided carries the newest decision out.
func (q *request) decided() {
	s := q.s
	if g := s.going; g != nil && q.chose(g) {
		s.replace()
	}
	plan := &q.run.Plan
	if plan.Err != nil {
		next := q.run.NoChoice()
		if s.plant == keepOut && next.Step == attempt.Recall {
			next.Step = attempt.GiveUp
		}
		q.follow(next, plan.Err)
		return
	}
	q.resent()
	q.run.Compact()
	if s.chance(0.3) { // others come between
		s.w.At(s.w.Now()+s.between(0, 2*time.Millisecond), func() {
			if q.ended == 0 {
				q.carryOut(true)
			}
		})
		return
	}
	q.carryOut(false)
}

// carryOut sends what the plan says, some time after it was made if late.
func (q *request) carryOut(late bool) {
	if q.run.History.Continued == 0 || q.enterMove() {
		q.send(late)
	}
}

// send sends the legs of the plan.
func (q *request) send(late bool) {
	s, in, plan := q.s, &q.run.In, &q.run.Plan
	before := q.refused
	q.refused = nil
	d := q.node(in.DecodePeers[plan.DecodeIndex])
	if !q.admit(selector.Decode, d, late) {
		q.failed(selector.Decode, d, nil, attempt.Ejected)
		return
	}
	claim, prefill := q.run.Claims()
	held := q.placed
	if q.placed = nil; held == nil {
		held = q.reserve(d, claim)
	}
	if plan.Path == decide.Local {
		s.note("%s: try %d, local on %s (%s), %d cached", q.id, q.tries, d.name, plan.Reason, plan.CachedTokens)
		s.sent(q, d)
		q.decode(d, nil, nil, held)
		return
	}
	p := q.node(in.PrefillPeers[plan.PrefillIndex])
	if q.handOver(before, p, d, in.DecodePeers[plan.DecodeIndex], held) {
		return
	}
	s.note("%s: try %d, prefill on %s, decode on %s (%s)", q.id, q.tries, p.name, d.name, plan.Reason)
	if !q.admit(selector.Prefill, p, late) {
		q.failed(selector.Prefill, p, nil, attempt.Ejected)
		return
	}
	s.out.Remote++
	t, err := s.conn.Begin(disagg.Dispatch{
		RequestID: q.transferID(), Facts: q.run.Request.Facts,
		Prefill: in.PrefillPeers[plan.PrefillIndex], Decode: in.DecodePeers[plan.DecodeIndex],
	})
	if err != nil {
		s.violate("%s: %v", q.id, err)
		return
	}
	s.sent(q, p)
	s.sent(q, d)
	q.prefill(t, p, prefill, d, held)
}

// resent wants a request whose connection was closed as idle to go to the same engine.
func (q *request) resent() {
	n, in, p := q.idle, &q.run.In, &q.run.Plan
	q.idle = nil
	if n == nil || q.s.line.limited || !n.member {
		return
	}
	now := in.DecodePeers[p.DecodeIndex]
	if q.idlePhase == selector.Prefill {
		if p.Path == decide.Local {
			return
		}
		now = in.PrefillPeers[p.PrefillIndex]
	}
	if ok, _ := n.worker.State.Usable(); ok && now.Worker.State != n.worker.State {
		q.s.violate("%s goes to %s after %s had closed an idle connection", q.id, now.Worker.Name, n.name)
	}
}

// handOver has another decode rank fetch the KV that the last one had no room for.
func (q *request) handOver(t *disagg.Transfer, p, d *node, to disagg.Peer, held *hold) bool {
	s := q.s
	if t == nil || q.holder != p || s.w.Now() > q.aliveBy {
		return false
	}
	if !t.HandOver(to) {
		s.violate("%s: a transfer that was refused cannot be handed over", q.id)
		return true
	}
	edits, err := t.DecodeEdits()
	if err != nil {
		s.violate("%s: %v", q.id, err)
		return true
	}
	s.out.HandedOver++
	s.note("%s: try %d, decode on %s of what %s has", q.id, q.tries, d.name, p.name)
	s.sent(q, d)
	q.decode(d, p, edits, held)
	return true
}

// transferID is the request's id on the wire; it names no other request.
func (q *request) transferID() string { return fmt.Sprintf("%s.%d.", q.id, q.tries) }

func (q *request) node(p disagg.Peer) *node {
	for _, n := range q.s.nodes {
		if n.worker.State == p.Worker.State {
			return n
		}
	}
	return nil
}

// sent records a request for the prediction of ranks without events.
func (s *stage) sent(q *request, n *node) {
	if !n.silent {
		return
	}
	locals := blockhash.Locals(nil, q.tokens, s.group.BlockSize, blockhash.Key{})
	s.approx.Sent(n.slot(), n.rank.Number, locals, blockhash.Chain(nil, locals), s.now())
}

// choose asks the stages.
func (q *request) choose() decide.Effects {
	s := q.s
	locals := blockhash.Locals(nil, q.tokens, s.group.BlockSize, blockhash.Key{})
	s.index.Overlap(locals, &q.exact)
	s.approx.Overlap(locals, &q.predicted)
	return q.run.Decide(&s.settings, s.registry.Snapshot().Workers, s.group.BlockSize, q)
}

// apply does what a decision asks of the router.
func (q *request) apply(e decide.Effects) {
	s := q.s
	for _, w := range e.Readmit {
		if s.plant != leaveEjected {
			s.out.Readmitted++
			s.outliers.Last(w)
		}
	}
	if turn := q.run.Request.Chances[1].Turn; e.ReturnTurn && s.turns[1] == turn+1 {
		s.turns[1] = turn
	}
}

// Overlap is for decide.Seen.
func (q *request) Overlap(w *workers.Worker, k *workers.Rank, _ *decision.Tiers) int {
	depth := q.exact.Depth(kvindex.Rank(k.Slot))
	if q.node(disagg.Peer{Worker: w}).silent {
		depth = q.predicted.Depth(kvindex.Rank(k.Slot))
	}
	return depth * q.s.group.BlockSize
}

// Resident is for decide.Seen.
func (q *request) Resident(k *workers.Rank) int { return q.s.index.Blocks(kvindex.Rank(k.Slot)) }

// Ledger is for decide.Seen.
func (q *request) Ledger() *ledger.Ledger { return q.s.ledger }

// chose reports whether the plan has given work to a node.
func (q *request) chose(n *node) bool {
	in, p := &q.run.In, &q.run.Plan
	return p.Err == nil && (in.DecodePeers[p.DecodeIndex].Worker == n.worker ||
		p.Path != decide.Local && in.PrefillPeers[p.PrefillIndex].Worker == n.worker)
}

// phaseIndex is where the leave of a phase's leg stands.
func phaseIndex(p selector.Phase) int {
	if p == selector.Prefill {
		return 1
	}
	return 0
}

// admit asks whether a leg may go to a worker. Only where something has happened
// since the decision may it be refused.
func (q *request) admit(p selector.Phase, n *node, late bool) (ok bool) {
	i := phaseIndex(p)
	q.leave[i], ok = q.s.outliers.Admit(n.worker)
	if q.unreported[i] = ok; !ok {
		q.s.out.Refused++
		if !late {
			q.s.violate("%s was decided for %s, which is kept out: %s", q.id, n.name, n.worker.State.Condition().Reason)
		}
	}
	q.s.step()
	return ok
}

// report says how a leg ended, for the health of its worker.
func (q *request) report(p selector.Phase, out health.Outcome) {
	i := phaseIndex(p)
	q.unreported[i] = false
	q.leave[i] = q.s.outliers.Report(q.leave[i], out)
	q.s.step()
}

// hold is a reservation and the node that it is on.
type hold struct {
	*ledger.Reservation
	n *node
}

func (q *request) reserve(n *node, c ledger.Claim) *hold {
	r := &hold{q.s.ledger.Reserve(n.rank, c), n}
	n.holds++
	q.held = append(q.held, r)
	q.s.accounts()
	return r
}

// release ends all reservations of an attempt.
func (q *request) release() {
	for i, r := range q.held {
		r.n.holds--
		if q.s.plant == skipRelease && i == 0 && q.s.chance(0.05) {
			q.s.note("PLANTED: a reservation of %s is not released", q.id)
			continue
		}
		r.Release()
	}
	q.held, q.placed = nil, nil
}

// stop gives up what is under way at the engines.
func (q *request) stop() {
	for _, l := range q.current {
		l.abort()
	}
	q.current = nil
}

// end is the end of a request, which has exactly one.
func (q *request) end(how string) {
	s := q.s
	s.note("%s ends: %s", q.id, how)
	q.outOfLine()
	q.leaveMove()
	for _, p := range []selector.Phase{selector.Decode, selector.Prefill} {
		if q.unreported[phaseIndex(p)] { // nobody waits for it any more
			q.report(p, health.Canceled)
		}
	}
	q.release()
	if q.ended++; q.ended > 1 {
		s.violate("%s ended %d times", q.id, q.ended)
	}
	q.run.Release()
	delete(s.open, q)
}

// cut ends a request from outside.
func (q *request) cut(why string) {
	q.stop()
	q.prefix()
	q.s.out.cutFor("the router was restarted")
	q.s.out.Cut++
	q.end(why)
}

// prefix wants what the client has got so far to be right.
func (q *request) prefix() {
	if len(q.got) > len(q.want.Tokens) || !slices.Equal(q.got, q.want.Tokens[:len(q.got)]) {
		q.s.violate("%s got the tokens %v, the answer is %v", q.id, q.got, q.want.Tokens)
	}
	if q.stream != nil {
		q.heard(false)
	}
}

// hopeless ends a request that failed before its first token. Somebody who was
// well all the time, and for long enough before that the probes could know, must
// not have been left.
func (q *request) hopeless(err error) {
	s := q.s
	for _, n := range s.nodes {
		if n.member && !n.worker.State.Draining() && n.worker.Role.CanDecode() && n.since+probeEvery <= q.arrived && !slices.Contains(q.struck, n) {
			s.violate("%s failed although %s was well since %v: %v; kept out: %v", q.id, n.name, n.since, err, q.why())
			return
		}
	}
	s.out.Hopeless++
	q.stop()
	q.prefix()
	q.end(fmt.Sprintf("nobody is left: %v", err))
}

func (q *request) why() (list []string) {
	in := &q.run.In.Decode
	for i := range in.Candidates {
		list = append(list, in.Candidates[i].Rank+": "+in.Why(i))
	}
	return list
}

// failed is the failure of a leg on a worker before the first token, with KV from
// another one or nil.
func (q *request) failed(phase selector.Phase, n, from *node, reason attempt.Reason) {
	s := q.s
	s.note("%s: %s leg on %s failed: %s", q.id, phase, n.name, reason)
	switch {
	case reason == attempt.Stale:
		q.idle, q.idlePhase = n, phase
	case q.kind == poison && reason == attempt.Status5xx:
		if n.poisoned == nil {
			n.poisoned = map[attempt.RequestKey]bool{}
		}
		n.poisoned[q.key()] = true
	case reason.Means().Outcome.Failure():
		n.faulted = true
	}
	q.stop()
	q.report(phase, reason.Means().Outcome)
	if phase == selector.Prefill {
		q.report(selector.Decode, health.Canceled) // nothing was sent to it
	}
	q.release()
	q.leaveMove()
	f := attempt.Failure{
		Worker: n.worker.State, Name: n.name, Phase: phase, Reason: reason, Sent: reason != attempt.Connect && reason != attempt.Ejected,
		Admission: q.leave[phaseIndex(phase)], Alive: reason == attempt.Stale && n.up && !n.hang,
	}
	if from != nil {
		f.Other = from.worker.State
	}
	if other := q.uninvolved(phase); other != nil && slices.ContainsFunc(q.run.History.Failures, func(was attempt.Failure) bool {
		return was.Worker == f.Worker && was.Phase == f.Phase && was.Reason != attempt.Ejected && was.Reason != attempt.Stale && (was.Other == nil || !was.Reason.Means().Mutual)
	}) {
		s.violate("%s was tried on %s again, which had failed it, and not on %s", q.id, n.name, other.name)
		return
	}
	next := q.run.Failed(f)
	if next.Budgeted {
		if s.budget == 0 {
			next = q.run.NoBudget()
		} else {
			s.budget--
		}
	}
	q.follow(next, fmt.Errorf("%s leg on %s: %s", phase, n.name, reason))
}

// uninvolved is a worker for a phase that was well all the time and has had no part in
// a failure of the request.
func (q *request) uninvolved(p selector.Phase) *node {
	for _, n := range q.s.nodes {
		state, can := n.worker.State, n.worker.Role.CanDecode()
		if p == selector.Prefill {
			can = n.worker.Role.CanPrefill()
		}
		if n.member && can && !state.Draining() && n.since+probeEvery <= q.arrived &&
			!slices.ContainsFunc(q.run.History.Failures, func(f attempt.Failure) bool { return f.Worker == state || f.Other == state }) {
			return n
		}
	}
	return nil
}

// after is the router's policy, with the bugs that are planted in it.
func (s *stage) after(h *attempt.History, a attempt.Settings, prefills []*workers.State) attempt.Next {
	next := attempt.AfterFailure(h, a, prefills)
	switch {
	case s.plant == giveUpFallBack && next.Step == attempt.FallBack:
		next.Step = attempt.GiveUp
	case s.plant == keepOut:
		next.Bans = slices.Clone(next.Bans)
		for i := range next.Bans {
			next.Bans[i].Suspect = false
		}
	case s.plant == forgetFailed:
		next.Bans = nil
	case s.plant == resendElsewhere:
		next.Stays = nil
	case s.plant == forgetLost && next.Why == attempt.NoMoreLost:
		forgot := *h
		forgot.Lost = nil
		next = attempt.AfterFailure(&forgot, a, prefills)
	}
	return next
}

// key identifies the request by what a body would have of it.
func (q *request) key() attempt.RequestKey {
	h := fnv.New64a()
	for _, t := range append(slices.Clone(q.whole), uint32(q.most)) {
		_, _ = h.Write(binary.LittleEndian.AppendUint32(nil, t)) // never fails
	}
	return attempt.RequestKey{Size: len(q.whole), Hash: h.Sum64()}
}

// blamed reports whether engines of one phase broke on the request three times,
// and not always the same one.
func (q *request) blamed() bool {
	broke := map[selector.Phase][]*workers.State{}
	for _, f := range q.run.History.Failures {
		if f.Sent && f.Reason.Means().Broke {
			broke[f.Phase] = append(broke[f.Phase], f.Worker)
		}
	}
	for _, list := range broke {
		if len(list) > 2 && slices.ContainsFunc(list, func(w *workers.State) bool { return w != list[0] }) {
			return true
		}
	}
	return false
}

// follow carries out what the policy says.
func (q *request) follow(next attempt.Next, err error) {
	switch next.Step {
	case attempt.GiveUp:
		blamed := q.s.repeats.Failed(q.key(), &q.run.History, q.s.now())
		for _, f := range blamed {
			if q.s.plant == blameEngines {
				break
			}
			q.s.out.Excused++
			q.s.outliers.Excuse(f.Admission)
			q.s.step()
		}
		if q.kind != harmless {
			if q.kind == poison && len(blamed) > 0 {
				q.acquitted()
			}
			q.s.out.Hopeless++
			q.end("it breaks every engine: " + err.Error())
			return
		}
		if next.Why == attempt.NoMoreTry && q.blamed() || next.Why == attempt.NoMoreLost && len(q.run.History.Lost) >= attempt.MaxLost || next.Why == attempt.NoBudget && q.s.budget == 0 ||
			next.Why == attempt.NoAttempts && len(q.run.History.Failures) >= q.s.settings.Attempts {
			q.s.out.Hopeless++
			q.end(next.Why + ": " + err.Error())
			return
		}
		q.hopeless(err)
		return
	case attempt.FallBack:
		q.s.out.Fallbacks++
	}
	q.try()
}
