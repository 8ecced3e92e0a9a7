package kube

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// recorded is a file of testdata, which holds what a real API server said.
func recorded(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if strings.HasSuffix(name, ".gz") {
		z, err := gzip.NewReader(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		if b, err = io.ReadAll(z); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// patience is how long something may take that takes milliseconds.
const patience = 20 * time.Second

const noPods = `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"249"},"items":[]}`

// apiServer answers with recorded bytes.
type apiServer struct {
	*httptest.Server
	t *testing.T

	mu     sync.Mutex
	list   []byte
	kind   string // content type of list
	refuse []byte // answers everything with 403
	// refuseWatch answers watches so
	refuseWatch []byte
	down        bool // breaks every connection
	cut         chan struct{}

	slices []byte // the list of EndpointSlices

	lines      chan string // of the watch
	sliceLines chan string // of that of EndpointSlices
	pool       chan string // of that of InferencePools
	asked      chan string // one word for each question: list, watch

	agents map[string]string // who asked, by the last part of the path
	open   map[string]int    // watches that go on, by what is watched and its selector
}

func newAPIServer(t *testing.T) *apiServer {
	a := &apiServer{t: t, list: []byte(noPods), kind: "application/json", lines: make(chan string, 64), asked: make(chan string, 1000), cut: make(chan struct{}), agents: map[string]string{}, open: map[string]int{}}
	a.Server = httptest.NewServer(a)
	t.Cleanup(a.Close)
	return a
}

func (a *apiServer) set(change func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change()
}

func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	list, kind, refuse, down, cut, lines := a.list, a.kind, a.refuse, a.down, a.cut, a.lines
	if r.URL.Query().Get("watch") != "" && refuse == nil {
		refuse = a.refuseWatch
	}
	a.agents[path.Base(r.URL.Path)] = r.UserAgent()
	a.mu.Unlock()
	if strings.Contains(r.URL.Path, "/endpointslices") {
		list, lines = a.slices, a.sliceLines
	}
	q := r.URL.Query()
	word := "list"
	if q.Get("watch") != "" {
		word = "watch"
	}
	if q.Get("sendInitialEvents") == "" {
		a.asked <- word + " " + r.URL.Path + " " + q.Get("labelSelector")
	}
	switch {
	case a.pool != nil && strings.Contains(r.URL.Path, "/inferencepools"):
		a.poolAnswer(w, r)
	case down:
		panic(http.ErrAbortHandler)
	case refuse != nil:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write(refuse)
	case q.Get("sendInitialEvents") != "":
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(recorded(a.t, "no-streaming-list.jsonl"))
	case word == "list":
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(list)
	default:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		what := path.Base(r.URL.Path) + " " + q.Get("labelSelector")
		a.set(func() { a.open[what]++ })
		defer a.set(func() { a.open[what]-- })
		for {
			select {
			case <-r.Context().Done():
				return
			case <-cut:
				panic(http.ErrAbortHandler)
			case line := <-lines:
				_, _ = io.WriteString(w, line+"\n")
				w.(http.Flusher).Flush()
			}
		}
	}
}

// kubeconfig is a file that points to the server.
func (a *apiServer) kubeconfig() string {
	file := filepath.Join(a.t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"t","clusters":[{"name":"t","cluster":{"server":%q}}],
"users":[{"name":"t","user":{}}],"contexts":[{"name":"t","context":{"cluster":"t","user":"t","namespace":"life"}}]}`, a.URL)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return file
}

// stand is a source that runs.
type stand struct {
	*Source
	reg    *workers.Registry
	events chan eventlog.Event
}

// labelRoles has the label "model" of simulated engines' pods state their roles.
func (s *stand) labelRoles(t *testing.T) {
	t.Helper()
	labels := workers.RoleLabels{Prefill: []string{"sim-prefill"}, Decode: []string{"sim-decode"}}
	if _, err := s.reg.ApplyWithRoles(workers.SourceFlag, nil, labels); err != nil {
		t.Fatal(err)
	}
}

func start(t *testing.T, a *apiServer, k workers.Kubernetes) *stand {
	t.Helper()
	return startWith(t, a, k, Options{})
}

func startWith(t *testing.T, a *apiServer, k workers.Kubernetes, o Options) *stand {
	t.Helper()
	k.Kubeconfig, k.Port, o.Gather = a.kubeconfig(), 8000, time.Millisecond
	if !k.On() {
		k.Selector = "app"
	}
	s := &stand{events: make(chan eventlog.Event, 1000), reg: workers.NewRegistry(nil)}
	var err error
	if s.Source, err = New(s.reg, k, o, func(e eventlog.Event) { s.events <- e }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// wait waits until the fleet, as fleet describes it, is want.
func (s *stand) wait(t *testing.T, want ...string) {
	t.Helper()
	changed, cancel := s.reg.Subscribe()
	defer cancel()
	deadline := time.After(patience)
	poll := time.NewTicker(5 * time.Millisecond) // what a worker's state says is no change of the fleet
	defer poll.Stop()
	for {
		got := fleet(s.reg)
		if cmp.Equal(got, want) {
			return
		}
		select {
		case <-changed:
		case <-poll.C:
		case <-deadline:
			t.Fatalf("the fleet (-want +got):\n%s", cmp.Diff(want, got))
		}
	}
}

// leftOut waits until pods of these names are left out: the status follows the fleet.
func (s *stand) leftOut(t *testing.T, names ...string) []LeftOut {
	t.Helper()
	deadline := time.After(patience)
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for {
		left := s.Status().LeftOut
		if slices.EqualFunc(left, names, func(l LeftOut, name string) bool { return l.Pod == name }) {
			return left
		}
		select {
		case <-poll.C:
		case <-deadline:
			t.Fatalf("left out are %v, want %q", left, names)
		}
	}
}

func (s *stand) event(t *testing.T, kind string) eventlog.Event {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case e := <-s.events:
			if e.Kind == kind {
				return e
			}
		case <-deadline:
			t.Fatalf("no event %s", kind)
		}
	}
}

// fleet are the workers in a line each.
func fleet(reg *workers.Registry) []string {
	var out []string
	for _, w := range reg.Snapshot().Workers {
		_, why := w.State.Usable()
		if c := w.State.Condition(); !w.State.Draining() && c.Health == workers.Unhealthy {
			why = c.Reason
		}
		line := fmt.Sprintf("%s %s %s %s", w.Name, w.Role, w.Engine, w.URL.Host)
		if w.Revision != "" {
			line += " rev=" + w.Revision
		}
		if w.Slice != "" {
			line += " slice=" + w.Slice
		}
		if w.Bootstrap != nil {
			line += fmt.Sprintf(" bootstrap=%s:%d", w.Bootstrap.Host, w.Bootstrap.Port)
		}
		for _, e := range w.Events {
			line += " " + e.Endpoint
		}
		if why != "" && why != workers.Unknown.String() {
			line += ": " + why
		}
		out = append(out, line)
	}
	return out
}
