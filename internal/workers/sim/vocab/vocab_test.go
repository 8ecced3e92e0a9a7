package vocab_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

const prose = `The history of the small town by the river is a simple one. For a hundred years its people
worked on the fields, sold their bread and wool in the market, and told their children the same stories that they
had heard from their own parents. When the railway came, everything changed: new houses were built, strangers
arrived with machines nobody understood, and 1,250 men found work in the factory behind the station.`

func TestAboutFourCharactersAToken(t *testing.T) {
	v := vocab.New()
	n := len(v.Encode(nil, prose))
	if ratio := float64(len(prose)) / float64(n); ratio < 3.2 || ratio > 5 {
		t.Errorf("%.2f characters a token", ratio)
	}
}

// What a model says encodes to the same tokens again, so that the turns of a
// conversation share their prefix.
func TestAnswersSurviveARoundTrip(t *testing.T) {
	v := vocab.New()
	for name, next := range map[string]func([]uint32, uint64) uint32{"words": v.Word, "letters": v.Letter} {
		var ids []uint32
		used := map[uint32]bool{}
		rng := rand.New(rand.NewPCG(1, 2))
		for range 20_000 {
			ids = append(ids, next(ids, rng.Uint64()))
			used[ids[len(ids)-1]] = true
		}
		text := v.Decode(ids, true)
		for n := 0; !utf8.ValidString(text); n++ { // the last character may not be whole
			if n == utf8.UTFMax {
				t.Fatalf("%s: no UTF-8: %q", name, text)
			}
			ids = ids[:len(ids)-1]
			text = v.Decode(ids, true)
		}
		if again := v.Encode(nil, text); !slices.Equal(again, ids) {
			t.Errorf("%s: %d tokens became %d others", name, len(ids), len(again))
		}
		if len(used) < 500 {
			t.Errorf("%s: only %d tokens are said", name, len(used))
		}
		if multi := utf8.RuneCountInString(text) < len(text)*9/10; multi != (name == "letters") {
			t.Errorf("%s: %d characters of %d bytes", name, utf8.RuneCountInString(text), len(text))
		}
	}
}

func TestChatTemplate(t *testing.T) {
	v := vocab.New()
	msgs := []vocab.Message{{Role: "system", Content: "Be brief."}, {Role: "user", Content: "Hi"}}
	got := v.Decode(v.Chat(nil, "", msgs, true), false)
	want := "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := v.Decode(v.Chat(nil, `[{"x":1}]`, msgs[1:], false), false); !strings.HasPrefix(got, "<|im_start|>system\n# Tools\n[{\"x\":1}]<|im_end|>\n<|im_start|>user") {
		t.Errorf("%q", got)
	}
	if got := v.Decode([]uint32{vocab.Start, 300000, vocab.End}, true); got != "⟨300000⟩" {
		t.Errorf("%q", got)
	}
}

func TestEveryTextRoundTrips(t *testing.T) {
	v := vocab.New()
	property.Check(t, func(t *rapid.T) {
		s := rapid.OneOf(rapid.String(), rapid.StringMatching(`[a-z ]{0,40}[0-9]{0,9} *\n*`), rapid.StringMatching(`(<\|im_(start|end)\|>|<|\|){0,5}`)).Draw(t, "text")
		if got := v.Decode(v.Encode(nil, s), false); got != s {
			t.Fatalf("%q became %q", s, got)
		}
	})
}

func FuzzEncode(f *testing.F) {
	v := vocab.New()
	f.Add("hello  world\n\n42 <|im_end|> \xff é")
	f.Fuzz(func(t *testing.T, s string) {
		ids := v.Encode(nil, s)
		if got := v.Decode(ids, false); got != s {
			t.Errorf("%q became %q", s, got)
		}
		for _, id := range ids {
			if id >= vocab.Size {
				t.Errorf("id %d", id)
			}
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	v := vocab.New()
	b.SetBytes(int64(len(prose)))
	b.ReportAllocs()
	var ids []uint32
	for b.Loop() {
		ids = v.Encode(ids[:0], prose)
	}
}
