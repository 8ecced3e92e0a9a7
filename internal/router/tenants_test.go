package router_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/property"
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
func storedResponsesAreTheirTenants(t *testing.T, r *rig, _ *tap) {
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
}
