package e2e

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// tap is a listener before an engine that passes bytes on as they come, the end of a
// connection and its reset included, and keeps what was asked for and answered.
type tap struct {
	engine string // its address
	url    string
	wg     sync.WaitGroup
	mu     sync.Mutex // guards what follows
	conns  map[net.Conn]bool
	all    []*tapped
	closed bool
}

// tapped is one request to an engine and its answer, as far as it came.
type tapped struct {
	id, path     string
	body, answer []byte
	done         chan struct{} // closed when the answer has ended, or was cut
}

func startTap(t *testing.T, url string) *tap {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &tap{engine: strings.TrimPrefix(url, "http://"), url: "http://" + l.Addr().String(), conns: map[net.Conn]bool{}}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.pass(c.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.mu.Lock()
		p.closed = true
		for c := range p.conns {
			_ = c.Close()
		}
		p.mu.Unlock()
		p.wg.Wait()
	})
	return p
}

// keep has a connection closed at the end of the test.
func (p *tap) keep(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = true
	if p.closed {
		_ = c.Close()
	}
}

func (p *tap) drop(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// pass carries one connection.
func (p *tap) pass(client *net.TCPConn) {
	p.keep(client)
	defer p.drop(client)
	defer client.Close()
	c, err := net.Dial("tcp", p.engine)
	if err != nil {
		_ = client.SetLinger(0) // the nearest to a refused connection
		return
	}
	engine := c.(*net.TCPConn)
	p.keep(engine)
	defer p.drop(engine)
	defer engine.Close()
	type asked struct {
		q *http.Request
		e *tapped
	}
	queue := make(chan asked, 16)
	p.wg.Go(func() {
		defer close(queue)
		defer engine.CloseWrite()
		in := bufio.NewReader(io.TeeReader(client, engine))
		for {
			q, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			body, err := io.ReadAll(q.Body)
			if err != nil {
				return
			}
			e := &tapped{id: q.Header.Get("X-Request-Id"), path: q.URL.Path, body: body, done: make(chan struct{})}
			if strings.HasSuffix(e.path, "/completions") {
				p.mu.Lock()
				p.all = append(p.all, e)
				p.mu.Unlock()
			}
			queue <- asked{q, e}
		}
	})
	out := bufio.NewReader(io.TeeReader(engine, client))
	for err = nil; err == nil; {
		if _, err = out.Peek(1); err != nil {
			break
		}
		a, ok := <-queue
		if !ok {
			break
		}
		var resp *http.Response
		if resp, err = http.ReadResponse(out, a.q); err == nil {
			a.e.answer, err = io.ReadAll(resp.Body)
		}
		close(a.e.done)
	}
	if errors.Is(err, syscall.ECONNRESET) {
		_ = client.SetLinger(0)
	}
	_ = client.Close()
	for a := range queue { // they never got an answer
		close(a.e.done)
	}
}

// take returns what a request came to at this engine, and forgets it.
func (p *tap) take(id string) (out []*tapped) {
	p.mu.Lock()
	rest := p.all[:0]
	for _, e := range p.all {
		if e.id == id {
			out = append(out, e)
		} else {
			rest = append(rest, e)
		}
	}
	p.all = rest
	p.mu.Unlock()
	for _, e := range out {
		<-e.done
	}
	return out
}
