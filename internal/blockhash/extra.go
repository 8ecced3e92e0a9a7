package blockhash

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// Media is an item of a prompt that is not text: an image, a sound or a video. ID is the
// engine's name of its content. Its placeholders are the token ids
// [Offset, Offset+Length) of the prompt.
type Media struct {
	ID             string
	Offset, Length int
}

// The seeds of what an extra digest is made of. They differ, so that no kind passes for another.
const (
	mediaSeed = 0x6d6d00000539 + iota
	wideSeed
	aheadSeed
)

// ExtraMedia adds a media item to the extra digest of a block, 0 for none yet. offset is where
// the item begins, in tokens from the block's first one; it is negative in the later blocks
// of an item. An engine that names a block by (id, offset) pairs, as vLLM (0.17 and later)
// does in extra_keys, gives the digest of all pairs in their order.
func ExtraMedia(digest uint64, id string, offset int) uint64 {
	return ExtraNamed(digest, MediaName(id), offset)
}

// MediaName is the hash of an engine's name of an item.
func MediaName(id string) uint64 { return xxh3.HashStringSeed(id, mediaSeed) }

// ExtraNamed is [ExtraMedia] of an item whose name has the given hash.
func ExtraNamed(digest, name uint64, offset int) uint64 {
	return fold(fold(digest, name, mediaSeed), uint64(offset), mediaSeed)
}

// ExtraWide adds a token id that has more than 32 bits to the extra digest of a block. at is
// its place in the block. SGLang (0.5.23) puts such ids, made from the hash of an image, in
// place of the image's placeholders.
func ExtraWide(digest uint64, at int, id uint64) uint64 {
	return fold(fold(digest, uint64(at), wideSeed), id, wideSeed)
}

// ExtraAhead adds a token after a block to the block's extra digest. vLLM (0.33) names blocks by
// the tokens after them, too, where it drafts with EAGLE or MTP without a KV connector.
func ExtraAhead(digest uint64, token uint32) uint64 { return fold(digest, uint64(token), aheadSeed) }

// fold continues a digest over a value. The result is never 0, which stands for no digest.
func fold(digest, v, seed uint64) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], digest)
	binary.LittleEndian.PutUint64(b[8:], v)
	return max(xxh3.HashSeed(b[:], seed), 1)
}

// Extras appends the extra digests of the full blocks of size tokens, as vLLM makes them, to dst
// and returns it. media are in the order of their offsets and do not overlap. ahead is how
// many tokens after a block its name covers; a block without that many after it has no
// name, and no digest here.
// Each is appended parts times, for blocks that are parts of the engine's.
func Extras(dst []uint64, tokens []uint32, media []Media, size, ahead, parts int) []uint64 {
	if size < 1 || ahead < 0 {
		return dst
	}
	for from := 0; from+size+ahead <= len(tokens); from += size {
		to := from + size
		for len(media) > 0 && media[0].Offset+media[0].Length <= from {
			media = media[1:]
		}
		var x uint64
		for _, m := range media {
			if m.Offset >= to+ahead {
				break
			}
			x = ExtraMedia(x, m.ID, m.Offset-from)
		}
		for _, t := range tokens[to : to+ahead] {
			x = ExtraAhead(x, t)
		}
		for range parts {
			dst = append(dst, x)
		}
	}
	return dst
}
