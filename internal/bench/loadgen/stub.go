package loadgen

import (
	"bufio"
	"bytes"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// Stub is an engine that answers every request immediately with the same stream of eight
// tokens, at next to no cost: against it a client's own ceiling shows.
type Stub struct {
	ln    net.Listener
	wg    sync.WaitGroup
	mu    sync.Mutex // guards conns and over
	conns map[net.Conn]struct{}
	over  bool
}

// NewStub serves on a listener until Close, which closes it too.
func NewStub(ln net.Listener) *Stub {
	s := &Stub{ln: ln, conns: make(map[net.Conn]struct{})}
	s.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			if s.over {
				c.Close()
			}
			s.conns[c] = struct{}{}
			s.mu.Unlock()
			s.wg.Go(func() { s.serve(c) })
		}
	})
	return s
}

// Close ends all connections and waits for their goroutines.
func (s *Stub) Close() {
	s.ln.Close()
	s.mu.Lock()
	s.over = true
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

var stubAnswer = func() []byte {
	body := strings.Repeat(`data: {"choices":[{"index":0,"text":" a","finish_reason":null}]}`+"\n\n", 8) + "data: [DONE]\n\n"
	return []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body)
}()

func (s *Stub) serve(c net.Conn) {
	defer func() {
		c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	br := bufio.NewReaderSize(c, 16<<10)
	for {
		length := 0
		for {
			line, err := br.ReadSlice('\n')
			if err != nil {
				return
			}
			if len(line) <= 2 {
				break
			}
			if v, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
				if length, err = strconv.Atoi(string(bytes.TrimSpace(v))); err != nil {
					return
				}
			}
		}
		if _, err := br.Discard(length); err != nil {
			return
		}
		if _, err := c.Write(stubAnswer); err != nil {
			return
		}
	}
}

// repeated sends one body again and again.
type repeated struct{ left atomic.Int64 }

// Repeated is a source of n equal small requests, for a Stub.
func Repeated(n int) Source {
	r := &repeated{}
	r.left.Store(int64(n))
	return r
}

// Fill makes the next request.
func (r *repeated) Fill(_ int, q *Request) bool {
	if r.left.Add(-1) < 0 {
		return false
	}
	q.ISL, q.OSL = 8, 8
	q.Body = append(q.Body[:0], `{"model":"stub","prompt":[1,2,3,4,5,6,7,8],"max_tokens":8,"stream":true}`...)
	return true
}
