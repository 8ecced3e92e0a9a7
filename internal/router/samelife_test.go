package router_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// hop passes TCP connections on, as long as it is open.
type hop struct {
	ln net.Listener
	wg sync.WaitGroup

	mu    sync.Mutex
	to    string // empty while closed
	conns []net.Conn
}

func newHop(t *testing.T) *hop {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &hop{ln: ln}
	h.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return // closed
			}
			h.pass(c)
		}
	})
	t.Cleanup(func() {
		ln.Close()
		h.open("")
		h.wg.Wait()
	})
	return h
}

func (h *hop) pass(in net.Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	out, err := net.Dial("tcp", h.to)
	if err != nil {
		in.Close()
		return
	}
	h.conns = append(h.conns, in, out)
	for _, p := range [][2]net.Conn{{in, out}, {out, in}} {
		h.wg.Go(func() {
			_, _ = io.Copy(p[0], p[1]) // an end of either is the end of both
			in.Close()
			out.Close()
		})
	}
}

// open cuts what there is and passes new connections on to an address; to none
// if it is empty.
func (h *hop) open(to string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.conns {
		c.Close()
	}
	h.to, h.conns = to, nil
}

// TestFeedsOfTheSameProcess: a rank without a replay socket keeps its entries
// over a lost connection if its engine says that it was there all the while, and
// drops them if the engine was restarted, even where the new process has come to
// the very batch that is expected.
func TestFeedsOfTheSameProcess(t *testing.T) {
	t.Parallel()
	hops := []*hop{newHop(t), newHop(t)}
	r := startCold(t, loopback.Options{Fleet: "2a:profile=instant,replay=off", Specs: func(s []workers.Spec) []workers.Spec {
		for i := range s {
			s[i].Events = []string{"tcp://" + hops[i].ln.Addr().String()}
		}
		return s
	}}, func(c *settings.Config) { c.Routing.AllowHeaders = true })
	began := time.Now()
	publishers := make([]string, len(hops))
	for i, h := range hops {
		publishers[i] = strings.TrimPrefix(r.Sim.Engine(i).Worker().Events[0].Endpoint, "tcp://")
		h.open(publishers[i])
	}
	if err := r.Ready(r.wait()); err != nil {
		t.Fatal(err)
	}
	for i, restarted := range []bool{false, true} {
		t.Run(fmt.Sprint("restarted ", restarted), func(t *testing.T) {
			r := r.in(t)
			h, e, at := hops[i], r.Sim.Engine(i), publishers[i]
			events := func(kind string) (n int) { // of this engine
				for _, v := range r.events(kind) {
					if v.Worker == e.Name() {
						n++
					}
				}
				return n
			}
			// What is published before the subscription has come is lost.
			subscribers := func(n int) {
				t.Helper()
				r.eventually(fmt.Sprintf("%d subscriber(s)", n), func() error {
					pub, err := e.Publisher(0)
					if err == nil && pub.Subscribers() != n {
						err = fmt.Errorf("there are %d", pub.Subscribers())
					}
					return err
				})
			}
			subscribers(1)
			// Only a batch that is clearly younger than its process proves anything.
			r.eventually("the engine's second second", func() error {
				if time.Since(began) < 1500*time.Millisecond {
					return errors.New("too soon")
				}
				return nil
			})
			const batches = 5
			for i := range batches {
				r.complete(ids(64, i), "X-Dynctl-Worker", e.Name())
			}
			r.synced()
			if f := r.worker(e.Name()).Ranks[0].Feed; f.Replay == nil || *f.Replay != "" || f.LastSeq == nil || *f.LastSeq != batches-1 {
				t.Fatalf("before: %+v", f)
			}

			h.open("")
			if restarted {
				if err := e.Restart(); err != nil {
					t.Fatal(err)
				}
				for i := range batches {
					direct(t, e.URL(), ids(64, 100+i))
				}
				if pub, err := e.Publisher(0); err != nil || pub.Next() != batches {
					t.Fatalf("the new process is at batch %d, not %d (%v)", pub.Next(), batches, err)
				}
			}
			r.eventually("an event of the loss", func() error {
				if n := events("feed_disconnected"); n != 1 {
					return fmt.Errorf("%d events", n)
				}
				return nil
			})
			subscribers(0)
			h.open(at)
			subscribers(1)
			r.eventually("the connection", func() error {
				f := r.worker(e.Name()).Ranks[0].Feed
				if waits := f.State == "verifying"; waits == restarted || restarted && f.Dropped != 1 {
					return fmt.Errorf("%+v", f)
				}
				return nil
			})
			r.eventually("a usable engine", func() error {
				if w := r.worker(e.Name()); !w.Usable {
					return errors.New(w.Reason)
				}
				return nil
			})
			// An engine that has nothing to publish may wait for its next batch for
			// hours: nothing is wrong with it, and nothing is said to be.
			s, err := r.Admin.Status(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !restarted && (s.State != "ready" || len(s.Reasons) != 0 || s.Index.UntrustedRank != 1) {
				t.Errorf("an idle engine after its connection was lost: %s %v, untrusted %d", s.State, s.Reasons, s.Index.UntrustedRank)
			}
			r.complete(ids(64, 50), "X-Dynctl-Worker", e.Name())
			r.eventually("the next batch", func() error {
				if f := r.worker(e.Name()).Ranks[0].Feed; f.State != "live" || f.LastSeq == nil || *f.LastSeq != batches {
					return fmt.Errorf("%+v", f)
				}
				return nil
			})
			f, kept := r.worker(e.Name()).Ranks[0].Feed, events("feed_kept")
			if restarted {
				if kept != 0 || f.Dropped != 1 {
					t.Errorf("kept %d times after a restart: %+v", kept, f)
				}
				return
			}
			if kept != 1 || f.Dropped != 0 || f.Gaps != 0 {
				t.Errorf("kept %d times: %+v", kept, f)
			}
			r.synced()
		})
	}
}
