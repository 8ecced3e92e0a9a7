package kvevent

import (
	"encoding/binary"
	"math"
)

// cursor reads msgpack (the specification of 2013, with bin and ext) from p. A
// method that returns false leaves pos anywhere; callers that go on restore it.
type cursor struct {
	p   []byte
	pos int
}

// take consumes n bytes.
func (c *cursor) take(n uint64) ([]byte, bool) {
	if n > uint64(len(c.p)-c.pos) {
		return nil, false
	}
	b := c.p[c.pos : c.pos+int(n)]
	c.pos += int(n)
	return b, true
}

// peek returns the next type byte, or 0xc1, which msgpack never uses.
func (c *cursor) peek() byte {
	if c.pos < len(c.p) {
		return c.p[c.pos]
	}
	return 0xc1
}

// null consumes a nil if one is next.
func (c *cursor) null() bool {
	if c.peek() == 0xc0 {
		c.pos++
		return true
	}
	return false
}

// be reads an n-byte big endian number that follows the type byte at pos, and
// consumes both.
func (c *cursor) be(n int) (uint64, bool) {
	if len(c.p)-c.pos < 1+n {
		return 0, false
	}
	b := c.p[c.pos+1:]
	c.pos += 1 + n
	switch n {
	case 1:
		return uint64(b[0]), true
	case 2:
		return uint64(binary.BigEndian.Uint16(b)), true
	case 4:
		return uint64(binary.BigEndian.Uint32(b)), true
	}
	return binary.BigEndian.Uint64(b), true
}

// integer reads an integer of any width as its two's complement; neg says that
// it is below zero.
func (c *cursor) integer() (v uint64, neg, ok bool) {
	switch b := c.peek(); {
	case b <= 0x7f:
		c.pos++
		return uint64(b), false, true
	case b >= 0xe0:
		c.pos++
		return uint64(int64(int8(b))), true, true
	case b >= 0xcc && b <= 0xcf:
		v, ok = c.be(1 << (b - 0xcc))
		return v, false, ok
	case b >= 0xd0 && b <= 0xd3:
		n := 1 << (b - 0xd0)
		v, ok = c.be(n)
		shift := 64 - 8*n
		s := int64(v<<shift) >> shift
		return uint64(s), s < 0, ok
	}
	return 0, false, false
}

// number reads a float or an integer as a float.
func (c *cursor) number() (float64, bool) {
	switch c.peek() {
	case 0xca:
		v, ok := c.be(4)
		return float64(math.Float32frombits(uint32(v))), ok
	case 0xcb:
		v, ok := c.be(8)
		return math.Float64frombits(v), ok
	}
	v, neg, ok := c.integer()
	if neg {
		return float64(int64(v)), ok
	}
	return float64(v), ok
}

func isStr(b byte) bool   { return b&0xe0 == 0xa0 || b >= 0xd9 && b <= 0xdb }
func isBin(b byte) bool   { return b >= 0xc4 && b <= 0xc6 }
func isArray(b byte) bool { return b&0xf0 == 0x90 || b == 0xdc || b == 0xdd }
func isMap(b byte) bool   { return b&0xf0 == 0x80 || b == 0xde || b == 0xdf }
func isInt(b byte) bool   { return b <= 0x7f || b >= 0xe0 || b >= 0xcc && b <= 0xd3 }

// str reads a str, bin a bin. The bytes are those of p.
func (c *cursor) str() ([]byte, bool) {
	b := c.peek()
	if b&0xe0 == 0xa0 {
		c.pos++
		return c.take(uint64(b & 0x1f))
	}
	if !isStr(b) {
		return nil, false
	}
	n, ok := c.be(1 << (b - 0xd9))
	if !ok {
		return nil, false
	}
	return c.take(n)
}

func (c *cursor) bin() ([]byte, bool) {
	b := c.peek()
	if !isBin(b) {
		return nil, false
	}
	n, ok := c.be(1 << (b - 0xc4))
	if !ok {
		return nil, false
	}
	return c.take(n)
}

// arrayLen reads an array header. Every element takes at least a byte, so a
// length beyond the input is refused here and sizes no allocation.
func (c *cursor) arrayLen() (int, bool) {
	b := c.peek()
	var n uint64
	ok := true
	switch {
	case b&0xf0 == 0x90:
		c.pos++
		n = uint64(b & 0x0f)
	case b == 0xdc:
		n, ok = c.be(2)
	case b == 0xdd:
		n, ok = c.be(4)
	default:
		return 0, false
	}
	if !ok || n > uint64(len(c.p)-c.pos) {
		return 0, false
	}
	return int(n), true
}

// mapLen reads a map header; see arrayLen.
func (c *cursor) mapLen() (int, bool) {
	b := c.peek()
	var n uint64
	ok := true
	switch {
	case b&0xf0 == 0x80:
		c.pos++
		n = uint64(b & 0x0f)
	case b == 0xde:
		n, ok = c.be(2)
	case b == 0xdf:
		n, ok = c.be(4)
	default:
		return 0, false
	}
	if !ok || 2*n > uint64(len(c.p)-c.pos) {
		return 0, false
	}
	return int(n), true
}

// skip steps over one value of any type. It keeps a count instead of a stack:
// no nesting, however deep, costs memory, and a count that exceeds the input
// ends it.
func (c *cursor) skip() bool {
	for left := uint64(1); left > 0; left-- {
		if left > uint64(len(c.p)-c.pos) {
			return false
		}
		b := c.p[c.pos]
		ok := true
		switch {
		case b <= 0x7f || b >= 0xe0 || b == 0xc0 || b == 0xc2 || b == 0xc3:
			c.pos++
		case isArray(b):
			var n int
			n, ok = c.arrayLen()
			left += uint64(n)
		case isMap(b):
			var n int
			n, ok = c.mapLen()
			left += 2 * uint64(n)
		case isStr(b):
			_, ok = c.str()
		case isBin(b):
			_, ok = c.bin()
		case b >= 0xcc && b <= 0xcf:
			_, ok = c.be(1 << (b - 0xcc))
		case b >= 0xd0 && b <= 0xd3:
			_, ok = c.be(1 << (b - 0xd0))
		case b == 0xca || b == 0xcb:
			_, ok = c.be(4 << (b - 0xca))
		case b >= 0xd4 && b <= 0xd8: // fixext: type, then 1 to 16 bytes
			_, ok = c.take(2 + 1<<(b-0xd4))
		case b >= 0xc7 && b <= 0xc9: // ext: length, type, bytes
			var n uint64
			if n, ok = c.be(1 << (b - 0xc7)); ok {
				_, ok = c.take(1 + n)
			}
		default: // 0xc1
			return false
		}
		if !ok {
			return false
		}
	}
	return true
}
