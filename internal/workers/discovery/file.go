// Package discovery puts workers into the registry: those stated on the command
// line once, those of a file again whenever the file changes, and from time to time where
// it was refused or names key files.
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
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/wait"
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
	// Again is how often a file that was not taken over is tried again, and how often
	// the key files that it names are read again; 10 s when zero.
	Again time.Duration
}

const defaultAgain = 10 * time.Second

// File is a watched file of workers.
type File struct {
	reg  *workers.Registry
	opts FileOptions
	sink eventlog.Sink

	mu    sync.Mutex // one load at a time; guards what follows
	last  [sha256.Size]byte
	seen  bool   // last is set
	taken bool   // the content of last is taken over
	keyed bool   // and names key files
	bad   string // the error of the last load; empty when it went well
}

// NewFile prepares a watched file. Nothing is read before Reread or Run.
func NewFile(reg *workers.Registry, opts FileOptions, sink eventlog.Sink) *File {
	opts.Source = cmp.Or(opts.Source, "file")
	opts.Poll = cmp.Or(max(opts.Poll, 0), watchfile.DefaultPoll)
	opts.Again = cmp.Or(max(opts.Again, 0), defaultAgain)
	opts.Path = filepath.Clean(opts.Path)
	return &File{reg: reg, opts: opts, sink: sink}
}

// Reread takes the file over again, with the key files that it names, whether or not it
// has changed. The error is an event, too.
func (f *File) Reread() error { return f.load(true) }

func (f *File) load(force bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	content, err := f.read()
	if err == nil && f.remember(content) && f.taken && !force {
		return nil
	}
	return f.take(content, err)
}

// again takes the file over once more where that can have another result although the
// file is the same: what refused it (a key file that is not there yet, a name that another
// source has) may be gone, and keys may be others. Content that is new here may be half of
// what is being written, so that it is left until it is found a second time.
func (f *File) again() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.taken && !f.keyed {
		return
	}
	if content, err := f.read(); err == nil && f.remember(content) {
		_ = f.take(content, nil) // the error has become an event
	}
}

// remember notes the content of the file and reports whether it is that of the last time.
func (f *File) remember(content []byte) bool {
	sum := sha256.Sum256(content)
	if f.seen && sum == f.last {
		return true
	}
	f.last, f.seen, f.taken = sum, true, false
	return false
}

// take takes the content over, unless the file could not be read.
func (f *File) take(content []byte, err error) error {
	f.seen = f.seen && err == nil // an unreadable file is looked at again
	var specs []workers.Spec
	if err == nil {
		specs, err = Parse(f.opts.Path, content)
	}
	var changes []workers.Change
	if err == nil {
		changes, err = f.reg.Apply(f.opts.Source, specs)
	}
	f.taken = err == nil
	f.keyed = slices.ContainsFunc(specs, func(s workers.Spec) bool { return s.APIKeyFile != "" })
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
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() {
		for range wait.Every(ctx, f.opts.Again) {
			f.again()
		}
	})
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
