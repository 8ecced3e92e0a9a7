package decide

import (
	"reflect"
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestCompactKeepsThePlan: who was chosen and every figure of the plan stay, whatever
// another request decides in the memory that was given back.
func TestCompactKeepsThePlan(t *testing.T) {
	list := []*workers.Worker{well("d1", workers.Decode), well("d2", workers.Decode), well("p1", workers.Prefill), well("p2", workers.Prefill)}
	others := []*workers.Worker{well("other", workers.Aggregated)}
	for _, threshold := range []int{0, 1000} {
		s := usual()
		s.Rule.Threshold = threshold
		var r, next Run
		q := prompt(100)
		q.Chances[0].Turn, q.Chances[1].Turn = 1, 1
		r.Begin(q)
		r.NextPlan(s, list, 16, nothing{})
		before, decode, prefill := r.Plan, r.In.DecodePeers[r.Plan.DecodeIndex], r.In.PrefillPeers[r.Plan.PrefillIndex]
		wantD, wantP := r.Claims()
		r.Compact()
		next.Begin(prompt(5000))
		next.NextPlan(s, others, 16, nothing{})
		if r.memory != nil || len(r.In.Decode.Candidates) != 0 || len(r.Plan.Decode.Order) != 0 {
			t.Errorf("threshold %d: memory is kept", threshold)
		}
		if d, p := r.In.DecodePeers[r.Plan.DecodeIndex], r.In.PrefillPeers[r.Plan.PrefillIndex]; d != decode || p != prefill || d.Worker.Name != "d2" || p.Worker.Name != "p2" {
			t.Errorf("threshold %d: %s and %s are chosen, were %s and %s", threshold, d.Worker, p.Worker, decode.Worker, prefill.Worker)
		}
		if d, p := r.Claims(); d != wantD || p != wantP {
			t.Errorf("threshold %d: claims %+v %+v, were %+v %+v", threshold, d, p, wantD, wantP)
		}
		was, is := reflect.ValueOf(before), reflect.ValueOf(r.Plan)
		for i := range was.NumField() {
			switch name := was.Type().Field(i).Name; name {
			case "Decode", "Prefill", "decodeVeto", "prefillVeto", "pricing", "DecodeIndex", "PrefillIndex": // the memory, and places in it
			default:
				if !was.Field(i).Equal(is.Field(i)) {
					t.Errorf("threshold %d: %s is %v, was %v", threshold, name, is.Field(i), was.Field(i))
				}
			}
		}
	}
}

// TestReleaseAndDecideAgain: a plan with an error stays whole, since it says why; a
// compacted run decides again in memory of its own; a released one knows nothing of
// its last request.
func TestReleaseAndDecideAgain(t *testing.T) {
	d1, d2 := well("d1", workers.Decode), well("d2", workers.Decode)
	list := []*workers.Worker{d1, d2}
	var r Run
	r.Begin(prompt(100))
	r.NextPlan(usual(), list, 16, nothing{})
	r.Compact()
	r.Failed(attempt.Failure{Worker: d1.State, Name: "d1", Phase: route.Decode, Reason: attempt.Connect})
	r.NextPlan(usual(), list, 16, nothing{})
	if got, _ := chosen(&r); got != "d2" || r.Attempt != 2 {
		t.Errorf("attempt %d: %s", r.Attempt, got)
	}
	r.Compact()
	r.Failed(attempt.Failure{Worker: d2.State, Name: "d2", Phase: route.Decode, Reason: attempt.Connect})
	r.NextPlan(usual(), list, 16, nothing{})
	if r.Compact(); r.Plan.Err == nil || len(r.In.Decode.Candidates) != 2 || !slices.ContainsFunc([]int{0, 1}, func(i int) bool { return r.In.Decode.Why(i) != "" }) {
		t.Errorf("%v of %d candidates", r.Plan.Err, len(r.In.Decode.Candidates))
	}
	r.Release()
	r.Release()
	if r.memory != nil || !reflect.ValueOf(r.In).IsZero() {
		t.Errorf("%+v is left, with memory: %v", r.In, r.memory != nil)
	}
	if p := &r.Plan; p.DecodeIndex != -1 || p.PrefillIndex != -1 || p.Err != nil {
		t.Errorf("%+v is left", p)
	}
	r.Begin(prompt(100))
	r.NextPlan(usual(), list[:1], 16, nothing{})
	if got, _ := chosen(&r); got != "d1" || r.Attempt != 1 {
		t.Errorf("the next request: attempt %d: %s, %v", r.Attempt, got, r.Plan.Err)
	}
}
