package kvfeed

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/zmtp"
)

var listening = workers.EventSource{Endpoint: "tcp://127.0.0.1:0", Topic: "kv", Bind: true}

// joins adds a rank whose publisher dials in.
func (f *fixture) joins(id kvindex.Rank, key Key, replay string) {
	f.t.Helper()
	if _, ok := f.x.RankStats(id); !ok {
		if err := f.x.AddRank(id, key.String()); err != nil {
			f.t.Fatal(err)
		}
	}
	src := listening
	src.DP, src.Replay = key.DP, replay
	if err := f.Add(id, key, src, nil); err != nil {
		f.t.Fatal(err)
	}
}

// dialIn is a publisher that has dialled the listener.
func (f *fixture) dialIn() *zmtp.Pub {
	f.t.Helper()
	at := ""
	eventually(f.t, f.show, func() bool {
		if l := f.Listeners(); len(l) == 1 {
			at = l[0].Bound
		}
		return at != ""
	})
	p, err := zmtp.DialPub(context.Background(), at, zmtp.Options{RedialMin: time.Millisecond})
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = p.Close() })
	if err := p.WaitSubscribers(f.t.Context(), 1); err != nil {
		f.t.Fatal(err)
	}
	return p
}

func sendBatch(p *zmtp.Pub, dp int32, seq uint64, e ...kvevent.Event) {
	b := kvevent.Batch{TS: float64(seq), Rank: dp, Events: e}
	p.Send([]byte("kv"), kvevent.AppendSeq(nil, seq), kvevent.AppendBatch(nil, &b, kvevent.Encoding{}))
}

func storing(h uint64) kvevent.Event {
	return kvmodel.Stored(0, []uint64{h}, kvmodel.Tokens(int(h), kvmodel.Block), kvmodel.Block)
}

// blocks are the names of the blocks that the index has of a rank.
func (f *fixture) blocks(id kvindex.Rank) map[uint64]bool {
	f.t.Helper()
	all := map[uint64]bool{}
	if err := f.x.RankBlocks(id, func(_, name uint64) bool { all[name] = true; return true }); err != nil {
		f.t.Fatal(err)
	}
	return all
}

// A second worker joins that cannot be distinguished from the first: the entries
// of the first are not used any more, because its batches are dropped from now
// on.
func TestListenerAmbiguousWorkerJoins(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	f.joins(0, Key{Worker: "a", Host: "127.0.0.1"}, "")
	p := f.dialIn()
	sendBatch(p, 0, 0, storing(11))
	f.until(func(s Status) bool { return s.State == Live && s.LastSeq == 0 })
	f.joins(1, Key{Worker: "b", Host: "127.0.0.1"}, "")
	sendBatch(p, 0, 1, kvmodel.Removed(11))
	eventually(t, f.show, func() bool { return f.Listeners()[0].Unrouted == 1 })
	if s := f.one(); s.State != Unknown || s.Trusted || s.Reason != reasonElsewhere || len(f.blocks(0)) != 0 {
		t.Errorf("entries whose removal the engine has published: %+v", s)
	}
	if f.emitted("feed_unknown") != 1 {
		t.Errorf("no event: %+v", f.events)
	}
	// It can be distinguished again.
	f.Remove(1)
	sendBatch(p, 0, 2, storing(12))
	f.until(func(s Status) bool { return s.Trusted && s.LastSeq == 2 })
	if got := f.blocks(0); len(got) != 1 || !got[12] {
		t.Errorf("blocks %v", got)
	}
}

// An engine dials in before its worker is registered, and feeds another; what it
// brought goes when its own worker comes.
func TestListenerWorkerComesAfterItsPublisher(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	f.joins(0, Key{Worker: "a", Host: "10.9.9.9"}, "")
	p := f.dialIn()
	sendBatch(p, 0, 0, storing(11))
	f.until(func(s Status) bool { return s.State == Live && s.LastSeq == 0 })
	f.joins(1, Key{Worker: "b", Host: "127.0.0.1"}, "")
	sendBatch(p, 0, 1, kvmodel.Removed(11))
	sendBatch(p, 0, 2, storing(12))
	eventually(t, f.show, func() bool { return f.Status()[1].LastSeq == 2 })
	if s := f.one(); s.State != Unknown || s.Trusted || len(f.blocks(0)) != 0 {
		t.Errorf("a has what b's engine published: %+v", s)
	}
	if s := f.Status()[1]; !s.Trusted || !f.blocks(1)[12] {
		t.Errorf("b is not fed: %+v", s)
	}
}

// The ranks of a worker come one by one, their publishers before them.
func TestListenerRanksOneByOne(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(o *Options) { o.Observer = nil })
	f.joins(0, Key{Worker: "a", Host: "127.0.0.1"}, "")
	p0, p1 := f.dialIn(), f.dialIn()
	sendBatch(p0, 0, 0, storing(1))
	f.until(func(s Status) bool { return s.State == Live && s.LastSeq == 0 })
	sendBatch(p1, 1, 0, storing(2))
	f.until(func(s Status) bool { return s.Connects == 2 || s.State == Unknown })
	f.joins(1, Key{Worker: "a", DP: 1, Host: "127.0.0.1"}, "")
	for seq := uint64(1); seq < 4; seq++ {
		sendBatch(p0, 0, seq, storing(10+seq))
		sendBatch(p1, 1, seq, storing(20+seq))
	}
	eventually(t, f.show, func() bool {
		s := f.Status()
		return s[0].Trusted && s[0].LastSeq == 3 && s[1].Trusted && s[1].LastSeq == 3
	})
	for i := range 2 {
		for name := range f.blocks(kvRank(i)) {
			if name > 9 && int(name/10) != i+1 {
				t.Errorf("rank %d has block %d", i, name)
			}
		}
	}
	if f.blocks(0)[2] {
		t.Error("rank 0 has a block of rank 1")
	}
}

// One connection speaks for a rank under two topics, and then comes a batch of no
// certain rank under one of them, or under a third: it may be the rank's own, whose
// entries are not used any more.
func TestListenerUncertainBatchOfAnotherTopic(t *testing.T) {
	t.Parallel()
	for _, last := range []string{"kv@h@one", "kv@h@two", "kv@h@three"} {
		f := newFixture(t, nil)
		f.joins(0, Key{Worker: "a", Host: "127.0.0.1"}, "")
		f.joins(1, Key{Worker: "a", DP: 1, Host: "127.0.0.1"}, "")
		p := f.dialIn()
		send := func(topic string, dp int32, seq uint64, e kvevent.Event) {
			b := kvevent.Batch{TS: 1, Rank: dp, Events: []kvevent.Event{e}}
			p.Send([]byte(topic), kvevent.AppendSeq(nil, seq), kvevent.AppendBatch(nil, &b, kvevent.Encoding{}))
		}
		send("kv@h@one", 0, 0, storing(11))
		send("kv@h@two", 0, 1, storing(12))
		f.until(func(s Status) bool { return s.Trusted && s.LastSeq == 1 })
		send(last, -1, 2, kvmodel.Removed(11))
		eventually(t, f.show, func() bool { return f.Listeners()[0].Unrouted == 1 })
		if s := f.one(); s.Trusted || s.Reason != reasonUnrouted || len(f.blocks(0)) != 0 {
			t.Errorf("after an uncertain batch of topic %s: %+v", last, s)
		}
	}
}

// Of two rivals the one in use leaves, and a third comes before the other
// sends: until one is left, the status says that the rank's blocks are not
// known, and no replay is asked for them.
func TestListenerThirdPublisher(t *testing.T) {
	t.Parallel()
	for _, replay := range []string{"", "tcp://127.0.0.1:1"} {
		f := newFixture(t, func(o *Options) { o.Observer = nil })
		f.joins(0, Key{Worker: "a", Host: "h"}, replay)
		a := f.dialIn()
		sendBatch(a, 0, 0, storing(1))
		f.until(func(s Status) bool { return s.State == Live && s.LastSeq == 0 })
		b := f.dialIn()
		sendBatch(b, 0, 0, storing(2))
		f.until(func(s Status) bool { return s.Connects == 2 && s.State == Live })
		sendBatch(a, 0, 1, storing(3))
		f.until(func(s Status) bool { return s.State == Unknown })
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		f.until(func(s Status) bool { return s.State == Connecting })
		c := f.dialIn()
		asked := f.one().Replays
		sendBatch(c, 0, 0, storing(4))
		s := f.until(func(s Status) bool { return s.Connects == 3 && s.Foreign > 0 })
		if s.State != Unknown || s.Trusted || !strings.Contains(s.Reason, "two publishers") || s.Replays != asked {
			t.Errorf("replay %q, two publishers and neither is followed: %+v", replay, s)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		f.until(func(s Status) bool { return s.State == Live })
		sendBatch(c, 0, 1, storing(5))
		f.until(func(s Status) bool { return s.Trusted && s.LastSeq == 1 })
	}
}

// Two from elsewhere are rivals; the engine on the worker's own host comes and is
// followed. A rival that leaves while nobody is in use leaves nothing behind.
func TestListenerRivalsFromElsewhere(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	f.joins(0, Key{Worker: "w", Host: "h"}, "")
	r := f.ranks[0]
	say := func(conn uint64, home bool, seq uint64) {
		b := kvevent.Batch{TS: 1, Events: []kvevent.Event{storing(seq + 1)}}
		r.claim(conn, fmt.Sprintf("peer %d", conn), home)
		r.receive(conn, seq, kvevent.AppendBatch(nil, &b, kvevent.Encoding{}), nil)
	}
	say(101, false, 0)
	say(102, false, 0)
	say(101, false, 1)
	say(103, true, 0)
	say(103, true, 1)
	if s := f.one(); s.LastSeq != 1 || !s.Trusted {
		t.Errorf("the engine on the worker's host is not followed: %+v", s)
	}
	say(104, true, 0)
	say(103, true, 2)
	r.detach(104, context.Canceled)
	r.detach(103, context.Canceled)
	say(105, true, 0)
	if s := f.one(); s.LastSeq != 0 || !s.Trusted {
		t.Errorf("a rival that is gone keeps out: %+v", s)
	}
}

// A connection that is attached again is another attachment: what was under way
// for the last one does not go on.
func TestAttachmentIsNotItsConnection(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	f.joins(0, Key{Worker: "w", Host: "h"}, "")
	r := f.ranks[0]
	r.claim(101, "peer 101", false)
	r.claim(102, "peer 102", false)
	r.mu.Lock()
	before := r.attached
	r.mu.Unlock()
	r.claim(101, "peer 101", false) // a rival
	r.detach(101, context.Canceled)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn != 102 || r.current(before) || !r.current(r.attached) {
		t.Errorf("connection %d, the attachment %d before the rival is current: %v", r.conn, before, r.current(before))
	}
}

// Workers and ranks come and go, their engines dial in before, after and without
// them, under topics and from hosts that distinguish them or do not: a rank that
// is trusted has nothing but what one and the same engine holds now.
func TestListenerTrustsWhatOneEngineHolds(t *testing.T) {
	t.Parallel()
	for seed := range uint64(150) {
		rng := rand.New(rand.NewPCG(seed, 11))
		f := newFixture(t, func(o *Options) { o.Observer = nil })
		keeper := kvindex.Rank(9) // keeps the listener; nobody speaks for it
		src := listening
		src.Topic = "other"
		if err := f.x.AddRank(keeper, "keeper"); err != nil {
			t.Fatal(err)
		}
		if err := f.Add(keeper, Key{Worker: "keeper"}, src, nil); err != nil {
			t.Fatal(err)
		}
		var h *hub
		eventually(t, f.show, func() bool {
			f.Manager.mu.Lock()
			defer f.Manager.mu.Unlock()
			h = f.hubs[src.Endpoint]
			return h != nil
		})
		type peer struct {
			l     *publisherConn
			topic string
			also  string // a second topic of some, "" for none
			vague bool   // some of its batches do not say their rank
			said  int32
			seq   uint64
			has   map[uint64]bool
		}
		hosts := []string{"h", "h", "i"}
		var peers []*peer
		for i := range 4 {
			conn := &publisherConn{conn: f.conns.Add(1), peer: fmt.Sprintf("peer %d", i), host: hosts[rng.IntN(3)], mine: map[*rank]*identity{}}
			h.mu.Lock()
			h.conns[conn] = struct{}{}
			h.mu.Unlock()
			peers = append(peers, &peer{l: conn, topic: []string{"kv", "kv@h", "kv@i"}[rng.IntN(3)], said: int32(rng.IntN(3)), has: map[uint64]bool{}})
			if p := peers[i]; seed%3 == 0 {
				p.also, p.vague = p.topic+"@model", true
			}
		}
		fed := map[kvindex.Rank]bool{}
		followed := false
		for step := range 80 {
			if id := kvRank(rng.IntN(4)); rng.IntN(5) == 0 {
				if fed[id] {
					f.Remove(id)
				} else {
					f.joins(id, Key{Worker: fmt.Sprintf("w%d", id/2), DP: int(id % 2), Host: hosts[rng.IntN(3)]}, "")
				}
				fed[id] = !fed[id]
			} else {
				p := peers[rng.IntN(len(peers))]
				b, topic := kvevent.Batch{TS: 1, Rank: p.said}, p.topic
				if p.also != "" && rng.IntN(2) == 0 {
					topic = p.also
				}
				if p.vague && rng.IntN(4) == 0 {
					b.Rank = -1
				}
				if name := 1000*(p.l.conn+1) + uint64(step); len(p.has) == 0 || rng.IntN(3) > 0 {
					b.Events, p.has[name] = []kvevent.Event{storing(name)}, true
				} else {
					for name := range p.has {
						b.Events = append(b.Events, kvmodel.Removed(name))
					}
					p.has = map[uint64]bool{}
				}
				payload := kvevent.AppendBatch(nil, &b, kvevent.Encoding{})
				if r := p.l.take(h, []byte(topic), &b); r != nil {
					r.receive(p.l.conn, p.seq, payload, nil)
				}
				p.seq++
			}
			for id, is := range fed {
				if is {
					f.ranks[id].consistent(t)
				}
				if !f.Trusted(id) {
					continue
				}
				got, of := f.blocks(id), -1
				for i, p := range peers {
					all := len(got) > 0
					for name := range got {
						all = all && p.has[name]
					}
					if all {
						of = i
					}
				}
				followed = followed || of >= 0
				if len(got) > 0 && of < 0 {
					t.Fatalf("seed %d, step %d: rank %d is trusted with %v, which no engine holds", seed, step, id, got)
				}
			}
		}
		if seed == 0 && !followed {
			t.Error("no rank was ever fed")
		}
	}
}

// Publishers dial one listener; topic, rank and host show whose batches are whose.
func TestFeedListens(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	f := newFixture(t, func(o *Options) { o.Observer = nil })
	const at = "tcp://127.0.0.1:0"
	type pair struct {
		topic string
		dp    int
	}
	ranks := []pair{{"kv@a", 0}, {"kv@a", 1}, {"kv@b", 0}}
	for i, k := range ranks {
		if i > 0 {
			if err := f.x.AddRank(kvRank(i), fmt.Sprintf("rank %d", i)); err != nil {
				t.Fatal(err)
			}
		}
		src := workers.EventSource{DP: k.dp, Endpoint: at, Topic: k.topic, Bind: true}
		if err := f.Add(kvRank(i), Key{Worker: k.topic, DP: k.dp}, src, nil); err != nil {
			t.Fatal(err)
		}
	}
	bound := ""
	eventually(t, f.show, func() bool {
		if l := f.Listeners(); len(l) == 1 {
			bound = l[0].Bound
		}
		return bound != ""
	})
	pubs := map[string]*zmtp.Pub{}
	for _, topic := range []string{"kv@a", "kv@b"} {
		pub, err := zmtp.DialPub(ctx, bound, zmtp.Options{RedialMin: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = pub.Close() })
		pubs[topic] = pub
		if err := pub.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	send := func(topic string, dp int32, seq, hash uint64) {
		b := kvevent.Batch{TS: float64(seq), Rank: dp, Events: []kvevent.Event{kvmodel.Stored(0, []uint64{hash}, kvmodel.Tokens(int(hash), kvmodel.Block), kvmodel.Block)}}
		pubs[topic[:4]].Send([]byte(topic), kvevent.AppendSeq(nil, seq), kvevent.AppendBatch(nil, &b, kvevent.Encoding{}))
	}
	for seq := range uint64(3) {
		for i, k := range ranks {
			send(k.topic+"@model", int32(k.dp), seq, 100*uint64(i+1)+seq)
		}
	}
	send("kv@bb", 0, 0, 1) // of nobody
	send("kv@b", -1, 3, 399)
	eventually(t, func() string { return fmt.Sprintf("%+v %+v", f.Status(), f.Listeners()) }, func() bool {
		s := f.Status()
		return len(s) == 3 && s[0].LastSeq == 2 && s[1].LastSeq == 2 && s[2].LastSeq == 3 && f.Listeners()[0].Unrouted == 1
	})
	if f.emitted("feed_unrouted") != 1 {
		t.Errorf("no event about a batch that no rank gets: %+v", f.events)
	}
	for i := range ranks {
		n := 0
		err := f.x.RankBlocks(kvRank(i), func(_, name uint64) bool {
			if int(name/100) != i+1 {
				t.Errorf("rank %d has block %d", i, name)
			}
			n++
			return true
		})
		if err != nil || n < 3 {
			t.Errorf("rank %d has %d blocks: %v", i, n, err)
		}
	}
	// A later publisher of b's topic takes the place of the first, from scratch.
	second, err := zmtp.DialPub(ctx, bound, zmtp.Options{RedialMin: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := second.WaitSubscribers(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	first := pubs["kv@b"]
	pubs["kv@b"] = second
	send("kv@b", 0, 0, 301)
	eventually(t, f.show, func() bool { s := f.Status()[2]; return s.State == Live && s.LastSeq == 0 })
	// When the first still speaks, nobody knows whose batches are the engine's.
	pubs["kv@b"] = first
	send("kv@b", 0, 4, 302)
	eventually(t, f.show, func() bool {
		s := f.Status()[2]
		return s.State == Unknown && strings.Contains(s.Reason, "two publishers")
	})
	pubs["kv@b"] = second
	send("kv@b", 0, 1, 303)
	eventually(t, f.show, func() bool { return f.Status()[2].Foreign == 2 })
	if s := f.Status()[2]; s.Trusted {
		t.Errorf("status %+v", s)
	}
	// Once one of them is gone, the other is taken on.
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, f.show, func() bool { return f.Status()[2].State == Live })
	send("kv@b", 0, 2, 304)
	eventually(t, f.show, func() bool { s := f.Status()[2]; return s.State == Live && s.LastSeq == 2 })
	n := 0
	if err := f.x.RankBlocks(2, func(_, _ uint64) bool { n++; return true }); err != nil || n != 1 {
		t.Errorf("%d blocks after the change of publisher, want 1 (%v)", n, err)
	}
	// The listener goes with its last rank.
	for i := range ranks {
		f.Remove(kvRank(i))
	}
	if l := f.Listeners(); len(l) != 0 {
		t.Errorf("listeners left: %+v", l)
	}
}

// TestFeedOfAnotherRank: batches that claim to be of another rank of the deployment than
// the socket's make one event, and each is counted.
func TestFeedOfAnotherRank(t *testing.T) {
	t.Parallel()
	for start, each := range map[int]uint64{0: 0, 4: 1} {
		p := newPublisher(t, 54, 1) // of rank 0, as it says
		f := newFixture(t, nil)
		if err := f.Add(0, Key{Worker: "w", Start: start}, p.source(false), nil); err != nil {
			t.Fatal(err)
		}
		p.subscribed()
		p.steps(5)
		s := f.caughtUp(p)
		if s.RankDisagree != 5*each || uint64(f.emitted("feed_rank_disagree")) != each || !s.Trusted {
			t.Errorf("the worker begins with rank %d: %d batches of another one, %d events, %+v", start, s.RankDisagree, f.emitted("feed_rank_disagree"), s)
		}
		f.equals(p)
	}
}
