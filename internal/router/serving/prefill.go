package serving

import (
	"context"
	"errors"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/account"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// prefill is a prefill leg with all that is held for it. The error is an *attempt.Error, or an
// answer that the client shall get (4xx).
func (g *Legs) prefill(ctx context.Context, c *Call, t *disagg.Transfer, p disagg.Peer, claim ledger.Claim) (err error) {
	if !g.Open.Take(1) {
		g.report(c, selector.Prefill, health.Canceled)
		return g.noLeg()
	}
	defer g.Open.Give(1)
	held := g.Ledger.Reserve(p.Rank, claim)
	defer held.Release()
	leg := c.leg(selector.Prefill, p, c.edit(t.PrefillEdits(), p, selector.Prefill), c.Question.Settings.Timeouts.Prefill, t.RequestID())
	c.Measured.PrefillBegins()
	record := c.Book.BeginLeg(selector.Prefill, p, leg)
	err = errPanic // until it returns
	defer func() {
		if errors.Is(err, errPanic) {
			g.report(c, selector.Prefill, health.Canceled)
		}
		g.endPrefill(c, record, err)
	}()
	return g.prefilled(ctx, c, t, p, leg, record)
}

// prefilled sends a prefill leg and judges its answer.
func (g *Legs) prefilled(ctx context.Context, c *Call, t *disagg.Transfer, p disagg.Peer, leg *upstream.Leg, record *account.Leg) error {
	resp, err := g.Transport.Do(ctx, leg)
	if err != nil {
		return g.broke(ctx, c, selector.Prefill, p.Worker, err)
	}
	defer resp.Close()
	head := resp.Begins()
	record.Head(head.Status)
	body, err := resp.ReadAll(maxPrefillAnswer)
	if err != nil {
		return g.broke(ctx, c, selector.Prefill, p.Worker, err)
	}
	if head.Status/100 != 2 {
		return g.refused(c, selector.Prefill, p.Worker, head, body)
	}
	err = t.CheckPrefill(body)
	facts := t.Facts()
	record.Facts(facts)
	c.Book.Prefilled(p.Worker, &facts, err)
	reason := attempt.BadParams
	switch {
	case err == nil:
		g.report(c, selector.Prefill, health.Success)
		return nil
	case errors.Is(err, disagg.ErrEnded):
		reason = attempt.Ended
	case errors.Is(err, disagg.ErrRestarted):
		reason = attempt.Restarted
	case errors.Is(err, disagg.ErrMissingParams):
		reason = attempt.MissingParams
	}
	if reason == attempt.Ended || reason == attempt.Restarted {
		g.endPrefill(c, record, nil) // a good answer
	}
	return g.fail(c, selector.Prefill, p.Worker, reason, true, err)
}

// endPrefill ends the account of a prefill leg.
func (g *Legs) endPrefill(c *Call, record *account.Leg, err error) {
	if now := time.Now(); record.End(err, now) && err == nil {
		g.took(c, selector.Prefill, record.Start, now)
	}
}
