package simulate

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

func TestConv(t *testing.T) {
	src := conversation(t)
	b, err := Bound(src, 512, 0)
	t.Log(b, err)
	for _, p := range []selector.Policy{selector.KV, selector.LeastLoaded} {
		f, err := sim.ParseFleet("16a:block=64,kv_blocks=16384,max_model_len=262144")
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		res, err := Simulate(t.Context(), src, Setup{Fleet: f, Policy: p, Weights: selector.DefaultWeights(), Plan: disagg.Config{}})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%v %+v", time.Since(start), res)
	}
}
