package kvfeed

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/kvevent"
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

// storeOf is one batch of vLLM's map form that stores blocks of tokens 0 to 15
// in a group of the named kind for each kind given.
func storeOf(kinds ...string) []byte {
	b := kvevent.Batch{TS: 1e9, Rank: 0}
	for i, kind := range kinds {
		e := stored(0, []uint64{1, 2, 3, 4}, tokens(0, 4*modelBlock), modelBlock)
		e.Group = int32(i)
		if kind != "" {
			e.CacheKind, e.CacheName = kvevent.OtherCache, kind // written as it is
		}
		b.Events = append(b.Events, e)
	}
	return kvevent.AppendBatch(nil, &b, kvevent.Encoding{Form: kvevent.VLLMMap})
}

// No kind of cache leaves the index empty without a word, alone or beside
// another one, in whatever order the groups come.
func TestNoKindOfCacheIsSilent(t *testing.T) {
	t.Parallel()
	for first, a := range cacheKinds {
		for second, b := range cacheKinds {
			x := newIndex(t)
			s := NewStream(x, 0, modelBlock)
			if v := s.Offer(0, storeOf(first, second)); v.Kind != Apply || s.Counters().Skipped != 0 {
				t.Fatalf("%q and %q: %v, %+v", first, second, v, s.Counters())
			}
			held, why, fault := overlap(x, tokens(0, 4*modelBlock), blockhash.Key{}), s.Mismatch(), s.TakeFault()
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
			if _, ok := s.Position(); ok != (why == "") {
				t.Errorf("%q and %q: position %v, mismatch %q", first, second, ok, why)
			}
		}
	}
}

// A kind that nobody knows is a state of the rank, an event and a figure, all
// of which name it; a publisher that begins anew without it is trusted again.
func TestUnknownCacheKindIsTold(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 21, 1)
	f := newFixture(t, nil)
	f.add(p.source(true))
	p.subscribed()
	p.steps(5)
	f.settled(p)
	p.set(func() {
		p.e.log = append(p.e.log, storeOf("quantum_attention"))
		p.e.after = append(p.e.after, set{})
		clear(p.e.held)
	})
	p.send(uint64(len(p.e.log)-1), p.e.log[len(p.e.log)-1])
	s := f.until(func(s Status) bool { return s.State == Unknown })
	if s.Trusted || f.Trusted(0) || len(s.UnknownKinds) != 1 || s.UnknownKinds[0] != "quantum_attention" || !strings.Contains(s.Reason, "quantum_attention") {
		t.Errorf("status %+v", s)
	}
	f.equals(p)
	f.mu.Lock()
	told := false
	for _, e := range f.events {
		told = told || e.Kind == "feed.unknown" && strings.Contains(e.Text, "quantum_attention") && strings.Contains(e.Text, "w/dp0")
	}
	f.mu.Unlock()
	if !told {
		t.Errorf("no event names the kind: %+v", f.events)
	}
	p.hangUp(func() { p.set(p.e.restart) })
	p.subscribed()
	p.steps(5)
	if s := f.settled(p); len(s.UnknownKinds) != 0 {
		t.Errorf("after a restart: %+v", s)
	}
	f.equals(p)
}
