package serving

import (
	"context"
	"errors"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestOtherLegMayBeLost: an engine counts as lost with its pair if its own leg broke as if
// it had died, whatever became of the other leg, or if something broke and it gives no sign
// of life.
func TestOtherLegMayBeLost(t *testing.T) {
	w, other := &workers.Worker{State: new(workers.State)}, &workers.Worker{State: new(workers.State)}
	of := func(p route.Phase, w *workers.Worker, r attempt.Reason) *attempt.Error {
		return attempt.NewError(p, w, r, true, errors.New("broken"))
	}
	revived := of(route.Prefill, other, attempt.Stale)
	if revived.Alive = true; revived.MayHaveDied() {
		t.Error("a connection that was closed as idle is no death")
	}
	f := of(route.Decode, w, attempt.StreamError)
	if new(Legs).mayBeLost(t.Context(), New(), f, other, revived); f.OtherLost {
		t.Error("an engine counts as lost that gave a sign of life")
	}
	for _, c := range []struct {
		reason, other attempt.Reason // of the failure that counts, and of the other leg's; "" for none
		answers, lost bool
		asked         bool
	}{
		{attempt.Reset, "", true, false, true},
		{attempt.Reset, "", false, true, true},
		{attempt.Stale, "", false, true, true},
		{attempt.Reset, attempt.Reset, true, true, false},
		// The decode engine waits in vain for the KV of one that has died.
		{attempt.StreamError, attempt.Reset, true, true, false},
		{attempt.Status5xx, attempt.Timeout, true, true, false},
		{attempt.StreamError, attempt.Stale, true, true, false}, // it has come back since
		{attempt.StreamError, attempt.Status5xx, false, false, false},
		{attempt.StreamError, "", false, false, false},
	} {
		asked := false
		g := &Legs{Answers: func(context.Context, *workers.Worker) bool { asked = true; return c.answers }}
		call := New()
		call.Record = &lifecycle.Record{}
		f := of(route.Decode, w, c.reason)
		var err error
		if c.other != "" {
			err = of(route.Prefill, other, c.other)
		}
		g.mayBeLost(t.Context(), call, f, other, err)
		if f.OtherLost != c.lost || asked != c.asked {
			t.Errorf("%s, and the other leg %q: lost %v, asked %v; want %v and %v", c.reason, c.other, f.OtherLost, asked, c.lost, c.asked)
		}
		call.Release()
	}
}
