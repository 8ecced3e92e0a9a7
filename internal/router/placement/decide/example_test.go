package decide_test

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// A prompt of 4,096 tokens, of which the decode rank holds first none and then 120 blocks
// of 32, at a threshold of 2,048 tokens.
func ExampleMakePlan() {
	phase := func(p route.Phase, name string, role workers.Role, held int) (selector.Input, []workers.Peer) {
		rank := &workers.Rank{WorkerName: name, Label: name + "/dp0"}
		worker := &workers.Worker{
			Facts: workers.Facts{
				Role: role, Engine: workers.VLLM, Connector: workers.ConnectorNIXL,
				BlockSize: 32,
			},
			Name: name, Ranks: []*workers.Rank{rank}, State: &workers.State{},
		}
		in := selector.Input{
			Phase: p, Policy: selector.KV, Weights: selector.DefaultWeights(), ISL: 4096, BlockSize: 32,
			Candidates: []decision.Candidate{{Rank: rank.Label, OverlapBlocks: held}},
		}
		return in, []workers.Peer{{Worker: worker, Rank: rank}}
	}
	for _, held := range []int{0, 120} {
		in := decide.Input{
			Rule: decide.Rule{Threshold: 2048, LoadCredit: decide.LoadCredit},
			Facts: api.Facts{
				Kind: api.Completion, Splittable: true, ISL: 4096, Source: route.FromLocal,
				N: 1, Prompts: 1, MaxTokens: 100, MinTokens: -1,
			},
		}
		in.Decode, in.DecodePeers = phase(route.Decode, "decode-0", workers.Decode, held)
		in.Prefill, in.PrefillPeers = phase(route.Prefill, "prefill-0", workers.Prefill, 0)
		var plan decide.Plan
		decide.MakePlan(&in, &plan)
		if plan.Err != nil {
			fmt.Println(plan.Err)
			return
		}
		fmt.Printf("%d tokens to compute: %s, %s\n", plan.EffISL, plan.Path, plan.Reason)
	}
	// Output:
	// 4096 tokens to compute: remote, eff_isl_above_threshold
	// 256 tokens to compute: local, eff_isl_below_threshold
}
