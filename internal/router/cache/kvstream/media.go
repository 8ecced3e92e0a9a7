package kvstream

import (
	"math"
	"slices"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
)

// span is what is known of the length of an item in tokens: more than over, at most upTo. That is
// nothing where over is not below upTo: a client may give two images one name.
type span struct{ over, upTo int }

// spans are those of the images, sounds and videos of a batch, by [kvevent.Item.Name]. An event
// states where an item begins and which of the engine's blocks have a part of it, not where it
// ends. A cache group with blocks of the router's size shows that exactly enough, and vLLM
// publishes for all groups in one batch.
type spans map[uint64]span

// see learns from an event.
func (s *spans) see(e *kvevent.Event) {
	size := int(e.BlockSize)
	if e.Kind != kvevent.Stored || size == 0 {
		return
	}
	for i, m := range e.Items {
		got := span{max(m.Last-m.At, 0), math.MaxInt}
		if m.Last+2*size <= len(e.Tokens) { // the next block has no part of it
			got.upTo = m.Last + size - m.At
		}
		if i+1 < len(e.Items) {
			got.upTo = min(got.upTo, e.Items[i+1].At-m.At)
		}
		if was, ok := (*s)[m.Name]; ok {
			got = span{max(got.over, was.over), min(got.upTo, was.upTo)}
		}
		if *s == nil {
			*s = spans{}
		}
		(*s)[m.Name] = got
	}
}

// extras appends the digests of the first n blocks of size tokens of an event to dst, as a prompt
// with its items has them. The engine's blocks have whole tokens, a multiple of size.
func (s spans) extras(dst []uint64, e *kvevent.Event, whole, n, size int) []uint64 {
	items := e.Items
	for from := 0; from < n*size; from += size {
		for len(items) > 0 && !s.reaches(e, items, whole, from) {
			items = items[1:]
		}
		var x uint64
		for _, m := range items {
			if m.At >= from+size {
				break
			}
			x = blockhash.ExtraNamed(x, m.Name, m.At-from)
		}
		dst = append(dst, x)
	}
	return dst
}

// reaches reports whether the first of items has tokens at from or behind it.
func (s spans) reaches(e *kvevent.Event, items []kvevent.Item, whole, from int) bool {
	m, block := items[0], from-from%whole
	if m.At >= from || block != m.Last {
		return m.At >= from || block < m.Last
	}
	if known := s[m.Name]; known.over < known.upTo {
		switch length := from - m.At; {
		case known.over >= length:
			return true
		case known.upTo <= length:
			return false
		}
	}
	// Taken to end behind the last of the tokens with which its part of the block begins. If
	// that is wrong, the block has a name that no prompt has.
	limit := min(block+whole, len(e.Tokens))
	if len(items) > 1 {
		limit = min(limit, items[1].At)
	}
	return from < limit && slices.Contains(e.Tokens[from:limit], e.Tokens[max(m.At, block)])
}
