package widget

import (
	"math"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/muesli/termenv"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/tui/theme"
)

func painter(w int, ascii bool) *Painter {
	return NewPainter(theme.New("dark", termenv.Ascii, ascii), w)
}

func strip(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == 0x1b {
			for s[i] != 'm' {
				i++
			}
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// TestLinesNeverOverflow writes arbitrary cells and demands that no line is
// wider than the painter, holds no control character and, in ASCII, nothing
// else.
func TestLinesNeverOverflow(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		w := rapid.IntRange(0, 40).Draw(t, "w")
		ascii := rapid.Bool().Draw(t, "ascii")
		p := painter(w, ascii)
		for range rapid.IntRange(1, 6).Draw(t, "cells") {
			s := string(rapid.SliceOfN(rapid.Byte(), 0, 30).Draw(t, "bytes")) + rapid.String().Draw(t, "text")
			n := rapid.IntRange(0, 20).Draw(t, "n")
			st := theme.Style(rapid.IntRange(0, int(theme.Selected)).Draw(t, "style"))
			switch rapid.IntRange(0, 5).Draw(t, "kind") {
			case 0:
				p.Put(st, s)
			case 1:
				before := p.X()
				p.Cell(st, s, n)
				if want := min(w, before+n); p.X() != max(want, before) {
					t.Fatalf("a cell of %d columns went from %d to %d of %d", n, before, p.X(), w)
				}
			case 2:
				p.Right(st, s, n)
			case 3:
				p.Bar(st, rapid.Float64().Draw(t, "share"), n)
			case 4:
				p.Spark(st, rapid.SliceOfN(rapid.Float64(), 0, 30).Draw(t, "values"), n)
			case 5:
				p.Select(rapid.Bool().Draw(t, "select"))
			}
		}
		p.End()
		line := strip(p.Lines()[0])
		if !utf8.ValidString(line) || Width(line) > w {
			t.Fatalf("%q has %d columns of %d", line, Width(line), w)
		}
		for _, r := range line {
			if unicode.IsControl(r) || ascii && r > 0x7e {
				t.Fatalf("%q holds %U", line, r)
			}
		}
	})
}

// TestCutsAreMarked: a line that lacks something has a sign at its end, whatever wrote it.
func TestCutsAreMarked(t *testing.T) {
	for name, write := range map[string]func(p *Painter){
		"one text":     func(p *Painter) { p.Put(theme.Plain, "all of it is too long") },
		"two":          func(p *Painter) { p.Put(theme.Bold, "0123456789"); p.Put(theme.Plain, "more") },
		"a line":       func(p *Painter) { p.Words(theme.Plain, "all of it is too long") },
		"a cell":       func(p *Painter) { p.Cell(theme.Plain, "a name", 12); p.Right(theme.Plain, "12", 6) },
		"marked":       func(p *Painter) { p.Select(true); p.Put(theme.Plain, "all of it is too long") },
		"of two signs": func(p *Painter) { p.Put(theme.Plain, "012345678…"); p.Put(theme.Plain, "x") },
	} {
		for _, ascii := range []bool{false, true} {
			p := painter(10, ascii)
			write(p)
			p.End()
			line := strings.TrimRight(strip(p.Lines()[0]), " ")
			if want := map[bool]string{false: "…", true: "~"}[ascii]; !strings.HasSuffix(line, want) && name != "of two signs" {
				t.Errorf("%s: %q does not end with %s", name, line, want)
			}
		}
	}
	p := painter(10, false)
	p.Put(theme.Plain, "0123456789")
	p.Put(theme.Plain, "   ")
	p.End()
	if p.Lines()[0] != "0123456789" {
		t.Errorf("blanks are not missed: %q", p.Lines()[0])
	}
}

func TestNumbers(t *testing.T) {
	nan := math.NaN()
	for _, c := range []struct{ got, want string }{
		{Count(nan), "-"},
		{Count(0), "0"},
		{Count(999), "999"},
		{Count(9999), "9999"},
		{Count(12345), "12.3k"},
		{Count(127600), "128k"},
		{Count(999499), "999k"},
		{Count(999500), "1.00M"},
		{Count(1.84e6), "1.84M"},
		{Count(-12345), "-12.3k"},
		{Count(7.2e15), "7.20P"},
		{Count(math.Inf(1)), "-"},
		{Rate(nan), "-"},
		{Rate(0), "0"},
		{Rate(.25), "0.25"},
		{Rate(41.83), "41.8"},
		{Rate(99.96), "100"},
		{Rate(12000), "12.0k"},
		{Percent(nan), "-"},
		{Percent(.914), "91.4"},
		{Percent(1), "100.0"},
		{Millis(nan), "-"},
		{Millis(-1), "-"},
		{Millis(.21), "210us"},
		{Millis(1.5), "1.5ms"},
		{Millis(188), "188ms"},
		{Millis(1020), "1.02s"},
		{Millis(61000), "1m01s"},
		{Age(400 * time.Millisecond), "0.4s"},
		{Age(12 * time.Second), "12s"},
		{Age(190 * time.Second), "3m10s"},
		{Age(76 * time.Hour), "3d04h"},
		{Age(-time.Second), "0.0s"},
		{Age(2 * time.Hour), "2h00m"},
		{Seconds(nan), "-"},
		{Seconds(7.2), "7.2s"},
		{Bytes(nan), "-"},
		{Bytes(512), "512B"},
		{Bytes(91 << 20), "91.0MiB"},
		{Bytes(1023.9 * 1024), "1.00MiB"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

func TestCountFits(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		if s := Count(rapid.Float64Range(0, 9e17).Draw(t, "v")); len(s) > 6 {
			t.Fatalf("%q has more than six columns", s)
		}
	})
}

func TestBar(t *testing.T) {
	for _, c := range []struct {
		share float64
		ascii bool
		want  string
	}{{0, true, "........"}, {.5, true, "####...."}, {1, true, "########"}, {2, true, "########"}, {math.NaN(), true, "--------"}, {.5, false, "████░░░░"}, {.56, false, "████▌░░░"}, {.99, true, "########"}, {.3, true, "##......"}, {-1, false, "░░░░░░░░"}} {
		p := painter(8, c.ascii)
		p.Bar(theme.Plain, c.share, 8)
		p.End()
		if got := p.Lines()[0]; got != c.want {
			t.Errorf("%v: %q, want %q", c.share, got, c.want)
		}
	}
}

func TestGraph(t *testing.T) {
	p := painter(12, true)
	p.Graph(theme.Plain, []float64{0, 25, 50, 75, 100, math.NaN(), 100}, 4, 100, Count, 4)
	want := strings.Join([]string{" 100|    # #", "    |   ## #", "    |  ### #", "   0| #### #"}, "\n")
	if got := strip(strings.Join(p.Lines(), "\n")); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestBoxAndBeside(t *testing.T) {
	p := painter(20, true)
	l, r := p.Sub(10), p.Sub(10)
	for _, q := range []*Painter{l, r} {
		in := q.Sub(6)
		in.Line(theme.Plain, "ab")
		q.Box("T", in)
	}
	p.Beside(l, r)
	want := "+- T ----++- T ----+\n| ab     || ab     |\n+--------++--------+"
	if got := strip(strings.Join(p.Lines(), "\n")); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestWordsAreWhole: what does not fit drops by whole words, so that no figure is
// half of another one.
func TestWordsAreWhole(t *testing.T) {
	th := theme.New("mono", termenv.Ascii, false)
	whole := "remote: eff_isl 1187 >= 1024, cached 12"
	words := strings.Fields(whole)
	for w := 1; w <= 50; w++ {
		p := NewPainter(th, w)
		p.Words(theme.Plain, whole)
		p.End()
		got := p.Lines()[0]
		if Width(got) > w {
			t.Fatalf("%q has more than %d columns", got, w)
		}
		if Width(whole) <= w {
			if got != whole {
				t.Errorf("%d columns: %q", w, got)
			}
			continue
		}
		kept, cut := strings.CutSuffix(got, th.Ellipsis)
		if !cut {
			t.Fatalf("%d columns: %q does not say that something is missing", w, got)
		}
		for i, word := range strings.Fields(kept) {
			if word != words[i] {
				t.Fatalf("%d columns: %q", w, got)
			}
		}
	}
}
