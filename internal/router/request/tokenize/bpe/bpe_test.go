package bpe

import (
	"bytes"
	"encoding/json"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode"

	"golang.org/x/text/unicode/norm"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// naive merges by looking for the lowest rank again and again.
func (t *Tokenizer) naive(w []byte) []uint32 {
	ids := make([]uint32, len(w))
	for i, b := range w {
		ids[i] = t.byteID[b]
	}
	for {
		best, at := uint64(noMerge), 0
		for i := 0; i+1 < len(ids); i++ {
			if v := t.merges.get(ids[i], ids[i+1]); v < best {
				best, at = v, i
			}
		}
		if best == noMerge {
			return ids
		}
		ids[at] = uint32(best)
		ids = slices.Delete(ids, at+1, at+2)
	}
}

func TestMergeEqualsNaive(t *testing.T) {
	t.Parallel()
	tok := load(t, "gpt2", Options{})
	property.Check(t, func(t *rapid.T) {
		alphabet := rapid.SampledFrom([]string{"ab", "theinr ", "aeinrst", "\x00\xff\xe4\xb8\xad的", "esEStT"}).Draw(t, "alphabet")
		var w []byte
		for range rapid.IntRange(1, 300).Draw(t, "n") {
			w = append(w, alphabet[rapid.IntRange(0, len(alphabet)-1).Draw(t, "i")])
		}
		var h mergeHeap
		want := tok.naive(w)
		if got := tok.merge(nil, w, &h); !slices.Equal(got, want) {
			t.Fatalf("merge(%q) = %v, want %v", w, got, want)
		}
		if got := tok.mergeLong(nil, w, &h); !slices.Equal(got, want) {
			t.Fatalf("mergeLong(%q) = %v, want %v", w, got, want)
		}
	})
}

// TestPrefixCacheExact: ids with the prefix cache, cold, warm and under a
// cache so small that it evicts, equal those without it, for prompts that
// share heads and for every family.
func TestPrefixCacheExact(t *testing.T) {
	t.Parallel()
	texts := readJSON[[]string](t, "texts.json")
	var short []string
	for _, s := range texts {
		if len(s) < 2000 {
			short = append(short, s)
		}
	}
	for _, f := range families {
		t.Run(f.dir, func(t *testing.T) {
			t.Parallel()
			plain := load(t, f.dir, Options{ChunkCacheBytes: -1})
			cached := load(t, f.dir, Options{})
			small := load(t, f.dir, Options{ChunkCacheBytes: 100 << 10, WordCacheWords: 64})
			r := rand.New(rand.NewPCG(1, 2))
			build := func(n int) string {
				var b strings.Builder
				for b.Len() < n {
					b.WriteString(short[r.IntN(len(short))])
					b.WriteString([]string{"", " ", "\n", " word ", "a\nb", "的，"}[r.IntN(6)])
				}
				return b.String()
			}
			head := build(60 << 10)
			rounds := 6
			if testing.Short() {
				rounds = 2
			}
			for i := range rounds {
				text := head[:r.IntN(len(head))]
				text = strings.ToValidUTF8(text, "") + build(r.IntN(30<<10))
				want := plain.AppendString(nil, text)
				for name, tok := range map[string]*Tokenizer{"cached": cached, "small": small} {
					for pass := range 2 {
						if got := tok.AppendString(nil, text); !slices.Equal(got, want) {
							t.Fatalf("round %d pass %d: %s ids differ from the plain ones", i, pass, name)
						}
					}
				}
			}
			if f.dir == "flags" { // its single_word token forbids every cut
				if cached.cuts != 0 {
					t.Errorf("cut rules %b with a single_word token", cached.cuts)
				}
				return
			}
			// A chunk that is there moves to the front, and its ids come from the cache.
			newest := cached.chunks.order.Front().Value.(*chunkEntry)
			if ids, ok := cached.chunks.get(cached.chunks.key(newest.text), newest.text); !ok || !slices.Equal(ids, newest.ids) {
				t.Error("the cache was not hit")
			}
			if n, kept := cached.chunks.order.Len(), small.chunks.order.Len(); kept >= n || small.chunks.size > 100<<10 {
				t.Errorf("small cache: %d chunks of %d, %d bytes", kept, n, small.chunks.size)
			}
		})
	}
}

// TestCutsAreSafe: at every place where a rule would cut, the ids of the two
// sides are those of the whole.
func TestCutsAreSafe(t *testing.T) {
	t.Parallel()
	texts := readJSON[[]string](t, "texts.json")
	for _, f := range families {
		t.Run(f.dir, func(t *testing.T) {
			t.Parallel()
			tok := load(t, f.dir, Options{ChunkCacheBytes: -1})
			cuts := 0
			for k, s := range texts {
				if len(s) > 1500 || testing.Short() && k%5 != 0 {
					continue
				}
				want := tok.AppendString(nil, s)
				for i := 3; i < len(s)-2; i++ {
					if !tok.cutAt([]byte(s), i) {
						continue
					}
					cuts++
					got := tok.AppendString(tok.AppendString(nil, s[:i]), s[i:])
					if !slices.Equal(got, want) {
						t.Fatalf("cutting %q at %d changes its ids", s, i)
					}
				}
			}
			if cuts == 0 && f.dir != "flags" {
				t.Error("no cut was tried")
			}
			t.Logf("%d cuts", cuts)
		})
	}
}

func TestConcurrent(t *testing.T) {
	t.Parallel()
	tok := load(t, "qwen2", Options{ChunkCacheBytes: 200 << 10, WordCacheWords: 16})
	texts := readJSON[[]string](t, "texts.json")
	want := readJSON[[][]uint32](t, "qwen2/ids.json")
	long := strings.Repeat(texts[5]+" and\nso on ", 30)
	wantLong := load(t, "qwen2", Options{ChunkCacheBytes: -1}).AppendString(nil, long)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range texts {
				k := (i*7 + g*13) % len(texts)
				if !slices.Equal(tok.AppendString(nil, texts[k]), want[k]) {
					t.Errorf("ids of %q differ", texts[k])
					return
				}
				if i%100 == 0 && !slices.Equal(tok.AppendString(nil, long), wantLong) {
					t.Error("ids of the long text differ")
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestClassTable pins the class of every code point, so that a Go version
// with other Unicode tables is noticed.
func TestClassTable(t *testing.T) {
	t.Parallel()
	c := newClassTable()
	all := make([]byte, 0, 2*(unicode.MaxRune+1))
	for r := rune(0); r <= unicode.MaxRune; r++ {
		x := c.pages[c.page[r>>7]][r&127]
		if x == 0 || x&(x-1) != 0 {
			t.Fatalf("%U has class %b", r, x)
		}
		all = append(all, byte(x), byte(x>>8))
	}
	const want = 0xdb711d6b // of Unicode 16, as tokenizers 0.23.3 answers
	if got := crc32.ChecksumIEEE(all); got != want {
		t.Errorf("checksum %#x, want %#x: compare the classes with the reference again", got, want)
	}
}

// TestNormalizerSlowPath: the slow path agrees with x/text wherever x/text
// agrees with the reference.
func TestNormalizerSlowPath(t *testing.T) {
	t.Parallel()
	for _, form := range []norm.Form{norm.NFC, norm.NFKC} {
		n := newNormalizer(form)
		marks := []rune("\u0301\u0323\u0308\u031b\u0345\u0334\u093c\u3099\u11a8\u1161")
		property.Check(t, func(t *rapid.T) {
			rs := rapid.SliceOfN(rapid.OneOf(rapid.SampledFrom(marks), rapid.Rune(), rapid.SampledFrom([]rune("aeoqÅÅ각가\u1100한ﬁ"))), 0, 12).Draw(t, "text")
			rs = slices.DeleteFunc(rs, isYoung)
			s := string(rs)
			want := form.String(s)
			if strings.ContainsRune(want, 0x034f) {
				t.Skip("stream-safe break")
			}
			if got := n.slow(nil, []byte(s)); string(got) != want {
				t.Fatalf("slow(%+q) = %+q, want %+q", s, got, want)
			}
		})
	}
}

func TestRefuses(t *testing.T) {
	t.Parallel()
	good, err := os.ReadFile(filepath.Join(testdata, "qwen2", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	edit := func(path string, v any) []byte {
		var d map[string]any
		if err := json.Unmarshal(good, &d); err != nil {
			t.Fatal(err)
		}
		at := d
		keys := strings.Split(path, ".")
		for _, k := range keys[:len(keys)-1] {
			at = at[k].(map[string]any)
		}
		if v == nil {
			delete(at, keys[len(keys)-1])
		} else {
			at[keys[len(keys)-1]] = v
		}
		out, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	type m = map[string]any
	split := func(pattern, behavior string, invert bool) m {
		return m{"type": "Sequence", "pretokenizers": []any{
			m{"type": "Split", "pattern": m{"Regex": pattern}, "behavior": behavior, "invert": invert},
			m{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}}}
	}
	for _, c := range []struct {
		name string
		data []byte
		want error
		says string
	}{
		{"nothing", nil, ErrMalformed, ""},
		{"no JSON", []byte("{"), ErrMalformed, ""},
		{"list", []byte("[]"), ErrMalformed, "model"},
		{"unigram", edit("model.type", "Unigram"), ErrUnknown, "Unigram"},
		{"wordpiece prefix", edit("model.continuing_subword_prefix", "##"), ErrUnknown, "continuing_subword_prefix"},
		{"dropout", edit("model.dropout", 0.1), ErrUnknown, "dropout"},
		{"normalizer", edit("normalizer", m{"type": "Lowercase"}), ErrUnknown, "Lowercase"},
		{"two normalizers", edit("normalizer", m{"type": "Sequence", "normalizers": []any{m{"type": "NFC"}, m{"type": "Strip"}}}), ErrUnknown, "Strip"},
		{"no pre-tokenizer", edit("pre_tokenizer", nil), ErrUnknown, "pre_tokenizer"},
		{"metaspace", edit("pre_tokenizer", m{"type": "Metaspace"}), ErrUnknown, "Metaspace"},
		{"pattern", edit("pre_tokenizer", split(patQwen2+" ", "Isolated", false)), ErrUnknown, "unknown split pattern"},
		{"behavior", edit("pre_tokenizer", split(patQwen2, "MergedWithNext", false)), ErrUnknown, "MergedWithNext"},
		{"inverted", edit("pre_tokenizer", split(patQwen2, "Isolated", true)), ErrUnknown, "invert"},
		{"prefix space", edit("pre_tokenizer", m{"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}), ErrUnknown, "add_prefix_space"},
		{"post-processor", edit("post_processor", m{"type": "RobertaProcessing"}), ErrUnknown, "Roberta"},
		{"template without ids", edit("post_processor", m{"type": "TemplateProcessing", "single": []any{
			m{"SpecialToken": m{"id": "<s>"}}, m{"Sequence": m{"id": "A"}}}, "special_tokens": m{}}), ErrMalformed, "<s>"},
		{"vocab id", edit("model.vocab.a", -1), ErrMalformed, "vocab"},
		{"same id", edit("model.vocab.a", 1), ErrMalformed, "two tokens"},
		{"huge id", edit("model.vocab.a", 1<<23), ErrMalformed, "vocab"},
		{"byte missing", edit("model.vocab.!", nil), ErrMalformed, ""},
		{"merges", edit("model.merges", []any{[]any{"a", "zzz"}}), ErrMalformed, "merge 0"},
		{"merges that are no list", edit("model.merges", "a b"), ErrMalformed, "model: merges"},
		{"merges of null", edit("model.merges", nil), ErrMalformed, "model: merges"},
		{"added tokens that are no list", edit("added_tokens", m{"id": 0, "content": "x"}), ErrMalformed, "added_tokens"},
		{"normalizers that are no list", edit("normalizer", m{"type": "Sequence", "normalizers": m{"type": "NFC"}}), ErrMalformed, "normalizers"},
		{"a sequence without normalizers", edit("normalizer", m{"type": "Sequence"}), ErrUnknown, "normalizer"},
		{"pre-tokenizers that are no list", edit("pre_tokenizer", m{"type": "Sequence", "pretokenizers": m{"type": "ByteLevel"}}), ErrMalformed, "pretokenizers"},
		{"processors that are no list", edit("post_processor", m{"type": "Sequence", "processors": m{"type": "ByteLevel"}}), ErrMalformed, "processors"},
		{"ids that are no list", edit("post_processor", m{"type": "TemplateProcessing", "single": []any{m{"SpecialToken": m{"id": "<s>"}}, m{"Sequence": m{"id": "A"}}}, "special_tokens": m{"<s>": m{"ids": 1}}}), ErrMalformed, "ids of <s>"},
		{"merge of three", edit("model.merges", []any{[]any{"a", "b", "c"}}), ErrMalformed, "merge 0"},
		{"added id taken", edit("added_tokens", []any{m{"id": 5, "content": "<new>"}}), ErrMalformed, "taken"},
		{"added id differs", edit("added_tokens", []any{m{"id": 99999, "content": "a"}}), ErrMalformed, "vocabulary"},
	} {
		_, err := Parse(c.data, Options{})
		if err == nil || !errors.Is(err, c.want) && c.name != "byte missing" || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error %v, want %v saying %q", c.name, err, c.want, c.says)
		}
	}
	if _, err := Parse(good, Options{MaxFileBytes: 100}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("error %v, want ErrTooLarge", err)
	}
	if _, err := Load(filepath.Join(testdata, "qwen2"), Options{MaxFileBytes: 100}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("error %v, want ErrTooLarge", err)
	}
	if tok, err := Parse(edit("pre_tokenizer", split(patQwen2, "Removed", true)), Options{}); err != nil || tok.family != famQwen2 {
		t.Errorf("Removed and inverted: %v", err)
	}
	if _, err := Load(t.TempDir(), Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("empty folder: %v", err)
	}
}

func TestAllocs(t *testing.T) {
	tok := load(t, "llama3", Options{})
	text := mixedText(t, 64<<10, 1)
	dst := make([]uint32, 0, len(text))
	tok.Append(dst, text)
	if n := testing.AllocsPerRun(50, func() { tok.Append(dst, text) }); n > 2 {
		t.Errorf("%v allocations for a warm text, want at most 2", n)
	}
}

// FuzzAppend: any bytes come back from their ids, with and without caches.
func FuzzAppend(f *testing.F) {
	for _, s := range readJSON[[]string](f, "texts.json")[:150] {
		f.Add([]byte(s), uint8(len(s)))
	}
	var toks []*Tokenizer
	for _, fam := range families {
		if fam.dir == "flags" {
			continue // its added tokens swallow spaces
		}
		t := load(f, fam.dir, Options{WordCacheWords: 64})
		t.norm = nil // bytes in, bytes out
		toks = append(toks, t)
	}
	f.Fuzz(func(t *testing.T, b []byte, k uint8) {
		tok := toks[int(k)%len(toks)]
		ids := tok.Append(nil, b)
		if got := decode(tok, ids); !bytes.Equal(got, b) {
			t.Fatalf("%s: decode(encode(%q)) = %q", tok.family, b, got)
		}
		if again := tok.Append(nil, b); !slices.Equal(again, ids) {
			t.Fatalf("%s: ids of %q changed", tok.family, b)
		}
	})
}

func must(tb testing.TB, v any) []byte {
	tb.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// FuzzParse: no file makes the loader panic, and what it accepts tokenizes.
func FuzzParse(f *testing.F) {
	vocab, next := map[string]int{}, 0
	for r := range byteAlphabet() {
		vocab[string(r)] = next
		next++
	}
	vocab["ab"], vocab["abĠ"] = 256, 257
	for _, pre := range []string{
		`{"type":"ByteLevel","add_prefix_space":false}`,
		string(must(f, map[string]any{"type": "Sequence", "pretokenizers": []any{
			map[string]any{"type": "Split", "pattern": map[string]any{"Regex": patO200k}, "behavior": "Isolated"},
			map[string]any{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}}})),
	} {
		f.Add([]byte(`{"model":{"type":"BPE","ignore_merges":true,"merges":["a b",["ab","Ġ"]],"vocab":` + string(must(f, vocab)) +
			`},"normalizer":{"type":"NFC"},"pre_tokenizer":` + pre + `,"added_tokens":[{"id":300,"content":"<x>","lstrip":true,"single_word":true}],` +
			`"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"s"}},{"Sequence":{"id":"A"}}],"special_tokens":{"s":{"ids":[1]}}}}`))
	}
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		tok, err := Parse(data, Options{MaxFileBytes: 1 << 20, WordCacheWords: 16})
		if err != nil {
			if !errors.Is(err, ErrUnknown) && !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrTooLarge) {
				t.Fatalf("unclassified error %v", err)
			}
			return
		}
		ids := tok.AppendString(nil, "Hello, wörld! 12345 \n\n 的 <|im_start|>")
		if len(ids) == 0 && tok.norm == nil {
			t.Fatal("no ids")
		}
	})
}

// decode returns the bytes that ids stand for; unknown ids add nothing.
func decode(t *Tokenizer, ids []uint32) (out []byte) {
	for _, id := range ids {
		out, _ = t.AppendBytes(out, id, true)
	}
	return out
}
