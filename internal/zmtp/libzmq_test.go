package zmtp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/rig/external"
)

// peer is a libzmq socket in a Python process; see testdata/peer.py.
type peer struct {
	t        testing.TB
	cmd      *exec.Cmd
	in       io.WriteCloser
	lines    chan string
	endpoint string
}

func startPeer(t testing.TB, args ...string) *peer {
	t.Helper()
	cmd := exec.Command(external.Python(t, "zmq"), append([]string{filepath.Join("testdata", "peer.py")}, args...)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &peer{t: t, cmd: cmd, in: in, lines: make(chan string, 1000)}
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(p.lines)
		for sc := bufio.NewScanner(out); sc.Scan(); {
			select {
			case p.lines <- sc.Text():
			default: // nobody waits for so many
			}
		}
	})
	t.Cleanup(func() {
		p.stop()
		reader.Wait()
		_ = cmd.Wait() // it was killed
		if t.Failed() && stderr.Len() > 0 {
			t.Log(stderr.String())
		}
	})
	p.endpoint = strings.TrimPrefix(p.line(), "ready ")
	return p
}

func (p *peer) stop() { _ = p.cmd.Process.Kill() }

func (p *peer) line() string {
	p.t.Helper()
	select {
	case l, ok := <-p.lines:
		if !ok {
			p.t.Fatal("the libzmq peer ended")
		}
		return l
	case <-time.After(10 * time.Second):
		p.t.Fatal("the libzmq peer says nothing")
	}
	return ""
}

func (p *peer) command(format string, args ...any) {
	p.t.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		p.t.Fatal(err)
	}
}

// hangUp ends what waits at a connection whose peer says nothing for long.
func hangUp(c *Conn) (stop func()) {
	stuck := time.AfterFunc(20*time.Second, func() { _ = c.Close() })
	return func() { stuck.Stop() }
}

// expect receives n messages of the given topic and size, with sequences
// increasing by one, and returns the last one. libzmq may not know of the
// subscription at the first publication, so p is commanded to publish until
// something comes.
func expect(t *testing.T, p *peer, c *Conn, n, size int, topic string) uint64 {
	t.Helper()
	defer hangUp(c)()
	first := make(chan struct{})
	var commander sync.WaitGroup
	commander.Go(func() {
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			select {
			case <-first:
				tick.Stop()
				return
			case <-tick.C:
				fmt.Fprintf(p.in, "send 1 %d %s\nsend 1 %d zz\n", size, topic, size)
			}
		}
	})
	var m Message
	err := c.Recv(&m)
	close(first)
	commander.Wait()
	if err != nil {
		t.Fatal(err)
	}
	p.command("send %d %d %s", n, size, topic)
	last := binary.BigEndian.Uint64(m.Frames()[1])
	for run := 1; run < n; {
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
		f := m.Frames()
		if len(f) != 3 || string(f[0]) != topic || len(f[2]) != size {
			t.Fatalf("message %d: %d frames, topic %q", last, len(f), f[0])
		}
		if seq := binary.BigEndian.Uint64(f[1]); seq == last+1 {
			run++
			last = seq
		} else if seq == last+2 { // the other topic was in between
			run = 1
			last = seq
		} else {
			t.Fatalf("sequence %d after %d", seq, last)
		}
	}
	return last
}

// TestLibzmqPubBinds also restarts the publisher: the Conn ends, and a new one
// to the same endpoint works and starts at the publisher's first sequences.
func TestLibzmqPubBinds(t *testing.T) {
	p := startPeer(t, "pub-bind", "tcp://127.0.0.1:*")
	endpoint := p.endpoint
	for life := range 2 {
		c := opened(t, DialSub, endpoint, Options{Topics: []string{"kv@"}})
		if last := expect(t, p, c, 500, 700, "kv@pod@model"); last > 2000 {
			t.Errorf("life %d ends at sequence %d", life, last)
		}
		p.stop()
		stop := hangUp(c)
		var err error
		for err == nil { // what was on its way
			err = c.Recv(new(Message))
		}
		stop()
		if errors.Is(err, ErrProtocol) || errors.Is(err, ErrClosed) {
			t.Errorf("end of the publisher: %v", err)
		}
		if life == 0 {
			p = startPeer(t, "pub-bind", endpoint)
		}
	}
}

func TestLibzmqPubConnects(t *testing.T) {
	l := opened(t, ListenSub, "tcp://127.0.0.1:0", Options{})
	for range 2 {
		p := startPeer(t, "pub-connect", l.Endpoint())
		c, err := l.Accept(within(t))
		if err != nil {
			t.Fatal(err)
		}
		expect(t, p, c, 50, 100_000, "zz")
		// The peer ends first: while it lives it connects again, and would be
		// taken for the next one.
		p.stop()
		stop := hangUp(c)
		for err == nil {
			err = c.Recv(new(Message))
		}
		stop()
		c.Close()
	}
}

func TestLibzmqIPC(t *testing.T) {
	p := startPeer(t, "pub-bind", "ipc://"+filepath.Join(t.TempDir(), "p"))
	c := opened(t, DialSub, p.endpoint, Options{Topics: []string{"kv"}})
	expect(t, p, c, 20, 10, "kv")
	ours := listenPub(t, "ipc://"+filepath.Join(t.TempDir(), "o"), Options{})
	s := startPeer(t, "sub-connect", ours.Endpoint(), "kv")
	if err := ours.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	ours.Send([]byte("kv"), make([]byte, 8), []byte("abc"))
	if got := s.line(); got != "got kv 0 3" {
		t.Errorf("libzmq %s", got)
	}
}

// TestLibzmqHeartbeats sets libzmq's heartbeats to 60 ms, with ten times that for
// an answer. Without our PONGs it would drop the link twice while we are silent for
// 1.5 s.
func TestLibzmqHeartbeats(t *testing.T) {
	p := startPeer(t, "pub-bind", "tcp://127.0.0.1:*", "60")
	c := opened(t, DialSub, p.endpoint, Options{Topics: []string{"kv"}, Heartbeat: 100 * time.Millisecond, HeartbeatTimeout: 5 * time.Second})
	defer hangUp(c)()
	timer := time.AfterFunc(1500*time.Millisecond, func() { p.command("send 1 5 kv") })
	defer timer.Stop()
	var m Message
	if err := c.Recv(&m); err != nil || string(m.Frames()[0]) != "kv" {
		t.Errorf("after silence: %q, %v", text(&m), err)
	}
	select {
	case l := <-p.lines:
		t.Errorf("libzmq says %q", l)
	default:
	}

	ours := listenPub(t, "tcp://127.0.0.1:0", Options{})
	s := startPeer(t, "sub-connect", ours.Endpoint(), "kv", "60")
	if err := ours.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	select {
	case l := <-s.lines:
		t.Errorf("libzmq's SUB says %q", l)
	case <-time.After(1500 * time.Millisecond):
	}
	if got := ours.Stats(); got.Accepted != 1 || got.Failed != 0 {
		t.Errorf("stats %+v", got)
	}
}

func TestLibzmqSubscribers(t *testing.T) {
	p := listenPub(t, "tcp://127.0.0.1:0", Options{})
	s := startPeer(t, "sub-connect", p.Endpoint(), "kv@")
	b := startPeer(t, "sub-bind", "tcp://127.0.0.1:*", "")
	d := opened(t, DialPub, b.endpoint, Options{})
	for pub, want := range map[*Pub][]string{p: {"got kv@x 1 0", "got kv@y 3 300"}, d: {"got other 0 0", "got kv@x 1 0", "got - 2 200", "got kv@y 3 300"}} {
		if err := pub.WaitSubscribers(within(t), 1); err != nil {
			t.Fatal(err)
		}
		for i, topic := range []string{"other", "kv@x", "", "kv@y"} {
			pub.Send([]byte(topic), binary.BigEndian.AppendUint64(nil, uint64(i)), make([]byte, i/2*i*100))
		}
		from := s
		if pub == d {
			from = b
		}
		for _, w := range want {
			if got := from.line(); got != w {
				t.Errorf("libzmq %s, want %s", got, w)
			}
		}
	}
}

func TestLibzmqReplay(t *testing.T) {
	r := startPeer(t, "router", "tcp://127.0.0.1:*")
	c := opened(t, DialDealer, r.endpoint, Options{})
	defer hangUp(c)()
	if c.PeerType() != "ROUTER" {
		t.Errorf("peer is %s", c.PeerType())
	}
	for _, start := range []uint64{7, 9, 12} {
		if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, start)); err != nil {
			t.Fatal(err)
		}
		for seq := start; seq < 10; seq++ {
			recv(t, c, "", "kv", string(binary.BigEndian.AppendUint64(nil, seq)), "payload")
		}
		recv(t, c, "", "", strings.Repeat("\xff", 8), "")
	}
}

func TestLibzmqDealer(t *testing.T) {
	r, err := ListenRouter(t.Context(), "tcp://127.0.0.1:0", Options{}, serveReplay)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	d := startPeer(t, "dealer", r.Endpoint())
	d.command("replay 258")
	var got []string
	for range 3 {
		got = append(got, d.line())
	}
	if diff := cmp.Diff([]string{"answer - 0000000000000102 aa", "answer - 0000000000000103 aa", "answer - ffffffffffffffff -"}, got); diff != "" {
		t.Errorf("want - got +:\n%s", diff)
	}
	d.stop()
}

// serveReplay answers each request by two batches and the end marker.
func serveReplay(_ context.Context, c *Conn) error {
	var m Message
	for {
		if err := c.Recv(&m); err != nil {
			return err
		}
		start := binary.BigEndian.Uint64(m.Frames()[1])
		for i := range uint64(2) {
			if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, start+i), []byte{0xaa}); err != nil {
				return err
			}
		}
		if err := c.Send(nil, []byte(strings.Repeat("\xff", 8)), nil); err != nil {
			return err
		}
	}
}
