package router

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"testing"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// Piped is a router and its engines for a synctest bubble: the whole path of a request, with
// net/http's server before it and the router's own client behind it, over pipes in place of
// sockets. It runs nothing beside requests.
type Piped struct {
	*Router
	// Client sends requests to the router, at http://router.
	Client *http.Client
}

// NewPiped makes a router in front of the workers of a config, all healthy, for whose hosts
// engine answers. All ends with the test.
func NewPiped(t *testing.T, c settings.Config, engine http.Handler) *Piped {
	t.Helper()
	r, err := New(t.Context(), Options{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	engines, door := pipeListener(make(chan net.Conn)), pipeListener(make(chan net.Conn))
	r.client = upstream.New(upstream.Options{Dial: engines.dial})
	r.served = newServed(r.base, r.entry, r.engines, r.observing, r.others, r.deciding)
	r.door = newDoor(r)
	for _, w := range r.registry.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
		for _, k := range w.Ranks {
			if err := r.predicted.AddRank(kvindex.Rank(k.Slot), k.Number, k.Label); err != nil {
				t.Fatal(err)
			}
		}
	}
	quiet := log.New(io.Discard, "", 0)
	servers := []*http.Server{NewServer(engine, quiet), r.DataServer(quiet)}
	for i, ln := range []net.Listener{engines, door} {
		go func() { _ = servers[i].Serve(ln) }()
	}
	p := &Piped{Router: r, Client: &http.Client{Transport: &http.Transport{DialContext: door.dial}}}
	t.Cleanup(func() {
		p.Client.CloseIdleConnections()
		for _, s := range servers {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := r.Balanced(); err != nil {
			t.Error(err)
		}
		if err := r.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return p
}

// ErrorCode is the one in a request's receipt.
func (p *Piped) ErrorCode(decision string) (string, error) {
	c, ok := p.receipts.Find(decision)
	if !ok {
		return "", fmt.Errorf("no receipt %s", decision)
	}
	return c.Outcome.ErrorCode, nil
}

// pipeListener accepts the server's ends of pipes.
type pipeListener chan net.Conn

func (l pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l <- theirs:
		return ours, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l pipeListener) Accept() (net.Conn, error) {
	if c, ok := <-l; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (l pipeListener) Close() error   { close(l); return nil }
func (l pipeListener) Addr() net.Addr { return &net.TCPAddr{} }
