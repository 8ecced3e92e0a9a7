package access

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// TestTokens: a key may begin requests while it has tokens left, pays for what they took, and
// over a long time uses no more than its tokens a minute and one request.
func TestTokens(t *testing.T) {
	s := stored(t, "name: user, tokens: 600", "one", "name: free", "two")
	now := time.Unix(1000, 0)
	admit := func(secret string) (*Key, error) {
		k, reason, err := s.Admit(http.Header{"Authorization": {"Bearer " + secret}}, true, now)
		if (reason == ReasonTokens) != (err != nil) {
			t.Fatalf("%q, %v", reason, err)
		}
		return k, err
	}
	used := 0
	for began := now; now.Sub(began) < time.Hour; {
		k, err := admit("one")
		if err != nil {
			e := refused(t, err)
			if e.Status != 429 || e.Code != api.CodeRateLimited || e.RetryAfter <= 0 {
				t.Fatalf("%+v", e)
			}
			now = now.Add(e.RetryAfter)
			if _, err := admit("one"); err != nil {
				t.Fatalf("refused after Retry-After: %v", err)
			}
			continue
		}
		k.Spend(700, now)
		used += 700
	}
	if used < 59*600 || used > 61*600+700 {
		t.Errorf("%d tokens in an hour of 600 a minute", used)
	}
	for range 3 {
		k, err := admit("two")
		if err != nil {
			t.Fatal(err)
		}
		k.Spend(1_000_000, now)
	}
	(*Key)(nil).Spend(5, now)
}

// TestTokensGoBack: what was taken for a request that failed goes back, and no more than that.
func TestTokensGoBack(t *testing.T) {
	s := stored(t, "name: user, tokens: 600", "one")
	now := time.Unix(1000, 0)
	k := s.Find("one")
	k.Spend(600, now)
	if k.tokens.wait(k.Tokens, now) == 0 {
		t.Error("a key without tokens does not wait")
	}
	k.Spend(-600, now)
	k.Spend(-600, now)
	k.Spend(599, now)
	if k.tokens.wait(k.Tokens, now) != 0 {
		t.Error("tokens did not go back")
	}
	k.Spend(1, now)
	if k.tokens.wait(k.Tokens, now) == 0 {
		t.Error("more tokens went back than were taken")
	}
}

// TestTokensAfterAReload: reading the file again gives nothing back, and a new number counts
// from then on.
func TestTokensAfterAReload(t *testing.T) {
	parse := func(tokens int) *Set {
		s, err := Parse(fmt.Appendf(nil, "keys: [{name: a, sha256: %s, tokens: %d}]", hashOf("one"), tokens))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	now := time.Unix(1000, 0)
	old, same, more := parse(600), parse(600), parse(6000)
	old.Keys()[0].Spend(1200, now)
	if _, changed, _ := difference(old, same); changed != 0 {
		t.Error("the same key counts as changed")
	}
	if k := &same.Keys()[0]; k.tokens.wait(k.Tokens, now) == 0 {
		t.Error("a reload gave tokens back")
	}
	if _, changed, _ := difference(same, more); changed != 1 {
		t.Error("another number of tokens does not count as a change")
	}
	if k := &more.Keys()[0]; k.tokens.wait(k.Tokens, now) != 0 {
		t.Error("more tokens do not count at once")
	}
	if _, err := Parse(fmt.Appendf(nil, "keys: [{name: a, sha256: %s, tokens: -1}]", hashOf("one"))); err == nil {
		t.Error("negative tokens are accepted")
	}
}
