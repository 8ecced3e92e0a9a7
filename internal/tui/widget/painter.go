// Package widget draws lines of exact width: text in columns, bars, sparklines
// and graphs. What a terminal would obey in the data is escaped (printable.Line).
package widget

import (
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/mattn/go-runewidth"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/tui/theme"
)

// Painter builds lines from left to right. Text beyond the width is cut, and a sign stands
// in the last column then.
type Painter struct {
	Th *theme.Theme
	W  int // columns

	lines  []string
	widths []int
	b      []byte
	x      int
	marked bool
	// last is where in b the newest character of text begins, and end where it ends.
	last, end int
}

// NewPainter paints lines of at most w columns.
func NewPainter(th *theme.Theme, w int) *Painter {
	return &Painter{Th: th, W: w, b: make([]byte, 0, 512)}
}

// Sub is a painter of the same theme for a part of the screen.
func (p *Painter) Sub(w int) *Painter { return NewPainter(p.Th, max(w, 0)) }

// Lines are the finished lines.
func (p *Painter) Lines() []string { return p.lines }

// Len is the number of finished lines.
func (p *Painter) Len() int { return len(p.lines) }

// X is the column of the next cell.
func (p *Painter) X() int { return p.x }

// Select makes the line that is being built, up to End, the one under the
// cursor: one style over the whole width.
func (p *Painter) Select(on bool) {
	if on {
		p.marked = true
		p.b = append(p.b, p.Th.Prefix(theme.Selected)...)
	}
}

// Put writes text in a style.
func (p *Painter) Put(st theme.Style, s string) {
	if s == "" {
		return
	}
	if p.x >= p.W {
		p.cut(s)
		return
	}
	pre := ""
	if !p.marked && st != theme.Plain {
		pre = p.Th.Prefix(st)
	}
	p.b = append(p.b, pre...)
	p.text(printable.Line(s), p.W-p.x)
	if pre != "" {
		p.b = append(p.b, theme.Reset...)
	}
}

// text appends at most room columns of s, in which nothing is obeyed.
func (p *Painter) text(s string, room int) {
	for i := 0; i < len(s); {
		if c := s[i]; c < utf8.RuneSelf {
			if room < 1 {
				p.cut(s[i:])
				return
			}
			p.last, p.end = len(p.b), len(p.b)+1
			p.b = append(p.b, c)
			p.x++
			room--
			i++
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		w := runeWidth(r)
		if w == 0 {
			i += n // combining: nothing that a cell could hold
			continue
		}
		if w > room {
			p.cut(s[i:])
			return
		}
		p.last = len(p.b)
		if p.Th.ASCII {
			for range w {
				p.b = append(p.b, '?')
			}
		} else {
			p.b = append(p.b, s[i:i+n]...)
		}
		p.end = len(p.b)
		p.x += w
		room -= w
		i += n
	}
}

// cut puts a sign for text without room into the last column, unless that is blank or
// nothing stands there that can give way.
func (p *Painter) cut(rest string) {
	sign := p.Th.Ellipsis
	if p.x < p.W || p.end == 0 || strings.TrimSpace(rest) == "" || string(p.b[p.last:p.end]) == sign {
		return
	}
	last, _ := utf8.DecodeRune(p.b[p.last:p.end])
	if columns(last) != 1 {
		return
	}
	p.b = slices.Replace(p.b, p.last, p.end, []byte(sign)...)
	p.end = p.last + len(sign)
}

// runeWidth does not depend on the locale: signs whose width is ambiguous are
// narrow, as terminals draw them.
func runeWidth(r rune) int {
	if r >= 0x2500 && r <= 0x25ff { // lines and blocks, most of what is drawn
		return 1
	}
	return narrow.RuneWidth(r)
}

var narrow = &runewidth.Condition{StrictEmojiNeutral: true}

// columns is the number of columns that a rune takes.
func columns(r rune) int {
	if r < utf8.RuneSelf {
		return 1
	}
	return runeWidth(r)
}

// Width is the number of columns of s as Put writes it.
func Width(s string) int {
	w := 0
	for _, r := range printable.Line(s) {
		w += columns(r)
	}
	return w
}

// Cell writes s into exactly w columns, cut with a sign when it is longer.
func (p *Painter) Cell(st theme.Style, s string, w int) {
	end := p.x + w
	p.Put(st, p.Cut(s, w))
	p.To(end)
}

// Right writes s into exactly w columns, aligned right. Numbers are not cut:
// what does not fit becomes a row of dots.
func (p *Painter) Right(st theme.Style, s string, w int) {
	n := Width(s)
	if n > w {
		s, n = strings.Repeat(".", w), w
	}
	p.To(p.x + w - n)
	p.Put(st, s)
}

// Cut shortens s to w columns and marks that it did.
func (p *Painter) Cut(s string, w int) string {
	if Width(s) <= w {
		return s
	}
	if w <= 1 {
		return ""
	}
	s = printable.Line(s)
	at := 0
	for i, r := range s {
		at += columns(r)
		if at > w-1 {
			return s[:i] + p.Th.Ellipsis
		}
	}
	return s
}

// Words writes as many whole words of s as there is room for, and a sign where some
// are missing: half a figure would be another one.
func (p *Painter) Words(st theme.Style, s string) {
	p.Put(st, p.FitWords(s, p.W-p.x))
}

// FitWords are the first words of s that fit into w columns with the sign that some
// are missing. Blanks at the beginning stay.
func (p *Painter) FitWords(s string, w int) string {
	if Width(s) <= w {
		return s
	}
	for {
		at := strings.LastIndexByte(strings.TrimRight(s, " "), ' ')
		if at < 0 || strings.TrimSpace(s[:at]) == "" {
			return p.Th.Ellipsis[:min(len(p.Th.Ellipsis), len(p.Th.Ellipsis)*max(0, w))]
		}
		if s = strings.TrimRight(s[:at], " "); Width(s)+1+Width(p.Th.Ellipsis) <= w {
			return s + " " + p.Th.Ellipsis
		}
	}
}

const blanks = "                                                                                "

// To fills with blanks up to a column.
func (p *Painter) To(x int) {
	x = min(x, p.W)
	for n := x - p.x; n > 0; n -= len(blanks) {
		p.b = append(p.b, blanks[:min(n, len(blanks))]...)
	}
	p.x = max(p.x, x)
}

// dim writes n copies of a glyph of one column.
func (p *Painter) dim(glyph string, n int) {
	p.Put(theme.Dim, strings.Repeat(glyph, max(0, min(n, p.W-p.x))))
}

// End finishes the line.
func (p *Painter) End() {
	if p.marked {
		p.To(p.W)
		p.b = append(p.b, theme.Reset...)
		p.marked = false
	} else {
		// Blanks at the end cost bytes and show nothing.
		n := len(p.b)
		for n > 0 && p.b[n-1] == ' ' {
			n--
			p.x--
		}
		p.b = p.b[:n]
	}
	p.lines = append(p.lines, string(p.b))
	p.widths = append(p.widths, p.x)
	p.b, p.x, p.last, p.end = p.b[:0], 0, 0, 0
}

// Line writes one line, of whole words.
func (p *Painter) Line(st theme.Style, s string) {
	p.Words(st, s)
	p.End()
}

// Fill adds empty lines up to n lines, and cuts what is beyond.
func (p *Painter) Fill(n int) {
	for len(p.lines) < n {
		p.End()
	}
	if len(p.lines) > n {
		p.lines, p.widths = p.lines[:n], p.widths[:n]
	}
}

// Rule writes a title on a line across the width.
func (p *Painter) Rule(title string) {
	p.dim(p.Th.H, 2)
	if title != "" {
		p.Put(theme.Plain, " ")
		p.Put(theme.Title, title)
		p.Put(theme.Plain, " ")
	}
	p.dim(p.Th.H, p.W-p.x)
	p.End()
}

// Append takes over the finished lines of another painter.
func (p *Painter) Append(q *Painter) {
	p.lines = append(p.lines, q.lines...)
	p.widths = append(p.widths, q.widths...)
}

// Beside appends two painters' lines next to each other.
func (p *Painter) Beside(l, r *Painter) {
	for i := range max(len(l.lines), len(r.lines)) {
		if i < len(l.lines) {
			p.b = append(p.b, l.lines[i]...)
			p.x = l.widths[i]
		}
		if i < len(r.lines) {
			p.To(l.W)
			p.b = append(p.b, r.lines[i]...)
			p.x += r.widths[i]
		}
		p.lines = append(p.lines, string(p.b))
		p.widths = append(p.widths, p.x)
		p.b, p.x = p.b[:0], 0
	}
}

// Box frames the finished lines of inner, whose width should be W-4.
func (p *Painter) Box(title string, inner *Painter) {
	g := &p.Th.Glyphs
	p.Put(theme.Dim, g.TopLeft+g.H)
	p.Put(theme.Title, " "+title+" ")
	p.dim(g.H, p.W-p.x-1)
	p.Put(theme.Dim, g.TopRight)
	p.End()
	for i, l := range inner.lines {
		p.Put(theme.Dim, g.V)
		p.Put(theme.Plain, " ")
		p.b = append(p.b, l...)
		p.x += inner.widths[i]
		p.To(p.W - 1)
		p.Put(theme.Dim, g.V)
		p.End()
	}
	p.Put(theme.Dim, g.BotLeft)
	p.dim(g.H, p.W-2)
	p.Put(theme.Dim, g.BotRight)
	p.End()
}
