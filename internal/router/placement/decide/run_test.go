package decide

import (
	"cmp"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/affinity"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// idle is the ledger of a fleet without work.
var idle = ledger.New()

// nothing is a fleet without work, whose caches are empty.
type nothing struct{}

func (nothing) Overlap(*workers.Worker, *workers.Rank, *route.Tiers) int { return 0 }

func (nothing) Resident(*workers.Rank) int { return 0 }

func (nothing) Ledger() *ledger.Ledger { return idle }

func (nothing) Homes(string, uint64) affinity.Homes { return affinity.Homes{} }

// well makes a healthy worker.
func well(name string, role workers.Role) *workers.Worker {
	w := worker(name, role, workers.ConnectorNIXL, 1)
	w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	return w
}

func eject(w *workers.Worker) {
	w.State.SetEjection(&workers.Ejection{Since: time.Now(), Until: time.Now().Add(time.Hour), Reason: "by the test"})
}

func usual() *Options {
	return &Options{Decode: selector.RoundRobin, Prefill: selector.RoundRobin, Weights: selector.DefaultWeights(), Attempts: 3}
}

func prompt(tokens int) Criteria {
	return Criteria{Facts: api.Facts{Kind: api.Completion, Splittable: true, ISL: tokens, Source: route.FromIDs, N: 1, Prompts: 1, MaxTokens: 8, MinTokens: -1}}
}

// chosen are the names of the plan's workers, "-" for none.
func chosen(r *Run) (decode, prefill string) {
	decode, prefill = "-", "-"
	if r.Plan.Err != nil {
		return decode, prefill
	}
	if i := r.Plan.DecodeIndex; i >= 0 {
		decode = r.In.DecodePeers[i].Worker.Name
	}
	if i := r.Plan.PrefillIndex; i >= 0 && r.Plan.Path == route.Remote {
		prefill = r.In.PrefillPeers[i].Worker.Name
	}
	return decode, prefill
}

// TestEjectedComeBackWhenNobodyElseIsLeft: they are candidates then, and named, and
// nothing is done to them; those who failed this request, or were not asked for,
// stay out.
func TestEjectedComeBackWhenNobodyElseIsLeft(t *testing.T) {
	d1, d2, d3 := well("d1", workers.Decode), well("d2", workers.Decode), well("d3", workers.Decode)
	list := []*workers.Worker{d1, d2, d3}
	eject(d1)
	eject(d2)
	var r Run
	r.Begin(prompt(100))
	if e := r.NextPlan(usual(), list, 16, nothing{}); len(e.Readmit) != 0 {
		t.Errorf("%v come back although d3 is well", e.Readmit)
	}
	d3.State.SetDraining(true)
	e := r.NextPlan(usual(), list, 16, nothing{})
	if got, _ := chosen(&r); got != "d1" || !slices.Equal(e.Readmit, list[:2]) {
		t.Errorf("%s is chosen, %v come back: %v", got, e.Readmit, r.Plan.Err)
	}
	if d1.State.Ejection() == nil {
		t.Error("the decision itself has brought a worker back")
	}
	r.Failed(attempt.Failure{Worker: d1.State, Name: "d1", Phase: route.Decode, Reason: attempt.Connect})
	if e = r.NextPlan(usual(), list, 16, nothing{}); !slices.Equal(e.Readmit, list[1:2]) {
		t.Errorf("after d1 has failed %v come back", e.Readmit)
	}
	q := prompt(100)
	q.Pin.Decode = "d3"
	r.Begin(q)
	if e = r.NextPlan(usual(), list, 16, nothing{}); len(e.Readmit) != 0 || r.Plan.Err == nil {
		t.Errorf("d3 is asked for, %v come back", e.Readmit)
	}
}

// TestTrialThatAnotherRequestTook: two requests are decided for the last worker that
// is left, whose penalty is over. One gets the trial; the other comes too late for it,
// and brings the worker back instead of being given up.
func TestTrialThatAnotherRequestTook(t *testing.T) {
	reg := workers.NewRegistry(nil)
	if _, err := reg.Apply(workers.SourceFlag, []workers.Spec{
		{Name: "d1", URL: &url.URL{Scheme: "http", Host: "d1:1"}, Facts: workers.Facts{Role: workers.Decode, BlockSize: 16}, DP: 1},
		{Name: "d2", URL: &url.URL{Scheme: "http", Host: "d2:1"}, Facts: workers.Facts{Role: workers.Decode, BlockSize: 16}, DP: 1},
	}); err != nil {
		t.Fatal(err)
	}
	list, now := reg.Snapshot().Workers, time.Unix(1_800_000_000, 0)
	for _, w := range list {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	outliers := health.NewOutliers(reg, health.OutlierOptions{Connects: 1, Now: func() time.Time { return now }}, nil)
	a, _ := outliers.Admit(list[0])
	outliers.Report(a, health.ConnectError)
	list[1].State.SetCondition(workers.Condition{Health: workers.Unhealthy})
	now = now.Add(time.Minute)
	outliers.Step()

	var runs [2]Run
	admit := func(r *Run) bool {
		t.Helper()
		if r.Plan.Err != nil {
			t.Fatal(r.Plan.Err)
		}
		_, ok := outliers.Admit(r.In.DecodePeers[r.Plan.DecodeIndex].Worker)
		return ok
	}
	for i := range runs {
		runs[i].Begin(prompt(100))
		if e := runs[i].NextPlan(usual(), list, 16, nothing{}); len(e.Readmit) != 0 {
			t.Fatal("a worker that is open for a trial comes back")
		}
	}
	if !admit(&runs[0]) || admit(&runs[1]) {
		t.Fatal("a trial is for one request")
	}
	r := &runs[1]
	r.Failed(attempt.Failure{Worker: list[0].State, Name: "d1", Phase: route.Decode, Reason: attempt.Ejected})
	r.NextPlan(usual(), list, 16, nothing{})
	if next := r.NoChoice(); r.Plan.Err == nil || next.Step != attempt.LiftBans {
		t.Fatalf("%v: %v", r.Plan.Err, next.Step)
	}
	e := r.NextPlan(usual(), list, 16, nothing{})
	for _, w := range e.Readmit {
		outliers.Last(w)
	}
	if !admit(r) || r.History.Attempts != 0 {
		t.Errorf("d1 takes no request, after %d attempts", r.History.Attempts)
	}
}

// TestPrefillTurnIsReturned: once, by the first decision, and only if no prefill
// rank is used.
func TestPrefillTurnIsReturned(t *testing.T) {
	list := []*workers.Worker{well("d", workers.Decode), well("p", workers.Prefill)}
	s := usual()
	var r Run
	r.Begin(prompt(100))
	if r.NextPlan(s, list, 16, nothing{}).ReturnTurn {
		t.Error("a remote plan returns its turn")
	}
	s.Rule.Threshold = 1000
	r.Begin(prompt(100))
	if !r.NextPlan(s, list, 16, nothing{}).ReturnTurn || r.Attempt != 1 {
		t.Error("a local plan keeps its turn")
	}
	if r.NextPlan(s, list, 16, nothing{}).ReturnTurn || r.Attempt != 2 {
		t.Error("a retry returns the turn again")
	}
}

func TestClaims(t *testing.T) {
	list := []*workers.Worker{well("d", workers.Decode), well("p", workers.Prefill)}
	s := usual()
	var r Run
	r.Begin(prompt(100))
	r.NextPlan(s, list, 16, nothing{})
	d, p := r.Claims()
	if want := (ledger.Claim{ContextTokens: 100, LoadTokens: 100, BlockSize: 16}); d != want {
		t.Errorf("decode of a remote plan: %+v", d)
	}
	if want := (ledger.Claim{PrefillTokens: 100, BlockSize: 16}); p != want {
		t.Errorf("prefill of a remote plan: %+v", p)
	}
	s.Rule.Threshold = 1000
	r.Begin(prompt(100))
	r.NextPlan(s, list, 16, nothing{})
	d, p = r.Claims()
	if want := (ledger.Claim{ContextTokens: 100, PrefillTokens: 100, BlockSize: 16}); d != want || p != (ledger.Claim{}) {
		t.Errorf("a local plan: %+v, %+v", d, p)
	}
}

// TestRunGoesOn: what the policy says becomes part of the next decision.
func TestRunGoesOn(t *testing.T) {
	d1, d2, p := well("d1", workers.Decode), well("d2", workers.Decode), well("p", workers.Prefill)
	list := []*workers.Worker{d1, d2, p}
	for _, c := range []struct {
		reason attempt.Reason
		want   route.Reason
		words  string
	}{
		{attempt.Connect, route.ReasonFallback, "(connect)"},
		{attempt.BadParams, route.ReasonFallback, "(bad_params)"},
		{attempt.Ended, route.ReasonEnded, "ended the answer"},
	} {
		var r Run
		r.Begin(prompt(100))
		r.NextPlan(usual(), list, 16, nothing{})
		if d, f := chosen(&r); d != "d1" || f != "p" {
			t.Fatalf("%s and %s are chosen", d, f)
		}
		if next := r.Failed(attempt.Failure{Worker: p.State, Name: "p", Phase: route.Prefill, Reason: c.reason}); next.Step != attempt.FallBack {
			t.Fatalf("%s: %+v", c.reason, next)
		}
		r.NextPlan(usual(), list, 16, nothing{})
		if words := r.Plan.Words(&r.In); r.Plan.Path != route.Local || r.Plan.Reason != c.want || !strings.Contains(words, c.words) {
			t.Errorf("%s: %s because %s (%s)", c.reason, r.Plan.Path, r.Plan.Reason, words)
		}
	}

	var r Run
	r.Begin(prompt(100))
	r.NextPlan(usual(), list, 16, nothing{})
	if next := r.Failed(attempt.Failure{Worker: d1.State, Name: "d1", Phase: route.Decode, Reason: attempt.Reset, Sent: true, Other: p.State}); next.Step != attempt.Retry || !next.Budgeted {
		t.Fatalf("%+v", next)
	}
	if next := r.NoBudget(); next.Step != attempt.GiveUp || next.Why != attempt.NoBudget || len(r.History.Bans) != 1 {
		t.Errorf("without budget: %+v", next)
	}

	// Either worker of a pair may be at fault: nobody is left, until they are
	// taken back.
	pair := []*workers.Worker{d1, p}
	r.Begin(prompt(100))
	r.NextPlan(usual(), pair, 16, nothing{})
	r.Failed(attempt.Failure{Worker: d1.State, Name: "d1", Phase: route.Decode, Reason: attempt.Timeout, Sent: true, Other: p.State})
	if r.NextPlan(usual(), pair, 16, nothing{}); r.Plan.Err == nil {
		t.Fatalf("%s is tried again at once", r.In.DecodePeers[r.Plan.DecodeIndex].Worker)
	}
	if next := r.NoChoice(); next.Step != attempt.LiftBans {
		t.Fatalf("%+v", next)
	}
	if r.NextPlan(usual(), pair, 16, nothing{}); r.Plan.Err != nil || r.Attempt != 3 {
		t.Errorf("decision %d: %v", r.Attempt, r.Plan.Err)
	}
}

func TestDecideAllocatesNothing(t *testing.T) {
	var list []*workers.Worker
	for _, name := range []string{"a", "b", "c", "d"} {
		list = append(list, well("decode-"+name, workers.Decode), well("prefill-"+name, workers.Prefill))
	}
	var r Run
	s, q := usual(), prompt(100)
	s.Decode = selector.KV
	one := func() {
		r.Begin(q)
		r.NextPlan(s, list, 16, nothing{})
	}
	one()
	if n := testing.AllocsPerRun(100, one); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestFallbackLooksAtTheWholeFleet: whether somebody can prefill by itself is asked
// of all workers, also when the caller has kept of the plan only who was chosen.
func TestFallbackLooksAtTheWholeFleet(t *testing.T) {
	sglang := func(name string, role workers.Role) *workers.Worker {
		w := well(name, role)
		w.Engine, w.Connector = workers.SGLang, workers.ConnectorSGLang
		return w
	}
	d, p := sglang("d", workers.Decode), sglang("p", workers.Prefill)
	for _, c := range []struct {
		list []*workers.Worker
		want attempt.Step
	}{
		{[]*workers.Worker{d, p}, attempt.GiveUp},
		{[]*workers.Worker{d, p, sglang("z", workers.Aggregated)}, attempt.FallBack},
	} {
		var r Run
		r.Begin(prompt(100))
		r.NextPlan(usual(), c.list, 16, nothing{})
		if to, from := chosen(&r); to != "d" || from != "p" {
			t.Fatalf("%s and %s are chosen: %v", to, from, r.Plan.Err)
		}
		r.Compact()
		if next := r.Failed(attempt.Failure{Worker: p.State, Name: "p", Phase: route.Prefill, Reason: attempt.Connect}); next.Step != c.want {
			t.Errorf("of %d workers: %v, want %v", len(c.list), next.Step, c.want)
		}
	}
}

// holds is a fleet whose workers hold so many leading tokens of every prompt.
type holds struct {
	nothing
	tokens map[string]int
}

func (h holds) Overlap(w *workers.Worker, _ *workers.Rank, _ *route.Tiers) int {
	return h.tokens[w.Name]
}

// TestJudge: where the prompt is computed is measured by kv's costs, whatever the
// policy was and whatever weights and limits it had.
func TestJudge(t *testing.T) {
	list := []*workers.Worker{well("d1", workers.Decode), well("d2", workers.Decode), well("p1", workers.Prefill), well("p2", workers.Prefill)}
	fleet := holds{tokens: map[string]int{"d2": 32, "p1": 96, "p2": 16}}
	for _, c := range []struct {
		turn      uint64
		threshold int
		want      Judgement
	}{
		{0, 1000, Judgement{RegretBlocks: 2, CachedTokens: 0, MostTokens: 32}}, // local on d1
		{1, 1000, Judgement{RegretBlocks: 0, CachedTokens: 32, MostTokens: 32}},
		{0, 0, Judgement{RegretBlocks: 0, CachedTokens: 96, MostTokens: 96}}, // remote on p1
		{1, 0, Judgement{RegretBlocks: 5, CachedTokens: 16, MostTokens: 96}},
	} {
		s := usual()
		s.Rule.Threshold, s.Weights, s.Busy.PrefillTokens = c.threshold, selector.Weights{Queue: 9}, 1
		q := prompt(416)
		q.Chances[0].Turn, q.Chances[1].Turn = c.turn, c.turn
		var r Run
		r.Begin(q)
		r.NextPlan(s, list, 16, fleet)
		if got, ok := r.Judge(); !ok || got != c.want {
			t.Errorf("turn %d, threshold %d: %+v, %v, want %+v", c.turn, c.threshold, got, ok, c.want)
		}
		r.Compact()
		if _, ok := r.Judge(); ok {
			t.Errorf("turn %d, threshold %d: a compacted plan is judged", c.turn, c.threshold)
		}
	}
	var r Run
	// Without prefill ranks four answers wait for 26 blocks, at 1/16 of a block each.
	q := prompt(416)
	q.Chances[0].Turn = 0
	r.Begin(q)
	r.NextPlan(usual(), list[:2], 16, fleet)
	r.In.Decode.Candidates[0].ActiveRequests = 4
	if got, ok := r.Judge(); !ok || got != (Judgement{RegretBlocks: 8.5, MostTokens: 32}) {
		t.Errorf("without prefill ranks: %+v, %v", got, ok)
	}
	r.Begin(prompt(160))
	r.NextPlan(usual(), list[2:], 16, fleet)
	if _, ok := r.Judge(); ok {
		t.Error("a plan with an error is judged")
	}
}

// TestBlind: prompts are looked up in caches as soon as one part of the settings
// depends on what is found.
func TestBlind(t *testing.T) {
	for i, change := range []func(*Options){
		func(s *Options) { s.Decode = selector.KV },
		func(s *Options) { s.Prefill = selector.KVDynamo },
		func(s *Options) { s.Busy.PrefillTokens = 1 },
		func(s *Options) { s.Rule.PrefillGate = 1 },
		func(s *Options) { s.Rule.Threshold = 1 },
		func(s *Options) { s.Rule.Threshold, s.Rule.On = 1, OnEffISL },
	} {
		s := usual()
		if !s.Blind() {
			t.Fatal("nothing looks at caches")
		}
		if change(s); s.Blind() {
			t.Errorf("change %d: no decision would look at caches", i)
		}
	}
	s := usual()
	s.Rule.Threshold, s.Rule.On, s.Rule.DecodeGate = 1000, OnISL, 0.5
	if !s.Blind() {
		t.Error("the whole prompt's length needs no cache")
	}
}

// TestApart: what a request finds nothing of stands for others like it only while nobody
// is kept from it; the rest of a stream is kept from the engine that broke off.
func TestApart(t *testing.T) {
	d := well("d1", workers.Decode)
	s := usual()
	s.Continuations = 1
	var r Run
	r.Begin(prompt(100))
	r.NextPlan(s, []*workers.Worker{d}, 16, nothing{})
	if r.HasOwnBans() {
		t.Error("before anything has failed")
	}
	next := r.Failed(attempt.Failure{Worker: d.State, Name: "d1", Phase: route.Decode, Reason: attempt.Reset, Sent: true, Begun: true})
	if next.Step != attempt.Continue || !r.HasOwnBans() {
		t.Errorf("after its stream has broken off: %+v, apart: %v", next, r.HasOwnBans())
	}
}

// TestSilentAreTriedWhenNoOtherIsLeft: a worker that answers no probe, and whose port takes
// connections, is a candidate where the request has no plan without it.
func TestSilentAreTriedWhenNoOtherIsLeft(t *testing.T) {
	silence := func(w *workers.Worker, port bool) {
		w.State.SetCondition(workers.Condition{Health: workers.Unhealthy, Reason: "no answer", Silent: port, Since: time.Now()})
	}
	for _, c := range []struct {
		name, quiet, dead string
		fallback          Fallback
		decode, prefill   string
		back              []string
	}{
		{name: "one is well", quiet: "d1 p1 p2", decode: "d2"},
		{name: "a decode rank can prefill", quiet: "p1 p2", decode: "d1"},
		{name: "no decode rank may prefill", quiet: "p1", dead: "p2", fallback: FallbackError, decode: "d1", prefill: "p1", back: []string{"p1"}},
		{name: "no decode rank", quiet: "d2", dead: "d1", decode: "d2", prefill: "p1", back: []string{"d2"}},
		{name: "neither phase", quiet: "d1 p2", dead: "d2 p1", fallback: FallbackError, decode: "d1", prefill: "p2", back: []string{"d1", "p2"}},
		{name: "no port", dead: "d1 d2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			list := []*workers.Worker{well("d1", workers.Decode), well("d2", workers.Decode), well("p1", workers.Prefill), well("p2", workers.Prefill)}
			for _, w := range list {
				if strings.Contains(c.quiet, w.Name) || strings.Contains(c.dead, w.Name) {
					silence(w, strings.Contains(c.quiet, w.Name))
				}
			}
			s := usual()
			s.Rule.Fallback = c.fallback
			var r Run
			r.Begin(prompt(100))
			e := r.NextPlan(s, list, 16, nothing{})
			var back []string
			for _, w := range e.Readmit {
				back = append(back, w.Name)
			}
			if d, p := chosen(&r); d != cmp.Or(c.decode, "-") || p != cmp.Or(c.prefill, "-") || !slices.Equal(back, c.back) {
				t.Errorf("decode %q, prefill %q, back %q: %v; want %q, %q, %q", d, p, back, r.Plan.Err, c.decode, c.prefill, c.back)
			}
		})
	}
}

// TestWindows: a rank whose engine would refuse the request for its length is no choice, in
// either phase, and says so; an estimate counts where it is far beyond the window and another
// has a larger one.
func TestWindows(t *testing.T) {
	sized := func(name string, role workers.Role, window int) *workers.Worker {
		w := well(name, role)
		w.Engine, w.MaxModelLen = workers.VLLM, window
		return w
	}
	list := []*workers.Worker{
		sized("d1", workers.Decode, 8192), sized("d2", workers.Decode, 131072), sized("p1", workers.Prefill, 8192), sized("p2", workers.Prefill, 131072),
	}
	const small = "its window of 8192 tokens cannot hold "
	for _, c := range []struct {
		what            string
		change          func(*api.Facts)
		decode, prefill string // why the small ones are kept out
	}{
		{"short", func(*api.Facts) {}, "", ""},
		{"to the last token", func(f *api.Facts) { f.ISL = 8184 }, "", ""},
		{"a long answer", func(f *api.Facts) { f.MaxTokens = 8000 }, small + "1000 + 8000", ""},
		{"a long prompt", func(f *api.Facts) { f.ISL, f.MaxTokens = 9000, 500 }, small + "9000 + 500", small + "9000 + 1"},
		{"without a limit", func(f *api.Facts) { f.ISL, f.MaxTokens = 9000, -1 }, small + "9000 + 0", small + "9000 + 1"},
		{"no room for a token", func(f *api.Facts) { f.ISL, f.MaxTokens = 8192, -1 }, "", small + "8192 + 1"},
		{"a prompt that the engine may cut", func(f *api.Facts) { f.ISL, f.Truncated = 9000, true }, "", ""},
		{"several prompts", func(f *api.Facts) { f.ISL, f.Prompts = 9000, 2 }, "", ""},
		{"no prompt to an answer", func(f *api.Facts) { f.ISL, f.Kind = 9000, api.Embeddings }, "", ""},
		{"about as long", func(f *api.Facts) { f.ISL, f.Source = 16000, route.FromEstimate }, "", ""},
		{"far longer", func(f *api.Facts) { f.ISL, f.Source = 16385, route.FromEstimate }, small + "about 16385 + 8", small + "about 16385 + 1"},
		{"an estimate and a long answer", func(f *api.Facts) { f.MaxTokens, f.Source = 8000, route.FromEstimate }, small + "about 1000 + 8000", ""},
		{"far longer than all", func(f *api.Facts) { f.ISL, f.Source = 300000, route.FromEstimate }, "", ""},
	} {
		q := prompt(1000)
		c.change(&q.Facts)
		var r Run
		r.Begin(q)
		r.NextPlan(usual(), list, 16, nothing{})
		if got := [2]string{r.In.Decode.Candidates[0].KeptOut, r.In.Prefill.Candidates[0].KeptOut}; got != [2]string{c.decode, c.prefill} {
			t.Errorf("%s: d1 and p1 are kept out for %q", c.what, got)
		}
		if got := [2]string{r.In.Decode.Candidates[1].KeptOut, r.In.Prefill.Candidates[1].KeptOut}; got != [2]string{} {
			t.Errorf("%s: d2 and p2 are kept out for %q", c.what, got)
		}
		if d, p := chosen(&r); (c.decode == "") != (d == "d1") || p != "-" && (c.prefill == "") != (p == "p1") {
			t.Errorf("%s: %s and %s are chosen: %v", c.what, d, p, r.Plan.Err)
		}
	}
	var r Run
	q := prompt(9000)
	r.Begin(q)
	r.NextPlan(usual(), list[:1], 16, nothing{})
	if why := r.Refusal(); !strings.Contains(why.Error(), "1 rank(s): "+small+"9000 + 8") {
		t.Errorf("alone: %v", why)
	}
	// An engine that may cut the request is no choice only where another holds all of it.
	for _, w := range list {
		w.Engine = workers.SGLang
	}
	if r.NextPlan(usual(), list[:1], 16, nothing{}); r.In.Decode.Candidates[0].KeptOut != "" {
		t.Errorf("an engine that may cut is kept out: %s", r.In.Decode.Candidates[0].KeptOut)
	}
	q.Facts.ISL, q.Facts.MaxTokens = 8000, 500
	r.Begin(q)
	r.NextPlan(usual(), list, 16, nothing{})
	for _, in := range []*selector.Input{&r.In.Decode, &r.In.Prefill} {
		if why := in.Candidates[0].KeptOut; why != small+"8000 + 500" {
			t.Errorf("kept out for %q where another holds it", why)
		}
	}
	q.Pin.Decode = "d1"
	r.Begin(q)
	if r.NextPlan(usual(), list, 16, nothing{}); r.In.Decode.Candidates[0].KeptOut != "" {
		t.Errorf("kept out for %q where it is asked for", r.In.Decode.Candidates[0].KeptOut)
	}
	q.Pin.Decode = ""
	r.Begin(q)
	list[1].State.SetDraining(true)
	if r.NextPlan(usual(), list, 16, nothing{}); r.In.Decode.Candidates[0].KeptOut != "" {
		t.Errorf("kept out for %q where another that drains holds it", r.In.Decode.Candidates[0].KeptOut)
	}
}

// full is a fleet whose ledger is its own.
type full struct {
	nothing
	ledger *ledger.Ledger
}

func (f full) Ledger() *ledger.Ledger { return f.ledger }

// TestLongPromptsAreSpreadApart: what a rank was given because others are too small for it does
// not keep short prompts from it, and counts among those that take long ones.
func TestLongPromptsAreSpreadApart(t *testing.T) {
	small, large := well("small", workers.Aggregated), well("large", workers.Aggregated)
	small.Engine, small.MaxModelLen, large.Engine, large.MaxModelLen = workers.VLLM, 8192, workers.VLLM, 131072
	list, fleet := []*workers.Worker{small, large}, full{ledger: ledger.New()}
	fresh := func(tokens int) (of [2]int) {
		t.Helper()
		var r Run
		r.Begin(prompt(tokens))
		if r.NextPlan(usual(), list, 16, fleet); r.Plan.Err != nil {
			t.Fatal(r.Plan.Err)
		}
		claim, _ := r.Claims()
		if claim.Long != (tokens > 8192) {
			t.Errorf("a prompt of %d tokens: long is %v", tokens, claim.Long)
		}
		fleet.ledger.Reserve(r.In.DecodePeers[r.Plan.DecodeIndex].Rank, claim).Release()
		return [2]int{r.In.Decode.Candidates[0].FreshTokens, r.In.Decode.Candidates[1].FreshTokens}
	}
	fresh(20000)
	if got := fresh(20000); got != [2]int{0, 20000} {
		t.Errorf("a long prompt sees fresh tokens %v", got)
	}
	if got := fresh(1000); got != [2]int{} {
		t.Errorf("a short prompt sees fresh tokens %v", got)
	}
}
