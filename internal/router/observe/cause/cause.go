// Package cause judges what is wrong with workers that are up and answer: that they
// fail a part of their requests, that a rank computes and publishes no KV events for it,
// that a cache is smaller than those of its peers. Each has signs of its own, so that
// a worker is named by what is really wrong with it.
//
// The Judge takes what is known by value, the time included, and has no clock of its
// own.
package cause

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Kind is what is wrong.
type Kind string

// The kinds, a closed set.
const (
	// Failing: the worker fails a part of its requests.
	Failing Kind = "failing"
	// Mute: a rank computes prompts, and its connected feed says nothing of them.
	Mute Kind = "mute"
	// SmallCache: the worker's cache is smaller than those of its peers.
	SmallCache Kind = "small_cache"
)

// Kinds are all kinds.
func Kinds() []Kind { return []Kind{Failing, Mute, SmallCache} }

// What the judgement rests on.
const (
	// minFailures and minShare are what a worker must fail at least, within one of
	// the windows; failTimes how many times the share of its peers that must be.
	minFailures = 3
	minShare    = .02
	failTimes   = 3
	// quickFailures are enough where an engine itself answered them (ownFault), they are
	// quickShare of its requests, and its peers, sent quickPeers times as many since they
	// joined, fail so few that of its requests fewer than quickExpected would.
	quickFailures = 2
	quickShare    = .04
	quickPeers    = 20
	quickExpected = .01
	ownFault      = "status_5xx"
	// minRequests is how many requests a share rests on, of peers and of the end.
	minRequests = 20

	// batchDelay is how much later than its computation a prompt's batch may come.
	batchDelay = time.Second
	// A rank is mute when it has answered muteRequests without a batch, besides those
	// that were on their way when the last one came, and has computed muteBlocks more than
	// overBlocks a request, which blocks that are not full account for. Answers are needed
	// since engines count a prompt when they begin it: one that hangs is not mute.
	muteRequests = 3
	muteBlocks   = 16
	overBlocks   = 2

	// A cache below smallest times that of its peers is small. Another one counts as
	// equally small up to alike times its size.
	smallest = .75
	alike    = 1.25
	// crowd: of so many workers one may be small. More are other hardware.
	crowd = 8
	// evictions is how many blocks a rank must have evicted to count as full.
	evictions = 20
	// persist is how long a cache must be small, or not, before that is reported.
	persist = 2 * time.Second
)

// windows are the times in which failures are counted, in seconds.
var windows = [...]int{10, 30}

// Worker is what is known of one worker.
type Worker struct {
	Name string
	// Group names the workers that it can be compared with: same role, model and
	// hardware.
	Group string
	// Usable says that requests are sent to it; while they are not, something else is
	// wrong, and reported.
	Usable bool
	// Requests were sent to it since it joined, Failed of them broke there, by reason.
	Requests uint64
	Failed   map[string]uint64
	// Capacity is what a rank's cache holds in tokens as the engine reports it, 0 for
	// unknown.
	Capacity int64
	Ranks    []Rank
}

// Rank is what is known of one rank.
type Rank struct {
	Label string
	// Requests were sent to it since it joined, Answered of them had at least a first
	// token, and Pending wait for it.
	Requests, Answered uint64
	Pending            int
	// Live says that its feed is connected and up to date, as far as can be known;
	// Heard is when it last said something, or began. Muted says that the feed is not
	// trusted since the rank was found to be mute.
	Live, Muted bool
	Heard       time.Time
	// Block is the length of a block in tokens.
	Block int
	// Held are the blocks that the index knows of it, Removed those that its events
	// removed. Plain is false where blocks are not all of what fills its cache.
	Held    int64
	Removed uint64
	Plain   bool
	// Looked and Found count prompt tokens looked up and found in its cache, as its
	// engine reports; NaN when it does not. They are of a process and not older than Asked.
	Looked, Found, Process float64
	Asked                  time.Time
}

// Finding is something wrong.
type Finding struct {
	Kind   Kind
	Worker string
	// Rank is the label of the one that it is about, "" for the whole worker.
	Rank string
	// Text says it in plain words, less the subject.
	Text string
	// Since is when it was first so.
	Since time.Time
}

// Subject is the rank or the worker that it is about.
func (f *Finding) Subject() string { return cmp.Or(f.Rank, f.Worker) }

// Change is a finding that is new, or not so any more.
type Change struct {
	Finding
	Ended bool
}

// Judge keeps what is known of every worker. It is not safe for concurrent use.
type Judge struct {
	workers map[string]*worker
	step    int
}

// NewJudge is a judge that knows nothing.
func NewJudge() *Judge { return &Judge{workers: map[string]*worker{}} }

// worker is what is kept of one.
type worker struct {
	seen     int
	seconds  [30]second // of the last steps, a second each
	requests uint64
	failed   map[string]uint64
	ranks    map[string]*rank
	failing  *Finding
	small    *Finding
	other    time.Time // since when the opposite of small holds
}

// second is what happened in a step.
type second struct {
	requests uint64
	failed   map[string]uint64
}

// rank is what is kept of one.
type rank struct {
	seen int
	mute *Finding
	// What had been computed and sent when a batch must have come of all before.
	heard    time.Time
	base     bool
	looked   float64
	found    float64
	process  float64
	requests uint64
	answered uint64 // with those that were on their way then
	// The most that it held, and what it had removed when that began.
	most    int64
	removed uint64
}

// Step takes in what is known now, about a second after the last step, and returns
// what changed.
func (j *Judge) Step(now time.Time, in []Worker) (out []Change) {
	j.step++
	groups := map[string][]*Worker{}
	for i := range in {
		w := &in[i]
		s := j.workers[w.Name]
		if s == nil {
			s = &worker{requests: w.Requests, failed: w.Failed, ranks: map[string]*rank{}}
			j.workers[w.Name] = s
		}
		s.seen = j.step
		s.count(w, j.step)
		for k := range w.Ranks {
			s.observe(&w.Ranks[k], j.step)
		}
		groups[w.Group] = append(groups[w.Group], w)
	}
	for name, s := range j.workers {
		if s.seen != j.step {
			delete(j.workers, name)
			continue
		}
		for label, k := range s.ranks {
			if k.seen != j.step {
				delete(s.ranks, label)
			}
		}
	}
	for i := range in {
		w := &in[i]
		s, peers := j.workers[w.Name], groups[w.Group]
		out = replaceFinding(out, &s.failing, j.failing(w, s, peers), now)
		for k := range w.Ranks {
			r := s.ranks[w.Ranks[k].Label]
			out = replaceFinding(out, &r.mute, r.judge(w, &w.Ranks[k], now), now)
		}
		small := j.small(w, s, peers)
		switch {
		case (small != nil) == (s.small != nil):
			s.other = time.Time{}
		case s.other.IsZero():
			s.other = now
			continue
		case now.Sub(s.other) < persist:
			continue
		}
		out = replaceFinding(out, &s.small, small, now)
	}
	return out
}

// replaceFinding replaces an old judgement by a new one and adds the change, if it is one.
func replaceFinding(out []Change, was **Finding, is *Finding, now time.Time) []Change {
	switch old := *was; {
	case old == nil && is == nil:
	case old == nil:
		is.Since = now
		*was, out = is, append(out, Change{Finding: *is})
	case is == nil:
		*was, out = nil, append(out, Change{Finding: *old, Ended: true})
	default:
		is.Since = old.Since
		*was = is
	}
	return out
}

// Findings are what is wrong with a worker now.
func (j *Judge) Findings(name string) (out []Finding) {
	s := j.workers[name]
	if s == nil {
		return nil
	}
	add := func(f *Finding) {
		if f != nil {
			out = append(out, *f)
		}
	}
	add(s.failing)
	add(s.small)
	for _, r := range s.ranks {
		add(r.mute)
	}
	slices.SortFunc(out, func(a, b Finding) int { return strings.Compare(string(a.Kind)+a.Rank, string(b.Kind)+b.Rank) })
	return out
}

// count keeps what was sent and failed in this step.
func (s *worker) count(w *Worker, step int) {
	now := second{failed: map[string]uint64{}}
	if w.Requests > s.requests {
		now.requests = w.Requests - s.requests
	}
	for reason, n := range w.Failed {
		if n > s.failed[reason] {
			now.failed[reason] = n - s.failed[reason]
		}
	}
	s.requests, s.failed = w.Requests, w.Failed
	s.seconds[step%len(s.seconds)] = now
}

// sum adds up the last steps.
func (s *worker) sum(step, seconds int) (requests, failed uint64, reasons map[string]uint64) {
	reasons = map[string]uint64{}
	for i := range seconds {
		if step-i < 0 {
			break
		}
		v := &s.seconds[(step-i)%len(s.seconds)]
		requests += v.requests
		for reason, n := range v.failed {
			failed += n
			reasons[reason] += n
		}
	}
	return requests, failed, reasons
}

// share is the part of requests that failed. More may have failed than were sent: some
// were sent before.
func share(requests, failed uint64) float64 {
	return float64(failed) / float64(max(requests, failed, 1))
}

// failing judges whether a worker fails a part of its requests, and its peers do not.
func (j *Judge) failing(w *Worker, s *worker, peers []*Worker) *Finding {
	if s.failing != nil {
		requests, failed, _ := s.sum(j.step, windows[0])
		_, ever, _ := s.sum(j.step, len(s.seconds))
		if ever == 0 || requests >= minRequests && share(requests, failed) < minShare/2 {
			s.seconds = [30]second{} // what is over is not reported again
			return nil
		}
	} else if !w.Usable {
		return nil
	}
	for _, seconds := range windows {
		requests, failed, reasons := s.sum(j.step, seconds)
		mine := share(requests, failed)
		enough := failed >= minFailures && mine >= minShare && mine >= failTimes*j.peersFail(w, peers, seconds)
		if s.failing == nil && !enough && (reasons[ownFault] < quickFailures || mine < quickShare || !peersClean(w, peers, requests)) {
			continue
		}
		return &Finding{Kind: Failing, Worker: w.Name, Text: fmt.Sprintf("fails %.0f%% of its requests: %d of %d in the last %d s (%s)", 100*mine, failed, max(requests, failed), seconds, byFrequency(reasons))}
	}
	return nil
}

// peersFail is the median share of failures of a worker's peers.
func (j *Judge) peersFail(w *Worker, peers []*Worker, seconds int) float64 {
	var shares []float64
	for _, p := range peers {
		if requests, failed, _ := j.workers[p.Name].sum(j.step, seconds); p != w && requests >= minRequests {
			shares = append(shares, share(requests, failed))
		}
	}
	if len(shares) == 0 {
		return 0
	}
	return median(shares)
}

// peersClean reports whether a worker's peers have failed next to none of the requests
// that they ever got, and have got enough to say so.
func peersClean(w *Worker, peers []*Worker, requests uint64) bool {
	var sent, broke uint64
	for _, p := range peers {
		if p == w {
			continue
		}
		sent += p.Requests
		for _, n := range p.Failed {
			broke += n
		}
	}
	return sent >= quickPeers*max(requests, quickFailures) && float64(requests)*share(sent, broke) < quickExpected
}

// byFrequency lists reasons, the most frequent first.
func byFrequency(reasons map[string]uint64) string {
	type one struct {
		reason string
		n      uint64
	}
	list := make([]one, 0, len(reasons))
	for reason, n := range reasons {
		list = append(list, one{reason, n})
	}
	slices.SortFunc(list, func(a, b one) int {
		if a.n != b.n {
			return int(int64(b.n) - int64(a.n))
		}
		return strings.Compare(a.reason, b.reason)
	})
	words := make([]string, 0, len(list))
	for _, o := range list {
		words = append(words, fmt.Sprintf("%s %d", o.reason, o.n))
	}
	return strings.Join(words, ", ")
}

// observe keeps what a rank has shown up to now.
func (s *worker) observe(in *Rank, step int) {
	r := s.ranks[in.Label]
	if r == nil {
		r = &rank{removed: in.Removed}
		s.ranks[in.Label] = r
	}
	r.seen = step
	if in.Removed < r.removed || in.Held < r.most/2 { // another cache
		r.most, r.removed = in.Held, in.Removed
	}
	r.most = max(r.most, in.Held)
}

// judge says whether a rank has computed what it must have sent events of, and sent none.
func (r *rank) judge(w *Worker, in *Rank, now time.Time) *Finding {
	if in.Muted && r.mute != nil {
		f := *r.mute // until its feed is trusted again
		return &f
	}
	known := in.Live && !math.IsNaN(in.Looked) && !math.IsNaN(in.Found) && in.Block > 0
	same := known && r.base && in.Heard.Equal(r.heard) && in.Looked >= r.looked && in.Found >= r.found &&
		(in.Process == r.process || math.IsNaN(in.Process) && math.IsNaN(r.process))
	if !same {
		// What the newest page counts as computed may be in a batch that is on its way.
		r.base = known && in.Asked.After(in.Heard.Add(batchDelay))
		r.heard, r.looked, r.found, r.process, r.requests = in.Heard, in.Looked, in.Found, in.Process, in.Requests
		r.answered = in.Answered + uint64(max(0, in.Pending))
		return nil
	}
	if !in.Asked.After(in.Heard.Add(2 * batchDelay)) {
		return nil
	}
	looked := in.Looked - r.looked
	computed := looked - (in.Found - r.found)
	requests := in.Requests - min(r.requests, in.Requests)
	over := float64((overBlocks*int(min(requests, 1<<30)) + muteBlocks) * in.Block)
	if r.mute == nil && (in.Answered < r.answered+muteRequests || computed < over || computed < looked/2) {
		return nil
	}
	return &Finding{Kind: Mute, Worker: w.Name, Rank: in.Label, Text: fmt.Sprintf("publishes no KV events: its engine has computed %.0f prompt tokens in the last %.0f s, and published none of them although the connection is up; its cache is unknown until events come again", computed, now.Sub(in.Heard).Seconds())}
}

// capacity is the size of a rank's cache in tokens: as stated; else as its ranks show
// it, exactly where one had to evict. It is 0 where nothing is known.
func (s *worker) capacity(w *Worker) (tokens int64, exact bool) {
	if w.Capacity > 0 {
		return w.Capacity, true
	}
	for i := range w.Ranks {
		in := &w.Ranks[i]
		r := s.ranks[in.Label]
		if !in.Plain || !in.Live {
			return 0, false
		}
		if t := r.most * int64(in.Block); t > tokens {
			tokens, exact = t, in.Removed-r.removed >= evictions
		}
	}
	return tokens, exact
}

// small judges whether a worker's cache is smaller than those of its peers. Peers
// that are as small are hardware of their own, unless there are many more others.
func (j *Judge) small(w *Worker, s *worker, peers []*Worker) *Finding {
	mine, exact := s.capacity(w)
	if !exact || mine == 0 {
		return nil
	}
	var others []float64
	like := 1
	for _, p := range peers {
		if p == w {
			continue
		}
		c, _ := j.workers[p.Name].capacity(p)
		if c == 0 {
			continue
		}
		if float64(c) <= alike*float64(mine) {
			like++
		}
		others = append(others, float64(c))
	}
	if len(others) < 2 || like > max(1, (len(others)+1)/crowd) {
		return nil
	}
	m := median(others)
	if float64(mine) > smallest*m {
		return nil
	}
	how := "by its metrics"
	if w.Capacity == 0 {
		how = "by its evictions"
	}
	return &Finding{Kind: SmallCache, Worker: w.Name, Text: fmt.Sprintf("has a small KV cache: room for %d tokens (%s), %.0f%% of the median of its peers", mine, how, 100*float64(mine)/m)}
}

// median is that of a list, which it sorts.
func median(list []float64) float64 {
	slices.Sort(list)
	n := len(list)
	return (list[(n-1)/2] + list[n/2]) / 2
}
