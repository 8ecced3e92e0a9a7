package engine

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// TestSenders: a decode that asks for a transfer that never comes takes one of 20 senders for
// 480 s, and others wait behind 20 of them; a transfer_id is taken once.
func TestSenders(t *testing.T) {
	r, err := New(Config{
		BlockSize: 32, Blocks: 64, MaxSeqs: 8, MaxBatchedTokens: 512, MaxModelLen: 512, Model: "m", OSL: 4, Lease: time.Second,
		Timing: Profile{Prefill: [3]float64{10, 0.01, 0}, Decode: [3]float64{5, 1, 0}}, Next: func([]uint32, uint64) uint32 { return 7 },
	})
	if err != nil {
		t.Fatal(err)
	}
	failed, got := 0, 0
	ask := func(name string) {
		t.Helper()
		if err := r.Ask(r.now, name, 1, func(c []cache.Content, err error) {
			if err != nil {
				failed++
				return
			}
			got += len(c)
		}); err != nil {
			t.Fatal(err)
		}
	}
	prefill := func(name string) error {
		return r.Submit(r.now, Request{ID: "r-" + name, Tokens: make([]uint32, 20), MaxTokens: 1, IgnoreEOS: true, Pin: true, Transfer: name})
	}
	advance := func(d time.Duration) { r.Advance(r.now + d) }

	ask("before") // its prefill comes later
	if s := r.Stats(r.now); s.Senders != 1 {
		t.Errorf("%d senders are taken", s.Senders)
	}
	if err := prefill("before"); err != nil {
		t.Fatal(err)
	}
	advance(time.Minute)
	if s := r.Stats(r.now); got != 1 || s.Senders != 0 || s.Pinned != 0 {
		t.Errorf("%d blocks came, %d senders are taken, %d prompts kept", got, s.Senders, s.Pinned)
	}
	if err := prefill("before"); !errors.Is(err, errTransferUsed) {
		t.Errorf("a second time: %v", err)
	}
	for i := range 20 {
		ask(fmt.Sprint("never", i))
	}
	if err := prefill("after"); err != nil {
		t.Fatal(err)
	}
	advance(time.Minute)
	ask("after")
	if s := r.Stats(r.now); got != 1 || s.Senders != 20 || s.Pinned != 1 {
		t.Errorf("%d blocks came, %d senders are taken, %d prompts kept", got, s.Senders, s.Pinned)
	}
	advance(SendTime - time.Minute + time.Second)
	if s := r.Stats(r.now); failed != 20 || s.Senders != 0 {
		t.Errorf("%d decodes failed, %d senders are taken", failed, s.Senders)
	}
}
