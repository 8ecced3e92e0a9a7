package kvgroup

import (
	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
)

// maxTips bounds the blocks that a rank does not hold and whose full names are kept, since
// the next event of the same prompt begins behind one.
const maxTips = 8192

// names computes the engine's own names of blocks from tokens. Events have a part of each
// name only, so the whole of a block's name is known if that of all before it was.
type names struct {
	engine *blockhash.EngineNames
	known  map[uint64]link // by the name in events
	tips   []uint64        // of known, those that may not be held, in a ring
	next   int
	fits   bool // an event's names were as computed
	misfit bool // another's were not
	// seqs, before and whole are what place found, last is the name of the event's last block.
	seqs, before []uint64
	whole        []blockhash.Name
	last         uint64
}

// link is a block of which the whole name is known, and the prefix that it stands for.
type link struct {
	name blockhash.Name
	seq  uint64
}

// Know sets the traits, before the first event.
func (g *Groups) Know(t Traits) {
	g.Traits, g.names = t, nil
	if e := blockhash.NewEngineNames(t.HashAlgorithm, t.HashSeed); e != nil {
		g.names = &names{engine: e}
		g.names.clear()
	}
}

// Computes reports whether the engine's names of blocks are computed, so that it is
// known what they stand for where events do not say. It is for the goroutine that
// writes.
func (g *Groups) Computes() bool { return g.names != nil }

// Named reports whether the engine was seen to give names as computed. It is for the
// goroutine that writes.
func (g *Groups) Named() bool { return g.names != nil && g.names.fits }

// NamesSuffice reports whether blocks are found by their names alone: where names are computed
// as was seen, or nothing was seen yet and all groups are chunked. Whole chunks before a
// block are in no event then, so that a name can seldom be tested, and the engine continues
// from the end of a chunk whatever it holds. It is for the goroutine that writes.
func (g *Groups) NamesSuffice() bool {
	if g.Named() || g.names == nil || g.HashDiffers() || g.Chunk == 0 {
		return g.Named()
	}
	for i := range g.groups {
		if g.groups[i].kind != kvevent.ChunkedLocal {
			return false
		}
	}
	return true
}

// HashDiffers reports whether names were to be computed and the engine gave others only.
// One that fits proves what was stated: salts and images that are not in an event make
// other names, too. It is for the goroutine that writes.
func (g *Groups) HashDiffers() bool { return g.names != nil && g.names.misfit && !g.names.fits }

func (n *names) clear() {
	n.known, n.tips, n.next = map[uint64]link{}, nil, 0
}

// resolve finds which of an event's blocks its names stand for. It returns false if that
// cannot be known: the name of the parent is not, or the names are made of more than
// tokens and a salt, or otherwise. Afterwards seqs and before are, for each name, the
// prefix and the name of the block before it, 0 for none.
func (n *names) resolve(e *Store, size int) bool {
	if e.Foreign || len(e.Locals) == 0 {
		return false
	}
	at, seq, parent := n.engine.Root(), uint64(0), uint64(0)
	if e.HasParent {
		l, ok := n.known[e.Parent]
		if !ok {
			return false
		}
		at, seq, parent = l.name, l.seq, e.Parent
	}
	n.seqs, n.before, n.whole = n.seqs[:0], n.before[:0], n.whole[:0]
	salt := e.Salt
	for i, local := range e.Locals {
		if i == 0 && !e.HasParent {
			seq = local
		} else {
			seq, salt = blockhash.Next(seq, local), ""
		}
		at = n.engine.Next(nil, at, e.Tokens[i*size:(i+1)*size], salt)
		short := at.Short()
		if k := len(n.seqs); k < len(e.Names) && e.Names[k] == short {
			n.seqs, n.before, n.whole = append(n.seqs, seq), append(n.before, parent), append(n.whole, at)
		}
		parent = short
	}
	if len(n.seqs) < len(e.Names) {
		n.misfit = true
		return false
	}
	n.fits = n.fits || len(e.Names) > 0
	for j, name := range e.Names {
		n.known[name] = link{n.whole[j], n.seqs[j]}
	}
	n.known[parent] = link{at, seq}
	n.last = parent
	return true
}

// tip keeps the whole name of a block that is not held, for a while.
func (g *Groups) tip(name uint64) {
	n := g.names
	if _, ok := n.known[name]; !ok {
		return
	}
	if len(n.tips) < maxTips {
		n.tips = append(n.tips, name)
		return
	}
	old := n.tips[n.next]
	if _, held := g.byName[old]; !held {
		delete(n.known, old)
	}
	n.tips[n.next] = name
	n.next = (n.next + 1) % maxTips
}
