package effective

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// steps are what a replacement does, in its order.
type steps struct {
	mu     sync.Mutex
	list   []string
	refuse error
}

func (s *steps) add(format string, a ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, fmt.Sprintf(format, a...))
}

// inForce begins with revision 7; the steps are what it does.
func inForce(t *testing.T) (*Reloader, *steps) {
	t.Helper()
	s := &steps{}
	in := NewInForce(made(t, func(*settings.Config) {}))
	f := NewReloader(in, Options{
		Prepare: func(old, now *Settings, listed []workers.Spec) error {
			s.add("prepare %d of %d, %d workers", now.Revision, old.Revision, len(listed))
			return s.refuse
		},
		Follow:   func(now *Settings) { s.add("follow %d, in force %v", now.Revision, in.Load() == now) },
		Event:    func(e eventlog.Event) { s.add("%s: %s", e.Kind, e.Text) },
		Result:   func(r string) { s.add("%s", r) },
		Replaced: func(old, now *settings.Config) { s.add("%d requests instead of %d", now.Receipts, old.Receipts) },
	})
	return f, s
}

// TestReload: what can refuse new settings is asked before they are in force, the rest
// follows after, and then there is an event.
func TestReload(t *testing.T) {
	f, s := inForce(t)
	first := f.Load()
	c := settings.Default()
	c.Worker, c.Prefill, c.Limits.Queue = []string{"http://a:1"}, []string{"http://b:1"}, 7
	if err := f.Reload(c, map[string]string{"worker": "file"}); err != nil {
		t.Fatal(err)
	}
	now := f.Load()
	type of struct {
		Revision uint64
		Queue    int
		Worker   string
	}
	if d := cmp.Diff(of{8, 7, "file"}, of{now.Revision, now.Limits.Queue, now.Origin["worker"]}); d != "" {
		t.Errorf("in force now (-want +got):\n%s", d)
	}
	if first.Limits.Queue == 7 || first.Origin["worker"] != "" {
		t.Errorf("what was in force before has changed: queue %d, origin %v", first.Limits.Queue, first.Origin)
	}
	want := []string{"prepare 8 of 7, 2 workers", "follow 8, in force true", "ok", fmt.Sprintf("%d requests instead of %[1]d", c.Receipts), "config_reloaded: configuration revision 8 is in force"}
	if !slices.Equal(s.list, want) {
		t.Errorf("%q", s.list)
	}
}

// TestRefused: whatever is wrong, the old settings stay in force, and an event says why.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		what, says string
		prepared   bool
		change     func(*settings.Config)
	}{
		{"a value", "receipts", false, func(c *settings.Config) { c.Receipts = -1 }},
		{"what is fixed, and workers", "listen cannot change while the router runs", false, func(c *settings.Config) { c.Listen, c.Worker = "127.0.0.1:1", []string{"http://a:1,nonsense=1"} }},
		{"workers, and what is fixed", "worker[0]: ", false, func(c *settings.Config) { c.Listen, c.Worker = "127.0.0.1:1", []string{"http://a:1,nonsense=1"} }},
		{"what is derived", "routing.decoder_registry", false, func(c *settings.Config) { c.Routing.DecoderRegistry = "no JSON" }},
		{"the fleet", "two workers", true, func(c *settings.Config) { c.Limits.Queue = 7 }},
	} {
		f, s := inForce(t)
		s.refuse = errors.New("two workers\nof a name")
		old := f.Load()
		config := old.Config
		c.change(&config)
		err := f.Reload(config, nil)
		if err == nil || !strings.Contains(err.Error(), c.says) || f.Load() != old {
			t.Errorf("%s: %v, revision %d", c.what, err, f.Load().Revision)
			continue
		}
		if c.prepared {
			s.list = s.list[1:]
		}
		want := []string{"refused"}
		for line := range strings.Lines(err.Error()) {
			want = append(want, "config_refused: the new configuration was refused, the old one stays in force: "+strings.TrimSpace(line))
		}
		if !slices.Equal(s.list, want) {
			t.Errorf("%s: %q", c.what, s.list)
		}
	}
}

// TestPatch: a patch changes its settings alone and says whose it was; one that is wrong
// does nothing, and is not taken for a configuration that was refused.
func TestPatch(t *testing.T) {
	f, s := inForce(t)
	first := f.Load()
	if err := f.Patch(map[string]any{"limits.queue": 7.0}, "somebody"); err != nil {
		t.Fatal(err)
	}
	now := f.Load()
	limits, origin := first.Limits, maps.Clone(first.Origin)
	limits.Queue, origin["limits.queue"], origin["routing.policy"] = 7, "somebody", "flag"
	if d := cmp.Diff(limits, now.Limits); d != "" {
		t.Errorf("limits (-want +got):\n%s", d)
	}
	if d := cmp.Diff(origin, now.Origin); d != "" || len(first.Origin) != 1 {
		t.Errorf("where settings come from, %d before (-want +got):\n%s", len(first.Origin), d)
	}
	s.list = nil
	if err := f.Patch(map[string]any{"nosuch": 1.0}, "somebody"); err == nil || f.Load() != now || len(s.list) != 0 {
		t.Errorf("%v, %q", err, s.list)
	}
}

// TestNoChangeIsLost: each change is made upon the one before.
func TestNoChangeIsLost(t *testing.T) {
	f, _ := inForce(t)
	began := f.Load().Limits.Queue
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if err := f.Change(func(c settings.Config, origin map[string]string) (settings.Config, map[string]string, error) {
				c.Limits.Queue++
				return c, origin, nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if s := f.Load(); s.Limits.Queue != began+50 || s.Revision != 57 {
		t.Errorf("queue %d, revision %d", s.Limits.Queue, s.Revision)
	}
}
