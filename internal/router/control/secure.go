package control

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/netip"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/certs"
	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/quicksock"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/settings"
)

// SecureOptions say what is read and where events go. Nothing but SimTLS may be missing.
type SecureOptions struct {
	// Config names the files.
	Config *settings.Config
	// SimTLS is how simulated engines are spoken to over TLS; nil without them.
	SimTLS *tls.Config
	// Connections is how many connections an address may have; 0 is no bound.
	Connections func(netip.Addr) int
	Metrics     *telemetry.Metrics
	Event       func(eventlog.Event)
}

// Secure is the certificates and keys in force. It is safe for concurrent use.
type Secure struct {
	addresses *admission.Addresses
	metrics   *telemetry.Metrics
	// Nil where they are not configured.
	data, admin, engines, replicas *certs.Store
	keys                           *access.Store
	engineTLS                      func() *tls.Config
}

// NewSecure reads the files that the config names, which must be good.
func NewSecure(o SecureOptions) (*Secure, error) {
	s := &Secure{metrics: o.Metrics, addresses: admission.NewAddresses(o.Connections, func(a netip.Addr, limit int) {
		o.Event(eventlog.Event{
			Kind: "client_connections_full", Severity: eventlog.Warn,
			Text: fmt.Sprintf("%s has %d connections, and more are refused (limits.client_connections); if it is a proxy, name it in trusted_proxies", a, limit),
		})
	})}
	if err := s.readCerts(&o); err != nil {
		return nil, err
	}
	if file := o.Config.Keys.File; file != "" {
		var err error
		if s.keys, err = access.NewStore(access.Options{Path: file, Event: o.Event, Loaded: o.Metrics.Keys}); err != nil {
			return nil, inSection("keys.file", err)
		}
	}
	return s, nil
}

func (s *Secure) readCerts(o *SecureOptions) (err error) {
	options := func(name, cert, key, ca string) certs.Options {
		return certs.Options{Name: name, Cert: cert, Key: key, CA: ca, Event: o.Event, Loaded: func(result string) { o.Metrics.Certificate(name, result) }}
	}
	server := func(name, section string, t settings.ServerTLS) (*certs.Store, error) {
		if t.CertFile == "" {
			return nil, nil
		}
		c, err := certs.NewServer(options(name, t.CertFile, t.KeyFile, t.ClientCAFile))
		return c, inSection(section, err)
	}
	if s.data, err = server("data", "tls", o.Config.TLS); err != nil {
		return err
	}
	if s.admin, err = server("admin", "admin_tls", o.Config.AdminTLS); err != nil {
		return err
	}
	if r := &o.Config.Replicas; r.Server() != "" && (r.CertFile != "" || r.CAFile != "") {
		s.replicas, err = certs.NewClient(options("replicas", r.CertFile, r.KeyFile, r.CAFile))
		err = inSection("replicas", err)
	} else if r.Server() == "" {
		s.replicas, err = server("replicas", "replicas", settings.ServerTLS{CertFile: r.CertFile, KeyFile: r.KeyFile, ClientCAFile: r.CAFile})
	}
	if err != nil {
		return err
	}
	if sim := o.SimTLS; sim != nil {
		s.engineTLS = func() *tls.Config { return sim }
	}
	e := o.Config.EngineTLS
	if e == (settings.EngineTLS{}) {
		return nil
	}
	if s.engineTLS != nil {
		return errors.New("engine_tls: simulated engines with tls=on have certificates of their own; leave engine_tls out")
	}
	c := options("engines", e.CertFile, e.KeyFile, e.CAFile)
	c.ServerName = e.ServerName
	if s.engines, err = certs.NewClient(c); err != nil {
		return inSection("engine_tls", err)
	}
	s.engineTLS = s.engines.Client
	return nil
}

func inSection(section string, err error) error {
	if err == nil {
		return nil
	}
	return &settings.Problem{Key: section, Err: err}
}

// Run reads the files again when they change, until ctx ends.
func (s *Secure) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, c := range s.certs() {
		g.Go(func() error { return c.Run(ctx) })
	}
	if s.keys != nil {
		g.Go(func() error { return s.keys.Run(ctx) })
	}
	return g.Wait()
}

// Addresses bound the connections of clients at both listeners.
func (s *Secure) Addresses() *admission.Addresses { return s.addresses }

// Keys are the API keys, nil without a file of them.
func (s *Secure) Keys() *access.Store { return s.keys }

// EngineTLS is how https engines are spoken to, nil for the system's roots.
func (s *Secure) EngineTLS() func() *tls.Config { return s.engineTLS }

// ReplicasTLS is TLS to other routers, or to the NATS server between them; nil for none.
func (s *Secure) ReplicasTLS(server bool) *tls.Config {
	switch {
	case s.replicas == nil:
		return nil
	case server:
		return s.replicas.Client()
	default:
		return s.replicas.Peer()
	}
}

// certs are the configured ones.
func (s *Secure) certs() (list []*certs.Store) {
	for _, c := range []*certs.Store{s.data, s.admin, s.engines, s.replicas} {
		if c != nil {
			list = append(list, c)
		}
	}
	return list
}

// Certificates are those in force.
func (s *Secure) Certificates() (list []Certificate) {
	for _, c := range s.certs() {
		if at, ok := c.Expires(); ok {
			list = append(list, Certificate{Of: c.Name(), Expires: at})
		}
	}
	return list
}

// KeyCount is the number of API keys in force; -1 without a file of them.
func (s *Secure) KeyCount() int {
	if s.keys == nil {
		return -1
	}
	return s.keys.Count()
}

// Troubles say why the newest content of files is not in force.
func (s *Secure) Troubles() (out []string) {
	for _, c := range s.certs() {
		if why := c.Trouble(); why != "" {
			out = append(out, why)
		}
	}
	if s.keys != nil {
		if why := s.keys.Trouble(); why != "" {
			out = append(out, why)
		}
	}
	return out
}

// DataListener accepts the connections of the data plane from ln, over TLS where that
// is configured. Those beyond the bound of their address are for a refusal
// ([admission.Addresses.Refusal]).
func (s *Secure) DataListener(ln net.Listener) net.Listener {
	ln = s.addresses.Listen(quicksock.Listen(ln), true)
	if s.data == nil {
		return admission.FramedListener(ln)
	}
	return over(s.data, ln)
}

// AdminListener is DataListener for the admin API; it closes connections beyond the bound.
func (s *Secure) AdminListener(ln net.Listener) net.Listener {
	return over(s.admin, s.addresses.Listen(ln, false))
}

func over(c *certs.Store, ln net.Listener) net.Listener {
	if c == nil {
		return ln
	}
	return c.Listen(ln)
}

// Schemes are those of the URLs under which the data plane and the admin API are
// reached.
func (s *Secure) Schemes() (data, ctrl string) { return scheme(s.data), scheme(s.admin) }

func scheme(c *certs.Store) string {
	if c == nil {
		return "http"
	}
	return "https"
}

// ServerLog is the log of a server's own errors, which it passes to l: the metrics count the
// failed handshakes among them, which net/http reports nowhere else.
func (s *Secure) ServerLog(of string, l *log.Logger) *log.Logger {
	return log.New(&handshakes{of: of, metrics: s.metrics, next: l}, "", 0)
}

type handshakes struct {
	of      string
	metrics *telemetry.Metrics
	next    *log.Logger
}

// Write takes one message.
func (h *handshakes) Write(b []byte) (int, error) {
	if bytes.HasPrefix(b, []byte("http: TLS handshake error")) {
		h.metrics.Handshake(h.of)
	}
	return len(b), h.next.Output(0, string(b))
}
