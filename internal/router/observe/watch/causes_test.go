package watch

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

const (
	beginsAt = 30 * time.Second // when something goes wrong
	endsAt   = 75 * time.Second
	filledAt = 110 * time.Second // by then caches of nobody knows which size are full
)

// scene is eight engines of one group under load on the virtual clock.
type scene struct {
	seed  uint64
	rate  float64 // requests per second
	short bool    // prompts only
	brief bool    // answers of a few tokens
	mixed bool    // every other engine has a third of the speed and half the cache
	// What goes wrong with one: it fails a share of its requests, its events are cut
	// off, it is slowed, it has half the cache.
	errors, slow float64
	rare         float64 // share of requests that every engine fails, all the time
	cut, half    bool
	silent       bool // engines do not say how large their caches are
}

// stage is a scene as it is played.
type stage struct {
	t       *testing.T
	scene   scene
	world   *virtual.World
	rng     *rand.Rand
	engines []*virtual.Rank
	fleet   *workers.Snapshot
	feeds   map[uint32]Feed
	held    []map[uint64]bool
	sent    []uint64
	waiting []int
	active  []int
	n       int
	victim  int
	base    time.Time

	failures Failures
	slow     *Slow
	causes   *Causes
	events   []eventlog.Event
	full     time.Duration // since when half a cache can be known
}

// play returns the events, and which worker something was done to.
func play(t *testing.T, sc scene) *stage {
	t.Helper()
	s := &stage{t: t, scene: sc, world: virtual.NewWorld(), rng: rand.New(rand.NewPCG(sc.seed, 99)), feeds: map[uint32]Feed{}}
	s.victim = s.rng.IntN(8)
	var specs []workers.Spec
	for i := range 8 {
		cfg := engine.Config{
			BlockSize: 16, Blocks: 20_000, MaxSeqs: 64, MaxBatchedTokens: 2048, Model: "m", Seed: 1, NameSeed: uint64(i), NoiseSeed: sc.seed + uint64(i),
			Timing: engine.Mocker{}, Noise: .05, Next: func(_ []uint32, draw uint64) uint32 { return uint32(300 + draw%100) }, EOS: 2, OSL: 150,
			Publish: func(_ time.Duration, e []cache.Event) { s.publish(i, e) },
		}
		if sc.silent {
			cfg.Blocks = 4000
		}
		if sc.mixed && i%2 == 1 {
			cfg.Speed, cfg.Blocks = 1./3, cfg.Blocks/2
		}
		if sc.half && i == s.victim {
			cfg.Blocks /= 2
		}
		e, err := s.world.Add(cfg)
		if err != nil {
			t.Fatal(err)
		}
		s.engines = append(s.engines, e)
		u, err := url.Parse(fmt.Sprintf("http://127.0.0.1:%d", 9000+i))
		if err != nil {
			t.Fatal(err)
		}
		spec := workers.Spec{Facts: workers.Facts{Role: workers.Aggregated, Engine: workers.VLLM, Models: []string{"m"}, BlockSize: 16}, Name: fmt.Sprint("w", i), URL: u, EventsOff: true, Origin: "test"}
		if !sc.silent {
			spec.KVBlocks = cfg.Blocks
		}
		specs = append(specs, spec)
		s.held = append(s.held, map[uint64]bool{})
	}
	s.sent, s.waiting, s.active = make([]uint64, 8), make([]int, 8), make([]int, 8)
	registry := workers.NewRegistry(func(eventlog.Event) {})
	if _, err := registry.Apply(workers.SourceFlag, specs); err != nil {
		t.Fatal(err)
	}
	s.fleet = registry.Snapshot()
	for _, w := range s.fleet.Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	report := func(e eventlog.Event) { s.events = append(s.events, e) }
	index := func(k *workers.Rank) int { return slices.Index(s.fleet.Ranks, k) }
	s.slow = NewSlow(SlowOptions{
		Fleet: registry.Snapshot, Factor: func() float64 { return 2 }, Event: report,
		Load: func(k *workers.Rank) (int, int) { return s.waiting[index(k)], 0 },
	})
	s.base = s.slow.began
	s.causes = NewCauses(CausesOptions{
		Fleet: registry.Snapshot, Failures: &s.failures, Event: report, BlockOf: func(*workers.Worker) int { return 16 },
		Feeds:    func() map[uint32]Feed { return s.feeds },
		Requests: func(k *workers.Rank) uint64 { return s.sent[index(k)] },
		Held:     func(k *workers.Rank) int64 { return int64(len(s.held[index(k)])) },
		Answers:  func(k *workers.Rank) (uint64, int) { return s.slow.Meter(k).Answers() },
		Mute: func(k *workers.Rank, heard time.Time, _ string) {
			if f := s.feeds[k.Slot]; f.Live && f.Heard.Equal(heard) {
				f.Live, f.Muted = false, true
				s.feeds[k.Slot] = f
			}
		},
	})
	for _, k := range s.fleet.Ranks {
		s.feeds[k.Slot] = Feed{Live: true, Heard: s.base, Plain: true}
	}
	if sc.slow > 0 {
		s.world.At(beginsAt, func() { s.engines[s.victim].Core().SetSlow(sc.slow); s.engines[s.victim].Touch() })
	}
	s.slow.step(s.base)
	s.world.At(0, s.arrive)
	ends := endsAt
	if sc.silent && sc.half {
		ends = filledAt
	}
	for at := time.Second; at <= ends; at += time.Second {
		// The page was asked for a little before it is looked at.
		asked := at - time.Duration(100+s.rng.IntN(600))*time.Millisecond
		s.world.Run(asked)
		for i, k := range s.fleet.Ranks {
			st := s.engines[i].Core().Stats(asked)
			l := workers.UnknownLoad(s.base.Add(asked))
			l.Asked, l.PrefixQueries, l.PrefixHits = l.At, float64(st.PrefixQueries), float64(st.PrefixHits)
			k.SetLoad(&l)
		}
		s.world.Run(at)
		n := len(s.events)
		s.slow.step(s.base.Add(at))
		s.causes.step(s.base.Add(at))
		for i := n; i < len(s.events); i++ {
			s.events[i].At = s.base.Add(at)
		}
		if sc.silent && s.full == 0 && s.evicts() {
			s.full = at
		}
	}
	return s
}

// evicts reports whether the victim has evicted, and most others hold half as much
// again as it can.
func (s *stage) evicts() bool {
	more := 0
	for i := range s.held {
		if i != s.victim && 2*len(s.held[i]) >= 3*len(s.held[s.victim]) {
			more++
		}
	}
	return s.feeds[s.fleet.Ranks[s.victim].Slot].Removed >= 20 && more >= 4
}

func (s *stage) publish(i int, events []cache.Event) {
	if s.scene.cut && i == s.victim && s.world.Now() >= beginsAt {
		return
	}
	slot := s.fleet.Ranks[i].Slot
	f := s.feeds[slot]
	f.Heard, f.Live, f.Muted = s.base.Add(s.world.Now()), true, false
	for _, e := range events {
		for _, name := range e.Names {
			if e.Kind == cache.Removed {
				f.Removed++
				delete(s.held[i], name)
			} else {
				s.held[i][name] = true
			}
		}
	}
	s.feeds[slot] = f
}

// arrive sends a request, and another one after it.
func (s *stage) arrive() {
	s.n++
	prefix, rest := s.rng.IntN(200), int(100*math.Exp(3*s.rng.Float64()))
	prompt := make([]uint32, 0, 512+rest)
	for i := range 512 {
		prompt = append(prompt, uint32(1000+(prefix*7919+i*31)%5000))
	}
	for i := range rest {
		prompt = append(prompt, uint32(1000+(s.n*6007+i*37)%5000))
	}
	s.send(prompt, -1)
	s.world.At(s.world.Now()+time.Duration(s.rng.ExpFloat64()/s.scene.rate*1e9), s.arrive)
}

// send sends a prompt to the engine with the least work but one.
func (s *stage) send(prompt []uint32, but int) {
	at, best := 0, math.Inf(1)
	for i := range s.engines {
		if c := float64(s.active[i]) + float64(s.waiting[i])/2000 + s.rng.Float64()/2; c < best && i != but {
			at, best = i, c
		}
	}
	s.sent[at]++
	now := s.world.Now()
	fails := at == s.victim && now >= beginsAt && s.rng.Float64() < s.scene.errors
	if fails || s.scene.rare > 0 && s.rng.Float64() < s.scene.rare {
		w := s.fleet.Workers[at]
		if e, ok := s.failures.Failed(w, "decode", "status_5xx", fmt.Errorf("answered 500"), s.base.Add(now)); ok {
			e.At = s.base.Add(now)
			s.events = append(s.events, e)
		}
		s.send(prompt, at)
		return
	}
	meter, k := s.slow.Meter(s.fleet.Ranks[at]), s.engines[at]
	q := engine.Request{ID: fmt.Sprint(s.n, "-", at), Tokens: prompt, MaxTokens: 1, IgnoreEOS: true}
	switch {
	case s.scene.short:
	case s.scene.brief:
		q.MaxTokens = 5 + s.rng.IntN(30)
	default:
		q.MaxTokens = 50 + s.rng.IntN(250)
	}
	s.active[at]++
	s.waiting[at] += len(prompt)
	meter.Begin(now)
	meter.Sent()
	answer, tokens := pace.NewAnswer(meter, now), 0
	q.Sink = func(o engine.Output) {
		if o.HasToken {
			if tokens++; tokens == 1 {
				meter.End(now)
				meter.Answered(true)
				meter.First(o.At-now, len(prompt)-o.Cached)
				s.waiting[at] -= len(prompt)
			}
			answer.Came(o.At, 1)
		}
		if o.Finish != engine.Running {
			s.active[at]--
		}
	}
	if err := k.Submit(q); err != nil {
		s.t.Fatal(err)
	}
}

func seeds() uint64 {
	if testing.Short() {
		return 3
	}
	return 20
}

// TestCauses: one engine of eight with which something is wrong is named within ten
// seconds, by what is wrong with it, and nothing else is named.
func TestCauses(t *testing.T) {
	for _, c := range []struct {
		name  string
		scene scene
		cause string
	}{
		{"5xx", scene{rate: 80, brief: true, errors: .1}, "failing"},
		{"5xx, prompts only", scene{rate: 80, short: true, errors: .1}, "failing"},
		{"5xx, mixed", scene{rate: 60, brief: true, mixed: true, errors: .1}, "failing"},
		{"cut off", scene{rate: 12, cut: true}, "mute"},
		{"cut off, prompts only", scene{rate: 60, short: true, cut: true}, "mute"},
		{"cut off, mixed", scene{rate: 12, mixed: true, cut: true}, "mute"},
		{"half the cache", scene{rate: 12, half: true}, "small_cache"},
		{"half the cache, not stated", scene{rate: 20, half: true, silent: true}, "small_cache"},
		{"slow", scene{rate: 12, slow: 3}, "slow"},
		{"slow", scene{rate: 12, slow: 10}, "slow"},
		{"slow", scene{rate: 12, slow: 20}, "slow"},
	} {
		t.Run(fmt.Sprintf("%s %g", c.name, c.scene.slow), func(t *testing.T) {
			slowest := time.Duration(0)
			for c.scene.seed = 1; c.scene.seed <= seeds(); c.scene.seed++ {
				s := play(t, c.scene)
				from := beginsAt
				if c.scene.half {
					from = s.full
				}
				victim, named := s.fleet.Workers[s.victim].Name, time.Duration(-1)
				const by = 10 * time.Second
				for _, e := range s.events {
					cause, at := causeOf(&e), e.At.Sub(s.base)
					switch {
					case cause != c.cause || e.Worker != victim:
						t.Errorf("seed %d, victim %s: at %s %s: %s", c.scene.seed, victim, at, e.Kind, e.Text)
					case named < 0 && e.Kind != "worker_failing":
						named = at - from
					}
				}
				if slowest = max(slowest, named); named < 0 || named > by {
					t.Errorf("seed %d: named after %s, must be by %s", c.scene.seed, named, by)
				}
			}
			t.Logf("named within %s, %d seeds", slowest, seeds())
		})
	}
}

// causeOf is what an event names.
func causeOf(e *eventlog.Event) string {
	switch e.Kind {
	case "rank_slow", "rank_slow_ended":
		return "slow"
	case "worker_failing":
		return "failing"
	}
	return fmt.Sprint(e.Fields["cause"])
}

// TestNothingIsWrong: healthy fleets name nothing, of one kind of hardware or of two,
// nor do those of which every engine fails one request in a thousand.
func TestNothingIsWrong(t *testing.T) {
	for _, sc := range []scene{
		{rate: 12}, {rate: 2}, {rate: 40}, {rate: 12, mixed: true}, {rate: 60, short: true}, {rate: 40, short: true, mixed: true},
		{rate: 16, silent: true}, {rate: 12, silent: true, mixed: true}, {rate: 60, silent: true, short: true},
		{rate: 80, brief: true, rare: .001}, {rate: 60, brief: true, mixed: true, rare: .001}, {rate: 12, rare: .001},
	} {
		for sc.seed = 1; sc.seed <= seeds(); sc.seed++ {
			for _, e := range play(t, sc).events {
				if sc.rare > 0 && e.Kind == "worker_failing" {
					continue // it is about a request, not that a worker is in trouble
				}
				t.Errorf("%+v: %s: %s", sc, e.Kind, e.Text)
			}
		}
	}
}

// TestFeeds: what fills a rank's cache is of one kind where it has no cache groups and
// reports all blocks on one socket.
func TestFeeds(t *testing.T) {
	parts := kvfeed.Status{Rank: 2, State: kvfeed.Mute, Heard: time.Unix(5, 0)}
	parts.Parts = 2
	got := Feeds([]kvfeed.Status{{Rank: 1, State: kvfeed.Live}, parts})
	if len(got) != 2 || !got[1].Live || got[1].Muted || !got[1].Plain {
		t.Errorf("%+v", got[1])
	}
	if f := got[2]; f.Live || !f.Muted || f.Plain || !f.Heard.Equal(time.Unix(5, 0)) {
		t.Errorf("%+v", f)
	}
}
