package stored

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestFind: requests for one id share a search, an id that no worker knows is not searched again
// for a few seconds, one that was found is not remembered here, and a client that leaves does
// not end a search that others wait for.
func TestFind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFinder()
		searches := map[string]int{}
		var mu sync.Mutex
		find := func(ctx context.Context, id string, answer Found) (Found, error) {
			return f.Find(ctx, id, func() Found {
				mu.Lock()
				searches[id]++
				mu.Unlock()
				<-time.After(time.Second)
				return answer
			})
		}
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if got, err := find(t.Context(), "a", Found{Worker: "w"}); got.Worker != "w" || err != nil {
					t.Error(got, err)
				}
				if got, err := find(t.Context(), "b", Found{}); got != (Found{}) || err != nil {
					t.Error(got, err)
				}
			})
		}
		wg.Wait()
		if searches["a"] != 1 || searches["b"] != 1 {
			t.Errorf("%v, want one search for each id", searches)
		}
		<-time.After(rememberedFor - time.Second)
		_, _ = find(t.Context(), "b", Found{})
		_, _ = find(t.Context(), "a", Found{Worker: "w"})
		if searches["a"] != 2 || searches["b"] != 1 {
			t.Errorf("%v before the end of %s", searches, rememberedFor)
		}
		<-time.After(rememberedFor)
		_, _ = find(t.Context(), "b", Found{})
		if searches["b"] != 2 || len(f.ended) != 1 {
			t.Errorf("%v after it, and %d are remembered", searches, len(f.ended))
		}
		ctx, leave := context.WithCancel(t.Context())
		wg.Go(func() { _, _ = find(ctx, "c", Found{Worker: "w"}) })
		synctest.Wait()
		leave()
		if got, err := find(t.Context(), "c", Found{}); got.Worker != "w" || err != nil {
			t.Errorf("after the first client left: %v, %v", got, err)
		}
		wg.Go(func() { _, _ = find(t.Context(), "d", Found{Worker: "w"}) })
		synctest.Wait()
		if _, err := find(ctx, "d", Found{}); !errors.Is(err, context.Canceled) {
			t.Errorf("a client that has left: %v", err)
		}
		wg.Wait()
	})
}

// TestSearchesAreBounded: a few searches run at once, one that gets no turn in time is not
// complete and not remembered, and so is one that panics; a thousand ids are remembered.
func TestSearchesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFinder()
		var wg sync.WaitGroup
		hang := make(chan struct{})
		for i := range searchesAtOnce {
			wg.Go(func() {
				_, _ = f.Find(t.Context(), fmt.Sprint("hangs ", i), func() Found { <-hang; return Found{} })
			})
		}
		synctest.Wait()
		query := func() Found { return Found{} }
		if got, err := f.Find(t.Context(), "x", query); got.Unclear == "" || err != nil {
			t.Errorf("without a turn: %v, %v", got, err)
		}
		close(hang)
		wg.Wait()
		wg.Go(func() {
			defer func() { _ = recover() }()
			_, _ = f.Find(t.Context(), "x", func() Found { panic("the fleet") })
		})
		wg.Wait()
		for i := range maxRemembered {
			if got, err := f.Find(t.Context(), fmt.Sprint(i), query); got != (Found{}) || err != nil {
				t.Fatal(got, err)
			}
		}
		if len(f.byID) != maxRemembered || len(f.ended) != maxRemembered || len(f.slots) != 0 {
			t.Errorf("%d ids, %d of them ended, %d in progress", len(f.byID), len(f.ended), len(f.slots))
		}
	})
}

// TestSearchable: what is searched for is a plain part of a path.
func TestSearchable(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]bool{
		"resp_0a-B.c:1": true, "": false, ".": false, "..": false, "a/b": false, "a?b": false, "a b": false, "a\r\nb": false, "a%2fb": false, "ä": false,
		strings.Repeat("x", maxID): true, strings.Repeat("x", maxID+1): false,
	} {
		if Searchable(id) != want {
			t.Errorf("%q: %v, want %v", id, !want, want)
		}
	}
}

// FuzzSearchable: an id that is searched for is its own escape in a path.
func FuzzSearchable(f *testing.F) {
	for _, id := range []string{"resp_1", "..", "a/b", "a#b", "%2e%2e"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		if Searchable(id) && (id == "" || len(id) > maxID || path.Clean("/"+id) != "/"+id || url.PathEscape(id) != id) {
			t.Errorf("%q", id)
		}
	})
}
