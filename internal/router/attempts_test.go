package router_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// decisionsAreNumbered: a worker that is ejected between the choice and the
// dispatch costs the request another decision, which has a number of its own;
// what the receipt has of a request is not recorded twice.
func decisionsAreNumbered(t *testing.T, r *rig, _ *tap, hook *onDecision) {
	var mu sync.Mutex
	var numbers []int
	hook.set(func(d *trace.Decision) {
		mu.Lock()
		defer mu.Unlock()
		if numbers = append(numbers, d.Attempt); len(numbers) == 1 {
			eject(d)
		}
	})
	r.set(func(c *settings.Config) { c.Retry.Attempts = 1 })
	const plans = `dynctl_stage_seconds_count{stage="plan"}`
	planned := max(0, r.metric(plans))
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": "words", "max_tokens": 2}))
	if a.status != http.StatusOK {
		t.Fatalf("%s", a)
	}
	mu.Lock()
	if !slices.Equal(numbers, []int{1, 2}) {
		t.Errorf("the observer got the decisions %d", numbers)
	}
	mu.Unlock()
	c := r.receipt(a.header.Get("X-Dynctl-Decision"))
	if len(c.Earlier) != 1 || c.Earlier[0].Attempt != 1 || c.Attempt != 2 || len(c.Legs) != 1 || c.Legs[0].Attempt != 2 {
		t.Errorf("the receipt has attempt %d after %+v, legs %+v", c.Attempt, c.Earlier, c.Legs)
	}
	for i, n := range c.Notes {
		if slices.Contains(c.Notes[:i], n) {
			t.Errorf("a note twice: %q", c.Notes)
		}
	}
	if n := r.metric(plans) - planned; n != 1 {
		t.Errorf("the stages of one request are counted %v times", n)
	}
}

// failuresOfARank: what an engine refuses because of the request, or for lack of
// room, is no failure of its rank; what it breaks is.
func failuresOfARank(t *testing.T, r *rig, p *tap) {
	failures := func() uint64 {
		fleet, err := r.Admin.Workers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return fleet.Workers[0].Ranks[0].Failures
	}
	for _, c := range []struct {
		status   int
		failures uint64
	}{{http.StatusBadRequest, 0}, {http.StatusTooManyRequests, 0}, {http.StatusInternalServerError, 1}} {
		p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
			if q.URL.Path == "/v1/completions" {
				w.WriteHeader(c.status)
				return true
			}
			return false
		})
		before := failures()
		a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 1), "max_tokens": 2}))
		legs := uint64(len(r.receipt(a.header.Get("X-Dynctl-Decision")).Legs))
		if n := failures() - before; legs == 0 || n != c.failures*legs {
			t.Errorf("%d, answered %s: %d failures of %d legs", c.status, a, n, legs)
		}
	}
}

// refuseWith has engines whose name has a prefix refuse generations with a status.
func refuseWith(status int, prefix string) func(string, http.ResponseWriter, *http.Request, []byte) bool {
	return func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" || !strings.HasPrefix(engine, prefix) {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, engineWords)
		return true
	}
}

const engineWords = `{"error":{"message":"the engine's own words"}}`

// healAll ends the ejections of all engines.
func (r *rig) healAll() {
	for _, e := range r.Sim.Engines() {
		r.Router.Heal(e.Name())
	}
}

// TestRefusals: what clients get where engines refuse or break, and no other is left.
func TestRefusals(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant,model=1a+1p1d:profile=instant,model=1p1d+2a:profile=instant,model=2a")
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{
		{"a lone worker keeps the budget", loneWorkerKeepsTheBudget}, // the first: no retry is granted yet
		{"suspects cost no attempt", suspectsThatComeBackCostNoAttempt},
		{"the engine's own answer", enginesOwnAnswer},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.set(nil)
			p.reset()
			r.set(func(*settings.Config) {})
			r.healAll()
			c.test(t, r.in(t), p)
		})
	}
}

// loneWorkerKeepsTheBudget: a worker that refuses everything and has nobody beside it
// takes nothing of the budget for retries that others need.
func loneWorkerKeepsTheBudget(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Retry.Budget = 0 })
	p.set(refuseWith(http.StatusTooManyRequests, ""))
	for i := range 20 { // 10 retries are granted in any case
		a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "1a", "prompt": ids(100, i), "max_tokens": 2}))
		if notes := r.receipt(a.header.Get("X-Dynctl-Decision")).Notes; strings.Contains(strings.Join(notes, ""), "budget") {
			t.Fatalf("request %d: %q", i, notes)
		}
	}
}

// suspectsThatComeBackCostNoAttempt: with one pair whose legs suspect each
// other, the engines are asked as often as there are attempts.
func suspectsThatComeBackCostNoAttempt(t *testing.T, r *rig, p *tap) {
	const attempts = 3
	r.set(func(c *settings.Config) {
		c.Retry = settings.Retry{Attempts: attempts, Budget: 1}
		c.Routing.PrefillFallback = "error"
	})
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" || !strings.HasPrefix(engine, "decode") {
			return false
		}
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "1p1d", "prompt": ids(200, 3), "max_tokens": 2}))
	if n := len(p.legsOf("decode")); n != attempts {
		t.Errorf("%d attempts, want %d: %s %q", n, attempts, a, r.receipt(a.header.Get("X-Dynctl-Decision")).Notes)
	}
}

// enginesOwnAnswer: where no other attempt did better the client gets what the engine
// said, also where nobody else could be asked; and what was not asked is no retry.
func enginesOwnAnswer(t *testing.T, r *rig, p *tap) {
	for n, c := range []struct{ model, refuses string }{{"1a", "aggregated"}, {"1p1d", "decode"}, {"2a", "aggregated"}} {
		for _, status := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusInternalServerError} {
			t.Run(fmt.Sprint(c.model, " ", status), func(t *testing.T) {
				r := r.in(t)
				r.healAll()
				before := r.status().Traffic.Retries
				p.set(refuseWith(status, c.refuses))
				a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": c.model, "prompt": ids(100, 1000*n+status), "max_tokens": 2}))
				got := r.receipt(a.header.Get("X-Dynctl-Decision"))
				if a.status != status || string(a.body) != engineWords || a.header.Get("Retry-After") != "7" || got.Outcome.Status != status {
					t.Errorf("%s, Retry-After %q; the receipt has %d, notes %q", a, a.header.Get("Retry-After"), got.Outcome.Status, got.Notes)
				}
				attempts := map[int]bool{}
				for _, l := range got.Legs {
					attempts[l.Attempt] = true
				}
				if n := r.status().Traffic.Retries - before; int(n) != len(attempts)-1 {
					t.Errorf("%d attempts sent a leg, and %d retries are counted", len(attempts), n)
				}
			})
		}
	}
}

// answerOutlivesAnEjection: an attempt that sent nothing, since its worker had been
// ejected, does not take the place of an engine's answer.
func answerOutlivesAnEjection(t *testing.T, r *rig, p *tap, hook *onDecision) {
	var first atomic.Value
	hook.set(func(d *trace.Decision) {
		if !first.CompareAndSwap(nil, d.DecodeRank) && d.DecodeRank != "" && d.DecodeRank != first.Load() {
			eject(d)
		}
	})
	p.set(refuseWith(http.StatusTooManyRequests, ""))
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, 1), "max_tokens": 2}))
	c := r.receipt(a.header.Get("X-Dynctl-Decision"))
	if a.status != http.StatusTooManyRequests || string(a.body) != engineWords || a.header.Get("Retry-After") != "7" || len(c.Legs) != 1 || len(c.Earlier) < 2 {
		t.Errorf("%s after %d decisions and %d legs: %q", a, len(c.Earlier)+1, len(c.Legs), c.Notes)
	}
}

// TestWorkerRefusesTheRoutersKey: a worker whose engine refuses the key that the router has
// for it costs no client anything while there are others, and is ejected as any that
// fails; alone it is named, and nobody is told that its own key is wrong. What an engine
// makes of a client's own key is the client's.
func TestWorkerRefusesTheRoutersKey(t *testing.T) {
	t.Parallel()
	p := &tap{}
	specs := p.specs(t)
	fleet := "2a:profile=instant,model=a401+2a:profile=instant,model=a403"
	for _, model := range []string{"d401", "d403", "p401", "p403"} {
		fleet += "+2p2d:profile=instant,model=" + model
	}
	fleet += "+1a:profile=instant,model=keyed+1a:profile=instant,model=open"
	r := startWith(t, loopback.Options{Fleet: fleet, Specs: func(in []workers.Spec) []workers.Spec {
		in = specs(in)
		for i := range in {
			if in[i].Name != "aggregated-5" {
				in[i].APIKey = "key"
			}
		}
		return in
	}}, func(c *settings.Config) {
		c.Routing.Policy, c.Routing.Threshold.Tokens, c.Retry.Budget = "round_robin", 1, 1
	})
	for _, c := range []struct {
		model, refuses string
		status         int
	}{
		{"a401", "aggregated-0", http.StatusUnauthorized},
		{"a403", "aggregated-2", http.StatusForbidden},
		{"d401", "decode-0", http.StatusUnauthorized},
		{"d403", "decode-2", http.StatusForbidden},
		{"p401", "prefill-4", http.StatusUnauthorized},
		{"p403", "prefill-6", http.StatusForbidden},
	} {
		t.Run(c.model, func(t *testing.T) {
			r := r.in(t)
			ejected, failing := len(r.events("outlier_ejected")), len(r.events("worker_failing"))
			p.set(refuseWith(c.status, c.refuses))
			for i := range 20 {
				if a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": c.model, "prompt": ids(100, i), "max_tokens": 2})); a.status != http.StatusOK {
					t.Fatalf("request %d: %s", i, a)
				}
			}
			if e := r.events("outlier_ejected")[ejected:]; len(e) != 1 || e[0].Worker != c.refuses {
				t.Errorf("ejections %+v", e)
			}
			if e := r.events("worker_failing")[failing:]; len(e) == 0 || e[0].Worker != c.refuses || !strings.Contains(e[0].Text, "refuses the router's key") {
				t.Errorf("events %+v", e)
			}
		})
	}
	for _, c := range []struct {
		model  string
		status int
		text   string
	}{{"keyed", http.StatusBadGateway, "aggregated-4: it refuses the router's key"}, {"open", http.StatusUnauthorized, engineWords}} {
		p.set(refuseWith(http.StatusUnauthorized, ""))
		if a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": c.model, "prompt": ids(100, 1), "max_tokens": 2})); a.status != c.status || !strings.Contains(string(a.body), c.text) {
			t.Errorf("with the model %q: %s", c.model, a)
		}
	}
}

// dryRunReadsTheRequest: a dry run takes the session and the adapter from the
// body, as the request itself does.
func dryRunReadsTheRequest(t *testing.T, r *rig, _ *tap) {
	r.set(func(c *settings.Config) { c.Routing.SessionField = "user" })
	counted := func(source string) float64 {
		return max(0, r.metric(fmt.Sprintf("dynctl_tokenize_total{source=%q}", source)))
	}
	before := map[string]float64{}
	for _, source := range []string{"ids", "engine", "local", "estimate"} {
		before[source] = counted(source)
	}
	body := object{"model": "sim", "prompt": "words", "max_tokens": 2, "user": "ann"}
	a := r.send(http.MethodPost, "/v1/completions", encode(t, body))
	c := r.receipt(a.header.Get("X-Dynctl-Decision"))
	d, err := r.Admin.Route(t.Context(), routeOf(t, "/v1/completions", body))
	if err != nil {
		t.Fatal(err)
	}
	var dry receipt.Receipt
	if err := json.Unmarshal(d.Receipt, &dry); err != nil {
		t.Fatal(err)
	}
	if c.Inputs.SessionKey == 0 || dry.Inputs.SessionKey != c.Inputs.SessionKey {
		t.Errorf("session %d, in the dry run %d", c.Inputs.SessionKey, dry.Inputs.SessionKey)
	}
	if n := counted(string(c.Inputs.ISLSource)) - before[string(c.Inputs.ISLSource)]; n != 1 {
		t.Errorf("one prompt and a dry run count as %v prompts", n)
	}
}
