package kvfeed

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
)

// muted is a feed of a rank that was found to be mute, after some batches.
func muted(t *testing.T, replay bool, change func(*Options)) (*fixture, *publisher) {
	t.Helper()
	p := newPublisher(t, 51, 1)
	f := newFixture(t, change)
	f.add(p.source(replay))
	f.live(p)
	p.steps(20)
	s := f.caughtUp(p)
	if len(p.e.Set()) == 0 || !f.Trusted(0) || f.Untrusted(0) {
		t.Fatalf("before it: %+v", s)
	}
	f.Mute(0, s.Heard.Add(-time.Second), "heard of since")
	f.Mute(7, s.Heard, "not fed")
	if s := f.one(); s.State != Live || f.emitted("feed_mute") != 0 {
		t.Fatalf("it was heard of since: %+v", s)
	}
	f.Mute(0, s.Heard, "it computes")
	return f, p
}

// lose lets an engine do what it never publishes: not even a number is missing.
func (p *publisher) lose(n int) {
	p.set(func() {
		for range n {
			p.e.Step()
			p.e.Log, p.e.After = p.e.Log[:len(p.e.Log)-1], p.e.After[:len(p.e.After)-1]
		}
	})
}

// TestMuteRankIsNotTrusted: the entries of a rank that computes and publishes nothing
// are not used, and in no snapshot. A batch that was late lets them be used again; one
// that was published afterwards shows that something never was, and all are dropped.
func TestMuteRankIsNotTrusted(t *testing.T) {
	t.Parallel()
	for name, late := range map[string]bool{"late": true, "never published": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, p := muted(t, false, nil)
			s := f.one()
			type facts struct {
				State                      State
				Reason                     string
				Status, Trusted, Untrusted bool
				Usable, Events             int
			}
			got := facts{s.State, s.Reason, s.Trusted, f.Trusted(0), f.Untrusted(0), f.Usable(0, 4, nil, nil), f.emitted("feed_mute")}
			if d := cmp.Diff(facts{Mute, "it computes", false, false, true, 0, 1}, got); d != "" {
				t.Fatalf("mute (-want +got):\n%s", d)
			}
			f.Freeze(0, func(_ kvstream.Position, ok bool) {
				if ok {
					t.Error("a router would go on from its entries")
				}
			})
			f.equals(p) // they are kept
			skew := -1.
			if !late {
				p.lose(40)
				skew = 3600
			}
			p.set(func() { p.e.Skew = skew })
			p.steps(1)
			s = f.caughtUp(p)
			if n := f.emitted("feed_live"); !f.Trusted(0) || f.Untrusted(0) || n != 2 {
				t.Errorf("it speaks again: trusted %v, untrusted %v, %d times live", f.Trusted(0), f.Untrusted(0), n)
			}
			if s.Complete != late || (s.Dropped == 0) != late || late == strings.HasPrefix(s.Reason, "rebuilding: ") {
				t.Errorf("it speaks again: complete %v, dropped %d times, %q", s.Complete, s.Dropped, s.Reason)
			}
			if late {
				f.equals(p)
			}
			f.within(p)
			p.steps(20)
			f.caughtUp(p)
			f.within(p)
		})
	}
}

// TestMuteRankIsAskedFor: a replay that has what the connection did not bring makes a
// mute rank whole at once; one that has nothing leaves it mute, over a lost connection,
// too.
func TestMuteRankIsAskedFor(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 52, 1)
	f := newFixture(t, nil)
	f.add(p.source(true))
	f.live(p)
	p.steps(20)
	s := f.caughtUp(p)
	p.set(func() { p.e.Skew = -1 })
	for range 3 {
		p.step(false)
	}
	before := s.ReplayedBatches
	f.Mute(0, s.Heard, "it computes")
	s = f.caughtUp(p)
	f.equals(p)
	if s.Dropped != 0 || s.ReplayedBatches != before+3 || !s.Complete || f.emitted("feed_mute") != 1 {
		t.Errorf("a replay had the rest: %+v", s)
	}
	was := s.Replays
	f.Mute(0, s.Heard, "it computes")
	f.until(func(s Status) bool { return s.Replays > was && s.State == Mute })
	p.hangUp(func() { f.until(func(s Status) bool { return s.State == Connecting }) })
	p.subscribed()
	f.until(func(s Status) bool { return s.Connects == 2 && s.State == Mute && s.Reason == "it computes" })
	p.set(func() { p.e.Skew = 3600 })
	p.steps(1)
	if s := f.caughtUp(p); s.Dropped != 1 {
		t.Errorf("after the connection was lost: %+v", s)
	}
	f.within(p)
}

// TestMuteRankWithoutBatches: a rank of which no batch has ever come has nothing to
// lose by the first.
func TestMuteRankWithoutBatches(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 53, 1)
	f := newFixture(t, nil)
	f.add(p.source(false))
	p.subscribed()
	s := f.until(func(s Status) bool { return s.State == Live })
	f.Mute(0, s.Heard, "it computes")
	if s := f.one(); s.State != Mute {
		t.Fatalf("%+v", s)
	}
	p.set(func() { p.e.Skew = 3600 })
	p.steps(1)
	if s := f.caughtUp(p); s.Dropped != 0 || s.Reason != "every batch since the publisher's start was applied" {
		t.Errorf("%+v", s)
	}
	f.equals(p)
}

// TestMuteRankOverAGap: a gap that no replay closes ends the silence, too.
func TestMuteRankOverAGap(t *testing.T) {
	t.Parallel()
	f, p := muted(t, false, nil)
	p.step(false)
	p.steps(1)
	if s := f.caughtUp(p); s.Dropped != 1 || s.Lost != 1 {
		t.Errorf("%+v", s)
	}
	f.within(p)
	p.steps(5)
	f.caughtUp(p)
	f.within(p)
}
