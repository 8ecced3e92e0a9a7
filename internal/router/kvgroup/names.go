package kvgroup

import (
	"github.com/dynctl/dynctl/internal/router/blockhash"
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
	wrong  bool
	// seqs and before are what place found, last is the name of the event's last block.
	seqs, before []uint64
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

// Named reports whether the engine's names of blocks are computed, which tells what they
// stand for where events do not; HashDiffers whether they were to be, and the first that
// could be compared was another one. Both are for the goroutine that writes.
func (g *Groups) Named() bool       { return g.names != nil && !g.names.wrong }
func (g *Groups) HashDiffers() bool { return g.names != nil && g.names.wrong }

func (n *names) clear() {
	n.known, n.tips, n.next = map[uint64]link{}, nil, 0
}

// place finds which of an event's blocks its names stand for. It returns false if that
// cannot be known: the name of the parent is not, or the names are made of more than
// tokens and a salt. Afterwards seqs and before are, for each name, the prefix and the
// name of the block before it, 0 for none.
func (n *names) place(e *Store, size int) bool {
	if n.wrong || e.Foreign || len(e.Locals) == 0 {
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
	n.seqs, n.before = n.seqs[:0], n.before[:0]
	salt, last := e.Salt, len(e.Locals)-1
	for i, local := range e.Locals {
		if i == 0 && !e.HasParent {
			seq = local
		} else {
			seq, salt = blockhash.Next(seq, local), ""
		}
		at = n.engine.Next(nil, at, e.Tokens[i*size:(i+1)*size], salt)
		short := at.Short()
		found := len(n.seqs) < len(e.Names) && e.Names[len(n.seqs)] == short
		if found {
			n.seqs, n.before = append(n.seqs, seq), append(n.before, parent)
		}
		if _, ok := n.known[short]; !ok && (found || i == last) {
			n.known[short] = link{at, seq}
		}
		parent = short
	}
	n.last = parent
	if len(n.seqs) < len(e.Names) {
		n.wrong = true
		n.clear()
	}
	return !n.wrong
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
