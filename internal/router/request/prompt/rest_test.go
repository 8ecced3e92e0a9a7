package prompt

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// moody is an engine whose /tokenize can be made to fail.
type moody struct {
	*httptest.Server
	mood  atomic.Pointer[string] // "", "hang", "hang in the body", "503", "404", "refuse"
	asked atomic.Int64
}

func (m *moody) is(mood string) { m.mood.Store(&mood) }

func newMoody(t *testing.T) *moody {
	t.Helper()
	m := &moody{}
	m.is("")
	m.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		m.asked.Add(1)
		_, _ = io.Copy(io.Discard, q.Body) // else a client that leaves is not noticed
		switch *m.mood.Load() {
		case "hang in the body":
			w.Header().Set("Content-Length", "60")
			_, _ = w.Write([]byte(`{"count":3,`))
			_ = http.NewResponseController(w).Flush()
			<-q.Context().Done()
		case "hang":
			<-q.Context().Done()
		case "503", "404":
			status, _ := strconv.Atoi(*m.mood.Load())
			w.WriteHeader(status)
		case "refuse":
			w.WriteHeader(400)
		default:
			_, _ = w.Write([]byte(`{"count":3,"tokens":[7,8,9]}`))
		}
	}))
	t.Cleanup(m.Close)
	return m
}

// patience is how long a test waits for what should come at once.
const patience = 20 * time.Second

// hangs is the time of a question that is not answered: too short for none that
// is, and enough for the engine to be asked.
const hangs = time.Second

// moodyStage is a stage over engines d0, d1, … of model m.
type moodyStage struct {
	*Stage
	t        *testing.T
	registry *workers.Registry
	mu       sync.Mutex
	events   []string
	prompts  atomic.Int64
}

func newMoodyStage(t *testing.T, engines ...*moody) *moodyStage {
	t.Helper()
	s := &moodyStage{t: t, registry: workers.NewRegistry(func(eventlog.Event) {})}
	var err error
	if s.Stage, err = New(Options{Mode: "engine", Registry: s.registry, Event: func(e eventlog.Event) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.events = append(s.events, strings.TrimSpace(e.Kind+" "+e.Worker))
	}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	s.timeout = patience // a test in which it must end sets its own
	var specs []workers.Spec
	for i, e := range engines {
		spec, err := workers.ParseSpec(workers.Decode, fmt.Sprintf("%s,name=d%d,model=m", e.URL, i))
		if err != nil {
			t.Fatal(err)
		}
		specs = append(specs, spec)
	}
	if _, err := s.registry.Apply("flag", specs); err != nil {
		t.Fatal(err)
	}
	for _, w := range s.registry.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	return s
}

// ask finds the ids of a prompt that was not asked for before.
func (s *moodyStage) ask() Prompt {
	s.t.Helper()
	var v api.View
	if err := v.Parse(fmt.Appendf(nil, `{"model":"m","prompt":"prompt %d"}`, s.prompts.Add(1)), api.Completion, api.Limits{}); err != nil {
		s.t.Fatal(err)
	}
	defer v.Release()
	return s.Find(s.t.Context(), &v, "m", s.registry.Snapshot().Model("m"), nil)
}

// tick does what Run does, at a time.
func (s *moodyStage) tick(now time.Time) {
	s.t.Helper()
	var g errgroup.Group
	g.SetLimit(maxTrials)
	s.trials(s.t.Context(), &g, now)
	if err := g.Wait(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *moodyStage) kinds() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.events)
}

// TestHangingTokenizerIsLeftAlone: an engine whose /tokenize fails costs a few
// requests their ids, not every one the time limit, and comes back by a trial
// that no request waits for.
func TestHangingTokenizerIsLeftAlone(t *testing.T) {
	t.Parallel()
	for mood, words := range map[string]string{
		"hang": "did not answer /tokenize in time", "hang in the body": "did not answer /tokenize in time", "503": "answers /tokenize with 503", "404": "answers /tokenize with 404",
	} {
		t.Run(mood, func(t *testing.T) {
			t.Parallel()
			e := newMoody(t)
			s := newMoodyStage(t, e)
			s.timeout = hangs
			e.is(mood)
			began := time.Now()
			for range 20 {
				if p := s.ask(); p.Source != route.FromEstimate || !strings.Contains(p.Note, "d0 "+words) {
					t.Fatalf("%+v", p)
				}
			}
			if n := e.asked.Load(); n != failuresToRest {
				t.Errorf("%d of 20 requests waited for the engine, want %d", n, failuresToRest)
			}
			if got := s.Troubles(); len(got) != 2 || !strings.Contains(got[0], "d0 "+words) || !strings.Contains(got[1], "d0") || !s.AtRest("d0") {
				t.Errorf("troubles %q, at rest %v", got, s.AtRest("d0"))
			}
			// Trials: none before the pause is over, then one for each pause,
			// and the pauses grow to a bound.
			now, asked := time.Now(), e.asked.Load()
			s.tick(began)
			if e.asked.Load() != asked {
				t.Error("tried before the pause was over")
			}
			for range 6 { // 1 s doubled until it is over the bound
				now = now.Add(restMax + time.Second)
				asked = e.asked.Load()
				s.tick(now)
				if n := e.asked.Load() - asked; n != 1 {
					t.Fatalf("%d trials", n)
				}
			}
			if s.models["m"].rests.engine["d0"].pause != restMax {
				t.Errorf("pause %v", s.models["m"].rests.engine["d0"].pause)
			}
			if p := s.ask(); p.Source != route.FromEstimate {
				t.Errorf("%+v", p)
			}
			// It is well again, and no request is needed to find out.
			e.is("")
			s.tick(now.Add(restMax + time.Second))
			if got := s.Troubles(); len(got) != 0 || s.AtRest("d0") {
				t.Errorf("troubles after it came back: %q", got)
			}
			if p := s.ask(); p.Source != route.FromEngine || len(p.IDs) != 3 {
				t.Errorf("%+v", p)
			}
			if got, want := s.kinds(), []string{"tokenizer_degraded", "tokenizer_degraded d0", "tokenizer_recovered d0", "tokenizer_recovered"}; !slices.Equal(got, want) {
				t.Errorf("events %q, want %q", got, want)
			}
		})
	}
}

// TestOtherEnginesAreAskedFirst: with one engine of two at rest every prompt has
// its ids from the other.
func TestOtherEnginesAreAskedFirst(t *testing.T) {
	t.Parallel()
	bad, good := newMoody(t), newMoody(t)
	s := newMoodyStage(t, bad, good)
	s.timeout = 2 * hangs // the good one must answer within it
	bad.is("hang")
	for range 2 * failuresToRest {
		s.ask()
	}
	if bad.asked.Load() != failuresToRest || !s.AtRest("d0") || s.AtRest("d1") {
		t.Fatalf("asked %d times, at rest %v and %v", bad.asked.Load(), s.AtRest("d0"), s.AtRest("d1"))
	}
	for range 20 {
		if p := s.ask(); p.Source != route.FromEngine {
			t.Fatalf("%+v", p)
		}
	}
	if n := bad.asked.Load(); n != failuresToRest {
		t.Errorf("asked %d times", n)
	}
	if got := s.Troubles(); len(got) != 1 || !strings.Contains(got[0], "d0") || strings.Contains(got[0], "estimated") {
		t.Errorf("troubles %q", got)
	}
	// An answer that refuses the question is an answer.
	good.is("refuse")
	for range 2 * failuresToRest {
		s.ask()
	}
	if s.AtRest("d1") {
		t.Error("an engine that refuses a prompt is left alone")
	}
	// An engine that left is forgotten.
	if _, err := s.registry.Apply("flag", nil); err != nil {
		t.Fatal(err)
	}
	s.tick(time.Now())
	if s.AtRest("d0") {
		t.Error("a worker that left is still at rest")
	}
}

// TestOneTimeoutPasses: after a single answer that came too late, the state is
// right again without a further request.
func TestOneTimeoutPasses(t *testing.T) {
	e := newMoody(t)
	s := newMoodyStage(t, e)
	s.timeout = 100 * time.Millisecond
	e.is("hang")
	s.ask()
	if got := s.Troubles(); len(got) != 1 || !strings.Contains(got[0], "did not answer /tokenize in time") {
		t.Errorf("troubles %q", got)
	}
	e.is("")
	s.timeout = patience
	s.tick(time.Now())
	if got := s.Troubles(); len(got) != 0 {
		t.Errorf("troubles %q", got)
	}
}

// TestRunTriesEngines: Run makes the trials by itself and ends with its context
// although one hangs.
func TestRunTriesEngines(t *testing.T) {
	e := newMoody(t)
	s := newMoodyStage(t, e)
	e.is("503")
	for range failuresToRest {
		s.ask()
	}
	asked := e.asked.Load()
	e.is("hang")
	s.timeout = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	var g errgroup.Group
	g.Go(func() error { return s.Run(ctx) })
	for end := time.Now().Add(patience); e.asked.Load() == asked; {
		if time.Now().After(end) {
			t.Error("no trial")
			break
		}
		<-time.After(5 * time.Millisecond)
	}
	cancel()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}
