package zmtp

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/dynctl/dynctl/internal/wait"
)

// Pub is a PUB socket, bound or dialling. Each subscriber has a bounded queue;
// a subscriber that does not keep up loses messages, never another's.
type Pub struct {
	o      Options
	ctx    context.Context // ends when the Pub closes
	cancel context.CancelCauseFunc
	l      *listener // nil when dialling
	wg     sync.WaitGroup
	tally  *tally
	name   string

	sent, dropped atomic.Uint64

	mu      sync.Mutex // guards the fields below and the topics of subscribers
	peers   map[*subscriber]struct{}
	changed chan struct{} // closed and replaced when subscriptions change
}

// subscriber is one peer of a Pub.
type subscriber struct {
	c      *Conn
	topics [][]byte // guarded by Pub.mu; each once, however often it was asked for
	queue  chan []byte
	full   bool         // guarded by Pub.mu; something was dropped and queue is not half empty yet
	bytes  atomic.Int64 // encoded bytes in queue
}

// ListenPub binds endpoint for subscribers to connect to. The end of ctx closes
// the socket.
func ListenPub(ctx context.Context, endpoint string, o Options) (*Pub, error) {
	p, err := newPub(ctx, o)
	if err != nil {
		return nil, err
	}
	p.l, err = listen(p.ctx, endpoint, rolePub, &p.o, p.serve)
	if err != nil {
		p.cancel(err)
		return nil, err
	}
	p.tally, p.name = &p.l.tally, p.l.endpoint
	return p, nil
}

// DialPub publishes to a subscriber that binds endpoint. It dials in the
// background and again, with a growing pause, whenever the connection is not
// there; Stats has the latest error. Messages sent meanwhile have no subscriber
// and go nowhere, as with any PUB. The end of ctx closes the socket.
func DialPub(ctx context.Context, endpoint string, o Options) (*Pub, error) {
	if _, err := parseEndpoint(endpoint); err != nil {
		return nil, err
	}
	p, err := newPub(ctx, o)
	if err != nil {
		return nil, err
	}
	p.tally, p.name = new(tally), endpoint
	p.wg.Go(p.redial)
	return p, nil
}

func newPub(ctx context.Context, o Options) (*Pub, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	// All that a subscriber has to say is a topic.
	o.Limits.MaxFrameBytes = min(o.Limits.MaxFrameBytes, o.Limits.MaxCommandBytes)
	o.Limits.MaxMessageBytes = min(o.Limits.MaxMessageBytes, o.Limits.MaxCommandBytes)
	p := &Pub{o: o, peers: make(map[*subscriber]struct{}), changed: make(chan struct{})}
	p.ctx, p.cancel = context.WithCancelCause(ctx)
	return p, nil
}

// Endpoint returns the bound endpoint with its real port, or the dialled one.
func (p *Pub) Endpoint() string { return p.name }

// Stats returns what has happened with this socket's peers so far.
func (p *Pub) Stats() ListenerStats { return p.tally.Stats() }

// Sent returns the number of messages queued, counted once per subscriber.
func (p *Pub) Sent() uint64 { return p.sent.Load() }

// Dropped returns the number of messages dropped because a subscriber's queue
// was full, counted once per subscriber.
func (p *Pub) Dropped() uint64 { return p.dropped.Load() }

// Close disconnects the subscribers, with what is still queued for them, and
// waits for all goroutines.
func (p *Pub) Close() error {
	p.cancel(ErrClosed)
	if p.l != nil {
		_ = p.l.Close() // it has no error
	}
	p.wg.Wait()
	return nil
}

// Send queues one message for every subscriber that has a topic which is a
// prefix of the first frame. It never blocks and does not keep the frames. After
// Close it does nothing.
func (p *Pub) Send(frames ...[]byte) {
	if len(frames) == 0 {
		return
	}
	var encoded []byte // shared by the queues, never written again
	p.mu.Lock()
	defer p.mu.Unlock()
	for s := range p.peers {
		if !s.wants(frames[0]) {
			continue
		}
		if encoded == nil {
			n := 0
			for _, f := range frames {
				n += 9 + len(f)
			}
			encoded = appendMessage(make([]byte, 0, n), frames)
		}
		if s.enqueue(encoded, int64(p.o.SendQueueBytes)) {
			p.sent.Add(1)
		} else {
			p.dropped.Add(1)
		}
	}
}

func (s *subscriber) wants(first []byte) bool {
	return slices.ContainsFunc(s.topics, func(t []byte) bool { return bytes.HasPrefix(first, t) })
}

// enqueue queues msg unless there is no room. As in libzmq, whoever has lost one
// message loses all until half of the queue has gone. The caller holds Pub.mu.
func (s *subscriber) enqueue(msg []byte, limit int64) bool {
	n := int64(len(msg))
	if s.full && (len(s.queue) > cap(s.queue)/2 || s.bytes.Load() > limit/2) {
		return false
	}
	s.full = s.bytes.Add(n) > limit
	if !s.full {
		select {
		case s.queue <- msg:
			return true
		default:
			s.full = true
		}
	}
	s.bytes.Add(-n)
	return false
}

// Subscribers returns the number of peers with at least one subscription.
func (p *Pub) Subscribers() int {
	n, _ := p.subscribers()
	return n
}

func (p *Pub) subscribers() (int, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for s := range p.peers {
		if len(s.topics) > 0 {
			n++
		}
	}
	return n, p.changed
}

// WaitSubscribers returns once at least n peers are subscribed, or with the
// cause of the end of ctx or of the Pub.
func (p *Pub) WaitSubscribers(ctx context.Context, n int) error {
	for {
		have, changed := p.subscribers()
		if have >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("zmtp: %d of %d subscribers: %w", have, n, context.Cause(ctx))
		case <-p.ctx.Done():
			return fmt.Errorf("zmtp: %d of %d subscribers: %w", have, n, context.Cause(p.ctx))
		}
	}
}

// redial keeps one connection up until the Pub closes.
func (p *Pub) redial() {
	pause := p.o.RedialMin
	for p.ctx.Err() == nil {
		c, err := dialPeer(p.ctx, p.name, rolePub, &p.o)
		if err == nil {
			p.tally.accepted.Add(1)
			pause = p.o.RedialMin
			err = p.serve(p.ctx, c)
			_ = c.Close()
		}
		if err != nil {
			p.tally.failure(p.ctx, err)
		}
		wait.For(p.ctx, pause/2+rand.N(pause/2+1))
		pause = min(2*pause, p.o.RedialMax)
	}
}

// serve runs one subscriber until its connection ends.
func (p *Pub) serve(_ context.Context, c *Conn) error {
	s := &subscriber{c: c, queue: make(chan []byte, p.o.SendQueue)}
	c.onSubscribe = func(on bool, topic []byte) error { return p.subscribe(s, on, topic) }
	p.mu.Lock()
	p.peers[s] = struct{}{}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.peers, s)
		p.notify()
		p.mu.Unlock()
	}()

	var writer sync.WaitGroup
	writer.Go(s.write)
	var m Message
	var err error
	for err == nil {
		if err = c.Recv(&m); err != nil {
			break
		}
		// Anything else than a subscription is an XSUB's message upstream, which
		// a PUB has no use for.
		if f := m.Frames(); len(f) == 1 && len(f[0]) > 0 && f[0][0] <= 1 {
			err = p.subscribe(s, f[0][0] == 1, f[0][1:])
		}
	}
	c.shut(err)
	writer.Wait()
	return peerFault(err)
}

// subscribe adds or removes one subscription of s. As in libzmq, asking twice
// is asking once: a SUB counts for itself how often it wants a topic.
func (p *Pub) subscribe(s *subscriber, on bool, prefix []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.IndexFunc(s.topics, func(t []byte) bool { return bytes.Equal(t, prefix) })
	switch {
	case on == (i >= 0):
		return nil
	case !on:
		s.topics = slices.Delete(s.topics, i, i+1)
	case len(s.topics) >= p.o.Limits.MaxSubscriptions:
		return fmt.Errorf("%w: more than %d subscriptions of %s", ErrLimit, p.o.Limits.MaxSubscriptions, s.c.name)
	default:
		s.topics = append(s.topics, bytes.Clone(prefix))
	}
	p.notify()
	return nil
}

// notify wakes those who wait for a change. The caller holds p.mu.
func (p *Pub) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// write moves the queue to the transport, small messages many at a time.
func (s *subscriber) write() {
	const batch = 64 << 10
	for {
		select {
		case msg := <-s.queue:
			if err := s.writeBatch(msg, batch); err != nil {
				s.c.shut(err)
				return
			}
		case <-s.c.closing:
			return
		}
	}
}

func (s *subscriber) writeBatch(msg []byte, batch int) error {
	c := s.c
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.wbuf = append(c.wbuf[:0], msg...)
	for more := true; more && len(c.wbuf) < batch; {
		select {
		case msg = <-s.queue:
			c.wbuf = append(c.wbuf, msg...)
		default:
			more = false
		}
	}
	s.bytes.Add(-int64(len(c.wbuf)))
	return c.flush()
}
