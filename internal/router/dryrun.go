package router

import (
	"context"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/account"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/state"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// dryRun runs the deciding stages for a request to an endpoint.
func (r *Router) dryRun(ctx context.Context, ep *api.Endpoint, in admin.RouteRequest) (*receipt.Receipt, error) {
	x := r.acquire(nil, nil)
	defer x.release()
	x.ctx, x.ep, x.d.Dry = ctx, ep, true
	x.d.Settings = r.settings.Load()
	if err := x.view.Parse(in.Body, ep.Kind, api.Limits{}); err != nil {
		return nil, err
	}
	x.asked = x.view.Model
	if err := x.findModel(); err != nil {
		return nil, err
	}
	q := &x.d.Run.Request
	var err error
	if q.Force, err = disagg.ParseForce(in.Path); err != nil {
		return nil, api.BadRequest("path", "%v", err)
	}
	x.d.FindSession(in.Session, &x.view)
	if err := x.follows(); err != nil {
		return nil, err
	}
	x.findPrompt()
	r.asker.Decide(&x.d)
	c := &receipt.Receipt{
		Schema: receipt.Schema, ID: "dry-run", Time: x.start, Endpoint: ep.Kind.String(), Model: x.model, Stream: x.view.Stream, ConfigRevision: x.d.Settings.Revision,
		Legs: []receipt.Leg{}, Outcome: receipt.Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
	}
	for _, n := range x.d.Notes() {
		c.Note(n)
	}
	account.Fill(c, &x.d, r.untrusted)
	if _, busy := x.d.Run.Busy(); busy {
		text := fmt.Sprintf("the request would wait in the queue of %s, or be refused", x.model)
		for _, q := range r.ranks.States() {
			if q.Queue == x.model {
				v := state.Queue(q, time.Now())
				text += "; there " + v.Text()
			}
		}
		c.Note(text)
	}
	return c, nil
}
