package router

import (
	"errors"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// TestPlanErrorIsTheSameEachTime: a client that compares messages, and a person
// who greps for one, find the same words for the same state.
func TestPlanErrorIsTheSameEachTime(t *testing.T) {
	in, p := &decide.Input{}, &decide.Plan{Err: decide.ErrNoDecode}
	p.Decode.Verdict = selector.AllExcluded
	for _, why := range []string{"draining", "unhealthy", "asleep", "ejected", "unhealthy", "failed in this request"} {
		in.Decode.Candidates = append(in.Decode.Candidates, decision.Candidate{Excluded: why, ExcludedCode: selector.ExcludedGiven})
	}
	const want = "no_decode_worker: no decode worker can take the request; 1 rank(s): asleep; 1 rank(s): draining; 1 rank(s): ejected; 1 rank(s): failed in this request; 2 rank(s): unhealthy: no decode worker"
	for range 20 {
		if got := planError(in, p); got.Error() != want || !errors.Is(got, decide.ErrNoDecode) {
			t.Fatalf("%v\nwant %s", got, want)
		}
	}
}
