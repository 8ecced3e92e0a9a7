// Package theme is how the screen looks: glyphs, unicode or ASCII, and styles,
// with or without colour. Colour only repeats what words and signs say.
package theme

import (
	"io"
	"strings"

	"github.com/charmbracelet/lipgloss"
	"github.com/muesli/termenv"
)

// Style is a role of text; the theme decides what it looks like.
type Style uint8

// The styles.
const (
	Plain Style = iota
	Dim
	Bold
	Title    // titles of panels and columns
	Accent   // keys, the current tab
	Good     // "ok", "LIVE"
	Warn     // worth a look
	Bad      // broken
	Bar      // filled part of bars and graphs
	Selected // the line under the cursor
	styles
)

// Names lists the colour themes, in the order of the key that turns them.
func Names() []string { return []string{"dark", "light", "mono"} }

// Theme is a set of glyphs and styles. It is not changed after New.
type Theme struct {
	// Name is one of Names.
	Name string
	// ASCII says that nothing but ASCII may reach the screen.
	ASCII bool
	Glyphs

	pre [styles]string
}

// Glyphs are the signs that unicode and ASCII draw differently.
type Glyphs struct {
	H, V                                 string // lines
	TopLeft, TopRight, BotLeft, BotRight string
	Pipe                                 string // of a tree
	Ellipsis, Cursor, Open, Closed, Leaf string
	Held, NotHeld, Up, Down              string
	spark, bar                           []string
	empty                                string
	graph                                []string
}

var unicodeGlyphs = Glyphs{
	H: "─", V: "│", TopLeft: "┌", TopRight: "┐", BotLeft: "└", BotRight: "┘", Pipe: "│ ",
	Ellipsis: "…", Cursor: "▶", Open: "▾", Closed: "▸", Leaf: "·", Held: "■", NotHeld: "·", Up: "▲", Down: "▼",
	spark: []string{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"},
	bar:   []string{"", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█"}, empty: "░",
	graph: []string{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"},
}

var asciiGlyphs = Glyphs{
	H: "-", V: "|", TopLeft: "+", TopRight: "+", BotLeft: "+", BotRight: "+", Pipe: "| ",
	Ellipsis: "~", Cursor: ">", Open: "v", Closed: ">", Leaf: "-", Held: "#", NotHeld: ".", Up: "^", Down: "v",
	spark: []string{" ", ".", ":", "-", "=", "+", "*", "#", "#"},
	bar:   []string{"", "#"}, empty: ".",
	graph: []string{" ", ".", "-", "+", "#"},
}

// New makes the theme with a name of Names for a terminal with the given
// colour profile; termenv.Ascii gives no colours, bold and reverse only.
func New(name string, profile termenv.Profile, ascii bool) *Theme {
	t := &Theme{Name: name, ASCII: ascii, Glyphs: unicodeGlyphs}
	if ascii {
		t.Glyphs = asciiGlyphs
	}
	if name == "mono" {
		profile = termenv.Ascii
	}
	r := lipgloss.NewRenderer(io.Discard)
	r.SetColorProfile(profile)
	// Nearly everybody can distinguish blue and orange; all are among the
	// 256 fixed colours or the terminal's own 16.
	warn, bad, good, accent, bar, dim := "214", "203", "114", "117", "75", "245"
	if name == "light" {
		warn, bad, good, accent, bar, dim = "130", "160", "22", "25", "25", "241"
	}
	s := r.NewStyle
	fg := func(c string) lipgloss.Style { return s().Foreground(lipgloss.Color(c)) }
	set := map[Style]lipgloss.Style{
		Dim: fg(dim), Bold: s().Bold(true), Title: s().Bold(true), Accent: fg(accent).Bold(true),
		Good: fg(good), Warn: fg(warn).Bold(true), Bad: fg(bad).Bold(true), Bar: fg(bar), Selected: s().Reverse(true),
	}
	if profile == termenv.Ascii {
		// Attributes are no colours: NO_COLOR leaves them.
		attribute := map[Style]string{Bold: "1", Title: "1", Accent: "1", Warn: "1", Bad: "1", Selected: "7"}
		for k, code := range attribute {
			t.pre[k] = "\x1b[" + code + "m"
		}
		return t
	}
	const mark = "x"
	for k, st := range set {
		t.pre[k], _, _ = strings.Cut(st.Render(mark), mark)
	}
	return t
}

// Prefix is the escape sequence that begins a style; empty when it looks like
// plain text. Every style that has one ends with Reset.
func (t *Theme) Prefix(s Style) string { return t.pre[s] }

// Reset ends every style.
const Reset = "\x1b[0m"

// Spark is the glyph of a height between 0 and 1.
func (g *Glyphs) Spark(v float64) string { return pick(g.spark, v) }

// Graph is the glyph of the topmost, partly filled cell of a column.
func (g *Glyphs) Graph(v float64) string { return pick(g.graph, v) }

func pick(list []string, v float64) string {
	top := len(list) - 1
	i := int(v*float64(top) + 0.5)
	if v > 0 && i == 0 {
		i = 1 // something is not nothing
	}
	return list[min(max(i, 0), top)]
}

// Full and Empty are the cells of bars; Part is the cell between them, empty
// when the theme has no parts.
func (g *Glyphs) Full() string { return g.bar[len(g.bar)-1] }

// Empty is the cell of a bar that is not filled.
func (g *Glyphs) Empty() string { return g.empty }

// Part is the glyph of a cell that is filled by a share below 1, "" when that
// is less than the smallest part.
func (g *Glyphs) Part(v float64) string {
	i := int(v*float64(len(g.bar)-1) + 0.5)
	return g.bar[min(max(i, 0), len(g.bar)-1)]
}
