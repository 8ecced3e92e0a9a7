package kvfeed

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/kvevent"
	"github.com/dynctl/dynctl/internal/router/kvindex"
)

const modelBlock = 4 // router block size of the tests, in tokens

// set is what a rank holds, by sequence hash.
type set map[uint64]bool

// engine is a model of a publishing engine: a set of named blocks and the
// batches that led to it.
type engine struct {
	rng    *rand.Rand
	parts  int // router blocks per engine block
	life   uint64
	skew   float64 // seconds that dates of batches are ahead
	serial uint64
	chains map[uint64][]uint32 // every block ever made in this life: its whole prefix
	parent map[uint64]uint64   // 0 for none
	held   map[uint64]bool
	log    [][]byte // payloads of this life by number
	after  []set    // what is held after each
	enc    kvevent.Encoding
}

func newEngine(seed uint64, parts int) *engine {
	e := &engine{rng: rand.New(rand.NewPCG(seed, 7)), parts: parts}
	e.restart()
	return e
}

func (e *engine) restart() {
	e.life++
	e.serial = 0
	e.chains, e.parent, e.held = map[uint64][]uint32{}, map[uint64]uint64{}, map[uint64]bool{}
	e.log, e.after = nil, nil
	e.enc.Form = kvevent.Form(e.life % 2)
}

func (e *engine) pick() (uint64, bool) {
	if len(e.held) == 0 {
		return 0, false
	}
	n := e.rng.IntN(len(e.held))
	// In a fixed order, so that a seed says everything.
	best := make([]uint64, 0, len(e.held))
	for s := uint64(1); s <= e.serial; s++ {
		if h := mix64(e.life<<32 | s); e.held[h] {
			best = append(best, h)
		}
	}
	return best[n], true
}

// step makes the next batch of one to four events.
func (e *engine) step() {
	b := kvevent.Batch{TS: 1e9 + float64(e.life)*1e5 + float64(len(e.log))/8 + e.skew, Rank: 0}
	for range 1 + e.rng.IntN(4) {
		switch k := e.rng.IntN(20); {
		case k == 0:
			b.Events = append(b.Events, kvevent.Event{Kind: kvevent.Cleared, Group: -1})
			clear(e.held)
		case k < 9:
			if h, ok := e.pick(); ok {
				b.Events = append(b.Events, kvevent.Event{Kind: kvevent.Removed, Group: -1, Hashes: []uint64{h}})
				delete(e.held, h)
			}
		case k < 11:
			if ev, ok := e.restore(); ok {
				b.Events = append(b.Events, ev)
			}
		default:
			b.Events = append(b.Events, e.grow())
		}
	}
	e.log = append(e.log, kvevent.AppendBatch(nil, &b, e.enc))
	e.after = append(e.after, e.set())
}

func (e *engine) event(parent uint64, hashes []uint64) kvevent.Event {
	bs := modelBlock * e.parts
	ev := kvevent.Event{Kind: kvevent.Stored, Group: -1, Parent: parent, HasParent: parent != 0, Hashes: hashes, BlockSize: int32(bs)}
	for _, h := range hashes {
		c := e.chains[h]
		ev.Tokens = append(ev.Tokens, c[len(c)-bs:]...)
	}
	return ev
}

// grow stores one to three new blocks below a held one or at the root.
func (e *engine) grow() kvevent.Event {
	parent, ok := e.pick()
	if !ok || e.rng.IntN(4) == 0 {
		parent = 0
	}
	above := parent
	var hashes []uint64
	for range 1 + e.rng.IntN(3) {
		e.serial++
		h := mix64(e.life<<32 | e.serial)
		chain := append([]uint32(nil), e.chains[above]...)
		// Some begin like a sibling and differ in the last router block only.
		if like, ok := e.sibling(above); ok && e.rng.IntN(2) == 0 {
			from := e.chains[like]
			chain = append(chain, from[len(chain):len(from)-modelBlock]...)
		}
		for len(chain) < len(e.chains[above])+modelBlock*e.parts {
			chain = append(chain, uint32(e.serial))
		}
		e.chains[h], e.parent[h] = chain, above
		e.held[h] = true
		hashes = append(hashes, h)
		above = h
	}
	return e.event(parent, hashes)
}

// sibling finds a block below parent, evicted or not.
func (e *engine) sibling(parent uint64) (uint64, bool) {
	for s := e.serial; s > 0; s-- {
		if h := mix64(e.life<<32 | s); e.chains[h] != nil && e.parent[h] == parent {
			return h, true
		}
	}
	return 0, false
}

// restore stores a block again: one that is held, or one that was evicted and
// whose parent is held.
func (e *engine) restore() (kvevent.Event, bool) {
	for range 20 {
		if e.serial == 0 {
			break
		}
		h := mix64(e.life<<32 | (1 + e.rng.Uint64N(e.serial)))
		if p := e.parent[h]; p == 0 || e.held[p] {
			e.held[h] = true
			return e.event(p, []uint64{h}), true
		}
	}
	return kvevent.Event{}, false
}

// set is what the index should hold now.
func (e *engine) set() set {
	s := set{}
	for h := range e.held {
		chain := blockhash.Chain(nil, blockhash.Locals(nil, e.chains[h], modelBlock, blockhash.Key{}))
		for i := range e.parts {
			s[chain[len(chain)-1-i]] = true
		}
	}
	return s
}

// newIndex makes an index with one rank.
func newIndex(t testing.TB) *kvindex.Index {
	t.Helper()
	x := kvindex.New(kvindex.Options{})
	t.Cleanup(func() {
		if err := x.Close(); err != nil {
			t.Errorf("close index: %v", err)
		}
	})
	if err := x.AddRank(0, "w/dp0"); err != nil {
		t.Fatal(err)
	}
	return x
}

type fataler interface {
	Helper()
	Fatalf(string, ...any)
}

// holds returns what rank 0 holds.
func holds(t fataler, x *kvindex.Index) set {
	t.Helper()
	s := set{}
	if err := x.RankBlocks(0, func(seq, _ uint64) bool { s[seq] = true; return true }); err != nil {
		t.Fatalf("rank blocks: %v", err)
	}
	return s
}

func equalSet(t fataler, what string, want, got set) {
	t.Helper()
	if !maps.Equal(want, got) {
		t.Fatalf("%s: %d blocks, want %d (-want +got):\n%s", what, len(got), len(want), clipText(cmp.Diff(want, got)))
	}
}

func subset(t fataler, what string, of, got set) {
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

// newIndexOf is newIndex for tests that close the index themselves.
func newIndexOf(t fataler) *kvindex.Index {
	t.Helper()
	x := kvindex.New(kvindex.Options{})
	if err := x.AddRank(0, "w/dp0"); err != nil {
		t.Fatalf("add rank: %v", err)
	}
	return x
}
