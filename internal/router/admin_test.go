package router_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
)

// modelListIsAskedForOnce: clients who ask for the models at the same time
// share one question to the fleet, and none of them has to wait for it.
func modelListIsAskedForOnce(t *testing.T, r *rig, p *tap) {
	before := r.status().Traffic
	asked, release := make(chan struct{}, 8), make(chan struct{})
	p.set(func(_ string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path == "/v1/models" && q.Header.Get("User-Agent") != "dynctl" { // which the probes are
			asked <- struct{}{}
			<-release
		}
		return false
	})
	type result struct {
		a   *answer
		err error
	}
	ask := func(ctx context.Context) chan result {
		got := make(chan result, 1)
		go func() {
			a, err := r.try(ctx, http.MethodGet, "/v1/models", nil)
			got <- result{a, err}
		}()
		return got
	}
	first := ask(t.Context())
	<-asked
	hasty, leave := context.WithCancel(t.Context())
	gone := ask(hasty)
	others := []chan result{ask(t.Context()), ask(t.Context())}
	r.eventually("all to be in", func() error {
		if st, err := r.Admin.Status(t.Context()); err != nil || st.Traffic.Requests < before.Requests+4 {
			return fmt.Errorf("%d requests, %w", st.Traffic.Requests, err)
		}
		return nil
	})
	leave()
	if g := <-gone; !errors.Is(g.err, context.Canceled) {
		t.Errorf("the client who left: %v", g.err)
	}
	r.eventually("the books of the client who left to be closed", func() error {
		if st, err := r.Admin.Status(t.Context()); err != nil || st.Traffic.Cancelled != before.Cancelled+1 {
			return fmt.Errorf("%d cancelled, %w", st.Traffic.Cancelled, err)
		}
		return nil
	})
	close(release)
	for _, c := range append(others, first) {
		if g := <-c; g.err != nil || g.a.status != http.StatusOK || rawjson.Value(g.a.body).Get("data.0.id").String() != "sim" {
			t.Errorf("%v %v", g.a, g.err)
		}
	}
	if len(asked) != 0 {
		t.Errorf("the fleet was asked %d times more", len(asked))
	}
}

// recorded is a recording with the state that a test sets.
type recorded struct {
	atomic.Pointer[admin.Recorder]
	ended chan struct{}
}

func (r *recorded) State() *admin.Recorder { return r.Load() }

func (r *recorded) Ended() <-chan struct{} { return r.ended }

// statusShowsTheRecorder: what the process records is part of the status and
// of the metrics, and a recording that broke is a reason not to be ready, a metric
// and an event.
func statusShowsTheRecorder(t *testing.T, r *rig, rec *recorded) {
	if st := r.status(); st.Recorder == nil || *st.Recorder != *rec.State() || st.State != "ready" {
		t.Errorf("%+v in state %s %q", st.Recorder, st.State, st.Reasons)
	}
	metrics := func(want map[string]float64) {
		t.Helper()
		for name, n := range want {
			if got := r.metric("dynctl_recording_" + name); got != n {
				t.Errorf("dynctl_recording_%s is %v, want %v", name, got, n)
			}
		}
	}
	metrics(map[string]float64{"failed": 0, "bytes_total": 7, "records_total": 3, "dropped_total": 1})
	rec.Store(&admin.Recorder{Path: "t.jsonl", Records: 3, Error: "no space left on device"})
	close(rec.ended)
	snap, err := r.Admin.Snapshot(t.Context(), 0, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if st := snap.Status; st.Recorder == nil || st.State != "degraded" || !strings.Contains(strings.Join(st.Reasons, "; "), "the recording has ended: no space left on device") {
		t.Errorf("%+v in state %s %q", st.Recorder, st.State, st.Reasons)
	}
	metrics(map[string]float64{"failed": 1, "records_total": 3})
	r.eventually("an event of it", func() error {
		if e := r.events("recording_failed"); len(e) != 1 || e[0].Severity != "error" || !strings.Contains(e[0].Text, "t.jsonl") || !strings.Contains(e[0].Text, "no space left on device") {
			return fmt.Errorf("events %+v", e)
		}
		return nil
	})
}

// unknownFiguresAreNull: what nothing has been seen of yet is null, and a
// number once there was something.
func unknownFiguresAreNull(t *testing.T, r *rig, _ *tap) {
	figures := map[string]string{
		"/admin/v1/status":      "index.hit_share",
		"/admin/v1/index/stats": "totals.hit_share",
		"/admin/v1/ranks":       "ranks.0.feed.last_seq",
		"/admin/v1/workers":     "workers.0.ranks.0.feed.lag_seconds",
	}
	check := func(null bool) error {
		for path, key := range figures {
			raw, err := r.adminPage(t.Context(), path)
			if got := rawjson.Value(raw).Get(key); err != nil || !got.Exists() || rawjson.IsNull(got) != null {
				return fmt.Errorf("%s of %s is %q, want null: %v (%w)", key, path, []byte(got), null, err)
			}
		}
		return nil
	}
	if err := check(true); err != nil {
		t.Error(err)
	}
	if a, _ := r.complete(ids(100, 1)); a.status != http.StatusOK {
		t.Fatal(a)
	}
	r.eventually("figures", func() error { return check(false) })
}

// TestRoleByLabel: a worker's label "model" gives its role wherever the worker
// was stated, a stated role comes before it, and a change of the setting counts
// for the workers that are there.
func TestRoleByLabel(t *testing.T) {
	t.Parallel()
	cases := map[string]struct{ keys, want, after string }{
		"p": {"labels=model:first", "prefill", "decode"},
		"d": {"labels=model:second", "decode", "aggregated"},
		"o": {"labels=model:other", "aggregated", "aggregated"},
		"n": {"labels=gpu:first", "aggregated", "aggregated"},
		"s": {"labels=model:first,role=decode", "decode", "decode"},
	}
	port := 0
	spec := func(source, name string) string {
		port++
		return fmt.Sprintf("http://127.0.0.1:%d,name=%s-%s,%s", port, source, name, cases[name].keys)
	}
	file := filepath.Join(t.TempDir(), "workers.yaml")
	text := "workers:\n"
	var flags []string
	for name := range cases {
		flags = append(flags, spec("flag", name))
		text += "  - " + spec("file", name) + "\n"
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	r := startCold(t, loopback.Options{Fleet: "1a:profile=instant"}, func(c *settings.Config) {
		c.Worker, c.WorkersFile = flags, file
		c.Routing.PrefillLabels, c.Routing.DecodeLabels = []string{"first"}, []string{"second"}
	})
	for name := range cases {
		if _, err := r.Admin.AddWorker(t.Context(), admin.AddWorker{Spec: spec("admin", name)}); err != nil {
			t.Fatal(err)
		}
	}
	roles := func() map[string]string {
		list, err := r.Admin.Workers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]string{}
		for _, w := range list.Workers {
			out[w.Name] = w.Role
		}
		return out
	}
	r.eventually("the workers of the file", func() error {
		if n := len(roles()); n != 3*len(cases)+1 {
			return fmt.Errorf("%d workers", n)
		}
		return nil
	})
	check := func(when string, want func(name string) string) {
		got := roles()
		for _, source := range []string{"flag", "file", "admin"} {
			for name, c := range cases {
				if role := got[source+"-"+name]; role != want(name) {
					t.Errorf("%s: %s with %s is %s, want %s", when, source, c.keys, role, want(name))
				}
			}
		}
	}
	check("at first", func(name string) string { return cases[name].want })
	c := r.Config
	c.Routing.PrefillLabels, c.Routing.DecodeLabels = nil, []string{"first"}
	if err := r.Router.Settings().Reload(c, nil); err != nil {
		t.Fatal(err)
	}
	check("after a reload", func(name string) string { return cases[name].after })
}
