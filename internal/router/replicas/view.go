package replicas

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// View keeps the load that other routers published. It is safe for concurrent use.
type View struct {
	fleet, self string
	epoch       time.Time // of self
	revision    atomic.Uint64

	mu      sync.RWMutex
	ranks   []Rank       // sorted
	index   map[Rank]int // in ranks
	origins []*origin    // sorted by id
	counts  Counts
}

// origin is another router. A state is a message of its present epoch.
type origin struct {
	id, version, settings string
	epoch                 time.Time
	left                  bool
	// at is when the newest state arrived, newest its number.
	at     time.Time
	newest uint64
	// sound is the largest number for which the cells have all that was published up to
	// it. Bit i of window is set if state sound+1+i arrived. soundAt is when the newest
	// state arrived while none was missing.
	sound, window uint64
	soundAt       time.Time
	asked         time.Time // when its full state was requested last
	cells         []cell    // like View.ranks
	unknown       int       // cells that are not known
	messages      uint64
	gaps          uint64
	strange       int // rows of the last full state whose ranks the receiver does not know
}

// cell is an origin's load on one rank, from the state with number seq.
type cell struct {
	Load
	known bool
	seq   uint64
	at    time.Time
}

// NewView returns the view of a router that knows no ranks yet.
func NewView(self Identity) *View {
	return &View{fleet: self.Fleet, self: self.Origin, epoch: self.Epoch}
}

// Revision grows when what [View.Sums] returns may have changed for another reason than the
// time.
func (v *View) Revision() uint64 { return v.revision.Load() }

// SetRanks replaces the ranks whose load the view keeps. Others are ignored. The load of new
// ranks is known from the next full state of each router on.
func (v *View) SetRanks(ranks []Rank) {
	v.mu.Lock()
	defer v.mu.Unlock()
	defer v.revision.Add(1)
	ranks = slices.Clone(ranks)
	slices.Sort(ranks)
	ranks = slices.Compact(ranks)
	for _, o := range v.origins {
		cells := make([]cell, len(ranks))
		o.unknown = 0
		for i, r := range ranks {
			if was, ok := v.index[r]; ok {
				cells[i] = o.cells[was]
			} else {
				// Rows of older states are not the last word on this rank.
				cells[i].seq = o.newest
			}
			if !cells[i].known {
				o.unknown++
			}
		}
		o.cells = cells
	}
	v.ranks, v.index = ranks, make(map[Rank]int, len(ranks))
	for i, r := range ranks {
		v.index[r] = i
	}
}

// take takes a state of another router that arrived now. It reports whether the state was new,
// and whether the router's full state should be requested, because states are missing.
func (v *View) take(now time.Time, m *Message) (taken, ask bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case m.Fleet != v.fleet:
		v.counts.Foreign++
		return false, false
	case m.Origin == v.self:
		if !m.Epoch.Equal(v.epoch) {
			v.counts.SameOrigin++
		}
		return false, false
	}
	i, known := v.find(m.Origin)
	if !known {
		if i, known = v.admit(now, m.Origin); !known {
			v.counts.Crowded++
			return false, false
		}
		v.origins[i] = newOrigin(m, len(v.ranks))
	}
	o := v.origins[i]
	switch {
	case m.Epoch.Equal(o.epoch):
	case m.Epoch.Before(o.epoch) && o.live(now):
		v.counts.Earlier++
		return false, false
	default:
		// A restart. It may have an earlier epoch if the host's clock was set back; then it
		// counts when the process before it no longer does.
		o = newOrigin(m, len(v.ranks))
		v.origins[i] = o
	}
	if !o.arrive(now, m.Seq) {
		v.counts.Repeated++
		return false, false
	}
	o.apply(now, m, v.ranks)
	v.revision.Add(1)
	if o.sound == o.newest {
		o.soundAt = o.at
	}
	o.left = o.left || m.Gone && m.Seq == o.newest
	if o.left || o.complete() || !o.asked.IsZero() && now.Sub(o.asked) < Heartbeat {
		return true, false
	}
	o.asked = now
	return true, true
}

// find is where the origin with an id is in v.origins, or belongs.
func (v *View) find(id string) (i int, ok bool) {
	return slices.BinarySearchFunc(v.origins, id, func(o *origin, id string) int { return cmp.Compare(o.id, id) })
}

// admit makes room for another origin and returns its index; false if there are too many.
func (v *View) admit(now time.Time, id string) (i int, ok bool) {
	if len(v.origins) >= MaxOrigins {
		oldest := -1
		for i, o := range v.origins {
			if !o.live(now) && (oldest < 0 || o.at.Before(v.origins[oldest].at)) {
				oldest = i
			}
		}
		if oldest < 0 {
			return 0, false
		}
		v.origins = slices.Delete(v.origins, oldest, oldest+1)
	}
	i, _ = v.find(id)
	v.origins = slices.Insert(v.origins, i, nil)
	return i, true
}

func newOrigin(m *Message, ranks int) *origin {
	return &origin{id: m.Origin, epoch: m.Epoch, cells: make([]cell, ranks), unknown: ranks}
}

// live reports whether the origin's load counts.
func (o *origin) live(now time.Time) bool { return !o.left && now.Sub(o.at) < Lifetime }

// complete reports whether all that the origin published up to its newest state is known.
func (o *origin) complete() bool { return o.sound == o.newest && o.unknown == 0 }

// arrive counts a state, and reports false for one that holds nothing new. Only the newest
// one shows that the origin is alive.
func (o *origin) arrive(now time.Time, seq uint64) bool {
	if seq <= o.sound {
		return false
	}
	if i := seq - o.sound - 1; i < 64 {
		if o.window&(1<<i) != 0 {
			return false
		}
		o.window |= 1 << i
	}
	o.messages++
	if seq > o.newest {
		if o.newest > 0 && seq > o.newest+1 {
			o.gaps++
		}
		o.newest, o.at, o.left = seq, now, false
	}
	o.slide(o.sound)
	return true
}

// slide moves sound to a larger number, and on over all states that arrived.
func (o *origin) slide(to uint64) {
	o.window >>= to - o.sound // 0 from 64 on
	for o.sound = to; o.window&1 != 0; o.sound++ {
		o.window >>= 1
	}
}

// apply puts rows into the cells whose load is from an older state.
func (o *origin) apply(now time.Time, m *Message, ranks []Rank) {
	rows, strange := m.Rows, 0
	oldest := m.Seq
	for i := range o.cells {
		for len(rows) > 0 && rows[0].Rank < ranks[i] {
			rows = rows[1:]
			strange++
		}
		c := &o.cells[i]
		var load Load
		covered := m.Full && m.From <= ranks[i] && ranks[i] <= m.To
		if len(rows) > 0 && rows[0].Rank == ranks[i] {
			load, covered = rows[0].Load, true
			rows = rows[1:]
		}
		if covered && m.Seq > c.seq {
			if !c.known {
				o.unknown--
			}
			*c = cell{Load: load, known: true, seq: m.Seq, at: now}
		}
		oldest = min(oldest, c.seq)
	}
	if !m.Full {
		return
	}
	if m.Seq == o.newest {
		if m.From == 0 {
			o.strange = 0
		}
		o.strange += strange + len(rows)
		o.version, o.settings = m.Version, m.Settings
	}
	// Every cell is at least as new as the oldest one: no earlier state matters.
	if o.unknown == 0 && oldest > o.sound {
		o.slide(oldest)
	}
}

// Departed marks a router as gone, which ends its load before its [Lifetime]. A newer state
// from it brings it back.
func (v *View) Departed(origin string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if i, ok := v.find(origin); ok {
		v.origins[i].left = true
		v.revision.Add(1)
	}
}

// Sum is the load of the other live routers on one rank, together.
type Sum struct {
	Load
	// Since is when the oldest part of it was known to be true, by the time of its arrival;
	// zero if no live router has published its load on the rank.
	Since time.Time
}

func (v *View) sum(now time.Time, rank Rank) (s Sum) {
	i, ok := v.index[rank]
	if !ok {
		return s
	}
	for _, o := range v.origins {
		if c := &o.cells[i]; c.known && o.live(now) {
			s.add(&c.Load)
			if since := o.since(c); s.Since.IsZero() || since.Before(s.Since) {
				s.Since = since
			}
		}
	}
	return s
}

// Sums writes the sums of ranks, with figures of at most [MaxAmount], into a slice of the
// same length. live is the number of live
// routers. heard is when the newest state of the one arrived that has been silent longest.
// The sums hold until the time until, unless [View.Revision] grows.
func (v *View) Sums(now time.Time, ranks []Rank, into []Sum) (live int, heard, until time.Time) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for i, r := range ranks {
		into[i] = v.sum(now, r)
		into[i].limit()
	}
	for _, o := range v.origins {
		if !o.live(now) {
			continue
		}
		if live++; live == 1 || o.at.Before(heard) {
			heard = o.at
		}
	}
	return live, heard, heard.Add(Lifetime)
}

// since is when a cell was known to be true.
func (o *origin) since(c *cell) time.Time {
	if o.soundAt.After(c.at) {
		return o.soundAt
	}
	return c.at
}

// Counts are messages that brought no load, since the start.
type Counts struct {
	// Foreign came from routers of another fleet.
	Foreign uint64
	// Earlier came from an epoch before the one that is live.
	Earlier uint64
	// Repeated were doubled, or older than all that was known.
	Repeated uint64
	// Crowded came from routers beyond [MaxOrigins].
	Crowded uint64
	// SameOrigin came from another process with this router's origin: one of the two
	// needs another.
	SameOrigin uint64
	// Refused could not be read. LastRefused is the reason for the last of them.
	Refused     uint64
	LastRefused string
}

// Origin is another router for display.
type Origin struct {
	// Origin, Epoch, Version and Settings are as in [Identity]. The last two are empty
	// until a full state arrives.
	Origin, Version, Settings string
	Epoch                     time.Time
	// Live reports whether its load counts. Otherwise it was silent for [Lifetime], or,
	// with Left, is known to have gone.
	Live, Left bool
	// Silent is the time since its newest state arrived.
	Silent time.Duration
	// Complete reports whether no state is missing. Load is the sum over the ranks, as far as
	// it was published, also of an origin that is not live.
	Complete bool
	Load     Load
	// Messages are the states that arrived in this epoch, Gaps how often some before them
	// were missing.
	Messages, Gaps uint64
	// Strange is the number of busy ranks in the last full state that this router does
	// not know.
	Strange int
}

// Snapshot is the view for display.
type Snapshot struct {
	Origins []Origin // by Origin
	Counts
}

// Snapshot returns the view as it is now.
func (v *View) Snapshot(now time.Time) Snapshot {
	v.mu.RLock()
	defer v.mu.RUnlock()
	s := Snapshot{Counts: v.counts}
	for _, o := range v.origins {
		e := Origin{
			Origin: o.id, Version: o.version, Settings: o.settings, Epoch: o.epoch,
			Live: o.live(now), Left: o.left, Silent: now.Sub(o.at), Complete: o.complete(),
			Messages: o.messages, Gaps: o.gaps, Strange: o.strange,
		}
		for i := range o.cells {
			e.Load.add(&o.cells[i].Load)
		}
		s.Origins = append(s.Origins, e)
	}
	return s
}

// refused counts a message that could not be read.
func (v *View) refused(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.counts.Refused++
	v.counts.LastRefused = err.Error()
}
