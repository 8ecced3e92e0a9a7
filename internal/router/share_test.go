package router_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// freePort is the address of a port that was free a moment ago.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// startReplicas starts routers with the engines of one fleet; the first one has the engines.
func startReplicas(t *testing.T, fleet string, n int, configure ...func(*settings.Config)) (list []*rig) {
	t.Helper()
	var ports []string
	for range n {
		ports = append(ports, freePort(t))
	}
	share := func(i int) func(*settings.Config) {
		return func(c *settings.Config) {
			c.Replicas.Routers, c.Replicas.Listen, c.Replicas.Name = ports[:1], ports[i], fmt.Sprint("router-", i)
			c.Routing.AllowHeaders = true
			for _, f := range configure {
				f(c)
			}
		}
	}
	list = append(list, start(t, fleet, share(0)))
	for i := 1; i < n; i++ {
		list = append(list, startWith(t, loopback.Options{}, share(i), func(c *settings.Config) {
			for _, s := range list[0].Sim.Specs("--sim") {
				c.Worker = append(c.Worker, fmt.Sprintf("%s,name=%s", s.URL, s.Name))
			}
		}))
	}
	for _, r := range list {
		r.eventually("all other routers", func() error {
			if got := r.replicas(); got.Live != n-1 {
				return fmt.Errorf("%s knows %d: %+v", got.Name, got.Live, got.Routers)
			}
			return nil
		})
	}
	return list
}

// replicas is what a router knows of the others.
func (r *rig) replicas() *admin.Replicas {
	r.t.Helper()
	s, err := r.Admin.Status(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	if s.Replicas == nil {
		r.t.Fatal("the status has no replicas")
	}
	return s.Replicas
}

// TestReplicasShareLoad: over NATS, a request at one router counts in the decisions of the
// other, with its age, in receipts and status, and no longer when it ends or its router does.
func TestReplicasShareLoad(t *testing.T) {
	t.Parallel()
	routers := startReplicas(t, "2a:profile=instant", 2)
	a, b := routers[0], routers[1]
	name := a.Sim.Specs("")[0].Name
	if err := a.Sim.Named(name).SetFaults(fault.Set{Hang: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	for range 3 {
		wg.Go(func() {
			_, _ = a.try(ctx, http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(64, 1), "max_tokens": 5}), "X-Dynctl-Worker", name)
		})
	}
	dryRun := func() (c receipt.Receipt) {
		a, err := b.Admin.Route(t.Context(), admin.RouteRequest{Body: encode(t, object{"model": "sim", "prompt": ids(640, 7), "max_tokens": 5})})
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(a.Receipt, &c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	seen := func(want int32) error {
		c := dryRun()
		for i := range c.Decode.Candidates {
			k := &c.Decode.Candidates[i]
			if !strings.HasPrefix(k.Rank, name+"/") {
				continue
			}
			if k.SiblingRequests == want && k.ActiveRequests == int(want) && (want == 0 || k.SiblingAgeMS > 0) {
				return nil
			}
			return fmt.Errorf("%+v", k)
		}
		return fmt.Errorf("no candidate of %s", name)
	}
	b.eventually("the other router's requests", func() error { return seen(3) })
	b.eventually("them in the status", func() error {
		if r := b.replicas().Routers[0]; r.Name != "router-0" || r.State != "live" || r.Requests != 3 || r.Differs != "" || r.Version == "" {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	if a.replicas().Routers[0].Requests != 0 {
		t.Errorf("the router that has them shows %+v of the other", a.replicas().Routers[0])
	}
	cancel()
	wg.Wait()
	b.eventually("no request", func() error { return seen(0) })
	metrics, err := b.adminPage(t.Context(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"dynctl_replicas_live 1", `dynctl_replica_up{replica="router-0"} 1`, `dynctl_replicas_ignored_messages_total{reason="other_fleet"} 0`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	b.eventually("the event", func() error {
		if n := len(b.events("replica_found")); n != 1 {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
}

// TestReplicasStart: what cannot work is refused at the start, in words.
func TestReplicasStart(t *testing.T) {
	t.Parallel()
	empty := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*settings.Replicas)
		want   string
	}{
		"an open port":       {func(r *settings.Replicas) { r.Listen = "0.0.0.0:0" }, "replicas.cert_file"},
		"an empty password":  {func(r *settings.Replicas) { r.PasswordFile = empty }, "is empty"},
		"no password file":   {func(r *settings.Replicas) { r.PasswordFile = empty + "x" }, "no such file"},
		"no certificate":     {func(r *settings.Replicas) { r.CertFile, r.KeyFile = empty, empty }, "replicas"},
		"two kinds":          {func(r *settings.Replicas) { r.Routers = append(r.Routers, "nats://127.0.0.1:4222") }, "stands alone"},
		"a name for a route": {func(r *settings.Replicas) { r.Routers = []string{"router-1"} }, "HOST:PORT"},
		"a long name":        {func(r *settings.Replicas) { r.Name = strings.Repeat("x", 257) }, "256"},
	} {
		t.Run(name, func(t *testing.T) {
			config := settings.Default()
			config.Replicas.Routers, config.Replicas.Listen = []string{"127.0.0.1:1"}, "127.0.0.1:0"
			c.change(&config.Replicas)
			r, err := router.New(t.Context(), router.Options{Config: config})
			if err == nil {
				err = r.Run(t.Context())
				if err := r.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want an error with %q", err, c.want)
			}
		})
	}
}

// TestReplicasOrders: a drain at one router is obeyed by the other, and so is its end.
func TestReplicasOrders(t *testing.T) {
	t.Parallel()
	routers := startReplicas(t, "2a:profile=instant", 2)
	a, b := routers[0], routers[1]
	name := a.Sim.Specs("")[0].Name
	for _, on := range []bool{true, false} {
		order := a.Admin.DrainWorker
		if !on {
			order = a.Admin.ResumeWorker
		}
		if _, err := order(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		b.eventually("the order", func() error {
			l, err := b.Admin.Workers(t.Context())
			if err != nil {
				return err
			}
			for i := range l.Workers {
				if w := &l.Workers[i]; w.Draining != (on && w.Name == name) {
					return fmt.Errorf("%s drains: %v", w.Name, w.Draining)
				}
			}
			return nil
		})
	}
}

// TestReplicasStored: with API keys, a response that one router stored is found by its tenant at
// the other, and by no other tenant.
func TestReplicasStored(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	entry := func(tenant, key string) string {
		return fmt.Sprintf("- name: %s\n  tenant: %s\n  sha256: %x\n", tenant, tenant, sha256.Sum256([]byte(key)))
	}
	if err := os.WriteFile(file, []byte("keys:\n"+entry("mine", "key-of-mine-0123456789")+entry("other", "key-of-other-0123456789")), 0o600); err != nil {
		t.Fatal(err)
	}
	routers := startReplicas(t, "2a:profile=instant", 2, func(c *settings.Config) { c.Keys.File = file })
	a, b := routers[0], routers[1]
	mine, other := "Bearer key-of-mine-0123456789", "Bearer key-of-other-0123456789"
	first := a.post("/v1/responses", object{"model": "sim", "input": "hello", "store": true, "max_output_tokens": 3}, "Authorization", mine)
	id := decode[struct{ ID string }](t, first.body).ID
	next := encode(t, object{"model": "sim", "input": "again", "previous_response_id": id, "max_output_tokens": 3})
	b.eventually("the response", func() error {
		got := b.send(http.MethodPost, "/v1/responses", next, "Authorization", mine)
		if got.status == http.StatusNotFound {
			return fmt.Errorf("%s", got)
		}
		if w := got.header.Get("X-Dynctl-Worker"); w != first.header.Get("X-Dynctl-Worker") {
			t.Errorf("it went to %s, and the response is at %s", w, first.header.Get("X-Dynctl-Worker"))
		}
		return nil
	})
	b.send(http.MethodPost, "/v1/responses", next, "Authorization", other).refused(t, http.StatusNotFound, "invalid_request")
}
