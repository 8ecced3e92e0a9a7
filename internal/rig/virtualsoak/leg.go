package virtualsoak

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/virtualsoak/reference"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

const (
	// legTimeout is how long a leg may be without the head of its answer, idleTimeout how
	// long its answer may pause.
	legTimeout, idleTimeout = 400 * time.Millisecond, 2 * time.Second
)

// engines are those of the world, as the router reaches them.
type engines struct{ s *stage }

// leg is one call of an engine, and its answer.
type leg struct {
	s      *stage
	q      *request
	n      *node
	from   *node // the prefill whose KV a decode leg pulls
	phase  route.Phase
	addr   string
	id     string
	tokens []uint32
	inc    int
	life   string        // the engine's id when the leg reached it
	delay  time.Duration // one way
	over   bool          // the engine does no more for it, or nobody listens
	heard  bool          // an output has come
	begun  bool          // the client has a part of the answer
	cutAt  int           // tokens after which the answer is cut, -1 for never
	// before is how many tokens of the answer came from other legs.
	before int
	// diesAt is after how many tokens its engine dies, -1 for never.
	diesAt int
	// pull names the transfer whose KV it fetches, push the one whose KV is pushed.
	pull, push, pushedBy string
	// written is called once the request was written; nil for nothing.
	written func()
	// struck says that it is cut for nobody's fault.
	struck bool
	// cutShort says that the router closed it before its end.
	cutShort bool
	said     []uint32
	voice    *reference.Voice
	usage    bool

	// The answer, as far as it has come.
	head     upstream.Head
	headed   bool
	pieces   [][]byte
	failed   *upstream.Failure // and then it broke
	eof      bool
	waiting  *task
	since    time.Duration // when a piece came last
	idle     time.Duration
	timed    bool // the timer for idle runs
	returned bool
	closed   int
}

// Do is for serving.Transport.
func (e engines) Do(ctx context.Context, u *upstream.Leg) (serving.Response, error) {
	s, q := e.s, e.s.running.q
	body := bytes.Join(u.Body, nil)
	l := &leg{
		s: s, q: q, n: s.byHost[u.Base.Host], addr: u.Base.Host, cutAt: -1, diesAt: -1, delay: s.between(50*time.Microsecond, time.Millisecond),
		phase: route.Decode, waiting: s.running, idle: u.IdleTimeout,
	}
	for _, h := range u.Set {
		if h.Key == api.HeaderRequestID {
			l.id = fmt.Sprintf("cmpl-%s-%d", h.Value, len(q.legs))
		}
	}
	if s.running.beside || rawjson.Value(body).Get("kv_transfer_params.do_remote_decode").Bool() {
		l.phase = route.Prefill
	} else {
		q.decoding = l
	}
	q.legs = append(q.legs, l)
	r := l.read(u.Path, body)
	if l.phase == route.Prefill {
		l.n.prefills++
	}
	sent := s.now()
	if l.phase == route.Prefill && l.push != "" {
		connects, written := u.Connects, u.Written // u is memory that is used again
		connected := l.n.known == l.n.inc+1
		if !connected && connects != nil {
			connects(l.n.known > 0)
		}
		l.written = func() {
			s.transfer(l.push).written = true
			if written != nil {
				written(!connected || l.n.known != l.n.inc+1)
			}
			l.n.known = l.n.inc + 1
		}
	}
	s.w.At(s.w.Now()+u.HeadTimeout, func() { l.timeout() })
	if alive := u.Alive; alive != nil {
		s.w.At(max(s.w.Now(), s.w.Now()+u.AliveBy.Sub(sent)), func() {
			if !alive(sent) {
				l.timeout()
			}
		})
	}
	s.w.At(s.w.Now()+l.delay, func() { l.arrives(r) })
	for !l.headed && l.failed == nil {
		if ctx.Err() != nil {
			l.hangUp()
			l.failed = &upstream.Failure{Kind: upstream.Canceled, Addr: l.addr, Op: "wait for the answer of", Sent: true, Err: context.Cause(ctx)}
			break
		}
		s.block(ctx)
	}
	if !l.headed {
		l.ended()
		return nil, l.failed
	}
	l.returned, l.since = true, s.w.Now()
	return &response{l, ctx}, nil
}

// ended takes the leg out of those in progress.
func (l *leg) ended() {
	if l.phase == route.Prefill {
		l.n.prefills--
	}
	l.s.judge = true
}

// read reads the request that the engine gets.
func (l *leg) read(path string, body []byte) engine.Request {
	s, q := l.s, l.q
	kind := api.Completion
	ids, limit := rawjson.Value(body).Get("prompt"), rawjson.Value(body).Get("max_tokens")
	if path == paths[api.SGLangGenerate] {
		kind = api.SGLangGenerate
		ids, limit = rawjson.Value(body).Get("input_ids"), rawjson.Value(body).Get("sampling_params.max_new_tokens")
	}
	if path == paths[api.Chat] {
		kind, l.tokens = api.Chat, q.whole
	} else if err := json.Unmarshal(ids, &l.tokens); err != nil {
		s.violate("%s: an engine got %s: %v", q.id, body, err)
	}
	l.before = len(l.tokens) - len(q.whole)
	want := append(slices.Clone(q.whole), q.want.Tokens[:min(max(0, l.before), len(q.want.Tokens))]...)
	if !slices.Equal(l.tokens, want) {
		s.violate("%s would go on from %v, the client has %v", q.id, l.tokens, want)
	}
	most, _ := limit.Int()
	r := engine.Request{ID: l.id, Tokens: l.tokens, MaxTokens: most, IgnoreEOS: s.script != nil && s.script.on}
	run := &q.call.Routing.Run
	if s.atOnce() {
		l.push = rawjson.Value(body).Get("kv_transfer_params.transfer_id").String()
	}
	if l.phase == route.Prefill {
		r.MaxTokens, r.Pin = 1, true
		if l.push != "" {
			t := s.transfer(l.push)
			if t.asked {
				s.violate("%s: a second prefill leg has the transfer %s", q.id, l.push)
			}
			t.asked = true
		}
		return r
	}
	if r.MaxTokens != q.most-l.before && (limit.Exists() || l.before > 0) {
		s.violate("%s: an engine is asked for %d tokens after %d of %d", q.id, r.MaxTokens, l.before, q.most)
	}
	if r.MaxTokens == 0 {
		r.MaxTokens = q.most // a body whose only sampling parameter is another one
	}
	if run.History.Continued > 0 {
		s.note("%s: goes on after %d tokens on %s", q.id, l.before, l.n.name)
		if q.refusal != "" {
			s.violate("%s goes on elsewhere; it should be refused as %q", q.id, q.refusal)
		}
		l.plantSeam(&r)
	}
	if q.stream != nil {
		l.voice = reference.NewVoice(tokenizer(), kind, l.tokens, rawjson.Value(body).Get("return_token_ids").Bool(), q.stream.stops)
		q.stream.voice = l.voice
		l.usage = rawjson.Value(body).Get("stream_options.include_usage").Bool()
	} else {
		l.voice = reference.NewVoice(tokenizer(), kind, l.tokens, false, nil)
	}
	if params := rawjson.Value(body).Get("kv_transfer_params"); params.Exists() {
		if run.Plan.Path != route.Local {
			l.from = s.nodeOf(run.In.PrefillPeers[run.Plan.PrefillIndex].Worker)
		}
		if l.push == "" {
			l.fetch(&r, string(params))
		} else {
			l.pushedBy = params.Get("remote_engine_id").String()
		}
	}
	return r
}

// plantSeam has the engine asked for another rest than the router has asked for.
func (l *leg) plantSeam(r *engine.Request) {
	s, q := l.s, l.q
	switch s.plant {
	case seamTwice: // the client has the last one already
		if l.before > 0 {
			l.tokens = l.tokens[:len(l.tokens)-1]
		}
	case wholeLimit:
		r.MaxTokens = q.most
	case aheadOfText:
		if had := q.broke; had != nil {
			l.tokens = append(slices.Clone(had.tokens), had.said...)
			r.MaxTokens = max(1, q.most-(len(l.tokens)-len(q.whole)))
		}
	}
	r.Tokens = l.tokens
	l.before = len(l.tokens) - len(q.whole)
}

// fetch reads whose KV the engine is to pull. No transfer feeds two requests.
func (l *leg) fetch(r *engine.Request, params string) {
	s, q := l.s, l.q
	var err error
	if r.Pull, err = reference.Pull([]api.Edit{{Key: "kv_transfer_params", Value: []byte(params)}}); err != nil {
		s.violate("%s: %v", q.id, err)
		return
	}
	if s.plant == reuseTransfer && s.old != nil && len(s.old.Blocks) >= len(r.Pull.Blocks) && s.chance(0.2) {
		s.note("PLANTED: %s gets the transfer parameters of %s", q.id, s.old.RequestID)
		r.Pull = s.old
		return
	}
	s.old = r.Pull
	name := r.Pull.EngineID + " " + r.Pull.RequestID
	if who, ok := s.used[name]; ok {
		s.violate("the transfer %s feeds %s, but has fed %s", name, q.id, who)
		return
	}
	if q.refused[name] {
		s.out.HandedOver++
		s.note("%s: decode on %s of what %s has", q.id, l.n.name, l.from.name)
	}
	s.used[name] = q.id
	l.pull = name
}

// arrives is the request at its engine.
func (l *leg) arrives(r engine.Request) {
	s, q, n := l.s, l.q, l.n
	switch {
	case l.over:
		return
	case !n.up:
		l.later(func() {
			l.breaks(upstream.Failure{Kind: upstream.Connect, Op: "connect to", Err: errors.New("refused")})
		})
		return
	}
	if l.written != nil {
		l.written()
	}
	switch {
	case n.hang:
		return
	case s.chance(n.full):
		l.later(func() {
			if l.pull != "" {
				q.refused[l.pull] = true
				delete(s.used, l.pull) // it was not read
			}
			l.refuses(http.StatusServiceUnavailable, "The request queue is full")
		})
		return
	case q.kind == poison:
		l.later(func() { l.refuses(http.StatusInternalServerError, "the request is bad") })
		return
	case s.script == nil && s.chance(0.01): // an idle connection is closed as the request comes
		if !q.call.Routing.Run.History.MayBeStale(l.phase) {
			q.struck = append(q.struck, n)
		}
		l.later(func() { l.breaks(stale) })
		return
	case q.kind == deadly && s.script != nil:
		l.diesAt = s.script.cut
	case q.kind == deadly:
		l.diesAt = s.rng.IntN(3)
	case s.chance(n.errors):
		l.later(func() { l.refuses(http.StatusInternalServerError, "the engine has a fault") })
		return
	case s.chance(n.die):
		l.cutAt = s.rng.IntN(4)
	case s.script != nil:
		if l.phase == route.Decode && !s.script.struck {
			s.script.struck, l.struck, l.cutAt = true, true, s.script.cut
		}
	case q.mayGoOn() && l.phase == route.Decode && s.chance(0.1): // and nobody need be to blame
		l.struck = true
		l.cutAt = 1 + s.rng.IntN(max(1, len(q.want.Tokens)-l.before)) // before the first token it would be tried again
	}
	if l.inc, l.life = n.inc, n.v.EngineID(); l.pushedBy != "" {
		l.registers(r, l.pushedBy)
	} else if !l.submit(r) {
		return
	}
	if l.phase == route.Decode && q.stream != nil && s.chance(0.3) { // the head of a stream need not wait for a token
		l.later(func() { l.begins(http.StatusOK, "text/event-stream", -1) })
	}
	if l.diesAt == 0 {
		s.w.At(s.w.Now()+s.between(0, time.Millisecond), l.dies)
	}
}

// submit has the engine take the request up.
func (l *leg) submit(r engine.Request) bool {
	r.Sink = func(o engine.Output) {
		// Mooncake's connector keeps nothing of an answer that ended by itself.
		if l.push != "" && l.phase == route.Prefill && len(o.Pinned) > 0 && (l.s.group.Connector != workers.ConnectorMooncake || o.Finish == engine.FinishLength) {
			l.computed(o)
		}
		l.later(func() { l.output(o) })
	}
	err := l.n.v.Submit(r)
	if err != nil {
		l.later(func() { l.refuses(http.StatusInternalServerError, err.Error()) })
	}
	return err == nil
}

// stale is a connection that was closed as idle while the request was sent.
var stale = upstream.Failure{Kind: upstream.Reset, Op: "wait for the answer of", Sent: true, Reused: true, After: time.Millisecond, Err: io.ErrUnexpectedEOF}

// later is what comes over the wire, unless nobody listens any more.
func (l *leg) later(f func()) {
	l.s.w.At(l.s.w.Now()+l.delay, func() {
		if !l.over {
			f()
		}
	})
}

// begins is the head of an answer.
func (l *leg) begins(status int, media string, length int) {
	if l.headed {
		return
	}
	l.headed = true
	l.head = upstream.Head{Status: status, Addr: l.addr, ContentLength: int64(length)}
	l.head.Header.Add("Content-Type", media)
	l.s.wake(l.waiting)
}

// says is a piece of the answer.
func (l *leg) says(p []byte) {
	l.since = l.s.w.Now()
	if len(p) > 0 {
		l.pieces = append(l.pieces, p)
		l.s.wake(l.waiting)
	}
}

// whole is all of an answer.
func (l *leg) whole(status int, body []byte) {
	l.over, l.eof = true, true
	l.begins(status, api.MediaJSON, len(body))
	l.says(body)
}

// refuses is an answer that is none, or the error event of a stream that has begun.
func (l *leg) refuses(status int, why string) {
	body, _ := json.Marshal(map[string]any{"error": map[string]any{"message": why, "code": status}}) // strings and numbers
	if !l.headed {
		l.whole(status, body)
		return
	}
	l.lost(why)
	l.over, l.eof = true, true
	l.says(fmt.Appendf(nil, "data: %s\n\n", body))
}

// breaks is the end of the connection.
func (l *leg) breaks(f upstream.Failure) {
	l.lost(fmt.Sprint(f.Err))
	if l.begun && l.s.chance(0.5) && len(l.said) > 0 { // in the middle of an event
		if now, _, _ := l.voice.Says(l.id, engine.Output{Token: 300}, false); len(now) > 0 {
			l.says(now[:l.s.rng.IntN(slices.Index(now, '\n'))])
		}
	}
	f.Addr, f.Started = l.addr, l.headed
	l.over, l.failed = true, &f
	l.s.wake(l.waiting)
}

// reset is the end of a connection whose engine was at work.
func (l *leg) reset(why string) {
	l.breaks(upstream.Failure{Kind: upstream.Reset, Op: "read the answer of", Sent: true, Err: errors.New(why)})
}

// lost notes that a leg breaks while its client has a part of the answer, and
// whether the rest of that may come from elsewhere.
func (l *leg) lost(why string) {
	s, q := l.s, l.q
	switch {
	case l.phase == route.Prefill || q.decoding != l:
		return
	case !l.begun:
		if l.struck {
			q.struck = append(q.struck, l.n)
		}
		return
	}
	s.note("%s: %s breaks off (%s) after %d tokens", q.id, l.n.name, why, l.before+len(l.said))
	l.n.faulted = true
	q.broke = l
	if q.stream != nil {
		q.refusal = q.mayNot()
	}
	l.right()
}

// timeout gives the leg up if there is no head of an answer.
func (l *leg) timeout() {
	if l.headed || l.over || l.failed != nil {
		return
	}
	l.abort()
	l.over, l.failed = true, &upstream.Failure{Kind: upstream.Timeout, Addr: l.addr, Op: "wait for the answer of", Sent: true, Err: context.DeadlineExceeded}
	if l.struck {
		l.q.struck = append(l.q.struck, l.n)
	}
	l.s.wake(l.waiting)
}

// output is what the engine says.
func (l *leg) output(o engine.Output) {
	q := l.q
	switch {
	case (q.kind == deadly || o.Finish == engine.FinishError || o.Finish == engine.FinishAbort) && l.n.inc != l.inc: // its process is gone
		if l.diesAt == 0 && !l.heard && l.s.chance(0.5) {
			l.breaks(stale) // on a reused connection it looks the same
			return
		}
		l.reset(fmt.Sprint(cmp.Or(o.Err, virtual.ErrDown)))
		return
	case o.Finish == engine.FinishError || o.Finish == engine.FinishAbort:
		l.refuses(http.StatusInternalServerError, fmt.Sprint(o.Err))
		return
	case o.HasToken && l.cutAt == 0:
		l.abort()
		l.reset("the answer was cut")
		return
	}
	l.cutAt--
	if o.HasToken {
		if l.diesAt--; l.diesAt == 0 {
			l.s.w.At(l.s.w.Now(), l.dies)
		}
	}
	l.heard = true
	if l.phase == route.Prefill {
		if o.Finish != engine.Running {
			l.prefilled(o)
		}
		return
	}
	if o.HasToken {
		l.said = append(l.said, o.Token)
	}
	if q.stream == nil {
		if o.HasToken {
			l.voice.Text(o.Token, o.Finish)
		}
		if o.Finish != engine.Running {
			l.right()
			l.whole(http.StatusOK, l.voice.Answer(l.id, o.Finish))
		}
		return
	}
	l.begins(http.StatusOK, "text/event-stream", -1)
	if o.HasToken {
		l.speak(o)
	} else if o.Finish != engine.Running {
		l.s.violate("%s: %s ends without a token", q.id, l.n.name)
	}
}

// speak says an output in a stream.
func (l *leg) speak(o engine.Output) {
	s, q := l.s, l.q
	now, end, finish := l.voice.Says(l.id, o, l.usage)
	l.says(now)
	if finish == engine.Running {
		return
	}
	if o.Finish == engine.Running { // a stop string has ended it
		l.abort()
	}
	if q.stream.why == "" && (s.chance(0.05) || s.script != nil && s.script.cut == s.script.limit) {
		s.note("%s: %s breaks off after the last token", q.id, l.n.name)
		l.over, l.failed = true, &upstream.Failure{Kind: upstream.Reset, Addr: l.addr, Op: "read the answer of", Sent: true, Started: true, Err: io.ErrUnexpectedEOF}
		q.broke, l.struck, l.n.faulted = l, true, true
		s.wake(l.waiting)
		return
	}
	l.right()
	l.says(end)
	l.over, l.eof = true, true
	s.wake(l.waiting)
}

// right wants what the engine has said to be a part of the answer.
func (l *leg) right() {
	q, want := l.q, l.q.want.Tokens
	if to := l.before + len(l.said); l.before > len(want) || to > len(want) || !slices.Equal(l.said, want[l.before:to]) {
		q.s.violate("%s got the tokens %v after %d from %s, the answer is %v", q.id, l.said, l.before, l.n.name, want)
	}
}

// prefilled is the answer to a prefill.
func (l *leg) prefilled(o engine.Output) {
	s := l.s
	l.whole(http.StatusOK, reference.PrefillAnswer(l.id, l.id, l.life, len(l.tokens), s.group.Connector, o))
	if s.doomed > 0 && l.n.up && l.n.well() {
		s.w.At(s.w.Now(), func() {
			if s.doomed > 0 && l.n.up && l.n.well() {
				s.doom(l.n)
			}
		})
	}
}

// abort has the engine give the leg up.
func (l *leg) abort() {
	s := l.s
	s.w.At(s.w.Now()+l.delay, func() {
		if l.n.up && l.n.inc == l.inc {
			l.n.v.Abort(l.id)
		}
	})
}

// hangUp closes the connection on the router's side.
func (l *leg) hangUp() {
	if !l.over {
		l.over = true
		l.abort()
	}
}

// response is what the router reads of a leg.
type response struct {
	*leg
	ctx context.Context //nolint:containedctx // of the leg
}

// Begins is for serving.Response.
func (r *response) Begins() *upstream.Head { return &r.head }

// Done is for serving.Response.
func (r *response) Done() bool { return r.eof && len(r.pieces) == 0 }

// Next is for serving.Response.
func (r *response) Next() ([]byte, error) {
	l := r.leg
	l.waiting, l.since = l.s.running, l.s.w.Now()
	for {
		switch {
		case r.ctx.Err() != nil:
			return nil, &upstream.Failure{Kind: upstream.Canceled, Addr: l.addr, Op: "read the answer of", Sent: true, Started: true, Err: context.Cause(r.ctx)}
		case len(l.pieces) > 0:
			p := l.pieces[0]
			l.pieces = l.pieces[1:]
			return p, nil
		case l.failed != nil:
			return nil, l.failed
		case l.eof:
			return nil, io.EOF
		}
		l.watch()
		l.s.block(r.ctx)
	}
}

// watch has the leg fail where its answer pauses too long.
func (l *leg) watch() {
	if l.timed || l.idle <= 0 {
		return
	}
	l.timed = true
	l.s.w.At(l.since+l.idle, func() {
		l.timed = false
		switch {
		case l.over:
		case l.s.w.Now() < l.since+l.idle:
			l.watch()
		default:
			l.abort()
			l.breaks(upstream.Failure{Kind: upstream.Timeout, Op: "read the answer of", Sent: true, Err: context.DeadlineExceeded})
		}
	})
}

// ReadAll is for serving.Response.
func (r *response) ReadAll(int64) (all []byte, err error) {
	for {
		p, err := r.Next()
		if upstream.AtEnd(err) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, p...)
	}
}

// Close is for serving.Response.
func (r *response) Close() {
	l := r.leg
	if l.s.plant == keepLeg && l.s.chance(0.02) {
		l.s.note("PLANTED: the %s leg of %s on %s is not closed", l.phase, l.q.id, l.n.name)
		l.ended()
		return
	}
	if l.closed++; l.closed == 1 {
		l.ended()
		l.cutShort = !l.over
		l.hangUp()
	}
}
