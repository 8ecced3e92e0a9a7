package routing

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// served is a registry of workers w0, w1 and so on that serve the model m.
func served(t *testing.T, n int) *workers.Registry {
	t.Helper()
	r := workers.NewRegistry(func(eventlog.Event) {})
	var specs []workers.Spec
	for i := range n {
		specs = append(specs, workers.Spec{Facts: workers.Facts{Models: []string{"m"}}, Name: fmt.Sprint("w", i), URL: &url.URL{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", i+1)}})
	}
	if _, err := r.Apply("test", specs); err != nil {
		t.Fatal(err)
	}
	return r
}

// parse is a request of a kind.
func parse(t *testing.T, kind api.Kind, body string) *api.View {
	t.Helper()
	v := new(api.View)
	if err := v.Parse([]byte(body), kind, api.Limits{}); err != nil {
		t.Fatal(err)
	}
	return v
}

// TestSteer: the headers set path, workers and rank; what cannot be had is refused with
// the header's name.
func TestSteer(t *testing.T) {
	fleet := served(t, 2).Snapshot()
	for _, c := range []struct {
		header, value string
		force         route.Force
		pin           decide.Pin
		status        int
	}{
		{"X-Dynctl-Path", "local", route.ForceLocal, decide.Pin{}, 0},
		{"X-Dynctl-Path", "sideways", "", decide.Pin{}, http.StatusBadRequest},
		{"X-Dynctl-Worker", "w1", route.ForceAuto, decide.Pin{Decode: "w1"}, 0},
		{"X-Dynctl-Worker", "w2", "", decide.Pin{}, http.StatusNotFound},
		{"X-Dynctl-Prefill-Worker", "w0", route.ForceAuto, decide.Pin{Prefill: "w0"}, 0},
		{"X-Dynctl-Prefill-Worker", "nobody", "", decide.Pin{}, http.StatusNotFound},
		{"X-Dynctl-Worker", "w1/dp0", route.ForceAuto, decide.Pin{Decode: "w1", HasRank: true}, 0},
		{"X-Dynctl-Worker", "w1/dp1", "", decide.Pin{}, http.StatusNotFound},
		{"X-Dynctl-Worker", "/dp0", "", decide.Pin{}, http.StatusNotFound},
		{"X-Dynctl-Worker", "w1/", "", decide.Pin{}, http.StatusNotFound},
		{"X-Dynctl-Prefill-Worker", "w0/dp0", route.ForceAuto, decide.Pin{Prefill: "w0", HasPrefillRank: true}, 0},
		{"X-data-parallel-rank", "3", route.ForceAuto, decide.Pin{HasRank: true, Rank: 3}, 0},
		{"X-data-parallel-rank", "-1", "", decide.Pin{}, http.StatusBadRequest},
		{"X-data-parallel-rank", "first", "", decide.Pin{}, http.StatusBadRequest},
	} {
		q := Request{Details: Details{Model: "m"}}
		q.UseFleet(fleet)
		h := http.Header{}
		h.Set(c.header, c.value)
		err := q.Steer(h)
		if c.status != 0 {
			if e := api.FromError(err); err == nil || e.Status != c.status || e.Param != c.header {
				t.Errorf("%s: %s: %+v", c.header, c.value, e)
			}
			continue
		}
		if got := &q.Run.Criteria; err != nil || got.Force != c.force || got.Pin != c.pin {
			t.Errorf("%s: %s: %+v %+v, %v", c.header, c.value, got.Force, got.Pin, err)
		}
	}
}

// TestSteerTwice: two headers that name different ranks of the decode worker are refused.
func TestSteerTwice(t *testing.T) {
	q := Request{Details: Details{Model: "m"}}
	q.UseFleet(served(t, 1).Snapshot())
	h := http.Header{"X-Dynctl-Worker": {"w0/dp0"}, "X-Data-Parallel-Rank": {"0"}}
	if err := q.Steer(h); err != nil {
		t.Error(err)
	}
	h.Set("X-Data-Parallel-Rank", "1")
	if e := api.FromError(q.Steer(h)); e == nil || e.Status != http.StatusBadRequest {
		t.Errorf("%+v", e)
	}
}

// TestFollow: a response is where its tenant had it made, unless that worker has left; one
// that is not known is looked for where only one worker could have made it, unless another
// tenant may have. The error names the member of the body that has the id, if one has.
func TestFollow(t *testing.T) {
	from := stored.New(8)
	from.Put("known", "w1", "tenant")
	from.Put("left", "w9", "tenant")
	for _, c := range []struct {
		id, tenant string
		workers    int
		mine, dry  bool
		pin        string
		refused    bool
	}{
		{id: "", workers: 2},
		{id: "known", tenant: "tenant", workers: 2, pin: "w1"},
		{id: "known", tenant: "other", workers: 2, refused: true},
		{id: "known", tenant: "other", workers: 2, dry: true, pin: "w1"},
		{id: "left", tenant: "tenant", workers: 2, mine: true, refused: true},
		{id: "left", tenant: "tenant", workers: 1, mine: true, refused: true},
		{id: "left", workers: 2, dry: true, refused: true},
		{id: "gone", workers: 2, mine: true, refused: true},
		{id: "gone", workers: 1, mine: true},
		{id: "gone", workers: 1, refused: true},
		{id: "gone", workers: 1, dry: true},
	} {
		for _, param := range []string{"", "previous_response_id"} {
			q := Request{Details: Details{Model: "m", Dry: c.dry}}
			q.UseFleet(served(t, c.workers).Snapshot())
			err := q.PinToResponse(c.id, param, from, c.tenant, c.mine)
			if q.Run.Criteria.Pin.Decode != c.pin || (err != nil) != c.refused {
				t.Errorf("%+v: %q, %v", c, q.Run.Criteria.Pin.Decode, err)
			}
			if e := api.FromError(err); c.refused && (e.Status != http.StatusNotFound || e.Param != param) {
				t.Errorf("%+v: %+v", c, e)
			}
		}
	}
}

// TestRead: the facts are those of the body; the rest of a stream is of another kind, and
// where no prompt is looked at there is nothing to know.
func TestRead(t *testing.T) {
	r := served(t, 1)
	stage, err := prompt.New(prompt.Options{Mode: "estimate", Registry: r})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stage.Close)
	lengths := outputs.New()
	d := New(Sources{Prompts: stage, Answers: lengths}, 1)
	read := func(path string, kind api.Kind, v *api.View) (*Request, *api.Facts) {
		t.Helper()
		ep, err := api.Lookup(http.MethodPost, path)
		if err != nil {
			t.Fatal(err)
		}
		q := &Request{Details: Details{Settings: &effective.Settings{}, Model: "m"}}
		q.UseFleet(r.Snapshot())
		d.Read(t.Context(), q, ep, kind, v)
		t.Cleanup(q.Release)
		return q, &q.Run.Criteria.Facts
	}
	q, f := read("/v1/completions", api.Completion, parse(t, api.Completion, `{"model":"m","prompt":[1,2,3],"max_tokens":7,"n":2,"echo":true,"logprobs":1}`))
	want := *f
	want.Kind, want.Splittable, want.ISL, want.Source, want.N, want.MaxTokens, want.PromptLogprobs = api.Completion, true, 3, route.FromIDs, 2, 7, true
	if diff := cmp.Diff(want, *f); diff != "" || len(q.IDs) != 3 {
		t.Errorf("%d ids (-want +got):\n%s", len(q.IDs), diff)
	}
	if _, f = read("/v1/chat/completions", api.Completion, parse(t, api.Chat, `{"model":"m","messages":[{"role":"user","content":"eight letters"}]}`)); f.Kind != api.Completion || f.Source != route.FromEstimate || f.ISL == 0 || f.N != 1 {
		t.Errorf("a chat as a completion: %+v", f)
	}
	q, f = read("/v1/audio/transcriptions", api.Unknown, &api.View{})
	want = *f
	want.Splittable, want.Source, want.MaxTokens, want.MinTokens = false, route.FromNothing, -1, -1
	if diff := cmp.Diff(want, *f); diff != "" || q.IDs != nil {
		t.Errorf("a form with ids %v (-want +got):\n%s", q.IDs, diff)
	}
	const hint = `,"nvext":{"agent_hints":{"osl":300}}`
	output := func(learned int, more string) int {
		t.Helper()
		if learned > 0 {
			lengths.Learn("m", "", learned)
		}
		_, f := read("/v1/completions", api.Completion, parse(t, api.Completion, `{"model":"m","prompt":[1]`+more+`}`))
		return f.Output
	}
	for _, c := range []struct {
		learned int
		more    string
		want    int
	}{
		{0, "", 0}, {0, `,"max_tokens":100`, 0}, {0, hint, 300}, {0, hint + `,"max_tokens":100`, 100}, {200, "", 200},
		{0, `,"max_tokens":100`, 100}, {0, `,"max_tokens":1000,"min_tokens":250`, 250}, {0, `,"max_tokens":0`, 1}, {0, hint, 300},
	} {
		if got := output(c.learned, c.more); got != c.want {
			t.Errorf("%s: %d tokens of answer are expected, want %d", c.more, got, c.want)
		}
	}
	if _, f = read("/v1/embeddings", api.Embeddings, parse(t, api.Embeddings, `{"model":"m","input":"text"}`)); f.Output != 0 {
		t.Errorf("an embedding is expected to have %d tokens", f.Output)
	}
}

// TestFits: a request that is too long for every decode worker that it may use gets the error
// of an engine, which names both lengths; one of unknown length does not.
func TestFits(t *testing.T) {
	r := workers.NewRegistry(func(eventlog.Event) {})
	spec := func(name string, window int) workers.Spec {
		return workers.Spec{Facts: workers.Facts{Engine: workers.VLLM, Models: []string{"m"}, MaxModelLen: window}, Name: name, URL: &url.URL{Scheme: "http", Host: name + ":1"}}
	}
	if _, err := r.Apply("test", []workers.Spec{spec("small", 8192), spec("large", 131072)}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		isl    int
		source route.Source
		most   int64
		pin    string
		want   string
	}{
		{9000, route.FromIDs, 500, "", ""},
		{131000, route.FromEngine, 500, "", `this model's maximum context length is 131072 tokens; the prompt has 131000, and "max_tokens" is 500`},
		{140000, route.FromLocal, -1, "", "this model's maximum context length is 131072 tokens, and the prompt has 140000"},
		{9000, route.FromIDs, 500, "small", "this model's maximum context length is 8192 tokens, and the prompt has 9000"},
		{9000, route.FromIDs, 500, "large", ""},
		{900000, route.FromEstimate, 500, "", ""},
	} {
		q := Request{Details: Details{Model: "m"}}
		q.UseFleet(r.Snapshot())
		q.Run.Criteria.Pin.Decode = c.pin
		q.Run.Criteria.Facts = api.Facts{Kind: api.Completion, ISL: c.isl, Source: c.source, MaxTokens: c.most, MaxTokensKey: "max_tokens"}
		err := q.Fits()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
