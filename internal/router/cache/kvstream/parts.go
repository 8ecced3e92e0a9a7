package kvstream

// parts keeps account of the router blocks inside the engine blocks of a rank
// whose blocks are larger than the router's.
//
// Two engine blocks that follow the same parent and differ only in their second
// half share the router blocks of the first one. The index has a block once, so
// whoever removes an engine block must know which of its parts another one still
// has. A part is therefore named by what it holds: the engine's name of the
// block before the engine block, and the local hashes up to the part. The last
// part carries the engine's name itself.
type parts struct {
	tail map[uint64]uint64 // engine block to its last part but one
	refs map[uint64]part   // all parts but last ones
}

type part struct {
	before uint64 // the part before, 0 for the first
	blocks uint32 // engine blocks that have this part
}

// maxSplit bounds the engine blocks of one rank that are accounted for; at 16
// tokens a block that is more KV cache than any device has.
const maxSplit = 4 << 20

// rootName stands for the parent of block 0.
const rootName = 0x6b76_6665_6564_0001

func (p *parts) reset() { p.tail, p.refs = nil, nil }

// names appends the names of the router blocks with the given local hashes that
// make up the engine block h below parent.
func (p *parts) names(dst []uint64, h, parent uint64, locals []uint64) []uint64 {
	n := mix64(parent ^ 0x9e3779b97f4a7c15)
	for _, l := range locals[:len(locals)-1] {
		n = mix64(n + 0x9e3779b97f4a7c15 ^ l)
		dst = append(dst, n)
	}
	return append(dst, h)
}

// add takes note of the engine block whose parts are named. It appends to gone
// the names of parts that only an older block of the same name had, and returns
// false when there is no room.
func (p *parts) add(names, gone []uint64) ([]uint64, bool) {
	h, inner := names[len(names)-1], names[:len(names)-1]
	if old, ok := p.tail[h]; ok {
		if old == inner[len(inner)-1] {
			return gone, true
		}
		gone = p.remove(h, gone)
	}
	if len(p.tail) >= maxSplit {
		return gone, false
	}
	if p.tail == nil {
		p.tail, p.refs = map[uint64]uint64{}, map[uint64]part{}
	}
	p.tail[h] = inner[len(inner)-1]
	before := uint64(0)
	for _, n := range inner {
		r := p.refs[n]
		p.refs[n] = part{before, r.blocks + 1}
		before = n
	}
	return gone, true
}

// remove forgets the engine block h and appends to gone the names of the router
// blocks that nothing holds any more, the last first.
func (p *parts) remove(h uint64, gone []uint64) []uint64 {
	gone = append(gone, h)
	n, ok := p.tail[h]
	if !ok {
		return gone
	}
	delete(p.tail, h)
	for n != 0 {
		r := p.refs[n]
		if r.blocks--; r.blocks == 0 {
			delete(p.refs, n)
			gone = append(gone, n)
		} else {
			p.refs[n] = r
		}
		n = r.before
	}
	return gone
}
