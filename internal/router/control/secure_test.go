package control

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/rig/certtest"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/settings"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// a key's SHA-256, of the word "secret".
const keys = "keys: [{name: a, sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b}]\n"

// options are those of a config, which hear of nothing.
func options(change func(*settings.Config)) SecureOptions {
	c := settings.Default()
	change(&c)
	return SecureOptions{
		Config: &c, Metrics: telemetry.New("test", "", func(string) bool { return true }), Event: func(eventlog.Event) {},
		Connections: func(netip.Addr) int { return 0 },
	}
}

func made(t *testing.T, o SecureOptions) *Secure {
	t.Helper()
	s, err := NewSecure(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestFilesThatDoNotLoad: nothing starts with a file that is missing or says nonsense, and
// the error names its section of the config.
func TestFilesThatDoNotLoad(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "router.test", time.Hour)
	_, other := ca.Pair(t, "other.test", time.Hour)
	for _, c := range []struct {
		what, section, says string
		change              func(*settings.Config)
	}{
		{"no certificate", "tls", "no such file", func(c *settings.Config) { c.TLS.CertFile, c.TLS.KeyFile = filepath.Join(t.TempDir(), "none"), key }},
		{"the key of another", "admin_tls", "", func(c *settings.Config) { c.AdminTLS.CertFile, c.AdminTLS.KeyFile = cert, other }},
		{"clients' authorities", "tls", "", func(c *settings.Config) {
			c.TLS.CertFile, c.TLS.KeyFile, c.TLS.ClientCAFile = cert, key, file(t, "nonsense")
		}},
		{"engines' authorities", "engine_tls", "", func(c *settings.Config) { c.EngineTLS.CAFile = file(t, "nonsense") }},
		{"API keys", "keys.file", "", func(c *settings.Config) { c.Keys.File = file(t, "keys: 7") }},
	} {
		_, err := NewSecure(options(c.change))
		var p *settings.Problem
		if !errors.As(err, &p) || p.Key != c.section || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want section %s", c.what, err, c.section)
		}
	}
	o := options(func(c *settings.Config) { c.EngineTLS.CAFile = ca.File(t) })
	o.SimTLS = &tls.Config{MinVersion: tls.VersionTLS12}
	if _, err := NewSecure(o); err == nil || !strings.Contains(err.Error(), "leave engine_tls out") {
		t.Errorf("two ways to speak to engines: %v", err)
	}
}

// TestWhatIsInForce: without files nothing is asked of anybody; with them the router says
// which there are, and how engines and it are spoken to.
func TestWhatIsInForce(t *testing.T) {
	s := made(t, options(func(*settings.Config) {}))
	if data, admin := s.Schemes(); data != "http" || admin != "http" {
		t.Errorf("without certificates the router speaks %s and %s", data, admin)
	}
	if s.Keys() != nil || s.KeyCount() != -1 {
		t.Errorf("without a file there are %d keys", s.KeyCount())
	}
	if s.EngineTLS() != nil || len(s.Certificates()) != 0 || len(s.Troubles()) != 0 {
		t.Errorf("without files: certificates %v, troubles %q, TLS to engines: %t", s.Certificates(), s.Troubles(), s.EngineTLS() != nil)
	}
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "router.test", time.Hour)
	s = made(t, options(func(c *settings.Config) {
		c.TLS.CertFile, c.TLS.KeyFile, c.Keys.File = cert, key, file(t, keys)
		c.EngineTLS.CAFile, c.EngineTLS.ServerName = ca.File(t), "engine.test"
	}))
	list := s.Certificates()
	if data, admin := s.Schemes(); data != "https" || admin != "http" || s.KeyCount() != 1 || s.Keys().Find("secret") == nil {
		t.Errorf("%s %s, %d keys", data, admin, s.KeyCount())
	}
	if len(list) != 1 || list[0].Of != "data" || time.Until(list[0].Expires) > time.Hour {
		t.Errorf("%+v", list)
	}
	if c := s.EngineTLS()(); c.ServerName != "engine.test" || c.RootCAs == nil {
		t.Errorf("%+v", c)
	}
	o := options(func(*settings.Config) {})
	o.SimTLS = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: "simulated"}
	if got := made(t, o).EngineTLS()(); got != o.SimTLS {
		t.Errorf("simulated engines are spoken to with %+v", got)
	}
}

// TestFilesAreWatched: a certificate that cannot take the place of the one in force is reported.
func TestFilesAreWatched(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "router.test", 90*24*time.Hour)
	refused := make(chan string, 10)
	o := options(func(c *settings.Config) {
		c.AdminTLS.CertFile, c.AdminTLS.KeyFile, c.Keys.File = cert, key, file(t, keys)
	})
	o.Event = func(e eventlog.Event) { refused <- e.Kind }
	s := made(t, o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	certtest.Put(t, cert, []byte("nonsense"))
	if got := <-refused; got != "certificate_refused" {
		t.Errorf("%s", got)
	}
	if why := s.Troubles(); len(why) != 1 || len(s.Certificates()) != 1 {
		t.Errorf("%q, %d in force", why, len(s.Certificates()))
	}
	certtest.Put(t, o.Config.Keys.File, []byte("keys: 7"))
	if got := <-refused; got != "keys_refused" {
		t.Errorf("%s", got)
	}
	if why := s.Troubles(); len(why) != 2 || s.KeyCount() != 1 {
		t.Errorf("%q, %d keys", why, s.KeyCount())
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestFailedHandshakesAreLogged: they are counted, and logged with whatever else a server says.
func TestFailedHandshakesAreLogged(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "router.test", time.Hour)
	o := options(func(c *settings.Config) { c.TLS.CertFile, c.TLS.KeyFile = cert, key })
	s := made(t, o)
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	logged := make(lines, 10)
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, ErrorLog: s.ServerLog("data", log.New(logged, "", 0)), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "hello")
	})}
	done := make(chan error, 1)
	go func() { done <- server.Serve(s.DataListener(ln)) }()
	ask := func(c *tls.Config) error {
		transport := &http.Transport{TLSClientConfig: c}
		defer transport.CloseIdleConnections()
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+ln.Addr().String(), http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := transport.RoundTrip(q)
		if err == nil {
			_ = resp.Body.Close()
		}
		return err
	}
	if err := ask(&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: ca.Pool()}); err != nil {
		t.Errorf("a client that knows the authority: %v", err)
	}
	if err := ask(&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: certtest.NewAuthority(t, "another").Pool()}); err == nil {
		t.Error("a client that does not know the authority went on")
	}
	if got := <-logged; !strings.HasPrefix(got, "http: TLS handshake error") {
		t.Errorf("%q", got)
	}
	if err := s.ServerLog("admin", log.New(logged, "", 0)).Output(1, "http: something else"); err != nil {
		t.Error(err)
	}
	if got := <-logged; got != "http: something else\n" {
		t.Errorf("%q", got)
	}
	_ = server.Close()
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
	w := httptest.NewRecorder()
	o.Metrics.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
	const name = "\ndynctl_tls_handshake_failures_total"
	if page := w.Body.Bytes(); !bytes.Contains(page, []byte(name+`{of="data"} 1`)) || bytes.Contains(page, []byte(name+`{of="admin"}`)) {
		t.Errorf("%s", page)
	}
}

// lines takes each line of a log.
type lines chan string

// Write implements io.Writer.
func (l lines) Write(b []byte) (int, error) { l <- string(b); return len(b), nil }

// TestConnectionsAreBounded: at both listeners together, and an address with more is reported.
func TestConnectionsAreBounded(t *testing.T) {
	events := make(chan eventlog.Event, 10)
	o := options(func(*settings.Config) {})
	o.Connections, o.Event = func(netip.Addr) int { return 1 }, func(e eventlog.Event) { events <- e }
	s := made(t, o)
	var d net.Dialer
	var conns []net.Conn
	accepted := make(chan net.Conn, 10)
	for _, over := range []func(net.Listener) net.Listener{s.DataListener, s.AdminListener} {
		ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for bounded := over(ln); ; {
				c, err := bounded.Accept()
				if err != nil {
					return
				}
				accepted <- c
			}
		}()
		t.Cleanup(func() { _ = ln.Close(); <-ended })
		c, err := d.DialContext(t.Context(), "tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		if len(conns) == 1 {
			conns = append(conns, <-accepted)
		}
	}
	if e := <-events; e.Kind != "client_connections_full" || e.Severity != eventlog.Warn || !strings.Contains(e.Text, "127.0.0.1 has 1 connections") {
		t.Errorf("%+v", e)
	}
	if n := s.Addresses().Refused(); n != 1 || len(accepted) != 0 {
		t.Errorf("%d were refused, %d more accepted", n, len(accepted))
	}
	for _, c := range conns {
		_ = c.Close()
	}
}

// TestExposed: a listener that other machines reach is reported, loudly, unless it is under
// TLS and asks who comes.
func TestExposed(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "router.test", time.Hour)
	withTLS := func(c *settings.Config) {
		c.TLS.CertFile, c.TLS.KeyFile, c.AdminTLS.CertFile, c.AdminTLS.KeyFile = cert, key, cert, key
	}
	withKeys := func(c *settings.Config) { c.Keys.File, c.Keys.Required, c.Keys.Admin = file(t, keys), true, true }
	const inside, outside = "127.0.0.1:8000", "0.0.0.0:8000"
	for _, c := range []struct {
		what   string
		change func(*settings.Config)
		l      Listeners
		events []string
	}{
		{"loopback", func(*settings.Config) {}, Listeners{Data: inside, Admin: inside}, nil},
		{"nothing is asked", func(*settings.Config) {}, Listeners{Data: outside, Admin: outside}, []string{"THE DATA PLANE LISTENS ON 0.0.0.0:8000: other machines reach it, and it does not authenticate them", "THE ADMIN API LISTENS ON 0.0.0.0:8000: other machines"}},
		{"keys in the clear", withKeys, Listeners{Data: outside, Admin: inside}, []string{"DATA PLANE LISTENS ON 0.0.0.0:8000: other machines reach it without TLS"}},
		{"a token in the clear", func(*settings.Config) {}, Listeners{Data: inside, Admin: outside, Token: true}, []string{"THE ADMIN API LISTENS ON 0.0.0.0:8000: other machines reach it without TLS"}},
		{"TLS without keys", withTLS, Listeners{Data: outside, Admin: outside, Token: true}, []string{"THE DATA PLANE LISTENS ON 0.0.0.0:8000: other machines reach it, and it does not authenticate them"}},
		{"TLS and keys that need not be shown", func(c *settings.Config) { withTLS(c); withKeys(c); c.Keys.Required = false }, Listeners{Data: outside, Admin: outside}, []string{"THE DATA PLANE"}},
		{"TLS and keys", func(c *settings.Config) { withTLS(c); withKeys(c) }, Listeners{Data: outside, Admin: outside}, nil},
		{"certificates", func(c *settings.Config) {
			withTLS(c)
			c.TLS.ClientCAFile, c.AdminTLS.ClientCAFile = ca.File(t), ca.File(t)
		}, Listeners{Data: outside, Admin: outside}, nil},
	} {
		o := options(c.change)
		list := Exposed(made(t, o).Accesses(o.Config, c.l))
		if len(list) != len(c.events) {
			t.Errorf("%s: %+v", c.what, list)
			continue
		}
		for i, e := range list {
			if e.Kind != "listener_exposed" || e.Severity != eventlog.Warn || !strings.Contains(e.Text, c.events[i]) {
				t.Errorf("%s: %+v", c.what, e)
			}
		}
	}
}
