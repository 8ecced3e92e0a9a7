// Package table writes rows of cells for people, for documents and for spreadsheets, and the
// figures in them.
package table

import (
	"encoding/csv"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/olekukonko/tablewriter"
	"github.com/olekukonko/tablewriter/pkg/twwidth"
	"github.com/olekukonko/tablewriter/renderer"
	"github.com/olekukonko/tablewriter/tw"

	"github.com/dynctl/dynctl/internal/printable"
)

// Write writes rows below a head in a format: "csv", "markdown", or else
// columns that stand under each other. A cell is one line, in which printable.Line escapes
// what a terminal would obey. It keeps the blanks that it begins with only in columns and CSV.
func Write(out io.Writer, format string, head []string, rows [][]string) error {
	switch format {
	case "csv":
		w := csv.NewWriter(out)
		for _, r := range slices.Concat([][]string{head}, rows) {
			cells := make([]string, len(r))
			for i, c := range r {
				cells[i] = plain(c)
			}
			if err := w.Write(cells); err != nil {
				return err
			}
		}
		w.Flush()
		return w.Error()
	case "markdown":
		return render(out, renderer.NewMarkdown(), markdown, tw.Padding{Left: " ", Right: " "}, tw.CellAlignment{Global: tw.AlignLeft}, head, rows)
	}
	return trimmed(out, "", func(c string) string { return plain(c) + gap }, tw.CellAlignment{Global: tw.AlignLeft}, head, rows)
}

// Figures writes columns of figures, which end under each other, and those of words,
// named by their places, which begin so. The head may be nil. All are two blanks from what stands left.
func Figures(out io.Writer, head []string, rows [][]string, words ...int) error {
	align := slices.Repeat([]tw.Align{tw.AlignRight}, widest(head, rows))
	for _, i := range words {
		if i < len(align) { // without head and rows there is no column
			align[i] = tw.AlignLeft
		}
	}
	return trimmed(out, "", func(c string) string { return gap + plain(c) }, tw.CellAlignment{PerColumn: align}, head, rows)
}

// List writes rows of words without a head, each line after an indent. What would pass a width
// in columns (0: none) continues in further lines below the last column; a word is never cut.
func List(out io.Writer, indent string, width int, rows [][]string) error {
	n, taken := widest(nil, rows), len(indent)
	for i := range n - 1 {
		width := 0
		for _, r := range rows {
			if i < len(r) {
				width = max(width, twwidth.Width(plain(r[i])))
			}
		}
		taken += width + len(gap)
	}
	folded := make([][]string, len(rows))
	for k, r := range rows {
		folded[k] = slices.Clone(r)
		for i := range folded[k] {
			folded[k][i] = plain(folded[k][i])
		}
		if len(r) == n && width > 0 {
			folded[k][n-1] = fold(folded[k][n-1], max(width-taken, leastRoom))
		}
	}
	return trimmed(out, indent, func(c string) string { return c + gap }, tw.CellAlignment{Global: tw.AlignLeft}, nil, folded)
}

// leastRoom is what the last column of a list gets, however narrow the screen is.
const leastRoom = 30

// fold breaks a text between words into lines of at most a width in columns.
func fold(text string, width int) string {
	if twwidth.Width(text) <= width {
		return text
	}
	var b strings.Builder
	at := 0
	for i, word := range strings.Fields(text) {
		w := twwidth.Width(word)
		switch {
		case i == 0:
		case at+1+w > width:
			b.WriteByte('\n')
			at = 0
		default:
			b.WriteByte(' ')
			at++
		}
		b.WriteString(word)
		at += w
	}
	return b.String()
}

// gap is what stands between two columns.
const gap = "  "

// trimmed writes columns after an indent and without blanks at the ends of lines.
func trimmed(out io.Writer, indent string, cell func(string) string, align tw.CellAlignment, head []string, rows [][]string) error {
	var b strings.Builder
	if err := render(&b, renderer.NewBlueprint(columns), cell, tw.PaddingNone, align, head, rows); err != nil {
		return err
	}
	for line := range strings.Lines(b.String()) {
		if _, err := io.WriteString(out, strings.TrimRight(indent+line, " \n")+"\n"); err != nil {
			return err
		}
	}
	return nil
}

// columns are cells under each other and nothing else.
var columns = tw.Rendition{
	Borders: tw.BorderNone, Symbols: tw.NewSymbols(tw.StyleNone),
	Settings: tw.Settings{Lines: tw.LinesNone, Separators: tw.SeparatorsNone},
}

// render writes a table through tablewriter, which knows the widths of wide
// characters and of escape sequences. Every row gets as many cells as the widest.
func render(out io.Writer, as tw.Renderer, cell func(string) string, padding tw.Padding, align tw.CellAlignment, head []string, rows [][]string) error {
	n := widest(head, rows)
	if n == 0 {
		return nil
	}
	whole := func(cells []string) []string {
		full := make([]string, n)
		for i, c := range cells {
			full[i] = cell(c)
		}
		return full
	}
	cells := tw.CellConfig{
		Formatting: tw.CellFormatting{AutoWrap: tw.WrapNone, AutoFormat: tw.Off},
		Alignment:  align,
		Padding:    tw.CellPadding{Global: padding},
	}
	t := tablewriter.NewTable(out, tablewriter.WithRenderer(as), tablewriter.WithConfig(tablewriter.Config{
		Header: cells, Row: cells,
		Behavior: tw.Behavior{TrimSpace: tw.Off, TrimLine: tw.Off, TrimTab: tw.Off, AutoHide: tw.Off},
	}), tablewriter.WithEastAsian(tw.Off)) // not by the locale: the same everywhere
	if len(head) > 0 {
		t.Header(whole(head))
	}
	for _, r := range rows {
		if err := t.Append(whole(r)); err != nil {
			return err
		}
	}
	return t.Render()
}

// widest is the greatest number of cells of a line.
func widest(head []string, rows [][]string) int {
	n := len(head)
	for _, r := range rows {
		n = max(n, len(r))
	}
	return n
}

// lines and tabs would break a row in two.
var oneLine = strings.NewReplacer("\r\n", " ", "\n", " ", "\t", " ")

func plain(c string) string { return printable.Line(oneLine.Replace(c)) }

func markdown(c string) string {
	return strings.ReplaceAll(strings.TrimSpace(plain(c)), "|", "\\|")
}

// Figure is a figure with about three digits.
func Figure(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

// Count is a count with commas between thousands.
func Count[N int | int64 | uint64](n N) string {
	s, sign := fmt.Sprint(n), ""
	if n < 0 {
		s, sign = s[1:], "-"
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

// Percent is a share of 1 in percent, with two places.
func Percent(share float64) string { return strconv.FormatFloat(100*share, 'f', 2, 64) + "%" }

// Bytes is a number of bytes in the unit that fits.
func Bytes(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, exp := float64(n)/unit, 0
	for v >= unit && exp < 3 {
		v, exp = v/unit, exp+1
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGT"[exp])
}
