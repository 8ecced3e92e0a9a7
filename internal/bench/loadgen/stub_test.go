package loadgen

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// stub is an engine that costs next to nothing: raw sockets and canned parts.
type stub struct {
	ln net.Listener
	wg sync.WaitGroup
	mu sync.Mutex
	cs map[net.Conn]bool
	// parts are the writes of one answer; before, when set, is called ahead of
	// each with the numbers of the request and the part.
	parts  func(n int, req string) []string
	before func(n, part int)
	number int
	seen   []string // requests, when keep is set
	keep   bool
	limit  int // answers of one connection before it is closed; 0 never
}

func startStub(t testing.TB, s *stub) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.ln, s.cs = ln, make(map[net.Conn]bool)
	s.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.cs[c] = true
			s.mu.Unlock()
			s.wg.Go(func() { s.serve(c) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		s.mu.Lock()
		for c := range s.cs {
			c.Close()
		}
		s.mu.Unlock()
		s.wg.Wait()
	})
	return "http://" + ln.Addr().String()
}

func (s *stub) serve(c net.Conn) {
	defer c.Close()
	br := bufio.NewReaderSize(c, 64<<10)
	for served := 0; ; served++ {
		length := 0
		var head strings.Builder
		for {
			line, err := br.ReadSlice('\n')
			if err != nil {
				return
			}
			if s.keep {
				head.Write(line)
			}
			if len(line) <= 2 {
				break
			}
			if v, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
				length, _ = strconv.Atoi(strings.TrimSpace(string(v)))
			}
		}
		var body string
		if s.keep {
			b := make([]byte, length)
			for n := 0; n < length; {
				k, err := br.Read(b[n:])
				if err != nil {
					return
				}
				n += k
			}
			body = string(b)
		} else if _, err := br.Discard(length); err != nil {
			return
		}
		s.mu.Lock()
		n := s.number
		s.number++
		if s.keep {
			s.seen = append(s.seen, head.String()+body)
		}
		s.mu.Unlock()
		for i, p := range s.parts(n, body) {
			if s.before != nil {
				s.before(n, i)
			}
			if p == "CLOSE" {
				return
			}
			if _, err := c.Write([]byte(p)); err != nil {
				return
			}
		}
		if s.limit > 0 && served+1 >= s.limit {
			return
		}
	}
}

const okHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Dynctl-Path: local\r\nX-Dynctl-Decision: d-1\r\nTransfer-Encoding: chunked\r\n\r\n"

func chunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

func token(text string) string {
	return `data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"` + text + `","finish_reason":null}]}` + "\n\n"
}

func counted(text string, total int) string {
	return fmt.Sprintf(`data: {"id":"c","choices":[{"index":0,"text":%q,"finish_reason":null}],"usage":{"prompt_tokens":7,"completion_tokens":%d}}`+"\n\n", text, total)
}

func tail(n int) string {
	return fmt.Sprintf(`data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":2}}}`+"\n\ndata: [DONE]\n\n", n)
}

// answer is a whole stream of n tokens in two writes.
func answer(n int) []string {
	var b strings.Builder
	for range n - 1 {
		b.WriteString(chunk(token(" x")))
	}
	b.WriteString(chunk(tail(n)))
	b.WriteString("0\r\n\r\n")
	return []string{okHead + chunk(token("a")), b.String()}
}
