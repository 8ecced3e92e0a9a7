package control

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers"
)

// called is a set of engines that note what they are called for, and what followed.
type called struct {
	mu        sync.Mutex
	requests  []string
	forgotten []string
	reread    []string
	events    []eventlog.Event
	status    int
}

func (c *called) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	body, _ := io.ReadAll(q.Body)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests = append(c.requests, strings.TrimSpace(q.Method+" "+q.RequestURI+" "+string(body)))
	w.WriteHeader(c.status)
	_, _ = io.WriteString(w, "the engine's own words")
}

// fleetOf is workers as stated, and what calls them.
func (c *called) fleetOf(t *testing.T, stated ...string) ([]*workers.Worker, *Engines) {
	t.Helper()
	reg := workers.NewRegistry(func(eventlog.Event) {})
	var specs []workers.Spec
	for _, s := range stated {
		spec, err := workers.ParseSpec("", s+",model=m")
		if err != nil {
			t.Fatal(err)
		}
		specs = append(specs, spec)
	}
	if _, err := reg.Apply(workers.SourceFlag, specs); err != nil {
		t.Fatal(err)
	}
	client := upstream.New(upstream.Options{})
	t.Cleanup(client.Close)
	return reg.Snapshot().Workers, NewEngines(EnginesOptions{
		Client: client, Event: func(e eventlog.Event) { c.events = append(c.events, e) },
		Forget: func(k *workers.Rank, _ string) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.forgotten = append(c.forgotten, k.Label)
		},
		Models: func(_ context.Context, w *workers.Worker) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.reread = append(c.reread, w.Name)
		},
	})
}

// TestCallEngines: each engine is called in its own words, and what the router knows follows.
func TestCallEngines(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		set, want         string
		in                admin.ControlCall
		forgotten, reread int
	}{
		{"engine=vllm,dp=2", "POST /reset_prefix_cache", admin.ControlCall{Action: admin.ResetPrefixCache}, 2, 0},
		{"engine=vllm", "POST /start_profile", admin.ControlCall{Action: admin.StartProfile}, 0, 0},
		{"engine=vllm", "POST /sleep?level=2", admin.ControlCall{Action: admin.Sleep, Level: "2"}, 1, 0},
		{"engine=vllm", "POST /wake_up?tags=weights&tags=kv_cache", admin.ControlCall{Action: admin.WakeUp, Tags: []string{"weights", "kv_cache"}}, 0, 0},
		{"engine=vllm", `POST /v1/load_lora_adapter {"lora_name":"a","lora_path":"/a"}`, admin.ControlCall{Action: admin.LoadAdapter, Adapter: "a", Path: "/a"}, 0, 1},
		{"engine=sglang", "POST /flush_cache", admin.ControlCall{Action: admin.ResetPrefixCache}, 1, 0},
		{"engine=sglang", `POST /release_memory_occupation {"tags":["weights"]}`, admin.ControlCall{Action: admin.Sleep, Tags: []string{"weights"}}, 1, 0},
		{"engine=sglang", "POST /resume_memory_occupation {}", admin.ControlCall{Action: admin.WakeUp}, 0, 0},
		{"engine=sglang", `POST /unload_lora_adapter {"lora_name":"a"}`, admin.ControlCall{Action: admin.UnloadAdapter, Adapter: "a"}, 0, 1},
		{"engine=sim,dialect=sglang", "POST /stop_profile", admin.ControlCall{Action: admin.StopProfile}, 0, 0},
	} {
		e := &called{status: 200}
		srv := httptest.NewServer(e)
		c.in.Timeout = time.Minute
		list, engines := e.fleetOf(t, srv.URL+",name=w,"+c.set)
		got := engines.Call(t.Context(), list, &c.in)
		srv.Close()
		if d := cmp.Diff([]string{c.want}, e.requests); d != "" || got.Failed != 0 || !got.Workers[0].OK {
			t.Errorf("%s: %+v\n%s", c.set, got, d)
		}
		if len(e.forgotten) != c.forgotten || len(e.reread) != c.reread {
			t.Errorf("%s %s: forgotten %q, read again %q", c.set, c.in.Action, e.forgotten, e.reread)
		}
		if len(e.events) != 1 || e.events[0].Kind != "workers_called" || e.events[0].Severity == eventlog.Warn {
			t.Errorf("%s: %+v", c.in.Action, e.events)
		}
	}
}

// TestCallFails: one answer for each worker, whatever became of the others. An index follows
// where the engine may have done it, and stays where it has refused or was not reached.
func TestCallFails(t *testing.T) {
	t.Parallel()
	e := &called{status: http.StatusNotFound}
	srv := httptest.NewServer(e)
	defer srv.Close()
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) { <-q.Context().Done() }))
	defer silent.Close()
	list, engines := e.fleetOf(t, srv.URL+",name=a,engine=vllm", "http://b:1,name=b,engine=trtllm", silent.URL+",name=silent,engine=vllm", "http://127.0.0.1:1,name=gone,engine=vllm")
	in := admin.ControlCall{Action: admin.ResetPrefixCache, Timeout: 200 * time.Millisecond}
	got := engines.Call(t.Context(), list, &in)
	want := map[string]string{"a": "VLLM_SERVER_DEV_MODE", "b": "no such call of trtllm", "silent": "timeout", "gone": "connect"}
	for _, r := range got.Workers {
		if r.OK || !strings.Contains(r.Message, want[r.Worker]) {
			t.Errorf("%+v, want %q", r, want[r.Worker])
		}
	}
	if got.Failed != 4 || len(got.Workers) != 4 || !slices.Equal(e.forgotten, []string{"silent/dp0"}) {
		t.Errorf("%d failed, forgotten %q", got.Failed, e.forgotten)
	}
	if len(e.events) != 1 || e.events[0].Severity != eventlog.Warn || !strings.Contains(e.events[0].Text, "0 of 4 workers did it; a: ") {
		t.Errorf("%+v", e.events)
	}
}

// TestCallNames: a name that no worker has is refused before any engine is called.
func TestCallNames(t *testing.T) {
	e := &called{status: 200}
	list, engines := e.fleetOf(t, "http://127.0.0.1:1,name=w,engine=vllm")
	c := &console{Router: &Router{Registry: workers.NewRegistry(func(eventlog.Event) {}), Engines: engines}}
	_, err := c.CallEngines(t.Context(), &admin.ControlCall{Action: admin.Sleep, Workers: []string{"wx"}, Timeout: time.Second})
	refused(t, err, 404, "there is no worker")
	if len(list) != 1 || len(e.events) != 0 {
		t.Errorf("%+v", e.events)
	}
}
