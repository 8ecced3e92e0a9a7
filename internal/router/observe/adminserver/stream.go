package adminserver

import (
	"fmt"
	"net/http"

	"github.com/dynctl/dynctl/internal/eventlog"
)

// Stream is a handler of New that serves a recording as it is made, and logs that a
// listener was dropped: there is no way left to say so to the listener itself.
func Stream(recording http.Handler, log *eventlog.Log) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		recording.ServeHTTP(w, q)
		if b, ok := w.(*boundWriter); ok && b.late { // New made it
			log.Add(eventlog.Event{
				Kind: "stream_dropped", Severity: eventlog.Warn,
				Text: fmt.Sprintf("the listener to /admin/v1/stream at %s was dropped: it took nothing for %s (timeouts.write), so its recording ends there; what reads it must read on, or start it again", q.RemoteAddr, b.time),
			})
		}
	})
}
