package kvfeed

import (
	"cmp"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/decision"
	"github.com/dynctl/dynctl/internal/router/kvevent"
	"github.com/dynctl/dynctl/internal/router/kvgroup"
)

// seedOf is the PYTHONHASHSEED of a recording, by its file's name.
func seedOf(file string) string {
	_, seed, _ := strings.Cut(strings.TrimSuffix(filepath.Base(file), ".jsonl.gz"), ".seed")
	return seed
}

// With the algorithm and the seed of the engine's names stated, the count is vLLM's own
// in every request, also without full attention where windows or mamba tell it. A wrong
// statement is noticed at once and counts nothing too long.
func TestHybridCachesWithNamesStated(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../testdata/hybrid/*.jsonl.gz")
	seeded, err2 := filepath.Glob("../../../testdata/hybrid/names/*.jsonl.gz")
	if err = cmp.Or(err, err2); err != nil || len(files) < 20 || len(seeded) < 3 {
		t.Fatalf("recordings: %d, %d with a seed, %v", len(files), len(seeded), err)
	}
	for _, file := range append(files, seeded...) {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".jsonl.gz"), func(t *testing.T) {
			t.Parallel()
			lines := readHybrid(t, file)
			head := lines[0]
			known := kvgroup.Traits{Chunk: head.chunk(), HashAlgorithm: head.Hash, HashSeed: seedOf(file)}
			n, s := predict(t, lines, head.Unit, known)
			t.Logf("%+v", n)
			// Before its first event a rank's groups are not known.
			early := 0
			for _, l := range lines[1:] {
				if l.Type == "batch" {
					break
				}
				if l.Cached > 0 {
					early++
				}
			}
			// Chunked attention alone leaves out whole chunks, whose tokens no event tells.
			alone := len(head.Groups) == 1 && head.chunk() > 0
			if n.more > 0 || n.less > early && !alone || s.HashDiffers() {
				t.Errorf("%d predictions are more than vLLM's, %d less; differs: %v", n.more, n.less, s.HashDiffers())
			}
			// After a restart, and from the middle on, blocks are not known from their
			// beginnings: less may be counted, never more.
			if n, _, _ := predictOver(t, lines, head.Unit, known, 5); n.more > 0 {
				t.Errorf("with restarts %d predictions are more than vLLM's", n.more)
			}
			for from := 1; from < len(lines); from += 29 {
				if n, _ := predict(t, lines[from:], head.Unit, known); n.more > 0 {
					t.Errorf("from line %d on %d predictions are more than vLLM's", from+1, n.more)
				}
			}
			if len(head.Groups) > 1 || !strings.Contains(head.Groups[0].Spec, "Full") {
				if s.app.groups == nil || !s.app.groups.Named() {
					t.Error("names are not computed")
				}
				plain, _ := predict(t, lines, head.Unit, kvgroup.Traits{Chunk: head.chunk()})
				known.HashSeed += "7"
				wrong, s := predict(t, lines, head.Unit, known)
				if !s.HashDiffers() || wrong != plain {
					t.Errorf("of a wrong seed: differs %v, %+v; without a statement %+v", s.HashDiffers(), wrong, plain)
				}
			}
		})
	}
}

// What is stated of an engine's names is held against what it gives: names that fit make
// a cache without full attention count, others are a state of the rank and an event, once,
// and count nothing.
func TestStatedNamesAreHeldAgainstTheEngines(t *testing.T) {
	t.Parallel()
	for seed, fits := range map[string]bool{"5": true, "6": false} {
		p := newPublisher(t, 22, 1)
		f := newFixture(t, nil)
		if err := f.Add(0, Key{Worker: "w", Traits: kvgroup.Traits{HashAlgorithm: "sha256", HashSeed: seed}}, p.source(true), nil); err != nil {
			t.Fatal(err)
		}
		p.subscribed()
		f.until(func(s Status) bool { return s.State == Live })
		text := tokens(0, 4*modelBlock)
		engine := blockhash.NewEngineNames("sha256", "5")
		name := engine.Root()
		for i := range 4 {
			name = engine.Next(nil, name, text[i*modelBlock:(i+1)*modelBlock], "")
		}
		// A state at the end of the prompt alone, after the tokens of all four blocks.
		e := stored(0, []uint64{name.Short()}, text, modelBlock)
		e.Group, e.CacheKind, e.CacheName = 0, kvevent.OtherCache, "mamba"
		payload := kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9, Events: []kvevent.Event{e}}, kvevent.Encoding{Form: kvevent.VLLMMap})
		for n := range int64(3) {
			p.set(func() {
				p.e.log = append(p.e.log, payload)
				p.e.after = append(p.e.after, set{})
			})
			p.send(uint64(n), payload)
			s := f.until(func(s Status) bool { return s.LastSeq == n })
			if s.HashDiffers == fits || (s.State == Live) != fits {
				t.Fatalf("seed %s: %+v", seed, s)
			}
		}
		locals := blockhash.Locals(nil, append(text, 1), modelBlock, blockhash.Key{})
		var beyond decision.Tiers
		got, want := f.Usable(0, 0, &kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(text) + 1, Block: modelBlock}, &beyond), 0
		if fits {
			want = 4
		}
		if told := f.told("hash.differs"); got != want || (told == 0) != fits || told > 1 {
			t.Errorf("seed %s: %d blocks usable, not %d; told %d times", seed, got, want, told)
		}
	}
}
