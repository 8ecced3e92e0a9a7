// Package adminserver serves the admin API: state, decisions, index and events
// to read, workers and configuration to change, and beside them the metrics page,
// the probes and the profiler.
package adminserver

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/admission"
	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/router/state"
	"github.com/dynctl/dynctl/internal/workers"
)

// maxBody bounds a request to the admin API, maxBodies all of them.
const (
	maxBody   = 32 << 20
	maxBodies = 2 * maxBody
)

// maxEventWait bounds a wait for the next event.
const maxEventWait = 30 * time.Second

// Options are what the API serves and changes.
type Options struct {
	// TokenFile holds the bearer token; empty asks for none.
	TokenFile string
	// Hosts are further names under which the API answers without a token.
	Hosts func() []string
	// Name of this replica in status; the data plane's address.
	Name string

	State    *state.State
	Registry *workers.Registry
	Receipts *receipt.Ring
	Events   *eventlog.Log
	Index    *kvindex.Index
	// Metrics is the page for Prometheus, Probe answers /healthz and /readyz.
	Metrics http.Handler
	Probe   http.HandlerFunc

	// BodyTime is how long the body of a request may take, WriteTime how long a
	// piece of an answer may wait for a client that does not read.
	BodyTime, WriteTime func() time.Duration
	// Config is the configuration in force, Patch changes settings of it.
	Config func() admin.ConfigView
	Patch  func(settings map[string]any) error
	// Route decides about a request and does nothing.
	Route func(context.Context, admin.RouteRequest) (*receipt.Receipt, error)
	// Drain begins a drain of a length, 0 for the configured one, unless one has
	// begun; Draining is closed when one has.
	Drain    func(timeout time.Duration) admin.DrainState
	Draining <-chan struct{}

	// The following may be nil. Sim controls the simulated engines of this
	// process, under /sim/v1/; Stream answers GET /admin/v1/stream with a
	// recording; Recorder tells of the recording of this process.
	Sim      http.Handler
	Stream   http.Handler
	Recorder func() *admin.Recorder
}

// Source is the source of workers that were added by this API.
const Source = "admin"

type server struct {
	o     Options
	token [sha256.Size]byte
	auth  bool
	// bodies is the memory of the requests' bodies.
	bodies *admission.Memory
}

// New is a handler of the admin API, the metrics page and the probes.
func New(o Options) (http.Handler, error) {
	a := &server{o: o, bodies: admission.NewMemory(maxBodies, nil)}
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
		mux.Handle("GET /admin/v1/stream", a.guard(http.HandlerFunc(a.stream)))
	}
	mux.Handle("GET /metrics", a.guard(o.Metrics))
	if o.Sim != nil {
		mux.Handle("/sim/v1/", a.guard(o.Sim))
	}
	mux.HandleFunc("GET /healthz", o.Probe)
	mux.HandleFunc("GET /readyz", o.Probe)
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
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		api.BoundBody(w, q, o.BodyTime())
		b := &boundWriter{ResponseWriter: w, time: o.WriteTime()}
		mux.ServeHTTP(b, q)
		b.bound() // what is not written yet
	}), nil
}

// guard asks for the token, and then for the body, whole. Without a token it
// refuses what a web page could have sent (see fromPage).
func (a *server) guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if a.auth {
			token, ok := strings.CutPrefix(q.Header.Get("Authorization"), "Bearer ")
			sum := sha256.Sum256([]byte(token))
			if !ok || subtle.ConstantTimeCompare(sum[:], a.token[:]) != 1 {
				w.Header().Set("WWW-Authenticate", `Bearer realm="dynctl"`)
				api.WriteError(w, q, &api.Error{Status: http.StatusUnauthorized, Code: api.CodeUnauthorized, Message: "the admin API needs the bearer token of --admin-token-file"})
				return
			}
		} else if why := a.fromPage(q); why != "" {
			api.WriteError(w, q, &api.Error{Status: http.StatusForbidden, Code: api.CodeForbidden, Message: why})
			return
		}
		if q.ContentLength != 0 {
			body, err := api.ReadBody(q, maxBody, a.bodies)
			if err != nil {
				api.WriteError(w, q, err)
				return
			}
			defer body.Release()
			api.UnboundBody(w, q)
			q.Body = io.NopCloser(bytes.NewReader(body.B))
		}
		h.ServeHTTP(w, q)
	})
}

// fromPage says why a request is refused that a web page may have sent: any site
// could otherwise steer a router on loopback, or read it after its own name was
// pointed there (DNS rebinding). Pages of this API itself may link to each other.
func (a *server) fromPage(q *http.Request) string {
	if !a.local(q.Host) {
		return fmt.Sprintf("without a token the admin API answers under names of this machine only, not as %q; name it with --admin-host, or set --admin-token-file", api.Clip(q.Host))
	}
	origin, site := q.Header.Get("Origin"), q.Header.Get("Sec-Fetch-Site")
	reads := q.Method == http.MethodGet || q.Method == http.MethodHead
	switch {
	case !reads && (origin != "" || site != ""):
		return "the admin API takes no changes from web pages without a token"
	case origin != "" && origin != "http://"+q.Host, site != "" && site != "none" && site != "same-origin":
		return "the admin API shows nothing to other web pages without a token"
	}
	return ""
}

// local reports whether a Host header is a name of this machine that nobody else
// can take, or one of those that were stated. What is no host, with a port or
// without, is neither, however it begins.
func (a *server) local(host string) bool {
	if strings.ContainsFunc(host, func(r rune) bool { return r > unicode.MaxASCII }) {
		return false // letters that fold to those of a name
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = host, ""
		if inner, ok := strings.CutPrefix(host, "["); ok {
			if name, ok = strings.CutSuffix(inner, "]"); !ok {
				return false
			}
		}
	}
	if _, err := strconv.ParseUint(port, 10, 16); port != "" && err != nil {
		return false
	}
	name = strings.TrimSuffix(name, ".")
	ip := net.ParseIP(name)
	switch {
	case ip != nil && ip.IsLoopback():
		return true
	case ip == nil && strings.HasPrefix(host, "["): // a name in the place of an address
		return false
	case strings.EqualFold(name, "localhost"):
		return true
	}
	return slices.ContainsFunc(a.o.Hosts(), func(h string) bool { return strings.EqualFold(h, name) || strings.EqualFold(h, host) })
}

func jsonHandler(h func(*http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
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

func bad(param, format string, args ...any) error { return api.BadRequest(param, format, args...) }

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

func (a *server) status(*http.Request) (any, error) { return a.state(), nil }

// state is the router's status, with what only this API's owner knows.
func (a *server) state() admin.Status {
	st := a.o.State.Status(time.Now())
	st.Name, st.Listen = a.o.Name, a.o.Name
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

func (a *server) workers(*http.Request) (any, error) {
	return admin.WorkerList{Schema: admin.Schema, Now: time.Now(), Revision: a.o.Registry.Snapshot().Revision, Workers: a.o.State.Workers()}, nil
}

func (a *server) ranks(*http.Request) (any, error) {
	l := admin.RankList{Schema: admin.Schema, Now: time.Now(), Ranks: []admin.Rank{}}
	for _, w := range a.o.State.Workers() {
		l.Ranks = append(l.Ranks, w.Ranks...)
	}
	return l, nil
}

func (a *server) worker(name string) (any, error) {
	for _, w := range a.o.State.Workers() {
		if w.Name == name {
			return w, nil
		}
	}
	return nil, a.noWorker(name)
}

func (a *server) noWorker(name string) error {
	var names []string
	for _, w := range a.o.Registry.Snapshot().Workers {
		names = append(names, w.Name)
	}
	e := &api.Error{Status: http.StatusNotFound, Code: api.CodeWorkerNotFound, Param: "name", Message: fmt.Sprintf("there is no worker %q", api.Clip(name))}
	if near := workers.Nearest(name, names); near != "" {
		e.Message += fmt.Sprintf("; did you mean %q?", near)
	}
	return e
}

func (a *server) addWorker(q *http.Request) (any, error) {
	var in admin.AddWorker
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	s, err := workers.ParseSpec(workers.Role(in.Role), in.Spec)
	if err != nil {
		return nil, bad("spec", "%v", err)
	}
	s.Origin = "admin API"
	changes, err := a.o.Registry.Modify(Source, func(specs []workers.Spec) ([]workers.Spec, error) { return append(specs, s), nil })
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

func (a *server) removeWorker(q *http.Request) (any, error) {
	name := q.PathValue("name")
	w, ok := a.o.Registry.Snapshot().Worker(name)
	if !ok {
		return nil, a.noWorker(name)
	}
	if w.Source == workers.SourceFile {
		return nil, &api.Error{Status: http.StatusConflict, Code: api.CodeInvalidRequest, Param: "name", Message: fmt.Sprintf("worker %s comes from %s; remove it there, or drain it", name, w.Origin)}
	}
	if _, err := a.o.Registry.Modify(w.Source, func(specs []workers.Spec) ([]workers.Spec, error) {
		return slices.DeleteFunc(specs, func(s workers.Spec) bool { return s.Name == name || s.Name == "" && s.URL.String() == w.URL.String() }), nil
	}); err != nil {
		return nil, err
	}
	return map[string]string{"removed": name}, nil
}

func (a *server) drainWorker(q *http.Request, on bool) (any, error) {
	name := q.PathValue("name")
	w, ok := a.o.Registry.Snapshot().Worker(name)
	if !ok {
		return nil, a.noWorker(name)
	}
	if w.State.Draining() != on {
		w.State.SetDraining(on)
		e := eventlog.Event{Kind: "worker_draining", Worker: name, Text: fmt.Sprintf("worker %s drains: it gets no new requests, running ones finish", name)}
		if !on {
			e.Kind, e.Text = "worker_resumed", fmt.Sprintf("worker %s takes requests again", name)
		}
		a.o.Events.Add(e)
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

func (a *server) decisions(q *http.Request) (any, error) {
	limit, err := number(q, "limit", 100, 1, 1000)
	if err != nil {
		return nil, err
	}
	query := receipt.Query{Limit: limit, Before: q.URL.Query().Get("cursor")}
	if err := parseFilter(q.URL.Query().Get("filter"), &query); err != nil {
		return nil, err
	}
	list, next, err := a.o.Receipts.List(query)
	if err != nil {
		return nil, bad("cursor", "%v", err)
	}
	raw, err := receipts(list, q.URL.Query().Get("brief") == "true")
	if err != nil {
		return nil, err
	}
	return admin.DecisionList{Schema: admin.Schema, Now: time.Now(), Decisions: raw, Next: next, Total: a.o.Receipts.Stats().Total}, nil
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

func (a *server) decision(q *http.Request) (any, error) {
	id := q.PathValue("id")
	c, ok := a.o.Receipts.Get(id)
	if !ok {
		c, ok = a.o.Receipts.ByRequest(id)
	}
	if !ok {
		return nil, &api.Error{
			Status: http.StatusNotFound, Code: "decision_not_found", Param: "id",
			Message: fmt.Sprintf("no decision or request %q is kept here: the last %d are (--receipts)", api.Clip(id), a.o.Receipts.Stats().Capacity),
		}
	}
	return c, nil
}

func (a *server) indexStats(*http.Request) (any, error) { return a.o.State.IndexStats(time.Now()), nil }

func (a *server) indexChildren(q *http.Request) (any, error) {
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
	for _, k := range a.o.Registry.Snapshot().Ranks {
		labels[kvindex.Rank(k.Slot)] = k.Label
		if query.Get("rank") == k.Label {
			slot := kvindex.Rank(k.Slot)
			o.Rank = &slot
		}
	}
	if name := query.Get("rank"); name != "" && o.Rank == nil {
		return nil, bad("rank", "there is no rank %q", api.Clip(name))
	}
	node := kvindex.Root
	if raw := query.Get("node"); raw != "" {
		n, err := strconv.ParseUint(raw, 16, 64)
		if err != nil {
			return nil, bad("node", "node=%q is not an id that this API gave", api.Clip(raw))
		}
		node = kvindex.NodeID(n)
	}
	b, err := a.o.Index.Children(node, o)
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

func (a *server) events(q *http.Request) (any, error) {
	limit, err := number(q, "limit", 100, 1, 10000)
	if err != nil {
		return nil, err
	}
	var after uint64
	if raw := q.URL.Query().Get("after"); raw != "" {
		if after, err = strconv.ParseUint(raw, 10, 64); err != nil {
			return nil, bad("after", "after=%q is not a sequence number", api.Clip(raw))
		}
	} else if _, newest, _ := a.o.Events.Since(0, 0); newest > uint64(limit) {
		after = newest - uint64(limit) // who asks for some wants the newest
	}
	var wait time.Duration
	if raw := q.URL.Query().Get("wait"); raw != "" {
		if wait, err = time.ParseDuration(raw); err != nil || wait < 0 || wait > maxEventWait {
			return nil, bad("wait", "wait=%q is not a duration up to %s", api.Clip(raw), maxEventWait)
		}
	}
	ctx, cancel := context.WithTimeout(q.Context(), wait)
	defer cancel()
	for {
		signal := a.o.Events.Wait()
		list, newest, lost := a.o.Events.Since(after, limit)
		if len(list) > 0 || ctx.Err() != nil || wait == 0 {
			return admin.EventList{Schema: admin.Schema, Now: time.Now(), Events: convertEvents(list), Newest: newest, Lost: lost}, nil
		}
		select {
		case <-signal:
		case <-ctx.Done():
		case <-a.o.Draining:
			cancel()
		}
	}
}

// stream sends the recording, and tells of a listener that was dropped: nothing
// can tell the listener itself.
func (a *server) stream(w http.ResponseWriter, q *http.Request) {
	a.o.Stream.ServeHTTP(w, q)
	if b, ok := w.(*boundWriter); ok && b.late { // New made it
		a.o.Events.Add(eventlog.Event{
			Kind: "stream_dropped", Severity: eventlog.Warn,
			Text: fmt.Sprintf("the listener to /admin/v1/stream at %s was dropped: it took nothing for %s (timeouts.write), so its recording ends there; what reads it must read on, or start it again", q.RemoteAddr, b.time),
		})
	}
}

func (a *server) snapshot(q *http.Request) (any, error) {
	decisions, err := number(q, "decisions", 20, 0, 1000)
	if err != nil {
		return nil, err
	}
	events, err := number(q, "events", 100, 0, 10000)
	if err != nil {
		return nil, err
	}
	after, _ := strconv.ParseUint(q.URL.Query().Get("after"), 10, 64)
	out := admin.Snapshot{Schema: admin.Schema, Status: a.state(), Workers: a.o.State.Workers(), Decisions: []json.RawMessage{}}
	if decisions > 0 {
		list, _, err := a.o.Receipts.List(receipt.Query{Limit: decisions})
		if err != nil {
			return nil, err
		}
		if out.Decisions, err = receipts(list, q.URL.Query().Get("brief") == "true"); err != nil {
			return nil, err
		}
	}
	list, newest, _ := a.o.Events.Since(after, events)
	if after == 0 || newest-after > uint64(events) {
		list = a.o.Events.Last(events)
	}
	out.Events = convertEvents(list)
	return out, nil
}

// route answers what would be decided now, by the very stages of a request,
// without sending or reserving anything.
func (a *server) route(q *http.Request) (any, error) {
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
			if models := a.o.Registry.Snapshot().Models(); len(models) == 1 {
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
	c, err := a.o.Route(q.Context(), in)
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

func (a *server) config(*http.Request) (any, error) { return a.o.Config(), nil }

func (a *server) patchConfig(q *http.Request) (any, error) {
	var in admin.ConfigPatch
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	if len(in.Settings) == 0 {
		return nil, bad("settings", "no settings to change")
	}
	if err := a.o.Patch(in.Settings); err != nil {
		return nil, bad("settings", "%v", err)
	}
	return a.config(q)
}

// maxDrainSeconds is a week.
const maxDrainSeconds = 7 * 24 * 3600

func (a *server) drain(q *http.Request) (any, error) {
	var in admin.DrainRequest
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	if in.TimeoutSeconds < 0 || in.TimeoutSeconds > maxDrainSeconds {
		return nil, bad("timeout_seconds", "timeout_seconds: %v is not a number from 0 to %d", in.TimeoutSeconds, maxDrainSeconds)
	}
	return a.o.Drain(time.Duration(in.TimeoutSeconds * float64(time.Second))), nil
}
