package watch

import (
	"context"
	"fmt"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// Recording is a recording of what a router does.
type Recording interface {
	// State is the recording as the status shows it.
	State() *admin.Recorder
	// Ended is closed when the recording has ended, as it should or with the error
	// that State has from then on.
	Ended() <-chan struct{}
}

// Record waits until a recording has ended, or ctx has, and reports one that broke off.
func Record(ctx context.Context, r Recording, event func(eventlog.Event)) error {
	select {
	case <-ctx.Done():
	case <-r.Ended():
		if rec := r.State(); rec.Error != "" {
			event(eventlog.Event{
				Kind: "recording_failed", Severity: eventlog.Error,
				Text: fmt.Sprintf("the recording to %s has ended after %d records: %s; requests are served as before, but nothing is recorded until the router is started again", rec.Path, rec.Records, rec.Error),
			})
		}
	}
	return nil
}

// Legs is the event that requests begin to be refused because the limit of requests to
// workers is reached, or that there are half as many again.
func Legs(full bool, limit int64) eventlog.Event {
	if full {
		return eventlog.Event{Kind: "legs_full", Severity: eventlog.Warn, Text: fmt.Sprintf("requests are refused with 503: %d requests to workers are in progress (limits.legs, by default from the limit of open files); raise it, and the limit of open files with it, or add routers", limit)}
	}
	return eventlog.Event{Kind: "legs_freed", Text: fmt.Sprintf("less than half of the %d requests to workers that may be in progress (limits.legs) are", limit)}
}

// BodyMemory is the event that requests begin to be refused because the memory for bodies
// is full, or that half of its limit is free again.
func BodyMemory(full bool, limit int64) eventlog.Event {
	if full {
		return eventlog.Event{Kind: "body_memory_full", Severity: eventlog.Warn, Text: fmt.Sprintf("requests are refused with 503: the bodies of those that are read, wait or run, and what is kept of streams that may be continued, take all of %d bytes (limits.body_memory); raise it, or admit fewer (limits.inflight, limits.queue)", limit)}
	}
	return eventlog.Event{Kind: "body_memory_freed", Text: fmt.Sprintf("half of the %d bytes for request bodies is free again", limit)}
}
