package bpe

import (
	"bytes"
	"container/list"
	"hash/maphash"
	"sync"
)

// The prefix cache. A long text is cut into chunks at places where the ids of
// the two sides do not depend on each other, so that a chunk's ids are a
// function of the chunk alone. Where the cuts fall is a function of the text
// before them (and one character after), so that prompts with the same head
// share its chunks.

const (
	minChunk = 4 << 10  // bytes a chunk has at least
	maxChunk = 64 << 10 // longer ones (no safe place for long) are not kept
)

// cutRules is a set of the kinds of places where a text may be cut.
type cutRules uint8

const (
	// cutSpace: between an ASCII letter and a space. No pattern matches a
	// letter and the space after it together, and what starts with the space
	// does not look back.
	cutSpace cutRules = 1 << iota
	// cutLine: between LF and an ASCII letter, with a non-space ASCII
	// character before the LF, so that the LF is all of its white space run.
	cutLine
	// cutCJK: between a unified ideograph and ideographic punctuation.
	cutCJK
)

// safeCuts returns the rules that hold with this tokenizer's added tokens: no
// token may match across a cut or take white space from beyond it.
func (t *Tokenizer) safeCuts() cutRules {
	rules := cutSpace | cutLine | cutCJK
	for _, a := range t.added {
		contents := [2]string{a.content, a.content}
		if t.norm != nil {
			contents[1] = string(t.norm.apply(nil, []byte(a.content)))
		}
		for _, c := range contents {
			if a.single || c == "" {
				return 0
			}
			if (a.lstrip || a.rstrip) && !(asciiPunct(c[0]) && asciiPunct(c[len(c)-1])) {
				return 0
			}
			for i := 1; i < len(c); i++ {
				switch {
				case asciiLetter(c[i-1]) && c[i] == ' ':
					rules &^= cutSpace
				case c[i-1] == '\n' && asciiLetter(c[i]):
					rules &^= cutLine
				case c[i-1] >= 0x80 && c[i] >= 0xe3:
					rules &^= cutCJK
				}
			}
		}
	}
	return rules
}

func asciiLetter(c byte) bool { c |= 0x20; return 'a' <= c && c <= 'z' }

func asciiPunct(c byte) bool { return '!' <= c && c <= '~' && !asciiLetter(c) && (c < '0' || c > '9') }

// cut returns the length of the first chunk of text, 0 when the rest has no
// safe place. text has at least minChunk bytes.
func (t *Tokenizer) cut(text []byte) int {
	for i := minChunk; i < len(text)-2; i++ {
		if t.cutAt(text, i) {
			return i
		}
	}
	return 0
}

// cutAt reports whether text may be cut at i, which has three bytes on either
// side.
func (t *Tokenizer) cutAt(text []byte, i int) bool {
	switch c := text[i]; {
	case c == ' ':
		return t.cuts&cutSpace != 0 && asciiLetter(text[i-1])
	case text[i-1] == '\n':
		p := text[i-2]
		return t.cuts&cutLine != 0 && asciiLetter(c) && p > ' ' && p < 0x7f
	case c == 0xe3 || c == 0xef:
		return t.cuts&cutCJK != 0 && cjkPunct(text[i:]) && ideograph(text[i-3:])
	}
	return false
}

// cjkPunct: 、 。 ， ！ ？ at b.
func cjkPunct(b []byte) bool {
	switch {
	case b[0] == 0xe3 && b[1] == 0x80:
		return b[2] == 0x81 || b[2] == 0x82
	case b[0] == 0xef && b[1] == 0xbc:
		return b[2] == 0x8c || b[2] == 0x81 || b[2] == 0x9f
	}
	return false
}

// ideograph: U+4E00 to U+9F7F at b, which has three bytes.
func ideograph(b []byte) bool {
	return b[0] >= 0xe4 && b[0] <= 0xe9 && !(b[0] == 0xe4 && b[1] < 0xb8) && !(b[0] == 0xe9 && b[1] > 0xbd) &&
		b[1]&0xc0 == 0x80 && b[2]&0xc0 == 0x80
}

// chunkCache maps chunks to their ids, least recently used out first. The
// text is kept and compared, so that a hash collision cannot give wrong ids.
type chunkCache struct {
	seed maphash.Seed
	max  int64

	mu    sync.Mutex // guards what follows; held for map and list work only
	size  int64
	items map[uint64]*list.Element // of *chunkEntry
	order *list.List               // front is the newest
}

type chunkEntry struct {
	key  uint64
	text []byte
	ids  []uint32
}

// chunkOverhead is what an entry costs beside its text and ids, about.
const chunkOverhead = 200

func (e *chunkEntry) bytes() int64 { return int64(len(e.text) + 4*len(e.ids) + chunkOverhead) }

func newChunkCache(maxBytes int64) *chunkCache {
	return &chunkCache{seed: maphash.MakeSeed(), max: maxBytes, items: map[uint64]*list.Element{}, order: list.New()}
}

func (c *chunkCache) key(chunk []byte) uint64 { return maphash.Bytes(c.seed, chunk) }

func (c *chunkCache) get(key uint64, chunk []byte) ([]uint32, bool) {
	c.mu.Lock()
	el, ok := c.items[key]
	if !ok {
		c.mu.Unlock()
		return nil, false
	}
	c.order.MoveToFront(el)
	e := el.Value.(*chunkEntry) // never changed once it is in the list
	c.mu.Unlock()
	return e.ids, bytes.Equal(e.text, chunk)
}

func (c *chunkCache) put(key uint64, chunk []byte, ids []uint32) {
	e := &chunkEntry{key: key, text: bytes.Clone(chunk), ids: append([]uint32(nil), ids...)}
	if e.bytes() > c.max {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if el, ok := c.items[key]; ok { // put by another, or a collision: the newer wins
		c.drop(el)
	}
	c.items[key] = c.order.PushFront(e)
	c.size += e.bytes()
	for c.size > c.max {
		c.drop(c.order.Back())
	}
}

// drop removes an entry; c.mu is held.
func (c *chunkCache) drop(el *list.Element) {
	e := el.Value.(*chunkEntry)
	c.order.Remove(el)
	delete(c.items, e.key)
	c.size -= e.bytes()
}
