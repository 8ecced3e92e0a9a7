package bpe

import (
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// mixedText returns about n bytes of prose, code, CJK and emoji from the
// vectors' texts, or the file named by DYNCTL_BENCH_TEXT.
func mixedText(tb testing.TB, n int, seed uint64) []byte {
	tb.Helper()
	if p := os.Getenv("DYNCTL_BENCH_TEXT"); p != "" {
		b, err := os.ReadFile(p)
		if err != nil {
			tb.Fatal(err)
		}
		return b[:min(n, len(b))]
	}
	var parts []string
	for _, t := range readJSON[[]string](tb, "texts.json")[:100] {
		if len(t) > 100 && len(t) < 600 && strings.Contains(t, " ") {
			parts = append(parts, strings.Fields(t)...)
		}
	}
	r := rand.New(rand.NewPCG(seed, 1))
	var b strings.Builder
	for b.Len() < n {
		b.WriteString(parts[r.IntN(len(parts))])
		b.WriteByte(" \n"[r.IntN(20)/19])
	}
	return []byte(b.String()[:n])
}

// benchTokenizers calls f for each synthetic tokenizer, and for the file named
// by DYNCTL_TOKENIZER.
func benchTokenizers(b *testing.B, o Options, f func(*testing.B, *Tokenizer)) {
	if p := os.Getenv("DYNCTL_TOKENIZER"); p != "" {
		t, err := Load(p, o)
		if err != nil {
			b.Fatal(err)
		}
		b.Run("real", func(b *testing.B) { f(b, t) })
		return
	}
	for _, fam := range families {
		t := load(b, fam.dir, o)
		b.Run(fam.dir, func(b *testing.B) { f(b, t) })
	}
}

// cpu returns the processor time of this process. Benchmarks report it beside
// the wall time, because it is what a router pays and does not depend on what
// else the machine does.
func cpu(tb testing.TB) time.Duration {
	tb.Helper()
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// reset empties the caches.
func (t *Tokenizer) reset() {
	t.words = newWordCache(len(t.words.slots))
	if t.chunks != nil {
		t.chunks = newChunkCache(t.chunks.max)
	}
}

// cold tokenizes a text with empty caches each time, and returns the CPU time that this took.
func cold(b *testing.B, t *Tokenizer, text []byte) (used time.Duration) {
	b.ReportAllocs()
	var ids []uint32
	for b.Loop() {
		b.StopTimer()
		t.reset()
		b.StartTimer()
		start := cpu(b)
		ids = t.Append(ids[:0], text)
		used += cpu(b) - start
	}
	return used
}

// BenchmarkCold1MB is one thread over 1 MB with empty caches each time.
func BenchmarkCold1MB(b *testing.B) {
	text := mixedText(b, 1<<20, 1)
	benchTokenizers(b, Options{}, func(b *testing.B, t *Tokenizer) {
		b.SetBytes(int64(len(text)))
		used := cold(b, t, text)
		b.ReportMetric(float64(len(text))*float64(b.N)/used.Seconds()/1e6, "MB/cpu-s")
	})
}

// BenchmarkWords1MB leaves the word cache warm and has no chunk cache: what a
// text of known words costs.
func BenchmarkWords1MB(b *testing.B) {
	text := mixedText(b, 1<<20, 1)
	benchTokenizers(b, Options{ChunkCacheBytes: -1}, func(b *testing.B, t *Tokenizer) {
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		var ids []uint32
		for b.Loop() {
			ids = t.Append(ids[:0], text)
		}
	})
}

// BenchmarkPrompt220KB: cold, and sharing the first 90 % with an earlier one.
func BenchmarkPrompt220KB(b *testing.B) {
	const n = 220 << 10
	text := mixedText(b, n, 1)
	benchTokenizers(b, Options{}, func(b *testing.B, t *Tokenizer) {
		b.Run("cold", func(b *testing.B) {
			used := cold(b, t, text)
			b.ReportMetric(float64(used.Microseconds())/float64(b.N)/1e3, "cpu-ms/op")
		})
		b.Run("share90", func(b *testing.B) {
			b.ReportAllocs()
			tail := mixedText(b, 2<<20, 2)
			prompt := append([]byte(nil), text...)
			ids := t.Append(nil, prompt)
			var used time.Duration
			for k := 0; b.Loop(); k += 997 {
				b.StopTimer()
				at := k % (len(tail) - n/10)
				copy(prompt[n-n/10:], tail[at:at+n/10])
				b.StartTimer()
				start := cpu(b)
				ids = t.Append(ids[:0], prompt)
				used += cpu(b) - start
			}
			b.ReportMetric(float64(used.Microseconds())/float64(b.N)/1e3, "cpu-ms/op")
		})
	})
}

func BenchmarkLoad(b *testing.B) {
	path := os.Getenv("DYNCTL_TOKENIZER")
	if path == "" {
		path = testdata + "/qwen2"
	}
	b.ReportAllocs()
	start := cpu(b)
	for b.Loop() {
		if _, err := Load(path, Options{}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((cpu(b)-start).Microseconds())/float64(b.N)/1e3, "cpu-ms/op")
}
