package serving

import (
	"fmt"
	"reflect"
	"testing"
	"time"
	"unsafe"

	"github.com/dynctl/dynctl/internal/router/effective"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/observe/account"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestReleasedCallIsEmpty: nothing of a call is found in the next one, nor of one that
// followed it.
func TestReleasedCallIsEmpty(t *testing.T) {
	c := New()
	c.ID, c.Model, c.Name, c.Start, c.Book = "id", "model", "asked", time.Now(), &account.Request{}
	c.begun.Store(hasBegun)
	c.decided, c.retry.budgeted = true, true
	c.Question.AcquireHashes()
	c.Question.IDs = append(c.Question.IDs, 1)
	c.Endpoint, c.Question.Settings = &api.Endpoint{}, &effective.Settings{}
	used := c.scratch
	c.leg("prefill", disagg.Peer{Worker: &workers.Worker{}}, nil, 0, "id")
	first, second := New(), New()
	c.Follow(first)
	first.ID = "first"
	if c.Book.Question != &first.Question {
		t.Error("the account is not of the call that goes on")
	}
	c.Follow(second)
	if first.ID != "" {
		t.Error("the call before is not released")
	}
	second.ID = "second"
	c.Release()
	if !reflect.DeepEqual(c.Asked, Asked{}) || c.begun.Load() != mayBegin || c.decided || c.retry.budgeted || c.next != nil || c.Question.IDs != nil || c.Question.Run.Plan.DecodeIndex != -1 || second.ID != "" {
		t.Errorf("%+v is left", c)
	}
	if c.scratch != nil {
		t.Error("the memory of its legs is not given back")
	}
	for i := range used {
		if s, empty := fmt.Sprint(used[i]), fmt.Sprint(rewrite.Scratch{}); s != empty {
			t.Errorf("%s is left of a leg", s)
		}
	}
}

// TestCallIsSmall: each stream that waits for a token holds a call. One byte more than this,
// and Go's allocator gives each 768 more.
func TestCallIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(Call{}); n > 4096 {
		t.Errorf("a call has %d bytes, and may have 4096: what only its attempts need belongs where DropInput gives it back", n)
	}
}
