package watch

import (
	"container/heap"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// clockwork runs what is due in the order of its time.
type clockwork struct {
	now time.Time
	due agenda
	n   int
}

type entry struct {
	at time.Time
	n  int // keeps the order of what is due at the same time
	do func()
}

type agenda []entry

func (a agenda) Len() int      { return len(a) }
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a agenda) Less(i, j int) bool {
	return a[i].at.Before(a[j].at) || a[i].at.Equal(a[j].at) && a[i].n < a[j].n
}
func (a *agenda) Push(x any) { *a = append(*a, x.(entry)) }
func (a *agenda) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

func (c *clockwork) after(d time.Duration, do func()) {
	c.n++
	heap.Push(&c.due, entry{c.now.Add(d), c.n, do})
}

func (c *clockwork) run(until time.Time) {
	for len(c.due) > 0 && !c.due[0].at.After(until) {
		e := heap.Pop(&c.due).(entry)
		c.now = e.at
		e.do()
	}
	c.now = until
}

// countingEngine is a decode engine as far as its metrics page goes, and the
// scrapes of that page. As vLLM does, it counts the tokens that came over the
// connector when it takes a request up, and everything from 0 in a new process.
type countingEngine struct {
	*clockwork
	rng      *rand.Rand
	rank     *workers.Rank
	connects bool // without a connector nothing comes over it
	// again has each prompt of so many computed all the same; 0 for none.
	again, takenUp int
	cached         bool // it finds a part of the prompts in its own cache, and counts that
	others         int  // cached tokens of each of other requests that it has beside them
	hits           float64
	dates          bool // the page has process_start_time_seconds
	process        int  // 0 while it is down
	starts         int
	loaded         float64
	taking         time.Time // when it is done with what it has taken up
	misses         int
}

// between is a duration from lo to hi, more often a short one.
func (e *countingEngine) between(lo, hi time.Duration) time.Duration {
	f := e.rng.Float64()
	return lo + time.Duration(f*f*f*float64(hi-lo))
}

func (e *countingEngine) start() {
	e.starts++
	e.process, e.loaded, e.hits, e.taking = e.starts, 0, 0, e.now
}

// crash ends the process; another one is there after a while.
func (e *countingEngine) crash() {
	e.process = 0
	e.after(e.pauseOfRestart(), e.start)
}

// pauseOfRestart: where the page does not say when its process began, an
// engine that is back between two scrapes looks like the old one. Real
// ones take longer than the scrapes' patience.
func (e *countingEngine) pauseOfRestart() time.Duration {
	if e.dates {
		return e.between(10*time.Millisecond, 20*time.Second)
	}
	return e.between(12*time.Second, 40*time.Second)
}

// scrape reads the page about once a second, as internal/workers/health does.
func (e *countingEngine) scrape() {
	asked := e.now
	e.after(e.between(time.Millisecond, 900*time.Millisecond), func() { // the page is written
		process, loaded, hits := e.process, e.loaded, e.hits
		e.after(e.between(time.Millisecond, 900*time.Millisecond), func() { // and read
			defer e.after(time.Duration(900+e.rng.IntN(200))*time.Millisecond, e.scrape)
			if process == 0 {
				if e.misses++; e.misses >= 3 {
					e.rank.SetLoad(nil)
				}
				return
			}
			e.misses = 0
			l := workers.UnknownLoad(e.now)
			l.ExternalHits, l.PrefixHits, l.Asked = loaded, hits, asked
			if e.dates {
				l.Process = float64(process)
			}
			e.rank.SetLoad(&l)
		})
	})
}

// request is one remote plan: its decode leg is sent now.
func (e *countingEngine) request(tokens int, w *Recompute, answered func()) {
	sent, process := e.now, e.process
	if process == 0 || e.taking.Sub(e.now) > 20*time.Second {
		return // refused
	}
	alive := func() bool { return e.process == process }
	if e.taking.Before(e.now) {
		e.taking = e.now
	}
	e.taking = e.taking.Add(e.between(0, 4*time.Second))
	e.after(e.taking.Sub(e.now), func() {
		first := e.between(time.Millisecond, time.Second)
		e.takenUp++
		local, again := 0, e.again > 0 && e.takenUp%e.again == 0
		if e.cached && e.rng.IntN(2) == 0 { // of a prompt that came since the router decided
			local = e.rng.IntN(tokens)
		}
		count := func() {
			if !alive() {
				return
			}
			if e.hits += float64(local); e.connects && !again {
				e.loaded += float64(tokens - local)
			}
		}
		if e.rng.IntN(4) > 0 {
			count()
		} else { // the page shows it a little after the first token
			e.after(first+e.between(0, countingDelay*8/10), count)
		}
		if e.rng.IntN(10) == 0 {
			return // the client leaves before the first token
		}
		if e.rng.IntN(2) == 0 { // not a stream: the router sees the end
			first += e.between(0, 40*time.Second)
		}
		e.after(first, func() {
			if alive() {
				w.Answered(e.rank, tokens, tokens-16, sent, e.now)
				answered()
			}
		})
	})
}

// other is a request that is not remote, and finds its prompt in the cache.
func (e *countingEngine) other(w *Recompute) {
	sent, process := e.now, e.process
	e.after(e.between(0, 4*time.Second), func() {
		if e.process != process || process == 0 {
			return
		}
		e.hits += float64(e.others)
		if e.rng.IntN(10) > 0 { // otherwise its client leaves
			e.after(e.between(countingDelay, 40*time.Second), func() {
				if e.process == process {
					w.Cached(e.rank, e.others, sent, e.now)
				}
			})
		}
	})
}

var recomputeBegin = time.Unix(1_000_000, 0)

// schedule is a random schedule of requests, scrapes, slow pages and restarts.
type schedule struct {
	*countingEngine
	alarms, ended int
	third, alarm  time.Time // the third answer, and the first alarm
}

// playSchedule runs an engine for some minutes.
func playSchedule(t *testing.T, seed uint64, minutes int, configure func(*countingEngine)) *schedule {
	t.Helper()
	e := &countingEngine{
		clockwork: &clockwork{now: recomputeBegin}, rng: rand.New(rand.NewPCG(seed, 11)), rank: &workers.Rank{Label: "d0/dp0", WorkerName: "d0"},
	}
	configure(e)
	s := &schedule{countingEngine: e}
	w := NewRecompute(RecomputeOptions{
		Ranks: func() []*workers.Rank { return []*workers.Rank{e.rank} }, Found: func(string, int) {},
		Event: func(v eventlog.Event) {
			if v.Kind != "silent_recompute" {
				s.ended++
				return
			}
			if s.alarms++; s.alarms == 1 {
				s.alarm = e.now
			}
		},
	})
	e.dates = e.rng.IntN(4) > 0
	e.start()
	e.after(e.between(0, time.Second), e.scrape)
	var tick func()
	tick = func() { w.compare(); e.after(recomputeEvery, tick) }
	e.after(e.between(0, recomputeEvery), tick)
	answers := 0
	var burst func()
	pace := 100*time.Millisecond + time.Duration(e.rng.Int64N(int64(12*time.Second)))
	burst = func() {
		for range 1 + e.rng.IntN(1+e.rng.IntN(12)) {
			known := e.now.Sub(recomputeBegin) >= 4*time.Second // the first page has been read and compared by then
			e.request(100+e.rng.IntN(4000), w, func() {
				if known {
					if answers++; answers == 3 {
						s.third = e.now
					}
				}
			})
			if e.others > 0 {
				e.other(w)
			}
		}
		e.after(e.between(0, pace), burst)
	}
	e.after(e.between(0, 6*time.Second), burst)
	if e.connects && e.again == 0 {
		for range e.rng.IntN(4) {
			e.after(time.Duration(e.rng.Int64N(int64(2*time.Minute))), e.crash)
		}
	}
	e.run(recomputeBegin.Add(time.Duration(minutes) * time.Minute))
	return s
}

// TestRecomputeSchedules runs random schedules: an engine that loads what was moved to it is
// never blamed, and the same schedule on one that computes it again is found out within 10 s of
// the third answer.
func TestRecomputeSchedules(t *testing.T) {
	slowest := time.Duration(0)
	for seed := range uint64(1000) {
		if s := playSchedule(t, seed, 3, func(e *countingEngine) { e.connects = true }); s.alarms != 0 {
			t.Errorf("seed %d: a false alarm after %s", seed, s.alarm.Sub(recomputeBegin))
		}
		s := playSchedule(t, seed, 3, func(*countingEngine) {})
		switch {
		case s.third.IsZero():
			t.Errorf("seed %d: the schedule has no three answers", seed)
		case s.alarms != 1 || s.ended != 0:
			t.Errorf("seed %d: %d alarms, %d ended", seed, s.alarms, s.ended)
		default:
			slowest = max(slowest, s.alarm.Sub(s.third))
		}
	}
	if slowest > 10*time.Second {
		t.Errorf("the slowest alarm came %s after the third answer", slowest)
	}
	t.Logf("the slowest alarm came %s after the third answer", slowest.Round(time.Millisecond))
}

// TestRecomputeAmongOthers: an engine that computes every other prompt again, and loads those
// between, is found, also where it finds prompts in its own cache of which the router did not know
// that. One that loads all but those is never blamed, whatever other requests it has beside them.
func TestRecomputeAmongOthers(t *testing.T) {
	slowest := time.Duration(0)
	for seed := range uint64(100) {
		for _, others := range []int{0, 1000} {
			healthy := playSchedule(t, seed, 12, func(e *countingEngine) { e.connects, e.cached, e.others = true, true, others })
			if healthy.alarms != 0 {
				t.Errorf("seed %d, others %d: a false alarm after %s", seed, others, healthy.alarm.Sub(recomputeBegin))
			}
		}
		s := playSchedule(t, seed, 12, func(e *countingEngine) { e.connects, e.cached, e.again = true, true, 2 })
		if s.alarms != 1 || s.ended != 0 {
			t.Errorf("seed %d: %d alarms, %d ended", seed, s.alarms, s.ended)
			continue
		}
		slowest = max(slowest, s.alarm.Sub(s.third))
	}
	if slowest > 6*time.Minute {
		t.Errorf("the slowest alarm came %s after the third answer", slowest)
	}
	t.Logf("the slowest alarm came %s after the third answer", slowest.Round(time.Second))
}
