package access

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/watchfile"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func hashOf(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

func TestKeysAreFound(t *testing.T) {
	s, err := Parse(fmt.Appendf(nil, "keys:\n  - {name: a, sha256: %s}\n  - {name: b, sha256: %s, tenant: t, models: [m1, m2], rate: 60, roles: [use, operate]}\n", hashOf("one"), hashOf("two")))
	if err != nil {
		t.Fatal(err)
	}
	a, b := s.Find("one"), s.Find("two")
	if a == nil || b == nil {
		t.Fatalf("found %v and %v", a, b)
	}
	if d := cmp.Diff([]string{"a", "a", "t"}, []string{a.Name, a.Tenant, b.Tenant}); d != "" {
		t.Fatalf("name and tenants (-want +got):\n%s", d)
	}
	for _, secret := range []string{"three", "", hashOf("one")} {
		if k := s.Find(secret); k != nil {
			t.Errorf("%q is the secret of %+v", secret, k)
		}
	}
	for _, c := range []struct {
		key  *Key
		role Role
		has  bool
	}{{a, Use, true}, {a, Read, false}, {b, Use, true}, {b, Read, true}, {b, Operate, true}, {b, Admin, false}} {
		if c.key.Has(c.role) != c.has {
			t.Errorf("key %s has role %v: %t, want %t", c.key.Name, c.role, !c.has, c.has)
		}
	}
	for _, c := range []struct {
		key    *Key
		models []string
		may    bool
	}{{a, []string{"anything"}, true}, {b, []string{"m1"}, true}, {b, []string{"m3"}, false}, {b, []string{"alias", "m2"}, true}, {b, []string{""}, false}} {
		if c.key.May(c.models...) != c.may {
			t.Errorf("key %s may use %q: %t, want %t", c.key.Name, c.models, !c.may, c.may)
		}
	}
}

func TestBadFilesAreRefused(t *testing.T) {
	good := hashOf("one")
	for _, c := range []struct{ text, want string }{
		{"keys: 7", "cannot unmarshal"},
		{"kyes: []", "not found"},
		{"keys: [{sha256: " + good + "}]", "key 1: it has no name"},
		{"keys: [{name: a}]", `key "a": sha256 is not 64 hexadecimal digits`},
		{"keys: [{name: a, sha256: secret-in-the-clear}]", "sha256 is not"},
		{"keys: [{name: a, sha256: " + good + "}, {name: a, sha256: " + hashOf("x") + "}]", "another key has this name"},
		{"keys: [{name: a, sha256: " + good + "}, {name: b, sha256: " + good + "}]", `the same key as "a"`},
		{"keys: [{name: a, sha256: " + good + ", roles: [root]}]", `role "root" is not one of`},
		{"keys: [{name: a, sha256: " + good + ", rate: -1}]", "rate -1"},
		{"keys: [{name: a, sha256: " + good + ", weight: 1001}]", "weight 1001"},
		{"keys: [{name: \"a\\n\", sha256: " + good + "}]", "control characters"},
		{"keys: []\n---\nkeys: []", "more than one"},
	} {
		_, err := Parse([]byte(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret-in-the-clear") || strings.Contains(err.Error(), good) {
			t.Errorf("%s: %v, want %q", c.text, err, c.want)
		}
	}
}

// TestRate: over any minute no more than the rate and its share of ten seconds
// begin, and a key that keeps to the rate never waits.
func TestRate(t *testing.T) {
	s, err := Parse(fmt.Appendf(nil, "keys: [{name: a, sha256: %s, rate: 60}]", hashOf("one")))
	if err != nil {
		t.Fatal(err)
	}
	k := s.Find("one")
	now := time.Unix(1000, 0)
	begun := 0
	for range 100 {
		if k.Take(now) == 0 {
			begun++
		}
	}
	if begun != 10 {
		t.Errorf("%d began at once, not 10", begun)
	}
	wait := k.Take(now)
	if wait <= 0 || wait > time.Second {
		t.Errorf("the next one waits %v", wait)
	}
	if k.Take(now.Add(wait)) != 0 {
		t.Error("a request that has waited as long as it was asked to is refused")
	}
	now = now.Add(time.Hour)
	for i := range 600 {
		if w := k.Take(now.Add(time.Duration(i) * time.Second)); w != 0 {
			t.Fatalf("request %d of one a second waits %v", i, w)
		}
	}
	slow, err := Parse(fmt.Appendf(nil, "keys: [{name: a, sha256: %s, rate: 1}]", hashOf("one")))
	if err != nil {
		t.Fatal(err)
	}
	if k = slow.Find("one"); k.Take(now) != 0 || k.Take(now) != time.Minute {
		t.Error("one a minute")
	}
	// A file with another rate changes it for what comes, and gives nothing back.
	faster, err := Parse(fmt.Appendf(nil, "keys: [{name: a, sha256: %s, rate: 6000}]", hashOf("one")))
	if err != nil {
		t.Fatal(err)
	}
	difference(slow, faster)
	k, now = faster.Find("one"), time.Now().Add(time.Hour)
	for begun = 0; begun < 2000 && k.Take(now) == 0; begun++ {
	}
	if wait := k.Take(now); begun != 1000 || wait != 10*time.Millisecond {
		t.Errorf("of 6,000 a minute %d begin at once, and the next one after %v", begun, wait)
	}
	free, err := Parse(fmt.Appendf(nil, "keys: [{name: a, sha256: %s}]", hashOf("one")))
	if err != nil {
		t.Fatal(err)
	}
	difference(faster, free)
	if k = free.Find("one"); k.Take(now) != 0 {
		t.Error("a key without a rate waits")
	}
}

func TestShown(t *testing.T) {
	for _, c := range []struct {
		h    http.Header
		want string
	}{
		{http.Header{}, ""},
		{http.Header{"Authorization": {"Bearer abc"}}, "abc"},
		{http.Header{"Authorization": {"bearer  abc "}}, "abc"},
		{http.Header{"X-Api-Key": {"abc"}}, "abc"},
		{http.Header{"Authorization": {"Basic abc"}}, noBearer},
		{http.Header{"Authorization": {"Bearer abc", "Bearer def"}, "X-Api-Key": {"x"}}, noBearer},
	} {
		if got := Shown(c.h); got != c.want {
			t.Errorf("%v: %q", c.h, got)
		}
		Hide(c.h)
		if len(c.h) != 0 {
			t.Errorf("left %v", c.h)
		}
	}
}

// TestNewKeysAreAdded: a file grows by its new keys, keeps its comments, and knows
// them.
func TestNewKeysAreAdded(t *testing.T) {
	var content []byte
	var secrets []string
	for i := range 3 {
		secret, with, err := New(Key{Name: fmt.Sprint("key-", i), Models: []string{"m"}, Roles: []Role{Use, Read}}, content)
		if err != nil {
			t.Fatal(err)
		}
		if len(secret) < 40 || strings.Contains(string(with), secret) {
			t.Errorf("%s in %s", secret, with)
		}
		secrets = append(secrets, secret)
		if content = with; i == 0 {
			content = append([]byte("# ours\n"), content...)
		}
	}
	s, err := Parse(content)
	if err != nil || !strings.Contains(string(content), "# ours") {
		t.Fatalf("%v\n%s", err, content)
	}
	for i, secret := range secrets {
		if k := s.Find(secret); k == nil || k.Name != fmt.Sprint("key-", i) || !k.Has(Read) {
			t.Errorf("key %d: %+v", i, k)
		}
	}
	if _, _, err := New(Key{Name: "key-1"}, content); err == nil || !strings.Contains(err.Error(), "another key has this name") {
		t.Errorf("a name that is taken: %v", err)
	}
	if _, _, err := New(Key{Name: "a"}, []byte("keys: null\n")); err != nil {
		t.Error(err)
	}
}

// TestFileIsWatched: a key that is taken out is one no more, a bad file changes
// nothing and is reported.
func TestFileIsWatched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	one, two := "  - {name: a, rate: 1, sha256: "+hashOf("one")+"}\n", "  - {name: b, sha256: "+hashOf("two")+"}\n"
	write("keys:\n" + one)
	var mu sync.Mutex
	var kinds, loads []string
	s, err := NewStore(Options{
		Path: path, Watch: watchfile.Options{Poll: 10 * time.Millisecond, Settle: time.Millisecond},
		Event:  func(e eventlog.Event) { mu.Lock(); kinds = append(kinds, e.Kind); mu.Unlock() },
		Loaded: func(r string) { mu.Lock(); loads = append(loads, r); mu.Unlock() },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	defer func() { cancel(); <-done }()
	until := func(what string, so func() bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if !wait.Until(ctx, time.Millisecond, so) {
			t.Fatalf("not so: %s; trouble %q", what, s.Trouble())
		}
	}
	if s.Find("one").Take(time.Now()) != 0 {
		t.Fatal("the first request waits")
	}
	write("keys:\n" + one + two)
	until("two is known", func() bool { return s.Find("two") != nil })
	if s.Find("one").Take(time.Now()) == 0 {
		t.Error("reading the file again gave a key its rate back")
	}
	write("keys:\n" + two + "  - nonsense\n")
	until("trouble", func() bool { return s.Trouble() != "" })
	if s.Find("one") == nil || s.Count() != 2 {
		t.Error("a bad file took keys away")
	}
	write("keys:\n" + two)
	until("one is gone", func() bool { return s.Find("one") == nil && s.Trouble() == "" })
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(kinds, []string{"keys_replaced", "keys_refused", "keys_replaced"}) || !slices.Equal(loads, []string{"ok", "refused", "ok"}) {
		t.Errorf("%v %v", kinds, loads)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("keys:\n  - {name: a, sha256: " + hashOf("one") + ", roles: [use], models: [m], rate: 5}\n"))
	f.Add([]byte("keys: [&a {name: x}, *a]"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		s, err := Parse(raw)
		if err != nil {
			return
		}
		for i := range s.Keys() {
			k := &s.Keys()[i]
			if k.Name == "" || k.Tenant == "" || len(k.Roles) == 0 {
				t.Errorf("%+v is taken", k)
			}
		}
		if _, with, err := New(Key{Name: "a name that nobody has"}, raw); err == nil {
			if again, err := Parse(with); err != nil || len(again.Keys()) != len(s.Keys())+1 {
				t.Errorf("%v: %s", err, with)
			}
		}
	})
}

func BenchmarkFind(b *testing.B) {
	s, err := Parse(fmt.Appendf(nil, "keys: [{name: a, sha256: %s}]", hashOf("one")))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if s.Find("one") == nil {
			b.Fatal("lost")
		}
	}
}

// TestNoKey: a request without a key has no owner, and one with a key waits as that says.
func TestNoKey(t *testing.T) {
	var none *Key
	if none.Owner() != "" || none.Claim() != (admission.Claim{}) {
		t.Errorf("%q %+v", none.Owner(), none.Claim())
	}
	k := &Key{Name: "n", Tenant: "t", Weight: 2, Priority: admission.High}
	if k.Owner() != "t" || k.Claim() != (admission.Claim{Tenant: "t", Weight: 2, Band: admission.High}) {
		t.Errorf("%q %+v", k.Owner(), k.Claim())
	}
}
