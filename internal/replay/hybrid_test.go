package replay

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// TestHybridRanksReplay: a recording of a rank with several cache groups, written and
// read as a file, gives in a replay what the engine's own cache manager found at each
// request. What the router knew of the engine beside its events is in the recording.
func TestHybridRanksReplay(t *testing.T) {
	t.Parallel()
	for file, known := range map[string]kvgroup.Traits{
		"vllm-0.32.0-full+window.jsonl.gz":             {},
		"vllm-0.32.0-full+window+mamba.jsonl.gz":       {},
		"vllm-0.32.0-full+chunked.jsonl.gz":            {Chunk: 64},
		"eagle/vllm-0.32.0-full.jsonl.gz":              {Drops: true},
		"eagle/vllm-0.32.0-full+window+mamba.jsonl.gz": {Drops: true},
	} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			f, err := os.Open(filepath.Join("../../testdata/hybrid", file))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			z, err := gzip.NewReader(f)
			if err != nil {
				t.Fatal(err)
			}
			const rank, size = "w/dp0", 16
			raw, err := trace.AppendHeader(nil, trace.Header{Source: "test", Start: time.Unix(1_800_000_000, 0)})
			if err != nil {
				t.Fatal(err)
			}
			put := func(r trace.Record) {
				if raw, err = trace.AppendRecord(raw, &r); err != nil {
					t.Fatal(err)
				}
			}
			put(trace.Record{Kind: trace.KindRank, Rank: rank, RankInfo: trace.RankInfo{BlockSize: size, New: true, Traits: known}})
			put(trace.Record{Kind: trace.KindFeed, Rank: rank, Trusted: true})
			type asked struct {
				after, cached int // batches before it
				tokens        []uint32
			}
			var questions []asked
			batches := 0
			sc := bufio.NewScanner(z)
			sc.Buffer(nil, 16<<20)
			for sc.Scan() {
				var l struct {
					Type    string
					Payload []byte
					Seq     uint64
					Tokens  []uint32
					Cached  int
				}
				if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
					t.Fatal(err)
				}
				switch l.Type {
				case "batch":
					batches++
					put(trace.Record{Kind: trace.KindBatch, Rank: rank, Batch: trace.Batch{Seq: l.Seq, Payload: l.Payload}})
				case "request":
					questions = append(questions, asked{batches, l.Cached, l.Tokens})
				}
			}
			r, err := trace.NewReader(bytes.NewReader(raw), "t", trace.Options{})
			if err != nil {
				t.Fatal(err)
			}
			p := NewPlayer(PlayerOptions{})
			defer p.Close()
			warm := 0
			answer := func(played int) {
				for len(questions) > 0 && questions[0].after == played {
					q := questions[0]
					questions = questions[1:]
					locals := blockhash.Locals(nil, q.tokens, size, blockhash.Key{})
					var held kvindex.Query
					p.Overlap(locals, &held)
					n, _ := p.ranks[rank].usable(&held, prompt(locals, len(q.tokens)))
					got := min(n, (len(q.tokens)-1)/size*size)
					if got != q.cached {
						t.Fatalf("after %d batches: %d tokens of %d, vLLM found %d", played, got, len(q.tokens), q.cached)
					}
					if q.cached > 0 {
						warm++
					}
				}
			}
			for played := 0; ; {
				var rec trace.Record
				if err := r.Next(&rec); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
				if err := p.Play(&rec); err != nil {
					t.Fatal(err)
				}
				if rec.Kind == trace.KindRank || rec.Kind == trace.KindBatch {
					if rec.Kind == trace.KindBatch {
						played++
					}
					answer(played)
				}
			}
			if warm < 10 || len(questions) > 0 {
				t.Errorf("%d requests met a warm cache, %d were not asked", warm, len(questions))
			}
		})
	}
}
