package loadgen

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/quicksock"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
)

// Bounds on an answer.
const (
	readBuffer = 32 << 10
	maxHead    = 64 << 10
	maxKept    = 2 << 10 // bytes of an error's body
)

// endpoint is where requests go.
type endpoint struct {
	addr, host string
	tls        *tls.Config
	prefix     string
	timeout    time.Duration
}

func parseEndpoint(base string, conf *tls.Config) (*endpoint, error) {
	u, err := url.Parse(base)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("%q is not a URL such as http://127.0.0.1:8000", base)
	}
	e := &endpoint{addr: u.Host, host: u.Host, prefix: u.Path, timeout: 5 * time.Second}
	if u.Port() == "" {
		port := "80"
		if u.Scheme == "https" {
			port = "443"
		}
		e.addr = net.JoinHostPort(u.Hostname(), port)
	}
	if u.Scheme == "https" {
		e.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		if conf != nil {
			e.tls = conf.Clone()
		}
		e.tls.NextProtos = []string{"http/1.1"}
		if e.tls.ServerName == "" {
			e.tls.ServerName = u.Hostname()
		}
	}
	e.prefix = strings.TrimRight(e.prefix, "/")
	return e, nil
}

func (e *endpoint) dial() (*conn, error) {
	d := &net.Dialer{Timeout: e.timeout}
	var c net.Conn
	var err error
	if e.tls != nil {
		c, err = tls.DialWithDialer(d, "tcp", e.addr, e.tls)
	} else {
		c, err = d.Dial("tcp", e.addr)
	}
	if err != nil {
		return nil, err
	}
	return &conn{Conn: quicksock.New(c), buf: make([]byte, readBuffer)}, nil
}

// conn is one connection and the memory to read an answer.
type conn struct {
	net.Conn
	buf     []byte
	r, w    int
	scan    sse.Scanner
	pieces  []piece
	kept    []byte
	used    bool // an answer was read on it before
	closing bool // the server will close it
	// until is when it times out. It belongs to who sends on it.
	until time.Duration

	// Of an open loop: the request under way, and that nobody reads any more.
	current atomic.Pointer[call]
	dead    atomic.Bool
}

// piece is a part of a stream that held tokens.
type piece struct {
	at     time.Duration
	tokens int // as continuous usage says, later corrected by finish
	events int // with content
}

var (
	errHead = errors.New("the answer is not HTTP/1.1")
	errCut  = errors.New("the stream was cut before its end")
	errIdle = errors.New("closed while idle")
)

// more reads from the socket; at is when the read returned.
func (c *conn) more(now func() time.Duration) (at time.Duration, err error) {
	if c.r == c.w {
		c.r, c.w = 0, 0
	}
	if c.w == len(c.buf) {
		if c.r > 0 {
			c.w = copy(c.buf, c.buf[c.r:c.w])
			c.r = 0
		} else if len(c.buf) < maxHead {
			c.buf = append(c.buf, make([]byte, len(c.buf))...)
		} else {
			return 0, errHead
		}
	}
	n, err := c.Conn.Read(c.buf[c.w:])
	at = now()
	c.w += n
	if n > 0 {
		return at, nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return at, err
}

// answer reads one answer. When q is nil it is taken from c.current after the
// first bytes came. The result's fields of the answer are set.
func (c *conn) answer(q *call, now func() time.Duration) (*call, error) {
	var at time.Duration
	var err error
	if c.r == c.w {
		if at, err = c.more(now); err != nil {
			if q == nil {
				if q = c.current.Load(); q == nil {
					return nil, errIdle
				}
			}
			return q, err
		}
	} else {
		at = now()
	}
	if q == nil {
		if q = c.current.Load(); q == nil {
			return nil, errIdle
		}
	}
	res := &q.res
	res.FirstByte = at
	var head int
	for {
		if head = bytes.Index(c.buf[c.r:c.w], []byte("\r\n\r\n")); head >= 0 {
			break
		}
		if at, err = c.more(now); err != nil {
			return q, fmt.Errorf("answer's head: %w", err)
		}
	}
	h, err := c.parseHead(c.buf[c.r:c.r+head], res)
	c.r += head + 4
	if err != nil {
		c.closing = true
		return q, err
	}
	c.scan.Reset()
	c.pieces, c.kept = c.pieces[:0], c.kept[:0]
	if err := c.body(h, at, now); err != nil {
		c.closing = true
		return q, err
	}
	c.used = true
	res.End = now()
	return q, c.finish(h, res)
}

type head struct {
	chunked, stream bool
	length          int64 // -1 unknown
}

func (c *conn) parseHead(b []byte, res *Result) (head, error) {
	h := head{length: -1}
	line, rest, _ := bytes.Cut(b, []byte("\r\n"))
	if len(line) < 12 || !bytes.HasPrefix(line, []byte("HTTP/1.")) {
		return h, errHead
	}
	status, ok := number(line[9:12])
	if !ok {
		return h, errHead
	}
	res.Status = int(status)
	c.closing = line[7] == '0'
	for len(rest) > 0 {
		line, rest, _ = bytes.Cut(rest, []byte("\r\n"))
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case fold(name, "transfer-encoding"):
			h.chunked = bytes.EqualFold(value, []byte("chunked"))
		case fold(name, "content-length"):
			if h.length, ok = number(value); !ok {
				return h, errHead
			}
		case fold(name, "content-type"):
			h.stream = bytes.HasPrefix(value, []byte("text/event-stream"))
		case fold(name, "connection"):
			c.closing = c.closing || bytes.EqualFold(value, []byte("close"))
		case fold(name, "x-dynctl-decision"):
			res.Decision = string(value)
		case fold(name, "x-dynctl-path"):
			switch string(value) { // no allocation for the usual ones
			case "local":
				res.Path = "local"
			case "remote":
				res.Path = "remote"
			default:
				res.Path = string(value)
			}
		}
	}
	return h, nil
}

func fold(name []byte, want string) bool { return bytes.EqualFold(name, []byte(want)) }

func number(b []byte) (int64, bool) {
	n, err := strconv.ParseUint(string(b), 10, 60)
	return int64(n), err == nil
}

// body reads the answer's body as it is framed; it has come up to at.
func (c *conn) body(h head, at time.Duration, now func() time.Duration) error {
	if !h.chunked {
		return c.part(h, h.length, &at, now)
	}
	for {
		line, err := c.line(&at, now)
		if err != nil {
			return err
		}
		line, _, _ = bytes.Cut(line, []byte(";"))
		size, err := strconv.ParseUint(string(line), 16, 32)
		if err != nil {
			return errHead
		}
		if err := c.part(h, int64(size), &at, now); err != nil {
			return err
		}
		// The end of the chunk; after the last one there may be trailers.
		for {
			line, err := c.line(&at, now)
			if err != nil {
				return err
			}
			if size > 0 {
				break
			}
			if len(line) == 0 {
				return nil
			}
		}
	}
}

// line reads a line of a chunked body.
func (c *conn) line(at *time.Duration, now func() time.Duration) ([]byte, error) {
	for {
		if line, _, whole := bytes.Cut(c.buf[c.r:c.w], []byte("\n")); whole {
			c.r += len(line) + 1
			return bytes.TrimSuffix(line, []byte("\r")), nil
		}
		if c.w-c.r > 4096 {
			return nil, errHead
		}
		var err error
		if *at, err = c.more(now); err != nil {
			return nil, fmt.Errorf("%w: %w", errCut, err)
		}
	}
}

// part reads that many bytes of a body, or below 0 all up to the connection's end.
func (c *conn) part(h head, left int64, at *time.Duration, now func() time.Duration) (err error) {
	for left != 0 {
		if c.r == c.w {
			if *at, err = c.more(now); err != nil {
				if left < 0 && errors.Is(err, io.EOF) {
					c.closing = true
					return nil
				}
				return fmt.Errorf("%w: %w", errCut, err)
			}
		}
		n := c.w - c.r
		if left > 0 {
			n = int(min(int64(n), left))
			left -= int64(n)
		}
		c.feed(h, c.buf[c.r:c.r+n], *at)
		c.r += n
	}
	return nil
}

// feed takes a part of the body that arrived at a time.
func (c *conn) feed(h head, p []byte, at time.Duration) {
	if !h.stream {
		c.kept = append(c.kept, p[:min(len(p), maxKept-len(c.kept))]...)
		return
	}
	before := c.scan.Summary().Usage.CompletionTokens
	got := c.scan.Feed(p)
	if got.Tokens == 0 {
		return
	}
	n := 0 // unknown
	if total := c.scan.Summary().Usage.CompletionTokens; total > max(before, 0) {
		n = int(total - max(before, 0))
	}
	if k := len(c.pieces); k > 0 && c.pieces[k-1].at == at { // of one read
		c.pieces[k-1].tokens += n
		c.pieces[k-1].events += got.Tokens
		return
	}
	c.pieces = append(c.pieces, piece{at, n, got.Tokens})
}

// finish turns what was read into the result and checks it.
func (c *conn) finish(h head, res *Result) error {
	if res.Status/100 != 2 {
		return fmt.Errorf("status %d: %s", res.Status, clip(c.kept))
	}
	if !h.stream {
		return fmt.Errorf("the answer is not an event stream: %s", clip(c.kept))
	}
	c.scan.Finish()
	s := c.scan.Summary()
	res.PromptTokens, res.CachedTokens, res.OutputTokens = int(s.Usage.PromptTokens), int(s.Usage.CachedTokens), int(s.Usage.CompletionTokens)
	switch {
	case s.Failed:
		return fmt.Errorf("error in the stream: %s", s.Error)
	case !s.Done:
		return errCut
	case len(c.pieces) == 0:
		return errors.New("the answer has no token")
	}
	// Continuous usage gave each piece's tokens, or the total is spread evenly.
	counted, events := 0, 0
	for _, p := range c.pieces {
		counted += p.tokens
		events += p.events
	}
	total := res.OutputTokens
	if total < 0 {
		total = s.Tokens
		res.OutputTokens = total
	}
	switch {
	case counted == total:
	case events == total: // one token each
		for i := range c.pieces {
			c.pieces[i].tokens = c.pieces[i].events
		}
	default:
		k, n := len(c.pieces), max(total, len(c.pieces))
		for i := range c.pieces {
			c.pieces[i].tokens = (i+1)*n/k - i*n/k
		}
	}
	res.First, res.FirstTokens = c.pieces[0].at, c.pieces[0].tokens
	res.Last, res.Pieces = c.pieces[len(c.pieces)-1].at, len(c.pieces)
	if res.First <= res.Sent {
		return errors.New("the first token came before the request was sent")
	}
	return nil
}

func clip(b []byte) string {
	if len(b) > 300 {
		return strconv.Quote(string(b[:300])) + "…"
	}
	return string(bytes.TrimSpace(b))
}
