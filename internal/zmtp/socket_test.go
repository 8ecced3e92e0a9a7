package zmtp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// opened is a socket that is closed when the test ends.
func opened[S io.Closer](t testing.TB, open func(context.Context, string, Options) (S, error), endpoint string, o Options) S {
	t.Helper()
	s, err := open(t.Context(), endpoint, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func listenPub(t testing.TB, endpoint string, o Options) *Pub {
	t.Helper()
	return opened(t, ListenPub, endpoint, o)
}

func dialSub(t testing.TB, p *Pub, topics ...string) *Conn {
	t.Helper()
	// A peer counts from its first topic on; the others come one by one.
	topicsNow := func() (n int, changed <-chan struct{}) {
		p.mu.Lock()
		defer p.mu.Unlock()
		for s := range p.peers {
			n += len(s.topics)
		}
		return n, p.changed
	}
	before, _ := topicsNow()
	c, err := DialSub(t.Context(), p.Endpoint(), Options{Topics: topics})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	for ctx := within(t); ; {
		n, changed := topicsNow()
		if n >= before+max(1, len(topics)) {
			return c
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("%d of %d topics are subscribed to", n-before, len(topics))
		}
	}
}

func recv(t testing.TB, c *Conn, want ...string) {
	t.Helper()
	var m Message
	if err := c.Recv(&m); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, text(&m)); diff != "" {
		t.Fatalf("message: want - got +:\n%s", diff)
	}
}

func TestPubSub(t *testing.T) {
	for _, endpoint := range []string{"tcp://127.0.0.1:0", "tcp://*:0", "ipc://" + filepath.Join(t.TempDir(), "s")} {
		t.Run(strings.ReplaceAll(endpoint, "/", "_"), func(t *testing.T) {
			p := listenPub(t, endpoint, Options{})
			if strings.HasSuffix(p.Endpoint(), ":0") {
				t.Fatalf("endpoint %s is not resolved", p.Endpoint())
			}
			if host, ok := strings.CutPrefix(p.Endpoint(), "tcp://*"); ok {
				p.name = "tcp://127.0.0.1" + host
			}
			all, kv, two := dialSub(t, p), dialSub(t, p, "kv@a"), dialSub(t, p, "load", "kv")
			big := strings.Repeat("x", 300_000)
			for _, topic := range []string{"kv@a@m", "kv@b@m", "load", "other"} {
				p.Send([]byte(topic), nil, []byte(big))
			}
			p.Send()
			p.Send([]byte("kv@a"))
			for _, topic := range []string{"kv@a@m", "kv@b@m", "load", "other"} {
				recv(t, all, topic, "", big)
			}
			recv(t, kv, "kv@a@m", "", big)
			recv(t, kv, "kv@a")
			for _, topic := range []string{"kv@a@m", "kv@b@m", "load"} {
				recv(t, two, topic, "", big)
			}
			if p.Dropped() != 0 || p.Sent() != 5+2+4 {
				t.Errorf("%d sent, %d dropped", p.Sent(), p.Dropped())
			}
			if err := all.Send([]byte("x")); err == nil {
				t.Error("a SUB sent a message")
			}
			kv.Close()
			if err := kv.Recv(new(Message)); !errors.Is(err, ErrClosed) {
				t.Errorf("receive on a closed Conn: %v", err)
			}
			recv(t, two, "kv@a")
			p.Close()
			if err := two.Recv(new(Message)); !errors.Is(err, io.EOF) {
				t.Errorf("receive after the publisher closed: %v", err)
			}
			p.Send([]byte("nobody"))
		})
	}
}

// TestSlowSubscriber checks that a subscriber that does not read costs a bounded
// queue and its own messages only.
func TestSlowSubscriber(t *testing.T) {
	for name, o := range map[string]Options{
		"by messages": {SendQueue: 8},
		"by bytes":    {SendQueueBytes: 8 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			p := listenPub(t, "tcp://127.0.0.1:0", o)
			slow := dialSub(t, p)
			const n, size = 200, 1 << 20
			body := make([]byte, size)
			for i := range n {
				p.Send(binary.BigEndian.AppendUint64(nil, uint64(i)), body)
			}
			if p.Dropped() == 0 || p.Sent()+p.Dropped() != n {
				t.Fatalf("%d sent, %d dropped of %d", p.Sent(), p.Dropped(), n)
			}
			var m Message
			last := -1
			for range p.Sent() {
				if err := slow.Recv(&m); err != nil {
					t.Fatal(err)
				}
				i := int(binary.BigEndian.Uint64(m.Frames()[0]))
				if i <= last || len(m.Frames()[1]) != size {
					t.Fatalf("message %d of %d bytes after %d", i, len(m.Frames()[1]), last)
				}
				last = i
			}
		})
	}
}

// TestListenSub lets publishers dial in and checks that each one's messages and
// its end are distinguished, and that a dialling Pub comes back.
func TestListenSub(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l, err := ListenSub(ctx, "tcp://127.0.0.1:0", Options{Topics: []string{"kv"}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conns := map[string]*Conn{}
	var pubs []*Pub
	for i := range 3 {
		p, err := DialPub(ctx, l.Endpoint(), Options{RedialMin: time.Millisecond, RedialMax: 5 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		pubs = append(pubs, p)
		c, err := l.Accept(within(t))
		if err != nil {
			t.Fatal(err)
		}
		conns[c.RemoteAddr()] = c
		if err := p.WaitSubscribers(within(t), 1); err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprint("kv", i)
		p.Send([]byte("no"))
		p.Send([]byte(name))
		recv(t, c, name)
		if i == 1 {
			p.Close()
			if err := c.Recv(new(Message)); !errors.Is(err, io.EOF) {
				t.Errorf("end of a publisher: %v", err)
			}
		}
	}
	if len(conns) != 3 {
		t.Errorf("%d distinct peers", len(conns))
	}
	for _, c := range conns {
		c.Close()
	}
	for range 2 { // the two that live dial again
		c, err := l.Accept(within(t))
		if err != nil {
			t.Fatal(err)
		}
		if c.PeerType() != "PUB" {
			t.Errorf("peer is %s", c.PeerType())
		}
	}
	cancel()
	if _, err := l.Accept(context.Background()); !errors.Is(err, context.Canceled) {
		t.Errorf("accept after the end: %v", err)
	}
	if err := pubs[0].WaitSubscribers(context.Background(), 9); !errors.Is(err, context.Canceled) {
		t.Errorf("wait after the end: %v", err)
	}
}

// TestBadPeersAtListener mixes hostile peers with a good one: they are counted
// and gone, it is served.
func TestBadPeersAtListener(t *testing.T) {
	l := opened(t, ListenSub, "tcp://127.0.0.1:0", Options{MaxPeers: 3})
	address := strings.TrimPrefix(l.Endpoint(), "tcp://")
	connect := func() net.Conn {
		nc, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { nc.Close() })
		return nc
	}
	gone := func(nc net.Conn) {
		t.Helper()
		if err := nc.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		var ne net.Error
		if _, err := io.Copy(io.Discard, nc); errors.As(err, &ne) && ne.Timeout() {
			t.Error("a bad peer stayed connected")
		}
	}
	// placed connects until there is a place: that of a peer is free a moment
	// after its connection is closed. Until then it is refused.
	refused := uint64(0)
	placed := func() net.Conn {
		t.Helper()
		for ctx := within(t); ctx.Err() == nil; {
			nc := connect()
			if _, err := io.ReadFull(nc, make([]byte, greetingSize)); err == nil {
				return nc
			}
			refused++
		}
		t.Fatal("no place for a peer")
		return nil
	}
	garbage := connect()
	if _, err := garbage.Write([]byte("POST /generate HTTP/1.1\r\n")); err != nil {
		t.Fatal(err)
	}
	gone(garbage)
	placed() // holds a place in its handshake
	p := opened(t, DialPub, l.Endpoint(), Options{})
	c, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	endless := placed()
	if _, err := endless.Write(hello(rolePub)); err != nil {
		t.Fatal(err)
	}
	bad, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	gone(connect()) // the fourth
	refused++
	if _, err := endless.Write([]byte(strings.Repeat("\x01\x00", 100))); err != nil {
		t.Fatal(err)
	}
	if err := bad.Recv(new(Message)); !errors.Is(err, ErrLimit) {
		t.Errorf("endless message: %v", err)
	}
	gone(endless)
	if err := p.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	p.Send([]byte("kv"))
	recv(t, c, "kv")
	l.Close()
	if s := l.Stats(); s.Accepted != 2 || s.Refused != refused || s.Failed < 1 || s.LastError == nil {
		t.Errorf("stats %+v, want %d refused", s, refused)
	}
}

// TestTooManySubscriptions checks the limit and that cancelling makes room.
func TestTooManySubscriptions(t *testing.T) {
	p := listenPub(t, "tcp://127.0.0.1:0", Options{Limits: Limits{MaxSubscriptions: 2}})
	s := &subscriber{c: &Conn{name: "peer"}}
	for _, step := range []struct {
		on    bool
		topic string
		held  int
		err   error
	}{
		{true, "a", 1, nil}, {true, "b", 2, nil}, {true, "a", 2, nil}, {true, "c", 2, ErrLimit},
		{false, "zz", 2, nil}, {false, "a", 1, nil}, {false, "a", 1, nil}, {true, "c", 2, nil}, {false, "b", 1, nil},
	} {
		if err := p.subscribe(s, step.on, []byte(step.topic)); !errors.Is(err, step.err) || len(s.topics) != step.held {
			t.Errorf("%+v: %d held, %v", step, len(s.topics), err)
		}
	}
	if !s.wants([]byte("cc")) || s.wants([]byte("a")) {
		t.Error("wrong topics are left")
	}
	c := opened(t, DialSub, p.Endpoint(), Options{Topics: []string{"x", "y", "z"}})
	if err := c.Recv(new(Message)); err == nil {
		t.Error("a subscriber over the limit received")
	}
}

func TestDealerRouter(t *testing.T) {
	r, err := ListenRouter(t.Context(), "tcp://127.0.0.1:0", Options{}, func(_ context.Context, c *Conn) error {
		var m Message
		for {
			if err := c.Recv(&m); err != nil {
				return err
			}
			if c.PeerIdentity() != "me" || len(m.Frames()) != 2 {
				t.Errorf("identity %q, request %q", c.PeerIdentity(), text(&m))
				return nil
			}
			for i := range 3 {
				if err := c.Send(nil, m.Frames()[1], []byte{byte(i)}); err != nil {
					return err
				}
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var wg sync.WaitGroup
	for k := range 4 {
		wg.Go(func() {
			c, err := DialDealer(t.Context(), r.Endpoint(), Options{Identity: "me"})
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			if err := c.Send(nil, []byte{byte(k)}); err != nil {
				t.Error(err)
			}
			var m Message
			for i := range 3 {
				if err := c.Recv(&m); err != nil || !slices.Equal(text(&m), []string{"", string(rune(k)), string(rune(i))}) {
					t.Errorf("answer %q, %v", text(&m), err)
				}
			}
		})
	}
	wg.Wait()
	c := opened(t, DialDealer, r.Endpoint(), Options{Identity: "me"})
	if err := c.Send(); err == nil {
		t.Error("a message without frames was sent")
	}
	if err := c.Send(nil, []byte("x")); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		recv(t, c, "", "x", string(rune(i)))
	}
	r.Close()
	if err := c.Recv(new(Message)); !errors.Is(err, io.EOF) {
		t.Errorf("after the router closed: %v", err)
	}
	if s := r.Stats(); s.Accepted != 5 || s.Failed != 0 {
		t.Errorf("stats %+v", s)
	}
	if _, err := DialSub(t.Context(), listenPub(t, "tcp://127.0.0.1:0", Options{}).Endpoint(), Options{Limits: Limits{MaxCommandBytes: 5}}); !errors.Is(err, ErrLimit) {
		t.Errorf("READY over the command limit: %v", err)
	}
}

// TestContextEnds checks that the end of a context interrupts a dial's Conn in
// the middle of Recv and reports its cause.
func TestContextEnds(t *testing.T) {
	p := listenPub(t, "tcp://127.0.0.1:0", Options{})
	ctx, cancel := context.WithCancelCause(t.Context())
	c, err := DialSub(ctx, p.Endpoint(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got := make(chan error)
	go func() { got <- c.Recv(new(Message)) }()
	cause := errors.New("worker removed")
	cancel(cause)
	select {
	case err := <-got:
		if !errors.Is(err, cause) {
			t.Errorf("got %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("Recv did not notice")
	}
	if _, err := DialSub(ctx, p.Endpoint(), Options{}); err == nil {
		t.Error("dialled with an ended context")
	}
}

func BenchmarkRecv(b *testing.B) {
	for _, size := range []int{200, 4 << 10, 64 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			defer ln.Close()
			var wg sync.WaitGroup
			wg.Go(func() { // a peer that writes as fast as it is read
				nc, err := ln.Accept()
				if err != nil {
					return
				}
				defer nc.Close()
				one := appendMessage(nil, [][]byte{[]byte("kv@abc"), make([]byte, 8), make([]byte, size)})
				many := slices.Repeat(one, max(1, (256<<10)/len(one)))
				for _, err := nc.Write(hello(rolePub)); err == nil; _, err = nc.Write(many) {
				}
			})
			c, err := DialSub(b.Context(), "tcp://"+ln.Addr().String(), Options{})
			if err != nil {
				b.Fatal(err)
			}
			var m Message
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if err := c.Recv(&m); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
			c.Close()
			wg.Wait()
		})
	}
}
