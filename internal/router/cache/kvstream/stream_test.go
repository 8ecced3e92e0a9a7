package kvstream

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// newIndex has one rank, and is closed when the test ends.
func newIndex(t testing.TB, o kvindex.Options) *kvindex.Index {
	t.Helper()
	x := kvindex.New(o)
	t.Cleanup(func() { _ = x.Close() })
	if err := x.AddRank(0, "w/dp0"); err != nil {
		t.Fatal(err)
	}
	return x
}

// deliver offers batch seq of e to s the way a feed does, with a replay socket
// that still has the batches from window on (window beyond the log: none).
func deliver(t kvmodel.T, s *Stream, e *kvmodel.Engine, seq, window int) Verdict {
	t.Helper()
	v := s.Offer(uint64(seq), e.Log[seq])
	if v.Kind == Restart {
		s.Reset()
		v = s.Offer(uint64(seq), e.Log[seq])
	}
	if v.Kind != Gap {
		return v
	}
	if window <= seq {
		from := max(int(v.From), window)
		if from > int(v.From) {
			s.Skip(uint64(from))
		}
		for i := from; i < seq; i++ {
			if v := s.Offer(uint64(i), e.Log[i]); v.Kind != Apply {
				t.Fatalf("replayed batch %d is %v", i, v.Kind)
			}
		}
	} else {
		s.Skip(uint64(seq))
	}
	return s.Offer(uint64(seq), e.Log[seq])
}

// Whatever is dropped, repeated, reordered or restarted: with the replay at hand
// the index ends as the engine is, without it it never has what the engine has
// not, not even for a moment.
func TestStreamFollowsModel(t *testing.T) {
	t.Parallel()
	property.Check(t, func(t *rapid.T) {
		e := kvmodel.New(rapid.Uint64().Draw(t, "seed"), rapid.SampledFrom([]int{1, 1, 2, 5}).Draw(t, "parts"))
		x := kvmodel.NewIndexOf(t)
		defer x.Close()
		s := New(x, 0, kvmodel.Block)
		replay := rapid.Bool().Draw(t, "replay")
		window := math.MaxInt
		if replay {
			window = 0
		}
		check := func() {
			last, ok := s.Last()
			if !ok {
				return
			}
			if replay {
				kvmodel.Equal(t, "with replay", e.After[last], kvmodel.Holds(t, x))
				if !s.Complete() {
					t.Fatalf("not complete after batch %d though nothing was lost", last)
				}
			}
			kvmodel.Subset(t, "after a batch", e.After[last], kvmodel.Holds(t, x))
		}
		for range rapid.IntRange(5, 60).Draw(t, "steps") {
			e.Step()
			now := len(e.Log) - 1
			switch rapid.SampledFrom([]string{"send", "send", "send", "send", "drop", "repeat", "swap", "restart"}).Draw(t, "fate") {
			case "send":
				deliver(t, s, e, now, window)
			case "drop":
			case "repeat":
				deliver(t, s, e, now, window)
				if last, _ := s.Last(); int(last) != now {
					t.Fatalf("batch %d was not applied", now)
				}
				if v := s.Offer(uint64(now), e.Log[now]); v.Kind != Duplicate {
					t.Fatalf("the repetition of batch %d is %v", now, v.Kind)
				}
			case "swap":
				e.Step()
				deliver(t, s, e, now+1, window)
				check()
				// The late one is a duplicate if the replay brought it, else it
				// looks like a restart and must leave the index safe.
				deliver(t, s, e, now, window)
			case "restart":
				e.Restart()
				e.Step()
				if _, had := s.Last(); !had {
					continue
				}
				deliver(t, s, e, 0, window)
			}
			check()
		}
		if len(e.Log) > 0 {
			e.Step()
			deliver(t, s, e, len(e.Log)-1, window)
			check()
		}
		if replay && s.Counters().Orphans > 0 {
			t.Fatalf("%d orphans in a complete stream", s.Counters().Orphans)
		}
	})
}

// A batch or an event that cannot be read may have been a removal.
func TestStreamDistrusts(t *testing.T) {
	t.Parallel()
	good := func() []byte {
		return kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1, Rank: 0, Events: []kvevent.Event{
			{Kind: kvevent.Stored, Group: -1, Hashes: []uint64{1, 2}, Tokens: make([]uint32, 2*kvmodel.Block), BlockSize: kvmodel.Block},
		}}, kvevent.Encoding{})
	}
	tests := map[string]struct {
		payload []byte
		drops   bool
	}{
		"garbage":              {[]byte("garbage"), true},
		"empty payload":        {nil, true},
		"a removal misspelled": {[]byte("\x92\xcb\x40\x00\x00\x00\x00\x00\x00\x00\x91\x92\xacBlockRemoved\xa3abc"), true},
		"an unknown event":     {[]byte("\x92\xcb\x40\x00\x00\x00\x00\x00\x00\x00\x91\x92\xa7Whatnot\xa3abc"), false},
		"no event":             {[]byte("\x92\xcb\x40\x00\x00\x00\x00\x00\x00\x00\x90"), false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := kvmodel.NewIndex(t)
			s := New(x, 0, kvmodel.Block)
			s.Offer(0, good())
			if n := len(kvmodel.Holds(t, x)); n != 2 {
				t.Fatalf("%d blocks held at first, want 2", n)
			}
			if v := s.Offer(1, tt.payload); v.Kind != Apply {
				t.Fatalf("verdict %v", v.Kind)
			}
			held := len(kvmodel.Holds(t, x))
			fault := s.TakeFault()
			want := 2
			if tt.drops {
				want = 0
			}
			if held != want || (fault != "") != tt.drops || s.Complete() == tt.drops {
				t.Fatalf("holds %d blocks, want %d; fault %q, complete %v", held, want, fault, s.Complete())
			}
		})
	}
}

func TestStreamResume(t *testing.T) {
	t.Parallel()
	e := kvmodel.New(3, 1)
	for range 20 {
		e.Step()
	}
	x := kvmodel.NewIndex(t)
	s := New(x, 0, kvmodel.Block)
	for i := range 10 {
		s.Offer(uint64(i), e.Log[i])
	}
	p, ok := s.Position()
	if !ok || p.Seq != 9 || p.Parts != 1 {
		t.Fatalf("position %+v, %v", p, ok)
	}
	again := New(x, 0, kvmodel.Block)
	again.Resume(p)
	for i := 10; i < 20; i++ {
		if v := again.Offer(uint64(i), e.Log[i]); v.Kind != Apply {
			t.Fatalf("batch %d after the resume is %v", i, v.Kind)
		}
	}
	kvmodel.Equal(t, "resumed", e.After[19], kvmodel.Holds(t, x))

	split := New(x, 0, kvmodel.Block/2)
	split.Offer(0, e.Log[0])
	if p, ok := split.Position(); ok {
		t.Fatalf("position %+v for blocks of two parts", p)
	}

	other := New(x, 0, 3)
	other.Resume(p)
	if n := len(kvmodel.Holds(t, x)); n != 0 {
		t.Fatalf("%d blocks of another block size survived the resume", n)
	}
}
