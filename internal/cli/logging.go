package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/settings"
)

// NewLogger logs lines for people to a terminal and JSON elsewhere, unless the settings
// say otherwise.
func NewLogger(c settings.Log, w io.Writer) *slog.Logger {
	log, _ := NewLevelLogger(c, w)
	return log
}

// NewLevelLogger is NewLogger with a level that can be changed while it is
// used.
func NewLevelLogger(c settings.Log, w io.Writer) (*slog.Logger, *slog.LevelVar) {
	level := new(slog.LevelVar)
	_ = level.UnmarshalText([]byte(c.Level)) // validated with the config
	tty := IsTerminal(w)
	if c.Format == "text" || c.Format == "auto" && tty {
		h := &lineHandler{w: w, mu: &sync.Mutex{}, level: level, layout: time.RFC3339}
		if tty {
			h.layout, h.colour = time.TimeOnly, wantColour()
		}
		return slog.New(h), level
	}
	return slog.New(slog.NewJSONHandler(printable.JSON(w), &slog.HandlerOptions{Level: level})), level
}

// IsTerminal reports whether v is a file that is a terminal.
func IsTerminal(v any) bool {
	f, ok := v.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// wantColour obeys NO_COLOR (https://no-color.org) and dumb terminals.
func wantColour() bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("DYNCTL_NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// lineHandler writes one line for people per record: time, level unless it is
// info, message, and those attributes that the message does not name already. What a
// terminal would obey is escaped, so that nothing in a record begins a line of its own.
type lineHandler struct {
	w      io.Writer
	mu     *sync.Mutex // shared by the handlers that With makes
	level  slog.Leveler
	layout string
	colour bool
	prefix string // of groups
	attrs  []slog.Attr
}

// Enabled implements slog.Handler.
func (h *lineHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level.Level() }

// WithAttrs implements slog.Handler.
func (h *lineHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	n := *h
	n.attrs = slices.Clone(h.attrs)
	for _, a := range attrs {
		a.Key = h.prefix + a.Key
		n.attrs = append(n.attrs, a)
	}
	return &n
}

// WithGroup implements slog.Handler.
func (h *lineHandler) WithGroup(name string) slog.Handler {
	n := *h
	n.prefix += name + "."
	return &n
}

// Handle implements slog.Handler.
func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	var b bytes.Buffer
	b.WriteString(r.Time.Format(h.layout))
	before, after := "", ""
	if h.colour {
		switch {
		case r.Level >= slog.LevelError:
			before, after = "\x1b[31m", "\x1b[0m"
		case r.Level >= slog.LevelWarn:
			before, after = "\x1b[33m", "\x1b[0m"
		}
	}
	b.WriteString(" " + before)
	if r.Level != slog.LevelInfo {
		b.WriteString(r.Level.String() + " ")
	}
	b.WriteString(printable.Line(r.Message) + after)
	attr := func(prefix string, a slog.Attr) bool {
		v := a.Value.Resolve().String()
		if a.Key == "kind" || v != "" && strings.Contains(r.Message, v) {
			return true
		}
		if strings.ContainsAny(v, " \"=") || v == "" || printable.Line(v) != v {
			v = fmt.Sprintf("%q", v)
		}
		b.WriteString("  " + prefix + a.Key + "=" + v)
		return true
	}
	for _, a := range h.attrs {
		attr("", a)
	}
	r.Attrs(func(a slog.Attr) bool { return attr(h.prefix, a) })
	b.WriteByte('\n')
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := h.w.Write(b.Bytes())
	return err
}
