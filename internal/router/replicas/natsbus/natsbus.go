// Package natsbus carries the messages of package replicas over NATS. [Embed] runs a NATS
// server in this process, which forms a cluster with those of other routers. [Dial] uses a
// NATS server that is there already.
//
// NATS reports nothing of a router that leaves; the others count it out when its messages
// end.
package natsbus

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/dynctl/dynctl/internal/router/replicas"
)

const (
	// subject is where all routers publish; requests to one router have a subject below it.
	subject = "dynctl.replicas"
	// user is the name that goes with the password.
	user = "dynctl"
	// maxPending is how many bytes wait for a slow reader, which loses the rest.
	maxPending = 4 << 20
	// startTime is how long the server may take to listen.
	startTime = 10 * time.Second
	// triesAgain is how often a server tries to reach one that it learned of from another and
	// has lost, about once a second, and tryReports each how many tries it reports that.
	triesAgain = 3600
	tryReports = 600
)

// Cluster configures a router's own server, and how it finds those of the others. All of
// them have one password, and certificates that they trust.
type Cluster struct {
	// Name is unique among the routers.
	Name string
	// Listen is the address for the servers of other routers; port 0 takes a free one.
	// Without TLS it must be a loopback address.
	Listen string
	// Routes are the addresses of other routers; this router's may be among them. One that
	// answers leads to all others. A single host name may have the addresses of several, and
	// others in the course of time.
	Routes []string
	// TLS secures connections that come in and that go out; nil for none.
	TLS *tls.Config
	// Password is required of other routers; empty for none. With TLS, either it or
	// verified client certificates are required.
	Password string
	// Log gets what the server warns of.
	Log *slog.Logger
	// lookup replaces the resolver of the host in tests.
	lookup func(ctx context.Context, host string) ([]string, error)
}

// Bus is a replicas.Transport and a replicas.Direct over NATS.
type Bus struct {
	server *server.Server // nil for an external one
	conn   *nats.Conn

	stop      context.CancelFunc // ends following
	following sync.WaitGroup

	mu     sync.Mutex // held during calls of received
	closed bool

	answering sync.Mutex // held during calls of answer, and guards the field below
	ended     bool
}

// Embed starts a server in this process and connects to it. It does not wait for other
// routers.
func Embed(c Cluster) (*Bus, error) {
	host, port, err := c.check()
	if err != nil {
		return nil, fmt.Errorf("replicas: %w", err)
	}
	token := rand.Text()
	o := &server.Options{
		ServerName: c.Name,
		// Only a server that listens for clients accepts routes: with DontListen the
		// cluster port stays closed. The token keeps other processes of the host out.
		Host: "127.0.0.1", Port: server.RANDOM_PORT, Authorization: token,
		Cluster: server.ClusterOpts{
			Name: "dynctl", Host: host, Port: port, TLSConfig: c.TLS, TLSTimeout: 2,
			ConnectRetries: triesAgain, PoolSize: -1, Compression: server.CompressionOpts{Mode: server.CompressionOff},
			WriteDeadline: replicas.Lifetime, PingInterval: 2 * replicas.Lifetime,
		},
		NoSigs: true, NoSystemAccount: true,
		MaxPayload: replicas.MaxMessage, MaxPending: maxPending,
		WriteDeadline: replicas.Lifetime, PingInterval: 2 * replicas.Lifetime,
		ReconnectErrorReports: tryReports,
	}
	var login *url.Userinfo
	if c.Password != "" {
		o.Cluster.Username, o.Cluster.Password = user, c.Password
		login = url.UserPassword(user, c.Password)
	}
	found := c.found(login)
	if found == nil {
		for _, r := range c.Routes {
			o.Routes = append(o.Routes, route(r, login))
		}
	} else if c.TLS != nil && c.TLS.ServerName == "" {
		// All have a certificate of the name, and are reached at their addresses.
		o.Cluster.TLSConfig = c.TLS.Clone()
		o.Cluster.TLSConfig.ServerName = found.host
	}
	s, err := server.NewServer(o)
	if err != nil {
		return nil, fmt.Errorf("replicas: NATS server: %w", err)
	}
	s.SetLoggerV2(logger{c.Log}, false, false, false)
	ctx, stop := context.WithCancel(context.Background())
	b := &Bus{server: s, stop: stop}
	s.Start()
	if !s.ReadyForConnections(startTime) {
		_ = b.Close()
		return nil, fmt.Errorf("replicas: the NATS server does not listen on %s after %v: see its warnings in the log", c.Listen, startTime)
	}
	if b.conn, err = connect("", nats.InProcessServer(s), nats.Token(token)); err != nil {
		_ = b.Close()
		return nil, err
	}
	if found != nil {
		b.following.Go(func() { found.follow(ctx, s, o) })
	}
	return b, nil
}

func route(address string, login *url.Userinfo) *url.URL {
	return &url.URL{Scheme: "nats-route", Host: address, User: login}
}

// check returns the host and port to listen on, or what is wrong with the settings.
func (c *Cluster) check() (host string, port int, err error) {
	for _, r := range c.Routes {
		if _, _, err := net.SplitHostPort(r); err != nil {
			return "", 0, fmt.Errorf("address of another router: %w", err)
		}
	}
	host, _, err = net.SplitHostPort(c.Listen)
	if err != nil {
		return "", 0, fmt.Errorf("address to listen on: %w", err)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		switch {
		case c.TLS == nil:
			return "", 0, fmt.Errorf("%s is not a loopback address: it needs TLS, and a password or client certificates", c.Listen)
		case c.Password == "" && c.TLS.ClientAuth != tls.RequireAndVerifyClientCert:
			return "", 0, fmt.Errorf("%s is not a loopback address: it needs a password or client certificates beside TLS", c.Listen)
		}
	}
	// The server would report a port that is taken only in its log.
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return "", 0, err
	}
	defer l.Close()
	_, text, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return "", 0, err
	}
	port, err = strconv.Atoi(text)
	return host, port, err
}

// Server is how to use a NATS server that is there already.
type Server struct {
	// URL may have a user and a password.
	URL string
	// TLS secures the connection; nil for what the URL requires.
	TLS *tls.Config
	// Credentials is a file of credentials; empty for none.
	Credentials string
}

// Dial uses a NATS server. It does not wait for it: messages are lost until the server is
// reached.
func Dial(s Server) (*Bus, error) {
	options := []nats.Option{nats.RetryOnFailedConnect(true)}
	if s.TLS != nil {
		options = append(options, nats.Secure(s.TLS))
	}
	if s.Credentials != "" {
		options = append(options, nats.UserCredentials(s.Credentials))
	}
	conn, err := connect(s.URL, options...)
	if err != nil {
		return nil, err
	}
	return &Bus{conn: conn}, nil
}

func connect(url string, options ...nats.Option) (*nats.Conn, error) {
	conn, err := nats.Connect(url, append(options,
		nats.Name("dynctl"), nats.NoEcho(), nats.MaxReconnects(-1), nats.ReconnectWait(replicas.Heartbeat),
		// A message that cannot be sent now is of no use later.
		nats.ReconnectBufSize(-1), nats.FlusherTimeout(replicas.Lifetime),
		nats.PingInterval(2*replicas.Lifetime),
		// By default errors are printed. The messages that they cost are counted as lost.
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}),
	)...)
	if err != nil {
		return nil, fmt.Errorf("replicas: connect to NATS: %w", err)
	}
	return conn, nil
}

// Addr is where the embedded server listens for other routers; nil for an external one.
func (b *Bus) Addr() *net.TCPAddr {
	if b.server == nil {
		return nil
	}
	return b.server.ClusterAddr()
}

// Publish implements replicas.Transport.
func (b *Bus) Publish(message []byte) error { return b.conn.Publish(subject, message) }

// Subscribe implements replicas.Transport. It never calls left.
func (b *Bus) Subscribe(received func([]byte), _ func(string)) error {
	sub, err := b.conn.Subscribe(subject, func(m *nats.Msg) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if !b.closed {
			received(m.Data)
		}
	})
	if err == nil {
		err = sub.SetPendingLimits(-1, maxPending)
	}
	return err
}

// subjectOf is where the requests to an address are published. Names may have any characters.
func subjectOf(address string) string { return subject + "." + hex.EncodeToString([]byte(address)) }

// Request implements replicas.Direct.
func (b *Bus) Request(ctx context.Context, address string, request []byte) ([]byte, error) {
	m, err := b.conn.RequestWithContext(ctx, subjectOf(address), request)
	if err != nil {
		return nil, err
	}
	return m.Data, nil
}

// Answer implements replicas.Direct.
func (b *Bus) Answer(address string, answer func([]byte) []byte) error {
	sub, err := b.conn.Subscribe(subjectOf(address), func(m *nats.Msg) {
		b.answering.Lock()
		defer b.answering.Unlock()
		if b.ended {
			return
		}
		if a := answer(m.Data); a != nil {
			_ = m.Respond(a) // who gets no answer asks again
		}
	})
	if err == nil {
		err = sub.SetPendingLimits(-1, maxPending)
	}
	return err
}

// Close implements replicas.Transport. It also ends an embedded server, and returns when it
// has ended.
func (b *Bus) Close() error {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.answering.Lock()
	b.ended = true
	b.answering.Unlock()
	if b.conn != nil {
		b.conn.Close()
	}
	if b.server != nil {
		b.stop()
		b.following.Wait()
		b.server.Shutdown()
		b.server.WaitForShutdown()
	}
	return nil
}

// logger passes on what the server warns of.
type logger struct{ log *slog.Logger }

func (l logger) Noticef(string, ...any) {}
func (l logger) Debugf(string, ...any)  {}
func (l logger) Tracef(string, ...any)  {}

func (l logger) Warnf(format string, v ...any)  { l.warn(format, v) }
func (l logger) Errorf(format string, v ...any) { l.warn(format, v) }
func (l logger) Fatalf(format string, v ...any) { l.warn(format, v) }

func (l logger) warn(format string, v []any) {
	l.log.Warn("NATS server", "err", fmt.Sprintf(format, v...))
}
