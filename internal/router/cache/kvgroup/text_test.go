package kvgroup

import (
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
)

// stated are the traits of an engine whose names of blocks can be computed.
var stated = Traits{HashAlgorithm: "sha256", HashSeed: "7"}

// named is a prompt of so many blocks and a token, its hashes, and its blocks' names.
func named(blocks int) (tokens []uint32, seq, names []uint64) {
	tokens = make([]uint32, blocks*routerBlock+1)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	engine := blockhash.NewEngineNames(stated.HashAlgorithm, stated.HashSeed)
	at := engine.Root()
	for rest := tokens; len(rest) >= routerBlock; rest = rest[routerBlock:] {
		at = engine.Next(nil, at, rest[:routerBlock], "")
		names = append(names, at.Short())
	}
	return tokens, blockhash.Chain(nil, blockhash.Locals(nil, tokens, routerBlock, blockhash.Key{})), names
}

// holding is a rank of full attention, with blocks of which no event said what they stand
// for: those with these names, and another.
func holding(names []uint64) *Groups {
	g := New(routerBlock)
	g.Know(stated)
	g.Store(&Store{Kind: kvevent.FullAttention, Block: routerBlock, Names: append(slices.Clone(names), 1), Parent: 2, HasParent: true})
	return g
}

// TestNamesAsFarAsLookedFor: names are computed no further than blocks are looked for by
// them, and are the same whether they are asked for at once or bit by bit, with a salt, and
// by memory that had an earlier prompt.
func TestNamesAsFarAsLookedFor(t *testing.T) {
	t.Parallel()
	tokens, seq, names := named(64)
	var text Text
	for _, held := range []int{64, 0, 8} {
		text.Set(tokens, "")
		if n := holding(names[:held]).Usable(Prompt{Seq: seq, Tokens: len(tokens), Block: routerBlock, Text: &text}, 0); n != held {
			t.Errorf("%d blocks usable, not %d", n, held)
		}
		if n := len(text.Names(&stated, routerBlock, 0)); n > min(2*(held+1), 64) {
			t.Errorf("%d names for %d blocks that are held", n, held)
		}
	}
	text.Set(tokens, "salt")
	for _, n := range []int{0, 1, 1, 5, 2, 64, 65} {
		if got := text.Names(&stated, routerBlock, n); len(got) < min(n, 64) {
			t.Errorf("%d names, not %d", len(got), n)
		}
	}
	var once Text
	once.Set(tokens, "salt")
	salted := once.Names(&stated, routerBlock, 64)
	if bit := text.Names(&stated, routerBlock, 64); !slices.Equal(bit, salted) || slices.Contains(salted, names[0]) {
		t.Errorf("bit by bit %x, at once %x", bit, salted)
	}
	text.Set(tokens, "")
	if got := text.Names(&stated, routerBlock, 64); !slices.Equal(got, names) {
		t.Errorf("without a salt %x, not %x", got, names)
	}
	if got := text.Names(&Traits{HashAlgorithm: "another"}, routerBlock, 64); len(got) != 0 {
		t.Errorf("of an algorithm that is not known: %x", got)
	}
}

// atWork calls a function before each name that is computed.
type atWork struct {
	*blockhash.EngineNames
	name func()
}

func (w atWork) Next(dst []byte, before blockhash.Name, tokens []uint32, salt string) blockhash.Name {
	w.name()
	return w.EngineNames.Next(dst, before, tokens, salt)
}

// TestWritersDoNotWaitForNames: while names are computed for an answer, events can be
// written, and the answer is what holds after those. Nor does it end where they come with
// every name.
func TestWritersDoNotWaitForNames(t *testing.T) {
	t.Parallel()
	const blocks, held = 64, 32
	tokens, seq, names := named(blocks)
	store := func(g *Groups, n int) {
		g.Store(&Store{Kind: kvevent.FullAttention, Block: routerBlock, Names: names[n : n+1], Parent: 2, HasParent: true})
	}
	for _, tt := range []struct {
		name  string
		write func(g *Groups, computed int)
		want  int
	}{
		{"nothing", func(*Groups, int) {}, held},
		{"one more each time", func(g *Groups, computed int) { store(g, min(held+computed, blocks)-1) }, blocks},
		{"its first is removed late", func(g *Groups, computed int) {
			if computed == held {
				g.Remove(0, names[:1])
			}
		}, 0},
		{"all are forgotten", func(g *Groups, computed int) {
			if computed == held/2 {
				g.Clear()
			}
		}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			g, computed := holding(names[:held]), 0
			engine := atWork{blockhash.NewEngineNames(stated.HashAlgorithm, stated.HashSeed), func() {
				computed++
				if !g.TryLock() {
					t.Error("writers wait for a name")
					return
				}
				tt.write(g, computed)
				g.Unlock()
			}}
			text := Text{ways: []made{{algorithm: stated.HashAlgorithm, seed: stated.HashSeed, engine: engine}}}
			text.Set(tokens, "")
			if n := g.Usable(Prompt{Seq: seq, Tokens: len(tokens), Block: routerBlock, Text: &text}, 0); n != tt.want {
				t.Errorf("%d blocks usable, not %d", n, tt.want)
			}
			if computed == 0 || computed > blocks {
				t.Errorf("%d names computed for a prompt of %d blocks", computed, blocks)
			}
		})
	}
}

// BenchmarkUsableByNames is the overlap of a new prompt of 2,048 blocks, of which a rank has
// so many that are found by their names only.
func BenchmarkUsableByNames(b *testing.B) {
	for _, bb := range []struct {
		name string
		held int
	}{{"none held", 0}, {"128 held", 128}, {"all held", 2048}} {
		b.Run(bb.name, func(b *testing.B) {
			tokens, seq, names := named(2048)
			g := holding(names[:bb.held])
			var text Text
			b.ReportAllocs()
			for b.Loop() {
				text.Set(tokens, "")
				if n := g.Usable(Prompt{Seq: seq, Tokens: len(tokens), Block: routerBlock, Text: &text}, 0); n != bb.held {
					b.Fatal(n)
				}
			}
		})
	}
}
