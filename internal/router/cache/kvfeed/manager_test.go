package kvfeed

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestManagerRefuses(t *testing.T) {
	t.Parallel()
	x := kvmodel.NewIndex(t)
	for name, o := range map[string]Options{
		"no index":      {BlockSize: 16},
		"no block size": {Index: x},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	m, err := New(Options{Index: x, BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	src := workers.EventSource{Endpoint: "tcp://127.0.0.1:1"}
	if err := m.Add(0, Key{Worker: "w"}, workers.EventSource{}, nil); err == nil {
		t.Error("a rank without endpoint was taken")
	}
	if err := m.Add(1<<20, Key{Worker: "w"}, src, nil); err == nil {
		t.Error("a rank beyond the limit was taken")
	}
	if err := m.Add(0, Key{Worker: "w", BlockSize: -1}, src, nil); err == nil {
		t.Error("a rank with a negative block size was taken")
	}
	if err := m.Add(3, Key{Worker: "w"}, src, nil); err != nil {
		t.Fatal(err)
	}
	if err := m.Add(3, Key{Worker: "v"}, src, nil); err == nil {
		t.Error("a rank was taken twice")
	}
	if m.Trusted(3) || m.Trusted(1<<19) || m.Usable(3, 4, &kvgroup.Prompt{}, nil) != 0 {
		t.Error("trusted before it runs")
	}
	if s := m.Status(); len(s) != 1 || s[0].State != Connecting || s[0].LastSeq != -1 {
		t.Errorf("status %+v", s)
	}
	for _, id := range []kvindex.Rank{3, 4} {
		m.Freeze(id, func(p kvstream.Position, ok bool) {
			if ok {
				t.Errorf("rank %d has the position %+v before the first batch", id, p)
			}
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	eventually(t, func() string { return "connect errors" }, func() bool { return m.Status()[0].ConnectErrors > 0 })
	if err := m.Run(ctx); err == nil {
		t.Error("a second run was begun")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := m.Add(4, Key{Worker: "w"}, src, nil); err == nil {
		t.Error("a rank was taken after the end")
	}
	if !m.Remove(3) {
		t.Error("the rank is gone after the end")
	}
}

func TestStatusJSON(t *testing.T) {
	t.Parallel()
	b, err := json.Marshal(Status{Worker: "w", State: Live, Since: time.Unix(0, 0).UTC()})
	if err != nil {
		t.Fatal(err)
	}
	var flat map[string]any
	if err := json.Unmarshal(b, &flat); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"rank", "worker", "dp_rank", "state", "reason", "trusted", "last_seq", "lag_seconds", "engine_block_tokens", "batches", "stored_blocks", "orphan_blocks", "gaps", "replayed_batches"} {
		if _, ok := flat[key]; !ok {
			t.Errorf("no %q in %s", key, b)
		}
	}
	if _, ok := flat["last_event"]; ok {
		t.Errorf("an event time before the first event: %s", b)
	}
}
