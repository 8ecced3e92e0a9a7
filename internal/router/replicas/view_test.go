package replicas

import (
	"fmt"
	"testing"
	"time"
)

// state is a message of router-1 from fleet "a".
func state(seq uint64, full bool, rows ...Row) *Message {
	m := &Message{Identity: self, Seq: seq, Full: full, Rows: rows}
	if full {
		m.To = 1<<64 - 1
	}
	return m
}

func busy(r Rank, requests int) Row { return Row{r, Load{Requests: requests}} }

func newTestView(ranks ...Rank) *View {
	v := NewView(Identity{Fleet: "a", Origin: "me", Epoch: start})
	v.SetRanks(ranks)
	return v
}

func ms(n int) time.Time { return start.Add(time.Duration(n) * time.Millisecond) }

func wantLoad(t *testing.T, v *View, now time.Time, r Rank, requests int, age time.Duration) {
	t.Helper()
	if l, a, ok := v.Load(now, r); !ok || l.Requests != requests || a != age {
		t.Errorf("rank %d has %+v, %v old, %v; want %d requests, %v old", r, l, a, ok, requests, age)
	}
}

func wantNothing(t *testing.T, v *View, now time.Time, r Rank) {
	t.Helper()
	if l, a, ok := v.Load(now, r); ok || l != (Load{}) || a != 0 {
		t.Errorf("rank %d has %+v, %v old, %v; want nothing", r, l, a, ok)
	}
}

// TestGap: a state after a gap counts, the ages of other ranks do not lie, and the full
// state is requested, again if none comes.
func TestGap(t *testing.T) {
	v := newTestView(7, 8)
	asks := func(at int, m *Message, want bool) {
		t.Helper()
		if got := v.Apply(ms(at), m); got != want {
			t.Errorf("state %d at %d: requests the full state: %v", m.Seq, at, got)
		}
	}
	asks(0, state(1, true, busy(7, 1), busy(8, 1)), false)
	asks(100, state(2, false), false)
	wantLoad(t, v, ms(110), 7, 1, 10*time.Millisecond)
	asks(200, state(4, false, busy(7, 2)), true)
	wantLoad(t, v, ms(210), 7, 2, 10*time.Millisecond)
	wantLoad(t, v, ms(210), 8, 1, 110*time.Millisecond)
	asks(250, state(5, false), false)
	asks(449, state(6, false), false)
	asks(450, state(7, false), true)
	wantLoad(t, v, ms(460), 8, 1, 360*time.Millisecond)
	if s := v.Snapshot(ms(460)); s.Origins[0].Complete || s.Origins[0].Gaps != 1 || !s.Origins[0].Live {
		t.Errorf("%+v", s)
	}
	asks(500, state(8, true, busy(7, 2), busy(8, 5)), false)
	wantLoad(t, v, ms(501), 8, 5, time.Millisecond)
	// A gap whose state comes late closes without a full one.
	asks(600, state(10, false), false) // requested less than a Heartbeat ago
	asks(610, state(9, false, busy(7, 3)), false)
	wantLoad(t, v, ms(620), 7, 3, 10*time.Millisecond)
	wantLoad(t, v, ms(620), 8, 5, 20*time.Millisecond)
	if s := v.Snapshot(ms(620)); !s.Origins[0].Complete {
		t.Errorf("%+v", s)
	}
}

// TestUnknownIsNotZero: a rank counts as idle when a state says so, not before.
func TestUnknownIsNotZero(t *testing.T) {
	v := newTestView(7, 8)
	if !v.Apply(ms(0), state(5, false, busy(7, 1))) {
		t.Error("the full state is not requested")
	}
	wantLoad(t, v, ms(0), 7, 1, 0)
	wantNothing(t, v, ms(0), 8)
	v.Apply(ms(10), state(6, true, busy(7, 1), busy(9, 4), busy(10, 4)))
	wantLoad(t, v, ms(10), 8, 0, 0)
	wantNothing(t, v, ms(10), 9)
	if s := v.Snapshot(ms(10)); s.Origins[0].Strange != 2 || s.Origins[0].Load.Requests != 1 {
		t.Errorf("%+v", s)
	}
	v.SetRanks([]Rank{8, 9})
	wantNothing(t, v, ms(10), 7)
	wantNothing(t, v, ms(10), 9)
	wantLoad(t, v, ms(10), 8, 0, 0)
	if !v.Apply(ms(300), state(7, false)) {
		t.Error("the full state is not requested for the new rank")
	}
}

// TestSilence: a router that is silent for a Lifetime counts for nothing and stays visible;
// so does one that departed. Either comes back with a newer state.
func TestSilence(t *testing.T) {
	v := newTestView(7)
	v.Apply(ms(0), state(1, true, busy(7, 3)))
	wantLoad(t, v, ms(999), 7, 3, 999*time.Millisecond)
	wantNothing(t, v, ms(1000), 7)
	s := v.Snapshot(ms(5000))
	if o := s.Origins[0]; o.Live || o.Left || o.Silent != 5*time.Second || o.Load.Requests != 3 || o.Origin != "router-1" || o.Version != "v1" || o.Settings != "5e7" {
		t.Errorf("%+v", o)
	}
	v.Apply(ms(5000), state(1, true, busy(7, 3))) // once more
	wantNothing(t, v, ms(5000), 7)
	v.Apply(ms(5000), state(2, false))
	wantLoad(t, v, ms(5000), 7, 3, 0)
	v.Departed("router-1")
	v.Departed("router-9")
	wantNothing(t, v, ms(5001), 7)
	if o := v.Snapshot(ms(5001)).Origins[0]; o.Live || !o.Left {
		t.Errorf("%+v", o)
	}
	v.Apply(ms(5002), state(3, true))
	wantLoad(t, v, ms(5002), 7, 0, 0)
}

// TestRestart: a later epoch replaces all; an earlier one only when the later is silent.
func TestRestart(t *testing.T) {
	v := newTestView(7)
	v.Apply(ms(0), state(90, true, busy(7, 3)))
	next := state(1, true, busy(7, 1))
	next.Epoch = start.Add(time.Minute)
	v.Apply(ms(10), next)
	wantLoad(t, v, ms(10), 7, 1, 0)
	v.Apply(ms(20), state(91, true, busy(7, 9)))
	wantLoad(t, v, ms(20), 7, 1, 10*time.Millisecond)
	if s := v.Snapshot(ms(20)); s.Earlier != 1 || !s.Origins[0].Epoch.Equal(next.Epoch) {
		t.Errorf("%+v", s)
	}
	v.Apply(ms(1010), state(92, true, busy(7, 9)))
	wantLoad(t, v, ms(1010), 7, 9, 0)
}

// TestStrangers: what is not of the fleet, or has this router's own name, brings no load and
// is counted.
func TestStrangers(t *testing.T) {
	v := newTestView(7)
	foreign, own, twin := state(1, true, busy(7, 1)), state(1, true, busy(7, 1)), state(1, true, busy(7, 1))
	foreign.Fleet = "b"
	own.Origin = "me"
	twin.Origin, twin.Epoch = "me", start.Add(1)
	for _, m := range []*Message{foreign, own, twin} {
		if v.Apply(ms(0), m) {
			t.Errorf("requests the full state of %+v", m)
		}
	}
	wantNothing(t, v, ms(0), 7)
	if s := v.Snapshot(ms(0)); s.Foreign != 1 || s.SameOrigin != 1 || len(s.Origins) != 0 {
		t.Errorf("%+v", s)
	}
}

// TestManyOrigins: beyond MaxOrigins a router takes the place of the one that has been
// silent longest, never that of a live one.
func TestManyOrigins(t *testing.T) {
	v := newTestView(7)
	from := func(at, n int) {
		m := state(uint64(at+1), true, busy(7, 1))
		m.Origin = fmt.Sprint(n)
		v.Apply(ms(at), m)
	}
	for n := range MaxOrigins + 5 {
		from(n, n)
	}
	wantLoad(t, v, ms(40), 7, MaxOrigins, 40*time.Millisecond)
	if s := v.Snapshot(ms(40)); s.Crowded != 5 || len(s.Origins) != MaxOrigins {
		t.Errorf("%+v", s)
	}
	from(500, 0)
	from(1100, 99)
	wantLoad(t, v, ms(1100), 7, 2, 600*time.Millisecond)
	s := v.Snapshot(ms(1100))
	for _, o := range s.Origins {
		if o.Origin == "1" {
			t.Errorf("the router that was silent longest is still there: %+v", o)
		}
	}
	if len(s.Origins) != MaxOrigins {
		t.Errorf("%d origins", len(s.Origins))
	}
}

// TestLargestSum: routers that claim the most they can do not make sums overflow.
func TestLargestSum(t *testing.T) {
	v := newTestView(7)
	for n := range MaxOrigins {
		m := state(1, true, Row{7, Load{MaxAmount, MaxAmount, MaxAmount, MaxAmount, 0, MaxAmount}})
		m.Origin = fmt.Sprint(n)
		v.Apply(ms(0), m)
	}
	wantLoad(t, v, ms(0), 7, MaxOrigins*MaxAmount, 0)
}
