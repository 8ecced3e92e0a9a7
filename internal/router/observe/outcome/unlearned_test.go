package outcome

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// serving are usable workers of model m.
func serving(t *testing.T, specs ...string) *workers.Registry {
	t.Helper()
	r := workers.NewRegistry(func(eventlog.Event) {})
	var list []workers.Spec
	for _, text := range specs {
		role, rest, _ := strings.Cut(text, " ")
		spec, err := workers.ParseSpec(workers.Role(role), rest+",model=m")
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, spec)
	}
	if _, err := r.Apply(workers.SourceFlag, list); err != nil {
		t.Fatal(err)
	}
	for _, w := range r.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	return r
}

// TestUnlearned: each reason for which something is not known is found from what is known, the
// settings and the fleet, says in words what is missing, and is overdue after enough requests.
func TestUnlearned(t *testing.T) {
	const pair, one, bound = "pair", "one", "bound"
	fleets := map[string]*workers.Registry{
		pair:  serving(t, "prefill http://127.0.0.1:1,engine=vllm,connector=nixl", "decode http://127.0.0.1:2,engine=vllm,connector=nixl"),
		one:   serving(t, "aggregated http://127.0.0.1:1,engine=vllm"),
		bound: serving(t, "prefill http://127.0.0.1:1,engine=sglang,connector=sglang", "decode http://127.0.0.1:2,engine=sglang,connector=sglang"),
		"":    serving(t),
	}
	both := &cost.Model{Prices: cost.Prices{Step: cost.StepModel{1}}}
	all := func(edit func(*cost.Known)) cost.Known {
		k := cost.Known{Requests: 300, Local: 20, Prefill: 20, Transfer: 20, Stretches: 20, Wanted: 12, Model: both}
		edit(&k)
		return k
	}
	auto, fixed := decide.Rule{Auto: true, Threshold: 2048}, func(n int) decide.Rule { return decide.Rule{Threshold: n} }
	for name, c := range map[string]struct {
		fleet  string
		policy selector.Policy
		rule   decide.Rule
		known  cost.Known
		want   string // reasons, in order
		due    bool
		text   string
	}{
		"all is known":         {pair, selector.KV, auto, all(func(*cost.Known) {}), "", false, ""},
		"unstable":             {pair, selector.KV, auto, all(func(k *cost.Known) { k.Model, k.Calm = nil, 77 }), "paths unstable", true, "77 more without"},
		"no steps":             {pair, selector.KV, auto, all(func(k *cost.Known) { k.Model, k.Stretches = &cost.Model{}, 0 }), "times no_steps", true, "no answer to 300 requests"},
		"few steps":            {pair, selector.KV, auto, all(func(k *cost.Known) { k.Model, k.Stretches, k.Requests = &cost.Model{}, 5, 100 }), "times few_steps", false, "5 of 12 stretches"},
		"few prompts":          {pair, selector.KV, fixed(2048), all(func(k *cost.Known) { k.Model, k.Local, k.Transfer = nil, 9, 4 }), "times few_samples, paths threshold_is_set", true, "9 of 12 prompts on decode ranks were measured, and 4 of 6 transfers"},
		"times decide nothing": {pair, selector.LeastLoaded, fixed(2048), all(func(k *cost.Known) { k.Model, k.Stretches = nil, 0 }), "", false, ""},
		"nothing is streamed":  {pair, selector.LeastLoaded, auto, all(func(k *cost.Known) { k.Model, k.Local, k.Transfer = nil, 0, 0 }), "paths not_streamed", true, "no answer to 300 requests showed its first token"},
		"no request yet":       {pair, selector.LeastLoaded, auto, cost.Known{}, "paths never_taken", false, "none of 0 prompts was computed on a decode rank"},
		"never remote":         {pair, selector.KV, auto, all(func(k *cost.Known) { k.Prefill, k.Transfer, k.Since = 0, 0, [3]uint64{0, 300, 300} }), "paths never_taken", true, "none of 300 prompts was prefilled remotely; one request in 20 takes it to learn"},
		"never local":          {pair, selector.KV, auto, all(func(k *cost.Known) { k.Local, k.Since = 0, [3]uint64{300} }), "paths never_taken", true, "none of 300 prompts was computed on a decode rank"},
		"few transfers":        {pair, selector.KV, auto, all(func(k *cost.Known) { k.Transfer, k.Since = 3, [3]uint64{0, 9, 9} }), "paths few_samples", false, "3 of 6 prompts were prefilled remotely"},
		"stale": {pair, selector.KV, auto, all(func(k *cost.Known) {
			k.Lacks, k.Age, k.Since = 1<<cost.LocalLeg, [3]time.Duration{340 * time.Second}, [3]uint64{212}
		}), "paths stale", true, "no prompt was computed on a decode rank for 340 s and 212 requests"},
		"stale, in few requests": {pair, selector.KV, auto, all(func(k *cost.Known) {
			k.Lacks, k.Age, k.Since = 1<<cost.TransferLeg, [3]time.Duration{0, 0, time.Hour}, [3]uint64{0, 0, 3}
		}), "paths stale", false, "no prompt was prefilled remotely for 3600 s and 3 requests"},
		"stale, and a threshold decides": {pair, selector.KV, fixed(2048), all(func(k *cost.Known) { k.Lacks = 7 }), "", false, ""},
		"threshold 0":                    {pair, selector.KV, fixed(0), all(func(k *cost.Known) { k.Local = 0 }), "paths threshold_is_set", false, "routing.threshold is 0: no prompt is computed on a decode rank"},
		"threshold never":                {pair, selector.KV, fixed(1 << 20), all(func(k *cost.Known) { k.Transfer = 0 }), "paths threshold_is_set", false, "routing.threshold is 1,048,576: 0 prompts were prefilled remotely"},
		"only local":                     {one, selector.KV, auto, all(func(k *cost.Known) { k.Transfer = 0 }), "paths one_path", true, "no usable prefill worker can send KV"},
		"only local, and meant":          {one, selector.KV, fixed(0), all(func(k *cost.Known) { k.Transfer = 0 }), "", false, ""},
		"only remote":                    {bound, selector.KV, auto, all(func(k *cost.Known) { k.Local = 0 }), "paths one_path", true, "every decode worker needs a prefill worker"},
		"no workers":                     {"", selector.KV, auto, all(func(k *cost.Known) { k.Local = 0 }), "", false, ""},
	} {
		list := unlearned(&c.known, &decide.Options{Decode: c.policy, Prefill: c.policy, Rule: c.rule}, fleets[c.fleet].Snapshot().Model("m"))
		var got []string
		for i := range list {
			u := &list[i]
			got = append(got, u.Of+" "+u.Reason)
			if u.Advice == "" || u.Effect() == "" {
				t.Errorf("%s: nothing to do is said: %+v", name, u)
			}
		}
		if strings.Join(got, ", ") != c.want || c.want != "" && (list[0].Overdue != c.due || !strings.Contains(list[0].Text, c.text)) {
			t.Errorf("%s: %+v, want %s, overdue %v: %s", name, list, c.want, c.due, c.text)
		}
	}
}

// TestUnlearnedIsReported: what is overdue is one event, until it is known or another reason
// holds; both changes that one revision brings are events.
func TestUnlearnedIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := serving(t, "prefill http://127.0.0.1:1,engine=vllm,connector=nixl", "decode http://127.0.0.1:2,engine=vllm,connector=nixl")
		var mu sync.Mutex
		var events []eventlog.Event
		decisions := &decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights(), Rule: decide.Rule{Auto: true, Threshold: 2048}}
		c := New(Options{Ledger: ledger.New(), Fleet: registry.Snapshot, Decisions: func() *decide.Options { return decisions }, Event: func(e eventlog.Event) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, e)
		}})
		ctx, stop := context.WithCancel(t.Context())
		var done sync.WaitGroup
		done.Go(func() { _ = c.Run(ctx) })
		defer done.Wait()
		defer stop()
		kinds := func() (list []string) {
			<-time.After(3 * renewed)
			mu.Lock()
			defer mu.Unlock()
			for i := range events {
				e := &events[i]
				list = append(list, strings.TrimSpace(e.Kind+" "+field(e, "of")+" "+field(e, "reason")))
			}
			events = nil
			return list
		}
		want := func(what string, want ...string) {
			t.Helper()
			if got := kinds(); strings.Join(got, ", ") != strings.Join(want, ", ") {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
		}
		rank := registry.Snapshot().Workers[0].Ranks[0]
		request := func(path route.Path, streamed bool) {
			q := &RequestSamples{}
			c.Begins(q, "m", 16)
			now := time.Now()
			p := &decide.Plan{Path: path, Paths: cost.Paths{Local: cost.Work{Tokens: 1000, Context: 1000}, Prefill: cost.Work{Tokens: 1000, Context: 1000}, Transfer: cost.Work{Tokens: 1000}}}
			if path == route.Remote {
				c.Took(q, p, LegSample{Model: "m", Phase: route.Prefill, Sent: now, First: now.Add(30 * time.Millisecond)})
			}
			if streamed {
				c.Took(q, p, LegSample{Model: "m", Phase: route.Decode, Sent: now, First: now.Add(50 * time.Millisecond)})
				c.Runs(q, "m", rank, 1, now)
				q.Ran(rank, 40, now.Add(time.Second))
				q.Ended()
			}
			<-time.After(100 * time.Millisecond)
		}
		for range overdue - 1 {
			request(route.Local, false)
		}
		want("before it is overdue")
		request(route.Local, false)
		want("nothing is streamed", "costs_unlearned times no_steps", "costs_unlearned paths not_streamed")
		want("nothing is new")
		c.o.Ledger.Reserve(rank, ledger.Claim{BlockSize: 16}).FirstToken()
		for range 20 {
			request(route.Local, true)
		}
		want("all are local", "costs_unlearned paths never_taken", "times_known")
		for range 8 {
			request(route.Remote, true)
		}
		want("both paths were taken", "costs_known")
		if list := c.Costs(); len(list) != 1 || !list[0].TimesKnown || !list[0].PathsKnown || len(list[0].Crossings) != 3 || len(list[0].Unlearned) != 0 {
			t.Errorf("%+v", list)
		}
		<-time.After(3 * time.Minute)
		for range overdue {
			request(route.Local, true)
		}
		want("no prompt was prefilled remotely for minutes", "costs_unlearned paths stale")
		if e := c.Costs()[0].Unlearned[0]; !e.Overdue || e.Severity() != eventlog.Info {
			t.Errorf("%+v", e)
		}
	})
}

// field is a field of an event; empty without it.
func field(e *eventlog.Event, name string) string {
	s, _ := e.Fields[name].(string)
	return s
}
