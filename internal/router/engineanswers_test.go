package router_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/settings"
)

// apis are requests to every endpoint that engines answer.
var apis = []struct{ method, path, body string }{
	{http.MethodPost, "/v1/completions", `{"model":"m","prompt":"x","stream":%v}`},
	{http.MethodPost, "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"stream":%v}`},
	{http.MethodPost, "/v1/responses", `{"model":"m","input":"x","stream":%v}`},
	{http.MethodPost, "/v1/messages", `{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":1,"stream":%v}`},
	{http.MethodPost, "/v1/messages/count_tokens", `{"model":"m","messages":[{"role":"user","content":"x"}]}`},
	{http.MethodPost, "/inference/v1/generate", `{"model":"m","token_ids":[1,2,3],"sampling_params":{"max_tokens":1},"stream":%v}`},
	{http.MethodPost, "/generate", `{"text":"x","stream":%v}`},
	{http.MethodGet, "/v1/responses/resp_1", ""},
	{http.MethodPost, "/v1/embeddings", `{"model":"m","input":"x"}`},
	{http.MethodPost, "/v1/rerank", `{"model":"m","query":"x","documents":["y"]}`},
	{http.MethodPost, "/v1/score", `{"model":"m","text_1":"x","text_2":"y"}`},
	{http.MethodPost, "/v1/classify", `{"model":"m","input":"x"}`},
	{http.MethodPost, "/v1/pooling", `{"model":"m","input":"x"}`},
	{http.MethodPost, "/v1/tokenize", `{"model":"m","prompt":"x"}`},
	{http.MethodPost, "/v1/detokenize", `{"model":"m","tokens":[1]}`},
	{http.MethodPost, "/v1/audio/transcriptions", "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n"},
	{http.MethodPost, "/v1/audio/speech", `{"model":"m","input":"x","stream":%v}`},
	{http.MethodGet, "/version", ""},
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
				for _, api := range apis {
					for _, stream := range []bool{false, true} {
						// A response that is not known is another tenant's, for all that the router knows.
						if stream && !strings.Contains(api.body, "%v") || c.keys && api.path == "/v1/responses/resp_1" {
							continue
						}
						body := strings.Replace(api.body, "%v", fmt.Sprint(stream), 1)
						header := append(bearer(userSecret), "Content-Type", "application/json")
						if strings.HasPrefix(body, "--b") {
							header[3] = "multipart/form-data; boundary=b"
						}
						resp, text := at(t, p, api.method, api.path, body, header...)
						want := c.want
						if c.fails == "prefill" && resp.Header.Get("X-Dynctl-Path") == "local" && resp.Header.Get("X-Dynctl-Prefill-Worker") == "" {
							want = 200 // there was no prefill, or it was tried in vain
						}
						if resp.StatusCode != want {
							t.Errorf("%s, stream %v: %d, want %d: %s", api.path, stream, resp.StatusCode, want, text)
						}
						if want == 502 && (resp.Header.Get("Location")+resp.Header.Get("WWW-Authenticate") != "" || !strings.Contains(text, c.fails+"-0")) {
							t.Errorf("%s, stream %v: %v %s", api.path, stream, resp.Header, text)
						}
						<-time.After(time.Hour) // in which a worker that fails is no more ejected
					}
				}
			})
		})
	}
}

// TestBadHeadersOfOurOwn: a bad value of a header of the router is refused on every API, also
// where nothing waits, and names the header. Without routing.allow_headers nobody reads those
// that steer.
func TestBadHeadersOfOurOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := doorOf(t, func(c *settings.Config) { c.Routing.AllowHeaders = true })
		off := doorOf(t, func(*settings.Config) {})
		for _, api := range apis {
			if api.method == http.MethodGet || strings.HasPrefix(api.body, "--b") {
				continue
			}
			body := strings.Replace(api.body, "%v", "false", 1)
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
				resp, text := at(t, p, api.method, api.path, body, h.name, h.value)
				if resp.StatusCode != h.status || !strings.Contains(strings.ToLower(text), strings.ToLower(h.name)) {
					t.Errorf("%s, %s: %s: %s %s", api.path, h.name, h.value, resp.Status, text)
				}
				want := h.status
				if h.steers {
					want = 200
				}
				if resp, text := at(t, off, api.method, api.path, body, h.name, h.value); resp.StatusCode != want {
					t.Errorf("%s, %s: %s where it does not steer: %s %s", api.path, h.name, h.value, resp.Status, text)
				}
			}
			// What an answer prints is good for the next request.
			resp, _ := at(t, p, api.method, api.path, body)
			worker := resp.Header.Get("X-Dynctl-Worker")
			if again, text := at(t, p, api.method, api.path, body, "X-Dynctl-Worker", worker); worker == "" || again.StatusCode != 200 || again.Header.Get("X-Dynctl-Worker") != worker {
				t.Errorf("%s: to %q again: %s %s", api.path, worker, again.Status, text)
			}
		}
	})
}
