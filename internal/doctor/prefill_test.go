package doctor

import (
	"math"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
)

// TestLegFailureIsTheLastLegs: a failed prefill after which another one
// delivered is no failure of the transfer.
func TestLegFailureIsTheLastLegs(t *testing.T) {
	failed := receipt.LegEntry{Kind: "prefill", Worker: "p0", Error: "broken", RetryReason: "missing_params"}
	good := receipt.LegEntry{Kind: "prefill", Worker: "p1"}
	decode := receipt.LegEntry{Kind: "decode", Worker: "d0"}
	for name, c := range map[string]struct {
		legs []receipt.LegEntry
		want string
	}{
		"none":             {nil, ""},
		"good":             {[]receipt.LegEntry{good, decode}, ""},
		"failed":           {[]receipt.LegEntry{failed, decode}, "p0: broken"},
		"failed then good": {[]receipt.LegEntry{failed, good, decode}, ""},
		"good then failed": {[]receipt.LegEntry{good, failed, decode}, "p0: broken"},
		"decode":           {[]receipt.LegEntry{good, {Kind: "decode", Worker: "d0", Error: "refused"}}, "d0: refused"},
	} {
		why, advice := legFailure(&receipt.Receipt{Legs: c.legs})
		if why != c.want || (advice == "") != (c.want == "") {
			t.Errorf("%s: %q, advice %q", name, why, advice)
		}
	}
}

// TestMovedIsTheProbesAlone: counters prove something when nothing but the probe
// moved them.
func TestMovedIsTheProbesAlone(t *testing.T) {
	sums := func(prompt, external, running float64) fleet.Sums {
		return fleet.Sums{Prompt: prompt, ExternalHits: external, Running: running}
	}
	unknown := math.NaN()
	for name, c := range map[string]struct {
		before, after fleet.Sums
		want          State
		again         bool
	}{
		"moved":               {sums(100, 50, 0), sums(741, 690, 0), OK, false},
		"not moved":           {sums(100, 50, 0), sums(741, 50, 0), Fail, false},
		"others moved, too":   {sums(100, 50, 0), sums(5000, 4094, 0), Warn, true},
		"others hide it":      {sums(100, 50, 0), sums(5000, 50, 0), Warn, true},
		"others run before":   {sums(100, 50, 1), sums(741, 690, 0), Warn, true},
		"others run after":    {sums(100, 50, 0), sums(741, 690, 1), Warn, true},
		"no such counter":     {sums(100, unknown, 0), sums(741, unknown, 0), Warn, false},
		"prompts uncounted":   {sums(unknown, 50, 0), sums(unknown, 690, 0), Warn, false},
		"load not reported":   {sums(100, 50, unknown), sums(741, 690, unknown), OK, false},
		"the engine restarts": {sums(900, 900, 0), sums(641, 640, 0), Warn, true},
	} {
		c.before.External, c.after.External = unknown, unknown
		cell, again := moved(c.before, c.after, 641, 640, "decode-0")
		if cell.State != c.want || again != c.again {
			t.Errorf("%s: %+v, again %v", name, cell, again)
		}
	}
}
