package router_test

import (
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings"
)

// askAll sends a request to every endpoint that engines answer: each that has a model, streamed
// and not, and those without a body.
func askAll(t *testing.T, p *router.Piped, check func(about string, resp *http.Response, text string), header ...string) {
	t.Helper()
	send := func(method, path, body, about string, more ...string) {
		resp, text := at(t, p, method, path, body, append(more, header...)...)
		check(about, resp, text)
	}
	for _, path := range slices.Sorted(maps.Keys(everyAPI)) {
		body, kind := withModel(t, path, `"m"`)
		send(http.MethodPost, path, string(body), path, "Content-Type", kind)
		if ep, err := api.Lookup(http.MethodPost, path); err != nil {
			t.Error(err)
		} else if ep.Streamable && body[0] == '{' {
			send(http.MethodPost, path, `{"stream":true,`+string(body[1:]), path+", streamed", "Content-Type", kind)
		}
	}
	send(http.MethodGet, "/v1/responses/resp_1", "", "a stored response")
	send(http.MethodGet, "/version", "", "/version")
}

// TestOthersAnswersAreNotTheRouters: a redirect of an engine, and its 401 or 403 where clients'
// keys are the router's, reach no client, on any API, in either phase, streamed or not: the
// client gets the answer of another engine, or a 502 that names this one. Where the client's
// key goes to the engine, what it says of that is for the client.
func TestOthersAnswersAreNotTheRouters(t *testing.T) {
	t.Parallel()
	keys := keysFile(t)
	model := fakeengine.Model{Text: "F"}
	for _, c := range []struct {
		what, fails string
		status      int
		keys        bool
		want        int
	}{
		{"a redirect", "aggregated", 302, false, 502},
		{"a redirect for good", "aggregated", 308, true, 502},
		{"a redirect of a prefill", "prefill", 307, false, 200},
		{"a redirect of a decode", "decode", 301, false, 502},
		{"the router's key", "aggregated", 401, true, 502},
		{"the router's key, forbidden", "aggregated", 403, true, 502},
		{"the router's key at a prefill", "prefill", 401, true, 200},
		{"the router's key at a decode", "decode", 401, true, 502},
		{"the client's key", "aggregated", 401, false, 401},
		{"the client's key at a prefill", "prefill", 401, false, 401},
		{"the client's key at a decode", "decode", 403, false, 403},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conf := settings.Default()
				if c.fails == "aggregated" {
					conf.Worker = []string{"http://aggregated-0,engine=vllm,model=m,block_size=16"}
				} else {
					conf.Prefill = []string{"http://prefill-0,engine=vllm,model=m,block_size=16,connector=nixl"}
					conf.Decode = []string{"http://decode-0,engine=vllm,model=m,block_size=16,connector=nixl"}
					conf.Routing.Threshold.Tokens = 0
				}
				if c.keys {
					conf.Keys.File = keys
				}
				p := router.NewPiped(t, conf, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
					body, err := io.ReadAll(q.Body)
					if err != nil {
						panic(http.ErrAbortHandler)
					}
					if strings.HasPrefix(q.Host, c.fails) {
						if has := q.Header.Get("Authorization") != ""; has == c.keys {
							t.Errorf("%s: the engine gets a key: %v", q.URL.Path, has)
						}
						w.Header().Set("Location", "http://elsewhere.example/v1")
						w.Header().Set("WWW-Authenticate", "Bearer")
						w.WriteHeader(c.status)
						return
					}
					a := model.Answer(&fakeengine.Request{Worker: q.Host, Method: q.Method, Path: q.URL.Path, ID: q.Header.Get("X-Request-Id"), Body: body})
					play(w, q, &a)
				}))
				askAll(t, p, func(about string, resp *http.Response, text string) {
					want := c.want
					switch {
					case c.keys && about == "a stored response":
						want = 404 // the router does not know it: it may be another tenant's
					case c.fails == "prefill" && resp.Header.Get("X-Dynctl-Prefill-Worker") == "":
						want = 200 // there was no prefill, or it was tried in vain
					}
					if resp.StatusCode != want {
						t.Errorf("%s: %d, want %d: %s", about, resp.StatusCode, want, text)
					}
					if want == 502 && (resp.Header.Get("Location")+resp.Header.Get("WWW-Authenticate") != "" || !strings.Contains(text, c.fails+"-0")) {
						t.Errorf("%s: %v %s", about, resp.Header, text)
					}
					<-time.After(time.Hour) // until a worker that fails is no more ejected
				}, bearer(userSecret)...)
			})
		})
	}
}

// TestBadHeadersOfOurOwn: a bad value of a header of the router is refused on every API, also
// where nothing waits, with the header's name. Without routing.allow_headers the router reads
// none of those that steer.
func TestBadHeadersOfOurOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := doorOf(t, func(c *settings.Config) { c.Routing.AllowHeaders = true })
		off := doorOf(t, func(*settings.Config) {})
		for _, h := range []struct {
			name, value string
			status      int
			steers      bool
		}{
			{"X-Dynctl-Priority", "urgent", 400, false},
			{"X-Dynctl-Max-Wait", "soon", 400, false},
			{"X-Dynctl-Max-Wait", "-1", 400, false},
			{"X-Dynctl-Path", "sideways", 400, true},
			{"X-Data-Parallel-Rank", "first", 400, true},
			{"X-Dynctl-Worker", "nobody", 404, true},
			{"X-Dynctl-Worker", "aggregated-0:80/dp7", 404, true},
			{"X-Dynctl-Prefill-Worker", "nobody", 404, true},
		} {
			askAll(t, p, func(about string, resp *http.Response, text string) {
				if resp.StatusCode != h.status || !strings.Contains(strings.ToLower(text), strings.ToLower(h.name)) {
					t.Errorf("%s, %s: %s: %s %s", about, h.name, h.value, resp.Status, text)
				}
			}, h.name, h.value)
			askAll(t, off, func(about string, resp *http.Response, text string) {
				if want := map[bool]int{false: h.status, true: 200}[h.steers]; resp.StatusCode != want {
					t.Errorf("%s, %s: %s where it does not steer: %s %s", about, h.name, h.value, resp.Status, text)
				}
			}, h.name, h.value)
		}
		// What an answer prints is good for the next request.
		const worker = "aggregated-0:80/dp0"
		askAll(t, p, func(about string, resp *http.Response, text string) {
			if got := resp.Header.Get("X-Dynctl-Worker"); resp.StatusCode != 200 || got != worker {
				t.Errorf("%s: to %q: %s by %q: %s", about, worker, resp.Status, got, text)
			}
		}, "X-Dynctl-Worker", worker)
	})
}
