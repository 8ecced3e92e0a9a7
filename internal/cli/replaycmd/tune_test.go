package replaycmd

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/replay/simulate"
)

// TestTune: the command simulates each value with each seed, reports the runs, and prints the
// table with the setting, for people and as data.
func TestTune(t *testing.T) {
	file := filepath.Join(t.TempDir(), "agents.jsonl")
	if code, _, stderr := typed("replay", "generate", "agents", "--requests", "400", "-w", file); code != cli.ExitOK {
		t.Fatal(stderr)
	}
	args := []string{"replay", file, "--tune", "--seeds", "2", "--fleet", "2a:kv_blocks=1024", "--arrival-speedup", "2"}
	code, stdout, stderr := typed(args...)
	if code != cli.ExitOK || strings.Count(stderr, "run ") != 10 || !strings.Contains(stderr, "run 10 of 10: others=") {
		t.Errorf("code %d, %s", code, stderr)
	}
	for _, want := range []string{"GOOD/S", "TTFT P50", "ITL P99", "E2E P50 BETTER", "Means over 2 seeds of 400 requests on 2a:kv_blocks=1024, policy kv, threshold 0", "98.75 % interval", "routing:\n  others: ", "--others-weight "} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	for line := range strings.Lines(stdout) {
		if len([]rune(line)) > 121 {
			t.Errorf("too wide: %s", line)
		}
	}
	code, stdout, stderr = typed(append(args, "--quiet", "-o", "json")...)
	var found tuning
	if err := json.Unmarshal([]byte(stdout), &found); code != cli.ExitOK || err != nil || stderr != "" {
		t.Fatalf("code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	if len(found.Rows) != 5 || found.Rows[0].Value != 0.25 || found.Rows[4].Value != 4 || found.Present != 1 || found.Requests != 400 || found.Rows[2].GoodTimes.Low != 1 {
		t.Errorf("%+v", found)
	}
	// One rank leaves nothing to choose.
	_, stdout, _ = typed("replay", file, "--tune", "--seeds", "2", "--fleet", "1a:kv_blocks=4096", "--quiet")
	if !strings.Contains(stdout, "Keep this (no value changes any figure") {
		t.Error(stdout)
	}
}

// TestTuneChooses: another value is taken only where it is better beyond chance: by good requests
// first, and where those are equal, by E2E p50.
func TestTuneChooses(t *testing.T) {
	result := func(good, p50, p99 float64) *simulate.Result {
		return &simulate.Result{Requests: 1000, Good: good, VirtualS: 100, E2E: simulate.Quantiles{P50: p50, P99: p99}}
	}
	for _, tt := range []struct {
		name   string
		change func(value, seed int) *simulate.Result // nil for the present figures
		best   float64
		why    string
	}{
		{"all the same", func(int, int) *simulate.Result { return nil }, 1, "no value changes any figure"},
		{"more good requests", func(value, seed int) *simulate.Result {
			return map[int]*simulate.Result{0: result(.9+.001*float64(seed), 1000, 4000), 3: result(.95+.001*float64(seed), 1200, 4000)}[value]
		}, 2, "more good requests: +18."},
		{"within chance", func(value, seed int) *simulate.Result {
			return map[int]*simulate.Result{4: result(.8+.2*float64(seed%2), 1000, 4000)}[value]
		}, 1, "no other value is better beyond its 98.75 % interval"},
		{"a shorter p50", func(value, seed int) *simulate.Result {
			return map[int]*simulate.Result{1: result(.8, 900+float64(seed), 4000), 0: result(.8, 800+float64(seed), 4500+float64(seed))}[value]
		}, .5, "as many good requests, and a shorter E2E p50: +"},
		{"a shorter p50 of fewer good requests", func(value, seed int) *simulate.Result {
			return map[int]*simulate.Result{1: result(.7+.001*float64(seed), 900, 4000)}[value]
		}, 1, "no other value is better"},
	} {
		results := make([][]*simulate.Result, len(tried))
		for value := range results {
			for seed := range 4 {
				r := tt.change(value, seed)
				if r == nil {
					r = result(.8, 1000, 4000)
				}
				results[value] = append(results[value], r)
			}
		}
		found := tuning{Present: 1, Seeds: 4, Level: .9875}
		found.fill(results)
		if found.Best != tt.best || !strings.HasPrefix(found.Why, tt.why) {
			t.Errorf("%s: %v, %q, want %v, %q", tt.name, found.Best, found.Why, tt.best, tt.why)
		}
	}
}
