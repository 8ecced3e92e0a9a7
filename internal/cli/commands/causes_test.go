package commands

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/rig/loopbacktest"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// silentPublisher is a libzmq publisher that is connected and says nothing, until its
// input ends.
const silentPublisher = `import sys, zmq
s = zmq.Context().socket(zmq.PUB)
s.bind("tcp://127.0.0.1:*")
print(s.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
sys.stdin.read()
`

// TestCausesOnSockets: one engine of eight with which something is wrong is named by
// top, doctor, an event and a metric, by what is wrong with it; and no other one is. That it
// takes at most ten seconds is proved in virtual time, by the tests of watch and pace.
func TestCausesOnSockets(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute of load")
	}
	const victim = "aggregated-3"
	t.Run("slow", func(t *testing.T) {
		g := underLoad(t, loopback.Options{Fleet: "8a"})
		clitest.Until(t, "all are judged by their past, too", func() error {
			l, err := g.Admin.Workers(t.Context())
			if err != nil {
				return err
			}
			for _, w := range l.Workers {
				if k := &w.Ranks[0]; !k.SpeedKnown || k.Requests < 100 {
					return fmt.Errorf("%s has had %d requests", k.Label, k.Requests)
				}
			}
			return nil
		})
		if err := g.Sim.Named(victim).SetFaults(fault.Set{Slow: 10}); err != nil {
			t.Fatal(err)
		}
		named(t, g, "slow", victim+"/dp0", "times the median of its peers")
	})
	t.Run("a prefill engine that is slow from its start", func(t *testing.T) {
		g := underLoad(t, loopback.Options{Fleet: "3p+1p:slow=10+2d"})
		named(t, g, "slow", "prefill-3/dp0", "TTFT")
	})
	t.Run("answers of 5xx", func(t *testing.T) {
		g := underLoad(t, loopback.Options{Fleet: "8a:speed=10"})
		if err := g.Sim.Named(victim).SetFaults(fault.Set{ErrorRate: .1}); err != nil {
			t.Fatal(err)
		}
		named(t, g, "failing", victim, "status_5xx")
	})
	t.Run("half the cache", func(t *testing.T) {
		g := underLoad(t, loopback.Options{Fleet: "3a:speed=10,kv_blocks=4096+1a:speed=10,kv_blocks=2048+4a:speed=10,kv_blocks=4096"})
		named(t, g, "small_cache", victim, "by its metrics")
	})
	t.Run("events of libzmq that do not come", func(t *testing.T) {
		cmd := exec.Command(external.Python(t, "zmq"), "-c", silentPublisher)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		end := sync.OnceFunc(func() {
			_ = in.Close() // ends the process
			if err := cmd.Wait(); err != nil {
				t.Errorf("publisher: %v", err)
			}
		})
		t.Cleanup(end)
		lines := bufio.NewScanner(out)
		if !lines.Scan() {
			t.Fatal("the publisher says nothing")
		}
		endpoint := lines.Text()
		g := underLoad(t, loopback.Options{Fleet: "8a:speed=10", Specs: func(list []workers.Spec) []workers.Spec {
			for i := range list {
				if list[i].Name == victim {
					list[i].Events, list[i].Replay = []string{endpoint}, nil
				}
			}
			return list
		}})
		named(t, g, "mute", victim+"/dp0", "publishes no KV events")
		l, err := g.Admin.Workers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range l.Workers {
			if f := &w.Ranks[0].Feed; (f.State == "mute") != (w.Name == victim) || f.Trusted == (w.Name == victim) {
				t.Errorf("%s: its feed is %s, trusted: %t", w.Name, f.State, f.Trusted)
			}
		}
		_, explained, stderr := typed("explain", "--router", g.AdminURL, "--tokens", "1001,1002,1003,1004,1005,1006,1007,1008,1009,1010,1011,1012,1013,1014,1015,1016,1017,1018", "-o", "json")
		var receipt struct {
			Decode struct {
				Candidates []struct {
					Rank         string
					CacheUnknown bool `json:"cache_unknown"`
				}
			}
		}
		if err := json.Unmarshal([]byte(explained), &receipt); err != nil || len(receipt.Decode.Candidates) != 8 {
			t.Fatalf("%v: %s%s", err, explained, stderr)
		}
		for _, c := range receipt.Decode.Candidates {
			if c.CacheUnknown != (c.Rank == victim+"/dp0") {
				t.Errorf("explain says of the cache of %s that it is unknown: %t", c.Rank, c.CacheUnknown)
			}
		}
		end()
		// Now the connection is gone, too, and that is another cause.
		clitest.Until(t, "the cut is reported", func() error {
			_, doctor, _ := typed("doctor", "--passive", "--router", g.AdminURL)
			if !strings.Contains(doctor, "the index does not trust the feed") || strings.Contains(doctor, "mute") {
				return fmt.Errorf("doctor says %s", doctor)
			}
			l, err := g.Admin.Events(t.Context(), 0, 500, 0)
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(l.Events, func(e admin.Event) bool { return e.Kind == "feed_disconnected" && e.Worker == victim }) {
				return fmt.Errorf("no event")
			}
			return nil
		})
	})
}

// underLoad starts a fleet, and clients that send to it until the test ends.
func underLoad(t *testing.T, o loopback.Options) *loopback.Rig {
	t.Helper()
	g := loopbacktest.Start(t, o)
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		clients.Wait()
	})
	clitest.Until(t, "workers", func() error {
		l, err := g.Admin.Workers(t.Context())
		if err != nil {
			return err
		}
		for _, w := range l.Workers {
			if !w.Usable || w.KVBlocks == 0 {
				return fmt.Errorf("%s is not ready", w.Name)
			}
		}
		return nil
	})
	for i := range 16 {
		clients.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				prompt := make([]int, 150)
				for j := range prompt {
					prompt[j] = 1000 + (i*7919+n*6007+j*31)%20000
				}
				status, _, _, _ := g.Post(ctx, "/v1/completions", map[string]any{"model": "sim", "prompt": prompt, "max_tokens": 20, "ignore_eos": true, "stream": true})
				if status != http.StatusOK && status != 0 && ctx.Err() == nil {
					t.Errorf("a client got %d", status)
					return
				}
			}
		})
	}
	return g
}

// named waits until top, doctor, the events and the metrics name a worker or a rank
// with a cause, and fails when they name anything else.
func named(t *testing.T, g *loopback.Rig, cause, subject, words string) {
	t.Helper()
	began := time.Now()
	worker, _, _ := strings.Cut(subject, "/")
	clitest.Until(t, "it is named", func() error {
		l, err := g.Admin.Events(t.Context(), 0, 500, 0)
		if err != nil {
			return err
		}
		for _, e := range l.Events {
			if e.Kind == "rank_slow" {
				if cause != "slow" || e.Rank != subject || !strings.Contains(e.Text, words) {
					t.Fatalf("it says %+v", e)
				}
				return nil
			}
			if e.Kind == "worker_trouble" {
				if e.Worker != worker || e.Fields["cause"] != cause || !strings.Contains(e.Text, words) {
					t.Fatalf("it says %+v", e)
				}
				return nil
			}
		}
		return fmt.Errorf("it is not")
	})
	t.Logf("named after %s", time.Since(began).Round(time.Millisecond))
	_, doctor, stderr := typed("doctor", "--passive", "--router", g.AdminURL, "-o", "json")
	var report struct {
		Findings []struct{ Check, Subject, State, Text string }
	}
	if err := json.Unmarshal([]byte(doctor), &report); err != nil {
		t.Fatalf("%v: %s%s", err, doctor, stderr)
	}
	found := false
	for _, f := range report.Findings {
		switch f.Check {
		case cause:
			if found = f.Subject == subject && strings.Contains(f.Text, words); !found {
				t.Errorf("doctor says %+v", f)
			}
		case "failing", "mute", "small_cache", "slow", "behaviour":
			t.Errorf("doctor says %+v", f)
		}
	}
	code := cause
	if cause == "slow" {
		code = "rank_slow"
	}
	_, top, stderr := typed("top", "--once", "-o", "json", "--router", g.AdminURL)
	var screen struct {
		Routers []struct {
			Attention []struct{ Code, Subject, Text string }
		}
	}
	if err := json.Unmarshal([]byte(top), &screen); err != nil || len(screen.Routers) != 1 {
		t.Fatalf("%v: %s%s", err, top, stderr)
	}
	seen := false
	for _, a := range screen.Routers[0].Attention {
		switch a.Code {
		case code:
			seen = seen || a.Subject == subject
		case "failing", "mute", "small_cache", "rank_slow":
			t.Errorf("top says %+v", a)
		}
	}
	if !found || !seen {
		t.Errorf("doctor names it: %t, top names it: %t\n%s\n%s", found, seen, doctor, top)
	}
	page := metricsOf(t, g)
	want := fmt.Sprintf("dynctl_worker_trouble{cause=%q,worker=%q} 1", cause, worker)
	if cause == "slow" {
		want = fmt.Sprintf("dynctl_rank_slow{dp_rank=\"0\",worker=%q} 1", worker)
	}
	for _, line := range strings.Split(page, "\n") {
		if is := strings.HasSuffix(line, " 1"); is && line != want && (strings.HasPrefix(line, "dynctl_worker_trouble{") || strings.HasPrefix(line, "dynctl_rank_slow{")) {
			t.Errorf("metrics say %s", line)
		}
	}
	if !strings.Contains(page, want+"\n") {
		t.Errorf("metrics do not say %s", want)
	}
}
