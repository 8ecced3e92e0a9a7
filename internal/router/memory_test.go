package router

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/dynctl/dynctl/internal/router/effective"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/outcome"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestReleasedExchangeIsEmpty: nothing of a request is found in the next one's
// exchange, nor can anything be done with one that was given back.
func TestReleasedExchangeIsEmpty(t *testing.T) {
	r := &Router{}
	x := r.acquire(nil, nil)
	x.id, x.model, x.asked, x.decision, x.status, x.committed = "id", "model", "asked", "d", 200, true
	x.begun.Store(true)
	outcome.New(outcome.Options{Ledger: ledger.New(), Fleet: workers.NewRegistry(nil).Snapshot, BlockOf: func(*workers.Worker) int { return 64 }}).
		Runs(&x.measured, true, "m", &workers.Worker{}, &workers.Rank{}, 1, x.start)
	x.d.AcquireHashes()
	x.d.IDs = append(x.d.IDs, 1)
	x.ep, x.d.Settings = &api.Endpoint{}, &effective.Settings{}
	x.req = httptest.NewRequest(http.MethodGet, "/v1/models", nil)
	x.leg("prefill", disagg.Peer{Worker: &workers.Worker{}}, nil, 0, "id")
	x.release()
	if x.r != nil || x.id != "" || x.model != "" || x.asked != "" || x.decision != "" || x.status != 0 || x.committed || x.begun.Load() || x.measured != (outcome.Request{}) || x.path != "" || x.d.IDs != nil {
		t.Errorf("%+v is left", x)
	}
	for i := range x.legs {
		if s, empty := fmt.Sprint(x.legs[i]), fmt.Sprint(rewrite.Scratch{}); s != empty {
			t.Errorf("%s is left of a leg", s)
		}
	}
	if next := r.acquire(nil, nil); next.r != r || next.path != "none" || next.start.IsZero() || next.d.Run.Plan.DecodeIndex != -1 {
		t.Errorf("%+v", next)
	}
}
