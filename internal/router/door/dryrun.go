package door

import (
	"context"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/control"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
)

// DryRun runs the deciding stages for a request to an endpoint.
func (d *Door) DryRun(ctx context.Context, ep *api.Endpoint, in admin.RouteRequest) (*receipt.Receipt, error) {
	x := d.newExchange(nil, nil, time.Now())
	defer x.release()
	x.ctx, x.call.Endpoint, x.call.Routing.Dry = ctx, ep, true
	x.call.Routing.Settings = d.Settings.Load()
	if err := x.call.View.Parse(in.Body, ep.Kind, api.Limits{}); err != nil {
		return nil, err
	}
	x.call.Name = x.call.View.Model
	if err := d.findModel(ctx, x.call, nil); err != nil {
		return nil, err
	}
	q := &x.call.Routing.Run.Criteria
	var err error
	if q.Force, err = route.ParseForce(in.Path); err != nil {
		return nil, api.BadRequest("path", "%v", err)
	}
	x.call.Routing.FindSession(in.Session, nil, &x.call.View)
	if err := d.pinToResponse(ctx, x.call, nil, ""); err != nil {
		return nil, err
	}
	d.Decider.Read(ctx, &x.call.Routing, ep, ep.Kind, &x.call.View)
	d.Decider.Decide(&x.call.Routing)
	c := &receipt.Receipt{
		Schema: receipt.Schema, ID: receipt.DryRun, Time: x.record.Start, Endpoint: ep.Kind.String(), Model: x.call.Model, Stream: x.call.View.Stream, ConfigRevision: x.call.Routing.Settings.Revision,
		Legs: []receipt.LegEntry{}, Outcome: receipt.Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
	}
	for n := range x.call.Routing.Notes() {
		c.Note(n)
	}
	lifecycle.Fill(c, &x.call.Routing, d.Untrusted)
	if _, _, waits := x.call.Routing.Waits(); waits {
		text := fmt.Sprintf("the request would wait in the queue of %s, or be refused", x.call.Model)
		for _, q := range d.RankQueue.States() {
			if q.Queue == x.call.Model {
				v := control.Queue(q, time.Now())
				text += "; there " + v.Text()
			}
		}
		c.Note(text)
	}
	return c, nil
}
