package router_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/settings"
)

// hits is how many blocks of prompts the index of a router has, each where it has most.
func (r *rig) hits(prompts [][]int) (blocks int, err error) {
	r.t.Helper()
	for _, p := range prompts {
		a, err := r.Admin.Route(r.t.Context(), admin.RouteRequest{Body: encode(r.t, object{"model": "sim", "prompt": p, "max_tokens": 5})})
		if err != nil {
			return 0, err
		}
		var c receipt.Receipt
		if err := json.Unmarshal(a.Receipt, &c); err != nil {
			return 0, err
		}
		most := 0
		for i := range c.Decode.Candidates {
			most = max(most, c.Decode.Candidates[i].OverlapBlocks)
		}
		blocks += most
	}
	return blocks, nil
}

// live returns the rank whose feed is not live, nil if all are.
func (r *rig) live() error {
	l, err := r.Admin.Ranks(r.t.Context())
	if err != nil {
		return err
	}
	for i := range l.Ranks {
		if l.Ranks[i].Feed.State != "live" {
			return fmt.Errorf("%+v", l.Ranks[i].Feed)
		}
	}
	return nil
}

// TestReplicasIndex: a third router that starts beside two warm ones has 95 % of their hits,
// though the engines' replays reach back to their last batches only; one that shares nothing has
// not.
func TestReplicasIndex(t *testing.T) {
	t.Parallel()
	var prompts [][]int
	for i := range 60 {
		prompts = append(prompts, ids(640, i+1))
	}
	const fleet = "4a:profile=instant,steps=8"
	routers := startReplicas(t, fleet, 2)
	a, b := routers[0], routers[1]
	for _, p := range prompts {
		a.post("/v1/completions", object{"model": "sim", "prompt": p, "max_tokens": 5})
	}
	var want int
	a.eventually("the blocks at the first router", func() (err error) {
		if want, err = a.hits(prompts); err == nil && want < 60*39*9/10 {
			err = fmt.Errorf("%d", want)
		}
		return err
	})
	b.eventually("the blocks at the second router", func() error {
		got, err := b.hits(prompts)
		if err == nil && got < want {
			err = fmt.Errorf("%d of %d", got, want)
		}
		return err
	})
	engines := func(c *settings.Config) {
		for _, s := range a.Sim.Specs("--sim") {
			c.Worker = append(c.Worker, fmt.Sprintf("%s,name=other-%s", s.URL, s.Name))
		}
	}
	var third *rig
	var got int
	enough := func() bool { return got*100 >= want*95 }
	// On a machine that is too busy for the time limits of a copy a router begins without it.
	for n := 2; n < 6 && !enough(); n++ {
		began := time.Now()
		third = startCold(t, loopback.Options{}, engines, func(c *settings.Config) {
			c.Replicas = a.Config.Replicas
			c.Replicas.Listen, c.Replicas.Name = freePort(t), fmt.Sprint("router-", n)
		})
		third.eventually("the hits of the third router, or none to come", func() (err error) {
			live := third.live()
			if got, err = third.hits(prompts); err == nil && !enough() && live != nil {
				err = fmt.Errorf("%d of %d: %w", got, want, live)
			}
			return err
		})
		t.Logf("the third router has %d of %d blocks %v after the beginning of its start: %+v", got, want, time.Since(began).Round(time.Millisecond), third.replicas().IndexCopied)
	}
	if !enough() {
		t.Fatalf("it has %d of %d blocks", got, want)
	}
	third.eventually("all ranks in the status", func() error {
		if c := third.replicas().IndexCopied; c == nil || c.Ranks+c.Missing != 4 || c.Refused != 0 || !strings.HasPrefix(c.Router, "router-") {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
	third.eventually("the event", func() error {
		if n := len(third.events("index_copied")); n == 0 {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
	metrics, err := third.adminPage(t.Context(), "/metrics")
	if want := fmt.Sprintf("dynctl_replicas_index_ranks_total{result=\"copied\"} %d", third.replicas().IndexCopied.Ranks); err != nil || !strings.Contains(metrics, want) {
		t.Errorf("no metric %s: %v", want, err)
	}
	alone := startWith(t, loopback.Options{}, engines)
	alone.eventually("live feeds", alone.live)
	if got, err = alone.hits(prompts); err != nil || got*100 >= want*95 {
		t.Errorf("a router that shares nothing has %d of %d blocks, %v", got, want, err)
	}
	t.Logf("a router that shares nothing has %d", got)
	// The first of all finds no other router, and serves.
	if a.post("/v1/completions", object{"model": "sim", "prompt": prompts[0], "max_tokens": 5}).status != http.StatusOK {
		t.Error("the first router does not serve")
	}
	if n := len(a.events("index_not_copied")); n == 0 {
		t.Error("the first router has no event")
	}
}
