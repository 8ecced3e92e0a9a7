package arrivals

import (
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/table"
)

// Rows are the figures, one to a row.
func (s *Stat) Rows() [][]string {
	lengths := func(l Lengths) string {
		return fmt.Sprintf("mean %.0f  min %d  p50 %d  p90 %d  p99 %d  max %d", l.Mean, l.Min, l.P50, l.P90, l.P99, l.Max)
	}
	rows := [][]string{
		{"requests", fmt.Sprintf("%s in %s, %.2f/s", table.Count(s.Requests), s.Span.Round(time.Millisecond), s.RPS)},
		{"sessions", table.Count(uint64(s.Sessions))},
		{"input tokens", lengths(s.ISL)},
		{"output tokens", lengths(s.OSL)},
		{"blocks", fmt.Sprintf("%s of %d tokens, %s distinct, longest prompt %d", table.Count(s.Blocks), s.BlockSize, table.Count(s.Distinct), s.LongestPath)},
		{"reuse bound", fmt.Sprintf("%s of blocks (%s), %s of tokens: what an infinite cache saves", table.Percent(s.ReuseRatio), table.Count(s.Reused), table.Percent(s.TokenReuse))},
		{"first blocks", table.Count(s.Roots)},
		{"shared blocks", table.Count(s.Shared)},
		{"reuse of the top 1/10/100", fmt.Sprintf("%s / %s / %s", table.Percent(s.Hot[0]), table.Percent(s.Hot[1]), table.Percent(s.Hot[2]))},
		{"seconds between uses", fmt.Sprintf("p50 %.1f  p90 %.1f  p99 %.1f", s.ReuseGapP50, s.ReuseGapP90, s.ReuseGapP99)},
	}
	for i, p := range s.Top[:min(len(s.Top), 5)] {
		rows = append(rows, []string{fmt.Sprintf("prefix %d", i+1), fmt.Sprintf("%d blocks, %s requests, %d continuations", p.Blocks, table.Count(p.Requests), p.Children)})
	}
	for _, c := range s.Cache {
		rows = append(rows, []string{fmt.Sprintf("shared cache of %s blocks", table.Count(c.Blocks)), table.Percent(c.HitRatio)})
	}
	return rows
}
