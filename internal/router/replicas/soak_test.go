package replicas

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/rig/virtualnet"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// plant is a bug put into a router on purpose.
type plant struct {
	name string
	// before may change a view and a message that it is about to receive; false drops it.
	// after sees both when it was received, look changes the view before it is read.
	before func(v *View, now time.Time, m *Message) bool
	after  func(v *View, now time.Time, m *Message)
	look   func(v *View, now time.Time)
	relays bool // routers publish what they heard as their own
}

// stage is routers on a network under a virtual clock, with what must be true of them.
type stage struct {
	seed  uint64
	rand  *rand.Rand
	world *virtual.World
	net   *virtualnet.Net
	plant plant

	ranks    []Rank
	routers  []*member // by origin
	foreign  *member
	quiet    bool          // loads stay as they are
	setBack  bool          // a router restarted with an earlier epoch
	slowest  time.Duration // that a message could take on its way
	longest  time.Duration // that a router was stopped
	problems []string
	checks   int
	did      map[string]int
}

// member is one router, over its restarts.
type member struct {
	s       *stage
	self    Identity
	life    int
	up      bool
	stopped bool
	port    *virtualnet.Port
	ex      *Exchange
	own     map[Rank]Load
	past    []moment // of own, since the first start
	known   []Rank
	heard   map[string]*heard
}

// moment is a router's load from a time on.
type moment struct {
	at   time.Time
	load map[Rank]Load
}

// heard is all that a router received from one origin in its present epoch: the naive
// reference, which looks through all of it.
type heard struct {
	epoch   time.Time
	states  []Message
	newest  uint64
	at      time.Time
	left    bool
	ignores map[Rank]uint64 // states up to a number came before the rank was known
}

// start is the time of the world's 0.
var start = time.Unix(1_800_000_000, 0)

func (s *stage) now() time.Time { return start.Add(s.world.Now()) }

func (s *stage) in(d time.Duration, f func()) { s.world.At(s.world.Now()+d, f) }

// upTo draws a time.
func (s *stage) upTo(d time.Duration) time.Duration { return time.Duration(s.rand.Int64N(int64(d))) }

func (s *stage) oneIn(n int) bool { return s.rand.IntN(n) == 0 }

func (s *stage) problem(format string, args ...any) {
	s.problems = append(s.problems, fmt.Sprintf("seed %d at %v: ", s.seed, s.world.Now())+fmt.Sprintf(format, args...))
}

func newStage(seed uint64, p plant) *stage {
	s := &stage{seed: seed, rand: rand.New(rand.NewPCG(seed, 44)), world: virtual.NewWorld(), plant: p, did: map[string]int{}}
	s.net = &virtualnet.Net{World: s.world, Rand: s.rand, Least: time.Millisecond, Most: 5 * time.Millisecond}
	for i := range 2 + s.rand.IntN(6) {
		s.ranks = append(s.ranks, RankOf(fmt.Sprintf("http://engine-%d:8000", i/2), i%2))
	}
	for i := range 2 + s.rand.IntN(3) {
		m := &member{s: s, self: Identity{Fleet: "a", Origin: fmt.Sprintf("router-%d", i), Version: "v1", Settings: "5e7"}, own: map[Rank]Load{}}
		s.routers = append(s.routers, m)
		m.boot(start)
	}
	if s.oneIn(3) {
		s.foreign = &member{s: s, self: Identity{Fleet: "b", Origin: s.routers[0].self.Origin}, own: map[Rank]Load{}}
		s.foreign.boot(start)
	}
	return s
}

// boot starts a router's process.
func (m *member) boot(epoch time.Time) {
	s := m.s
	m.self.Epoch, m.up, m.stopped = epoch, true, false
	m.life++
	clear(m.own)
	m.remember()
	m.heard = map[string]*heard{}
	m.port = s.net.Port()
	ex, err := NewExchange(m.self, tap{m.port, m}, s.now, m.rows, More{})
	if err != nil {
		panic(err)
	}
	m.ex, m.known = ex, nil
	m.learn()
	life := m.life
	var step func()
	step = func() {
		if !m.up || m.life != life {
			return
		}
		next := Pace
		if !m.stopped {
			next = ex.Step().Sub(s.now())
		}
		s.in(next, step)
	}
	s.in(s.upTo(Pace), step)
}

// rows are what the router publishes.
func (m *member) rows(into []Row) []Row {
	for _, r := range m.s.ranks { // in an order that repeats
		row := Row{r, m.own[r]}
		if m.s.plant.relays && m.ex != nil {
			heard, _, _ := m.ex.View().Load(m.s.now(), r)
			row.add(&heard)
		}
		into = append(into, row)
	}
	return into
}

// remember keeps the router's present load.
func (m *member) remember() {
	load := map[Rank]Load{}
	for r, l := range m.own {
		load[r] = l
	}
	m.past = append(m.past, moment{m.s.now(), load})
}

// learn changes the ranks that the router knows.
func (m *member) learn() {
	known := slices.DeleteFunc(slices.Clone(m.s.ranks), func(Rank) bool { return m.s.oneIn(6) })
	for _, r := range known {
		if !slices.Contains(m.known, r) {
			for _, h := range m.heard {
				h.ignores[r] = h.newest
			}
		}
	}
	m.known = known
	m.ex.View().SetRanks(known)
}

// tap is a router's transport, which plants bugs and writes down what arrives.
type tap struct {
	*virtualnet.Port
	m *member
}

// Subscribe implements Transport.
func (t tap) Subscribe(received func([]byte), left func(string)) error {
	return t.Port.Subscribe(func(b []byte) { t.m.receive(b, received) }, func(origin string) {
		if h := t.m.heard[origin]; h != nil {
			h.left = true
		}
		left(origin)
	})
}

func (m *member) receive(b []byte, received func([]byte)) {
	now, v, p := m.s.now(), m.ex.View(), &m.s.plant
	var message Message
	if err := message.Decode(b); err != nil {
		m.s.problem("%v", err)
		return
	}
	m.note(now, &message)
	if message.Ask == "" && p.before != nil {
		message.Rows = slices.Clone(message.Rows)
		if !p.before(v, now, &message) {
			return
		}
		b = message.Append(nil)
	}
	received(b)
	if message.Ask == "" && p.after != nil {
		p.after(v, now, &message)
	}
}

// note writes a message down.
func (m *member) note(now time.Time, message *Message) {
	if message.Ask != "" || message.Fleet != m.self.Fleet || message.Origin == m.self.Origin {
		return
	}
	h := m.heard[message.Origin]
	if h != nil && !message.Epoch.Equal(h.epoch) {
		if message.Epoch.Before(h.epoch) && h.live(now) {
			return
		}
		h = nil
	}
	if h == nil {
		h = &heard{epoch: message.Epoch, ignores: map[Rank]uint64{}}
		m.heard[message.Origin] = h
	}
	if message.Seq > h.newest {
		h.newest, h.at, h.left = message.Seq, now, false
	}
	h.states = append(h.states, *message)
}

func (h *heard) live(now time.Time) bool { return !h.left && now.Sub(h.at) < time.Second }

// load is what the newest state that has the rank says of it.
func (h *heard) load(r Rank) (load Load, ok bool) {
	newest := h.ignores[r]
	for _, m := range h.states {
		if m.Seq <= newest {
			continue
		}
		row, in := slices.BinarySearchFunc(m.Rows, r, func(row Row, r Rank) int {
			switch {
			case row.Rank < r:
				return -1
			case row.Rank > r:
				return 1
			}
			return 0
		})
		if in {
			load, newest, ok = m.Rows[row].Load, m.Seq, true
		} else if m.Full {
			load, newest, ok = Load{}, m.Seq, true
		}
	}
	return load, ok
}

// check compares a router's view with all that arrived, and its ages with the truth.
func (m *member) check() {
	if !m.up || m.stopped {
		return
	}
	s, now, v := m.s, m.s.now(), m.ex.View()
	if s.plant.look != nil {
		s.plant.look(v, now)
	}
	s.checks++
	for _, r := range s.ranks {
		var want Load
		live := false
		for _, h := range m.heard {
			if l, ok := h.load(r); ok && h.live(now) && slices.Contains(m.known, r) {
				want.add(&l)
				live = true
			}
		}
		got, age, ok := v.Load(now, r)
		if ok != live || got != want || age < 0 {
			s.problem("%s has %+v (%v, %v old) of rank %x, but received %+v (%v)", m.self.Origin, got, ok, age, r, want, live)
		}
	}
	for _, o := range v.origins {
		other := s.routers[slices.IndexFunc(s.routers, func(m *member) bool { return m.self.Origin == o.id })]
		for i, c := range o.cells {
			if c.known && o.live(now) {
				if since := o.since(&c); !other.had(v.ranks[i], c.Load, since.Add(-s.slowest-s.longest), since) {
					s.problem("%s shows %+v of %s as true %v ago, when it was not", m.self.Origin, c.Load, o.id, now.Sub(o.since(&c)))
				}
			}
		}
	}
}

// had reports whether a router had a load on a rank at some time from one to another.
func (m *member) had(r Rank, l Load, from, to time.Time) bool {
	for i := len(m.past) - 1; i >= 0; i-- {
		if p := m.past[i]; !p.at.After(to) {
			if p.load[r] == l {
				return true
			}
			if p.at.Before(from) {
				return false
			}
		}
	}
	return false
}

// settled compares a router's view with what the others really have.
func (m *member) settled() {
	s, now := m.s, m.s.now()
	if !m.up {
		return
	}
	others := 0
	for _, r := range m.known {
		var want Load
		others = 0
		for _, o := range s.routers {
			if o != m && o.up {
				load := o.own[r]
				want.add(&load)
				others++
			}
		}
		if got, age, ok := m.ex.View().Load(now, r); ok != (others > 0) || got != want || age > Heartbeat+Pace {
			s.problem("after all faults %s has %+v (%v, %v old) of rank %x, but the others have %+v", m.self.Origin, got, ok, age, r, want)
		}
	}
	for _, o := range m.ex.View().Snapshot(now).Origins {
		up := slices.ContainsFunc(s.routers, func(m *member) bool {
			return m.up && m.self.Origin == o.Origin && m.self.Epoch.Equal(o.Epoch) && m.self.Version == o.Version && m.self.Settings == o.Settings
		})
		if o.Live != up || o.Live && !o.Complete {
			s.problem("after all faults %s shows %+v, which is up: %v", m.self.Origin, o, up)
		}
	}
}

// change draws a new load of a router on a rank.
func (m *member) change() {
	s := m.s
	if m.up && !m.stopped && !s.quiet {
		r := s.ranks[s.rand.IntN(len(s.ranks))]
		if delete(m.own, r); !s.oneIn(3) {
			blocks := s.rand.IntN(1 << 16)
			m.own[r] = Load{1 + s.rand.IntN(50), s.rand.IntN(20), s.rand.IntN(1 << 20), blocks, s.rand.IntN(blocks + 1), s.rand.IntN(1 << 20)}
		}
		m.remember()
		if s.oneIn(4) {
			m.ex.Step()
		}
	}
	if !s.quiet {
		s.in(s.upTo(120*time.Millisecond), m.change)
	}
}

// fault does one thing to a router or to the network, and ends it later.
func (s *stage) fault() {
	if s.quiet {
		return
	}
	m, least := s.routers[s.rand.IntN(len(s.routers))], s.upTo(2*time.Second)
	switch kind := []string{"loss", "doubles", "delay", "cut", "stop", "crash", "restart", "departure", "ranks"}[s.rand.IntN(9)]; kind {
	case "loss":
		s.net.Loss = 0.5 * s.rand.Float64()
		s.in(least, func() { s.net.Loss = 0 })
		s.did[kind]++
	case "doubles":
		s.net.Double = s.rand.Float64()
		s.in(least, func() { s.net.Double = 0 })
		s.did[kind]++
	case "delay":
		s.net.Most = 10*time.Millisecond + s.upTo(3*time.Second)
		s.slowest = max(s.slowest, s.net.Most)
		s.in(s.upTo(time.Second), func() { s.net.Most = 5 * time.Millisecond })
		s.did[kind]++
	case "cut":
		m.port.Side = 1
		port := m.port
		s.in(least, func() { port.Side = 0 })
		s.did[kind]++
	case "stop":
		if m.up && !m.stopped {
			m.stopped = true
			m.port.Stop()
			life := m.life
			s.longest = max(s.longest, least)
			s.in(least, func() {
				if m.life == life && m.up {
					m.stopped = false
					m.port.Continue()
				}
			})
			s.did[kind]++
		}
	case "crash", "restart":
		if !m.up {
			return
		}
		m.up = false
		_ = m.port.Close()
		clear(m.own)
		m.remember()
		if kind == "restart" {
			epoch := s.now()
			if s.oneIn(4) {
				epoch = start.Add(-s.upTo(time.Hour))
				s.setBack = true
			}
			s.in(s.upTo(3*time.Second/2), func() { m.boot(epoch) })
		} else if s.oneIn(2) {
			s.net.Depart(m.self.Origin)
		}
		s.did[kind]++
	case "departure": // that is not true
		s.net.Depart(m.self.Origin)
		s.did[kind]++
	case "ranks":
		for range 8 {
			s.in(least, func() {
				if m.up {
					m.learn()
					s.did[kind]++
				}
			})
			least += s.upTo(200 * time.Millisecond)
		}
	}
	s.in(s.upTo(time.Second/2), s.fault)
}

// play runs one seed: faults, then none until all is settled.
func play(seed uint64, p plant) *stage {
	s := newStage(seed, p)
	s.slowest = 5*time.Millisecond + Pace
	members := s.routers
	if s.foreign != nil {
		members = append(slices.Clone(members), s.foreign)
	}
	for _, m := range members {
		m.change()
	}
	s.in(time.Millisecond, s.fault)
	var look func()
	look = func() {
		for _, m := range s.routers {
			m.check()
		}
		if len(s.problems) == 0 {
			s.in(s.upTo(200*time.Millisecond), look)
		}
	}
	s.in(0, look)
	s.world.Run(2*time.Second + s.upTo(3*time.Second))
	s.quiet = true
	// All that lasts ends by itself, restarts included, and every message arrives.
	s.world.Run(s.world.Now() + 4*time.Second + s.slowest + s.longest)
	s.world.Run(s.world.Now() + Lifetime + Pace + 20*time.Millisecond)
	if s.setBack {
		s.world.Run(s.world.Now() + 2*Heartbeat)
	}
	for range 10 {
		if len(s.problems) > 0 {
			break
		}
		for _, m := range s.routers {
			m.settled()
		}
		s.world.Run(s.world.Now() + s.upTo(200*time.Millisecond))
	}
	return s
}

// TestVirtual plays seeds of faults: at all times each view has what the newest messages
// say, its ages are true, and after the faults its sums are the truth.
func TestVirtual(t *testing.T) {
	n, from := property.FromEnv(t, "DYNCTL_SOAK_SEEDS", 100), property.FromEnv(t, "DYNCTL_SOAK_SEED", 1)
	checks, did, failed := 0, map[string]int{}, 0
	for seed := from; seed < from+n && failed < 3; seed++ {
		s := play(seed, plant{})
		checks += s.checks
		for kind, n := range s.did {
			did[kind] += n
		}
		if len(s.problems) > 0 {
			failed++
			t.Errorf("%s (of %d problems; DYNCTL_SOAK_SEED=%d DYNCTL_SOAK_SEEDS=1 repeats it)", s.problems[0], len(s.problems), seed)
		}
	}
	t.Logf("%d seeds from %d: %d checks of a view, %v", n, from, checks, did)
	if n >= 100 && len(did) != 9 {
		t.Errorf("only these faults happened: %v", did)
	}
}

// TestPlantedBugsAreFound: TestVirtual finds each of these bugs.
func TestPlantedBugsAreFound(t *testing.T) {
	each := func(v *View, f func(o *origin)) {
		for _, o := range v.origins {
			f(o)
		}
	}
	by := func(v *View, m *Message) *origin {
		if i, ok := v.find(m.Origin); ok {
			return v.origins[i]
		}
		return nil
	}
	same := func(v *View, m *Message) *origin {
		if o := by(v, m); o != nil && o.epoch.Equal(m.Epoch) && m.Fleet == v.fleet {
			return o
		}
		return nil
	}
	var was []cell
	for _, p := range []plant{
		{name: "applies older states", before: func(v *View, _ time.Time, m *Message) bool {
			if o := same(v, m); o != nil {
				o.sound, o.window = 0, 0
				for i := range o.cells {
					o.cells[i].seq = 0
				}
			}
			return true
		}},
		{name: "forgets the epoch", before: func(v *View, _ time.Time, m *Message) bool {
			if o := by(v, m); o != nil {
				m.Epoch = o.epoch
			}
			return true
		}},
		{name: "refuses an earlier epoch for ever", before: func(v *View, _ time.Time, m *Message) bool {
			o := by(v, m)
			return o == nil || !m.Epoch.Before(o.epoch)
		}},
		{name: "never times out", look: func(v *View, now time.Time) {
			each(v, func(o *origin) { o.at = now })
		}},
		{name: "adds instead of replacing", before: func(v *View, _ time.Time, m *Message) bool {
			was = nil
			if o := same(v, m); o != nil {
				was = slices.Clone(o.cells)
			}
			return true
		}, after: func(v *View, _ time.Time, m *Message) {
			if o := same(v, m); o != nil {
				for i := range was {
					if c := &o.cells[i]; c.seq != was[i].seq {
						c.add(&was[i].Load)
					}
				}
			}
		}},
		{name: "keeps ranks that a full state leaves out", before: func(_ *View, _ time.Time, m *Message) bool {
			m.Full = m.Full && m.Seq == 1
			return true
		}},
		{name: "does not publish that a rank became idle", before: func(_ *View, _ time.Time, m *Message) bool {
			m.Rows = slices.DeleteFunc(m.Rows, func(r Row) bool { return r.Load == Load{} })
			return true
		}},
		{name: "never publishes a full state", before: func(_ *View, _ time.Time, m *Message) bool { return !m.Full }},
		{name: "counts its own messages", before: func(v *View, _ time.Time, m *Message) bool {
			v.self = ""
			return true
		}},
		{name: "counts another fleet", before: func(v *View, _ time.Time, m *Message) bool {
			m.Fleet = v.fleet
			return true
		}},
		{name: "is kept alive by old messages", after: func(v *View, now time.Time, m *Message) {
			if o := same(v, m); o != nil {
				o.at = now
			}
		}},
		{name: "ignores departures", look: func(v *View, _ time.Time) {
			each(v, func(o *origin) { o.left = false })
		}},
		{name: "shows the newest message's age despite gaps", look: func(v *View, _ time.Time) {
			each(v, func(o *origin) { o.soundAt = o.at })
		}},
		{name: "takes old states for new ranks", before: func(v *View, _ time.Time, m *Message) bool {
			each(v, func(o *origin) {
				for i := range o.cells {
					if c := &o.cells[i]; !c.known {
						c.seq = 0
					}
				}
			})
			return true
		}},
		{name: "relays what it heard", relays: true},
	} {
		t.Run(p.name, func(t *testing.T) {
			for seed := uint64(1); seed <= 300; seed++ {
				if s := play(seed, p); len(s.problems) > 0 {
					t.Logf("found with %s", s.problems[0])
					return
				}
			}
			t.Error("was not found in 300 seeds")
		})
	}
}
