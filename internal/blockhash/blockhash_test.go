package blockhash

import (
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/xxh3"
)

type vectors struct {
	Cases []struct {
		Name      string
		BlockSize int `json:"block_size"`
		LoRA      string
		Salt      string
		Extra     []uint64
		Tokens    []uint32
		Locals    []uint64
		Chain     []uint64
	}
	Text struct {
		Text       string
		ChunkBytes int `json:"chunk_bytes"`
		Hashes     []uint64
	}
}

func load(t testing.TB) *vectors {
	t.Helper()
	b, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	v := &vectors{}
	if err := json.Unmarshal(b, v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestVectors(t *testing.T) {
	t.Parallel()
	v := load(t)
	for _, c := range v.Cases {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			key := Key{LoRA: c.LoRA, Salt: c.Salt}
			locals := LocalsAt([]uint64{}, c.Tokens, c.BlockSize, 0, c.Extra, key)
			if d := cmp.Diff(c.Locals, locals); d != "" {
				t.Errorf("local hashes (-want +got):\n%s", d)
			}
			if len(c.Extra) == 0 {
				if d := cmp.Diff(c.Locals, Locals([]uint64{}, c.Tokens, c.BlockSize, key)); d != "" {
					t.Errorf("Locals (-want +got):\n%s", d)
				}
			}
			if d := cmp.Diff(c.Chain, Chain([]uint64{}, locals)); d != "" {
				t.Errorf("sequence hashes (-want +got):\n%s", d)
			}
			// A chain cut anywhere and continued from its parent is the same chain.
			for cut := 1; cut < len(locals); cut++ {
				tail := LocalsAt(nil, c.Tokens[cut*c.BlockSize:], c.BlockSize, cut, c.Extra[min(cut, len(c.Extra)):], key)
				got := Chain([]uint64{}, locals[:cut])
				for _, l := range tail {
					got = append(got, Next(got[len(got)-1], l))
				}
				if d := cmp.Diff(c.Chain, got); d != "" {
					t.Errorf("continued at block %d (-want +got):\n%s", cut, d)
				}
			}
		})
	}
	got := textChunks([]uint64{}, v.Text.ChunkBytes, Key{}, []byte(v.Text.Text))
	if d := cmp.Diff(v.Text.Hashes, got); d != "" {
		t.Errorf("text chunks (-want +got):\n%s", d)
	}
}

// TestTextsInARow: the first text alone is hashed as ever, what is left of it changes every
// hash of the next, and a text that is empty changes nothing.
func TestTextsInARow(t *testing.T) {
	t.Parallel()
	a, b := []byte("0123456789"), []byte("abcdefghijkl")
	chunks := func(texts ...[]byte) []uint64 { return Chain(nil, textChunks(nil, 4, Key{}, texts...)) }
	whole := chunks(a, b)
	if len(whole) != 5 || !slices.Equal(whole[:2], chunks(a)) || !slices.Equal(chunks(nil, b), chunks(b)) {
		t.Errorf("%x of both, %x of the first, %x of the second", whole, chunks(a), chunks(b))
	}
	other := chunks([]byte("01234567x9"), b)
	if !slices.Equal(other[:2], whole[:2]) || slices.ContainsFunc(other[2:], func(h uint64) bool { return slices.Contains(whole, h) }) {
		t.Errorf("%x and %x", whole, other)
	}
}

// TestNextIsXXH3: the sequence hash is XXH3 of the 16 bytes of both hashes.
func TestNextIsXXH3(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 4))
	for range 1000 {
		parent, local := r.Uint64(), r.Uint64()
		b := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, parent), local)
		if got, want := Next(parent, local), xxh3.HashSeed(b, Seed); got != want {
			t.Fatalf("Next(%x, %x) = %x, want %x", parent, local, got, want)
		}
	}
}

// The view of tokens as bytes must hash like the bytes written out one by one.
func TestViewEqualsPortable(t *testing.T) {
	t.Parallel()
	if !littleEndian {
		t.Skip("big-endian host: only the portable form is used")
	}
	r := rand.New(rand.NewPCG(1, 2))
	for size := range 300 {
		block := make([]uint32, size)
		for i := range block {
			block[i] = r.Uint32()
		}
		seed := r.Uint64()
		if got, want := Local(block, 0, seed), localPortable(block, 0, seed); got != want {
			t.Fatalf("block of %d tokens: view hashes to %x, portable form to %x", size, got, want)
		}
	}
}

func TestKeysSeparate(t *testing.T) {
	t.Parallel()
	tokens := make([]uint32, 48)
	hash := func(k Key) []uint64 { return Chain(nil, Locals(nil, tokens, 16, k)) }
	text := func(k Key) []uint64 { return Chain(nil, textChunks(nil, 64, k, make([]byte, 192))) }
	seen := map[uint64]string{}
	for _, k := range []Key{{}, {LoRA: "a"}, {LoRA: "b"}, {Salt: "a"}, {Salt: "b"}, {LoRA: "a", Salt: "b"}, {LoRA: "b", Salt: "a"}} {
		for form, chain := range map[string][]uint64{"tokens": hash(k), "text": text(k)} {
			for i, s := range chain {
				if by, ok := seen[s]; ok {
					t.Errorf("%s block %d under %+v has the sequence hash of %s", form, i, k, by)
				}
				seen[s] = form
			}
		}
	}
	// The salt is in block 0 only: what follows differs through the chain, not through the local hash.
	a, b := Locals(nil, tokens, 16, Key{}), Locals(nil, tokens, 16, Key{Salt: "s"})
	if a[0] == b[0] || a[1] != b[1] || a[2] != b[2] {
		t.Errorf("salt changes local hashes %v, want block 0 only (plain %x, salted %x)", []bool{a[0] != b[0], a[1] != b[1], a[2] != b[2]}, a, b)
	}
}

func TestNoBlocks(t *testing.T) {
	t.Parallel()
	tokens := make([]uint32, 32)
	for name, got := range map[string][]uint64{
		"block size 0":  Locals(nil, tokens, 0, Key{}),
		"block size -1": Locals(nil, tokens, -1, Key{}),
		"chunk size 0":  textChunks(nil, 0, Key{}, make([]byte, 9)),
		"partial block": Locals(nil, tokens, 33, Key{}),
		"no tokens":     Locals(nil, nil, 16, Key{}),
		"empty chain":   Chain(nil, nil),
		"empty text":    textChunks(nil, 4, Key{}, nil),
	} {
		if len(got) != 0 {
			t.Errorf("%s: got %d hashes, want none", name, len(got))
		}
	}
}

func TestNoAllocations(t *testing.T) {
	tokens := make([]uint32, 8192)
	text := make([]byte, 32<<10)
	extra := []uint64{1, 2, 3}
	key := Key{LoRA: "adapter", Salt: "tenant"}
	locals := make([]uint64, 0, 512)
	chain := make([]uint64, 0, 512)
	got := testing.AllocsPerRun(20, func() {
		locals = LocalsAt(locals[:0], tokens, 16, 0, extra, key)
		chain = Chain(chain[:0], locals)
		locals = textChunks(locals[:0], 64, Key{}, text)
	})
	if got != 0 {
		t.Errorf("%v allocations per prompt with reused buffers, want 0", got)
	}
}

func BenchmarkPrompt8k(b *testing.B) {
	tokens := make([]uint32, 8192)
	for i := range tokens {
		tokens[i] = uint32(i * 7919)
	}
	locals, chain := make([]uint64, 0, 512), make([]uint64, 0, 512)
	b.ReportAllocs()
	b.SetBytes(int64(4 * len(tokens)))
	for b.Loop() {
		locals = Locals(locals[:0], tokens, 16, Key{})
		chain = Chain(chain[:0], locals)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/512, "ns/block")
}

func BenchmarkTextChunks32K(b *testing.B) {
	text := make([]byte, 32<<10)
	dst := make([]uint64, 0, 512)
	b.ReportAllocs()
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		dst = textChunks(dst[:0], 64, Key{}, text)
	}
}

// textChunks appends one local hash per full chunk of chunkBytes bytes of each text to dst and
// returns it. What is left of one text is part of the first hash of the next.
func textChunks(dst []uint64, chunkBytes int, key Key, texts ...[]byte) []uint64 {
	c := NewChunker(chunkBytes, key)
	for _, text := range texts {
		dst = c.Text(dst, text)
	}
	return dst
}
