package decide

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Refusal is the error for a client whose request has no plan.
func (r *Run) Refusal() error {
	p := &r.Plan
	if errors.Is(p.Err, ErrWhole) {
		return &api.Error{
			Status: http.StatusBadRequest, Code: api.CodeInvalidRequest, Err: p.Err,
			Message: fmt.Sprintf("%v (%s); change the request, or add a worker that both prefills and decodes", p.Err, p.Reason),
		}
	}
	e := &api.Error{Status: http.StatusServiceUnavailable, RetryAfter: time.Second, Err: p.Err}
	phase, ranks := &p.Decode, &r.In.Decode
	if errors.Is(p.Err, ErrNoPrefill) {
		phase, ranks = &p.Prefill, &r.In.Prefill
		e.Code, e.Message = api.CodeNoPrefillWorker, "no prefill worker can take the request"
	} else {
		e.Code, e.Message = api.CodeNoDecodeWorker, "no decode worker can take the request"
	}
	switch phase.Verdict {
	case selector.AllBusy:
		e.Status, e.Code = http.StatusTooManyRequests, api.CodeOverloaded
		e.Message += ": all are busy; try again later"
	case selector.AllExcluded:
		reasons := map[string]int{}
		for i := range ranks.Candidates {
			reasons[ranks.Why(i)]++
		}
		for _, why := range slices.Sorted(maps.Keys(reasons)) {
			e.Message += fmt.Sprintf("; %d rank(s): %s", reasons[why], why)
		}
	case selector.Chosen:
		e.Message = p.Err.Error()
	default:
		e.Message += ": there is none for this model"
	}
	return e
}

// Needs are the words for what a request found nothing of in a phase: one of the same
// words would not have found it either. Where it has bans of its own the words are its own
// name.
func (r *Run) Needs(phase route.Phase, name string) string {
	if r.HasOwnBans() {
		return name
	}
	p := &r.Criteria.Pin
	s := string(phase) + "\x00" + string(r.Criteria.Force) + "\x00" + p.Decode + "\x00" + p.Prefill + "\x00" + string(r.Plan.Reason)
	for _, phase := range [...]route.Phase{route.Decode, route.Prefill} {
		if n, has := p.rank(phase); has {
			s += "\x00" + string(phase) + strconv.Itoa(n)
		}
	}
	if phase == route.Prefill {
		s += "\x00" + r.Criteria.Facts.Kind.String()
	}
	return s
}

// BusyWhy says in words why no rank of a phase had room.
func (r *Run) BusyWhy(phase route.Phase) string {
	in := &r.In.Decode
	if phase == route.Prefill {
		in = &r.In.Prefill
	}
	n, first := 0, ""
	for i := range in.Candidates {
		if code := in.Candidates[i].ExcludedCode; code != "" && code != selector.ExcludedGiven {
			n, first = n+1, cmp.Or(first, in.Why(i))
		}
	}
	return fmt.Sprintf("%d %s rank(s) were at their limits (%s)", n, phase, first)
}
