package sockets

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// The side channel is the TCP link over which simulated engines move KV: a decode rank reads
// the contents of a prefill rank's blocks, and an LMCache prefill pushes them to its decode.
//
// It stands in for NIXL's side channel and its memory registration, of which
// only the observable behaviour is kept: a link is made once per remote engine
// id and remembered, an unknown port costs five seconds, blocks are read by
// number whoever they belong to. The wire is this program's own:
//
//	frame    = len32be body                  ; at most MaxFrame bytes of JSON
//	request  = {"op": "hello" | "read" | "beat" | "done" | "put" | "register" | "write" | "take", …}
//	response = {"error"?, …}                 ; one per request, in order

// MaxFrame is the largest frame in bytes, enough for a million blocks.
const MaxFrame = 64 << 20

// The operations.
const (
	OpHello = "hello"
	OpRead  = "read"
	OpBeat  = "beat"
	OpDone  = "done"
	OpPut   = "put"
	// OpRegister asks for the last Want blocks of a request, to be written to the
	// engine at From; OpWrite brings them, or the Problem why none come. With Transfer the
	// request is known by that name, RequestID is the asking engine's own.
	OpRegister = "register"
	OpWrite    = "write"
	// OpTake asks for the blocks Seqs that are offered under the name RequestID.
	OpTake = "take"
)

// Request is a question on the side channel.
type Request struct {
	Op        string          `json:"op"`
	RequestID string          `json:"request_id,omitempty"`
	Blocks    []int           `json:"blocks,omitempty"`
	Seqs      []uint64        `json:"seqs,omitempty"`
	Contents  []cache.Content `json:"contents,omitempty"`
	Want      int             `json:"want,omitempty"`
	From      *Target         `json:"from,omitempty"`
	Transfer  string          `json:"transfer,omitempty"`
	Problem   string          `json:"problem,omitempty"`
}

// Response is its answer.
type Response struct {
	Error    string          `json:"error,omitempty"`
	EngineID string          `json:"engine_id,omitempty"`
	TPSize   int             `json:"tp_size,omitempty"`
	Version  string          `json:"version,omitempty"`
	Contents []cache.Content `json:"contents,omitempty"`
}

// Server answers the requests of other engines.
type Server struct {
	ln     net.Listener
	handle func(Request) Response
	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
	wg     sync.WaitGroup
}

// maxConns bounds the peers of a Server.
const maxConns = 1024

// Serve answers at addr until Close. handle is called from many goroutines.
func Serve(ctx context.Context, addr string, handle func(Request) Response) (*Server, error) {
	ln, err := Listen(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("side channel: %w", err)
	}
	s := &Server{ln: ln, handle: handle, conns: make(map[net.Conn]struct{})}
	s.wg.Go(s.accept)
	return s, nil
}

// Addr is the bound address.
func (s *Server) Addr() *net.TCPAddr { return s.ln.Addr().(*net.TCPAddr) }

// Close disconnects everyone and joins the server's goroutines.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	err := s.ln.Close()
	for c := range s.conns {
		_ = c.Close() // its reader reports nothing to anyone
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

func (s *Server) accept() {
	for {
		c, err := s.ln.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.closed || len(s.conns) >= maxConns {
			s.mu.Unlock()
			_ = c.Close()
			continue
		}
		s.conns[c] = struct{}{}
		s.wg.Go(func() { s.serve(c) })
		s.mu.Unlock()
	}
}

func (s *Server) serve(c net.Conn) {
	defer func() {
		_ = c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	br := bufio.NewReader(c)
	for {
		var q Request
		if readFrame(br, &q) != nil {
			return
		}
		if writeFrame(c, s.handle(q)) != nil {
			return
		}
	}
}

func readFrame(r io.Reader, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > MaxFrame {
		return fmt.Errorf("side channel: frame of %d bytes", n)
	}
	body, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err != nil {
		return err
	}
	if len(body) < int(n) {
		return io.ErrUnexpectedEOF
	}
	return json.Unmarshal(body, v)
}

func writeFrame(w io.Writer, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(body) > MaxFrame {
		return fmt.Errorf("side channel: frame of %d bytes", len(body))
	}
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body)))
	_, err = w.Write(append(b, body...))
	return err
}

// Links are the remote engines that one engine knows. It is safe for
// concurrent use.
type Links struct {
	// Patience is how long an unknown engine's port is tried; 0 means 5 s.
	Patience time.Duration
	// Version must be that of the remote engine, unless one of both is "": NIXL's handshake
	// compares a hash of it and more.
	Version string

	mu    sync.Mutex
	links map[string]*link
}

// maxLinks bounds the remembered engines; restarted engines leave theirs behind.
const maxLinks = 4096

type link struct {
	addr string
	mu   sync.Mutex // held during an exchange
	conn net.Conn
	br   *bufio.Reader
}

// ErrRefused is an answer that says no, as opposed to no answer.
var ErrRefused = errors.New("refused by the remote engine")

// Target is a remote engine to talk to.
type Target struct {
	EngineID string
	Host     string
	Port     int
	// TPSize must match on first contact unless it is 0.
	TPSize int
}

// Call sends one request to the remote engine and returns its answer. On first
// contact with the engine id it dials and shakes hands; afterwards host, port
// and TP size of the target do not matter.
func (l *Links) Call(ctx context.Context, t Target, q Request) (Response, error) {
	k, err := l.connect(ctx, t)
	if err != nil {
		return Response{}, err
	}
	return k.exchange(ctx, t.EngineID, q)
}

// Close closes all links.
func (l *Links) Close() {
	l.mu.Lock()
	links := l.links
	l.links = nil
	l.mu.Unlock()
	for _, k := range links {
		k.mu.Lock()
		k.drop()
		k.mu.Unlock()
	}
}

func (l *Links) connect(ctx context.Context, t Target) (*link, error) {
	l.mu.Lock()
	k := l.links[t.EngineID]
	l.mu.Unlock()
	if k != nil {
		return k, nil
	}
	patience := cmp.Or(max(l.Patience, 0), 5*time.Second)
	k = &link{addr: net.JoinHostPort(t.Host, strconv.Itoa(t.Port))}
	give := time.NewTimer(patience)
	defer give.Stop()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for {
		hello, err := k.dial(ctx)
		if err == nil {
			if hello.EngineID != t.EngineID {
				k.drop()
				return nil, fmt.Errorf("engine %s answers at %s, not %s", hello.EngineID, k.addr, t.EngineID)
			}
			if l.Version != "" && hello.Version != "" && l.Version != hello.Version {
				k.drop()
				return nil, fmt.Errorf("NIXL compatibility hash mismatch: engine %s is of version %s, this one of %s", t.EngineID, hello.Version, l.Version)
			}
			if t.TPSize != 0 && t.TPSize != hello.TPSize {
				k.drop()
				return nil, fmt.Errorf("engine %s has TP size %d, not %d", t.EngineID, hello.TPSize, t.TPSize)
			}
			break
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-give.C:
			return nil, fmt.Errorf("nothing answers at %s: %w", k.addr, err)
		case <-again.C:
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if had := l.links[t.EngineID]; had != nil {
		k.drop()
		return had, nil
	}
	if l.links == nil {
		l.links = make(map[string]*link)
	}
	if len(l.links) >= maxLinks {
		for id, old := range l.links { // any one: the dead ones are the most
			delete(l.links, id)
			if old.mu.TryLock() { // in use: its user closes nothing, the remote end will
				old.drop()
				old.mu.Unlock()
			}
			break
		}
	}
	l.links[t.EngineID] = k
	return k, nil
}

// dial connects and asks who is there.
func (k *link) dial(ctx context.Context) (Response, error) {
	d := net.Dialer{Timeout: 2 * time.Second}
	c, err := d.DialContext(ctx, "tcp", k.addr)
	if err != nil {
		return Response{}, err
	}
	k.conn, k.br = c, bufio.NewReader(c)
	hello, err := k.send(ctx, Request{Op: OpHello})
	if err != nil {
		k.drop()
	}
	return hello, err
}

func (k *link) drop() {
	if k.conn != nil {
		_ = k.conn.Close()
		k.conn, k.br = nil, nil
	}
}

func (k *link) send(ctx context.Context, q Request) (Response, error) {
	c := k.conn
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var a Response
	if err := writeFrame(c, q); err != nil {
		return a, err
	}
	if err := readFrame(k.br, &a); err != nil {
		return a, err
	}
	if a.Error != "" {
		return a, fmt.Errorf("%w: %s", ErrRefused, a.Error)
	}
	return a, nil
}

func (k *link) exchange(ctx context.Context, engineID string, q Request) (Response, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn == nil {
		hello, err := k.dial(ctx)
		if err != nil {
			return hello, fmt.Errorf("link to engine %s at %s: %w", engineID, k.addr, err)
		}
		if hello.EngineID != engineID {
			k.drop()
			return hello, fmt.Errorf("engine %s is gone from %s", engineID, k.addr)
		}
	}
	a, err := k.send(ctx, q)
	if err != nil && !errors.Is(err, ErrRefused) {
		k.drop()
		err = fmt.Errorf("link to engine %s at %s: %w", engineID, k.addr, err)
	}
	return a, err
}
