//go:build race

package decide

import (
	"math"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/workers"
)

// poison overwrites memory that is given back: who still reads it finds a candidate
// that is none, and where it writes or reads beside others the race detector sees it.
func (m *memory) poison() {
	overwrite(m.in.Decode.Candidates, released)
	overwrite(m.in.Prefill.Candidates, released)
	overwrite(m.in.DecodePeers, workers.Peer{})
	overwrite(m.in.PrefillPeers, workers.Peer{})
	overwrite(m.plan.Decode.Order, math.MaxInt)
	overwrite(m.plan.Prefill.Order, math.MaxInt)
	overwrite(m.plan.decodeVeto, released.Rank)
	overwrite(m.plan.prefillVeto, released.Rank)
}

// released is a candidate in memory that was given back.
var released = decision.Candidate{
	Rank: "released memory", KeptOut: "released memory", Excluded: "released memory", Slot: math.MaxUint32,
	OverlapBlocks: math.MinInt32, Cost: math.NaN(), LastTurn: math.MaxUint64, KVUsage: math.NaN(),
}

// overwrite writes v into all of a slice's memory.
func overwrite[T any](s []T, v T) {
	s = s[:cap(s)]
	for i := range s {
		s[i] = v
	}
}
