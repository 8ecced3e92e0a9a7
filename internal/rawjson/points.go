package rawjson

import (
	"encoding/binary"
	"math/bits"
)

// CodePoints counts the code points of a valid JSON string between its quotes.
func CodePoints(b []byte) int {
	n, i := 0, 0
	for i+8 <= len(b) {
		for i+32 <= len(b) {
			p := b[i : i+32 : i+32]
			x0, x1 := binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
			x2, x3 := binary.LittleEndian.Uint64(p[16:]), binary.LittleEndian.Uint64(p[24:])
			if (unplain(x0)|unplain(x1)|unplain(x2)|unplain(x3))&highs != 0 {
				break
			}
			n += 32
			i += 32
		}
		if i+8 > len(b) {
			break
		}
		x := binary.LittleEndian.Uint64(b[i:])
		e := x ^ (ones * '\\')
		if m := (e - ones) & ^e & highs; m != 0 {
			k := bits.TrailingZeros64(m) &^ 7
			n += k>>3 - continuations(x&(1<<k-1))
			used := escapeLen(b[i+k>>3:])
			n++
			i += k>>3 + used
			continue
		}
		n += 8 - continuations(x)
		i += 8
	}
	for i < len(b) {
		switch c := b[i]; {
		case c == '\\':
			n++
			i += escapeLen(b[i:])
		default:
			if c&0xc0 != 0x80 {
				n++
			}
			i++
		}
	}
	return n
}

// unplain has a high bit set if a byte of x is a backslash or not ASCII.
func unplain(x uint64) uint64 { return x | ((x ^ ones*'\\') - ones) }

// continuations counts the bytes 10xxxxxx of a word.
func continuations(x uint64) int {
	return bits.OnesCount64(x & ^(x << 1) & highs)
}

// escapeLen is the length of the escape at the start of b; a surrogate pair
// counts as one.
func escapeLen(b []byte) int {
	if b[1] != 'u' {
		return 2
	}
	high := b[2]|0x20 == 'd' && (b[3] == '8' || b[3] == '9' || b[3]|0x20 == 'a' || b[3]|0x20 == 'b')
	if high && len(b) >= 12 && b[6] == '\\' && b[7] == 'u' && b[8]|0x20 == 'd' && (b[9]|0x20 >= 'c' && b[9]|0x20 <= 'f') {
		return 12
	}
	return 6
}
