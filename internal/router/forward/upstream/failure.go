package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Kind says in which way a leg failed.
type Kind string

// The kinds of failures.
const (
	// Connect: no connection was made (refused, unreachable, no such host,
	// TLS handshake failed).
	Connect Kind = "connect"
	// Timeout: connecting, sending, waiting for the answer or a pause within
	// it took too long.
	Timeout Kind = "timeout"
	// Silent: [Leg.Watch] gave up an engine without a sign of life.
	Silent Kind = "silent"
	// Reset: the engine closed the connection before its answer was complete.
	Reset Kind = "reset"
	// Protocol: the answer is not HTTP, or larger than allowed.
	Protocol Kind = "protocol"
	// Canceled: the caller's context ended.
	Canceled Kind = "canceled"
	// Status: the engine answered with a status that the caller takes for a
	// failure.
	Status Kind = "status"
	// Invalid: the leg itself cannot be sent.
	Invalid Kind = "invalid"
)

// Failure is why a leg did not bring an answer, or not all of it.
type Failure struct {
	Kind Kind
	// Addr is the engine's host and port.
	Addr string
	// Op is what was being done: "connect", "send the request", "wait for the
	// answer", "read the answer".
	Op string
	// Sent says that bytes of the request may have reached the engine.
	Sent bool
	// Started says that at least one byte of the answer arrived.
	Started bool
	// Reused says that the connection had served requests before: a reset may
	// then only mean that the engine had closed it as idle.
	Reused bool
	// Idle is how long the connection had been unused before the request, After how long
	// after the beginning of the request it failed.
	Idle, After time.Duration
	// Late says that the time for the answer ([Leg.HeadTimeout]) was up while the connection
	// stood.
	Late bool
	// Status is the HTTP status of a failure of kind Status.
	Status int
	// Answer is the engine's answer, where the client may get it; nil otherwise.
	Answer *Answer
	// Err is the cause.
	Err error
}

// flight is how long after the request the end of a connection may still be under way
// that the engine closed before the request.
const flight = 100 * time.Millisecond

// Stale reports whether the connection may have been closed as idle at the very moment in which
// the request was sent: it was reused and broke without a byte of an answer, immediately, or
// within a second if it had been idle for longer than it then lived. An engine that dies of a
// request may look the same, so the request may be sent again to the same engine only.
func (f *Failure) Stale() bool {
	return f.Reused && f.Kind == Reset && !f.Started && (f.After < flight || f.After < min(f.Idle, time.Second))
}

// Error says what failed where.
func (f *Failure) Error() string {
	if f.Kind == Status {
		return fmt.Sprintf("%s %s: status %d", f.Op, f.Addr, f.Status)
	}
	if dial, ok := errors.AsType[*net.OpError](f.Err); ok && f.Kind == Connect && dial.Addr != nil && dial.Addr.String() == f.Addr {
		return fmt.Sprintf("%s %s: %v", f.Op, f.Addr, dial.Err) // its own text has the address again
	}
	return fmt.Sprintf("%s %s: %s: %v", f.Op, f.Addr, f.Kind, f.Err)
}

// Unwrap is the cause.
func (f *Failure) Unwrap() error { return f.Err }

// APIError is the failure as the client gets it.
func (f *Failure) APIError() *api.Error {
	e := &api.Error{Status: http.StatusBadGateway, Code: api.CodeUpstreamError, Err: f}
	switch f.Kind {
	case Canceled:
		e.Status, e.Code, e.Message = api.StatusClientClosed, api.CodeClientClosed, "the client closed the connection"
	case Timeout, Silent:
		e.Status, e.Code, e.Message = http.StatusGatewayTimeout, api.CodeTimeout, "the engine did not answer in time"
	case Connect:
		e.Message = "the engine cannot be reached"
	case Reset:
		e.Message = "the engine closed the connection before its answer was complete"
	case Protocol:
		e.Message = "the engine's answer is not valid HTTP"
	case Status:
		e.Message = fmt.Sprintf("the engine answered with status %d", f.Status)
	default:
		e.Status, e.Code, e.Message = http.StatusInternalServerError, api.CodeInternal, "internal error of the router"
	}
	return e
}

// ClientError is a failure to write to the client: it left, or it read too
// slowly.
type ClientError struct{ Err error }

// Error says what failed.
func (e *ClientError) Error() string { return "write to the client: " + e.Err.Error() }

// Unwrap is the cause.
func (e *ClientError) Unwrap() error { return e.Err }

// Slow reports whether the client was there but did not read in time.
func (e *ClientError) Slow() bool { return errors.Is(e.Err, os.ErrDeadlineExceeded) }

// APIError is the failure in logs and receipts; no client gets it.
func (e *ClientError) APIError() *api.Error {
	return &api.Error{Status: api.StatusClientClosed, Code: api.CodeClientClosed, Message: "the client closed the connection", Err: e}
}

var (
	errClosedEarly = errors.New("connection closed before the answer was complete")
	errHeadSize    = errors.New("head of the answer is larger than allowed")
	errBodySize    = errors.New("body of the answer is larger than allowed")
)

// malformed is a violation of HTTP by the engine.
type malformed string

func (m malformed) Error() string { return string(m) }

// kindOf sorts an error of the connection.
func kindOf(ctx context.Context, err error) Kind {
	if ctx.Err() != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return Timeout
		}
		return Canceled
	}
	var ne net.Error
	var m malformed
	switch {
	case errors.Is(err, errSilent):
		return Silent
	case errors.As(err, &m), errors.Is(err, errHeadSize), errors.Is(err, errBodySize):
		return Protocol
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, errClosedEarly),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, net.ErrClosed):
		return Reset
	case errors.As(err, &ne) && ne.Timeout():
		return Timeout
	}
	return Reset
}
