package siblings_test

import (
	"bytes"
	"context"
	"errors"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/workers"
)

// hub is a transport between routers of this process, for messages and requests.
type hub struct {
	mu      sync.Mutex // guards the fields below
	ports   []*hubPort
	answers map[string]func([]byte) []byte
}

type hubPort struct {
	hub  *hub
	name string
	in   chan []byte
	done sync.WaitGroup
	// dies is after how many answers the router gives none any more; 0 for never.
	dies, given int
}

func (h *hub) port(name string) *hubPort {
	p := &hubPort{hub: h, name: name, in: make(chan []byte, 1024)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ports = append(h.ports, p)
	return p
}

func (p *hubPort) Publish(message []byte) error {
	p.hub.mu.Lock()
	defer p.hub.mu.Unlock()
	for _, to := range p.hub.ports {
		if to != p {
			select {
			case to.in <- bytes.Clone(message):
			default: // lost
			}
		}
	}
	return nil
}

func (p *hubPort) Subscribe(received func([]byte), _ func(string)) error {
	p.done.Go(func() {
		for m := range p.in {
			received(m)
		}
	})
	return nil
}

func (p *hubPort) Close() error {
	p.hub.mu.Lock()
	close(p.in)
	for i, q := range p.hub.ports {
		if q == p {
			p.hub.ports = append(p.hub.ports[:i:i], p.hub.ports[i+1:]...)
			break
		}
	}
	p.hub.mu.Unlock()
	p.done.Wait()
	return nil
}

func (p *hubPort) Answer(address string, answer func([]byte) []byte) error {
	p.hub.mu.Lock()
	defer p.hub.mu.Unlock()
	p.hub.answers[address] = func(request []byte) []byte {
		if p.given++; p.dies > 0 && p.given > p.dies {
			return nil
		}
		return answer(request)
	}
	return nil
}

func (p *hubPort) Request(ctx context.Context, address string, request []byte) ([]byte, error) {
	p.hub.mu.Lock()
	answer := p.hub.answers[address]
	p.hub.mu.Unlock()
	if answer != nil {
		if a := answer(request); a != nil {
			return a, nil
		}
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestCopyOfARank: a router that starts gets the copy of the router of its fleet that has been
// running longest; of the next one, where that dies in the middle; and none alone, or beside
// another fleet.
func TestCopyOfARank(t *testing.T) {
	t.Parallel()
	registry := workers.NewRegistry(func(eventlog.Event) {})
	if _, err := registry.Apply("test", []workers.Spec{{Name: "w", URL: &url.URL{Scheme: "http", Host: "10.0.0.1:8000"}}}); err != nil {
		t.Fatal(err)
	}
	w := registry.Snapshot().Workers[0]
	type other struct {
		fleet, name string
		age         time.Duration
		dies        int // after so many answers
		lacks       bool
	}
	for name, c := range map[string]struct {
		others     []other
		from, want string
	}{
		"the oldest":               {[]other{{"a", "new", time.Minute, 0, false}, {"a", "old", time.Hour, 0, false}}, "old", ""},
		"the oldest dies":          {[]other{{"a", "new", time.Minute, 0, false}, {"a", "old", time.Hour, 2, false}}, "new", ""},
		"the oldest has no copy":   {[]other{{"a", "new", time.Minute, 0, false}, {"a", "old", time.Hour, 0, true}}, "new", ""},
		"the only one dies":        {[]other{{"a", "old", time.Hour, 2, false}}, "", "no answer in 3 tries"},
		"the only one has no copy": {[]other{{"a", "old", time.Hour, 0, true}}, "", "nothing is known"},
		"alone":                    {nil, "", "no other router was heard"},
		"another fleet":            {[]other{{"b", "old", time.Hour, 0, false}}, "", "no other router was heard"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := &hub{answers: map[string]func([]byte) []byte{}}
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				start := func(o other) *siblings.Siblings {
					s := siblings.New(siblings.Options{
						Self: replicas.Identity{Fleet: o.fleet, Origin: o.name, Epoch: time.Now().Add(-o.age)}, Fleet: registry.Snapshot, Ledger: ledger.New(),
						Clock: time.Now, Event: func(eventlog.Event) {},
					})
					s.Offer(func(*workers.Rank, int) ([]byte, error) {
						if o.lacks {
							return nil, errors.New("nothing is known of the rank")
						}
						return bytes.Repeat([]byte(o.name), replicas.MaxPiece), nil // three pieces
					})
					p := h.port(o.name)
					p.dies = o.dies
					running.Go(func() {
						if err := errors.Join(s.Run(ctx, p), p.Close()); err != nil {
							t.Error(err)
						}
					})
					return s
				}
				for _, o := range c.others {
					start(o)
				}
				starts := start(other{fleet: "a", name: "starts"})
				began := time.Now()
				for range 3 { // as many ranks
					copied, from, err := starts.Copy(ctx, w, w.Ranks[0])
					if from != c.from || (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
						t.Errorf("from %q, %v; want %q, %q", from, err, c.from, c.want)
					}
					if err == nil && !bytes.Equal(copied, bytes.Repeat([]byte(from), replicas.MaxPiece)) {
						t.Errorf("%d bytes came, or others", len(copied))
					}
				}
				if took := time.Since(began); took > 6*time.Second {
					t.Errorf("it took %v", took)
				}
				cancel()
				running.Wait()
			})
		})
	}
}
