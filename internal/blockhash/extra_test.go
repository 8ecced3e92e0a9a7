package blockhash

import (
	"slices"
	"testing"
)

func TestExtras(t *testing.T) {
	t.Parallel()
	tokens := make([]uint32, 14)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	a, b := Media{ID: "a", Offset: 2, Length: 5}, Media{ID: "b", Offset: 7, Length: 1}
	one := func(id string, at int) uint64 { return ExtraMedia(0, id, at) }
	for _, c := range []struct {
		media       []Media
		size, ahead int
		want        []uint64
	}{
		{nil, 4, 0, []uint64{0, 0, 0}},
		{[]Media{a}, 4, 0, []uint64{one("a", 2), one("a", -2), 0}},
		{[]Media{a, b}, 4, 0, []uint64{one("a", 2), ExtraMedia(one("a", -2), "b", 3), 0}},
		{[]Media{b}, 7, 0, []uint64{0, one("b", 0)}},
		{nil, 7, 1, []uint64{ExtraAhead(0, 7)}}, // the last block has no token behind it
		{[]Media{b}, 7, 1, []uint64{ExtraAhead(one("b", 7), 7)}},
		{[]Media{b}, 4, 2, []uint64{ExtraAhead(ExtraAhead(0, 4), 5), ExtraAhead(ExtraAhead(one("b", 3), 8), 9), ExtraAhead(ExtraAhead(0, 12), 13)}},
		{nil, 0, 0, nil},
		{[]Media{a}, 20, 0, nil},
	} {
		if got := Extras(nil, tokens, c.media, c.size, c.ahead, 1); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %x, want %x", c, got, c.want)
		}
	}
	if got := Extras(nil, tokens, []Media{b}, 7, 0, 2); !slices.Equal(got, []uint64{0, 0, one("b", 0), one("b", 0)}) {
		t.Errorf("of blocks with two parts: %x", got)
	}
	seen := map[uint64]bool{0: true}
	for _, x := range []uint64{one("a", 1), one("a", -1), one("b", 1), ExtraMedia(one("a", 1), "b", 1), ExtraWide(0, 1, 1<<40), ExtraWide(0, 2, 1<<40), ExtraAhead(0, 1), ExtraAhead(0, 2)} {
		if seen[x] {
			t.Errorf("%x stands for two", x)
		}
		seen[x] = true
	}
}

// TestChunker: an image is one hash, which depends on the text before it, and it is no text.
func TestChunker(t *testing.T) {
	t.Parallel()
	chain := func(text string, name byte, rest string) []uint64 {
		c := NewChunker(4, Key{})
		return Chain(nil, c.Text(c.Whole(c.Text(nil, []byte(text)), [16]byte{name}), []byte(rest)))
	}
	x := chain("abcdef", 1, "ghij")
	if len(x) != 3 {
		t.Fatalf("%d hashes", len(x))
	}
	for _, c := range []struct {
		got  []uint64
		same int
	}{
		{chain("abcdef", 2, "ghij"), 1}, {chain("abcdeg", 1, "ghij"), 1}, {chain("abcdef", 1, "ghik"), 2}, {chain("abcd", 1, "ghij"), 1},
	} {
		n := 0
		for n < len(x) && c.got[n] == x[n] {
			n++
		}
		if n != c.same {
			t.Errorf("%d hashes are the same, want %d", n, c.same)
		}
	}
}
