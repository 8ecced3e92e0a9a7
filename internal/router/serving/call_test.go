package serving

import (
	"fmt"
	"net/url"
	"reflect"
	"testing"
	"time"
	"unsafe"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// TestReleasedCallIsEmpty: nothing of a call is found in the next one, nor of one that
// followed it.
func TestReleasedCallIsEmpty(t *testing.T) {
	c := New()
	c.ID, c.Model, c.Name, c.Start, c.Record = "id", "model", "asked", time.Now(), &lifecycle.Record{}
	c.begun.Store(hasBegun)
	c.decided, c.retry.budgeted = true, true
	c.Routing.AcquireHashes()
	c.Routing.IDs = append(c.Routing.IDs, 1)
	c.Endpoint, c.Routing.Settings = &api.Endpoint{}, &effective.Settings{}
	used := c.scratch
	new(Legs).leg(c, "prefill", workers.Peer{Worker: &workers.Worker{State: new(workers.State)}}, nil, 0, "id")
	first, second := New(), New()
	c.SetRest(first)
	first.ID = "first"
	if c.Record.Routing != &first.Routing {
		t.Error("the record is not of the call that continues")
	}
	c.SetRest(second)
	if first.ID != "" {
		t.Error("the call before is not released")
	}
	second.ID = "second"
	c.Release()
	if !reflect.DeepEqual(c.Details, Details{}) {
		t.Errorf("%+v is left", c.Details)
	}
	if c.begun.Load() != mayBegin || c.decided || c.retry.budgeted || c.next != nil {
		t.Errorf("of its attempts is left: begun %d, decided %t, retry %+v, next %v", c.begun.Load(), c.decided, c.retry, c.next)
	}
	if q := &c.Routing; q.IDs != nil || q.Run.Plan.DecodeIndex != -1 {
		t.Errorf("of the routing request is left: ids %v, plan %+v", q.IDs, q.Run.Plan)
	}
	if second.ID != "" {
		t.Error("the call that it follows is not released")
	}
	if c.scratch != nil {
		t.Error("the memory of its legs is not given back")
	}
	for i := range used {
		if s, empty := fmt.Sprint(used[i]), fmt.Sprint(rewrite.Scratch{}); s != empty {
			t.Errorf("%s is left of a leg", s)
		}
	}
}

// TestCallIsSmall: each stream that waits for a token holds a call. One byte more than this,
// and Go's allocator gives each 512 more.
func TestCallIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(Call{}); n > 4864 {
		t.Errorf("a call has %d bytes, and may have 4864: what only its attempts need belongs where DropInput gives it back", n)
	}
}

// broken panics where it is told how a leg ended.
type broken struct{ Health }

func (broken) Report(health.Admission, health.Outcome) health.Admission { panic("the judge") }

// closing counts how often an answer is closed.
type closing struct {
	Response
	times int
}

func (c *closing) Close() { c.times++ }

// TestPanicWhileAnAnswerIsJudged: whoever panics at the end of an answer, its place, its leg,
// its connection and the leg beside it are given back, once.
func TestPanicWhileAnAnswerIsJudged(t *testing.T) {
	books, open, resp, joined := ledger.New(), admission.NewMemory(5, nil), &closing{}, 0
	w := &workers.Worker{Name: "w", State: &workers.State{}}
	peer := workers.Peer{Worker: w, Rank: &workers.Rank{}}
	open.Take(1)
	g := &Legs{Open: open, Outliers: broken{}}
	c := New()
	defer c.Release()
	c.Record, c.reserved = &lifecycle.Record{Routing: &c.Routing}, books.Reserve(peer.Rank, ledger.Claim{})
	c.permits[0] = permit{legs: g}
	c.decoding = decoding{
		g: g, c: c, peer: peer, record: c.Record.BeginLeg(route.Decode, peer, nil, time.Now()), resp: resp,
		after: func(err error) {
			if joined++; err == nil {
				t.Error("the leg beside it hears of a good end")
			}
		},
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		_ = c.decoding.Close(Ended("w", "too early"))
	}()
	if err := books.Balanced(); err != nil || books.DoubleReleases() > 0 {
		t.Errorf("%v, %d released twice", err, books.DoubleReleases())
	}
	if open.Used() != 0 || resp.times != 1 || joined != 1 {
		t.Errorf("%d legs are in progress, closed %d times, joined %d times", open.Used(), resp.times, joined)
	}
	if err := c.decoding.Close(nil); err != nil { // again, for nothing
		t.Error(err)
	}
}

// admits counts how many requests it has admitted and not heard of since.
type admits struct{ pending int }

func (h *admits) Admit(*workers.Worker) (a health.Admission, ok bool) {
	h.pending++
	return a, true
}

func (h *admits) Report(a health.Admission, _ health.Outcome) health.Admission {
	h.pending--
	return a
}

// TestPanicOfASubscriber: what a call holds for its legs is given back, once, where a subscriber
// of its events panics before a leg is sent.
func TestPanicOfASubscriber(t *testing.T) {
	peer := workers.Peer{
		Worker: &workers.Worker{Name: "w", State: &workers.State{}, URL: &url.URL{Scheme: "http", Host: "w"}},
		Rank:   &workers.Rank{Label: "w/dp0"},
	}
	for _, x := range []struct {
		name string
		at   lifecycle.Kind
		do   func(g *Legs, c *Call) error
	}{
		{"the plan is chosen", lifecycle.Chosen, func(g *Legs, c *Call) error {
			p := &FleetPlanner{Legs: g}
			c.reserved = g.Ledger.Reserve(peer.Rank, ledger.Claim{})
			_, err := (&reserving{p, peer, &local{p, peer}}).Do(t.Context(), c)
			return err
		}},
		{"the prefill leg is about to be sent", lifecycle.LegSent, func(g *Legs, c *Call) error {
			if err := g.mustPermit(c, route.Prefill, peer.Worker); err != nil {
				return err
			}
			return g.prefill(t.Context(), c, &disagg.Transfer{}, peer, ledger.Claim{}, nil, nil)
		}},
	} {
		t.Run(x.name, func(t *testing.T) {
			books, open, h := ledger.New(), admission.NewMemory(5, nil), &admits{}
			c := New()
			defer c.Release()
			c.Endpoint, c.Routing.Settings = &api.Endpoint{}, &effective.Settings{}
			c.Record = &lifecycle.Record{Routing: &c.Routing, To: lifecycle.NewStream(lifecycle.Subscriber{x.at: func(*lifecycle.Event) { panic(x.name) }})}
			func() {
				defer func() {
					if p := recover(); p != x.name {
						t.Errorf("the panic is %v", p)
					}
				}()
				t.Error(x.do(&Legs{Open: open, Outliers: h, Ledger: books}, c))
			}()
			if err := books.Balanced(); err != nil || books.DoubleReleases() > 0 || open.Used() != 0 || h.pending != 0 {
				t.Errorf("%v, %d legs, %d admitted and not reported", err, open.Used(), h.pending)
			}
		})
	}
}

// TestReleaseOfAHeldCall: a call that is released before its legs are sent, as after a panic,
// gives back what FleetPlanner.Hold has taken for them.
func TestReleaseOfAHeldCall(t *testing.T) {
	books, open, h := ledger.New(), admission.NewMemory(5, nil), &admits{}
	g := &Legs{Open: open, Outliers: h, Ledger: books}
	c := New()
	c.reserved, c.decided = books.Reserve(&workers.Rank{Label: "w/dp0"}, ledger.Claim{}), true
	for _, p := range []route.Phase{route.Decode, route.Prefill} {
		if err := g.permit(c, p, &workers.Worker{State: new(workers.State)}, open.Try); err != nil {
			t.Fatal(err)
		}
	}
	c.Release()
	if err := books.Balanced(); err != nil || open.Used() != 0 || h.pending != 0 {
		t.Errorf("%v, %d legs, %d admitted and not reported", err, open.Used(), h.pending)
	}
}
