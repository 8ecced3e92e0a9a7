package kvindex

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// A node is a run of blocks that is never split: runs that diverge from it hang off any of its blocks,
// so that a block reference never goes stale while the block lives. Nodes are reused but never
// unmapped. parent, off, first and depth are fixed while the node is linked.
//
// For readers, who take no lock: every block below len was visible before, in the directory and in its
// chunk; a cut of the run (len going down) raises ver first, so that a reader that saw blocks that
// were replaced meanwhile notices and starts again.
type node struct {
	parent uint32
	off    uint32 // blocks of the parent's run above this one
	first  uint64 // local hash of block 0
	ver    atomic.Uint32
	len    atomic.Uint32 // blocks
	dir    atomic.Uint32 // array of the chunk of each 16 blocks
	mem    atomic.Uint32 // array of members: word 0 counts the others; dead = the node is going away
	hits   atomic.Uint32 // lookups that ended here
	depth  uint32        // blocks of the prefix above the run
	mu     sync.Mutex    // guards all but parent, off, first, depth; next and prev are under the parent's
	kid    uint32        // first child
	next   uint32        // siblings
	prev   uint32
	kids   uint32 // children, and threads that are about to fill the node
}

const (
	dead   = 1<<32 - 1
	maxRun = 1 << 16 // blocks in a run; a longer chain goes on in a child
	// retries bound how often a lookup starts again because a run was cut under its eyes.
	retries = 16
)

// pending is a stretch of blocks that the rank now holds and whose names go into its table.
type pending struct {
	ref uint32
	at  uint32 // index of the first name
	n   uint16
	own bool // the chunk's names may differ
}

func (x *Index) chunkAt(nd *node, off uint32) uint32 {
	return loadHalf(&x.m.dir(nd.dir.Load())[off/chunkLen])
}

// trim drops the tail of the run that no rank holds and no child needs. It reports whether the node is
// dead, which is when nothing is left of it; then the caller buries it after unlocking.
func (x *Index) trim(c *cache, n uint32, nd *node) bool {
	l := nd.len.Load()
	if l > 0 {
		keep := x.keeps(n, nd)
		to := l
		for to > keep {
			ch := x.chunkAt(nd, to-1)
			m := x.m.meta(ch)
			if m.kids > 0 {
				break
			}
			to = max(keep, uint32(m.index)*chunkLen)
		}
		if to < l {
			nd.ver.Add(1)
			nd.len.Store(to)
			d := x.m.dir(nd.dir.Load())
			for i := (to + chunkLen - 1) / chunkLen; i < (l+chunkLen-1)/chunkLen; i++ {
				c.retire(kindChunk, loadHalf(&d[i]))
			}
			c.blocks -= int64(l - to)
			l = to
		}
	}
	if l > 0 || nd.kids > 0 || n == 0 {
		return false
	}
	c.retireArray(nd.mem.Load())
	nd.mem.Store(dead)
	c.retireArray(nd.dir.Load())
	return true
}

// bury unlinks dead nodes from the edges and their parents, whose tails may go in turn.
func (x *Index) bury(c *cache, n uint32) {
	for {
		nd := x.m.node(n)
		x.edges.remove(n)
		p := nd.parent
		pd := x.m.node(p)
		pd.mu.Lock()
		x.unlink(pd, n, nd)
		died := x.trim(c, p, pd)
		pd.mu.Unlock()
		c.retire(kindNode, n)
		c.nodes--
		if !died {
			return
		}
		n = p
	}
}

// link makes n a child of p, under p's lock.
func (x *Index) link(p uint32, pd *node, n uint32, nd *node) {
	nd.prev, nd.next = 0, pd.kid
	if pd.kid != 0 {
		x.m.node(pd.kid).prev = n
	}
	pd.kid = n
	pd.kids++
	if p != 0 {
		x.m.meta(x.chunkAt(pd, nd.off-1)).kids++
	}
}

func (x *Index) unlink(pd *node, n uint32, nd *node) {
	if nd.prev != 0 {
		x.m.node(nd.prev).next = nd.next
	} else {
		pd.kid = nd.next
	}
	if nd.next != 0 {
		x.m.node(nd.next).prev = nd.prev
	}
	nd.next = n // shows a browser that it has lost its way
	pd.kids--
	if nd.parent != 0 {
		x.m.meta(x.chunkAt(pd, nd.off-1)).kids--
	}
}

// pend notes that blocks [lo,hi) of nd are to get names[at:].
func (x *Index) pend(c *cache, nd *node, lo, hi, at uint32, own bool) {
	for lo < hi {
		k := lo % chunkLen
		n := min(chunkLen-k, hi-lo)
		c.pend = append(c.pend, pending{ref: x.chunkAt(nd, lo)*chunkLen + k, at: at, n: uint16(n), own: own})
		lo, at = lo+n, at+n
	}
}

// hold lets the rank hold blocks [from,to) of the run, of which names[at:] are the names, with room for
// at most budget new ones. It returns the end of what it did and the number of new ones. The rank holds
// the block before from, unless from is 0; it has place i with entry e.
func (x *Index) hold(k *rankState, c *cache, n uint32, nd *node, i int, e uint64, from, to, at, budget uint32, own bool) (end, fresh uint32) {
	a := x.m.array(nd.mem.Load())
	cut := uint32(e >> 32)
	if e&extra == 0 {
		if to <= cut {
			return to, 0
		}
		end = min(to, cut+budget)
		if end > cut {
			x.pend(c, nd, cut, end, at+cut-from, own)
			storeWord(&a[i], uint64(end)<<32|e&0xffffffff)
		}
		return end, end - cut
	}
	b := x.extras(n).take(n, k.slot)
	for end = from; end < to; end++ {
		if end < cut || hasBit(b, end) {
			continue
		}
		if fresh == budget {
			break
		}
		fresh++
		x.pend(c, nd, end, end+1, at+end-from, own)
		b = setBit(b, end)
	}
	x.storeExtra(k, n, &a[i], cut, b)
	return end, fresh
}

// extend appends blocks to the end of the run, as many as fit. It returns their number.
func (x *Index) extend(c *cache, n uint32, nd *node, names, locals []uint64) uint32 {
	l := nd.len.Load()
	want := min(uint32(len(locals)), maxRun-l)
	h := nd.dir.Load()
	if chunks := int(l+want+chunkLen-1) / chunkLen; h == 0 || chunks > len(x.m.dir(h)) {
		class := uint32(0)
		for 4<<class < chunks {
			class++
		}
		h2 := c.newArray(class)
		if h2 == 0 {
			return 0
		}
		if h != 0 {
			d := x.m.dir(h2)
			for i, v := range x.m.dir(h) {
				d[i] = v
			}
			c.retireArray(h)
		}
		h = h2
		nd.dir.Store(h)
	}
	dir := x.m.dir(h)
	done := uint32(0)
	for done < want {
		at := l + done
		k := at % chunkLen
		m := min(chunkLen-k, want-done)
		if k == 0 {
			id, ok := c.alloc(kindChunk)
			if !ok {
				break
			}
			if f := c.free[kindChunk]; len(f) >= 4 {
				// The misses on chunks to come overlap with the copying.
				next := f[len(f)-4]
				to, nm := x.m.locals(next), x.m.names(next)
				c.touch += to[0] + to[chunkLen/2] + nm[0] + nm[chunkLen/2] + uint64(x.m.meta(next).node)
			}
			meta := x.m.meta(id)
			*meta = chunkMeta{node: n, index: uint16(at / chunkLen), high: uint16(m)}
			copy(x.m.locals(id)[:m], locals[done:])
			copy(x.m.names(id)[:m], names[done:])
			storeHalf(&dir[at/chunkLen], id)
		} else {
			id := loadHalf(&dir[at/chunkLen])
			meta := x.m.meta(id)
			to := x.m.locals(id)
			for j := range m {
				if k+j < uint32(meta.high) {
					storeWord(&to[k+j], locals[done+j])
				} else {
					to[k+j] = locals[done+j]
				}
			}
			copy(x.m.names(id)[k:k+m], names[done:])
			meta.high = max(meta.high, uint16(k+m))
		}
		done += m
	}
	nd.len.Store(l + done)
	c.blocks += int64(done)
	return done
}

// matching returns how many blocks from offset off on have the given local hashes.
func (x *Index) matching(nd *node, off uint32, locals []uint64) uint32 {
	l := nd.len.Load()
	if off >= l || len(locals) == 0 {
		return 0
	}
	dir := x.m.dir(nd.dir.Load())
	n := min(l-off, uint32(len(locals)))
	i := uint32(0)
	for i < n {
		ch := x.m.locals(loadHalf(&dir[(off+i)/chunkLen]))
		k := (off + i) % chunkLen
		m := min(chunkLen-k, n-i)
		for j := range m {
			if loadWord(&ch[k+j]) != locals[i+j] {
				return i + j
			}
		}
		i += m
	}
	return n
}

// walk makes the rank hold a chain of blocks below node n at offset off (0, 0: the root) and collects
// the new ones in c.pend. It returns how many blocks of the chain were done and how many of them are new.
func (x *Index) walk(k *rankState, c *cache, n, off uint32, names, locals []uint64, budget uint32) (done, fresh uint32) {
	total := uint32(len(locals))
	filling := false // n is ours to fill: its kids count holds one for us
	up, upOff := uint32(0), uint32(0)
	for done < total {
		nd := x.m.node(n)
		nd.mu.Lock()
		if off == 0 && n != 0 && !filling && (nd.mem.Load() == dead || nd.parent != up || nd.off != upOff || nd.first != locals[done]) {
			// The run found by its edge died before it was locked.
			nd.mu.Unlock()
			runtime.Gosched()
			n, off = up, upOff
			continue
		}
		if n != 0 {
			was := done
			full := x.fill(k, c, n, nd, &off, names, locals, &done, &fresh, budget)
			if filling {
				nd.kids--
				filling = false
			}
			if full || done == total {
				died := done == was && x.trim(c, n, nd)
				nd.mu.Unlock()
				if died {
					x.bury(c, n)
				}
				return done, fresh
			}
		}
		// The chain leaves the run at off.
		t := x.edges.find(n, off, locals[done])
		if t != 0 {
			nd.mu.Unlock()
		} else {
			var ok bool
			if t, ok = c.alloc(kindNode); !ok {
				died := x.trim(c, n, nd)
				nd.mu.Unlock()
				if died {
					x.bury(c, n)
				}
				return done, fresh
			}
			td := x.m.node(t)
			td.init(n, off, locals[done], nd.depth+off)
			x.link(n, nd, t, td)
			nd.mu.Unlock()
			if o := x.edges.insert(t); o != 0 {
				nd.mu.Lock()
				x.unlink(nd, t, td)
				nd.mu.Unlock()
				c.retire(kindNode, t) // a browser may have seen it
				t = o
			} else {
				filling = true
				c.nodes++
			}
		}
		up, upOff = n, off
		n, off = t, 0
	}
	return done, fresh
}

func (nd *node) init(parent, off uint32, first uint64, depth uint32) {
	nd.parent, nd.off, nd.first, nd.depth = parent, off, first, depth
	nd.ver.Add(1)
	nd.len.Store(0)
	nd.dir.Store(0)
	nd.mem.Store(0)
	nd.hits.Store(0)
	nd.kid, nd.kids = 0, 1
}

// fill does the part of a chain that lies in node n: it holds the blocks that are there and appends
// those that are not, if the run ends where the chain does not. It reports whether a limit was reached.
func (x *Index) fill(k *rankState, c *cache, n uint32, nd *node, off *uint32, names, locals []uint64, done, fresh *uint32, budget uint32) (full bool) {
	m := x.matching(nd, *off, locals[*done:])
	total := uint32(len(locals))
	grow := *done+m < total && *off+m == nd.len.Load() && *off+m < maxRun
	if grow && *off+m > 0 && x.m.meta(x.chunkAt(nd, *off+m-1)).kids > 0 {
		grow = x.edges.find(n, *off+m, locals[*done+m]) == 0
	}
	if m == 0 && !grow {
		return false
	}
	i, e := x.join(k, c, n, nd)
	if i == 0 {
		return true
	}
	to := *off + m
	own := to
	full = grow && *fresh >= budget
	if grow && !full {
		want := min(total-*done-m, budget-*fresh)
		got := x.extend(c, n, nd, names[*done+m:*done+m+want], locals[*done+m:*done+m+want])
		full = got < want && to+got < maxRun || *fresh+got == budget && *done+m+got < total
		to += got
	}
	// Names of blocks that were there may differ from the rank's; those just appended are the rank's.
	end, f := *off, uint32(0)
	if own > *off {
		end, f = x.hold(k, c, n, nd, i, e, *off, own, *done, budget-*fresh, true)
	}
	if end == own && to > own {
		a := x.m.array(nd.mem.Load())
		var g uint32
		end, g = x.hold(k, c, n, nd, i, loadWord(&a[i]), own, to, *done+own-*off, budget-*fresh-f, false)
		f += g
	}
	if end < to {
		full = true
		if to > own {
			x.trim(c, n, nd) // the run keeps what others hold; it cannot die, as the rank holds a part or a place in it
		}
	}
	if a := x.m.array(nd.mem.Load()); loadWord(&a[i])>>16 == 0 {
		x.leave(nd, i) // nothing held in the end
	}
	*fresh += f
	*done += end - *off
	*off = end
	return full
}

// release ends the rank's hold on blocks [lo,hi) of node n, all of which it holds.
func (x *Index) release(k *rankState, c *cache, n, lo, hi uint32) {
	nd := x.m.node(n)
	nd.mu.Lock()
	i, e := x.member(k, n, nd)
	a := x.m.array(nd.mem.Load())
	cut := uint32(e >> 32)
	switch {
	case e&extra == 0 && hi == cut:
		if lo == 0 {
			x.leave(nd, i)
		} else {
			storeWord(&a[i], uint64(lo)<<32|uint64(k.slot))
		}
	default:
		var b []uint64
		if e&extra != 0 {
			b = x.extras(n).take(n, k.slot)
		}
		if lo < cut {
			for o := hi; o < cut; o++ {
				b = setBit(b, o)
			}
			cut = lo
		} else {
			for o := lo; o < hi; o++ {
				b[o/64] &^= 1 << (o % 64)
			}
		}
		x.storeExtra(k, n, &a[i], cut, b)
		if loadWord(&a[i])>>16 == 0 {
			x.leave(nd, i)
		}
	}
	died := hi == nd.len.Load() && x.trim(c, n, nd)
	nd.mu.Unlock()
	if died {
		x.bury(c, n)
	}
}

// abandon ends the rank's hold on all of node n.
func (x *Index) abandon(k *rankState, c *cache, n uint32) {
	nd := x.m.node(n)
	nd.mu.Lock()
	died := false
	if nd.mem.Load() != dead {
		if i, e := x.member(k, n, nd); i > 0 {
			if e&extra != 0 {
				x.extras(n).take(n, k.slot)
			}
			x.leave(nd, i)
			died = x.trim(c, n, nd)
		}
	}
	nd.mu.Unlock()
	if died {
		x.bury(c, n)
	}
}
