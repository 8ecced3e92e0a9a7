package router_test

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// searched are the workers that the router has queried for a response, as often as it did.
func (p *tap) searched(id string) (names []string) {
	for _, c := range p.callsOf("/v1/responses/" + id) {
		if c.header.Get("X-Request-Id") == "" { // it follows from no client's
			names = append(names, c.engine)
		}
	}
	return names
}

// TestStoredResponsesAfterARestart: a router that comes back finds the worker of a response that
// was stored before, once for each, for all that clients do with it. It queries each worker that
// decodes once for an id that no worker knows, and none for what is no id.
func TestStoredResponsesAfterARestart(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p3d:profile=instant")
	type response struct{ id, worker string }
	var list []response
	for i := range 8 {
		a := r.post("/v1/responses", object{"model": "sim", "input": fmt.Sprint("conversation ", i), "max_output_tokens": 3, "stream": i%2 == 1})
		id := rawjson.Value(a.body).Get("id").String()
		if i%2 == 1 {
			_, data, _ := bytes.Cut(a.body, []byte("data: "))
			line, _, _ := bytes.Cut(data, []byte("\n"))
			id = rawjson.Value(line).Get("response.id").String()
		}
		list = append(list, response{id, a.header.Get("X-Dynctl-Worker")})
	}
	if err := r.StopRouter(r.wait()); err != nil {
		t.Fatal(err)
	}
	p.reset()
	if err := r.StartRouter(r.wait()); err != nil {
		t.Fatal(err)
	}
	if err := r.Ready(r.wait()); err != nil {
		t.Fatal(err)
	}
	turn := func(id string, stream bool) []byte {
		return encode(t, object{"model": "sim", "input": "and then", "max_output_tokens": 3, "previous_response_id": id, "stream": stream})
	}
	// What the client asks first of each.
	first := []func(id string) *answer{
		func(id string) *answer { return r.send(http.MethodGet, "/v1/responses/"+id, nil) },
		func(id string) *answer { return r.send(http.MethodPost, "/v1/responses", turn(id, false)) },
		func(id string) *answer { return r.send(http.MethodPost, "/v1/responses", turn(id, true)) },
		func(id string) *answer { return r.send(http.MethodPost, "/v1/responses/"+id+"/cancel", nil) },
		func(id string) *answer { return r.send(http.MethodDelete, "/v1/responses/"+id, nil) },
		func(id string) *answer { return r.send(http.MethodHead, "/v1/responses/"+id, nil) },
	}
	for i, c := range list {
		if i < len(first) {
			// The simulated engine knows neither cancel nor delete; the router's answer would
			// have no worker.
			if a := first[i](c.id); a.header.Get("X-Dynctl-Worker") != c.worker || i < 3 && a.status != http.StatusOK {
				t.Errorf("request %d: %s by %q, it is on %s", i, a, a.header.Get("X-Dynctl-Worker"), c.worker)
			}
		} else if d, err := r.Admin.Route(t.Context(), routeOf(t, "/v1/responses", object{"model": "sim", "input": "x", "previous_response_id": c.id})); err != nil || rawjson.Value(d.Receipt).Get("decode.chosen").String() != c.worker {
			t.Errorf("a dry run: %v", err)
		}
		for range 2 {
			for _, a := range []*answer{first[0](c.id), first[1](c.id)} {
				if a.status != http.StatusOK || a.header.Get("X-Dynctl-Worker") != c.worker {
					t.Errorf("again: %s by %q, it is on %s", a, a.header.Get("X-Dynctl-Worker"), c.worker)
				}
			}
		}
		names := p.searched(c.id)
		if n := strings.Count(fmt.Sprint(names), "decode-"); n != len(names) || n == 0 || n > 3 {
			t.Errorf("queried were %v", names)
		}
	}
	for _, ask := range first {
		if a := ask("resp_nobody"); a.status != http.StatusNotFound || a.header.Get("X-Dynctl-Worker") != "" {
			t.Errorf("an id that no worker knows: %s", a)
		}
	}
	if names := p.searched("resp_nobody"); len(names) != 3 {
		t.Errorf("queried were %v, want each decode worker once", names)
	}
	p.reset()
	for _, id := range []string{"../models", "..", "a/b", "a b", strings.Repeat("x", 300), "?a"} {
		first[1](id).refused(t, http.StatusNotFound, "invalid_request")
	}
	p.mu.Lock()
	for _, c := range p.calls {
		if strings.HasPrefix(c.path, "/v1/responses") {
			t.Errorf("an engine was asked for %s", c.path)
		}
	}
	p.mu.Unlock()
	// One that does not answer may keep it.
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		broken := engine == "decode-1" && strings.HasPrefix(q.URL.Path, "/v1/responses/resp_")
		if broken {
			w.WriteHeader(http.StatusInternalServerError)
		}
		return broken
	})
	for range 2 {
		a := first[0]("resp_maybe")
		if e := a.refused(t, http.StatusServiceUnavailable, "no_decode_worker"); !strings.Contains(e.Error.Message, "decode-1 has not answered") || a.header.Get("Retry-After") != "5" {
			t.Errorf("%s, Retry-After %q", a, a.header.Get("Retry-After"))
		}
	}
	if names := p.searched("resp_maybe"); len(names) != 3 {
		t.Errorf("queried were %v, want each decode worker once", names)
	}
}
