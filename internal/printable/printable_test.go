package printable

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"
)

func TestLine(t *testing.T) {
	for in, want := range map[string]string{
		"":               "",
		"plain 100% \\n": "plain 100% \\n",
		"café 模型 🚀 👩‍💻 עברית e\u0301": "café 模型 🚀 👩‍💻 עברית e\u0301",
		"\x1b]0;title\x07\x1b[2J":     `\u001b]0;title\u0007\u001b[2J`,
		"a\nb\tc\rd\x00\x7f":          `a\nb\tc\rd\u0000\u007f`,
		"\u009b5m":                    `\u009b5m`,
		"\x9b5m\xff":                  `\x9b5m\xff`,
		"\u202ex\u2066y\u200f\u061c":  `\u202ex\u2066y\u200f\u061c`,
		"\u2028\u2029":                `\u2028\u2029`,
		"\ufffd stays":                "\ufffd stays",
	} {
		if got := Line(in); got != want {
			t.Errorf("Line(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestLines(t *testing.T) {
	if got, want := Lines("one\ntwo\x1b\n   three\n\nforged\n"), "one\n  two\\u001b\n   three\n  \n  forged"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

type label string

type unit struct{ name string }

func (u unit) String() string { return u.name }

func TestFprintf(t *testing.T) {
	const evil = "\x1b[2J\nx"
	var b strings.Builder
	if _, err := Fprintf(&b, "%s|%v|%v|%q|%v|%s\n", evil, label(evil), errors.New(evil), evil, []string{evil}, unit{evil}); err != nil {
		t.Fatal(err)
	}
	const shown = `\u001b[2J\nx`
	if got, want := b.String(), strings.Join([]string{shown, shown, shown, fmt.Sprintf("%q", evil), "[" + shown + "]", shown}, "|")+"\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := Sprintf("%-6s|%*d|%6.2f|%t|%s|%x", "ab", 5, 7, 1.5, true, time.Second, 255), fmt.Sprintf("%-6s|%*d|%6.2f|%t|%s|%x", "ab", 5, 7, 1.5, true, time.Second, 255); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// FuzzLine: whatever others wrote, nothing of it is obeyed, and what is harmless stays.
func FuzzLine(f *testing.F) {
	for _, s := range []string{"a\x1b]0;t\x07", "\u009b1m", "\x9b", "\u202e\u2066\u200e\u061c", "\u2028", "é模🚀", "\r\n\t\x7f", `\u001b`, "\ufffd"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		check := func(kind, out string) {
			if !utf8.ValidString(out) {
				t.Errorf("%s(%q) is no UTF-8: %q", kind, s, out)
			}
			for _, r := range out {
				lines := r == '\n' && kind != "Line"
				if unicode.IsControl(r) && !lines || unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp) {
					t.Errorf("%s(%q) has %U: %q", kind, s, r, out)
				}
			}
		}
		line := Line(s)
		check("Line", line)
		if Line(line) != line {
			t.Errorf("twice: %q, then %q", line, Line(line))
		}
		if Sprintf("%s", s) != line || Sprintf("%v", []string{s}) != "["+line+"]" {
			t.Errorf("as an argument %q, as a line %q", Sprintf("%s", s), line)
		}
		lines := Lines(s)
		check("Lines", lines)
		for i, l := range strings.Split(lines, "\n") {
			if i > 0 && !strings.HasPrefix(l, "  ") {
				t.Errorf("Lines(%q) begins a line with %q", s, l)
			}
		}

		raw, err := json.MarshalIndent(map[string]string{s: s}, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if n, err := JSON(&b).Write(raw); err != nil || n != len(raw) {
			t.Fatal(n, err)
		}
		check("JSON", b.String())
		var before, after any
		if err := errors.Join(json.Unmarshal(raw, &before), json.Unmarshal(b.Bytes(), &after)); err != nil || !reflect.DeepEqual(before, after) {
			t.Errorf("%v: %s became %s", err, raw, b.Bytes())
		}
	})
}
