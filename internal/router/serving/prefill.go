package serving

import (
	"context"
	"errors"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// prefill is a prefill leg, which the call may send, and gives back all that is held for it.
// connects and written, where they are not nil, are those of [upstream.Leg]. The error is an
// *attempt.Error, or an answer that the client shall get (4xx).
func (g *Legs) prefill(ctx context.Context, c *Call, t *disagg.Transfer, p workers.Peer, claim ledger.Claim, connects func(lost bool), written func(fresh bool)) (err error) {
	defer c.permit(route.Prefill).giveBack()
	held := g.Ledger.Reserve(p.Rank, claim)
	defer held.Release()
	leg := g.leg(c, route.Prefill, p, c.edit(t.PrefillEdits(), p, route.Prefill), c.Routing.Settings.Timeouts.Prefill, t.RequestID())
	leg.Connects, leg.Written = connects, written
	record := c.Record.BeginLeg(route.Prefill, p, leg, time.Now())
	err = errPanic // until it returns
	defer func() { record.End(err, time.Now()) }()
	return g.prefilled(ctx, c, t, p, leg, record)
}

// prefilled sends a prefill leg and judges its answer.
func (g *Legs) prefilled(ctx context.Context, c *Call, t *disagg.Transfer, p workers.Peer, leg *upstream.Leg, record *lifecycle.LegRecord) error {
	resp, err := g.Transport.Do(ctx, leg)
	if err != nil {
		return g.broke(ctx, c, route.Prefill, p.Worker, err)
	}
	defer resp.Close()
	head := resp.Begins()
	record.Head(head.Status)
	if head.Status/100 != 2 {
		body, _, err := readUpTo(resp, maxErrorAnswer)
		if err != nil {
			return g.broke(ctx, c, route.Prefill, p.Worker, err)
		}
		return g.refused(ctx, c, route.Prefill, p.Worker, head, body)
	}
	body, err := resp.ReadAll(maxPrefillAnswer)
	if err != nil {
		return g.broke(ctx, c, route.Prefill, p.Worker, err)
	}
	err = t.CheckPrefill(body)
	facts := t.Facts()
	record.Facts(facts)
	c.Record.Prefilled(p.Worker, &facts, err)
	reason := attempt.BadParams
	switch {
	case err == nil:
		g.report(c, route.Prefill, health.Success)
		return nil
	case errors.Is(err, disagg.ErrPrefillFailed): // as where the other leg's worker has died
		reason = attempt.StreamError
	case errors.Is(err, disagg.ErrEnded):
		reason = attempt.Ended
	case errors.Is(err, disagg.ErrRestarted):
		reason = attempt.Restarted
	case errors.Is(err, disagg.ErrMissingParams):
		reason = attempt.MissingParams
	}
	if reason == attempt.Ended || reason == attempt.Restarted {
		record.End(nil, time.Now()) // a good answer
	}
	return g.fail(c, route.Prefill, p.Worker, reason, true, err)
}
