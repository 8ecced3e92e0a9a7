package watch

import (
	"context"
	"maps"
	"math"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/observe/cause"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// causesEvery is how often workers are judged; package cause counts in seconds.
const causesEvery = time.Second

// Feed is what the watch on causes must know of a rank's KV events.
type Feed struct {
	// Live says that it is connected and up to date, Heard when it last said
	// something, or began; Muted that it is not trusted since that was too long ago.
	Live, Muted bool
	Heard       time.Time
	// Plain says that all that fills the rank's cache is of one kind.
	Plain bool
	// Removed counts the blocks that its events removed.
	Removed uint64
}

// Feeds are what the watch on causes must know of feeds, by their ranks' slots.
func Feeds(list []kvfeed.Status) map[uint32]Feed {
	out := make(map[uint32]Feed, len(list))
	for i := range list {
		s := &list[i]
		out[uint32(s.Rank)] = Feed{
			Live: s.State == kvfeed.Live, Muted: s.State == kvfeed.Mute, Heard: s.Heard,
			Plain: len(s.CacheGroups) == 0 && s.Parts <= 1, Removed: s.Removed,
		}
	}
	return out
}

// CausesOptions are what the watch on causes needs.
type CausesOptions struct {
	// Fleet is the fleet of now.
	Fleet func() *workers.Snapshot
	// Requests counts those sent to a rank since it joined. Answers are how many it has
	// answered, at least with a first token, and how many it has still to.
	Requests func(*workers.Rank) uint64
	Answers  func(*workers.Rank) (answered uint64, pending int)
	// Failures counts every failure of a worker.
	Failures *Failures
	// Feeds are the feeds by their ranks' slots.
	Feeds func() map[uint32]Feed
	// Held is how many blocks the index knows of a rank, BlockOf their length in tokens.
	Held    func(*workers.Rank) int64
	BlockOf func(*workers.Worker) int
	Event   func(eventlog.Event)
	// Mute is called with a rank that has computed since it was last heard of.
	Mute func(k *workers.Rank, heard time.Time, why string)
}

// Causes finds what is wrong with workers that are up and answer.
type Causes struct {
	o     CausesOptions
	mu    sync.Mutex
	judge *cause.Judge
}

// NewCauses makes a watch; Run does its work.
func NewCauses(o CausesOptions) *Causes { return &Causes{o: o, judge: cause.NewJudge()} }

// Findings are what is wrong with a worker now.
func (c *Causes) Findings(worker string) []cause.Finding {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.judge.Findings(worker)
}

// Run judges until ctx ends.
func (c *Causes) Run(ctx context.Context) error {
	for range wait.Every(ctx, causesEvery) {
		c.step(time.Now())
	}
	return nil
}

func (c *Causes) step(now time.Time) {
	fleet := c.o.Fleet()
	feeds, broke := c.o.Feeds(), c.o.Failures.broken(fleet)
	in := make([]cause.Worker, 0, len(fleet.Workers))
	for _, w := range fleet.Workers {
		usable, _ := w.State.Usable()
		group, _ := groupOf(w)
		v := cause.Worker{
			Name: w.Name, Group: group, Usable: usable && w.State.Ejection() == nil, Failed: broke[w.Name],
			Capacity: int64(w.KVBlocks) * int64(w.BlockSize), Ranks: make([]cause.Rank, 0, len(w.Ranks)),
		}
		for _, k := range w.Ranks {
			f := feeds[k.Slot]
			r := cause.Rank{
				Label: k.Label, Requests: c.o.Requests(k), Live: f.Live, Muted: f.Muted, Heard: f.Heard, Plain: f.Plain, Removed: f.Removed,
				Block: c.o.BlockOf(w), Held: c.o.Held(k), Looked: math.NaN(), Found: math.NaN(), Process: math.NaN(),
			}
			r.Answered, r.Pending = c.o.Answers(k)
			if l := k.Load(); l != nil {
				r.Looked, r.Found, r.Process, r.Asked = l.PrefixQueries, l.PrefixHits, l.Process, l.Asked
			}
			v.Requests += r.Requests
			v.Ranks = append(v.Ranks, r)
		}
		in = append(in, v)
	}
	c.mu.Lock()
	changes := c.judge.Step(now, in)
	c.mu.Unlock()
	for i := range changes {
		f := &changes[i]
		c.o.Event(causeEvent(f))
		if f.Kind == cause.Mute && !f.Ended {
			for _, k := range fleet.Ranks {
				if k.Label == f.Rank {
					c.o.Mute(k, feeds[k.Slot].Heard, f.Text)
				}
			}
		}
	}
}

func causeEvent(c *cause.Change) eventlog.Event {
	fields := map[string]any{"cause": string(c.Kind)}
	if c.Ended {
		return eventlog.Event{Kind: "worker_trouble_ended", Worker: c.Worker, Rank: c.Rank, Fields: fields, Text: c.Subject() + ": it is not so any more that it " + c.Text}
	}
	return eventlog.Event{Kind: "worker_trouble", Severity: eventlog.Warn, Worker: c.Worker, Rank: c.Rank, Fields: fields, Text: c.Subject() + " " + c.Text}
}

// broken are the failures of a fleet's workers since they joined, by reason; those
// of workers that left are forgotten.
func (f *Failures) broken(fleet *workers.Snapshot) map[string]map[string]uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.broke, func(name string, _ map[string]uint64) bool {
		_, ok := fleet.Worker(name)
		return !ok
	})
	out := make(map[string]map[string]uint64, len(f.broke))
	for name, reasons := range f.broke {
		out[name] = maps.Clone(reasons)
	}
	return out
}

// Uncount takes back one failure of a worker: it was the request's fault.
func (f *Failures) Uncount(worker, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.broke[worker]; r[reason] > 0 {
		r[reason]--
	}
}
