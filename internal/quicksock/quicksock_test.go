package quicksock

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// pair is a direct connection and its plain peer.
func pair(t testing.TB) (direct net.Conn, peer *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		if direct, err = Listen(ln).Accept(); err != nil {
			t.Error(err)
		}
	})
	nc, derr := net.Dial("tcp", ln.Addr().String())
	wg.Wait()
	if derr != nil || direct == nil {
		t.Fatal(derr)
	}
	t.Cleanup(func() { _ = direct.Close(); _ = nc.Close() })
	return direct, nc.(*net.TCPConn)
}

func TestBytesArriveWhole(t *testing.T) {
	c, peer := pair(t)
	for _, size := range []int{1, 100, 32 << 10, 1 << 20} {
		want := bytes.Repeat([]byte{byte(size), 1, 2, 3, 5, 7, 11}, size/7+1)[:size]
		var got []byte
		var wg sync.WaitGroup
		wg.Go(func() {
			got = make([]byte, size)
			if _, err := io.ReadFull(peer, got); err != nil {
				t.Error(err)
			}
			if _, err := peer.Write(got); err != nil {
				t.Error(err)
			}
		})
		// More than the socket takes at once, in pieces of a size that is
		// written directly: waiting for room is part of it.
		for rest := want; len(rest) > 0; {
			n, err := c.Write(rest[:min(len(rest), 32<<10)])
			if err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		back := make([]byte, size)
		if _, err := io.ReadFull(c, back); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if !bytes.Equal(got, want) || !bytes.Equal(back, want) {
			t.Fatalf("%d bytes arrived changed", size)
		}
	}
}

func TestVectoredWritesAreKept(t *testing.T) {
	c, peer := pair(t)
	bufs := net.Buffers{[]byte("head "), []byte("body")}
	if _, err := bufs.WriteTo(c); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 9)
	if _, err := io.ReadFull(peer, got); err != nil || string(got) != "head body" {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestDeadlineEndsReadAndWrite(t *testing.T) {
	c, _ := pair(t)
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	_, err := c.Read(make([]byte, 8))
	var oe *net.OpError
	if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &oe) || !oe.Timeout() || oe.Op != "read" {
		t.Fatalf("read: %v", err)
	}
	_ = c.SetReadDeadline(time.Time{})
	_ = c.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
	sent := 0
	for err = nil; err == nil; { // nobody reads: the buffers fill up
		var n int
		n, err = c.Write(make([]byte, 8<<10))
		sent += n
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &oe) || oe.Op != "write" || sent == 0 {
		t.Fatalf("write after %d bytes: %v", sent, err)
	}
}

func TestCloseWakesAReader(t *testing.T) {
	c, _ := pair(t)
	entered := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		close(entered)
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("read: %v", err)
		}
	})
	<-entered
	_ = c.Close()
	wg.Wait()
	if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write: %v", err)
	}
}

func TestPeerCloseAndReset(t *testing.T) {
	c, peer := pair(t)
	if _, err := peer.Write([]byte("last")); err != nil {
		t.Fatal(err)
	}
	_ = peer.CloseWrite()
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "last" {
		t.Fatalf("%q, %v", got, err)
	}
	if n, err := c.Read(nil); n != 0 || err != nil {
		t.Fatalf("empty read: %d, %v", n, err)
	}

	c, peer = pair(t)
	_ = peer.SetLinger(0)
	_ = peer.Close()
	if _, err = c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("read after a reset: %v", err)
	}
	for err = nil; err == nil; {
		_, err = c.Write([]byte("x"))
	}
	if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("write after a reset: %v", err)
	}
}

func TestQuiet(t *testing.T) {
	c, peer := pair(t)
	probe := NewProbe(c)
	if !probe.Quiet() {
		t.Fatal("an idle connection is not quiet")
	}
	if _, err := peer.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if !probe.Quiet() {
		t.Fatal("a connection is not quiet after all was read")
	}
	_ = peer.CloseWrite()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if probe.Quiet() {
		t.Fatal("a closed connection is quiet")
	}
}

func TestOnlyTCPIsChanged(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if New(a) != a {
		t.Error("a pipe was wrapped")
	}
}

// BenchmarkEcho is one token's way: a read and a write.
func BenchmarkEcho(b *testing.B) {
	c, peer := pair(b)
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 256)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			if _, err := c.Write(buf[:n]); err != nil {
				return
			}
		}
	})
	b.ReportAllocs()
	msg := make([]byte, 200)
	for b.Loop() {
		if _, err := peer.Write(msg); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(peer, msg); err != nil {
			b.Fatal(err)
		}
	}
	_ = peer.Close()
	wg.Wait()
}

// purse is a Lender that counts what is lent.
type purse struct {
	out   atomic.Int64
	taken chan struct{} // one for each buffer taken
}

func (l *purse) Take() []byte {
	l.out.Add(1)
	l.taken <- struct{}{}
	return make([]byte, 64)
}
func (l *purse) Give([]byte) { l.out.Add(-1) }

func TestWaitingReadHoldsNoMemory(t *testing.T) {
	c, peer := pair(t)
	r, ok := c.(LendingReader)
	if !ok {
		t.Skip("no direct reads here")
	}
	l := &purse{taken: make(chan struct{}, 8)}
	type result struct {
		p   []byte
		n   int
		err error
	}
	done := make(chan result, 1)
	read := func() {
		p, n, err := r.ReadLent(l)
		done <- result{p, n, err}
	}
	go read()
	<-l.taken // it has looked, and found nothing
	for l.out.Load() != 0 {
		runtime.Gosched()
	}
	if _, err := peer.Write([]byte("token")); err != nil {
		t.Fatal(err)
	}
	if got := <-done; got.err != nil || string(got.p[:got.n]) != "token" || l.out.Load() != 1 {
		t.Fatalf("%q, %v, %d lent", got.p[:got.n], got.err, l.out.Load())
	}
	l.Give(nil)

	_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	go read()
	if got := <-done; !errors.Is(got.err, os.ErrDeadlineExceeded) || got.p == nil || l.out.Load() != 1 {
		t.Fatalf("deadline: %v, buffer %v, %d lent", got.err, got.p != nil, l.out.Load())
	}
	l.Give(nil)

	_ = c.SetReadDeadline(time.Time{})
	if err := peer.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	go read()
	if got := <-done; !errors.Is(got.err, io.EOF) || got.p == nil || l.out.Load() != 1 {
		t.Fatalf("end: %v, buffer %v, %d lent", got.err, got.p != nil, l.out.Load())
	}
}

func TestWriteAllWritesEverything(t *testing.T) {
	c, peer := pair(t)
	w, ok := c.(VectorWriter)
	if !ok {
		t.Skip("no direct writes here")
	}
	for name, sizes := range map[string][]int{
		"none": {}, "empty ones": {0, 0}, "one": {5}, "around the limit": {maxVectorBytes - 1, 1, 1, maxVectorBytes, maxVectorBytes + 1},
		"many": slices.Repeat([]int{0, 1, 700, 3}, 100), "more than a socket takes": {100, 3 << 20, 0, 17},
	} {
		var pieces [][]byte
		var want []byte
		for i, n := range sizes {
			p := bytes.Repeat([]byte{byte(i + 1)}, n)
			pieces = append(pieces, p)
			want = append(want, p...)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			got := make([]byte, len(want))
			if _, err := io.ReadFull(peer, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s: %d bytes arrived changed, %v", name, len(want), err)
			}
		})
		n, err := w.WriteAll(pieces)
		wg.Wait()
		if err != nil || n != int64(len(want)) {
			t.Fatalf("%s: wrote %d of %d, %v", name, n, len(want), err)
		}
	}
	much := [][]byte{make([]byte, 64<<20)}
	_ = c.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
	n, err := w.WriteAll(much) // nobody reads
	if !errors.Is(err, os.ErrDeadlineExceeded) || n == 0 || n == 64<<20 {
		t.Fatalf("wrote %d, %v", n, err)
	}
	_ = c.Close()
	if _, err := w.WriteAll([][]byte{{1}}); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("closed: %v", err)
	}
}
