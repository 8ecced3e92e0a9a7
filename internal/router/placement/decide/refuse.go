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
		e.Message += ": the model has none"
	}
	return e
}

// Overflows reports whether a worker's engine refuses the request in a phase because its
// context window does not hold the prompt with the longest answer that the leg asks for. It
// judges where the prompt's tokens are counted, and engines that refuse: others may cut the
// prompt or the answer.
func Overflows(f *api.Facts, w *workers.Worker, phase route.Phase) bool {
	refuses := f.Kind == api.Completion || f.Kind == api.Chat || f.Kind == api.Messages
	return refuses && w.WireEngine() == workers.VLLM && f.Source.Counted() && outgrows(f, promptOf(f), w, phase)
}

// farBeyond is how many times a window an estimated prompt must be to be too long for it: no
// usual text has twice as many characters to a token as the estimate takes.
const farBeyond = 2

// promptOf is how many tokens the prompt of a request has at least; 0 where windows do not
// matter to it, or that is not known.
func promptOf(f *api.Facts) int {
	switch {
	case f.Prompts > 1 || f.Truncated:
		return 0
	case f.Kind != api.Completion && f.Kind != api.Generate && f.Kind != api.SGLangGenerate && !f.Kind.IsChat():
		return 0
	case f.Source == route.FromEstimate:
		return (f.ISL - f.MediaTokens + farBeyond - 1) / farBeyond // media may be much smaller than usual
	}
	return f.ISL
}

// answerOf is the longest answer that a leg asks a worker for, in tokens. SGLang's two legs ask
// for the same, other prefill legs for one token.
func answerOf(f *api.Facts, w *workers.Worker, phase route.Phase) int {
	if phase == route.Prefill && w.WireEngine() != workers.SGLang {
		return 1
	}
	return int(max(f.MaxTokens, 0))
}

// outgrows reports whether a worker's window is known and does not hold a prompt of at least that
// many tokens with its answer in a phase.
func outgrows(f *api.Facts, prompt int, w *workers.Worker, phase route.Phase) bool {
	if prompt == 0 || w.MaxModelLen <= 0 || int64(w.MaxModelLen) >= int64(prompt)+max(f.MaxTokens, 1) {
		return false
	}
	return w.MaxModelLen < prompt+answerOf(f, w, phase)
}

// tooSmall reports whether a worker's window keeps it out of a phase: its engine refuses the
// request, or another worker holds what it might cut or what is only estimated.
func (r *Run) tooSmall(w *workers.Worker, phase route.Phase) bool {
	f := &r.Criteria.Facts
	return outgrows(f, r.prompt, w, phase) && (r.held[index(phase)] || Overflows(f, w, phase))
}

// holds reports whether a worker of the list that serves, and that the client may have meant,
// holds the prompt with its answer in a phase.
func (r *Run) holds(list []*workers.Worker, phase route.Phase) bool {
	pin := r.Criteria.Pin.worker(phase)
	return slices.ContainsFunc(list, func(w *workers.Worker) bool {
		return can(w, phase) && (pin == "" || pin == w.Name) && Serves(w) && !outgrows(&r.Criteria.Facts, r.prompt, w, phase)
	})
}

// tooSmallWhy says why a worker's window is too small in a phase.
func (r *Run) tooSmallWhy(w *workers.Worker, phase route.Phase) string {
	f, about := &r.Criteria.Facts, ""
	if f.Source == route.FromEstimate {
		about = "about "
	}
	return fmt.Sprintf("its window of %d tokens cannot hold %s%d + %d", w.MaxModelLen, about, f.ISL, answerOf(f, w, phase))
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
			if can(w, phase) && r.tooSmall(w, phase) {
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
