package router_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/certtest"
	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// load is OpenSSL's client in eight threads, half of which keep their connection.
// Each new certificate that one sees is a line, and the end counts requests.
const load = `
import http.client, ssl, sys, threading
port, ca, body = int(sys.argv[1]), sys.argv[2], sys.argv[3]
done, lock, seen, counts = threading.Event(), threading.Lock(), set(), [0, 0]
def client(keep):
    c = None
    while not done.is_set():
        try:
            if c is None:
                c = http.client.HTTPSConnection("127.0.0.1", port, context=ssl.create_default_context(cafile=ca), timeout=20)
            c.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            r = c.getresponse()
            text = r.read()
            ok = r.status == 200 and b"[DONE]" in text
            name = dict(x[0] for x in c.sock.getpeercert()["subject"])["commonName"] if c.sock else ""
            why = (r.status, text[-200:])
        except Exception as e:
            ok, name, why = False, "", e
        with lock:
            counts[0 if ok else 1] += 1
            if not ok:
                print("failed", why, flush=True)
            if name and not keep and name not in seen:
                seen.add(name)
                print("saw", name, flush=True)
        if not keep or not ok:
            c and c.close()
            c = None
threads = [threading.Thread(target=client, args=(i % 2 == 0,)) for i in range(8)]
[t.start() for t in threads]
sys.stdin.read()
done.set()
[t.join() for t in threads]
print("end", *counts, flush=True)
`

// TestReplacedCertificateUnderLoad: while streams run over kept and over new
// connections, certificates are replaced by others, one of them by an expired one:
// no request fails, and new connections see each good one.
func TestReplacedCertificateUnderLoad(t *testing.T) {
	p := external.Python(t, "ssl", "http.client")
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "router-0.test", 90*24*time.Hour)
	r := startWith(t, loopback.Options{Fleet: "1a:profile=instant", TLS: &tls.Config{RootCAs: ca.Pool(), MinVersion: tls.VersionTLS12}}, func(c *settings.Config) {
		c.TLS.CertFile, c.TLS.KeyFile = cert, key
		c.AdminTLS.CertFile, c.AdminTLS.KeyFile = cert, key
	})
	base, err := url.Parse(r.URL)
	if err != nil || base.Scheme != "https" || !strings.HasPrefix(r.AdminURL, "https://") {
		t.Fatalf("%s %s: %v", r.URL, r.AdminURL, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, p, "-c", load, base.Port(), ca.File(t), fmt.Sprintf(`{"model":%q,"prompt":"hello","max_tokens":8,"stream":true}`, "sim"))
	in, lines := talkTo(t, cmd)
	next := func() string {
		if !lines.Scan() {
			t.Fatalf("the client ended: %v", lines.Err())
		}
		return lines.Text()
	}
	if got := next(); got != "saw router-0.test" {
		t.Fatal(got)
	}
	for i := 1; i <= 4; i++ {
		name, valid := fmt.Sprintf("router-%d.test", i), 90*24*time.Hour
		if i == 2 {
			valid = -time.Hour
		}
		raw, rawKey := ca.Leaf(t, name, valid)
		certtest.Put(t, key, rawKey)
		certtest.Put(t, cert, raw)
		if i == 2 {
			if err := loopback.Wait(r.wait(), "the refusal", func() error {
				if s := r.status(); !strings.Contains(strings.Join(s.Reasons, " "), "router-2.test expired on") {
					return fmt.Errorf("%q", s.Reasons)
				}
				// Both listeners read the files, each at times of its own.
				if n := r.metric(`dynctl_certificate_reloads_total{of="admin",result="refused"}`); n < 1 {
					return fmt.Errorf("%v certificates of the admin API were refused", n)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
			continue
		}
		if got := next(); got != "saw "+name {
			t.Fatalf("%s, want %s", got, name)
		}
	}
	_ = in.Close()
	var ok, failed int
	if _, err := fmt.Sscanf(next(), "end %d %d", &ok, &failed); err != nil || failed != 0 || ok < 50 {
		t.Errorf("%d requests went well, %d did not: %v", ok, failed, err)
	}
	for lines.Scan() {
		t.Errorf("after its end the client says %q", lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if s := r.status(); s.State != "ready" || !s.Access.Data.TLS || !s.Access.Admin.TLS || s.Access.Data.ClientCertificates {
		t.Errorf("%s %q %+v", s.State, s.Reasons, s.Access)
	}
	if n := r.metric(`dynctl_certificate_reloads_total{of="data",result="ok"}`); n != 3 {
		t.Errorf("%v certificates were put into force, not 3", n)
	}
	if at := time.Unix(int64(r.metric(`dynctl_certificate_expires_timestamp_seconds{of="data"}`)), 0); time.Until(at) < 89*24*time.Hour {
		t.Errorf("the certificate in force ends on %v", at)
	}
}

// knock shows a certificate and says whether it was let in.
const knock = `
import http.client, ssl, sys
port, ca, cert, key = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
context.check_hostname = False
context.load_cert_chain(cert, key)
c = http.client.HTTPSConnection("127.0.0.1", int(port), context=context, timeout=20)
try:
    c.request("GET", "/v1/models")
    print(c.getresponse().status)
except (ssl.SSLError, OSError) as e:
    print("refused")
`

// TestAuthorityThatIsTakenOut: certificates of an authority that is taken out of
// tls.client_ca_file open no further connection, those of the one in its place do, and
// failed handshakes are counted.
func TestAuthorityThatIsTakenOut(t *testing.T) {
	p := external.Python(t, "ssl", "http.client")
	server, old, renewed := certtest.NewAuthority(t, "servers"), certtest.NewAuthority(t, "old"), certtest.NewAuthority(t, "renewed")
	cert, key := server.Pair(t, "router.test", time.Hour)
	theirs, theirKey := old.Pair(t, "client.test", time.Hour)
	mine, mineKey := renewed.Leaf(t, "client.test", time.Hour)
	pair, err := tls.X509KeyPair(mine, mineKey)
	if err != nil {
		t.Fatal(err)
	}
	trusted := filepath.Join(t.TempDir(), "clients.pem")
	read := func(path string) []byte {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	certtest.Put(t, trusted, append(read(old.File(t)), read(renewed.File(t))...))
	r := startWith(t, loopback.Options{Fleet: "1a:profile=instant", TLS: &tls.Config{RootCAs: server.Pool(), MinVersion: tls.VersionTLS12, ServerName: "router.test", Certificates: []tls.Certificate{pair}}}, func(c *settings.Config) {
		c.TLS.CertFile, c.TLS.KeyFile, c.TLS.ClientCAFile = cert, key, trusted
	})
	base, err := url.Parse(r.URL)
	if err != nil {
		t.Fatal(err)
	}
	ask := func() string {
		out, err := exec.CommandContext(t.Context(), p, "-c", knock, base.Port(), server.File(t), theirs, theirKey).Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	if got := ask(); got != "200" {
		t.Fatal(got)
	}
	certtest.Put(t, trusted, read(renewed.File(t)))
	r.eventually("the authorities", func() error {
		if len(r.events("certificate_replaced")) == 0 {
			return errors.New("as before")
		}
		return nil
	})
	if got := ask(); got != "refused" {
		t.Errorf("a client of an authority that was taken out: %s", got)
	}
	r.eventually("the failure in the metrics", func() error {
		if n := r.metric(`dynctl_tls_handshake_failures_total{of="data"}`); n != 1 {
			return fmt.Errorf("%v", n)
		}
		return nil
	})
	r.Client.CloseIdleConnections()
	if a := r.send(http.MethodGet, "/v1/models", nil); a.status != http.StatusOK {
		t.Errorf("a client of the authority in its place: %s", a)
	}
}

// tlsFront is TLS before an engine: it shows a certificate for a name, and asks for one
// that routers have.
func tlsFront(t *testing.T, engines, routers *certtest.Authority, name string, to *url.URL) *url.URL {
	cert, key := engines.Leaf(t, name, time.Hour)
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	s := httptest.NewUnstartedServer(proxyTo(to, transport))
	s.Config.ErrorLog = quietLog
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, ClientCAs: routers.Pool(), ClientAuth: tls.RequireAndVerifyClientCert}
	s.StartTLS()
	t.Cleanup(func() { s.CloseClientConnections(); s.Close(); transport.CloseIdleConnections() })
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// TestEngineTLS: engines behind a private authority are reached by the router's settings, for
// requests, probes and tokens. An engine of another authority or another name is not taken
// for one of them, and one that lets other routers in does not let this one in.
func TestEngineTLS(t *testing.T) {
	ca, own, other := certtest.NewAuthority(t, "engines'"), certtest.NewAuthority(t, "routers'"), certtest.NewAuthority(t, "others'")
	cert, key := own.Pair(t, "router.test", time.Hour)
	reasons := []string{"", "certificate", "certificate", "other.test"}
	r := startCold(t, loopback.Options{Fleet: "4a:profile=instant", Specs: func(specs []workers.Spec) []workers.Spec {
		for i, f := range []struct {
			engines, routers *certtest.Authority
			name             string
		}{{ca, own, "engine.test"}, {other, own, "engine.test"}, {ca, other, "engine.test"}, {ca, own, "other.test"}} {
			specs[i].URL = tlsFront(t, f.engines, f.routers, f.name, specs[i].URL)
		}
		return specs
	}}, func(s *settings.Config) {
		s.EngineTLS = settings.EngineTLS{CAFile: ca.File(t), CertFile: cert, KeyFile: key, ServerName: "engine.test"}
	})
	r.eventually("the engines' answers", func() error {
		for i, reason := range reasons {
			w := r.worker(fmt.Sprint("aggregated-", i))
			if w.Usable != (reason == "") || !strings.Contains(w.Reason, reason) {
				return fmt.Errorf("%s: usable %v: %s", w.Name, w.Usable, w.Reason)
			}
		}
		return nil
	})
	a := r.post("/v1/completions", object{"model": "sim", "prompt": strings.Repeat("words ", 40), "max_tokens": 2})
	if c := r.receipt(a.header.Get("X-Dynctl-Decision")); c.Inputs.ISLSource != "engine" || a.header.Get("X-Dynctl-Worker") != "aggregated-0/dp0" {
		t.Errorf("%v, tokens by %s", a.header, c.Inputs.ISLSource)
	}
}

// TestExposedListenersAreReported: loudly, at the start.
func TestExposedListenersAreReported(t *testing.T) {
	r, err := router.New(t.Context(), router.Options{Config: loopback.FastConfig()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close(context.Background()) }()
	for _, c := range []struct{ data, admin, want string }{
		{"127.0.0.1:8000", "127.0.0.1:8001", ""},
		{"0.0.0.0:8000", "127.0.0.1:8001", "THE DATA PLANE LISTENS ON 0.0.0.0:8000"},
	} {
		h, err := r.AdminHandler(router.AdminOptions{Name: c.data, AdminName: c.admin})
		if err != nil {
			t.Fatal(err)
		}
		q := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1/admin/v1/events", http.NoBody)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, q)
		text := w.Body.String()
		if got := strings.Contains(text, "listener_exposed"); got != (c.want != "") || !strings.Contains(text, c.want) {
			t.Errorf("%v: %s", c, text)
		}
	}
}
