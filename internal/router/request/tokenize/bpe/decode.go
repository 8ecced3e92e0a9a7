package bpe

import (
	"slices"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// addedText is what an added token is decoded to.
type addedText struct {
	bytes   []byte
	special bool
}

// byteLevelDecoder reports whether a file's decoder is the byte-level one alone, by which
// the text of ids is the bytes of their tokens.
func byteLevelDecoder(v rawjson.Value) bool {
	if list := slices.Collect(v.Get("decoders").Elements()); v.Get("type").String() == "Sequence" && len(list) == 1 {
		v = list[0]
	}
	return v.Get("type").String() == "ByteLevel"
}

// alphabet is [byteAlphabet], made once.
var alphabet = byteAlphabet()

// alphabetBytes are the bytes that a token of the byte-level alphabet stands for; a
// token with any other character stands for itself.
func alphabetBytes(token string) []byte {
	b := make([]byte, 0, len(token))
	for _, r := range token {
		c, ok := alphabet[r]
		if !ok {
			return []byte(token)
		}
		b = append(b, c)
	}
	return b
}

// Decodes reports whether the file says that ids are decoded as AppendBytes does.
func (t *Tokenizer) Decodes() bool { return t.decodes }

// AppendBytes appends the bytes of a token, which may be a part of a character; none of a
// special token, unless those are wanted. ok is false where no token has the id.
func (t *Tokenizer) AppendBytes(dst []byte, id uint32, special bool) (b []byte, ok bool) {
	if a, is := t.texts[id]; is {
		if a.special && !special {
			return dst, true
		}
		return append(dst, a.bytes...), true
	}
	if uint64(id) >= uint64(len(t.tokens)) || t.tokens[id] == nil {
		return dst, false
	}
	return append(dst, t.tokens[id]...), true
}
