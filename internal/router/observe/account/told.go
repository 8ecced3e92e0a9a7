package account

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/eventlog"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/workers"
)

// Headers tell the client what was decided.
func (r *Request) Headers(h http.Header) {
	values := make([]string, 0, 5) // one allocation for all
	set := func(key, value string) {
		values = append(values, value)
		h[key] = values[len(values)-1 : len(values) : len(values)]
	}
	set("X-Dynctl-Decision", r.Live.ID())
	p, in := &r.Question.Run.Plan, &r.Question.Run.In
	if p.Err != nil || p.DecodeIndex < 0 || p.Path == "" {
		return
	}
	set("X-Dynctl-Path", string(p.Path))
	set("X-Dynctl-Worker", in.DecodePeers[p.DecodeIndex].Rank.Label)
	if p.Path == decide.Remote {
		set("X-Dynctl-Prefill-Worker", in.PrefillPeers[p.PrefillIndex].Rank.Label)
	}
	set("X-Dynctl-Cached-Tokens", strconv.Itoa(p.CachedTokens))
}

// Prefilled tells what is odd or wrong with a prefill's good answer: err is why its KV
// cannot move.
func (r *Request) Prefilled(w *workers.Worker, f *disagg.Checked, err error) {
	now := time.Now()
	switch {
	case err == nil:
		if len(f.Odd) > 0 {
			what := strings.Join(f.Odd, "; ")
			r.Note(fmt.Sprintf("the transfer parameters of %s are not as expected and were used (transfer_check=report): %s", w.Name, what))
			r.To.Metrics.OddParams(w.Name)
			r.Event(r.To.Failures.OddParams(w, what, now))
		}
		if f.Groups > 1 {
			r.Event(r.To.Failures.Hybrid(w, f.Groups, now))
		}
	case errors.Is(err, disagg.ErrEnded), errors.Is(err, disagg.ErrRestarted): // nothing is wrong with what it said
	case errors.Is(err, disagg.ErrMissingParams):
		r.Event(eventlog.Event{
			Kind: "prefill_without_params", Severity: eventlog.Error, Worker: w.Name,
			Text: fmt.Sprintf("%s answered a remote prefill with 200 but without transfer parameters, so its KV cannot move; check its --kv-transfer-config", w.Name),
		}, true)
	default:
		r.Event(eventlog.Event{
			Kind: "prefill_bad_params", Severity: eventlog.Error, Worker: w.Name,
			Text: fmt.Sprintf("%s answered a remote prefill with transfer parameters that do not fit the prompt; they were not used: %v", w.Name, err),
		}, true)
	}
}
