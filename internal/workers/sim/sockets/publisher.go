package sockets

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// PublisherConfig says where and how to publish.
type PublisherConfig struct {
	// Endpoint is bound ("tcp://127.0.0.1:0"), or dialled if Dial is set.
	Endpoint string
	Dial     bool
	// Replay is the endpoint of the replay ROUTER; empty for none.
	Replay string
	// Topic is the first frame.
	Topic string
	// Rank is the data-parallel rank; BlockSize the tokens of a block.
	Rank, BlockSize int
	Encoding        kvevent.Encoding
	// Steps is how many batches are kept for replay; 0 means 10000.
	Steps int
	// Faults may drop, reorder, corrupt and lose batches, and drop replays; nil for
	// none.
	Faults *fault.Source
}

// Publisher publishes the batches of one rank: a ZeroMQ PUB socket with vLLM's frames
// (topic, sequence, payload), and the ROUTER that replays the latest batches. Publish may be
// called from one goroutine at a time.
type Publisher struct {
	cfg    PublisherConfig
	pub    *zmtp.Pub
	router *zmtp.Router

	mu     sync.Mutex
	seq    uint64
	ring   []entry // replay buffer, oldest first from head
	head   int
	late   *entry        // a batch that waits to be overtaken by the next
	asked  uint64        // replays that were answered
	turned time.Time     // when the latest batch was published
	turn   chan struct{} // closed with the next one; nil when nobody waits for it
	closed bool
}

// poll is how long the thread of vLLM's and SGLang's publishers waits for a batch
// before it looks at its replay socket again.
const poll = 100 * time.Millisecond

type entry struct {
	seq     uint64
	payload []byte
}

// OpenPublisher starts the sockets.
func OpenPublisher(ctx context.Context, cfg PublisherConfig) (*Publisher, error) {
	cfg.Steps = cmp.Or(max(cfg.Steps, 0), 10000)
	if cfg.Faults == nil {
		cfg.Faults = fault.NewSource(0, fault.Set{})
	}
	p := &Publisher{cfg: cfg, turned: time.Now()}
	var err error
	o := zmtp.Options{SendQueue: 100000, SendQueueBytes: 256 << 20}
	if cfg.Dial {
		p.pub, err = zmtp.DialPub(ctx, cfg.Endpoint, o)
	} else {
		p.pub, err = zmtp.ListenPub(ctx, cfg.Endpoint, o)
	}
	if err != nil {
		return nil, fmt.Errorf("kv events of rank %d: %w", cfg.Rank, err)
	}
	if cfg.Replay != "" {
		p.router, err = zmtp.ListenRouter(ctx, cfg.Replay, o, p.replay)
		if err != nil {
			_ = p.pub.Close()
			return nil, fmt.Errorf("kv event replay of rank %d: %w", cfg.Rank, err)
		}
	}
	return p, nil
}

// Endpoint is the endpoint of the events, with its real port.
func (p *Publisher) Endpoint() string { return p.pub.Endpoint() }

// Replay is the endpoint of the replay socket; empty without one.
func (p *Publisher) Replay() string {
	if p.router == nil {
		return ""
	}
	return p.router.Endpoint()
}

// Subscribers is the number of connected subscribers.
func (p *Publisher) Subscribers() int { return p.pub.Subscribers() }

// WaitSubscribers returns once n subscribers are there.
func (p *Publisher) WaitSubscribers(ctx context.Context, n int) error {
	return p.pub.WaitSubscribers(ctx, n)
}

// Next is the sequence number of the next batch.
func (p *Publisher) Next() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seq
}

// Replays is how many replays were answered but for the end, whatever became of
// the answers.
func (p *Publisher) Replays() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

// Close closes the sockets and joins their goroutines.
func (p *Publisher) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.pub.Close() // nothing is read from these; a late error changes nothing
	if p.router != nil {
		_ = p.router.Close()
	}
}

// Publish sends the events of one step as one batch.
func (p *Publisher) Publish(ts float64, events []cache.Event) {
	b := kvevent.Batch{TS: ts, Rank: int32(p.cfg.Rank), Events: make([]kvevent.Event, len(events))}
	for i, e := range events {
		b.Events[i] = Convert(e, p.cfg.BlockSize)
	}
	payload := kvevent.AppendBatch(nil, &b, p.cfg.Encoding)

	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.turned = time.Now()
	if p.turn != nil {
		close(p.turn)
		p.turn = nil
	}
	e := entry{p.seq, payload}
	p.seq++
	set, _ := p.cfg.Faults.Set()
	if p.cfg.Faults.Hit(set.LoseEvents) {
		return // the number is used up, and what could not be sent is not kept
	}
	if len(p.ring) < p.cfg.Steps {
		p.ring = append(p.ring, e)
	} else {
		p.ring[p.head] = e
		p.head = (p.head + 1) % len(p.ring)
	}
	switch {
	case p.cfg.Faults.Hit(set.DropEvents):
	case p.cfg.Faults.Hit(set.CorruptEvents):
		p.send(entry{e.seq, p.damage(payload)})
	case p.late == nil && p.cfg.Faults.Hit(set.ReorderEvents):
		p.late = &e
		return
	default:
		p.send(e)
	}
	if p.late != nil {
		p.send(*p.late)
		p.late = nil
	}
}

// damage returns a payload that cannot be read: cut short, or with bytes behind
// its end. TCP's checksum lets no changed byte through, and one that gives
// another valid batch would pass for one.
func (p *Publisher) damage(payload []byte) []byte {
	if p.cfg.Faults.IntN(2) == 0 {
		return payload[:p.cfg.Faults.IntN(len(payload))]
	}
	return append(append([]byte(nil), payload...), byte(p.cfg.Faults.IntN(256)))
}

func (p *Publisher) send(e entry) {
	var seq [8]byte
	binary.BigEndian.PutUint64(seq[:], e.seq)
	p.pub.Send([]byte(p.cfg.Topic), seq[:], e.payload)
}

// wait returns when the publisher looks at its replay socket: after each batch,
// and while there is none, now and then.
func (p *Publisher) wait(ctx context.Context) error {
	p.mu.Lock()
	if p.turn == nil {
		p.turn = make(chan struct{})
	}
	next, left := p.turn, poll-time.Since(p.turned)%poll
	p.mu.Unlock()
	t := time.NewTimer(left)
	defer t.Stop()
	select {
	case <-next:
	case <-t.C:
	case <-ctx.Done():
	}
	return ctx.Err()
}

// replay answers the requests of one DEALER.
func (p *Publisher) replay(ctx context.Context, c *zmtp.Conn) error {
	var m zmtp.Message
	for {
		if err := c.Recv(&m); err != nil {
			return err
		}
		start, err := kvevent.ParseReplayRequest(m.Frames())
		if err != nil {
			continue // like vLLM: not answered
		}
		if err := p.wait(ctx); err != nil {
			return err
		}
		set, _ := p.cfg.Faults.Set()
		sglang := p.cfg.Encoding.Form == kvevent.SGLangArray || p.cfg.Encoding.Form == kvevent.SGLangMap
		topic := []byte(p.cfg.Topic)
		for _, e := range p.since(start) {
			if p.cfg.Faults.Hit(set.DropReplay) {
				continue
			}
			seq := kvevent.AppendSeq(nil, e.seq)
			if sglang {
				err = c.Send(nil, seq, e.payload)
			} else {
				err = c.Send(nil, topic, seq, e.payload)
			}
			if err != nil {
				return err
			}
		}
		p.mu.Lock()
		p.asked++ // before whoever asked can know
		p.mu.Unlock()
		end := kvevent.AppendSeq(nil, kvevent.EndSeq)
		switch {
		case p.cfg.Faults.Hit(set.DropReplay):
		case sglang:
			err = c.Send(nil, end, nil)
		default:
			err = c.Send(nil, nil, end, nil)
		}
		if err != nil {
			return err
		}
	}
}

// since copies the kept batches from sequence start on.
func (p *Publisher) since(start uint64) []entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []entry
	for i := range p.ring {
		if e := p.ring[(p.head+i)%len(p.ring)]; e.seq >= start {
			out = append(out, e)
		}
	}
	return out
}

// Convert gives a cache event the form that is published.
func Convert(e cache.Event, blockSize int) kvevent.Event {
	k := kvevent.Event{Kind: kvevent.Removed, Group: 0, Hashes: e.Names}
	switch e.Kind {
	case cache.Cleared:
		k.Kind, k.Group = kvevent.Cleared, -1
	case cache.Stored:
		k.Kind, k.CacheKind = kvevent.Stored, kvevent.FullAttention
		k.Parent, k.HasParent = e.Parent, e.HasParent
		k.Tokens, k.BlockSize = e.Tokens, int32(blockSize)
		k.LoRAName, k.Salt = e.LoRA, e.Salt
	case cache.Removed:
	}
	if e.Tier != cache.Device {
		// vLLM says of blocks outside the device what they are called, and nothing else.
		k.CacheKind, k.BlockSize = kvevent.CacheAbsent, 0
		k.Medium, k.MediumName = kvevent.CPU, "CPU"
		if e.Tier == cache.Storage {
			k.Medium, k.MediumName = kvevent.Disk, "STORAGE"
		}
	}
	return k
}
