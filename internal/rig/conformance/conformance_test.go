package conformance_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/rig/conformance"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSimulatedEngines(t *testing.T) {
	for _, text := range []string{"1p1d:speed=100", "1p1d:dp=2,block=32,profile=cpu,speed=20,events=array,hash=bin"} {
		t.Run(text, func(t *testing.T) {
			r := fleet(t, text)
			client := &http.Client{Transport: &http.Transport{}}
			defer client.CloseIdleConnections()
			p, d := r.Engine(0).URL(), r.Engine(1).URL()
			conformance.Run(t, conformance.Target{URL: d, Prefill: p, Decode: d, Client: client})
		})
	}
}

// TestRealEngines judges engines that somebody else has started. The variable
// holds a JSON object with the fields of Target: {"url", "prefill", "decode"}.
func TestRealEngines(t *testing.T) {
	const name = "DYNCTL_CONFORMANCE_TARGET"
	text := os.Getenv(name)
	if text == "" {
		t.Skipf("no real engine: set %s to {\"url\": …, \"prefill\": …, \"decode\": …}", name)
	}
	var target struct{ URL, Prefill, Decode string }
	if err := json.Unmarshal([]byte(text), &target); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	conformance.Run(t, conformance.Target{URL: target.URL, Prefill: target.Prefill, Decode: target.Decode, Client: client})

	// The simulator's cache must do what the real one does.
	resp, err := client.Get(target.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	page, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	label := func(name string) int {
		_, rest, _ := strings.Cut(string(page), "vllm:cache_config_info{")
		_, rest, _ = strings.Cut(rest, ","+name+`="`)
		text, _, _ := strings.Cut(rest, `"`)
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("cache_config_info: %s: %v", name, err)
		}
		return n
	}
	r := fleet(t, fmt.Sprintf("1a:profile=instant,block=%d,kv_blocks=%d", label("block_size"), label("num_gpu_blocks")))
	t.Run("SameCaching", func(t *testing.T) {
		conformance.SameCaching(t, client, target.URL, r.Engine(0).URL(), label("num_gpu_blocks"), 150)
	})
}

// fleet runs simulated engines for the time of the test.
func fleet(t *testing.T, text string) *sim.Running {
	t.Helper()
	f, err := sim.ParseFleet(text)
	if err != nil {
		t.Fatal(err)
	}
	r, err := sim.Start(context.Background(), f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestSameCachingOfEqualEngines(t *testing.T) {
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	r := fleet(t, "2a:profile=instant,block=4,kv_blocks=200,seed=3")
	conformance.SameCaching(t, client, r.Engine(0).URL(), r.Engine(1).URL(), 200, 100)
}
