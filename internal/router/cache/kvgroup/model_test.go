package kvgroup

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/property"
)

// The model is the rule in plain words, for prompts of tokens: for every length
// from the greatest down, it looks at every block that every group needs.

const routerBlock = 4

type modelGroup struct {
	kind   kvevent.CacheKind
	window int
	block  int // tokens
	copies map[string]int
}

type model struct {
	groups []modelGroup
	sizes  []int // of all blocks reported
	names  map[string]uint64
	chunk  int // tokens, 0 = not stated
}

// name is the engine's name of a prefix.
func (m *model) name(prefix []uint32) uint64 {
	k := fmt.Sprint(prefix)
	if m.names[k] == 0 {
		m.names[k] = uint64(len(m.names) + 1)
	}
	return m.names[k]
}

func (m *model) usable(prompt []uint32) int {
	for n := len(prompt) - 1; n > 0; n-- {
		if m.reusable(prompt, n) {
			return n
		}
	}
	return 0
}

// full is how far the full groups hold all: one size of blocks after the other, in the order
// of the groups, each no further than those before. Those of one size count as one.
func (m *model) full(prompt []uint32, finest int, parts bool) int {
	limit := len(prompt) - 1
	seen := map[int]bool{}
	for _, g := range m.groups {
		if g.kind != kvevent.FullAttention || seen[g.block] {
			continue
		}
		seen[g.block] = true
		has := func(end int) bool {
			for _, o := range m.groups {
				if o.kind == kvevent.FullAttention && o.block == g.block && o.copies[fmt.Sprint(prompt[:end])] == 0 {
					return false
				}
			}
			return true
		}
		reach := 0
		for reach+g.block <= limit && has(reach+g.block) {
			reach += g.block
		}
		whole := reach
		for end := whole + finest; parts && end < whole+g.block && end <= limit; end += finest {
			if has(end) {
				reach = end
			}
		}
		limit = reach
	}
	return limit
}

func (m *model) reusable(prompt []uint32, n int) bool {
	finest := m.sizes[0]
	for _, s := range m.sizes {
		finest = gcd(finest, s)
	}
	larger, fit := false, true
	for _, g := range m.groups {
		larger = larger || g.kind == kvevent.Mamba && g.block > finest
		fit = fit && (g.kind == kvevent.Mamba || g.kind == kvevent.FullAttention || g.block == finest)
	}
	if larger && fit {
		if n%finest != 0 {
			return false
		}
	} else {
		for _, g := range m.groups {
			if n%g.block != 0 {
				return false
			}
		}
	}
	for i := range m.groups {
		g := &m.groups[i]
		has := func(end int) bool { return g.copies[fmt.Sprint(prompt[:end])] > 0 }
		switch g.kind {
		case kvevent.FullAttention:
			if n > m.full(prompt, finest, larger && fit) {
				return false
			}
		case kvevent.Mamba:
			if !has(n) {
				return false
			}
		default:
			start := 0
			if g.kind == kvevent.ChunkedLocal && m.chunk > 0 {
				start = n / m.chunk * m.chunk
			}
			if g.kind == kvevent.SlidingWindow {
				for start = n; start > 0 && n-start < g.window-1; {
					start -= g.block
				}
			}
			for end := start + g.block; end <= n; end += g.block {
				if !has(end) {
					return false
				}
			}
		}
	}
	return true
}

// drawGroups makes a full group and up to three others.
func drawGroups(t *rapid.T) *model {
	m := &model{names: map[string]uint64{}, chunk: rapid.SampledFrom([]int{0, 4 * routerBlock, 6 * routerBlock}).Draw(t, "chunk")}
	kinds := []kvevent.CacheKind{kvevent.FullAttention, kvevent.SlidingWindow, kvevent.Mamba, kvevent.ChunkedLocal}
	for i := range rapid.IntRange(1, 4).Draw(t, "groups") {
		g := modelGroup{kind: kvevent.FullAttention, block: routerBlock, copies: map[string]int{}}
		if i > 0 {
			g.kind = rapid.SampledFrom(kinds).Draw(t, "kind")
			g.block *= rapid.SampledFrom([]int{1, 1, 1, 2}).Draw(t, "blocks")
		}
		if g.kind == kvevent.SlidingWindow {
			g.window = rapid.IntRange(0, 3).Draw(t, "window blocks")*g.block + rapid.IntRange(1, 3).Draw(t, "window rest")
		}
		m.sizes = append(m.sizes, g.block)
		m.groups = append(m.groups, g)
	}
	return m
}

// TestUsableAsTheModelSays plays random stores and removals of random groups.
func TestUsableAsTheModelSays(t *testing.T) {
	t.Parallel()
	property.Check(t, func(t *rapid.T) {
		m, g := drawGroups(t), New(routerBlock)
		g.Chunk = m.chunk
		places := make([]int, len(m.groups))
		for i := range places {
			places[i] = i
		}
		// In any order, as events without hashes report a group.
		for _, i := range rapid.Permutation(places).Draw(t, "reported") {
			g.Store(&Store{Group: int32(i), Kind: m.groups[i].kind, Window: m.groups[i].window, Block: m.groups[i].block})
		}
		draw := func() []uint32 {
			return rapid.SliceOfN(rapid.Uint32Range(0, 1), 12, 40).Draw(t, "prompt")
		}
		prompts := [][]uint32{draw(), draw()}
		prompts = append(prompts, append(slices.Clone(prompts[0]), draw()...))
		for range rapid.IntRange(4, 40).Draw(t, "steps") {
			p := rapid.SampledFrom(prompts).Draw(t, "of")
			i := rapid.IntRange(0, len(m.groups)-1).Draw(t, "group")
			k := &m.groups[i]
			if rapid.IntRange(0, 5).Draw(t, "what") > 0 {
				m.store(t, g, i, p)
			} else if whole := len(p) / k.block; whole > 0 {
				end := rapid.IntRange(1, whole).Draw(t, "block") * k.block
				key := fmt.Sprint(p[:end])
				k.copies[key] = max(0, k.copies[key]-1)
				g.Remove(int32(i), []uint64{m.name(p[:end])})
			}
		}
		for _, p := range prompts {
			m.judge(t, g, p)
		}
	})
}

// store stores some blocks of a prompt in a group, published as engines do: all of
// them in a row with their tokens, or the last one alone after tokens of several.
func (m *model) store(t *rapid.T, g *Groups, i int, p []uint32) {
	k := &m.groups[i]
	whole := len(p) / k.block
	if part := (len(p) - 1) / routerBlock * routerBlock; k.kind == kvevent.Mamba && part%k.block != 0 && rapid.Bool().Draw(t, "part") {
		k.copies[fmt.Sprint(p[:part])]++ // a state inside a block
		m.sizes = append(m.sizes, routerBlock)
		g.Store(&Store{Group: int32(i), Kind: k.kind, Block: routerBlock, Names: []uint64{m.name(p[:part])}})
		return
	}
	if whole == 0 {
		return
	}
	from := rapid.IntRange(0, whole-1).Draw(t, "from")
	e := Store{Group: int32(i), Kind: k.kind, Window: k.window, Block: k.block}
	if k.kind == kvevent.FullAttention {
		from = 0
		e.Whole = true
		e.Locals = blockhash.Locals(nil, p[:whole*k.block], routerBlock, blockhash.Key{})
	}
	for n := from; n < whole; n++ {
		end := (n + 1) * k.block
		k.copies[fmt.Sprint(p[:end])]++
		e.Names = append(e.Names, m.name(p[:end]))
	}
	if n := g.Store(&e); n != 0 {
		t.Fatalf("no room for %d blocks", n)
	}
}

func (m *model) judge(t *rapid.T, g *Groups, p []uint32) {
	full := m.groups[0]
	held := 0
	for (held+1)*full.block <= len(p) && full.copies[fmt.Sprint(p[:(held+1)*full.block])] > 0 {
		held++
	}
	// What stands for which prefix is known of the first group's blocks only while
	// it holds them, and it needs all of them.
	seq := blockhash.Chain(nil, blockhash.Locals(nil, p, routerBlock, blockhash.Key{}))
	g.First = 0
	want := m.usable(p)
	known := rapid.IntRange(0, held).Draw(t, "known overlap")
	if got := g.Usable(Prompt{Seq: seq, Tokens: len(p)}, known) * routerBlock; got != want {
		t.Fatalf("prompt of %d tokens, %d held by the first group, groups %+v: %d usable, the model says %d", len(p), held, m.groups, got, want)
	}
	// What exactly an engine that drops blocks comes to is for recordings of one. Where
	// full groups reach into a block, the one that is dropped may be the only whole one.
	if _, parts := g.unit(); parts {
		return
	}
	g.Drops = true
	defer func() { g.Drops = false }()
	got := g.Usable(Prompt{Seq: seq, Tokens: len(p)}, known) * routerBlock
	if kept := got > 0 && got == want && len(m.groups) == 1; got > want || kept {
		t.Fatalf("prompt of %d tokens, groups %+v: %d usable without the last block, the model says %d with it", len(p), m.groups, got, want)
	}
	if got > 0 && !m.reusable(p, got) {
		t.Fatalf("prompt of %d tokens, groups %+v: %d usable, not by the model", len(p), m.groups, got)
	}
}

// TestSizesWhoseProductOverflows: engines may report any block sizes. The least common
// multiple of these, in blocks of the router, is -1 in 64 bits.
func TestSizesWhoseProductOverflows(t *testing.T) {
	t.Parallel()
	p := make([]uint32, 64)
	g := New(routerBlock)
	locals := blockhash.Locals(nil, p, routerBlock, blockhash.Key{})
	names := make([]uint64, len(locals))
	for i := range names {
		names[i] = uint64(i + 1)
	}
	g.Store(&Store{Kind: kvevent.FullAttention, Block: routerBlock, Names: names, Locals: locals, Whole: true})
	g.Store(&Store{Group: 1, Kind: kvevent.Mamba, Block: routerBlock * 65537})
	g.Store(&Store{Group: 2, Kind: kvevent.SlidingWindow, Window: 8, Block: routerBlock * 42007935})
	g.Store(&Store{Group: 3, Kind: kvevent.SlidingWindow, Window: 8, Block: routerBlock * 6700417})
	if n := g.Usable(Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(p)}, len(locals)); n != 0 {
		t.Errorf("%d blocks are said to be usable", n)
	}
}

// TestOrderOfReports: an engine looks its groups up in the order of their numbers, whichever
// of them reported first. Here the first group holds 12 tokens and the second one 16: the
// second is looked up within 12, where it has 8, and no state is there.
func TestOrderOfReports(t *testing.T) {
	t.Parallel()
	p := make([]uint32, 17)
	seq := blockhash.Chain(nil, blockhash.Locals(nil, p, routerBlock, blockhash.Key{}))
	const first, second, state = int32(0), int32(1), int32(2)
	for _, reported := range [][]int32{{first, second, state}, {second, first, state}, {state, second, first}} {
		g := New(routerBlock)
		for _, i := range reported {
			switch i {
			case first:
				g.Store(&Store{Group: first, Kind: kvevent.FullAttention, Block: routerBlock, Whole: true, Names: []uint64{4, 8, 12}, Locals: blockhash.Locals(nil, p[:12], routerBlock, blockhash.Key{})})
			case second:
				g.Store(&Store{Group: second, Kind: kvevent.FullAttention, Block: 2 * routerBlock, Whole: true, Names: []uint64{8, 16}, Locals: blockhash.Locals(nil, p[:16], routerBlock, blockhash.Key{})})
			case state:
				g.Store(&Store{Group: state, Kind: kvevent.Mamba, Block: 2 * routerBlock})
				g.Store(&Store{Group: state, Kind: kvevent.Mamba, Block: routerBlock, Names: []uint64{12}})
			}
		}
		if got := g.Usable(Prompt{Seq: seq, Tokens: len(p)}, 0) * routerBlock; got != 0 {
			t.Errorf("reported in the order %v: %d tokens usable, want none", reported, got)
		}
	}
}
