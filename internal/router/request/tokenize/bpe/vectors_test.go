package bpe

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const testdata = "../../../../../testdata/tokenizer"

// families are the folders of testdata/tokenizer and what they are recognised as.
var families = []struct{ dir, family string }{
	{"gpt2", "gpt2"}, {"llama3", "llama3"}, {"qwen2", "qwen2"}, {"qwen35", "qwen3.5"},
	{"o200k", "o200k"}, {"deepseek3", "deepseek3"}, {"flags", "qwen2"},
}

func load(tb testing.TB, dir string, o Options) *Tokenizer {
	tb.Helper()
	t, err := Load(filepath.Join(testdata, dir), o)
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

func readJSON[T any](tb testing.TB, path string) (v T) {
	tb.Helper()
	data, err := os.ReadFile(filepath.Join(testdata, path))
	if err != nil {
		tb.Fatal(err)
	}
	if err := json.Unmarshal(data, &v); err != nil {
		tb.Fatalf("%s: %v", path, err)
	}
	return v
}

// TestVectors compares ids with those of the Hugging Face package, twice, so
// that the second pass is answered from the word cache.
func TestVectors(t *testing.T) {
	t.Parallel()
	texts := readJSON[[]string](t, "texts.json")
	for _, f := range families {
		t.Run(f.dir, func(t *testing.T) {
			t.Parallel()
			tok := load(t, f.dir, Options{})
			if string(tok.family) != f.family {
				t.Fatalf("family %q, want %q", tok.family, f.family)
			}
			want := readJSON[[][]uint32](t, filepath.Join(f.dir, "ids.json"))
			if len(want) != len(texts) || len(texts) < 500 {
				t.Fatalf("%d texts, %d vectors", len(texts), len(want))
			}
			bad := 0
			for pass := range 2 {
				for i, text := range texts {
					got := tok.AppendString(nil, text)
					if !slices.Equal(got, want[i]) {
						if bad++; bad <= 5 {
							t.Errorf("pass %d: ids of %q differ (-want +got):\n%s", pass, text, cmp.Diff(want[i], got))
						}
					}
				}
			}
			if bad > 0 {
				t.Errorf("%d of %d wrong", bad, 2*len(texts))
			}
			special := readJSON[[]uint32](t, filepath.Join(f.dir, "special.json"))
			got := slices.Concat(tok.Prefix(), tok.AppendString(nil, "Hello, world!"), tok.Suffix())
			if d := cmp.Diff(special, got); d != "" {
				t.Errorf("with special tokens (-want +got):\n%s", d)
			}
		})
	}
}

// TestExternal runs vectors made by gen.py --vectors from a real file.
func TestExternal(t *testing.T) {
	path, vectors := os.Getenv("DYNCTL_TOKENIZER"), os.Getenv("DYNCTL_TOKENIZER_VECTORS")
	if path == "" || vectors == "" {
		t.Skip("set DYNCTL_TOKENIZER to a tokenizer.json and DYNCTL_TOKENIZER_VECTORS to its vectors (testdata/tokenizer/gen)")
	}
	tok, err := Load(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(vectors)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 64<<20)
	n, bad, ids := 0, 0, 0
	for sc.Scan() {
		var v struct {
			Text         string
			IDs, Special []uint32
		}
		if err := json.Unmarshal(sc.Bytes(), &v); err != nil {
			t.Fatal(err)
		}
		n++
		ids += len(v.IDs)
		got := tok.AppendString(nil, v.Text)
		whole := slices.Concat(tok.Prefix(), got, tok.Suffix())
		if !slices.Equal(got, v.IDs) || !slices.Equal(whole, v.Special) {
			if bad++; bad <= 5 {
				t.Errorf("%q:\nwant %v\ngot  %v", v.Text, v.IDs, got)
			}
		}
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %d texts, %d ids, %d wrong", tok.family, n, ids, bad)
	if n == 0 || bad > 0 {
		t.Errorf("%d of %d texts wrong", bad, n)
	}
}
