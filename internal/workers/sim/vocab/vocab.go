// Package vocab is the built-in tokenizer of simulated engines: about four
// characters of English a token, no model file, every byte string possible.
//
// # Tokens
//
//	0 <|endoftext|>  1 <|im_start|>  2 <|im_end|>
//	3 … 258          one byte each, 0x00 … 0xff
//	then             " " + word, for each word of the list
//	then             word, for each word of the list
//	then             letter pairs "aa" … "zz", common endings, runs of spaces
//	up to Size-1     reserved ids; they read as "⟨id⟩" and no text makes them
//
// # Splitting
//
// Text is cut into pieces: a special token; an optional space with a run of
// ASCII letters; an optional space with a run of at most three digits; a run of
// newlines; a run of spaces (less the one that belongs to the next word); any
// other single byte. A piece that is in the table is one token. A longer word
// is cut from the left into the longest parts that are; what is left are bytes.
// Decoding joins the bytes of the tokens, so it undoes encoding exactly.
//
// # Chat template
//
//	[<|im_start|>system\n# Tools\n{tools as JSON}<|im_end|>\n]
//	<|im_start|>{role}\n{content}<|im_end|>\n   for each message
//	<|im_start|>assistant\n                     to ask for an answer
package vocab

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Ids of the special tokens.
const (
	EndOfText uint32 = 0
	Start     uint32 = 1
	End       uint32 = 2
	firstByte uint32 = 3
)

// Size is the number of ids that the model knows, reserved ones included. An
// id of Size or more is out of vocabulary.
const Size = 151936

var specials = [...]string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"}

// Vocab is the tokenizer. It is immutable and safe for concurrent use.
type Vocab struct {
	ids    map[string]uint32
	texts  []string
	words  []uint32
	maxLen int
}

// New builds the table.
func New() *Vocab {
	v := &Vocab{ids: make(map[string]uint32, 4096)}
	for _, s := range specials {
		v.texts = append(v.texts, s)
	}
	for b := range 256 {
		v.ids[string([]byte{byte(b)})] = firstByte + uint32(b)
		v.texts = append(v.texts, string([]byte{byte(b)}))
	}
	words := strings.Fields(wordList)
	for _, w := range words {
		v.words = append(v.words, v.add(" "+w))
	}
	for _, w := range words {
		v.add(w)
		v.add(strings.ToUpper(w[:1]) + w[1:])
		v.add(" " + strings.ToUpper(w[:1]) + w[1:])
	}
	for a := 'a'; a <= 'z'; a++ {
		for b := 'a'; b <= 'z'; b++ {
			v.add(string([]rune{a, b}))
			v.add(string([]rune{' ', a, b}))
		}
	}
	for _, s := range strings.Fields(partList) {
		v.add(s)
	}
	for i := range 1000 {
		v.add(fmt.Sprint(i))
		v.add(fmt.Sprint(" ", i))
		if i < 100 {
			v.add(fmt.Sprintf("%02d", i))
		}
		v.add(fmt.Sprintf("%03d", i))
	}
	for n := 2; n <= 16; n++ {
		v.add(strings.Repeat(" ", n))
	}
	v.add("\n\n")
	return v
}

func (v *Vocab) add(s string) uint32 {
	if id, ok := v.ids[s]; ok {
		return id
	}
	id := uint32(len(v.texts))
	v.ids[s] = id
	v.texts = append(v.texts, s)
	v.maxLen = max(v.maxLen, len(s))
	return id
}

// Word is a token that a model answers with: a word with a space before, so that
// text made of such tokens encodes to the same tokens again.
func (v *Vocab) Word(_ []uint32, draw uint64) uint32 { return v.words[draw%uint64(len(v.words))] }

// Letter is a token of an answer that is half of words and half of characters that take two to
// four tokens, a byte each. Scripts and signs without a token of their own do that in a model.
// before is what it comes after; Letter continues a character that is begun there.
func (v *Vocab) Letter(before []uint32, draw uint64) uint32 {
	var begun []byte
	for i := len(before) - 1; i >= 0 && len(begun) < utf8.UTFMax-1; i-- {
		id := before[i]
		if id < firstByte+utf8.RuneSelf || id >= firstByte+256 {
			break
		}
		begun = append([]byte{byte(id - firstByte)}, begun...)
		if utf8.RuneStart(begun[0]) {
			break
		}
	}
	one := func(b byte) uint32 { return firstByte + uint32(b) }
	draw, half := draw>>1, draw&1
	if len(begun) == 0 || !utf8.RuneStart(begun[0]) || utf8.FullRune(begun) {
		if half == 0 {
			return v.Word(nil, draw)
		}
		return one(leads[draw%uint64(len(leads))])
	}
	low, high := byte(0x80), byte(0xBF)
	if len(begun) == 1 { // the second byte is narrower where the rune would be too small, a surrogate or too large
		switch begun[0] {
		case 0xE0:
			low = 0xA0
		case 0xED:
			high = 0x9F
		case 0xF0:
			low = 0x90
		case 0xF4:
			high = 0x8F
		}
	}
	return one(low + byte(draw%uint64(high-low+1)))
}

// leads are first bytes of characters of two, three and four bytes.
const leads = "\xC3\xD0\xD7\xE0\xE3\xE4\xED\xEF\xF0\xF4"

// Encode appends the tokens of text to dst. Special tokens in the text are
// recognised, as the tokenizers of real engines do.
func (v *Vocab) Encode(dst []uint32, text string) []uint32 {
	for len(text) > 0 {
		if text[0] == '<' {
			if id, n := special(text); n > 0 {
				dst = append(dst, id)
				text = text[n:]
				continue
			}
		}
		n := piece(text)
		dst = v.cut(dst, text[:n])
		text = text[n:]
	}
	return dst
}

func special(text string) (uint32, int) {
	for i, s := range specials {
		if strings.HasPrefix(text, s) {
			return uint32(i), len(s)
		}
	}
	return 0, 0
}

func letter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }
func digit(b byte) bool  { return b >= '0' && b <= '9' }

// piece is the length of the first piece of a text that is not empty.
func piece(s string) int {
	i := 0
	if s[0] == ' ' {
		if len(s) == 1 {
			return 1
		}
		i = 1
	}
	switch c := s[i]; {
	case letter(c):
		for i < len(s) && letter(s[i]) {
			i++
		}
		return i
	case digit(c):
		end := min(len(s), i+3)
		for i < end && digit(s[i]) {
			i++
		}
		return i
	case i == 1 && c == ' ':
		for i < len(s) && s[i] == ' ' {
			i++
		}
		if i < len(s) && (letter(s[i]) || digit(s[i])) {
			i--
		}
		return i
	case i == 1:
		return 1
	case c == '\n':
		for i < len(s) && s[i] == '\n' {
			i++
		}
		return i
	}
	return 1
}

// cut appends the tokens of one piece.
func (v *Vocab) cut(dst []uint32, p string) []uint32 {
	for len(p) > 0 {
		n := min(len(p), v.maxLen)
		for ; n > 1; n-- {
			if _, ok := v.ids[p[:n]]; ok {
				break
			}
		}
		dst = append(dst, v.ids[p[:n]])
		p = p[n:]
	}
	return dst
}

// Text is the text of one token. Reserved ids read as "⟨id⟩"; special tokens
// as themselves.
func (v *Vocab) Text(id uint32) string {
	if int(id) < len(v.texts) {
		return v.texts[id]
	}
	return fmt.Sprintf("⟨%d⟩", id)
}

// Decode joins the texts of the tokens. Special tokens are left out if skip is
// set. The result may cut a character in two at its ends; see Printable.
func (v *Vocab) Decode(ids []uint32, skip bool) string {
	var b strings.Builder
	for _, id := range ids {
		if skip && id < firstByte {
			continue
		}
		b.WriteString(v.Text(id))
	}
	return b.String()
}

// Printable replaces what is not UTF-8 by U+FFFD, as engines do in answers.
func Printable(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// Message is one turn of a chat.
type Message struct {
	Role    string
	Content string
}

// Chat appends the tokens of a rendered chat. tools is the compact JSON of the
// request's tools, empty for none.
func (v *Vocab) Chat(dst []uint32, tools string, messages []Message, generate bool) []uint32 {
	if tools != "" {
		dst = v.turn(dst, "system", "# Tools\n"+tools)
	}
	for _, m := range messages {
		dst = v.turn(dst, m.Role, m.Content)
	}
	if generate {
		dst = append(dst, Start)
		dst = v.Encode(dst, "assistant\n")
	}
	return dst
}

func (v *Vocab) turn(dst []uint32, role, content string) []uint32 {
	dst = append(dst, Start)
	// The newline is a piece of its own, so that equal contents give equal
	// tokens whatever they begin with.
	dst = v.Encode(dst, role)
	dst = append(dst, firstByte+'\n')
	dst = v.Encode(dst, content)
	dst = append(dst, End)
	return append(dst, firstByte+'\n')
}
