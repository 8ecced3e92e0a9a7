package simulate

import (
	"slices"

	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
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

// Set makes the run with other settings of decisions and other constants.
func (s *Setup) Set(list []replay.Change) {
	s.Options = replay.Changed(s.Options, list)
	now := cost.Tuned
	if s.Constants != nil {
		now = *s.Constants
	}
	if c := replay.ChangedConstants(now, list); c != now {
		s.Constants = &c
	}
}

// Ranks are what of the run matters to whether a setting has an effect in it.
func (s *Setup) Ranks() replay.Ranks {
	r := replay.Ranks{Limits: s.TTFT > 0 && s.ITL > 0 && (s.Objective == "" || s.Objective == cost.ForGoodput)}
	answering := 0 // groups, which may differ in speed
	for _, g := range s.Fleet.Groups {
		if g.Role.CanDecode() {
			answering++
		}
		r.Split = r.Split || g.Role.CanPrefill()
		r.Offload = r.Offload || g.HostBlocks > 0
	}
	r.Alone = !r.Split || s.Busy != selector.Busy{} || slices.ContainsFunc(s.Faults, func(f Fault) bool { return f.Kind == PrefillGone })
	r.Slow = s.SlowFactor > 0 && (len(s.Faults) > 0 || answering > 1)
	return r
}
