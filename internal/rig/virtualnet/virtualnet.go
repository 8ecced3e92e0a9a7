// Package virtualnet carries messages between routers under a virtual clock. It loses,
// doubles, delays and reorders them, and cuts routers off, as it is set to.
package virtualnet

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// Net is a network on which each message goes to all ports, the sender's among them. Its
// fields may change at any time. It is used by one goroutine.
type Net struct {
	World *virtual.World
	Rand  *rand.Rand
	// Loss and Double are the shares of messages, by receiver, that are lost and that
	// arrive twice.
	Loss, Double float64
	// Least and Most bound the time that a message takes, drawn for each receiver. Unequal
	// times reorder messages.
	Least, Most time.Duration

	ports []*Port
}

// Port is one router's access to the network, a replicas.Transport.
type Port struct {
	// Side is the part of the network that the port is in. Ports of different sides do
	// not reach each other.
	Side int

	net      *Net
	received func([]byte)
	left     func(string)
	held     []func()
	stopped  bool
	closed   bool
}

// Port adds a port to the network.
func (n *Net) Port() *Port {
	p := &Port{net: n}
	n.ports = append(n.ports, p)
	return p
}

// Subscribe implements replicas.Transport.
func (p *Port) Subscribe(received func([]byte), left func(string)) error {
	p.received, p.left = received, left
	return nil
}

// Publish implements replicas.Transport.
func (p *Port) Publish(message []byte) error {
	if p.closed {
		return errors.New("the port is closed")
	}
	n := p.net
	for _, to := range n.ports {
		copies := 1
		if n.Rand.Float64() < n.Double {
			copies = 2
		}
		for range copies {
			if to.Side != p.Side || n.Rand.Float64() < n.Loss {
				continue
			}
			m := bytes.Clone(message)
			delay := n.Least
			if n.Most > n.Least {
				delay += time.Duration(n.Rand.Int64N(int64(n.Most - n.Least)))
			}
			n.World.At(n.World.Now()+delay, func() {
				to.deliver(func() { to.received(m) })
			})
		}
	}
	return nil
}

// Depart informs all ports that an origin has gone.
func (n *Net) Depart(origin string) {
	for _, p := range n.ports {
		p.deliver(func() { p.left(origin) })
	}
}

func (p *Port) deliver(f func()) {
	switch {
	case p.closed || p.received == nil:
	case p.stopped:
		p.held = append(p.held, f)
	default:
		f()
	}
}

// Stop holds what arrives until Continue, as for a process that is stopped.
func (p *Port) Stop() { p.stopped = true }

// Continue delivers what Stop held.
func (p *Port) Continue() {
	held := p.held
	p.held, p.stopped = nil, false
	for _, f := range held {
		f()
	}
}

// Close implements replicas.Transport: nothing arrives afterwards.
func (p *Port) Close() error {
	p.closed = true
	p.net.ports = slices.DeleteFunc(p.net.ports, func(other *Port) bool { return other == p })
	return nil
}
