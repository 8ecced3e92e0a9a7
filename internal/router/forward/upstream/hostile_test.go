package upstream

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// What a hostile engine does with a request: one of each group, by the bits of a
// byte. Answers hold the id of the request that they answer, so that a client
// sees whose it has got.
const (
	hostileCut   = 1 << 0 // closes within the answer
	hostileEarly = 1 << 1 // answers before it has read the body
	hostileHint  = 1 << 2 // interim answers first
	hostileJunk  = 1 << 3 // another answer behind the answer
	hostileClose = 1 << 4 // closes after the answer
	hostileFrame = 3 << 5 // how the body is framed
	hostileHead  = 1 << 7 // a body where there may be none (HEAD, 204)
)

// corked sends what is written with one write, so that nothing of it is still
// on its way when a client has read the beginning.
type corked struct {
	net.Conn
	out bytes.Buffer
}

func (c *corked) Write(p []byte) (int, error) { return c.out.Write(p) }

func (c *corked) flush() {
	_, _ = c.Conn.Write(c.out.Bytes()) // a client that is gone is no news
	c.out.Reset()
}

// hostile answers the requests of one connection.
func hostile(raw net.Conn, conf *tls.Config) {
	defer func() { _ = raw.Close() }()
	cork := &corked{Conn: raw}
	var c net.Conn = cork
	if conf != nil {
		tc := tls.Server(raw, conf)
		if tc.Handshake() != nil {
			return
		}
		// The handshake wants its answers at once.
		cork = &corked{Conn: tc}
		c = cork
	}
	br := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		var does byte
		_, _ = fmt.Sscanf(req.Header.Get("X-Does"), "%d", &does)
		id, status := req.Header.Get("X-Id"), req.Header.Get("X-Status")
		if req.Header.Get("X-Slow") != "" {
			// The client may have sent all of it, and listens by now.
			late := time.NewTimer(time.Millisecond)
			<-late.C
		}
		if does&hostileEarly == 0 {
			if body, err := io.ReadAll(req.Body); err != nil || !strings.HasPrefix(string(body), id) {
				return
			}
		}
		answer := "HTTP/1.1 " + status + " Reason\r\nX-Id: " + id + "\r\nConnection: x-hop, keep-alive\r\nX-Hop: " + id + "\r\n"
		none := req.Method == http.MethodHead
		if does&hostileHead != 0 && !none {
			answer, none = strings.Replace(answer, status, "204", 1), true
		}
		ends := false
		switch frame := does & hostileFrame >> 5; {
		case none:
			answer += fmt.Sprintf("Content-Length: %d\r\n\r\n", len(id))
			if does&hostileHead != 0 {
				answer += id
			}
		case frame == 0:
			answer += fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(id), id)
		case frame == 1:
			answer += fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(id), id)
		case frame == 2:
			answer += fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n1;a=b\r\n%s\r\n%x\r\n%s\r\n0\r\nX-Trailer: HTTP/1.1 200 OK\r\n\r\n", id[:1], len(id)-1, id[1:])
		default:
			answer, ends = answer+"\r\n"+id, true
		}
		if does&hostileHint != 0 {
			answer = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-Id: hint\r\n\r\n" + answer
		}
		if does&hostileCut != 0 {
			cut := int(does) * 7 % len(answer)
			if strings.Contains(answer[cut:], "\r\n\r\n") || !ends { // else the cut would not be seen
				answer, ends = answer[:cut], true
			}
		} else if does&hostileJunk != 0 && !ends {
			answer += "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\njunk"
		}
		_, _ = io.WriteString(c, answer)
		cork.flush()
		if ends || does&(hostileClose|hostileEarly) != 0 {
			return
		}
	}
}

// FuzzHostileEngine: whatever an engine does with its connections, plain or TLS,
// every client gets the answer to its own request or a failure that says so, and
// one that was answered well over a fresh connection has its answer.
func FuzzHostileEngine(f *testing.F) {
	// In a binary built for fuzzing, RSA and the hybrid key exchange take nearly
	// all of the time.
	certFile, keyFile, roots := certificate(f)
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		f.Fatal(err)
	}
	curves := []tls.CurveID{tls.X25519}
	// Many short scripts: what a request meets, the few before it have left.
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 1))
		script := make([]byte, 11+seed/2%2) // the length chooses the version of TLS
		for i := range script {
			if script[i] = byte(rng.Uint32()); rng.IntN(2) == 0 {
				script[i] &= hostileFrame | hostileHint | hostileJunk // an engine that goes on
			}
		}
		f.Add(script, seed%2 == 0)
	}
	f.Fuzz(func(t *testing.T, script []byte, secure bool) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		scheme, conf := "http", (*tls.Config)(nil)
		if secure {
			scheme, conf = "https", &tls.Config{Certificates: []tls.Certificate{cert}, CurvePreferences: curves, MinVersion: tls.VersionTLS12}
			if len(script)%2 == 0 {
				conf.MaxVersion = tls.VersionTLS12
			}
		}
		var wg sync.WaitGroup
		defer wg.Wait()
		defer func() { _ = ln.Close() }()
		wg.Go(func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				wg.Go(func() { hostile(c, conf) })
			}
		})
		client := New(Options{IdleConn: time.Minute, TLS: func() *tls.Config {
			return &tls.Config{RootCAs: roots, CurvePreferences: curves, MinVersion: tls.VersionTLS12}
		}})
		defer client.Close()
		client.earlyAfter = 0 // else a slow engine costs this much with each request
		for i, does := range script[:min(len(script), 24)] {
			id := fmt.Sprintf("request-%d", i)
			leg := legTo(t, scheme+"://"+ln.Addr().String())
			status := []int{200, 400, 413, 503}[(int(does)*5+i)%4]
			leg.Set = []HeaderField{{"X-Does", fmt.Sprint(does)}, {"X-Id", id}, {"X-Status", fmt.Sprint(status)}}
			if (int(does)+i)%3 == 0 {
				leg.Set = append(leg.Set, HeaderField{"X-Slow", "1"})
			}
			leg.Body = [][]byte{[]byte(id), make([]byte, int(does)%3*50_000)}
			if does&hostileHead != 0 && i%2 == 0 {
				leg.Method, leg.Body = http.MethodHead, nil
				leg.Set[0].Value = fmt.Sprint(does | hostileEarly) // there is no body to read
			} else if does&hostileHead != 0 {
				status = http.StatusNoContent
			}
			honest := does&(hostileCut|hostileEarly|hostileHead) == 0
			r, err := client.Do(t.Context(), leg)
			var body []byte
			if err == nil {
				body, err = r.ReadAll(1 << 20)
				h := http.Header{}
				r.Header.CopyTo(h)
				if got := r.Header.Get("X-Id"); got != id || r.Status != status {
					t.Errorf("%s (%08b) got the head of %s, status %d, want %d", id, does, got, r.Status, status)
				}
				none := r.Status == http.StatusNoContent || leg.Method == http.MethodHead
				if !none && !strings.HasPrefix(id, string(body)) {
					t.Errorf("%s (%08b) got another's body: %d %v %q, %v", id, does, r.Status, h, body, err)
				}
				if err == nil && len(body) > 0 && string(body) != id {
					t.Errorf("%s (%08b) got a part without an error: %d %v %q", id, does, r.Status, h, body)
				}
				if h.Get("X-Hop") != "" {
					t.Errorf("%s: a header of the engine's connection goes on: %v", id, h)
				}
				r.Close()
			}
			fail := new(Failure)
			if err != nil && (!errors.As(err, &fail) || fail.Kind != Reset && fail.Kind != Protocol) {
				t.Errorf("%s (%08b): %v", id, does, err)
			}
			if honest && err != nil && !fail.Reused {
				t.Errorf("%s (%08b) was answered: %v", id, does, err)
			}
		}
	})
}
