// Package kvmodel is a model of an engine that publishes the events of its KV cache, and
// of what an index must hold after each batch: for the tests of those who follow events.
package kvmodel

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// Block is the router's block in tokens.
const Block = 4

// Set is what a rank holds, by sequence hash.
type Set map[uint64]bool

// Engine is a model of a publishing engine: a set of named blocks and the
// batches that led to it.
type Engine struct {
	rng    *rand.Rand
	parts  int // router blocks per engine block
	serial uint64
	chains map[uint64][]uint32 // every block ever made in this life: its whole prefix
	parent map[uint64]uint64   // 0 for none
	enc    kvevent.Encoding

	// Life counts the restarts; Skew is by how many seconds its clock is ahead.
	Life uint64
	Skew float64
	// Held are the names of the blocks that it holds now.
	Held map[uint64]bool
	// Log are the payloads of this life by their number, After what is held after each.
	Log   [][]byte
	After []Set
}

// T is what the checks need of a test.
type T interface {
	Helper()
	Fatalf(string, ...any)
}

// name is the engine's name of a block, by two numbers.
func name(a, b uint64) uint64 { return blockhash.Next(a, b) }

// New makes an engine whose blocks have this many router blocks; the same seed does the same.
func New(seed uint64, parts int) *Engine {
	e := &Engine{rng: rand.New(rand.NewPCG(seed, 7)), parts: parts}
	e.Restart()
	return e
}

// Restart begins the next life, with an empty cache.
func (e *Engine) Restart() {
	e.Life++
	e.serial = 0
	e.chains, e.parent, e.Held = map[uint64][]uint32{}, map[uint64]uint64{}, map[uint64]bool{}
	e.Log, e.After = nil, nil
	e.enc.Form = kvevent.Form(e.Life % 2)
}

func (e *Engine) pick() (uint64, bool) {
	if len(e.Held) == 0 {
		return 0, false
	}
	n := e.rng.IntN(len(e.Held))
	// In a fixed order, so that a seed says everything.
	best := make([]uint64, 0, len(e.Held))
	for s := uint64(1); s <= e.serial; s++ {
		if h := name(e.Life, s); e.Held[h] {
			best = append(best, h)
		}
	}
	return best[n], true
}

// Step makes the next batch of one to four events.
func (e *Engine) Step() {
	b := kvevent.Batch{TS: 1e9 + float64(e.Life)*1e5 + float64(len(e.Log))/8 + e.Skew, Rank: 0}
	for range 1 + e.rng.IntN(4) {
		switch k := e.rng.IntN(20); {
		case k == 0:
			b.Events = append(b.Events, kvevent.Event{Kind: kvevent.Cleared, Group: -1})
			clear(e.Held)
		case k < 9:
			if h, ok := e.pick(); ok {
				b.Events = append(b.Events, kvevent.Event{Kind: kvevent.Removed, Group: -1, Hashes: []uint64{h}})
				delete(e.Held, h)
			}
		case k < 11:
			if ev, ok := e.restore(); ok {
				b.Events = append(b.Events, ev)
			}
		default:
			b.Events = append(b.Events, e.grow())
		}
	}
	e.Log = append(e.Log, kvevent.AppendBatch(nil, &b, e.enc))
	e.After = append(e.After, e.Set())
}

func (e *Engine) event(parent uint64, hashes []uint64) kvevent.Event {
	bs := Block * e.parts
	ev := kvevent.Event{Kind: kvevent.Stored, Group: -1, Parent: parent, HasParent: parent != 0, Hashes: hashes, BlockSize: int32(bs)}
	for _, h := range hashes {
		c := e.chains[h]
		ev.Tokens = append(ev.Tokens, c[len(c)-bs:]...)
	}
	return ev
}

// grow stores one to three new blocks below a held one or at the root.
func (e *Engine) grow() kvevent.Event {
	parent, ok := e.pick()
	if !ok || e.rng.IntN(4) == 0 {
		parent = 0
	}
	above := parent
	var hashes []uint64
	for range 1 + e.rng.IntN(3) {
		e.serial++
		h := name(e.Life, e.serial)
		chain := append([]uint32(nil), e.chains[above]...)
		// Some begin like a sibling and differ in the last router block only.
		if like, ok := e.sibling(above); ok && e.rng.IntN(2) == 0 {
			from := e.chains[like]
			chain = append(chain, from[len(chain):len(from)-Block]...)
		}
		for len(chain) < len(e.chains[above])+Block*e.parts {
			chain = append(chain, uint32(e.serial))
		}
		e.chains[h], e.parent[h] = chain, above
		e.Held[h] = true
		hashes = append(hashes, h)
		above = h
	}
	return e.event(parent, hashes)
}

// sibling finds a block below parent, evicted or not.
func (e *Engine) sibling(parent uint64) (uint64, bool) {
	for s := e.serial; s > 0; s-- {
		if h := name(e.Life, s); e.chains[h] != nil && e.parent[h] == parent {
			return h, true
		}
	}
	return 0, false
}

// restore stores a block again: one that is held, or one that was evicted and
// whose parent is held.
func (e *Engine) restore() (kvevent.Event, bool) {
	for range 20 {
		if e.serial == 0 {
			break
		}
		h := name(e.Life, 1+e.rng.Uint64N(e.serial))
		if p := e.parent[h]; p == 0 || e.Held[p] {
			e.Held[h] = true
			return e.event(p, []uint64{h}), true
		}
	}
	return kvevent.Event{}, false
}

// Set is what the index should hold now.
func (e *Engine) Set() Set {
	s := Set{}
	for h := range e.Held {
		chain := blockhash.Chain(nil, blockhash.Locals(nil, e.chains[h], Block, blockhash.Key{}))
		for i := range e.parts {
			s[chain[len(chain)-1-i]] = true
		}
	}
	return s
}

// NewIndex makes an index with one rank, which is closed when the test ends.
func NewIndex(t testing.TB) *kvindex.Index {
	t.Helper()
	x := NewIndexOf(t)
	t.Cleanup(func() {
		if err := x.Close(); err != nil {
			t.Errorf("close index: %v", err)
		}
	})
	return x
}

// Holds returns what rank 0 holds.
func Holds(t T, x *kvindex.Index) Set {
	t.Helper()
	s := Set{}
	if err := x.RankBlocks(0, func(seq, _ uint64) bool { s[seq] = true; return true }); err != nil {
		t.Fatalf("rank blocks: %v", err)
	}
	return s
}

// Equal fails unless two sets are the same.
func Equal(t T, what string, want, got Set) {
	t.Helper()
	if !maps.Equal(want, got) {
		t.Fatalf("%s: %d blocks, want %d (-want +got):\n%s", what, len(got), len(want), clipText(cmp.Diff(want, got)))
	}
}

// Subset fails if got has a block that of has not.
func Subset(t T, what string, of, got Set) {
	t.Helper()
	for s := range got {
		if !of[s] {
			t.Fatalf("%s: the index has the block with sequence hash %x, the engine has not", what, s)
		}
	}
}

func clipText(s string) string {
	if len(s) > 2000 {
		return s[:2000] + fmt.Sprintf("\n… %d bytes more", len(s)-2000)
	}
	return s
}

// NewIndexOf is newIndex for tests that close the index themselves.
func NewIndexOf(t T) *kvindex.Index {
	t.Helper()
	x := kvindex.New(kvindex.Options{})
	if err := x.AddRank(0, "w/dp0"); err != nil {
		t.Fatalf("add rank: %v", err)
	}
	return x
}

// Traffic is what a busy rank with a full cache publishes: chains of blocks of
// 16 tokens, each batch storing some and removing as many of the oldest, one
// event per removal as vLLM sends them. It returns payloads for one round; a
// round leaves the cache as it found it, so that it can be repeated.
// Blocks are counted as the router's.
func Traffic(engineBlock, chain, batches int) (payloads [][]byte, blocks int) {
	const kept = 64 // chains in the cache
	serial := uint64(0)
	hash := func(c, i int) uint64 { return name(uint64(c%(batches+kept)), uint64(i)) }
	for c := range batches + kept {
		b := kvevent.Batch{TS: 1.7e9 + float64(c), Rank: 0}
		e := Stored(0, nil, nil, int32(engineBlock))
		for i := range chain {
			e.Hashes = append(e.Hashes, hash(c, i))
		}
		for range chain * engineBlock {
			serial++
			e.Tokens = append(e.Tokens, uint32(name(0, serial)%150000))
		}
		for i := chain - 1; i >= 0; i-- {
			b.Events = append(b.Events, Removed(hash(c+batches, i)))
		}
		b.Events = append(b.Events, e)
		blocks += 2 * chain * engineBlock / 16
		payloads = append(payloads, kvevent.AppendBatch(nil, &b, kvevent.Encoding{}))
	}
	return payloads, blocks
}

// Tokens are n token ids from one on.
func Tokens(from, n int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32(from + i)
	}
	return t
}

// Stored is the event that stores blocks of bs tokens below parent, 0 for none.
func Stored(parent uint64, hashes []uint64, toks []uint32, bs int32) kvevent.Event {
	return kvevent.Event{Kind: kvevent.Stored, Group: -1, Parent: parent, HasParent: parent != 0, Hashes: hashes, Tokens: toks, BlockSize: bs}
}

// Removed is the event that removes blocks.
func Removed(hashes ...uint64) kvevent.Event {
	return kvevent.Event{Kind: kvevent.Removed, Group: -1, Hashes: hashes}
}

// StoreOf is one batch of vLLM's map form that stores blocks of tokens 0 to 15
// in a group of the named kind for each kind given.
func StoreOf(kinds ...string) []byte {
	b := kvevent.Batch{TS: 1e9, Rank: 0}
	for i, kind := range kinds {
		e := Stored(0, []uint64{1, 2, 3, 4}, Tokens(0, 4*Block), Block)
		e.Group = int32(i)
		if kind != "" {
			e.CacheKind, e.CacheName = kvevent.OtherCache, kind // written as it is
		}
		b.Events = append(b.Events, e)
	}
	return kvevent.AppendBatch(nil, &b, kvevent.Encoding{Form: kvevent.VLLMMap})
}
