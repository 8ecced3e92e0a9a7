package follower

import (
	"path/filepath"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/route"
)

// TestStopKeepsGroupsAndTiers: a rank of a hybrid model, and one that spills to the host's
// memory, are after a restart of the router what they would be without it, although the
// replay reaches back to the last batches only.
func TestStopKeepsGroupsAndTiers(t *testing.T) {
	t.Parallel()
	host := recordedGroups(t, "../../../../testdata/tiers/vllm-0.32.0-host-60.jsonl.gz")
	host.block = 16
	for _, k := range []recording{host, pick(t, "full+window+mamba")} {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			const at, missed = 50, 5 // batches before the stop, and while no router runs
			path := filepath.Join(t.TempDir(), "index")
			o := newOutlet(t, k, 10)
			l := begin(t, path, o)
			l.until(0)
			o.publish(at)
			l.until(at)
			if err := l.stop(); err != nil {
				t.Fatal(err)
			}
			o.publish(at + missed)
			l = begin(t, path, o)
			if s := l.until(at + missed); s.Dropped != 0 || s.Batches != missed || !s.Complete {
				t.Errorf("the rank did not go on where it was: %+v", s)
			}
			o.publish(len(k.payloads))
			s := l.until(len(k.payloads))
			g := newRig(t, k.block)
			defer g.close()
			for i, p := range k.payloads {
				g.offer(i, p, kvstream.Apply)
			}
			if s.Tiers != g.s.Tiers() || s.TiersReported != g.s.TiersReported() || len(s.CacheGroups) > 1 != (k.groups > 1) {
				t.Errorf("after the restart tiers have %+v, without it %+v; groups %+v", s.Tiers, g.s.Tiers(), s.CacheGroups)
			}
			found, beyond := 0, route.Tiers{}
			for _, q := range k.asked {
				locals := blockhash.Locals(nil, q.tokens, k.block, blockhash.Key{})
				p := kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(q.tokens), Block: k.block}
				var here, there kvindex.Query
				l.Index.Overlap(locals, &here)
				g.x.Overlap(locals, &there)
				var got route.Tiers
				n := l.feeds.Usable(0, here.Depth(0), &p, &got)
				want, wantBeyond := g.s.Usable(there.Depth(0), p)
				if n != want || got != wantBeyond {
					t.Fatalf("after the restart %d blocks, then %+v; without it %d, %+v", n, got, want, wantBeyond)
				}
				found += n
				beyond.CPU += got.CPU
			}
			if found == 0 || (beyond.CPU > 0) != s.TiersReported {
				t.Errorf("as a recording it proves nothing: %d blocks, %+v", found, beyond)
			}
		})
	}
}
