package kvfeed

import (
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
)

// A kind that nobody knows is a state of the rank, an event and a figure, all
// of which name it; a publisher that starts over without it is trusted again.
func TestUnknownCacheKindIsReported(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 21, 1)
	f := p.followed(true, nil)
	p.steps(5)
	f.caughtUp(p)
	p.set(func() {
		p.e.Log = append(p.e.Log, kvmodel.StoreOf("quantum_attention"))
		p.e.After = append(p.e.After, kvmodel.Set{})
		clear(p.e.Held)
	})
	p.send(uint64(len(p.e.Log)-1), p.e.Log[len(p.e.Log)-1])
	s := f.until(func(s Status) bool { return s.State == Unknown })
	if s.Trusted || f.Trusted(0) {
		t.Errorf("status trusted %v, rank trusted %v", s.Trusted, f.Trusted(0))
	}
	if !slices.Equal(s.UnknownKinds, []string{"quantum_attention"}) || !strings.Contains(s.Reason, "quantum_attention") {
		t.Errorf("unknown kinds %q, reason %q", s.UnknownKinds, s.Reason)
	}
	f.equals(p)
	f.mu.Lock()
	reported := false
	for _, e := range f.events {
		reported = reported || e.Kind == "feed_unknown" && strings.Contains(e.Text, "quantum_attention") && strings.Contains(e.Text, "w/dp0")
	}
	f.mu.Unlock()
	if !reported {
		t.Errorf("no event names the kind: %+v", f.events)
	}
	p.hangUp(func() { p.set(p.e.Restart) })
	p.subscribed()
	p.steps(5)
	if s := f.caughtUp(p); len(s.UnknownKinds) != 0 {
		t.Errorf("after a restart: %+v", s)
	}
	f.equals(p)
}

// The end of counting copies is a state of the rank and one event; it lasts for the
// publisher's life, and outlives a restart of the router.
func TestImplausibleCopiesAreReported(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 22, 1)
	f := p.followed(true, nil)
	f.until(func(s Status) bool { return s.State == Live })
	send := func() Status {
		p.set(func() {
			p.e.Log = append(p.e.Log, kvmodel.StoreOf("full_attention", "sliding_window"))
			p.e.After = append(p.e.After, kvmodel.Set{})
		})
		p.send(uint64(len(p.e.Log)-1), p.e.Log[len(p.e.Log)-1])
		return f.caughtUp(p)
	}
	for n := 1; n <= 70; n++ {
		if s := send(); s.CopiesImplausible != (n >= 64) {
			t.Fatalf("after %d copies: %+v", n, s)
		}
	}
	if n := f.emitted("copies_implausible"); n != 1 {
		t.Errorf("%d events", n)
	}
	f.Freeze(0, func(at kvstream.Position, ok bool) {
		again := kvstream.New(kvmodel.NewIndex(t), 0, kvmodel.Block)
		if again.Resume(at); !ok || !again.CopiesImplausible() {
			t.Errorf("after a restart of the router copies are counted: %t, %+v", ok, at)
		}
	})
	p.hangUp(func() { p.set(p.e.Restart) })
	p.subscribed()
	if s := send(); s.CopiesImplausible {
		t.Errorf("after a restart of the engine: %+v", s)
	}
}
