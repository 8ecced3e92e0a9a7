package workload

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/rig/external"
)

type body struct {
	Model     string
	Prompt    []uint32
	MaxTokens int  `json:"max_tokens"`
	MinTokens int  `json:"min_tokens"`
	IgnoreEOS bool `json:"ignore_eos"`
	Stream    bool
}

func fill(t *testing.T, s loadgen.Source, slot int) (body, *loadgen.Request) {
	t.Helper()
	q := &loadgen.Request{}
	if !s.Fill(slot, q) {
		t.Fatal("the source is dry")
	}
	var b body
	if err := json.Unmarshal(q.Body, &b); err != nil {
		t.Fatalf("%v in %s", err, q.Body)
	}
	if n := len(b.Prompt); n != q.ISL {
		t.Fatalf("a prompt of %d tokens, want %d", n, q.ISL)
	}
	want := body{Model: b.Model, Prompt: b.Prompt, MaxTokens: q.OSL, MinTokens: q.OSL, IgnoreEOS: true, Stream: true}
	if d := cmp.Diff(want, b); d != "" {
		t.Fatalf("body (-want +got):\n%s", d)
	}
	return b, q
}

// No two prompts of a cell, of two cells or of two runs begin alike.
func TestPromptsAreUnique(t *testing.T) {
	seen := map[string]string{}
	for _, salt := range []string{"a", "b"} {
		for _, name := range []string{"c1", "c2"} {
			c := &Cell{Series: Series{Pool: DefaultPool(), Model: "m", Name: name, Salt: salt, Ramp: 2, N: 100}, Fresh: 64, OSL: 5}
			for i := range 102 {
				b, q := fill(t, c, 0)
				if q.Warm != (i < 2) {
					t.Fatal("the ramp is not marked")
				}
				raw, _ := json.Marshal(b.Prompt[:8])
				if before, ok := seen[string(raw)]; ok {
					t.Fatalf("%s/%s/%d begins like %s", salt, name, i, before)
				}
				seen[string(raw)] = q.ID
			}
			if c.Fill(0, &loadgen.Request{}) {
				t.Error("more requests than asked for")
			}
		}
	}
}

func TestCellsRepeatForEqualSalts(t *testing.T) {
	make1 := func() []uint32 {
		b, _ := fill(t, &Cell{Series: Series{Pool: DefaultPool(), Name: "x", Salt: "s", N: 1}, Fresh: 20, OSL: 1, Prefix: []uint32{1, 2}}, 0)
		return b.Prompt
	}
	a := make1()
	if !slices.Equal(a, make1()) || a[0] != 1 || len(a) != 22 {
		t.Error("the same cell gives other prompts")
	}
}

func TestTurnsGrow(t *testing.T) {
	isl, _ := ParseDist("10")
	osl, _ := ParseDist("4")
	m := &Mixed{Series: Series{Pool: DefaultPool(), Name: "n", Salt: "s", N: 100}, ISL: isl, OSL: osl, Turns: 3, MaxLen: 1000}
	var last []uint32
	for i := range 6 {
		b, q := fill(t, m, 1)
		if !strings.Contains(q.Header, "X-Session-ID: ") {
			t.Error("a turn has no session")
		}
		if i%3 == 0 {
			if len(b.Prompt) != 10 {
				t.Errorf("a first turn of %d tokens", len(b.Prompt))
			}
		} else if !slices.Equal(b.Prompt[:len(last)], last) || len(b.Prompt) != len(last)+14 {
			t.Errorf("turn %d does not go on with the one before", i%3)
		}
		last = b.Prompt
	}
	m.MaxLen = 30
	for range 20 {
		if b, q := fill(t, m, 1); len(b.Prompt)+q.OSL > 30 {
			t.Errorf("%d tokens with an answer of %d are more than the model takes", len(b.Prompt), q.OSL)
		}
	}
}

func TestGroupsShareTheirPrefix(t *testing.T) {
	isl, _ := ParseDist("100")
	osl, _ := ParseDist("1")
	m := &Mixed{Series: Series{Pool: DefaultPool(), Name: "n", Salt: "s", N: 60}, ISL: isl, OSL: osl, Groups: 3, PrefixTokens: 80}
	heads := map[string]int{}
	all := map[string]bool{}
	for range 60 {
		b, _ := fill(t, m, 0)
		h, _ := json.Marshal(b.Prompt[:80])
		heads[string(h)]++
		w, _ := json.Marshal(b.Prompt)
		all[string(w)] = true
	}
	if len(heads) != 3 || len(all) != 60 {
		t.Errorf("%d prefixes, %d prompts", len(heads), len(all))
	}
}

func TestDistributions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, text := range []string{"512", "U(100,300)", "N(1000,100)", "L(500,0.5)", "128:0.7,4096:0.3"} {
		d, err := ParseDist(text)
		if err != nil {
			t.Fatal(err)
		}
		var sum float64
		const n = 20000
		for range n {
			v := d.Draw(rng)
			if v < 1 {
				t.Fatalf("%s gave %d", text, v)
			}
			sum += float64(v)
		}
		if got := sum / n; math.Abs(got/d.Mean()-1) > 0.03 {
			t.Errorf("%s: mean %v, want %v", text, got, d.Mean())
		}
	}
	for _, bad := range []string{"", "0", "-1", "N(1,-1)", "U(5,1)", "N(1)", "D(1,2)", "L(1,99)", "x", "1:0", "1:-1", "99999999999", "N(NaN,1)", "1:1,2"} {
		if _, err := ParseDist(bad); err == nil {
			t.Errorf("%q passed", bad)
		}
	}
}

func FuzzParseDist(f *testing.F) {
	for _, s := range []string{"512", "U(1,2)", "N(1,1)", "L(5,.5)", "1:2,3:4"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := ParseDist(s)
		if err != nil {
			return
		}
		if v := d.Draw(rand.New(rand.NewPCG(1, 1))); v < 1 || v > maxLength {
			t.Errorf("%q gave %d", s, v)
		}
	})
}

func TestTrace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "t.jsonl")
	text := `{"timestamp": 1000, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 3]}
{"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 4]}
{"timestamp": 2000, "input_length": 99999, "output_length": 9, "hash_ids": [1]}
`
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	items, info, err := ReadTrace(file, nil, TraceOptions{Scale: 0.5, MaxLen: 4096})
	if err != nil {
		t.Fatal(err)
	}
	if len(items) != 2 || info.TooLong != 1 {
		t.Fatalf("%d items, want 2; %d too long, want 1", len(items), info.TooLong)
	}
	if items[0].At != 0 || items[1].At != time.Second || items[1].OSL != 9 {
		t.Fatalf("at %v and %v, want 0 s and 1 s; %d tokens in the second, want 9", items[0].At, items[1].At, items[1].OSL)
	}
	src := &Trace{Series: Series{Pool: DefaultPool(), Name: "n", Salt: "s"}, Items: items}
	a, _ := fill(t, src, 0)
	b, q := fill(t, src, 0)
	if len(a.Prompt) != 1030 || !slices.Equal(a.Prompt[:1024], b.Prompt[:1024]) || slices.Equal(a.Prompt[1024:1030], b.Prompt[1024:1030]) || q.At != time.Second {
		t.Error("prompts do not share what their block ids say")
	}
	if _, _, err := ReadTrace(file, nil, TraceOptions{MaxLen: 10}); !errors.Is(err, ErrEmpty) {
		t.Errorf("%v", err)
	}
	if _, _, err := ReadTrace(filepath.Join(t.TempDir(), "none"), nil, TraceOptions{}); err == nil {
		t.Error("a trace that does not exist was read")
	}
}

func TestConversationTrace(t *testing.T) {
	items, info, err := ReadTrace(external.Conversation(t), nil, TraceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(items) != 12031 || math.Abs(info.MeanISL-12035) > 1 || math.Abs(info.MeanOSL-343) > 1 || info.Format != "mooncake" {
		t.Errorf("%+v", info)
	}
}

// TestModelInBody: engines name models as they like, and routers read JSON.
func TestModelInBody(t *testing.T) {
	for _, model := range []string{"m", "a\"b\\c", "\x1b]0;t\x07\x7f\n", "\u009b\u202e", "模型"} {
		var b body
		if err := json.Unmarshal(Body(nil, model, []uint32{7}, 1), &b); err != nil || b.Model != model {
			t.Errorf("%q became %q: %v", model, b.Model, err)
		}
	}
}

func BenchmarkBody(b *testing.B) {
	p := DefaultPool().Tokens(nil, rand.New(rand.NewPCG(1, 1)), 4096)
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		dst = Body(dst[:0], "m", p, 16)
	}
}
