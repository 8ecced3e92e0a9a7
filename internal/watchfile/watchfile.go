// Package watchfile reports changes of files: workers, certificates, keys.
package watchfile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Options say what is watched.
type Options struct {
	// Paths of the files. A symbolic link, or a file in a directory that is swapped
	// by one, as a Kubernetes ConfigMap or Secret, is followed again each time.
	Paths []string
	// Poll is how often the files are looked at when the system reports nothing;
	// 5 s when zero.
	Poll time.Duration
	// Settle is how long the files must have been left alone before they are
	// reported as changed; 50 ms when zero.
	Settle time.Duration
}

// DefaultPoll is Options.Poll where none is given.
const DefaultPoll = 5 * time.Second

// Run calls changed immediately, and again each time that the files may have changed, until
// ctx ends. unwatched hears, at most once, that the system cannot watch, and that polling
// notices changes instead.
//
// The directories are watched rather than the files, because editors and
// Kubernetes put a new file or a new link in a file's place. Where the system
// cannot watch, and for links into other directories, polling notices the change.
func Run(ctx context.Context, o Options, changed func(), unwatched func(error)) {
	poll, settleFor := cmp.Or(max(o.Poll, 0), DefaultPoll), cmp.Or(max(o.Settle, 0), 50*time.Millisecond)
	paths := make([]string, len(o.Paths))
	var dirs []string
	for i, p := range o.Paths {
		paths[i] = filepath.Clean(p)
		dirs = append(dirs, filepath.Dir(p))
	}
	slices.Sort(dirs)
	w, err := fsnotify.NewWatcher()
	if err == nil {
		for _, d := range slices.Compact(dirs) {
			err = errors.Join(err, w.Add(d))
		}
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}
	var events <-chan fsnotify.Event
	var failures <-chan error
	if err != nil {
		unwatched(err)
	} else {
		defer w.Close()
		events, failures = w.Events, w.Errors
	}
	tick := time.NewTicker(poll)
	defer tick.Stop()
	settle := time.NewTimer(0) // the files may have changed since they were read
	defer settle.Stop()
	before := fingerprint(paths)
	var latest time.Time // when to report even if writing goes on
	touch := func() {
		now := time.Now()
		if latest.IsZero() {
			latest = now.Add(20 * settleFor)
		}
		settle.Reset(min(settleFor, max(0, latest.Sub(now))))
	}
	for {
		select {
		case <-ctx.Done():
			return
		case e, ok := <-events:
			switch {
			case !ok:
				events = nil
			case slices.Contains(paths, filepath.Clean(e.Name)) || fingerprint(paths) != before:
				// Anything else in the directory matters only if it is a link on
				// the way to a file.
				touch()
			}
		case _, ok := <-failures:
			if !ok {
				failures = nil
				continue
			}
			touch() // events were lost: look
		case <-tick.C:
			if fingerprint(paths) != before {
				touch()
			}
		case <-settle.C:
			latest = time.Time{}
			before = fingerprint(paths)
			changed()
		}
	}
}

// fingerprint is what stat reports of the files behind all links; it changes
// whenever the content may have.
func fingerprint(paths []string) string {
	var b strings.Builder
	for _, p := range paths {
		info, err := os.Stat(p)
		if err == nil {
			p, err = filepath.EvalSymlinks(p)
		}
		if err != nil {
			fmt.Fprintln(&b, err)
			continue
		}
		fmt.Fprintln(&b, p, info.ModTime().UnixNano(), info.Size(), info.Mode())
	}
	return b.String()
}
