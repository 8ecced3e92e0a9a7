package workers

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

func TestAliases(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "flag", spec(t, Decode, "http://a:1,name=a,model=llama"), spec(t, Decode, "http://b:1,name=b,model=llama;gpt-4"))
	if err := r.SetNames(Names{Aliases: map[string]string{"gpt-4": "llama", "best": "llama", "lost": "nothing", "claude-*": "llama"}}); err != nil {
		t.Fatal(err)
	}
	s := r.Snapshot()
	if diff := cmp.Diff([]string{"best", "gpt-4", "llama"}, s.Models()); diff != "" {
		t.Error(diff)
	}
	if len(s.Model("llama")) != 2 || len(s.Model("gpt-4")) != 1 || len(s.Model("best")) != 0 || len(s.Model("")) != 2 {
		t.Error("a wrong set of workers for a model")
	}
	if s.Canonical("best") != "llama" || s.Canonical("gpt-4") != "gpt-4" || s.Canonical("x") != "x" {
		t.Error("a wrong canonical name")
	}
	if err := r.SetNames(Names{Aliases: map[string]string{"a": "b", "b": "c", "": "x"}}); err == nil ||
		!strings.Contains(err.Error(), "which is an alias itself") || !strings.Contains(err.Error(), "needs a name and a model") {
		t.Errorf("bad aliases: %v", err)
	}
	if r.Snapshot() != s {
		t.Error("refused aliases changed the fleet")
	}
}

// TestResolve: a served name is never hidden, an exact alias goes before a pattern, a more
// specific pattern before others, and the default is for what is left.
func TestResolve(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "flag", spec(t, Decode, "http://a:1,name=a,model=model-a"), spec(t, Decode, "http://b:1,name=b,model=model-b"), spec(t, Decode, "http://c:1,name=c,model=claude-local"))
	aliases := map[string]string{
		"claude-*": "model-a", "claude-haiku-*": "model-b", "claude-haiku-4": "claude-local", "*-haiku": "model-b", "gpt-*-mini": "model-a", "gpt-5*": "model-b",
		"a*b*c": "model-a", "abc*": "model-b", "bc*": "model-a", "*bc": "model-b", "first": "model-a", "gone*": "nothing",
	}
	for _, c := range []struct {
		fallback, asked string
		want            Resolved
	}{
		{"", "model-a", Resolved{Model: "model-a"}},
		{"", "first", Resolved{Model: "model-a", Alias: "first"}},
		{"", "claude-local", Resolved{Model: "claude-local"}},
		{"", "claude-haiku-4", Resolved{Model: "claude-local", Alias: "claude-haiku-4"}},
		{"", "claude-haiku-4-5", Resolved{Model: "model-b", Alias: "claude-haiku-*"}},
		{"", "claude-opus-4-1[1m]", Resolved{Model: "model-a", Alias: "claude-*"}},
		{"", "claude-", Resolved{Model: "model-a", Alias: "claude-*"}},
		{"", "claude-*", Resolved{Model: "model-a", Alias: "claude-*"}},
		{"", "claude-3-haiku", Resolved{Model: "model-a", Alias: "claude-*"}},
		{"", "gpt-5-mini", Resolved{Model: "model-a", Alias: "gpt-*-mini"}},
		{"", "gpt-5-large", Resolved{Model: "model-b", Alias: "gpt-5*"}},
		{"", "abc", Resolved{Model: "model-b", Alias: "abc*"}},
		{"", "bc", Resolved{Model: "model-b", Alias: "*bc"}},
		{"", "gone-1", Resolved{Model: "nothing", Alias: "gone*"}},
		{"", "Claude-x", Resolved{Model: "Claude-x"}},
		{"", "", Resolved{}},
		{"model-b", "Claude-x", Resolved{Model: "model-b", Default: true}},
		{"model-b", "", Resolved{Model: "model-b", Default: true}},
		{"model-b", "gone-1", Resolved{Model: "nothing", Alias: "gone*"}},
		{"model-b", "model-a", Resolved{Model: "model-a"}},
		{"first", "", Resolved{Model: "model-a", Alias: "first", Default: true}},
		{"away", "what", Resolved{Model: "away", Default: true}},
	} {
		if err := r.SetNames(Names{Aliases: aliases, Default: c.fallback}); err != nil {
			t.Fatal(err)
		}
		if got := r.Snapshot().Resolve(c.asked); got != c.want {
			t.Errorf("%q, default %q: %+v, want %+v", c.asked, c.fallback, got, c.want)
		}
	}
}

// TestCandidates: only where engines resolve names themselves does a name that no worker lists
// go to all of them, and the default is for requests without a name then.
func TestCandidates(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "flag", spec(t, Decode, "http://a:1,name=a,model=m;lora"), spec(t, Decode, "http://b:1,name=b,model=m"))
	for _, c := range []struct {
		any      bool
		asked    string
		want     Resolved
		workers  int
		unlisted bool
	}{
		{false, "other", Resolved{Model: "m", Default: true}, 2, false},
		{true, "other", Resolved{Model: "other"}, 2, true},
		{true, "alias", Resolved{Model: "m", Alias: "alias"}, 2, false},
		{true, "lora", Resolved{Model: "lora"}, 1, false},
		{true, "", Resolved{Model: "m", Default: true}, 2, false},
	} {
		if err := r.SetNames(Names{Aliases: map[string]string{"alias": "m"}, Default: "m", Any: c.any}); err != nil {
			t.Fatal(err)
		}
		s := r.Snapshot()
		got := s.Resolve(c.asked)
		if list, unlisted := s.Candidates(got.Model); got != c.want || len(list) != c.workers || unlisted != c.unlisted {
			t.Errorf("%q, any %v: %+v, %d workers, unlisted %v", c.asked, c.any, got, len(list), unlisted)
		}
	}
	if err := r.SetNames(Names{}); err != nil {
		t.Fatal(err)
	}
	if list, unlisted := r.Snapshot().Candidates("other"); len(list) > 0 || unlisted {
		t.Errorf("%d workers for a name that nobody serves", len(list))
	}
}

// TestKnows: a fleet knows the models that it serves, that the configuration names, and that
// left with their workers, but no model that an engine has dropped.
func TestKnows(t *testing.T) {
	r := NewRegistry(nil)
	check := func(when string, want ...string) {
		t.Helper()
		for _, m := range []string{"", "a", "b", "lora", "target", "default", "other"} {
			if got := r.Snapshot().Knows(m); got != slices.Contains(want, m) {
				t.Errorf("%s: knows %q: %v", when, m, got)
			}
		}
	}
	check("no worker")
	a, b := spec(t, Decode, "http://a:1,name=a,model=a;lora"), spec(t, Decode, "http://b:1,name=b,model=b")
	apply(t, r, "flag", a, b)
	check("both", "a", "b", "lora")
	apply(t, r, "flag", b)
	check("one has left", "a", "b", "lora")
	apply(t, r, "flag")
	check("both have left", "a", "b", "lora")
	apply(t, r, "flag", spec(t, Decode, "http://a:1,name=a,model=a"))
	apply(t, r, "flag", spec(t, Decode, "http://a:1,name=a,model=other"))
	check("a worker has another model now", "b", "lora", "other")
	if err := r.SetNames(Names{Aliases: map[string]string{"alias": "target", "d": "default"}, Default: "d"}); err != nil {
		t.Fatal(err)
	}
	check("named", "b", "lora", "other", "target", "default")
	for i := range 2 * maxLeft {
		apply(t, r, "flag", spec(t, Decode, fmt.Sprintf("http://a:1,name=w%d,model=m%d", i, i)))
	}
	if s := r.Snapshot(); len(s.left) != maxLeft || s.Knows("b") || !s.Knows(fmt.Sprint("m", 2*maxLeft-2)) {
		t.Errorf("%d models are remembered", len(s.left))
	}
}

func TestBadNames(t *testing.T) {
	for _, c := range []struct {
		names Names
		want  string
	}{
		{Names{Aliases: map[string]string{"a**": "b"}}, "write it once"},
		{Names{Aliases: map[string]string{"a*": "b*"}}, "its model is one model"},
		{Names{Aliases: map[string]string{"a*": "b", "b": "c"}}, `"a*" for "b", which is an alias itself`},
		{Names{Default: "model-*"}, "has a * in it"},
		{Names{Aliases: map[string]string{"*": "a"}, Default: "b"}, "contradicts the alias"},
		{Names{Aliases: map[string]string{"*": "a", "also": "b"}, Default: "also"}, "contradicts the alias"},
		{Names{Aliases: map[string]string{"*": "a", "also": "a", "claude-*": "b"}, Default: "also"}, ""},
		{Names{Aliases: map[string]string{"[a]?": "a"}, Default: "b"}, ""},
	} {
		err := c.names.Check()
		if (err == nil) != (c.want == "") || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("%+v: %v, want %q", c.names, err, c.want)
		}
	}
}

// TestMatches: a pattern matches what the regular expression of its form does.
func TestMatches(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		letters := func(name, of string) string {
			return rapid.StringOfN(rapid.RuneFrom([]rune(of)), 0, 8, -1).Draw(t, name)
		}
		pattern, name := letters("pattern", "ab/*"), letters("name", "ab/")
		like := regexp.MustCompile(`^(?s:` + strings.ReplaceAll(regexp.QuoteMeta(pattern), `\*`, ".*") + `)$`)
		if got := matches(pattern, name); got != like.MatchString(name) {
			t.Fatalf("%q matches %q: %v", pattern, name, got)
		}
	})
}

// TestOnly: a request without a model is for the base model where all workers have one in
// common, by whichever of its names all of them know.
func TestOnly(t *testing.T) {
	for _, c := range []struct {
		name  string
		fleet []Learned
		want  string
	}{
		{"nobody has reported", []Learned{{}, {}}, ""},
		{"one", []Learned{{Facts: Facts{Models: []string{"m"}}}, {}, {Facts: Facts{Models: []string{}}}}, "m"},
		{"two", []Learned{{Facts: Facts{Models: []string{"m"}}}, {Facts: Facts{Models: []string{"n"}}}}, ""},
		{"adapters", []Learned{{Facts: Facts{Models: []string{"lora", "m"}}, LoRAs: []string{"lora"}}, {Facts: Facts{Models: []string{"m"}}}}, "m"},
		{"an adapter called as another base", []Learned{{Facts: Facts{Models: []string{"m", "n"}}, LoRAs: []string{"n"}}, {Facts: Facts{Models: []string{"n"}}}}, ""},
		{"names of one model", []Learned{{Facts: Facts{Models: []string{"first", "m"}}}, {Facts: Facts{Models: []string{"m", "other"}}}}, "m"},
		{"two models at one worker", []Learned{{Facts: Facts{Models: []string{"m", "n"}}, Several: true}}, ""},
		{"two models at one of the workers", []Learned{{Facts: Facts{Models: []string{"m"}}}, {Facts: Facts{Models: []string{"m", "n"}}, Several: true}}, ""},
		{"three in a chain", []Learned{{Facts: Facts{Models: []string{"a", "b"}}}, {Facts: Facts{Models: []string{"b", "c"}}}, {Facts: Facts{Models: []string{"c", "d"}}}}, ""},
	} {
		r := NewRegistry(nil)
		var specs []Spec
		for i := range c.fleet {
			specs = append(specs, spec(t, Decode, "http://w"+string(rune('a'+i))+":1"))
		}
		apply(t, r, "flag", specs...)
		for i, w := range r.Snapshot().Workers {
			if _, err := r.Update(w, c.fleet[i]); err != nil {
				t.Fatal(err)
			}
		}
		if got := r.Snapshot().Resolve(""); got != (Resolved{Model: c.want}) {
			t.Errorf("%s: %+v, want %q", c.name, got, c.want)
		}
	}
}

func TestSameModel(t *testing.T) {
	w := func(models ...string) *Worker { return &Worker{Facts: Facts{Models: models}} }
	adapters := func(n int, models ...string) *Worker { return &Worker{Facts: Facts{Models: models}, LoRAs: models[n:]} }
	for _, c := range []struct {
		name  string
		a, b  *Worker
		model string
		want  bool
	}{
		{"nothing is known", w(), w(), "m", true},
		{"of one nothing is known", w("m"), w(), "m", false},
		{"the same", w("m"), w("m"), "m", true},
		{"others", w("m"), w("n"), "m", false},
		{"others, without a model", w("m"), w("n"), "", false},
		{"the same, without a model", w("m", "x"), w("m", "y"), "", true},
		{"other defaults", w("m", "n"), w("n", "m"), "", false},
		{"other defaults, by name", w("m", "n"), w("n", "m"), "n", true},
		{"an adapter of the same", adapters(1, "m", "x"), adapters(1, "m", "x", "y"), "x", true},
		{"an adapter of another", adapters(1, "m", "x"), adapters(1, "n", "x"), "x", false},
		{"an adapter, and a model of its name", adapters(1, "m", "x"), w("x"), "x", false},
		{"an adapter, and a model of its name beside its own", adapters(1, "m", "x"), w("m", "x"), "x", false},
		{"the base of adapters", adapters(1, "m", "x"), w("m"), "m", true},
	} {
		if got, back := c.a.SameModel(c.b, c.model), c.b.SameModel(c.a, c.model); got != c.want || back != c.want {
			t.Errorf("%s: %v and %v, want %v", c.name, got, back, c.want)
		}
	}
}
