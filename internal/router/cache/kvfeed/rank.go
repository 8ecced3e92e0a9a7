package kvfeed

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// rank is the feed of one rank. The goroutine that receives (dial's, or that of
// a listener's connection) calls attach, receive and detach; maintain runs replays.
type rank struct {
	m          *Manager
	id         kvindex.Rank
	key        Key
	label      string
	reader     *readerState
	boundTopic string        // topic of a rank whose publisher dials in
	wake       chan struct{} // something for maintain to do; never blocks the waker
	wg         sync.WaitGroup
	cancel     context.CancelFunc // guarded by m.mu, as hub is
	hub        *hub

	mu     sync.Mutex // guards the fields below
	src    workers.EventSource
	stream *kvstream.Stream
	n      FeedCounters

	standing
	published uint64

	link
	rival     uint64 // another connection that speaks for this rank, 0 for none
	rivalPeer string
	process   float64 // start of the engine's process as known when the last batch was applied, see provable

	implausible  edge // the stream counts no copies any more
	hashDiffers  edge // the engine's names are not what was stated
	nextFull     time.Time
	held         []heldBatch
	heldBytes    int64
	heldFrom     uint64 // from here on, held has no gap
	cancelReplay context.CancelFunc
	tokens       float64 // replays allowed now
	refilled     time.Time

	lastEvent time.Time
	heard     time.Time // see Status
	mute      muteState
	lag       float64
	quotas    map[string]*quota // by kind of event
}

// heldBatch is a live batch that waits for the end of a replay.
type heldBatch struct {
	seq     uint64
	payload []byte
	at      time.Time
}

// size is what the batch counts for in bytes, with an allowance for the rest.
func (b *heldBatch) size() int64 { return int64(len(b.payload)) + 128 }

func newRank(m *Manager, id kvindex.Rank, key Key, src workers.EventSource, at *readerState) *rank {
	now := m.now()
	r := &rank{
		m: m, id: id, key: key, label: key.String(), src: src, boundTopic: src.Topic, reader: at,
		wake:     make(chan struct{}, 1),
		stream:   kvstream.New(m.o.Index, id, cmp.Or(key.BlockSize, m.o.BlockSize)),
		standing: standing{state: Connecting, want: wantConnection, reason: "not connected yet", since: now, until: now.Add(m.o.StaleAfter)},
		process:  math.NaN(), lag: math.NaN(), tokens: float64(m.o.ReplayBurst), refilled: now,
		quotas: map[string]*quota{},
	}
	r.stream.Know(key.Traits)
	r.publish()
	return r
}

func (r *rank) poke() { wait.Poke(r.wake) }

// Of one kind and rank, emitBurst events are emitted in a row and then one in
// each emitEvery: a publisher that misbehaves cannot flood the log.
const (
	emitBurst = 10
	emitEvery = 5 * time.Second
)

// quota limits the rate of one kind of event. The kinds are a closed set.
type quota struct {
	left       float64
	last       time.Time
	suppressed int // since the last one emitted
}

// allow reports whether one more may be emitted now; more mentions those that
// were suppressed.
func (q *quota) allow(now time.Time) (more string, ok bool) {
	q.left = min(emitBurst, q.left+now.Sub(q.last).Seconds()/emitEvery.Seconds())
	q.last = now
	if q.left < 1 {
		q.suppressed++
		return "", false
	}
	q.left--
	if q.suppressed > 0 {
		more = fmt.Sprintf(" (and %d more like this since the last event)", q.suppressed)
		q.suppressed = 0
	}
	return more, true
}

// emit emits an event within the quota of its kind. The caller holds r.mu.
func (r *rank) emit(sev eventlog.Severity, kind, format string, args ...any) {
	now := r.m.now()
	q := r.quotas[kind]
	if q == nil {
		q = &quota{left: emitBurst, last: now}
		r.quotas[kind] = q
	}
	more, ok := q.allow(now)
	if !ok {
		return
	}
	text := fmt.Sprintf(format, args...) + more
	r.m.o.Events.Emit(eventlog.Event{At: now, Severity: sev, Kind: kind, Worker: r.key.Worker, Rank: r.label, Text: text})
}

// observe passes what has happened to the observer. The caller holds r.mu, or r
// is not known to anybody yet.
func (r *rank) observe(at time.Time, o Observation) {
	if r.m.o.Observer != nil {
		o.Rank, o.Worker, o.DP, o.At = r.id, r.key.Worker, r.key.DP, at
		r.m.o.Observer(o)
	}
}

// dropped reports that the rank's entries were dropped. The caller holds r.mu.
func (r *rank) dropped(reason string, forgotPublisher bool) {
	r.observe(r.m.now(), Observation{Cleared: true, ForgotPublisher: forgotPublisher, Reason: reason})
	if r.stream.Mismatch() != "" {
		r.emit(eventlog.Warn, "feed_unknown", "%s: routed without cache knowledge: %s", r.label, reason)
		return
	}
	r.emit(eventlog.Warn, "feed_unknown", "%s: entries dropped and rebuilt: %s", r.label, reason)
}

// startOver empties the rank, to which the next batch is the first of a publisher. The
// caller holds r.mu.
func (r *rank) startOver(w want, reason string) {
	_, had := r.stream.Last()
	r.set(Unknown, w, reason)
	r.stream.Reset()
	r.mute = muteState{}
	r.publish()
	if had {
		r.dropped(reason, true)
	}
}

// restarted starts over because the publisher has, as how shows. The caller holds r.mu.
func (r *rank) restarted(w want, how string) {
	r.n.Restarts++
	r.startOver(w, "the publisher started over: "+how)
}

// countable keeps a made-up number from wrapping a counter.
func countable(n uint64) uint64 { return min(n, 1<<32) }

// lose gives up the batches before seq. The caller holds r.mu.
func (r *rank) lose(seq uint64, why string) {
	last, had := r.stream.Last()
	if had {
		reason := fmt.Sprintf("batches %d to %d are lost: %s", last+1, seq-1, why)
		r.n.Lost += countable(seq - 1 - last)
		r.set(Unknown, r.want, reason)
		r.stream.Skip(seq)
		r.mute = muteState{}
		r.dropped(reason, false)
		return
	}
	r.stream.Skip(seq)
}

// attach begins to use a connection to the publisher. The caller of receive and
// detach passes the same number.
func (r *rank) attach(conn uint64, peer string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attachLocked(conn, peer, false)
}

func (r *rank) attachLocked(conn uint64, peer string, home bool) {
	r.link = link{conn: conn, attached: r.attached + 1, peer: peer, home: home, began: r.m.now()}
	r.n.Connects++
	_, had := r.stream.Last()
	switch {
	case r.rival != 0:
		r.startOver(wantOne, r.contested())
	case r.src.Replay != "":
		w := wantMissed
		if had {
			w = wantSame
		}
		r.set(Replaying, w, "connected, asking for what was missed")
		r.poke()
	case had && r.provable():
		// The proof takes an answer of the engine and a batch, which wait for it.
		r.set(Verifying, wantProof, "connected again; its entries are kept, unused, until its engine has proven to be the same process and its next batch follows the last")
		r.emit(eventlog.Info, "feed_verifying", "%s: %s", r.label, r.reason)
		r.poke()
	case had:
		r.startOver(wantNext, lostWithoutReplay)
		r.goLive()
	default:
		r.goLive()
	}
}

const lostWithoutReplay = "the connection was lost, and without a replay socket it is not known what was missed"

// detach ends the use of connection conn, because of err.
func (r *rank) detach(conn uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.withdraw(conn) || r.conn != conn {
		return
	}
	r.conn = 0
	r.abandon()
	r.set(Connecting, wantConnection, "connection lost: "+err.Error())
	if !errors.Is(err, context.Canceled) { // else the feed itself was ended
		r.emit(eventlog.Warn, "feed_disconnected", "%s: connection to %s lost: %v", r.label, r.src.Endpoint, err)
	}
	r.poke()
}

// withdraw ends the claim of connection conn beside the one in use, and reports
// whether it had one. The caller holds r.mu.
func (r *rank) withdraw(conn uint64) bool {
	if r.rival != conn {
		return false
	}
	r.rival = 0
	if r.conn != 0 {
		r.attachLocked(r.conn, r.peer, r.home)
	}
	return true
}

// abandon ends what is under way with the connection in use. The caller holds
// r.mu.
func (r *rank) abandon() {
	r.release()
	if r.cancelReplay != nil {
		r.cancelReplay()
	}
}

// current reports whether an attachment is the one whose batches count. The
// caller holds r.mu.
func (r *rank) current(attached uint64) bool {
	return r.attached == attached && r.conn != 0 && r.rival == 0
}

// goLive ends a resync. The caller holds r.mu.
func (r *rank) goLive() {
	was := r.state
	r.until = r.m.now().Add(r.m.o.VerifyAfter)
	if why := r.stream.Mismatch(); why != "" {
		r.set(Unknown, wantFit, why)
		return
	}
	if r.mute.why != "" { // nothing has come since
		r.set(Mute, wantNext, r.mute.why)
		r.poke()
		return
	}
	why := r.liveReason()
	if was == Unknown && why == reasonJoined {
		why = "rebuilding: " + r.reason
	}
	r.set(Live, wantNext, why)
	if was != Live {
		r.emit(eventlog.Info, "feed_live", "%s: live: %s", r.label, r.reason)
	}
	r.poke()
}

// liveReason is why a live rank's entries are complete, or what they lack. The caller
// holds r.mu.
func (r *rank) liveReason() string {
	switch _, had := r.stream.Last(); {
	case !had:
		return reasonNone
	case r.stream.Complete():
		return "every batch since the publisher's start was applied"
	case r.stream.Short():
		return reasonFull
	}
	return reasonJoined
}

const (
	reasonNone    = "connected, no batch yet"
	reasonJoined  = "blocks stored before the feed began are missing until they are stored again"
	reasonFits    = "the engine's blocks fit again"
	reasonRefused = "blocks that the index had no room for are missing until they are stored again"
	reasonFull    = "the index is full: some of its blocks are not known until there is room"
)

// receive takes a live batch of connection conn. decoded is its content if the
// caller has decoded it already. Nothing is kept of payload.
func (r *rank) receive(conn, seq uint64, payload []byte, decoded *kvevent.Batch) {
	now := r.m.now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn == 0 {
		return // the connection was given up meanwhile
	}
	if r.conn != conn || r.rival != 0 {
		r.n.Foreign++
		r.emit(eventlog.Warn, "feed_foreign", "%s: a second publisher claims this rank while %s is connected; its batches are dropped", r.label, r.peer)
		return
	}
	r.lastEvent = now
	if r.m.o.Life != nil {
		r.m.o.Life(r.key.Worker).Sign(now)
	}
	if r.want.holds() {
		r.hold(seq, payload, now)
		if r.want == wantProof {
			r.poke()
		}
		return
	}
	v := r.stream.OfferDecoded(seq, payload, decoded)
	if v.Kind == kvstream.Apply {
		r.applied(seq, payload, now, false)
		return
	}
	r.outOfOrder(v, seq, payload, now)
}

// applied does what follows every applied batch. The caller holds r.mu.
func (r *rank) applied(seq uint64, payload []byte, at time.Time, replayed bool) {
	if r.m.o.Observer != nil { // an Observation is too large to be made when nobody reads it
		r.observe(at, Observation{Seq: seq, Payload: payload, Replayed: replayed})
	}
	s := r.stream
	r.heard = r.m.now()
	if r.mute.why != "" {
		r.endSilence(seq)
	}
	if r.m.o.Process != nil && r.src.Replay == "" && !r.src.Bind {
		r.process, _ = r.m.o.Process(r.key.Worker, r.key.DP)
	}
	if said := s.Claimed(); said >= 0 && int(said) != r.key.Start+r.key.DP {
		if r.n.RankDisagree == 0 {
			r.emit(eventlog.Warn, "feed_rank_disagree", "%s: batches from %s claim to be of rank %d of the deployment, not %d; the socket's rank is used. Either dp_start of worker %s is not what its engine counts from, or that is another rank's port", r.label, r.src.Endpoint, said, r.key.Start+r.key.DP, r.key.Worker)
		}
		r.n.RankDisagree++
	}
	if lag := float64(at.UnixNano())/1e9 - s.Published(); !replayed && math.Abs(lag) < 1e9 { // else the publisher has no clock
		r.lag = lag
	}
	if f := s.TakeFault(); f != "" {
		r.dropped(f, false)
		if !replayed && r.src.Replay != "" && s.Mismatch() == "" {
			r.refetch = true
			r.poke()
		}
		switch {
		case r.want.holds():
		case s.Mismatch() != "":
			r.set(Unknown, wantFit, f)
		default:
			r.set(Live, wantNext, "rebuilding: "+f)
		}
	} else if r.want == wantFit && s.Mismatch() == "" {
		r.set(Live, wantNext, reasonFits)
	}
	if r.implausible.rises(s.CopiesImplausible()) {
		r.emit(eventlog.Warn, "copies_implausible", "%s: its events store more copies of a block than there can be: requests have it report hits as stores (kv_cache_report_mode \"full\"); copies are not counted any more, and of cache groups other than full attention only what a hit needs; kv_copies=single on the worker states this from the start", r.label)
	}
	if r.hashDiffers.rises(s.HashDiffers()) {
		r.emit(eventlog.Warn, "hash_differs", "%s: the names of its blocks are not what kv_hash, kv_hash_seed and the router's block make them (the engine's --prefix-caching-hash-algo, PYTHONHASHSEED and smallest block): only what its events state counts, until one fits", r.label)
	}
	if s.TakeShort() {
		r.emit(eventlog.Warn, "feed_full", "%s: the index is full, and blocks of this rank are not known until there is room: raise index.max_blocks", r.label)
		if r.state == Live {
			r.explain(reasonFull)
		}
	}
	if r.state == Live && r.reason == reasonNone {
		r.explain(r.liveReason())
	}
	r.publish()
	if !r.resynced && !r.want.holds() && !replayed && r.src.Replay != "" && s.LacksParent() {
		// Every batch was applied and yet a parent is missing: either the engine
		// names blocks in a way not understood here, or something was lost
		// without a trace. Starting over, once, shows which.
		r.resynced = true
		r.startOver(wantMissed, fmt.Sprintf("batch %d has a child of a block that was never stored", seq))
		r.poke()
	}
}

// outOfOrder handles a live batch that does not follow the one before. The
// caller holds r.mu.
func (r *rank) outOfOrder(v kvstream.Verdict, seq uint64, payload []byte, now time.Time) {
	if v.Kind == kvstream.Duplicate {
		r.n.Duplicates++
		return
	}
	_, had := r.stream.Last()
	fetch := r.src.Replay != "" && (had || !r.gaveUp)
	if fetch {
		r.await(wantMissed)
	}
	switch {
	case v.Kind == kvstream.Restart:
		r.restarted(r.want, fmt.Sprintf("batch %d came again with another content", seq))
		r.emit(eventlog.Warn, "feed_restart", "%s: %s", r.label, r.reason)
	case had:
		r.n.Gaps++
		r.n.Missing += countable(v.To - v.From + 1)
		r.set(InGap, r.want, fmt.Sprintf("batches %d to %d are missing", v.From, v.To))
		r.emit(eventlog.Warn, "feed_gap", "%s: %s", r.label, r.reason)
	}
	if fetch {
		r.hold(seq, payload, now)
		r.poke()
		return
	}
	r.force(heldBatch{seq, payload, now}, "there is no replay socket")
	r.goLive()
}

// force applies a live batch whatever came before it. The caller holds r.mu.
func (r *rank) force(b heldBatch, why string) {
	v := r.stream.Offer(b.seq, b.payload)
	if v.Kind == kvstream.Restart {
		r.restarted(r.want, fmt.Sprintf("batch %d came again with another content", b.seq))
		v = r.stream.Offer(b.seq, b.payload)
	}
	if v.Kind == kvstream.Gap {
		r.lose(b.seq, why)
		v = r.stream.Offer(b.seq, b.payload)
	}
	if v.Kind == kvstream.Duplicate {
		r.n.Duplicates++
		return
	}
	r.applied(b.seq, b.payload, b.at, false)
}

// hold keeps a live batch until the replay has ended. Beyond the limits all
// that wait are dropped: the next replay brings them. The caller holds r.mu.
func (r *rank) hold(seq uint64, payload []byte, at time.Time) {
	b := heldBatch{seq, payload, at}
	size := b.size()
	if r.heldBytes+size > r.m.o.HoldBytes || r.m.held.Load()+size > r.m.o.HoldTotal {
		r.n.Overrun += uint64(len(r.held))
		r.release()
		if size > r.m.o.HoldBytes || r.m.held.Load()+size > r.m.o.HoldTotal {
			r.n.Overrun++
			return
		}
	}
	r.heldBytes += size
	r.m.held.Add(size)
	b.payload = bytes.Clone(payload)
	if n := len(r.held); n == 0 || seq != r.held[n-1].seq+1 {
		r.heldFrom = seq
	}
	r.held = append(r.held, b)
}

// release forgets the batches that wait. The caller holds r.mu.
func (r *rank) release() {
	r.m.held.Add(-r.heldBytes)
	r.held, r.heldBytes = nil, 0
}

// dial keeps a connection to a publisher that listens.
func (r *rank) dial(ctx context.Context) {
	pause := r.m.o.BackoffMin
	for first := true; ; first = false {
		r.findSource(ctx, first)
		began := r.m.now()
		err := r.connection(ctx)
		if ctx.Err() != nil {
			return
		}
		if r.m.now().Sub(began) >= stableAfter {
			pause = r.m.o.BackoffMin
		}
		r.m.o.Logger.Debug("kv event connection ended", "rank", r.label, "error", err, "retry_in", pause)
		if !wait.For(ctx, pause/2+rand.N(pause/2+1)) {
			return
		}
		pause = min(2*pause, r.m.o.BackoffMax)
	}
}

// findSource finds out where the rank publishes now. On an error the last known
// endpoint stays.
func (r *rank) findSource(ctx context.Context, first bool) {
	r.mu.Lock()
	known := r.src.Endpoint != ""
	r.mu.Unlock()
	if r.m.o.Sources == nil || first && known {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, r.m.o.BackoffMax)
	defer cancel()
	all, err := r.m.o.Sources(ctx, r.key.Worker)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.n.SourceErrors++
		if !known {
			r.explain("where the rank publishes is not known: " + err.Error())
		}
		return
	}
	for _, s := range all {
		if s.DP != r.key.DP || s.Bind || s.Endpoint == "" {
			continue
		}
		if known && s.Endpoint != r.src.Endpoint {
			r.emit(eventlog.Info, "feed_source", "%s: publishes at %s now, not at %s", r.label, s.Endpoint, r.src.Endpoint)
		}
		r.src = s
		return
	}
	if !known {
		r.explain("the worker names no event endpoint for this rank")
	}
}

// connection receives from one connection until it ends.
func (r *rank) connection(ctx context.Context) error {
	r.mu.Lock()
	src := r.src
	r.mu.Unlock()
	if src.Endpoint == "" {
		return errors.New("no event endpoint")
	}
	o := r.m.o.Socket
	o.Topics = []string{src.Topic}
	c, err := zmtp.DialSub(ctx, src.Endpoint, o)
	if err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.n.ConnectErrors++
		r.explain(err.Error())
		return err
	}
	defer c.Close()
	conn := r.m.conns.Add(1)
	r.attach(conn, c.RemoteAddr())
	var msg zmtp.Message
	for {
		_, seq, payload, err := nextLive(c, &msg)
		if err != nil {
			r.malformed(err)
			r.detach(conn, err)
			return err
		}
		r.receive(conn, seq, payload, nil)
	}
}

// nextLive receives the next live batch. Where a message is none of a KV event
// publisher, the error is ErrFrames: hang up rather than guess.
func nextLive(c *zmtp.Conn, msg *zmtp.Message) (topic []byte, seq uint64, payload []byte, err error) {
	if err = c.Recv(msg); err != nil {
		return nil, 0, nil, err
	}
	topic, seq, payload, err = kvevent.ParseLive(msg.Frames())
	if err == nil && seq == kvevent.EndSeq {
		err = fmt.Errorf("%w: live batch with the number of a replay's end", kvevent.ErrFrames)
	}
	return topic, seq, payload, err
}

// malformed counts the end of a connection that is no publisher's.
func (r *rank) malformed(err error) {
	if errors.Is(err, kvevent.ErrFrames) {
		r.mu.Lock()
		r.n.Malformed++
		r.mu.Unlock()
	}
}
