package virtualsoak

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/rig/virtualsoak/reference"
	"github.com/dynctl/dynctl/internal/router/forward/resume"
	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/workers"
)

// request is one client request, and what is known of its way through the router.
type request struct {
	s       *stage
	no      int
	id      string
	arrived time.Duration
	// The prompt and the limit as the client gave them, and the right answer.
	whole  []uint32
	most   int
	want   reference.Answer
	stream *stream // nil where the answer is not streamed
	body   string
	// kind is what it does to engines, killed are those that died of it.
	kind   kind
	killed []*node

	// What the router has of it.
	ctx    context.Context //nolint:containedctx // of the request
	cancel context.CancelFunc
	call   *serving.Call // the newest, which may ask for the rest
	record lifecycle.Record
	gone   string // why it was ended from outside

	// What the client got.
	header    http.Header
	status    int
	committed bool
	client    []byte

	tries       int          // decisions
	inLine      bool         // it waits for a rank
	late        bool         // something may have come between the newest decision and its leg
	next        attempt.Step // what the policy has said of the newest failure
	why         string       // and why nothing follows
	noChoice    bool         // the newest decision found nobody
	lost, moves int          // how many engines it has lost then, and how often it had gone on elsewhere
	holding     *node        // on which it has a place
	ahead       bool         // it was given that before its plan
	ready       int64        // legs of its newest plan that were taken before that, and are not sent
	sent        bool         // a leg of its newest plan was sent, and that has not ended
	legs        []*leg
	decoding    *leg // the newest decode leg
	// broke is the newest leg that broke off when the client had a part of the answer,
	// refusal why the rest may not come from elsewhere then.
	broke   *leg
	refusal resume.Refusal
	// refused are transfers that a decode rank had no room for.
	refused map[string]bool
	// idle is the node whose connection was closed as idle in the last try, in idlePhase.
	idle      *node
	idlePhase route.Phase
	// struck are the engines that failed it before its client had a word, and are well.
	struck []*node

	// What its account says.
	began            []*workers.Rank
	left, took       int
	outcomes         int
	audited          bool
	notes            []string
	notContinued     string
	continued, moved int
}

// request begins a request.
func (s *stage) request() {
	limit := 1 + s.rng.IntN(12)
	q := &request{s: s, no: s.started, id: fmt.Sprintf("r%d", s.started), arrived: s.w.Now(), refused: map[string]bool{}, header: http.Header{}}
	s.started++
	tokens := s.prompts[s.rng.IntN(len(s.prompts))]
	if s.chance(0.3) { // a turn of its own
		tokens = append(slices.Clone(tokens), uint32(5000+q.no), uint32(6000+q.no))
	}
	if s.chance(0.7) {
		q.stream = newStream(s.rng)
		if s.chance(0.3) {
			limit += s.rng.IntN(40)
		}
	}
	if c := s.script; c != nil {
		q.stream, limit = &stream{kind: c.kind, usage: c.kind != api.SGLangGenerate}, c.limit
		if c.whole {
			q.stream = nil
		}
	}
	q.kind = s.draw()
	q.whole, q.most, q.want = tokens, limit, s.ref.Answer(tokens, limit, s.script != nil && s.script.on)
	q.ask(s.rng)
	s.open[q] = true
	s.out.Requests++
	s.note("%s arrives with %d tokens, wants %d", q.id, len(tokens), limit)
	if s.script == nil && s.chance(0.1) {
		s.w.At(s.w.Now()+s.between(0, 100*time.Millisecond), func() { q.leave(leftEarly) })
	}
	session := uint64(0)
	if s.chance(0.5) {
		session = selector.HashSession(fmt.Sprint("session ", s.rng.IntN(5)))
	}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	if s.away {
		s.out.cutFor("the router was restarted")
		s.out.Cut++
		q.end("the router is away")
		return
	}
	s.start(q, func() { q.serve(session) })
}

// leave ends a request from outside.
func (q *request) leave(why string) {
	if q.s.open[q] && q.gone == "" {
		q.gone = why
		q.cancel()
	}
}

// serve is the door: package router's, for a request that was let in.
func (q *request) serve(session uint64) {
	s, now := q.s, time.Now()
	c := serving.New()
	q.call = c
	kind := api.Completion
	if q.stream != nil {
		kind = q.stream.kind
	}
	ep, err := api.Lookup(http.MethodPost, paths[kind])
	if err != nil {
		panic(err) // a path that exists
	}
	c.Details = serving.Details{
		ID: q.id, Start: now, Path: ep.Path, Endpoint: ep, Model: model, Record: &q.record, Idle: q,
		From:  rewrite.Client{Method: http.MethodPost, Host: "router", Remote: "127.0.0.1:9", Header: http.Header{"Content-Type": {api.MediaJSON}}},
		Claim: admission.Claim{Tenant: []string{"a", "b", "c"}[q.no%3], Band: admission.Band(q.no%5%3) - 1},
	}
	d := &c.Routing
	d.Settings, d.Model, d.Run.After, d.Run.Criteria.Session = s.settings, model, s.after, session
	c.Body, _ = api.OwnBody([]byte(q.body), s.router.bodies) // there is room
	if err := c.View.Parse(c.Body.B, ep.Kind, api.Limits{}); err != nil {
		s.violate("%s: %s: %v", q.id, q.body, err)
	}
	c.Name = c.View.Model
	d.UseFleet(s.registry.Snapshot())
	s.router.decider.Read(q.ctx, d, ep, ep.Kind, &c.View)
	q.record = lifecycle.Record{
		To: s.router.stream, Live: s.router.receipts.Begin(now), Routing: d, ID: c.ID, Endpoint: ep, Model: model, Stream: c.View.Stream, Start: now,
	}
	s.budget.Request(now)
	a, err := s.router.answers.Do(q.ctx, c)
	if err == nil {
		err = q.read(a)
	}
	q.finish(err)
	c.Release()
}

const model = "sim"

// paths are the endpoints by kind.
var paths = map[api.Kind]string{api.Completion: "/v1/completions", api.Chat: "/v1/chat/completions", api.SGLangGenerate: "/generate"}

// read copies an answer to the client, and closes it.
func (q *request) read(a *serving.Answer) (err error) {
	q.status, q.committed = a.Status, true
	q.record.Headers(q.header)
	if a.Whole != nil {
		q.client = append(q.client, a.Whole...)
		return a.Close(nil)
	}
	along := sse.AcquireHead()
	defer along.Release()
	p := &pieces{Body: a.Body}
	a.WriteHead(q)
	err = upstream.Stream(q, p, a.Flushes(), upstream.StreamOptions{Gate: &along.Gate, Observe: func(b []byte, _ time.Time) {
		got := along.Scanner.Feed(b)
		if !p.head && got.Events > 0 {
			q.record.Answer.Piece(time.Now(), got.Tokens)
		}
	}})
	along.Scanner.Finish()
	q.record.Answer.Learn(along.Scanner.Summary())
	return a.Close(err)
}

// pieces is the body of an answer as it is copied.
type pieces struct {
	serving.Body
	head bool
}

func (p *pieces) Next() (b []byte, err error) {
	b, p.head, err = p.Body.Next()
	return b, err
}

// Header, WriteHeader, Write and FlushError are for http.ResponseWriter.
func (q *request) Header() http.Header         { return q.header }
func (q *request) WriteHeader(int)             {}
func (q *request) Write(p []byte) (int, error) { q.client = append(q.client, p...); return len(p), nil }
func (q *request) FlushError() error           { return nil }

// Comment is for serving.Idle.
func (q *request) Comment([]byte) {}

// Idle is for serving.Idle.
func (q *request) Idle(words string) error {
	_, err := q.Write([]byte(": " + words + "\n\n"))
	return err
}

// finish is the end of a request in the router.
func (q *request) finish(err error) {
	s := q.s
	var e *api.Error
	if err != nil {
		if e = api.FromError(err); q.ctx.Err() != nil {
			e = api.Ended(err, q.gone == leftEarly, q.gone != leftEarly, q.committed)
		}
		if !q.committed {
			q.status = e.Status
		}
	}
	q.record.Ended(lifecycle.Outcome{Status: q.status, Err: e, Took: s.w.Now() - q.arrived})
	q.balanced()
	switch {
	case q.ctx.Err() != nil && q.gone != "":
		q.prefix()
		if q.gone == leftEarly {
			s.out.Left++
		} else {
			s.out.cutFor(q.gone)
			s.out.Cut++
		}
		q.end(q.gone)
	case err == nil:
		q.complete()
	case q.committed:
		q.prefix()
		q.cut(err)
	default:
		q.prefix()
		q.givenUp(err)
	}
}

const leftEarly = "its client has left"

// balanced wants whatever the router had for the request to be given back, and its account
// to have each thing once.
func (q *request) balanced() {
	s := q.s
	for _, l := range q.legs {
		if want := 1; l.returned && l.closed != want || !l.returned && l.closed != 0 {
			s.violate("%s: its %s leg on %s was closed %d times", q.id, l.phase, l.n.name, l.closed)
			return
		}
	}
	if q.holding != nil {
		s.violate("%s has ended and has a place on %s", q.id, q.holding.name)
	}
	ranks := make([]*workers.Rank, 0, len(q.legs))
	for _, l := range q.legs {
		ranks = append(ranks, l.n.rank)
	}
	if !slices.Equal(ranks, q.began) {
		s.violate("account: %s had %d legs, and %d are counted", q.id, len(ranks), len(q.began))
	}
	if !q.audited || q.outcomes != 1 {
		s.violate("account: %s has %d outcomes", q.id, q.outcomes)
	}
	if q.left != q.continued || q.took > 0 && q.continued == 0 {
		s.violate("account: %s went on elsewhere %d times, %d streams left a rank, %d came to one", q.id, q.continued, q.left, q.took)
	}
}

// audit compares a receipt with what happened.
func (q *request) audit(r *receipt.Receipt) {
	s := q.s
	q.audited, q.notes, q.notContinued, q.continued = true, slices.Clone(r.Notes), r.Outcome.NotContinued, len(r.Continued)
	for _, c := range r.Continued {
		if c.Reason == string(attempt.Moved) {
			q.moved++
		}
	}
	if len(r.Legs)+r.LegsOmitted != len(q.legs) {
		s.violate("account: the receipt of %s has %d legs, there were %d", q.id, len(r.Legs)+r.LegsOmitted, len(q.legs))
		return
	}
	for i, l := range r.Legs {
		was := q.legs[i]
		if l.Kind != string(was.phase) || l.Worker != was.n.name || l.Status != was.head.Status {
			s.violate("account: leg %d of %s was %s on %s with %d, its receipt says %s on %s with %d", i, q.id, was.phase, was.n.name, was.head.Status, l.Kind, l.Worker, l.Status)
		}
		if l.EndMS < l.DispatchMS || l.DispatchMS < 0 {
			s.violate("account: leg %d of %s has no end: from %v to %v ms", i, q.id, l.DispatchMS, l.EndMS)
		}
	}
}

// end is the end of a request, which has exactly one.
func (q *request) end(how string) {
	s := q.s
	s.note("%s ends: %s", q.id, how)
	if !s.open[q] {
		s.violate("%s ended twice", q.id)
	}
	q.cancel()
	delete(s.open, q)
	s.judge = true
}

// complete is a request whose answer the client has got.
func (q *request) complete() {
	s := q.s
	if l := q.decoding; l != nil && l.cutShort {
		s.out.Stopped++
	}
	for _, n := range q.notes {
		if strings.Contains(n, "broke off after the last token") {
			s.out.Closed++
		}
	}
	s.out.Continued, s.out.Moved = s.out.Continued+q.continued, s.out.Moved+q.moved
	if q.stream != nil {
		q.heard(true)
	} else {
		q.readWhole()
	}
	s.out.Completed++
	q.end("complete")
}

// prefix wants what the client has got so far to be right.
func (q *request) prefix() {
	if q.stream != nil {
		q.heard(false)
	}
}

// cut is a request that breaks off in the middle of its answer, and must say why the rest
// does not come from elsewhere.
func (q *request) cut(err error) {
	s, l := q.s, q.broke
	s.out.Continued, s.out.Moved = s.out.Continued+q.continued, s.out.Moved+q.moved
	words := q.notContinued
	switch {
	case l == nil && !strings.HasPrefix(words, "no other engine could continue it"):
		s.violate("%s was cut, and no leg broke: %v", q.id, err)
		return
	case q.stream == nil:
		s.out.cutFor("not a stream")
	case s.settings.Decisions.Continuations == 0:
		s.out.cutFor("not switched on")
	case strings.HasPrefix(words, "no other engine could continue it"):
		q.givenUp(err)
		return
	case q.refusal != "":
		if words != q.refusal.String() && !strings.HasPrefix(words, q.refusal.String()+" (") {
			s.violate("%s is not gone on with for %q; it should be %q", q.id, words, q.refusal)
		}
		s.out.cutFor(string(q.refusal))
	case words == attempt.NoMoreMove && q.moves >= s.settings.Decisions.Continuations, words == attempt.NoMoreLost && q.lost >= attempt.MaxLost:
		s.out.cutFor("went on as often as it may")
	default:
		s.violate("%s does not go on elsewhere: %q (%v)", q.id, words, err)
		return
	}
	if !l.struck && l.n.since <= q.arrived && (l.from == nil || l.from.since <= q.arrived) {
		s.violate("%s was cut although %s is well: %v", q.id, l.n.name, err)
	}
	s.out.Cut++
	q.end("cut in the middle: " + err.Error())
}

// givenUp is a request that nobody answers, or whose rest nobody does.
func (q *request) givenUp(err error) {
	s := q.s
	blamed := slices.ContainsFunc(q.notes, func(n string) bool { return strings.Contains(n, "counts against no engine") })
	if blamed {
		s.out.Excused++
	}
	h := &q.call.Routing.Run.History
	switch {
	case errors.Is(err, admission.ErrTimeout):
	case q.kind != harmless:
		if q.kind == poison && blamed {
			s.endPenalties()
			q.acquitted()
		}
	case q.noChoice:
		q.hopeless(err)
	case q.next != attempt.GiveUp && s.settings.Retry.Budget == 0: // it was used up
	case q.why == attempt.NoMoreTry && q.blamed(h), q.why == attempt.NoMoreLost && q.lost >= attempt.MaxLost,
		q.why == attempt.NoAttempts && len(h.Failures) >= s.settings.Decisions.Attempts:
	default:
		q.hopeless(err)
	}
	s.out.Hopeless++
	q.end("nobody is left: " + err.Error())
}

// hopeless looks at a request that nobody answers. Somebody who was
// well all the time, and for long enough before that the probes could know, must
// not have been left.
func (q *request) hopeless(err error) {
	s := q.s
	for _, n := range s.nodes {
		if n.member && !n.worker.State.Draining() && n.worker.Role.CanDecode() && n.since+probeEvery <= q.arrived && !slices.Contains(q.struck, n) {
			s.violate("%s failed although %s was well since %v: %v; kept out: %v", q.id, n.name, n.since, err, q.keptOut())
			return
		}
	}
}

func (q *request) keptOut() (list []string) {
	in := &q.call.Routing.Run.In.Decode
	for i := range in.Candidates {
		list = append(list, in.Candidates[i].Rank+": "+in.Why(i))
	}
	return list
}

// failed looks at an attempt that brought no answer.
func (q *request) failed(ctx context.Context, err error) {
	s := q.s
	s.note("%s: %v", q.id, err)
	f, ok := errors.AsType[*attempt.Error](err)
	if !ok || ctx.Err() != nil {
		return
	}
	var n *node
	for _, x := range s.nodes {
		if x.worker.State == f.Worker {
			n = x
		}
	}
	switch {
	case f.Reason == attempt.Ejected:
		if s.out.Refused++; !q.late {
			s.violate("%s was decided for %s, which is kept out: %s", q.id, n.name, n.worker.State.Condition().Reason)
		}
	case f.Reason == attempt.Stale:
		q.idle, q.idlePhase = n, f.Phase
	case q.kind == poison && f.Reason == attempt.Status5xx:
		if n.poisoned == nil {
			n.poisoned = map[string]bool{}
		}
		n.poisoned[q.body] = true
	case f.Reason.Means().Outcome.Failure():
		n.faulted = true
	}
	h := &q.call.Routing.Run.History
	if other := q.uninvolved(f.Phase); other != nil && slices.ContainsFunc(h.Failures, func(was attempt.Failure) bool {
		return was.Worker == f.Worker && was.Phase == f.Phase && was.Reason != attempt.Ejected && was.Reason != attempt.Stale && (was.Other == nil || !was.Reason.Means().Mutual)
	}) {
		s.violate("%s was tried on %s again, which had failed it, and not on %s", q.id, n.name, other.name)
	}
}

// uninvolved is a worker for a phase that was well all the time and has had no part in
// a failure of the request.
func (q *request) uninvolved(p route.Phase) *node {
	for _, n := range q.s.nodes {
		state, can := n.worker.State, n.worker.Role.CanDecode()
		if p == route.Prefill {
			can = n.worker.Role.CanPrefill()
		}
		if n.member && can && !state.Draining() && n.since+probeEvery <= q.arrived &&
			!slices.ContainsFunc(q.call.Routing.Run.History.Failures, func(f attempt.Failure) bool { return f.Worker == state || f.Other == state }) {
			return n
		}
	}
	return nil
}

// resent wants a request whose connection was closed as idle to go to the same engine.
func (q *request) resent() {
	n, in, p := q.idle, &q.call.Routing.Run.In, &q.call.Routing.Run.Plan
	q.idle = nil
	if n == nil || q.s.settings.Bounded || !n.member {
		return
	}
	now := in.DecodePeers[p.DecodeIndex]
	if q.idlePhase == route.Prefill {
		if p.Path == route.Local {
			return
		}
		now = in.PrefillPeers[p.PrefillIndex]
	}
	if ok, _ := n.worker.State.Usable(); ok && now.Worker.State != n.worker.State {
		q.s.violate("%s goes to %s after %s had closed an idle connection", q.id, now.Worker.Name, n.name)
	}
}

// chose reports whether the plan has given work to a node.
func (q *request) chose(n *node) bool {
	in, p := &q.call.Routing.Run.In, &q.call.Routing.Run.Plan
	return in.DecodePeers[p.DecodeIndex].Worker == n.worker || p.Path != route.Local && in.PrefillPeers[p.PrefillIndex].Worker == n.worker
}

// blamed reports whether engines of one phase broke on the request three times,
// and not always the same one.
func (q *request) blamed(h *attempt.History) bool {
	broke := map[route.Phase][]*workers.State{}
	for _, f := range h.Failures {
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
