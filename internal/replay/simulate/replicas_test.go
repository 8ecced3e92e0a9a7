package simulate

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/rig/virtualnet"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// several are routers that exchange their load over a virtual network.
type several struct {
	world *virtual.World
	net   *virtualnet.Net
	list  []*oneOf
	next  int
	// every is the least time between two steps of an exchange; 0 is the router's own rhythm.
	every time.Duration
	// change is called with each tick.
	change func(s *several)
}

type oneOf struct {
	*siblings.Siblings
	ledger   *ledger.Ledger
	exchange *replicas.Exchange
	port     *virtualnet.Port
	due      time.Duration
}

func (r *oneOf) Ledger() *ledger.Ledger { return r.ledger }

func (s *several) now() time.Time { return time.Unix(0, 0).Add(s.world.Now()) }

// begin makes n routers in front of a fleet.
func (s *several) begin(t *testing.T, n int, world *virtual.World, fleet []*workers.Worker) {
	t.Helper()
	snap := &workers.Snapshot{Workers: fleet}
	for _, w := range fleet {
		snap.Ranks = append(snap.Ranks, w.Ranks...)
	}
	s.world = world
	s.net = &virtualnet.Net{World: world, Rand: rand.New(rand.NewPCG(44, 2)), Least: time.Millisecond, Most: 3 * time.Millisecond}
	for i := range n {
		r := &oneOf{ledger: ledger.New(), port: s.net.Port()}
		r.Siblings = siblings.New(siblings.Options{
			Self: replicas.Identity{Fleet: "a", Origin: fmt.Sprint("router-", i), Epoch: s.now()}, Ledger: r.ledger, Clock: s.now,
			Fleet: func() *workers.Snapshot { return snap }, Event: func(eventlog.Event) {},
		})
		var err error
		if r.exchange, err = r.Siblings.Join(r.port); err != nil {
			t.Fatal(err)
		}
		s.list = append(s.list, r)
	}
}

func (s *several) take(q *decide.Criteria) router {
	r := s.list[s.next%len(s.list)]
	s.next++
	q.Siblings = r.Siblings.Look(s.now())
	return r
}

func (s *several) tick() {
	if s.change != nil {
		s.change(s)
	}
	for _, r := range s.list {
		if s.world.Now() >= r.due {
			r.due = max(s.world.Now()+s.every, r.exchange.Step().Sub(s.now())+s.world.Now())
			r.Siblings.Watch()
		}
	}
}

func (s *several) balanced() (err error) {
	for _, r := range s.list {
		err = errors.Join(err, r.ledger.Balanced())
	}
	return err
}

// TestConversationReplicas runs the hour of real conversations, eight times as fast, over 16
// ranks behind four routers to which requests come in turn: docs/lab/replicas.md has the table.
func TestConversationReplicas(t *testing.T) {
	if testing.Short() {
		t.Skip("an hour of requests, seven times")
	}
	path := external.Conversation(t)
	opened, err := arrivals.FromTrace(func() (*trace.Reader, error) { return trace.Open(path, nil, trace.Options{}) })
	if err != nil {
		t.Fatal(err)
	}
	src, err := arrivals.Keep(opened)
	if err != nil {
		t.Fatal(err)
	}
	f, err := ParseFleet("16a")
	if err != nil {
		t.Fatal(err)
	}
	run := func(name string, n int, s *several, change func(*several)) *Result {
		t.Helper()
		setup := Setup{Fleet: f, Options: Decisions(selector.KV, decide.Threshold{}), Speedup: 8, Seed: 1, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond}
		setup.routers = func(world *virtual.World, fleet []*workers.Worker) routers {
			s.begin(t, n, world, fleet)
			if change != nil {
				change(s)
			}
			return s
		}
		got, err := Run(t.Context(), arrivals.FromSlice(src), setup)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("| %s | %.2f %% | %.3f | %.0f ms | %.0f ms | %.1f %% |", name, 100*got.HitRatio, got.Imbalance, got.TTFT.P50, got.TTFT.P99, 100*got.Good)
		return got
	}
	one := run("one", 1, &several{}, nil)
	run("four that share nothing", 4, &several{}, func(s *several) {
		for i, r := range s.list {
			r.port.Side = i
		}
	})
	four := run("four that share", 4, &several{}, nil)
	run("four, a message each 10 s", 4, &several{every: 10 * time.Second}, nil)
	run("four, 10 % of messages lost", 4, &several{}, func(s *several) { s.net.Loss = 0.1 })
	run("four, messages 200 ms late", 4, &several{}, func(s *several) { s.net.Least, s.net.Most = 195*time.Millisecond, 205*time.Millisecond })
	run("four, cut in two for 30 s of each minute", 4, &several{change: func(s *several) {
		side := 0
		if s.world.Now()%time.Minute >= 30*time.Second {
			side = 1
		}
		s.list[2].port.Side, s.list[3].port.Side = side, side
	}}, nil)
	if four.HitRatio < 0.98*one.HitRatio || four.Imbalance > 1.05*one.Imbalance {
		t.Errorf("four routers have %.2f %% hits and an imbalance of %.3f, one has %.2f %% and %.3f", 100*four.HitRatio, four.Imbalance, 100*one.HitRatio, one.Imbalance)
	}
}
