package router

import (
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// TestReleasedExchangeIsEmpty: nothing of a request is found in the next one's
// exchange, nor can anything be done with one that was given back.
func TestReleasedExchangeIsEmpty(t *testing.T) {
	r := &Router{}
	x := r.acquire(nil, nil)
	x.id, x.model, x.asked, x.decision, x.status, x.committed = "id", "model", "asked", "d", 200, true
	x.begun.Store(true)
	x.prefilled.Store(1)
	x.d.AcquireHashes()
	x.d.IDs = append(x.d.IDs, 1)
	s := x.scratch("prefill")
	s.edits, s.body, s.set = append(s.edits, api.Set("a", nil)), append(s.body, []byte("b")), append(s.set, s.set...)
	s.leg.Path = "/v1/models"
	x.release()
	if x.r != nil || x.id != "" || x.model != "" || x.asked != "" || x.decision != "" || x.status != 0 || x.committed || x.begun.Load() || x.prefilled.Load() != 0 || x.path != "" || x.d.IDs != nil {
		t.Errorf("%+v is left", x)
	}
	for i := range x.legs {
		if s := &x.legs[i]; len(s.edits)+len(s.body)+len(s.set) != 0 || s.leg.Path != "" {
			t.Errorf("%+v is left of a leg", s)
		}
	}
	if next := r.acquire(nil, nil); next.r != r || next.path != "none" || next.start.IsZero() || next.d.Run.Plan.DecodeIndex != -1 {
		t.Errorf("%+v", next)
	}
}
