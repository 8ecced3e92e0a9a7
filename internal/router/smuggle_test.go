package router_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// smuggling: bytes that a gateway may take for the body of one client's request
// never become a request of their own, nor part of the next one's: they reach no
// engine, and there is one answer at most.
func smuggling(t *testing.T, r *rig, p *tap) {
	const body = `{"model":"sim","prompt":"first","max_tokens":1}`
	hidden := "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 49\r\n\r\n" + `{"model":"sim","prompt":"smuggled","max_tokens":1}`
	chunked := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(body), body)
	request := func(lines ...string) string {
		return "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n"
	}
	length := func(n int) string { return fmt.Sprintf("Content-Length: %d", n) }
	all := len(chunked) + len(hidden)
	for _, c := range []struct{ what, raw string }{
		{"a length that holds chunks and a second request", request(length(all), "Transfer-Encoding: chunked") + chunked + hidden},
		{"chunks first, then a length", request("Transfer-Encoding: chunked", length(all)) + chunked + hidden},
		{"chunks in other letters", request("transfer-encoding: cHuNkEd", length(all)) + chunked + hidden},
		{"chunks behind a tab", request("Transfer-Encoding:\tchunked", length(all)) + chunked + hidden},
		{"a blank before the colon", request("Transfer-Encoding : chunked", length(all)) + chunked + hidden},
		{"a folded encoding", request("Transfer-Encoding:\r\n chunked", length(all)) + chunked + hidden},
		{"two encodings", request("Transfer-Encoding: chunked", "Transfer-Encoding: identity", length(all)) + chunked + hidden},
		{"a list of encodings", request("Transfer-Encoding: identity, chunked", length(all)) + chunked + hidden},
		{"an unknown encoding", request("Transfer-Encoding: xchunked", length(all)) + chunked + hidden},
		{"a vertical tab before the encoding", request("Transfer-Encoding: \vchunked", length(all)) + chunked + hidden},
		{"two lengths", request(length(len(body)), length(all)) + body + hidden},
		{"a list of lengths", request(fmt.Sprintf("Content-Length: %d, %d", len(body), len(body)+len(hidden))) + body + hidden},
		{"a length with a sign", request(fmt.Sprintf("Content-Length: +%d", len(body))) + body + hidden},
		{"a length below zero", request("Content-Length: -1") + body + hidden},
		{"a length in hexadecimal", request(fmt.Sprintf("Content-Length: 0x%x", len(body))) + body + hidden},
		{"a folded length", request(fmt.Sprintf("Content-Length:\r\n %d", len(hidden))) + hidden},
		{"a header that continues", request(length(all), "X: a\r\n Transfer-Encoding: chunked") + chunked + hidden},
		{"bare LF in a header", request(length(0), "X: a\nTransfer-Encoding: chunked") + chunked + hidden},
		{"bare CR in a header", request(length(0), "X: a\rTransfer-Encoding: chunked") + chunked + hidden},
		{"NUL in a header", request(length(0), "X: a\x00b") + hidden},
		{"a chunk with bare LF", request("Transfer-Encoding: chunked") + strings.ReplaceAll(chunked, "\r\n", "\n") + hidden},
		{"a chunk size that overflows", request("Transfer-Encoding: chunked") + "10000000000000001\r\nx\r\n0\r\n\r\n" + hidden},
		{"a chunk with a long extension", request("Transfer-Encoding: chunked") + fmt.Sprintf("%x;%s\r\n%s\r\n0\r\n\r\n", len(body), strings.Repeat("a", 100), body) + hidden},
		{"trailers", request("Transfer-Encoding: chunked", "Trailer: Content-Length") + fmt.Sprintf("%x\r\n%s\r\n0\r\nContent-Length: 5\r\n\r\n", len(body), body) + hidden},
		{"HTTP/1.0 with chunks", strings.Replace(request("Connection: keep-alive", "Transfer-Encoding: chunked", length(all)), "HTTP/1.1", "HTTP/1.0", 1) + chunked + hidden},
		{"no version", "POST /v1/completions\r\n\r\n" + hidden},
		{"an upgrade", request("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", "Transfer-Encoding: chunked") + chunked + hidden},
	} {
		t.Run(c.what, func(t *testing.T) {
			p.reset()
			conn := r.dial()
			defer conn.Close()
			if _, err := io.WriteString(conn, c.raw); err != nil {
				t.Fatal(err)
			}
			// One that stays open has nothing left to answer.
			if err := conn.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
				t.Fatal(err)
			}
			in := bufio.NewReader(conn)
			answers := 0
			for {
				resp, err := http.ReadResponse(in, nil)
				if err != nil {
					break // the connection has ended
				}
				answers++
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			for _, l := range p.legs() {
				if bytes.HasPrefix(l.body, []byte(`{"model":"sim","prompt":"smuggled"`)) {
					t.Errorf("the hidden request reached an engine: %q", l.body)
				}
			}
			if answers > 1 {
				t.Errorf("%d answers to what a gateway sent as one request", answers)
			}
		})
	}
	// What is in order stays in order: two requests by length on one connection.
	p.reset()
	conn := r.dial()
	fmt.Fprint(conn, request(length(len(body)))+body+request(length(len(body)))+body)
	in := bufio.NewReader(conn)
	for range 2 {
		resp, err := http.ReadResponse(in, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v %v", resp, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	r.unharmed()
}

// chunkedBodies: a chunked body ends its connection only where a length may stand beside it,
// also where that came with the request before.
func chunkedBodies(t *testing.T, r *rig, _ *tap) {
	const body = `{"model":"sim","prompt":"first","max_tokens":1}`
	const head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	chunks := fmt.Sprintf("7;x=y\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n", body[:7], len(body)-7, body[7:])
	chunked := head + "Transfer-Encoding: chunked\r\n\r\n" + chunks
	length := head + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body)
	both := head + fmt.Sprintf("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n%s", chunks)
	get := "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
	half := len(head) + len("Content-Length: 5\r\n")
	type part struct {
		answers int
		raw     string
	}
	for _, c := range []struct {
		what  string
		sends []part // each after the answers to those before
		stays bool
	}{
		{"chunks", []part{{1, chunked}, {1, chunked}, {1, chunked}}, true},
		{"chunks among others", []part{{1, length}, {1, chunked}, {1, get}, {1, chunked}, {2, length + length}, {1, chunked}}, true},
		{"two requests at once", []part{{2, chunked + chunked}, {1, chunked}}, true},
		{"a length, too", []part{{1, both}}, false},
		{"a length in a later request", []part{{1, chunked}, {1, both}}, false},
		{"a length behind chunks", []part{{1, chunked + both}}, false},
		{"a length behind others", []part{{3, get + length + both}}, false},
		{"a length that came with the request before", []part{{1, get + both[:half]}, {1, both[half:]}}, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			conn := r.dial()
			defer conn.Close()
			in := bufio.NewReader(conn)
			closed := false
			for i, part := range c.sends {
				if _, err := io.WriteString(conn, part.raw); err != nil {
					t.Fatal(err)
				}
				for range part.answers {
					resp, err := http.ReadResponse(in, nil)
					if err != nil || resp.StatusCode != http.StatusOK {
						t.Fatalf("after part %d: %v %v", i, resp, err)
					}
					if _, err := io.Copy(io.Discard, resp.Body); err != nil {
						t.Fatal(err)
					}
					resp.Body.Close()
					closed = resp.Close
				}
			}
			if closed == c.stays {
				t.Errorf("the last answer ends the connection: %v", closed)
			}
			if !c.stays {
				if n, err := io.WriteString(conn, get); err == nil && n > 0 {
					if resp, err := http.ReadResponse(in, nil); err == nil {
						resp.Body.Close()
						t.Errorf("%s to what follows", resp.Status)
					}
				}
			}
		})
	}
	r.unharmed()
}

// otherVersions: a client that begins with HTTP/2 gets an error in words.
func otherVersions(t *testing.T, r *rig, _ *tap) {
	c := r.dial()
	fmt.Fprint(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusHTTPVersionNotSupported || !resp.Close || !strings.Contains(string(text), "use HTTP/1.1") {
		t.Errorf("%s %v: %s", resp.Status, resp.Header, text)
	}
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.URL+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	// Go's client names HTTP/1.1 where it reads the answer before the connection's end.
	if resp, err := (&http.Client{Transport: transport}).Do(q); err == nil {
		resp.Body.Close()
		t.Errorf("HTTP/2: %s", resp.Status)
	}
	r.unharmed()
}
