package cli

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/settings"
)

// TestLogLines: what a person reads names nothing twice; what a program reads
// is JSON.
func TestLogLines(t *testing.T) {
	var b bytes.Buffer
	log, level := NewLevelLogger(settings.Log{Level: "info", Format: "text"}, &b)
	at := time.Date(2026, 11, 21, 15, 0, 0, 0, time.UTC)
	r := slog.NewRecord(at, slog.LevelWarn, "worker p0 is unhealthy", 0)
	r.AddAttrs(slog.String("kind", "health_changed"), slog.String("worker", "p0"), slog.String("request", "r 1"), slog.Any("err", errors.New("gone")))
	h := log.With("a", 1).WithGroup("g").Handler()
	if err := h.Handle(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	log.Debug("not shown")
	if got, want := b.String(), "2026-11-21T15:00:00Z WARN worker p0 is unhealthy  a=1  g.request=\"r 1\"  g.err=gone\n"; got != want {
		t.Errorf("%q\nwant %q", got, want)
	}
	b.Reset()
	level.Set(slog.LevelDebug)
	if log.Debug("shown"); !strings.HasSuffix(b.String(), " DEBUG shown\n") {
		t.Errorf("after the level changed: %q", b.String())
	}
	b.Reset()
	log = NewLogger(settings.Log{Level: "info", Format: "auto"}, &b)
	log.Info("hello", "k", "v")
	if got := b.String(); !strings.HasPrefix(got, `{"time":`) || !strings.HasSuffix(got, `"msg":"hello","k":"v"}`+"\n") {
		t.Errorf("a pipe gets %q", got)
	}
}
