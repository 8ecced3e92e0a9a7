package feed

import (
	"maps"
	"math"
)

// seriesLen is how many samples a series keeps: five minutes at one a second.
const seriesLen = 300

// Metric names a series of figures.
type Metric int

// The metrics of a rank; of the router, the first ones mean its totals.
const (
	KV      Metric = iota // used share of the KV cache
	running               // requests running; of the router: in flight
	waitingRequests
	Hit     // prefix hit share
	Flow    // prompt tokens per second; of the router: requests per second
	Metrics // how many there are
)

var metricNames = [...]string{"kv", "run", "wait", "hit", "in t/s"}

// String is the short name on the screen.
func (m Metric) String() string { return metricNames[m] }

// Series keeps the newest samples of every metric. It is not safe for
// concurrent use.
type Series struct {
	ring [Metrics][]float32
	at   int
	out  []float64
}

// NewSeries is an empty series.
func NewSeries() *Series { return &Series{} }

// add appends a sample of all metrics.
func (s *Series) add(v [Metrics]float64) {
	for m := range s.ring {
		if len(s.ring[m]) < seriesLen {
			s.ring[m] = append(s.ring[m], float32(v[m]))
		} else {
			s.ring[m][s.at] = float32(v[m])
		}
	}
	s.at = (s.at + 1) % seriesLen
}

// Values are the samples of a metric, oldest first, NaN for a missing one. The result is valid
// until the next call.
func (s *Series) Values(m Metric) []float64 {
	if s == nil {
		return nil
	}
	ring := s.ring[m]
	s.out = s.out[:0]
	start := 0
	if len(ring) == seriesLen {
		start = s.at
	}
	for i := range ring {
		s.out = append(s.out, float64(ring[(start+i)%len(ring)]))
	}
	return s.out
}

// record appends the newest view to the series.
func (b *Builder) record() {
	r := &b.router
	used, n := 0.0, 0
	live := make(map[string]bool, len(r.Ranks))
	for i := range r.Ranks {
		k := &r.Ranks[i]
		live[k.Label] = true
		s := b.history[k.Label]
		if s == nil {
			s = NewSeries()
			b.history[k.Label] = s
		}
		s.add([Metrics]float64{k.KVUsage().F(), k.Running().F(), k.Waiting().F(), k.HitShare.F(), k.PromptRate.F()})
		if k.KVUsage().Known() {
			used += k.KVUsage().F()
			n++
		}
	}
	maps.DeleteFunc(b.history, func(label string, _ *Series) bool { return !live[label] })
	mean := math.NaN()
	if n > 0 {
		mean = used / float64(n)
	}
	b.total.add([Metrics]float64{mean, Reported(r, r.Traffic.Inflight).F(), Reported(r, r.Traffic.Queued).F(), r.HitShare.F(), r.RequestRate.F()})
}
