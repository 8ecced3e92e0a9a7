package control

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers"
)

// leaving is a router that may drain.
type leaving struct {
	Stages
	drain *admin.DrainState
}

func (d *leaving) Drain() *admin.DrainState { return d.drain }

// TestServeProbe: a router that cannot serve lives all the same; it can when a worker that
// decodes is usable, and it does not drain.
func TestServeProbe(t *testing.T) {
	r, d := workers.NewRegistry(func(eventlog.Event) {}), &leaving{}
	s := &State{Stages: d, Registry: r}
	probe := func(ready int) {
		t.Helper()
		for path, want := range map[string]int{"/healthz": http.StatusOK, "/health": ready, "/readyz": ready} {
			w := httptest.NewRecorder()
			s.ServeProbe(w, httptest.NewRequest(http.MethodGet, path, nil))
			if w.Code != want {
				t.Errorf("%s: %d, not %d: %s", path, w.Code, want, w.Body)
			}
		}
	}
	probe(http.StatusServiceUnavailable)
	if _, err := r.Apply("test", []workers.Spec{{Name: "a", Facts: workers.Facts{Role: workers.Decode}, URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}}}); err != nil {
		t.Fatal(err)
	}
	a, _ := r.Snapshot().Worker("a")
	a.State.SetCondition(workers.Condition{Health: workers.Healthy})
	probe(http.StatusOK)
	d.drain = &admin.DrainState{}
	probe(http.StatusServiceUnavailable)
}
