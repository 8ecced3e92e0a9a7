package kvtier

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// errKept is the error of bytes that Append did not write.
var errKept = errors.New("not an account of tiers")

const (
	// keptVersion is the form of Append.
	keptVersion = 1
	// keptBlock is the least size of a block in it.
	keptBlock = 8 + 8 + 1 + 1
)

// Append appends the account to dst, for [Read]: the version of the form and the number
// of blocks as unsigned LEB128 varints, and of each block its name and prefix (8 bytes,
// little-endian), its width (varint) and a byte with a bit for each tier.
func (t *Tiers) Append(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, keptVersion)
	dst = binary.AppendUvarint(dst, uint64(len(t.byName)))
	for i := range t.blocks {
		b := &t.blocks[i]
		if b.in == 0 {
			continue
		}
		dst = binary.LittleEndian.AppendUint64(dst, b.name)
		dst = binary.LittleEndian.AppendUint64(dst, b.seq)
		dst = binary.AppendUvarint(dst, uint64(b.width))
		dst = append(dst, b.in)
	}
	return dst
}

// Read makes an account from what Append wrote.
func Read(p []byte) (*Tiers, error) {
	bad := func(what string) (*Tiers, error) { return nil, fmt.Errorf("%w: %s", errKept, what) }
	version, n := binary.Uvarint(p)
	if n <= 0 || version != keptVersion {
		return bad("its version")
	}
	p = p[n:]
	blocks, n := binary.Uvarint(p)
	if n <= 0 || blocks > maxBlocks || blocks > uint64(len(p)/keptBlock) {
		return bad("the number of blocks")
	}
	p = p[n:]
	t := New()
	for range blocks {
		if len(p) < 16 {
			return bad("a block")
		}
		name, seq := binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
		width, n := binary.Uvarint(p[16:])
		if n <= 0 || len(p) < 16+n+1 {
			return bad("a block")
		}
		in := p[16+n]
		p = p[16+n+1:]
		if _, again := t.byName[name]; again || width > maxWidth || in == 0 || in >= 1<<tiers {
			return bad("a block")
		}
		for tier := range tiers {
			if in&(1<<tier) != 0 && !t.Store(tier, name, seq, int(width)) {
				return bad("a block")
			}
		}
	}
	if len(p) > 0 {
		return bad("bytes behind the end")
	}
	return t, nil
}
