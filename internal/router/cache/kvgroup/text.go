package kvgroup

import "github.com/dynctl/dynctl/internal/router/cache/blockhash"

// Text is what a prompt's blocks are made of. Groups that hold blocks of which no event
// told what they stand for compute the engine's names of the prompt's blocks from it, and
// find them by these. It is for one goroutine at a time.
type Text struct {
	tokens []uint32
	salt   string
	made   []made
	used   int // of made, for these tokens
}

// ByNames reports whether there are blocks of which no event told what they stand for and
// that a [Text] may find. It is for the goroutine that writes.
func (g *Groups) ByNames() bool { return g.nowhere > 0 && g.names != nil && !g.HashDiffers() }

// made are the names of a text's blocks, in one way to name them.
type made struct {
	algorithm, seed string
	size            int
	names           []uint64
}

// Set makes it that of a prompt with a salt, "" for none. It keeps the tokens. Without
// tokens no names are computed: those of a prompt with an adapter are not known.
func (t *Text) Set(tokens []uint32, salt string) { t.tokens, t.salt, t.used = tokens, salt, 0 }

// Names are the names, as events have them, that an engine with these traits gives to the
// text's full blocks of size tokens; nil when they are not known. They are computed once.
func (t *Text) Names(k *Traits, size int) []uint64 {
	for i := range t.made[:t.used] {
		if m := &t.made[i]; m.algorithm == k.HashAlgorithm && m.seed == k.HashSeed && m.size == size {
			return m.names
		}
	}
	if len(t.tokens) < size {
		return nil
	}
	engine := blockhash.NewEngineNames(k.HashAlgorithm, k.HashSeed)
	if engine == nil {
		return nil
	}
	if t.used == len(t.made) {
		t.made = append(t.made, made{})
	}
	m := &t.made[t.used]
	t.used++
	m.algorithm, m.seed, m.size, m.names = k.HashAlgorithm, k.HashSeed, size, m.names[:0]
	at, salt := append(blockhash.Name(nil), engine.Root()...), t.salt
	for rest := t.tokens; len(rest) >= size; rest = rest[size:] {
		at, salt = engine.Next(at[:0], at, rest[:size], salt), ""
		m.names = append(m.names, at.Short())
	}
	return m.names
}

// Forget drops the prompt and gives back memory of more than keep names.
func (t *Text) Forget(keep int) {
	t.Set(nil, "")
	for i := range t.made {
		if cap(t.made[i].names) > keep {
			t.made[i].names = nil
		}
	}
}
