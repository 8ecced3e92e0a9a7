package kvfeed

import (
	"strings"
	"testing"
)

// TestDistrust: the entries of an engine that has emptied its cache unseen are gone at once. What
// a replay has from before does not bring them back; later batches rebuild the rank.
func TestDistrust(t *testing.T) {
	t.Parallel()
	for name, replay := range map[string]bool{"with a replay": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPublisher(t, 53, 1)
			f := newFixture(t, nil)
			f.add(p.source(replay))
			f.live(p)
			f.Distrust(0, "nothing has come")
			f.Distrust(7, "not fed")
			if n := f.emitted("feed_unknown"); n != 0 {
				t.Errorf("%d times dropped before there was anything", n)
			}
			p.steps(20)
			f.caughtUp(p)
			f.Distrust(0, "it has slept")
			if s := f.one(); f.x.Blocks(0) != 0 || s.Dropped != 1 || s.State != Live || !strings.Contains(s.Reason, "it has slept") {
				t.Errorf("%d blocks are left: %+v", f.x.Blocks(0), s)
			}
			p.steps(20)
			f.caughtUp(p)
			f.within(p)
		})
	}
}
