package router

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/pprof"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// maxAdminBody bounds a request to the admin API.
const maxAdminBody = 32 << 20

// maxEventWait bounds a wait for the next event.
const maxEventWait = 30 * time.Second

// AdminOptions set up the admin API.
type AdminOptions struct {
	// TokenFile holds the bearer token; empty asks for none.
	TokenFile string
	// Name of this replica in status; the data plane's address.
	Name string
	// Sim controls the simulated engines of this process, under /sim/v1/; nil
	// without them.
	Sim http.Handler
	// Settings lists the effective configuration; nil for none.
	Settings func(c *Config) []admin.ConfigValue
	// Patch makes the configuration with some settings changed; nil refuses
	// changes.
	Patch func(c Config, settings map[string]any) (Config, error)
	// Stream answers GET /admin/v1/stream with a recording; nil for none.
	Stream http.Handler
	// Recorder tells of the recording of this process, nil while there is
	// none; may be nil itself.
	Recorder func() *admin.Recorder
}

// adminAPI serves /admin/v1/*, /metrics and the probes.
type adminAPI struct {
	r     *Router
	o     AdminOptions
	token [sha256.Size]byte
	auth  bool
}

// AdminHandler is the admin API, the metrics page and the probes.
func (r *Router) AdminHandler(o AdminOptions) (http.Handler, error) {
	a := &adminAPI{r: r, o: o}
	r.name = o.Name
	if o.TokenFile != "" {
		raw, err := os.ReadFile(o.TokenFile)
		if err != nil {
			return nil, fmt.Errorf("admin_token_file: %w", err)
		}
		token := strings.TrimSpace(string(raw))
		if len(token) < 16 {
			return nil, fmt.Errorf("admin_token_file %s: the token has %d characters, fewer than 16", o.TokenFile, len(token))
		}
		a.token, a.auth = sha256.Sum256([]byte(token)), true
	}
	mux := http.NewServeMux()
	for pattern, h := range map[string]func(*http.Request) (any, error){
		"GET /admin/v1/status":                 a.status,
		"GET /admin/v1/workers":                a.workers,
		"POST /admin/v1/workers":               a.addWorker,
		"DELETE /admin/v1/workers/{name}":      a.removeWorker,
		"POST /admin/v1/workers/{name}/drain":  func(q *http.Request) (any, error) { return a.drainWorker(q, true) },
		"POST /admin/v1/workers/{name}/resume": func(q *http.Request) (any, error) { return a.drainWorker(q, false) },
		"GET /admin/v1/ranks":                  a.ranks,
		"GET /admin/v1/decisions":              a.decisions,
		"GET /admin/v1/decisions/{id}":         a.decision,
		"GET /admin/v1/index/stats":            a.indexStats,
		"GET /admin/v1/index/children":         a.indexChildren,
		"GET /admin/v1/events":                 a.events,
		"GET /admin/v1/snapshot":               a.snapshot,
		"POST /admin/v1/route":                 a.route,
		"GET /admin/v1/config":                 a.config,
		"POST /admin/v1/config":                a.patchConfig,
		"POST /admin/v1/drain":                 a.drain,
	} {
		mux.Handle(pattern, a.guard(jsonHandler(h)))
	}
	if o.Stream != nil {
		mux.Handle("GET /admin/v1/stream", a.guard(o.Stream))
	}
	mux.Handle("GET /metrics", a.guard(r.metrics.Handler()))
	if o.Sim != nil {
		mux.Handle("/sim/v1/", a.guard(o.Sim))
	}
	mux.HandleFunc("GET /healthz", r.probe)
	mux.HandleFunc("GET /readyz", r.probe)
	for path, h := range map[string]http.HandlerFunc{
		"/debug/pprof/": pprof.Index, "/debug/pprof/cmdline": pprof.Cmdline, "/debug/pprof/profile": pprof.Profile,
		"/debug/pprof/symbol": pprof.Symbol, "/debug/pprof/trace": pprof.Trace,
	} {
		mux.Handle(path, a.guard(h))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, q *http.Request) {
		api.WriteError(w, q, &api.Error{
			Status: http.StatusNotFound, Code: api.CodeUnknownPath,
			Message: fmt.Sprintf("%s %s is not part of the admin API; clients' requests go to the data plane", q.Method, q.URL.Path),
		})
	})
	return mux, nil
}

// guard asks for the token. A request from a web page is refused where there
// is none: a page on any site could otherwise steer a router on loopback.
func (a *adminAPI) guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if a.auth {
			token, ok := strings.CutPrefix(q.Header.Get("Authorization"), "Bearer ")
			sum := sha256.Sum256([]byte(token))
			if !ok || subtle.ConstantTimeCompare(sum[:], a.token[:]) != 1 {
				w.Header().Set("WWW-Authenticate", `Bearer realm="dynctl"`)
				api.WriteError(w, q, &api.Error{Status: http.StatusUnauthorized, Code: api.CodeUnauthorized, Message: "the admin API needs the bearer token of --admin-token-file"})
				return
			}
		} else if q.Method != http.MethodGet && (q.Header.Get("Origin") != "" || q.Header.Get("Sec-Fetch-Site") != "") {
			api.WriteError(w, q, &api.Error{Status: http.StatusForbidden, Code: api.CodeForbidden, Message: "the admin API takes no changes from web pages without a token"})
			return
		}
		h.ServeHTTP(w, q)
	})
}

func jsonHandler(h func(*http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		q.Body = http.MaxBytesReader(w, q.Body, maxAdminBody)
		v, err := h(q)
		if err != nil {
			api.WriteError(w, q, err)
			return
		}
		raw, err := json.Marshal(v)
		if err != nil {
			api.WriteError(w, q, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(raw)+1))
		_, _ = w.Write(append(raw, '\n')) // a client that is gone is no news here
	})
}

func bad(param, format string, args ...any) error {
	return &api.Error{Status: http.StatusBadRequest, Code: api.CodeInvalidRequest, Param: param, Message: fmt.Sprintf(format, args...)}
}

// readJSON decodes a body strictly.
func readJSON(q *http.Request, v any) error {
	dec := json.NewDecoder(q.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil && !errors.Is(err, io.EOF) {
		return &api.Error{Status: http.StatusBadRequest, Code: api.CodeInvalidJSON, Message: "the body is not understood: " + err.Error()}
	}
	return nil
}

// number reads a query parameter between bounds.
func number(q *http.Request, name string, def, low, high int) (int, error) {
	raw := q.URL.Query().Get(name)
	if raw == "" {
		return def, nil
	}
	n, err := strconv.Atoi(raw)
	if err != nil || n < low || n > high {
		return 0, bad(name, "%s=%q is not a number from %d to %d", name, raw, low, high)
	}
	return n, nil
}

func (a *adminAPI) status(*http.Request) (any, error) { return a.state(), nil }

// state is the router's status, with what only this API's owner knows.
func (a *adminAPI) state() admin.Status {
	st := a.r.status(time.Now())
	if a.o.Recorder == nil {
		return st
	}
	if st.Recorder = a.o.Recorder(); st.Recorder != nil && st.Recorder.Error != "" {
		st.Reasons = append(st.Reasons, "the recording has ended: "+st.Recorder.Error)
		if st.State == "ready" {
			st.State = "degraded"
		}
	}
	return st
}

func (a *adminAPI) workers(*http.Request) (any, error) {
	return admin.WorkerList{Schema: admin.Schema, Now: time.Now(), Revision: a.r.registry.Snapshot().Revision, Workers: a.r.workerList()}, nil
}

func (a *adminAPI) ranks(*http.Request) (any, error) {
	l := admin.RankList{Schema: admin.Schema, Now: time.Now(), Ranks: []admin.Rank{}}
	for _, w := range a.r.workerList() {
		l.Ranks = append(l.Ranks, w.Ranks...)
	}
	return l, nil
}

func (a *adminAPI) worker(name string) (any, error) {
	for _, w := range a.r.workerList() {
		if w.Name == name {
			return w, nil
		}
	}
	return nil, a.noWorker(name)
}

func (a *adminAPI) noWorker(name string) error {
	var names []string
	for _, w := range a.r.registry.Snapshot().Workers {
		names = append(names, w.Name)
	}
	e := &api.Error{Status: http.StatusNotFound, Code: api.CodeWorkerNotFound, Param: "name", Message: fmt.Sprintf("there is no worker %q", clipName(name))}
	if near := workers.Nearest(name, names); near != "" {
		e.Message += fmt.Sprintf("; did you mean %q?", near)
	}
	return e
}

func (a *adminAPI) addWorker(q *http.Request) (any, error) {
	var in admin.AddWorker
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	s, err := workers.ParseSpec(workers.Role(in.Role), in.Spec)
	if err != nil {
		return nil, bad("spec", "%v", err)
	}
	s.Origin = "admin API"
	labelRole(&s, &a.r.settings.Load().Routing)
	changes, err := a.r.registry.Modify(sourceAdmin, func(specs []workers.Spec) ([]workers.Spec, error) { return append(specs, s), nil })
	if err != nil {
		return nil, &api.Error{Status: http.StatusConflict, Code: api.CodeInvalidRequest, Param: "spec", Message: err.Error()}
	}
	for _, c := range changes {
		if c.Kind == workers.Added {
			return a.worker(c.New.Name)
		}
	}
	return nil, &api.Error{Status: http.StatusConflict, Code: api.CodeInvalidRequest, Param: "spec", Message: "the fleet did not change"}
}

func (a *adminAPI) removeWorker(q *http.Request) (any, error) {
	name := q.PathValue("name")
	w, ok := a.r.registry.Snapshot().Worker(name)
	if !ok {
		return nil, a.noWorker(name)
	}
	if w.Source == sourceFile {
		return nil, &api.Error{Status: http.StatusConflict, Code: api.CodeInvalidRequest, Param: "name", Message: fmt.Sprintf("worker %s comes from %s; remove it there, or drain it", name, w.Origin)}
	}
	if _, err := a.r.registry.Modify(w.Source, func(specs []workers.Spec) ([]workers.Spec, error) {
		return slices.DeleteFunc(specs, func(s workers.Spec) bool { return s.Name == name || s.Name == "" && s.URL.String() == w.URL.String() }), nil
	}); err != nil {
		return nil, err
	}
	return map[string]string{"removed": name}, nil
}

func (a *adminAPI) drainWorker(q *http.Request, on bool) (any, error) {
	name := q.PathValue("name")
	w, ok := a.r.registry.Snapshot().Worker(name)
	if !ok {
		return nil, a.noWorker(name)
	}
	if w.State.Draining() != on {
		w.State.SetDraining(on)
		e := eventlog.Event{Kind: "worker_draining", Worker: name, Text: fmt.Sprintf("worker %s drains: it gets no new requests, running ones finish", name)}
		if !on {
			e.Kind, e.Text = "worker_resumed", fmt.Sprintf("worker %s takes requests again", name)
		}
		a.r.event(e)
	}
	return a.worker(name)
}

// parseFilter reads "path=remote worker=d0 status>=500 model=m state=live word".
func parseFilter(text string, q *receipt.Query) error {
	for _, word := range strings.Fields(text) {
		if v, ok := strings.CutPrefix(word, "status>="); ok {
			n, err := strconv.Atoi(v)
			if err != nil {
				return bad("filter", "filter %q: not a status", word)
			}
			q.MinStatus = n
			continue
		}
		key, value, ok := strings.Cut(word, "=")
		if !ok {
			q.Text = word
			continue
		}
		switch key {
		case "path":
			q.Path = value
		case "reason":
			q.Reason = value
		case "model":
			q.Model = value
		case "state":
			q.State = value
		case "worker":
			q.Worker = value
		default:
			return bad("filter", "filter %q: unknown key; known: path, reason, model, state, worker, status>=", word)
		}
	}
	return nil
}

func (a *adminAPI) decisions(q *http.Request) (any, error) {
	limit, err := number(q, "limit", 100, 1, 1000)
	if err != nil {
		return nil, err
	}
	query := receipt.Query{Limit: limit, Before: q.URL.Query().Get("cursor")}
	if err := parseFilter(q.URL.Query().Get("filter"), &query); err != nil {
		return nil, err
	}
	list, next, err := a.r.receipts.List(query)
	if err != nil {
		return nil, bad("cursor", "%v", err)
	}
	raw, err := receipts(list, q.URL.Query().Get("brief") == "true")
	if err != nil {
		return nil, err
	}
	return admin.DecisionList{Schema: admin.Schema, Now: time.Now(), Decisions: raw, Next: next, Total: a.r.receipts.Stats().Total}, nil
}

func receipts(list []*receipt.Receipt, brief bool) ([]json.RawMessage, error) {
	out := make([]json.RawMessage, 0, len(list))
	for _, c := range list {
		if brief {
			c.Decode.Omitted += len(c.Decode.Candidates)
			c.Prefill.Omitted += len(c.Prefill.Candidates)
			c.Decode.Candidates, c.Prefill.Candidates = []receipt.Candidate{}, []receipt.Candidate{}
		}
		raw, err := json.Marshal(c)
		if err != nil {
			return nil, err
		}
		out = append(out, raw)
	}
	return out, nil
}

func (a *adminAPI) decision(q *http.Request) (any, error) {
	id := q.PathValue("id")
	c, ok := a.r.receipts.Get(id)
	if !ok {
		c, ok = a.r.receipts.ByRequest(id)
	}
	if !ok {
		return nil, &api.Error{
			Status: http.StatusNotFound, Code: "decision_not_found", Param: "id",
			Message: fmt.Sprintf("no decision or request %q is kept here: the last %d are (--receipts)", clipName(id), a.r.receipts.Stats().Capacity),
		}
	}
	return c, nil
}

func (a *adminAPI) indexStats(*http.Request) (any, error) {
	r := a.r
	untrusted := 0
	for _, f := range r.feedStatus() {
		if !f.Trusted {
			untrusted++
		}
	}
	out := admin.IndexStats{Schema: admin.Schema, Now: time.Now(), Totals: r.indexTotals(untrusted), Ranks: []admin.IndexRank{}}
	for _, k := range r.registry.Snapshot().Ranks {
		if s, ok := r.index.RankStats(kvindex.Rank(k.Slot)); ok {
			out.Ranks = append(out.Ranks, admin.IndexRank{Label: k.Label, Slot: k.Slot, Blocks: s.Blocks, Stored: s.Stored, Removed: s.Removed, Orphaned: s.Orphaned, Refused: s.Refused, Lost: s.Lost})
		}
	}
	return out, nil
}

func (a *adminAPI) indexChildren(q *http.Request) (any, error) {
	query := q.URL.Query()
	limit, err := number(q, "limit", 100, 1, 1000)
	if err != nil {
		return nil, err
	}
	depth, err := number(q, "min_depth", 0, 0, 1<<30)
	if err != nil {
		return nil, err
	}
	o := kvindex.BrowseOptions{Limit: limit, MinDepth: depth}
	switch s := kvindex.SortBy(query.Get("sort")); s {
	case "", kvindex.ByOffset, kvindex.ByBlocks, kvindex.ByRanks, kvindex.ByHits:
		o.Sort = s
	default:
		return nil, bad("sort", "sort=%q is not one of offset, blocks, ranks, hits", s)
	}
	labels := map[kvindex.Rank]string{}
	for _, k := range a.r.registry.Snapshot().Ranks {
		labels[kvindex.Rank(k.Slot)] = k.Label
		if query.Get("rank") == k.Label {
			slot := kvindex.Rank(k.Slot)
			o.Rank = &slot
		}
	}
	if name := query.Get("rank"); name != "" && o.Rank == nil {
		return nil, bad("rank", "there is no rank %q", clipName(name))
	}
	node := kvindex.Root
	if raw := query.Get("node"); raw != "" {
		n, err := strconv.ParseUint(raw, 16, 64)
		if err != nil {
			return nil, bad("node", "node=%q is not an id that this API gave", clipName(raw))
		}
		node = kvindex.NodeID(n)
	}
	b, err := a.r.index.Children(node, o)
	if errors.Is(err, kvindex.ErrUnknownNode) {
		return nil, &api.Error{Status: http.StatusNotFound, Code: "node_not_found", Param: "node", Message: "the node is gone: its blocks were evicted or moved"}
	}
	if err != nil {
		return nil, err
	}
	convert := func(c kvindex.Child) admin.IndexNode {
		n := admin.IndexNode{
			ID: strconv.FormatUint(uint64(c.ID), 16), OffsetBlocks: c.Offset, DepthBlocks: c.Depth, LengthBlocks: c.Length, Local: fmt.Sprintf("%016x", c.Local),
			Children: c.Children, Blocks: c.Blocks, Exact: c.Exact, Ranks: c.Ranks, Longest: c.Longest, Hits: c.Hits, RankLabels: make([]string, 0, len(c.Mask)),
		}
		for _, k := range c.Mask {
			n.RankLabels = append(n.RankLabels, labels[k])
		}
		return n
	}
	out := admin.IndexChildren{Schema: admin.Schema, Now: time.Now(), Children: make([]admin.IndexNode, 0, len(b.Children)), Total: b.Total, Partial: b.Partial}
	if node != kvindex.Root {
		n := convert(b.Node)
		out.Node = &n
	}
	for _, c := range b.Children {
		out.Children = append(out.Children, convert(c))
	}
	return out, nil
}

func convertEvents(in []eventlog.Event) []admin.Event {
	out := make([]admin.Event, 0, len(in))
	for _, e := range in {
		out = append(out, admin.Event{Seq: e.Seq, At: e.At, Kind: e.Kind, Severity: string(e.Severity), Worker: e.Worker, Rank: e.Rank, Text: e.Text, Request: e.Request, Fields: e.Fields})
	}
	return out
}

func (a *adminAPI) events(q *http.Request) (any, error) {
	limit, err := number(q, "limit", 100, 1, 10000)
	if err != nil {
		return nil, err
	}
	var after uint64
	if raw := q.URL.Query().Get("after"); raw != "" {
		if after, err = strconv.ParseUint(raw, 10, 64); err != nil {
			return nil, bad("after", "after=%q is not a sequence number", clipName(raw))
		}
	}
	var wait time.Duration
	if raw := q.URL.Query().Get("wait"); raw != "" {
		if wait, err = time.ParseDuration(raw); err != nil || wait < 0 || wait > maxEventWait {
			return nil, bad("wait", "wait=%q is not a duration up to %s", clipName(raw), maxEventWait)
		}
	}
	ctx, cancel := context.WithTimeout(q.Context(), wait)
	defer cancel()
	for {
		signal := a.r.events.Wait()
		list, newest, lost := a.r.events.Since(after, limit)
		if len(list) > 0 || ctx.Err() != nil || wait == 0 {
			return admin.EventList{Schema: admin.Schema, Now: time.Now(), Events: convertEvents(list), Newest: newest, Lost: lost}, nil
		}
		select {
		case <-signal:
		case <-ctx.Done():
		case <-a.r.drain:
			cancel()
		}
	}
}

func (a *adminAPI) snapshot(q *http.Request) (any, error) {
	decisions, err := number(q, "decisions", 20, 0, 1000)
	if err != nil {
		return nil, err
	}
	events, err := number(q, "events", 100, 0, 10000)
	if err != nil {
		return nil, err
	}
	after, _ := strconv.ParseUint(q.URL.Query().Get("after"), 10, 64)
	out := admin.Snapshot{Schema: admin.Schema, Status: a.state(), Workers: a.r.workerList(), Decisions: []json.RawMessage{}}
	if decisions > 0 {
		list, _, err := a.r.receipts.List(receipt.Query{Limit: decisions})
		if err != nil {
			return nil, err
		}
		if out.Decisions, err = receipts(list, q.URL.Query().Get("brief") == "true"); err != nil {
			return nil, err
		}
	}
	list, newest, _ := a.r.events.Since(after, events)
	if after == 0 || newest-after > uint64(events) {
		list = a.r.events.Last(events)
	}
	out.Events = convertEvents(list)
	return out, nil
}

// route answers what would be decided now, by the very stages of a request,
// without sending or reserving anything.
func (a *adminAPI) route(q *http.Request) (any, error) {
	var in admin.RouteRequest
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	given := 0
	for _, is := range []bool{in.Body != nil, in.Prompt != "", in.Tokens != nil} {
		if is {
			given++
		}
	}
	if given != 1 {
		return nil, bad("", "give exactly one of body, prompt and tokens")
	}
	if in.Endpoint == "" {
		in.Endpoint = "/v1/completions"
	}
	if in.Body == nil {
		if in.Model == "" {
			if models := a.r.registry.Snapshot().Models(); len(models) == 1 {
				in.Model = models[0]
			}
		}
		var prompt any = in.Prompt
		if in.Tokens != nil {
			prompt = in.Tokens
		}
		raw, err := json.Marshal(map[string]any{"model": in.Model, "prompt": prompt})
		if err != nil {
			return nil, err
		}
		in.Body = raw
	}
	c, err := a.r.dryRun(q.Context(), in)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	if err := c.Explain(&text); err != nil {
		return nil, err
	}
	return admin.RouteAnswer{Schema: admin.Schema, Receipt: raw, Text: text.String()}, nil
}

// dryRun runs the deciding stages for a request.
func (r *Router) dryRun(ctx context.Context, in admin.RouteRequest) (*receipt.Receipt, error) {
	ep, err := api.Lookup(http.MethodPost, in.Endpoint)
	if err != nil {
		return nil, err
	}
	if ep.Body != api.JSONBody {
		return nil, bad("endpoint", "%s takes no JSON body", in.Endpoint)
	}
	x := &exchange{r: r, ctx: ctx, start: time.Now(), ep: ep, dry: true}
	x.d.reset()
	defer x.d.release()
	x.d.dry = true
	x.d.settings = r.settings.Load()
	if err := x.view.Parse(in.Body, ep.Kind, api.Limits{}); err != nil {
		return nil, err
	}
	x.asked = x.view.Model
	x.d.fleet = r.registry.Snapshot()
	x.model = x.d.fleet.Canonical(x.asked)
	x.d.list = x.d.fleet.Model(x.model)
	if len(x.d.list) == 0 {
		return nil, x.noModel()
	}
	x.d.lora = loraOf(x.model, x.d.list)
	if x.force, err = disagg.ParseForce(in.Path); err != nil {
		return nil, bad("path", "%v", err)
	}
	x.session = selector.HashSession(in.Session)
	x.findPrompt()
	r.decide(&x.d, x.facts, x.force, x.session)
	c := &receipt.Receipt{
		Schema: receipt.Schema, ID: "dry-run", Time: x.start, Endpoint: ep.Kind.String(), Model: x.model, Stream: x.view.Stream, ConfigRevision: x.d.settings.revision,
		Legs: []receipt.Leg{}, Outcome: receipt.Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
	}
	if x.d.prompt.note != "" {
		c.Note(x.d.prompt.note)
	}
	fillPlan(c, &x.d, x.d.plan.Reason)
	c.Inputs.SessionKey, c.Inputs.Force = x.session, string(x.force)
	return c, nil
}

func (a *adminAPI) config(*http.Request) (any, error) {
	s := a.r.settings.Load()
	v := admin.ConfigView{Schema: admin.Schema, Revision: s.revision, Settings: []admin.ConfigValue{}}
	if a.o.Settings != nil {
		v.Settings = a.o.Settings(&s.Config)
		for i := range v.Settings {
			v.Settings[i].Origin = s.origin[v.Settings[i].Key]
		}
	}
	return v, nil
}

func (a *adminAPI) patchConfig(q *http.Request) (any, error) {
	var in admin.ConfigPatch
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	if a.o.Patch == nil || len(in.Settings) == 0 {
		return nil, bad("settings", "no settings to change")
	}
	err := a.r.Change(func(c Config, origin map[string]string) (Config, map[string]string, error) {
		c, err := a.o.Patch(c, in.Settings)
		origin = maps.Clone(origin)
		if origin == nil {
			origin = map[string]string{}
		}
		for k := range in.Settings {
			origin[k] = "admin API"
		}
		return c, origin, err
	})
	if err != nil {
		return nil, bad("settings", "%v", err)
	}
	return a.config(q)
}

func (a *adminAPI) drain(q *http.Request) (any, error) {
	var in admin.DrainRequest
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // begin only; serve waits
	_ = a.r.Drain(ctx)
	return map[string]any{"draining": true, "inflight_requests": a.r.gate.Inflight()}, nil
}
