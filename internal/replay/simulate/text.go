package simulate

import (
	"fmt"
	"io"
	"strconv"

	"github.com/dynctl/dynctl/internal/table"
)

// WriteTable writes results as a table, one to a row.
func WriteTable(out io.Writer, format string, results []*Result) error {
	head := []string{"POLICY", "THRESHOLD", "KV BLOCKS", "HIT", "BOUND", "OF BOUND", "TTFT P50", "P95", "P99", "ITL P50", "P99", "E2E P50", "P99", "GOOD", "GOOD/S", "IMBALANCE", "REGRET", "MISSED", "REMOTE", "WAITED", "WAIT P99", "REFUSED", "FAILED"}
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
	if err := table.Write(out, format, head, rows); err != nil || format != "table" {
		return err
	}
	_, err := fmt.Fprintln(out, "times in ms; HIT and BOUND are shares of prompt tokens, REGRET is blocks by kv's cost, MISSED tokens that another rank had cached; WAITED and REFUSED are requests of a limit")
	return err
}
