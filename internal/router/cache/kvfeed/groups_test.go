package kvfeed

import (
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
)

// The groups of a rank are in its status, until its publisher starts over without
// them.
func TestGroupsAreShown(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 22, 1)
	f := p.followed(true, nil)
	p.steps(3)
	if s := f.caughtUp(p); len(s.CacheGroups) != 0 {
		t.Errorf("a plain rank has groups: %+v", s.CacheGroups)
	}
	p.set(func() {
		p.e.Log = append(p.e.Log, kvmodel.StoreOf("full_attention", "mamba"))
		p.e.After = append(p.e.After, kvmodel.Set{})
	})
	p.send(uint64(len(p.e.Log)-1), p.e.Log[len(p.e.Log)-1])
	s := f.until(func(s Status) bool { return len(s.CacheGroups) > 1 })
	want := []kvgroup.Group{{Number: -1, Kind: kvevent.FullAttention, Block: kvmodel.Block}, {Kind: kvevent.FullAttention, Block: kvmodel.Block}, {Number: 1, Kind: kvevent.Mamba, Block: kvmodel.Block}}
	if !slices.Equal(s.CacheGroups, want) {
		t.Errorf("groups %+v, want %+v", s.CacheGroups, want)
	}
	p.hangUp(func() { p.set(p.e.Restart) })
	p.subscribed()
	p.steps(3)
	if s := f.caughtUp(p); len(s.CacheGroups) != 0 {
		t.Errorf("after a restart: %+v", s.CacheGroups)
	}
}
