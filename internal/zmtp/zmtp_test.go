package zmtp

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is a transport that delivers fixed bytes, then EOF, and keeps what is
// written to it.
type script struct {
	in    io.Reader
	wrote bytes.Buffer
}

func (s *script) Read(p []byte) (int, error)       { return s.in.Read(p) }
func (s *script) Write(p []byte) (int, error)      { return s.wrote.Write(p) }
func (s *script) Close() error                     { return nil }
func (s *script) LocalAddr() net.Addr              { return nil }
func (s *script) RemoteAddr() net.Addr             { return nil }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// chunked delivers at most n bytes a read.
type chunked struct {
	r io.Reader
	n int
}

func (c chunked) Read(p []byte) (int, error) { return c.r.Read(p[:min(len(p), c.n)]) }

func options(t testing.TB, o Options) *Options {
	t.Helper()
	o, err := o.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return &o
}

// hello is the greeting and READY of a peer.
func hello(role roleKind) []byte { return appendReady(greeting(), role, "") }

func readHex(t testing.TB, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	out, err := hex.DecodeString(strings.Join(strings.Fields(string(raw)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func text(m *Message) []string {
	var out []string
	for _, f := range m.Frames() {
		out = append(out, string(f))
	}
	return out
}

// TestLibzmqBytes replays both directions of a link between two libzmq 4.3.5
// sockets (heartbeats on, two topics, frames on both sides of the short length)
// in pieces of several sizes.
func TestLibzmqBytes(t *testing.T) {
	pub, sub := readHex(t, "libzmq-4.3.5-pub.hex"), readHex(t, "libzmq-4.3.5-sub.hex")
	for _, size := range []int{1, 3, 64, 1 << 20} {
		t.Run(fmt.Sprintf("SUB in pieces of %d", size), func(t *testing.T) {
			s := &script{in: chunked{bytes.NewReader(pub), size}}
			c, err := newConn(t.Context(), s, roleSub, options(t, Options{Topics: []string{"kv", "load"}}), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if err := c.opened(); err != nil {
				t.Fatal(err)
			}
			if c.PeerType() != "PUB" || c.Minor() != 1 {
				t.Errorf("peer %s, ZMTP 3.%d", c.PeerType(), c.Minor())
			}
			var m Message
			for i, n := range []int{0, 1, 200, 255, 256, 1500} {
				if err := c.Recv(&m); err != nil {
					t.Fatal(err)
				}
				topic := []string{"kv@a", "load"}[i%2]
				want := []string{topic, string(binary.BigEndian.AppendUint64(nil, uint64(i))), strings.Repeat(string(rune(i)), n)}
				if diff := cmp.Diff(want, text(&m)); diff != "" {
					t.Fatalf("message %d: want - got +:\n%s", i, diff)
				}
			}
			if err := c.Recv(&m); !errors.Is(err, io.EOF) {
				t.Errorf("after the last message: %v", err)
			}
			// What we say is byte for byte what libzmq's SUB said up to its PONGs.
			const spoken = greetingSize + 27 + 14 + 16
			// (It keeps a length for older peers in the padding.)
			sub := bytes.Clone(sub)
			sub[8] = 0
			if got := s.wrote.Bytes(); !bytes.HasPrefix(got, sub[:spoken]) {
				t.Errorf("handshake and subscriptions\n%x, libzmq sends\n%x", got, sub[:spoken])
			}
			pings, pongs := bytes.Count(pub, []byte("\x04PING")), bytes.Count(s.wrote.Bytes(), []byte("\x04\x05\x04PONG"))
			if pings == 0 || pings != pongs {
				t.Errorf("%d PINGs answered by %d PONGs", pings, pongs)
			}
		})
		t.Run(fmt.Sprintf("PUB in pieces of %d", size), func(t *testing.T) {
			c, err := newConn(t.Context(), &script{in: chunked{bytes.NewReader(sub), size}}, rolePub, options(t, Options{}), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			var got []string
			c.onSubscribe = func(on bool, topic []byte) error {
				got = append(got, fmt.Sprint(on, " ", string(topic)))
				return nil
			}
			var m Message
			if err := c.Recv(&m); !errors.Is(err, io.EOF) {
				t.Errorf("receive: %v", err)
			}
			if diff := cmp.Diff([]string{"true kv", "true load", "false load"}, got); diff != "" {
				t.Errorf("subscriptions: want - got +:\n%s", diff)
			}
		})
	}
}

// TestCapturedLink replays a ZMTP 3.0 link of another implementation, whose PUB
// dials.
func TestCapturedLink(t *testing.T) {
	f, err := os.Open(filepath.Join("..", "..", "testdata", "captures", "zmtp-link-raw.txt.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var dir byte
	bytesOf := map[byte][]byte{}
	sc := bufio.NewScanner(z)
	for sc.Scan() {
		switch line := sc.Text(); {
		case line == "" || line == "--":
		case line[0] == '>' || line[0] == '<':
			dir = line[0]
		default:
			digits, _, _ := strings.Cut(strings.TrimSpace(line), "  ")
			raw, err := hex.DecodeString(strings.ReplaceAll(digits, " ", ""))
			if err != nil {
				t.Fatal(err)
			}
			bytesOf[dir] = append(bytesOf[dir], raw...)
		}
	}
	s := &script{in: bytes.NewReader(bytesOf['>'])}
	c, err := newConn(t.Context(), s, roleSub, options(t, Options{Topics: []string{"kv@"}}), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.opened(); err != nil {
		t.Fatal(err)
	}
	if !bytes.HasSuffix(s.wrote.Bytes(), []byte("\x00\x04\x01kv@")) || c.Minor() != 0 || len(c.PeerIdentity()) != 36 {
		t.Errorf("ZMTP 3.%d with %q, wrote %q", c.Minor(), c.PeerIdentity(), s.wrote.Bytes())
	}
	var m Message
	n := uint64(0)
	for ; ; n++ {
		if err = c.Recv(&m); err != nil {
			break
		}
		f := m.Frames()
		if len(f) != 3 || !bytes.HasPrefix(f[0], []byte("kv@")) || binary.BigEndian.Uint64(f[1]) != n+1 || len(f[2]) == 0 {
			t.Fatalf("message %d: %q", n, text(&m))
		}
	}
	if !errors.Is(err, io.EOF) || n < 10 {
		t.Errorf("%d messages, then %v", n, err)
	}
	t.Logf("%d messages", n)
	p, err := newConn(t.Context(), &script{in: bytes.NewReader(bytesOf['<'])}, rolePub, options(t, Options{}), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Recv(&m); err != nil || !cmp.Equal(text(&m), []string{"\x01kv@"}) {
		t.Errorf("subscription %q, %v", text(&m), err)
	}
}

// TestHostilePeer feeds bytes that a peer should not send and expects an error
// of the right kind and no memory that follows announced lengths.
func TestHostilePeer(t *testing.T) {
	long := func(flags byte, n uint64) []byte {
		return binary.BigEndian.AppendUint64([]byte{flags | flagLong}, n)
	}
	ready := func(data string) []byte { return append(greeting(), appendCommand(nil, "READY", []byte(data))...) }
	greet := func(i int, b byte) []byte { g := hello(rolePub); g[i] = b; return g }
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	pub := hello(rolePub)
	for _, tt := range []struct {
		name string
		in   []byte
		want error
	}{
		{"HTTP", []byte("GET / HTTP/1.1\r\n\r\n"), ErrProtocol},
		{"nothing", nil, io.ErrUnexpectedEOF},
		{"half a greeting", greeting()[:40], io.ErrUnexpectedEOF},
		{"ZMTP 2", greet(10, 1), ErrProtocol},
		{"signature", greet(9, 0x7e), ErrProtocol},
		{"CURVE", join(greeting()[:12], []byte("CURVE"), make([]byte, 47)), ErrProtocol},
		{"mechanism with NULL inside", greet(20, 'x'), ErrProtocol},
		{"message instead of READY", join(greeting(), []byte{0, 1, 'x'}), ErrProtocol},
		{"other command than READY", join(greeting(), appendCommand(nil, "HELLO")), ErrProtocol},
		{"ERROR", join(greeting(), appendCommand(nil, "ERROR", []byte("\x03bad"))), ErrProtocol},
		{"ERROR cut", join(greeting(), appendCommand(nil, "ERROR", []byte("\xffbad"))), ErrProtocol},
		{"huge READY", join(greeting(), long(flagCommand, 1<<40)), ErrLimit},
		{"READY property without a name", ready("\x00"), ErrProtocol},
		{"READY property longer than READY", ready("\x01a\xff\xff\xff\xff"), ErrProtocol},
		{"READY without a type", ready(""), ErrProtocol},
		{"wrong type", hello(roleDealer), ErrProtocol},
		{"empty command name", join(pub, []byte{4, 1, 0}), ErrProtocol},
		{"empty command", join(pub, []byte{4, 0}), ErrProtocol},
		{"unknown command", join(pub, appendCommand(nil, "JOIN", []byte("x"))), io.EOF},
		{"SUBSCRIBE to a SUB", join(pub, appendCommand(nil, "SUBSCRIBE", []byte("x"))), io.EOF},
		{"ERROR later", join(pub, appendCommand(nil, "ERROR", []byte("\x03bad"))), ErrProtocol},
		{"PING without a time to live", join(pub, appendCommand(nil, "PING")), ErrProtocol},
		{"PING with a long context", join(pub, appendCommand(nil, "PING", make([]byte, 19))), io.EOF},
		{"huge command", join(pub, long(flagCommand, 1<<30)), ErrLimit},
		{"reserved flag", join(pub, []byte{8, 0}), ErrProtocol},
		{"command with MORE", join(pub, []byte{5, 0}), ErrProtocol},
		{"negative length", join(pub, long(0, 1<<63)), ErrProtocol},
		{"length 2^62", join(pub, long(0, 1<<62)), ErrLimit},
		{"frame over the limit", join(pub, long(0, 16<<20+1)), ErrLimit},
		{"announced and never sent", join(pub, long(0, 16<<20), []byte("little")), io.ErrUnexpectedEOF},
		{"endless MORE", join(pub, bytes.Repeat([]byte{1, 0}, 1000)), ErrLimit},
		{"message over the limit", join(pub, bytes.Repeat(append(long(flagMore, 12<<20), make([]byte, 12<<20)...), 3)), ErrLimit},
		{"ended within a message", join(pub, []byte{1, 0}), io.ErrUnexpectedEOF},
		{"ended within a header", join(pub, []byte{1}), io.ErrUnexpectedEOF},
		{"ended within a long header", join(pub, long(0, 300)[:4]), io.ErrUnexpectedEOF},
		{"ended well", pub, io.EOF},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			var m Message
			c, err := newConn(t.Context(), &script{in: bytes.NewReader(tt.in)}, roleSub, options(t, Options{}), nil)
			if err == nil {
				err = c.Recv(&m)
				if again := c.Recv(&m); again == nil {
					t.Error("a failed Conn received again")
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}
			runtime.ReadMemStats(&after)
			if !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
			if got, limit := after.TotalAlloc-before.TotalAlloc, uint64(8*len(tt.in)+1<<20); got > limit {
				t.Errorf("%d bytes were allocated for %d received", got, len(tt.in))
			}
			if len(m.Frames()) != 0 {
				t.Errorf("%d frames after an error", len(m.Frames()))
			}
		})
	}
}

// TestHandshakeDeadline checks that a peer that trickles its greeting is given
// up at the deadline, whatever its pace.
func TestHandshakeDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		var peer sync.WaitGroup
		defer peer.Wait()
		peer.Go(func() { _, _ = io.Copy(io.Discard, theirs) })
		peer.Go(func() {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for _, b := range greeting() {
				<-tick.C
				if _, err := theirs.Write([]byte{b}); err != nil {
					return
				}
			}
		})
		start := time.Now()
		_, err := newConn(t.Context(), ours, roleSub, options(t, Options{HandshakeTimeout: 3500 * time.Millisecond}), nil)
		if !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != 3500*time.Millisecond {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
	})
}

// TestHeartbeat checks both ends of a heartbeat in virtual time: silence makes a
// PING, an answered PING keeps the connection, an unanswered one ends it.
func TestHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		o := options(t, Options{Heartbeat: time.Second, HeartbeatTimeout: 300 * time.Millisecond})
		made := make(chan *Conn)
		go func() {
			c, err := newConn(t.Context(), ours, roleSub, o, nil)
			if err != nil {
				t.Error(err)
			}
			made <- c
		}()
		read := func(n int) []byte {
			b := make([]byte, n)
			if _, err := io.ReadFull(theirs, b); err != nil {
				t.Error(err)
			}
			return b
		}
		read(greetingSize)
		go func() { _, _ = theirs.Write(hello(rolePub)) }()
		read(27)
		c := <-made
		defer c.Close()
		start := time.Now()
		failed := make(chan error)
		go func() { failed <- c.Recv(new(Message)) }()
		for i := range 3 {
			if got, want := read(9), "\x04\x07\x04PING\x00\x00"; string(got) != want {
				t.Errorf("got %q, want %q", got, want)
			}
			if d := time.Since(start); d != time.Duration(i+1)*time.Second {
				t.Errorf("PING %d after %v", i, d)
			}
			if i < 2 {
				if _, err := theirs.Write([]byte("\x04\x05\x04PONG")); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := <-failed; !errors.Is(err, ErrHeartbeat) || time.Since(start) != 3300*time.Millisecond {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
	})
}

// TestTimeToLive: a subscriber and a requester keep to the time that a peer
// grants itself, however long; a publisher is as hasty as libzmq's, which counts
// the milliseconds in 16 bits.
func TestTimeToLive(t *testing.T) {
	for _, c := range []struct {
		role, peer roleKind
		tenths     uint16
		want       time.Duration
	}{
		{roleSub, rolePub, 3, 300 * time.Millisecond},
		{roleSub, rolePub, 655, 65500 * time.Millisecond},
		{roleSub, rolePub, 656, 65600 * time.Millisecond},
		{roleDealer, roleRouter, 656, 65600 * time.Millisecond},
		{roleSub, rolePub, math.MaxUint16, 6553500 * time.Millisecond},
		{rolePub, roleSub, 656, 64 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			ours, theirs := net.Pipe()
			defer theirs.Close()
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			go func() { _, _ = theirs.Write(append(hello(c.peer), ping(c.tenths, "")...)) }()
			o := options(t, Options{})
			o.Heartbeat = 0
			conn, err := newConn(t.Context(), ours, c.role, o, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			start := time.Now()
			if err := conn.Recv(new(Message)); !errors.Is(err, ErrHeartbeat) || time.Since(start) != c.want {
				t.Errorf("%s with %d tenths: after %v: %v", c.role, c.tenths, time.Since(start), err)
			}
		})
	}
}

// TestPeerWithoutHeartbeats: a publisher of ZMTP 3.0 (the greeting of go-zeromq
// and of libzmq before 4.3.3) knows no PING. It is sent none, and its silence is
// no reason to hang up.
func TestPeerWithoutHeartbeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		failed := make(chan error, 1)
		go func() {
			c, err := newConn(t.Context(), ours, roleSub, options(t, Options{Heartbeat: time.Second}), nil)
			if err == nil {
				defer c.Close()
				err = c.opened()
			}
			for err == nil {
				err = c.Recv(new(Message))
			}
			failed <- err
		}()
		older := hello(rolePub)
		older[11] = 0
		go func() { _, _ = theirs.Write(older) }()
		// Greeting, READY, and the subscription as 3.0 has it: a message.
		want := append(hello(roleSub), 0, 1, 1)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(theirs, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("handshake %q, want %q: %v", got, want, err)
		}
		if err := theirs.SetReadDeadline(time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if n, err := theirs.Read(got); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("in an hour of silence it was sent %q: %v", got[:n], err)
		}
		theirs.Close()
		if err := <-failed; !errors.Is(err, io.EOF) {
			t.Error(err)
		}
	})
}

// TestStalledReader checks that a Send to a peer that reads nothing ends at the
// write timeout.
func TestStalledReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		go func() {
			_, _ = theirs.Write(hello(roleRouter))
		}()
		go func() {
			_, _ = io.CopyN(io.Discard, theirs, int64(greetingSize+len(appendReady(nil, roleDealer, "abc"))))
		}()
		c, err := newConn(t.Context(), ours, roleDealer, options(t, Options{WriteTimeout: 2 * time.Second, Identity: "abc"}), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		start := time.Now()
		if err := c.Send(nil, make([]byte, 1000)); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != 2*time.Second {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
	})
}

func TestEndpoints(t *testing.T) {
	for _, bad := range []string{"", "udp://h:1", "tcp://", "tcp://h", "tcp://:5", "tcp://h:70000", "tcp://h:x", "tcp://h:-1", "tcp://h:007", "ipc://", "ipc://*", "h:5557"} {
		if _, err := parseEndpoint(bad); err == nil {
			t.Errorf("endpoint %q is accepted", bad)
		}
	}
	for in, want := range map[string]endpoint{
		"tcp://*:5557":       {"tcp", ":5557", true},
		"tcp://127.0.0.1:0":  {"tcp", "127.0.0.1:0", false},
		"tcp://127.0.0.1:*":  {"tcp", "127.0.0.1:0", false},
		"tcp://[::1]:1":      {"tcp", "[::1]:1", false},
		"tcp://engine-0:557": {"tcp", "engine-0:557", false},
		"ipc:///run/kv.sock": {"unix", "/run/kv.sock", false},
		"ipc://@abstract":    {"unix", "@abstract", false},
	} {
		if got, err := parseEndpoint(in); err != nil || got != want {
			t.Errorf("endpoint %q: %+v, %v", in, got, err)
		}
	}
	for _, undialable := range []string{"tcp://*:5557", "tcp://127.0.0.1:0"} {
		if _, err := DialSub(t.Context(), undialable, Options{}); err == nil {
			t.Errorf("%s was dialled", undialable)
		}
	}
	if _, err := DialSub(t.Context(), "tcp://127.0.0.1:1", Options{MaxPeers: -1, DialTimeout: -1}); err == nil ||
		!strings.Contains(err.Error(), "MaxPeers") || !strings.Contains(err.Error(), "DialTimeout") {
		t.Errorf("negative options: %v", err)
	}
}

// TestStaleSocketFile checks that a socket file without a listener is taken over
// and one with a listener, or another kind of file, is not.
func TestStaleSocketFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kv.sock")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	if _, err := ListenPub(t.Context(), "ipc://"+path, Options{}); err == nil {
		t.Error("a live socket was taken over")
	}
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	p, err := ListenPub(t.Context(), "ipc://"+path, Options{})
	if err != nil {
		t.Fatalf("stale socket: %v", err)
	}
	p.Close()
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenPub(t.Context(), "ipc://"+path, Options{}); err == nil {
		t.Error("a regular file was replaced")
	}
}

// TestMessageGivesMemoryBack checks that one large message does not cost memory
// for ever, and that small ones cost none.
func TestMessageGivesMemoryBack(t *testing.T) {
	in := append(hello(rolePub), appendFrame(nil, make([]byte, 2*keepBuffer), false)...)
	in = append(in, bytes.Repeat(appendMessage(nil, [][]byte{[]byte("t"), make([]byte, 200)}), 2*shrinkAfter)...)
	c, err := newConn(t.Context(), &script{in: bytes.NewReader(in)}, roleSub, options(t, Options{}), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var m Message
	if err := c.Recv(&m); err != nil || m.Size() != 2*keepBuffer {
		t.Fatalf("%d bytes, %v", m.Size(), err)
	}
	for range shrinkAfter + 2 {
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
	}
	if cap(m.buf) > keepBuffer {
		t.Errorf("buffer of %d bytes after many small messages", cap(m.buf))
	}
	if got := testing.AllocsPerRun(shrinkAfter/2, func() {
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
	}); got != 0 {
		t.Errorf("%v allocations per message", got)
	}
}

func FuzzConn(f *testing.F) {
	for _, role := range []roleKind{roleSub, rolePub, roleRouter} {
		for _, name := range []string{"libzmq-4.3.5-pub.hex", "libzmq-4.3.5-sub.hex"} {
			f.Add(string(role), uint16(7), readHex(f, name))
		}
	}
	f.Add("DEALER", uint16(1), append(hello(roleRouter), appendMessage(nil, [][]byte{nil, []byte("seq"), make([]byte, 300)})...))
	f.Fuzz(func(t *testing.T, role string, piece uint16, in []byte) {
		o := options(t, Options{Limits: Limits{MaxFrameBytes: 4096, MaxMessageBytes: 8192, MaxFrames: 4, MaxCommandBytes: 256}})
		s := &script{in: chunked{bytes.NewReader(in), int(piece) + 1}}
		c, err := newConn(context.Background(), s, roleKind(role), o, nil)
		if err != nil {
			return
		}
		defer c.Close()
		if c.role == rolePub {
			c.onSubscribe = func(bool, []byte) error { return nil }
		}
		var m Message
		for {
			if err := c.Recv(&m); err != nil {
				if len(m.Frames()) != 0 {
					t.Error("frames after an error")
				}
				break
			}
			total := 0
			for _, f := range m.Frames() {
				total += len(f)
			}
			if n := len(m.Frames()); n == 0 || n > 4 || total != m.Size() || total > 8192 {
				t.Errorf("%d frames of %d bytes", n, total)
			}
			// A message that is written again reads the same.
			again := &Conn{nc: &script{in: bytes.NewReader(appendMessage(nil, m.Frames()))}, o: o, role: c.role, rbuf: make([]byte, 64)}
			var m2 Message
			if err := again.recv(&m2); err != nil {
				t.Fatal(err)
			}
			if m2.seal(); !cmp.Equal(text(&m), text(&m2)) {
				t.Errorf("%q was read back as %q", text(&m), text(&m2))
			}
		}
		if s.wrote.Len() > 64+256+2*len(in) {
			t.Errorf("%d bytes were written for %d received", s.wrote.Len(), len(in))
		}
	})
}
