package kvgroup

import "github.com/dynctl/dynctl/internal/kvevent"

// Prompt is what a rank's groups are queried about.
type Prompt struct {
	// Seq are the sequence hashes of the prompt's full router blocks.
	Seq []uint64
	// Tokens is the length of the prompt, Block that of a router block.
	Tokens, Block int
	// Text is nil where the prompt's tokens are not known.
	Text *Text
}

// Usable returns how many leading router blocks of a prompt the engine reuses. The
// last token is always computed, so it is fewer than the prompt's. The first
// overlap blocks are known to be held by the group First, as whole blocks.
func (g *Groups) Usable(p Prompt, overlap int) int {
	for {
		l := look{g: g, seq: p.Seq, left: maxLooks + 4*len(p.Seq)}
		n := l.usable(&p, overlap)
		if l.lacks == 0 {
			return n
		}
		// Writers do not wait for names to be computed. What was seen may have changed
		// meanwhile, so all is looked up again; half as many names again keep that
		// rare.
		if known := len(l.names); len(p.Text.Names(&l.traits, g.size, max(l.lacks, known+known/2))) < l.lacks {
			p.Text = nil
		}
	}
}

// usable is Usable as far as names are computed; lacks says that more are wanted.
func (l *look) usable(p *Prompt, overlap int) int {
	g := l.g
	g.RLock()
	defer g.RUnlock()
	if len(g.groups) == 0 || g.Mismatch() != "" {
		return 0
	}
	if p.Text != nil && g.ByNames() {
		l.traits = g.Traits
		l.names, l.named = p.Text.computed(&l.traits, g.size), len(p.Text.tokens)/g.size
	}
	unit, parts := g.unit()
	limit := max(0, min((p.Tokens-1)/g.size, len(p.Seq)))
	if g.Drops {
		return l.dropped(overlap, limit, unit, parts)
	}
	for _, i := range g.order { // as the engine does: each no further than those before
		if k := &g.groups[i]; k.kind == kvevent.FullAttention {
			held := 0
			if k.id == g.First {
				held = overlap
			}
			limit = l.reach(i, held, limit, unit, parts)
		}
	}
	n := limit / unit * unit
	for agreed := 0; n > 0 && agreed < len(g.groups); {
		for _, i := range g.order {
			was := n
			if n = l.reusable(i, n, unit); n == was {
				agreed++
				continue
			}
			agreed = 1
		}
		if l.left <= 0 {
			return 0
		}
	}
	return n
}

// maxUnit is longer than any prompt. It bounds a unit, so that no product of
// reported block sizes overflows.
const maxUnit = 1 << 31

// unit returns what lengths are multiples of, in router blocks, and whether full
// groups reach into a block.
func (g *Groups) unit() (unit int, parts bool) {
	larger, fit := false, true
	unit = 1
	for i := range g.groups {
		k := &g.groups[i]
		larger = larger || k.kind == kvevent.Mamba && k.blocks > g.finest
		fit = fit && (k.kind == kvevent.FullAttention || k.kind == kvevent.Mamba || k.blocks == g.finest)
		if k.blocks > 0 {
			unit = min(unit/gcd(unit, k.blocks)*k.blocks, maxUnit)
		}
	}
	if larger && fit {
		return g.finest, true
	}
	return unit, false
}

// look answers for one prompt.
type look struct {
	g    *Groups
	seq  []uint64
	left int // lookups
	// names are those that the engine gives to the prompt's first blocks, with these
	// traits, as far as they are computed; they can be for the first named blocks. lacks is
	// the first length that was looked for beyond them, which ends the look; 0 for none.
	names  []uint64
	named  int
	lacks  int
	traits Traits
}

// find finds the block that ends at a length.
func (l *look) find(end int) (at uint32, ok bool) {
	at, ok = l.g.bySeq[l.seq[end-1]]
	switch {
	case ok:
	case end <= len(l.names):
		at, ok = l.g.byName[l.names[end-1]]
	case end <= l.named && l.lacks == 0:
		l.lacks, l.left = end, 0
	}
	return at, ok
}

// holds reports whether a group has the block that ends at a length.
func (l *look) holds(i, end int) bool {
	l.left--
	at, ok := l.find(end)
	return ok && l.g.blocks[at].copies[i] > 0
}

// reach returns how far the full groups that are looked up with the group i hold all from
// the start, at most limit. The first overlap blocks are held by the group First.
func (l *look) reach(i, overlap, limit, unit int, parts bool) int {
	g := l.g
	size := g.groups[i].blocks
	if size == 0 {
		return 0 // it has stored nothing yet
	}
	end := limit / size * size
	for j := range g.groups {
		if !g.together(i, j) {
			continue
		}
		held := 0
		if g.groups[j].id == g.First {
			held = min(overlap, end) / size * size
		}
		for held < end && l.left > 0 && l.holds(j, held+size) {
			held += size
		}
		end = held
	}
	if parts {
		for tail := min(limit, end+size-unit) / unit * unit; tail > end && l.left > 0; tail -= unit {
			if l.allHold(i, tail) {
				return tail
			}
		}
	}
	return end
}

// allHold reports whether each of the groups that are looked up with the group i has the
// block that ends at a length.
func (l *look) allHold(i, end int) bool {
	for j := range l.g.groups {
		if l.g.together(i, j) && !l.holds(j, end) {
			return false
		}
	}
	return true
}

// reusable returns the largest length, a multiple of unit and at most n, at which
// the group can go on.
func (l *look) reusable(i, n, unit int) int {
	k := &l.g.groups[i]
	if k.blocks == 0 {
		return 0 // it has stored nothing yet
	}
	switch k.kind {
	case kvevent.FullAttention:
		return n
	case kvevent.Mamba:
		for n > 0 && l.left > 0 && !l.holds(i, n) {
			n -= unit
		}
		return n
	}
	for n > 0 && l.left > 0 {
		gap := l.gap(i, n, l.start(k, n))
		if gap == 0 {
			return n
		}
		// No length from there on to n can do without that block.
		n = (gap - 1) / unit * unit
	}
	return n
}

// start returns where the blocks begin that a group needs to go on at n.
func (l *look) start(k *group, n int) int {
	size := k.blocks * l.g.size
	switch {
	case k.kind == kvevent.ChunkedLocal && l.g.Chunk > 0:
		return n * l.g.size / l.g.Chunk * l.g.Chunk / size * k.blocks
	case k.kind != kvevent.SlidingWindow || k.window <= 0:
		return 0 // all of it is needed for certain
	}
	return max(0, n-(k.window-1+size-1)/size*k.blocks)
}

// gap returns the end of the last block from start to n that the group does not
// hold, 0 if there is none.
func (l *look) gap(i, n, start int) int {
	if n <= start {
		return 0
	}
	size, blocks := l.g.groups[i].blocks, l.g.blocks
	at, ok := l.find(n)
	for end := n; ; {
		if !ok || blocks[at].copies[i] == 0 {
			l.left -= (n-end)/size + 1
			return end
		}
		if end -= size; end <= start {
			l.left -= (n - end) / size
			return 0
		}
		// Chains mostly lie in a row, or are linked; else the block is looked up.
		seq := l.seq[end-1]
		if at > 0 && blocks[at-1].seq == seq {
			at--
		} else if at = blocks[at].before; int(at) >= len(blocks) || blocks[at].seq != seq {
			at, ok = l.find(end)
		}
	}
}
