// Package doctor examines a router and its engines: what is broken, what
// contradicts itself, and whether the KV cache and its transfer do what they
// should. Every finding comes from the fleet itself; nothing is changed.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/workload"
)

// Schema is the version of the JSON form.
const Schema = "dynctl.doctor/v1"

// State is how a check came out.
type State string

// The states.
const (
	OK   State = "ok"
	Warn State = "warn"
	Fail State = "fail"
	Skip State = "skip"
)

// Finding is one check.
type Finding struct {
	Check string `json:"check"`
	// Subject is the router, a worker or a rank.
	Subject string `json:"subject"`
	State   State  `json:"state"`
	Text    string `json:"text"`
	// Advice says what to do; empty when there is nothing.
	Advice string `json:"advice,omitempty"`
}

// Report is an examination.
type Report struct {
	Schema  string    `json:"schema"`
	Target  string    `json:"target"`
	Created time.Time `json:"created"`
	// Verdict is the outcome in one sentence.
	Verdict  string    `json:"verdict"`
	Findings []Finding `json:"findings"`
	Failed   int       `json:"failed"`
	Warned   int       `json:"warned"`
	// Transfer is null when no pair was looked at.
	Transfer *Matrix `json:"transfer"`
}

// Options set what is done.
type Options struct {
	Target *fleet.Target
	Model  string
	// Passive sends no request that an engine would have to compute.
	Passive bool
	// Tokens of the prompts of the probes; 0 means 40 blocks.
	Tokens int
	// Step, when set, is called before each step with what it examines.
	Step func(what string)
}

// exam is an examination under way.
type exam struct {
	o      Options
	r      *Report
	facts  *fleet.Facts
	http   *http.Client
	pool   workload.Pool
	salt   string
	number int
	down   map[string]bool // workers whose one finding says why they get no requests
	locked bool            // the data plane takes no request of this examination
}

// Run examines a target. The error is of what made the examination impossible.
func Run(ctx context.Context, o Options) (*Report, error) {
	r, err := run(ctx, o)
	if err == nil {
		r.Verdict = verdict(r)
	}
	return r, err
}

func run(ctx context.Context, o Options) (*Report, error) {
	if o.Step == nil {
		o.Step = func(string) {}
	}
	e := &exam{
		o: o, r: &Report{Schema: Schema, Target: o.Target.URL, Created: time.Now(), Findings: []Finding{}},
		http: &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: o.Target.TLS}},
		salt: fmt.Sprint(time.Now().UnixNano()), down: map[string]bool{},
	}
	o.Step("the router")
	status, err := e.clock(ctx)
	if err != nil {
		return nil, err
	}
	list, err := o.Target.Admin.Workers(ctx)
	if err != nil {
		return nil, err
	}
	e.router(ctx, status, list.Workers)
	e.learned(status)
	e.kubernetes(status.Kubernetes)
	list.Workers = e.reach(ctx, list.Workers)
	e.contradictions(list.Workers)
	e.troubles(list.Workers)
	e.feeds(list.Workers)
	model := o.Model
	if model == "" && len(status.Models) > 0 {
		model = status.Models[0]
	}
	if e.facts, err = o.Target.Describe(ctx, model); err != nil {
		e.add("engines", "router", Fail, err.Error(), "")
		return e.r, nil
	}
	if e.locked && !o.Passive {
		e.add("probes", "engines", Skip, "no request was sent: the data plane does not take any", "")
		return e.r, ctx.Err()
	}
	var own bool
	o.Step("the tokenizer")
	e.pool, own = o.Target.Pool(ctx, e.facts.Model)
	e.tokenizer(ctx, own)
	if o.Passive {
		e.add("cache probe", "engines", Skip, "passive: no request was sent", "")
		e.add("transfer", "engines", Skip, "passive: no request was sent", "")
		return e.r, ctx.Err()
	}
	e.cacheProbe(ctx)
	e.transfer(ctx)
	return e.r, ctx.Err()
}

func (e *exam) add(check, subject string, s State, text, advice string) {
	e.r.Findings = append(e.r.Findings, Finding{check, subject, s, text, advice})
	switch s {
	case Fail:
		e.r.Failed++
	case Warn:
		e.r.Warned++
	case OK, Skip:
	}
}

func (e *exam) get(ctx context.Context, u string) (code int, date time.Time, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return 0, date, err
	}
	e.o.Target.Authorize(req)
	resp, err := e.http.Do(req)
	if err != nil {
		return 0, date, err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 8<<20)) // only the status counts
	date, _ = http.ParseTime(resp.Header.Get("Date"))
	return resp.StatusCode, date, nil
}

// count is "1 check" or "2 checks".
func count(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

func orNone(s string) string { return cmp.Or(s, "no reason given") }
