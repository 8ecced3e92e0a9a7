package kvevent

import (
	"encoding/hex"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// TestMediaKeys: the digest of a block with images is that of a prompt with them, however the
// engine encodes it.
func TestMediaKeys(t *testing.T) {
	t.Parallel()
	var d Decoder
	var b Batch
	digests := func(keys string) []uint64 {
		t.Helper()
		// ["BlockStored", [1], nil, [7, 7], 2, nil, "GPU", nil, keys]
		raw, err := hex.DecodeString("92cb3ff8000000000000" + "91" + "99ab426c6f636b53746f726564" + "9101" + "c0" + "920707" + "02" + "c0" + "a3475055" + "c0" + keys)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Decode(raw, &b); err != nil || len(b.Events) != 1 || b.Skipped > 0 {
			t.Fatalf("%v, %+v", err, b)
		}
		return slices.Clone(b.Events[0].ExtraKeys)
	}
	want := []uint64{blockhash.ExtraMedia(blockhash.ExtraMedia(0, "ab", -5), "c", 1)}
	for name, keys := range map[string]string{
		"short": "91" + "92" + "92a26162fb" + "92a16301",
		"long":  "dd00000001" + "dc0002" + "dd00000002db000000026162d3fffffffffffffffb" + "92d90163cf0000000000000001",
	} {
		if got := digests(keys); !slices.Equal(got, want) {
			t.Errorf("%s: %x, want %x", name, got, want)
		}
	}
	for name, keys := range map[string]string{"another offset": "91" + "92" + "92a26162fa" + "92a16301", "another image": "91" + "92" + "92a26161fb" + "92a16301", "three members": "91" + "92" + "93a26162fb01" + "92a16301"} {
		if slices.Equal(digests(keys), want) {
			t.Errorf("%s has the same digest", name)
		}
	}
}

// TestPlaceholder: what stands for media is the token where an item begins, and that of a block
// in the middle of one. An engine that has several is not one whose places are known.
func TestPlaceholder(t *testing.T) {
	t.Parallel()
	var d Decoder
	var b Batch
	for _, c := range []struct {
		name, tokens, keys string
		want               Placeholder
	}{
		// Two blocks of 2 tokens.
		{"none", "9407080909", "c0", Placeholder{}},
		{"text", "9407080909", "92" + "c0" + "c0", Placeholder{}},
		{"one item in two blocks", "9407090909", "92" + "9192a16101" + "9192a161ff", Placeholder{Token: 9, Known: true}},
		{"its first token is another one", "9407080909", "92" + "9192a16101" + "9192a161ff", Placeholder{Token: 9, Known: true, Mixed: true}},
		{"an item after the block", "9407080909", "92" + "9192a16102" + "c0", Placeholder{}},
		{"another form", "9407080909", "92" + "91a161" + "c0", Placeholder{}},
		{"fewer tokens than blocks", "9107", "92" + "c0" + "9192a16100", Placeholder{}},
	} {
		// ["BlockStored", [1, 2], nil, tokens, 2, nil, "GPU", nil, keys]
		raw, err := hex.DecodeString("92cb3ff8000000000000" + "91" + "99ab426c6f636b53746f726564" + "920102" + "c0" + c.tokens + "02" + "c0" + "a3475055" + "c0" + c.keys)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Decode(raw, &b); err != nil || len(b.Events) != 1 || b.Events[0].Placeholder != c.want {
			t.Errorf("%s: %v, %+v, want %+v", c.name, err, b.Events, c.want)
		}
	}
}

// TestItemsOfKeys: an event has its items where its keys hold nothing else.
func TestItemsOfKeys(t *testing.T) {
	t.Parallel()
	var d Decoder
	var b Batch
	a := blockhash.MediaName("a")
	for _, c := range []struct {
		name, keys string
		want       []Item
	}{
		{"in two blocks", "92" + "9192a16101" + "9192a161ff", []Item{{a, 1, 2}}},
		{"from before", "92" + "9192a161fb" + "c0", []Item{{a, -5, 0}}},
		{"twice", "92" + "9192a16100" + "9192a16101", []Item{{a, 0, 0}, {a, 3, 2}}},
		{"out of order", "92" + "9192a16101" + "9192a161fe", nil},
		{"far away", "92" + "9192a161cf7fffffffffffffff" + "c0", nil},
		{"embeddings, too", "92" + "9192a16101" + "91c40107", nil},
		{"a salt beside it", "92" + "9292a16101a173" + "c0", []Item{{a, 1, 0}}},
	} {
		// ["BlockStored", [1, 2], nil, [7, 9, 9, 9], 2, nil, "GPU", nil, keys]
		raw, err := hex.DecodeString("92cb3ff8000000000000" + "91" + "99ab426c6f636b53746f726564" + "920102" + "c0" + "9407090909" + "02" + "c0" + "a3475055" + "c0" + c.keys)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Decode(raw, &b); err != nil || len(b.Events) != 1 || !slices.Equal(b.Events[0].Items, c.want) {
			t.Errorf("%s: %v, %+v, want %+v", c.name, err, b.Events, c.want)
		}
	}
}

// TestWideTokens: SGLang's ids in place of an image have up to 63 bits. Blocks with others differ.
func TestWideTokens(t *testing.T) {
	t.Parallel()
	var d Decoder
	var b Batch
	// ["BlockStored", [1, 2], nil, [3, 2^40, 4, 5], 2, nil, "GPU"]
	raw, err := hex.DecodeString("92cb3ff8000000000000" + "91" + "97ab426c6f636b53746f726564" + "920102" + "c0" + "9403cf00000100000000000405" + "02" + "c0" + "a3475055")
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Decode(raw, &b); err != nil || len(b.Events) != 1 || b.Skipped > 0 {
		t.Fatalf("%v, %+v", err, b)
	}
	e := &b.Events[0]
	if !slices.Equal(e.Tokens, []uint32{3, math.MaxUint32, 4, 5}) || !slices.Equal(e.ExtraKeys, []uint64{blockhash.ExtraWide(0, 1, 1<<40), 0}) {
		t.Errorf("%v, %x", e.Tokens, e.ExtraKeys)
	}
}

func TestLookahead(t *testing.T) {
	t.Parallel()
	var d Decoder
	var b Batch
	decode := func(ahead string) *Batch {
		t.Helper()
		// {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1, 2, 3, 4], "block_size": 2, "lookahead_token_ids": …}
		text := func(s string) string { return hex.EncodeToString(append([]byte{0xa0 | byte(len(s))}, s...)) }
		raw, err := hex.DecodeString("92cb3ff8000000000000" + "91" + "85" + text("type") + text("BlockStored") + text("block_hashes") + "920102" + text("token_ids") + "9401020304" + text("block_size") + "02" + text("lookahead_token_ids") + ahead)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Decode(raw, &b); err != nil {
			t.Fatal(err)
		}
		return &b
	}
	if b := decode("92" + "920304" + "920506"); len(b.Events) != 1 || b.Events[0].Ahead != 2 || !slices.Equal(b.Events[0].ExtraKeys, blockhash.Extras(nil, []uint32{1, 2, 3, 4, 5, 6}, nil, 2, 2, 1)) {
		t.Errorf("%+v", b)
	}
	if b := decode("c0"); len(b.Events) != 1 || b.Events[0].Ahead != 0 || b.Events[0].ExtraKeys != nil {
		t.Errorf("none: %+v", b)
	}
	for name, ahead := range map[string]string{"of different lengths": "92" + "9103" + "920506", "no lists": "920304", "too many": "91" + "dc0041" + strings.Repeat("01", 65), "too wide": "9191cf0000000100000000"} {
		if b := decode(ahead); b.Skipped != 1 {
			t.Errorf("%s: %+v", name, b)
		}
	}
}
