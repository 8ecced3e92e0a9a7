package jinja

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const vectors = "../../../../../testdata/tokenizer/templates.json"

type vector struct {
	Template, Want string
	Vars           json.RawMessage
	Fails          bool
}

func readVectors(tb testing.TB, path string) []vector {
	tb.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	var cases []vector
	if err := json.Unmarshal(data, &cases); err != nil {
		tb.Fatal(err)
	}
	return cases
}

func render(src string, vars []byte) (string, error) {
	t, err := Parse(src)
	if err != nil {
		return "", err
	}
	v, err := ParseJSON(vars)
	if err != nil {
		return "", err
	}
	out, err := t.Render(v.(*Dict), 1<<20)
	return string(out), err
}

// TestReference compares renderings with jinja2's. DYNCTL_TEMPLATES names
// another file of cases, made by templates.py from real models' templates.
func TestReference(t *testing.T) {
	t.Parallel()
	path := vectors
	if p := os.Getenv("DYNCTL_TEMPLATES"); p != "" {
		path = p
	}
	cases := readVectors(t, path)
	bad := 0
	for i, c := range cases {
		got, err := render(c.Template, c.Vars)
		switch {
		case c.Fails && err == nil:
			t.Errorf("case %d: %.200q rendered %q, jinja2 fails", i, c.Template, got)
			bad++
		case c.Fails:
			if !errors.Is(err, ErrTemplate) {
				t.Errorf("case %d: error %v is not ErrTemplate", i, err)
			}
		case err != nil:
			t.Errorf("case %d: %.200q: %v", i, c.Template, err)
			bad++
		default:
			if d := cmp.Diff(c.Want, got); d != "" {
				t.Errorf("case %d: %.200q (-jinja2 +got):\n%s", i, c.Template, d)
				bad++
			}
		}
	}
	if len(cases) < 50 || bad > 0 {
		t.Errorf("%d of %d cases differ", bad, len(cases))
	}
}

// TestLimits: a template cannot run, nest or write without bound.
func TestLimits(t *testing.T) {
	t.Parallel()
	for name, src := range map[string]string{
		"loops":     "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
		"output":    "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
		"repeat":    "{{ 'x' * 99999999999 }}",
		"doubling":  "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
		"replace":   "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
		"recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
		"parens":    "{{ " + strings.Repeat("(", 100000) + " }}",
		"nots":      "{{ " + strings.Repeat("not ", 100000) + "1 }}",
		"minus":     "{{ " + strings.Repeat("-", 100000) + "1 }}",
		"blocks":    strings.Repeat("{% if 1 %}", 100000),
		"size":      strings.Repeat("x", maxTemplate+1),
	} {
		if out, err := render(src, []byte(`{}`)); !errors.Is(err, ErrTemplate) {
			t.Errorf("%s: got %d bytes, error %v; want ErrTemplate", name, len(out), err)
		}
	}
}

func TestLoopsOverContent(t *testing.T) {
	t.Parallel()
	for src, want := range map[string]bool{
		"{% for m in messages %}{{ m.content }}{% endfor %}":                                                    false,
		"{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}":                true,
		"{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}":                   true,
		"{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}":    true,
		"{% set c = messages %}{% for m in c %}{% for t in m.tool_calls %}{{ t.name }}{% endfor %}{% endfor %}": false,
	} {
		tm, err := Parse(src)
		if err != nil {
			t.Fatal(err)
		}
		if got := tm.LoopsOverContent(); got != want {
			t.Errorf("%q: %v, want %v", src, got, want)
		}
	}
}

// FuzzParse: no template or input makes the renderer panic.
func FuzzParse(f *testing.F) {
	for _, c := range readVectors(f, vectors) {
		f.Add(c.Template, []byte(c.Vars))
	}
	f.Fuzz(func(t *testing.T, src string, vars []byte) {
		tm, err := Parse(src)
		if err != nil {
			return
		}
		v, err := ParseJSON(vars)
		d, ok := v.(*Dict)
		if err != nil || !ok {
			d = &Dict{}
		}
		if out, err := tm.Render(d, 1<<16); err == nil && len(out) > 1<<16 {
			t.Fatalf("%d bytes are over the limit", len(out))
		}
	})
}

func BenchmarkRender(b *testing.B) {
	c := readVectors(b, vectors)[8]
	tm, err := Parse(c.Template)
	if err != nil {
		b.Fatal(err)
	}
	v, err := ParseJSON(c.Vars)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tm.Render(v.(*Dict), 1<<20); err != nil {
			b.Fatal(err)
		}
	}
}
