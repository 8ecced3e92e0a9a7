package kvstream

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

func with(e kvevent.Event, f func(*kvevent.Event)) kvevent.Event {
	f(&e)
	return e
}

// overlap asks for the leading blocks of a prompt that rank 0 holds.
func overlap(x *kvindex.Index, toks []uint32, key blockhash.Key) int {
	var q kvindex.Query
	x.Overlap(blockhash.Locals(nil, toks, kvmodel.Block, key), &q)
	return q.Depth(0)
}

func TestApplierShapes(t *testing.T) {
	t.Parallel()
	const bs = kvmodel.Block
	type want struct {
		overlap  int // of tokens 0 to 31 under key
		held     int
		counters Applied
		mismatch string
		bigram   bool
	}
	tests := map[string]struct {
		events []kvevent.Event
		key    blockhash.Key
		want   want
	}{
		"chain": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), bs), kvmodel.Stored(2, []uint64{3}, kvmodel.Tokens(2*bs, bs), bs)},
			want:   want{overlap: 3, held: 3, counters: Applied{Events: 2, Stored: 3}},
		},
		"duplicate store, one removal": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), kvmodel.Removed(1)},
			want:   want{counters: Applied{Events: 3, Stored: 2, Removed: 1}},
		},
		"unknown parent": {
			events: []kvevent.Event{kvmodel.Stored(9, []uint64{1}, kvmodel.Tokens(0, bs), bs)},
			want:   want{counters: Applied{Events: 1, Stored: 1}},
		},
		"evicted in the middle and stored again": {
			events: []kvevent.Event{
				kvmodel.Stored(0, []uint64{1, 2, 3}, kvmodel.Tokens(0, 3*bs), bs), kvmodel.Removed(2), kvmodel.Stored(1, []uint64{2}, kvmodel.Tokens(bs, bs), bs),
			},
			want: want{overlap: 3, held: 3, counters: Applied{Events: 3, Stored: 4, Removed: 1}},
		},
		"cleared": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), {Kind: kvevent.Cleared, Group: -1}},
			want:   want{counters: Applied{Events: 2, Stored: 1, Clears: 1}},
		},
		"another tier": {
			events: []kvevent.Event{
				kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs),
				with(kvmodel.Removed(1), func(e *kvevent.Event) { e.Medium, e.MediumName = kvevent.CPU, "CPU" }),
				with(kvmodel.Stored(1, []uint64{2}, kvmodel.Tokens(bs, bs), bs), func(e *kvevent.Event) { e.Medium = kvevent.Disk }),
				with(kvmodel.Stored(1, []uint64{3}, kvmodel.Tokens(bs, bs), bs), func(e *kvevent.Event) { e.Locality = kvevent.Remote }),
				{Kind: kvevent.Cleared, Group: -1, Medium: kvevent.CPU, MediumName: "CPU"},
			},
			want: want{overlap: 1, held: 1, counters: Applied{Events: 5, Stored: 1, Tiered: 4}},
		},
		"hybrid groups": {
			events: []kvevent.Event{
				with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.Mamba }),
				with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 1, kvevent.FullAttention }),
				with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 2, kvevent.SlidingWindow }),
				with(kvmodel.Removed(1), func(e *kvevent.Event) { e.Group = 2 }),
				with(kvmodel.Stored(1, []uint64{2}, kvmodel.Tokens(bs, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 3, kvevent.FullAttention }),
			},
			want: want{overlap: 1, held: 1, counters: Applied{Events: 5, Stored: 1, OtherGroup: 4}},
		},
		"attention sinks beside a window": {
			events: []kvevent.Event{
				with(kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 1, kvevent.SlidingWindow }),
				with(kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.FullAttention }),
				with(kvmodel.Removed(1), func(e *kvevent.Event) { e.Group = 1 }),
			},
			want: want{overlap: 2, held: 2, counters: Applied{Events: 3, Stored: 2, OtherGroup: 2}},
		},
		"no full attention": {
			events: []kvevent.Event{with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.ChunkedLocal })},
			want:   want{counters: Applied{Events: 1, OtherGroup: 1}, mismatch: "chunked_local_attention only"},
		},
		"an unknown kind beside full attention": {
			events: []kvevent.Event{
				with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.FullAttention }),
				with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) {
					e.Group, e.CacheKind, e.CacheName = 1, kvevent.OtherCache, "quantum\n"+strings.Repeat("x", 200)
				}),
				with(kvmodel.Stored(1, []uint64{2}, kvmodel.Tokens(bs, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 0, kvevent.FullAttention }),
			},
			want: want{counters: Applied{Events: 3, Stored: 1, OtherGroup: 2}, mismatch: "quantum?" + strings.Repeat("x", maxKindName-8) + ","},
		},
		"removal without a group": {
			events: []kvevent.Event{
				with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind = 1, kvevent.FullAttention }),
				kvmodel.Removed(1),
			},
			want: want{counters: Applied{Events: 2, Stored: 1, Removed: 1}},
		},
		"LoRA": {
			events: []kvevent.Event{with(kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.LoRAName = "a" })},
			key:    blockhash.Key{LoRA: "a"},
			want:   want{overlap: 2, held: 2, counters: Applied{Events: 1, Stored: 2}},
		},
		"LoRA known by number only": {
			events: []kvevent.Event{with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.LoRAID, e.HasLoRAID = 3, true })},
			want:   want{held: 1, counters: Applied{Events: 1, Stored: 1}},
		},
		"salt on the first block only": {
			events: []kvevent.Event{
				with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.Salt = "s" }),
				kvmodel.Stored(1, []uint64{2}, kvmodel.Tokens(bs, bs), bs),
				with(kvmodel.Stored(2, []uint64{3}, kvmodel.Tokens(2*bs, bs), bs), func(e *kvevent.Event) { e.Salt = "s" }),
			},
			key:  blockhash.Key{Salt: "s"},
			want: want{overlap: 3, held: 3, counters: Applied{Events: 3, Stored: 3}},
		},
		"image in the second block": {
			events: []kvevent.Event{with(kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.ExtraKeys = []uint64{0, 7} })},
			want:   want{overlap: 1, held: 2, counters: Applied{Events: 1, Stored: 2}},
		},
		"no tokens": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1, 2}, nil, 0)},
			want:   want{counters: Applied{Events: 1, Tokenless: 2}},
		},
		"short last block": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs-1), bs)},
			want:   want{overlap: 1, held: 1, counters: Applied{Events: 1, Stored: 1, Partial: 1}},
		},
		"partial entries beside full blocks": {
			events: []kvevent.Event{
				kvmodel.Stored(0, []uint64{10}, kvmodel.Tokens(0, 2*bs), 2*bs),
				kvmodel.Stored(10, []uint64{11}, kvmodel.Tokens(2*bs, bs), bs),
				kvmodel.Stored(11, []uint64{12}, kvmodel.Tokens(3*bs, bs), bs),
			},
			want: want{overlap: 2, held: 2, counters: Applied{Events: 3, Stored: 2, Partial: 2}},
		},
		"partial entries first": {
			events: []kvevent.Event{
				kvmodel.Stored(0, []uint64{11}, kvmodel.Tokens(0, bs), bs),
				kvmodel.Stored(0, []uint64{10}, kvmodel.Tokens(0, 2*bs), 2*bs),
				kvmodel.Removed(11),
			},
			want: want{overlap: 2, held: 2, counters: Applied{Events: 3, Stored: 3, Removed: 1, Resized: 1}},
		},
		"more tokens than blocks": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 3*bs), bs)},
			want:   want{counters: Applied{Events: 1, Misfit: 2}},
		},
		"far too few tokens": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1, 2, 3}, kvmodel.Tokens(0, bs), bs)},
			want:   want{counters: Applied{Events: 1, Misfit: 3}},
		},
		"size from the tokens": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), 0)},
			want:   want{overlap: 2, held: 2, counters: Applied{Events: 1, Stored: 2}},
		},
		"engine block of three router blocks": {
			events: []kvevent.Event{
				kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 6*bs), 3*bs), kvmodel.Stored(2, []uint64{3}, kvmodel.Tokens(6*bs, 3*bs), 3*bs), kvmodel.Removed(3, 2),
			},
			want: want{overlap: 3, held: 3, counters: Applied{Events: 3, Stored: 9, Removed: 6}},
		},
		"not a multiple": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, 6), 6), kvmodel.Stored(1, []uint64{2}, kvmodel.Tokens(6, 6), 6)},
			want: want{
				counters: Applied{Events: 2, Mismatched: 2},
				mismatch: "engine's block of 6 tokens is not a multiple of the router's block of 4 tokens",
			},
		},
		"not a multiple after all": {
			events: []kvevent.Event{kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), kvmodel.Stored(1, []uint64{2}, kvmodel.Tokens(bs, 6), 6)},
			want: want{
				counters: Applied{Events: 2, Stored: 1, Mismatched: 1, Resized: 1},
				mismatch: "engine's block of 6 tokens",
			},
		},
		"pairs of tokens": {
			events: []kvevent.Event{with(kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), bs), func(e *kvevent.Event) { e.Bigram = true })},
			want:   want{overlap: 2, held: 2, counters: Applied{Events: 1, Stored: 2}, bigram: true},
		},
		"nothing": {
			events: []kvevent.Event{kvmodel.Stored(0, nil, nil, bs), kvmodel.Removed()},
			want:   want{counters: Applied{Events: 2}},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := kvmodel.NewIndex(t)
			a := NewApplier(bs)
			var ops kvindex.Batch
			a.Apply(&kvevent.Batch{Events: tt.events}, &ops)
			x.Apply(0, &ops)
			got := want{
				overlap: overlap(x, kvmodel.Tokens(0, 32), tt.key), held: len(kvmodel.Holds(t, x)), counters: a.Counters,
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

// Blocks that differ in what the engine hashes besides tokens never match the
// prompt of the plain model.
func TestApplierKeepsKeysApart(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]func(*kvevent.Event){
		"LoRA":        func(e *kvevent.Event) { e.LoRAName = "a" },
		"LoRA number": func(e *kvevent.Event) { e.LoRAID, e.HasLoRAID = 1, true },
		"salt":        func(e *kvevent.Event) { e.Salt = "a" },
		"image":       func(e *kvevent.Event) { e.ExtraKeys = []uint64{5} },
	} {
		x := kvmodel.NewIndex(t)
		a := NewApplier(kvmodel.Block)
		var ops kvindex.Batch
		a.Apply(&kvevent.Batch{Events: []kvevent.Event{with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, 2*kvmodel.Block), 2*kvmodel.Block), f)}}, &ops)
		if r := x.Apply(0, &ops); r.Stored != 2 {
			t.Errorf("%s: stored %d blocks, want 2", name, r.Stored)
		}
		if n := overlap(x, kvmodel.Tokens(0, 2*kvmodel.Block), blockhash.Key{}); n != 0 {
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
	const bs = 4 * kvmodel.Block
	x := kvmodel.NewIndex(t)
	a := NewApplier(kvmodel.Block)
	apply := func(events ...kvevent.Event) {
		var ops kvindex.Batch
		a.Apply(&kvevent.Batch{Events: events}, &ops)
		x.Apply(0, &ops)
	}
	like := func(same, other int) []uint32 { // same tokens of the first prompt, then others
		return append(kvmodel.Tokens(0, same), kvmodel.Tokens(other, bs-same)...)
	}
	one, two, three := like(bs, 0), like(2*kvmodel.Block, 1000), like(3*kvmodel.Block, 2000)
	check := func(when string, want ...int) {
		t.Helper()
		got := []int{overlap(x, one, blockhash.Key{}), overlap(x, two, blockhash.Key{}), overlap(x, three, blockhash.Key{})}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", when, d)
		}
	}
	apply(kvmodel.Stored(0, []uint64{1}, one, bs), kvmodel.Stored(0, []uint64{2}, two, bs), kvmodel.Stored(0, []uint64{3}, three, bs))
	check("all", 4, 4, 4)
	apply(kvmodel.Stored(2, []uint64{4}, kvmodel.Tokens(5000, bs), bs))
	if n := overlap(x, append(append([]uint32(nil), two...), kvmodel.Tokens(5000, bs)...), blockhash.Key{}); n != 8 {
		t.Errorf("child: %d blocks", n)
	}
	apply(kvmodel.Stored(0, []uint64{1}, one, bs)) // once more
	apply(kvmodel.Removed(1))
	check("first gone", 3, 4, 4)
	apply(kvmodel.Removed(3), kvmodel.Removed(3))
	check("third gone", 2, 4, 2)
	apply(kvmodel.Removed(2))
	check("second gone", 0, 0, 0)
	apply(kvmodel.Stored(0, []uint64{2}, one, bs), kvmodel.Stored(0, []uint64{2}, two, bs)) // another content under one name
	check("renamed", 2, 4, 2)
	apply(kvmodel.Removed(2), kvmodel.Removed(4))
	check("empty", 0, 0, 0)
	if n := len(kvmodel.Holds(t, x)); n != 0 || len(a.split.refs)+len(a.split.tail) != 0 {
		t.Errorf("%d blocks and %d accounts left behind", n, len(a.split.refs)+len(a.split.tail))
	}
}
