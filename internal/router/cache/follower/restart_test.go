package follower

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// outlet publishes a recording as its engine did: live, and again from a replay
// socket that has the newest batches.
type outlet struct {
	recording
	pub    *zmtp.Pub
	replay *zmtp.Router
	sent   chan int // holds how many batches went out
	reach  int      // batches that the replay socket has
}

func newOutlet(t *testing.T, k recording, reach int) *outlet {
	t.Helper()
	o := &outlet{recording: k, sent: make(chan int, 1), reach: reach}
	o.sent <- 0
	var err error
	if o.pub, err = zmtp.ListenPub(t.Context(), "tcp://127.0.0.1:0", zmtp.Options{}); err != nil {
		t.Fatal(err)
	}
	if o.replay, err = zmtp.ListenRouter(context.WithoutCancel(t.Context()), "tcp://127.0.0.1:0", zmtp.Options{}, o.serve); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(o.pub.Close(), o.replay.Close()); err != nil {
			t.Error(err)
		}
	})
	return o
}

func (o *outlet) serve(_ context.Context, c *zmtp.Conn) error {
	var m zmtp.Message
	for {
		if err := c.Recv(&m); err != nil {
			return err
		}
		from, err := kvevent.ParseReplayRequest(m.Frames())
		if err != nil {
			return err
		}
		n := <-o.sent
		o.sent <- n
		for i := max(int(min(from, 1<<30)), n-o.reach); i < n; i++ {
			if err := c.Send(nil, kvevent.AppendSeq(nil, uint64(i)), o.payloads[i]); err != nil {
				return err
			}
		}
		if err := c.Send(nil, kvevent.AppendSeq(nil, kvevent.EndSeq), nil); err != nil {
			return err
		}
	}
}

// publish sends all batches up to the n-th.
func (o *outlet) publish(n int) {
	for i := <-o.sent; ; i++ {
		if i == n {
			o.sent <- n
			return
		}
		o.pub.Send(nil, kvevent.AppendSeq(nil, uint64(i)), o.payloads[i])
	}
}

// soon reports whether a condition holds within 20 s, also where the test is being cleaned up.
func soon(t *testing.T, so func() bool) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
	defer cancel()
	return wait.Until(ctx, 2*time.Millisecond, so)
}

// heardBy waits until n subscribers would get what is published. A router may be
// live before its subscription has come, and what is sent until then passes it by.
func (o *outlet) heardBy(t *testing.T, n int) {
	t.Helper()
	if !soon(t, func() bool { return o.pub.Subscribers() == n }) {
		t.Fatalf("%d subscribers, want %d", o.pub.Subscribers(), n)
	}
}

// worker is the rank as a worker is typed.
func (o *outlet) worker() string {
	return fmt.Sprintf("http://127.0.0.1:1,name=a,events=%s,replay=%s", o.pub.Endpoint(), o.replay.Endpoint())
}

func (o *outlet) blockOf(*workers.Worker) int { return o.block }

// life is a follower that runs.
type life struct {
	*fixture
	t    *testing.T
	o    *outlet
	stop func() error // and the outlet has noticed
}

func begin(t *testing.T, path string, o *outlet) *life {
	t.Helper()
	s := newFixture(t, path)
	s.BlockOf = o.blockOf
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	l := &life{fixture: s, t: t, o: o, stop: func() error {
		cancel()
		err := <-done
		done <- nil
		o.heardBy(t, 0)
		return err
	}}
	t.Cleanup(func() {
		if err := l.stop(); err != nil {
			t.Error(err)
		}
	})
	s.register(t, o.worker())
	return l
}

// until waits until the rank is subscribed, trusted, and has applied n batches.
func (l *life) until(n int) kvfeed.Status {
	l.t.Helper()
	l.o.heardBy(l.t, 1)
	return l.reaches(n)
}

// reaches is until beside other routers, which hear the engine, too.
func (l *life) reaches(n int) kvfeed.Status {
	l.t.Helper()
	var all []kvfeed.Status
	if !soon(l.t, func() bool {
		all = l.feeds.Status()
		return len(all) == 1 && all[0].Trusted && all[0].LastSeq == int64(n)-1
	}) {
		l.t.Fatalf("not live at batch %d: %+v", n, all)
	}
	return all[0]
}

// equals compares the index with one that never stopped.
func (l *life) equals(o *outlet, n int) {
	l.t.Helper()
	g := newRig(l.t, o.block)
	defer g.close()
	for i, p := range o.payloads[:n] {
		g.offer(i, p, kvstream.Apply)
	}
	s, _ := l.Index.RankStats(0)
	if want := g.now(false); l.Index.RankChecksum(0) != want.sum || s.Copies != want.copies {
		w, _ := g.x.RankStats(0)
		l.t.Errorf("after batch %d the index has %d blocks (sum %x) and %d further copies; one that never stopped %d (%x) and %d", n-1, s.Blocks, l.Index.RankChecksum(0), s.Copies, w.Blocks, want.sum, want.copies)
	}
}

// pick is the recording whose name has a part.
func pick(t *testing.T, part string) recording {
	t.Helper()
	for _, k := range recordings(t) {
		if strings.Contains(k.name, part) {
			return k
		}
	}
	t.Fatalf("no recording %s", part)
	return recording{}
}

// TestStopKeepsPositions: a router that is stopped in the ordinary way goes on
// where it was, although the replay reaches back to its last batches only; also
// when it is stopped again before the engine has answered, and when the
// connection was lost before.
func TestStopKeepsPositions(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "index")
	o := newOutlet(t, pick(t, "sink."), 10)
	l := begin(t, path, o)
	l.until(0)
	o.publish(60)
	l.until(60)
	if err := l.stop(); err != nil {
		t.Fatal(err)
	}
	o.publish(65)

	// The next one hears nothing of its engine in its short life.
	deaf := newFixture(t, path)
	deaf.restore()
	if err := deaf.save(); err != nil {
		t.Fatal(err)
	}
	mute := newFixture(t, path)
	mute.restore()
	mute.BlockOf = o.blockOf
	mute.set(t, o.worker()) // fed, and not connected yet
	if err := mute.save(); err != nil {
		t.Fatal(err)
	}

	l = begin(t, path, o)
	if s := l.until(65); s.Dropped != 0 || s.Restarts != 0 || !s.Complete {
		t.Errorf("the rank did not go on where it was: %+v", s)
	}
	l.equals(o, 65)
	o.publish(len(o.payloads))
	l.until(len(o.payloads))
	l.equals(o, len(o.payloads))

	// An engine that is replaced does not know the position.
	if err := l.stop(); err != nil {
		t.Fatal(err)
	}
	other := newOutlet(t, pick(t, "-full.jsonl"), 1<<20)
	other.publish(70)
	l = begin(t, path, other)
	if s := l.until(70); s.Restarts != 1 {
		t.Errorf("another engine was not noticed: %+v", s)
	}
	l.equals(other, 70)
}

// TestSavedIsOneMoment: while events come, what is copied of a rank is the index
// as of the very batch that the note beside it names.
func TestSavedIsOneMoment(t *testing.T) {
	t.Parallel()
	o := newOutlet(t, pick(t, "-full.jsonl"), 1<<20)
	g := newRig(t, o.block)
	defer g.close()
	var moments []moment
	for i, p := range o.payloads {
		g.offer(i, p, kvstream.Apply)
		moments = append(moments, g.now(false))
	}
	l := begin(t, "", o)
	l.until(0)
	var over atomic.Bool
	done := make(chan string, 1)
	seen := map[uint64]int{}
	go func() {
		for !over.Load() {
			var got moment
			note := l.note(0, "a/dp0", func() {
				s, _ := l.Index.RankStats(0)
				got = moment{sum: l.Index.RankChecksum(0), copies: s.Copies}
			})
			if note == nil {
				continue // before the first batch
			}
			var k snapshotRank
			if err := json.Unmarshal(note, &k); err != nil {
				done <- err.Error()
				return
			}
			seen[k.Position.Seq]++
			if want := moments[k.Position.Seq]; got.sum != want.sum || got.copies != want.copies {
				done <- fmt.Sprintf("what was copied is not the index as of batch %d", k.Position.Seq)
				return
			}
		}
		done <- ""
	}()
	for n := 0; n < len(o.payloads); {
		n = min(n+2, len(o.payloads))
		o.publish(n)
		l.until(n)
	}
	over.Store(true)
	if why := <-done; why != "" {
		t.Fatal(why)
	}
	if t.Logf("%d moments", len(seen)); len(seen) < 5 {
		t.Errorf("%d moments", len(seen))
	}
}

// withCopies follows a worker up to the last batch after which copies of blocks are counted.
func withCopies(t *testing.T) (o *outlet, l *life, batches int) {
	t.Helper()
	o = newOutlet(t, pick(t, "-full.jsonl"), 1<<20)
	g, n := newRig(t, o.block), 0
	defer g.close()
	for i, p := range o.payloads {
		if g.offer(i, p, kvstream.Apply); g.now(false).copies > 0 {
			n = i + 1
		}
	}
	l = begin(t, "", o)
	l.until(0)
	o.publish(n)
	l.until(n)
	if s, _ := l.Index.RankStats(0); s.Copies == 0 {
		t.Fatalf("no copies after %d batches", n)
	}
	return o, l, n
}

// TestSingleCopies: a worker of which it is stated that its stores are no copies has
// none counted, also when that is stated while it is followed.
func TestSingleCopies(t *testing.T) {
	t.Parallel()
	o, l, n := withCopies(t)
	l.register(t, o.worker()+",kv_copies=single")
	if !soon(t, func() bool {
		s, ok := l.Index.RankStats(0)
		all := l.feeds.Status()
		return ok && s.Copies == 0 && s.Blocks > 0 && len(all) == 1 && all[0].LastSeq == int64(n)-1
	}) {
		s, _ := l.Index.RankStats(0)
		t.Fatalf("copies are still counted: %+v, %+v", s, l.feeds.Status())
	}
}

// TestRoomOfAPool: blocks and copies may fill the pool that an engine's cache groups
// share, which is more than the tokens that all groups together have room for; with
// one more, the removals of single copies were not published.
func TestRoomOfAPool(t *testing.T) {
	t.Parallel()
	o, l, n := withCopies(t)
	s, _ := l.Index.RankStats(0)
	if s.Blocks < 4 {
		t.Fatalf("%d blocks after %d batches", s.Blocks, n)
	}
	for _, tt := range []struct {
		pool     int64
		believed bool
	}{{s.Blocks + s.Copies, true}, {s.Blocks + s.Copies - 1, false}} {
		l.ranksMu.Lock()
		fleet, w := *l.last, *l.last.Workers[0]
		w.BlockSize, w.KVBlocks, w.PoolBlocks = o.block, int(s.Blocks)/4, int(tt.pool)
		fleet.Workers = []*workers.Worker{&w}
		l.last = &fleet
		l.ranksMu.Unlock()
		l.audit()
		if l.ranksMu.Lock(); l.ignoreCopies[w.Ranks[0]] == tt.believed {
			t.Errorf("%d blocks and %d copies, a pool of %d: copies are believed: %v", s.Blocks, s.Copies, tt.pool, !tt.believed)
		}
		l.ranksMu.Unlock()
		if s := l.feeds.Status(); len(s) != 1 || s[0].CopiesImplausible == tt.believed {
			t.Errorf("a pool of %d: copies are believed: %v, and the status says otherwise: %+v", tt.pool, tt.believed, s)
		}
	}
}

// TestLastBlockStatedWhileFollowed: what is stated of a worker's engine counts from
// then on, also where it was followed before.
func TestLastBlockStatedWhileFollowed(t *testing.T) {
	t.Parallel()
	o := newOutlet(t, pick(t, "-full.jsonl"), 1<<20)
	l := begin(t, "", o)
	l.until(0)
	o.publish(len(o.payloads))
	l.until(len(o.payloads))
	if s := l.feeds.Status(); len(s) != 1 || s[0].Drops {
		t.Fatalf("%+v", s)
	}
	l.register(t, o.worker()+",kv_last_block=dropped")
	if !soon(t, func() bool {
		s := l.feeds.Status()
		return len(s) == 1 && s[0].Drops && s[0].Stored > 0 && s[0].LastSeq == int64(len(o.payloads))-1
	}) {
		t.Fatalf("%+v", l.feeds.Status())
	}
}
