package follower

import (
	"testing"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestFewerRanks: an engine that comes back with fewer ranks leaves nothing of
// the others behind, here or in their slots, and can come back with more again.
func TestFewerRanks(t *testing.T) {
	t.Parallel()
	s := newFixture(t, "")
	s.set(t, "http://127.0.0.1:1,name=a")
	for _, dp := range []int{4, 1, 3, 2, 4} {
		l := workers.Learned{Facts: workers.Facts{From: map[workers.Field]string{workers.FieldDP: "test"}}, DP: dp}
		for i := range dp {
			l.Events = append(l.Events, workers.EventSource{DP: i, Endpoint: "tcp://127.0.0.1:3"})
		}
		if _, err := s.Registry.Update(s.Registry.Snapshot().Workers[0], l); err != nil {
			t.Fatal(err)
		}
		now := s.Registry.Snapshot()
		s.applySnapshot(now)
		ranks := now.Workers[0].Ranks
		if len(ranks) != dp || len(s.feeds.Status()) != dp || len(s.Index.Ranks()) != dp || len(s.Registry.Retired()) != 0 {
			t.Fatalf("%d ranks: %d known, %d fed, %d in the index, %d slots not released", dp, len(ranks), len(s.feeds.Status()), len(s.Index.Ranks()), len(s.Registry.Retired()))
		}
		var b kvindex.Batch
		b.Store(0, false, []uint64{1}, []uint64{1})
		for _, k := range ranks {
			if x, _ := s.Index.RankStats(kvindex.Rank(k.Slot)); x.Name != k.Label || !s.Fed(k) || k.DP > 0 && x.Blocks > 1 {
				t.Errorf("%d ranks: %s has the place %+v", dp, k.Label, x)
			}
			s.Index.Apply(kvindex.Rank(k.Slot), &b)
		}
	}
}
