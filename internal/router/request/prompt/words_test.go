package prompt

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestWordsAreThoseOfTheRun: what followed a block in one prompt is not shown for another run
// that begins with the same block, and no more than was asked for is kept.
func TestWordsAreThoseOfTheRun(t *testing.T) {
	w := NewWords(nil, 6)
	ids := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	w.Note("m", []uint64{10, 11}, ids, 4)
	ids[0] = 99 // the request's memory is used again
	w.Note("m", []uint64{10, 12}, []uint32{1, 2, 3, 4, 50, 60, 70, 80}, 4)
	for _, c := range []struct {
		run  []uint64
		want []uint32
	}{
		{[]uint64{10}, []uint32{1, 2, 3, 4}},
		{[]uint64{10, 11}, []uint32{1, 2, 3, 4, 5, 6}},
		{[]uint64{10, 12}, []uint32{1, 2, 3, 4, 50, 60}},
		{[]uint64{10, 13, 11}, []uint32{1, 2, 3, 4}},
		{[]uint64{13}, nil},
	} {
		if got := w.run(c.run); !slices.Equal(got.ids, c.want) {
			t.Errorf("%v is %v, want %v", c.run, got.ids, c.want)
		}
	}
	long := NewWords(nil, 2)
	long.Note("m", []uint64{10}, []uint32{1, 2, 3, 4}, 4)
	if got := long.now[10].ids; len(got) != 2 {
		t.Errorf("%d ids of a block are kept, 2 are wanted", len(got))
	}
	NewWords(nil, 0).Note("m", []uint64{10}, ids, 4) // keeps nothing
}

// TestWordsAreBounded: of more prompts than there is room for the newest are known.
func TestWordsAreBounded(t *testing.T) {
	w := NewWords(nil, 4)
	const prompts = 5 * wordsBlocks
	for i := range uint64(prompts) {
		w.Note("m", []uint64{1, 2 + i}, []uint32{7, uint32(i)}, 1)
	}
	if n := len(w.now) + len(w.old); n > 2*wordsBlocks {
		t.Errorf("%d blocks are kept", n)
	}
	if got := w.run([]uint64{1, 1 + prompts}); !slices.Equal(got.ids, []uint32{7, prompts - 1}) {
		t.Errorf("the newest: %v", got.ids)
	}
	if got := w.run([]uint64{2}); got.ids != nil {
		t.Errorf("the oldest: %v", got.ids)
	}
	w = NewWords(nil, 4)
	w.Note("m", make([]uint64, 10*wordsDeep), make([]uint32, 10*wordsDeep), 1)
	deep := make([]uint64, 2*wordsDeep)
	for i := range deep {
		deep[i] = uint64(i)
	}
	w.Note("m", deep, make([]uint32, len(deep)), 1)
	if len(w.now) != wordsDeep {
		t.Errorf("%d blocks of one prompt are kept", len(w.now))
	}
}

// TestWordsOfNoEngine: what no engine gives is not known, and the error says why.
func TestWordsOfNoEngine(t *testing.T) {
	registry := workers.NewRegistry(func(eventlog.Event) {})
	s, err := New(Options{Mode: "engine", Registry: registry})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := NewWords(s, 4)
	w.Note("m", []uint64{10}, []uint32{1, 2}, 2)
	got, err := w.Texts(t.Context(), registry.Snapshot(), [][]uint64{{10}, {11}, nil})
	if err == nil || !slices.Equal(got, []string{"", "", ""}) {
		t.Errorf("%q, %v", got, err)
	}
}

// FuzzOneWordLine: whatever a prompt holds, what is shown of it is one bounded line that
// steers no terminal.
func FuzzOneWordLine(f *testing.F) {
	f.Add("a\x1b[31m b\r\nc\u202e\xff " + strings.Repeat("é", 600))
	f.Fuzz(func(t *testing.T, text string) {
		got := oneWordLine(text)
		if len(got) > wordsBytes || !utf8.ValidString(got) || strings.ContainsAny(got, "\x1b\r\n\t\u202e") {
			t.Errorf("%q", got)
		}
	})
}
