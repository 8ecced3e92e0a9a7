package soak

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/route"
)

// IndexSynced waits until what the index holds of every rank is what its engine's
// cache holds.
func IndexSynced(ctx context.Context, g *loopback.Rig) error {
	return loopback.Wait(ctx, "the index to equal the caches", func() error { return IndexDiffers(g) })
}

// IndexDiffers says where the index and the engines' caches are not equal; nil when
// they are. Engines without events are left out.
func IndexDiffers(g *loopback.Rig) error {
	var errs []error
	for _, e := range g.Sim.Engines() {
		for dp := range e.Group().DP {
			pub, err := e.Publisher(dp)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if pub == nil {
				continue
			}
			want, err := e.Cached(dp)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			label := route.RankLabel(e.Name(), dp)
			got, ok := g.Router.Fleet().Blocks(label)
			if !ok {
				errs = append(errs, fmt.Errorf("the index knows no rank %s", label))
				continue
			}
			slices.Sort(want)
			slices.Sort(got)
			want, got = slices.Compact(want), slices.Compact(got)
			if !slices.Equal(want, got) {
				errs = append(errs, fmt.Errorf("%s: the index holds %d block(s), %d of them not in the engine's cache of %d", label, len(got), foreign(got, want), len(want)))
			}
		}
	}
	return errors.Join(errs...)
}

// foreign counts the blocks that a cache, which is sorted, does not have.
func foreign(blocks, cache []uint64) (n int) {
	for _, b := range blocks {
		if _, ok := slices.BinarySearch(cache, b); !ok {
			n++
		}
	}
	return n
}
