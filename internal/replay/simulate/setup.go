package simulate

import (
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// fleetDefaults are options of simulated engines that fit long prompts.
const fleetDefaults = "block=64,kv_blocks=16384,max_model_len=1048576,max_batched_tokens=8192,max_seqs=256"

// ParseFleet reads a fleet as sim.ParseFleet does, with other defaults, which fit long
// prompts: blocks of 64 tokens, 16,384 of them on a rank, and prompts of up to a million
// tokens.
func ParseFleet(text string) (sim.Fleet, error) {
	return sim.ParseFleet(sim.WithOptions(text, fleetDefaults))
}

// Decisions are the router's settings of decisions, with a policy for both phases and a
// threshold of uncached tokens.
func Decisions(policy selector.Policy, threshold decide.Threshold) decide.Options {
	o := decide.Options{
		Decode: policy, Prefill: policy, Weights: selector.DefaultWeights(), Rule: decide.Rule{On: decide.OnEffISL, LoadCredit: decide.LoadCredit},
	}
	threshold.Apply(&o.Rule)
	return o
}
