package kvgroup

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/dynctl/dynctl/internal/kvevent"
)

// errKept is the error of bytes that Append did not write.
var errKept = errors.New("not an account of cache groups")

// keptBlock is the least size of a block in Append's form: name, prefix, place.
const keptBlock = 8 + 8 + 1

// Append appends the groups to dst, for [Read]. Numbers are unsigned LEB128 varints, unless
// noted:
//
//   - the router's block, whether copies are not counted, First + 1, the smallest block
//   - the number of groups; for each its number + 1, kind, window, block in tokens
//   - the number of blocks; for each its name and prefix (8 bytes, little-endian), the index of
//     the block before it, and a byte of copies for each group
func (g *Groups) Append(dst []byte) []byte {
	uv := func(n uint64) { dst = binary.AppendUvarint(dst, n) }
	uv(uint64(g.size))
	single := uint64(0)
	if g.implausible {
		single = 1
	}
	uv(single)
	uv(uint64(g.First + 1))
	uv(uint64(g.finest))
	uv(uint64(len(g.groups)))
	for i := range g.groups {
		k := &g.groups[i]
		uv(uint64(k.id + 1))
		uv(uint64(k.kind))
		uv(uint64(k.window))
		uv(uint64(k.tokens))
	}
	positions, n := make([]uint32, len(g.blocks)), uint32(0)
	for i := range g.blocks {
		if g.held(i) {
			positions[i] = n
			n++
		}
	}
	uv(uint64(n))
	for i := range g.blocks {
		b := &g.blocks[i]
		if !g.held(i) {
			continue
		}
		dst = binary.LittleEndian.AppendUint64(dst, b.name)
		dst = binary.LittleEndian.AppendUint64(dst, b.seq)
		before := uint32(0) // a block that has gone is looked up by its prefix
		if int(b.before) < len(positions) {
			before = positions[b.before]
		}
		uv(uint64(before))
		dst = append(dst, b.copies[:len(g.groups)]...)
	}
	return dst
}

// held reports whether the block at a place is in use.
func (g *Groups) held(i int) bool { return g.blocks[i].copies != [maxGroups]uint8{} }

// Read makes the groups of a rank, for router blocks of size tokens, from what Append
// wrote. Traits are the caller's to set.
func Read(size int, p []byte) (*Groups, error) {
	bad := func(what string) (*Groups, error) { return nil, fmt.Errorf("%w: %s", errKept, what) }
	cut := false
	uv := func(limit uint64) uint64 {
		v, n := binary.Uvarint(p)
		if n <= 0 || v > limit {
			cut, p = true, nil
			return 0
		}
		p = p[n:]
		return v
	}
	const number = 1<<31 - 1
	g := New(size)
	if uv(number) != uint64(size) {
		return bad("of another router block")
	}
	g.implausible = uv(1) == 1
	g.First = int32(uv(number)) - 1
	g.finest = int(uv(number))
	groups := uv(maxGroups)
	for range groups {
		k := group{id: int32(uv(number)) - 1, kind: kvevent.CacheKind(uv(uint64(kvevent.ChunkedLocal))), window: int(uv(number)), tokens: int(uv(number))}
		if cut || k.kind == kvevent.CacheAbsent || g.indexOf(k.id) >= 0 {
			return bad("a group")
		}
		if k.tokens%size == 0 {
			k.blocks = k.tokens / size
		}
		g.add(k)
	}
	for i := range g.groups {
		// finest divides the blocks of all groups; lookups divide by it.
		if b := g.groups[i].blocks; b > 0 && (g.finest == 0 || b%g.finest != 0) {
			return bad("the finest block")
		}
	}
	n := uv(maxBlocks)
	if cut || n > uint64(len(p)/keptBlock) {
		return bad("the number of blocks")
	}
	g.blocks = make([]block, n)
	for i := range g.blocks {
		b := &g.blocks[i]
		if len(p) < 16 {
			return bad("a block")
		}
		b.name, b.seq = binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
		p = p[16:]
		b.before = uint32(uv(max(n, 1) - 1))
		if cut || len(p) < len(g.groups) {
			return bad("a block")
		}
		p = p[copy(b.copies[:len(g.groups)], p):]
		for _, c := range b.copies {
			if c >= maxCopies {
				return bad("copies")
			}
		}
		if _, again := g.byName[b.name]; again || !g.held(i) {
			return bad("a name")
		}
		g.byName[b.name] = uint32(i)
		if b.seq == 0 {
			g.unresolved++
		} else {
			g.bySeq[b.seq] = uint32(i)
		}
	}
	if len(p) > 0 {
		return bad("bytes behind the end")
	}
	return g, nil
}
