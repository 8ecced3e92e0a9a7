package sim

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"math/big"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

func (g *Group) scheme() string {
	if g.TLS {
		return "https"
	}
	return "http"
}

// selfSigned makes a certificate for the loopback address, and the
// configurations of a server that has it and of a client that trusts no other.
func selfSigned() (server, client *tls.Config, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("key of simulated engines: %w", err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(1, 0, 0),
		IPAddresses: []net.IP{net.ParseIP(loopback)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate of simulated engines: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate of simulated engines: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key, Leaf: cert}}},
		&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}, nil
}

// listener gives connections that faults can reach.
type listener struct {
	net.Listener
	tls *tls.Config // nil for plain HTTP
}

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, wire: &gathered{Conn: raw}}
	if l.tls != nil {
		c.Conn = tls.Server(c.wire, l.tls)
	} else {
		c.Conn = c.wire
	}
	return c, nil
}

// connKey is the key of a request's conn in its context.
type connKey struct{}

// conn is a connection of an engine's HTTP server.
type conn struct {
	net.Conn
	wire *gathered
	// late asks for a lateAnswer behind what the server writes next: its handler
	// has returned, so that is the end of the answer.
	late atomic.Bool

	mu   sync.Mutex
	idle *time.Timer // closes the connection; nil while it is in use
}

const (
	lastChunk  = "0\r\n\r\n"
	lateAnswer = "HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)

// Write implements net.Conn. What nobody asked for leaves in one segment with
// the answer's end, so that it is there before the connection can be used
// again: which request the client takes it for is the client's doing only. Over
// TLS it is a record of its own.
func (c *conn) Write(p []byte) (int, error) {
	// An answer of more than one write ends with the last chunk, often alone.
	whole := bytes.HasPrefix(p, []byte("HTTP/1.1 ")) && len(p) < 4096
	last := string(p) == lastChunk || bytes.HasSuffix(p, []byte("\r\n"+lastChunk))
	if !whole && !last || !c.late.CompareAndSwap(true, false) {
		return c.Conn.Write(p)
	}
	c.wire.hold()
	n, err := c.Conn.Write(p)
	if err == nil {
		_, err = c.Conn.Write([]byte(lateAnswer))
	}
	if flushed := c.wire.flush(); err == nil {
		err = flushed
	}
	return n, err
}

// CloseWrite lets the server end an answer before it has read all of a request.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.wire.Conn.(*net.TCPConn).CloseWrite()
}

// rest begins or ends the time that a connection is without a request; limit is
// how long that may be.
func (c *conn) rest(idle bool, limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.late.Store(false)
	if c.idle != nil {
		c.idle.Stop()
		c.idle = nil
	}
	if idle {
		c.idle = time.AfterFunc(limit, func() { _ = c.Conn.Close() })
	}
}

// gathered makes one write of several.
type gathered struct {
	net.Conn
	mu      sync.Mutex
	holding bool
	held    []byte
}

func (g *gathered) hold() {
	g.mu.Lock()
	g.holding = true
	g.mu.Unlock()
}

func (g *gathered) flush() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	b := g.held
	g.held, g.holding = nil, false
	_, err := g.Conn.Write(b)
	return err
}

// Write implements net.Conn.
func (g *gathered) Write(p []byte) (int, error) {
	g.mu.Lock()
	if g.holding {
		defer g.mu.Unlock()
		g.held = append(g.held, p...)
		return len(p), nil
	}
	g.mu.Unlock()
	return g.Conn.Write(p)
}
