package table

import (
	"math"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rig/hostile"
)

func TestWrite(t *testing.T) {
	head, rows := []string{"NAME", "NOTE", ""}, [][]string{{"a", "x|y, z", ""}, {"  longer", "", "b"}}
	for format, want := range map[string]string{
		"table":    "NAME      NOTE\na         x|y, z\n  longer          b\n",
		"csv":      "NAME,NOTE,\na,\"x|y, z\",\n\"  longer\",,b\n",
		"markdown": "| NAME   | NOTE    |   |\n|:-------|:--------|:--|\n| a      | x\\|y, z |   |\n| longer |         | b |\n",
	} {
		var b strings.Builder
		if err := Write(&b, format, head, rows); err != nil || b.String() != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", format, err, b.String(), want)
		}
	}
	for format, want := range map[string]string{"table": "A\n", "csv": "A\n", "markdown": "| A |\n|:--|\n"} {
		var b strings.Builder
		if err := Write(&b, format, []string{"A"}, nil); err != nil || b.String() != want {
			t.Errorf("no rows as %s: %v %q", format, err, b.String())
		}
	}
}

// TestWidths: what a terminal shows in two columns, or in none, counts so, whatever
// the locale is; and a cell stays on its line.
func TestWidths(t *testing.T) {
	for _, lang := range []string{"C", "ja_JP.UTF-8"} {
		t.Setenv("LC_ALL", lang)
		head := []string{"NAME", "STATE", "END"}
		rows := [][]string{{"模型", "FAIL", "a"}, {"café …", "ok\tso", "b\nc"}, {"±1", "", "d"}, {"short"}}
		want := "NAME    STATE  END\n模型    FAIL   a\ncafé …  ok so  b c\n±1             d\nshort\n"
		var b strings.Builder
		if err := Write(&b, "table", head, rows); err != nil || b.String() != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", lang, err, b.String(), want)
		}
	}
	var b strings.Builder
	want := "     RANK  COST  STATE\n  >   d-0  1.50  chosen\n     d-10    12\n"
	if err := Figures(&b, []string{"", "RANK", "COST", "STATE"}, [][]string{{">", "d-0", "1.50", "chosen"}, {"", "d-10", "12", ""}}, 3); err != nil || b.String() != want {
		t.Errorf("%v\n%s\nwant\n%s", err, b.String(), want)
	}
}

// TestHostileCells: in no format a cell commands the terminal or begins a line.
func TestHostileCells(t *testing.T) {
	rows := [][]string{{hostile.Text, "b"}, {"c", hostile.Text}}
	for what, write := range map[string]func(*strings.Builder) error{
		"table":    func(b *strings.Builder) error { return Write(b, "table", []string{hostile.Text, ""}, rows) },
		"csv":      func(b *strings.Builder) error { return Write(b, "csv", []string{hostile.Text, ""}, rows) },
		"markdown": func(b *strings.Builder) error { return Write(b, "markdown", []string{hostile.Text, ""}, rows) },
		"figures":  func(b *strings.Builder) error { return Figures(b, []string{hostile.Text, ""}, rows) },
		"list":     func(b *strings.Builder) error { return List(b, "", 20, rows) },
	} {
		var b strings.Builder
		if err := write(&b); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		hostile.Check(t, what, b.String())
	}
}

func TestFiguresWithoutHead(t *testing.T) {
	var b strings.Builder
	if err := Figures(&b, nil, [][]string{{"all", "132252"}, {"end: completed", "7"}}, 0); err != nil || b.String() != "  all             132252\n  end: completed       7\n" {
		t.Errorf("%v %q", err, b.String())
	}
	b.Reset()
	if err := Figures(&b, nil, nil, 0); err != nil || b.String() != "" {
		t.Errorf("%v %q", err, b.String())
	}
}

func TestList(t *testing.T) {
	rows := [][]string{{"ok", "模型", "one two three four five six seven eight nine ten"}, {"FAIL", "b", strings.Repeat("x", 40)}, {"", "", "short"}, {"?"}}
	want := "  ok    模型  one two three four five six\n              seven eight nine ten\n" +
		"  FAIL  b     " + strings.Repeat("x", 40) + "\n              short\n  ?\n"
	var b strings.Builder
	if err := List(&b, "  ", 45, rows); err != nil || b.String() != want {
		t.Errorf("%v\n%s\nwant\n%s", err, b.String(), want)
	}
	b.Reset()
	if err := List(&b, "", 0, rows[:1]); err != nil || b.String() != "ok  模型  one two three four five six seven eight nine ten\n" {
		t.Errorf("%v %q", err, b.String())
	}
}

func TestFigures(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Count(0), "0"}, {Count(999), "999"}, {Count(1000), "1,000"}, {Count(int64(-1234567)), "-1,234,567"}, {Count(uint64(math.MaxUint64)), "18,446,744,073,709,551,615"},
		{Percent(0), "0.00%"}, {Percent(0.98765), "98.77%"}, {Percent(1), "100.00%"},
		{Bytes(0), "0 B"}, {Bytes(1023), "1023 B"}, {Bytes(1536), "1.5 KiB"}, {Bytes(5 << 30), "5.0 GiB"}, {Bytes(1 << 50), "1024.0 TiB"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}
