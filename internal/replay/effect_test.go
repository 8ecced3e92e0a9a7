package replay

import (
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// TestIdle: a weight is idle where the policy does not look at it, or the ranks give no
// occasion, and a change that states what is set already is not.
func TestIdle(t *testing.T) {
	whole, split, gone := Ranks{Alone: true}, Ranks{Split: true}, Ranks{Split: true, Alone: true}
	for _, tt := range []struct {
		policy selector.Policy
		ranks  Ranks
		change string
		idle   bool
	}{
		{selector.KV, whole, "decode_load=0.25", false},
		{selector.KV, split, "decode_load=0.25", false},
		{selector.KV, whole, "decode_load=0.125", false}, // as it is
		{selector.KVDynamo, whole, "decode_load=0.25", true},
		{selector.KVDynamo, whole, "decode_load=0.125", false},
		{selector.Session, whole, "decode_load=0.25", true},
		{selector.LeastLoaded, split, "overlap_credit=0.5", true},
		{selector.KVDynamo, whole, "overlap_credit=0.5", false},
		{selector.KVDynamo, split, "overlap_credit=0.5", false},
		{selector.KV, whole, "queue_weight=0", false},
		{selector.KVDynamo, whole, "queue_weight=0", true},
		{selector.KV, whole, "stall_weight=1", false},
		{selector.KV, split, "stall_weight=1", true},
		{selector.KV, gone, "stall_weight=1", false},
		{selector.KV, whole, "spread=0", false},
		{selector.KV, whole, "step_tokens=0", false},
		{selector.KV, whole, "others=0.5", false},
		{selector.KV, split, "others=0.5", false},
		{selector.KV, whole, "others=1", false}, // as it is
		{selector.KVBlocks, whole, "others=0.5", true},
		{selector.KVBlocks, whole, "decode_load=0.25", false},
		{selector.KVDynamo, whole, "step_tokens=0", true},
		{selector.KV, whole, "prefill_load_scale=2", false},
		{selector.KVDynamo, split, "prefill_load_scale=2", false},
		{selector.KV, whole, "credit_decay=0.5", false},
		{selector.KV, whole, "request_weight=1", false},
		{selector.KVDynamo, whole, "request_weight=1", false},
		{selector.RoundRobin, whole, "request_weight=1", true},
		{selector.KV, whole, "temperature=0.5", false},
		{selector.Random, whole, "temperature=0.5", true},
		{selector.KV, whole, "credit_cpu=0.5", true},
		{selector.KV, Ranks{Alone: true, Offload: true}, "credit_cpu=0.5", false},
		{selector.LeastLoaded, Ranks{Alone: true, Offload: true}, "credit_cpu=0.5", true},
		{selector.LeastLoaded, Ranks{Split: true, Offload: true}, "credit_cpu=0.5", false}, // the threshold counts it
		{selector.LeastLoaded, whole, "busy_requests=4", false},
		{selector.KV, whole, "prefill_gate=4096", true},
		{selector.KV, split, "prefill_gate=4096", false},
		{selector.KV, whole, "prefill_policy=random", true},
		{selector.KV, split, "prefill_policy=random", false},
		{selector.KV, whole, "decode_policy=random", false},
		{selector.KV, whole, "threshold=512", true},
		{selector.KV, split, "threshold=512", false},
	} {
		c, err := ParseChange(tt.change)
		if err != nil {
			t.Fatal(err)
		}
		s := decide.Options{Decode: tt.policy, Prefill: tt.policy, Weights: selector.DefaultWeights(), Rule: decide.Rule{Threshold: 2048, On: decide.OnEffISL}}
		if idle := Idle(s, []Change{c}, tt.ranks)[0]; idle != tt.idle {
			t.Errorf("%s with %s, %+v: idle %t, want %t", tt.policy, tt.change, tt.ranks, idle, tt.idle)
		}
	}
}

// TestIdleBesideOthers: a change is looked at with the others made.
func TestIdleBesideOthers(t *testing.T) {
	var list []Change
	for _, text := range []string{"overlap_credit=0", "credit_decay=2", "decode_load=0.5"} {
		c, err := ParseChange(text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, c)
	}
	s := decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()}
	if idle := Idle(s, list, Ranks{Alone: true}); !slices.Equal(idle, []bool{false, true, false}) {
		t.Errorf("idle: %v, want the second, since no block has a credit", idle)
	}
}

// TestIdleConstants: a constant is idle where no decision of the policy, on these ranks, can depend
// on it.
func TestIdleConstants(t *testing.T) {
	limits := Ranks{Alone: true, Limits: true}
	split := Ranks{Split: true, Limits: true}
	for _, tt := range []struct {
		policy selector.Policy
		auto   bool
		ranks  Ranks
		live   string // the constants that are not idle
	}{
		{selector.KV, false, limits, "loss scatter behind stays keep stretches"},
		{selector.KV, false, Ranks{Alone: true}, "behind stays keep stretches"},
		{selector.KV, false, Ranks{Alone: true, Slow: true}, "behind stays keep teach_every teach_within stretches"},
		{selector.KV, true, split, "loss scatter behind stays keep teach_every teach_within stretches stale_s"},
		{selector.LeastLoaded, true, split, "loss scatter behind stays keep teach_every teach_within stretches stale_s"},
		{selector.LeastLoaded, true, limits, ""},
		{selector.LeastLoaded, false, split, ""},
		{selector.KVBlocks, false, Ranks{Split: true, Limits: true, Slow: true}, "teach_every teach_within"},
		{selector.KVDynamo, false, Ranks{Alone: true, Limits: true, Slow: true}, ""},
	} {
		var live []string
		for _, key := range ConstantKeys() {
			c, err := ParseChange(key + "=0.8")
			if err != nil {
				if c, err = ParseChange(key + "=3"); err != nil {
					t.Fatal(err)
				}
			}
			s := decide.Options{Decode: tt.policy, Prefill: tt.policy, Weights: selector.DefaultWeights(), Rule: decide.Rule{Threshold: 2048, On: decide.OnEffISL, Auto: tt.auto}}
			if !Idle(s, []Change{c}, tt.ranks)[0] {
				live = append(live, key)
			}
		}
		if got := strings.Join(live, " "); got != tt.live {
			t.Errorf("%s, auto %t, %+v: %q have an effect, want %q", tt.policy, tt.auto, tt.ranks, got, tt.live)
		}
	}
	// What is a setting, too, matters to paths under every policy.
	c, err := ParseChange("others=3")
	if err != nil {
		t.Fatal(err)
	}
	s := decide.Options{Decode: selector.LeastLoaded, Prefill: selector.LeastLoaded, Weights: selector.DefaultWeights(), Rule: decide.Rule{Auto: true}}
	if Idle(s, []Change{c}, split)[0] || !Idle(s, []Change{c}, limits)[0] {
		t.Error("others matters to a threshold that is auto, where there are prefill ranks")
	}
}

// TestParseConstant: a constant has its bounds, and changes nothing but itself.
func TestParseConstant(t *testing.T) {
	for text, want := range map[string]string{
		"loss=-1": "loss=-1: want times that a good request may take, from 0 to 1e+06", "stays=1.1": "from 0 to 1", "scatter=0": "from 0.001", "keep=NaN": "want times", "keep=": "want times",
		"calm=3": `"calm" cannot be changed here`, "treshold=4096": `did you mean "threshold"?`,
		"4096": "a simulation also takes the constants loss, scatter, behind, stays, keep, teach_every, teach_within, stretches, stale_s",
	} {
		if c, err := ParseChange(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v, want %q", text, c, err, want)
		}
	}
	c, err := ParseChange("stale-s=30")
	if err != nil || !c.Constant() || c.String() != "stale_s=30" {
		t.Fatalf("%v, %v", c, err)
	}
	want := cost.Tuned
	want.Stale = 30
	if got := ChangedConstants(cost.Tuned, []Change{c}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	s := decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()}
	if Changed(s, []Change{c}) != Changed(s, nil) {
		t.Error("a constant changed a setting")
	}
}
