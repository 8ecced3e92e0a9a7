package watch

import (
	"context"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// record is a recording as it stands.
type record struct {
	state admin.Recorder
	ended chan struct{}
}

func (r *record) State() *admin.Recorder { return &r.state }
func (r *record) Ended() <-chan struct{} { return r.ended }

// TestRecord: a recording that breaks off is an event, one that ends as it should and one
// that runs when the router stops are not.
func TestRecord(t *testing.T) {
	over := make(chan struct{})
	close(over)
	stopped, stop := context.WithCancel(t.Context())
	stop()
	for _, c := range []struct {
		ctx   context.Context
		ended chan struct{}
		why   string
		event bool
	}{{t.Context(), over, "disk full", true}, {t.Context(), over, "", false}, {stopped, nil, "disk full", false}} {
		var events []eventlog.Event
		r := &record{admin.Recorder{Path: "file", Records: 7, Error: c.why}, c.ended}
		if err := Record(c.ctx, r, func(e eventlog.Event) { events = append(events, e) }); err != nil || (len(events) == 1) != c.event {
			t.Errorf("%q: %+v, %v", c.why, events, err)
		}
		if c.event && (events[0].Kind != "recording_failed" || events[0].Severity != eventlog.Error || !strings.Contains(events[0].Text, "to file has ended after 7 records: disk full")) {
			t.Errorf("%+v", events[0])
		}
	}
}

// TestLegs: so is a limit of legs that is reached.
func TestLegs(t *testing.T) {
	if e := Legs(true, 99); e.Kind != "legs_full" || e.Severity != eventlog.Warn || !strings.Contains(e.Text, "99 requests to workers are in progress (limits.legs") {
		t.Errorf("%+v", e)
	}
	if e := Legs(false, 99); e.Kind != "legs_freed" || e.Severity != "" || !strings.Contains(e.Text, "half of the 99 requests") {
		t.Errorf("%+v", e)
	}
}

// TestBodyMemory: what is full is a warning with the setting to change.
func TestBodyMemory(t *testing.T) {
	if e := BodyMemory(true, 99); e.Kind != "body_memory_full" || e.Severity != eventlog.Warn || !strings.Contains(e.Text, "all of 99 bytes (limits.body_memory)") {
		t.Errorf("%+v", e)
	}
	if e := BodyMemory(false, 99); e.Kind != "body_memory_freed" || e.Severity != "" || !strings.Contains(e.Text, "half of the 99 bytes") {
		t.Errorf("%+v", e)
	}
}
