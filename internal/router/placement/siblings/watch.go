package siblings

import (
	"fmt"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	// idleReports is how many reports of an engine in a row must call a rank idle before
	// the siblings' work there no longer counts.
	idleReports = 3
	// waitsAtMost is how long a request may be on a rank that neither prefills nor answers
	// it, since its prompt is still computed elsewhere.
	waitsAtMost = 30 * time.Second
)

// judgement is whether siblings are believed about a rank.
type judgement struct {
	// claimed is since when siblings have requests on the rank and its engine none; idle
	// counts the engine's reports since then, report is the time of the newest.
	claimed, report time.Time
	idle            int
	ignored         bool
}

// judge compares what siblings have on a rank with what its engine reports. It reports
// whether the judgement changed.
func (j *judgement) judge(now time.Time, sum *replicas.Sum, own int, e *workers.Load) (changed bool) {
	was := j.ignored
	if sum.Requests == 0 || own > 0 || e == nil || e.Running < 0 || e.Waiting < 0 || e.Running+e.Waiting > 0 {
		*j = judgement{}
		return was
	}
	if j.claimed.IsZero() {
		j.claimed = now
	}
	if e.At.After(j.claimed) && e.At.After(j.report) {
		j.report = e.At
		j.idle++
	}
	works := sum.Answering > 0 || sum.PrefillTokens > 0
	j.ignored = was || j.idle >= idleReports && (works || now.Sub(j.claimed) >= waitsAtMost)
	return j.ignored != was
}

// state is what was reported of another router.
type state struct {
	live bool
	// settings and version are those that were reported as different; empty for none.
	settings string
}

// Watch judges what siblings publish, and reports what changed among them.
func (s *Siblings) Watch() {
	x := s.exchange.Load()
	if x == nil {
		return
	}
	for _, e := range s.watch(x.View()) {
		s.o.Event(e)
	}
	if g := s.giver.Load(); g != nil {
		g.Expire()
	}
}

func (s *Siblings) watch(v *replicas.View) (events []eventlog.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.o.Clock()
	add := func(e eventlog.Event, format string, a ...any) {
		e.Text = fmt.Sprintf(format, a...)
		events = append(events, e)
	}
	s.sums = slices.Grow(s.sums[:0], len(s.keys))[:len(s.keys)]
	v.Sums(now, s.keys, s.sums)
	for i, k := range s.ranks {
		j := &s.judged[i]
		if !j.judge(now, &s.sums[i], s.o.Ledger.Load(k).Requests, k.Load()) {
			continue
		}
		s.loads.Store(nil) // decisions read the judgement
		if j.ignored {
			add(eventlog.Event{Kind: "replica_disagrees", Severity: eventlog.Warn, Worker: k.WorkerName, Rank: k.Label}, "other routers have %d request(s) on %s, and its engine reports none %d times in a row: their work there no longer counts", s.sums[i].Requests, k.Label, j.idle)
		} else {
			add(eventlog.Event{Kind: "replica_agrees", Worker: k.WorkerName, Rank: k.Label}, "what other routers publish of %s counts again", k.Label)
		}
	}
	snap := v.Snapshot(now)
	s.forget(snap.Origins)
	seen := make(map[string]state, len(snap.Origins))
	for i := range snap.Origins {
		o := &snap.Origins[i]
		was, known := s.states[o.Origin]
		is := state{live: o.Live, settings: was.settings}
		fields := map[string]any{"replica": o.Origin}
		switch {
		case !known && o.Live:
			add(eventlog.Event{Kind: "replica_found", Fields: fields}, "router %s shares its load with this one", o.Origin)
		case known && was.live && !o.Live:
			why, severity := fmt.Sprintf("has been silent for %v", replicas.Lifetime), eventlog.Warn
			if o.Left {
				why, severity = "has left", eventlog.Info
			}
			add(eventlog.Event{Kind: "replica_lost", Severity: severity, Fields: fields}, "router %s %s: its work no longer counts", o.Origin, why)
		case known && !was.live && o.Live:
			add(eventlog.Event{Kind: "replica_back", Fields: fields}, "router %s shares its load again", o.Origin)
		}
		if o.Settings != "" {
			is.settings = Differing(s.o.Self.Settings, o.Settings)
			if is.settings != "" && is.settings != was.settings {
				add(eventlog.Event{Kind: "replica_settings_differ", Severity: eventlog.Warn, Fields: fields}, "router %s has other settings (%s): the two decide otherwise", o.Origin, is.settings)
			}
		}
		seen[o.Origin] = is
	}
	s.states = seen
	c, was := &snap.Counts, &s.counts
	for _, n := range []struct {
		was, now uint64
		event    eventlog.Event
	}{
		{was.Foreign, c.Foreign, eventlog.Event{
			Kind: "replica_other_fleet", Text: "a router of another fleet publishes here: its load is not taken (replicas.fleet is " + s.o.Self.Fleet + " here)",
		}},
		{was.SameOrigin, c.SameOrigin, eventlog.Event{
			Kind: "replica_same_name", Text: "another process has this router's name: give each router a name of its own (replicas.name is " + s.o.Self.Origin + " here)",
		}},
		{was.Refused, c.Refused, eventlog.Event{Kind: "replica_refused", Text: c.LastRefused}},
		{was.Crowded, c.Crowded, eventlog.Event{
			Kind: "replica_too_many", Text: fmt.Sprintf("there are more than %d other routers: the load of the others is not taken", replicas.MaxOrigins),
		}},
	} {
		if n.was == 0 && n.now > 0 {
			n.event.Severity = eventlog.Warn
			events = append(events, n.event)
		}
	}
	s.counts = *c
	return events
}

// Status is what is known of the other routers, for display.
type Status struct {
	Self replicas.Identity
	// Joined reports whether the exchange runs. The rest is empty until then.
	Joined bool
	replicas.Snapshot
	// Differs names the settings of each of Origins that differ from this router's.
	Differs []string
	// Ignored are the ranks where siblings' work does not count.
	Ignored []string
	// Failed is how many messages the transport did not take, Failure the last reason.
	Failed  uint64
	Failure string
}

// Live is how many other routers share their load.
func (s *Status) Live() (n int) {
	for i := range s.Origins {
		if s.Origins[i].Live {
			n++
		}
	}
	return n
}

// Status returns the other routers as they are now.
func (s *Siblings) Status() (st Status) {
	s.mu.Lock()
	st.Self = s.o.Self
	s.mu.Unlock()
	x := s.exchange.Load()
	if x == nil {
		return st
	}
	st.Joined, st.Snapshot = true, x.View().Snapshot(s.o.Clock())
	for i := range st.Origins {
		st.Differs = append(st.Differs, Differing(st.Self.Settings, st.Origins[i].Settings))
	}
	failed, failure := x.Failed()
	if st.Failed = failed; failure != nil {
		st.Failure = failure.Error()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, k := range s.ranks {
		if s.judged[i].ignored {
			st.Ignored = append(st.Ignored, k.Label)
		}
	}
	return st
}
