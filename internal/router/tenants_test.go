package router_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestBlocksOfTenantsAreApart: no block of one tenant's prompts has the name of a
// block of another's, whatever salts they send themselves.
func TestBlocksOfTenantsAreApart(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.SampledFrom([]string{"", "a", "b", "ab", "1", "10"}), rapid.String())
		one, other := name.Draw(t, "tenant"), name.Draw(t, "another")
		if one == other {
			return
		}
		mine, theirs := name.Draw(t, "its salt"), rapid.OneOf(name, rapid.Just(access.Salt(one, "")), rapid.Just(one)).Draw(t, "the other's salt")
		tokens := rapid.SliceOfN(rapid.Uint32(), 16, 80).Draw(t, "prompt")
		chain := func(tenant, salt string) []uint64 {
			locals := blockhash.Locals(nil, tokens, 16, blockhash.Key{Salt: access.Salt(tenant, salt)})
			return blockhash.Chain(nil, locals)
		}
		a := chain(one, mine)
		for _, b := range chain(other, theirs) {
			if slices.Contains(a, b) {
				t.Fatalf("%q with %q and %q with %q share a block", one, mine, other, theirs)
			}
		}
		if !slices.Equal(a, chain(one, mine)) {
			t.Fatal("a tenant does not find its own")
		}
	})
}

// TestTenants: what a tenant has at engines is its own.
func TestTenants(t *testing.T) {
	path := keysFile(t)
	putKeys(t, path, "name: user, tenant: web", userSecret, "name: second, tenant: web", readSecret, "name: other, tenant: batch", otherSecret, "name: operator", opsSecret)
	r, p := tappedRig(t, "1a:profile=instant+1a:engine=sglang,profile=instant,model=other", func(c *settings.Config) { c.Keys = settings.APIKeys{File: path, Required: true, Salt: true} })
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{{"caches", tenantsDoNotHitEachOthersCache}, {"salts", saltReachesEveryEndpointThatTakesIt}, {"stored responses", storedResponsesAreTheirTenants}} {
		t.Run(c.name, func(t *testing.T) {
			p.set(nil)
			p.reset()
			c.test(t, r.in(t), p)
		})
	}
}

// tenantsDoNotHitEachOthersCache: prompts of tenants who send the same, and try
// each other's salts, count as cached, by the engine's own account and by the
// router's, for those only whose tenant has sent them with the same salt before.
func tenantsDoNotHitEachOthersCache(t *testing.T, r *rig, _ *tap) {
	tenants := map[string]string{userSecret: "web", readSecret: "web", otherSecret: "batch", opsSecret: "operator"}
	secrets := []string{userSecret, readSecret, otherSecret, opsSecret}
	salts := []string{"", "mine", "", access.Salt("web", ""), access.Salt("batch", "")}
	rng := rand.New(rand.NewPCG(1, 13))
	sent := map[string]bool{}
	hits := 0
	for i := range 80 {
		secret, salt, prompt := secrets[rng.IntN(len(secrets))], salts[rng.IntN(len(salts))], rng.IntN(3)
		body := object{"model": "sim", "prompt": ids(64, 50+prompt), "max_tokens": 2}
		if salt != "" {
			body["cache_salt"] = salt
		}
		a := r.post("/v1/completions", body, bearer(secret)...)
		which := fmt.Sprint(tenants[secret], "/", salt, "/", prompt)
		cached := a.completion(t).Usage.PromptTokensDetails.CachedTokens
		predicted := a.header.Get("X-Dynctl-Cached-Tokens")
		if (cached > 0) != sent[which] || !sent[which] && predicted != "" && predicted != "0" {
			t.Fatalf("request %d, %s: %d tokens cached by the engine, %q by the router; sent before: %v", i, which, cached, predicted, sent[which])
		}
		if cached > 0 {
			hits++
		}
		sent[which] = true
		r.synced()
	}
	if hits < 20 {
		t.Errorf("only %d requests found their own blocks", hits)
	}
	// Where an engine takes no salt, a prompt would be everybody's.
	for p, body := range map[string]object{"/generate": {"model": "sim", "text": "hello"}, "/v2/embed": {"model": "sim", "texts": []string{"hello"}}} {
		r.send(http.MethodPost, p, encode(t, body), bearer(userSecret)...).refused(t, 403, "forbidden")
	}
	for p, body := range map[string]object{
		"/v1/chat/completions": {"model": "sim", "max_tokens": 4, "messages": []object{{"role": "user", "content": "hello"}}},
		"/v1/responses":        {"model": "sim", "max_output_tokens": 4, "input": "hello"},
	} {
		r.post(p, body, bearer(userSecret)...)
	}
}

// saltReachesEveryEndpointThatTakesIt: where a worker is known to be vLLM 0.32, the
// bodies of Messages and of pooling endpoints get the tenant's salt; of other engines they
// are refused.
func saltReachesEveryEndpointThatTakesIt(t *testing.T, r *rig, p *tap) {
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.Method == http.MethodPost {
			_, _ = w.Write([]byte(`{"id":"x","object":"list","data":[]}`))
		}
		return q.Method == http.MethodPost
	})
	bodies := map[string]object{
		"/v1/messages": {"model": "sim", "max_tokens": 4, "messages": []object{{"role": "user", "content": "hello"}}}, "/v1/embeddings": {"model": "sim", "input": "hello"},
		"/v1/score": {"model": "sim", "text_1": "a", "text_2": "b"}, "/v1/rerank": {"model": "sim", "query": "a", "documents": []string{"b"}},
		"/classify": {"model": "sim", "input": "hello"}, "/pooling": {"model": "sim", "input": "hello"},
	}
	for path, body := range bodies {
		body["cache_salt"] = "mine"
		a := r.send(http.MethodPost, path, encode(t, body), bearer(userSecret)...)
		if a.status != http.StatusOK {
			t.Errorf("%s: %s", path, a)
			continue
		}
		calls := p.callsOf(path)
		if got := decode[object](t, calls[len(calls)-1].body)["cache_salt"]; got != access.Salt("web", "mine") {
			t.Errorf("%s reached the engine with the salt %v", path, got)
		}
	}
	for path, body := range bodies {
		body["model"] = "other"
		r.send(http.MethodPost, path, encode(t, body), bearer(userSecret)...).refused(t, 403, "forbidden")
	}
}

// storedResponsesAreTheirTenants: no tenant continues, reads or ends what an engine
// keeps for another one, nor what the router does not know.
func storedResponsesAreTheirTenants(t *testing.T, r *rig, p *tap) {
	first := r.post("/v1/responses", object{"model": "sim", "input": "a secret", "max_output_tokens": 3, "store": true}, bearer(userSecret)...)
	id := rawjson.Value(first.body).Get("id").String()
	next := encode(t, object{"model": "sim", "input": "repeat", "max_output_tokens": 3, "previous_response_id": id})
	for secret, status := range map[string]int{userSecret: 200, readSecret: 200, otherSecret: 404} {
		if a := r.send(http.MethodPost, "/v1/responses", next, bearer(secret)...); a.status != status {
			t.Errorf("going on from it: %s, want %d", a, status)
		}
	}
	// vLLM would store another tenant's response in place of this one.
	for _, streamed := range []bool{false, true} {
		a := r.post("/v1/responses", object{"model": "sim", "input": "not the secret", "max_output_tokens": 3, "request_id": id, "stream": streamed}, bearer(otherSecret)...)
		if bytes.Contains(a.body, []byte(id)) {
			t.Errorf("another tenant's response has the id %s: %s", id, a)
		}
	}
	for _, c := range []struct{ method, path string }{{http.MethodGet, "/v1/responses/" + id}, {http.MethodPost, "/v1/responses/" + id + "/cancel"}} {
		r.send(c.method, c.path, nil, bearer(otherSecret)...).refused(t, 404, "invalid_request")
		if a := r.send(c.method, c.path, nil, bearer(userSecret)...); a.status == 404 && bytes.Contains(a.body, []byte("not known here")) {
			t.Errorf("%s %s by its own tenant: %s", c.method, c.path, a)
		}
	}
	r.send(http.MethodPost, "/v1/responses", []byte(`{"model":"sim","input":"x","previous_response_id":"resp_nobody"}`), bearer(userSecret)...).refused(t, 404, "invalid_request")
	r.send(http.MethodGet, "/v1/responses/resp_nobody", nil, bearer(userSecret)...).refused(t, 404, "invalid_request")
	// No engine knows whose it would be.
	if names := p.searched("resp_nobody"); len(names) != 0 {
		t.Errorf("%v were queried for a response that the router does not know", names)
	}
}

// TestTokensByTenant: each tenant's tokens are counted, whether or not its clients request the
// usage of streams. Those that did get it from the engine, and the others get none.
func TestTokensByTenant(t *testing.T) {
	t.Parallel()
	path := keysFile(t)
	putKeys(t, path, "name: user, tenant: web", userSecret, "name: other, tenant: batch", otherSecret)
	r, p := tappedRig(t, "1p1d:profile=instant", func(c *settings.Config) {
		c.Keys = settings.APIKeys{File: path, Required: true}
		c.Routing.Threshold.Tokens = 64
	})
	usages := map[string]int{ // of the client's options
		"": 0, `,"stream_options":null`: 0, `,"stream_options":{"include_usage":false}`: 0, `,"stream_options":{"include_usage":true}`: 1,
	}
	for options, want := range usages {
		for i, n := range []int{20, 100} { // local, remote
			for path, prompt := range map[string]string{
				"/v1/completions":      `"prompt":` + string(encode(t, ids(n, len(options)+i))),
				"/v1/chat/completions": `"messages":[{"role":"user","content":"` + strings.Repeat("word ", n) + `"}]`,
			} {
				p.reset()
				a := r.send(http.MethodPost, path, []byte(`{"model":"sim",`+prompt+`,"max_tokens":4,"ignore_eos":true,"stream":true`+options+`}`), bearer(userSecret)...)
				if got := strings.Count(string(a.body), `"usage":{`); got != want || a.status != 200 || !strings.HasSuffix(string(a.body), "data: [DONE]\n\n") {
					t.Errorf("%s%s: the client got usage %d times, want %d: %s", path, options, got, want, a)
				}
				if legs := p.legsOf("decode"); len(legs) != 1 || !rawjson.Value(legs[0].body).Get("stream_options.include_usage").Bool() {
					t.Errorf("%s%s: the engine was not asked for usage", path, options)
				}
			}
		}
	}
	r.post("/v1/completions", object{"model": "sim", "prompt": ids(30, 99), "max_tokens": 5, "ignore_eos": true}, bearer(otherSecret)...)
	for series, want := range map[string]float64{
		`dynctl_tokens_total{kind="completion",model="sim",source="engine",tenant="web"}`:   4 * 4 * 4,
		`dynctl_tokens_total{kind="completion",model="sim",source="router",tenant="web"}`:   -1, // no series
		`dynctl_tokens_total{kind="prompt",model="sim",source="engine",tenant="batch"}`:     30,
		`dynctl_tokens_total{kind="completion",model="sim",source="engine",tenant="batch"}`: 5,
	} {
		r.eventually(series, func() error {
			if got := r.metricWith(series, ""); got != want {
				return fmt.Errorf("%v, want %v", got, want)
			}
			return nil
		})
	}
	// Options that the router does not know stay alone, and the router counts.
	a := r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"hi","max_tokens":4,"ignore_eos":true,"stream":true,"stream_options":{"x":1}}`), bearer(userSecret)...)
	if legs := p.legsOf("decode"); a.status != 200 || rawjson.Value(legs[len(legs)-1].body).Get("stream_options.x").String() == "" {
		t.Errorf("%s", a)
	}
	r.eventually("what the router counts", func() error {
		if got := r.metricWith(`dynctl_tokens_total{kind="completion",model="sim",source="router",tenant="web"}`, ""); got != 1 { // the engine sends all in one event
			return fmt.Errorf("%v, want 1", got)
		}
		return nil
	})
}

// TestTokensOfClientsWhoLeft: what a client got of a stream before it left is counted, on every
// API, from one engine and from a pair: by the router where the engine's usage did not come.
func TestTokensOfClientsWhoLeft(t *testing.T) {
	t.Parallel()
	const got = 3
	keys, many := keysFile(t), strings.TrimSuffix(strings.Repeat("1000,", 64), ",")
	text := strings.Repeat("word ", 100)
	messages := `"max_tokens":9,"messages":[{"role":"user","content":"` + text + `"}]`
	model := fakeengine.Model{Text: "x"}
	for path, c := range map[string]struct{ body, head, token string }{
		"/v1/completions":        {`"prompt":[` + many + `]`, `{"choices":[{"index":0,"text":"x"}]}`, `{"choices":[{"index":0,"text":"x"}]}`},
		"/v1/chat/completions":   {messages, `{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`, `{"choices":[{"index":0,"delta":{"content":"x"}}]}`},
		"/v1/messages":           {messages, `{"type":"message_start","message":{"usage":{"input_tokens":64,"output_tokens":0}}}`, `{"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}`},
		"/v1/responses":          {`"input":"` + text + `"`, `{"type":"response.created","response":{"id":"resp_1","status":"in_progress","usage":null}}`, `{"type":"response.output_text.delta","delta":"x"}`},
		"/inference/v1/generate": {`"token_ids":[` + many + `],"sampling_params":{"max_tokens":9}`, `{"choices":[{"index":0,"token_ids":[]}]}`, `{"choices":[{"index":0,"token_ids":[5]}]}`},
	} {
		for _, fleet := range []string{"one engine", "a pair"} {
			t.Run(path+" of "+fleet, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					conf := settings.Default()
					conf.Keys.File = keys
					if fleet == "a pair" {
						conf.Prefill = []string{"http://prefill-0,engine=vllm,model=m,block_size=16,connector=nixl"}
						conf.Decode = []string{"http://decode-0,engine=vllm,model=m,block_size=16,connector=nixl"}
						conf.Routing.Threshold.Tokens = 0
					} else {
						conf.Worker = []string{"http://aggregated-0,engine=vllm,model=m,block_size=16"}
					}
					p := router.NewPiped(t, conf, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
						body, err := io.ReadAll(q.Body)
						if err != nil {
							panic(http.ErrAbortHandler)
						}
						if q.URL.Path != path {
							http.NotFound(w, q)
							return
						}
						a := fakeengine.Stream(c.head, c.token, c.token, c.token, c.token, c.token).Every(time.Second)
						if strings.HasPrefix(q.Host, "prefill") {
							a = model.Answer(&fakeengine.Request{Worker: q.Host, Method: q.Method, Path: q.URL.Path, ID: q.Header.Get("X-Request-Id"), Body: body})
						}
						play(w, q, &a)
					}))
					q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://router"+path, strings.NewReader(`{"model":"m",`+c.body+`,"stream":true}`))
					if err != nil {
						t.Fatal(err)
					}
					q.Header.Set("Authorization", "Bearer "+userSecret)
					resp, err := p.Client.Do(q)
					if err != nil {
						t.Fatal(err)
					}
					tokens, want := 0, got
					if c.head == c.token {
						want++
					}
					for lines := bufio.NewScanner(resp.Body); tokens < want && lines.Scan(); {
						if lines.Text() == "data: "+c.token {
							tokens++
						}
					}
					resp.Body.Close()
					synctest.Wait()
					admin, err := p.AdminHandler(router.AdminOptions{})
					if err != nil {
						t.Fatal(err)
					}
					page := httptest.NewRecorder()
					admin.ServeHTTP(page, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1/metrics", nil))
					for kind, re := range map[string]string{
						"completion": fmt.Sprintf(`(?m)^dynctl_tokens_total\{kind="completion",model="m",source="router",tenant="web"\} %d$`, want),
						"prompt":     `(?m)^dynctl_tokens_total\{kind="prompt",model="m",source="(router|engine)",tenant="web"\} [1-9]`,
					} {
						if !regexp.MustCompile(re).MatchString(page.Body.String()) {
							t.Errorf("%s tokens after %d of the answer, %d %s:\n%s", kind, tokens, resp.StatusCode, resp.Header.Get("X-Dynctl-Path"), strings.Join(regexp.MustCompile(`(?m)^dynctl_tokens_total.*$`).FindAllString(page.Body.String(), -1), "\n"))
						}
					}
				})
			})
		}
	}
}

// TestUsageOfOddStreams: engines get a body whose stream is no plain true as it was sent.
func TestUsageOfOddStreams(t *testing.T) {
	r, p := tappedRig(t, "1a:profile=instant")
	for _, stream := range []string{`"true"`, "1"} {
		p.reset()
		body := `{"model":"sim","prompt":[1,2,3],"max_tokens":2,"stream":` + stream + `}`
		a := r.send(http.MethodPost, "/v1/completions", []byte(body))
		if legs := p.legsOf("aggregated"); len(legs) != 1 || string(legs[0].body) != body {
			t.Errorf("%s: %d legs, %s", stream, len(legs), a)
		}
	}
}

// TestLaxBodiesOfPairs: numbers and booleans as strings reach a decode engine as they came, and
// a prefill engine computes one token, whatever the type of the limit.
func TestLaxBodiesOfPairs(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant", func(c *settings.Config) { c.Routing.Threshold.Tokens = 0 })
	for path, prompt := range map[string]string{
		"/v1/completions":      `"prompt":` + string(encode(t, ids(100, 1))),
		"/v1/chat/completions": `"messages":[{"role":"user","content":"` + strings.Repeat("word ", 100) + `"}]`,
	} {
		for _, stream := range []string{`"true"`, `"false"`, "1", "0"} {
			p.reset()
			lax := `"max_tokens":"4","stream":` + stream
			a := r.send(http.MethodPost, path, []byte(`{"model":"sim",`+prompt+`,`+lax+`}`))
			prefills, decodes := p.legsOf("prefill"), p.legsOf("decode")
			if len(prefills) != 1 || len(decodes) != 1 {
				t.Fatalf("%s, stream %s: %d prefills and %d decodes: %s", path, stream, len(prefills), len(decodes), a)
			}
			if q := rawjson.Value(prefills[0].body); string(q.Get("max_tokens")) != "1" || q.Get("stream").Exists() && string(q.Get("stream")) != "false" {
				t.Errorf("%s, stream %s: the prefill engine gets %s", path, stream, prefills[0].body)
			}
			if !bytes.Contains(decodes[0].body, []byte(lax)) {
				t.Errorf("%s, stream %s: the decode engine gets %s", path, stream, decodes[0].body)
			}
		}
	}
}

// TestTokensOfAKey: a key that has used its tokens waits for the next ones, and the tokens of
// streams count although their clients did not request usage.
func TestTokensOfAKey(t *testing.T) {
	t.Parallel()
	path := keysFile(t)
	putKeys(t, path, "name: user, tokens: 100", userSecret, "name: other", otherSecret)
	r, _ := tappedRig(t, "1a:profile=instant", func(c *settings.Config) { c.Keys.File = path })
	big := encode(t, object{"model": "sim", "prompt": ids(1000, 1), "max_tokens": 5, "ignore_eos": true, "stream": true})
	if a := r.send(http.MethodPost, "/v1/completions", big, bearer(userSecret)...); a.status != 200 {
		t.Fatalf("the first request: %s", a)
	}
	a := r.send(http.MethodPost, "/v1/completions", big, bearer(userSecret)...)
	a.refused(t, 429, "rate_limited")
	if a.header.Get("Retry-After") == "" {
		t.Error("a refusal without Retry-After")
	}
	if a := r.send(http.MethodPost, "/v1/completions", big, bearer(otherSecret)...); a.status != 200 {
		t.Errorf("another key: %s", a)
	}
}
