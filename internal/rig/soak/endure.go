package soak

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
)

// Options shape an endurance run.
type Options struct {
	// Duration is how long load and faults last.
	Duration time.Duration
	// Seed makes requests and faults; when they meet is up to the machine.
	Seed uint64
	// Gap is the mean time between two faults, Hold half the mean time that one
	// lasts, RouterEvery the time between two restarts of the router: by default 2 s, 4 s
	// and an eighth of Duration.
	Gap, Hold, RouterEvery time.Duration
	// Timeout is how long the router waits for an engine: 6 s by default.
	Timeout time.Duration
	// Dir takes the events, the receipts of what went wrong, and the snapshot
	// of the index.
	Dir string
	// End, when closed, ends the load before its time; all checks are made.
	End <-chan struct{}
	// Log gets a line now and then.
	Log func(format string, a ...any)
}

// clients is the number of requests at a time, think the mean pause of a client between
// two, and epochTime how long the same requests come again.
const (
	clients   = 10
	think     = 60 * time.Millisecond
	epochTime = time.Minute
)

func (o *Options) defaults() {
	o.Gap, o.Hold = cmp.Or(o.Gap, 2*time.Second), cmp.Or(o.Hold, 4*time.Second)
	o.RouterEvery, o.Timeout = cmp.Or(o.RouterEvery, o.Duration/8), cmp.Or(o.Timeout, 6*time.Second)
}

// fleetText is the engines: five of vLLM that are split, one that is not (the
// spare that comes and goes), four of SGLang, two more of vLLM whose events
// arrive at one listener of the router, distinguished by their topics, and one
// that takes the spare's slot. The caches are small, so that they evict, and
// leave room for the longest prompt. All the time some write after their
// answers and close idle connections, which nobody may notice, and some
// prefills end with their first token, which is no fault either.
func fleetText(listener string) string {
	const vllm = "poison=" + poisonText + ",deadly=" + deadlyText + ",speed=20,kv_blocks=6000,max_model_len=90000,steps=100,osl=24"
	dial := ",replay=off,dial=" + listener + strings.Repeat("|"+listener, 11) // by rank of the fleet
	return "2p3d:tls=on,late_rate=.1,close_idle=700ms,end_rate=.1," + vllm +
		"+2p2d:engine=sglang,model=sgl,poison=" + poisonText + ",deadly=" + deadlyText + ",late_rate=.1,close_idle=700ms,speed=20,kv_blocks=12000,max_model_len=90000,steps=100,osl=24,bootstrap_wait=" + bootstrapWait.String() +
		"+1a:" + vllm +
		"+1a:topic=kv@10.0.0.1@sim," + vllm + dial + "+1a:topic=kv@10.0.0.10@sim," + vllm + dial +
		"+1a:events=off," + vllm
}

// The texts of requests that every engine answers with an error, and that it dies of.
const (
	poisonText = "a-poisonous-request"
	deadlyText = "a-deadly-request"
)

// bootstrapWait is how long a leg of SGLang waits for the other one.
const bootstrapWait = 20 * time.Second

// referenceText is the engines that nothing is done to.
const referenceText = "1a:profile=instant,kv_blocks=8000,max_model_len=90000,events=off,osl=24" +
	"+1a:engine=sglang,model=sgl,profile=instant,kv_blocks=8000,max_model_len=90000,events=off,osl=24"

// The spare, and who takes its slot while requests still hang on it.
const (
	spareName       = "aggregated-0"
	replacementName = "aggregated-3"
)

// soak is a run.
type soak struct {
	o      Options
	rig    *loopback.Rig
	ref    *sim.Running
	oracle *oracle
	chaos  *chaos
	http   *http.Client
	began  time.Time
	pins   atomic.Uint64

	// gate is held for reading by every request; who holds it for writing is
	// alone with an idle router.
	gate sync.RWMutex

	counts     counts
	mu         sync.Mutex
	violations []Violation
	checked    []string  // idle moments so far
	looked     time.Time // when the last one began
	more       int       // violations that were not kept
	notes      *os.File  // violations.jsonl
	events     *os.File  // events.jsonl
}

// Violation is something that must not happen.
type Violation struct {
	At       time.Time `json:"at"`
	What     string    `json:"what"`
	Detail   string    `json:"detail"`
	Request  string    `json:"request,omitempty"`
	Decision string    `json:"decision,omitempty"`
}

const maxViolations = 200

func (s *soak) violation(what string, t *try, detail string) {
	v := Violation{At: time.Now(), What: what, Detail: detail}
	var receipt json.RawMessage
	if t != nil {
		v.Request = fmt.Sprintf("%s %s %s, %d bytes, stream %v, took %s, answered by %q, path %q", t.way, t.job.model, t.job.kind, t.job.bytes, t.job.stream, t.to.Sub(t.from).Round(time.Millisecond), t.worker, t.path)
		v.Decision = t.decision
		if t.decision != "" {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			receipt, _ = s.rig.Admin.Decision(ctx, t.decision) // it may be gone by now
			cancel()
		}
	}
	s.o.Log("VIOLATION %s: %s (%s %s)", what, detail, v.Request, v.Decision)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.violations) >= maxViolations {
		s.more++
		return
	}
	s.violations = append(s.violations, v)
	if s.notes != nil {
		b, err := json.Marshal(struct {
			Violation
			Receipt json.RawMessage `json:"receipt,omitempty"`
		}{v, receipt})
		if err == nil {
			_, _ = s.notes.Write(append(b, '\n')) // the summary has it too
		}
	}
}

// Endure runs the endurance test and says what it has seen. The error is nil
// when everything held; the summary is there in any case unless the run could
// not even begin.
func Endure(ctx context.Context, o Options) (*Summary, error) {
	o.defaults()
	if o.Dir == "" {
		return nil, errors.New("soak: no folder to write to")
	}
	listener, err := freeEndpoint(ctx)
	if err != nil {
		return nil, err
	}
	sum := &Summary{Schema: SummarySchema, Started: time.Now(), Seed: o.Seed, Clients: clients, Fleet: fleetText(listener), Go: runtime.Version(), CPUs: runtime.NumCPU()}
	sum.Before = usageNow()
	s := &soak{o: o}
	if err := s.open(ctx, sum.Fleet); err != nil {
		return nil, errors.Join(err, s.close(ctx))
	}
	s.began = time.Now()
	s.load(ctx, sum)
	if err := s.close(context.WithoutCancel(ctx)); err != nil {
		s.violation("close", nil, err.Error())
	}
	sum.After = waitForBaseline(sum.Before)
	s.leaks(sum)
	s.findFaults(sum)
	s.fill(sum)
	return sum, sum.Err()
}

// freeEndpoint is an endpoint that a router can listen on, again after every restart.
func freeEndpoint(ctx context.Context) (string, error) {
	ln, err := sockets.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("soak: no port to listen on: %w", err)
	}
	return "tcp://" + ln.Addr().String(), ln.Close()
}

func (s *soak) open(ctx context.Context, fleet string) (err error) {
	if s.notes, err = os.Create(filepath.Join(s.o.Dir, "violations.jsonl")); err != nil {
		return err
	}
	if s.events, err = os.Create(filepath.Join(s.o.Dir, "events.jsonl")); err != nil {
		return err
	}
	f, err := sim.ParseFleet(referenceText)
	if err != nil {
		return err
	}
	if s.ref, err = sim.Start(ctx, f); err != nil {
		return err
	}
	s.http = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 128, DisableCompression: true}}
	s.oracle = &oracle{
		urls:   map[string]string{modelVLLM: s.ref.Engine(0).URL(), modelSGLang: s.ref.Engine(1).URL()},
		client: s.http, seed: s.o.Seed,
	}
	s.chaos = &chaos{s: s, active: map[string]*Fault{}}
	// While a router starts, what becomes of its workers is logged at level debug.
	s.chaos.watch.Handler = slog.NewJSONHandler(s.events, &slog.HandlerOptions{Level: slog.LevelDebug})
	s.chaos.watch.last = map[[2]string]time.Time{}
	s.rig, err = loopback.Start(ctx, loopback.Options{
		Fleet: fleet, Specs: s.chaos.specs(spareName, replacementName), Configure: configure(&s.o),
		// The event log is bounded; its events are kept in a file.
		Logger: slog.New(&s.chaos.watch),
	})
	if err != nil {
		return err
	}
	s.chaos.spare, s.chaos.replacement = s.rig.Sim.Named(spareName), s.rig.Sim.Named(replacementName)
	named := func(model string, prefill bool, names ...string) *group {
		g := &group{model: model, prefill: prefill}
		for _, n := range names {
			g.engines = append(g.engines, s.rig.Sim.Named(n))
		}
		return g
	}
	s.chaos.groups = []*group{
		named(modelVLLM, true, "prefill-0", "prefill-1"), named(modelVLLM, false, "decode-0", "decode-1", "decode-2"),
		named(modelSGLang, true, "prefill-2", "prefill-3"), named(modelSGLang, false, "decode-3", "decode-4"),
		named(modelVLLM, false, "aggregated-1", "aggregated-2"),
	}
	ready, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return s.rig.Ready(ready)
}

func (s *soak) close(ctx context.Context) error {
	var err error
	if s.rig != nil {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		err = s.rig.Close(ctx)
	}
	if s.http != nil {
		s.http.CloseIdleConnections()
	}
	if s.ref != nil {
		err = errors.Join(err, s.ref.Close())
	}
	if s.notes != nil {
		err = errors.Join(err, s.notes.Close())
		s.notes = nil
	}
	if s.events != nil {
		err = errors.Join(err, s.events.Close())
	}
	return err
}

// load runs clients and faults for the duration, with checks in between: the
// first after a twelfth of it (five minutes of an hour), the last at the end.
func (s *soak) load(ctx context.Context, sum *Summary) {
	run, cancel := context.WithTimeout(ctx, s.o.Duration)
	defer cancel()
	var load sync.WaitGroup
	load.Go(func() {
		select {
		case <-s.o.End:
			cancel()
		case <-run.Done():
		}
	})
	for i := range clients {
		load.Go(func() { s.client(run, i) })
	}
	first := s.o.Duration / 12
	for _, at := range []time.Duration{first, s.o.Duration / 3, s.o.Duration * 2 / 3, s.o.Duration} {
		broken, stop := context.WithDeadline(run, s.began.Add(at))
		s.chaos.run(broken)
		stop()
		if ctx.Err() != nil {
			break
		}
		if at == s.o.Duration || run.Err() != nil {
			break
		}
		sum.Checks = append(sum.Checks, s.check(ctx, fmt.Sprintf("after %s", at.Round(time.Second))))
	}
	cancel()
	load.Wait()
	if ctx.Err() != nil {
		s.violation("interrupted", nil, "the run was ended before its time")
		return
	}
	sum.Duration = Seconds(time.Since(s.began))
	sum.Checks = append(sum.Checks, s.check(ctx, atTheEnd))
}

// restart stops the router and starts it with the snapshot that it left.
func (s *soak) restart(ctx context.Context) error {
	stop, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	// A drain that needs longer cuts what is left; the ledger must balance even so.
	err := s.rig.StopRouter(stop)
	if errors.Is(err, context.DeadlineExceeded) && s.rig.Router == nil {
		s.o.Log("the drain was cut: %v", err)
		err = nil
	}
	if err = errors.Join(err, s.rig.StartRouter(ctx)); err != nil {
		return err
	}
	ready, done := context.WithTimeout(ctx, time.Minute)
	defer done()
	return s.rig.Ready(ready)
}
