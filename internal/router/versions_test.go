package router_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestRollingUpdate: from vLLM 0.32 to 0.33 under load, worker by worker. No prompt moves
// between two versions, whose handshake over NIXL would fail, and no request is lost; while
// each version has a pair, both move KV.
func TestRollingUpdate(t *testing.T) {
	t.Parallel()
	r := start(t, "2p2d:profile=instant,version=0.32.0+2p2d:profile=instant,version=0.33.0")
	version := map[string]string{}
	for i := range 4 {
		for _, role := range []string{"prefill", "decode"} {
			name := fmt.Sprintf("%s-%d", role, i)
			version[name] = []string{"0.32.0", "0.33.0"}[i/2]
			r.eventually("the version of "+name, func() error {
				if w := r.worker(name); w.Version != version[name] {
					return fmt.Errorf("it is %q", w.Version)
				}
				return nil
			})
			if i >= 2 { // not there yet
				r.drainWorker(name)
			}
		}
	}
	var load sync.WaitGroup
	var over atomic.Bool
	var sent atomic.Int64
	var mu sync.Mutex
	decisions := map[string]string{} // with the text of the answer
	for k := range 3 {
		load.Go(func() {
			for i := 0; !over.Load(); i++ {
				prompt := ids(120+i%40, 1000*k+i)
				a, got := r.complete(prompt)
				if want := right(prompt); a.status != 200 || got != want {
					t.Errorf("%d %q, want %q", a.status, got, want)
				}
				mu.Lock()
				decisions[a.header.Get("X-Dynctl-Decision")] = got
				mu.Unlock()
				sent.Add(1)
			}
		})
	}
	// Each step has requests before the next one.
	step := func(f func()) {
		f()
		at := sent.Load()
		r.eventually("requests", func() error {
			if sent.Load() < at+15 {
				return errors.New("too few")
			}
			return nil
		})
	}
	step(func() {})
	for i := range 2 {
		for _, role := range []string{"prefill", "decode"} {
			step(func() {
				name := fmt.Sprintf("%s-%d", role, i+2)
				if _, err := r.Admin.ResumeWorker(t.Context(), name); err != nil {
					t.Error(err)
				}
			})
			step(func() { r.drainWorker(fmt.Sprintf("%s-%d", role, i)) })
		}
	}
	over.Store(true)
	load.Wait()
	moved := map[string]int{}
	for id := range decisions {
		raw, err := r.Admin.Decision(t.Context(), id)
		if err != nil {
			continue // an older one than the router keeps
		}
		var c receipt.Receipt
		if err := json.Unmarshal(raw, &c); err != nil {
			t.Fatal(err)
		}
		var legs []string
		for _, l := range c.Legs {
			if l.Error != "" {
				t.Errorf("%s: the %s leg on %s: %s", id, l.Kind, l.Worker, l.Error)
			}
			legs = append(legs, version[l.Worker])
		}
		if len(legs) == 2 {
			moved[strings.Join(legs, " to ")]++
		}
	}
	if moved["0.32.0 to 0.32.0"] == 0 || moved["0.33.0 to 0.33.0"] == 0 || len(moved) != 2 {
		t.Errorf("KV moved %v", moved)
	}
	for _, e := range r.Sim.Engines() {
		all, err := e.Counters()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			if s.FailedTransfers > 0 {
				t.Errorf("%s: %d transfers failed", e.Name(), s.FailedTransfers)
			}
		}
	}
}

// TestVersionsThatDoNotPair: an engine of each version alone moves nothing, and the receipt
// says why.
func TestVersionsThatDoNotPair(t *testing.T) {
	t.Parallel()
	r := start(t, "1p:profile=instant,version=0.32.0+1d:profile=instant,version=0.33.0")
	for _, name := range []string{"prefill-0", "decode-0"} {
		r.eventually("the version of "+name, func() error {
			if r.worker(name).Version == "" {
				return errors.New("unknown")
			}
			return nil
		})
	}
	a, got := r.complete(ids(150, 1))
	if want := right(ids(150, 1)); got != want || a.header.Get("X-Dynctl-Path") != "local" {
		t.Errorf("%q by %s, want %q by local", got, a.header.Get("X-Dynctl-Path"), want)
	}
	const why = "NIXL would refuse its handshake with the decode worker: vLLM 0.32.0 and 0.33.0 (connector versions 14 and 15)"
	d := r.receipt(a.header.Get("X-Dynctl-Decision"))
	if len(d.Prefill.Candidates) != 1 || d.Prefill.Candidates[0].Excluded != why {
		t.Errorf("the receipt says %+v", d.Prefill)
	}
}

// TestEngineSinceVersion033: parameters with what 0.33 added are taken, and streams whose
// pieces have a member more are passed on.
func TestEngineSinceVersion033(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant,version=0.33.0")
	carries(t, r)
	prompt := ids(170, 5)
	s := r.post("/v1/completions", object{"model": r.model, "prompt": prompt, "max_tokens": 12, "ignore_eos": true, "stream": true})
	if got, want := streamed(t, s.body), right(prompt); got != want || !strings.Contains(string(s.body), `"kv_transfer_params":null`) {
		t.Errorf("%q, want %q: %.300s", got, want, s.body)
	}
}

// TestMooncakeOnSockets: simulated engines refuse each wrong member, so that what moves has
// the right ones; a restarted prefill engine has another id, and no request is lost by that.
func TestMooncakeOnSockets(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant,connector=mooncake")
	moved(t, r, ids(200, 1))
	moved(t, r, ids(200, 2))
	if w := r.worker("prefill-0"); w.From["connector"] == "" {
		t.Errorf("the connector comes from nowhere: %v", w.From)
	}
	if err := r.Sim.Named("prefill-0").Restart(); err != nil {
		t.Fatal(err)
	}
	p.hangUp()
	for i := range 3 {
		if _, got := r.complete(ids(200, 10+i)); got != right(ids(200, 10+i)) {
			t.Errorf("after the restart: %q", got)
		}
	}
	r.eventually("the prefill engine to be usable", func() error {
		if w := r.worker("prefill-0"); !w.Usable {
			return errors.New(w.Reason)
		}
		return nil
	})
	moved(t, r, ids(200, 20))
	moved(t, r, ids(200, 21))
	if n := r.counters("prefill-0").Senders; n != 0 {
		t.Errorf("%d senders are taken", n)
	}
}

// TestConnectorIsLearned: where no connector is stated, engines with Mooncake's are known by
// their metrics, and are not taken for NIXL's.
func TestConnectorIsLearned(t *testing.T) {
	t.Parallel()
	r := startWith(t, loopback.Options{Fleet: "1p1d:profile=instant,connector=mooncake", Specs: func(list []workers.Spec) []workers.Spec {
		for i := range list {
			list[i].Connector = workers.ConnectorNone
		}
		return list
	}})
	for _, name := range []string{"prefill-0", "decode-0"} {
		r.eventually("the connector of "+name, func() error {
			if w := r.worker(name); w.Connector != "mooncake" || w.From["connector"] != "vllm:mooncake_xfer_time_seconds" {
				return fmt.Errorf("%s by %s", w.Connector, w.From["connector"])
			}
			return nil
		})
	}
	moved(t, r, ids(200, 1))
}
