// Package resumed has another engine continue a stream whose engine dies in the middle, or
// whose worker is drained. Its prompt is the ids of the first prompt and of what the client
// has of the answer: to all below, this is a call of its own, whose events are the
// next ones of the client's stream. No token comes twice.
package resumed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/resume"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Next serves the parts of a stream.
type Next interface {
	serving.Engine
	// Hold decides a call and reserves its rank, without waiting for anything; Do begins
	// with that. Drop releases the reservation.
	Hold(c *serving.Call, take func(*decide.Run) bool) bool
	Drop(c *serving.Call)
}

// Engine is an engine whose streams outlive those of Next, for calls whose settings ask for
// it (continue.mode).
type Engine struct {
	Next    Next
	Decider *routing.Decider
	Tokens  Tokens
	Fleet   func() *workers.Snapshot
	// Bodies is the memory of what is kept of streams, Moves paces what continues.
	Bodies *admission.Memory
	Moves  Moves
}

// Parts are what New composes an engine of.
type Parts struct {
	Decider *routing.Decider
	Fleet   func() *workers.Snapshot
	// Queue and DoorQueue are those of [serving.FleetPlanner].
	Queue     serving.Queue
	DoorQueue *admission.Queue
	// Watched wraps the planner, for tests that look at decisions. It may be nil.
	Watched func(serving.Planner) serving.Planner
	Legs    *serving.Legs
	Budget  *attempt.Budget
	// Outliers takes back the failures of engines that are not at fault.
	Outliers *health.Outliers
	Failures *watch.Failures
	Tokens   Tokens
	Bodies   *admission.Memory
	Moves    Moves
}

// New composes what answers calls: legs below decisions, below attempts, below streams that
// continue on another engine.
func New(p Parts) *Engine {
	fleet := &serving.FleetPlanner{Decider: p.Decider, Fleet: p.Fleet, Queue: p.Queue, DoorQueue: p.DoorQueue, Legs: p.Legs}
	planner := serving.Planner(fleet)
	if p.Watched != nil {
		planner = p.Watched(planner)
	}
	retried := &serving.Retried{Planner: planner, Budget: p.Budget, Repeats: p.Legs.Repeats, Outliers: p.Outliers, Failures: p.Failures}
	type next struct {
		*serving.Retried
		*serving.FleetPlanner
	}
	return &Engine{Next: next{retried, fleet}, Decider: p.Decider, Tokens: p.Tokens, Fleet: p.Fleet, Bodies: p.Bodies, Moves: p.Moves}
}

// Tokens are the texts of token ids, as prompt.Stage has them.
type Tokens interface {
	Decoder() func(dst []byte, id uint32) (b []byte, ok bool)
	Text(ctx context.Context, model string, list []*workers.Worker, ids []uint32) (string, error)
}

// Moves pace what continues: an [admission.Moves], or one under a clock of its own.
type Moves interface {
	Enter(ctx context.Context, slots []uint32, limit int, every time.Duration, beat func() error) error
	Try(slots []uint32, limit int) bool
	Free(slot uint32, limit int) bool
	Leave(slots []uint32)
}

const (
	// alignTimeout bounds a request to an engine for where a text ends in its tokens.
	alignTimeout = 2 * time.Second
	// heartbeat is how often a stream that waits to continue elsewhere gets a
	// comment, for clients and proxies that give up silent streams.
	heartbeat = 5 * time.Second
	// moveInterval is how often a stream whose worker is drained looks for a rank elsewhere.
	// A look that reads a long prompt takes milliseconds, and hundreds of streams may look:
	// the next one waits for lookShare times as long as the last one took.
	moveInterval = 50 * time.Millisecond
	lookShare    = 100
)

var (
	// errMoved ends a leg whose worker is drained.
	errMoved = errors.New("the worker is drained, and the rest comes from elsewhere")
	// errPanic ends one whose stream a panic has kept from its reader.
	errPanic = errors.New("internal error of the router")
)

// Do is [serving.Engine.Do].
func (e *Engine) Do(ctx context.Context, c *serving.Call) (*serving.Answer, error) {
	if c.Routing.Settings.Decisions.Continuations == 0 || !c.View.Stream || c.Endpoint.Body != api.JSONBody {
		return e.Next.Do(ctx, c) // there is nothing to continue
	}
	b := &body{e: e, ctx: ctx, first: c, call: c, Continuation: resume.New(&c.View, e.Tokens.Decoder(), e.Bodies)}
	c.WantIDs, c.Keeps = b.Refused == "" && !b.Stream.Native, true
	b.Begin()
	a, err := e.Next.Do(ctx, c)
	if err != nil || !a.Streams() {
		return a, err
	}
	b.now = a
	defer func() {
		if err != nil { // a panic: the answer has no reader to close it
			_ = b.Close(err)
		}
	}()
	err = errPanic
	b.Keep(&c.View) // and not before: until then the body has it all
	c.DropInput()
	if len(a.Before) > 0 {
		b.Stream.Refuse(resume.FirstToken)
	}
	b.noMemory()
	err = nil
	return &serving.Answer{Head: a.Head, Before: a.Before, Body: b}, nil
}

// body is a stream that may come from several engines, one after the other.
type body struct {
	resume.Continuation
	e   *Engine
	ctx context.Context //nolint:containedctx // of the whole answer
	// first is the client's call, call the one that now answers; now is its answer, nil when
	// it has been closed.
	first, call *serving.Call
	now         *serving.Answer
	// pending is an error that came with a piece: it is next.
	pending error
	// cut is the error of the newest leg that the client has a part of.
	cut error
	// pacedOn are the slots of the ranks that the rest has entered.
	pacedOn []uint32
	// move is the call for the rest with its decision, where a healthy stream is about
	// to be taken from its worker; nextLook is when it may look for a rank again.
	move     *serving.Call
	nextLook time.Time
}

// Next is [serving.Body.Next].
func (b *body) Next() (p []byte, head bool, err error) {
	for {
		if err = b.pending; err == nil {
			switch {
			case b.now == nil:
				return nil, false, io.EOF
			case b.Refused != resume.Endpoint && b.moves():
				err = &upstream.Failure{Kind: upstream.Canceled, Op: "read the answer", Sent: true, Started: true, Err: errMoved}
			default:
				p, head, err = b.now.Next()
			}
			if err == nil {
				p, b.pending = b.read(p)
				return p, head, nil
			}
		}
		b.pending = nil
		if p, err = b.ended(err); err != nil || len(p) > 0 {
			return p, true, err // a piece is the router's own
		}
	}
}

// read is what the client gets of a piece of the engine's stream. The error is the
// engine's own: the client gets it with the reason why the rest does not come, or not at all.
func (b *body) read(p []byte) ([]byte, error) {
	out, err := b.Pass(p)
	b.noMemory()
	switch {
	case errors.Is(err, resume.ErrUnclear):
		err = &api.Error{Status: http.StatusBadGateway, Code: api.CodeUpstreamError, Message: err.Error(), Err: err}
	case err != nil && !errors.Is(err, resume.ErrStopped):
		text := strings.TrimSpace(strings.TrimPrefix(string(b.Stream.Held()), "data:"))
		err = &upstream.Failure{Kind: upstream.Reset, Op: "read the answer", Sent: true, Started: true, Err: fmt.Errorf("%w: %.512s", serving.ErrEngine, text)}
	}
	return out, err
}

// noMemory says in receipt and metrics that the stream is not continuable from now on, where
// limits.body_memory has just been used up.
func (b *body) noMemory() {
	if b.Lost() {
		b.call.Record.Unkept(resume.Memory.String())
	}
}

// Done is [serving.Body.Done]. The end of an engine's stream is that of the client's only
// where the engine has announced it, or no engine can continue.
func (b *body) Done() bool {
	return b.now == nil || b.pending == nil && b.now.Done() && (b.Refused != "" || b.Stream.Done())
}

// Close is [serving.Body.Close].
func (b *body) Close(err error) error {
	defer b.Release()
	b.Leave()
	b.dropMove()
	if a := b.now; a != nil {
		b.now = nil
		err = a.Close(err)
	}
	return err
}

// peer is the worker and the rank of the leg that answers.
func (b *body) peer() (*workers.Worker, *workers.Rank) {
	run := &b.call.Routing.Run
	p := run.In.DecodePeers[run.Plan.DecodeIndex]
	return p.Worker, p.Rank
}

// ended is what follows when a leg has ended with an error: nothing, and the next piece
// comes from another engine; a last piece; or an error.
func (b *body) ended(err error) ([]byte, error) {
	c := &b.Continuation
	switch {
	case errors.Is(err, resume.ErrStopped):
		return nil, io.EOF
	case upstream.AtEnd(err):
		if c.Refused != "" || c.Stream.Done() {
			return nil, io.EOF
		}
		err = serving.Ended(b.now.Addr, "the stream ended before its end was announced")
	}
	if b.ctx.Err() != nil {
		return nil, err
	}
	worker, from := b.peer()
	err = b.now.Close(err)
	b.now = nil
	var cut *attempt.Failure
	if broke, ok := errors.AsType[*serving.Cut](err); ok {
		cut = broke.Failure
	} else if errors.Is(err, errMoved) {
		cut = attempt.Cut(worker, attempt.Moved)
		// The leg was canceled by the router: where no engine takes the rest, the client is
		// still there.
		err = &api.Error{Status: http.StatusBadGateway, Code: api.CodeUpstreamError, Message: worker.Name + " is being drained", Err: err}
	}
	if cut == nil {
		if why := c.Stream.Refused(); why != "" && errors.Is(err, resume.ErrUnclear) {
			return nil, b.notContinued(err, err, string(why), why.String())
		}
		return nil, err
	}
	b.cut = err
	if c.Whole() {
		return b.closing(cut)
	}
	why, words := c.Refused, ""
	if why == "" {
		why, words = b.beginRest(cut, from)
	}
	switch {
	case why != "":
		return nil, b.notContinued(err, err, string(why), c.Words(why))
	case words != "":
		return nil, b.notContinued(err, err, "policy", words)
	}
	a, err := b.e.Next.Do(b.ctx, b.call)
	if err == nil {
		c.Begin()
		if len(a.Before) > 0 {
			c.Stream.Refuse(resume.FirstToken)
		}
		b.now = a
		return nil, nil
	}
	if _, left := errors.AsType[*upstream.ClientError](err); !left && b.ctx.Err() == nil {
		err = b.notContinued(b.cut, err, "failed", fmt.Sprintf("no other engine could continue it: %v", api.FromError(err).Message))
	}
	return nil, err
}

// closing ends a stream whose engine died after the answer's last token.
func (b *body) closing(cut *attempt.Failure) ([]byte, error) {
	end, ok := b.Ending(b.first.View.IncludeUsage)
	switch {
	case !ok:
		why := b.Stream.Refused()
		return nil, b.notContinued(b.cut, b.cut, string(why), b.Words(why))
	case len(end) == 0:
		return nil, io.EOF
	}
	b.call.Record.Note(fmt.Sprintf("%s broke off after the last token; the end of the stream is the router's", cut.Name))
	return end, nil
}

// notContinued says in receipt, metrics, events and the client's error why a stream
// that has broken off is not continued elsewhere.
func (b *body) notContinued(first, err error, label, words string) error {
	b.call.Record.NotContinued(label, words)
	e := *api.FromError(first)
	e.Message += "; not continued elsewhere: " + words
	e.Err = err
	return &e
}

// beginRest makes the call for the rest of the stream, which came from a rank. Where there is none
// it returns why: one of the known reasons, or else a text.
func (b *body) beginRest(cut *attempt.Failure, from *workers.Rank) (resume.Refusal, string) {
	c := &b.Continuation
	c.Stream.Broke()
	generated := c.Stream.Generated()
	b.align()
	ids, why := c.Stream.Next()
	if why != "" {
		return why, ""
	}
	sent := c.Stream.Sent()
	rest := b.move
	if b.move = nil; rest == nil {
		var words string
		if rest, why, words = b.callForRest(ids, sent, cut, b.e.Fleet()); rest == nil {
			return why, words
		}
	}
	b.call.DropInput()
	b.call = rest
	b.first.SetRest(rest)
	rest.Record.Tokenized(rest.Routing.Prompt.Source)
	rest.Record.Continued(cut, from, sent, generated-sent)
	return "", ""
}

// callForRest makes the call for what comes after ids, the last so many of them the
// answer's; nil, with the reason, where there is none.
func (b *body) callForRest(ids []uint32, sent int, cut *attempt.Failure, fleet *workers.Snapshot) (_ *serving.Call, why resume.Refusal, words string) {
	raw, why := b.Rest(ids, sent)
	if why != "" {
		return nil, why, ""
	}
	x, c := b.call, serving.New()
	c.Details = serving.Details{
		ID: x.ID, Start: x.Start, From: x.From, Path: b.PathOfRest(b.first.Path), Endpoint: x.Endpoint, Name: x.Name, Model: x.Model, Salted: x.Salted, Hops: x.Hops,
		Owner: x.Owner, Claim: x.Claim, KeyHidden: x.KeyHidden, Record: x.Record, Rest: true, WantIDs: x.WantIDs, WantUsage: x.WantUsage, Idle: x.Idle, Pacer: b,
	}
	q := &c.Routing
	x.Routing.CopyForRest(q, fleet)
	if next := q.Run.Failed(*cut); next.Step != attempt.Continue {
		c.Release()
		return nil, "", next.Why
	}
	var ok bool
	if c.Body, ok = api.OwnBody(raw, b.e.Bodies); !ok {
		c.Body = nil
		c.Release()
		return nil, resume.Memory, ""
	}
	kind := resume.RestKind(c.Endpoint.Kind)
	err := c.View.Parse(c.Body.B, kind, api.Limits{})
	c.View.Withheld = x.View.Withheld
	if err == nil && c.Salted {
		path, _, _ := strings.Cut(b.first.Path, "?")
		_, err = access.SaltPrompt(&c.View, c.Endpoint.Kind, path, c.Owner, q.List)
	}
	if err != nil { // cannot be: the router wrote it
		c.Release()
		return nil, "", err.Error()
	}
	b.e.Decider.Read(b.ctx, q, c.Endpoint, kind, &c.View)
	return c, "", ""
}

// align asks an engine which of the tokens stand for the text that was sent, where
// that is not known because several came in one event.
func (b *body) align() {
	if _, text := b.Stream.Unaligned(); text == "" {
		return
	}
	ctx, cancel := context.WithTimeout(b.ctx, alignTimeout)
	defer cancel()
	model := b.call.Model
	list, _ := b.e.Fleet().Candidates(model)
	b.Stream.AlignBy(func(ids []uint32) (string, error) { return b.e.Tokens.Text(ctx, model, list, ids) })
}

// Enter is [serving.Pacer.Enter]: an engine that dies leaves many streams at once.
func (b *body) Enter(ctx context.Context, run *decide.Run) error {
	if len(b.pacedOn) > 0 {
		return nil
	}
	slots := run.Slots(b.pacedOn)
	began := time.Now()
	err := b.e.Moves.Enter(ctx, slots, b.call.Routing.Settings.Continue.PerRank, heartbeat, func() error {
		return b.call.Idle.Idle("the rest waits in the queue of another engine")
	})
	if err == nil {
		b.pacedOn = slots
	}
	b.call.Record.Waited("move", time.Since(began))
	return err
}

// Leave is [serving.Pacer.Leave].
func (b *body) Leave() {
	if len(b.pacedOn) > 0 {
		b.e.Moves.Leave(b.pacedOn)
		b.pacedOn = b.pacedOn[:0]
	}
}

// moves reports whether a healthy stream is to be taken from its worker now: that one is
// drained, the stream has not moved as often as it may, and a rank elsewhere takes it at
// once. That rank is reserved for the stream then, in move; otherwise
// nothing has changed, and the stream stays where it is.
func (b *body) moves() bool {
	from, _ := b.peer()
	x := b.call
	run, s := &x.Routing.Run, x.Routing.Settings
	if !from.Role.CanDecode() || !from.State.Moving() || !b.Stream.Resumable() || run.History.Continued >= s.Decisions.Continuations || run.Criteria.Pin.Decode != "" {
		return false
	}
	now := time.Now()
	if now.Before(b.nextLook) {
		return false
	}
	b.nextLook = now.Add(moveInterval)
	fleet, limit := b.e.Fleet(), s.Continue.PerRank
	list, _ := fleet.Candidates(x.Model)
	if !slices.ContainsFunc(list, func(w *workers.Worker) bool {
		ok, _ := w.State.Usable()
		return ok && w.State != from.State && w.Role.CanDecode() && b.ReportsIDs(w.WireEngine()) &&
			slices.ContainsFunc(w.Ranks, func(k *workers.Rank) bool { return b.e.Moves.Free(k.Slot, limit) })
	}) {
		return false
	}
	defer func() {
		took := time.Since(now)
		b.nextLook = now.Add(max(moveInterval, lookShare*took))
	}()
	c, _, _ := b.callForRest(b.Stream.IDs(), b.Stream.Sent(), attempt.Cut(from, attempt.Moved), fleet)
	if c == nil {
		return false
	}
	if b.e.Next.Hold(c, func(run *decide.Run) bool {
		slots := run.Slots(b.pacedOn)
		if !b.e.Moves.Try(slots, limit) {
			return false
		}
		b.pacedOn = slots
		return true
	}) {
		b.move = c
		return true
	}
	c.Release()
	return false
}

// dropMove releases what a move holds that does not happen.
func (b *body) dropMove() {
	if c := b.move; c != nil {
		b.move = nil
		b.e.Next.Drop(c)
		c.Release()
	}
}
