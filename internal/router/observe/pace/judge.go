package pace

import (
	"math"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/traffic"
)

// Figure is what a rank can be slow at.
type Figure int

// The figures.
const (
	ITL  Figure = iota // time between tokens
	TTFT               // time to the first token, for the tokens that it took
	figures
)

// String is the figure's name.
func (f Figure) String() string { return [...]string{"ITL", "TTFT"}[f] }

// What the judgement rests on.
const (
	// MinSamples is how many samples a rank, its past and its peers must have each.
	MinSamples = 20
	// persist is how long a rank must be slow, or not, before that is reported.
	persist = 2 * time.Second
	// A rank that was never faster must be slow for persistAlone. Where its group's
	// hardware is not stated it must also be the only one among at least minAlone peers:
	// two such ranks may be other hardware.
	persistAlone = 4 * time.Second
	minAlone     = 3
	// A rank that is n times slower than its peers gets few requests, so that n times
	// fewer samples are enough, but no fewer than MinSamples/clearest.
	clearest = 4
	// forgetAfter is how long a rank without measurements stays slow. After as long without a
	// measurement it is less slow for costs: samples take longer to fade, the more there were.
	forgetAfter = 30 * time.Second
	// recoveredAt is the part of the factor below which a slow rank has recovered.
	recoveredAt = 0.7
	// pastHalf is after which time of use the past counts half, and countHalf a
	// sample as one of MinSamples.
	pastHalf  = 10 * time.Minute
	countHalf = 10 * time.Second
)

// recentHalf is after which time what was seen in a step counts half, floor the
// difference below which nobody is slow: what the network and the router's own load
// can add.
var (
	recentHalf = [figures]time.Duration{ITL: 2 * time.Second, TTFT: 3 * time.Second}
	floor      = [figures]time.Duration{ITL: 2 * time.Millisecond, TTFT: 20 * time.Millisecond}
)

// fading is a histogram whose steps count less as they get older. Every step that
// had samples weighs the same, however many: a rank that has become slow shows few,
// the more so since requests avoid it.
type fading struct {
	n      float64 // samples
	weight [traffic.Buckets]float32
}

func (h *fading) add(c *Counts) (n float64) {
	for _, k := range c {
		n += float64(k)
	}
	if n == 0 {
		return 0
	}
	for i, k := range c {
		if k != 0 {
			h.weight[i] += float32(float64(k) / n)
		}
	}
	h.n += n
	return n
}

// fade makes everything older by a time and gives what that takes away to to.
func (h *fading) fade(took, half time.Duration, to *fading) {
	if h.n == 0 {
		return
	}
	left := func(half time.Duration) float64 { return math.Exp2(-took.Seconds() / half.Seconds()) }
	keep, n := float32(left(half)), h.n*left(max(half, countHalf))
	if n < 0.01 {
		keep, n = 0, 0
	}
	for i, w := range h.weight {
		if w == 0 {
			continue
		}
		h.weight[i] = w * keep
		if to != nil {
			to.weight[i] += w - h.weight[i]
		}
	}
	if to != nil {
		to.n += h.n - n
	}
	h.n = n
}

// quantile is NaN without samples. It lies within its bucket as if the samples
// there were spread evenly.
func (h *fading) quantile(q float64) float64 {
	total := 0.0
	for _, k := range h.weight {
		total += float64(k)
	}
	if total <= 0 {
		return math.NaN()
	}
	seen := 0.0
	for i, k := range h.weight {
		if k == 0 {
			continue
		}
		if seen+float64(k) >= q*total {
			lo := 0.0
			if i > 0 {
				lo = float64(traffic.BucketTop(i - 1))
			}
			return lo + (float64(traffic.BucketTop(i))-lo)*(q*total-seen)/float64(k)
		}
		seen += float64(k)
	}
	return float64(traffic.BucketTop(traffic.Buckets - 1))
}

// Input is one rank's reading.
type Input[K comparable] struct {
	Key K
	// Group names the ranks that can be compared: same role, model and hardware. Alike
	// says that their hardware is stated, so that other hardware explains no difference.
	Group string
	Alike bool
	// Answering is how many answers it makes now.
	Answering int
	Reading
}

// Finding is how slow a rank is at a figure.
type Finding struct {
	Figure Figure
	// Times is the rank's median over that of its peers.
	Times float64
	// Since is when that was first so.
	Since time.Time
	// Always says that it was hardly faster before, as far as is known.
	Always bool
}

// Speed is what is known of a rank. Unknown figures are NaN.
type Speed struct {
	// TTFT and ITL are medians in seconds, of the last seconds.
	TTFT, ITL float64
	// TokensPerSecond is what came out of it in the last seconds.
	TokensPerSecond float64
	// Slow is nil for a rank that is not, as far as is known.
	Slow *Finding
	// Judged says that enough is known of it and of its peers to say whether it is slow.
	Judged bool
}

// Change is that a rank has become slow, or is not any more.
type Change[K comparable] struct {
	Key K
	Verdict
}

// Verdict is what is so from now on.
type Verdict struct {
	Slow bool
	Finding
	// End is why it is not slow any more.
	End End
}

// End is why a rank is not called slow any more.
type End int

// The reasons.
const (
	Recovered End = iota // it is about as fast as its peers
	Silent               // nothing is measured of it any more
	Unjudged             // no rank is judged any more
)

// state is what is kept of one rank.
type state struct {
	group  string
	alike  bool
	recent [figures]fading
	past   [figures]fading
	firsts fading // as they were, for people
	rate   float64
	known  bool // rate is that of a whole step at least

	// Of the present step.
	now, was [figures]float64
	few      [figures]float64 // as now, of fewer samples than it takes
	fresh    [figures]bool    // there were samples
	past90   float64          // of TTFT, of the step before
	judged   [figures]bool

	slow   [figures]bool
	always [figures]bool      // of slow: it has no faster past
	since  [figures]time.Time // of the state that slow says, or will say
	other  [figures]time.Time // since when the opposite holds; zero while it does not
	times  [figures]float64   // its median over that of its peers, as known at last
	at     [figures]time.Time // when it was measured at last
	silent [figures]time.Time // since when nothing is known
	lost   [figures]bool      // it was slow, and nothing is known since
	seen   int

	// answering fades as what is recent of ITL does.
	answering float64
	heavy     weight
}

// weight is whether answers of a rank take longer than those of its peers, whatever its hardware
// and its past are.
type weight struct {
	is    bool
	other time.Time // since when the opposite holds; zero while it does not
}

// Judge keeps what is known of every rank. It is not safe for concurrent use.
type Judge[K comparable] struct {
	ranks map[K]*state
	last  time.Time
	step  int
}

// NewJudge is a judge that knows nothing.
func NewJudge[K comparable]() *Judge[K] { return &Judge[K]{ranks: map[K]*state{}} }

// Step takes in what ranks have shown since the last step and returns what changed. A rank is
// slow at a figure when its median is more than factor times that of its peers' medians. It must
// also be more than factor times its own median of before, or that of its slowest peer. Where
// the hardware of its group is stated, the first is enough. A factor of 0 judges no rank.
func (j *Judge[K]) Step(now time.Time, factor float64, in []Input[K]) (out []Change[K]) {
	took := now.Sub(j.last)
	if j.last.IsZero() {
		took = 0
	}
	j.last = now
	j.step++
	groups := map[string][]*state{}
	for i := range in {
		s := j.ranks[in[i].Key]
		if s == nil {
			s = &state{past90: math.NaN()}
			j.ranks[in[i].Key] = s
		}
		s.seen, s.group, s.alike = j.step, in[i].Group, in[i].Alike
		keep := math.Exp2(-took.Seconds() / recentHalf[ITL].Seconds())
		s.answering = keep*s.answering + (1-keep)*float64(in[i].Answering)
		groups[s.group] = append(groups[s.group], s)
	}
	longest := map[string]float64{}
	for name, list := range groups {
		longest[name] = longestWait(list)
	}
	for i := range in {
		s := j.ranks[in[i].Key]
		s.take(&in[i].Reading, took, factor, longest[s.group])
	}
	for k, s := range j.ranks {
		if s.seen != j.step {
			delete(j.ranks, k)
		}
	}
	peers := map[string][figures][]float64{}
	for name, list := range groups {
		peers[name] = compare(list)
	}
	for i := range in {
		s := j.ranks[in[i].Key]
		for f := range figures {
			if c, ok := s.judge(f, peers[s.group][f], len(groups[s.group]), factor, now); ok {
				out = append(out, Change[K]{Key: in[i].Key, Verdict: c})
				if f == ITL && !c.Slow {
					s.heavy = weight{}
				}
			}
		}
		s.weigh(peers[s.group][ITL], groups[s.group], factor, now)
	}
	return out
}

// Speed is what is known of a rank.
func (j *Judge[K]) Speed(k K) Speed {
	out := Speed{TTFT: math.NaN(), ITL: math.NaN(), TokensPerSecond: math.NaN()}
	s := j.ranks[k]
	if s == nil {
		return out
	}
	out.TTFT, out.ITL = s.firsts.quantile(.5)/1e9, s.recent[ITL].quantile(.5)/1e9
	if s.known {
		out.TokensPerSecond = s.rate
	}
	for f := range figures {
		out.Judged = out.Judged || s.judged[f] || s.slow[f]
		if s.slow[f] && out.Slow == nil {
			out.Slow = &Finding{f, s.times[f], s.since[f], s.always[f]}
		}
	}
	return out
}

// Times is how many times as long as its peers a slow rank takes, by its slowest figure. A rank on
// other hardware also counts, if its answers take longer than the number of them explains. It is 1
// for any other rank, as far as is known. A rank without new measurements is forgotten gradually,
// or all requests would go to it, as it is idle: in each forgetAfter the factor becomes its square
// root.
func (j *Judge[K]) Times(k K) float64 {
	most := 1.0
	s := j.ranks[k]
	if s == nil {
		return most
	}
	for f := range figures {
		if !s.slow[f] && !s.lost[f] && !(f == ITL && s.heavy.is) {
			continue
		}
		times := s.times[f]
		for left := j.last.Sub(s.at[f]); left >= forgetAfter && times > 1; left -= forgetAfter {
			if times = math.Sqrt(times); times < negligible {
				times = 1
			}
		}
		most = max(most, times)
	}
	return most
}

// negligible is a factor that is none.
const negligible = 1.1

// longestWait is what nine of ten prompts of each rank of a group took at most, as far as
// enough is known of them; NaN where that is known of too few.
func longestWait(list []*state) float64 {
	longest, n := 0., 0
	for _, s := range list {
		if h := &s.recent[TTFT]; h.n >= MinSamples {
			n++
			longest = max(longest, h.quantile(.9))
		}
	}
	if n < minAlone {
		return math.NaN()
	}
	return longest
}

// take makes what is known older and adds a reading. What leaves the last seconds
// becomes the past, unless the rank may be slow now. longest is what prompts of its
// group take, for a rank without a past.
func (s *state) take(r *Reading, took time.Duration, factor, longest float64) {
	if took > 0 {
		for f := range figures {
			past := &s.past[f]
			if s.slow[f] || !s.other[f].IsZero() {
				past = nil
			} else if s.recent[f].n > 0 {
				past.fade(took, pastHalf, nil)
			}
			s.recent[f].fade(took, recentHalf[f], past)
		}
		s.firsts.fade(took, recentHalf[TTFT], nil)
	}
	gaps := s.recent[ITL].add(&r.Gaps)
	tokens := gaps + float64(r.Tokens) + s.firsts.add(&r.Firsts)
	limit := s.past90
	if math.IsNaN(limit) {
		limit = longest
	}
	if r.Waiting > 0 && float64(r.Age) > factor*limit {
		// They are no samples yet, but that they wait for too long is seen.
		r.Work[traffic.Bucket(r.Age)] += uint32(r.Waiting)
	}
	s.fresh = [figures]bool{ITL: gaps > 0, TTFT: s.recent[TTFT].add(&r.Work) > 0}
	if took > 0 {
		a := math.Exp2(-took.Seconds() / recentHalf[ITL].Seconds())
		if !s.known {
			a = 0
		}
		s.rate, s.known = a*s.rate+(1-a)*tokens/took.Seconds(), true
	}
	s.past90 = math.NaN()
	for f := range figures {
		s.now[f], s.was[f], s.few[f] = math.NaN(), math.NaN(), math.NaN()
		switch n := s.recent[f].n; {
		case n >= MinSamples:
			s.now[f] = s.recent[f].quantile(.5)
		case n >= MinSamples/clearest:
			s.few[f] = s.recent[f].quantile(.5)
		}
		if s.past[f].n >= MinSamples {
			s.was[f] = s.past[f].quantile(.5)
			if f == TTFT {
				s.past90 = s.past[f].quantile(.9)
			}
		}
	}
}

// compare sorts the medians of a group's ranks.
func compare(list []*state) (medians [figures][]float64) {
	for f := range figures {
		for _, s := range list {
			if !math.IsNaN(s.now[f]) {
				medians[f] = append(medians[f], s.now[f])
			}
		}
		slices.Sort(medians[f])
	}
	return medians
}

// without is the median of a sorted list less one of its values, NaN when nothing
// is left.
func without(list []float64, one float64) float64 {
	n, skip := len(list), len(list)
	if !math.IsNaN(one) {
		skip, _ = slices.BinarySearch(list, one)
		n--
	}
	if n <= 0 {
		return math.NaN()
	}
	at := func(i int) float64 {
		if i >= skip {
			i++
		}
		return list[i]
	}
	return (at((n-1)/2) + at(n/2)) / 2
}

// judge decides about one figure of a rank.
func (s *state) judge(f Figure, medians []float64, group int, factor float64, now time.Time) (v Verdict, changed bool) {
	peers, was, all := without(medians, s.now[f]), s.was[f], len(medians)
	mine := s.median(f, peers, true)
	if s.fresh[f] && !math.IsNaN(mine) {
		s.at[f] = now
	}
	if times := mine / peers; !math.IsNaN(times) {
		s.times[f] = times
	}
	mine = s.median(f, peers, math.IsNaN(was))
	if math.IsNaN(s.now[f]) && !math.IsNaN(mine) {
		all++
	}
	// What a rank without a faster past is compared with: its peers, where all hardware
	// is the same. Else the slowest of them, where there are enough and all are known: an
	// unknown one may be like this one.
	slowest := math.NaN()
	switch n := len(medians); {
	case math.IsNaN(mine):
	case s.alike:
		slowest = peers
	case all > minAlone && all == group:
		if slowest = medians[n-1]; slowest == mine {
			slowest = medians[n-2]
		}
	}
	known := !math.IsNaN(mine) && !math.IsNaN(peers) && (!math.IsNaN(was) || !math.IsNaN(slowest)) && factor > 0
	s.judged[f] = known
	switch {
	case known:
		s.silent[f] = time.Time{}
	case s.silent[f].IsZero():
		s.silent[f] = now
	}
	if known && (f != ITL || !s.heavier(mine, peers, factor)) || factor <= 0 {
		s.lost[f] = false
	}
	far := mine > peers+float64(floor[f])
	became := func(by float64) bool { return far && mine > by*peers && mine > by*was }
	over := func(by float64) bool { return became(by) || far && mine > by*slowest }
	is, wait := s.slow[f], persist
	if !is && !became(factor) {
		wait = persistAlone
	}
	end := Recovered
	switch {
	case is && factor <= 0:
		end = Unjudged
	case is && !s.silent[f].IsZero() && now.Sub(s.silent[f]) >= forgetAfter:
		end = Silent
	}
	switch {
	case end != Recovered:
	case !known, is && over(recoveredAt*factor), !is && !over(factor):
		s.other[f] = time.Time{}
		return v, false
	case s.other[f].IsZero():
		s.other[f] = now
		return v, false
	case now.Sub(s.other[f]) < wait:
		return v, false
	}
	if !is {
		s.always[f] = wait == persistAlone
	}
	s.slow[f], s.since[f], s.other[f] = !is, now, time.Time{}
	if end != Recovered {
		// What it will show is not to be held against a time that is long gone.
		s.recent[f], s.past[f] = fading{}, fading{}
	}
	s.lost[f] = end == Silent
	return Verdict{!is, Finding{f, s.times[f], now, s.always[f]}, end}, true
}

// median is what the rank takes at a figure. Where few is allowed, as many samples are enough as
// show how far it is from its peers.
func (s *state) median(f Figure, peers float64, few bool) float64 {
	if few && math.IsNaN(s.now[f]) && s.recent[f].n*min(s.few[f]/peers, clearest) >= MinSamples {
		return s.few[f]
	}
	return s.now[f]
}

// heavier reports whether answers take that many times as long as those of peers.
func (s *state) heavier(mine, peers, by float64) bool {
	return mine > peers+float64(floor[ITL]) && mine > by*peers
}

// weigh judges whether answers of the rank take longer than those of its peers, which are among
// group. More answers take longer on any rank: one that makes n times as many as its peers do on
// average must take n times the factor longer.
func (s *state) weigh(medians []float64, group []*state, factor float64, now time.Time) {
	w, peers := &s.heavy, without(medians, s.now[ITL])
	mine := s.median(ITL, peers, true)
	switch {
	case factor <= 0:
		*w = weight{}
		return
	case math.IsNaN(mine) || math.IsNaN(peers):
		return
	}
	others := -s.answering
	for _, one := range group {
		others += one.answering
	}
	opposite, wait := s.heavier(mine, peers, factor) && mine*others >= factor*peers*s.answering*float64(len(group)-1), persistAlone
	if w.is {
		opposite, wait = !s.heavier(mine, peers, recoveredAt*factor), persist
	}
	switch {
	case !opposite:
		w.other = time.Time{}
	case w.other.IsZero():
		w.other = now
	case now.Sub(w.other) >= wait:
		w.is, w.other, s.lost[ITL] = !w.is, time.Time{}, false
	}
}
