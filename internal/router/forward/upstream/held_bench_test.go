package upstream_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
)

// BenchmarkHeld is how long a decode leg is held (until the prefill's request of 64 KiB was
// written on a new connection, and on one that was there), beside what a connect and a write
// of the same bytes take with nothing of the router's. The 99th percentiles are in µs.
func BenchmarkHeld(b *testing.B) {
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		_, _ = io.Copy(io.Discard, q.Body) // a client that leaves is none here
	}))
	defer srv.Close()
	base, err := url.Parse(srv.URL)
	if err != nil {
		b.Fatal(err)
	}
	body := make([]byte, 64<<10)
	raw := append(fmt.Appendf(nil, "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", len(body)), body...)
	var fresh, reused, plain []time.Duration
	leg := func(c *upstream.Client, into *[]time.Duration) {
		began := time.Now()
		r, err := c.Do(context.Background(), &upstream.Leg{
			Base: base, Path: "/", Method: http.MethodPost, Body: [][]byte{body},
			Written: func(bool) { *into = append(*into, time.Since(began)) },
		})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := r.ReadAll(1 << 10); err != nil {
			b.Fatal(err)
		}
		r.Close()
	}
	for b.Loop() {
		c := upstream.New(upstream.Options{})
		leg(c, &fresh)
		leg(c, &reused)
		c.Close()
		began := time.Now()
		conn, err := net.Dial("tcp", base.Host)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := conn.Write(raw); err != nil {
			b.Fatal(err)
		}
		plain = append(plain, time.Since(began))
		if _, err := io.Copy(io.Discard, conn); err != nil {
			b.Fatal(err)
		}
		_ = conn.Close()
	}
	for name, all := range map[string][]time.Duration{"fresh": fresh, "reused": reused, "plain": plain} {
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)*99/100].Microseconds()), name+"-p99-µs")
	}
}
