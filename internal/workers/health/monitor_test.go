package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// fleet is a transport behind which engines live that answer from memory, so
// that time may be virtual.
type fleet struct {
	mu    sync.Mutex
	pages map[string]map[string]string // by host, by path; a host that is not there refuses
	asked map[string]int               // by host and path
	delay time.Duration
	now   atomic.Int32 // requests in flight
	most  atomic.Int32
}

func newFleet() *fleet {
	return &fleet{pages: map[string]map[string]string{}, asked: map[string]int{}}
}

func (f *fleet) RoundTrip(req *http.Request) (*http.Response, error) {
	n := f.now.Add(1)
	defer f.now.Add(-1)
	for old := f.most.Load(); n > old && !f.most.CompareAndSwap(old, n); old = f.most.Load() {
	}
	f.mu.Lock()
	delay := f.delay
	f.asked[req.URL.Host+req.URL.Path]++
	engine, up := f.pages[req.URL.Host]
	body, there := engine[req.URL.Path]
	f.mu.Unlock()
	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
	if !up {
		return nil, errors.New("connection refused")
	}
	status := http.StatusOK
	if !there {
		status = http.StatusNotFound
	} else if s, ok := strings.CutPrefix(body, "status "); ok {
		if _, err := fmt.Sscan(s, &status); err != nil {
			return nil, err
		}
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body)), Request: req}, nil
}

func (f *fleet) set(host string, pages map[string]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if pages == nil {
		delete(f.pages, host)
	} else {
		f.pages[host] = pages
	}
}

func (f *fleet) count(page string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[page]
}

func vllmPages(port int, extra string) map[string]string {
	return map[string]string{
		"/health":           "",
		"/v1/models":        `{"data":[{"id":"m","owned_by":"vllm","max_model_len":100}]}`,
		"/kv_event_sources": fmt.Sprintf(`{"0":{"publisher":"zmq","endpoint":"tcp://*:%d"}}`, port),
		"/metrics": `vllm:num_requests_running{engine="0"} 2
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="64"} 1
` + extra,
	}
}

// log collects events in one line each.
type log struct {
	mu    sync.Mutex
	lines []string
}

func (l *log) sink(e eventlog.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, e.Kind+": "+e.Text)
}

func (l *log) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.lines
	l.lines = nil
	return out
}

func specs(t testing.TB, texts ...string) []workers.Spec {
	t.Helper()
	var out []workers.Spec
	for _, text := range texts {
		s, err := workers.ParseSpec("", text)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
	return out
}

func registry(t testing.TB, sink eventlog.Sink, texts ...string) *workers.Registry {
	t.Helper()
	reg := workers.NewRegistry(sink)
	if _, err := reg.Apply("flag", specs(t, texts...)); err != nil {
		t.Fatal(err)
	}
	return reg
}

func get(t testing.TB, reg *workers.Registry, name string) *workers.Worker {
	t.Helper()
	w, ok := reg.Snapshot().Worker(name)
	if !ok {
		t.Fatalf("no worker %s", name)
	}
	return w
}

// elapse lets time pass inside a synctest bubble, and everything that it has
// set off come to rest. Outside of one it panics: no test waits for real time.
func elapse(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// background runs run until the test ends, and wants no error of it.
func background(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// expect compares the health of a worker once everything has come to rest.
func expect(t *testing.T, w *workers.Worker, h workers.Health, reason string) {
	t.Helper()
	synctest.Wait()
	c := w.State.Condition()
	if c.Health != h || c.Reason != reason {
		t.Errorf("condition %s %q, want %s %q", c.Health, c.Reason, h, reason)
	}
}

// scene is an engine at a:1, which is worker a, under a monitor.
type scene struct {
	*fleet
	reg    *workers.Registry
	w      *workers.Worker
	events *log
}

// monitored plays a scene in virtual time. It begins when the monitor begins to run; delay is
// how long the engine takes to answer.
func monitored(t *testing.T, o Options, delay time.Duration, pages map[string]string, play func(t *testing.T, s scene)) {
	synctest.Test(t, func(t *testing.T) {
		s := scene{fleet: newFleet(), reg: registry(t, nil, "http://a:1,name=a"), events: &log{}}
		s.w = get(t, s.reg, "a")
		s.delay = delay
		s.set("a:1", pages)
		o.Transport = s.fleet
		background(t, NewMonitor(s.reg, o, s.events.sink).Run)
		play(t, s)
	})
}

func TestMonitorLife(t *testing.T) {
	monitored(t, Options{}, 0, vllmPages(5557, ""), func(t *testing.T, f scene) {
		reg, w, events := f.reg, f.w, f.events
		// The first probe comes at once, and with it all that the engine reports.
		expect(t, w, workers.Healthy, "")
		now := get(t, reg, "a")
		if now.BlockSize != 16 || now.KVBlocks != 64 || !now.Serves("m") {
			t.Errorf("learned blocks of %d tokens, %d of them, models %q", now.BlockSize, now.KVBlocks, now.Models)
		}
		if len(now.Events) != 1 || now.Events[0].Endpoint != "tcp://a:5557" {
			t.Errorf("learned event sources %+v", now.Events)
		}
		if l := now.Ranks[0].Load(); l == nil || l.Running != 2 || l.Waiting != -1 {
			t.Errorf("load %+v", l)
		}

		// One failure is none; two are.
		f.set("a:1", map[string]string{"/health": "status 503"})
		elapse(1050 * time.Millisecond)
		expect(t, w, workers.Healthy, "")
		elapse(1150 * time.Millisecond)
		expect(t, w, workers.Unhealthy, "GET /health answers 503")
		if w.Ranks[0].Load() != nil {
			t.Error("the load of a dead engine is kept")
		}
		f.set("a:1", nil)
		elapse(1150 * time.Millisecond)
		expect(t, w, workers.Unhealthy, "GET /health: connection refused")

		// The engine comes back with other event ports.
		f.set("a:1", vllmPages(6000, ""))
		elapse(1150 * time.Millisecond)
		expect(t, w, workers.Healthy, "")
		if got := get(t, reg, "a").Events[0].Endpoint; got != "tcp://a:6000" {
			t.Errorf("event endpoint %s after the restart", got)
		}
		lines := events.take()
		if len(lines) != 3 || lines[0] != "health_changed: worker a is healthy" ||
			lines[1] != "health_changed: worker a is unhealthy: GET /health answers 503" ||
			!strings.HasPrefix(lines[2], "health_changed: worker a is healthy after ") {
			t.Errorf("events %q", lines)
		}

		// A worker that leaves is left alone.
		if _, err := reg.Apply("flag", nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		before := f.count("a:1/health")
		elapse(5 * time.Second)
		if after := f.count("a:1/health"); after != before {
			t.Errorf("%d probes after the worker left", after-before)
		}
	})
}

func TestMonitorThresholdsAndTimeout(t *testing.T) {
	monitored(t, Options{Up: 3, Down: 2}, 3*time.Second, vllmPages(1, ""), func(t *testing.T, f scene) {
		w := f.w
		elapse(2 * time.Second)
		expect(t, w, workers.Unhealthy, "GET /health: no answer within 2s")
		f.slow(0)
		f.set("a:1", map[string]string{"/health": "status 503"})
		elapse(4 * time.Second)
		expect(t, w, workers.Unhealthy, "GET /health answers 503")
		f.set("a:1", vllmPages(1, ""))
		elapse(1500 * time.Millisecond) // one or two good probes
		if h := w.State.Condition().Health; h != workers.Unhealthy {
			t.Errorf("%s before the third good probe", h)
		}
		elapse(2 * time.Second)
		expect(t, w, workers.Healthy, "")
	})
}

func TestMonitorContradiction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, events := newFleet(), &log{}
		reg := registry(t, events.sink, "http://a:1,name=decode-0,block_size=32")
		f.set("a:1", vllmPages(1, ""))
		background(t, NewMonitor(reg, Options{Transport: f}, events.sink).Run)
		const want = "block size 32 stated on the command line, engine says 16 (vllm:cache_config_info)"
		elapse(5 * time.Second)
		w := get(t, reg, "decode-0")
		expect(t, w, workers.Unhealthy, want)
		if ok, _ := w.State.Usable(); ok {
			t.Error("the worker is usable")
		}
		n := 0
		for _, line := range events.take() {
			if line == "worker_conflict: worker decode-0: "+want {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d events of the contradiction", n)
		}
	})
}

func TestMonitorSleep(t *testing.T) {
	const awake = `vllm:engine_sleep_state{engine="0",sleep_state="awake"} `
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		reg := registry(t, nil, "http://a:1,name=a", "http://b:1,name=b")
		a, b := get(t, reg, "a"), get(t, reg, "b")
		f.set("a:1", vllmPages(1, awake+"0\n"))
		withPath := func(asleep bool) map[string]string {
			p := vllmPages(2, "")
			p["/is_sleeping"] = fmt.Sprintf(`{"is_sleeping":%v}`, asleep)
			return p
		}
		f.set("b:1", withPath(false))
		var slept []string
		background(t, NewMonitor(reg, Options{Transport: f, Slept: func(w *workers.Worker) { slept = append(slept, w.Name) }}, nil).Run)
		expect(t, a, workers.Asleep, "the engine sleeps")
		expect(t, b, workers.Healthy, "")
		f.set("a:1", vllmPages(1, awake+"1\n"))
		f.set("b:1", withPath(true))
		elapse(2500 * time.Millisecond)
		expect(t, a, workers.Healthy, "")
		expect(t, b, workers.Asleep, "the engine sleeps")
		f.set("b:1", withPath(false))
		elapse(2500 * time.Millisecond)
		expect(t, b, workers.Healthy, "")
		if f.count("a:1/is_sleeping") != 0 {
			t.Error("/is_sleeping is asked although /metrics says it")
		}
		synctest.Wait()
		if d := cmp.Diff([]string{"a", "b"}, slept); d != "" {
			t.Errorf("found asleep (-want +got):\n%s", d)
		}
	})
}

func TestMonitorUnknownLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, events := newFleet(), &log{}
		reg := registry(t, nil, "http://a:1,name=a", "http://b:1,name=b")
		f.set("a:1", vllmPages(1, ""))
		f.set("b:1", map[string]string{"/health": ""})
		background(t, NewMonitor(reg, Options{Transport: f}, events.sink).Run)
		synctest.Wait()
		quiet := vllmPages(1, "")
		quiet["/metrics"] = "python_info 1\n"
		f.set("a:1", quiet)
		elapse(5 * time.Second)
		for _, name := range []string{"a", "b"} {
			if l := get(t, reg, name).Ranks[0].Load(); l != nil {
				t.Errorf("%s: load %+v", name, l)
			}
			expect(t, get(t, reg, name), workers.Healthy, "")
		}
		var unknown []string
		for _, line := range events.take() {
			if strings.HasPrefix(line, "load_unknown") {
				unknown = append(unknown, line)
			}
		}
		if len(unknown) != 2 || !strings.Contains(strings.Join(unknown, "\n"), "worker a reports no load: no series that is known") ||
			!strings.Contains(strings.Join(unknown, "\n"), "worker b reports no load: GET /metrics answers 404") {
			t.Errorf("events %q", unknown)
		}
		f.set("a:1", vllmPages(1, ""))
		elapse(1200 * time.Millisecond) // at the first scrape
		if l := get(t, reg, "a").Ranks[0].Load(); l == nil || l.Running != 2 {
			t.Errorf("load %+v after it is reported again", l)
		}
	})
}

func TestMonitorSeesAFastRestart(t *testing.T) {
	monitored(t, Options{}, 0, vllmPages(5557, "process_start_time_seconds 100\n"), func(t *testing.T, f scene) {
		reg, events := f.reg, f.events
		elapse(3 * time.Second)
		f.set("a:1", vllmPages(7000, "process_start_time_seconds 200\n"))
		elapse(3 * time.Second)
		if got := get(t, reg, "a").Events[0].Endpoint; got != "tcp://a:7000" {
			t.Errorf("event endpoint %s", got)
		}
		if lines := strings.Join(events.take(), "\n"); strings.Count(lines, "worker_restarted") != 1 {
			t.Errorf("events %s", lines)
		}
		f.set("a:1", vllmPages(7000, "process_start_time_seconds 200\nvllm:prefix_cache_queries_total{engine=\"0\"} 50\n"))
		elapse(2500 * time.Millisecond)
		f.set("a:1", vllmPages(8000, "process_start_time_seconds 200\nvllm:prefix_cache_queries_total{engine=\"0\"} 5\n"))
		elapse(3 * time.Second)
		if got := get(t, reg, "a").Events[0].Endpoint; got != "tcp://a:8000" {
			t.Errorf("event endpoint %s after the counters started over", got)
		}
	})
}

func TestMonitorRelearns(t *testing.T) {
	pages := vllmPages(1, "")
	pages["/v1/models"] = "status 500"
	monitored(t, Options{}, 0, pages, func(t *testing.T, f scene) {
		reg := f.reg
		synctest.Wait()
		if w := get(t, reg, "a"); w.State.Condition().Health != workers.Healthy || w.Serves("m") {
			t.Errorf("worker %+v", w)
		}
		// A page that failed is asked again soon; a whole answer, once a minute.
		f.set("a:1", vllmPages(1, ""))
		elapse(2500 * time.Millisecond)
		if !get(t, reg, "a").Serves("m") {
			t.Error("the models were not asked for again")
		}
		before := f.count("a:1/v1/models")
		elapse(30 * time.Second)
		if n := f.count("a:1/v1/models") - before; n != 0 {
			t.Errorf("asked %d times in half a minute", n)
		}
		elapse(45 * time.Second)
		if n := f.count("a:1/v1/models") - before; n != 1 {
			t.Errorf("asked %d times in more than a minute", n)
		}
	})
}

// TestMonitorModels: an adapter that an engine has loaded is known as soon as it is asked about
// its models, which changes nothing else of what is known.
func TestMonitorModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		reg := registry(t, nil, "http://a:1,name=a")
		f.set("a:1", vllmPages(1, ""))
		m := NewMonitor(reg, Options{Transport: f}, nil)
		if err := m.Learn(t.Context(), get(t, reg, "a")); err != nil {
			t.Fatal(err)
		}
		pages := vllmPages(1, "")
		pages["/v1/models"] = `{"data":[{"id":"m","owned_by":"vllm","max_model_len":100},{"id":"lora","owned_by":"vllm","parent":"m"}]}`
		f.set("a:1", pages)
		metrics := f.count("a:1/metrics")
		m.Models(t.Context(), get(t, reg, "a"))
		if w := get(t, reg, "a"); !w.Serves("lora") || w.BlockSize != 16 || len(w.LoRAs) != 1 || f.count("a:1/metrics") != metrics {
			t.Errorf("%+v, and %d metrics pages were read", w, f.count("a:1/metrics")-metrics)
		}
		// An answer that does not come changes nothing.
		f.set("a:1", nil)
		m.Models(t.Context(), get(t, reg, "a"))
		if !get(t, reg, "a").Serves("lora") {
			t.Error("the models are forgotten")
		}
	})
}

func TestMonitorSGLangLoads(t *testing.T) {
	monitored(t, Options{}, 0, map[string]string{
		"/health": "", "/v1/models": `{"data":[{"id":"m","owned_by":"sglang"}]}`,
		"/server_info": string(data(t, "sglang-server_info.json")),
		"/v1/loads":    `{"loads":[{"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":1,"token_usage":0.5},{"dp_rank":1,"num_running_reqs":4}]}`,
	}, func(t *testing.T, f scene) {
		elapse(2500 * time.Millisecond)
		w := get(t, f.reg, "a")
		if len(w.Ranks) != 2 || w.Engine != workers.SGLang || w.Role != workers.Prefill {
			t.Fatalf("worker %+v", w)
		}
		type load struct{ Running, Waiting int }
		for i, want := range []load{{3, 1}, {4, -1}} {
			l := w.Ranks[i].Load()
			if l == nil {
				t.Fatalf("rank %d has no load", i)
			}
			if d := cmp.Diff(want, load{l.Running, l.Waiting}); d != "" {
				t.Errorf("load of rank %d (-want +got):\n%s", i, d)
			}
		}
	})
}

func TestMonitorThousandWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		f.delay = 10 * time.Millisecond
		var texts []string
		for i := range 1000 {
			host := fmt.Sprintf("h%d:1", i)
			texts = append(texts, "http://"+host)
			f.set(host, vllmPages(1, ""))
		}
		reg := registry(t, nil, texts...)
		background(t, NewMonitor(reg, Options{Transport: f, Concurrency: 64}, nil).Run)
		begin := time.Now()
		for {
			elapse(50 * time.Millisecond)
			ready := 0
			for _, w := range reg.Snapshot().Workers {
				if w.State.Condition().Health == workers.Healthy {
					ready++
				}
			}
			if ready == 1000 {
				break
			}
			if time.Since(begin) > 2*time.Second {
				t.Fatalf("%d workers are ready after 2 s", ready)
			}
		}
		elapse(3 * time.Second)
		// A learning worker sends three requests at once within its turn.
		if most := f.most.Load(); most > 64*4 {
			t.Errorf("%d requests at the same time", most)
		}
	})
}

// TestMonitorOverHTTP runs against real sockets, with a key, and stops while
// requests hang.
func TestMonitorOverHTTP(t *testing.T) {
	pages := vllmPages(5557, "")
	hang := make(chan struct{})
	var hanging atomic.Bool
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer key" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if hanging.Load() {
			select {
			case hang <- struct{}{}:
			default:
			}
			<-r.Context().Done()
			return
		}
		body, ok := pages[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
		}
		fmt.Fprint(w, body)
	}))
	defer srv.Close()
	events := make(chan eventlog.Event, 100)
	s := specs(t, srv.URL+",name=a", "http://127.0.0.1:1,name=closed")
	s[0].APIKey = "key"
	reg := workers.NewRegistry(nil)
	if _, err := reg.Apply("flag", s); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- NewMonitor(reg, Options{Interval: 5 * time.Millisecond, Scrape: 5 * time.Millisecond, Timeout: time.Minute}, func(e eventlog.Event) {
			select {
			case events <- e:
			default:
			}
		}).Run(ctx)
	}()
	want := map[string]string{"a": "healthy", "closed": "unhealthy"}
	got := map[string]string{}
	for len(got) < 2 {
		select {
		case e := <-events:
			if e.Kind == "health_changed" {
				got[e.Worker] = fmt.Sprint(e.Fields["to"])
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("only %v", got)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if w := get(t, reg, "a"); !w.Serves("m") || w.BlockSize != 16 {
		t.Errorf("worker %+v", w)
	}
	hanging.Store(true)
	<-hang
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("Run does not end while a request hangs")
	}
}
