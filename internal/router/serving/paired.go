package serving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/pair"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

var errFirstToken = errors.New("the rest of a stream cannot begin with a prefill's own token")

// refused is a transfer whose decode rank had no room for the request.
type refused struct {
	t    *disagg.Transfer
	rank *workers.Rank // that has the KV
}

// paired is a prefill leg and the decode leg that it feeds, one after the other or both at
// once. One prefill feeds one decode.
type paired struct {
	p               *FleetPlanner
	prefill, decode workers.Peer
	// before is the transfer of the attempt before, if its decode rank had no room.
	before refused
}

// Do is [Engine.Do].
func (l *paired) Do(ctx context.Context, c *Call) (*Answer, error) {
	p, q := l.p, &c.Routing
	g, prefill, decode := p.Legs, l.prefill, l.decode
	_, claim := q.Run.Claims()
	now := time.Now()
	sent := now // the decode leg
	transfer := l.handedOver(c)
	if transfer == nil {
		err := g.mustPermit(c, route.Prefill, prefill.Worker)
		if err != nil {
			return nil, err
		}
		if transfer, err = g.transfer(ctx, c, prefill, decode); err != nil {
			return nil, err
		}
		c.sends()
		p.Decider.Sent(q, prefill.Worker, prefill.Rank, now)
		p.Decider.Sent(q, decode.Worker, decode.Rank, now)
		if transfer.Mode() != disagg.Sequential {
			return l.concurrent(ctx, c, transfer, claim)
		}
		err = g.prefill(ctx, c, transfer, prefill, claim, func(lost bool) {
			if lost {
				transfer.Lost()
			}
		}, nil)
		if err == nil {
			err = g.meet(ctx, c, transfer, prefill, true) // again, if it may be another engine
		}
		if err != nil {
			transfer.Failed()
			p.unsent(c, err, prefill, now)
			return nil, err
		}
		q.Run.History.Answered(prefill.Worker.State)
		sent = time.Now()
		c.aliveBy = sent.Add(q.Settings.Timeouts.KVLease * 4 / 5)
	} else {
		c.sends()
		p.Decider.Sent(q, decode.Worker, decode.Rank, now)
	}
	edits, err := transfer.DecodeEdits()
	if err != nil {
		return nil, attempt.NewError(route.Prefill, prefill.Worker, attempt.BadParams, true, err)
	}
	a, err := g.decode(ctx, c, decode, c.edit(edits, decode, route.Decode), transfer, sent)
	if err != nil && ctx.Err() == nil {
		transfer.Failed()
	}
	p.unsent(c, err, decode, now)
	var f *attempt.Error
	if errors.As(err, &f) {
		f.Other = prefill.Worker.State // its KV may be what was missing
		// An engine whose stream has begun may have fetched the KV.
		if u, ok := errors.AsType[*upstream.Failure](err); ok && (f.Reason == attempt.Overloaded || f.Reason == attempt.UnknownModel) && u.Kind == upstream.Status {
			c.refused = refused{transfer, prefill.Rank}
		}
	}
	return counted(c, transfer, a), err
}

// transfer begins a plan's transfer of KV.
func (g *Legs) transfer(ctx context.Context, c *Call, prefill, decode workers.Peer) (t *disagg.Transfer, err error) {
	q := &c.Routing
	name := q.Run.Plan.Connector
	switch connector := q.Settings.Connectors[name]; {
	case connector == nil:
		err = fmt.Errorf("unknown connector %q", name)
	case c.Rest && name == workers.ConnectorLMCache:
		err = errFirstToken
	default:
		t, err = connector.Begin(disagg.Dispatch{
			RequestID: c.ID, Facts: q.Run.Criteria.Facts, Prefill: prefill, Decode: decode,
			Check: cmp.Or(prefill.Worker.TransferCheck, workers.TransferCheck(q.Settings.Routing.TransferCheck)),
		})
	}
	if err != nil {
		return nil, g.fail(c, route.Prefill, prefill.Worker, attempt.NoConnector, false, err)
	}
	if t.Mode() == disagg.Sequential {
		if err := g.meet(ctx, c, t, prefill, true); err != nil {
			g.report(c, route.Prefill, attempt.NoConnector.Means().Outcome)
			return nil, err
		}
	}
	return t, nil
}

// meet finds the engine of the prefill leg, by [disagg.Transfer.Meet]. It leaves the worker's
// health to the caller: a prefill leg that was sent reports how it went itself.
func (g *Legs) meet(ctx context.Context, c *Call, t *disagg.Transfer, prefill workers.Peer, fresh bool) error {
	err := t.Meet(ctx, fresh)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	c.Record.Prefilled(prefill.Worker, nil, err)
	return attempt.NewError(route.Prefill, prefill.Worker, attempt.NoConnector, false, err)
}

// handedOver is the transfer of the attempt before, which a decode rank refused, if its KV
// serves this plan; else nil.
func (l *paired) handedOver(c *Call) *disagg.Transfer {
	t := l.before.t
	if t == nil || l.before.rank != l.prefill.Rank || t.Kind() != c.Routing.Run.Plan.Connector || t.Leased() && time.Now().After(c.aliveBy) || !t.HandOver(l.decode) {
		return nil
	}
	c.Record.Note(fmt.Sprintf("%s has the KV that %s computed before: the rank that should have taken it had no room", l.decode.Rank.Label, l.prefill.Rank.Label))
	return t
}

// mayBeLost finds out whether the engine of the other leg, which had the request at the
// same time, may have died of it, too, or hangs: it failed in such a way, or gives no sign
// of life.
func (g *Legs) mayBeLost(ctx context.Context, c *Call, f *attempt.Error, other *workers.Worker, err error) {
	e, failed := errors.AsType[*attempt.Error](err)
	// One that gave no sign of life then may be another process by now.
	f.OtherLost = failed && (e.MayHaveDied() || e.Reason == attempt.Stale && !e.Alive)
	switch {
	case f.OtherLost:
	case !f.MayHaveDied() && f.Reason != attempt.Stale: // nothing says so
		return
	case g.Answers(ctx, other):
		c.Routing.Run.History.Answered(other.State)
		return
	case ctx.Err() != nil:
		return
	}
	f.OtherLost = true
	c.Record.Note(other.Name + " had the request at the same time, and gives no sign of life either")
}

// both are the two legs of a plan, sent at once.
type both struct {
	*paired
	c      *Call
	t      *disagg.Transfer
	claim  ledger.Claim
	body   [][]byte // of the decode leg
	answer *Answer

	start time.Time
	// fresh is set before the decode leg is let go.
	fresh bool
}

func (b *both) Prefill(ctx context.Context, connects, written func()) (err error) {
	sent := false
	err = errPanic // until it returns
	defer func() { b.t.PrefillEnded(sent && lost(err)) }()
	return b.p.Legs.prefill(ctx, b.c, b.t, b.prefill, b.claim, func(lost bool) {
		if lost {
			b.t.Lost()
		}
		connects()
	}, func(fresh bool) {
		b.fresh, sent = fresh, true
		written()
	})
}

func (b *both) Prepare(ctx context.Context) { b.t.Prepare(ctx) }

// lost reports whether the KV of a prefill leg that was sent never comes to a decode engine that
// may wait for it. A request that a prefill engine does not accept (4xx) is none for
// the decode engine either.
func lost(err error) bool {
	f, ok := errors.AsType[*upstream.Failure](err)
	return err != nil && (!ok || f.Kind != upstream.Status || f.Status/100 != 4)
}

func (b *both) Decode(ctx context.Context) (err error) {
	g, c := b.p.Legs, b.c
	if b.t.Mode() == disagg.Held {
		if err := g.meet(ctx, c, b.t, b.prefill, b.fresh); err != nil {
			return err
		}
		c.Record.Waited("held", time.Since(b.start))
		if err := b.edit(); err != nil { // the prefill leg has made its own by now
			return err
		}
	}
	b.answer, err = g.decode(ctx, c, b.decode, b.body, b.t, time.Now())
	return err
}

// edit makes the body of the decode leg.
func (b *both) edit() error {
	edits, err := b.t.DecodeEdits()
	if err == nil {
		b.body = b.c.edit(edits, b.decode, route.Decode)
	}
	return err
}

func (b *both) Begun() bool { return b.c.begun.Load() == hasBegun }

func (b *both) Stop() bool { return b.c.begun.CompareAndSwap(mayBegin, mustNot) }

func (b *both) Both(err error) bool {
	f, ok := errors.AsType[*attempt.Error](err)
	return ok && (f.MayHaveDied() || f.Reason == attempt.Stale)
}

func (b *both) Panicked(p any) { b.p.Legs.Panicked(b.c, p) }

// concurrent sends both legs at once.
func (l *paired) concurrent(ctx context.Context, c *Call, t *disagg.Transfer, claim ledger.Claim) (*Answer, error) {
	g := l.p.Legs
	legs := &both{paired: l, c: c, t: t, claim: claim, start: time.Now()}
	held := t.Mode() == disagg.Held
	if !held {
		if err := legs.edit(); err != nil {
			return nil, err
		}
	}
	p, end := pair.Begin(ctx, g.Beside, legs, held)
	if p != nil {
		c.decoding.beside = p
		c.decoding.after = func(err error) {
			if _, cut := errors.AsType[*Cut](err); cut {
				t.Failed()
			}
			p.End(err == nil)
		}
		return counted(c, t, legs.answer), nil
	}
	if ctx.Err() == nil {
		t.Failed()
	}
	var f *attempt.Error
	if errors.As(end.Err, &f) {
		other := l.prefill.Worker
		if end.Cancelled {
			other = l.decode.Worker
		}
		f.Other = other.State
		if f.Reason == attempt.TooLong && end.Waiting {
			f.Reason = attempt.Timeout // it has no KV to work with yet
		}
		g.mayBeLost(ctx, c, f, other, end.Other)
		if end.Waiting && f.Phase == route.Decode && f.Reason == attempt.Timeout {
			c.Record.Failed(route.Prefill, l.prefill.Worker, f.Reason, errors.New("no answer when the decode leg's time was up"))
		}
	}
	return nil, end.Err
}
