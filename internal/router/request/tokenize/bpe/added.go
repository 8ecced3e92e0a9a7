package bpe

import (
	"bytes"
	"unicode/utf8"
)

// addedToken is an entry of "added_tokens": text that becomes one id before
// the model sees it.
type addedToken struct {
	id                     uint32
	content                string
	lstrip, rstrip, single bool
}

// matcher finds the leftmost-longest occurrences of a set of added tokens.
type matcher struct {
	tokens []addedToken
	first  [256]bool
	only   int // the one first byte of all tokens, or -1
	nodes  []trieNode
}

type trieNode struct {
	edge  []byte  // sorted by insertion; sets are small below the root
	child []int32 // parallel to edge
	token int32   // index into tokens, -1
}

func newMatcher(tokens []addedToken) *matcher {
	m := &matcher{tokens: tokens, only: -1, nodes: []trieNode{{token: -1}}}
	for i, tok := range tokens {
		at := int32(0)
		for j := range len(tok.content) {
			c := tok.content[j]
			var next int32
			if k := bytes.IndexByte(m.nodes[at].edge, c); k >= 0 {
				next = m.nodes[at].child[k]
			} else {
				next = int32(len(m.nodes))
				m.nodes = append(m.nodes, trieNode{token: -1})
				m.nodes[at].edge = append(m.nodes[at].edge, c)
				m.nodes[at].child = append(m.nodes[at].child, next)
			}
			at = next
		}
		m.nodes[at].token = int32(i)
		m.first[tok.content[0]] = true
	}
	if len(m.nodes[0].edge) == 1 {
		m.only = int(m.nodes[0].edge[0])
	}
	return m
}

// find returns the leftmost-longest match in b[from:], as token index and
// offsets; -1 for none.
func (m *matcher) find(b []byte, from int) (tok, start, end int) {
	for i := from; i < len(b); i++ {
		if m.only >= 0 {
			k := bytes.IndexByte(b[i:], byte(m.only))
			if k < 0 {
				break
			}
			i += k
		} else {
			for i < len(b) && !m.first[b[i]] {
				i++
			}
			if i == len(b) {
				break
			}
		}
		at, best, bestEnd := int32(0), int32(-1), 0
		for j := i; j < len(b); j++ {
			k := bytes.IndexByte(m.nodes[at].edge, b[j])
			if k < 0 {
				break
			}
			at = m.nodes[at].child[k]
			if m.nodes[at].token >= 0 {
				best, bestEnd = m.nodes[at].token, j+1
			}
		}
		if best >= 0 {
			return int(best), i, bestEnd
		}
	}
	return -1, 0, 0
}

// each cuts b at its added tokens, in order: text is called for each
// non-empty stretch between tokens, token for each token.
func (m *matcher) each(t *classTable, b []byte, dst []uint32, text func([]uint32, []byte) []uint32) []uint32 {
	done, from := 0, 0
	for {
		k, start, end := m.find(b, from)
		if k < 0 {
			break
		}
		from = end // also after a rejected match, as the reference does
		tok := &m.tokens[k]
		if tok.single && (t.wordBefore(b, start) || t.wordAfter(b, end)) {
			continue
		}
		if tok.lstrip {
			for start > done {
				c, n := t.before(b, start)
				if c&clWS == 0 {
					break
				}
				start -= n
			}
			start = max(start, done)
		}
		if tok.rstrip {
			end = t.run(b, end, clWS)
		}
		if done < start {
			dst = text(dst, b[done:start])
		}
		dst = append(dst, tok.id)
		done = end
	}
	if done < len(b) {
		dst = text(dst, b[done:])
	}
	return dst
}

// before returns the class and length of the character that ends at b[:i].
func (t *classTable) before(b []byte, i int) (class, int) {
	_, n := utf8.DecodeLastRune(b[:i])
	c, _ := t.at(b[i-n:i], 0)
	return c, n
}

// isWord is \w: letters, marks, decimal digits, letter numbers, connector
// punctuation and join controls.
func (t *classTable) isWord(b []byte) bool {
	c, _ := t.at(b, 0)
	if c&(clL|clM) != 0 {
		return true
	}
	r, _ := utf8.DecodeRune(b)
	return wordExtra(r, c)
}

func (t *classTable) wordBefore(b []byte, i int) bool {
	if i == 0 {
		return false
	}
	_, n := utf8.DecodeLastRune(b[:i])
	return t.isWord(b[i-n : i])
}

func (t *classTable) wordAfter(b []byte, i int) bool {
	return i < len(b) && t.isWord(b[i:])
}
