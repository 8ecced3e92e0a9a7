package kvgroup

import "github.com/dynctl/dynctl/internal/blockhash"

// Text is what a prompt's blocks are made of. Groups that hold blocks whose prefix no event has
// named compute the engine's names of the prompt's blocks from it, and find the blocks by these.
// It is for one goroutine at a time.
type Text struct {
	tokens []uint32
	salt   string
	ways   []made
	used   int // of ways, for these tokens
}

// ByNames reports whether there are blocks whose prefix no event has named, and that a [Text]
// may find. It is for the goroutine that writes.
func (g *Groups) ByNames() bool { return g.unresolved > 0 && g.names != nil && !g.HashDiffers() }

// made are the names of a text's first blocks, in one way to name them.
type made struct {
	algorithm, seed string
	size            int
	engine          namer // nil when these names cannot be computed
	names           []uint64
	at              blockhash.Name // the whole of the last one
}

// namer computes names, as [blockhash.EngineNames] does.
type namer interface {
	Root() blockhash.Name
	Next(dst []byte, before blockhash.Name, tokens []uint32, salt string) blockhash.Name
}

// Set makes it that of a prompt with a salt, "" for none. It keeps the tokens. Without
// tokens no names are computed: those of a prompt with an adapter are not known.
func (t *Text) Set(tokens []uint32, salt string) { t.tokens, t.salt, t.used = tokens, salt, 0 }

// Names are the names, as events have them, that an engine with these traits gives to the
// text's first full blocks of size tokens: to n of them or more, or all if there are fewer;
// none when they are not known. Each is computed once, when it is first asked for.
func (t *Text) Names(k *Traits, size, n int) []uint64 {
	m := t.way(k, size)
	if m == nil {
		m = t.begin(k, size)
	}
	if m.engine == nil {
		return nil
	}
	for n = min(n, len(t.tokens)/size); len(m.names) < n; {
		done, salt := len(m.names), ""
		if done == 0 {
			m.at, salt = append(m.at[:0], m.engine.Root()...), t.salt
		}
		m.at = m.engine.Next(m.at[:0], m.at, t.tokens[done*size:(done+1)*size], salt)
		m.names = append(m.names, m.at.Short())
	}
	return m.names
}

// computed are the names that were computed already.
func (t *Text) computed(k *Traits, size int) []uint64 {
	if m := t.way(k, size); m != nil {
		return m.names
	}
	return nil
}

// way finds the names in one way, nil when they were not asked for yet.
func (t *Text) way(k *Traits, size int) *made {
	for i := range t.ways[:t.used] {
		if m := &t.ways[i]; m.algorithm == k.HashAlgorithm && m.seed == k.HashSeed && m.size == size {
			return m
		}
	}
	return nil
}

// begin begins the names in one more way.
func (t *Text) begin(k *Traits, size int) *made {
	if t.used == len(t.ways) {
		t.ways = append(t.ways, made{})
	}
	m := &t.ways[t.used]
	t.used++
	if m.algorithm != k.HashAlgorithm || m.seed != k.HashSeed {
		m.algorithm, m.seed, m.engine = k.HashAlgorithm, k.HashSeed, nil
		if e := blockhash.NewEngineNames(k.HashAlgorithm, k.HashSeed); e != nil {
			m.engine = e
		}
	}
	m.size, m.names = size, m.names[:0]
	return m
}

// Forget drops the prompt and gives back memory of more than keep names.
func (t *Text) Forget(keep int) {
	t.Set(nil, "")
	for i := range t.ways {
		if cap(t.ways[i].names) > keep {
			t.ways[i].names = nil
		}
	}
}
