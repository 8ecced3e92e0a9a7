// Package blockhash names blocks of KV cache: token ids (or text chunks) in, 64-bit hashes out.
//
// Grammar, for blocks of B tokens, all integers little-endian, XXH3 meaning XXH3-64:
//
//	local[i] = XXH3(u32(token[i*B]) … u32(token[i*B+B-1]) [u64(extra[i]) when not 0], seed(i))
//	seed(i)  = 1337 [+ XXH3(lora, 0) when a LoRA name is set] [+ XXH3(salt, 1) when i = 0 and a salt is set]
//	s[0]     = local[0]
//	s[i]     = XXH3(u64(s[i-1]) u64(local[i]), 1337)
//
// All sums wrap. A partial last block has no hash: engines do not share it, so no router may count it.
//
// The local hash names a block's own tokens, the sequence hash s names the block together with
// its whole prefix. The scheme is that of Dynamo's KV router (1.6) with two differences. Dynamo
// adds the salt's term to the seed of every block. Here only block 0 carries it, because that is
// where vLLM (0.32) puts a cache_salt into its extra keys. An event that starts in the middle of a
// chain can then be hashed without the salt, and the chain still keeps salted prompts apart from
// block 0 on. And the extra digest is one value per block, chosen by the caller,
// where Dynamo appends a list.
package blockhash

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"github.com/zeebo/xxh3"
)

const (
	// Seed is the base seed of local and sequence hashes.
	Seed = 1337
	// textSeed is the base seed of text chunks. It differs from Seed so that a chunk of text cannot
	// carry the name of a block of tokens that happens to have the same bytes.
	textSeed = 0x7465787400000539
)

// Key is what separates the cache entries of equal tokens: prompts share blocks only under equal keys.
// The zero Key is the base model without a salt.
type Key struct {
	LoRA string // adapter name, "" = base model
	Salt string // the request's cache_salt, "" = none
}

// Seed returns the hash seed of block number i of a chain.
func (k Key) Seed(i int) uint64 { return k.seed(Seed, i) }

func (k Key) seed(base uint64, i int) uint64 {
	if k.LoRA != "" {
		base += xxh3.HashStringSeed(k.LoRA, 0)
	}
	if i == 0 && k.Salt != "" {
		base += xxh3.HashStringSeed(k.Salt, 1)
	}
	return base
}

// Locals appends the local hashes of tokens' full blocks, block 0 first, to dst and returns it. A
// blockSize below 1 yields no hashes.
func Locals(dst []uint64, tokens []uint32, blockSize int, key Key) []uint64 {
	return LocalsAt(dst, tokens, blockSize, 0, nil, key)
}

// LocalsAt is Locals for tokens that begin at block number first of their chain, as in an event that
// continues a parent. extra holds one digest per block (of its images or other non-token content, 0 =
// none); blocks beyond its end have none.
func LocalsAt(dst []uint64, tokens []uint32, blockSize, first int, extra []uint64, key Key) []uint64 {
	if blockSize < 1 {
		return dst
	}
	rest := key.Seed(first + 1)
	seed := rest
	if first == 0 {
		seed = key.Seed(0)
	}
	for i := 0; len(tokens) >= blockSize; i++ {
		var x uint64
		if i < len(extra) {
			x = extra[i]
		}
		dst = append(dst, Local(tokens[:blockSize], x, seed))
		tokens, seed = tokens[blockSize:], rest
	}
	return dst
}

// Local returns the local hash of one full block with an extra digest (0 = none) under a seed from
// [Key.Seed].
func Local(block []uint32, extra, seed uint64) uint64 {
	if extra == 0 && littleEndian {
		return xxh3.HashSeed(view(block), seed)
	}
	return localPortable(block, extra, seed)
}

// localPortable builds the hashed bytes explicitly. It is the whole rule on big-endian hosts, and for
// blocks with an extra digest everywhere.
func localPortable(block []uint32, extra, seed uint64) uint64 {
	var stack [64*4 + 8]byte
	buf := stack[:0]
	for _, t := range block {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	if extra != 0 {
		buf = binary.LittleEndian.AppendUint64(buf, extra)
	}
	return xxh3.HashSeed(buf, seed)
}

// Chain appends the sequence hashes of a chain of local hashes that starts at block 0 to dst and
// returns it. dst and locals may not overlap.
func Chain(dst, locals []uint64) []uint64 {
	if len(locals) == 0 {
		return dst
	}
	s := locals[0]
	dst = append(dst, s)
	for _, l := range locals[1:] {
		s = Next(s, l)
		dst = append(dst, s)
	}
	return dst
}

// Next returns the sequence hash of the block with local hash local that follows parent. It is
// [xxh3.HashSeed] of the 16 bytes of both, without the way over memory: of a prompt, each hash
// waits for the one before.
func Next(parent, local uint64) uint64 {
	low, high := parent^(secretLow+Seed), local^(secretHigh-Seed)
	top, bottom := bits.Mul64(low, high)
	h := 16 + bits.ReverseBytes64(low) + high + (top ^ bottom)
	h ^= h >> 37
	h *= 0x165667919e3779f9
	return h ^ h>>32
}

// Parts of XXH3's default secret, which it takes for 9 to 16 bytes.
const (
	secretLow  = 0x1f67b3b7a4a44072 ^ 0x78e5c0cc4ee679cb
	secretHigh = 0x2172ffcc7dd05a82 ^ 0x8e2443f7744608b8
)

// Chunker names the parts of a prompt whose token ids are not known, one after the other.
type Chunker struct {
	size       int
	seed, rest uint64
}

// NewChunker begins a prompt, in chunks of size bytes. A size below 1 gives no chunks.
func NewChunker(size int, key Key) Chunker {
	return Chunker{size, key.seed(textSeed, 0), key.seed(textSeed, 1)}
}

// Text appends one local hash for each full chunk of a text to dst and returns it. What is
// left is part of the hash that comes next.
func (c *Chunker) Text(dst []uint64, text []byte) []uint64 {
	if c.size < 1 {
		return dst
	}
	for len(text) >= c.size {
		dst = append(dst, xxh3.HashSeed(text[:c.size], c.seed))
		text, c.seed = text[c.size:], c.rest
	}
	if len(text) > 0 {
		c.seed = xxh3.HashSeed(text, c.seed)
	}
	return dst
}

// Whole appends one local hash for something with a name, as an image, that is no text.
func (c *Chunker) Whole(dst []uint64, name [16]byte) []uint64 {
	if c.size < 1 {
		return dst
	}
	dst = append(dst, xxh3.HashSeed(name[:], c.seed^wholeSeed))
	c.seed = c.rest
	return dst
}

// wholeSeed keeps the name of an image apart from a text of the same bytes.
const wholeSeed = 0x77686f6c65

// littleEndian reports whether a uint32 lies in memory in the order in which it is hashed.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// view returns the bytes of block without copying. It is used on little-endian hosts only.
func view(block []uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(block))), 4*len(block))
}
