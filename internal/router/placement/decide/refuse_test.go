package decide

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestRefusalIsTheSameEachTime: a client that compares messages, and a person who greps
// for one, find the same words for the same state.
func TestRefusalIsTheSameEachTime(t *testing.T) {
	var r Run
	r.Plan.Err, r.Plan.Decode.Verdict = ErrNoDecode, selector.AllExcluded
	for _, why := range []string{"draining", "unhealthy", "asleep", "ejected", "unhealthy", "failed in this request"} {
		r.In.Decode.Candidates = append(r.In.Decode.Candidates, decision.Candidate{Excluded: why, ExcludedCode: selector.ExcludedGiven})
	}
	const want = "no_decode_worker: no decode worker can take the request; 1 rank(s): asleep; 1 rank(s): draining; 1 rank(s): ejected; 1 rank(s): failed in this request; 2 rank(s): unhealthy: no decode worker"
	for range 20 {
		if got := r.Refusal(); got.Error() != want || !errors.Is(got, ErrNoDecode) {
			t.Fatalf("%v\nwant %s", got, want)
		}
	}
}

// TestRefusals: the status says whether to change the request, to come again or to go
// elsewhere, and the code which phase had nobody.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		err     error
		verdict selector.Verdict
		status  int
		code    api.Code
		text    string
	}{
		{ErrWhole, selector.Chosen, http.StatusBadRequest, api.CodeInvalidRequest, "add a worker that both prefills and decodes"},
		{ErrNoDecode, selector.AllBusy, http.StatusTooManyRequests, api.CodeOverloaded, "no decode worker can take the request: all are busy"},
		{ErrNoPrefill, selector.AllBusy, http.StatusTooManyRequests, api.CodeOverloaded, "no prefill worker can take the request: all are busy"},
		{ErrNoPrefill, selector.NoCandidates, http.StatusServiceUnavailable, api.CodeNoPrefillWorker, "the model has none"},
		{ErrNoDecode, selector.Chosen, http.StatusServiceUnavailable, api.CodeNoDecodeWorker, ErrNoDecode.Error()},
	} {
		var r Run
		r.Plan.Err, r.Plan.Decode.Verdict, r.Plan.Prefill.Verdict = c.err, c.verdict, c.verdict
		e := api.FromError(r.Refusal())
		if e.Status != c.status || e.Code != c.code || !strings.Contains(e.Message, c.text) || (e.RetryAfter > 0) != (c.status != http.StatusBadRequest) {
			t.Errorf("%v, %v: %d %s %q", c.err, c.verdict, e.Status, e.Code, e.Message)
		}
	}
}

// TestNeeds: who asks for the same and was refused nothing so far has the same needs; who
// was has its own.
func TestNeeds(t *testing.T) {
	all := map[string]string{}
	note := func(name string, r *Run, p route.Phase) {
		t.Helper()
		s := r.Needs(p, "its own name")
		if again := r.Needs(p, "another's name"); again != s {
			t.Errorf("%s: %q and %q", name, s, again)
		}
		if other, ok := all[s]; ok {
			t.Errorf("%s needs what %s needs", name, other)
		}
		all[s] = name
	}
	var r Run
	note("decode", &r, route.Decode)
	note("prefill", &r, route.Prefill)
	r.Criteria.Facts.Kind = api.Completion
	note("prefill of another kind", &r, route.Prefill)
	r.Criteria.Pin.Decode = "w"
	note("a worker", &r, route.Decode)
	r.Criteria.Pin.HasRank = true
	note("a rank", &r, route.Decode)
	r.Criteria.Pin.HasRank, r.Criteria.Pin.HasPrefillRank = false, true
	note("a rank for prefill", &r, route.Decode)
	r.Criteria.Facts.Source, r.Criteria.Facts.ISL, r.prompt = route.FromIDs, 9000, 9000
	d := well("d", workers.Decode)
	d.Engine, d.MaxModelLen = workers.VLLM, 8192
	r.workers = []*workers.Worker{d}
	note("a larger window", &r, route.Decode)
	r.History.Add(attempt.Failure{Reason: attempt.Reset})
	if s := r.Needs(route.Decode, "x"); s != "x" {
		t.Errorf("after a failure %q", s)
	}
}

// TestBusyWhy: the ranks at their limits are counted, and the first says which.
func TestBusyWhy(t *testing.T) {
	var r Run
	r.In.Prefill.Busy.Requests = 3
	r.In.Prefill.Candidates = []decision.Candidate{
		{Excluded: "draining", ExcludedCode: selector.ExcludedGiven}, {},
		{ActiveRequests: 3, ExcludedCode: selector.ExcludedRequests}, {ActiveRequests: 4, ExcludedCode: selector.ExcludedRequests},
	}
	if got, want := r.BusyWhy(route.Prefill), "2 prefill rank(s) were at their limits (busy: 3 requests in progress, limit 3)"; got != want {
		t.Errorf("%q, not %q", got, want)
	}
}

// TestSlots: those of the ranks that the plan takes, after those that there are.
func TestSlots(t *testing.T) {
	var r Run
	r.In.DecodePeers = []workers.Peer{{Rank: &workers.Rank{Slot: 4}}, {Rank: &workers.Rank{Slot: 5}}}
	r.In.PrefillPeers = []workers.Peer{{Rank: &workers.Rank{Slot: 6}}}
	r.Plan.DecodeIndex, r.Plan.Path = 1, route.Local
	if got := r.Slots([]uint32{1}); !slices.Equal(got, []uint32{1, 5}) {
		t.Errorf("local: %v", got)
	}
	if r.Plan.Path = route.Remote; !slices.Equal(r.Slots(nil), []uint32{5, 6}) {
		t.Errorf("remote: %v", r.Slots(nil))
	}
}
