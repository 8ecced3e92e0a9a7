package natsbus

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/rig/certtest"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/wait"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// eventually waits for a condition as long as the test may run.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	if !wait.Until(t.Context(), 5*time.Millisecond, ok) {
		t.Fatalf("%s never was", what)
	}
}

// warnings is a log.
type warnings struct {
	mu  sync.Mutex
	all strings.Builder
}

func (w *warnings) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.all.Write(b)
}

func (w *warnings) has(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Contains(w.all.String(), text)
}

// router is a bus with an exchange that runs on it.
type router struct {
	bus  *Bus
	ex   *replicas.Exchange
	stop context.CancelFunc
	done sync.WaitGroup
}

const rank = replicas.Rank(7)

func start(t *testing.T, n int, bus *Bus) *router {
	t.Helper()
	r := &router{bus: bus}
	var err error
	r.ex, err = replicas.NewExchange(replicas.Identity{Fleet: "a", Origin: fmt.Sprint(n), Epoch: time.Now()}, bus, time.Now, func(into []replicas.Row) []replicas.Row {
		return append(into, replicas.Row{Rank: rank, Load: replicas.Load{Requests: 1 << n}})
	}, replicas.More{})
	if err != nil {
		t.Fatal(err)
	}
	r.ex.View().SetRanks([]replicas.Rank{rank})
	ctx, cancel := context.WithCancel(t.Context())
	r.stop = cancel
	r.done.Go(func() { r.ex.Run(ctx) })
	return r
}

func (r *router) end() {
	r.stop()
	r.done.Wait()
	_ = r.bus.Close()
}

// sumOf is what the others have on the rank.
func sumOf(x *replicas.Exchange) replicas.Sum {
	var sums [1]replicas.Sum
	x.View().Sums(time.Now(), []replicas.Rank{rank}, sums[:])
	return sums[0]
}

// sees reports whether a router has a sum of requests from others.
func (r *router) sees(requests int) func() bool {
	return func() bool {
		s := sumOf(r.ex)
		return s.Since.IsZero() == (requests == 0) && s.Requests == requests
	}
}

// free is an address whose port was free a moment ago.
func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func embed(t *testing.T, c Cluster) *Bus {
	t.Helper()
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	b, err := Embed(c)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestCluster: four routers, of which three know only the first one, have each other's
// load. One that ends is counted out, and comes back under its old address, also where it
// is the one that all others know.
func TestCluster(t *testing.T) {
	ca := certtest.NewAuthority(t, "routers")
	cert, key := ca.Leaf(t, "router", time.Hour)
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	secure := &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: ca.Pool(), ClientCAs: ca.Pool(), ClientAuth: tls.RequireAndVerifyClientCert}
	for name, c := range map[string]Cluster{"plain": {}, "TLS and password": {TLS: secure, Password: "secret"}} {
		t.Run(name, func(t *testing.T) {
			var routers [4]*router
			c.Listen = "127.0.0.1:0"
			var first string
			join := func(n int) {
				c := c
				c.Name = fmt.Sprint("router-", n)
				if n == 0 && first != "" {
					c.Listen = first
				}
				if first != "" {
					c.Routes = []string{first}
				}
				routers[n] = start(t, n, embed(t, c))
			}
			join(0)
			first = routers[0].bus.Addr().String()
			for n := 1; n < 4; n++ {
				join(n)
			}
			all := func() {
				for n, r := range routers {
					eventually(t, fmt.Sprint("the sum at router ", n), r.sees(15-1<<n))
				}
			}
			all()
			for _, n := range []int{2, 0} {
				routers[n].end()
				for m, r := range routers {
					if m != n {
						eventually(t, fmt.Sprint("the sum without router ", n), r.sees(15-1<<n-1<<m))
					}
				}
				join(n)
				all()
			}
			for _, r := range routers {
				r.end()
			}
		})
	}
}

// TestFoundByName: routers that are found by one name with the addresses of all of them have each
// other's load, with certificates of that name. One that returns is found by the others also where
// its own resolver knows only itself; so is one at a new address.
func TestFoundByName(t *testing.T) {
	ca := certtest.NewAuthority(t, "routers")
	cert, key := ca.Leaf(t, "routers.test", time.Hour)
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(free(t))
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var known []string // by the name
	var log warnings
	var routers [4]*router
	join := func(n int, alone bool) {
		own := fmt.Sprint("127.0.44.", n+1)
		mu.Lock()
		if !slices.Contains(known, own) {
			known = append(known, own)
		}
		mu.Unlock()
		routers[n] = start(t, n, embed(t, Cluster{
			Name: fmt.Sprint("router-", n), Listen: net.JoinHostPort(own, port), Routes: []string{net.JoinHostPort("routers.test", port)},
			TLS: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: ca.Pool(), ClientCAs: ca.Pool(), ClientAuth: tls.RequireAndVerifyClientCert},
			Log: slog.New(slog.NewTextHandler(&log, nil)),
			lookup: func(context.Context, string) ([]string, error) {
				mu.Lock()
				defer mu.Unlock()
				if alone {
					return []string{own}, nil
				}
				return slices.Clone(known), nil
			},
		}))
	}
	all := func() {
		t.Helper()
		sum := 0
		for n, r := range routers {
			if r != nil {
				sum |= 1 << n
			}
		}
		for n, r := range routers {
			if r != nil {
				eventually(t, fmt.Sprint("the sum at router ", n), r.sees(sum&^(1<<n)))
			}
		}
	}
	for n := range 3 {
		join(n, n == 0)
	}
	all()
	for range 3 { // by chance it could be found anyway
		routers[0].end()
		routers[0] = nil
		all()
		join(0, true)
		all()
	}
	join(3, false)
	all()
	for _, r := range routers {
		r.end()
	}
	if log.has("cannot be found") {
		t.Error("routes could not be changed")
	}
}

// TestAddresses: an address is kept for a while after the name has lost it, and there is a limit.
func TestAddresses(t *testing.T) {
	f := (&Cluster{Routes: []string{"routers:6222"}}).found(nil)
	now := time.Unix(1_800_000_000, 0)
	for i, c := range []struct {
		list    []string
		after   time.Duration
		changed bool
		kept    int
	}{
		{[]string{"10.0.0.1"}, 0, true, 1},
		{[]string{"10.0.0.1"}, 0, false, 1},
		{[]string{"10.0.0.2"}, forgetAfter, true, 2},
		{[]string{"10.0.0.2"}, time.Second, true, 1},
		{nil, forgetAfter, false, 1},
		{nil, time.Second, true, 0},
	} {
		now = now.Add(c.after)
		if got := f.note(now, c.list); got != c.changed || len(f.seen) != c.kept {
			t.Errorf("lookup %d: changed %v, %v", i, got, f.seen)
		}
	}
	var many []string
	for i := range 1000 {
		many = append(many, fmt.Sprint("10.0.1.", i))
	}
	if f.note(now, many); len(f.seen) != maxAddresses {
		t.Errorf("%d addresses are kept", len(f.seen))
	}
	for _, c := range []Cluster{{}, {Routes: []string{"127.0.0.1:6222"}}, {Routes: []string{"[::1]:6222"}}, {Routes: []string{"a:1", "b:1"}}} {
		if c.found(nil) != nil {
			t.Errorf("%v is a name of several routers", c.Routes)
		}
	}
}

// TestWrongPassword: a router with another password, or none, gets and gives nothing, and
// the log says why.
func TestWrongPassword(t *testing.T) {
	for name, password := range map[string]string{"wrong": "guess", "none": ""} {
		t.Run(name, func(t *testing.T) {
			var log warnings
			first := Cluster{Name: "first", Listen: "127.0.0.1:0", Password: "secret", Log: slog.New(slog.NewTextHandler(&log, nil))}
			a := start(t, 0, embed(t, first))
			defer a.end()
			join := func(n int, password string) *router {
				return start(t, n, embed(t, Cluster{Name: fmt.Sprint("router-", n), Listen: "127.0.0.1:0", Routes: []string{a.bus.Addr().String()}, Password: password}))
			}
			b := join(1, password)
			defer b.end()
			eventually(t, "a warning of the password", func() bool { return log.has("authentication error") })
			c := join(2, "secret")
			defer c.end()
			eventually(t, "the load of the router with the password", a.sees(1<<2))
			eventually(t, "the load of the first router", c.sees(1<<0))
			if !b.sees(0)() {
				t.Error("load came through")
			}
		})
	}
}

// TestOtherClient: the server takes no client but its own router.
func TestOtherClient(t *testing.T) {
	b := embed(t, Cluster{Name: "a", Listen: "127.0.0.1:0"})
	defer b.Close()
	if _, err := nats.Connect(b.server.ClientURL()); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("got %v", err)
	}
}

// TestRefused: settings that are not safe, and addresses that are none or taken.
func TestRefused(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, c := range []struct {
		Cluster
		want string
	}{
		{Cluster{Listen: "0.0.0.0:0"}, "needs TLS"},
		{Cluster{Listen: ":0", Password: "secret"}, "needs TLS"},
		{Cluster{Listen: "0.0.0.0:0", TLS: &tls.Config{}}, "needs a password or client certificates"},
		{Cluster{Listen: "127.0.0.1"}, "address to listen on"},
		{Cluster{Listen: "127.0.0.1:0", Routes: []string{"router-1"}}, "address of another router"},
		{Cluster{Listen: l.Addr().String()}, "in use"},
	} {
		if b, err := Embed(c.Cluster); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want %q", c.Cluster, err, c.want)
			if b != nil {
				_ = b.Close()
			}
		}
	}
}

// TestExternal: routers meet at a server that starts after them, and messages beyond its
// limit are an error.
func TestExternal(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	var routers [2]*router
	for n := range routers {
		b, err := Dial(Server{URL: fmt.Sprintf("nats://me:secret@127.0.0.1:%d", port)})
		if err != nil {
			t.Fatal(err)
		}
		routers[n] = start(t, n, b)
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: port, Username: "me", Password: "secret", NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	for n, r := range routers {
		eventually(t, fmt.Sprint("the sum at router ", n), r.sees(3-1<<n))
	}
	if err := routers[0].bus.Publish(make([]byte, 2<<20)); err == nil {
		t.Error("a message of 2 MiB is taken")
	}
	if routers[0].bus.Addr() != nil {
		t.Error("it has an address for routers")
	}
	for _, r := range routers {
		r.end()
	}
	s.Shutdown()
	s.WaitForShutdown()
}

// TestSlowReader: a peer that connects and reads nothing holds up no other router.
func TestSlowReader(t *testing.T) {
	a := start(t, 0, embed(t, Cluster{Name: "a", Listen: "127.0.0.1:0"}))
	defer a.end()
	slow, err := net.Dial("tcp", a.bus.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	if _, err := slow.Write([]byte("CONNECT {\"name\":\"slow\",\"verbose\":false}\r\nRS+ $G dynctl.replicas\r\nPING\r\n")); err != nil {
		t.Fatal(err)
	}
	b := start(t, 1, embed(t, Cluster{Name: "b", Listen: "127.0.0.1:0", Routes: []string{a.bus.Addr().String()}}))
	defer b.end()
	eventually(t, "the load of the other router", a.sees(1<<1))
	eventually(t, "the load of the first router", b.sees(1<<0))
	big := make([]byte, replicas.MaxMessage)
	for range 4 * maxPending / len(big) {
		if err := a.bus.Publish(big); err != nil {
			t.Fatal(err)
		}
	}
	was := b.ex.View().Snapshot(time.Now()).Origins[0].Messages
	eventually(t, "a later message", func() bool {
		o := b.ex.View().Snapshot(time.Now()).Origins[0]
		return o.Messages > was && o.Live
	})
}

// TestCopyOfARank: a copy of a rank crosses two servers whole, and none comes of a router that
// ends in the middle.
func TestCopyOfARank(t *testing.T) {
	a := embed(t, Cluster{Name: "a", Listen: "127.0.0.1:0"})
	defer a.Close()
	b := embed(t, Cluster{Name: "b", Listen: "127.0.0.1:0", Routes: []string{a.Addr().String()}})
	defer b.Close()
	whole := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
	old, asker := replicas.Identity{Fleet: "one fleet.*", Origin: "old > new", Epoch: time.Now()}, replicas.Identity{Fleet: "one fleet.*", Origin: "new", Epoch: time.Now()}
	g := replicas.NewGiver(old, time.Now, func(replicas.Rank) ([]byte, error) { return whole, nil })
	var pieces atomic.Int64
	var ends atomic.Bool
	if err := a.Answer(old.Address(), func(request []byte) []byte {
		if n := pieces.Add(1); ends.Load() && n > 3 {
			return nil
		}
		return g.Answer(request)
	}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the copy", func() bool {
		began := time.Now()
		got, err := replicas.Fetch(t.Context(), b, &asker, old.Origin, rank)
		if err == nil && !bytes.Equal(got, whole) {
			t.Fatalf("%d bytes came of %d, or others", len(got), len(whole))
		}
		if err == nil {
			t.Logf("%d bytes in %d pieces after %v", len(got), pieces.Load(), time.Since(began))
		}
		return err == nil
	})
	pieces.Store(0)
	ends.Store(true)
	if _, err := replicas.Fetch(t.Context(), b, &asker, old.Origin, rank); err == nil || !strings.Contains(err.Error(), "no answer in 3 tries") {
		t.Errorf("a router that ends in the middle: %v", err)
	}
}
