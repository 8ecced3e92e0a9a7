package media

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

func TestExpect(t *testing.T) {
	t.Parallel()
	x := NewTable()
	if n, learned := x.Expect("m", api.MediaImage); n != FirstGuess || learned {
		t.Errorf("before the first: %d, %v", n, learned)
	}
	for range 3 * recent {
		x.Learn("m", api.MediaImage, 256)
		x.Learn("m", api.MediaVideo, 9000)
	}
	x.Learn("m", api.MediaImage, 256+recent)
	if n, learned := x.Expect("m", api.MediaImage); n != 257 || !learned {
		t.Errorf("%d, %v", n, learned)
	}
	if n, _ := x.Expect("other", api.MediaImage); n != FirstGuess {
		t.Errorf("of another model: %d", n)
	}
	var none *Table
	if n, _ := none.Expect("m", api.MediaImage); n != FirstGuess {
		t.Errorf("without a table: %d", n)
	}
}

func TestLearnFromUsage(t *testing.T) {
	t.Parallel()
	image := func(n int) (c Counts) { c[api.MediaImage] = n; return c }
	both := image(1)
	both[api.MediaAudio] = 1
	for _, c := range []struct {
		has          Counts
		text, prompt int
		want         int
	}{
		{image(2), 100, 700, 300}, {image(1), 0, 64, 64},
		{image(1), 1000, 1900, FirstGuess}, // most of it is text, whose estimate is off by as much
		{image(1), 50, 10, FirstGuess}, {both, 10, 2000, FirstGuess}, {Counts{}, 10, 2000, FirstGuess},
	} {
		x := NewTable()
		x.LearnFromUsage("m", c.has, c.text, c.prompt)
		if n, _ := x.Expect("m", api.MediaImage); n != c.want {
			t.Errorf("%+v: %d", c, n)
		}
	}
}

func TestTokens(t *testing.T) {
	t.Parallel()
	var v api.View
	body := `{"messages":[{"role":"user","content":[{"image_url":{"url":"data:,a"}},{"image_url":{"url":"data:,b"}},{"input_audio":{"data":"c"}}]}]}`
	if err := v.Parse([]byte(body), api.Chat, api.Limits{}); err != nil {
		t.Fatal(err)
	}
	x := NewTable()
	x.Learn("m", api.MediaImage, 70)
	x.Keep("m", v.MediaName(&v.Media[0]), 30)
	if each, sum := x.Tokens(nil, "m", &v); sum != 100+FirstGuess || !slices.Equal(each, []int{30, 70, FirstGuess}) {
		t.Errorf("%v, %d", each, sum)
	}
	if _, ok := x.Item("other", v.MediaName(&v.Media[0])); ok {
		t.Error("it is known for another model")
	}
}

// TestBounds: what was not used for the longest time is forgotten.
func TestBounds(t *testing.T) {
	t.Parallel()
	x := NewTable()
	name := func(i int) (b [16]byte) { binary.LittleEndian.PutUint64(b[:], uint64(i)); return b }
	for i := range 3 * maxItems {
		x.Keep("m", name(i), i)
		x.Learn(fmt.Sprint(i%(3*maxMeans)), api.MediaImage, i)
	}
	if n := len(x.items.newest) + len(x.items.before); n > 2*maxItems {
		t.Errorf("%d items", n)
	}
	if n := len(x.means.newest) + len(x.means.before); n > 2*maxMeans {
		t.Errorf("%d means", n)
	}
	if _, ok := x.Item("m", name(3*maxItems-1)); !ok {
		t.Error("the newest is gone")
	}
	if _, ok := x.Item("m", name(0)); ok {
		t.Error("the oldest is there")
	}
}
