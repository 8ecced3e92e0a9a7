package router_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/property"
	"github.com/dynctl/dynctl/internal/router/access"
	"github.com/dynctl/dynctl/internal/router/blockhash"
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

// TestTenantsDoNotHitEachOthersCache: prompts of tenants who send the same, and try
// each other's salts, count as cached, by the engine's own account and by the
// router's, for those only whose tenant has sent them with the same salt before.
func TestTenantsDoNotHitEachOthersCache(t *testing.T) {
	path := keysFile(t)
	tenants := map[string]string{userSecret: "web", otherSecret: "batch", opsSecret: "operator"}
	putKeys(t, path, "name: user, tenant: web", userSecret, "name: second, tenant: web", readSecret, "name: other, tenant: batch", otherSecret, "name: operator", opsSecret)
	tenants[readSecret] = "web"
	r := start(t, "1a:profile=instant", func(c *settings.Config) { c.Keys = settings.APIKeys{File: path, Required: true, Salt: true} })
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
		foretold := a.header.Get("X-Dynctl-Cached-Tokens")
		if (cached > 0) != sent[which] || !sent[which] && foretold != "" && foretold != "0" {
			t.Fatalf("request %d, %s: %d tokens cached by the engine, %q by the router; sent before: %v", i, which, cached, foretold, sent[which])
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
	for p, body := range map[string]object{
		"/v1/messages": {"model": "sim", "max_tokens": 4, "messages": []object{{"role": "user", "content": "hello"}}}, "/v1/embeddings": {"model": "sim", "input": "hello"},
		"/generate": {"model": "sim", "text": "hello"},
	} {
		r.send(http.MethodPost, p, encode(t, body), bearer(userSecret)...).refused(t, 403, "forbidden")
	}
	for p, body := range map[string]object{
		"/v1/chat/completions": {"model": "sim", "max_tokens": 4, "messages": []object{{"role": "user", "content": "hello"}}},
		"/v1/responses":        {"model": "sim", "max_output_tokens": 4, "input": "hello"},
	} {
		r.post(p, body, bearer(userSecret)...)
	}
}
