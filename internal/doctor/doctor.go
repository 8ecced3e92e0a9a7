// Package doctor examines a router and its engines: what is broken, what
// contradicts itself, and whether the KV cache and its transfer do what they
// should. Every finding comes from the fleet itself; nothing is changed.
package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/workload"
	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/table"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
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
	e.reach(ctx, list.Workers)
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

// clock asks for the status and sees by how much the router's clock is off:
// the middle of the question against the time in the answer.
func (e *exam) clock(ctx context.Context) (*admin.Status, error) {
	var s *admin.Status
	best, skew := time.Duration(math.MaxInt64), time.Duration(0)
	for range 5 {
		t0 := time.Now()
		got, err := e.o.Target.Admin.Status(ctx)
		if err != nil {
			return nil, err
		}
		if took := time.Since(t0); took < best {
			best, skew, s = took, got.Now.Sub(t0.Add(took/2)), got
		}
	}
	text := fmt.Sprintf("the router's clock is %+.1f ms from this one (+-%.1f)", float64(skew.Microseconds())/1000, float64(best.Microseconds())/2000)
	if skew.Abs() > best/2+50*time.Millisecond {
		e.add("clock", "router", Warn, text, "events and receipts are hard to put beside logs of other machines: run a time service")
	} else {
		e.add("clock", "router", OK, text, "")
	}
	return s, nil
}

func (e *exam) router(ctx context.Context, s *admin.Status, ws []admin.Worker) {
	facts := fmt.Sprintf("version %s, %d workers, policy %s, %s", s.Version, s.Workers.Total, s.Policy, admin.Rule(s.ThresholdTokens, s.ThresholdOn, s.ThresholdAuto, s.Costs))
	switch own := ownReasons(s.Reasons, ws); {
	case s.State == "ready":
		e.add("router", s.Name, OK, "ready, "+facts, "")
	case s.State == "degraded" && len(own) == 0:
		e.add("router", s.Name, OK, "degraded by what is found of its workers, "+facts, "")
	default:
		e.add("router", s.Name, Warn, fmt.Sprintf("%s: %s", s.State, strings.Join(own, "; ")), "dynctl workers list shows each worker")
	}
	code, _, err := e.get(ctx, e.o.Target.URL+"/v1/models")
	switch {
	case err != nil:
		e.add("data plane", e.o.Target.URL, Fail, err.Error(), "is this the address that clients use? give --data URL")
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		e.locked = true
		text := "requires an API key, and none was given"
		if e.o.Target.APIKey != "" {
			text = fmt.Sprintf("does not accept the API key (GET /v1/models answers %d)", code)
		}
		e.add("data plane", e.o.Target.URL, Fail, text, "give --api-key-file FILE; dynctl keys new makes a key")
	case code != http.StatusOK:
		e.add("data plane", e.o.Target.URL, Fail, fmt.Sprintf("GET /v1/models answers %d", code), "")
	default:
		e.add("data plane", e.o.Target.URL, OK, "answers; models "+strings.Join(s.Models, ", "), "")
	}
	for _, l := range []struct {
		name   string
		access admin.ListenerAccess
	}{{"data plane", s.Access.Data}, {"admin API", s.Access.Admin}} {
		if why := l.access.Exposed(); why != "" {
			e.add("access", l.name+" "+l.access.Listen, Warn, why, "docs/security.md shows what to ask clients for")
		} else if l.access.Listen != "" {
			e.add("access", l.name+" "+l.access.Listen, OK, l.access.Who(), "")
		}
	}
	if s.Traffic.Recomputes > 0 {
		e.add("silent recompute", "router", Fail, fmt.Sprintf("the decode engine computed the prompt of %s again that had been prefilled remotely, since the start", count(int(s.Traffic.Recomputes), "request")), "dynctl explain of one of them shows its workers; check the KV connector of both sides")
	}
	if s.Traffic.Fallbacks > 0 {
		e.add("fallback", "router", Warn, count(int(s.Traffic.Fallbacks), "request")+" fell back to local prefill since the start", "")
	}
}

// learned shows where costs change the path, and what of them is not known and why.
func (e *exam) learned(s *admin.Status) {
	for i := range s.Costs {
		m := &s.Costs[i]
		if len(m.Crossings) > 0 {
			var loads []string
			for k := range m.Crossings {
				if !m.Crossings[k].Unknown() { // learning has why
					loads = append(loads, m.Crossings[k].Sentence())
				}
			}
			if len(loads) > 0 && !s.ThresholdAuto {
				loads = append(loads, fmt.Sprintf("routing.threshold is %v and decides", s.Threshold()))
			}
			if len(loads) > 0 {
				e.add("crossing", m.Model, OK, strings.Join(loads, "; "), "")
			}
		}
		for k := range m.Unlearned {
			u, state := &m.Unlearned[k], Skip
			if u.Overdue && u.Severity() == eventlog.Warn {
				state = Warn
			}
			e.add("learning", m.Model, state, u.Effect()+": "+u.Text, u.Advice)
		}
	}
}

// ownReasons leaves out of a router's reasons those that findings of its workers repeat:
// a worker that is not usable, and ranks whose events are not trusted.
func ownReasons(reasons []string, ws []admin.Worker) []string {
	return slices.DeleteFunc(slices.Clone(reasons), func(reason string) bool {
		if strings.Contains(reason, "KV events are not trusted") {
			return true
		}
		return slices.ContainsFunc(ws, func(w admin.Worker) bool {
			return !w.Usable && strings.HasPrefix(reason, "worker "+w.Name+" is not usable")
		})
	})
}

// kubernetes reports whether the pods of a cluster are followed, and which are found
// and are no workers; k is nil where none are looked for.
func (e *exam) kubernetes(k *admin.Kubernetes) {
	if k == nil {
		return
	}
	lost := false
	for _, w := range k.Watches {
		subject := w.Namespace + " " + w.Selector
		switch {
		case w.Error != "":
			lost = true
			e.add("kubernetes", subject, Fail, "the pods are not followed since "+w.Since.Format(time.RFC3339)+": "+w.Error, "the workers stay as they were until then; docs/kubernetes.md has the rights that are needed")
		case !w.Synced:
			lost = true
			e.add("kubernetes", subject, Warn, "the pods were not listed yet", "")
		}
	}
	if !lost {
		e.add("kubernetes", k.Server, OK, fmt.Sprintf("%d pods are followed: %d workers, %d without an address yet", k.Pods, k.Workers, k.Waiting), "")
	}
	for _, p := range k.LeftOut {
		e.add("kubernetes", p.Pod, Warn, "a selector finds it, and it is no worker: "+p.Reason, "narrow the selector if that is right")
	}
	if more := k.LeftOutCount - len(k.LeftOut); more > 0 {
		e.add("kubernetes", k.Server, Warn, fmt.Sprintf("%d more pods are found and are no workers", more), "")
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

// reach asks every engine directly: is it there, healthy, and what time is it.
func (e *exam) reach(ctx context.Context, ws []admin.Worker) {
	if len(ws) == 0 {
		e.add("engines", "router", Fail, "the router has no worker", "dynctl workers add, or --worker, --prefill and --decode")
	}
	for _, w := range ws {
		e.o.Step("engine " + w.Name)
		base := strings.TrimRight(w.URL, "/")
		code, date, err := e.get(ctx, base+"/health")
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("GET /health answers %d", code)
		}
		switch {
		case !w.Usable && (err != nil || !w.Draining):
			e.down[w.Name] = true
			e.notUsable(&w, err)
			continue
		case !w.Usable:
			e.add("engine", w.Name, Warn, fmt.Sprintf(draining+"it gets no new requests, %d are in progress", active(&w)), fmt.Sprintf("dynctl workers resume %s ends the drain", w.Name))
		case err != nil && code == 0:
			e.add("reachable", w.Name, Warn, fmt.Sprintf("the router reaches it, this machine does not: %v", err), "counters cannot be read from here: run doctor and bench beside the router")
			continue
		case err != nil:
			e.add("reachable", w.Name, Fail, err.Error(), "")
			continue
		}
		text := engineText(&w)
		if !date.IsZero() {
			// The Date header has whole seconds.
			if off := time.Until(date); off > 2*time.Second || off < -3*time.Second {
				e.add("clock", w.Name, Warn, fmt.Sprintf("the engine's clock is about %.0f s from this one", off.Seconds()), "run a time service there")
			}
		}
		e.add("reachable", w.Name, OK, text, "")
	}
}

// notUsable is the one finding of a worker that gets no requests and is not drained. err is
// what this machine got of it; nil when the engine answers here.
func (e *exam) notUsable(w *admin.Worker, err error) {
	why := w.Reason
	if why == "" && err != nil {
		why = err.Error()
	}
	if err == nil {
		e.add("engine", w.Name, Fail, fmt.Sprintf("not usable: %s (%s)", w.Health, orNone(why)), "its engine answers here: dynctl top --view events shows when the router gave it up")
		return
	}
	e.add("engine", w.Name, Fail, "down: "+why, "is the engine running at "+w.URL+"? its own log says why it ended; the router takes it back once it answers")
}

// active is how many of the router's requests a worker has in progress.
func active(w *admin.Worker) (n int) {
	for i := range w.Ranks {
		n += w.Ranks[i].ActiveRequests
	}
	return n
}

// engineText is what is known of a worker's engine, and nothing of what is not.
func engineText(w *admin.Worker) string {
	words := []string{"engine unknown"}
	if w.Engine != "" {
		words[0] = strings.TrimSpace(w.Engine + " " + w.Version)
	}
	// What labels say may surprise those who did not write them.
	said := func(fact, value string) {
		if value == "" {
			return
		}
		if from := w.From[fact]; from != "" && w.Source == workers.SourceKube {
			value += " (" + from + ")"
		}
		words = append(words, value)
	}
	said("role", w.Role)
	if w.Revision != "" {
		said("revision", "revision "+w.Revision)
	}
	words = append(words, fmt.Sprintf("dp %d", w.DP))
	if w.BlockSizeTokens > 0 {
		words = append(words, fmt.Sprintf("block %d", w.BlockSizeTokens))
	}
	unused := len(w.Ranks) > 0
	for _, k := range w.Ranks {
		unused = unused && k.Engine != nil && k.Engine.Unused
	}
	if unused {
		words = append(words, "idle (no load series yet, and its counters say that it has served nothing)")
	}
	return strings.Join(words, ", ")
}

// verdict is the outcome of an examination in one sentence: what is wrong first, since
// what follows from it stands below.
func verdict(r *Report) string {
	pick := func(s State) (list []Finding) {
		for _, f := range r.Findings {
			if f.State == s {
				list = append(list, f)
			}
		}
		// An engine that is down explains more than any other check.
		slices.SortStableFunc(list, func(a, b Finding) int {
			rank := func(f Finding) int {
				if f.Check == "engine" {
					return 0
				}
				return 1
			}
			return rank(a) - rank(b)
		})
		return list
	}
	failed, warned := pick(Fail), pick(Warn)
	switch {
	case len(failed) > 0 && failed[0].Check == "engines" && len(warned) > 0 && drains(&warned[0]):
		n := slices.IndexFunc(append(warned, failed[0]), func(f Finding) bool { return !drains(&f) })
		verb := " is"
		if n > 1 {
			verb = " are"
		}
		return fmt.Sprintf("%s%s draining, so %s; %s", subjects(warned[:n]), verb, failed[0].Text, warned[0].Advice) + rest(len(failed)-1, "check", " failed", len(warned)-n, "warning")
	case len(failed) > 0:
		text, n := sentence(failed)
		return text + rest(len(failed)-n, "check", " failed", len(warned), "warning")
	case len(warned) > 0:
		text, n := sentence(warned)
		return "nothing failed; " + text + rest(len(warned)-n, "warning", "", 0, "")
	case len(pick(Skip)) > 0:
		return fmt.Sprintf("nothing is wrong in what could be examined; %s could not be made", count(len(pick(Skip)), "check"))
	}
	return "nothing is wrong"
}

// sentence is the first of some findings as part of one, with the n that differ from it in
// their subject only.
func sentence(list []Finding) (text string, n int) {
	f := &list[0]
	for n < len(list) && alike(f, &list[n]) {
		n++
	}
	switch {
	case f.Check == "engine":
		return f.Subject + " is " + f.Text, 1
	case f.Subject == "router" || f.Subject == "engines":
		return f.Check + ": " + f.Text, n
	}
	return fmt.Sprintf("%s of %s: %s", f.Check, subjects(list[:n]), f.Text), n
}

// alike reports whether findings differ in their subject only.
func alike(a, b *Finding) bool {
	return a.Check == b.Check && a.State == b.State && a.Text == b.Text && a.Advice == b.Advice
}

// drains reports whether a finding is of an engine that an operator drains.
func drains(f *Finding) bool { return f.Check == "engine" && strings.HasPrefix(f.Text, draining) }

const draining = "draining: "

// subjects are those of findings, as part of a sentence: two by name and the rest as a number.
func subjects(list []Finding) string {
	switch {
	case len(list) == 1:
		return list[0].Subject
	case len(list) == 2:
		return list[0].Subject + " and " + list[1].Subject
	}
	return fmt.Sprintf("%s, %s and %d more", list[0].Subject, list[1].Subject, len(list)-2)
}

// rest counts what a verdict does not name.
func rest(n int, word, more string, warnings int, warning string) (s string) {
	if n > 0 {
		s = fmt.Sprintf("; %d more%s%s", n, strings.TrimPrefix(count(n, word), strconv.Itoa(n)), more)
	}
	if warnings > 0 {
		s += "; " + count(warnings, warning)
	}
	return s
}

// count is "1 check" or "2 checks".
func count(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

func orNone(s string) string { return cmp.Or(s, "no reason given") }

// contradictions compares what workers of one model say of themselves.
func (e *exam) contradictions(ws []admin.Worker) {
	type seen struct {
		value int
		who   string
	}
	blocks := map[string]seen{}
	lens := map[string]seen{}
	roles := map[string]map[string]bool{}
	bad := false
	for _, w := range ws {
		if w.Conflict != "" {
			bad = true
			e.add("contradiction", w.Name, Fail, w.Conflict, "")
		}
		for _, m := range w.Models {
			if roles[m] == nil {
				roles[m] = map[string]bool{}
			}
			roles[m][w.Role] = true
			if b := w.BlockSizeTokens; b > 0 {
				if s, ok := blocks[m]; ok && s.value != b {
					bad = true
					e.add("block size", w.Name, Fail, fmt.Sprintf("model %s: block size %d here, %d on %s", m, b, s.value, s.who), "transfer between them fails or gives wrong text: give all engines of a model the same --block-size")
				} else {
					blocks[m] = seen{b, w.Name}
				}
			}
			if n := w.MaxModelLen; n > 0 {
				if s, ok := lens[m]; ok && s.value != n {
					e.add("model length", w.Name, Warn, fmt.Sprintf("model %s: %d tokens here, %d on %s", m, n, s.value, s.who), "long prompts are refused by some workers only")
				} else {
					lens[m] = seen{n, w.Name}
				}
			}
		}
		if strings.HasPrefix(w.Connector, string(workers.ConnectorNIXL)) && slices.ContainsFunc(w.Ranks, func(k admin.Rank) bool { return len(k.Feed.CacheGroups) > 1 }) {
			e.add("hybrid over NIXL", w.Name, Warn, "the model has caches of several kinds, and "+workers.HybridDefect, "compare answers with those of one engine alone before you trust them; without prefill workers nothing is moved")
		}
		if w.DP != len(w.Ranks) {
			bad = true
			e.add("dp", w.Name, Fail, fmt.Sprintf("the worker has dp %d and the router follows %d ranks", w.DP, len(w.Ranks)), "give the worker's dp=N")
		}
		reporting, silent := 0, []string{}
		for _, r := range w.Ranks {
			if r.Engine != nil {
				reporting++
			} else {
				silent = append(silent, r.Label)
			}
		}
		if reporting > 0 && len(silent) > 0 {
			bad = true
			e.add("dp", w.Name, Fail, fmt.Sprintf("its metrics have no figures of %s", strings.Join(silent, ", ")), "the engine may have fewer data-parallel ranks than dp says")
		}
	}
	if e.handshakes(ws) {
		bad = true
	}
	for m, r := range roles {
		switch {
		case r["prefill"] && !r["decode"] && !r["aggregated"]:
			bad = true
			e.add("roles", m, Fail, "the model has prefill workers and no worker that decodes", "")
		case r["decode"] && !r["prefill"] && !r["aggregated"]:
			e.add("roles", m, Warn, "the model has decode workers and no prefill worker: every prompt is prefilled locally", "")
		}
	}
	if !bad {
		e.add("contradictions", "engines", OK, "block sizes, ranks and roles agree", "")
	}
}

// smallBlock is the block size in tokens up to which NIXL is slow. Of a handover of 5,000
// tokens the transfer took 105 of 263 ms with blocks of 16, and 29 of 197 ms with blocks of 64
// (vllm-project/vllm#50913).
const smallBlock = 16

// handshakes looks for pairs of vLLM's engines over NIXL that cannot work together, or slowly.
func (e *exam) handshakes(ws []admin.Worker) (bad bool) {
	overNIXL := func(w *admin.Worker) bool { return workers.Connector(w.Connector).Reported() == workers.ConnectorNIXL }
	facts := func(w *admin.Worker) *workers.Worker {
		return &workers.Worker{Facts: workers.Facts{Engine: workers.Engine(w.Engine), Version: w.Version, CacheType: w.CacheType}}
	}
	for i := range ws {
		d := &ws[i]
		if !overNIXL(d) || d.Role == string(workers.Aggregated) {
			continue
		}
		if b := d.BlockSizeTokens; d.Engine == string(workers.VLLM) && b > 0 && b <= smallBlock {
			e.add("block size over NIXL", d.Name, Warn, fmt.Sprintf("blocks of %d tokens: each is a transfer of its own, and a handover takes longer than with blocks of 64", b), "--block-size 64 on all engines that pair")
		}
		if !workers.Role(d.Role).CanDecode() {
			continue
		}
		pairs, apart, why := 0, []string{}, ""
		for k := range ws {
			p := &ws[k]
			if p.Name == d.Name || !overNIXL(p) || !workers.Role(p.Role).CanPrefill() || !slices.ContainsFunc(p.Models, func(m string) bool { return slices.Contains(d.Models, m) }) {
				continue
			}
			if differ := workers.HandshakeDiffers(facts(p), facts(d)); differ != "" {
				apart, why = append(apart, p.Name), differ
			} else {
				pairs++
			}
		}
		switch {
		case len(apart) == 0:
		case pairs == 0:
			bad = true
			e.add("handshake", d.Name, Fail, fmt.Sprintf("NIXL would refuse every prefill worker of its model: %s (%s)", why, strings.Join(apart, ", ")), "give prefill and decode engines one version of vLLM and one type of cache; until then prompts stay local")
		default:
			e.add("handshake", d.Name, Warn, fmt.Sprintf("it pairs with %s, and NIXL would refuse %s: %s", count(pairs, "prefill worker"), strings.Join(apart, ", "), why), "as in a rolling update; pairs are kept within a version")
		}
	}
	return bad
}

// noReplay is the advice for a rank whose engine has no replay endpoint, as
// vLLM's have none unless they are given one.
const noReplay = `give vLLM a replay_endpoint in --kv-events-config, "replay_endpoint":"tcp://*:5657" say, or state it with replay=tcp://…`

// catchesUp is for how long a feed may fetch what it missed, as after a router's
// start, before that is a failure.
const catchesUp = time.Minute

// feeds looks at every rank's KV event feed.
func (e *exam) feeds(ws []admin.Worker) {
	followed, fine := 0, 0
	for _, w := range ws {
		if e.down[w.Name] || w.Role == "prefill" && !w.Usable {
			continue
		}
		some := false
		for _, r := range w.Ranks {
			some = some || r.Feed.State != "none"
		}
		for _, r := range w.Ranks {
			f := r.Feed
			switch {
			case f.State == "none" && some:
				e.add("events", r.Label, Fail, "no event feed, though other ranks of the worker have one", "each rank publishes on a port of its own: give events=… for every rank")
				continue
			case f.State == "none":
				e.add("events", r.Label, Warn, "no KV events: the router predicts what this rank holds", "start the engine with --kv-events-config, or give events=tcp://…")
				continue
			}
			followed++
			switch {
			case f.State == "verifying":
				e.add("events", r.Label, Warn, "nothing is known to be missing, and the index does not use its entries until that is proven: "+orNone(f.Reason), noReplay)
			case (f.State == "replaying" || f.State == "gap") && time.Since(f.Since) < catchesUp:
				e.add("events", r.Label, Skip, "it is still being brought up to date: "+orNone(f.Reason), "run doctor again in a moment")
			case f.State == "mute": // reported by troubles
			case f.HashDiffers:
				e.add("events", r.Label, Fail, "the engine names its blocks otherwise than the worker states: only what its events say counts", "state the engine's --prefix-caching-hash-algo as kv_hash, its PYTHONHASHSEED as kv_hash_seed, and its smallest block as block_size")
			case !f.Trusted:
				e.add("events", r.Label, Fail, fmt.Sprintf("the index does not trust the feed: %s (%s)", f.State, orNone(f.Reason)), "")
			case f.RankDisagree > 0:
				e.add("layout", r.Label, Fail, fmt.Sprintf("%d batches of its events claim to be of another rank of the deployment than %d", f.RankDisagree, w.DPStart+r.DP), "state dp_start=N, the place of the engine's first rank in its deployment, and the events of its own ports: what is known of the rank's cache may be another one's")
			case f.Gaps > 0 && f.Lost > 0:
				e.add("events", r.Label, Warn, fmt.Sprintf("%d gaps, %d batches lost for good, %d replayed", f.Gaps, f.Lost, f.Replayed), "raise the engine's buffer_steps, or give it a replay endpoint")
			case f.Errors > 0:
				e.add("events", r.Label, Warn, fmt.Sprintf("%d messages could not be read", f.Errors), "is the engine's version one that dynctl knows?")
			case f.Orphans > 0:
				e.add("events", r.Label, Warn, fmt.Sprintf("%d blocks came without their parent", f.Orphans), "events were lost before the router began to follow; a replay endpoint brings them back")
			case f.Replay == nil:
				e.add("events", r.Label, Warn, "live, but whether its engine has a replay endpoint is unknown: a recording does not say", "examine the router itself to learn whether a lost batch can be fetched again")
			case f.Dropped > 0 && *f.Replay == "":
				e.add("events", r.Label, Warn, fmt.Sprintf("its entries were dropped %d times since the start (now: %s), and no replay brings them back", f.Dropped, orNone(f.Reason)), noReplay)
			case *f.Replay == "":
				e.add("events", r.Label, Warn, "fragile: live, but its engine has no replay endpoint: a lost batch costs all that is known of its cache, and so does a lost connection unless the engine's metrics and its next batch prove that nothing was missed", noReplay)
			default:
				fine++
			}
		}
	}
	if followed > 0 && fine == followed {
		e.add("events", "engines", OK, count(followed, "feed")+" live and trusted, no gap", "")
	}
}

// texts are what tokenizers like to disagree about.
var texts = []string{
	"The quick brown fox jumps over the lazy dog.", "  leading and trailing  ", "naïve café — “quotes” … €5", "日本語のテキスト、混ぜて。", "def f(x):\n\treturn x ** 2  # square\n",
	"1234567890 3.14159 0x7fff", "emoji 👩‍👩‍👧‍👦 and flags 🇨🇭", "CamelCase snake_case kebab-case", "https://example.org/a?b=c&d=%20e", "\n\n\nnew\r\nlines\n", "Привет, мир", "ﬁ ligature ½ Ⅷ", "a", "<|im_start|>user\nhi<|im_end|>",
	`{"json": [1, 2, {"x": null}]}`, strings.Repeat("word ", 200), strings.Repeat("=", 80), "it's we'll I'd they've", "ＦＵＬＬ width", "\u200bzero\u200bwidth",
}

// tokenizer compares the router's count of tokens with each engine's.
func (e *exam) tokenizer(ctx context.Context, own bool) {
	if !own {
		e.add("tokenizer", "router", Skip, "no worker answers /tokenize", "")
		return
	}
	agree, total, source := 0, 0, ""
	var differ []string
	for _, text := range texts {
		a, err := e.o.Target.Admin.Route(ctx, admin.RouteRequest{Model: e.facts.Model, Prompt: text})
		if err != nil {
			e.add("tokenizer", "router", Skip, "the dry run of a text failed: "+err.Error(), "")
			return
		}
		var r receipt.Receipt
		if json.Unmarshal(a.Receipt, &r) != nil {
			e.add("tokenizer", "router", Skip, "the router's receipt is not understood", "")
			return
		}
		source = r.Inputs.ISLSource
		for i := range e.facts.Workers {
			w := &e.facts.Workers[i]
			if !w.Usable || !slices.Contains(w.Models, e.facts.Model) {
				continue
			}
			ids, err := e.o.Target.Tokenize(ctx, w.URL, e.facts.Model, text)
			if err != nil {
				continue
			}
			total++
			if len(ids) == r.Inputs.ISL {
				agree++
			} else if len(differ) < 3 {
				differ = append(differ, fmt.Sprintf("%q: router %d, %s %d", short(text), r.Inputs.ISL, w.Name, len(ids)))
			}
		}
	}
	switch {
	case total == 0:
		e.add("tokenizer", "engines", Skip, "no engine answers /tokenize", "")
	case agree == total:
		e.add("tokenizer", "router", OK, fmt.Sprintf("counts agree with the engines' %d/%d (source %s)", agree, total, source), "")
	case source == "estimate" || source == "none":
		e.add("tokenizer", "router", Warn, fmt.Sprintf("the router estimates: %d of %d counts differ from the engines', as %s", total-agree, total, strings.Join(differ, "; ")), "give --tokenizer-path, or --tokenizer engine")
	default:
		e.add("tokenizer", "router", Fail, fmt.Sprintf("%d of %d counts differ from the engines' (source %s): %s", total-agree, total, source, strings.Join(differ, "; ")), "cached prefixes will not be found: use the model's own tokenizer file")
	}
}

func short(s string) string {
	if r := []rune(s); len(r) > 24 {
		return string(r[:24]) + "…"
	}
	return s
}

// one sends one prompt for two tokens and gives what became of it with its receipt.
func (e *exam) one(ctx context.Context, header string, prompt []uint32) (*loadgen.Result, *receipt.Receipt, error) {
	e.number++
	src := &workload.Cell{
		Series: workload.Series{Pool: e.pool, Model: e.facts.Model, Header: header, Name: "doctor/" + strconv.Itoa(e.number), Salt: e.salt, N: 1},
		Prefix: prompt, OSL: 2,
	}
	sum, err := loadgen.Run(ctx, loadgen.Options{Base: e.o.Target.URL, TLS: e.o.Target.TLS, APIKey: e.o.Target.APIKey, Concurrency: 1, Keep: 1, Timeout: 2 * time.Minute}, src)
	if err != nil {
		return nil, nil, err
	}
	if len(sum.Kept) == 0 {
		return nil, nil, fmt.Errorf("nothing was sent")
	}
	r := &sum.Kept[0]
	if r.Err != "" {
		err = errors.New(r.Err)
	}
	rec, lost := e.receipt(ctx, r.ID)
	return r, rec, errors.Join(err, lost)
}

// receipt is that of a request that has been answered; nil when the router has
// none. It is final a little after the answer.
func (e *exam) receipt(ctx context.Context, id string) (*receipt.Receipt, error) {
	soon, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var rec receipt.Receipt
	if wait.Until(soon, 10*time.Millisecond, func() bool {
		raw, err := e.o.Target.Admin.Decision(ctx, id)
		rec = receipt.Receipt{}
		return err == nil && json.Unmarshal(raw, &rec) == nil && !rec.Live
	}) {
		return &rec, nil
	}
	return nil, ctx.Err()
}

// tokens is how many tokens the prompts of the probes have.
func (e *exam) tokens() int {
	n := e.o.Tokens
	if n <= 0 {
		n = 40 * max(e.facts.Block, 1)
		if e.facts.MaxModelLen > 0 {
			n = min(n, e.facts.MaxModelLen/2)
		}
		n = n/max(e.facts.Block, 1)*max(e.facts.Block, 1) + 1
	}
	return n
}

// prompt is n tokens that no engine has seen.
func (e *exam) prompt(n int) []uint32 {
	e.number++
	return e.pool.Tokens(nil, rand.New(rand.NewPCG(workload.Seed(e.salt, "prompt"), uint64(e.number))), n)
}

// Text writes the report for a terminal.
func Text(w io.Writer, r *Report) error {
	b := &strings.Builder{}
	printable.Fprintf(b, "%s\n\n", r.Verdict)
	var rows [][]string
	for i := 0; i < len(r.Findings); {
		f := &r.Findings[i]
		// What is found of several subjects is written once, beside all of them.
		words := []string{f.Text}
		if f.Advice != "" && f.State != OK {
			words = append(words, "-> "+f.Advice)
		}
		n := 0
		for ; i+n < len(r.Findings) && alike(f, &r.Findings[i+n]); n++ {
		}
		shown, more := n, ""
		if f.State == OK && n > 4 {
			shown, more = 2, fmt.Sprintf("and %d more", n-1)
		}
		for k := range max(shown, len(words)) {
			row := make([]string, 4)
			if k == 0 {
				row[0], row[1] = strings.ToUpper(string(f.State)), f.Check
			}
			if k < shown {
				row[2] = r.Findings[i+k].Subject
				if k > 0 && more != "" {
					row[2] = more
				}
			}
			if k < len(words) {
				row[3] = words[k]
			}
			rows = append(rows, row)
		}
		i += n
	}
	if err := table.Figures(b, []string{"STATE", "CHECK", "SUBJECT", "FINDING"}, rows, 0, 1, 2, 3); err != nil {
		return err
	}
	if m := r.Transfer; m != nil && len(m.Prefill)*len(m.Decode) > 1 {
		b.WriteString("\ntransfer of KV\n")
		if err := m.text(b); err != nil {
			return err
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(b, "%d checks, %d failed, %d warnings\n", len(r.Findings), r.Failed, r.Warned)
	_, err := io.WriteString(w, b.String())
	return err
}
