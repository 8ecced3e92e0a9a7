package kvstream

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
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
		for _, l := range lines[1:] {
			for _, m := range l.Media {
				if run := l.Tokens[m.Offset : m.Offset+m.Length]; !ok || slices.Max(run) != token || slices.Min(run) != token {
					t.Fatalf("%s: the placeholder %d (%v) is not that of %+v", l.ID, token, ok, m)
				}
			}
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
			// In parts of the engine's blocks the same is seen.
			if n := predictMedia(t, read(), lines[0].Unit/2, same); n.more > 0 || n.less > 0 {
				t.Errorf("in blocks of half the size: %+v", n)
			}
		})
	}
}
