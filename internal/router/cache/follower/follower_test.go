package follower

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a follower with all that it works on, and the events that it emitted.
type fixture struct {
	*Follower
	Ledger *ledger.Ledger // that of the follower, with all its methods
	kinds  []string
	gone   []string
}

func newFixture(t testing.TB, snapshot string) *fixture {
	t.Helper()
	return newFixtureOf(t, snapshot, 1<<12)
}

// newFixtureOf is newFixture with room for so many blocks.
func newFixtureOf(t testing.TB, snapshot string, blocks int64) *fixture {
	t.Helper()
	s := &fixture{Ledger: ledger.New()}
	o := Options{
		Registry: workers.NewRegistry(func(eventlog.Event) {}), Index: kvindex.New(kvindex.Options{MaxBlocks: blocks}), Predicted: approx.New(approx.Options{}), Ledger: s.Ledger,
		Feeds: kvfeed.Options{BlockSize: 16}, Snapshot: snapshot,
		BlockOf: func(*workers.Worker) int { return 16 },
		Learn:   func(context.Context, *workers.Worker) error { return errors.New("nobody to ask") },
		Gone:    func(w string) { s.gone = append(s.gone, w) },
		Event:   func(e eventlog.Event) { s.kinds = append(s.kinds, e.Kind) },
	}
	var err error
	if s.Follower, err = New(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(o.Index.Close(), o.Predicted.Close()); err != nil {
			t.Error(err)
		}
	})
	return s
}

// set makes the fleet consist of workers, given as they are typed, and follows.
func (s *fixture) set(t testing.TB, texts ...string) *workers.Snapshot {
	t.Helper()
	snap := s.register(t, texts...)
	s.applySnapshot(snap)
	return snap
}

// register makes the fleet consist of workers.
func (s *fixture) register(t testing.TB, texts ...string) *workers.Snapshot {
	t.Helper()
	var specs []workers.Spec
	for _, text := range texts {
		spec, err := workers.ParseSpec(workers.Aggregated, text)
		if err != nil {
			t.Fatal(err)
		}
		specs = append(specs, spec)
	}
	if _, err := s.Registry.Apply("flag", specs); err != nil {
		t.Fatal(err)
	}
	return s.Registry.Snapshot()
}

// TestPlaces: a rank has its place everywhere while it is in the fleet, and
// nothing is left of it afterwards, so that another can have its slot.
func TestPlaces(t *testing.T) {
	s := newFixture(t, "")
	snap := s.set(t, "http://127.0.0.1:1,name=a", "http://127.0.0.1:2,name=b,events=tcp://127.0.0.1:3")
	a, _ := snap.Worker("a")
	b, _ := snap.Worker("b")
	for _, w := range []*workers.Worker{a, b} {
		if _, ok := s.Index.RankStats(kvindex.Rank(w.Ranks[0].Slot)); !ok {
			t.Errorf("%s has no place in the index", w.Name)
		}
	}
	if s.Fed(a.Ranks[0]) || !s.Fed(b.Ranks[0]) {
		t.Errorf("fed: a %v, b %v", s.Fed(a.Ranks[0]), s.Fed(b.Ranks[0]))
	}
	s.Began(b.Ranks[0])
	s.Began(b.Ranks[0])
	s.Failed(b.Ranks[0])
	if n, failed := s.Counts(b.Ranks[0]); n != 2 || failed != 1 {
		t.Errorf("%d requests, %d failed", n, failed)
	}
	held := s.Ledger.Reserve(b.Ranks[0], ledger.Claim{PrefillTokens: 5})
	s.set(t, "http://127.0.0.1:1,name=a")
	held.Release()
	if _, ok := s.Index.RankStats(kvindex.Rank(b.Ranks[0].Slot)); ok || s.Fed(b.Ranks[0]) || len(s.feeds.Status()) != 0 {
		t.Error("a rank that left has its place still")
	}
	if n, _ := s.Counts(b.Ranks[0]); n != 0 || !slices.Equal(s.gone, []string{"b"}) {
		t.Errorf("%d requests are counted of who left; gone: %q", n, s.gone)
	}
	snap = s.set(t, "http://127.0.0.1:1,name=a", "http://127.0.0.1:4,name=c")
	if c, _ := snap.Worker("c"); c.Ranks[0].Slot != b.Ranks[0].Slot {
		t.Errorf("slot %d is not used again but %d", b.Ranks[0].Slot, c.Ranks[0].Slot)
	}
	if len(s.kinds) != 0 {
		t.Errorf("events %q", s.kinds)
	}
}

// TestBlocks: the blocks of a rank are its own, and one without a place has none.
func TestBlocks(t *testing.T) {
	s := newFixture(t, "")
	snap := s.set(t, "http://127.0.0.1:1,name=a", "http://127.0.0.1:2,name=b")
	a, _ := snap.Worker("a")
	var batch kvindex.Batch
	batch.Store(0, false, []uint64{1, 2}, []uint64{11, 12})
	s.Index.Apply(kvindex.Rank(a.Ranks[0].Slot), &batch)
	if got, ok := s.Blocks(a.Ranks[0].Label); !ok || len(got) != 2 || got[0] == got[1] {
		t.Errorf("%v, %v", got, ok)
	}
	b, _ := snap.Worker("b")
	if got, ok := s.Blocks(b.Ranks[0].Label); !ok || len(got) != 0 {
		t.Errorf("another rank: %v, %v", got, ok)
	}
	snap = s.register(t, "http://127.0.0.1:1,name=a", "http://127.0.0.1:3,name=c") // and nobody follows
	c, _ := snap.Worker("c")
	for _, label := range []string{c.Ranks[0].Label, "nobody"} {
		if got, ok := s.Blocks(label); len(got) != 0 || ok && label == "nobody" {
			t.Errorf("%s: %v, %v", label, got, ok)
		}
	}
}

// bringBack puts a rank into a slot as a snapshot would have brought it back.
func (s *fixture) bringBack(t rapid.TB, slot uint32, label string) {
	if err := s.Index.AddRank(kvindex.Rank(slot), label); err != nil {
		t.Fatal(err)
	}
	if s.restored == nil {
		s.restored = map[uint32]restoredRank{}
	}
	s.restored[slot] = restoredRank{label: label, snapshotRank: snapshotRank{Block: 16}}
}

// TestRestoredRankLeaves: a worker whose rank was restored and that leaves before
// its events are known leaves nothing behind; when it comes back, it has a place.
func TestRestoredRankLeaves(t *testing.T) {
	s := newFixture(t, "")
	s.bringBack(t, 0, "a/dp0")
	s.set(t, "http://127.0.0.1:1,name=a") // its events are not known yet
	s.set(t)
	if len(s.restored) != 0 {
		t.Errorf("restored for nobody: %v", s.restored)
	}
	snap := s.set(t, "http://127.0.0.1:1,name=a,events=tcp://127.0.0.1:3")
	a, _ := snap.Worker("a")
	if k, ok := s.Index.RankStats(kvindex.Rank(a.Ranks[0].Slot)); !ok || k.Name != "a/dp0" || !s.Fed(a.Ranks[0]) {
		t.Errorf("place %v %+v, fed %v", ok, k, s.Fed(a.Ranks[0]))
	}
}

// TestPlacesWhateverComes: workers come and go faster than the follower looks,
// come into slots that a snapshot has brought back for them or for others, and
// late requests go to those that have left. Whenever the follower has looked,
// each rank of the fleet has a place under its own name, and every other slot is
// free or kept for a worker that has not come back.
func TestPlacesWhateverComes(t *testing.T) {
	property.Check(t, func(r *rapid.T) {
		s := newFixture(t, "")
		for slot, port := range rapid.SliceOfNDistinct(rapid.IntRange(1, 6), 0, 4, rapid.ID[int]).Draw(r, "restored") {
			s.bringBack(r, uint32(slot), fmt.Sprintf("w%d/dp0", port))
		}
		var ever []*workers.Rank
		var held []*ledger.Reservation
		working := map[*workers.Rank]int{}
		for range rapid.IntRange(1, 20).Draw(r, "steps") {
			switch rapid.IntRange(0, 3).Draw(r, "step") {
			case 0, 1: // the fleet changes, and the follower does not look
				var specs []workers.Spec
				for _, port := range rapid.SliceOfNDistinct(rapid.IntRange(1, 6), 0, 4, rapid.ID[int]).Draw(r, "workers") {
					text := fmt.Sprintf("http://127.0.0.1:%d,name=w%d,dp=%d", port, port, rapid.IntRange(1, 2).Draw(r, "ranks"))
					if rapid.Bool().Draw(r, "publishes events") {
						text += ",events=tcp://127.0.0.1:7"
					}
					spec, err := workers.ParseSpec(workers.Aggregated, text)
					if err != nil {
						r.Fatal(err)
					}
					specs = append(specs, spec)
				}
				if _, err := s.Registry.Apply("flag", specs); err != nil {
					r.Fatal(err)
				}
				ever = append(ever, s.Registry.Snapshot().Ranks...)
			case 2:
				if len(ever) > 0 {
					k := rapid.SampledFrom(ever).Draw(r, "rank")
					held = append(held, s.Ledger.Reserve(k, ledger.Claim{PrefillTokens: 1}))
					working[k]++
					s.Began(k)
				}
			default:
				s.applySnapshot(s.Registry.Snapshot())
				now := s.Registry.Snapshot()
				if n := len(s.Registry.Retired()); n != 0 {
					r.Fatalf("%d slots are never free again", n)
				}
				kept := 0
				for slot, k := range s.restored {
					if _, owner, ok := now.Slot(slot); !ok {
						kept++
					} else if owner.Label != k.label {
						r.Fatalf("slot %d is kept for %s, and %s has it", slot, k.label, owner.Label)
					}
				}
				for _, k := range now.Ranks {
					if place, ok := s.Index.RankStats(kvindex.Rank(k.Slot)); !ok || place.Name != k.Label {
						r.Fatalf("%s has the place %v %q in the index", k.Label, ok, place.Name)
					}
				}
				if n := s.Index.Stats(); n.Ranks != len(now.Ranks)+kept {
					r.Fatalf("%d ranks have a place in the index, the fleet has %d, and %d are kept", n.Ranks, len(now.Ranks), kept)
				}
				if len(s.count) > len(now.Ranks) {
					r.Fatalf("%d ranks are counted, the fleet has %d", len(s.count), len(now.Ranks))
				}
			}
			for _, k := range s.Registry.Snapshot().Ranks {
				if got := s.Ledger.Load(k).Requests; got != working[k] {
					r.Fatalf("%s has %d requests on the books, and %d in work", k.Label, got, working[k])
				}
			}
		}
		for _, v := range held {
			v.Release()
		}
		if err := s.Ledger.Balanced(); err != nil {
			r.Fatal(err)
		}
	})
}

// TestSnapshot: what was saved is there after a restart until it is clear that
// the worker does not come back; a bad file is reported and changes nothing.
func TestSnapshot(t *testing.T) {
	path := filepath.Join(t.TempDir(), "index")
	o := newOutlet(t, pick(t, "sink."), 10)
	was := begin(t, path, o)
	was.until(0)
	o.publish(5)
	was.until(5)
	if err := was.stop(); err != nil {
		t.Fatal(err)
	}
	const slot = 0
	now := newFixture(t, path)
	now.restore()
	if _, ok := now.Index.RankStats(slot); !ok || !slices.Equal(now.kinds, []string{"snapshot_restored"}) {
		t.Errorf("after a restart: rank %v, events %q", ok, now.kinds)
	}
	now.expire()
	if _, ok := now.Index.RankStats(slot); ok {
		t.Error("a rank whose worker did not come back is kept")
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw[:len(raw)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	cut := newFixture(t, path)
	cut.restore()
	if cut.restored != nil || !slices.Equal(cut.kinds, []string{"snapshot_refused"}) {
		t.Errorf("a file that is cut: %v, events %q", cut.restored, cut.kinds)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	none := newFixture(t, path)
	if none.restore(); len(none.kinds) != 0 {
		t.Errorf("without a file: events %q", none.kinds)
	}
}

// FuzzSnapshot: whatever the file holds, it is taken or refused.
func FuzzSnapshot(f *testing.F) {
	path := filepath.Join(f.TempDir(), "index")
	s := newFixture(f, path)
	s.set(f, "http://127.0.0.1:1,name=a,events=tcp://127.0.0.1:3")
	s.restored = map[uint32]restoredRank{0: {label: "a/dp0", note: []byte(`{"block_size_tokens":16,"position":{"seq":7,"stamp":9}}`)}}
	if err := s.save(); err != nil {
		f.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add(raw[:len(raw)-1])
	f.Add(bytes.Replace(raw, []byte(snapshotSchema), []byte("other/v1"), 1))
	f.Add([]byte("{}\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		path := filepath.Join(t.TempDir(), "index")
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		s := newFixture(t, path)
		if s.restore(); len(s.kinds) != 1 {
			t.Errorf("events %q", s.kinds)
		}
		s.expire()
	})
}
