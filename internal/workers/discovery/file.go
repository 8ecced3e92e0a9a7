// Package discovery puts workers into the registry: those stated on the command
// line once, those of a file again whenever the file changes.
//
// The file is YAML or JSON with one key, workers, a list of entries with the
// keys of the flags:
//
//	workers:
//	  - url: http://10.0.0.1:8000
//	    role: prefill
//	    dp: 2
//	    events: tcp://*:5557
//	    labels: {gpu: h200}
//	  - http://10.0.0.2:8000,role=decode
package discovery

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/positive"
	"github.com/dynctl/dynctl/internal/watchfile"
	"github.com/dynctl/dynctl/internal/workers"
)

// FileOptions are the settings of a File.
type FileOptions struct {
	// Path of the file, watched as [watchfile.Run] does.
	Path string
	// Source is the name of this source in the registry; "file" when empty.
	Source string
	// Poll is how often the file is looked at when the system reports nothing;
	// 5 s when zero.
	Poll time.Duration
	// Settle is how long the file must have been left alone before it is read;
	// [watchfile.Options] has the default.
	Settle time.Duration
}

// File is a watched file of workers.
type File struct {
	reg  *workers.Registry
	opts FileOptions
	sink eventlog.Sink

	mu   sync.Mutex // one load at a time; guards what follows
	last [sha256.Size]byte
	seen bool   // last is set
	bad  string // the error of the last load; empty when it went well
}

// NewFile prepares a watched file. Nothing is read before Load or Run.
func NewFile(reg *workers.Registry, opts FileOptions, sink eventlog.Sink) *File {
	opts.Source = cmp.Or(opts.Source, "file")
	opts.Poll = positive.Or(opts.Poll, watchfile.DefaultPoll)
	opts.Path = filepath.Clean(opts.Path)
	return &File{reg: reg, opts: opts, sink: sink}
}

func (f *File) load(force bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	content, err := f.read()
	if err == nil {
		sum := sha256.Sum256(content)
		if f.seen && sum == f.last && !force {
			return nil
		}
		f.last, f.seen = sum, true
	} else {
		f.seen = false // an unreadable file is looked at again
	}
	var specs []workers.Spec
	if err == nil {
		specs, err = Parse(f.opts.Path, content)
	}
	var changes []workers.Change
	if err == nil {
		changes, err = f.reg.Apply(f.opts.Source, specs)
	}
	f.report(err, len(specs), len(changes))
	if err != nil {
		return fmt.Errorf("workers file: %w", err)
	}
	return nil
}

// report emits an event for a problem once, and one for its end.
func (f *File) report(err error, count, changes int) {
	switch {
	case err != nil && err.Error() != f.bad:
		f.bad = err.Error()
		lines := strings.Split(f.bad, "\n")
		f.sink.Emit(eventlog.Event{
			Severity: eventlog.Error, Kind: "discovery_file_bad",
			Text:   fmt.Sprintf("%s is not taken over, the workers stay as they are: %s", f.opts.Path, strings.Join(lines, "; ")),
			Fields: map[string]any{"path": f.opts.Path, "problems": lines},
		})
	case err == nil && f.bad != "":
		f.bad = ""
		f.sink.Emit(eventlog.Event{
			Kind: "discovery_file_fixed", Text: fmt.Sprintf("%s is in order again: %d workers, %d changes", f.opts.Path, count, changes),
			Fields: map[string]any{"path": f.opts.Path, "workers": count, "changes": changes},
		})
	case err == nil && changes > 0:
		f.sink.Emit(eventlog.Event{
			Kind: "discovery_file_loaded", Text: fmt.Sprintf("%s is taken over: %d workers, %d changes", f.opts.Path, count, changes),
			Fields: map[string]any{"path": f.opts.Path, "workers": count, "changes": changes},
		})
	}
}

func (f *File) read() ([]byte, error) {
	h, err := os.Open(f.opts.Path)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	info, err := h.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &Problem{File: f.opts.Path, Text: "is not a regular file"}
	}
	var b bytes.Buffer
	_, err = b.ReadFrom(io.LimitReader(h, maxFileBytes+1))
	return b.Bytes(), err
}

// Run watches the file until ctx ends and takes every good change over. It
// returns nil when ctx ends; problems of the file are events, not errors.
func (f *File) Run(ctx context.Context) error {
	o := watchfile.Options{Paths: []string{f.opts.Path}, Poll: f.opts.Poll, Settle: f.opts.Settle}
	// The error of load has become an event there.
	watchfile.Run(ctx, o, func() { _ = f.load(false) }, func(err error) {
		f.sink.Emit(eventlog.Event{
			Severity: eventlog.Warn, Kind: "discovery_file_unwatched",
			Text:   fmt.Sprintf("%s cannot be watched and is read every %s instead: %v", f.opts.Path, f.opts.Poll, err),
			Fields: map[string]any{"path": f.opts.Path},
		})
	})
	return nil
}
