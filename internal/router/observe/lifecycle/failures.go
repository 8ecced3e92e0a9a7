package lifecycle

import (
	"context"
	"errors"
	"fmt"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
)

// Failures logs what goes wrong with requests. f leaves out what is like an event of a
// moment ago; log adds to the event log.
func Failures(f *watch.Failures, log func(eventlog.Event)) Subscriber {
	of := func(e *Event) entry { return entry{e.Request.Live.ID(), log} }
	return Subscriber{
		Failed:        func(e *Event) { of(e).add(f.Failed(e.Worker, string(e.Phase), e.Reason, e.Err, e.At)) },
		Continued:     func(e *Event) { of(e).add(f.Continued(e.Text, e.Reason, e.Count, e.At)) },
		NotContinued:  func(e *Event) { of(e).add(f.NotContinued(e.Reason, e.Text, e.At)) },
		RequestFaulty: func(e *Event) { of(e).add(f.RequestFaulty(e.Text, e.At)) },
		Prefilled: func(e *Event) {
			w := e.Worker
			switch {
			case e.Err == nil:
				if e.Text != "" {
					of(e).add(f.OddParams(w, e.Text, e.At))
				}
				if e.Count > 1 {
					of(e).add(f.Hybrid(w, e.Count, e.At))
				}
			case errors.Is(e.Err, disagg.ErrEnded), errors.Is(e.Err, disagg.ErrRestarted): // the answer is right
			case errors.Is(e.Err, disagg.ErrPrefillFailed): // the leg's failure says so
			case errors.Is(e.Err, context.Canceled): // the client has left
			case errors.Is(e.Err, disagg.ErrNoBootstrap):
				of(e).add(eventlog.Event{
					Kind: "prefill_no_bootstrap", Severity: eventlog.Error, Worker: w.Name,
					Text: fmt.Sprintf("%s cannot send KV over connector=mooncake: %v", w.Name, e.Err),
				}, true)
			case errors.Is(e.Err, disagg.ErrMissingParams):
				of(e).add(eventlog.Event{
					Kind: "prefill_without_params", Severity: eventlog.Error, Worker: w.Name,
					Text: fmt.Sprintf("%s answered a remote prefill with 200 but without transfer parameters, so its KV cannot move; check its --kv-transfer-config. An engine with MooncakeConnector gives none: state connector=mooncake for it and for the decode workers beside it", w.Name),
				}, true)
			default:
				of(e).add(eventlog.Event{
					Kind: "prefill_bad_params", Severity: eventlog.Error, Worker: w.Name,
					Text: fmt.Sprintf("%s answered a remote prefill with transfer parameters that do not fit the prompt; they were not used: %v", w.Name, e.Err),
				}, true)
			}
		},
	}
}

// entry adds events about one request to the event log.
type entry struct {
	request string
	log     func(eventlog.Event)
}

func (l entry) add(e eventlog.Event, worth bool) {
	if worth {
		e.Request = l.request
		l.log(e)
	}
}
