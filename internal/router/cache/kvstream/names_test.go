package kvstream

import (
	"cmp"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
)

// seedOf is the PYTHONHASHSEED of a recording, by its file's name.
func seedOf(file string) string {
	_, seed, _ := strings.Cut(strings.TrimSuffix(filepath.Base(file), ".jsonl.gz"), ".seed")
	return seed
}

// With the algorithm and the seed of the engine's names stated, the count is vLLM's own
// in every request, also without full attention where windows or mamba show it. A wrong
// statement is noticed at once and counts nothing too long.
func TestHybridCachesWithNamesStated(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../../testdata/hybrid/*.jsonl.gz")
	seeded, err2 := filepath.Glob("../../../../testdata/hybrid/names/*.jsonl.gz")
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
			if n.more > 0 || n.less > early || s.HashDiffers() {
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
				if s.app.groups == nil || !s.app.groups.NamesSuffice() {
					t.Error("names are not computed")
				}
				// Of chunked attention alone whole chunks count without a name, and there
				// may be none from which on the others could be tested.
				whole := len(head.Groups) == 1 && head.chunk() > 0
				tested := !whole || s.app.groups.Named()
				plain, _ := predict(t, lines, head.Unit, kvgroup.Traits{Chunk: head.chunk()})
				known.HashSeed += "7"
				wrong, s := predict(t, lines, head.Unit, known)
				if s.HashDiffers() != tested || wrong.more > 0 || wrong != plain && !whole {
					t.Errorf("of a wrong seed: differs %v, %+v; without a statement %+v", s.HashDiffers(), wrong, plain)
				}
			}
		})
	}
}
