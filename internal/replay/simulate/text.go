package simulate

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/table"
)

// WriteTable writes results as a table, one to a row.
func WriteTable(out io.Writer, format string, results []*Result) error {
	head := []string{"POLICY", "THRESHOLD", "KV BLOCKS", "HIT", "BOUND", "OF BOUND", "TTFT P50", "TTFT P95", "TTFT P99", "ITL P50", "ITL P99", "E2E P50", "E2E P99", "GOOD", "GOOD/S", "IMBALANCE", "REGRET", "MISSED", "REMOTE", "WAITED", "WAIT P99", "REFUSED", "FAILED"}
	rows := make([][]string, 0, len(results))
	for _, r := range results {
		name := r.Policy
		if r.Label != "" {
			name += " " + r.Label
		}
		blocks := "unlimited"
		if r.KVBlocks > 0 {
			blocks = strconv.Itoa(r.KVBlocks)
		} else if r.Evictions > 0 {
			blocks += fmt.Sprintf(" (%s evicted)", table.Count(r.Evictions))
		}
		ms := func(v float64) string { return fmt.Sprintf("%.0f", v) }
		rows = append(rows, []string{
			name, r.Rule(), blocks, table.Percent(r.HitRatio), table.Percent(r.Bound), table.Percent(r.OfBound),
			ms(r.TTFT.P50), ms(r.TTFT.P95), ms(r.TTFT.P99), fmt.Sprintf("%.1f", r.ITL.P50), fmt.Sprintf("%.1f", r.ITL.P99), ms(r.E2E.P50), ms(r.E2E.P99),
			table.Percent(r.Good), fmt.Sprintf("%.2f", r.Goodput), fmt.Sprintf("%.2f", r.Imbalance), fmt.Sprintf("%.1f", r.Regret), table.Percent(r.Missed), table.Count(r.Remote), table.Count(r.Waited), ms(r.Wait.P99), table.Count(r.Refused), table.Count(r.Failed),
		})
	}
	if format != "table" {
		return table.Write(out, format, head, rows)
	}
	shown, left := fitting(head, rows)
	if err := table.Write(out, format, pick(head, shown), picked(rows, shown)); err != nil {
		return err
	}
	notes := [][]string{{"times in ms; HIT is of prompt tokens, OF BOUND of what one shared cache would hit"}}
	if len(left) > 0 {
		notes = append(notes, []string{"left out here, in -o json and csv: " + strings.Join(left, ", ")})
	}
	return table.List(out, "", maxWidth, notes)
}

// maxWidth is the width of a table in columns.
const maxWidth = 120

// Columns of the table, by number.
const (
	colBlocks  = 2
	colWaited  = 19
	colRefused = 21
)

// expendable are columns in the order in which they are left out when a table is too wide.
var expendable = []int{4, 7, 17, 16, 15, 11, 12, 14, 20, 19, 21, 5, 10, 9}

// fitting chooses the columns of a table that fit, and names those that do not. Caches that
// are equal in all rows, and limits that no request met, are left out first.
func fitting(head []string, rows [][]string) (shown []int, left []string) {
	gone := map[int]bool{colBlocks: !slices.ContainsFunc(rows, func(r []string) bool { return r[colBlocks] != rows[0][colBlocks] })}
	for i := colWaited; i <= colRefused; i++ {
		gone[i] = !slices.ContainsFunc(rows, func(r []string) bool { return r[i] != "0" })
	}
	wide := func() bool {
		sum := 0
		for i, h := range head {
			if gone[i] {
				continue
			}
			width := len(h)
			for _, r := range rows {
				width = max(width, utf8.RuneCountInString(r[i]))
			}
			sum += width + 2
		}
		return sum-2 > maxWidth
	}
	for _, i := range expendable {
		if !wide() {
			break
		}
		gone[i] = true
	}
	for i, h := range head {
		if gone[i] {
			left = append(left, h)
		} else {
			shown = append(shown, i)
		}
	}
	return shown, left
}

func pick(row []string, shown []int) []string {
	var out []string
	for _, i := range shown {
		out = append(out, row[i])
	}
	return out
}

func picked(rows [][]string, shown []int) [][]string {
	var out [][]string
	for _, r := range rows {
		out = append(out, pick(r, shown))
	}
	return out
}
