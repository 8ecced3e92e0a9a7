package models

import (
	"context"
	"fmt"
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
		if _, err := r.Update(w, workers.Learned{Models: list}); err != nil {
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
	l, err := Ask(left, f, []Alias{{"alias", "b"}}, func(ctx context.Context, w *workers.Worker) []byte {
		mu.Lock()
		defer mu.Unlock()
		asked[w.Name] = true
		if w.Name == "w3" || ctx.Err() != nil {
			return nil
		}
		return fmt.Appendf(nil, `{"data":[{"id":%q}]}`, w.Models[0])
	})
	if err != nil || len(asked) != 3 || !asked["w0"] || !asked["w2"] || !asked["w3"] {
		t.Errorf("asked %v: %v", asked, err)
	}
	if got, want := string(l.JSON()), `{"object":"list","data":[{"id":"a"},{"id":"b"},{"id":"alias","root":"b"}]}`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
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
		{"", [][]string{{"m", "n"}}, false, http.StatusNotFound, "the request names no model"},
		{"llama-8", [][]string{{"llama-8b", "qwen"}}, false, http.StatusNotFound, `did you mean "llama-8b"?`},
	} {
		e := NotServed(c.asked, fleet(t, c.lists...), c.starting)
		if e.Status != c.status || !strings.Contains(e.Message, c.text) || (e.RetryAfter > 0) != (c.status == http.StatusServiceUnavailable) {
			t.Errorf("%q of %v: %d %s", c.asked, c.lists, e.Status, e.Message)
		}
	}
}
