package router_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/soak"
	"github.com/dynctl/dynctl/internal/rig/virtualsoak/reference"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plain runs the tests on routers that are composed without package resumed; those of
// continued streams fail then, and no others. .ci/run does so with the acceptance list.
var plain = flag.Bool("plain", false, "compose routers without continued streams")

// patience is how long a test waits for what should come at once.
const patience = 20 * time.Second

type object = map[string]any

// rig is a router with engines for the time of one test.
type rig struct {
	*loopback.Rig
	t     *testing.T
	model string // that complete asks for
}

// start runs a fleet and a router in front of it, and waits until both are
// ready. When the test ends, nothing may be left on the ledger.
func start(t *testing.T, fleet string, configure ...func(*settings.Config)) *rig {
	t.Helper()
	return startWith(t, loopback.Options{Fleet: fleet}, configure...)
}

func startWith(t *testing.T, o loopback.Options, configure ...func(*settings.Config)) *rig {
	t.Helper()
	r := startCold(t, o, configure...)
	if err := r.Ready(r.wait()); err != nil {
		t.Fatal(err)
	}
	return r
}

// startCold does not wait.
func startCold(t *testing.T, o loopback.Options, configure ...func(*settings.Config)) *rig {
	t.Helper()
	was := o.Configure
	o.Configure = func(c *settings.Config) {
		if was != nil {
			was(c)
		}
		for _, f := range configure {
			f(c)
		}
	}
	g, err := loopback.Start(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	if *plain && g.Router != nil {
		g.Router.WithoutResumed()
	}
	t.Cleanup(func() {
		if g.Router != nil {
			if err := loopback.Wait(waitCtx(t), "an empty ledger", g.Router.Balanced); err != nil {
				t.Error(err)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := g.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return &rig{g, t, "sim"}
}

// set changes the configuration from what the router was started with.
func (r *rig) set(change func(*settings.Config)) {
	r.t.Helper()
	c := r.Config
	change(&c)
	if err := r.Router.Settings().Reload(c, nil); err != nil {
		r.t.Fatal(err)
	}
}

// in is the rig for a subtest.
func (r *rig) in(t *testing.T) *rig { return &rig{r.Rig, t, r.model} }

// of is the rig for requests for a model.
func (r *rig) of(model string) *rig { return &rig{r.Rig, r.t, model} }

func waitCtx(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func (r *rig) wait() context.Context { return waitCtx(r.t) }

// eventually waits until a condition holds.
func (r *rig) eventually(what string, cond func() error) {
	r.t.Helper()
	if err := loopback.Wait(r.wait(), what, cond); err != nil {
		r.t.Fatal(err)
	}
}

// answer is a whole answer of the data plane.
type answer struct {
	status int
	header http.Header
	body   []byte
	err    error // of reading the body
}

func (a *answer) String() string { return fmt.Sprintf("%d %s", a.status, a.body) }

// send sends a request and reads the answer to its end.
func (r *rig) send(method, path string, body []byte, header ...string) *answer {
	r.t.Helper()
	a, err := r.try(r.t.Context(), method, path, body, header...)
	if err != nil {
		r.t.Fatal(err)
	}
	return a
}

func (r *rig) try(ctx context.Context, method, path string, body []byte, header ...string) (*answer, error) {
	resp, err := r.open(ctx, method, path, body, header...)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return &answer{resp.StatusCode, resp.Header, b, err}, nil
}

func (r *rig) open(ctx context.Context, method, path string, body []byte, header ...string) (*http.Response, error) {
	var in io.Reader
	if body != nil {
		in = bytes.NewReader(body)
	}
	q, err := http.NewRequestWithContext(ctx, method, r.URL+path, in)
	if err != nil {
		return nil, err
	}
	for i := 0; i+1 < len(header); i += 2 {
		q.Header[http.CanonicalHeaderKey(header[i])] = append(q.Header[http.CanonicalHeaderKey(header[i])], header[i+1])
	}
	if body != nil && q.Header["Content-Type"] == nil {
		q.Header.Set("Content-Type", "application/json")
	}
	return r.Client.Do(q)
}

// post sends a JSON body and wants an answer with status 200.
func (r *rig) post(path string, body any, header ...string) *answer {
	r.t.Helper()
	a := r.send(http.MethodPost, path, encode(r.t, body), header...)
	if a.status != http.StatusOK || a.err != nil {
		r.t.Fatalf("POST %s: %s (%v)", path, a, a.err)
	}
	return a
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func decode[T any](t *testing.T, b []byte) (v T) {
	t.Helper()
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
	return v
}

// completion is what tests read of an answer.
type completion struct {
	ID      string
	Model   string
	Choices []struct {
		Text         string
		Message      struct{ Content string }
		Delta        struct{ Content string }
		FinishReason string `json:"finish_reason"`
	}
	Usage struct {
		PromptTokens        int `json:"prompt_tokens"`
		CompletionTokens    int `json:"completion_tokens"`
		PromptTokensDetails struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func (a *answer) completion(t *testing.T) completion {
	t.Helper()
	c := decode[completion](t, a.body)
	if len(c.Choices) == 0 {
		t.Fatalf("no choices in %s", a.body)
	}
	return c
}

// apiError is an OpenAI-shaped error.
type apiError struct {
	Error struct{ Message, Type, Code, Param string }
}

// refused checks for an OpenAI-shaped error with a status and a code.
func (a *answer) refused(t *testing.T, status int, code string) apiError {
	t.Helper()
	var e apiError
	if err := json.Unmarshal(a.body, &e); err != nil || a.status != status || e.Error.Code != code || e.Error.Message == "" {
		t.Errorf("got %s, want %d with code %s", a, status, code)
	}
	if a.header.Get("X-Request-Id") == "" {
		t.Errorf("an error without X-Request-Id: %s", a)
	}
	return e
}

// ids is a prompt of n tokens that depends on tag.
func ids(n, tag int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = 300 + (i*7919+tag*104729+i*i*tag)%3000
	}
	return out
}

// complete runs a completion of 12 tokens and returns its text.
func (r *rig) complete(prompt []int, header ...string) (*answer, string) {
	r.t.Helper()
	a := r.post("/v1/completions", object{"model": r.model, "prompt": prompt, "max_tokens": 12, "ignore_eos": true}, header...)
	return a, a.completion(r.t).Choices[0].Text
}

// right is what an engine alone says to the prompt of complete.
func right(prompt []int) string { return (&rig{model: "sim"}).right(prompt) }

// right is that of an engine with the rig's model.
func (r *rig) right(prompt []int) string {
	oracle.Lock()
	defer oracle.Unlock()
	if oracle.words == nil {
		oracle.words, oracle.engines = vocab.New(), map[string]*reference.Engine{}
	}
	e := oracle.engines[r.model]
	if e == nil {
		f, err := sim.ParseFleet("1a:profile=instant,model=" + r.model)
		if err != nil {
			panic(err) // the fleet is ours
		}
		e = reference.New(f.Groups[0], oracle.words)
		oracle.engines[r.model] = e
	}
	tokens := make([]uint32, len(prompt))
	for i, id := range prompt {
		tokens[i] = uint32(id)
	}
	text := ""
	for _, id := range e.Answer(tokens, 12, true).Tokens {
		text += oracle.words.Text(id)
	}
	return text
}

var oracle struct {
	sync.Mutex
	engines map[string]*reference.Engine
	words   *vocab.Vocab
}

// engineAlone starts an engine that no router knows yet.
func engineAlone(t *testing.T, model string) *sim.Engine {
	t.Helper()
	f, err := sim.ParseFleet("1a:profile=instant,model=" + model)
	if err != nil {
		t.Fatal(err)
	}
	running, err := sim.Start(context.Background(), f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := running.Close(); err != nil {
			t.Error(err)
		}
	})
	return running.Engine(0)
}

// askEngine has an engine itself answer a request.
func askEngine(t *testing.T, base, path string, body object) *answer {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, base+path, bytes.NewReader(encode(t, body)))
	if err != nil {
		t.Fatal(err)
	}
	q.Close = true
	q.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%d %s %v", resp.StatusCode, b, err)
	}
	return &answer{resp.StatusCode, resp.Header, b, nil}
}

// direct is complete at an engine itself.
func direct(t *testing.T, base string, prompt []int) string {
	t.Helper()
	a := askEngine(t, base, "/v1/completions", object{"model": "sim", "prompt": prompt, "max_tokens": 12, "ignore_eos": true})
	return a.completion(t).Choices[0].Text
}

// counters are the counters of an engine's first rank, from the engine itself.
func (r *rig) counters(name string) engine.Stats {
	r.t.Helper()
	e := r.Sim.Named(name)
	if e == nil {
		r.t.Fatalf("no engine %s", name)
	}
	s, err := e.Counters()
	if err != nil {
		r.t.Fatal(err)
	}
	return s[0]
}

// touched is the number of requests that all ranks of an engine have finished.
func (r *rig) touched(name string) (n uint64) {
	r.t.Helper()
	s, err := r.Sim.Named(name).Counters()
	if err != nil {
		r.t.Fatal(err)
	}
	for i := range s {
		for _, k := range s[i].Finished {
			n += k
		}
		n += uint64(s[i].Running + s[i].Waiting)
	}
	return n
}

// synced waits until the index equals the engines' caches.
func (r *rig) synced() {
	r.t.Helper()
	if err := soak.IndexSynced(r.wait(), r.Rig); err != nil {
		r.t.Fatal(err)
	}
}

// receipt is the finished receipt of a decision.
func (r *rig) receipt(id string) (c receipt.Receipt) {
	r.t.Helper()
	if id == "" {
		r.t.Fatal("no decision id")
	}
	r.eventually("the receipt", func() error {
		raw, err := r.Admin.Decision(r.t.Context(), id)
		if err != nil {
			return err
		}
		c = receipt.Receipt{}
		if err := json.Unmarshal(raw, &c); err != nil {
			return err
		}
		if c.Live {
			return errors.New("the request is not finished")
		}
		return nil
	})
	return c
}

// allEvents are the events so far.
func (r *rig) allEvents() []admin.Event {
	r.t.Helper()
	l, err := r.Admin.Events(r.t.Context(), 0, 10000, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	return l.Events
}

// events are the events of a kind so far.
func (r *rig) events(kind string) (out []admin.Event) {
	r.t.Helper()
	for _, e := range r.allEvents() {
		if e.Kind == kind {
			out = append(out, e)
		}
	}
	return out
}

func (r *rig) status() *admin.Status {
	r.t.Helper()
	s, err := r.Admin.Status(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// worker is a worker as the admin API describes it.
func (r *rig) worker(name string) admin.Worker {
	r.t.Helper()
	l, err := r.Admin.Workers(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, w := range l.Workers {
		if w.Name == name {
			return w
		}
	}
	r.t.Fatalf("no worker %s", name)
	return admin.Worker{}
}

// metric is a line of the router's metrics page that begins with a name and
// its labels; -1 when there is none.
func (r *rig) metric(series string) float64 {
	r.t.Helper()
	return r.metricWith(series, "")
}

// metricWith is metric with the bearer token of the admin API.
func (r *rig) metricWith(series, token string) float64 {
	r.t.Helper()
	if token != "" {
		token = "Bearer " + token
	}
	_, page, err := r.askAdmin(r.t.Context(), token, http.MethodGet, "/metrics", "")
	if err != nil {
		r.t.Fatal(err)
	}
	return readMetric(strings.NewReader(page), series)
}

// adminPage is what the admin API answers under a path.
func (r *rig) adminPage(ctx context.Context, path string) (string, error) {
	_, page, err := r.askAdmin(ctx, "", http.MethodGet, path, "")
	return page, err
}

// askAdmin sends the admin API a request, with an Authorization header unless that is empty.
func (r *rig) askAdmin(ctx context.Context, authorization, method, path, body string) (status int, page string, err error) {
	q, err := http.NewRequestWithContext(ctx, method, r.AdminURL+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	if authorization != "" {
		q.Header.Set("Authorization", authorization)
	}
	resp, err := r.Client.Do(q)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(raw), err
}

func readMetric(in io.Reader, series string) float64 {
	scan := bufio.NewScanner(in)
	scan.Buffer(nil, 1<<20)
	for scan.Scan() {
		if rest, ok := strings.CutPrefix(scan.Text(), series+" "); ok {
			var v float64
			if _, err := fmt.Sscan(rest, &v); err == nil {
				return v
			}
		}
	}
	return -1
}

// tap stands between the router and engines and keeps what passes.
type tap struct {
	mu         sync.Mutex
	calls      []*tapped
	transports []*http.Transport // to the engines
	// answer, when set, may answer instead of the engine, by returning true.
	answer func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool
}

// tapped is one call as an engine saw it, and what it answered.
type tapped struct {
	engine string
	path   string
	header http.Header
	body   []byte
	status int
	answer []byte
	done   bool
}

// generation reports whether the call is one of a request's legs.
func (c *tapped) generation() bool {
	switch c.path {
	case "/health", "/metrics", "/v1/models", "/version", "/kv_event_sources", "/tokenize", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/loads", "/is_sleeping", "/get_load", "/load":
		return false
	}
	return true
}

// legs are the generation calls so far, once all of them have ended: the
// router may be ready with an answer before the engine's handler is.
func (p *tap) legs() (out []tapped) {
	for end := time.Now().Add(patience); ; {
		p.mu.Lock()
		ended := true
		out = out[:0]
		for _, c := range p.calls {
			if c.generation() {
				out = append(out, *c)
				ended = ended && c.done
			}
		}
		p.mu.Unlock()
		if ended || time.Now().After(end) {
			return out
		}
		runtime.Gosched()
	}
}

// legsOf are the generation calls to engines whose name has a prefix.
func (p *tap) legsOf(prefix string) (out []tapped) {
	for _, c := range p.legs() {
		if strings.HasPrefix(c.engine, prefix) {
			out = append(out, c)
		}
	}
	return out
}

// hangUp closes the tap's unused connections to engines: one that was restarted has
// closed its side, which a transport may not have seen when the next call comes.
func (p *tap) hangUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.transports {
		t.CloseIdleConnections()
	}
}

func (p *tap) reset() {
	p.mu.Lock()
	p.calls = nil
	p.mu.Unlock()
}

func (p *tap) set(answer func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool) {
	p.mu.Lock()
	p.answer = answer
	p.mu.Unlock()
}

// specs puts a tap in front of every engine.
func (p *tap) specs(t *testing.T) func([]workers.Spec) []workers.Spec {
	return func(in []workers.Spec) []workers.Spec {
		for i := range in {
			in[i].URL = p.before(t, in[i].Name, in[i].URL)
		}
		return in
	}
}

// before starts a tap in front of an engine.
func (p *tap) before(t *testing.T, name string, to *url.URL) *url.URL {
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 16}
	p.mu.Lock()
	p.transports = append(p.transports, transport)
	p.mu.Unlock()
	proxy := proxyTo(to, transport)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, err := io.ReadAll(q.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		q.Body = io.NopCloser(bytes.NewReader(body))
		rec := &recorder{ResponseWriter: w, status: http.StatusOK}
		call := &tapped{engine: name, path: q.URL.RequestURI(), header: q.Header.Clone(), body: body}
		p.mu.Lock()
		p.calls = append(p.calls, call)
		answer := p.answer
		p.mu.Unlock()
		defer func() {
			p.mu.Lock()
			call.status, call.answer, call.done = rec.status, rec.body.Bytes(), true
			p.mu.Unlock()
		}()
		if answer != nil && answer(name, rec, q, body) {
			return
		}
		proxy.ServeHTTP(rec, q)
	}))
	s.Config.ErrorLog = quietLog
	s.Start()
	// The router is closed before: cleanups run in reverse order.
	t.Cleanup(func() { s.CloseClientConnections(); s.Close(); transport.CloseIdleConnections() })
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func proxyTo(to *url.URL, transport http.RoundTripper) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:       func(q *httputil.ProxyRequest) { q.SetURL(to); q.Out.Host = q.In.Host },
		FlushInterval: -1, Transport: transport, ErrorLog: quietLog,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { panic(http.ErrAbortHandler) },
	}
}

// recorder keeps what an engine answers.
type recorder struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

func (r *recorder) WriteHeader(status int) {
	r.status = status
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	r.body.Write(b)
	return r.ResponseWriter.Write(b)
}

func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// Flush is what ReverseProxy looks for besides Unwrap.
func (r *recorder) Flush() { _ = http.NewResponseController(r.ResponseWriter).Flush() }

// tappedRig runs a fleet behind taps.
func tappedRig(t *testing.T, fleet string, configure ...func(*settings.Config)) (*rig, *tap) {
	t.Helper()
	p := &tap{}
	return startWith(t, loopback.Options{Fleet: fleet, Specs: p.specs(t)}, configure...), p
}

// adminRoute asks for a dry run of a completion.
func adminRoute(prompt []int, session string) admin.RouteRequest {
	tokens := make([]uint32, len(prompt))
	for i, id := range prompt {
		tokens[i] = uint32(id)
	}
	return admin.RouteRequest{Model: "sim", Tokens: tokens, Session: session}
}

// routeOf asks for a dry run of a body.
func routeOf(t *testing.T, endpoint string, body object) admin.RouteRequest {
	t.Helper()
	return admin.RouteRequest{Endpoint: endpoint, Body: encode(t, body)}
}

// callsOf are the calls to a path that have begun.
func (p *tap) callsOf(path string) (out []*tapped) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.calls {
		if c.path == path {
			out = append(out, c)
		}
	}
	return out
}

// talkTo starts a program, and returns its input and the lines of its output.
func talkTo(t *testing.T, cmd *exec.Cmd) (io.WriteCloser, *bufio.Scanner) {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return in, bufio.NewScanner(out)
}
