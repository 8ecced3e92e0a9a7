package upstream

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// engine answers every request with 600 bytes of JSON.
func engine(b testing.TB) *httptest.Server {
	srv := newEngine()
	srv.Start()
	b.Cleanup(srv.Close)
	return srv
}

func newEngine() *httptest.Server {
	answer := []byte(`{"choices":[{"text":"` + strings.Repeat("x", 570) + `"}]}`)
	return httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(answer)
	}))
}

// BenchmarkLeg is one request to an engine in the same process, whose own cost
// is in both figures.
func BenchmarkLeg(b *testing.B) {
	for _, size := range []int{1 << 10, 220 << 10} {
		body := bytes.Repeat([]byte("x"), size)
		b.Run(fmt.Sprintf("own/%dKB", size>>10), func(b *testing.B) {
			srv := engine(b)
			c := newClient(b, Options{})
			leg := legTo(b, srv.URL)
			leg.Header = http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer x"}, "User-Agent": {"bench"}}
			leg.Body = [][]byte{body}
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			b.ReportAllocs()
			for b.Loop() {
				r, err := c.Do(ctx, leg)
				if err != nil {
					b.Fatal(err)
				}
				for {
					if _, err := r.Next(); err != nil {
						break
					}
				}
				r.Close()
			}
		})
		b.Run(fmt.Sprintf("transport/%dKB", size>>10), func(b *testing.B) {
			srv := engine(b)
			tr := &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}
			defer tr.CloseIdleConnections()
			buf := make([]byte, 32<<10)
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			b.ReportAllocs()
			for b.Loop() {
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, srv.URL+"/v1/completions", bytes.NewReader(body))
				if err != nil {
					b.Fatal(err)
				}
				req.Header = http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer x"}, "User-Agent": {"bench"}}
				resp, err := tr.RoundTrip(req)
				if err != nil {
					b.Fatal(err)
				}
				for {
					if _, err := resp.Body.Read(buf); err != nil {
						break
					}
				}
				_ = resp.Body.Close()
			}
		})
	}
}

// BenchmarkLegTLS is that to an https engine.
func BenchmarkLegTLS(b *testing.B) {
	srv := newEngine()
	srv.StartTLS()
	defer srv.Close()
	roots := x509.NewCertPool()
	roots.AddCert(srv.Certificate())
	c := newClient(b, Options{TLS: func() *tls.Config { return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12} }})
	leg := legTo(b, srv.URL)
	leg.Body = [][]byte{bytes.Repeat([]byte("x"), 1<<10)}
	b.ReportAllocs()
	for b.Loop() {
		r, err := c.Do(b.Context(), leg)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := r.ReadAll(1 << 20); err != nil {
			b.Fatal(err)
		}
		r.Close()
	}
}

// BenchmarkAlive is the look at an unused connection before it is used.
func BenchmarkAlive(b *testing.B) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	nc, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	cn := newConn(nc)
	defer cn.close()
	b.ReportAllocs()
	for b.Loop() {
		if !cn.alive() {
			b.Fatal("dead")
		}
	}
}
