package router

import (
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// TestLargeMemoryIsNotKept: what one large prompt has needed is not kept for the
// requests that follow, and a question that has given back its memory has none.
func TestLargeMemoryIsNotKept(t *testing.T) {
	var d question
	d.reset()
	for _, c := range []struct {
		tokens int
		kept   bool
	}{{maxKeep, true}, {maxKeep + 1, false}} {
		d.acquireHashes()
		d.ids = make([]uint32, 0, c.tokens)
		h := d.view(16)
		h.locals, h.seq = make([]uint64, 0, c.tokens/4+c.tokens%4), make([]uint64, 0, 1)
		m := d.hashed
		d.releaseHashes()
		if got := cap(m.ids) > 0 && cap(m.views[0].locals) > 0 && cap(m.views[0].seq) > 0; got != c.kept {
			t.Errorf("%d tokens: kept %v, want %v", c.tokens, got, c.kept)
		}
		if d.hashed != nil || d.ids != nil || d.views != nil || d.used != 0 {
			t.Errorf("%d tokens: the question has memory still", c.tokens)
		}
		d.releaseHashes() // again, for nothing
	}
}

// TestReleasedExchangeIsEmpty: nothing of a request is found in the next one's
// exchange, nor can anything be done with one that was given back.
func TestReleasedExchangeIsEmpty(t *testing.T) {
	r := &Router{}
	x := r.acquire(nil, nil)
	x.id, x.model, x.asked, x.decision, x.status, x.committed = "id", "model", "asked", "d", 200, true
	x.begun.Store(true)
	x.prefilled.Store(1)
	x.d.acquireHashes()
	s := x.scratch("prefill")
	s.edits, s.body, s.set = append(s.edits, api.Set("a", nil)), append(s.body, []byte("b")), append(s.set, s.set...)
	s.leg.Path = "/v1/models"
	x.release()
	if x.r != nil || x.id != "" || x.model != "" || x.asked != "" || x.decision != "" || x.status != 0 || x.committed || x.begun.Load() || x.prefilled.Load() != 0 || x.path != "" || x.d.hashed != nil {
		t.Errorf("%+v is left", x)
	}
	for i := range x.legs {
		if s := &x.legs[i]; len(s.edits)+len(s.body)+len(s.set) != 0 || s.leg.Path != "" {
			t.Errorf("%+v is left of a leg", s)
		}
	}
	if next := r.acquire(nil, nil); next.r != r || next.path != "none" || next.start.IsZero() || next.d.run.Plan.DecodeIndex != -1 {
		t.Errorf("%+v", next)
	}
}
