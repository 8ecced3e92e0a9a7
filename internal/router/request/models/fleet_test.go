package models

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// fleet is one worker for each list of models, which may be used; one with an
// empty list has not reported its models.
func fleet(t *testing.T, lists ...[]string) *workers.Snapshot {
	t.Helper()
	r := workers.NewRegistry(func(eventlog.Event) {})
	var specs []workers.Spec
	for i := range lists {
		specs = append(specs, workers.Spec{Name: fmt.Sprint("w", i), URL: &url.URL{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", i+1)}})
	}
	if _, err := r.Apply("test", specs); err != nil {
		t.Fatal(err)
	}
	for i, list := range lists {
		w, _ := r.Snapshot().Worker(fmt.Sprint("w", i))
		if _, err := r.Update(w, workers.Learned{Facts: workers.Facts{Models: list}}); err != nil {
			t.Fatal(err)
		}
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	return r.Snapshot()
}

// TestAsk: one worker of each set of models is asked, one that gives no answer or is not
// usable has no part, and a client that has left does not end the question.
func TestAsk(t *testing.T) {
	f := fleet(t, []string{"a"}, []string{"a"}, []string{"b", "a"}, []string{"c"}, []string{"d"})
	unhealthy, _ := f.Worker("w4")
	unhealthy.State.SetCondition(workers.Condition{Health: workers.Unhealthy})
	left, leave := context.WithCancel(t.Context())
	leave()
	var mu sync.Mutex
	asked := map[string]bool{}
	l, err := Query(left, f, []Alias{{"alias", "b"}}, func(ctx context.Context, w *workers.Worker) []byte {
		mu.Lock()
		defer mu.Unlock()
		asked[w.Name] = true
		if w.Name == "w3" || ctx.Err() != nil {
			return nil
		}
		return fmt.Appendf(nil, `{"data":[{"id":%q}]}`, w.Models[0])
	})
	if want := map[string]bool{"w0": true, "w2": true, "w3": true}; err != nil || !maps.Equal(asked, want) {
		t.Errorf("asked %v, want %v: %v", asked, want, err)
	}
	if got, want := string(l.JSON()), `{"object":"list","data":[{"id":"a"},{"id":"b"},{"id":"alias","root":"b"}]}`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestQueryPassesTheDead: a worker that does not answer hides no model that another one has.
func TestQueryPassesTheDead(t *testing.T) {
	l, err := Query(t.Context(), fleet(t, []string{"a"}, []string{"a"}), nil, func(_ context.Context, w *workers.Worker) []byte {
		if w.Name == "w0" {
			return nil
		}
		return []byte(`{"data":[{"id":"a"}]}`)
	})
	if got := string(l.JSON()); err != nil || !strings.Contains(got, `"a"`) {
		t.Errorf("%s, %v", got, err)
	}
}

// TestNotServed: for a while a model may be that of a worker which has not reported its own
// yet; a name that is nearly right gets a suggestion.
func TestNotServed(t *testing.T) {
	for _, c := range []struct {
		asked    string
		lists    [][]string
		starting bool
		status   int
		text     string
	}{
		{"other", [][]string{{"m"}, nil}, true, http.StatusServiceUnavailable, `serves "other", and others have not reported theirs yet`},
		{"other", [][]string{{"m"}, nil}, false, http.StatusNotFound, `served here: ["m"]`},
		{"other", [][]string{{"m"}}, true, http.StatusNotFound, `no worker serves the model "other"`},
		{"other", [][]string{nil}, false, http.StatusServiceUnavailable, "no worker has reported its models yet"},
		{"llama-8", [][]string{{"llama-8b", "qwen"}}, false, http.StatusNotFound, `did you mean "llama-8b"?`},
	} {
		e := NotServed(c.asked, fleet(t, c.lists...), c.starting)
		if e.Status != c.status || !strings.Contains(e.Message, c.text) || (e.RetryAfter > 0) != (c.status == http.StatusServiceUnavailable) {
			t.Errorf("%q of %v: %d %s", c.asked, c.lists, e.Status, e.Message)
		}
	}
}

// TestUnresolved: a request whose name does not say which model it is for is served where
// there is one model only, or a default, once all workers had the time to report theirs.
func TestUnresolved(t *testing.T) {
	none := [][]string{nil}
	one, two, late := [][]string{{"m"}}, [][]string{{"m"}, {"n"}}, [][]string{{"m"}, nil}
	byDefault := workers.Resolved{Model: "m", Default: true}
	for _, c := range []struct {
		asked    string
		of       workers.Resolved
		lists    [][]string
		starting bool
		status   int
		text     string
	}{
		{"m", workers.Resolved{Model: "m"}, two, false, 0, ""},
		{"x", workers.Resolved{Model: "x"}, two, false, 0, ""}, // NotServed is for it
		{"x", workers.Resolved{Model: "m", Alias: "*"}, late, true, 0, ""},
		{"", workers.Resolved{Model: "m"}, one, true, 0, ""},
		{"", workers.Resolved{Model: "m"}, late, false, 0, ""},
		{"", workers.Resolved{Model: "m"}, late, true, http.StatusServiceUnavailable, "not all workers have reported"},
		{"", workers.Resolved{}, none, false, http.StatusServiceUnavailable, "no worker has reported its models yet"},
		{"", workers.Resolved{}, two, false, http.StatusBadRequest, `name one of them in "model": ["m" "n"]`},
		{"", workers.Resolved{}, [][]string{{"m"}, {"n"}, {"secret"}}, false, http.StatusBadRequest, `["m" "n"]`},
		{"", workers.Resolved{}, [][]string{{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}, {"n"}}, false, http.StatusBadRequest, `"h"] and 3 more`},
		{"", byDefault, late, true, 0, ""},
		{"x", byDefault, two, false, 0, ""},
		{"x", byDefault, late, false, 0, ""},
		{"x", byDefault, late, true, http.StatusServiceUnavailable, `serves "x", and others have not reported theirs yet`},
	} {
		e := Unresolved(c.asked, c.of, fleet(t, c.lists...), c.starting, func(m string) bool { return m != "secret" })
		if c.status == 0 {
			if e != nil {
				t.Errorf("%q of %v, %+v: %v", c.asked, c.lists, c.of, e)
			}
			continue
		}
		if e == nil {
			t.Errorf("%q of %v, %+v: no error, want %d", c.asked, c.lists, c.of, c.status)
			continue
		}
		if e.Status != c.status || (e.Param == "model") != (c.status == http.StatusBadRequest) {
			t.Errorf("%q of %v, %+v: %d of %q, want %d", c.asked, c.lists, c.of, e.Status, e.Param, c.status)
		}
		if !strings.Contains(e.Message, c.text) || strings.Contains(e.Message, "secret") {
			t.Errorf("%q of %v, %+v: %q, want %q", c.asked, c.lists, c.of, e.Message, c.text)
		}
	}
}

func TestNote(t *testing.T) {
	for _, c := range []struct {
		asked string
		of    workers.Resolved
		want  string
	}{
		{"m", workers.Resolved{Model: "m"}, ""},
		{"other", workers.Resolved{Model: "m", Alias: "other"}, ""},
		{"", workers.Resolved{}, ""},
		{"", workers.Resolved{Model: "m"}, "no model in the request; m is the only one served"},
		{"", workers.Resolved{Model: "m", Default: true}, "no model in the request; served by routing.default_model m"},
		{"x", workers.Resolved{Model: "m", Alias: "d", Default: true}, `unknown model "x"; served by routing.default_model m`},
		{"claude-3", workers.Resolved{Model: "m", Alias: "claude-*"}, `model "claude-3" matches the alias "claude-*"; served by m`},
	} {
		if got := Note(c.asked, c.of); got != c.want {
			t.Errorf("%q, %+v: %q, want %q", c.asked, c.of, got, c.want)
		}
	}
}
