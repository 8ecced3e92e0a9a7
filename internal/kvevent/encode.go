package kvevent

import (
	"encoding/binary"
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// Form is the shape in which an engine writes its batches.
type Form uint8

// The forms that exist in the field.
const (
	// VLLMMap is vLLM since 0.24: an array batch of map events.
	VLLMMap Form = iota
	// VLLMArray is vLLM 0.9.1 to 0.23: an array batch of array events, trailing
	// defaults left out.
	VLLMArray
	// SGLangArray is SGLang up to 0.5.2x: an array batch of array events with the
	// medium last, or a map with the cache salt after it.
	SGLangArray
	// SGLangMap is SGLang since September 2026: an array batch of map events.
	SGLangMap
)

var formNames = [...]string{"vllm-map", "vllm-array", "sglang-array", "sglang-map", "unknown"}

// String names the form.
func (f Form) String() string { return formNames[min(int(f), len(formNames)-1)] }

// Encoding says how AppendBatch writes.
type Encoding struct {
	Form Form
	// BinHash writes hashes as 32-byte bin that end in the hash, as vLLM does
	// with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0. Otherwise they are integers:
	// unsigned from vLLM, signed from SGLang.
	BinHash bool
}

// AppendBatch appends b as one payload. What the form has no place for is left
// out: the group and cache kind in SGLang's forms, the LoRA name in SGLangArray,
// the locality, ownership and session in array forms. ExtraKeys digests, which
// have no way back to the keys, are written as made-up items that differ where
// the digests differ. Events of Kind Unknown are left out.
func AppendBatch(dst []byte, b *Batch, enc Encoding) []byte {
	w := writer{dst, enc}
	sglang := enc.Form == SGLangArray || enc.Form == SGLangMap
	if b.Rank < 0 && !sglang {
		w.array(2)
	} else {
		w.array(3)
	}
	w.float(b.TS)
	n := 0
	for i := range b.Events {
		if b.Events[i].Kind != Unknown {
			n++
		}
	}
	w.array(n)
	for i := range b.Events {
		e := &b.Events[i]
		switch {
		case e.Kind == Unknown:
		case enc.Form == VLLMMap || enc.Form == SGLangMap:
			w.mapEvent(e, sglang)
		default:
			w.arrayEvent(e, sglang)
		}
	}
	switch {
	case b.Rank >= 0:
		w.int(int64(b.Rank))
	case sglang:
		w.null()
	}
	return w.p
}

type writer struct {
	p   []byte
	enc Encoding
}

func (w *writer) null()           { w.p = msgp.AppendNil(w.p) }
func (w *writer) float(v float64) { w.p = msgp.AppendFloat64(w.p, v) }
func (w *writer) uint(v uint64)   { w.p = msgp.AppendUint64(w.p, v) }
func (w *writer) array(n int)     { w.p = msgp.AppendArrayHeader(w.p, uint32(n)) }
func (w *writer) mapOf(n int)     { w.p = msgp.AppendMapHeader(w.p, uint32(n)) }
func (w *writer) str(s string)    { w.p = msgp.AppendString(w.p, s) }

// int writes what is not negative as unsigned, as Python's encoders do.
func (w *writer) int(v int64) {
	if v >= 0 {
		w.uint(uint64(v))
		return
	}
	w.p = msgp.AppendInt64(w.p, v)
}

func (w *writer) strOrNull(s string) {
	if s == "" {
		w.null()
		return
	}
	w.str(s)
}

func (w *writer) hash(h Hash) {
	switch {
	case w.enc.BinHash:
		w.p = append(w.p, 0xc4, 32)
		w.p = append(w.p, make([]byte, 24)...)
		w.p = binary.BigEndian.AppendUint64(w.p, h)
	case w.enc.Form == SGLangArray || w.enc.Form == SGLangMap:
		w.int(int64(h))
	default:
		w.uint(h)
	}
}

func (w *writer) hashes(hs []Hash) {
	w.array(len(hs))
	for _, h := range hs {
		w.hash(h)
	}
}

func (w *writer) parent(e *Event) {
	if !e.HasParent {
		w.null()
		return
	}
	w.hash(e.Parent)
}

// tokens writes the token ids, of bigrams as pairs with the following token.
func (w *writer) tokens(e *Event) {
	w.array(len(e.Tokens))
	for i, t := range e.Tokens {
		if e.Bigram {
			w.array(2)
		}
		w.uint(uint64(t))
		if e.Bigram {
			w.uint(uint64(e.Tokens[min(i+1, len(e.Tokens)-1)]))
		}
	}
}

// The engines' spelling of the tiers.
var (
	vllmMedia   = [...]string{gpuName, "CPU", "STORAGE", "EXTERNAL", "OTHER"}
	sglangMedia = [...]string{gpuName, "CPU_PINNED", "DISK", "EXTERNAL", "OTHER"}
)

// mediumName is the engine's spelling of the tier.
func mediumName(e *Event, sglang bool) string {
	switch {
	case e.MediumName != "" || e.Kind == Cleared:
		return e.MediumName
	case sglang:
		return sglangMedia[min(e.Medium, OtherMedium)]
	}
	return vllmMedia[min(e.Medium, OtherMedium)]
}

func cacheKindName(e *Event) string {
	switch {
	case e.CacheKind == CacheAbsent:
		return ""
	case e.CacheKind == OtherCache && e.CacheName != "":
		return e.CacheName
	}
	return e.CacheKind.String()
}

var localityNames = [...]string{LocalityAbsent: "", Local: "LOCAL", Remote: "REMOTE"}

// extraKeys writes one entry per block: LoRA name, item, salt.
func (w *writer) extraKeys(e *Event) {
	w.array(len(e.Hashes))
	for i := range e.Hashes {
		item := i < len(e.ExtraKeys) && e.ExtraKeys[i] != 0
		salt := i == 0 && !e.HasParent && e.Salt != ""
		n := 0
		for _, has := range []bool{e.LoRAName != "", item, salt} {
			if has {
				n++
			}
		}
		if n == 0 {
			w.null()
			continue
		}
		w.array(n)
		if e.LoRAName != "" {
			w.str(e.LoRAName)
		}
		if item {
			w.array(2)
			w.str(fmt.Sprintf("%016x", e.ExtraKeys[i]))
			w.uint(0)
		}
		if salt {
			w.str(e.Salt)
		}
	}
}

func (w *writer) arrayEvent(e *Event, sglang bool) {
	medium := mediumName(e, sglang)
	tag := kinds[e.Kind].tag
	switch e.Kind {
	case Stored:
	case Cleared:
		if medium == "" {
			w.array(1)
			w.str(tag)
			return
		}
		w.array(2)
		w.str(tag)
		w.str(medium)
		return
	default: // Removed
		n := 3
		if !sglang && e.Group >= 0 {
			n = 4
		}
		w.array(n)
		w.str(tag)
		w.hashes(e.Hashes)
		w.strOrNull(medium)
		if n == 4 {
			w.int(int64(e.Group))
		}
		return
	}
	n := 8
	switch {
	case sglang && e.Salt == "":
		n = 7
	case sglang:
	case e.SlidingWindow > 0:
		n = 12
	case e.CacheKind != CacheAbsent:
		n = 11
	case e.Group >= 0:
		n = 10
	case e.LoRAName != "" || e.Salt != "" && !e.HasParent || len(e.ExtraKeys) > 0: // it has extra keys
		n = 9
	}
	w.array(n)
	w.str(tag)
	w.hashes(e.Hashes)
	w.parent(e)
	w.tokens(e)
	w.int(int64(e.BlockSize))
	w.intOrNull(e.HasLoRAID, e.LoRAID)
	w.strOrNull(medium)
	if sglang {
		if n == 8 {
			w.mapOf(1)
			w.str("cache_salt")
			w.str(e.Salt)
		}
		return
	}
	w.strOrNull(e.LoRAName)
	if n > 8 {
		w.extraKeys(e)
	}
	if n > 9 {
		w.intOrNull(e.Group >= 0, int64(e.Group))
	}
	if n > 10 {
		w.strOrNull(cacheKindName(e))
	}
	if n > 11 {
		w.int(int64(e.SlidingWindow))
	}
}

func (w *writer) intOrNull(has bool, v int64) {
	if !has {
		w.null()
		return
	}
	w.int(v)
}

// mapEvent writes the fields in the engines' order. Fields with a default are
// absent when they have it.
func (w *writer) mapEvent(e *Event, sglang bool) {
	start := len(w.p)
	w.p = append(w.p, 0x80) // the count is added below; there are 15 fields at most
	n := 0
	key := func(name string) { n++; w.str(name) }
	text := func(name, value string) {
		if value != "" {
			key(name)
			w.str(value)
		}
	}
	key("type")
	w.str(kinds[e.Kind].tag)
	switch e.Kind {
	case Cleared:
		text("medium", e.MediumName)
	case Stored:
		key("block_hashes")
		w.hashes(e.Hashes)
		key("parent_block_hash")
		w.parent(e)
		key("token_ids")
		w.tokens(e)
		key("block_size")
		w.int(int64(e.BlockSize))
		key("lora_id")
		w.intOrNull(e.HasLoRAID, e.LoRAID)
		key("medium")
		w.str(mediumName(e, sglang))
		if sglang {
			text("cache_salt", e.Salt)
			text("lora_name", e.LoRAName)
		} else {
			key("lora_name")
			w.strOrNull(e.LoRAName)
			key("extra_keys")
			w.extraKeys(e)
		}
	default: // Removed
		key("block_hashes")
		w.hashes(e.Hashes)
		key("medium")
		w.str(mediumName(e, sglang))
	}
	if !sglang && e.Kind != Cleared {
		if e.Group >= 0 {
			key("group_idx")
			w.int(int64(e.Group))
		}
		if e.Kind == Stored {
			text("kv_cache_spec_kind", cacheKindName(e))
			if e.SlidingWindow > 0 {
				key("kv_cache_spec_sliding_window")
				w.int(int64(e.SlidingWindow))
			}
		}
		text("locality", localityNames[e.Locality])
		text("ownership", e.Ownership)
	}
	if e.Kind == Stored {
		text("session_id", string(e.SessionID))
	}
	w.p[start] |= byte(n)
}
