package kvfeed

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// hub is a listener that publishers dial into, shared by the ranks whose source
// names its endpoint. A message belongs to the worker whose topic fits it best
// (see topicFits) and, where several have that, whose host is the one in the
// message's topic, or else the peer's. Of the worker's ranks it is the one that
// the batch claims (see rankOf). A message that fits no rank, or several, is
// dropped and counted.
type hub struct {
	m        *Manager
	endpoint string
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu    sync.Mutex // guards writes of ranks, conns and quota; before publisherConn.mu
	quota quota      // of feed.unrouted events
	conns map[*publisherConn]struct{}
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
	for conn := range h.conns {
		conn.review(h)
	}
}

// remove takes r off and reports whether no rank is left. With ending, when
// the manager stops, the other ranks' connections are not reviewed: a
// snapshot takes what the ranks know.
func (h *hub) remove(r *rank, ending bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	next := slices.DeleteFunc(slices.Clone(h.list()), func(o *rank) bool { return o == r })
	h.ranks.Store(&next)
	for conn := range h.conns {
		conn.leave(r)
		if !ending {
			conn.review(h)
		}
	}
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
			h.setReason("waiting for a publisher to dial " + ln.Endpoint())
			for {
				c, aerr := ln.Accept(ctx)
				if aerr != nil {
					err = aerr
					break
				}
				wg.Go(func() { h.serve(c) })
			}
			h.listener.Store(nil)
			_ = ln.Close()
		} else {
			h.setReason(err.Error())
		}
		h.m.o.Logger.Debug("kv event listener ended", "endpoint", h.endpoint, "error", err)
		if !wait.For(ctx, pause/2+rand.N(pause/2+1)) {
			return
		}
		pause = min(2*pause, h.m.o.BackoffMax)
	}
}

// setReason gives the ranks without a publisher the reason for it.
func (h *hub) setReason(reason string) {
	for _, r := range h.list() {
		r.mu.Lock()
		if r.want == wantConnection {
			r.explain(reason)
		}
		r.mu.Unlock()
	}
}

// publisherConn is a connection of a publisher, with the ranks that it speaks for.
type publisherConn struct {
	conn uint64
	peer string
	host string

	mu   sync.Mutex // guards mine; before rank.mu
	mine map[*rank]*identity
}

// identity is the topic and the rank number under which a connection first sent a
// rank's batches; route finds the rank from these two and from the ranks of the
// listener. mixed says that it has sent some under others, too.
type identity struct {
	topic   string
	claimed int32
	mixed   bool
}

const (
	reasonElsewhere = "since the workers of its listener changed, the batches that it was fed with are those of another rank, or of no certain one: give each worker that dials in a topic of its own"
	reasonUnrouted  = "a batch that may be its own cannot be distinguished from those of other ranks"
)

// review ends the use of the connection by ranks whose batches it does not bring
// any more, after the ranks of the listener have changed.
func (conn *publisherConn) review(h *hub) {
	conn.mu.Lock()
	defer conn.mu.Unlock()
	for r, v := range conn.mine {
		if v.mixed || h.route([]byte(v.topic), &kvevent.Batch{Rank: v.claimed}, conn.host, nil) != r {
			delete(conn.mine, r)
			r.disown(conn.conn, reasonElsewhere)
		}
	}
}

// leave forgets a rank that leaves the listener.
func (conn *publisherConn) leave(r *rank) {
	conn.mu.Lock()
	defer conn.mu.Unlock()
	delete(conn.mine, r)
}

// take finds the rank of a batch and claims it for the connection; a change of
// the list of ranks in between ends the claim (see review). When the rank is
// uncertain, each rank that the connection feeds and whose topic fits may have
// missed the batch, whatever topics its batches had before.
func (conn *publisherConn) take(h *hub, topic []byte, b *kvevent.Batch) *rank {
	conn.mu.Lock()
	defer conn.mu.Unlock()
	r := h.route(topic, b, conn.host, conn.mine)
	if r == nil {
		for o := range conn.mine {
			if topicFits(o.boundTopic, topic) {
				delete(conn.mine, o)
				o.disown(conn.conn, reasonUnrouted)
			}
		}
		return nil
	}
	switch v := conn.mine[r]; {
	case b == nil:
	case v == nil:
		conn.mine[r] = &identity{topic: string(topic), claimed: b.Rank}
	case v.claimed != b.Rank || v.topic != string(topic):
		v.mixed = true
	}
	r.claim(conn.conn, conn.peer, strings.EqualFold(r.key.Host, conn.host))
	return r
}

// serve receives from one publisher until its connection ends.
func (h *hub) serve(c *zmtp.Conn) {
	defer c.Close()
	conn := &publisherConn{conn: h.m.conns.Add(1), peer: c.RemoteAddr(), host: peerHost(c.RemoteAddr()), mine: map[*rank]*identity{}}
	h.mu.Lock()
	h.conns[conn] = struct{}{}
	h.mu.Unlock()
	var msg zmtp.Message
	var dec kvevent.Decoder
	var batch kvevent.Batch
	var ended error
	for {
		topic, seq, payload, err := nextLive(c, &msg)
		if err != nil {
			ended = err
			break
		}
		decoded := &batch
		if dec.Decode(payload, &batch) != nil {
			decoded = nil
		}
		r := conn.take(h, topic, decoded)
		if r == nil {
			h.dropUnrouted(topic, decoded, conn.peer)
			continue
		}
		r.receive(conn.conn, seq, payload, decoded)
	}
	h.mu.Lock()
	delete(h.conns, conn) // nobody else sees it any more
	h.mu.Unlock()
	for r := range conn.mine {
		r.malformed(ended)
		r.detach(conn.conn, ended)
	}
}

// dropUnrouted counts and reports a batch that belongs to no rank for certain.
func (h *hub) dropUnrouted(topic []byte, b *kvevent.Batch, peer string) {
	h.unrouted.Add(1)
	now := h.m.now()
	h.mu.Lock()
	more, ok := h.quota.allow(now)
	h.mu.Unlock()
	if !ok {
		return
	}
	what := "a batch that cannot be read"
	if b != nil {
		what = fmt.Sprintf("a batch of rank %d", b.Rank)
	}
	h.m.o.Events.Emit(eventlog.Event{At: now, Severity: eventlog.Warn, Kind: "feed_unrouted", Text: fmt.Sprintf(
		"listener %s: %s with topic %q from %s belongs to no rank, or to several, and is dropped: give each worker that dials in its own topic=kv@HOST%s",
		h.endpoint, what, topic[:min(len(topic), 100)], peer, more)})
}

// claim is connection conn's claim to speak for r; home says that it comes from
// the worker's host. A connection from there displaces one from elsewhere;
// otherwise the later connection displaces the earlier, which may be left over
// from an engine that died. When the earlier one sends all the same, nobody
// knows whose batches are the engine's: the rank is untrusted until one of them
// leaves.
func (r *rank) claim(conn uint64, peer string, home bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.want == wantEnd || r.conn == conn:
		return
	case r.conn == 0:
		if home && !r.home {
			r.rival = 0
		}
	case home && !r.home, home == r.home && conn > r.conn:
		if home && !r.home {
			r.rival = 0 // it came from elsewhere, too
		}
		r.emit(eventlog.Warn, "feed_publisher", "%s: its batches come from %s now, not from %s", r.label, peer, r.peer)
		r.abandon()
	case home == r.home && r.rival == 0:
		r.abandon()
		r.rival, r.rivalPeer = conn, peer
		r.startOver(wantOne, r.contested())
		return
	default:
		return
	}
	if r.rival == conn {
		r.rival = 0
	}
	r.attachLocked(conn, peer, home)
}

// contested is why a rank with a rival is not trusted. The caller holds r.mu.
func (r *rank) contested() string {
	return fmt.Sprintf("two publishers claim this rank, %s and %s: end the wrong one, or give each worker a topic of its own", r.rivalPeer, r.peer)
}

// disown ends the use of connection conn for r. What it brought may have been of
// another rank.
func (r *rank) disown(conn uint64, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.withdraw(conn) || r.conn != conn {
		return
	}
	r.abandon()
	r.conn = 0
	r.startOver(wantConnection, reason)
	r.poke()
}

// route finds the rank that a batch belongs to, nil if that is not certain. A
// batch that cannot be decoded goes to the only rank that the connection has
// served, which must not go on as if there had been none.
func (h *hub) route(topic []byte, b *kvevent.Batch, host string, mine map[*rank]*identity) *rank {
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
	ranks := h.list()
	longest := -1
	for _, r := range ranks {
		if len(r.boundTopic) > longest && topicFits(r.boundTopic, topic) {
			longest, found = len(r.boundTopic), r
		}
	}
	if found == nil {
		return nil
	}
	fits := func(r *rank) bool { return len(r.boundTopic) == longest && topicFits(r.boundTopic, topic) }
	one := true
	for _, r := range ranks {
		one = one && (r.key.Worker == found.key.Worker || !fits(r))
	}
	if one {
		return rankOf(ranks, found, fits, b.Rank)
	}
	for _, at := range [...]string{topicHost(topic), host} {
		found, one = nil, true
		for _, r := range ranks {
			if at == "" || !strings.EqualFold(r.key.Host, at) || !fits(r) {
				continue
			}
			one = one && (found == nil || found.key.Worker == r.key.Worker)
			found = r
		}
		if found != nil {
			if !one {
				return nil
			}
			return rankOf(ranks, found, fits, b.Rank)
		}
	}
	return nil
}

// rankOf finds the rank of a batch that claims a rank (-1 for none), among
// those of w's worker that fit. Engines count the ranks of a deployment, the
// router those of a worker: a worker that runs ranks 4 to 7 of a larger group has
// them as 0 to 3. Where the first one is not stated, every worker is assumed to
// have as many.
func rankOf(ranks []*rank, w *rank, fits func(*rank) bool, claimed int32) *rank {
	n := 0
	for _, r := range ranks {
		if r.key.Worker == w.key.Worker && fits(r) {
			n++
		}
	}
	if n == 1 {
		return w
	}
	if claimed < 0 {
		return nil
	}
	for _, r := range ranks {
		dp := int(claimed) - r.key.Start
		if r.key.Start == 0 {
			dp %= n
		}
		if r.key.Worker == w.key.Worker && fits(r) && r.key.DP == dp {
			return r
		}
	}
	return nil
}

// topicFits reports whether the topic of a rank is that of a message, part by
// part between the @s; the rank's may have fewer parts. Only the second, a host
// ("kv@10.0.0.1@model"), may have a port besides in the message's.
func topicFits(rank string, topic []byte) bool {
	rank = strings.TrimSuffix(rank, "@")
	if rank == "" {
		return true
	}
	for i, last := 0, false; !last; i++ {
		var part string
		var more bool
		part, rank, more = strings.Cut(rank, "@")
		got, rest, cut := bytes.Cut(topic, []byte{'@'})
		if string(got) != part && (i != 1 || string(withoutPort(got)) != part) || more && !cut {
			return false
		}
		topic, last = rest, !more
	}
	return true
}

// topicHost is the host that a topic names, "" for none.
func topicHost(topic []byte) string {
	_, rest, _ := bytes.Cut(topic, []byte{'@'})
	part, _, _ := bytes.Cut(rest, []byte{'@'})
	return strings.Trim(string(withoutPort(part)), "[]")
}

// withoutPort is host:port without the port. An IPv6 address has one only where
// it is in brackets.
func withoutPort(s []byte) []byte {
	i := bytes.LastIndexByte(s, ':')
	if i < 0 || i == len(s)-1 || bytes.IndexByte(s[:i], ':') >= 0 && s[i-1] != ']' {
		return s
	}
	for _, c := range s[i+1:] {
		if c < '0' || c > '9' {
			return s
		}
	}
	return s[:i]
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
		s := ListenerStatus{Endpoint: h.endpoint, Unrouted: h.unrouted.Load()}
		if ln := h.listener.Load(); ln != nil {
			st := ln.Stats()
			s.Bound, s.Accepted, s.Refused, s.Failed = ln.Endpoint(), st.Accepted, st.Refused, st.Failed
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b ListenerStatus) int { return strings.Compare(a.Endpoint, b.Endpoint) })
	return all
}
