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

// TestRefusalsOfOneEngine: what one engine of two refuses, on every API, in each phase, streamed
// or not: a model that it has unloaded the other one has, and a request that it does not like
// reaches no other.
func TestRefusalsOfOneEngine(t *testing.T) {
	t.Parallel()
	const kept = 1 << 20 // of an error's body
	model := fakeengine.Model{Text: "F"}
	for _, c := range []struct {
		what, text string
		status     int
		want       int
	}{
		{"an unknown model", "{\"error\":{\"message\":\"The model `m` does not exist.\"}}", 404, 200},
		{"an unloaded adapter", `{"object":"error","message":"The following requested LoRA adapters are not loaded: a"}`, 400, 200},
		{"a long refusal", strings.Repeat("x", 3*kept), 400, 400},
	} {
		for _, phase := range []string{"", "prefill", "decode"} {
			t.Run(c.what+" "+phase, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					// Ports that are closed, should the router ask for the models itself.
					worker := func(port string) string { return "http://127.0.0.1:" + port + ",engine=vllm,model=m,block_size=16" }
					conf := settings.Default()
					conf.Routing.Policy, conf.Routing.Threshold.Tokens = "round_robin", 0
					switch phase {
					case "":
						conf.Worker = []string{worker("1"), worker("2")}
					case "prefill":
						conf.Prefill, conf.Decode = []string{worker("1") + ",connector=nixl", worker("2") + ",connector=nixl"}, []string{worker("3") + ",connector=nixl"}
					case "decode":
						conf.Prefill, conf.Decode = []string{worker("3") + ",connector=nixl"}, []string{worker("1") + ",connector=nixl", worker("2") + ",connector=nixl"}
					}
					var refusals, refused, others int // others: requests to the other engine after a refusal
					p := router.NewPiped(t, conf, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
						body, err := io.ReadAll(q.Body)
						if err != nil || q.Header.Get("X-Request-Id") == "" {
							panic(http.ErrAbortHandler)
						}
						switch {
						case strings.HasSuffix(q.Host, ":1"):
							refusals++
							w.Header().Set("Content-Type", "application/json")
							w.WriteHeader(c.status)
							_, _ = io.WriteString(w, c.text)
							return
						case strings.HasSuffix(q.Host, ":2") && refusals > refused:
							others++
						}
						a := model.Answer(&fakeengine.Request{Method: q.Method, Path: q.URL.Path, ID: q.Header.Get("X-Request-Id"), Body: body})
						play(w, q, &a)
					}))
					askAll(t, p, func(about string, resp *http.Response, text string) {
						if refusals > refused && about != "a stored response" {
							if long := len(text) >= kept && strings.HasPrefix(c.text, text); resp.StatusCode != c.want || c.want != 200 && (!long || others > 0) {
								t.Errorf("%s: %d with %d bytes, want %d, after %d requests to the other engine: %.200s", about, resp.StatusCode, len(text), c.want, others, text)
							}
						}
						refused, others = refusals, 0
					})
					if refused == 0 {
						t.Error("nothing was refused")
					}
				})
			})
		}
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
