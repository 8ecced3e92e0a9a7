package e2e

import (
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// cpuOf is the CPU time that a process has used so far.
func cpuOf(t *testing.T, pid int) time.Duration {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		t.Skipf("skipped: no CPU time of processes here (%v)", err)
	}
	_, after, _ := strings.Cut(string(raw), ") ")
	f := strings.Fields(after)
	ticks := 0
	for _, s := range f[11:13] { // user, system
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond // USER_HZ is 100 everywhere
}

// TestCostOfContinuation: in front of the same simulated engines, a router that may
// continue streams uses at most 15 % more CPU for a paced event than one that may not.
// They are measured in turns; the figure is the median of the pairs.
func TestCostOfContinuation(t *testing.T) {
	need(t)
	bin := built(t)
	profile := filepath.Join(t.TempDir(), "profile.yaml")
	if err := os.WriteFile(profile, []byte("name: paced\nprefill_ms: [1, 0, 0]\ndecode_ms: [20, 0, 0]\ntransfer_ms: [2, 0.001]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var args []string
	for i := range 8 { // whose steps are not at the same time
		url, _ := simulated(t, bin, "1a:kv_blocks=16384,profile="+profile)
		args = append(args, "--worker", url+",name=w"+strconv.Itoa(i))
	}
	off, on := serve(t, args...), serve(t, append(args, "--continue", "exact")...)
	const streams, tokens, rounds = 64, 200, 5
	rng := rand.New(rand.NewPCG(5, 5))
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: streams, DisableCompression: true}}
	defer client.CloseIdleConnections()
	turn := func(r *router) float64 {
		bodies := make([][]byte, streams)
		for i := range bodies {
			var err error
			if bodies[i], err = json.Marshal(completion("sim", ids(rng, 64), tokens, true)); err != nil {
				t.Fatal(err)
			}
		}
		var began time.Duration
		list := crowd(r, client, bodies, func() { began = cpuOf(t, r.process.Pid) })
		used := cpuOf(t, r.process.Pid) - began
		for i, p := range list {
			if got := parseStream(p.body); p.err != nil || !got.done || got.failed != "" {
				t.Fatalf("stream %d: %v %s", i, p.err, p.body)
			}
		}
		return float64(used.Microseconds()) / float64(streams*tokens)
	}
	turn(off)
	turn(on)
	var share, cost []float64
	for range rounds {
		a, b := turn(off), turn(on)
		cost, share = append(cost, a), append(share, b/a)
		t.Logf("%.1f µs an event without, %.1f with: %.2f times", a, b, b/a)
	}
	slices.Sort(share)
	slices.Sort(cost)
	t.Logf("median: %.1f µs without, %.2f times with", cost[rounds/2], share[rounds/2])
	if share[rounds/2] > 1.15 {
		t.Errorf("an event costs %.2f times as much with continue.mode exact, more than 1.15", share[rounds/2])
	}
}
