package replicas

import (
	"context"
	"sync"
	"time"
)

// Transport carries messages between routers. It may lose, double, delay and reorder them.
type Transport interface {
	// Publish sends a message to all other routers. It waits for none of them, and calls
	// back nothing before it returns. It does not keep the message.
	Publish(message []byte) error
	// Subscribe starts to call received with each message, the router's own perhaps among
	// them, and left with the origin of a router that is known to have gone, if the
	// transport knows. It makes one call at a time.
	Subscribe(received func(message []byte), left func(origin string)) error
	// Close ends the transport. No call is in progress when it returns.
	Close() error
}

// Exchange publishes one router's load on a transport and keeps the view of the others. It
// is safe for concurrent use.
type Exchange struct {
	self      Identity
	transport Transport
	clock     func() time.Time
	own       func(into []Row) []Row
	view      *View
	more      More
	received  Message // reused; the transport makes one call at a time

	mu        sync.Mutex // guards the fields below
	publisher *Publisher
	rows      []Row
	failed    uint64
	failure   error
}

// More is what an exchange carries beside load. The zero value carries nothing.
type More struct {
	// Fill adds facts to a message; all of them to a full state.
	Fill func(full bool, f *Facts)
	// Heard gets another router's message that is new, and keeps nothing of it.
	Heard func(m *Message)
}

// NewExchange subscribes a router to a transport, which the caller closes. own appends the
// load of the router's own requests to a slice. Neither it nor more may call the exchange. An identity
// beyond the limits of messages is an error.
func NewExchange(self Identity, t Transport, clock func() time.Time, own func(into []Row) []Row, more More) (*Exchange, error) {
	if err := self.check(); err != nil {
		return nil, err
	}
	e := &Exchange{self: self, transport: t, clock: clock, own: own, view: NewView(self), publisher: NewPublisher(self), more: more}
	e.publisher.facts = more.Fill
	if err := t.Subscribe(e.receive, e.view.Departed); err != nil {
		return nil, err
	}
	return e, nil
}

// View is what the other routers published.
func (e *Exchange) View() *View { return e.view }

// Failed is how many messages the transport did not take, and its last error.
func (e *Exchange) Failed() (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failed, e.failure
}

// SetSettings changes the digest of the settings that other routers see.
func (e *Exchange) SetSettings(digest string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.publisher.SetSettings(digest)
}

// RequestFull has the next steps publish a full state, at most one each [Pace].
func (e *Exchange) RequestFull() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.publisher.RequestFull()
}

// Leave publishes that this router ends. It is called after the last step.
func (e *Exchange) Leave() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.send(e.publisher.leave())
}

// Step publishes what is due, and returns when it must be called again at the latest. An
// earlier call publishes a change earlier.
func (e *Exchange) Step() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.rows = e.own(e.rows[:0])
	for _, m := range e.publisher.Publish(e.clock(), e.rows) {
		e.send(m)
	}
	return e.publisher.Next()
}

// send publishes a message. Another one replaces it if it fails. The caller holds mu.
func (e *Exchange) send(m []byte) {
	if err := e.transport.Publish(m); err != nil {
		e.failed++
		e.failure = err
	}
}

// Run calls Step until the context ends. It uses real time.
func (e *Exchange) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			timer.Reset(e.Step().Sub(e.clock()))
		}
	}
}

func (e *Exchange) receive(message []byte) {
	m := &e.received
	if err := m.Decode(message); err != nil {
		e.view.refused(err)
		return
	}
	if m.Ask == "" {
		taken, ask := e.view.take(e.clock(), m)
		if taken && e.more.Heard != nil {
			e.more.Heard(m)
		}
		if ask {
			ask := Message{Identity: Identity{Fleet: e.self.Fleet, Origin: e.self.Origin, Epoch: e.self.Epoch}, Ask: m.Origin}
			e.mu.Lock()
			e.send(ask.Append(nil))
			e.mu.Unlock()
		}
		return
	}
	if m.Ask == e.self.Origin && m.Fleet == e.self.Fleet {
		e.mu.Lock()
		e.publisher.RequestFull()
		e.mu.Unlock()
		e.Step()
	}
}
