package routing

import (
	"slices"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings/effective"
)

// TestTextOfARequest: the engine's names of a prompt's blocks are available from its
// routing request, with the salt of its request; not where the prompt has an adapter, and not
// from the memory of an earlier one.
func TestTextOfARequest(t *testing.T) {
	ids := make([]uint32, 40)
	for i := range ids {
		ids[i] = uint32(i)
	}
	known := kvgroup.Traits{HashAlgorithm: "sha256", HashSeed: "7"}
	engine := blockhash.NewEngineNames("sha256", "7")
	first := engine.Next(nil, engine.Root(), ids[:16], "salt")
	want := []uint64{first.Short(), engine.Next(nil, first, ids[16:32], "").Short()}
	var d Decider
	var q Request
	ask := func(lora string) []uint64 {
		q.LoRA, q.Settings = lora, &effective.Settings{}
		q.Prompt = prompt.Prompt{IDs: ids, ISL: len(ids), Source: route.FromIDs}
		d.Hash(&q, &api.View{CacheSalt: "salt"}, time.Now())
		return q.hashed.text.Names(&known, 16, 2)
	}
	if got := ask(""); !slices.Equal(got, want) {
		t.Errorf("names %x, not %x", got, want)
	}
	text := &q.hashed.text
	q.Release()
	if got := text.Names(&known, 16, 2); len(got) != 0 {
		t.Errorf("after the request: %x", got)
	}
	if got := ask("adapter"); len(got) != 0 {
		t.Errorf("with an adapter: %x", got)
	}
	q.Release()
	// Between two attempts a worker may report that the model is an adapter.
	if got := ask(""); !slices.Equal(got, want) {
		t.Errorf("names %x, not %x", got, want)
	}
	if got := ask("adapter"); len(got) != 0 {
		t.Errorf("with an adapter that was not known before: %x", got)
	}
}
