package eventlog

import (
	"context"
	"log/slog"
)

// Print writes an event into the log of the process. While a router starts, serve sums up
// what its workers go through in one line; the four events of each worker are for those
// who look for mistakes, at level debug.
func Print(l *slog.Logger, e *Event, starting bool) {
	level := slog.LevelInfo
	switch e.Severity {
	case Warn:
		level = slog.LevelWarn
	case Error:
		level = slog.LevelError
	default:
		switch e.Kind {
		case "worker_added", "worker_changed", "health_changed", "feed_live":
			if starting {
				level = slog.LevelDebug
			}
		}
	}
	attrs := make([]slog.Attr, 1, 4)
	attrs[0] = slog.String("kind", e.Kind)
	for _, a := range []struct{ name, value string }{{"worker", e.Worker}, {"rank", e.Rank}, {"request", e.Request}} {
		if a.value != "" {
			attrs = append(attrs, slog.String(a.name, a.value))
		}
	}
	l.LogAttrs(context.Background(), level, e.Text, attrs...)
}
