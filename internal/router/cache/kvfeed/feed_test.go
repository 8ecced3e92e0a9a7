package kvfeed

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestFeedJoinsLateAndReplays(t *testing.T) {
	t.Parallel()
	for _, parts := range []int{1, 3} {
		p := newPublisher(t, uint64(parts), parts)
		for range 30 {
			p.step(false)
		}
		f := p.followed(true, nil)
		p.steps(30)
		s := f.caughtUp(p)
		f.equals(p)
		if !s.Trusted || !f.Trusted(0) || !s.Complete {
			t.Errorf("status trusted %v, rank trusted %v, complete %v: %s", s.Trusted, f.Trusted(0), s.Complete, s.Reason)
		}
		if s.Dropped != 0 || s.Parts != parts {
			t.Errorf("dropped %d times, want 0; %d parts, want %d", s.Dropped, s.Parts, parts)
		}
		if got := f.Usable(0, 2*parts+parts-1, &kvgroup.Prompt{}, nil); got != 2*parts {
			t.Errorf("usable %d, want %d", got, 2*parts)
		}
	}
}

func TestFeedWithoutReplay(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 1, 1)
	for range 20 {
		p.step(false)
	}
	var life workers.Life
	f := p.followed(false, func(o *Options) { o.Life = func(string) *workers.Life { return &life } })
	p.steps(20)
	s := f.caughtUp(p)
	f.within(p)
	if life.Last().IsZero() {
		t.Error("a batch is no sign of life")
	}
	if s.Complete || s.Gaps != 0 {
		t.Errorf("joined late without a replay: %+v", s)
	}
	p.step(false) // lost
	p.steps(20)
	s = f.caughtUp(p)
	f.within(p)
	if s.Gaps != 1 || s.Missing != 1 || s.Lost != 1 || s.Dropped != 1 {
		t.Errorf("after a gap: %+v", s)
	}
	if f.emitted("feed_gap") != 1 || f.emitted("feed_unknown") != 1 {
		t.Errorf("events %+v", f.events)
	}
}

// What the status says of a live rank is true of it now, not of the moment when
// it became live.
func TestFeedReasonIsOfNow(t *testing.T) {
	t.Parallel()
	const (
		none  = "connected, no batch yet"
		all   = "every batch since the publisher's start was applied"
		since = "blocks stored before the feed began are missing until they are stored again"
	)
	for name, c := range map[string]struct {
		replay bool
		missed int // batches before the feed
		do     func(f *fixture, p *publisher)
		want   string
	}{
		"no batch":               {false, 0, func(*fixture, *publisher) {}, none},
		"the first":              {false, 0, func(_ *fixture, p *publisher) { p.steps(1) }, all},
		"the first, with replay": {true, 0, func(_ *fixture, p *publisher) { p.steps(1) }, all},
		"joined late":            {false, 3, func(_ *fixture, p *publisher) { p.steps(1) }, since},
		"some lost": {false, 0, func(_ *fixture, p *publisher) {
			p.steps(2)
			p.step(false)
			p.steps(1)
		}, "rebuilding: batches 2 to 2 are lost: there is no replay socket"},
		"found by a look at the replay": {true, 0, func(_ *fixture, p *publisher) { p.step(false) }, all},
		"some lost, found by a look at the replay": {true, 0, func(f *fixture, p *publisher) {
			p.steps(2)
			f.caughtUp(p)
			p.set(func() { p.window = 4 })
			for range 3 {
				p.step(false)
			}
		}, "rebuilding: batches 2 to 3 are lost: the replay continues with batch 4"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPublisher(t, 46, 1)
			for range c.missed {
				p.step(false)
			}
			f := p.followed(c.replay, func(o *Options) { o.VerifyAfter, o.VerifyEvery = 50*time.Millisecond, 50*time.Millisecond })
			f.until(func(s Status) bool { return s.State == Live })
			c.do(f, p)
			f.until(func(s Status) bool {
				return s.State == Live && s.LastSeq == int64(len(p.e.Log))-1 && s.Reason == c.want
			})
		})
	}
}

// TestFeedOutlivesSilence: a rank without a replay socket has nothing but its
// connection to go by, and silence costs it neither that nor its entries.
func TestFeedOutlivesSilence(t *testing.T) {
	t.Parallel()
	const beat = 500 * time.Millisecond // an answer must come within one
	p := newPublisher(t, 47, 2)
	f := p.followed(false, func(o *Options) { o.Heartbeat = beat })
	p.steps(20)
	f.caughtUp(p)
	silent := time.Now()
	f.until(func(Status) bool { return time.Since(silent) > 3*beat })
	p.steps(5)
	if s := f.caughtUp(p); s.Connects != 1 || s.Dropped != 0 || s.Gaps != 0 || f.emitted("feed_disconnected") != 0 {
		t.Errorf("after silence: %+v", s)
	}
	f.equals(p)
	p.hangUp(func() {})
	p.subscribed()
	p.steps(5)
	if s := f.until(func(s Status) bool { return s.State == Live && s.Connects == 2 && s.LastSeq == int64(len(p.e.Log))-1 }); s.Dropped != 1 || f.emitted("feed_disconnected") != 1 {
		t.Errorf("after a cut: %+v", s)
	}
	f.within(p)
}

func TestFeedClosesGap(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 2, 2)
	f := p.followed(true, nil)
	f.until(func(s Status) bool { return s.State == Live })
	for range 10 {
		p.steps(5)
		p.step(false)
		p.step(false)
		p.steps(3)
		f.caughtUp(p)
		f.equals(p)
	}
	s := f.one()
	if s.Gaps == 0 || s.ReplayedBatches < 20 {
		t.Errorf("%d gaps, %d batches replayed, want some and 20 or more", s.Gaps, s.ReplayedBatches)
	}
	if s.Lost != 0 || s.Dropped != 0 || !s.Complete {
		t.Errorf("%d batches lost, dropped %d times, complete %v: %s", s.Lost, s.Dropped, s.Complete, s.Reason)
	}
}

func TestFeedGapBeyondTheReplay(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 3, 1)
	f := p.followed(true, nil)
	p.steps(20)
	f.caughtUp(p)
	for range 10 {
		p.step(false)
	}
	p.set(func() { p.window = 25 })
	p.steps(5)
	s := f.caughtUp(p)
	f.within(p)
	if s.Dropped == 0 || s.Lost != 5 || s.Complete {
		t.Errorf("status %+v", s)
	}
}

// damaged makes a batch and sends it with its end cut off.
func (p *publisher) damaged() {
	p.step(false)
	seq := uint64(len(p.e.Log) - 1)
	p.send(seq, p.e.Log[seq][:len(p.e.Log[seq])-3])
}

// A batch that came damaged empties the rank; the replay fills it again.
func TestFeedFetchesDamagedAgain(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 40, 1)
	f := p.followed(true, nil)
	p.steps(20)
	f.caughtUp(p)
	p.damaged()
	f.until(func(s Status) bool { return s.State == Live && s.Complete && s.Dropped == 2 })
	p.steps(5)
	f.caughtUp(p)
	f.equals(p)
}

// A replay that begins after the damage, or does not come, has nothing to add:
// what the rank has learned since is kept.
func TestFeedKeepsWhatTheReplayHasNot(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(p *publisher){
		"too short": func(p *publisher) { p.window = len(p.e.Log) + 1 },
		"empty":     func(p *publisher) { p.window = math.MaxInt },
		"silent":    func(p *publisher) { p.silent = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPublisher(t, 41, 1)
			f := p.followed(true, func(o *Options) {
				o.ReplayBurst, o.ReplayEvery = 1, 20*time.Millisecond
				if name == "silent" {
					o.ReplayIdle = silence
				}
			})
			p.steps(30)
			f.caughtUp(p)
			asked := f.one().Replays
			p.set(func() { change(p) })
			p.damaged()
			p.steps(30)
			s := f.until(func(s Status) bool {
				return s.Replays == asked+1 && s.State == Live && s.LastSeq == int64(len(p.e.Log))-1
			})
			f.within(p)
			if s.Dropped != 1 || f.emitted("feed_unknown") != 1 || len(kvmodel.Holds(t, f.x)) == 0 {
				t.Errorf("emptied %d times, %d events, %d blocks left: %s", s.Dropped, f.emitted("feed_unknown"), len(kvmodel.Holds(t, f.x)), f.show())
			}
		})
	}
}

func TestFeedNoticesRestart(t *testing.T) {
	t.Parallel()
	for name, replay := range map[string]bool{"replay": true, "no replay": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPublisher(t, 4, 1)
			f := p.followed(replay, nil)
			f.until(func(s Status) bool { return s.State == Live })
			p.steps(20)
			f.caughtUp(p)
			p.hangUp(func() {
				f.until(func(s Status) bool { return s.State == Connecting })
				if f.Trusted(0) {
					t.Error("trusted without a connection")
				}
				// The new life is further than the old one, so that the next
				// number is the one expected: only the replay shows it.
				p.set(func() { p.e.Restart() })
				for range 20 {
					p.step(false)
				}
			})
			p.subscribed()
			p.steps(10)
			s := f.caughtUp(p)
			if replay {
				f.equals(p)
				if !s.Complete || s.Restarts != 1 {
					t.Errorf("status %+v", s)
				}
			} else {
				f.within(p)
			}
			if s.Dropped == 0 {
				t.Errorf("entries of the old life were kept: %+v", s)
			}
		})
	}
}

// A reconnect to the same life fetches what was missed and drops nothing.
func TestFeedReconnects(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 5, 2)
	f := p.followed(true, nil)
	f.until(func(s Status) bool { return s.State == Live })
	p.steps(20)
	f.caughtUp(p)
	p.hangUp(func() {
		f.until(func(s Status) bool { return s.State == Connecting })
		for range 300 { // more than the feed remembers stamps of
			p.step(false)
		}
	})
	p.subscribed()
	s := f.caughtUp(p)
	f.equals(p)
	if s.Dropped != 0 || s.Restarts != 0 || !s.Complete || s.Connects != 2 {
		t.Errorf("status %+v", s)
	}
}

// TestFeedKeepsWhatIsProven: without a replay, entries outlive a connection only
// where the engine's process is known to be the same and no batch is missing. A
// new life of the publisher that has come to the very number expected, with the
// engine's own figures at whatever state, is not believed.
func TestFeedKeepsWhatIsProven(t *testing.T) {
	t.Parallel()
	type answer struct {
		started float64
		at      time.Time
	}
	const first = 1e9 + 1e5 - 100 // the engine model dates the batches of its first life from 1e9 + 1e5 on, 1e5 later in each
	for name, c := range map[string]struct {
		miss    int     // batches sent while the connection is lost
		restart bool    // so that the next batch has the number expected
		before  float64 // start of the process as learned before
		after   float64 // and after the connection came back
		early   bool    // that was learned before the connection was lost
		kept    bool
	}{
		"nothing missed":                      {0, false, first, first, false, true},
		"one batch missed":                    {1, false, first, first, false, false},
		"another process":                     {0, true, first, first + 1e5, false, false},
		"another process, learned too soon":   {0, true, first + 1e5, first + 1e5, false, false},
		"another process, and clock set back": {0, true, first, first - 10, false, false},
		"the same, learned before the loss":   {0, true, first, first - 10, true, false},
		"not learned any more":                {0, false, first, math.NaN(), false, false},
		"never learned":                       {0, false, math.NaN(), math.NaN(), false, false},
		"learned late only":                   {0, false, math.NaN(), first, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPublisher(t, 40, 2)
			var process atomic.Pointer[answer]
			process.Store(&answer{c.before, time.Now()})
			f := p.followed(false, func(o *Options) {
				o.Process = func(string, int) (float64, time.Time) { a := process.Load(); return a.started, a.at }
			})
			f.until(func(s Status) bool { return s.State == Live })
			p.steps(20)
			f.caughtUp(p)
			if c.early {
				process.Store(&answer{c.after, time.Now()})
			}
			p.hangUp(func() {
				f.until(func(s Status) bool { return s.State == Connecting })
				if c.restart {
					p.set(func() { p.e.Restart() })
					for range 20 {
						p.step(false)
					}
				}
				for range c.miss {
					p.step(false)
				}
			})
			p.subscribed()
			f.until(func(s Status) bool { return s.Connects == 2 })
			p.steps(1)
			if provable := c.before == first; provable && c.miss == 0 {
				// The engine has not been asked since: nothing is used, nothing dropped,
				// and nothing said to be missing.
				f.until(func(s Status) bool { return s.State == "verifying" })
				if s := f.one(); s.Trusted || s.Dropped != 0 || s.Gaps != 0 || f.emitted("feed_verifying") != 1 {
					t.Errorf("before the proof: %+v", s)
				}
			}
			process.Store(&answer{c.after, time.Now()})
			f.caughtUp(p)
			p.steps(10)
			s := f.caughtUp(p)
			f.within(p)
			if c.kept != (s.Dropped == 0) || c.kept != (f.emitted("feed_kept") == 1) {
				t.Errorf("status %+v", s)
			}
			if c.kept {
				f.equals(p)
			}
		})
	}
}

func TestFeedWithoutEndMarker(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 6, 1)
	p.set(func() { p.noEnd = true })
	for range 10 {
		p.step(false)
	}
	f := newFixture(t, func(o *Options) { o.ReplayIdle = silence })
	f.add(p.source(true))
	// Nothing live comes: the deadline ends the replay, and since it is not
	// known whether it was all, nothing is kept.
	s := f.until(func(s Status) bool { return s.State == Live })
	f.within(p)
	if s.ReplayErrors == 0 || s.Complete {
		t.Errorf("quiet publisher: %+v", s)
	}
	// With live batches that join the replay no end marker is needed.
	p.hangUp(func() { f.until(func(s Status) bool { return s.State == Connecting }) })
	p.subscribed()
	p.steps(10)
	f.caughtUp(p)
	f.within(p)
}

// A replay that reached the live batches is done, end marker or not.
func TestFeedReplayJoinsLive(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 16, 1)
	f := p.followed(true, nil)
	f.until(func(s Status) bool { return s.State == Live })
	p.set(func() { p.noEnd = true })
	p.steps(5)
	p.step(false)
	p.steps(5)
	s := f.caughtUp(p)
	f.equals(p)
	if s.ReplayErrors != 0 || s.Dropped != 0 || !s.Complete {
		t.Errorf("status %+v", s)
	}
}

// A quiet publisher whose replay ends before the batch known last is another one.
func TestFeedNoticesYoungerPublisher(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 17, 1)
	f := p.followed(true, nil)
	p.steps(20)
	f.caughtUp(p)
	p.hangUp(func() {
		f.until(func(s Status) bool { return s.State == Connecting })
		p.set(func() { p.e.Restart() })
		for range 5 {
			p.step(false)
		}
	})
	s := f.caughtUp(p)
	f.equals(p)
	if s.Restarts != 1 || !s.Complete {
		t.Errorf("status %+v", s)
	}
}

// The publisher is the same, but it has forgotten what was missed.
func TestFeedReconnectsTooLate(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 18, 1)
	f := p.followed(true, nil)
	p.steps(20)
	f.caughtUp(p)
	p.hangUp(func() {
		f.until(func(s Status) bool { return s.State == Connecting })
		for range 20 {
			p.step(false)
		}
		p.set(func() { p.window = 30 })
	})
	s := f.caughtUp(p)
	f.within(p)
	if s.Lost != 10 || s.Dropped != 1 || s.Complete {
		t.Errorf("status %+v", s)
	}
}

func TestFeedSilentReplay(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 7, 1)
	p.set(func() { p.silent = true })
	f := p.followed(true, func(o *Options) { o.ReplayIdle = silence })
	p.steps(20)
	s := f.caughtUp(p)
	f.within(p)
	if s.ReplayErrors == 0 {
		t.Errorf("status %+v", s)
	}
	p.step(false)
	p.steps(10)
	f.caughtUp(p)
	f.within(p)
}

// What a publisher's full queue dropped right before it fell silent shows by
// asking.
func TestFeedVerifiesQuietPublisher(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 8, 1)
	f := p.followed(true, func(o *Options) { o.VerifyAfter, o.VerifyEvery = 20*time.Millisecond, 20*time.Millisecond })
	p.steps(10)
	f.caughtUp(p)
	for range 5 {
		p.step(false)
	}
	s := f.caughtUp(p)
	f.equals(p)
	if s.Dropped != 0 || s.Gaps != 0 {
		t.Errorf("status %+v", s)
	}
}

func TestFeedGoesStale(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 9, 1)
	f := p.followed(true, func(o *Options) { o.StaleAfter = 60 * time.Millisecond })
	p.steps(5)
	f.caughtUp(p)
	before := f.emitted("feed_stale") // the first connection may have been late
	p.hangUp(func() {
		s := f.until(func(s Status) bool { return s.State == Stale })
		if n := f.Usable(0, 9, &kvgroup.Prompt{}, nil); s.Trusted || f.Trusted(0) || n != 0 {
			t.Errorf("status trusted %v, rank trusted %v, %d blocks usable", s.Trusted, f.Trusted(0), n)
		}
		if n := f.emitted("feed_stale") - before; s.Reason == "" || n != 1 {
			t.Errorf("reason %q, %d events, want a reason and one", s.Reason, n)
		}
	})
	f.caughtUp(p)
	f.equals(p)
}

// The event port changes with the engine's restart; the hook returns the new one.
func TestFeedAsksForSources(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 10, 1)
	var now atomic.Pointer[workers.EventSource]
	asked := atomic.Int64{}
	f := newFixture(t, func(o *Options) {
		o.Sources = func(_ context.Context, worker string) ([]workers.EventSource, error) {
			if worker != "w" {
				return nil, fmt.Errorf("asked for %q", worker)
			}
			if asked.Add(1) == 1 {
				return nil, errors.New("not up yet")
			}
			s := now.Load()
			return []workers.EventSource{{DP: 1, Endpoint: "tcp://127.0.0.1:1"}, *s}, nil
		}
	})
	src := p.source(true)
	now.Store(&src)
	f.add(workers.EventSource{}) // not known at all
	p.subscribed()
	p.steps(5)
	f.caughtUp(p)

	q := newPublisher(t, 11, 1)
	src2 := q.source(true)
	now.Store(&src2)
	p.hangUp(func() {
		q.subscribed()
		q.steps(7)
		s := f.caughtUp(q)
		f.equals(q)
		if s.Endpoint != q.pubAt || f.emitted("feed_source") != 1 || s.SourceErrors != 1 {
			t.Errorf("status %+v", s)
		}
	})
}

// Entries that no position vouches for are dropped.
func TestFeedBeginsEmpty(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 19, 1)
	p.steps(5)
	f := newFixture(t, func(o *Options) { o.Observer = nil })
	var ops kvindex.Batch
	ops.Store(0, false, []uint64{1}, []uint64{2})
	f.x.Apply(0, &ops)
	f.add(p.source(true))
	f.caughtUp(p)
	kvmodel.Equal(t, "index", p.e.Set(), kvmodel.Holds(t, f.x))
}

// A rank that goes on from a snapshot keeps its entries if the publisher proves
// to be the same.
func TestFeedResumes(t *testing.T) {
	t.Parallel()
	for name, same := range map[string]bool{"same life": true, "another life": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPublisher(t, 12, 1)
			f := p.followed(true, nil)
			p.steps(20)
			f.caughtUp(p)
			var pos kvstream.Position
			var ok bool
			f.Freeze(0, func(p kvstream.Position, known bool) { pos, ok = p, known })
			if !ok || !f.Remove(0) || f.Remove(0) {
				t.Fatalf("position %+v, %v", pos, ok)
			}
			if f.Trusted(0) || len(f.Status()) != 0 {
				t.Fatal("removed rank is still there")
			}
			if !same {
				p.set(func() { p.e.Restart() })
			}
			for range 30 {
				p.step(false)
			}
			if err := f.Add(0, Key{Worker: "w"}, p.source(true), &pos); err != nil {
				t.Fatal(err)
			}
			s := f.caughtUp(p)
			kvmodel.Equal(t, "index", p.e.Set(), kvmodel.Holds(t, f.x))
			if (s.Dropped == 0) != same {
				t.Errorf("status %+v", s)
			}
		})
	}
}

func TestFeedBlockSizeMismatch(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 13, 1)
	f := p.followed(true, func(o *Options) { o.BlockSize = 3; o.Observer = nil })
	p.steps(10)
	s := f.until(func(s Status) bool { return s.State == Unknown && s.LastSeq == 9 })
	if !strings.Contains(s.Reason, "4 tokens") || !strings.Contains(s.Reason, "3 tokens") || f.Trusted(0) || len(kvmodel.Holds(t, f.x)) != 0 {
		t.Errorf("status %+v", s)
	}
}
