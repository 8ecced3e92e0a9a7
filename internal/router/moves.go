package router

import (
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// heartbeat is how often a stream that waits for its turn to go on elsewhere gets a
// comment, for clients and proxies that give up silent streams.
const heartbeat = 5 * time.Second

// enterMove waits until the ranks of the plan may have the rest of a stream, unless
// they have a place for it already.
func (x *exchange) enterMove() error {
	if len(x.cont.places) > 0 {
		return nil
	}
	slots := x.d.Run.Slots(x.cont.places)
	out := upstream.NewWriter(x.w, x.d.Settings.Timeouts.Write)
	began := time.Now()
	err := x.r.moves.Enter(x.ctx, slots, x.d.Settings.Continue.AtOnce, heartbeat, func() error {
		_, err := out.Write([]byte(": the rest is waiting for its turn on another engine\n\n"))
		return err
	})
	if err == nil {
		x.cont.places = slots
	}
	x.r.metrics.Stage("move", time.Since(began))
	return err
}

// leaveMove gives the places back, with the first token of the rest, when it has
// failed, or when it is not asked for after all.
func (x *exchange) leaveMove() {
	if c := x.cont; c != nil && len(c.places) > 0 {
		x.r.moves.Leave(c.places)
		c.places = c.places[:0]
	}
}

// askForMove is how often a stream whose worker is drained asks for a place elsewhere.
const askForMove = lookInterval

// mayMove reports whether a healthy stream can be taken from its worker now: it
// has not moved as often as it may, and a rank elsewhere takes it at once. That rank is
// decided on and has a place for the stream then, in [continuation.move]; otherwise
// nothing has changed, and the stream stays where it is.
func (x *exchange) mayMove(from *workers.Worker) bool {
	run, c := &x.d.Run, x.cont
	if run.History.Continued >= x.d.Settings.Decisions.Continuations || run.Request.Pin.Decode != "" {
		return false
	}
	now := time.Now()
	if now.Before(c.askAt) {
		return false
	}
	c.askAt = now.Add(askForMove)
	fleet, limit := x.r.registry.Snapshot(), x.d.Settings.Continue.AtOnce
	if !slices.ContainsFunc(fleet.Model(x.model), func(w *workers.Worker) bool {
		ok, _ := w.State.Usable()
		return ok && w.State != from.State && w.Role.CanDecode() && c.ReportsIDs(w.WireEngine()) &&
			slices.ContainsFunc(w.Ranks, func(k *workers.Rank) bool { return x.r.moves.Free(k.Slot, limit) })
	}) {
		return false
	}
	y := x.r.acquire(x.w, x.req)
	if x.decideMove(y, from, fleet) {
		c.move = y
		return true
	}
	y.giveUpPlace()
	y.release()
	return false
}

// decideMove makes y the request for the rest of the stream and decides on it, without
// waiting for anything. If it reports true, y has its place on the decode rank, and
// those on which the rest is computed are taken.
func (x *exchange) decideMove(y *exchange, from *workers.Worker, fleet *workers.Snapshot) bool {
	r, c, d := x.r, x.cont, &y.d
	body, why := c.Rest(c.Stream.IDs(), c.Stream.Sent())
	if why != "" {
		return false
	}
	own, ok := api.OwnBody(body, r.bodies)
	if !ok {
		return false
	}
	y.ctx, y.key, y.ep, y.asked, y.model, y.salted = x.ctx, x.key, x.ep, x.asked, x.model, x.salted
	y.body = own
	y.begun.Store(true)
	x.d.Rest(d, fleet)
	if d.Run.Failed(*attempt.Cut(from, attempt.Moved)).Step != attempt.Continue || y.readRest() != nil {
		return false
	}
	return r.ranks.Try(func() bool {
		e := r.asker.Choose(d)
		if d.Run.Plan.Err != nil || len(e.Readmit) > 0 { // an ejected worker is no better place
			return false
		}
		slots := d.Run.Slots(c.places)
		if !r.moves.Try(slots, d.Settings.Continue.AtOnce) {
			return false
		}
		c.places = slots
		y.reserved = r.asker.Reserve(d)
		r.asker.Apply(d, e)
		return true
	})
}

// takeMove makes the exchange that of the rest, which got its place before the stream
// was taken from its worker.
func (x *exchange) takeMove() {
	y := x.cont.move
	x.cont.move = nil
	x.releaseInput()
	x.d, y.d = y.d, x.d
	x.view, y.view = y.view, x.view
	x.body, y.body = y.body, x.body
	x.reserved, y.reserved = y.reserved, nil
	x.decided = true
	y.release()
}

// dropMove gives up the place of a move that does not happen.
func (x *exchange) dropMove() {
	c := x.cont
	if c == nil {
		return
	}
	x.leaveMove()
	if y := c.move; y != nil {
		c.move = nil
		y.giveUpPlace()
		y.release()
	}
}
