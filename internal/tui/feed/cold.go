package feed

import (
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// When an index counts as cold: it holds less than coldBelow of what it held
// before, of which there must have been coldLeast blocks, and stays cold until it
// holds warmFrom of it again. After coldFor it is taken as it is: what was cached
// then may never come back.
const (
	coldBelow = 0.5
	warmFrom  = 0.8
	coldLeast = 64
	coldFor   = 10 * time.Minute
	// freshFor is how long a start is listed, and a recovery.
	freshFor = time.Minute
)

// cold is one index, or one rank's part of it, that lost most of its blocks.
type cold struct {
	from    int64     // blocks before
	now     int64     // blocks in the newest answer
	began   time.Time // by the router's clock
	warm    time.Time // zero while it is cold
	restart bool      // the engine's publisher was restarted
}

// coldWatch sees indexes fall and recover. The zero value is ready.
type coldWatch struct {
	whole *cold            // the router's index, after its own restart
	ranks map[string]*cold // by label
	// last is what the router's index held in the newest answer.
	last int64
	// restarted is when another process than before answered, by its own clock.
	restarted time.Time
}

// restart notes that the router is another process than before.
func (w *coldWatch) restart(st *admin.Status) {
	w.restarted, w.ranks = st.Started, nil
	from := w.last
	if w.whole != nil && w.whole.warm.IsZero() {
		from = max(from, w.whole.from)
	}
	w.whole = nil
	if from >= coldLeast {
		w.whole = &cold{from: from, began: st.Started}
	}
}

// follow moves a cold index on; it reports whether it is still to be listed.
func (c *cold) follow(held int64, now time.Time) bool {
	c.now = held
	if c.warm.IsZero() && float64(held) >= warmFrom*float64(c.from) {
		c.warm = now
	}
	if c.warm.IsZero() {
		return now.Sub(c.began) < coldFor
	}
	return now.Sub(c.warm) < freshFor
}

// add takes in an answer; points are the answers of the last minute, the newest
// one last.
func (w *coldWatch) add(snap *admin.Snapshot, points []point) {
	now := snap.Status.Now
	held := snap.Status.Index.Memberships
	w.last = held
	if c := w.whole; c != nil {
		// A router that began with its index, or gets it at once, was never cold.
		quick := c.warm.IsZero() && float64(held) >= warmFrom*float64(c.from) && now.Sub(c.began) < 10*time.Second
		if quick || !c.follow(held, now) {
			w.whole = nil
		}
	}
	was := w.ranks
	w.ranks = map[string]*cold{}
	newest := points[len(points)-1].ranks
	for label, k := range newest {
		c := was[label]
		if c == nil || !c.warm.IsZero() {
			most, restarts := int64(0), k.restarts
			for i := range points {
				if p, ok := points[i].ranks[label]; ok {
					most, restarts = max(most, p.indexed), min(restarts, p.restarts)
				}
			}
			if most >= coldLeast && float64(k.indexed) < coldBelow*float64(most) {
				c = &cold{from: most, began: now, restart: k.restarts > restarts}
			}
		}
		if c != nil {
			// That the publisher was restarted may be known only after the blocks went.
			c.restart = c.restart || c.warm.IsZero() && len(points) > 1 && k.restarts > points[len(points)-2].ranks[label].restarts
			if c.follow(k.indexed, now) {
				w.ranks[label] = c
			}
		}
	}
}

// isCold reports whether a rank's part of the index was lost and is not back.
func (w *coldWatch) isCold(label string) bool {
	c := w.ranks[label]
	return c != nil && c.warm.IsZero()
}

// share says how much is there of what was.
func (c *cold) share() string {
	if c.now >= c.from {
		return fmt.Sprintf("%d blocks, all", c.now)
	}
	return fmt.Sprintf("%d of %d blocks, %.0f%%", c.now, c.from, 100*float64(c.now)/float64(c.from))
}

// holds says, at the end of a line, what a rank whose part is cold still has.
func (w *coldWatch) holds(label string) string {
	if !w.isCold(label) {
		return ""
	}
	return fmt.Sprintf(" (it has %s of before)", w.ranks[label].share())
}

// attend lists restarts, cold indexes and their recovery.
func (w *coldWatch) attend(c *collector, r *Router) {
	up := time.Duration(r.UptimeSeconds.F() * float64(time.Second))
	if !w.restarted.IsZero() && up < freshFor {
		c.add(Info, CodeRestarted, "router", "was restarted %.0f s ago; its counters start over", up.Seconds())
	}
	if x := w.whole; x != nil {
		if x.warm.IsZero() {
			c.add(Warn, CodeCold, "index", "cold since the router's restart: it knows %s of what it knew before; hits are missed until engines' events rebuild it", x.share())
		} else {
			c.add(Info, CodeCold, "index", "rebuilt after the router's restart in %.0f s: it knows %s of what it knew before", x.warm.Sub(x.began).Seconds(), x.share())
		}
	}
	for i := range r.Ranks {
		k := &r.Ranks[i]
		x := w.ranks[k.Label]
		if x == nil || x.warm.IsZero() && (k.RecentLost >= 1 || k.RecentDropped >= 1 || !k.Usable) {
			continue // listed with its events or its worker
		}
		why := "its cache was cleared"
		if x.restart {
			why = "its engine started over"
		}
		if x.warm.IsZero() {
			c.rank(Warn, CodeCold, k, "cold cache: %s, and it holds %s of what it held before", why, x.share())
		} else {
			c.rank(Info, CodeCold, k, "warm again after %.0f s (%s): it holds %s of what it held before", x.warm.Sub(x.began).Seconds(), why, x.share())
		}
	}
}
