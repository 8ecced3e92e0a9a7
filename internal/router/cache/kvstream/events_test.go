package kvstream

import (
	"testing"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// TestEveryKindOfEventHasItsEffect: what each kind of event does to ranks that can reuse
// the first two blocks of a prompt. A kind that is silently ignored would let the router
// count blocks that the engine no longer has.
func TestEveryKindOfEventHasItsEffect(t *testing.T) {
	t.Parallel()
	const bs = kvmodel.Block
	stored := func(parent uint64, hashes ...uint64) kvevent.Event {
		return kvmodel.Stored(parent, hashes, kvmodel.Tokens(int(parent)*bs, len(hashes)*bs), bs)
	}
	of := func(group int32, e kvevent.Event) kvevent.Event {
		if e.Group = group; e.Kind == kvevent.Stored {
			e.CacheKind = kvevent.FullAttention
		}
		return e
	}
	places := []struct {
		name, code string
		had        []kvevent.Event
		as         func(kvevent.Event) kvevent.Event
	}{
		{"a rank", "each in applier.go", []kvevent.Event{stored(0, 1, 2)}, func(e kvevent.Event) kvevent.Event { return e }},
		{
			"a rank with two cache groups", "note in groups.go", []kvevent.Event{of(0, stored(0, 1, 2, 3)), of(1, stored(0, 1, 2))},
			func(e kvevent.Event) kvevent.Event { return of(1, e) },
		},
		{
			"a rank with a block in the host's memory", "noteTiers in tiers.go", []kvevent.Event{stored(0, 1), tiered(kvevent.CPU, stored(1, 2))},
			func(e kvevent.Event) kvevent.Event { return tiered(kvevent.CPU, e) },
		},
	}
	const none = 2 // blocks that each rank has before
	rows := map[kvevent.Kind]struct {
		event kvevent.Event
		left  [3]int // blocks that can be reused after it, in the order of places
		why   [3]string
	}{
		kvevent.Stored:  {event: stored(2, 3), left: [3]int{3, 3, 3}},
		kvevent.Removed: {event: kvmodel.Removed(2), left: [3]int{1, 1, 1}},
		kvevent.Cleared: {event: kvevent.Event{Kind: kvevent.Cleared, Group: -1}, left: [3]int{0, 0, 1}},
	}
	for kind := kvevent.Unknown + 1; kind.String() != kvevent.Unknown.String(); kind++ {
		row, ok := rows[kind]
		if !ok {
			t.Errorf("no row here for events of kind %s: say what they do in each (applier.go), in noteGroups (groups.go) and in noteTiers (tiers.go), and here what is left of a prompt after one, or why nothing changes", kind)
			continue
		}
		for i, place := range places {
			x := kvmodel.NewIndex(t)
			s := New(x, 0, bs)
			reusable := func(events ...kvevent.Event) int {
				for _, e := range events {
					payload := kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9, Events: []kvevent.Event{e}}, kvevent.Encoding{Form: kvevent.VLLMMap})
					if v := s.Offer(s.Next(), payload); v.Kind != Apply || s.Counters().Skipped+s.Counters().Unreadable > 0 {
						t.Fatalf("%s of %s: %v, %+v", kind, place.name, v, s.Counters())
					}
				}
				p, locals := asked(8)
				var q kvindex.Query
				x.Overlap(locals, &q)
				n, beyond := s.Usable(q.Depth(0), p)
				return n + int(beyond.CPU)
			}
			if had := reusable(place.had...); had != none {
				t.Fatalf("%s can reuse %d blocks, not %d", place.name, had, none)
			}
			if row.left[i] == none && row.why[i] == "" {
				t.Errorf("%s of %s changes nothing, and nobody says why", kind, place.name)
			}
			if left := reusable(place.as(row.event)); left != row.left[i] {
				t.Errorf("%s of %s leaves %d blocks, want %d: see %s", kind, place.name, left, row.left[i], place.code)
			}
		}
	}
}
