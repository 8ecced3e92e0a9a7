package follower

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/router/replicas/natsbus"
	"github.com/dynctl/dynctl/internal/workers"
)

// copyLimit is large enough for all copies of these tests.
const copyLimit = 1 << 20

type sibling = func(context.Context, *workers.Worker, *workers.Rank) ([]byte, string, error)

// copies is a router whose copies are changed on the way; nil leaves them.
func (l *life) copies(change func([]byte) []byte) sibling {
	return func(context.Context, *workers.Worker, *workers.Rank) ([]byte, string, error) {
		b, err := l.Copy(l.Registry.Snapshot().Ranks[0], copyLimit)
		if err == nil && change != nil {
			b = change(bytes.Clone(b))
		}
		return b, "old", err
	}
}

// beside begins a router beside another one. It knows the engine under another name and in
// another slot.
func beside(t *testing.T, o *outlet, other sibling, more string) *life {
	t.Helper()
	s := newFixture(t, "")
	s.BlockOf, s.Sibling = o.blockOf, other
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	l := &life{fixture: s, t: t, o: o, stop: func() error {
		cancel()
		err := <-done
		done <- nil
		return err
	}}
	t.Cleanup(func() {
		if err := l.stop(); err != nil {
			t.Error(err)
		}
	})
	s.register(t, "http://127.0.0.1:9,name=first", strings.Replace(o.worker(), "name=a", "name=b", 1)+more)
	return l
}

// TestCopy: a router that starts beside another one has all of its blocks, although the replay
// reaches back to the last batches only, and follows the engine from there.
func TestCopy(t *testing.T) {
	t.Parallel()
	o := newOutlet(t, pick(t, "sink."), 10)
	old := begin(t, "", o)
	old.until(0)
	const n = 60
	o.publish(n)
	old.until(n)
	l := beside(t, o, old.copies(nil), "")
	l.reaches(n)
	o.heardBy(t, 2)
	o.publish(n + 5)
	l.reaches(n + 5)
	old.reaches(n + 5)
	if got, want := l.Index.RankChecksum(1), old.Index.RankChecksum(0); got != want || want == 0 {
		t.Errorf("checksum %x, and that of the other router %x", got, want)
	}
	if s := l.feeds.Status()[0]; s.Dropped != 0 || s.Restarts != 0 || s.Lost != 0 {
		t.Errorf("the rank did not continue from the copy: %+v", s)
	}
	if c := l.Copied(); c.Router != "old" || c.Ranks != 1 || c.Blocks == 0 || c.Missing+c.Refused != 0 || c.Why != "" {
		t.Errorf("%+v", c)
	}
	if err := l.stop(); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(l.kinds, []string{"index_copied"}) {
		t.Errorf("events %q", l.kinds)
	}
}

// TestCopyProvesNothing: blocks of a copy do not count before the engine's replay has the batch
// that the copy ends with, and are dropped where it has another one.
func TestCopyProvesNothing(t *testing.T) {
	t.Parallel()
	first := newOutlet(t, pick(t, "-full.jsonl"), 1<<20)
	old := begin(t, "", first)
	old.until(0)
	first.publish(60)
	old.until(60)
	other := newOutlet(t, pick(t, "sink."), 1<<20)
	other.publish(70)
	if first.block != other.block {
		t.Fatalf("blocks of %d and %d tokens", first.block, other.block)
	}
	l := beside(t, other, old.copies(nil), "")
	l.reaches(70)
	if s := l.feeds.Status()[0]; s.Restarts != 1 || l.Copied().Ranks != 1 {
		t.Errorf("another engine was not noticed: %+v, %+v", s, l.Copied())
	}
	g := newRig(t, other.block)
	defer g.close()
	for i, p := range other.payloads[:70] {
		g.offer(i, p, kvstream.Apply)
	}
	if got, want := l.Index.RankChecksum(1), g.now(false).sum; got != want {
		t.Errorf("checksum %x, want %x: blocks of the other engine stayed", got, want)
	}
}

// TestCopyRefused: without a copy, or with one that cannot be used, a router starts as ever, and
// an event gives the reason.
func TestCopyRefused(t *testing.T) {
	t.Parallel()
	o := newOutlet(t, pick(t, "sink."), 1<<20)
	old := begin(t, "", o)
	old.until(0)
	o.publish(40)
	old.until(40)
	noted := func(change func(k *snapshotRank)) func([]byte) []byte {
		return func(b []byte) []byte {
			x := kvindex.New(kvindex.Options{})
			defer x.Close()
			r, _, err := readHead(bytes.NewReader(b))
			if err != nil {
				t.Error(err)
			}
			var k restoredRank
			if err := x.Restore(r, func(_ kvindex.Rank, label string, note []byte) error {
				k = restoredRank{label: label, note: bytes.Clone(note)}
				return k.read()
			}); err != nil {
				t.Error(err)
			}
			change(&k.snapshotRank)
			note, err := json.Marshal(k.snapshotRank)
			if err != nil {
				t.Error(err)
			}
			var out bytes.Buffer
			_ = json.NewEncoder(&out).Encode(snapshotHead{Schema: snapshotSchema})
			if err := x.Snapshot(&out, func(_ kvindex.Rank, _ string, take func()) []byte { take(); return note }); err != nil {
				t.Error(err)
			}
			return out.Bytes()
		}
	}
	var empty bytes.Buffer
	if err := old.write(&empty, func(kvindex.Rank, string, func()) []byte { return nil }); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change  func([]byte) []byte
		missing error
		more    string // keys of the worker at the router that starts
		want    string
	}{
		"alone":          {missing: errors.New("no other router was heard"), want: "no other router"},
		"garbage":        {change: func([]byte) []byte { return []byte("garbage\n") }, want: "not of the form"},
		"empty":          {change: func([]byte) []byte { return nil }, want: "unexpected EOF"},
		"cut":            {change: func(b []byte) []byte { return b[:len(b)/2] }, want: "bad snapshot"},
		"flipped":        {change: func(b []byte) []byte { b[len(b)/2] ^= 4; return b }, want: "bad snapshot"},
		"a form to come": {change: func(b []byte) []byte { return bytes.Replace(b, []byte("/v2"), []byte("/v3"), 1) }, want: "not of the form"},
		"no rank":        {change: func([]byte) []byte { return empty.Bytes() }, want: "no rank"},
		"other blocks":   {change: noted(func(k *snapshotRank) { k.Block = 4096 }), want: "4096 tokens"},
		"another hash":   {change: noted(func(k *snapshotRank) { k.Hash, k.HashSeed = "sha256_cbor", "7" }), more: ",kv_hash=sha256_cbor,kv_hash_seed=8", want: `seed "7", and here by "sha256_cbor" with seed "8"`},
		"another model":  {change: noted(func(k *snapshotRank) { k.Models = []string{"llama"} }), more: ",model=qwen", want: `"llama", and here "qwen"`},
		"counted copies": {more: ",kv_copies=single", want: "copies"},
	} {
		t.Run(name, func(t *testing.T) {
			other := old.copies(c.change)
			if c.missing != nil {
				other = func(context.Context, *workers.Worker, *workers.Rank) ([]byte, string, error) {
					return nil, "", c.missing
				}
			}
			l := beside(t, o, other, c.more)
			l.reaches(40)
			got := l.Copied()
			if got.Ranks != 0 || got.Missing+got.Refused != 1 || (got.Missing == 1) != (c.missing != nil) || !strings.Contains(got.Why, c.want) {
				t.Errorf("%+v, want %q", got, c.want)
			}
			if err := l.stop(); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(l.kinds, []string{"index_not_copied"}) {
				t.Errorf("events %q", l.kinds)
			}
		})
	}
}

// FuzzCopy: whatever another router sends, it is taken or refused, and a feed that continues
// from it stays whole.
func FuzzCopy(f *testing.F) {
	s := newFixture(f, "")
	s.set(f, "http://127.0.0.1:1,name=a,events=tcp://127.0.0.1:3")
	s.restored = map[uint32]restoredRank{0: {label: "a/dp0", note: []byte(`{"block_size_tokens":16,"position":{"seq":7,"stamp":9,"engine_block_tokens":16,"parts":1,"group":-1}}`)}}
	k := s.Registry.Snapshot().Ranks[0]
	raw, err := s.Copy(k, copyLimit)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add(raw[:len(raw)-1])
	f.Add([]byte("{}\n"))
	now := newFixture(f, "")
	snap := now.set(f, "http://127.0.0.1:1,name=a")
	w := snap.Workers[0]
	f.Fuzz(func(t *testing.T, raw []byte) {
		now.ranksMu.Lock()
		defer now.ranksMu.Unlock()
		now.Index.ClearRank(0)
		if err := now.take(w, w.Ranks[0], raw); err != nil {
			if x, _ := now.Index.RankStats(0); x.Blocks != 0 {
				t.Errorf("%v left %d blocks", err, x.Blocks)
			}
			return
		}
		p := now.resume(w, w.Ranks[0], 16)
		if p == nil {
			t.Fatal("what was taken is not resumed")
		}
		stream := kvstream.New(now.Index, 0, 16)
		stream.Resume(*p)
		stream.Offer(stream.Next(), nil)
	})
}

// BenchmarkNewRouter copies a rank of so many blocks from one router to another over two NATS
// servers, as a router that starts does for each of its ranks, one after the other.
func BenchmarkNewRouter(b *testing.B) {
	for _, blocks := range []int{16 << 10, 128 << 10, 1 << 20} {
		b.Run(fmt.Sprint(blocks>>10, "Ki-blocks"), func(b *testing.B) {
			old, now := newFixtureOf(b, "", 4<<20), newFixtureOf(b, "", 4<<20)
			snap := old.set(b, "http://127.0.0.1:1,name=a,events=tcp://127.0.0.1:3")
			w := now.set(b, "http://127.0.0.1:1,name=a").Workers[0]
			old.restored = map[uint32]restoredRank{0: {label: "a/dp0", note: []byte(`{"block_size_tokens":16,"position":{"seq":7,"stamp":9,"engine_block_tokens":16,"parts":1,"group":-1}}`)}}
			rng := rand.New(rand.NewPCG(44, uint64(blocks)))
			var ops kvindex.Batch
			const chain = 512
			for range blocks / chain {
				names, locals := make([]uint64, chain), make([]uint64, chain)
				for i := range names {
					names[i], locals[i] = rng.Uint64(), rng.Uint64()
				}
				ops.Reset()
				ops.Store(0, false, names, locals)
				old.Index.Apply(0, &ops)
			}
			var buses [2]*natsbus.Bus
			route := []string{}
			for i := range buses {
				var err error
				if buses[i], err = natsbus.Embed(natsbus.Cluster{Name: fmt.Sprint("router-", i), Listen: "127.0.0.1:0", Routes: route, Log: slog.New(slog.DiscardHandler)}); err != nil {
					b.Fatal(err)
				}
				defer buses[i].Close()
				route = []string{buses[i].Addr().String()}
			}
			giver, taker := replicas.Identity{Fleet: "a", Origin: "old", Epoch: time.Now()}, replicas.Identity{Fleet: "a", Origin: "new", Epoch: time.Now()}
			g := replicas.NewGiver(giver, time.Now, func(replicas.Rank) ([]byte, error) { return old.Copy(snap.Ranks[0], replicas.MaxCopy) })
			if err := buses[0].Answer(giver.Address(), g.Answer); err != nil {
				b.Fatal(err)
			}
			fetch := func() (copied []byte, err error) {
				return replicas.Fetch(b.Context(), buses[1], &taker, giver.Origin, 7)
			}
			copied, err := fetch()
			for err != nil { // until the servers have found each other
				copied, err = fetch()
			}
			for b.Loop() {
				now.Index.ClearRank(0)
				if copied, err = fetch(); err == nil {
					now.ranksMu.Lock()
					err = now.take(w, w.Ranks[0], copied)
					now.ranksMu.Unlock()
				}
				if s, _ := now.Index.RankStats(0); err != nil || s.Blocks != int64(blocks) {
					b.Fatalf("%d of %d blocks, %v", s.Blocks, blocks, err)
				}
			}
			b.ReportMetric(float64(blocks)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
			b.ReportMetric(float64(len(copied))/1e6, "MB")
		})
	}
}
