package eventlog

import (
	"context"
	"log/slog"
)

// Print writes an event into the log of the process. While a router starts, what every
// worker of its fleet goes through is told there in one line, by serve; here it would be
// four of them for each, and is for those who look for mistakes.
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
