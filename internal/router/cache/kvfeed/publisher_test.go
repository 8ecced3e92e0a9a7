package kvfeed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
	"github.com/dynctl/dynctl/internal/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// publisher is an engine's event sockets: a PUB for its batches and a ROUTER
// that replays them.
type publisher struct {
	t     *testing.T
	pubAt string
	repAt string
	topic string
	pub   *zmtp.Pub
	rep   *zmtp.Router

	mu     sync.Mutex // guards the fields below
	e      *kvmodel.Engine
	window int  // first batch that the replay still has
	noEnd  bool // the end marker gets lost
	silent bool // the replay socket does not answer
	topics bool // replies carry the topic, as vLLM's since 0.24
	asked  int
}

func newPublisher(t *testing.T, seed uint64, parts int) *publisher {
	t.Helper()
	p := &publisher{t: t, e: kvmodel.New(seed, parts), topic: "kv@test", topics: seed%2 == 0}
	p.repAt = "tcp://127.0.0.1:0"
	p.open()
	t.Cleanup(p.close)
	return p
}

func (p *publisher) open() {
	p.t.Helper()
	p.openPub()
	rep, err := zmtp.ListenRouter(context.Background(), p.repAt, zmtp.Options{}, p.serve)
	if err != nil {
		p.t.Fatal(err)
	}
	p.rep, p.repAt = rep, rep.Endpoint()
}

func (p *publisher) openPub() {
	p.t.Helper()
	open := func() (err error) {
		p.pub, err = zmtp.ListenPub(context.Background(), p.pubAt, zmtp.Options{})
		return err
	}
	var err error
	if p.pubAt != "" {
		err = sockets.BindAgain(p.t.Context(), open)
	} else {
		err = sockets.FreePorts(1, func(n int) error {
			p.pubAt = fmt.Sprintf("tcp://127.0.0.1:%d", n)
			return open()
		})
	}
	if err != nil {
		p.t.Fatal(err)
	}
	p.pubAt = p.pub.Endpoint()
}

func (p *publisher) close() {
	if err := errors.Join(p.pub.Close(), p.rep.Close()); err != nil {
		p.t.Errorf("close publisher: %v", err)
	}
}

func (p *publisher) serve(ctx context.Context, c *zmtp.Conn) error {
	var m zmtp.Message
	for {
		if err := c.Recv(&m); err != nil {
			return err
		}
		start, err := kvevent.ParseReplayRequest(m.Frames())
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.asked++
		log, from, silent, noEnd, topics := p.e.Log, max(int(min(start, 1<<40)), p.window), p.silent, p.noEnd, p.topics
		p.mu.Unlock()
		if silent {
			continue
		}
		for i := from; i < len(log); i++ {
			frames := [][]byte{{}, kvevent.AppendSeq(nil, uint64(i)), log[i]}
			if topics {
				frames = slices.Insert(frames, 1, []byte(p.topic))
			}
			if err := c.Send(frames...); err != nil {
				return err
			}
		}
		if !noEnd {
			frames := [][]byte{{}, kvevent.AppendSeq(nil, kvevent.EndSeq), {}}
			if topics {
				frames = slices.Insert(frames, 1, nil)
			}
			if err := c.Send(frames...); err != nil {
				return err
			}
		}
	}
}

func (p *publisher) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// step makes a batch and sends it, or keeps it from the subscribers.
func (p *publisher) step(send bool) {
	p.mu.Lock()
	p.e.Step()
	seq := uint64(len(p.e.Log) - 1)
	payload := p.e.Log[seq]
	p.mu.Unlock()
	if send {
		p.send(seq, payload)
	}
}

func (p *publisher) send(seq uint64, payload []byte) {
	p.pub.Send([]byte(p.topic), kvevent.AppendSeq(nil, seq), payload)
}

func (p *publisher) steps(n int) {
	for range n {
		p.step(true)
	}
}

// hangUp closes the PUB socket, with what f does meanwhile, and opens it again
// on the same port.
func (p *publisher) hangUp(f func()) {
	p.t.Helper()
	if err := p.pub.Close(); err != nil {
		p.t.Fatal(err)
	}
	f()
	p.openPub()
}

// subscribed waits for the feed's subscription.
func (p *publisher) subscribed() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), waitLimit)
	defer cancel()
	if err := p.pub.WaitSubscribers(ctx, 1); err != nil {
		p.t.Fatalf("no subscriber: %v", err)
	}
}

func (p *publisher) source(replay bool) workers.EventSource {
	s := workers.EventSource{Endpoint: p.pubAt}
	if replay {
		s.Replay = p.repAt
	}
	return s
}

const waitLimit = 30 * time.Second

// silence is how long a replay that is not answered is waited for. What is
// answered must be within it, on a busy machine, too.
const silence = 2 * time.Second

// eventually waits until ok, which it asks now and again.
func eventually(t *testing.T, what func() string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), waitLimit)
	defer cancel()
	if !wait.Until(ctx, 2*time.Millisecond, ok) {
		t.Fatalf("did not come to pass: %s", what())
	}
}

// fixture is a running Manager with an index that has one rank.
type fixture struct {
	*Manager
	t      *testing.T
	x      *kvindex.Index
	again  *kvstream.Stream // plays back what the observer saw
	copied *kvindex.Index
	mu     sync.Mutex // guards events
	events []eventlog.Event
}

// followed is a fixture whose feed is subscribed to the publisher, as rank 0, with or without
// its replay.
func (p *publisher) followed(replay bool, change func(*Options)) *fixture {
	p.t.Helper()
	f := newFixture(p.t, change)
	f.add(p.source(replay))
	p.subscribed()
	return f
}

func newFixture(t *testing.T, change func(*Options)) *fixture {
	t.Helper()
	f := idleFixture(t, change)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		if n := f.held.Load(); n != 0 {
			t.Errorf("%d bytes of batches are held at the end", n)
		}
	})
	return f
}

// idleFixture is a fixture whose Manager does not run.
func idleFixture(t *testing.T, change func(*Options)) *fixture {
	t.Helper()
	f := &fixture{t: t, x: kvmodel.NewIndex(t), copied: kvmodel.NewIndex(t)}
	f.again = kvstream.New(f.copied, 0, kvmodel.Block)
	o := Options{
		Index: f.x, BlockSize: kvmodel.Block,
		BackoffMin: 4 * time.Millisecond, BackoffMax: 20 * time.Millisecond,
		ReplayIdle: waitLimit, ReplayEvery: time.Millisecond, ReplayBurst: 50,
		VerifyAfter: time.Hour, VerifyEvery: time.Hour, StaleAfter: time.Hour,
		Observer: func(o Observation) {
			switch {
			case o.Rank != 0 || o.OfFeed:
			case o.ForgotPublisher:
				f.again.Reset()
			case o.Cleared:
				f.again.Drop()
			default:
				f.again.Playback(o.Seq, o.Payload, nil)
			}
		},
		Events: func(e eventlog.Event) {
			f.mu.Lock()
			f.events = append(f.events, e)
			f.mu.Unlock()
		},
	}
	if change != nil {
		change(&o)
	}
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	f.Manager = m
	return f
}

func (f *fixture) add(src workers.EventSource) {
	f.t.Helper()
	if err := f.Add(0, Key{Worker: "w"}, src, nil); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) one() Status {
	all := f.Status()
	if len(all) == 0 {
		return Status{}
	}
	return all[0]
}

func (f *fixture) show() string { return fmt.Sprintf("%+v", f.one()) }

// until waits until the rank's status is as asked.
func (f *fixture) until(ok func(Status) bool) Status {
	f.t.Helper()
	var s Status
	eventually(f.t, f.show, func() bool { s = f.one(); return ok(s) })
	return s
}

// caughtUp waits until the rank is live and has applied all of p's batches.
func (f *fixture) caughtUp(p *publisher) Status {
	f.t.Helper()
	return f.until(func(s Status) bool { return s.State == Live && s.LastSeq == int64(len(p.e.Log))-1 })
}

// live waits until what p sends comes by the connection: a batch sent while the rank
// still asks for a replay may come by that alone, and says nothing about the lag of the
// connection.
func (f *fixture) live(p *publisher) {
	f.t.Helper()
	p.subscribed()
	f.until(func(s Status) bool { return s.State == Live })
}

// equals checks that the index has what the engine has, and that the recording
// played back has it too.
func (f *fixture) equals(p *publisher) {
	f.t.Helper()
	kvmodel.Equal(f.t, "index", p.e.Set(), kvmodel.Holds(f.t, f.x))
	kvmodel.Equal(f.t, "played back", p.e.Set(), kvmodel.Holds(f.t, f.copied))
}

// within checks that the index has nothing that the engine has not.
func (f *fixture) within(p *publisher) {
	f.t.Helper()
	kvmodel.Subset(f.t, "index", p.e.Set(), kvmodel.Holds(f.t, f.x))
	kvmodel.Equal(f.t, "played back", kvmodel.Holds(f.t, f.x), kvmodel.Holds(f.t, f.copied))
}

func (f *fixture) emitted(kind string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, e := range f.events {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

func kvRank(i int) kvindex.Rank { return kvindex.Rank(i) }
