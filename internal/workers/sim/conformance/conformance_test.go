package conformance_test

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/conformance"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSimulatedEngines(t *testing.T) {
	for _, text := range []string{"1p1d:speed=100", "1p1d:dp=2,block=32,profile=cpu,speed=20,events=array,hash=bin"} {
		t.Run(text, func(t *testing.T) {
			f, err := sim.ParseFleet(text)
			if err != nil {
				t.Fatal(err)
			}
			r, err := sim.Start(context.Background(), f)
			if err != nil {
				t.Fatal(err)
			}
			client := &http.Client{Transport: &http.Transport{}}
			defer func() {
				client.CloseIdleConnections()
				if err := r.Close(); err != nil {
					t.Error(err)
				}
			}()
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
}
