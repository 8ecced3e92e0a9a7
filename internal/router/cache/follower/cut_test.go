package follower

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// recording is what one rank of a real engine published, from its start.
type recording struct {
	name     string
	block    int // tokens
	payloads [][]byte
	// asked are prompts that were looked up after so many batches, with how many
	// leading tokens the engine itself found; by hybrid recordings only.
	asked []lookup
	// groups are the cache groups of a hybrid recording, full says that one of them
	// has full attention, sizes that their blocks differ in size.
	groups      int
	full, sizes bool
}

type lookup struct {
	after  int
	tokens []uint32
	cached int
}

// recordings are those of testdata: ranks of real engines with evictions, and
// hybrid caches with removals in several groups.
func recordings(t testing.TB) []recording {
	t.Helper()
	var all []recording
	files, err := filepath.Glob("../../../../testdata/trace/vllm-*.zst")
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	for _, path := range files {
		all = append(all, recordedRanks(t, path)...)
	}
	if files, err = filepath.Glob("../../../../testdata/hybrid/*.jsonl.gz"); err != nil || len(files) < 4 {
		t.Fatalf("%d recordings of hybrid caches: %v", len(files), err)
	}
	for _, path := range files {
		all = append(all, recordedGroups(t, path))
	}
	return all
}

func recordedRanks(t testing.TB, path string) []recording {
	t.Helper()
	r, err := trace.Open(path, nil, trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ranks := map[string]*recording{}
	for {
		var rec trace.Record
		if err := r.Next(&rec); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		switch rec.Kind {
		case trace.KindRank:
			ranks[rec.Rank] = &recording{name: filepath.Base(path) + " " + rec.Rank, block: rec.RankInfo.BlockSize}
		case trace.KindBatch:
			k := ranks[rec.Rank]
			if rec.Batch.Seq != uint64(len(k.payloads)) {
				t.Fatalf("%s: batch %d after %d", k.name, rec.Batch.Seq, len(k.payloads))
			}
			k.payloads = append(k.payloads, bytes.Clone(rec.Batch.Payload))
		default:
		}
	}
	var all []recording
	for _, label := range slices.Sorted(maps.Keys(ranks)) {
		all = append(all, *ranks[label])
	}
	return all
}

func recordedGroups(t testing.TB, path string) recording {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	z, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	k := recording{name: filepath.Base(path)}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var l struct {
			Type   string
			Block  int `json:"scheduler_block_size"`
			Groups []struct {
				Spec string
				Size int `json:"block_size"`
			}
			Payload []byte
			Tokens  []uint32
			Cached  int `json:"cached_whole"`
		}
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			t.Fatal(err)
		}
		switch l.Type {
		case "header":
			k.block, k.groups = l.Block, len(l.Groups)
			for _, g := range l.Groups {
				k.full = k.full || strings.Contains(g.Spec, "FullAttention")
				k.sizes = k.sizes || g.Size != l.Block
			}
		case "batch":
			k.payloads = append(k.payloads, l.Payload)
		case "request":
			k.asked = append(k.asked, lookup{len(k.payloads), l.Tokens, l.Cached})
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return k
}

// truth is what the engine holds in its first group with full attention, by its
// own names, with the number of copies.
type truth struct {
	dec    kvevent.Decoder
	batch  kvevent.Batch
	group  int32
	copies map[uint64]int
}

func newTruth() *truth { return &truth{group: -1, copies: map[uint64]int{}} }

func (e *truth) take(t testing.TB, payload []byte) {
	t.Helper()
	if err := e.dec.Decode(payload, &e.batch); err != nil || e.batch.Skipped+e.batch.Unknown > 0 {
		t.Fatalf("%v, %d skipped, %d unknown", err, e.batch.Skipped, e.batch.Unknown)
	}
	for _, v := range e.batch.Events {
		if v.Kind == kvevent.Stored && v.CacheKind == kvevent.FullAttention && e.group < 0 {
			e.group = v.Group
		}
		switch {
		case v.Kind == kvevent.Cleared:
			clear(e.copies)
		case v.Group != e.group:
		case v.Kind == kvevent.Stored:
			for _, h := range v.Hashes {
				e.copies[h]++
			}
		case v.Kind == kvevent.Removed:
			for _, h := range v.Hashes {
				if e.copies[h]--; e.copies[h] <= 0 {
					delete(e.copies, h)
				}
			}
		}
	}
}

// moment is an index at one moment: blocks by name, and what one cannot see of
// them but by what later removals do.
type moment struct {
	sum    uint64
	copies int64
	names  map[uint64]bool
}

// rig is a rank's stream with an index of its own.
type rig struct {
	t testing.TB
	x *kvindex.Index
	s *kvstream.Stream
}

func newRig(t testing.TB, block int) *rig {
	t.Helper()
	g := &rig{t: t, x: kvindex.New(kvindex.Options{MaxRanks: 1, MaxBlocks: 1 << 12, MaxBytes: 1})}
	if err := g.x.AddRank(0, "a/dp0"); err != nil {
		t.Fatal(err)
	}
	g.s = kvstream.New(g.x, 0, block)
	return g
}

func (g *rig) close() {
	if err := g.x.Close(); err != nil {
		g.t.Error(err)
	}
}

func (g *rig) offer(seq int, payload []byte, want kvstream.VerdictKind) {
	g.t.Helper()
	if v := g.s.Offer(uint64(seq), payload); v.Kind != want {
		g.t.Fatalf("batch %d is %v, want %v", seq, v.Kind, want)
	}
}

func (g *rig) now(names bool) moment {
	g.t.Helper()
	s, _ := g.x.RankStats(0)
	m := moment{sum: g.x.RankChecksum(0), copies: s.Copies}
	if names {
		m.names = map[uint64]bool{}
		if err := g.x.RankBlocks(0, func(_, name uint64) bool { m.names[name] = true; return true }); err != nil {
			g.t.Fatal(err)
		}
	}
	return m
}

// restarted is the rig of a router that has only a snapshot of this one.
func (g *rig) restarted(block int) *rig {
	g.t.Helper()
	var file bytes.Buffer
	err := g.x.Snapshot(&file, func(_ kvindex.Rank, _ string, take func()) []byte {
		p, ok := g.s.Position()
		if !ok {
			return nil
		}
		take()
		note, err := json.Marshal(snapshotRank{Block: block, Position: p})
		if err != nil {
			g.t.Fatal(err)
		}
		return note
	})
	if err != nil {
		g.t.Fatal(err)
	}
	h := &rig{t: g.t, x: kvindex.New(kvindex.Options{MaxRanks: 1, MaxBlocks: 1 << 12, MaxBytes: 1})}
	var at *kvstream.Position
	err = h.x.Restore(&file, func(_ kvindex.Rank, _ string, note []byte) error {
		var k snapshotRank
		at = &k.Position
		return json.Unmarshal(note, &k)
	})
	if err != nil {
		g.t.Fatal(err)
	}
	if at == nil {
		if err := h.x.AddRank(0, "a/dp0"); err != nil {
			g.t.Fatal(err)
		}
	}
	h.s = kvstream.New(h.x, 0, block)
	if at != nil {
		h.s.Resume(*at)
	}
	return h
}

// TestAnyCutIsInvisible is the property of restarts: whatever batch a router is
// stopped after, what it restores and the batches from there on lead to the very
// index of one that never stopped, after each batch, in blocks and in copies;
// and neither ever holds a block that the engine does not.
func TestAnyCutIsInvisible(t *testing.T) {
	t.Parallel()
	for _, k := range recordings(t) {
		if k.groups > 1 || k.groups == 1 && !k.full {
			continue // in no snapshot, see TestAnyCutOfPartsNeverOvercounts
		}
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			g, e := newRig(t, k.block), newTruth()
			defer g.close()
			var moments []moment
			cuts := map[int]*rig{}
			every := 1 + len(k.payloads)/120 // each cut keeps an index
			asked, copied := k.asked, int64(0)
			for i, p := range k.payloads {
				for len(asked) > 0 && asked[0].after == i {
					g.judge(k, asked[0])
					asked = asked[1:]
				}
				g.offer(i, p, kvstream.Apply)
				e.take(t, p)
				m := g.now(true)
				extra := int64(0)
				for name, n := range e.copies {
					extra += int64(n - 1)
					if !m.names[name] {
						t.Fatalf("batch %d: block %x of the engine is not in the index", i, name)
					}
				}
				if len(m.names) != len(e.copies) || m.copies != extra {
					t.Fatalf("batch %d: the index has %d blocks and %d further copies, the engine %d and %d", i, len(m.names), m.copies, len(e.copies), extra)
				}
				moments = append(moments, m)
				copied = max(copied, m.copies)
				if i%every == 0 {
					cuts[i] = g.restarted(k.block)
				}
			}
			if c := g.s.Counters(); c.Removed == 0 || c.Dropped+c.Orphans+c.Refused+c.Renamed != 0 || !g.s.Complete() {
				t.Fatalf("not a recording with evictions that all apply: %+v", c)
			}
			for cut, h := range cuts {
				h.offer(cut, k.payloads[cut], kvstream.Duplicate) // by which the publisher proves itself
				for i := cut; i < len(k.payloads); i++ {
					if i > cut {
						h.offer(i, k.payloads[i], kvstream.Apply)
					}
					last := i == len(k.payloads)-1
					m, want := h.now(last), moments[i]
					if m.sum != want.sum || m.copies != want.copies || last && !maps.Equal(m.names, want.names) {
						t.Fatalf("cut after batch %d, after batch %d: sum %x and %d copies, without the cut %x and %d", cut, i, m.sum, m.copies, want.sum, want.copies)
					}
				}
				if !h.s.Complete() {
					t.Errorf("cut after batch %d: the rank counts as incomplete", cut)
				}
				h.close()
			}
			t.Logf("%d cuts; at most %d further copies", len(cuts), copied)
		})
	}
}

// judge compares the index with what the engine itself found cached.
func (g *rig) judge(k recording, l lookup) {
	g.t.Helper()
	var q kvindex.Query
	g.x.Overlap(blockhash.Locals(nil, l.tokens, k.block, blockhash.Key{}), &q)
	got := q.Depth(0) * k.block
	if got != l.cached {
		g.t.Errorf("after batch %d: the index has %d leading tokens of a prompt of %d, vLLM %d", l.after-1, got, len(l.tokens), l.cached)
	}
}

// TestAnyCutOfPartsNeverOvercounts: where the router's blocks are smaller than the
// engine's, there is nothing to go on from, and the rank starts over with what the
// engine still publishes: less than it has, and never more. A rank with several cache
// groups goes on with what it had.
func TestAnyCutOfPartsNeverOvercounts(t *testing.T) {
	t.Parallel()
	for i, k := range recordings(t) {
		switch {
		case i == 0:
			k.block /= 2
		case k.groups < 2 || !k.full || k.sizes:
			continue
		}
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			cutNeverOvercounts(t, k, i > 0)
		})
	}
}

func cutNeverOvercounts(t *testing.T, k recording, kept bool) {
	t.Helper()
	g, e := newRig(t, k.block), newTruth()
	defer g.close()
	for cut, p := range k.payloads {
		g.offer(cut, p, kvstream.Apply)
		if cut%16 != 0 {
			continue
		}
		h := g.restarted(k.block)
		n, had := len(h.now(true).names), len(g.now(true).names)
		switch {
		case kept && n == had:
			h.offer(cut, p, kvstream.Duplicate)
		case !kept && n == 0:
			h.s.Skip(uint64(cut) + 1)
		default:
			t.Fatalf("cut after batch %d: %d blocks of %d", cut, n, had)
		}
		*e = *newTruth()
		for i, p := range k.payloads {
			e.take(t, p)
			if i <= cut {
				continue
			}
			h.offer(i, p, kvstream.Apply)
			if has, engine := h.usable(), len(e.copies); has > engine {
				t.Fatalf("cut after batch %d, after batch %d: %d whole blocks, the engine has %d", cut, i, has, engine)
			}
		}
		h.close()
	}
}

// usable is how many of the rank's blocks carry the engine's names.
func (g *rig) usable() int {
	g.t.Helper()
	s, _ := g.x.RankStats(0)
	return int(s.Blocks) / max(g.s.Shape().Parts, 1)
}
