// Package adminserver serves the admin API: state, decisions, index and events
// to read, of a router or of a recording, workers and configuration of a router
// to change, and the profiler.
package adminserver

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
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

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// maxBody bounds a request to the admin API, maxBodies all of them.
const (
	maxBody   = 32 << 20
	maxBodies = 2 * maxBody
)

// maxEventWait bounds a wait for the next event.
const maxEventWait = 30 * time.Second

// Reader is what the API shows: a router, or a recording of one.
type Reader interface {
	// Now is the time of what is shown.
	Now() time.Time
	Status() admin.Status
	Workers() admin.WorkerList
	// Receipts and Events may be others at the next call; the events are closed
	// then.
	Receipts() *receipt.Ring
	Events() *eventlog.Log
	IndexStats() admin.IndexStats
	// IndexChildren is the function of that name with an index and its labels.
	IndexChildren(IndexQuery) (admin.IndexChildren, error)
}

// Control is what the API changes, and asks of a running router only.
type Control interface {
	AddWorker(workers.Spec) (admin.Worker, error)
	RemoveWorker(name string) error
	// DrainWorker begins a worker's drain, or ends it.
	DrainWorker(name string, on bool) (admin.Worker, error)
	// MoveStreams begins a drain whose streams continue elsewhere, those that can.
	MoveStreams(name string) (admin.Worker, error)
	// CallEngines calls the engines of all workers, or of those that are named.
	CallEngines(context.Context, *admin.ControlCall) (admin.ControlAnswer, error)
	// Route decides about a request and does nothing. One of the body, the prompt
	// and the tokens is given.
	Route(context.Context, admin.RouteRequest) (*receipt.Receipt, error)
	Config() admin.ConfigView
	// Patch changes settings of the configuration.
	Patch(settings map[string]any) error
	// Drain begins a drain of a length, 0 for the configured one, unless one has
	// begun; Draining is closed when one has.
	Drain(timeout time.Duration) admin.DrainState
	Draining() <-chan struct{}
}

// Access says who is answered.
type Access struct {
	// Token is the bearer token, which lets do everything; nil is none. Keys are API
	// keys, each with its roles; nil is none. Where there are any, one is required.
	Token []byte
	Keys  *access.Store
	// Terms are those of the moment.
	Terms func() Terms
	// Open are handlers, by their pattern, that answer anybody: the probes.
	Open map[string]http.Handler
}

// Terms are what may change about an Access.
type Terms struct {
	// Hosts are further names under which the API answers without a token.
	Hosts []string
	// Body is how long the body of a request may take, Write how long a piece of
	// an answer may wait for a client that does not read.
	Body, Write time.Duration
}

// ReadToken reads a bearer token from a file.
func ReadToken(file string) ([]byte, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("admin_token_file: %w", err)
	}
	token := bytes.TrimSpace(raw)
	if len(token) < 16 {
		return nil, fmt.Errorf("admin_token_file %s: the token has %d characters, fewer than 16", file, len(token))
	}
	return token, nil
}

type server struct {
	a     Access
	r     Reader
	c     Control // nil for a recording
	token [sha256.Size]byte
	// bodies is the memory of the requests' bodies.
	bodies *admission.Memory
}

// New is a handler of the admin API over r, with further handlers by their
// pattern. A recording has no control: what asks for it is answered 409.
func New(a Access, r Reader, c Control, more map[string]http.Handler) http.Handler {
	s := &server{a: a, r: r, c: c, token: sha256.Sum256(a.Token), bodies: admission.NewMemory(maxBodies, nil)}
	type routes map[string]func(*http.Request) (any, error)
	mux := http.NewServeMux()
	add := func(pattern string, h http.Handler) { mux.Handle(pattern, s.guard(h, needs(pattern))) }
	for pattern, h := range (routes{
		"GET /admin/v1/status":            func(*http.Request) (any, error) { return r.Status(), nil },
		"GET /admin/v1/workers":           func(*http.Request) (any, error) { return r.Workers(), nil },
		"GET /admin/v1/ranks":             s.ranks,
		"GET /admin/v1/decisions":         s.decisions,
		"GET /admin/v1/decisions/{id...}": s.decision, // an id may hold slashes
		"GET /admin/v1/index/stats":       func(*http.Request) (any, error) { return r.IndexStats(), nil },
		"GET /admin/v1/index/children":    s.indexChildren,
		"GET /admin/v1/events":            s.events,
		"GET /admin/v1/snapshot":          s.snapshot,
	}) {
		add(pattern, s.json(h))
	}
	for pattern, h := range (routes{
		"POST /admin/v1/workers":               s.addWorker,
		"DELETE /admin/v1/workers/{name}":      s.removeWorker,
		"POST /admin/v1/workers/{name}/drain":  func(q *http.Request) (any, error) { return c.DrainWorker(q.PathValue("name"), true) },
		"POST /admin/v1/workers/{name}/move":   func(q *http.Request) (any, error) { return c.MoveStreams(q.PathValue("name")) },
		"POST /admin/v1/workers/{name}/resume": func(q *http.Request) (any, error) { return c.DrainWorker(q.PathValue("name"), false) },
		"POST /admin/v1/control/{action}":      s.control,
		"POST /admin/v1/route":                 s.route,
		"GET /admin/v1/config":                 func(*http.Request) (any, error) { return c.Config(), nil },
		"POST /admin/v1/config":                s.patchConfig,
		"POST /admin/v1/drain":                 s.drain,
	}) {
		if c == nil {
			h = notRunning
		}
		add(pattern, s.json(h))
	}
	for pattern, h := range more {
		add(pattern, h)
	}
	for pattern, h := range a.Open {
		mux.Handle(pattern, h)
	}
	for path, h := range map[string]http.HandlerFunc{
		"/debug/pprof/": pprof.Index, "/debug/pprof/cmdline": pprof.Cmdline, "/debug/pprof/profile": pprof.Profile,
		"/debug/pprof/symbol": pprof.Symbol, "/debug/pprof/trace": pprof.Trace,
	} {
		add(path, h)
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, q *http.Request) {
		api.WriteError(w, q, &api.Error{
			Status: http.StatusNotFound, Code: api.CodeUnknownPath,
			Message: fmt.Sprintf("%s %s is not part of the admin API; clients' requests go to the data plane, at the address of --listen", q.Method, q.URL.Path),
		})
	})
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		t := a.Terms()
		api.BoundBody(w, q, time.Now().Add(t.Body))
		b := &boundWriter{ResponseWriter: w, time: t.Write}
		mux.ServeHTTP(b, named(q))
		b.by.Extend(w, t.Write) // what is not written yet
	})
}

// named is a request whose path has no segment "." or "..": both are escaped, because here
// they are names, such as the id that a client gave to its request. http.ServeMux would
// redirect to another path.
func named(q *http.Request) *http.Request {
	segments := strings.Split(q.URL.EscapedPath(), "/")
	found := false
	for i, s := range segments {
		if s == "." || s == ".." {
			segments[i], found = strings.ReplaceAll(s, ".", "%2E"), true
		}
	}
	if !found {
		return q
	}
	q, u := q.WithContext(q.Context()), *q.URL // a copy of the request, and one of its URL
	u.RawPath = strings.Join(segments, "/")
	q.URL = &u
	return q
}

// notRunning answers for a recording what only a router can do.
func notRunning(q *http.Request) (any, error) {
	return nil, &api.Error{
		Status: http.StatusConflict, Code: "not_running",
		Message: fmt.Sprintf("this is a recording of a router, which can be looked at only: %s %s needs the router itself", q.Method, q.URL.Path),
	}
}

// fromPage says why a request is refused that a web page may have sent: any site
// could otherwise steer a router on loopback, or read it after its own name was
// pointed there (DNS rebinding). Pages of this API itself may link to each other.
func (s *server) fromPage(q *http.Request) string {
	if !s.ownHost(q.Host) {
		way := "name it with --admin-host, or set --admin-token-file"
		if s.c == nil {
			way = "use 127.0.0.1"
		}
		return fmt.Sprintf("without a token the admin API answers under names of this machine only, not as %q; %s", api.Clip(q.Host), way)
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

// ownHost reports whether a Host header is a name of this machine that no other
// can take, or one of those that were stated. What is no host, with a port or
// without, is neither, however it begins.
func (s *server) ownHost(host string) bool {
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
	return slices.ContainsFunc(s.a.Terms().Hosts, func(h string) bool { return strings.EqualFold(h, name) || strings.EqualFold(h, host) })
}

// JSON is a handler that answers with what h returns.
func JSON(h func(*http.Request) (any, error)) http.Handler {
	return answer(h, func(*http.Request, error) {})
}

// json is JSON with an event for each answer that fails because of the router itself: its
// user gets no details.
func (s *server) json(h func(*http.Request) (any, error)) http.Handler {
	return answer(h, func(q *http.Request, err error) {
		if s.c == nil || api.FromError(err).Code != api.CodeInternal {
			return
		}
		path := api.Clip(q.URL.Path)
		s.r.Events().Add(eventlog.Event{
			Kind: "admin_failed", Severity: eventlog.Error, Text: fmt.Sprintf("the admin API cannot answer %s %s: %v", q.Method, path, err),
			Fields: map[string]any{"method": q.Method, "path": path},
		})
	})
}

// answer answers with what h returns, as JSON. failed gets an error before the client does.
func answer(h func(*http.Request) (any, error), failed func(*http.Request, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		v, err := h(q)
		var raw []byte
		if err == nil {
			raw, err = json.Marshal(v)
		}
		if err != nil {
			failed(q, err)
			api.WriteError(w, q, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(raw)+1))
		_, _ = w.Write(append(raw, '\n')) // a client that is gone is no news here
	})
}

func bad(param, format string, args ...any) error { return api.BadRequest(param, format, args...) }

// readJSON decodes a body, of which every member must be known. An empty one
// leaves v as it is.
func readJSON(q *http.Request, v any) error {
	dec := json.NewDecoder(q.Body)
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err == nil {
		if _, after := dec.Token(); !errors.Is(after, io.EOF) {
			err = errors.New("something follows its JSON value")
		}
	}
	if err != nil {
		return &api.Error{Status: http.StatusBadRequest, Code: api.CodeInvalidJSON, Message: "the body is not understood: " + err.Error()}
	}
	return nil
}

// Number reads a query parameter between bounds.
func Number(q *http.Request, name string, def, low, high int) (int, error) {
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

func (s *server) ranks(*http.Request) (any, error) {
	list := s.r.Workers()
	l := admin.RankList{Schema: admin.Schema, Now: list.Now, Ranks: []admin.Rank{}}
	for i := range list.Workers {
		l.Ranks = append(l.Ranks, list.Workers[i].Ranks...)
	}
	return l, nil
}

func (s *server) addWorker(q *http.Request) (any, error) {
	var in admin.AddWorker
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	spec, err := workers.ParseSpec(workers.Role(in.Role), in.Spec)
	if err != nil {
		return nil, bad("spec", "%v", err)
	}
	return s.c.AddWorker(spec)
}

func (s *server) control(q *http.Request) (any, error) {
	if q.ContentLength != 0 {
		return nil, bad("", "a control call takes no body; its parameters go into the query, as in /admin/v1/control/sleep?worker=NAME&level=1")
	}
	in, param, err := admin.ParseControl(q.PathValue("action"), q.URL.Query())
	if err != nil {
		return nil, bad(param, "%s", api.Clip(err.Error()))
	}
	return s.c.CallEngines(q.Context(), &in)
}

func (s *server) removeWorker(q *http.Request) (any, error) {
	name := q.PathValue("name")
	if err := s.c.RemoveWorker(name); err != nil {
		return nil, err
	}
	return map[string]string{"removed": name}, nil
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

func (s *server) decisions(q *http.Request) (any, error) {
	limit, err := Number(q, "limit", 100, 1, 1000)
	if err != nil {
		return nil, err
	}
	query := receipt.Query{Limit: limit, Before: q.URL.Query().Get("cursor")}
	if err := parseFilter(q.URL.Query().Get("filter"), &query); err != nil {
		return nil, err
	}
	ring := s.r.Receipts()
	list, next, err := ring.List(query)
	if err != nil {
		return nil, bad("cursor", "%v", err)
	}
	raw, err := receipts(q, list)
	if err != nil {
		return nil, err
	}
	return admin.DecisionList{Schema: admin.Schema, Now: s.r.Now(), Decisions: raw, Next: next, Total: ring.Stats().Total}, nil
}

func receipts(q *http.Request, list []*receipt.Receipt) ([]json.RawMessage, error) {
	out := make([]json.RawMessage, 0, len(list))
	redact, brief := !seesTexts(q), q.URL.Query().Get("brief") == "true"
	for _, c := range list {
		if redact {
			c.Redact()
		}
		if brief {
			c.Decode.Omitted += len(c.Decode.Candidates)
			c.Prefill.Omitted += len(c.Prefill.Candidates)
			c.Decode.Candidates, c.Prefill.Candidates = []decision.Candidate{}, []decision.Candidate{}
		}
		raw, err := json.Marshal(c)
		if err != nil {
			return nil, err
		}
		out = append(out, raw)
	}
	return out, nil
}

func (s *server) decision(q *http.Request) (any, error) {
	id := q.PathValue("id")
	ring := s.r.Receipts()
	c, ok := ring.Find(id)
	if !ok {
		kept := "(--receipts)"
		if s.c == nil {
			kept = "of those that were played"
		}
		return nil, &api.Error{
			Status: http.StatusNotFound, Code: "decision_not_found", Param: "id",
			Message: fmt.Sprintf("no decision or request %q is among the newest %d %s", api.Clip(id), ring.Stats().Capacity, kept),
		}
	}
	if !seesTexts(q) {
		c.Redact()
	}
	return c, nil
}

// sequence reads the number of the event that the reader knows last; given is
// false where it names none.
func sequence(q *http.Request) (after uint64, given bool, err error) {
	raw := q.URL.Query().Get("after")
	if raw == "" {
		return 0, false, nil
	}
	if after, err = strconv.ParseUint(raw, 10, 64); err != nil {
		return 0, false, bad("after", "after=%q is not a sequence number", api.Clip(raw))
	}
	return after, true, nil
}

func (s *server) events(q *http.Request) (any, error) {
	limit, err := Number(q, "limit", 100, 1, 10000)
	if err != nil {
		return nil, err
	}
	after, given, err := sequence(q)
	if err != nil {
		return nil, err
	}
	var wait time.Duration
	if raw := q.URL.Query().Get("wait"); raw != "" {
		if wait, err = time.ParseDuration(raw); err != nil || wait < 0 || wait > maxEventWait {
			return nil, bad("wait", "wait=%q is not a duration up to %s", api.Clip(raw), maxEventWait)
		}
	}
	var draining <-chan struct{}
	if s.c != nil {
		draining = s.c.Draining()
	}
	ctx, cancel := context.WithTimeout(q.Context(), wait)
	defer cancel()
	for {
		log := s.r.Events()
		signal := log.Wait()
		from := after
		switch _, newest, _ := log.Since(0, 0); {
		case !given && newest > uint64(limit):
			from = newest - uint64(limit) // who asks for some wants the newest
		case after > newest:
			from = 0 // the log has started over: the router started, or the recording was taken back
		}
		list, newest, lost := log.Since(from, limit)
		if !given {
			lost = 0 // no event that is not there was asked for
		}
		if len(list) > 0 || ctx.Err() != nil || wait == 0 {
			return admin.EventList{Schema: admin.Schema, Now: s.r.Now(), Events: eventsFor(q, list), Newest: newest, Lost: lost}, nil
		}
		select {
		case <-signal:
		case <-ctx.Done():
		case <-draining:
			cancel()
		}
	}
}

func (s *server) snapshot(q *http.Request) (any, error) {
	decisions, err := Number(q, "decisions", 20, 0, 1000)
	if err != nil {
		return nil, err
	}
	events, err := Number(q, "events", 100, 0, 10000)
	if err != nil {
		return nil, err
	}
	after, _, err := sequence(q)
	if err != nil {
		return nil, err
	}
	out := admin.Snapshot{Schema: admin.Schema, Status: s.r.Status(), Workers: s.r.Workers().Workers, Decisions: []json.RawMessage{}}
	if decisions > 0 {
		list, _, err := s.r.Receipts().List(receipt.Query{Limit: decisions})
		if err != nil {
			return nil, err
		}
		if out.Decisions, err = receipts(q, list); err != nil {
			return nil, err
		}
	}
	log := s.r.Events()
	list, newest, _ := log.Since(after, events)
	if after == 0 || after > newest || newest-after > uint64(events) {
		list = log.Last(events)
	}
	out.Events = eventsFor(q, list)
	return out, nil
}

// eventsFor are events as a request's user may see them: one about a request can quote
// what an engine said of it, which can quote the prompt.
func eventsFor(q *http.Request, list []eventlog.Event) []eventlog.Event {
	if seesTexts(q) {
		return list
	}
	list = slices.Clone(list)
	for i := range list {
		if list[i].Request != "" {
			list[i].Text, list[i].Fields = receipt.KeptBack, nil
		}
	}
	return list
}

// route answers what would be decided now, by the very stages of a request,
// without sending or reserving anything.
func (s *server) route(q *http.Request) (any, error) {
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
	in.Endpoint = cmp.Or(in.Endpoint, "/v1/completions")
	c, err := s.c.Route(q.Context(), in)
	if err != nil {
		return nil, err
	}
	// As the receipts that are kept: what an engine does not report is -1, and not NaN.
	c.Decision = c.Decision.Clone()
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

func (s *server) patchConfig(q *http.Request) (any, error) {
	var in admin.ConfigPatch
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	if len(in.Settings) == 0 {
		return nil, bad("settings", "no settings to change")
	}
	if err := s.c.Patch(in.Settings); err != nil {
		return nil, bad("settings", "%v", err)
	}
	return s.c.Config(), nil
}

// maxDrainSeconds is a week.
const maxDrainSeconds = 7 * 24 * 3600

func (s *server) drain(q *http.Request) (any, error) {
	var in admin.DrainRequest
	if err := readJSON(q, &in); err != nil {
		return nil, err
	}
	if in.TimeoutSeconds < 0 || in.TimeoutSeconds > maxDrainSeconds {
		return nil, bad("timeout_seconds", "timeout_seconds: %v is not a number from 0 to %d", in.TimeoutSeconds, maxDrainSeconds)
	}
	return s.c.Drain(time.Duration(in.TimeoutSeconds * float64(time.Second))), nil
}
