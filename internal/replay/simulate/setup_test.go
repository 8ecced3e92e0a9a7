package simulate

import (
	"fmt"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// TestConstantsReachTheRun: each constant changes a run whose load gives occasion to it, and the
// shipped values change nothing.
func TestConstantsReachTheRun(t *testing.T) {
	all := mixed(45*time.Second, 16)
	for i := 1; i < len(all); i += 2 { // what no prompt shares is not worth keeping
		copy(all[i].Blocks[:len(all[i].Blocks)/2], all[i-1].Blocks)
	}
	run := func(changes ...string) Result {
		t.Helper()
		s := Setup{
			Fleet: fleet(t, "2p2d:block=16,kv_blocks=2048"), Options: Decisions(selector.KV, decide.Threshold{Auto: true, Tokens: 512}),
			Seed: 1, TTFT: 120 * time.Millisecond, ITL: 12 * time.Millisecond, SlowFactor: 2,
		}
		for _, text := range changes {
			c, err := replay.ParseChange(text)
			if err != nil {
				t.Fatal(err)
			}
			s.Set([]replay.Change{c})
		}
		res, err := Run(t.Context(), arrivals.FromSlice(all), s)
		if err != nil {
			t.Fatal(err)
		}
		res.WallS = 0
		return *res
	}
	shipped := run()
	for _, c := range cost.List() {
		all := cost.Tuned
		if same := run(fmt.Sprintf("%s=%g", c.Key, *c.At(&all))); same != shipped {
			t.Errorf("%s as shipped changes the run: %+v", c.Key, same)
		}
		other := map[string]string{"stays": "1", "stale_s": "0.1", "teach_every": "2", "stretches": "400"}[c.Key]
		if other == "" {
			other = fmt.Sprint(8 * *c.At(&all))
		}
		before, also := shipped, []string{c.Key + "=" + other}
		if c.Key == "teach_within" { // it matters to requests that teach
			before, also = run("stale_s=0.1"), []string{"stale_s=0.1", "teach_within=0"}
		}
		if run(also...) == before {
			t.Errorf("%s does not change the run", also)
		}
	}
}

// TestRanks: what of a run matters to whether a setting has an effect.
func TestRanks(t *testing.T) {
	for _, tt := range []struct {
		fleet string
		s     Setup
		want  replay.Ranks
	}{
		{"2a", Setup{}, replay.Ranks{Alone: true}},
		{"2p2d", Setup{TTFT: time.Second, ITL: time.Second, SlowFactor: 2}, replay.Ranks{Split: true, Limits: true}},
		{"2p2d", Setup{TTFT: time.Second, ITL: time.Second, Objective: cost.ForE2E}, replay.Ranks{Split: true}},
		{"2p2d", Setup{Faults: []Fault{{0, PrefillGone, 1}}}, replay.Ranks{Split: true, Alone: true}},
		{"2p2d", Setup{Faults: []Fault{{0, SlowDecode, 2}}, SlowFactor: 2}, replay.Ranks{Split: true, Slow: true}},
		{"1p1d+1a:cpu_blocks=64", Setup{SlowFactor: 2}, replay.Ranks{Split: true, Offload: true, Slow: true}},
	} {
		tt.s.Fleet = fleet(t, tt.fleet)
		if got := tt.s.Ranks(); got != tt.want {
			t.Errorf("%s, %+v: %+v, want %+v", tt.fleet, tt.s, got, tt.want)
		}
	}
}
