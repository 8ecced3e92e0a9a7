package models

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestCache: calls at the same time share one question, it is asked again for another
// revision or an old list, and after one that panicked a call that waited for it asks.
func TestCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Cache
		var asked int // one at a time
		ask := func() *List {
			asked++
			<-time.After(time.Second)
			return &List{}
		}
		all := func(revision uint64) {
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					if l, err := c.Get(t.Context(), revision, ask); l == nil || err != nil {
						t.Error(l, err)
					}
				})
			}
			wg.Wait()
		}
		all(1)
		all(1)
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
		if all(2); asked != 2 {
			t.Errorf("asked %d times at two revisions", asked)
		}
		<-time.After(keep)
		if all(2); asked != 3 {
			t.Errorf("asked %d times after %s", asked, keep)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			defer func() { _ = recover() }()
			_, _ = c.Get(t.Context(), 3, func() *List {
				<-time.After(time.Second)
				panic("the fleet")
			})
		})
		synctest.Wait()
		if all(3); asked != 4 {
			t.Errorf("asked %d times after a panic", asked)
		}
		wg.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() { all(4) })
		synctest.Wait()
		cancel()
		if _, err := c.Get(ctx, 4, ask); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		wg.Wait()
	})
}
