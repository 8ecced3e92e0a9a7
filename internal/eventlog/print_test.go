package eventlog

import (
	"bytes"
	"log/slog"
	"testing"
)

// TestPrint: an event has the level of its severity and the names that it is about; what
// each worker goes through at the start is hidden, unless something is wrong with it.
func TestPrint(t *testing.T) {
	for _, c := range []struct {
		e        Event
		starting bool
		want     string
	}{
		{Event{Kind: "router_started", Severity: Info, Text: "a"}, true, "level=INFO msg=a kind=router_started\n"},
		{Event{Kind: "feed_gap", Severity: Warn, Worker: "w", Rank: "w/0", Text: "b"}, false, "level=WARN msg=b kind=feed_gap worker=w rank=w/0\n"},
		{Event{Kind: "panic", Severity: Error, Request: "r", Text: "c"}, false, "level=ERROR msg=c kind=panic request=r\n"},
		{Event{Kind: "worker_added", Severity: Info, Worker: "w", Text: "d"}, true, "level=DEBUG msg=d kind=worker_added worker=w\n"},
		{Event{Kind: "worker_added", Severity: Info, Worker: "w", Text: "d"}, false, "level=INFO msg=d kind=worker_added worker=w\n"},
		{Event{Kind: "health_changed", Severity: Warn, Text: "e"}, true, "level=WARN msg=e kind=health_changed\n"},
	} {
		var out bytes.Buffer
		Print(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})), &c.e, c.starting)
		if got := out.String(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.e, got, c.want)
		}
	}
}
