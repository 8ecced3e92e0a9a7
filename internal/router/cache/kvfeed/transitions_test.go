package kvfeed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/workers"
)

// stepped is a rank whose transitions a test makes one by one. Nothing runs beside it
// but the publisher's replay socket.
type stepped struct {
	*fixture
	p    *publisher
	r    *rank
	conn uint64
}

func newStepped(t *testing.T, replay bool, change func(*Options)) *stepped {
	t.Helper()
	p := newPublisher(t, 61, 1)
	f := idleFixture(t, change)
	f.add(p.source(replay))
	return &stepped{fixture: f, p: p, r: f.ranks[0]}
}

func (s *stepped) connect() {
	s.conn++
	s.r.attach(s.conn, "peer")
}

func (s *stepped) hangUp() { s.r.detach(s.conn, errors.New("cut")) }

// comes delivers batches of the publisher's log.
func (s *stepped) comes(seqs ...int) {
	for _, seq := range seqs {
		s.r.receive(s.conn, uint64(seq), s.p.e.Log[seq], nil)
	}
}

// next makes n batches and delivers them.
func (s *stepped) next(n int) {
	for range n {
		s.p.step(false)
		s.comes(len(s.p.e.Log) - 1)
	}
}

// say makes a batch of these events and delivers it.
func (s *stepped) say(events ...kvevent.Event) {
	s.p.set(func() {
		n := len(s.p.e.Log)
		payload := kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9 + float64(n), Events: events}, kvevent.Encoding{})
		s.p.e.Log, s.p.e.After = append(s.p.e.Log, payload), append(s.p.e.After, kvmodel.Set{})
	})
	s.comes(len(s.p.e.Log) - 1)
}

func (s *stepped) attached() uint64 {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	return s.r.attached
}

// fetch makes the replays that the rank waits for, verify the one of a quiet publisher.
func (s *stepped) fetch()  { s.r.catchUp(s.t.Context(), s.attached()) }
func (s *stepped) verify() { s.r.verify(s.t.Context(), s.attached()) }

// prove looks for the proof as if the connection had begun so long ago.
func (s *stepped) prove(ago time.Duration) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	s.r.prove(s.r.m.now().Add(ago))
}

// is checks the rank's state, how many batches wait, and the reason.
func (s *stepped) is(state State, held int, reason string) {
	s.t.Helper()
	type seen struct {
		State  State
		Held   int
		Reason string
	}
	now := s.r.status()
	s.r.mu.Lock()
	got := seen{now.State, len(s.r.held), now.Reason}
	s.r.mu.Unlock()
	if diff := cmp.Diff(seen{state, held, reason}, got); diff != "" {
		s.t.Errorf("rank (-want +got):\n%s", diff)
	}
	if trusted := s.Trusted(0); trusted != (state == Live) {
		s.t.Errorf("%s: trusted %t", state, trusted)
	}
	s.r.consistent(s.t)
}

// statesOf are the states in which a rank waits for something, as want has them.
var statesOf = map[want][]State{
	wantConnection: {Connecting, Stale, Unknown},
	wantOne:        {Unknown},
	wantSame:       {Replaying},
	wantMissed:     {Replaying, InGap, Unknown, Live},
	wantMore:       {Live, Mute, Unknown},
	wantProof:      {Verifying},
	wantNext:       {Live, Mute, Unknown},
	wantFit:        {Unknown},
}

// consistent checks that a rank that is fed is in a state in which it can be.
func (r *rank) consistent(t *testing.T) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Contains(statesOf[r.want], r.state) {
		t.Errorf("%s: %s while it waits for %d", r.label, r.state, r.want)
	}
	if idle := r.want == wantConnection; idle != (r.conn == 0) {
		t.Errorf("%s: waits for %d with connection %d", r.label, r.want, r.conn)
	}
	if two := r.conn != 0 && r.rival != 0; two != (r.want == wantOne) {
		t.Errorf("%s: waits for %d with connection %d and rival %d", r.label, r.want, r.conn, r.rival)
	}
	if len(r.held) > 0 && !r.want.holds() {
		t.Errorf("%s: %d batches are held while it waits for %d", r.label, len(r.held), r.want)
	}
}

const (
	reasonAll    = "every batch since the publisher's start was applied"
	reasonAsking = "connected, asking for what was missed"
	reasonCut    = "connection lost: cut"
	reasonAgain  = "connected again; its entries are kept, unused, until its engine has proven to be the same process and its next batch follows the last"
)

func TestTransitionsOfAConnection(t *testing.T) {
	t.Parallel()
	s := newStepped(t, false, nil)
	s.is(Connecting, 0, "not connected yet")
	s.connect()
	s.is(Live, 0, reasonNone)
	s.next(2)
	s.is(Live, 0, reasonAll)
	s.hangUp()
	s.is(Connecting, 0, reasonCut)
	s.comes(1) // from a connection that was given up
	s.is(Connecting, 0, reasonCut)
	s.connect()
	s.is(Live, 0, reasonNone)
	s.next(1)
	s.is(Live, 0, reasonJoined)
	if n := s.emitted("feed_unknown"); n != 1 {
		t.Errorf("%d times emptied", n)
	}
}

func TestTransitionsOfAGap(t *testing.T) {
	t.Parallel()
	s := newStepped(t, true, nil)
	s.connect()
	s.is(Replaying, 0, reasonAsking)
	s.fetch()
	s.is(Live, 0, reasonNone)
	s.next(2)
	s.p.step(false)
	s.next(2)
	s.is(InGap, 2, "batches 2 to 2 are missing")
	s.fetch()
	s.is(Live, 0, reasonAll)
	s.equals(s.p)
	s.p.step(false)
	s.next(1)
	s.is(InGap, 1, "batches 5 to 5 are missing")
	s.hangUp()
	s.is(Connecting, 0, reasonCut)
	s.connect()
	s.is(Replaying, 0, reasonAsking)
	s.fetch()
	s.is(Live, 0, reasonAll)
	s.equals(s.p)
}

// The publisher's numbers begin again without the connection being lost.
func TestTransitionsOfARestart(t *testing.T) {
	t.Parallel()
	for _, replay := range []bool{false, true} {
		s := newStepped(t, replay, nil)
		s.connect()
		s.fetch()
		s.next(3)
		s.is(Live, 0, reasonAll)
		s.p.set(s.p.e.Restart)
		s.next(1)
		if replay {
			s.is(Unknown, 1, "the publisher started over: batch 0 came again with another content")
			s.next(1)
			s.fetch()
		}
		s.is(Live, 0, reasonAll)
		s.equals(s.p)
		if n := s.emitted("feed_restart"); n != 1 || s.one().Restarts != 1 {
			t.Errorf("replay %t: %d events: %+v", replay, n, s.one())
		}
	}
}

// A quiet publisher whose replay shows another life is fetched from its start.
func TestTransitionsOfAQuietRestart(t *testing.T) {
	t.Parallel()
	s := newStepped(t, true, nil)
	s.connect()
	s.fetch()
	s.next(3)
	s.verify()
	s.is(Live, 0, reasonAll)
	s.p.set(s.p.e.Restart)
	for range 3 {
		s.p.step(false)
	}
	s.verify()
	s.is(Unknown, 0, "the publisher started over: its batch 2 is another one")
	s.next(1)
	s.is(Unknown, 1, "the publisher started over: its batch 2 is another one")
	s.fetch()
	s.is(Live, 0, reasonAll)
	s.equals(s.p)
}

// A child of a block that was never stored has the rank rebuilt from the replay, once
// in each connection.
func TestTransitionsOfAnOrphan(t *testing.T) {
	t.Parallel()
	orphan := func(name uint64) kvevent.Event {
		return kvmodel.Stored(99, []uint64{name}, kvmodel.Tokens(int(name), kvmodel.Block), kvmodel.Block)
	}
	s := newStepped(t, true, nil)
	s.connect()
	s.fetch()
	s.say(storing(11))
	s.say(orphan(12))
	s.is(Unknown, 0, "batch 1 has a child of a block that was never stored")
	s.say(storing(13))
	s.is(Unknown, 1, "batch 1 has a child of a block that was never stored")
	s.fetch()
	s.is(Live, 0, reasonAll)
	s.say(orphan(14))
	s.is(Live, 0, reasonAll)
	s.hangUp()
	s.connect()
	s.fetch()
	s.is(Live, 0, reasonAll)
	s.say(orphan(15))
	s.is(Unknown, 0, "batch 4 has a child of a block that was never stored")
}

// Blocks that do not fit make the rank unknown until one fits, or until the publisher
// starts over.
func TestTransitionsOfAMisfit(t *testing.T) {
	t.Parallel()
	misfit := func(size int) string {
		return fmt.Sprintf("the engine's block of %d tokens is not a multiple of the router's block of 4 tokens", size)
	}
	sized := func(size int) kvevent.Event {
		return kvmodel.Stored(0, []uint64{uint64(size)}, kvmodel.Tokens(size, size), int32(size))
	}
	for _, replay := range []bool{false, true} {
		s := newStepped(t, replay, nil)
		s.connect()
		s.fetch()
		s.say(sized(4))
		s.say(sized(6))
		s.is(Unknown, 0, misfit(6))
		s.say(sized(8))
		s.is(Live, 0, reasonFits)
		s.say(sized(10))
		s.is(Unknown, 0, misfit(10))
		if replay {
			s.p.step(false)
			s.say(sized(10))
			s.is(InGap, 1, "batches 4 to 4 are missing")
			s.fetch()
			s.is(Unknown, 0, misfit(10))
		}
		s.hangUp()
		s.is(Connecting, 0, reasonCut)
		s.p.set(s.p.e.Restart)
		s.connect()
		s.next(1)
		s.fetch()
		s.is(Live, 0, reasonAll)
		s.equals(s.p)
	}
}

// Where no replay can be had, the first batch is taken as it comes, and what is missing
// is given up.
func TestTransitionsWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	f := idleFixture(t, nil)
	p := newPublisher(t, 61, 1)
	f.add(workers.EventSource{Endpoint: p.pubAt, Replay: "tcp://127.0.0.1:1"})
	s := &stepped{fixture: f, p: p, r: f.ranks[0]}
	for range 9 {
		p.step(false)
	}
	begins := func(state State, held int, reason string) {
		t.Helper()
		why := f.one().Reason
		if !strings.HasPrefix(why, reason) {
			t.Errorf("reason %q, want %q", why, reason)
		}
		s.is(state, held, why)
	}
	const given = "rebuilding, what was missed could not be fetched: replay: "
	s.connect()
	s.is(Replaying, 0, reasonAsking)
	s.fetch()
	begins(Live, 0, given)
	s.comes(3)
	s.is(Live, 0, reasonJoined)
	s.comes(5)
	s.is(InGap, 1, "batches 4 to 4 are missing")
	s.fetch()
	begins(Live, 0, given)
	s.within(p)
	s.hangUp()
	s.connect()
	s.comes(6)
	s.is(Replaying, 1, reasonAsking)
	s.fetch()
	begins(Live, 0, given)
	type counts struct {
		Replays, ReplayErrors, Lost, Dropped uint64
		LastSeq                              int64
	}
	got := f.one()
	if d := cmp.Diff(counts{3, 3, 1, 2, 6}, counts{got.Replays, got.ReplayErrors, got.Lost, got.Dropped, got.LastSeq}); d != "" {
		t.Errorf("counts (-want +got):\n%s", d)
	}
}

// Entries that a lost connection left wait for the proof, with the batches that come;
// what does not come in time, or leaves a batch out, drops them.
func TestTransitionsOfAProof(t *testing.T) {
	t.Parallel()
	const lost = "rebuilding: the connection was lost, and without a replay socket it is not known what was missed "
	for name, c := range map[string]struct {
		answered bool
		missing  int // batches that do not come
		late     time.Duration
		state    State
		held     int
		reason   string
	}{
		"no batch, no answer": {false, -1, time.Hour, Verifying, 0, reasonAgain},
		"no batch":            {true, -1, time.Hour, Verifying, 0, reasonAgain},
		"no answer yet":       {false, 0, 0, Verifying, 2, reasonAgain},
		"no answer in time":   {false, 0, proveWithin + time.Second, Live, 0, lost + "(its engine does not report when its process started)"},
		"proven":              {true, 0, 0, Live, 0, reasonAll},
		"a gap before":        {true, 1, 0, Live, 0, lost + "(batch 4 came instead of 3)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			asked := time.Now()
			s := newStepped(t, false, func(o *Options) {
				o.Process = func(string, int) (float64, time.Time) { return 1e9 + 1e5 - 100, asked }
			})
			s.connect()
			s.next(3)
			s.hangUp()
			s.connect()
			s.is(Verifying, 0, reasonAgain)
			s.hangUp()
			s.is(Connecting, 0, reasonCut)
			s.connect()
			for range c.missing {
				s.p.step(false)
			}
			if c.missing >= 0 {
				s.next(2)
			}
			if c.answered {
				asked = time.Now().Add(time.Second)
			}
			s.prove(c.late)
			s.is(c.state, c.held, c.reason)
			s.within(s.p)
			s.hangUp()
		})
	}
}

// A gap among the batches that waited for the proof is one like any other.
func TestTransitionsOfAGapBehindAProof(t *testing.T) {
	t.Parallel()
	asked := time.Now()
	s := newStepped(t, false, func(o *Options) {
		o.Process = func(string, int) (float64, time.Time) { return 1e9 + 1e5 - 100, asked }
	})
	s.connect()
	s.next(3)
	s.hangUp()
	s.connect()
	s.next(1)
	s.p.step(false)
	s.next(1)
	asked = time.Now().Add(time.Second)
	s.prove(0)
	s.is(Live, 0, "rebuilding: batches 4 to 4 are lost: there is no replay socket")
	if s.emitted("feed_kept") != 1 {
		t.Errorf("events %+v", s.events)
	}
	s.within(s.p)
}

// A second publisher ends what is under way for the first, which is fetched again when
// the second has left.
func TestTransitionsOfARival(t *testing.T) {
	t.Parallel()
	s := newStepped(t, true, nil)
	claim := func(conn uint64) { s.r.claim(conn, fmt.Sprintf("peer %d", conn), false) }
	claim(1)
	s.conn = 1
	s.fetch()
	s.next(2)
	claim(2)
	s.conn = 2
	s.is(Replaying, 0, reasonAsking)
	s.next(1)
	s.is(Replaying, 1, reasonAsking)
	claim(1)
	const two = "two publishers claim this rank, peer 1 and peer 2: end the wrong one, or give each worker a topic of its own"
	s.is(Unknown, 0, two)
	s.next(1)
	s.is(Unknown, 0, two)
	s.fetch()
	s.is(Unknown, 0, two)
	s.r.detach(1, context.Canceled)
	s.is(Replaying, 0, reasonAsking)
	s.fetch()
	s.is(Live, 0, reasonAll)
	s.equals(s.p)
}

// A rank that has left takes nothing more, though a listener's connection may still
// know it.
func TestTransitionsOfAnEnd(t *testing.T) {
	t.Parallel()
	s := newStepped(t, true, nil)
	s.r.claim(1, "peer", false)
	s.conn = 1
	s.next(2)
	s.is(Replaying, 2, reasonAsking)
	s.Remove(0)
	if n := s.held.Load(); n != 0 {
		t.Errorf("%d bytes are held", n)
	}
	s.r.claim(2, "peer", false)
	s.conn = 2
	s.next(1)
	if got := s.r.status(); got.State != Unknown || got.Connects != 1 || got.LastSeq != -1 || s.held.Load() != 0 {
		t.Errorf("after its end: %+v", got)
	}
}

// A replay that has nothing more leaves the rank as the batches that waited for it left
// the blocks.
func TestTransitionsOfMore(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before, waits int // size of a block
		state         State
		reason        string
	}{
		"fits":            {8, 8, Live, "rebuilding: batch 2 cannot be read: kvevent: unreadable batch: neither an array nor a map"},
		"fits no more":    {8, 10, Unknown, "the engine's block of 10 tokens is not a multiple of the router's block of 4 tokens"},
		"fits again":      {10, 12, Live, reasonFits},
		"still fits none": {10, 10, Unknown, "the engine's block of 10 tokens is not a multiple of the router's block of 4 tokens"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sized := func(name uint64, size int) kvevent.Event {
				return kvmodel.Stored(0, []uint64{name}, kvmodel.Tokens(size, size), int32(size))
			}
			s := newStepped(t, true, nil)
			s.connect()
			s.fetch()
			s.say(storing(1))
			s.say(storing(2))
			s.p.step(false)
			s.p.e.Log[2] = []byte{0xff} // damaged, so that a replay may have more
			s.comes(2)
			s.say(sized(3, c.before))
			s.p.set(func() { s.p.window = len(s.p.e.Log) })
			s.r.mu.Lock()
			replay, _ := s.r.due(s.r.m.now())
			s.r.mu.Unlock()
			s.say(sized(4, c.waits))
			if len(s.r.held) != 1 || replay == nil {
				t.Fatalf("%d batches wait for the replay", len(s.r.held))
			}
			replay(t.Context(), s.attached())
			s.is(c.state, 0, c.reason)
		})
	}
}
