// Package kvevent is the KV cache event of an engine: what blocks a rank stored,
// removed or cleared, read from and written to the msgpack that vLLM and SGLang
// publish over ZeroMQ.
//
// The decoder goes by the shape of the bytes, never by an engine's version. Read
// from vLLM 0.8.5 to 0.33 and SGLang up to 0.5.23; in this grammar [..] is a
// msgpack array, {..} a map in any key order, x? may be absent or null:
//
//	batch   = [ts, [*event], rank?, *any] | {"ts", "events", rank-key?, *any}
//	rank    = int ; rank-key: data_parallel_rank, attn_dp_rank or dp_rank
//	event   = [tag, *field] | {"type": tag, *(name: field)}
//	Stored  = ["BlockStored", hashes, parent?, tokens, block_size, lora_id?,
//	           medium?, lora_name? | {"cache_salt": str}, extra_keys?,
//	           mm_infos?, group_idx?, kv_cache_spec_kind?, sliding_window?]
//	Removed = ["BlockRemoved", hashes, medium?, group_idx?]
//	Cleared = ["AllBlocksCleared", medium?]
//	hashes  = [*hash]
//	hash    = int | bin | str
//	tokens  = [*int] | [*[int, int]]                ; pairs: EAGLE bigrams
//	extra_keys = [*(null | [*(str | bin | [id, offset])])]   ; one entry a block
//	lookahead_token_ids = [*[*int]]                 ; one entry a block, in maps only
//
// The fields after index 8 are distinguished by their types, because forks put
// one more list in front of them. Map events also know cache_salt, session_id,
// locality and ownership. Unknown tags, keys and trailing elements are stepped
// over; one bad event does not lose its siblings.
//
// The ZeroMQ frames around a payload are in frames.go.
package kvevent

// Kind says what happened to the blocks of an Event.
type Kind uint8

// The kinds of events.
const (
	Unknown Kind = iota // never left in a decoded Batch
	Stored
	Removed
	Cleared
)

// kinds has a row for each kind of event. What it does to a rank's blocks is
// described at kvstream's Applier.
var kinds = [...]struct {
	// name is the kind's here, tag the engines'.
	name, tag string
	// array are its fields when it is an array, by their places.
	array []field
	// needs are those without which it cannot be understood.
	needs fields
}{
	Unknown: {name: "unknown"},
	Stored: {
		name: "stored", tag: "BlockStored", needs: 1<<fHashes | 1<<fTokens,
		array: []field{fTag, fHashes, fParent, fTokens, fBlockSize, fLoRAID, fMedium, fLoRANameOrSalt, fExtraKeys, fTail, fTail, fTail, fTail},
	},
	Removed: {name: "removed", tag: "BlockRemoved", needs: 1 << fHashes, array: []field{fTag, fHashes, fMedium, fGroup}},
	Cleared: {name: "cleared", tag: "AllBlocksCleared", array: []field{fTag, fMedium}},
}

// String returns the kind in lower case.
func (k Kind) String() string {
	if int(k) < len(kinds) {
		return kinds[k].name
	}
	return kinds[Unknown].name
}

// Medium is the storage tier that holds the blocks.
type Medium uint8

// The tiers, with the names that engines give them.
const (
	GPU         Medium = iota // "GPU", and null
	CPU                       // "CPU", "CPU_PINNED"
	Disk                      // "STORAGE", "DISK"
	External                  // "EXTERNAL"
	OtherMedium               // any other name; see Event.MediumName
)

var mediumNames = [...]string{"gpu", "cpu", "disk", "external", "other"}

// String returns the tier in lower case.
func (m Medium) String() string { return mediumNames[min(m, OtherMedium)] }

// CacheKind is the kind of KV cache group that a block belongs to. Hybrid models
// publish each block once per group.
type CacheKind uint8

// The kinds of cache groups, from vLLM's kv_cache_spec_kind.
const (
	CacheAbsent   CacheKind = iota // not said: an engine with one kind of cache
	FullAttention                  // "full_attention", "mla_attention", "sink_full_attention"
	SlidingWindow                  // "sliding_window", "sliding_window_mla"
	Mamba                          // "mamba"
	ChunkedLocal                   // "chunked_local_attention"
	OtherCache                     // any other name; see Event.CacheName
)

var cacheKindNames = [...]string{"absent", "full_attention", "sliding_window", "mamba", "chunked_local_attention", "other"}

// String returns the kind in lower case.
func (k CacheKind) String() string { return cacheKindNames[min(k, OtherCache)] }

// Locality says whether blocks outside the GPU are this engine's own.
type Locality uint8

// The localities.
const (
	LocalityAbsent Locality = iota
	Local
	Remote
)

// Hash is an engine's name of a block in canonical form: the two's complement
// of an integer, the last 8 bytes big endian of a bin, the last 16 digits of a
// hexadecimal string, FNV-1a of any other string. It is opaque: only equality
// within one rank has a meaning.
type Hash = uint64

// Event is one decoded event. Its slices belong to the Batch it is in and are
// overwritten by the next Decode into that Batch; its strings stay valid.
type Event struct {
	Kind   Kind
	Medium Medium
	// MediumName is the engine's name of the tier, empty when it said none. A
	// Cleared event without one concerns every tier.
	MediumName string
	// Group is the KV cache group, -1 when absent.
	Group     int32
	CacheKind CacheKind
	// CacheName is the engine's name of the kind if that is OtherCache.
	CacheName string
	// SlidingWindow is in tokens, 0 when absent.
	SlidingWindow int32

	// Hashes name the blocks in chain order for Stored, in any for Removed.
	Hashes []Hash
	// Parent names the block before the first one, if HasParent. The integer 0
	// counts as no parent: llm-d's simulator writes it for the first block.
	Parent    Hash
	HasParent bool
	// Tokens are the token ids of the blocks; one of more than 32 bits (SGLang's, in place of
	// an image) is math.MaxUint32 here, and counts in ExtraKeys. There may be fewer than
	// len(Hashes)*BlockSize (a partial block) and none (an offloaded block).
	Tokens []uint32
	// Bigram says that the engine sent pairs of tokens (EAGLE); Tokens has the first of each.
	Bigram bool
	// BlockSize is in tokens, 0 when the engine does not say.
	BlockSize int32

	LoRAName  string
	LoRAID    int64 // valid if HasLoRAID
	HasLoRAID bool
	// Salt is the cache salt of the request, from its own field (SGLang) or from
	// the extra keys of a chain's first block (vLLM); later blocks of the chain
	// inherit it through their parents.
	Salt string
	// ExtraKeys has one digest per block of what else its hash depends on:
	// multimodal inputs and prompt embeddings, not LoRA and salt. 0 is nothing.
	// It is empty when no block has any. See [blockhash.Extras] for those of a prompt.
	ExtraKeys []uint64
	// Items are the media of ExtraKeys in the order of their places, empty where there is
	// anything else in it.
	Items []Item
	// Placeholder is the token that stands for media in Tokens.
	Placeholder Placeholder
	// Ahead is how many tokens after a block its name and its digest cover (vLLM 0.33 with
	// EAGLE or MTP); 0 for none.
	Ahead int32

	Locality  Locality
	Ownership string // id of the secondary tier that owns the blocks
	SessionID []byte // session of the request that caused the event
}

// Item is an image, a sound or a video of an event. Name is [blockhash.MediaName] of the engine's
// name, At the place in the event's tokens at which it begins, negative where that is
// before the event. Last is where the last of the event's blocks begins that has a part of it.
type Item struct {
	Name     uint64
	At, Last int
}

// Placeholder is the token id that stands for images, sounds and videos in a prompt.
type Placeholder struct {
	Token uint32
	// Known says that one was seen, Mixed that others were, too: places cannot be found by Token.
	Known, Mixed bool
}

// See takes note of a token at which an item begins, or in the middle of one.
func (p *Placeholder) See(token uint32) {
	p.Mixed = p.Mixed || p.Known && token != p.Token
	p.Token, p.Known = token, true
}

// Batch is one decoded payload. Decode it again and again into the same Batch to
// reuse its memory.
type Batch struct {
	// TS is the publisher's time in Unix seconds.
	TS float64
	// Rank is the data parallel rank that the publisher claims, -1 for none.
	Rank int32
	// Events are the understood events in the publisher's order.
	Events []Event
	// Unknown counts events with a tag that is not known here; they may be
	// ignored. Skipped counts events of a known tag, or of no readable tag, that
	// could not be understood: what they said about the cache is lost.
	Unknown, Skipped int
	// Reason is why the first of the Skipped was, nil if none was skipped.
	Reason error

	// The slices of the Events are cut from these, so that the memory of a Batch
	// follows the largest payload and not the largest event at each position.
	hashes arena[Hash] // ExtraKeys too
	items  arena[Item]
	tokens arena[uint32]
	text   arena[byte]
}

func (b *Batch) reset() {
	clear(b.Events)
	b.TS, b.Rank, b.Events = 0, -1, b.Events[:0]
	b.Unknown, b.Skipped, b.Reason = 0, 0, nil
	b.hashes.reset()
	b.items.reset()
	b.tokens.reset()
	b.text.reset()
}

// next returns an empty Event at the end of Events.
func (b *Batch) next() *Event {
	b.Events = append(b.Events, Event{Group: -1})
	return &b.Events[len(b.Events)-1]
}

// arena hands out parts of one buffer.
type arena[T any] struct {
	buf   []T
	small int // resets in a row after which little of a large buffer was used
}

const (
	arenaKeep   = 1 << 18 // elements up to which a buffer is kept for good
	arenaShrink = 256     // small uses after which a larger one is given back
)

func (a *arena[T]) reset() {
	if cap(a.buf) > arenaKeep {
		if len(a.buf) < cap(a.buf)/8 {
			a.small++
		} else {
			a.small = 0
		}
		if a.small >= arenaShrink {
			a.buf, a.small = nil, 0
		}
	}
	a.buf = a.buf[:0]
}

// take returns n elements with undefined contents. Parts taken before stay
// valid when the buffer is replaced by a larger one.
func (a *arena[T]) take(n int) []T {
	if cap(a.buf)-len(a.buf) < n {
		a.buf = make([]T, 0, max(n, 2*cap(a.buf), 64))
	}
	start := len(a.buf)
	a.buf = a.buf[:start+n]
	return a.buf[start : start+n : start+n]
}

// untake gives the latest n elements back, after a failure.
func (a *arena[T]) untake(n int) { a.buf = a.buf[:len(a.buf)-n] }
