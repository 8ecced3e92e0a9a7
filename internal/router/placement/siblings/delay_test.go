package siblings_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/router/replicas/natsbus"
	"github.com/dynctl/dynctl/internal/workers"
)

// BenchmarkLedgerToDecision is the time from a change in one router's ledger until the inputs of
// another's decisions have it, over two NATS servers: on a machine as it is, and with a loop on
// each of its cores.
func BenchmarkLedgerToDecision(b *testing.B) {
	b.Run("idle", ledgerToDecision)
	b.Run("busy", func(b *testing.B) {
		ctx, cancel := context.WithCancel(b.Context())
		var loops sync.WaitGroup
		for range runtime.GOMAXPROCS(0) {
			loops.Go(func() {
				for ctx.Err() == nil { // it keeps a core busy
				}
			})
		}
		defer loops.Wait()
		defer cancel()
		ledgerToDecision(b)
	})
}

func ledgerToDecision(b *testing.B) {
	registry := workers.NewRegistry(func(eventlog.Event) {})
	if _, err := registry.Apply("test", []workers.Spec{{Name: "w", URL: &url.URL{Scheme: "http", Host: "10.0.0.1:8000"}}}); err != nil {
		b.Fatal(err)
	}
	rank := registry.Snapshot().Ranks[0]
	var ledgers [2]*ledger.Ledger
	var routers [2]*siblings.Siblings
	ctx, cancel := context.WithCancel(b.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	first := ""
	for i := range routers {
		c := natsbus.Cluster{Name: fmt.Sprint("router-", i), Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)}
		if i > 0 {
			c.Routes = []string{first}
		}
		bus, err := natsbus.Embed(c)
		if err != nil {
			b.Fatal(err)
		}
		first = bus.Addr().String()
		ledgers[i] = ledger.New()
		routers[i] = siblings.New(siblings.Options{
			Self: replicas.Identity{Fleet: "a", Origin: c.Name, Epoch: time.Now()}, Fleet: registry.Snapshot, Ledger: ledgers[i], Clock: time.Now, Event: func(eventlog.Event) {},
		})
		running.Go(func() {
			if err := routers[i].Run(ctx, bus); err != nil {
				b.Error(err)
			}
			_ = bus.Close()
		})
	}
	poll := time.NewTicker(200 * time.Microsecond)
	defer poll.Stop()
	until := func(requests int32) {
		for {
			var c decision.Candidate
			if s := routers[1].Look(time.Now()); s != nil {
				s.Add(&c, rank, 16)
			}
			if c.SiblingRequests == requests && c.SiblingAgeMS > 0 {
				return
			}
			<-poll.C
		}
	}
	until(0)
	var took []time.Duration
	for n := 0; b.Loop(); n++ {
		began := time.Now()
		v := ledgers[0].Reserve(rank, ledger.Claim{PrefillTokens: 1000, BlockSize: 16})
		until(1)
		took = append(took, time.Since(began))
		// Changes come at any time of the rhythm.
		<-time.After(time.Duration(n*37%50) * time.Millisecond)
		began = time.Now()
		v.Release()
		until(0)
		took = append(took, time.Since(began))
		<-time.After(time.Duration(n*23%50) * time.Millisecond)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Milliseconds()), "ms-p50")
	b.ReportMetric(float64(took[len(took)*99/100].Milliseconds()), "ms-p99")
}
