package cli

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/rig/hostile"
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

// TestLogIsPrintable: what engines and clients write neither commands a terminal nor forges
// a line, in the log for people and in that for programs.
func TestLogIsPrintable(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		var b bytes.Buffer
		log := NewLogger(settings.Log{Level: "info", Format: format}, &b).With("with", hostile.Text)
		log.Warn("model "+hostile.Text, "err", errors.New(hostile.Text), "list", []string{hostile.Text}, "name", "x\x1b[2J")
		if n := strings.Count(b.String(), "\n"); n != 1 {
			t.Errorf("%s: one record is %d lines: %q", format, n, b.String())
		}
		hostile.Check(t, format, b.String())
	}
}

// TestErrorIsPrintable: an error may quote the line of a trace.
func TestErrorIsPrintable(t *testing.T) {
	var b strings.Builder
	root := Root(&cobra.Command{Use: "fail", RunE: func(*cobra.Command, []string) error {
		return errors.Join(errors.New("line 3: "+hostile.Text), errors.New("line 4: too long"))
	}})
	if code := Main(root, []string{"fail"}, strings.NewReader(""), &b, &b); code != ExitRuntime {
		t.Errorf("exit code %d", code)
	}
	hostile.Check(t, "the error", b.String())
	if !strings.HasSuffix(b.String(), "\n  line 4: too long\n") {
		t.Errorf("the second error is no line of its own: %q", b.String())
	}
}
