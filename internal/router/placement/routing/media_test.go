package routing

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings/effective"
)

// TestImageIsOneChunk: where names are not known an image of any size is one chunk, which has
// the tokens that are expected of it, and another image another one.
func TestImageIsOneChunk(t *testing.T) {
	s := &effective.Settings{}
	s.Tokens.ChunkBytes = 16
	table := media.NewTable()
	table.Learn("m", api.MediaImage, 700)
	var d Decider
	hash := func(url string) (seq []uint64, tokens func(int) int) {
		v := parse(t, api.Chat, fmt.Sprintf(`{"messages":[{"role":"user","content":[{"type":"text","text":%q},{"type":"image_url","image_url":{"url":%q}},{"type":"text","text":%q}]}]}`, strings.Repeat("a", 64), url, strings.Repeat("b", 64)))
		q := &Request{Details: Details{Settings: s, Model: "m", Prompt: prompt.Estimate(v, table, "m", "")}}
		d.Hash(q, v, time.Now())
		t.Cleanup(q.Release)
		if !q.Chunked || q.Prompt.ISL != 32+700 {
			t.Fatalf("chunked %v, %d tokens", q.Chunked, q.Prompt.ISL)
		}
		return slices.Clone(q.views[0].seq), q.views[0].tokens
	}
	large := strings.Repeat("x", 1<<20)
	one, tokens := hash("data:image/png;base64," + large)
	other, _ := hash("data:image/png;base64," + large[1:] + "y")
	n := 0
	for n < len(one) && one[n] == other[n] {
		n++
	}
	if len(one) > 20 || len(one) != len(other) || n == 0 || n > 9 || one[len(one)-1] == other[len(other)-1] {
		t.Errorf("%d and %d chunks, %d of them the same", len(one), len(other), n)
	}
	if tokens(n) != 4*n || tokens(n+1) != 4*n+700 || tokens(n+2) != 4*(n+1)+700 {
		t.Errorf("%d, %d, %d tokens around the image", tokens(n), tokens(n+1), tokens(n+2))
	}
}

// TestMediaInBlocks: blocks with an image have its name in theirs.
func TestMediaInBlocks(t *testing.T) {
	r := served(t, 1)
	ids := make([]uint32, 48)
	var d Decider
	hash := func(m ...blockhash.Media) []uint64 {
		q := &Request{Details: Details{Settings: &effective.Settings{}, Model: "m", Prompt: prompt.Prompt{IDs: ids, ISL: 48, Source: route.FromEngine, Media: m}}}
		q.UseFleet(r.Snapshot())
		d.Hash(q, &api.View{}, time.Now())
		t.Cleanup(q.Release)
		got, size := q.Blocks()
		if size != 16 || len(got) != 3 {
			t.Fatalf("%d blocks of %d", len(got), size)
		}
		return slices.Clone(got)
	}
	plain := hash()
	got := hash(blockhash.Media{ID: "a", Offset: 20, Length: 4})
	want := blockhash.LocalsAt(nil, ids, 16, 0, []uint64{0, blockhash.ExtraMedia(0, "a", 4), 0}, blockhash.Key{})
	if !slices.Equal(got, want) || got[0] != plain[0] || got[1] == plain[1] || got[2] != plain[2] {
		t.Errorf("%x, want %x; without the image %x", got, want, plain)
	}
	if b := hash(blockhash.Media{ID: "b", Offset: 20, Length: 4}); b[1] == got[1] {
		t.Error("another image has the same name")
	}
}
