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
	"github.com/dynctl/dynctl/internal/workers"
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

// Overflows reports whether a worker's engine refuses the request in a phase because its
// context window does not hold the prompt with the longest answer that the leg asks for. It
// judges where the prompt's tokens are counted, and engines that refuse: others may cut the
// prompt or the answer.
func Overflows(f *api.Facts, w *workers.Worker, phase route.Phase) bool {
	return f.Source.Counted() && tooSmall(w, windowFor(f, phase))
}

// farBeyond is how many times a window an estimated prompt must be to be too long for it: no
// usual text has twice as many characters to a token as the estimate takes.
const farBeyond = 2

// windowFor is how many tokens an engine's window must hold for the request in a phase, which
// for an estimated prompt is the least that it can be; 0 where nothing is known, and for
// requests that engines may cut.
func windowFor(f *api.Facts, phase route.Phase) int {
	refused := f.Kind == api.Completion || f.Kind == api.Chat || f.Kind == api.Messages
	switch {
	case !refused || f.Prompts > 1 || f.Truncated:
		return 0
	case f.Source.Counted():
		return f.ISL + answerOf(f, phase)
	case f.Source == route.FromEstimate:
		return (f.ISL + farBeyond - 1) / farBeyond
	}
	return 0
}

// answerOf is the longest answer that the leg of a phase asks for, in tokens: a prefill's is
// one token.
func answerOf(f *api.Facts, phase route.Phase) int {
	if phase == route.Prefill {
		return 1
	}
	return int(max(f.MaxTokens, 0))
}

// tooSmall reports whether a worker's window is known, smaller than so many tokens, and its
// engine refuses what is longer.
func tooSmall(w *workers.Worker, tokens int) bool {
	return w.MaxModelLen < tokens && w.MaxModelLen > 0 && w.WireEngine() == workers.VLLM
}

// window is how many tokens a worker's window must hold in a phase; 0 where that excludes none.
// An estimate counts where a worker of the list holds as many.
func (r *Run) window(list []*workers.Worker, phase route.Phase) int {
	f := &r.Criteria.Facts
	need := windowFor(f, phase)
	if need > 0 && f.Source == route.FromEstimate && !slices.ContainsFunc(list, func(w *workers.Worker) bool { return can(w, phase) && !tooSmall(w, need) }) {
		return 0
	}
	return need
}

// tooSmallWhy says why a worker's window is too small in a phase.
func (r *Run) tooSmallWhy(w *workers.Worker, phase route.Phase) string {
	f := &r.Criteria.Facts
	if f.Source == route.FromEstimate {
		return fmt.Sprintf("its window of %d tokens cannot hold about %d", w.MaxModelLen, f.ISL)
	}
	return fmt.Sprintf("its window of %d tokens cannot hold %d + %d", w.MaxModelLen, f.ISL, answerOf(f, phase))
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
	for _, phase := range [...]route.Phase{route.Decode, route.Prefill} {
		largest := 0
		for _, w := range r.workers {
			if can(w, phase) && tooSmall(w, r.windows[index(phase)]) {
				largest = max(largest, w.MaxModelLen)
			}
		}
		if largest > 0 {
			s += fmt.Sprintf("\x00%s window %d", phase, largest)
		}
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
