package certs

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/rig/certtest"
	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// heard collects the events of a store.
type heard struct {
	mu     sync.Mutex
	events []eventlog.Event
	loads  []string
}

func (h *heard) options(name, cert, key, ca string) Options {
	return Options{
		Name: name, Cert: cert, Key: key, CA: ca, Poll: 10 * time.Millisecond,
		Event:  func(e eventlog.Event) { h.mu.Lock(); h.events = append(h.events, e); h.mu.Unlock() },
		Loaded: func(r string) { h.mu.Lock(); h.loads = append(h.loads, r); h.mu.Unlock() },
	}
}

func (h *heard) find(kind string) (eventlog.Event, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.events, func(e eventlog.Event) bool { return e.Kind == kind })
	if i < 0 {
		return eventlog.Event{}, false
	}
	return h.events[i], true
}

// waitFor waits for an event.
func (h *heard) waitFor(t *testing.T, kind string) eventlog.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if !wait.Until(ctx, 5*time.Millisecond, func() bool { _, ok := h.find(kind); return ok }) {
		t.Fatalf("no event %s; there are %v", kind, h.events)
	}
	e, _ := h.find(kind)
	return e
}

// run runs a store until the test ends.
func run(t *testing.T, s *Store) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// serve answers over TLS until the test ends.
func serve(t *testing.T, s *Store) net.Addr {
	t.Helper()
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "hello")
	})}
	done := make(chan error, 1)
	go func() { done <- server.Serve(s.Listen(ln)) }()
	t.Cleanup(func() {
		_ = server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return ln.Addr()
}

// openssl is a client by OpenSSL. It prints "ok VERSION CIPHER NAME BODY" or
// "failed REASON".
const openssl = `
import socket, ssl, sys, warnings
warnings.simplefilter("ignore")
port, ca, version, ciphers, cert, key = int(sys.argv[1]), *sys.argv[2:7]
c = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
c.load_verify_locations(ca)
if version:
    c.minimum_version = c.maximum_version = getattr(ssl.TLSVersion, version)
if ciphers:
    c.set_ciphers(ciphers)
if cert:
    c.load_cert_chain(cert, key)
try:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw, c.wrap_socket(raw, server_hostname="127.0.0.1") as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        body = b""
        while part := s.recv(65536):
            body += part
        name = dict(x[0] for x in s.getpeercert()["subject"])["commonName"]
        print("ok", s.version(), s.cipher()[0], name, body.split(b"\r\n\r\n")[1].decode())
except (ssl.SSLError, ConnectionError) as e:
    print("failed", e)
`

type client struct{ ca, version, ciphers, cert, key string }

func (c client) ask(t *testing.T, to net.Addr) string {
	t.Helper()
	p := external.Python(t, "ssl")
	out, err := exec.CommandContext(t.Context(), p, "-c", openssl, fmt.Sprint(to.(*net.TCPAddr).Port), c.ca, c.version, c.ciphers, c.cert, c.key).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// TestOpenSSLIsServed: what OpenSSL's client gets of each version and cipher, and
// with each certificate of its own.
func TestOpenSSLIsServed(t *testing.T) {
	ca, other := certtest.NewAuthority(t, "ours"), certtest.NewAuthority(t, "another")
	cert, key := ca.Pair(t, "router.test", time.Hour)
	mine, mineKey := ca.Pair(t, "client.test", time.Hour)
	old, oldKey := ca.Pair(t, "old.test", -time.Hour)
	foreign, foreignKey := other.Pair(t, "client.test", time.Hour)
	var h heard
	open, err := NewServer(h.options("data", cert, key, ""))
	if err != nil {
		t.Fatal(err)
	}
	closed, err := NewServer(h.options("data", cert, key, ca.File(t)))
	if err != nil {
		t.Fatal(err)
	}
	to, mutual := serve(t, open), serve(t, closed)
	trust := ca.File(t)
	for _, c := range []struct {
		what string
		to   net.Addr
		c    client
		want string
	}{
		{"TLS 1.3", to, client{ca: trust}, "ok TLSv1.3 TLS_"},
		{"TLS 1.2", to, client{ca: trust, version: "TLSv1_2"}, "ok TLSv1.2 ECDHE-ECDSA-"},
		{"TLS 1.1", to, client{ca: trust, version: "TLSv1_1", ciphers: "ALL:@SECLEVEL=0"}, "failed"},
		{"TLS 1.0", to, client{ca: trust, version: "TLSv1", ciphers: "ALL:@SECLEVEL=0"}, "failed"},
		{"a cipher without authentication of what is encrypted", to, client{ca: trust, version: "TLSv1_2", ciphers: "ECDHE-ECDSA-AES128-SHA"}, "failed"},
		{"a client that trusts another authority", to, client{ca: other.File(t)}, "failed [SSL: CERTIFICATE_VERIFY_FAILED]"},
		{"no client certificate", mutual, client{ca: trust}, "failed"},
		{"a client certificate", mutual, client{ca: trust, cert: mine, key: mineKey}, "ok TLSv1.3"},
		{"a client certificate over TLS 1.2", mutual, client{ca: trust, version: "TLSv1_2", cert: mine, key: mineKey}, "ok TLSv1.2"},
		{"an expired client certificate", mutual, client{ca: trust, cert: old, key: oldKey}, "failed"},
		{"a client certificate of another authority", mutual, client{ca: trust, cert: foreign, key: foreignKey}, "failed"},
	} {
		got := c.c.ask(t, c.to)
		if !strings.HasPrefix(got, c.want) || strings.HasPrefix(got, "ok") && !strings.HasSuffix(got, "router.test hello") {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
	}
}

// TestBadFilesAreNamed: at the start there is nothing to fall back to.
func TestBadFilesAreNamed(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "router.test", time.Hour)
	_, otherKey := ca.Pair(t, "router.test", time.Hour)
	old, oldKey := ca.Pair(t, "old.test", -time.Hour)
	none := filepath.Join(t.TempDir(), "none")
	var h heard
	for _, c := range []struct{ what, cert, key, ca, want string }{
		{"expired", old, oldKey, "", "the certificate of old.test expired on 2"},
		{"another's key", cert, otherKey, "", "private key does not match"},
		{"no file", none, key, "", "no such file"},
		{"no key", cert, none, "", "no such file"},
		{"a key as certificate", key, key, "", "tls.key"},
		{"a key as authority", cert, key, key, "holds no certificate in PEM form"},
		{"a folder", t.TempDir(), key, "", "is not a file"},
	} {
		_, err := NewServer(h.options("data", c.cert, c.key, c.ca))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.what, err, c.want)
		}
		if raw, _ := os.ReadFile(c.key); err != nil && len(raw) > 100 && strings.Contains(err.Error(), string(raw[40:80])) {
			t.Errorf("%s: the error shows the key: %v", c.what, err)
		}
	}
}

// TestReplacement: a good new certificate is shown to new connections, a bad one
// is refused and reported, and what was connected stays so.
func TestReplacement(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "one.test", time.Hour)
	var h heard
	s, err := NewServer(h.options("data", cert, key, ""))
	if err != nil {
		t.Fatal(err)
	}
	to := serve(t, s)
	run(t, s)
	trust := ca.File(t)
	ask := func(want string) {
		t.Helper()
		if got := (client{ca: trust}).ask(t, to); !strings.HasSuffix(got, want+" hello") {
			t.Errorf("%s, want %s", got, want)
		}
	}
	ask("one.test")
	if e := h.waitFor(t, "certificate_expires"); e.Severity != eventlog.Warn {
		t.Errorf("an hour left: %+v", e)
	}

	raw, rawKey := ca.Leaf(t, "expired.test", -time.Minute)
	certtest.Put(t, key, rawKey)
	certtest.Put(t, cert, raw)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if !wait.Until(ctx, 5*time.Millisecond, func() bool { return strings.Contains(s.Trouble(), "expired.test expired on") }) {
		t.Fatalf("the expired certificate is not named: %q", s.Trouble())
	}
	if e := h.waitFor(t, "certificate_refused"); e.Severity != eventlog.Error {
		t.Errorf("%+v", e)
	}
	ask("one.test")

	raw, rawKey = ca.Leaf(t, "two.test", 90*24*time.Hour)
	certtest.Put(t, key, rawKey)
	certtest.Put(t, cert, raw)
	if e := h.waitFor(t, "certificate_replaced"); !strings.Contains(e.Text, "two.test") {
		t.Errorf("%+v", e)
	}
	ask("two.test")
	if why := s.Trouble(); why != "" {
		t.Errorf("after a good one: %s", why)
	}
	if at, ok := s.Expires(); !ok || time.Until(at) < 89*24*time.Hour {
		t.Errorf("expires %v", at)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !slices.Contains(h.loads, "refused") || h.loads[len(h.loads)-1] != "ok" {
		t.Errorf("counted %v", h.loads)
	}
}

// TestExpiryIsAnnouncedOnce: the certificate in force comes to its end.
func TestExpiryIsAnnouncedOnce(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "one.test", time.Hour)
	var h heard
	s, err := NewServer(h.options("data", cert, key, ""))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for range 3 {
		s.age(now)
	}
	for range 3 {
		s.age(now.Add(2 * time.Hour))
	}
	var kinds []string
	for _, e := range h.events {
		kinds = append(kinds, e.Kind)
	}
	if !slices.Equal(kinds, []string{"certificate_expires", "certificate_expired"}) {
		t.Errorf("announced %v", kinds)
	}
}

// TestClientShowsItsNewCertificate to a server that asks for one.
func TestClientShowsItsNewCertificate(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "engine.test", time.Hour)
	mine, mineKey := ca.Pair(t, "one.test", time.Hour)
	var h heard
	server, err := NewServer(h.options("data", cert, key, ca.File(t)))
	if err != nil {
		t.Fatal(err)
	}
	authorities := filepath.Join(t.TempDir(), "engines.pem")
	certtest.Put(t, authorities, readAll(t, ca.File(t)))
	o := h.options("engines", mine, mineKey, authorities)
	o.ServerName = "engine.test"
	s, err := NewClient(o)
	if err != nil {
		t.Fatal(err)
	}
	run(t, s)
	to := serve(t, server)
	tr := &http.Transport{DialTLSContext: workers.DialTLS(new(net.Dialer), func() *tls.Config { return s.Client() }), DisableKeepAlives: true}
	defer tr.CloseIdleConnections()
	get := func() string {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+to.String(), nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return string(b)
	}
	if got := get(); got != "hello" {
		t.Fatal(got)
	}
	raw, rawKey := certtest.NewAuthority(t, "another").Leaf(t, "two.test", time.Hour)
	certtest.Put(t, mineKey, rawKey)
	certtest.Put(t, mine, raw)
	h.waitFor(t, "certificate_replaced")
	if got := get(); !strings.Contains(got, "certificate") {
		t.Errorf("a certificate of another authority: %s", got)
	}
	// Whom it trusts changes as well.
	certtest.Put(t, mineKey, readAll(t, key))
	certtest.Put(t, mine, readAll(t, cert))
	again := func(want string) {
		t.Helper()
		for range 200 {
			got := get()
			if strings.Contains(got, want) {
				return
			}
			<-time.After(50 * time.Millisecond)
		}
		t.Fatalf("not %q in ten seconds", want)
	}
	again("hello")
	trusted := readAll(t, o.CA)
	certtest.Put(t, o.CA, readAll(t, certtest.NewAuthority(t, "foreign").File(t)))
	again("unknown authority")
	certtest.Put(t, o.CA, trusted)
	again("hello")
	o.ServerName = "other.test"
	o.Cert, o.Key = cert, key
	if s, err = NewClient(o); err != nil {
		t.Fatal(err)
	}
	other := &http.Transport{DialTLSContext: workers.DialTLS(new(net.Dialer), s.Client), DisableKeepAlives: true}
	defer other.CloseIdleConnections()
	tr = other
	if got := get(); !strings.Contains(got, "other.test") {
		t.Errorf("another name than that of the certificate: %s", got)
	}
}

func readAll(t *testing.T, path string) []byte {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}
