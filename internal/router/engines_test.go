package router_test

import (
	"io"
	"log"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/settings"
)

var quietLog = log.New(io.Discard, "", 0)

// TestEnginesProveReuseTransferAndRestraint is the claim of the whole router,
// read from the engines' own counters: prefixes are reused, a remote prefill
// moves blocks, and short prompts leave the prefill workers alone.
func TestEnginesProveReuseTransferAndRestraint(t *testing.T) {
	t.Parallel()
	const threshold = 128
	r := start(t, "2p2d:profile=instant", func(c *settings.Config) { c.Routing.Threshold.Tokens = threshold })

	check := func(prompt []int, wantPath string) *answer {
		t.Helper()
		a, text := r.complete(prompt)
		if got := a.header.Get("X-Dynctl-Path"); got != wantPath {
			t.Fatalf("a prompt of %d tokens went %s, want %s", len(prompt), got, wantPath)
		}
		if want := right(prompt); text != want {
			t.Fatalf("wrong text %q, a single engine says %q", text, want)
		}
		r.synced()
		return a
	}

	// Below the threshold: no prefill worker sees anything.
	for i := range 8 {
		check(ids(threshold-1, 1000+i), "local")
	}
	for _, p := range []string{"prefill-0", "prefill-1"} {
		if n := r.touched(p); n != 0 {
			t.Errorf("%s got %d request(s) with prompts below the threshold", p, n)
		}
	}

	// Eight conversations that share a system prompt of 512 tokens: each is
	// prefilled remotely, and what moves is what decode did not have.
	system := ids(512, 7)
	before := map[string]uint64{}
	for _, d := range []string{"decode-0", "decode-1"} {
		before[d] = r.counters(d).ExternalHits
	}
	remote := 0
	for i := range 8 {
		prompt := append(append([]int{}, system...), ids(256, 100+i)...)
		check(prompt, "remote")
		remote++
	}
	var moved, hits, failed, prefilled, prefillHits uint64
	for _, d := range []string{"decode-0", "decode-1"} {
		s := r.counters(d)
		moved += s.ExternalHits - before[d]
		hits += s.PrefixHits
		failed += s.FailedTransfers
		if s.Transfers > 0 && s.TransferBytes == 0 {
			t.Errorf("%s counts %d transfers without bytes", d, s.Transfers)
		}
	}
	for _, p := range []string{"prefill-0", "prefill-1"} {
		s := r.counters(p)
		prefilled += s.Local
		prefillHits += s.PrefixHits
		if s.Expired != 0 {
			t.Errorf("%s let %d prefilled request(s) expire", p, s.Expired)
		}
	}
	if failed != 0 {
		t.Errorf("%d transfers failed", failed)
	}
	if moved < 8*256 {
		t.Errorf("decode engines loaded %d tokens over the connector, want at least the 8 x 256 that nobody had", moved)
	}
	if hits == 0 {
		t.Error("no decode engine found a shared prefix in its cache")
	}
	if prefillHits == 0 {
		t.Error("no prefill engine found a shared prefix in its cache")
	}
	// With reuse the prefill side computes the system prompt at most once on
	// each of its ranks.
	if limit := uint64(2*512 + remote*256 + remote*16); prefilled > limit {
		t.Errorf("prefill engines computed %d tokens, with reuse at most %d", prefilled, limit)
	}

	// A long prompt whose prefix decode now holds is short where it counts:
	// it stays local though its length is six times the threshold.
	touched := r.touched("prefill-0") + r.touched("prefill-1")
	again := append(append([]int{}, system...), append(ids(256, 100), ids(20, 9)...)...)
	a := check(again, "local")
	if r.touched("prefill-0")+r.touched("prefill-1") != touched {
		t.Error("a prompt that decode holds touched a prefill worker")
	}
	cached := a.completion(t).Usage.PromptTokensDetails.CachedTokens
	if c := r.receipt(a.header.Get("X-Dynctl-Decision")); c.Predicted.CachedTokens != cached || cached < 512+256-16 {
		t.Errorf("predicted %d cached tokens, the engine reports %d", c.Predicted.CachedTokens, cached)
	}
	if !strings.HasPrefix(a.header.Get("X-Dynctl-Worker"), "decode-") {
		t.Errorf("went to %q", a.header.Get("X-Dynctl-Worker"))
	}
	r.set(func(c *settings.Config) { c.Routing.Threshold.Tokens = 0 })
	carries(t, r)
}
