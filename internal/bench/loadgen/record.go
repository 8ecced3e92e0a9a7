package loadgen

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/bench/plan"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/dynctl/dynctl/internal/bench/stats"
)

// The kinds of failures.
const (
	kindConnect   = "connect"
	kindTimeout   = "timeout"
	kindFailed    = "failed"
	kindCancelled = "cancelled"
)

// Result is the outcome of one request. Times count from the start of the run; counts are -1
// when the engine did not report them.
type Result struct {
	ID       string
	ISL, OSL int
	Warm     bool

	Intended, Sent, FirstByte, First, Last, End time.Duration

	Status                                   int
	PromptTokens, CachedTokens, OutputTokens int
	// Pieces counts the parts of the stream with tokens, FirstTokens the tokens
	// of the first.
	Pieces, FirstTokens int
	// Decision and Path are the router's headers.
	Decision, Path string
	// Kind and Err say why it failed; empty when it did not.
	Kind, Err string
	Good      bool

	again bool
}

func (r *Result) fail(kind string, err error) {
	r.Kind, r.Err = kind, err.Error()
	r.Err = r.Err[:min(len(r.Err), 500)]
}

// TTFT is the time from sending to the first token.
func (r *Result) TTFT() time.Duration { return r.First - r.Sent }

// TTFTIntended is the time from when it should have been sent.
func (r *Result) TTFTIntended() time.Duration { return r.First - r.Intended }

// TPOT is the mean time of a token after the first piece; false when the
// answer was one piece.
func (r *Result) TPOT() (time.Duration, bool) {
	n := r.OutputTokens - r.FirstTokens
	if n < 1 || r.Last <= r.First {
		return 0, false
	}
	return (r.Last - r.First) / time.Duration(n), true
}

// meets reports whether a request was good. What has no value is not asked.
func meets(s plan.SLO, r *Result, worstGap time.Duration) bool {
	tpot, has := r.TPOT()
	return (s.TTFT == 0 || r.TTFTIntended() <= s.TTFT) &&
		(s.TPOT == 0 || !has || tpot <= s.TPOT) &&
		(s.ITL == 0 || worstGap <= s.ITL) &&
		(s.E2E == 0 || r.Last-r.Intended <= s.E2E)
}

// Progress can be read while a run is under way.
type Progress struct {
	InFlight, Ended, Failed atomic.Int64
}

// Histogram bounds: 1 µs to 600 s with 3 digits, 172 KB each.
const (
	histMax    = int64(600 * time.Second / time.Microsecond)
	histDigits = 3
)

func newHist() *hdrhistogram.Histogram { return hdrhistogram.New(1, histMax, histDigits) }

func note(h *hdrhistogram.Histogram, d time.Duration, n int64) {
	_ = h.RecordValues(min(max(d.Microseconds(), 1), histMax), n) // within the bounds
}

// recorder gathers figures. One lock for each request is cheap at the rates
// that one process reaches.
type recorder struct {
	slo  plan.SLO
	keep int

	// What a send touches takes no lock: it would wait there for a thread that
	// the system has put aside in the middle of its figures.
	inflight atomic.Int64
	full     atomic.Int64 // when the wanted number was first in flight; -1 not yet

	mu                                           sync.Mutex // guards the following
	ttft, ttftIntended, tpot, itl, e2e, dispatch *hdrhistogram.Histogram
	kept                                         []Result
	n, warm, failed, good                        int
	tokens                                       int64
	area                                         time.Duration // spent in flight by all requests between full and dry
	dry                                          time.Duration // from when on fewer are wanted; -1 not yet
	firstSent, lastSent                          time.Duration
	lastToken                                    time.Duration
	steadyTokens                                 int64 // that came while the wanted number was in flight
	errs                                         map[string]int
	sentCount                                    int
}

func newRecorder(slo plan.SLO, keep int) *recorder {
	r := &recorder{
		slo: slo, keep: keep, errs: make(map[string]int), dry: -1,
		ttft: newHist(), ttftIntended: newHist(), tpot: newHist(), itl: newHist(), e2e: newHist(), dispatch: newHist(),
	}
	r.full.Store(-1)
	return r
}

// sent notes a send; target is the concurrency of a closed loop.
func (r *recorder) sent(now time.Duration, target int) {
	if n := r.inflight.Add(1); n >= int64(target) && r.full.Load() < 0 {
		r.full.CompareAndSwap(-1, int64(now))
	}
}

// slotDry notes that from now on there may be fewer in flight than wanted.
func (r *recorder) slotDry(now time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dry < 0 {
		r.dry = now
	}
}

// ended notes the end of a request that sent has noted.
func (r *recorder) ended(res *Result, pieces []piece, now time.Duration, o Options) {
	var worst time.Duration
	if res.Err == "" {
		for i := 1; i < len(pieces); i++ {
			worst = max(worst, (pieces[i].at-pieces[i-1].at)/time.Duration(max(pieces[i].tokens, 1)))
		}
		res.Good = meets(r.slo, res, worst)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	inflight := r.inflight.Add(-1)
	if r.sentCount == 0 {
		r.firstSent = res.Sent
	}
	r.sentCount++
	r.firstSent, r.lastSent = min(r.firstSent, res.Sent), max(r.lastSent, res.Sent)
	end := cmp.Or(res.End, now)
	full := time.Duration(r.full.Load())
	if full >= 0 {
		to := end
		if r.dry >= 0 {
			to = min(to, r.dry)
		}
		r.area += max(to-max(res.Sent, full), 0)
	}
	if p := o.Progress; p != nil {
		p.InFlight.Store(inflight)
		p.Ended.Add(1)
		if res.Err != "" {
			p.Failed.Add(1)
		}
	}
	if res.Err == "" {
		// Rates are of all requests, warm ones too: they share the engines.
		r.tokens += int64(res.OutputTokens)
		r.lastToken = max(r.lastToken, res.Last)
		for _, p := range pieces {
			if full >= 0 && p.at >= full && (r.dry < 0 || p.at <= r.dry) {
				r.steadyTokens += int64(p.tokens)
			}
		}
	}
	switch {
	case res.Warm:
		r.warm++
		if res.Err != "" && res.Kind != kindCancelled {
			r.fault(res)
		}
	case res.Err != "":
		if res.Kind != kindCancelled {
			r.failed++
			r.fault(res)
		}
	default:
		r.n++
		note(r.ttft, res.TTFT(), 1)
		note(r.ttftIntended, res.TTFTIntended(), 1)
		note(r.e2e, res.Last-res.Sent, 1)
		note(r.dispatch, res.Sent-res.Intended, 1)
		if d, ok := res.TPOT(); ok {
			note(r.tpot, d, 1)
		}
		for i := 1; i < len(pieces); i++ {
			dt, k := pieces[i].at-pieces[i-1].at, max(pieces[i].tokens, 1)
			note(r.itl, dt/time.Duration(k), int64(k))
		}
		if res.Good {
			r.good++
		}
	}
	if len(r.kept) < r.keep {
		r.kept = append(r.kept, *res)
	}
	if o.OnResult != nil {
		o.OnResult(res)
	}
}

func (r *recorder) fault(res *Result) {
	key := res.Kind + ": " + res.Err
	key = key[:min(len(key), 200)]
	if len(r.errs) < 32 || r.errs[key] > 0 {
		r.errs[key]++
	}
}

// Dist is a distribution of times in milliseconds. P99 is 0 when there are
// fewer than 100 values, P999 when there are fewer than 1000.
type Dist struct {
	N    int64   `json:"n"`
	Mean float64 `json:"mean_ms"`
	P50  float64 `json:"p50_ms"`
	P90  float64 `json:"p90_ms"`
	P95  float64 `json:"p95_ms"`
	P99  float64 `json:"p99_ms,omitempty"`
	P999 float64 `json:"p999_ms,omitempty"`
	Max  float64 `json:"max_ms"`
}

// Tail is P99, or the largest of few values.
func (d Dist) Tail() float64 { return cmp.Or(d.P99, d.Max) }

func distOf(h *hdrhistogram.Histogram) Dist {
	d := Dist{N: h.TotalCount()}
	if d.N == 0 {
		return d
	}
	q := func(p float64) float64 { return float64(h.ValueAtQuantile(p)) / 1000 }
	d.Mean, d.P50, d.P90, d.P95, d.Max = h.Mean()/1000, q(50), q(90), q(95), float64(h.Max())/1000
	if d.N >= 100 {
		d.P99 = q(99)
	}
	if d.N >= 1000 {
		d.P999 = q(99.9)
	}
	return d
}

// exact replaces the quantiles of few values by those of the values themselves.
func exact(d Dist, xs []float64) Dist {
	if int64(len(xs)) != d.N || len(xs) == 0 {
		return d
	}
	slices.Sort(xs)
	q := func(p float64) float64 { return stats.SortedQuantile(xs, p) }
	d.P50, d.P90, d.P95, d.Max = q(0.5), q(0.9), q(0.95), xs[len(xs)-1]
	if d.N >= 100 {
		d.P99 = q(0.99)
	}
	return d
}

// Summary is what a run measured.
type Summary struct {
	// Requests ended well and were measured, Warm ones were not, Failed ones
	// have no times.
	Requests, Warm, Failed int
	Errors                 map[string]int
	// TTFT counts from sending, TTFTIntended from the planned time; Dispatch is
	// the difference.
	TTFT, TTFTIntended, TPOT, ITL, E2E, Dispatch Dist
	// Good requests met the SLO.
	Good int
	// Tokens were generated by all requests, warm ones included; Window is the
	// time from the first send to the last token, Wall the whole run.
	// SteadyTokens came while the wanted number was in flight (see Steady).
	Tokens, SteadyTokens int64
	Window, Wall         time.Duration
	// InFlight is the mean number in flight between reaching the wanted number
	// and the last send, as a share of it; of an open loop, the mean number.
	InFlight float64
	// Achieved is the rate of sends against the planned one (open loop).
	Achieved float64
	// Steady is the time of that window.
	Steady time.Duration
	// Client is how the client itself fared; nil when that could not be seen.
	Client *Starvation
	Kept   []Result
}

// PerSecond is the rate of requests that ended well, warm ones included.
func (s *Summary) PerSecond() float64 { return rate(float64(s.Requests+s.Warm), s.Window) }

// TokensPerSecond is the rate of generated tokens over the whole run, its
// filling and draining included.
func (s *Summary) TokensPerSecond() float64 { return rate(float64(s.Tokens), s.Window) }

// SteadyTokensPerSecond is the same while the wanted number was in flight; 0
// when that was never so.
func (s *Summary) SteadyTokensPerSecond() float64 { return rate(float64(s.SteadyTokens), s.Steady) }

// GoodPerSecond is the rate of requests that met the SLO: PerSecond times the
// share of measured requests that did.
func (s *Summary) GoodPerSecond() float64 {
	if n := s.Requests + s.Failed; n > 0 {
		return s.PerSecond() * float64(s.Good) / float64(n)
	}
	return 0
}

func rate(n float64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return n / d.Seconds()
}

func (r *recorder) summary(now time.Duration, o Options) *Summary {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &Summary{
		Requests: r.n, Warm: r.warm, Failed: r.failed, Errors: r.errs,
		TTFT: distOf(r.ttft), TTFTIntended: distOf(r.ttftIntended), TPOT: distOf(r.tpot), ITL: distOf(r.itl), E2E: distOf(r.e2e),
		Dispatch: distOf(r.dispatch), Good: r.good, Tokens: r.tokens,
		SteadyTokens: r.steadyTokens, Window: max(r.lastToken-r.firstSent, 0), Wall: now, Kept: r.kept,
	}
	var sent, intended, tpot, e2e []float64
	for i := range r.kept {
		if k := &r.kept[i]; !k.Warm && k.Err == "" {
			sent, intended = append(sent, ms(k.TTFT())), append(intended, ms(k.TTFTIntended()))
			e2e = append(e2e, ms(k.Last-k.Sent))
			if d, ok := k.TPOT(); ok {
				tpot = append(tpot, ms(d))
			}
		}
	}
	s.TTFT, s.TTFTIntended, s.TPOT, s.E2E = exact(s.TTFT, sent), exact(s.TTFTIntended, intended), exact(s.TPOT, tpot), exact(s.E2E, e2e)
	if full := time.Duration(r.full.Load()); full >= 0 && r.dry > full {
		s.Steady = r.dry - full
		s.InFlight = r.area.Seconds() / s.Steady.Seconds()
		if len(o.Schedule) == 0 {
			s.InFlight /= float64(o.Concurrency)
		}
	} else if len(o.Schedule) == 0 && full >= 0 {
		s.InFlight = 1 // over before anything could be missing
	}
	if n := len(o.Schedule); n > 1 && r.sentCount > 1 {
		if plan := o.Schedule[n-1] - o.Schedule[0]; plan > 0 && r.lastSent > r.firstSent {
			planned := float64(n-1) / plan.Seconds()
			s.Achieved = float64(r.sentCount-1) / (r.lastSent - r.firstSent).Seconds() / planned
		}
	}
	return s
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
