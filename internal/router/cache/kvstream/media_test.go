package kvstream

import (
	"encoding/json"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// mediaLine is a line of testdata/media.
type mediaLine struct {
	hybridLine
	Ahead int
	Salt  string
	Media []blockhash.Media
}

// predictMedia plays a recording of prompts with images and compares every request with what the
// router would count for it, in blocks of size tokens. name makes an image's name for the router of the engine's.
func predictMedia(t *testing.T, lines []mediaLine, size int, name func(string) string) (n tally) {
	t.Helper()
	x := kvmodel.NewIndex(t)
	s := New(x, 0, size)
	var q kvindex.Query
	var text kvgroup.Text
	defer func() { // by which the router finds items where an engine names no places
		token, ok := s.Placeholder()
		one := true // token stands for all of each item
		for _, l := range lines[1:] {
			for _, m := range l.Media {
				run := l.Tokens[m.Offset : m.Offset+m.Length]
				one = one && slices.Max(run) == token && slices.Min(run) == token
			}
		}
		if ok != one {
			t.Errorf("the placeholder is %d (%v), and stands for all of each item: %v", token, ok, one)
		}
	}()
	for _, l := range lines[1:] {
		if l.Type == "batch" {
			if v := s.Offer(l.Seq, l.Payload); v.Kind != Apply {
				t.Fatalf("batch %d: %v", l.Seq, v)
			}
			continue
		}
		for i := range l.Media {
			l.Media[i].ID = name(l.Media[i].ID)
		}
		ahead, parts := s.Shape().Ahead, 1
		if s.app.groups == nil {
			parts = max(1, s.Shape().Parts)
		}
		extra := blockhash.Extras(nil, l.Tokens, l.Media, size*parts, ahead, parts)
		locals := blockhash.LocalsAt(nil, l.Tokens[:max(0, len(l.Tokens)-ahead)], size, 0, extra, blockhash.Key{Salt: l.Salt})
		x.Overlap(locals, &q)
		text.Set(nil, "")
		usable, _ := s.Usable(q.Depth(0), kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(l.Tokens), Text: &text})
		got := min(usable, (len(l.Tokens)-1)/(size*parts)*parts) * size
		if s.Mismatch() != "" {
			got = 0
		}
		switch {
		case got == l.Cached:
			n.equal++
		case got > l.Cached:
			n.more++
			t.Logf("%s: %d tokens, vLLM %d of %d", l.ID, got, l.Cached, len(l.Tokens))
		default:
			n.less++
		}
		if l.Cached > 0 {
			n.warm++
		}
		n.found += got
		n.lost += max(0, l.Cached-got)
	}
	return n
}

// TestItemExtras: the digests that a batch's items give blocks of another size than the engine's
// are those of a prompt with them: where all of an item is one token, and where a group has
// blocks of that size.
func TestItemExtras(t *testing.T) {
	t.Parallel()
	for seed := range uint64(600) {
		rng := rand.New(rand.NewPCG(seed, 7))
		exact := seed%2 == 1 // items have several tokens, and a group small blocks
		var tokens []uint32
		var media []blockhash.Media
		add := func(id string) {
			m := blockhash.Media{ID: id, Offset: len(tokens), Length: 1 + rng.IntN(30)}
			for range m.Length {
				token := uint32(9)
				if exact {
					token += uint32(rng.IntN(3))
				}
				tokens = append(tokens, token)
			}
			media = append(media, m)
		}
		for i := range 1 + rng.IntN(6) {
			for range rng.IntN(20) {
				tokens = append(tokens, uint32(rng.IntN(8)))
			}
			add(string(rune('a' + 2*i)))
			if rng.IntN(4) == 0 {
				add(string(rune('b' + 2*i))) // without text between
			}
		}
		size := []int{1, 4, 8}[rng.IntN(3)]
		whole := size * (1 + rng.IntN(3))
		first := whole * rng.IntN(len(tokens)/whole+1) // tokens before the event
		event := func(block int) *kvevent.Event {
			e := &kvevent.Event{Kind: kvevent.Stored, BlockSize: int32(block)}
			e.Tokens = tokens[first : first+(len(tokens)-first)/block*block]
			for _, m := range media {
				at := m.Offset - first
				if last := min(at+m.Length, len(e.Tokens)) - 1; last >= max(at, 0) {
					e.Items = append(e.Items, kvevent.Item{Name: blockhash.MediaName(m.ID), At: at, Last: last / block * block})
				}
			}
			return e
		}
		var s spans
		e := event(whole)
		s.see(e)
		if exact {
			s.see(event(size))
		}
		n := len(e.Tokens) / size
		want := blockhash.Extras(nil, tokens, media, size, 0, 1)[first/size:][:n]
		if got := s.extras(nil, e, whole, n, size); !slices.Equal(got, want) {
			t.Fatalf("seed %d, blocks of %d in %d from %d: %x, want %x of %+v", seed, size, whole, first, got, want, media)
		}
	}
}

// Judged by vLLM's own cache manager: for prompts with images the router counts what the engine
// finds cached, in every request. Names that are not the engine's never count more.
func TestMediaOfVLLM(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.FromSlash("../../../../testdata/media/*.jsonl.gz"))
	if err != nil || len(files) < 4 {
		t.Fatalf("recordings: %d, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".jsonl.gz"), func(t *testing.T) {
			t.Parallel()
			read := func() (lines []mediaLine) {
				linesOf(t, file, func(line []byte) {
					lines = append(lines, mediaLine{})
					if err := json.Unmarshal(line, &lines[len(lines)-1]); err != nil {
						t.Fatal(err)
					}
				})
				return lines
			}
			lines := read()
			same := func(id string) string { return id }
			n := predictMedia(t, lines, lines[0].Unit, same)
			t.Logf("%+v", n)
			if n.more > 0 || n.less > 0 || n.warm < 40 || n.found == 0 {
				t.Errorf("%+v", n)
			}
			if n := predictMedia(t, read(), lines[0].Unit, func(id string) string { return id + "x" }); n.more > 0 || n.less < 20 {
				t.Errorf("with other names of the images: %+v", n)
			}
			// In parts of the engine's blocks the same is seen, but for the ends of items of several
			// tokens in groups of several sizes.
			less := 0
			if strings.HasSuffix(file, "-rows.jsonl.gz") || strings.HasSuffix(file, "-framed.jsonl.gz") {
				less = n.warm / 10
			}
			if n := predictMedia(t, read(), lines[0].Unit/2, same); n.more > 0 || n.less > less {
				t.Errorf("in blocks of half the size: %+v", n)
			}
		})
	}
}
