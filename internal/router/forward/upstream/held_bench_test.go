package upstream_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/pair"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// heldLegs are a prefill leg of 64 KiB and a decode leg that ends when it would be sent. Without
// a transfer no bootstrap server is asked.
type heldLegs struct {
	c     *upstream.Client
	leg   upstream.Leg
	t     *disagg.Transfer
	fresh bool
	began time.Time
	held  time.Duration
}

var errSent = errors.New("the decode leg would be sent")

func (l *heldLegs) Prefill(ctx context.Context, connects, written func()) error {
	l.leg.Connects, l.leg.Written = func(bool) { connects() }, func(fresh bool) {
		l.fresh = fresh
		written()
	}
	r, err := l.c.Do(ctx, &l.leg)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = r.ReadAll(1 << 10)
	return err
}

func (l *heldLegs) Prepare(ctx context.Context) {
	if l.t != nil {
		l.t.Prepare(ctx)
	}
}

func (l *heldLegs) Decode(ctx context.Context) error {
	if l.t != nil {
		if err := l.t.Meet(ctx, l.fresh); err != nil {
			return err
		}
	}
	l.held = time.Since(l.began)
	return errSent
}

func (l *heldLegs) Begun() bool     { return false }
func (l *heldLegs) Stop() bool      { return true }
func (l *heldLegs) Both(error) bool { return true } // the prefill leg ends by itself
func (l *heldLegs) Panicked(any)    {}

// BenchmarkHeld is how long a decode leg is held: until the prefill's request of 64 KiB was
// written on a new connection, and on one that was there. Over Mooncake a new connection
// has the bootstrap server asked, too, unless the engine was seen within a second. Beside them
// stands what a connect and a write of the same bytes take with nothing of the router's, and the
// same with a bare GET of the bootstrap server behind it. Medians and 99th percentiles are in µs.
func BenchmarkHeld(b *testing.B) {
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		_, _ = io.Copy(io.Discard, q.Body) // a client that leaves is none here
	}))
	defer srv.Close()
	base, err := url.Parse(srv.URL)
	if err != nil {
		b.Fatal(err)
	}
	boot := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"0":{"engine_id":"a","worker_addr":{"0":{"0":"tcp://127.0.0.1:1"}}}}`)
	}))
	defer boot.Close()
	meet, err := workers.ParseSpec(workers.Prefill, srv.URL+",name=p,connector=mooncake,bootstrap="+strings.TrimPrefix(boot.URL, "http://"))
	if err != nil {
		b.Fatal(err)
	}
	registry := workers.NewRegistry(func(eventlog.Event) {})
	if _, err := registry.Apply("flag", []workers.Spec{meet}); err != nil {
		b.Fatal(err)
	}
	w, _ := registry.Snapshot().Worker("p")
	mooncake, err := disagg.NewConnector(workers.ConnectorMooncake, disagg.Options{})
	if err != nil {
		b.Fatal(err)
	}
	on := boot.Listener.Addr().(*net.TCPAddr)
	at := workers.KVAddress{EngineID: "a", Host: on.IP.String(), Port: on.Port} // never seen
	body := make([]byte, 64<<10)
	raw := append(fmt.Appendf(nil, "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", len(body)), body...)
	var fresh, reused, plain, unseen, seen, asked []time.Duration
	hold := func(c *upstream.Client, t *disagg.Transfer) time.Duration {
		l := &heldLegs{c: c, t: t, leg: upstream.Leg{Base: base, Path: "/", Method: http.MethodPost, Body: [][]byte{body}}, began: time.Now()}
		if _, end := pair.Begin(context.Background(), nil, l, true); !errors.Is(end.Err, errSent) {
			b.Fatal(end)
		}
		return l.held
	}
	for b.Loop() {
		c := upstream.New(upstream.Options{})
		fresh = append(fresh, hold(c, nil))
		reused = append(reused, hold(c, nil))
		c.Close()
		for _, times := range []*[]time.Duration{&unseen, &seen} {
			if times == &unseen {
				w.Ranks[0].SetKVAddress(&at)
			}
			t, err := mooncake.Begin(disagg.Dispatch{RequestID: "r", Facts: api.Facts{Kind: api.Completion}, Prefill: workers.Peer{Worker: w, Rank: w.Ranks[0]}})
			if err != nil || t.Mode() != disagg.Held {
				b.Fatal(t.Mode(), err)
			}
			c := upstream.New(upstream.Options{})
			*times = append(*times, hold(c, t))
			t.PrefillEnded(false)
			c.Close()
		}
		began := time.Now()
		conn, err := net.Dial("tcp", base.Host)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := conn.Write(raw); err != nil {
			b.Fatal(err)
		}
		plain = append(plain, time.Since(began))
		q, err := boot.Client().Get(boot.URL + "/query")
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, q.Body); err != nil {
			b.Fatal(err)
		}
		_ = q.Body.Close()
		asked = append(asked, time.Since(began))
		if _, err := io.Copy(io.Discard, conn); err != nil {
			b.Fatal(err)
		}
		_ = conn.Close()
	}
	for name, all := range map[string][]time.Duration{"fresh": fresh, "reused": reused, "plain": plain, "unseen": unseen, "seen": seen, "plain-asked": asked} {
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds()), name+"-p50-µs")
		b.ReportMetric(float64(all[len(all)*99/100].Microseconds()), name+"-p99-µs")
	}
}
