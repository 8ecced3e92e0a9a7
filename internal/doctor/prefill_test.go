package doctor

import (
	"math"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
)

// TestLegFailureIsTheLastLegs: a failed prefill after which another one
// delivered is no failure of the transfer.
func TestLegFailureIsTheLastLegs(t *testing.T) {
	failed := receipt.LegEntry{Kind: "prefill", Worker: "p0", Error: "broken", RetryReason: "missing_params"}
	good := receipt.LegEntry{Kind: "prefill", Worker: "p1"}
	decode := receipt.LegEntry{Kind: "decode", Worker: "d0"}
	local := failed
	local.Error, local.RetryReason = "set VLLM_NIXL_SIDE_CHANNEL_HOST", "bad_params"
	if _, advice := legFailure(&receipt.Receipt{Legs: []receipt.LegEntry{local}}); !strings.Contains(advice, "names itself by an address of its own machine") {
		t.Errorf("a side channel on localhost: %q", advice)
	}
	unmet := &receipt.Receipt{Notes: []string{"p0 cannot send KV: " + disagg.ErrNoBootstrap.Error() + ": refused"}}
	unmet.Path = "local"
	unmet.Inputs.Force = "remote"
	if c, ok := notRemote(false, unmet, nil); ok || c.State != Fail || !strings.Contains(c.Text, "p0 cannot send KV") || !strings.Contains(c.Advice, "connector=nixl") {
		t.Errorf("no bootstrap server: %+v", c)
	}
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

// TestMoved: counters of an engine that runs nothing else are the probe's, and those of a
// busy one prove what other requests cannot change.
func TestMoved(t *testing.T) {
	unknown := math.NaN()
	// sums has an engine's prompt tokens, those of them that came from elsewhere and that it
	// computed, and its requests in progress.
	sums := func(prompt, external, computed, running float64) fleet.Sums {
		return fleet.Sums{Prompt: prompt, External: external, Computed: computed, Running: running, ExternalHits: unknown}
	}
	for name, c := range map[string]struct {
		before, after fleet.Sums
		want          State
		again         bool
	}{
		"moved":                {sums(100, 50, 50, 0), sums(741, 690, 51, 0), OK, false},
		"not moved":            {sums(100, 50, 50, 0), sums(741, 50, 691, 0), Fail, false},
		"others moved, too":    {sums(100, 50, 50, 0), sums(5000, 4094, 90, 0), OK, false},
		"others moved alone":   {sums(100, 50, 50, 0), sums(5000, 4094, 691, 0), Warn, true},
		"all are computed":     {sums(100, 50, 50, 0), sums(5000, 50, 4950, 0), Fail, false},
		"others run before":    {sums(100, 50, 50, 1), sums(741, 690, 51, 0), OK, false},
		"others run after":     {sums(100, 50, 50, 0), sums(741, 690, 51, 1), OK, false},
		"others compute":       {sums(100, 50, 50, 1), sums(2741, 690, 1051, 1), Warn, true},
		"no such counter":      {sums(100, unknown, unknown, 0), sums(741, unknown, unknown, 0), Warn, false},
		"prompts uncounted":    {sums(unknown, 50, unknown, 0), sums(unknown, 690, unknown, 0), Warn, false},
		"load not reported":    {sums(100, 50, unknown, unknown), sums(741, 690, unknown, unknown), OK, false},
		"no count of computed": {sums(100, 50, unknown, 1), sums(741, 690, unknown, 1), Warn, true},
		"counted too late":     {sums(100, 50, 50, 1), sums(100, 50, 50, 1), Warn, true},
		"the engine restarts":  {sums(900, 900, 0, 0), sums(641, 640, 1, 0), Warn, true},
	} {
		cell, again := moved(c.before, c.after, 641, 640, "decode-0")
		if cell.State != c.want || again != c.again {
			t.Errorf("%s: %+v, again %v", name, cell, again)
		}
	}
}
