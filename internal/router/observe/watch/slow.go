package watch

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// slowEvery is how often ranks' speed is judged.
const slowEvery = time.Second

// SlowOptions are what the watch on slow ranks needs.
type SlowOptions struct {
	// Fleet is the fleet of now.
	Fleet func() *workers.Snapshot
	// Factor is how many times slower than its peers a rank must be;
	// 0 turns the judgement off.
	Factor func() float64
	// Load is how many prompt tokens of a rank wait to be computed, and how many answers it makes.
	Load  func(*workers.Rank) (waiting, answering int)
	Event func(eventlog.Event)
}

// Slow measures how fast ranks answer, finds those that are slow, and sets their
// [workers.Rank.SetTimes].
type Slow struct {
	o     SlowOptions
	began time.Time
	// meters are those of the ranks of the fleet; the map is never written to.
	meters atomic.Pointer[map[*workers.Rank]*pace.Meter]

	mu    sync.Mutex
	judge *pace.Judge[*workers.Rank]
	in    []pace.Input[*workers.Rank]
}

// NewSlow makes a watch; Run does its work.
func NewSlow(o SlowOptions) *Slow {
	s := &Slow{o: o, began: time.Now(), judge: pace.NewJudge[*workers.Rank]()}
	s.meters.Store(&map[*workers.Rank]*pace.Meter{})
	return s
}

// Meter is the rank's, nil for one that is not known yet.
func (s *Slow) Meter(k *workers.Rank) *pace.Meter { return (*s.meters.Load())[k] }

// Since is a moment as meters take it: the time since the watch began.
func (s *Slow) Since(t time.Time) time.Duration { return max(0, t.Sub(s.began)) }

// Speed is what is known of a rank's.
func (s *Slow) Speed(k *workers.Rank) pace.Speed {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.judge.Speed(k)
}

// Run measures until ctx ends.
func (s *Slow) Run(ctx context.Context) error {
	s.step(time.Now())
	for range wait.Every(ctx, slowEvery) {
		s.step(time.Now())
	}
	return nil
}

func (s *Slow) step(now time.Time) {
	fleet := s.o.Fleet()
	s.updateMeters(fleet)
	meters := *s.meters.Load()
	s.mu.Lock()
	s.in = slices.Grow(s.in[:0], len(fleet.Ranks))[:len(fleet.Ranks)]
	n := 0
	for _, w := range fleet.Workers {
		g, alike := groupOf(w)
		for _, k := range w.Ranks {
			in := &s.in[n]
			n++
			in.Key, in.Group, in.Alike = k, g, alike
			waiting, answering := s.o.Load(k)
			in.Answering = answering
			meters[k].Read(s.Since(now), waiting, &in.Reading)
		}
	}
	changes := s.judge.Step(now, s.o.Factor(), s.in[:n])
	for _, k := range fleet.Ranks {
		k.SetTimes(s.judge.Times(k))
	}
	s.mu.Unlock()
	for _, c := range changes {
		s.o.Event(slowEvent(&c))
	}
}

// updateMeters gives every rank of the fleet a meter and drops those of ranks that left.
func (s *Slow) updateMeters(fleet *workers.Snapshot) {
	old := *s.meters.Load()
	same := len(old) == len(fleet.Ranks)
	for _, k := range fleet.Ranks {
		same = same && old[k] != nil
	}
	if same {
		return
	}
	meters := make(map[*workers.Rank]*pace.Meter, len(fleet.Ranks))
	for _, k := range fleet.Ranks {
		if meters[k] = old[k]; meters[k] == nil {
			meters[k] = &pace.Meter{}
		}
	}
	s.meters.Store(&meters)
}

// hardware are the labels that say what a worker runs on, the first one that it has.
var hardware = []string{"hardware", "gpu", "nvidia.com/gpu.product", "node.kubernetes.io/instance-type"}

// groupOf names the workers that a worker can be compared with, and reports whether labels
// say that they run on the same hardware.
func groupOf(w *workers.Worker) (name string, alike bool) {
	on := ""
	for _, label := range hardware {
		on = cmp.Or(on, w.Labels[label])
	}
	return strings.Join([]string{string(w.Role), string(w.Engine), strings.Join(w.Models, ","), on}, "\x00"), on != ""
}

func slowEvent(c *pace.Change[*workers.Rank]) eventlog.Event {
	k := c.Key
	switch {
	case c.Slow && c.Always:
		return eventlog.Event{
			Kind: "rank_slow", Severity: eventlog.Warn, Worker: k.WorkerName, Rank: k.Label, Fields: map[string]any{"figure": c.Figure.String(), "times": math.Round(10*c.Times) / 10},
			Text: fmt.Sprintf("%s is slow: %s %s times the median of its peers, and it was hardly faster before (health.slow_factor)", k.Label, c.Figure, times(c.Times)),
		}
	case c.Slow:
		return eventlog.Event{
			Kind: "rank_slow", Severity: eventlog.Warn, Worker: k.WorkerName, Rank: k.Label, Fields: map[string]any{"figure": c.Figure.String(), "times": math.Round(10*c.Times) / 10},
			Text: fmt.Sprintf("%s is slow: %s %s times the median of its peers, and it was faster before (health.slow_factor)", k.Label, c.Figure, times(c.Times)),
		}
	case c.End == pace.Unjudged:
		return eventlog.Event{Kind: "rank_slow_ended", Worker: k.WorkerName, Rank: k.Label, Text: k.Label + " was slow; slow ranks are not looked for any more (health.slow_factor is 0)"}
	case c.End == pace.Silent:
		return eventlog.Event{Kind: "rank_slow_ended", Worker: k.WorkerName, Rank: k.Label, Text: k.Label + " was slow; nothing is measured of it any more"}
	}
	return eventlog.Event{
		Kind: "rank_slow_ended", Worker: k.WorkerName, Rank: k.Label,
		Text: fmt.Sprintf("%s is not slow any more: %s %s times the median of its peers", k.Label, c.Figure, times(c.Times)),
	}
}

// times is a factor for people.
func times(f float64) string {
	if f < 9.95 {
		return fmt.Sprintf("%.1f", f)
	}
	return fmt.Sprintf("%.0f", f)
}
