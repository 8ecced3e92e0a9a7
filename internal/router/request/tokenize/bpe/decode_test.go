package bpe

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// TestDecode compares texts with those of the Hugging Face package, for whole texts, for
// parts of them that begin and end within characters, for each token alone and for any
// tokens in a row.
func TestDecode(t *testing.T) {
	t.Parallel()
	for _, f := range families {
		t.Run(f.dir, func(t *testing.T) {
			t.Parallel()
			tok := load(t, f.dir, Options{})
			if !tok.Decodes() {
				t.Fatal("no byte-level decoder")
			}
			type decoded struct {
				IDs         []uint32
				Text, Whole string
			}
			all := readJSON[[]decoded](t, filepath.Join(f.dir, "decoded.json"))
			cut, special := 0, 0
			for _, want := range all {
				for _, c := range []struct {
					text    string
					special bool
				}{{want.Text, false}, {want.Whole, true}} {
					var b []byte
					for _, id := range want.IDs {
						var ok bool
						if b, ok = tok.AppendBytes(b, id, c.special); !ok {
							t.Fatalf("no token %d", id)
						}
					}
					// The package puts U+FFFD where bytes are no character.
					if got := string(rawjson.AppendLossy(nil, b)); got != c.text {
						t.Errorf("%v, special %v: %q, want %q", want.IDs, c.special, got, c.text)
					}
				}
				if strings.Contains(want.Text, "\uFFFD") {
					cut++
				}
				if want.Text != want.Whole {
					special++
				}
			}
			if len(all) < 900 || cut < 100 || special == 0 {
				t.Errorf("%d of %d end within a character, %d have special tokens", cut, len(all), special)
			}
			if _, ok := tok.AppendBytes(nil, 1<<31, true); ok {
				t.Error("an id that no token has")
			}
		})
	}
	file, err := os.ReadFile(filepath.Join(testdata, "gpt2", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	is := regexp.MustCompile(`"decoder":\{[^}]*\}`)
	for decoder, want := range map[string]bool{
		`{"type":"ByteLevel"}`: true, `{"type":"Sequence","decoders":[{"type":"ByteLevel"}]}`: true,
		`{"type":"Sequence","decoders":[{"type":"ByteLevel"},{"type":"Strip"}]}`: false, `null`: false, `{"type":"Metaspace"}`: false,
	} {
		tok, err := Parse(is.ReplaceAllLiteral(file, []byte(`"decoder":`+decoder)), Options{})
		if err != nil || tok.Decodes() != want {
			t.Errorf("%s: %v", decoder, err)
		}
	}
}
