package blockhash

import (
	"crypto/sha256"
	"encoding/binary"
	"math"

	"github.com/zeebo/xxh3"
)

// DefaultEngineSeed is the seed of vLLM's names of blocks when PYTHONHASHSEED is not set
// and the algorithm is cryptographic.
const DefaultEngineSeed = "vllm-none-hash"

// Name is an engine's full name of a block; its events have the last 8 bytes.
type Name []byte

// Short returns the name as events have it, the last 8 bytes in big-endian order.
func (n Name) Short() uint64 { return binary.BigEndian.Uint64(n[len(n)-8:]) }

// EngineNames names blocks as vLLM (0.32) does: a hash over the name of the block before, the
// block's token ids and its extra keys, each written by Python's pickle (protocol 5) or as
// canonical CBOR. It is not safe for concurrent use.
type EngineNames struct {
	root   Name
	pickle bool
	sha    bool
	buf    []byte
}

// NewEngineNames returns the names of an algorithm of vLLM's (sha256, sha256_cbor, xxhash,
// xxhash_cbor) and the value of PYTHONHASHSEED, "" for the seed that vLLM has without it.
// It returns nil for other algorithms, and for an xxhash without a seed, which then is
// random in each process.
func NewEngineNames(algorithm, seed string) *EngineNames {
	e := &EngineNames{}
	switch algorithm {
	case "sha256":
		e.pickle, e.sha = true, true
	case "sha256_cbor":
		e.sha = true
	case "xxhash":
		e.pickle = true
	case "xxhash_cbor":
	default:
		return nil
	}
	if seed == "" {
		if !e.sha {
			return nil
		}
		seed = DefaultEngineSeed
	}
	if e.pickle {
		e.begin()
		e.pickleText(seed)
		e.root = e.pickled(nil)
	} else {
		e.buf = appendText(e.buf[:0], seed)
		e.root = e.sum(nil, e.buf)
	}
	return e
}

// Root returns the name that stands before a first block.
func (e *EngineNames) Root() Name { return e.root }

// Next appends to dst the name of the block of tokens that follows the block named before.
// salt is that of the request, and is part of a first block only; "" is none. dst may be
// before's own memory, from its beginning. Blocks whose pickle is larger than a frame
// (64 KiB) get a name that vLLM does not give.
func (e *EngineNames) Next(dst []byte, before Name, tokens []uint32, salt string) Name {
	if e.pickle {
		return e.pickleNext(dst, before, tokens, salt)
	}
	b := append(e.buf[:0], 0x83) // an array of three
	b = appendHead(b, 2, uint64(len(before)))
	b = append(b, before...)
	b = appendHead(b, 4, uint64(len(tokens)))
	for _, t := range tokens {
		b = appendHead(b, 0, uint64(t))
	}
	if salt == "" {
		b = append(b, 0xf6)
	} else {
		b = appendText(append(b, 0x81, 0x82), saltKey)
		b = appendText(b, salt)
	}
	e.buf = b
	return e.sum(dst, b)
}

const saltKey = "cache_salt"

func (e *EngineNames) sum(dst, b []byte) Name {
	if e.sha {
		h := sha256.Sum256(b)
		return append(dst, h[:]...)
	}
	h := xxh3.Hash128(b).Bytes()
	return append(dst, h[:]...)
}

// appendHead appends the head of a CBOR value in its shortest form.
func appendHead(b []byte, major byte, n uint64) []byte {
	major <<= 5
	switch {
	case n < 24:
		return append(b, major|byte(n))
	case n <= math.MaxUint8:
		return append(b, major|24, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(n))
	case n <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, major|26), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, major|27), n)
}

func appendText(b []byte, s string) []byte {
	return append(appendHead(b, 3, uint64(len(s))), s...)
}

// begin starts a pickle: protocol and frame, whose length is written at the end.
func (e *EngineNames) begin() {
	e.buf = append(e.buf[:0], 0x80, 5, 0x95, 0, 0, 0, 0, 0, 0, 0, 0)
}

const frameAt, frameEnd, memoize = 3, 11, 0x94

// pickled ends a pickle and appends its hash to dst.
func (e *EngineNames) pickled(dst []byte) Name {
	e.buf = append(e.buf, '.')
	binary.LittleEndian.PutUint64(e.buf[frameAt:], uint64(len(e.buf)-frameEnd))
	return e.sum(dst, e.buf)
}

func (e *EngineNames) pickleText(s string) {
	if len(s) <= math.MaxUint8 {
		e.buf = append(e.buf, 0x8c, byte(len(s)))
	} else {
		e.buf = binary.LittleEndian.AppendUint32(append(e.buf, 'X'), uint32(len(s)))
	}
	e.buf = append(append(e.buf, s...), memoize)
}

func (e *EngineNames) pickleNext(dst []byte, before Name, tokens []uint32, salt string) Name {
	e.begin()
	b := append(e.buf, 'C', byte(len(before)))
	b = append(append(b, before...), memoize)
	if len(tokens) > 3 {
		b = append(b, '(')
	}
	for _, t := range tokens {
		switch {
		case t <= math.MaxUint8:
			b = append(b, 'K', byte(t))
		case t <= math.MaxUint16:
			b = append(b, 'M', byte(t), byte(t>>8))
		case t <= math.MaxInt32:
			b = binary.LittleEndian.AppendUint32(append(b, 'J'), t)
		default: // five bytes, so that its sign is plus
			b = append(binary.LittleEndian.AppendUint32(append(b, 0x8a, 5), t), 0)
		}
	}
	switch n := len(tokens); n {
	case 0:
		b = append(b, ')') // the empty tuple is not remembered
	case 1, 2, 3:
		b = append(b, 0x84+byte(n), memoize)
	default:
		b = append(b, 't', memoize)
	}
	e.buf = b
	if salt == "" {
		e.buf = append(e.buf, 'N')
	} else {
		e.pickleText(saltKey)
		e.pickleText(salt)
		e.buf = append(e.buf, 0x86, memoize, 0x85, memoize)
	}
	e.buf = append(e.buf, 0x87, memoize)
	return e.pickled(dst)
}
