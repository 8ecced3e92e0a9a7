package kvstream

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// cacheKinds are all names that vLLM's KVCacheSpecKind has, and one of the
// future, with whether blocks of such a cache are followed, set aside, or make
// the rank unknown.
var cacheKinds = map[string]string{
	"":                        "followed",
	"full_attention":          "followed",
	"mla_attention":           "followed",
	"sink_full_attention":     "followed",
	"sliding_window":          "aside",
	"sliding_window_mla":      "aside",
	"mamba":                   "aside",
	"chunked_local_attention": "aside",
	"encoder_only_attention":  "unknown",
	"cross_attention":         "unknown",
	"unknown":                 "unknown",
	"quantum_attention":       "unknown",
}

// No kind of cache leaves the index empty without a reason, alone or beside
// another one, in whatever order the groups come.
func TestNoKindOfCacheIsSilent(t *testing.T) {
	t.Parallel()
	for first, a := range cacheKinds {
		for second, b := range cacheKinds {
			x := kvmodel.NewIndex(t)
			s := New(x, 0, kvmodel.Block)
			if v := s.Offer(0, kvmodel.StoreOf(first, second)); v.Kind != Apply || s.Counters().Skipped != 0 {
				t.Fatalf("%q and %q: %v, %+v", first, second, v, s.Counters())
			}
			held, why, fault := overlap(x, kvmodel.Tokens(0, 4*kvmodel.Block), blockhash.Key{}), s.Mismatch(), s.TakeFault()
			unknown := a == "unknown" || b == "unknown"
			switch {
			case unknown:
				named := (a != "unknown" || strings.Contains(why, first)) && (b != "unknown" || strings.Contains(why, second))
				if held != 0 || !named || fault != why {
					t.Errorf("%q and %q: %d blocks, mismatch %q, fault %q", first, second, held, why, fault)
				}
			case a == "followed" || b == "followed":
				if held != 4 || why != "" || fault != "" {
					t.Errorf("%q and %q: %d blocks, mismatch %q, fault %q", first, second, held, why, fault)
				}
			case held != 0 || why == "" || fault != why:
				t.Errorf("%q and %q: %d blocks, mismatch %q, fault %q", first, second, held, why, fault)
			}
			if p, ok := s.Position(); ok && len(p.Groups) == 0 {
				t.Errorf("%q and %q: two groups have a position, which is no account of them", first, second)
			}
		}
	}
}

// kindProgram reads events off the bytes of a program, four for each: what
// happens, the kind of cache, the group and tier, and the blocks. A block's tokens
// follow from its name.
func kindProgram(kinds []string, program []byte, size int) []kvevent.Event {
	var events []kvevent.Event
	for ; len(program) >= 4 && len(events) < 64; program = program[4:] {
		e := kvevent.Event{Group: int32(program[2]%4) - 1}
		if program[2] >= 224 {
			e.Medium, e.MediumName = kvevent.CPU, "CPU"
		}
		first := uint64(program[3] % 8)
		for h := first; h <= first+uint64(program[3]/8%3); h++ {
			e.Hashes = append(e.Hashes, h+1)
		}
		switch program[0] % 8 {
		case 0:
			e.Kind, e.Hashes = kvevent.Cleared, nil
		case 1, 2, 3:
			e.Kind = kvevent.Removed
		default:
			e.Kind, e.BlockSize = kvevent.Stored, int32(size)
			e.Parent, e.HasParent = first, first > 0
			for _, h := range e.Hashes {
				e.Tokens = append(e.Tokens, kvmodel.Tokens(int(h)*100, size)...)
			}
			if name := kinds[int(program[1])%len(kinds)]; name != "" {
				e.CacheKind, e.CacheName = kvevent.OtherCache, name // written as it is
			}
		}
		events = append(events, e)
	}
	return events
}

// kindModel is what may be known of a rank after its events, as plainly as it can
// be said: how many copies of each block its one followed group has.
type kindModel struct {
	copies   map[uint64]int
	group    int32
	followed bool
	aside    bool
	unknown  string // the first kind that nobody knows
}

// take returns whether the blocks of e must be in the index afterwards.
func (m *kindModel) take(e *kvevent.Event) bool {
	other := e.Group >= 0 && m.group >= 0 && e.Group != m.group
	switch {
	case e.Medium != kvevent.GPU:
	case e.Kind == kvevent.Cleared:
		clear(m.copies)
	case e.Kind == kvevent.Removed:
		for _, h := range e.Hashes {
			if !other && m.copies[h] > 0 {
				m.copies[h]--
			}
		}
	case cacheKinds[e.CacheName] == "unknown":
		clear(m.copies)
		if m.unknown == "" {
			m.unknown = e.CacheName
		}
	case cacheKinds[e.CacheName] == "aside":
		m.aside = true
	case m.unknown == "" && !other:
		m.followed, m.group = true, max(m.group, e.Group)
		for _, h := range e.Hashes {
			if m.copies[h]++; e.Group < 0 { // a publisher that does not publish copies
				m.copies[h] = max(1, m.copies[h]-1)
			}
		}
		return true
	}
	return false
}

// FuzzKinds: whatever kinds of cache an engine reports, in whatever groups and
// order, the index holds nothing that the engine may have lost, and what it stored
// is in there, or counted and, unless another group is followed, said by name.
func FuzzKinds(f *testing.F) {
	kinds := slices.Sorted(maps.Keys(cacheKinds))
	for i := range kinds {
		k := byte(i)
		f.Add([]byte{4, k, 1, 16, 4, k + 1, 2, 16, 1, 0, 1, 0, 4, k, 1, 1, 1, 0, 0, 1}, false)
		f.Add([]byte{4, 0, 0, 16, 4, k, 3, 2, 0, 0, 3, 0, 4, 0, 0, 16, 4, k, 255, 0, 1, 0, 0, 1}, true)
	}
	x := newIndex(f, kvindex.Options{MaxBlocks: 1 << 12})
	f.Fuzz(func(t *testing.T, program []byte, double bool) {
		size := kvmodel.Block
		if double {
			size *= 2
		}
		x.ClearRank(0)
		s := New(x, 0, kvmodel.Block)
		m := kindModel{copies: map[uint64]int{}, group: -1}
		for i, e := range kindProgram(kinds, program, size) {
			before := s.Counters()
			payload := kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9 + float64(i), Events: []kvevent.Event{e}}, kvevent.Encoding{Form: kvevent.VLLMMap})
			if v := s.Offer(uint64(i), payload); v.Kind != Apply || s.Counters().Skipped+s.Counters().Unreadable > 0 {
				t.Fatalf("event %d: %v, %+v", i, v, s.Counters())
			}
			must := m.take(&e)
			after, why := s.Counters(), s.Mismatch()
			held := map[uint64]bool{}
			if err := x.RankBlocks(0, func(_, name uint64) bool { held[name] = true; return true }); err != nil {
				t.Fatal(err)
			}
			for name := range held {
				if name < 100 && m.copies[name] == 0 { // the others are parts of blocks
					t.Fatalf("event %d %+v: block %d is in the index, and not in the engine", i, e, name)
				}
			}
			for _, h := range e.Hashes {
				if must && !held[h] && after.Orphans == before.Orphans {
					t.Fatalf("event %d %+v: block %d was stored and is not in the index: %+v", i, e, h, after)
				}
			}
			if ignored := after.OtherGroup + after.Tiered - before.OtherGroup - before.Tiered; e.Kind == kvevent.Stored && (ignored == 1) == must {
				t.Fatalf("event %d %+v: followed %v, %d counted as not", i, e, must, ignored)
			}
			switch {
			case m.unknown != "":
				if len(held) > 0 || !strings.Contains(why, m.unknown) || !slices.Contains(s.UnknownKinds(), m.unknown) {
					t.Fatalf("event %d %+v: kind %s is unknown; %d blocks, mismatch %q", i, e, m.unknown, len(held), why)
				}
			case m.followed || !m.aside:
				if why != "" {
					t.Fatalf("event %d %+v: mismatch %q", i, e, why)
				}
			case why == "" || len(held) > 0:
				t.Fatalf("event %d %+v: nothing is followed; %d blocks, mismatch %q", i, e, len(held), why)
			}
		}
	})
}
