// Package table writes rows of cells for people, for documents and for
// spreadsheets, and figures as they stand in them.
package table

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Write writes rows below a head in a format: "csv", "markdown", or else
// columns that stand under each other. A cell keeps the blanks that it begins
// with only in columns and CSV.
func Write(out io.Writer, format string, head []string, rows [][]string) error {
	switch format {
	case "csv":
		w := csv.NewWriter(out)
		if err := w.Write(head); err != nil {
			return err
		}
		return w.WriteAll(rows) // flushes
	case "markdown":
		var b strings.Builder
		line := func(cells []string) {
			b.WriteString("|")
			for _, c := range cells {
				b.WriteString(" " + strings.ReplaceAll(strings.TrimSpace(c), "|", "\\|") + " |")
			}
			b.WriteString("\n")
		}
		line(head)
		b.WriteString("|" + strings.Repeat("---|", len(head)) + "\n")
		for _, r := range rows {
			line(r)
		}
		_, err := io.WriteString(out, b.String())
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, r := range append([][]string{head}, rows...) {
		fmt.Fprintln(w, strings.TrimRight(strings.Join(r, "\t"), "\t"))
	}
	return w.Flush()
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
