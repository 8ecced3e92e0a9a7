package routing

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings/effective"
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
		d := New(Sources{Index: index, Ledger: l, Now: func() (*effective.Settings, *workers.Snapshot) { return later, r.Snapshot() }}, 1)
		line := admission.NewQueue(8, time.Minute, 0)
		l.OnEase(line.Wake)
		ask := func(c admission.Claim) (*Request, *ledger.Reservation, admission.Waited, string, error) {
			q := new(Request)
			q.Reset()
			q.Settings, q.Model = s, "m"
			q.Took.Queue = 10 * time.Second // of a wait before
			q.UseFleet(r.Snapshot())
			place, waited, why, err := d.DecideInQueue(t.Context(), line, c, q, &api.View{}, "its name")
			return q, place, waited, why, err
		}
		q, first, waited, why, err := ask(admission.Claim{})
		if err != nil || first == nil || q.Settings != s {
			t.Fatalf("%v, plan %v; the first settings: %v", err, q.Run.Plan.Err, q.Settings == s)
		}
		if waited.For != 0 || why != "" {
			t.Errorf("waited %+v for %q with room", waited, why)
		}
		q.Release()
		q, place, waited, why, err := ask(admission.Claim{Patience: 15 * time.Second})
		if !errors.Is(err, admission.ErrTimeout) || place != nil || waited.For != 5*time.Second || !strings.Contains(why, "1 decode rank(s) were at their limits") {
			t.Errorf("%v, waited %+v for %q", err, waited, why)
		}
		q.Release()
		time.AfterFunc(3*time.Second, func() { first.Release() })
		q, place, waited, why, err = ask(admission.Claim{})
		if err != nil || place == nil {
			t.Fatalf("%v, plan %v", err, q.Run.Plan.Err)
		}
		if waited.For != 3*time.Second || why == "" || !q.Run.Criteria.Waited {
			t.Errorf("waited %+v for %q; the decision knows: %v", waited, why, q.Run.Criteria.Waited)
		}
		if q.Settings != later || q.Run.Attempt != 1 {
			t.Errorf("attempt %d, want 1; the later settings: %v", q.Run.Attempt, q.Settings == later)
		}
		q.Release()
		place.Release()
		w.State.SetDraining(true)
		if q, place, _, _, err = ask(admission.Claim{}); err != nil || place != nil || q.Run.Plan.Err == nil {
			t.Errorf("%v, plan %v", err, q.Run.Plan.Err)
		}
		q.Release()
	})
}

// TestClaim: a request is worth its prompt and the answer that it may have, in the name of
// its header, else its body, else its key.
func TestClaim(t *testing.T) {
	s := &effective.Settings{}
	q := Request{Details: Details{Settings: s}}
	v := parse(t, api.Completion, `{"model":"m","prompt":"p","user":"body","max_tokens":5}`)
	key := admission.Claim{Tenant: "key", Weight: 3, Band: admission.Low}
	h := http.Header{"X-Team": {"header"}}
	for _, c := range []struct {
		header, field string
		v             *api.View
		want          string
	}{{"", "", v, "key"}, {"", "user", v, "body"}, {"X-Team", "user", v, "header"}, {"X-Other", "user", &api.View{}, "key"}} {
		s.Limits.TenantHeader, s.Limits.TenantField = c.header, c.field
		got, err := q.Claim(key, h, c.v, 7)
		want := got
		want.Tenant, want.Weight, want.Band, want.Tokens = c.want, 3, admission.Low, 7+int(max(0, c.v.MaxTokens))
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%q %q: %v (-want +got):\n%s", c.header, c.field, err, d)
		}
	}
	h.Set("X-Dynctl-Priority", "urgent")
	if _, err := q.Claim(key, h, v, 7); err == nil {
		t.Error("a band that there is not")
	}
}

// TestWaited: what a request waited adds up, and of a request that did not wait nothing
// is recorded.
func TestWaited(t *testing.T) {
	var q Request
	if q.Waited(admission.Waited{}, "nothing") || q.Took.Why != "" {
		t.Errorf("%+v", q.Took)
	}
	q.Waited(admission.Waited{For: time.Second, Ahead: 4}, "a place")
	if !q.Waited(admission.Waited{For: time.Second, Ahead: 2}, "a rank") || q.Took.Queue != 2*time.Second || q.Took.Ahead != 2 || q.Took.Why != "a rank" {
		t.Errorf("%+v", q.Took)
	}
}
