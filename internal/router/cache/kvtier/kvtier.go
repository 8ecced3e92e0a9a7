// Package kvtier keeps account of the blocks that one rank has outside its device:
// in the memory of its host, on disk, in a store that it shares with others.
//
// An engine takes what its device holds of a prompt from the start, and continues
// with what the other tiers hold, block by block, whichever tier has the next one. It does
// not come back to the device after that (vLLM's offloading connector, SGLang's
// hierarchical cache). So a block counts when all before it are on the device or
// counted, too.
//
// Events of these tiers name blocks by the engine's hashes, and many have no tokens:
// what prefix a name stands for is learned from the device's events of the same name,
// before or after. Until then the block counts for no prompt.
package kvtier

import (
	"sync"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/route"
)

// maxBlocks bounds the blocks of one rank, maxWidth the router blocks in one of them.
const (
	maxBlocks = 4 << 20
	maxWidth  = 1 << 10
)

// Tier is where a block is.
type Tier uint8

// The tiers, the fastest first.
const (
	CPU Tier = iota
	Disk
	Remote
	tiers
)

// Of returns the tier that an event is about, false for the device and for media that
// nothing is known of. Blocks that the engine says are not its own are remote.
func Of(e *kvevent.Event) (Tier, bool) {
	switch {
	case e.Medium == kvevent.GPU || e.Medium == kvevent.OtherMedium:
		return 0, false
	case e.Locality == kvevent.Remote || e.Medium == kvevent.External:
		return Remote, true
	case e.Medium == kvevent.Disk:
		return Disk, true
	}
	return CPU, true
}

// Tiers are the blocks of one rank outside its device. One goroutine writes, between
// Lock and Unlock once others read; Extend and Blocks may be called by any.
type Tiers struct {
	sync.RWMutex

	blocks     []block
	free       []uint32
	byName     map[uint64]uint32
	bySeq      map[uint64]uint32
	held       route.Tiers
	unresolved int            // blocks of which it is not known what prefix they stand for
	widths     map[uint16]int // blocks by their width
	widest     int            // greatest width of a block
}

// block is one name. seq is the router's hash of the prefix that it stands for, 0 while
// that is not known; width is the router blocks at the prefix's end that it holds.
type block struct {
	name, seq uint64
	width     uint16
	in        uint8 // a bit for each tier
}

// New makes an empty account.
func New() *Tiers {
	t := &Tiers{}
	t.Clear()
	return t
}

// Clear forgets all blocks.
func (t *Tiers) Clear() {
	t.blocks, t.free, t.held, t.unresolved, t.widest = nil, nil, route.Tiers{}, 0, 0
	t.byName, t.bySeq, t.widths = map[uint64]uint32{}, map[uint64]uint32{}, map[uint16]int{}
}

// ClearTier forgets what one tier holds.
func (t *Tiers) ClearTier(tier Tier) {
	for at := range t.blocks {
		t.leave(uint32(at), tier)
	}
}

// Store adds a block to a tier. seq is the hash of the prefix that it stands for, 0 if
// that is not known, width how many router blocks at its end it holds. It returns false
// when there is no room.
func (t *Tiers) Store(tier Tier, name, seq uint64, width int) bool {
	if width < 1 || width > maxWidth {
		return false
	}
	at, ok := t.byName[name]
	if !ok {
		if n := len(t.free); n > 0 {
			at, t.free = t.free[n-1], t.free[:n-1]
		} else {
			if len(t.blocks) == maxBlocks {
				return false
			}
			at = uint32(len(t.blocks))
			t.blocks = append(t.blocks, block{})
		}
		t.blocks[at] = block{name: name}
		t.byName[name] = at
		t.unresolved++
	}
	b := &t.blocks[at]
	if was := b.width; was != uint16(width) {
		b.width = uint16(width)
		t.widths[b.width]++
		t.widest = max(t.widest, width)
		t.narrow(was)
	}
	if b.in&(1<<tier) == 0 {
		b.in |= 1 << tier
		*t.count(tier)++
	}
	if seq != 0 {
		t.Learn(name, seq)
	}
	return true
}

// Learn notes what prefix a name stands for; a name that no tier holds is ignored.
func (t *Tiers) Learn(name, seq uint64) {
	at, ok := t.byName[name]
	if !ok || seq == 0 || t.blocks[at].seq == seq {
		return
	}
	b := &t.blocks[at]
	t.unresolve(at)
	b.seq = seq
	t.unresolved--
	t.bySeq[seq] = at
}

// unresolve forgets what prefix a block stands for.
func (t *Tiers) unresolve(at uint32) {
	b := &t.blocks[at]
	if b.seq == 0 {
		return
	}
	if t.bySeq[b.seq] == at {
		delete(t.bySeq, b.seq)
	}
	b.seq = 0
	t.unresolved++
}

// Seq returns what prefix a name stands for, 0 when that is not known.
func (t *Tiers) Seq(name uint64) uint64 {
	if at, ok := t.byName[name]; ok {
		return t.blocks[at].seq
	}
	return 0
}

// Unresolved reports whether a tier holds the name and it is not known what it stands for.
func (t *Tiers) Unresolved(name uint64) bool {
	if t.unresolved == 0 {
		return false
	}
	at, ok := t.byName[name]
	return ok && t.blocks[at].seq == 0
}

// AnyUnresolved reports whether there is a block whose prefix is not known.
func (t *Tiers) AnyUnresolved() bool { return t.unresolved > 0 }

// Remove takes a block from a tier. One that the tier does not hold is ignored.
func (t *Tiers) Remove(tier Tier, name uint64) {
	if at, ok := t.byName[name]; ok {
		t.leave(at, tier)
	}
}

// leave takes a block from a tier, and forgets it when no other one holds it.
func (t *Tiers) leave(at uint32, tier Tier) {
	b := &t.blocks[at]
	if b.in&(1<<tier) == 0 {
		return
	}
	*t.count(tier)--
	if b.in &^= 1 << tier; b.in != 0 {
		return
	}
	t.unresolve(at)
	t.unresolved--
	delete(t.byName, b.name)
	t.narrow(b.width)
	*b = block{}
	t.free = append(t.free, at)
}

// narrow counts one block fewer of a width; width 0 is no block.
func (t *Tiers) narrow(width uint16) {
	if width == 0 {
		return
	}
	if t.widths[width]--; t.widths[width] > 0 {
		return
	}
	delete(t.widths, width)
	if int(width) == t.widest {
		t.widest = 0
		for w := range t.widths {
			t.widest = max(t.widest, int(w))
		}
	}
}

func (t *Tiers) count(tier Tier) *uint32 { return at(&t.held, tier) }

func at(d *route.Tiers, tier Tier) *uint32 {
	return [tiers]*uint32{&d.CPU, &d.Disk, &d.Remote}[tier]
}

// Blocks returns how many of the engine's blocks each tier holds.
func (t *Tiers) Blocks() route.Tiers {
	t.RLock()
	defer t.RUnlock()
	return t.held
}

// Extend returns how many router blocks of a prompt the tiers hold behind the first from,
// which the device holds, up to limit. seq are the sequence hashes of the prompt's
// blocks. A block in several tiers counts for the fastest.
//
// A block of a tier may be larger than the device's, and begin before from. Engines load
// nothing that is shorter than one of the largest. With drop, the engine computes the last
// block of what it finds again.
func (t *Tiers) Extend(seq []uint64, from, limit int, drop bool) (d route.Tiers) {
	t.RLock()
	defer t.RUnlock()
	limit = min(limit, len(seq))
	n, last := from, from
	var was route.Tiers // before the last block
	for n < limit {
		next, before := n, d
		for end := n + 1; end <= min(limit, n+t.widest); end++ {
			i, ok := t.bySeq[seq[end-1]]
			if !ok || end-int(t.blocks[i].width) > n {
				continue
			}
			for tier := range tiers {
				if t.blocks[i].in&(1<<tier) != 0 {
					*at(&d, tier) += uint32(end - n)
					break
				}
			}
			next = end
			break
		}
		if next == n {
			break
		}
		n, last, was = next, n, before
	}
	if drop {
		n, d = last, was
	}
	if n-from < t.widest {
		return route.Tiers{}
	}
	return d
}
