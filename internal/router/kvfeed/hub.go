package kvfeed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/kvevent"
	"github.com/dynctl/dynctl/internal/router/zmtp"
)

// hub is a listener that publishers dial into, shared by the ranks whose source
// names its endpoint. A message belongs to the rank whose topic is the longest
// prefix of the message's, whose dp rank is the one that the batch claims, and,
// where that leaves several, whose host is the peer's. What fits no rank, or
// several, is dropped and counted.
type hub struct {
	m        *Manager
	endpoint string
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu    sync.Mutex // guards writes of ranks
	ranks atomic.Pointer[[]*rank]

	unrouted atomic.Uint64 // messages of no rank, or of an uncertain one
	listener atomic.Pointer[zmtp.SubListener]
}

func (h *hub) list() []*rank {
	if p := h.ranks.Load(); p != nil {
		return *p
	}
	return nil
}

func (h *hub) add(r *rank) {
	h.mu.Lock()
	defer h.mu.Unlock()
	next := append(append([]*rank(nil), h.list()...), r)
	h.ranks.Store(&next)
}

// remove takes r off and reports whether no rank is left.
func (h *hub) remove(r *rank) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	next := make([]*rank, 0, len(h.list()))
	for _, o := range h.list() {
		if o != r {
			next = append(next, o)
		}
	}
	h.ranks.Store(&next)
	return len(next) == 0
}

// run listens until ctx ends and joins the connections.
func (h *hub) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	pause := h.m.o.BackoffMin
	for {
		ln, err := zmtp.ListenSub(ctx, h.endpoint, h.m.o.Socket)
		if err == nil {
			h.listener.Store(ln)
			h.say("waiting for a publisher to dial " + ln.Endpoint())
			for {
				c, aerr := ln.Accept(ctx)
				if aerr != nil {
					err = aerr
					break
				}
				wg.Go(func() { h.serve(c) })
			}
			_ = ln.Close()
		} else {
			h.say(err.Error())
		}
		h.m.o.Logger.Debug("kv event listener ended", "endpoint", h.endpoint, "error", err)
		t := time.NewTimer(pause/2 + rand.N(pause/2+1))
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		pause = min(2*pause, h.m.o.BackoffMax)
	}
}

// say gives the ranks without a publisher the reason for that.
func (h *hub) say(reason string) {
	for _, r := range h.list() {
		r.mu.Lock()
		if r.conn == 0 {
			r.set(r.state, reason)
		}
		r.mu.Unlock()
	}
}

// serve receives from one publisher until its connection ends.
func (h *hub) serve(c *zmtp.Conn) {
	defer c.Close()
	conn := h.m.conns.Add(1)
	host := peerHost(c.RemoteAddr())
	mine := map[*rank]bool{} // ranks that use this connection; at most those of the hub
	var msg zmtp.Message
	var dec kvevent.Decoder
	var batch kvevent.Batch
	var err error
	for {
		if err = c.Recv(&msg); err != nil {
			break
		}
		topic, seq, payload, perr := kvevent.ParseLive(msg.Frames())
		if perr == nil && seq == kvevent.EndSeq {
			perr = fmt.Errorf("%w: live batch with the number of a replay's end", kvevent.ErrFrames)
		}
		if perr != nil {
			err = perr
			break
		}
		decoded := &batch
		if dec.Decode(payload, &batch) != nil {
			decoded = nil
		}
		r := h.route(topic, decoded, host, mine)
		if r == nil {
			h.unrouted.Add(1)
			continue
		}
		if !mine[r] && r.claim(conn, c.RemoteAddr()) {
			mine[r] = true
		}
		r.receive(conn, topic, seq, payload, decoded)
	}
	for r := range mine {
		if errors.Is(err, kvevent.ErrFrames) {
			r.mu.Lock()
			r.n.Malformed++
			r.mu.Unlock()
		}
		r.detach(conn, err)
	}
}

// claim attaches r to connection conn if it has none, and reports whether.
func (r *rank) claim(conn uint64, peer string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn != 0 || r.closed {
		return false
	}
	r.attachLocked(conn, peer)
	return true
}

// route finds the rank that a batch belongs to, nil if that is not certain. A
// batch that cannot be decoded goes to the only rank that the connection has
// served, which must not go on as if there had been none.
func (h *hub) route(topic []byte, b *kvevent.Batch, host string, mine map[*rank]bool) *rank {
	var found *rank
	if b == nil {
		for r := range mine {
			if found != nil {
				return nil
			}
			found = r
		}
		return found
	}
	longest, same := -1, 0
	for pass := range 2 {
		for _, r := range h.list() {
			t := r.boundTopic
			if len(t) < longest || !bytes.HasPrefix(topic, []byte(t)) || b.Rank >= 0 && int(b.Rank) != r.key.DP {
				continue
			}
			if pass == 1 && !strings.EqualFold(r.key.Host, host) {
				continue
			}
			if len(t) > longest {
				longest, same = len(t), 0
			}
			found = r
			same++
		}
		if same == 1 {
			return found
		}
		if same == 0 {
			return nil
		}
		same = 0 // several have this topic: only those on the peer's host
	}
	return nil
}

// peerHost is the host of a peer's name, "" for a local socket.
func peerHost(peer string) string {
	host, _, err := net.SplitHostPort(strings.TrimPrefix(peer, "tcp://"))
	if err != nil {
		return ""
	}
	return host
}

// ListenerStatus is the account of a socket that publishers dial into.
type ListenerStatus struct {
	Endpoint string `json:"endpoint"`
	// Bound is the endpoint with its real port, empty while it is not bound.
	Bound string `json:"bound"`
	Ranks int    `json:"ranks"`
	// Unrouted counts messages that belong to no rank, or to several.
	Unrouted uint64 `json:"unrouted_messages"`
	// Accepted, Refused and Failed count publishers: those that shook hands,
	// those beyond the limit, those that broke the protocol.
	Accepted uint64 `json:"accepted"`
	Refused  uint64 `json:"refused"`
	Failed   uint64 `json:"failed"`
}

// Listeners returns the account of every listener, by endpoint.
func (m *Manager) Listeners() []ListenerStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []ListenerStatus
	for _, h := range m.hubs {
		s := ListenerStatus{Endpoint: h.endpoint, Ranks: len(h.list()), Unrouted: h.unrouted.Load()}
		if ln := h.listener.Load(); ln != nil {
			st := ln.Stats()
			s.Bound, s.Accepted, s.Refused, s.Failed = ln.Endpoint(), st.Accepted, st.Refused, st.Failed
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b ListenerStatus) int { return strings.Compare(a.Endpoint, b.Endpoint) })
	return all
}
