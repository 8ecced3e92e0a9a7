package kvfeed

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/kvevent"
	"github.com/dynctl/dynctl/internal/router/kvgroup"
	"github.com/dynctl/dynctl/internal/router/kvindex"
)

func tokens(from, n int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32(from + i)
	}
	return t
}

func stored(parent uint64, hashes []uint64, toks []uint32, bs int32) kvevent.Event {
	return kvevent.Event{Kind: kvevent.Stored, Group: -1, Parent: parent, HasParent: parent != 0, Hashes: hashes, Tokens: toks, BlockSize: bs}
}

func removed(hashes ...uint64) kvevent.Event {
	return kvevent.Event{Kind: kvevent.Removed, Group: -1, Hashes: hashes}
}

func with(e kvevent.Event, f func(*kvevent.Event)) kvevent.Event {
	f(&e)
	return e
}

// overlap asks for the leading blocks of a prompt that rank 0 holds.
func overlap(x *kvindex.Index, toks []uint32, key blockhash.Key) int {
	var q kvindex.Query
	x.Overlap(blockhash.Locals(nil, toks, modelBlock, key), &q)
	return q.Depth(0)
}

func TestApplierShapes(t *testing.T) {
	t.Parallel()
	const bs = modelBlock
	type want struct {
		overlap  int // of tokens 0 to 31 under key
		held     int
		counters Counters
		mismatch string
		bigram   bool
	}
	tests := map[string]struct {
		events []kvevent.Event
		key    blockhash.Key
		want   want
	}{
		"chain": {
			events: []kvevent.Event{stored(0, []uint64{1, 2}, tokens(0, 2*bs), bs), stored(2, []uint64{3}, tokens(2*bs, bs), bs)},
			want:   want{overlap: 3, held: 3, counters: Counters{Events: 2, Stored: 3}},
		},
		"duplicate store, one removal": {
			events: []kvevent.Event{stored(0, []uint64{1}, tokens(0, bs), bs), stored(0, []uint64{1}, tokens(0, bs), bs), removed(1)},
			want:   want{counters: Counters{Events: 3, Stored: 2, Removed: 1}},
		},
		"unknown parent": {
			events: []kvevent.Event{stored(9, []uint64{1}, tokens(0, bs), bs)},
			want:   want{counters: Counters{Events: 1, Stored: 1}},
		},
		"evicted in the middle and stored again": {
			events: []kvevent.Event{
				stored(0, []uint64{1, 2, 3}, tokens(0, 3*bs), bs), removed(2), stored(1, []uint64{2}, tokens(bs, bs), bs),
			},
			want: want{overlap: 3, held: 3, counters: Counters{Events: 3, Stored: 4, Removed: 1}},
		},
		"cleared": {
			events: []kvevent.Event{stored(0, []uint64{1}, tokens(0, bs), bs), {Kind: kvevent.Cleared, Group: -1}},
			want:   want{counters: Counters{Events: 2, Stored: 1, Clears: 1}},
		},
		"another tier": {
			events: []kvevent.Event{
				stored(0, []uint64{1}, tokens(0, bs), bs),
				with(removed(1), func(e *kvevent.Event) { e.Medium, e.MediumName = kvevent.CPU, "CPU" }),
				with(stored(1, []uint64{2}, tokens(bs, bs), bs), func(e *kvevent.Event) { e.Medium = kvevent.Disk }),
				with(stored(1, []uint64{3}, tokens(bs, bs), bs), func(e *kvevent.Event) { e.Locality = kvevent.Remote }),
				{Kind: kvevent.Cleared, Group: -1, Medium: kvevent.CPU, MediumName: "CPU"},
			},
			want: want{overlap: 1, held: 1, counters: Counters{Events: 5, Stored: 1, Tiered: 4}},
		},
		"hybrid groups": {
			events: []kvevent.Event{
				with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.Mamba }),
				with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 1, kvevent.FullAttention }),
				with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 2, kvevent.SlidingWindow }),
				with(removed(1), func(e *kvevent.Event) { e.Group = 2 }),
				with(stored(1, []uint64{2}, tokens(bs, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 3, kvevent.FullAttention }),
			},
			want: want{overlap: 1, held: 1, counters: Counters{Events: 5, Stored: 1, OtherGroup: 4}},
		},
		"attention sinks beside a window": {
			events: []kvevent.Event{
				with(stored(0, []uint64{1, 2}, tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 1, kvevent.SlidingWindow }),
				with(stored(0, []uint64{1, 2}, tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.FullAttention }),
				with(removed(1), func(e *kvevent.Event) { e.Group = 1 }),
			},
			want: want{overlap: 2, held: 2, counters: Counters{Events: 3, Stored: 2, OtherGroup: 2}},
		},
		"no full attention": {
			events: []kvevent.Event{with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.ChunkedLocal })},
			want:   want{counters: Counters{Events: 1, OtherGroup: 1}, mismatch: "chunked_local_attention only"},
		},
		"an unknown kind beside full attention": {
			events: []kvevent.Event{
				with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.FullAttention }),
				with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) {
					e.Group, e.CacheKind, e.CacheName = 1, kvevent.OtherCache, "quantum\n"+strings.Repeat("x", 200)
				}),
				with(stored(1, []uint64{2}, tokens(bs, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.FullAttention }),
			},
			want: want{counters: Counters{Events: 3, Stored: 1, OtherGroup: 2}, mismatch: "quantum?" + strings.Repeat("x", maxKindName-8) + ","},
		},
		"removal without a group": {
			events: []kvevent.Event{
				with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 1, kvevent.FullAttention }),
				removed(1),
			},
			want: want{counters: Counters{Events: 2, Stored: 1, Removed: 1}},
		},
		"LoRA": {
			events: []kvevent.Event{with(stored(0, []uint64{1, 2}, tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.LoRAName = "a" })},
			key:    blockhash.Key{LoRA: "a"},
			want:   want{overlap: 2, held: 2, counters: Counters{Events: 1, Stored: 2}},
		},
		"LoRA known by number only": {
			events: []kvevent.Event{with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) { e.LoRAID, e.HasLoRAID = 3, true })},
			want:   want{held: 1, counters: Counters{Events: 1, Stored: 1}},
		},
		"salt on the first block only": {
			events: []kvevent.Event{
				with(stored(0, []uint64{1}, tokens(0, bs), bs), func(e *kvevent.Event) { e.Salt = "s" }),
				stored(1, []uint64{2}, tokens(bs, bs), bs),
				with(stored(2, []uint64{3}, tokens(2*bs, bs), bs), func(e *kvevent.Event) { e.Salt = "s" }),
			},
			key:  blockhash.Key{Salt: "s"},
			want: want{overlap: 3, held: 3, counters: Counters{Events: 3, Stored: 3}},
		},
		"image in the second block": {
			events: []kvevent.Event{with(stored(0, []uint64{1, 2}, tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.ExtraKeys = []uint64{0, 7} })},
			want:   want{overlap: 1, held: 2, counters: Counters{Events: 1, Stored: 2}},
		},
		"no tokens": {
			events: []kvevent.Event{stored(0, []uint64{1, 2}, nil, 0)},
			want:   want{counters: Counters{Events: 1, Tokenless: 2}},
		},
		"short last block": {
			events: []kvevent.Event{stored(0, []uint64{1, 2}, tokens(0, 2*bs-1), bs)},
			want:   want{overlap: 1, held: 1, counters: Counters{Events: 1, Stored: 1, Partial: 1}},
		},
		"partial entries beside full blocks": {
			events: []kvevent.Event{
				stored(0, []uint64{10}, tokens(0, 2*bs), 2*bs),
				stored(10, []uint64{11}, tokens(2*bs, bs), bs),
				stored(11, []uint64{12}, tokens(3*bs, bs), bs),
			},
			want: want{overlap: 2, held: 2, counters: Counters{Events: 3, Stored: 2, Partial: 2}},
		},
		"partial entries first": {
			events: []kvevent.Event{
				stored(0, []uint64{11}, tokens(0, bs), bs),
				stored(0, []uint64{10}, tokens(0, 2*bs), 2*bs),
				removed(11),
			},
			want: want{overlap: 2, held: 2, counters: Counters{Events: 3, Stored: 3, Removed: 1, Resized: 1}},
		},
		"more tokens than blocks": {
			events: []kvevent.Event{stored(0, []uint64{1, 2}, tokens(0, 3*bs), bs)},
			want:   want{counters: Counters{Events: 1, Misfit: 2}},
		},
		"far too few tokens": {
			events: []kvevent.Event{stored(0, []uint64{1, 2, 3}, tokens(0, bs), bs)},
			want:   want{counters: Counters{Events: 1, Misfit: 3}},
		},
		"size from the tokens": {
			events: []kvevent.Event{stored(0, []uint64{1, 2}, tokens(0, 2*bs), 0)},
			want:   want{overlap: 2, held: 2, counters: Counters{Events: 1, Stored: 2}},
		},
		"engine block of three router blocks": {
			events: []kvevent.Event{
				stored(0, []uint64{1, 2}, tokens(0, 6*bs), 3*bs), stored(2, []uint64{3}, tokens(6*bs, 3*bs), 3*bs), removed(3, 2),
			},
			want: want{overlap: 3, held: 3, counters: Counters{Events: 3, Stored: 9, Removed: 6}},
		},
		"not a multiple": {
			events: []kvevent.Event{stored(0, []uint64{1}, tokens(0, 6), 6), stored(1, []uint64{2}, tokens(6, 6), 6)},
			want: want{
				counters: Counters{Events: 2, Mismatched: 2},
				mismatch: "engine's block of 6 tokens is not a multiple of the router's block of 4 tokens",
			},
		},
		"not a multiple after all": {
			events: []kvevent.Event{stored(0, []uint64{1}, tokens(0, bs), bs), stored(1, []uint64{2}, tokens(bs, 6), 6)},
			want: want{
				counters: Counters{Events: 2, Stored: 1, Mismatched: 1, Resized: 1},
				mismatch: "engine's block of 6 tokens",
			},
		},
		"pairs of tokens": {
			events: []kvevent.Event{with(stored(0, []uint64{1, 2}, tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.Bigram = true })},
			want:   want{overlap: 2, held: 2, counters: Counters{Events: 1, Stored: 2}, bigram: true},
		},
		"nothing": {
			events: []kvevent.Event{stored(0, nil, nil, bs), removed()},
			want:   want{counters: Counters{Events: 2}},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := newIndex(t)
			a := NewApplier(bs)
			var ops kvindex.Batch
			a.Apply(&kvevent.Batch{Events: tt.events}, &ops)
			x.Apply(0, &ops)
			got := want{
				overlap: overlap(x, tokens(0, 32), tt.key), held: len(holds(t, x)), counters: a.Counters,
				mismatch: a.Mismatch(), bigram: a.Shape().Bigram,
			}
			if !strings.Contains(got.mismatch, tt.want.mismatch) || (got.mismatch == "") != (tt.want.mismatch == "") {
				t.Errorf("mismatch %q, want %q", got.mismatch, tt.want.mismatch)
			}
			got.mismatch = tt.want.mismatch
			if d := cmp.Diff(tt.want, got, cmp.AllowUnexported(want{})); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// Blocks that differ in what the engine hashes beside tokens never match the
// prompt of the plain model.
func TestApplierKeepsKeysApart(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]func(*kvevent.Event){
		"LoRA":        func(e *kvevent.Event) { e.LoRAName = "a" },
		"LoRA number": func(e *kvevent.Event) { e.LoRAID, e.HasLoRAID = 1, true },
		"salt":        func(e *kvevent.Event) { e.Salt = "a" },
		"image":       func(e *kvevent.Event) { e.ExtraKeys = []uint64{5} },
	} {
		x := newIndex(t)
		a := NewApplier(modelBlock)
		var ops kvindex.Batch
		a.Apply(&kvevent.Batch{Events: []kvevent.Event{with(stored(0, []uint64{1}, tokens(0, 2*modelBlock), 2*modelBlock), f)}}, &ops)
		if r := x.Apply(0, &ops); r.Stored != 2 {
			t.Errorf("%s: stored %d blocks, want 2", name, r.Stored)
		}
		if n := overlap(x, tokens(0, 2*modelBlock), blockhash.Key{}); n != 0 {
			t.Errorf("%s: the plain prompt matches %d blocks", name, n)
		}
	}
}

func TestUsable(t *testing.T) {
	t.Parallel()
	tests := []struct {
		shape         Shape
		overlap, want int
		tokens        int
	}{
		{Shape{}, 5, 5, 0},
		{Shape{Parts: 1}, 5, 5, 0},
		{Shape{Parts: 4}, 3, 0, 0},
		{Shape{Parts: 4}, 9, 8, 0},
		{Shape{Parts: 1, Bigram: true}, 5, 4, 0},
		{Shape{Parts: 4, Bigram: true}, 9, 4, 0},
		{Shape{Parts: 4, Bigram: true}, 2, 0, 0},
		{Shape{Parts: 1, Drops: true}, 5, 4, 9},
		{Shape{Parts: 1, Drops: true}, 5, 3, 5}, // the prompt's last token comes first
		{Shape{Parts: 4, Drops: true}, 8, 0, 8},
		{Shape{Parts: 4, Drops: true}, 8, 4, 9},
		{Shape{Parts: 4, Drops: true, Bigram: true}, 8, 4, 9},
		{Shape{Drops: true}, 1, 0, 9},
	}
	for _, tt := range tests {
		if got := tt.shape.Usable(tt.overlap, &kvgroup.Prompt{Tokens: tt.tokens, Block: 1}); got != tt.want {
			t.Errorf("%+v: %d of %d blocks usable, want %d", tt.shape, got, tt.overlap, tt.want)
		}
	}
}

// Engine blocks that begin alike share parts, which go with the last of them.
func TestPartsAreShared(t *testing.T) {
	t.Parallel()
	const bs = 4 * modelBlock
	x := newIndex(t)
	a := NewApplier(modelBlock)
	apply := func(events ...kvevent.Event) {
		var ops kvindex.Batch
		a.Apply(&kvevent.Batch{Events: events}, &ops)
		x.Apply(0, &ops)
	}
	like := func(same, other int) []uint32 { // same tokens of the first prompt, then others
		return append(tokens(0, same), tokens(other, bs-same)...)
	}
	one, two, three := like(bs, 0), like(2*modelBlock, 1000), like(3*modelBlock, 2000)
	check := func(when string, want ...int) {
		t.Helper()
		got := []int{overlap(x, one, blockhash.Key{}), overlap(x, two, blockhash.Key{}), overlap(x, three, blockhash.Key{})}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", when, d)
		}
	}
	apply(stored(0, []uint64{1}, one, bs), stored(0, []uint64{2}, two, bs), stored(0, []uint64{3}, three, bs))
	check("all", 4, 4, 4)
	apply(stored(2, []uint64{4}, tokens(5000, bs), bs))
	if n := overlap(x, append(append([]uint32(nil), two...), tokens(5000, bs)...), blockhash.Key{}); n != 8 {
		t.Errorf("child: %d blocks", n)
	}
	apply(stored(0, []uint64{1}, one, bs)) // once more
	apply(removed(1))
	check("first gone", 3, 4, 4)
	apply(removed(3), removed(3))
	check("third gone", 2, 4, 2)
	apply(removed(2))
	check("second gone", 0, 0, 0)
	apply(stored(0, []uint64{2}, one, bs), stored(0, []uint64{2}, two, bs)) // another content under one name
	check("renamed", 2, 4, 2)
	apply(removed(2), removed(4))
	check("empty", 0, 0, 0)
	if n := len(holds(t, x)); n != 0 || len(a.split.refs)+len(a.split.tail) != 0 {
		t.Errorf("%d blocks and %d accounts left behind", n, len(a.split.refs)+len(a.split.tail))
	}
}
