// Package certs is TLS from files: the certificates that the router shows to its
// clients and to engines, read again when their files change, and whom it trusts.
// What cannot be used is refused with its reason, and the certificate of before
// stays in force.
package certs

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/watchfile"
)

// soon is how long before its end a certificate is announced as one that will expire,
// lookEvery how often that is looked at.
const (
	soon      = 14 * 24 * time.Hour
	lookEvery = time.Minute
)

// maxFile bounds a file of certificates in bytes.
const maxFile = 4 << 20

// Options say which certificate it is and who hears of it.
type Options struct {
	// Name says whose the certificate is: "data", "admin", "engines" or "replicas".
	Name string
	// Cert and Key are PEM files with the certificate, followed by its chain, and
	// with its key. A client may have neither.
	Cert, Key string
	// CA is a PEM file with the authorities whose certificates the other side must
	// show. Empty asks clients for none, and trusts the system's for servers.
	CA string
	// ServerName is the name that servers must have instead of their host; for clients only.
	ServerName string
	// Event hears what happens to the files; Loaded is called for every reading after the
	// first, "ok" or "refused". Neither may be nil.
	Event  func(eventlog.Event)
	Loaded func(result string)
	// Poll is that of [watchfile.Options].
	Poll time.Duration
}

// Store holds the certificate in force. It is safe for concurrent use.
type Store struct {
	o       Options
	server  bool
	current atomic.Pointer[loaded]

	mu        sync.Mutex // one reading at a time; guards what follows
	bad       string     // why the newest files are not in force; empty when they are
	announced string     // the newest event of the certificate's age
}

// loaded is what one reading gave. It is not changed.
type loaded struct {
	conf *tls.Config
	pair *tls.Certificate // nil for a client without
	// sum is of the files' content.
	sum [sha256.Size]byte
}

// NewServer reads the files of a server, which must be good.
func NewServer(o Options) (*Store, error) { return newStore(o, true) }

// NewClient reads the files of a client, which must be good.
func NewClient(o Options) (*Store, error) { return newStore(o, false) }

func newStore(o Options, server bool) (*Store, error) {
	s := &Store{o: o, server: server}
	l, err := s.read(time.Now())
	if err != nil {
		return nil, err
	}
	s.current.Store(l)
	return s, nil
}

// read reads the files and says what is wrong with them.
func (s *Store) read(now time.Time) (*loaded, error) {
	l := &loaded{conf: &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, ServerName: s.o.ServerName,
		// Of TLS 1.2 those with forward secrecy and authenticated encryption; TLS 1.3
		// has no others.
		CipherSuites: []uint16{
			tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
			tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
			tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
		},
	}}
	content := sha256.New()
	if s.o.Cert != "" {
		pair, err := readPair(s.o.Cert, s.o.Key, now, content)
		if err != nil {
			return nil, err
		}
		l.pair = pair
		if s.server {
			l.conf.Certificates = []tls.Certificate{*pair}
		} else { // shown to whoever asks, whatever authorities it names
			l.conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair, nil }
		}
	}
	if s.o.CA != "" {
		raw, err := readFile(s.o.CA)
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(raw) {
			return nil, fmt.Errorf("%s holds no certificate in PEM form", s.o.CA)
		}
		content.Write(raw)
		if s.server {
			l.conf.ClientCAs, l.conf.ClientAuth = pool, tls.RequireAndVerifyClientCert
			// Each connection shows its certificate: one that is not trusted any more
			// must not come back with a ticket.
			l.conf.SessionTicketsDisabled = true
		} else {
			l.conf.RootCAs = pool
		}
	}
	content.Sum(l.sum[:0])
	return l, nil
}

// readPair reads a certificate with its key and sees whether it may be shown. What
// was read goes into content, too.
func readPair(certFile, keyFile string, now time.Time, content io.Writer) (*tls.Certificate, error) {
	cert, err := readFile(certFile)
	if err != nil {
		return nil, err
	}
	key, err := readFile(keyFile)
	if err != nil {
		return nil, err
	}
	p, err := tls.X509KeyPair(cert, key)
	if err != nil {
		// What the library says holds nothing of the key.
		return nil, fmt.Errorf("%s and %s: %s", certFile, keyFile, strings.TrimPrefix(err.Error(), "tls: "))
	}
	const day = "2006-01-02 15:04 MST"
	switch leaf := p.Leaf; {
	case now.After(leaf.NotAfter):
		return nil, fmt.Errorf("%s: the certificate of %s expired on %s; put a new one there", certFile, subject(leaf), leaf.NotAfter.Format(day))
	case now.Before(leaf.NotBefore):
		return nil, fmt.Errorf("%s: the certificate of %s is valid only from %s on; is the clock right?", certFile, subject(leaf), leaf.NotBefore.Format(day))
	}
	_, _ = content.Write(slices.Concat(cert, key)) // a hash takes everything
	return &p, nil
}

func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("%s is not a file of at most %d bytes", path, maxFile)
	}
	return os.ReadFile(path)
}

// subject is what people call a certificate.
func subject(c *x509.Certificate) string {
	switch {
	case len(c.DNSNames) > 0:
		return c.DNSNames[0]
	case c.Subject.CommonName != "":
		return c.Subject.CommonName
	case len(c.IPAddresses) > 0:
		return c.IPAddresses[0].String()
	}
	return "serial number " + c.SerialNumber.String()
}

// Listen makes TLS connections of those of a listener, each with the certificate
// in force when it is made.
func (s *Store) Listen(ln net.Listener) net.Listener {
	return tls.NewListener(ln, &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.current.Load().conf, nil },
	})
}

// Client is how a client speaks TLS now: with the certificate in force when a server
// asks for one, and trusting the authorities in force.
func (s *Store) Client() *tls.Config { return s.current.Load().conf }

// Peer is TLS between equals: a server's certificate in force is shown in both directions,
// and with a CA both sides require one of its certificates. As a client it trusts the
// authorities of the time of this call.
func (s *Store) Peer() *tls.Config {
	now := s.current.Load().conf
	return &tls.Config{
		MinVersion: now.MinVersion, CipherSuites: now.CipherSuites, ClientAuth: now.ClientAuth, ClientCAs: now.ClientCAs, RootCAs: now.ClientCAs,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.Client(), nil },
		GetCertificate:     func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.current.Load().pair, nil },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return s.current.Load().pair, nil
		},
	}
}

// Name is that of the options.
func (s *Store) Name() string { return s.o.Name }

// Expires is when the certificate in force ends; false without one.
func (s *Store) Expires() (time.Time, bool) {
	p := s.current.Load().pair
	if p == nil {
		return time.Time{}, false
	}
	return p.Leaf.NotAfter, true
}

// Trouble is what is wrong now, in words; empty for nothing.
func (s *Store) Trouble() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, ok := s.Expires(); ok && time.Now().After(at) {
		return fmt.Sprintf("the certificate of %s has expired", s.o.Name)
	}
	if s.bad != "" {
		return fmt.Sprintf("the new certificate of %s is not in force: %s", s.o.Name, s.bad)
	}
	return ""
}

// Run reads the files again when they change, and announces a certificate that ends,
// until ctx does.
func (s *Store) Run(ctx context.Context) error {
	var files []string
	for _, f := range []string{s.o.Cert, s.o.Key, s.o.CA} {
		if f != "" {
			files = append(files, f)
		}
	}
	var aging sync.WaitGroup
	defer aging.Wait()
	aging.Go(func() {
		s.age(time.Now())
		for range wait.Every(ctx, lookEvery) {
			s.age(time.Now())
		}
	})
	watchfile.Run(ctx, watchfile.Options{Paths: files, Poll: s.o.Poll}, func() { s.reload(time.Now()) }, func(err error) {
		s.o.Event(eventlog.Event{
			Kind: "certificate_unwatched", Severity: eventlog.Warn,
			Text: fmt.Sprintf("the certificate files of %s cannot be watched and are looked at every %s instead: %v", s.o.Name, watchfile.DefaultPoll, err),
		})
	})
	return nil
}

// reload puts what the files hold now into force, or says why not.
func (s *Store) reload(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.read(now)
	old := s.current.Load()
	switch {
	case err != nil && err.Error() == s.bad, err == nil && s.bad == "" && l.sum == old.sum:
		return // nothing new
	case err != nil:
		s.bad = err.Error()
		s.o.Loaded("refused")
		s.o.Event(eventlog.Event{
			Kind: "certificate_refused", Severity: eventlog.Error,
			Text: fmt.Sprintf("the new certificate files of %s are refused, the certificate of before stays in force: %v", s.o.Name, err),
		})
		return
	}
	s.bad, s.announced = "", ""
	s.current.Store(l)
	s.o.Loaded("ok")
	text := fmt.Sprintf("new certificate files of %s are in force for new connections", s.o.Name)
	if l.pair != nil {
		text += fmt.Sprintf(": %s, until %s", subject(l.pair.Leaf), l.pair.Leaf.NotAfter.Format(time.RFC3339))
	}
	s.o.Event(eventlog.Event{Kind: "certificate_replaced", Text: text})
}

// age announces once that the certificate in force will end, and once that it has.
func (s *Store) age(now time.Time) {
	at, ok := s.Expires()
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := eventlog.Event{}
	switch {
	case now.After(at):
		e = eventlog.Event{
			Kind: "certificate_expired", Severity: eventlog.Error,
			Text: fmt.Sprintf("the certificate of %s expired on %s: clients that check it do not connect any more; put a new one into %s", s.o.Name, at.Format(time.RFC3339), s.o.Cert),
		}
	case at.Sub(now) < soon:
		e = eventlog.Event{
			Kind: "certificate_expires", Severity: eventlog.Warn,
			Text: fmt.Sprintf("the certificate of %s ends on %s, in %d day(s)", s.o.Name, at.Format(time.RFC3339), int(at.Sub(now).Hours()/24)),
		}
	}
	if e.Kind != "" && e.Kind != s.announced {
		s.announced = e.Kind
		s.o.Event(e)
	}
}
