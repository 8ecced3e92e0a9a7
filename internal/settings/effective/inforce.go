package effective

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// Options say what follows new settings, and what is called then. Only Replaced may be nil.
type Options struct {
	// Prepare applies new settings, and the workers that they list, to whatever may refuse
	// them. After an error all of it is as it was.
	Prepare func(old, now *Settings, listed []workers.Spec) error
	// Follow applies settings that are in force to the rest.
	Follow func(now *Settings)
	// Event and Result, of "ok" or "refused", are called for every attempt.
	Event  func(eventlog.Event)
	Result func(string)
	// Replaced is called with new settings before the event.
	Replaced func(old, now *settings.Config)
}

// InForce holds the settings in force. It is safe for concurrent use.
type InForce struct{ current atomic.Pointer[Settings] }

// NewInForce begins with settings.
func NewInForce(s *Settings) *InForce {
	f := &InForce{}
	f.current.Store(s)
	return f
}

// Load returns the settings in force.
func (f *InForce) Load() *Settings { return f.current.Load() }

// Reloader replaces the settings in force. It is safe for concurrent use.
type Reloader struct {
	*InForce
	o  Options
	mu sync.Mutex // one replacement at a time
}

// NewReloader makes the one that may replace the settings in force.
func NewReloader(f *InForce, o Options) *Reloader { return &Reloader{InForce: f, o: o} }

// Reload replaces the configuration. What is fixed at the start may not change; everything
// else takes effect immediately, or the old configuration stays in force and the error says
// why.
func (f *Reloader) Reload(c settings.Config, origin map[string]string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.replace(c, origin)
}

// Change replaces the configuration by what change makes of the one in force and its
// origins, which it must not write to. No other change comes between. An error of change
// is returned as it is, and nothing has happened then.
func (f *Reloader) Change(change func(settings.Config, map[string]string) (settings.Config, map[string]string, error)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.Load()
	c, origin, err := change(s.Config, s.Origin)
	if err != nil {
		return err
	}
	return f.replace(c, origin)
}

// Patch changes settings by their keys; their origin is who did it from then on.
func (f *Reloader) Patch(changes map[string]any, who string) error {
	return f.Change(func(now settings.Config, origin map[string]string) (settings.Config, map[string]string, error) {
		now, err := settings.Patch(now, changes)
		origin = maps.Clone(origin)
		if origin == nil {
			origin = map[string]string{}
		}
		for k := range changes {
			origin[k] = who
		}
		return now, origin, err
	})
}

// replace is Reload. The caller holds mu.
func (f *Reloader) replace(c settings.Config, origin map[string]string) error {
	old := f.Load()
	now, err := f.put(old, c, origin)
	if err != nil {
		f.Refused(err)
		return err
	}
	f.o.Result("ok")
	if f.o.Replaced != nil {
		f.o.Replaced(&old.Config, &now.Config)
	}
	f.o.Event(eventlog.Event{Kind: "config_reloaded", Text: fmt.Sprintf("configuration revision %d is in force", now.Revision)})
	return nil
}

func (f *Reloader) put(old *Settings, c settings.Config, origin map[string]string) (*Settings, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	listed, err := c.Specs()
	if err := errors.Join(c.CanFollow(&old.Config), err); err != nil {
		return nil, err
	}
	now, err := New(c, origin, old.Revision+1)
	if err != nil {
		return nil, err
	}
	if err := f.o.Prepare(old, now, listed); err != nil {
		return nil, err
	}
	f.current.Store(now)
	f.o.Follow(now)
	return now, nil
}

// Refused notes that a new configuration could not be put into force, or not even read. Each
// problem is an event of its own.
func (f *Reloader) Refused(err error) {
	f.o.Result("refused")
	for _, problem := range eventlog.Problems(err) {
		f.o.Event(eventlog.Event{
			Kind: "config_refused", Severity: eventlog.Error,
			Text: "the new configuration was refused, the old one stays in force: " + problem,
		})
	}
}
