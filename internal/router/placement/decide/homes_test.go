package decide

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/affinity"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// settled is a fleet with a ledger and a table of sessions.
type settled struct {
	nothing
	l     *ledger.Ledger
	table *affinity.Table
	now   time.Time
}

func (s settled) Ledger() *ledger.Ledger { return s.l }

func (s settled) Homes(model string, session uint64) affinity.Homes {
	return s.table.Homes(model, session, s.now)
}

// TestSessionsSettle: a new session goes to the least loaded ranks and stays there, whatever
// comes there later, until a rank fails it or it is idle for too long. A decision whose
// effects are dropped leaves no trace, and a phase that a plan does not use has no home.
func TestSessionsSettle(t *testing.T) {
	list := []*workers.Worker{well("d1", workers.Decode), well("d2", workers.Decode), well("p1", workers.Prefill), well("p2", workers.Prefill)}
	for i, w := range list {
		w.Ranks[0].Slot = uint32(i)
	}
	seen := settled{l: ledger.New(), table: affinity.New(), now: time.Unix(0, 0)}
	options := usual()
	options.Decode, options.Prefill = selector.Session, selector.Session
	begin := func(session uint64) *Run {
		q := prompt(100)
		q.Model, q.Session = "m", session
		r := new(Run)
		r.Begin(q)
		return r
	}
	next := func(r *Run, move bool) (decode, prefill string) {
		t.Helper()
		e := r.NextPlan(options, list, 16, seen)
		if r.Plan.Err != nil {
			t.Fatal(r.Plan.Err)
		}
		if move {
			r.Move(&e, seen.table, seen.now)
		}
		return chosen(r)
	}
	load := func(name string) *ledger.Reservation {
		for _, w := range list {
			if w.Name == name {
				return seen.l.Reserve(w.Ranks[0], ledger.Claim{ContextTokens: 64, PrefillTokens: 64, BlockSize: 16})
			}
		}
		return nil
	}
	r := begin(1)
	decode, prefill := next(r, true)
	if got := seen.Homes("m", 1); got != (affinity.Homes{decode + "/dp0", prefill + "/dp0"}) || r.In.Decode.Home != selector.HomeNew {
		t.Errorf("a new session goes to %s and %s, the table has %q", decode, prefill, got)
	}
	load(decode)
	load(prefill)
	if d, p := next(begin(1), true); d != decode || p != prefill {
		t.Errorf("with others on its ranks the session goes from %s and %s to %s and %s", decode, prefill, d, p)
	}
	for session := uint64(2); session < 20; session++ {
		if d, p := next(begin(session), false); d == decode || p == prefill {
			t.Errorf("new session %d goes to %s and %s, where requests are", session, d, p)
		}
		if got := seen.Homes("m", session); got != (affinity.Homes{}) {
			t.Errorf("session %d is at %q after a decision without effect", session, got)
		}
	}
	// Another model's session of that name is another one.
	q := begin(1)
	q.Criteria.Model = "other"
	if d, _ := next(q, false); d == decode {
		t.Error("a session with another model is where the first one is")
	}
	// A rank that fails the session loses it, for good.
	r = begin(1)
	next(r, true)
	for _, w := range list {
		if w.Name == decode {
			r.Failed(attempt.Failure{Worker: w.State, Name: w.Name, Phase: route.Decode, Reason: attempt.Connect})
		}
	}
	moved, _ := next(r, true)
	if d, p := next(begin(1), true); moved == decode || d != moved || p != prefill {
		t.Errorf("after %s has failed the session goes to %s, then to %s and %s", decode, moved, d, p)
	}
	seen.now = seen.now.Add(2 * time.Hour)
	if r := begin(1); true {
		if next(r, false); r.In.Decode.Home != selector.HomeNew {
			t.Errorf("after two hours the session still lives at %s", r.In.Decode.Home)
		}
	}
	// Without the policy nobody looks for a home, and a local plan has none for prefill.
	options.Decode = selector.LeastLoaded
	r = begin(3)
	if next(r, true); r.In.Decode.Home != "" || seen.Homes("m", 3)[0] != "" || seen.Homes("m", 3)[1] == "" {
		t.Errorf("policy session for prefill alone: the table has %q", seen.Homes("m", 3))
	}
	options.Decode, options.Rule.Threshold = selector.Session, 1000
	if next(begin(4), true); seen.Homes("m", 4)[0] == "" || seen.Homes("m", 4)[1] != "" {
		t.Errorf("a local plan: the table has %q", seen.Homes("m", 4))
	}
	if e := begin(0).NextPlan(options, list, 16, seen); e.Homes != (affinity.Homes{}) {
		t.Errorf("a request without a session is at %q", e.Homes)
	}
}
