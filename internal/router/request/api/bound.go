package api

import (
	"net/http"
	"time"
)

// refusedBody is how long the rest of a body that is not read may take: long enough
// for one that is on its way, so that its connection can be used again.
const refusedBody = time.Second

// BoundBody sets the time until which the body of a request must have come, also where
// net/http reads it: that waits for the rest of a body that no handler read before it
// answers, and for ever when there is no deadline. It ends with the request, or
// with UnboundBody once the body is read.
func BoundBody(w http.ResponseWriter, r *http.Request, by time.Time) {
	if r.ContentLength != 0 {
		setReadDeadline(w, by)
	}
}

// UnboundBody ends BoundBody for a body that has been read: the connection is
// watched for the client's leaving from then on, however long that takes.
func UnboundBody(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		setReadDeadline(w, time.Time{})
	}
}

// setReadDeadline uses the writer's own method, or what is found below wrappers.
// A writer without a connection has none, and nothing to bound.
func setReadDeadline(w http.ResponseWriter, at time.Time) {
	if d, ok := w.(interface{ SetReadDeadline(time.Time) error }); ok {
		_ = d.SetReadDeadline(at)
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(at)
}

// AnswerDeadline is until when what is written may wait for a client that does not read,
// and net/http for the last of the answer to be sent. The zero value is none yet.
type AnswerDeadline struct{ by time.Time }

// Extend gives what is written from now on d, or up to a quarter more: moving a deadline
// costs as much as a short write, so one that leaves d is left alone.
func (a *AnswerDeadline) Extend(w http.ResponseWriter, d time.Duration) {
	now := time.Now()
	if a.by.Sub(now) >= d {
		return
	}
	a.by = now.Add(d + d/4)
	if s, ok := w.(interface{ SetWriteDeadline(time.Time) error }); ok {
		_ = s.SetWriteDeadline(a.by)
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(a.by)
}
