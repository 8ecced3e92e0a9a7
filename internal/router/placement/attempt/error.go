package attempt

import (
	"fmt"
	"net/http"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Error is the failure of a leg, which knows what the client gets of it.
type Error struct {
	Failure
	// Err is what happened.
	Err error
}

// NewError is the failure of the leg of a phase that went to a worker. sent says that the
// engine may have read something of the request.
func NewError(phase route.Phase, w *workers.Worker, reason Reason, sent bool, err error) *Error {
	return &Error{Failure: Failure{Worker: w.State, Name: w.Name, Phase: phase, Reason: reason, Sent: sent}, Err: err}
}

// Cut is how the leg of a stream broke off that the client has a part of.
func Cut(w *workers.Worker, reason Reason) *Failure {
	return &Failure{Worker: w.State, Name: w.Name, Phase: route.Decode, Reason: reason, Sent: true, Begun: true}
}

// Error names the leg, its worker and what happened.
func (e *Error) Error() string { return fmt.Sprintf("%s leg on %s: %v", e.Phase, e.Name, e.Err) }

// Unwrap is what happened.
func (e *Error) Unwrap() error { return e.Err }

// APIError is the failure as the client gets it: what is the request's own fault in its
// own words, anything else as the fault of the worker behind the router.
func (e *Error) APIError() *api.Error {
	out := *api.FromError(e.Err)
	if e.Phase == route.Prefill && out.Status >= 500 {
		if out.Status == http.StatusInternalServerError {
			out.Status = http.StatusBadGateway
		}
		out.Code = api.CodePrefillFailed
		out.Message = fmt.Sprintf("remote prefill on %s failed: %v", e.Name, e.Err)
	} else if out.Status >= 500 {
		if out.Status == http.StatusInternalServerError {
			out.Status, out.Code = http.StatusBadGateway, api.CodeUpstreamError
		}
		out.Message = fmt.Sprintf("%s: %v", e.Name, e.Err)
	}
	out.Err = e
	return &out
}
