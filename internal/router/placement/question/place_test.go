package question

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/effective"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestWait: who finds a rank with room takes its place at once; who finds none waits until
// there is one, and decides then by the settings and the fleet of then.
func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := served(t, 1)
		w, _ := r.Snapshot().Worker("w0")
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
		s := &effective.Settings{}
		s.Decisions.Decode, s.Decisions.Prefill, s.Decisions.Busy.Requests = selector.RoundRobin, selector.RoundRobin, 1
		later := new(effective.Settings)
		*later = *s
		index, l := kvindex.New(kvindex.Options{}), ledger.New()
		defer func() { _ = index.Close() }()
		a := New(Sources{Index: index, Ledger: l, Now: func() (*effective.Settings, *workers.Snapshot) { return later, r.Snapshot() }}, 1)
		line := admission.NewLine(8, time.Minute, 0)
		l.OnEase(line.Wake)
		ask := func(c admission.Claim) (*Question, *ledger.Reservation, admission.Waited, string, error) {
			d := new(Question)
			d.Reset()
			d.Settings, d.Model = s, "m"
			d.Took.Queue = 10 * time.Second // of a wait before
			d.Look(r.Snapshot())
			place, waited, why, err := a.Wait(t.Context(), line, c, d, &api.View{}, "its name")
			return d, place, waited, why, err
		}
		d, first, waited, why, err := ask(admission.Claim{})
		if err != nil || first == nil || waited.For != 0 || why != "" || d.Settings != s {
			t.Fatalf("%v, waited %+v for %q, plan %v", err, waited, why, d.Run.Plan.Err)
		}
		d.Release()
		d, place, waited, why, err := ask(admission.Claim{Patience: 15 * time.Second})
		if !errors.Is(err, admission.ErrTimeout) || place != nil || waited.For != 5*time.Second || !strings.Contains(why, "1 decode rank(s) were at their limits") {
			t.Errorf("%v, waited %+v for %q", err, waited, why)
		}
		d.Release()
		time.AfterFunc(3*time.Second, func() { first.Release() })
		d, place, waited, why, err = ask(admission.Claim{})
		if err != nil || place == nil || waited.For != 3*time.Second || why == "" || d.Settings != later || d.Run.Attempt != 1 || !d.Run.Request.Waited {
			t.Errorf("%v, waited %+v for %q, attempt %d", err, waited, why, d.Run.Attempt)
		}
		d.Release()
		place.Release()
		w.State.SetDraining(true)
		if d, place, _, _, err = ask(admission.Claim{}); err != nil || place != nil || d.Run.Plan.Err == nil {
			t.Errorf("%v, plan %v", err, d.Run.Plan.Err)
		}
		d.Release()
	})
}
