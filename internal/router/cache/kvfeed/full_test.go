package kvfeed

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// What a full index refused comes back by itself when there is room again: the
// engine does not store again what it has, so nothing else would bring it.
func TestFullIndexRecovers(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 31, 1)
	f, x := fullFixture(t)
	f.add(p.source(true))
	p.subscribed()
	for len(p.e.Held) < 8 {
		p.steps(1)
	}
	if s := f.caughtUp(p); s.Refused == 0 {
		t.Fatalf("nothing was refused: %+v", s)
	}
	kvmodel.Subset(t, "index", p.e.Set(), kvmodel.Holds(t, x))
	x.ClearRank(1)
	f.until(func(s Status) bool { return s.State == Live && len(kvmodel.Holds(t, x)) == len(p.e.Set()) })
	kvmodel.Equal(t, "index", p.e.Set(), kvmodel.Holds(t, x))
}

// Blocks that were refused and that the replay no longer has are still missing
// when there is room again, and the reason says so.
func TestFullIndexBeyondTheReplay(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 31, 1)
	f, x := fullFixture(t)
	f.add(p.source(true))
	p.subscribed()
	for len(p.e.Held) < 8 {
		p.steps(1)
	}
	if s := f.caughtUp(p); s.Refused == 0 || s.Reason != reasonFull {
		t.Fatalf("nothing was refused: %+v", s)
	}
	p.set(func() { p.window = len(p.e.Log) - 1 })
	x.ClearRank(1)
	f.until(func(s Status) bool { return s.State == Live && s.Reason == reasonRefused })
	kvmodel.Subset(t, "index", p.e.Set(), kvmodel.Holds(t, x))
}

// That there is no room is one event, however often the refused blocks are asked
// for and still do not fit.
func TestFullIndexIsReportedOnce(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]func(*publisher){
		"the replay does not end":    func(p *publisher) { p.noEnd = true; p.window = len(p.e.Log) },
		"the replay does not answer": func(p *publisher) { p.silent = true },
	} {
		p := newPublisher(t, 31, 1)
		f, x := fullFixture(t)
		f.o.ReplayIdle = 10 * time.Millisecond
		f.add(p.source(true))
		p.subscribed()
		for len(p.e.Held) < 8 {
			p.steps(1)
		}
		if s := f.caughtUp(p); s.Refused == 0 {
			t.Fatalf("nothing was refused: %+v", s)
		}
		p.set(func() { broken(p) })
		x.ClearRank(1) // room, so that it is asked for
		for asked := f.one().ReplayErrors; asked < 4; asked = f.one().ReplayErrors {
			f.until(func(s Status) bool { return s.ReplayErrors > asked })
			p.steps(1)
			f.until(func(s Status) bool { return s.LastSeq == int64(len(p.e.Log))-1 })
		}
		if n := f.emitted("feed_full"); n != 1 {
			t.Errorf("%s: %d events that the index is full: %+v", name, n, f.one())
		}
	}
}

// That there is no room is one event in each life of the publisher.
func TestFullIndexIsReportedAgain(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 31, 1)
	f, _ := fullFixture(t)
	f.add(p.source(false))
	p.subscribed()
	for life := 1; life <= 2; life++ {
		for n := 0; f.emitted("feed_full") < life; n++ {
			if n == 100 {
				t.Fatalf("life %d: %d events: %+v", life, f.emitted("feed_full"), f.one())
			}
			p.steps(1)
			f.caughtUp(p)
		}
		if s := f.one(); s.Reason != reasonFull {
			t.Errorf("life %d: %+v", life, s)
		}
		p.set(func() { p.e.Restart() })
	}
}

// fullFixture has an index with hardly any room, until its rank 1 is cleared.
func fullFixture(t *testing.T) (*fixture, *kvindex.Index) {
	t.Helper()
	x := kvindex.New(kvindex.Options{MaxBlocks: 64})
	if err := x.AddRank(0, "w/dp0"); err != nil {
		t.Fatal(err)
	}
	if err := x.AddRank(1, "other/dp0"); err != nil {
		t.Fatal(err)
	}
	var b kvindex.Batch
	names := make([]uint64, 62)
	for i := range names {
		names[i] = uint64(i) + 1
	}
	b.Store(0, false, names, names)
	if r := x.Apply(1, &b); r.Stored != len(names) {
		t.Fatalf("%+v", r)
	}
	f := newFixture(t, func(o *Options) {
		o.Index, o.VerifyAfter, o.VerifyEvery = x, 10*time.Millisecond, 10*time.Millisecond
		o.Observer = nil
	})
	f.x = x
	t.Cleanup(func() {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	})
	return f, x
}
