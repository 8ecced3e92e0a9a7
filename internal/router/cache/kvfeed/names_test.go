package kvfeed

import (
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/route"
)

// What is stated of an engine's names is compared with those that it gives: names that fit
// make a cache without full attention count; others count nothing, and are a state of the
// rank and one event.
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
		text := kvmodel.Tokens(0, 4*kvmodel.Block)
		engine := blockhash.NewEngineNames("sha256", "5")
		name := engine.Root()
		for i := range 4 {
			name = engine.Next(nil, name, text[i*kvmodel.Block:(i+1)*kvmodel.Block], "")
		}
		// A state at the end of the prompt alone, after the tokens of all four blocks.
		e := kvmodel.Stored(0, []uint64{name.Short()}, text, kvmodel.Block)
		e.Group, e.CacheKind, e.CacheName = 0, kvevent.OtherCache, "mamba"
		payload := kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9, Events: []kvevent.Event{e}}, kvevent.Encoding{Form: kvevent.VLLMMap})
		for n := range int64(3) {
			p.set(func() {
				p.e.Log = append(p.e.Log, payload)
				p.e.After = append(p.e.After, kvmodel.Set{})
			})
			p.send(uint64(n), payload)
			s := f.until(func(s Status) bool { return s.LastSeq == n })
			if s.HashDiffers == fits || (s.State == Live) != fits {
				t.Fatalf("seed %s: %+v", seed, s)
			}
		}
		locals := blockhash.Locals(nil, append(text, 1), kvmodel.Block, blockhash.Key{})
		var beyond route.Tiers
		got, want := f.Usable(0, 0, &kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(text) + 1, Block: kvmodel.Block}, &beyond), 0
		if fits {
			want = 4
		}
		if events := f.emitted("hash_differs"); got != want || (events == 0) != fits || events > 1 {
			t.Errorf("seed %s: %d blocks usable, not %d; %d events", seed, got, want, events)
		}
	}
}
