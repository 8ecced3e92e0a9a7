package virtual_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// shape is what an event looks like, whatever blocks it is about.
type shape struct {
	Kind, Medium, MediumName   string
	Group                      int32
	CacheKind                  string
	Parent, Tokens, Size, Many bool
}

// shapes adds those of a batch.
func shapes(t *testing.T, payload []byte, to map[shape]bool) {
	t.Helper()
	var d kvevent.Decoder
	var b kvevent.Batch
	if err := d.Decode(payload, &b); err != nil || b.Skipped+b.Unknown > 0 {
		t.Fatalf("%v, %+v", err, b)
	}
	for _, e := range b.Events {
		// Runs of blocks on the device may have one or several, with a parent or without.
		s := shape{
			Kind: e.Kind.String(), Medium: e.Medium.String(), MediumName: e.MediumName, Group: e.Group, CacheKind: e.CacheKind.String(),
			Tokens: len(e.Tokens) > 0, Size: e.BlockSize > 0,
		}
		if e.Medium != kvevent.GPU {
			s.Parent, s.Many = e.HasParent, len(e.Hashes) > 1
		}
		to[s] = true
	}
}

// TestOffloadPublishesAsVLLM: events of a rank that offloads have the very shapes of those
// that vLLM's own cache manager and offloading manager published.
func TestOffloadPublishesAsVLLM(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../../testdata/tiers/*.jsonl.gz")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d recordings, %v", len(files), err)
	}
	real, sim := map[shape]bool{}, map[shape]bool{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		z, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		sc := bufio.NewScanner(z)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			var l struct{ Payload []byte }
			if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
				t.Fatal(err)
			}
			if l.Payload != nil {
				shapes(t, l.Payload, real)
			}
		}
		if err := sc.Err(); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	w := virtual.NewWorld()
	cfg := config()
	cfg.Blocks, cfg.HostBlocks = 12, 16
	cfg.Publish = func(_ engine.Time, events []cache.Event) {
		b := kvevent.Batch{Events: make([]kvevent.Event, len(events))}
		for i, e := range events {
			b.Events[i] = sockets.Convert(e, cfg.BlockSize)
		}
		shapes(t, kvevent.AppendBatch(nil, &b, kvevent.Encoding{Form: kvevent.VLLMMap}), sim)
	}
	r := add(t, w, cfg)
	for i := range 60 {
		if err := r.Submit(engine.Request{ID: fmt.Sprint(i), Tokens: prompt(9+i%23, i%5), MaxTokens: 5}); err != nil {
			t.Fatal(err)
		}
		drain(t, w)
	}
	if d := cmp.Diff(real, sim); d != "" {
		t.Errorf("(-vLLM +simulator):\n%s", d)
	}
}

// TestOffload: what has left the device comes back from the host's memory or the store,
// takes the time of a transfer, and is the right KV; what the memory had no room for is
// computed. What was published is what there is.
func TestOffload(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		host    int
		storage bool
		want    int // tokens found behind those of the device
	}{
		"nothing beside the device": {0, false, 0},
		"room for all":              {64, false, 24},
		"room for the others only":  {14, false, 0},
		"a store behind":            {14, true, 24},
		"less room than a prompt":   {3, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := virtual.NewWorld()
			cfg := config()
			cfg.Blocks, cfg.HostBlocks, cfg.Storage = 12, tt.host, tt.storage
			published := map[cache.Tier]map[uint64]bool{cache.Device: {}, cache.Host: {}, cache.Storage: {}}
			cfg.Publish = func(_ engine.Time, events []cache.Event) {
				for _, e := range events {
					if e.Tier != cache.Device && (len(e.Tokens) > 0 || e.HasParent) {
						t.Errorf("an event of tier %d has more than names: %+v", e.Tier, e)
					}
					for _, n := range e.Names {
						if e.Kind == cache.Stored {
							published[e.Tier][n] = true
						} else {
							delete(published[e.Tier], n)
						}
					}
				}
			}
			r := add(t, w, cfg)
			ask := func(id string, tokens []uint32) (last engine.Output, ids []uint32, took engine.Time) {
				t.Helper()
				began := w.Now()
				if err := r.Submit(engine.Request{ID: id, Tokens: tokens, MaxTokens: 3, IgnoreEOS: true, Sink: func(o engine.Output) {
					if ids = append(ids, o.Token); len(ids) == 1 {
						took = o.At - began
					}
					last = o
				}}); err != nil {
					t.Fatal(err)
				}
				drain(t, w)
				return last, ids, took
			}
			first := prompt(25, 1)
			_, want, _ := ask("first", first)
			for i := range 3 { // they take its place on the device
				ask(fmt.Sprint(i), prompt(33, 2+i))
			}
			locals := blockhash.Locals(nil, first, cfg.BlockSize, blockhash.Key{})
			seqs := blockhash.Chain(nil, locals)
			if device, beyond := r.Core().Found(seqs); device != 0 || beyond*cfg.BlockSize != tt.want {
				t.Errorf("%d blocks on the device, %d beyond; want 0 and %d tokens", device, beyond, tt.want)
			}
			got, again, took := ask("again", first)
			if got.Cached != 0 || got.External != tt.want || !slices.Equal(again, want) {
				t.Errorf("%d tokens cached, %d loaded, want 0 and %d; answer %v, want %v", got.Cached, got.External, tt.want, again, want)
			}
			if least := cfg.Timing.Transfer(tt.want); tt.want > 0 && took < least {
				t.Errorf("the first token came after %v, before %v had passed", took, least)
			}
			if s := r.Core().Stats(w.Now()); int(s.External) != tt.want || s.UsedBlocks != 0 {
				t.Errorf("%+v", s)
			}
			// Who asks for the same again finds it on the device.
			if got, _, _ := ask("third", first); got.Cached != 24 || got.External != 0 {
				t.Errorf("%d tokens cached, %d loaded", got.Cached, got.External)
			}
			there := 0
			for _, s := range seqs {
				n := r.Core().Cache().Name(s)
				if published[cache.Host][n] || published[cache.Storage][n] {
					there++
				}
			}
			if there < tt.want/cfg.BlockSize || len(published[cache.Host]) > tt.host || len(published[cache.Storage]) > 0 != (tt.storage && tt.host > 3) {
				t.Errorf("published %d blocks of the prompt, %d in memory with room for %d, %d in the store", there, len(published[cache.Host]), tt.host, len(published[cache.Storage]))
			}
		})
	}
}
