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
	dates    bool // the page has process_start_time_seconds
	process  int  // 0 while it is down
	starts   int
	loaded   float64
	taking   time.Time // when it is done with what it has taken up
	misses   int
}

// between is a duration from lo to hi, more often a short one.
func (e *countingEngine) between(lo, hi time.Duration) time.Duration {
	f := e.rng.Float64()
	return lo + time.Duration(f*f*f*float64(hi-lo))
}

func (e *countingEngine) start() {
	e.starts++
	e.process, e.loaded, e.taking = e.starts, 0, e.now
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
		process, loaded := e.process, e.loaded
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
			l.ExternalHits, l.Asked = loaded, asked
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
		count := func() {
			if alive() && e.connects {
				e.loaded += float64(tokens)
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
				w.Answered(e.rank, tokens, sent, e.now)
				answered()
			}
		})
	})
}

// TestRecomputeSchedules runs random schedules of requests, scrapes, slow pages
// and restarts: an engine that loads what was moved to it is never blamed, and
// the same schedule on one that computes it again is found out within 10 s of
// the third answer.
func TestRecomputeSchedules(t *testing.T) {
	begin := time.Unix(1_000_000, 0)
	play := func(seed uint64, connects bool) (alarms int, third, alarm time.Time) {
		e := &countingEngine{
			clockwork: &clockwork{now: begin}, rng: rand.New(rand.NewPCG(seed, 11)), rank: &workers.Rank{Label: "d0/dp0", WorkerName: "d0"}, connects: connects,
		}
		w := NewRecompute(RecomputeOptions{
			Ranks: func() []*workers.Rank { return []*workers.Rank{e.rank} }, Found: func(string, int) {},
			Event: func(v eventlog.Event) {
				if v.Kind != "silent_recompute" {
					t.Errorf("seed %d: %s", seed, v.Kind)
				}
				if alarms++; alarms == 1 {
					alarm = e.now
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
				known := e.now.Sub(begin) >= 4*time.Second // the first page has been read and compared by then
				e.request(100+e.rng.IntN(4000), w, func() {
					if known {
						if answers++; answers == 3 {
							third = e.now
						}
					}
				})
			}
			e.after(e.between(0, pace), burst)
		}
		e.after(e.between(0, 6*time.Second), burst)
		if connects {
			for range e.rng.IntN(4) {
				e.after(time.Duration(e.rng.Int64N(int64(2*time.Minute))), e.crash)
			}
		}
		e.run(begin.Add(3 * time.Minute))
		return alarms, third, alarm
	}
	slowest := time.Duration(0)
	for seed := range uint64(1000) {
		if n, _, at := play(seed, true); n != 0 {
			t.Errorf("seed %d: a false alarm after %s", seed, at.Sub(begin))
		}
		n, third, at := play(seed, false)
		switch {
		case third.IsZero():
			t.Errorf("seed %d: the schedule has no three answers", seed)
		case n != 1:
			t.Errorf("seed %d: %d alarms", seed, n)
		default:
			slowest = max(slowest, at.Sub(third))
		}
	}
	if slowest > 10*time.Second {
		t.Errorf("the slowest alarm came %s after the third answer", slowest)
	}
	t.Logf("the slowest alarm came %s after the third answer", slowest.Round(time.Millisecond))
}
