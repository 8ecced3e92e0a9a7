package virtualsoak

import (
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// node is one worker with one rank: the engine, its publisher, and the router's
// feed from it.
type node struct {
	s      *stage
	name   string
	index  int
	worker *workers.Worker
	rank   *workers.Rank
	v      *virtual.Rank
	inc    int // incarnation

	up     bool
	member bool // of the fleet
	missed int
	// Of requests: who has a place there to decode, and the prefill legs in progress.
	decodes, prefills int
	readySince        time.Duration // when it was usable first since the line looked; -1 for not
	since             time.Duration // nothing was done to it since
	hang              bool
	known             int // the incarnation to which the router has a connection, and one more
	errors, die       float64
	full              float64 // share of requests that it refuses
	// faulted says that it failed a request that does not break every engine; poisoned are
	// the requests that do and which it failed.
	faulted  bool
	poisoned map[string]bool

	// The publisher.
	drop, late, spoil float64
	silent            bool // publishes nothing: its cache is predicted
	held              *batch
	log               []batch // of this incarnation
	ring              int     // how many of them the replay socket has
	form              kvevent.Encoding
	recorded          recorded // nil for an engine that is simulated

	feed *feed
	// onKill is called when its process ends.
	onKill []func()
}

type batch struct {
	seq     uint64
	payload []byte
	events  []cache.Event
}

// join adds a worker to the fleet.
func (s *stage) join(role workers.Role) {
	i := len(s.nodes)
	n := &node{readySince: -1,
		s: s, index: i, name: fmt.Sprintf("%s-%d", role, i), up: true, member: true, since: s.w.Now(),
		silent: s.chance(0.1), ring: []int{4, 32, 1 << 20, 1 << 20}[s.rng.IntN(4)],
		form: kvevent.Encoding{Form: []kvevent.Form{kvevent.VLLMMap, kvevent.VLLMMap, kvevent.VLLMArray}[s.rng.IntN(3)], BinHash: s.chance(0.3)},
	}
	cfg, err := s.group.RankConfig(tokenizer(), i, 0, 0)
	if err == nil {
		if !n.silent {
			cfg.Publish = n.publish
		}
		cfg.Exit = n.exited
		n.v, err = s.w.Add(cfg)
	}
	if err != nil {
		panic(err) // the group is ours
	}
	g := &s.group
	spec := workers.Spec{
		Facts: workers.Facts{
			Engine: workers.Sim, Dialect: workers.VLLM, Role: role,
			Models: []string{model}, Connector: g.Connector, BlockSize: g.BlockSize, KVBlocks: g.Blocks,
		},
		Name: n.name, URL: &url.URL{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", 1+i)}, DP: 1,
	}
	if g.Connector == workers.ConnectorMooncake {
		spec.Bootstrap = &workers.Bootstrap{Port: 1 + i} // as query has it
	}
	s.changeRegistry(func(list []workers.Spec) []workers.Spec { return append(list, spec) })
	n.worker, _ = s.registry.Snapshot().Worker(n.name)
	n.rank = n.worker.Ranks[0]
	s.byHost[spec.URL.Host] = n
	n.probed(workers.Healthy)
	s.note("%s joins in slot %d (silent %v, replay of %d)", n.name, n.rank.Slot, n.silent, n.ring)
	if err := s.index.AddRank(n.slot(), n.name); err != nil {
		s.violate("%v", err)
	}
	if err := s.approx.AddRank(n.slot(), n.rank.Number, n.name); err != nil {
		s.violate("%v", err)
	}
	n.feed = newFeed(n)
	s.nodes = append(s.nodes, n)
	if !s.away {
		n.feed.connect()
	}
}

// changeRegistry changes the fleet.
func (s *stage) changeRegistry(edit func([]workers.Spec) []workers.Spec) {
	if _, err := s.registry.Modify(workers.SourceSim, func(list []workers.Spec) ([]workers.Spec, error) { return edit(list), nil }); err != nil {
		panic(err) // the workers are ours
	}
}

// leave takes a worker out of the fleet; what it has begun it finishes.
func (s *stage) leave(n *node) {
	n.hurt()
	n.member = false
	s.changeRegistry(func(list []workers.Spec) []workers.Spec {
		return slices.DeleteFunc(list, func(w workers.Spec) bool { return w.Name == n.name })
	})
	n.feed.closed = true
	s.index.RemoveRank(n.slot())
	s.approx.RemoveRank(n.slot())
	s.ledger.Forget(n.rank)
	if s.plant == displace {
		n.rank.Number += 1 << 32
	}
	s.registry.ReleaseRanks(n.rank)
}

func (n *node) slot() kvindex.Rank { return kvindex.Rank(n.rank.Slot) }

// well reports whether nothing is being done to the worker.
func (n *node) well() bool { return n.since <= n.s.w.Now() }

// hurt begins a fault: the worker counts as well from its end on.
func (n *node) hurt() { n.since = 1 << 62 }

// endFaults ends all faults.
func (n *node) endFaults() {
	n.hang, n.errors, n.die, n.full, n.drop, n.late, n.spoil = false, 0, 0, 0, 0, 0, 0
	n.worker.State.SetDraining(false)
	if c := n.v.Core(); c != nil {
		c.SetSlow(1)
		n.v.Touch()
	}
	if !n.up {
		n.boot()
		return
	}
	n.flush()
	n.since = n.s.w.Now()
	n.s.note("%s is well", n.name)
}

func (n *node) kill(why string) {
	n.up = false
	n.inc++ // what is on the wire from the old process is lost with it
	n.held, n.log = nil, nil
	n.v.Kill(why)
	for _, f := range n.onKill {
		f()
	}
	n.onKill = nil
	n.feed.disconnected()
}

// exited is an engine that ended by itself: nothing that the router sends may
// have this effect.
func (n *node) exited(_ engine.Time, reason string) {
	n.s.violate("engine %s has exited: %s", n.name, reason)
}

func (n *node) boot() {
	if n.up {
		return
	}
	if err := n.v.Restart(n.s.rng.Uint64()); err != nil {
		n.s.violate("restart of %s: %v", n.name, err)
		return
	}
	n.up = true
	n.s.note("%s is up again", n.name)
	n.since = n.s.w.Now()
	n.endFaults()
	if n.member && !n.s.away {
		n.feed.connect()
	}
}

// stir makes the engine publish something, by a prompt that no other has.
func (n *node) stir(salt uint32) {
	tokens := make([]uint32, 3*n.s.group.BlockSize)
	for i := range tokens {
		tokens[i] = 4000 + salt%1000 + uint32(i)
	}
	// One that the rank does not take now changes nothing.
	_ = n.v.Submit(engine.Request{ID: fmt.Sprintf("stir-%d-%d", n.index, n.s.out.Steps), Tokens: tokens, MaxTokens: 1})
}

// publish sends the events of one step.
func (n *node) publish(_ engine.Time, events []cache.Event) {
	s := n.s
	b := kvevent.Batch{TS: float64(s.w.Now()) / 1e9, Events: make([]kvevent.Event, len(events))}
	for i, e := range events {
		b.Events[i] = sockets.Convert(e, s.group.BlockSize)
	}
	n.emit(batch{uint64(len(n.log)), kvevent.AppendBatch(nil, &b, n.form), events})
}

// emit sends a batch, if nothing happens to it on the way.
func (n *node) emit(m batch) {
	s := n.s
	n.log = append(n.log, m)
	s.out.Batches++
	switch {
	case s.chance(n.drop):
		s.note("batch %d of %s is lost", m.seq, n.name)
	case s.chance(n.spoil):
		s.note("batch %d of %s is spoiled", m.seq, n.name)
		m.payload = spoiled(s, m.payload)
		n.send(m)
	case n.held == nil && s.chance(n.late):
		n.held = &m
		return
	default:
		n.send(m)
	}
	n.flush()
}

func (n *node) flush() {
	if n.held != nil {
		n.s.note("batch %d of %s is late", n.held.seq, n.name)
		n.send(*n.held)
		n.held = nil
	}
}

// spoiled is a payload that cannot be read.
func spoiled(s *stage, payload []byte) []byte {
	if s.chance(0.5) {
		return payload[:s.rng.IntN(len(payload))]
	}
	return append(append([]byte(nil), payload...), byte(s.rng.Uint32()))
}

// wire is how long a batch is on its way.
const wire = 300 * time.Microsecond

func (n *node) send(m batch) {
	f, life := n.feed, n.feed.life
	n.s.w.At(n.s.w.Now()+wire, func() {
		if n.feed == f && f.life == life && f.connected {
			f.live(m)
		}
	})
}

// feed is the router's side: a kvstream.Stream, with the socket's part (when to
// ask for a replay, what to hold meanwhile) modelled after package kvfeed.
type feed struct {
	n         *node
	stream    *kvstream.Stream
	connected bool
	closed    bool
	catching  bool
	refetch   bool
	life      int // connections so far
	held      []batch
	promised  *kept // what the latest snapshot should be good for, until it was looked at

	// truth is what the engine holds after the last batch that the stream has
	// taken, by the engine's names; at is the next batch to add to it.
	truth   map[uint64]int
	outside outside
	at      uint64
	inc     int
	past    []batch // for applyTwice
}

func newFeed(n *node) *feed {
	return &feed{n: n, stream: kvstream.New(n.s.index, n.slot(), n.s.group.BlockSize), truth: map[uint64]int{}, inc: n.inc}
}

// kept is what a snapshot has of a feed, and what it should be good for: the
// life of the engine that the position belongs to, and whether all was known.
type kept struct {
	slot     kvindex.Rank
	Position kvstream.Position `json:"position"`
	Life     int               `json:"life"`
	Complete bool              `json:"complete"`
}

// keep is what a snapshot has of the feed, false when there is nothing to continue
// from.
func (f *feed) keep() (k kept, ok bool) {
	k.Position, ok = f.stream.Position()
	k.Life, k.Complete = f.inc, f.stream.Complete()
	return k, ok
}

// again is the feed of a router that was restarted with what it kept, nil for
// nothing, and should have kept.
func (f *feed) again(k, promised *kept) *feed {
	g := newFeed(f.n)
	g.life, g.promised = f.life+1, promised
	if k != nil {
		g.stream.Resume(k.Position)
		g.truth, g.outside, g.at, g.inc = f.truth, f.outside, f.at, f.inc
	}
	return g
}

// recall looks at a feed that has caught up after a restart of the router: what
// was known at the snapshot must be known still if the replay continues from there.
func (f *feed) recall(replayed []batch) {
	p := f.promised
	f.promised = nil
	if p == nil || !p.Complete || p.Life != f.n.inc || len(replayed) == 0 || replayed[0].seq > p.Position.Seq || f.stream.Complete() {
		return
	}
	f.n.s.violate("the restarted router has forgotten what it knew of %s: all up to batch %d, and the replay begins at %d", f.n.name, p.Position.Seq, replayed[0].seq)
}

// connect begins a connection after a moment, and asks for what was missed.
func (f *feed) connect() {
	s := f.n.s
	if f.n.silent || f.closed {
		return
	}
	f.life++
	life := f.life
	within := 30 * time.Millisecond
	if s.chance(0.3) { // a try failed, and the next one is later
		within = time.Second
	}
	s.w.At(s.w.Now()+s.between(time.Millisecond, within), func() {
		if f.life == life && !f.closed && f.n.up && f.n.feed == f {
			f.connected = true
			f.catchUp()
		}
	})
}

func (f *feed) disconnected() {
	f.life++
	f.connected, f.catching, f.held = false, false, nil
}

// live takes a batch from the socket.
func (f *feed) live(m batch) {
	if f.closed {
		return
	}
	if f.catching {
		f.held = append(f.held, m)
		return
	}
	f.offer(m, false)
}

// offer gives a batch to the stream.
func (f *feed) offer(m batch, replayed bool) {
	s := f.n.s
	if f.planted(m) {
		return
	}
	m = f.lacking(m)
	v := f.stream.Offer(m.seq, m.payload)
	switch v.Kind {
	case kvstream.Apply:
		f.applied(m, replayed)
	case kvstream.Duplicate:
	case kvstream.Gap:
		if replayed {
			// The replay does not reach back far enough.
			f.stream.Skip(m.seq)
			f.offer(m, true)
			return
		}
		s.out.Gaps++
		s.note("feed of %s: batches %d to %d are missing", f.n.name, v.From, v.To)
		f.held = append(f.held, m)
		f.catchUp()
	case kvstream.Restart:
		s.note("feed of %s: the publisher started over", f.n.name)
		f.stream.Reset()
		f.held = append(f.held, m)
		f.catchUp()
	}
}

// applied looks at the index after a batch.
func (f *feed) applied(m batch, replayed bool) {
	s := f.n.s
	f.follow(m.seq)
	if fault := f.stream.TakeFault(); fault != "" {
		s.note("feed of %s: emptied: %s", f.n.name, fault)
		if !replayed {
			f.refetch = true
		}
	}
	f.check()
	f.checkPrompts(m.seq)
	if f.refetch && !f.catching {
		f.refetch = false
		f.replay(true)
	}
	f.past = append(f.past, m)
}

// follow brings the truth to the state after a batch.
func (f *feed) follow(seq uint64) {
	n := f.n
	if f.inc != n.inc || seq+1 < f.at {
		f.truth, f.outside, f.at, f.inc = map[uint64]int{}, outside{}, 0, n.inc
	}
	for ; f.at <= seq && f.at < uint64(len(n.log)); f.at++ {
		for _, e := range n.log[f.at].events {
			if e.Tier != cache.Device {
				f.outside.take(&e)
				continue
			}
			switch e.Kind {
			case cache.Stored:
				for _, name := range e.Names {
					f.truth[name]++
				}
			case cache.Removed:
				for _, name := range e.Names {
					if f.truth[name]--; f.truth[name] <= 0 {
						delete(f.truth, name)
					}
				}
			case cache.Cleared:
				clear(f.truth)
			}
		}
	}
}

// check wants every block of the index to be in the engine as of the last batch.
func (f *feed) check() {
	s := f.n.s
	s.out.Checks++
	var over []uint64 // in no order that would be the same twice
	err := s.index.RankBlocks(f.n.slot(), func(seq, name uint64) bool {
		if f.truth[name] == 0 {
			over = append(over, seq)
		}
		return true
	})
	if len(over) > 0 {
		s.violate("the index holds %d block(s) of %s, the first %x, which the engine does not", len(over), f.n.name, slices.Min(over))
	}
	if err != nil {
		s.violate("%s: %v", f.n.name, err)
	}
}

// catchUp asks the replay socket for everything from the last known batch on.
func (f *feed) catchUp() { f.replay(false) }

// replay is catchUp; asking, nothing is taken unless the replay reaches further
// back than the stream.
func (f *feed) replay(asking bool) {
	n, s := f.n, f.n.s
	f.catching = true
	life := f.life
	from, known := f.stream.Last()
	if !known {
		from = 0
	}
	s.out.Resyncs++
	s.w.At(s.w.Now()+2*wire, func() {
		if f.life != life || f.closed || n.feed != f {
			return
		}
		all := n.log[max(0, len(n.log)-n.ring):]
		switch {
		case asking && (len(all) == 0 || all[0].seq >= f.stream.Base()):
			all = nil
		case asking:
			f.stream.Reset()
			from = 0
		case known && s.plant == numbersOnly && uint64(len(n.log)) > from+1:
			from++
		case known:
			// The last batch must still be the one that was applied; if it is not there
			// at all, that is not known.
			if len(all) == 0 || all[0].seq > from || uint64(len(n.log)) <= from || f.stream.Offer(from, f.lacking(all[from-all[0].seq]).payload).Kind != kvstream.Duplicate {
				s.note("feed of %s: starts over", n.name)
				f.stream.Reset()
				from = 0
			}
		}
		for _, m := range all {
			if m.seq >= from && len(s.out.Violations) == 0 {
				f.offer(m, true)
			}
		}
		if !asking {
			f.recall(all)
		}
		f.catching, f.refetch = false, false
		held := f.held
		f.held = nil
		for i, m := range held {
			if f.catching {
				f.held = append(f.held, held[i:]...)
				break
			}
			if last, ok := f.stream.Last(); ok && m.seq <= last {
				continue // the replay had it
			}
			f.offer(m, false)
		}
	})
}

// audit is the look at the end: a feed that has seen everything must know all
// that the engine holds, and none may know more.
func (n *node) audit() {
	if n.silent {
		return
	}
	s, f := n.s, n.feed
	if !f.connected || f.catching {
		s.violate("the feed of %s has not come to rest", n.name)
		return
	}
	if last, ok := f.stream.Last(); len(n.log) > 0 && (!ok || last+1 != uint64(len(n.log))) {
		s.violate("the feed of %s is at batch %d of %d", n.name, last, len(n.log))
		return
	}
	f.check()
	want := map[uint64]bool{}
	for _, q := range n.v.Core().Cache().Seqs(nil) {
		want[q] = true
	}
	got := 0
	var over []uint64
	_ = s.index.RankBlocks(n.slot(), func(seq, _ uint64) bool { // its error was reported by check
		got++
		if !want[seq] {
			over = append(over, seq)
		}
		return true
	})
	if len(over) > 0 {
		s.violate("at rest the index holds %d block(s) of %s, the first %x, which the engine does not", len(over), n.name, slices.Min(over))
	}
	if f.stream.Complete() && got != len(want) {
		s.violate("at rest the index knows %d of the %d blocks of %s, although every batch was applied", got, len(want), n.name)
	}
}

// planted carries out the bugs of the feed. It reports whether the batch is
// dealt with.
func (f *feed) planted(m batch) bool {
	s := f.n.s
	raw := func(m batch) {
		var d kvevent.Decoder
		var b kvevent.Batch
		var ops kvindex.Batch
		if d.Decode(m.payload, &b) == nil {
			a := kvstream.NewApplier(s.group.BlockSize)
			a.Apply(&b, &ops)
			s.index.Apply(f.n.slot(), &ops)
		}
	}
	switch s.plant {
	case applyTwice:
		if len(f.past) > 4 && s.chance(0.05) {
			old := f.past[s.rng.IntN(len(f.past)-3)]
			s.note("PLANTED: batch %d of %s is applied again", old.seq, f.n.name)
			raw(old)
			f.check()
		}
	case applyEarly:
		if last, ok := f.stream.Last(); ok && m.seq > last+1 {
			s.note("PLANTED: batch %d of %s is applied after batch %d", m.seq, f.n.name, last)
			raw(m)
			f.follow(m.seq)
			f.stream.TakeFault()
			f.check()
			return true
		}
	}
	return false
}
