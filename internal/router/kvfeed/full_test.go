package kvfeed

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/kvindex"
)

// What a full index refused comes back by itself when there is room again: the
// engine does not store again what it has, so nothing else would bring it.
func TestFullIndexRecovers(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 31, 1)
	x := kvindex.New(kvindex.Options{MaxBlocks: 64})
	if err := x.AddRank(0, "w/dp0"); err != nil {
		t.Fatal(err)
	}
	if err := x.AddRank(1, "other/dp0"); err != nil {
		t.Fatal(err)
	}
	var b kvindex.Batch
	names := make([]uint64, 62)
	for i := range names {
		names[i] = uint64(i) + 1
	}
	b.Store(0, false, names, names)
	if r := x.Apply(1, &b); r.Stored != len(names) {
		t.Fatalf("%+v", r)
	}
	f := newFixture(t, func(o *Options) {
		o.Index, o.VerifyAfter, o.VerifyEvery = x, 10*time.Millisecond, 10*time.Millisecond
		o.Observer = nil
	})
	f.x = x
	t.Cleanup(func() {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	})
	f.add(p.source(true))
	p.subscribed()
	for len(p.e.held) < 8 {
		p.steps(1)
	}
	if s := f.settled(p); s.Refused == 0 {
		t.Fatalf("nothing was refused: %+v", s)
	}
	subset(t, "index", p.e.set(), holds(t, x))
	x.ClearRank(1)
	f.until(func(s Status) bool { return s.State == Live && len(holds(t, x)) == len(p.e.set()) })
	equalSet(t, "index", p.e.set(), holds(t, x))
}
