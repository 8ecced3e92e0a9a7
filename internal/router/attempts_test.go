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

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/settings"
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
	if len(c.Earlier) != 1 || len(c.Legs) != 1 {
		t.Fatalf("%d earlier decisions and %d legs, want one of each", len(c.Earlier), len(c.Legs))
	}
	if d := cmp.Diff([]int{1, 2, 2}, []int{c.Earlier[0].Attempt, c.Attempt, c.Legs[0].Attempt}); d != "" {
		t.Errorf("attempts: earlier, last, of its leg (-want +got):\n%s", d)
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
	if wait := a.header.Get("Retry-After"); a.status != http.StatusTooManyRequests || string(a.body) != engineWords || wait != "7" {
		t.Errorf("%s, retry after %q; want 429 %s, retry after 7", a, wait, engineWords)
	}
	if len(c.Legs) != 1 || len(c.Earlier) < 2 {
		t.Errorf("%d decisions and %d legs: %q", len(c.Earlier)+1, len(c.Legs), c.Notes)
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
	if n := counted(c.Inputs.ISLSource) - before[c.Inputs.ISLSource]; n != 1 {
		t.Errorf("one prompt and a dry run count as %v prompts", n)
	}
}
