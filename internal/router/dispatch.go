package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/pair"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

var (
	errEjected    = errors.New("the worker is ejected")
	errFirstToken = errors.New("the rest of a stream cannot begin with a prefill's own token")
)

// dispatch decides and carries out, again elsewhere when an attempt fails
// before the client got a byte.
func (x *exchange) dispatch() error {
	err := x.attempts()
	if err != nil && !x.begun.Load() && x.ctx.Err() == nil {
		x.excuse()
	}
	return err
}

// excuse takes back the failures counted against engines that broke on a request, where
// it failed in the end and is as likely at fault itself.
func (x *exchange) excuse() {
	if x.body == nil { // nothing says that two requests are the same
		return
	}
	blamed := x.r.repeats.Failed(x.requestKey(), &x.d.Run.History, time.Now())
	if len(blamed) == 0 {
		return
	}
	for i := range blamed {
		x.r.outliers.Excuse(blamed[i].Admission)
		x.r.failures.Excuse(blamed[i].Name, string(blamed[i].Reason))
	}
	text := attempt.Excuse(blamed)
	x.book.Note(text)
	x.r.metrics.Blamed()
	x.book.Event(x.r.failures.Blamed(text, time.Now()))
}

// served says that an engine has answered the request, of whose body x still holds the
// bytes.
func (x *exchange) served() {
	if x.body != nil && x.r.repeats.Watches(len(x.body.B), time.Now()) {
		x.r.repeats.Served(x.requestKey())
	}
}

// requestKey identifies the request, which has a body, by that and its path.
func (x *exchange) requestKey() attempt.RequestKey {
	var h maphash.Hash
	h.SetSeed(keySeed)
	_, _ = h.WriteString(x.req.URL.Path) // never fails
	_, _ = h.Write(x.body.B)
	return attempt.RequestKey{Size: len(x.body.B), Hash: h.Sum64()}
}

// keySeed is that of the hashes of bodies, which leave no process.
var keySeed = maphash.MakeSeed()

func (x *exchange) attempts() error {
	d := &x.d
	defer x.noRetry()
	var last error // of the attempts that sent a leg, if there are any
	for {
		if d.Run.Attempt > 0 && !x.decided {
			x.r.asker.Renew(d, x.r.registry.Snapshot(), &x.view)
		}
		if err := x.place(); err != nil {
			return cmp.Or(last, err)
		}
		x.book.Decided()
		if d.Run.Plan.Err != nil {
			if d.Run.NoChoice().Step == attempt.Recall {
				continue
			}
			if last != nil {
				return last // why the workers are banned says more
			}
			return d.Run.Refusal()
		}
		d.Run.Compact()
		err := x.carryOut()
		if last != nil && errors.Is(err, errNoLeg) {
			return last // what an engine has answered says more
		}
		if err == nil || x.begun.Load() || x.ctx.Err() != nil || !x.again(err) {
			return err
		}
		if f, ok := errors.AsType[*attempt.Error](err); last == nil || !ok || !f.Reason.Means().Unsent {
			last = err
		}
	}
}

// retry is an attempt that follows a failed one.
type retry struct {
	phase  selector.Phase
	reason attempt.Reason // "" where none follows, and where it counts as none
	// budgeted says that it is taken out of the budget.
	budgeted bool
}

// sends counts a retry: a leg of it goes out.
func (x *exchange) sends() {
	if p := &x.retry; p.reason != "" {
		x.r.traffic.Retries.Add(1)
		x.r.metrics.Retry(string(p.phase), string(p.reason))
	}
	x.retry = retry{}
}

// noRetry gives back what was taken of the budget where nobody was found who could be
// asked: a lone worker that refuses would use up what the others need.
func (x *exchange) noRetry() {
	if x.retry.budgeted {
		x.r.budget.Return(time.Now())
	}
	x.retry = retry{}
}

// again reports whether another attempt may follow one that has failed, and
// prepares it.
func (x *exchange) again(err error) bool {
	r, run := x.r, &x.d.Run
	var f *attempt.Error
	if !errors.As(err, &f) {
		return false
	}
	f.Admission = *x.admission(f.Phase)
	next := run.Failed(f.Failure)
	if next.Budgeted && !x.retry.budgeted {
		if x.retry.budgeted = r.budget.Take(time.Now(), x.d.Settings.Retry.Budget); !x.retry.budgeted {
			next = run.NoBudget()
		}
	}
	switch {
	case next.Step == attempt.GiveUp:
		if next.Why != "" {
			x.book.Note("no retry: " + next.Why)
		}
		return false
	case next.Step == attempt.FallBack:
		x.book.Note(fmt.Sprintf("fallback to local prefill: %v", f))
	case next.Free && f.Reason != attempt.Stale: // nothing was sent
	default:
		x.retry.phase, x.retry.reason = f.Phase, f.Reason
		x.book.Note(fmt.Sprintf("attempt %d failed: %v", run.Attempt, err))
	}
	return true
}

// carryOut executes the plan once, up to the end of the answer or the head of a
// stream.
func (x *exchange) carryOut() error {
	r, d := x.r, &x.d
	p := &d.Run.Plan
	decode := d.Run.In.DecodePeers[p.DecodeIndex]
	x.path = string(p.Path)
	// For the attempt right after it only, and so for the same prompt.
	before := x.refused
	x.refused = refused{}
	if d.Run.History.Continued > 0 {
		if err := x.enterMove(); err != nil {
			return err
		}
		defer x.leaveMove()
	}
	if !x.r.legs.Take(1) {
		x.giveUpPlace()
		return x.noLeg()
	}
	defer func() {
		if x.flow.resp == nil { // else respond gives it back
			r.legs.Give(1)
		}
	}()
	if !x.admit(selector.Decode, decode.Worker) {
		x.giveUpPlace()
		return x.fail(selector.Decode, decode.Worker, attempt.Ejected, false, errEjected)
	}
	held := x.reserved
	if x.reserved = nil; held == nil {
		held = r.asker.Reserve(d)
	}
	if d.Settings.Decisions.Rule.Auto {
		r.costs.Chose(x.model, p, time.Now())
	}
	defer func() {
		if x.flow.resp == nil { // else it goes on
			held.Release()
		}
	}()
	if p.Path == decide.Local {
		x.sends()
		now := time.Now()
		r.asker.Sent(d, decode.Worker, decode.Rank, now)
		err := x.decodeLeg(x.ctx, decode, held, x.edit(nil, decode, selector.Decode), nil)
		x.unsent(err, decode, now)
		return err
	}
	return x.remote(decode, held, before)
}

// transfer begins a plan's transfer of KV.
func (x *exchange) transfer(prefill, decode disagg.Peer) (t *disagg.Transfer, err error) {
	if !x.admit(selector.Prefill, prefill.Worker) {
		return nil, x.fail(selector.Prefill, prefill.Worker, attempt.Ejected, false, errEjected)
	}
	d := &x.d
	name := d.Run.Plan.Connector
	switch connector := d.Settings.Connectors[name]; {
	case connector == nil:
		err = fmt.Errorf("unknown connector %q", name)
	case d.Run.History.Continued > 0 && name == workers.ConnectorLMCache:
		err = errFirstToken
	default:
		t, err = connector.Begin(disagg.Dispatch{
			RequestID: x.id, Facts: d.Run.Request.Facts, Prefill: prefill, Decode: decode,
			Check: cmp.Or(prefill.Worker.TransferCheck, workers.TransferCheck(d.Settings.Routing.TransferCheck)),
		})
	}
	if err != nil {
		return nil, x.fail(selector.Prefill, prefill.Worker, attempt.NoConnector, false, err)
	}
	return t, nil
}

// remote carries out a plan with remote prefill.
func (x *exchange) remote(decode disagg.Peer, held *ledger.Reservation, before refused) error {
	r, d := x.r, &x.d
	_, claim := d.Run.Claims()
	prefill := d.Run.In.PrefillPeers[d.Run.Plan.PrefillIndex]
	now := time.Now()
	transfer := x.handedOver(before, prefill, decode)
	if transfer == nil {
		var err error
		if transfer, err = x.transfer(prefill, decode); err != nil {
			x.report(selector.Decode, health.Canceled)
			return err
		}
		x.sends()
		r.asker.Sent(d, prefill.Worker, prefill.Rank, now)
		r.asker.Sent(d, decode.Worker, decode.Rank, now)
		if transfer.Mode() == disagg.Concurrent {
			return x.concurrent(transfer, prefill, claim, decode, held)
		}
		if err := x.prefillLeg(x.ctx, transfer, prefill, claim); err != nil {
			x.report(selector.Decode, health.Canceled) // nothing was sent to it
			x.unsent(err, prefill, now)
			return err
		}
		d.Run.History.Answered(prefill.Worker.State)
		x.aliveBy = time.Now().Add(d.Settings.Timeouts.KVLease * 4 / 5)
	} else {
		x.sends()
		r.asker.Sent(d, decode.Worker, decode.Rank, now)
	}
	edits, err := transfer.DecodeEdits()
	if err != nil {
		x.report(selector.Decode, health.Canceled)
		return attempt.NewError(selector.Prefill, prefill.Worker, attempt.BadParams, true, err)
	}
	err = x.decodeLeg(x.ctx, decode, held, x.edit(edits, decode, selector.Decode), transfer)
	x.unsent(err, decode, now)
	var f *attempt.Error
	if errors.As(err, &f) {
		f.Other = prefill.Worker.State // its KV may be what was missing
		// An engine whose stream has begun may have fetched the KV.
		if u, ok := errors.AsType[*upstream.Failure](err); ok && f.Reason == attempt.Overloaded && u.Kind == upstream.Status {
			x.refused = refused{transfer, prefill.Rank}
		}
	}
	return err
}

// unsent takes back that a rank is predicted to have the prompt, if it has refused it.
func (x *exchange) unsent(err error, p disagg.Peer, sent time.Time) {
	if f, ok := errors.AsType[*attempt.Error](err); ok && f.Reason == attempt.Overloaded && f.Worker == p.Worker.State {
		x.r.asker.Refused(&x.d, p.Worker, p.Rank, sent)
	}
}

// mayBeLost finds out whether the engine of the other leg, which had the request at the
// same time, may have died of it, too, or hangs: it failed in such a way, or gives no sign
// of life.
func (x *exchange) mayBeLost(f *attempt.Error, other *workers.Worker, err error) {
	if !f.MayHaveDied() && f.Reason != attempt.Stale {
		return
	}
	if g, ok := errors.AsType[*attempt.Error](err); ok {
		f.OtherLost = g.MayHaveDied()
	}
	switch {
	case !f.OtherLost && x.r.monitor.Answers(x.ctx, other):
		x.d.Run.History.Answered(other.State)
	case f.OtherLost || x.ctx.Err() == nil:
		f.OtherLost = true
		x.book.Note(other.Name + " had the request at the same time, and gives no sign of life either")
	}
}

// refused is a transfer whose decode rank had no room for the request.
type refused struct {
	t    *disagg.Transfer
	rank *workers.Rank // that has the KV
}

// handedOver is the transfer of the attempt before, which a decode rank refused, if its KV
// serves this plan; else nil.
func (x *exchange) handedOver(before refused, prefill, decode disagg.Peer) *disagg.Transfer {
	t := before.t
	if t == nil || before.rank != prefill.Rank || t.Kind() != x.d.Run.Plan.Connector || t.Leased() && time.Now().After(x.aliveBy) || !t.HandOver(decode) {
		return nil
	}
	x.book.Note(fmt.Sprintf("%s has the KV that %s computed before: the rank that should have taken it had no room", decode.Rank.Label, prefill.Rank.Label))
	return t
}

// both are the two legs of a plan, sent at once.
type both struct {
	x               *exchange
	t               *disagg.Transfer
	prefill, decode disagg.Peer
	claim           ledger.Claim
	held            *ledger.Reservation
	body            [][]byte
}

func (b *both) Prefill(ctx context.Context) error {
	return b.x.prefillLeg(ctx, b.t, b.prefill, b.claim)
}

func (b *both) Decode(ctx context.Context) error {
	err := b.x.decodeLeg(ctx, b.decode, b.held, b.body, b.t)
	if err != nil {
		b.t.DecodeFailed()
	}
	return err
}

func (b *both) Begun() bool { return b.x.begun.Load() }

func (b *both) Both(err error) bool {
	f, ok := errors.AsType[*attempt.Error](err)
	return ok && (f.MayHaveDied() || f.Reason == attempt.Stale)
}

func (b *both) Panicked(p any) { b.x.r.panicked(b.x, p) }

// concurrent sends both legs at once.
func (x *exchange) concurrent(t *disagg.Transfer, prefill disagg.Peer, claim ledger.Claim, decode disagg.Peer, held *ledger.Reservation) error {
	edits, err := t.DecodeEdits()
	if err != nil {
		x.report(selector.Decode, health.Canceled)
		x.report(selector.Prefill, health.Canceled)
		return err
	}
	p, end := pair.Begin(x.ctx, &both{x, t, prefill, decode, claim, held, x.edit(edits, decode, selector.Decode)})
	switch {
	case p == nil:
	case x.flow.resp == nil: // the client has all of the answer
		p.End(true)
	default:
		x.flow.pair, x.flow.transfer = p, t
	}
	var f *attempt.Error
	if errors.As(end.Err, &f) {
		other := prefill.Worker
		if end.Cancelled {
			other = decode.Worker
		}
		f.Other = other.State
		x.mayBeLost(f, other, end.Other)
		if end.Waiting && f.Phase == selector.Decode && f.Reason == attempt.Timeout {
			x.book.Failed(selector.Prefill, prefill.Worker, f.Reason, errors.New("no answer when the decode leg's time was up"))
		}
	}
	return end.Err
}
