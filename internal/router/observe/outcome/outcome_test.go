package outcome

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// class is a collector, and the events that it sends.
type class struct {
	*Collector
	at    time.Time
	kinds []string
}

func newClass() *class {
	c := &class{}
	c.Collector = New(Options{Ledger: ledger.New(), Decisions: func() *decide.Options { return &decide.Options{} }, Fleet: workers.NewRegistry(func(eventlog.Event) {}).Snapshot, Event: func(e eventlog.Event) {
		c.kinds = append(c.kinds, e.Kind)
		if e.Request != "its id" || e.Text == "" || (e.Severity == eventlog.Info) != (e.Kind == "costs_known" || e.Kind == "times_known") {
			c.kinds = append(c.kinds, "which is wrong")
		}
	}})
	c.at = c.began
	return c
}

// remote reports so many requests that were prefilled in a time for 1,000 tokens, and
// whose KV moved in 10 ms.
func (c *class) remote(n int, prefill time.Duration) {
	for i := range n {
		c.at = c.at.Add(time.Second)
		tokens := 1000 + 100*(i%7)
		var q RequestSamples
		p := &decide.Plan{Path: route.Remote, Paths: cost.Paths{Prefill: cost.Work{Tokens: tokens, Context: tokens}, Transfer: cost.Work{Tokens: tokens}}}
		done := c.at.Add(prefill * time.Duration(tokens) / 1000)
		q.PrefillBegins()
		c.Took(&q, p, LegSample{"m", "its id", route.Prefill, c.at, done})
		c.Took(&q, p, LegSample{"m", "its id", route.Decode, c.at, done.Add(10 * time.Millisecond)})
	}
}

// TestChangesAreReported: a drift of the costs, the doubt after a second one, and its end are
// events in this order, and there is no model in between.
func TestChangesAreReported(t *testing.T) {
	c := newClass()
	for _, step := range []struct {
		n       int
		prefill time.Duration
		known   bool
		event   string
	}{
		{100, 100 * time.Millisecond, true, "costs_known"},
		{90, 400 * time.Millisecond, true, "costs_drifted"},
		{60, 100 * time.Millisecond, false, "costs_suspended"},
		{150, 100 * time.Millisecond, true, "costs_known"},
	} {
		c.kinds = nil
		c.remote(step.n, step.prefill)
		if known := c.Known()["m"].Model != nil; known != step.known || !slices.Equal(c.kinds, []string{step.event}) {
			t.Errorf("after %d of %v: known is %v, events %v; want %v and %s", step.n, step.prefill, known, c.kinds, step.known, step.event)
		}
	}
}

// TestLegsWithoutSample: KV whose prefill has not ended, a leg with nothing to do, and
// one whose clock went back are no outcomes; KV that was asked for before its prefill had
// ended took the time from then on.
func TestLegsWithoutSample(t *testing.T) {
	c := newClass()
	p := &decide.Plan{Path: route.Remote, Paths: cost.Paths{Prefill: cost.Work{Tokens: 1000, Context: 1000}, Transfer: cost.Work{Tokens: 1000}}}
	var q RequestSamples
	after := func(d time.Duration) time.Time { return c.began.Add(d) }
	c.Took(&q, p, LegSample{"m", "", route.Decode, c.began, after(time.Second)})
	c.Took(&q, &decide.Plan{}, LegSample{"m", "", route.Decode, c.began, after(time.Second)})
	c.Took(&q, p, LegSample{"m", "", route.Prefill, after(2 * time.Second), after(time.Second)})
	if k := c.Known(); len(k) != 0 {
		t.Errorf("learned %+v", k)
	}
	c.Took(&q, p, LegSample{"m", "", route.Prefill, c.began, after(time.Second)})
	c.Took(&q, p, LegSample{"m", "", route.Decode, c.began, after(time.Second + 10*time.Millisecond)})
	k := c.Known()["m"]
	if k.Prefill != 1 || k.Transfer != 1 || k.Local != 0 {
		t.Errorf("known %+v", k)
	}
	q.PrefillBegins()
	c.Took(&q, p, LegSample{"m", "", route.Decode, c.began, after(time.Minute)})
	if k := c.Known()["m"]; k.Transfer != 1 {
		t.Errorf("KV of the attempt before: %+v", k)
	}
}

// TestAnswers: an answer is heard of under every setting, and steps are learned from what its
// rank does meanwhile.
func TestAnswers(t *testing.T) {
	c := newClass()
	rank := &workers.Rank{Label: "d/dp0"}
	held := c.o.Ledger.Reserve(rank, ledger.Claim{PrefillTokens: 300, ContextTokens: 1000, CachedTokens: 700, BlockSize: 16})
	held.FirstToken()
	if got, want := decide.DecodingOn(c.o.Ledger, rank, 16), (cost.Decoding{Running: 1, Held: 20 * 16, HeldCached: 43 * 16, Prompts: 1, Computed: 300, Times: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	var q RequestSamples
	if q.Begun() {
		t.Error("begun before a plan")
	}
	c.Begins(&q, "m", 16)
	for range 20 { // until times are known
		c.Runs(&q, "m", rank, 1, c.at)
		c.at = c.at.Add(time.Second)
		q.Ran(rank, 100, c.at)
		q.Ended()
		c.Took(&q, &decide.Plan{Path: route.Local, Paths: cost.Paths{Local: cost.Work{Tokens: 1000, Context: 1000}}}, LegSample{"m", "its id", route.Decode, c.at, c.at.Add(time.Second)})
	}
	if m := c.Known()["m"].Model; !m.Timed() || m.Compares() || q.learner != c.Of("m") {
		t.Errorf("model %+v", m)
	}
	if !slices.Equal(c.kinds, []string{"times_known"}) {
		t.Errorf("events %v", c.kinds)
	}
}

// TestModelsThatLeft: models that no worker serves any more and of which nothing is heard are
// forgotten after a while, those that are served or still answer are not; that there is no
// room for another is an event once in a while.
func TestModelsThatLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := workers.NewRegistry(func(eventlog.Event) {})
		serve := func(models ...string) {
			var specs []workers.Spec
			for _, m := range models {
				spec, err := workers.ParseSpec(workers.Decode, "http://"+m+",engine=vllm,connector=nixl,model="+m)
				if err != nil {
					t.Fatal(err)
				}
				specs = append(specs, spec)
			}
			if _, err := registry.Apply(workers.SourceFlag, specs); err != nil {
				t.Fatal(err)
			}
		}
		var events []eventlog.Event
		c := New(Options{Fleet: registry.Snapshot, Decisions: func() *decide.Options { return &decide.Options{} }, Event: func(e eventlog.Event) { events = append(events, e) }})
		ctx, stop := context.WithCancel(t.Context())
		var done sync.WaitGroup
		done.Go(func() { _ = c.Run(ctx) })
		defer done.Wait()
		defer stop()
		asked := func(model string) {
			p := &decide.Plan{Path: route.Local, Paths: cost.Paths{Local: cost.Work{Tokens: 10, Context: 10}}}
			c.Took(new(RequestSamples), p, LegSample{Model: model, Phase: route.Decode, Sent: time.Now(), First: time.Now()})
		}
		var adapters []string
		for i := range cost.MaxModels - 1 {
			adapters = append(adapters, fmt.Sprint("a", i))
		}
		serve(append(adapters, "base")...)
		for _, m := range append(adapters, "base") {
			asked(m)
		}
		<-time.After(2 * forgotten) // all are served
		if n := len(c.All()); n != cost.MaxModels {
			t.Fatalf("%d models are learned of", n)
		}
		serve("base", "new")
		for range 3 * int(forgotten/fullEvery) {
			asked("new")
			asked("a0") // its last requests
			<-time.After(fullEvery / 3)
		}
		if n := int(forgotten / fullEvery); len(events) != n || c.Refused() != 6 {
			t.Fatalf("%d refused, want 6; %d events, want %d", c.Refused(), len(events), n)
		}
		if e := events[0]; e.Kind != "costs_full" || e.Severity != eventlog.Warn || !strings.HasPrefix(e.Text, "model new: costs are learned of 64 models") {
			t.Errorf("%+v", e)
		}
		<-time.After(3 * renewed) // what happens at one moment has no order
		asked("new")
		left := slices.Sorted(maps.Keys(c.Known()))
		if !slices.Equal(left, []string{"a0", "base", "new"}) || c.Refused() != 6 {
			t.Errorf("left are %q, and %d were refused", left, c.Refused())
		}
	})
}
