// Package bpe runs byte-level BPE tokenizers from Hugging Face tokenizer.json
// files, id for id as the tokenizers package (0.23.3) does.
//
// A file is run only when every part of it is known exactly: the model is BPE
// over the byte-level alphabet, the pre-tokenizer is one of the patterns in
// pretoken.go, the normalizer is none, NFC or NFKC, and the post-processor is
// none, ByteLevel or a template. Anything else is refused by name.
//
// A text goes through these steps:
//
//   - added tokens that match raw text are cut out
//   - each stretch between them is normalized
//   - added tokens that match normalized text are cut out
//   - the pattern, written out as a state machine, splits each stretch into words
//   - each word's bytes are merged
package bpe

import "sync"

// Tokenizer is a loaded tokenizer. It is safe for concurrent use.
type Tokenizer struct {
	family       family
	classes      *classTable
	norm         *normalizer // nil for none
	merges       *mergeTable
	byteID       [256]uint32
	ignoreMerges bool
	whole        map[string]uint32 // word to id, only with ignoreMerges
	tokens       [][]byte          // id to bytes; nil for holes
	added        []addedToken
	rawAdded     *matcher // nil for none
	normAdded    *matcher
	texts        map[uint32]addedText // of added tokens, by id
	decodes      bool
	prefix       []uint32 // put around a prompt by the post-processor
	suffix       []uint32

	cuts   cutRules
	words  *wordCache
	chunks *chunkCache // nil for none

	scratch sync.Pool // *scratch
}

// scratch is the working memory of one Append.
type scratch struct {
	heap mergeHeap
	norm []byte
	text []byte
}

// maxScratch bounds the memory that the pool keeps per entry.
const maxScratch = 1 << 20

// Prefix and Suffix are the ids that the post-processor puts around a prompt.
func (t *Tokenizer) Prefix() []uint32 { return t.prefix }

// Suffix is what follows a prompt; see Prefix.
func (t *Tokenizer) Suffix() []uint32 { return t.suffix }

// Append appends the ids of text, without what the post-processor adds.
func (t *Tokenizer) Append(dst []uint32, text []byte) []uint32 {
	s := t.get()
	dst = t.appendText(dst, text, s)
	t.put(s)
	return dst
}

// AppendString is Append for a string.
func (t *Tokenizer) AppendString(dst []uint32, text string) []uint32 {
	s := t.get()
	s.text = append(s.text[:0], text...)
	dst = t.appendText(dst, s.text, s)
	t.put(s)
	return dst
}

func (t *Tokenizer) get() *scratch {
	if s, ok := t.scratch.Get().(*scratch); ok {
		return s
	}
	return &scratch{}
}

func (t *Tokenizer) put(s *scratch) {
	if cap(s.norm) > maxScratch {
		s.norm = nil
	}
	if cap(s.text) > maxScratch {
		s.text = nil
	}
	if cap(s.heap.ids) > maxScratch/16 {
		s.heap = mergeHeap{}
	}
	t.scratch.Put(s)
}

// appendText answers the head of text from the chunk cache, chunk by chunk.
func (t *Tokenizer) appendText(dst []uint32, text []byte, s *scratch) []uint32 {
	if t.chunks != nil && t.cuts != 0 {
		for len(text) >= minChunk {
			cut := t.cut(text)
			if cut == 0 {
				break
			}
			dst = t.appendChunk(dst, text[:cut], s)
			text = text[cut:]
		}
	}
	return t.appendCold(dst, text, s)
}

func (t *Tokenizer) appendChunk(dst []uint32, chunk []byte, s *scratch) []uint32 {
	if len(chunk) > maxChunk {
		return t.appendCold(dst, chunk, s)
	}
	key := t.chunks.key(chunk)
	if ids, ok := t.chunks.get(key, chunk); ok {
		return append(dst, ids...)
	}
	n := len(dst)
	dst = t.appendCold(dst, chunk, s)
	t.chunks.put(key, chunk, dst[n:])
	return dst
}

// appendCold tokenizes text without the chunk cache.
func (t *Tokenizer) appendCold(dst []uint32, text []byte, s *scratch) []uint32 {
	if t.rawAdded == nil {
		return t.appendRaw(dst, text, s)
	}
	return t.rawAdded.each(t.classes, text, dst, func(dst []uint32, b []byte) []uint32 {
		return t.appendRaw(dst, b, s)
	})
}

// appendRaw takes a stretch of raw text between added tokens.
func (t *Tokenizer) appendRaw(dst []uint32, b []byte, s *scratch) []uint32 {
	if t.norm != nil {
		n := t.norm.apply(s.norm, b)
		if len(n) > 0 && len(b) > 0 && &n[0] != &b[0] {
			s.norm = n
		}
		b = n
	}
	if t.normAdded == nil {
		return t.appendStretch(dst, b, s)
	}
	return t.normAdded.each(t.classes, b, dst, func(dst []uint32, b []byte) []uint32 {
		return t.appendStretch(dst, b, s)
	})
}

// appendStretch splits normalized text into words.
func (t *Tokenizer) appendStretch(dst []uint32, b []byte, s *scratch) []uint32 {
	c := t.classes
	switch t.family {
	case famGPT2:
		for i := 0; i < len(b); {
			e := c.nextGPT2(b, i)
			dst = t.appendWord(dst, b[i:e], s)
			i = e
		}
	case famLlama3, famQwen2, famQwen35:
		digits, letters := 1, clL
		if t.family == famLlama3 {
			digits = 3
		}
		if t.family == famQwen35 {
			letters |= clM
		}
		for i := 0; i < len(b); {
			e := c.nextCL100K(b, i, digits, letters)
			dst = t.appendWord(dst, b[i:e], s)
			i = e
		}
	case famO200k:
		for i := 0; i < len(b); {
			e := c.nextO200k(b, i)
			dst = t.appendWord(dst, b[i:e], s)
			i = e
		}
	case famDeepSeek:
		for i := 0; i < len(b); {
			e, main := c.nextDeepSeek(b, i)
			if main {
				dst = t.appendDeepSeek(dst, b[i:e], s)
			} else {
				dst = t.appendWord(dst, b[i:e], s)
			}
			i = e
		}
	}
	return dst
}

// appendDeepSeek runs the third DeepSeek split over one stretch; what no
// alternative matches is a word of its own.
func (t *Tokenizer) appendDeepSeek(dst []uint32, b []byte, s *scratch) []uint32 {
	gap := 0
	for i := 0; i < len(b); {
		e := t.classes.nextDeepSeekMain(b, i)
		if e == i {
			_, n := t.classes.at(b, i)
			i += n
			continue
		}
		if gap < i {
			dst = t.appendWord(dst, b[gap:i], s)
		}
		dst = t.appendWord(dst, b[i:e], s)
		gap, i = e, e
	}
	if gap < len(b) {
		dst = t.appendWord(dst, b[gap:], s)
	}
	return dst
}

// appendWord appends the ids of one word, from the word cache if it is there.
func (t *Tokenizer) appendWord(dst []uint32, w []byte, s *scratch) []uint32 {
	if len(w) == 1 {
		return append(dst, t.byteID[w[0]]) // also with ignoreMerges: the same id
	}
	if len(w) > maxCachedWord {
		return t.wordIDs(dst, w, s)
	}
	k := packWord(w)
	if out, ok := t.words.get(k, dst); ok {
		return out
	}
	n := len(dst)
	dst = t.wordIDs(dst, w, s)
	t.words.put(k, dst[n:])
	return dst
}

func (t *Tokenizer) wordIDs(dst []uint32, w []byte, s *scratch) []uint32 {
	if t.ignoreMerges {
		if id, ok := t.whole[string(w)]; ok {
			return append(dst, id)
		}
	}
	return t.merge(dst, w, &s.heap)
}
