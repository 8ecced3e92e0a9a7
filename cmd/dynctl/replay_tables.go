package main

import (
	"encoding/csv"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dynctl/dynctl/internal/bench/replay"
	"github.com/dynctl/dynctl/internal/bench/replay/simulate"
	"github.com/dynctl/dynctl/internal/bench/replay/workload"
	"github.com/dynctl/dynctl/internal/router/trace"
)

// tableOf writes rows as a table, CSV or markdown.
func tableOf(out io.Writer, format string, head []string, rows [][]string) error {
	switch format {
	case "csv":
		w := csv.NewWriter(out)
		if err := w.Write(head); err != nil {
			return err
		}
		if err := w.WriteAll(rows); err != nil {
			return err
		}
		return w.Error()
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

// num writes a count with commas between thousands.
func num(n uint64) string {
	s := strconv.FormatUint(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func percent(v float64) string { return fmt.Sprintf("%.2f%%", 100*v) }

// size is bytes in words.
func size(n int64) string {
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

func sortedKinds(m map[trace.Kind]int64) []trace.Kind { return slices.Sorted(maps.Keys(m)) }

// reportRows are the figures of a report, one to a row.
func reportRows(r *replay.Report) [][]string {
	rows := [][]string{
		{"trace", r.Name},
		{"format", string(r.Format)},
		{"lines", num(uint64(r.Lines))},
		{"span", r.Span.Round(time.Millisecond).String()},
		{"bad lines", badLines(r)},
		{"reordered records", num(uint64(r.Order))},
		{"cut", fmt.Sprint(r.Cut)},
		{"batches", num(r.Counts.Batches)},
		{"events", num(r.Counts.Events)},
		{"blocks stored", num(r.Counts.Stored)},
		{"blocks removed", num(r.Counts.Removed)},
		{"clears", num(r.Counts.Clears)},
		{"gaps", fmt.Sprintf("%s (%s batches)", num(r.Counts.Gaps), num(r.Counts.Missing))},
		{"orphan blocks", num(r.Counts.Orphans)},
		{"dropped while recording", num(r.Counts.Dropped)},
		{"ranks", num(uint64(len(r.Ranks)))},
		{"blocks at end", num(uint64(r.Blocks))},
		{"distinct blocks", num(uint64(r.Distinct))},
		{"index checksum", r.Checksum},
		{"index memory", size(r.Memory)},
		{"heap", size(int64(r.Heap))},
		{"decisions", num(r.Decisions)},
		{"predicted hit rate", percent(r.Hit)},
		{"apply p50/p99/max", fmt.Sprintf("%.1f/%.1f/%.0f µs", r.ApplyP50, r.ApplyP99, r.ApplyMax)},
		{"records/s", num(uint64(r.RecordsPS))},
		{"blocks/s", num(uint64(r.BlocksPS))},
	}
	if v := r.Verify; v != nil {
		rows = append(rows,
			[]string{"decisions equal", fmt.Sprintf("%s of %s (%s)", num(v.Equal), num(v.Decisions), percent(v.Match()))},
			[]string{"other rank, equal cost", num(v.TieBreaks)},
			[]string{"other choice", num(v.Real)},
			[]string{"other inputs", num(v.InputsDiffer)},
		)
	}
	return rows
}

func badLines(r *replay.Report) string {
	if r.Bad == 0 {
		return "0"
	}
	return fmt.Sprintf("%s (first is line %d)", num(uint64(r.Bad)), r.FirstBad)
}

// reportTable writes a report for people.
func reportTable(out io.Writer, r *replay.Report) error {
	fmt.Fprintf(out, "trace   %s  %s  %s lines  %s  span %s  ranks %d\n", r.Name, r.Format, num(uint64(r.Lines)), size(r.Bytes), r.Span.Round(time.Millisecond), len(r.Ranks))
	fmt.Fprintf(out, "        batches %s  stored %s  removed %s  clears %s  decisions %s  bad lines %s  reordered %s%s\n",
		num(r.Counts.Batches), num(r.Counts.Stored), num(r.Counts.Removed), num(r.Counts.Clears), num(r.Decisions), badLines(r), num(uint64(r.Order)), map[bool]string{true: "  CUT (read up to the cut)"}[r.Cut])
	fmt.Fprintf(out, "        gaps %s (%s batches)  orphans %s  duplicates %s  unreadable %s  dropped while recording %s\n",
		num(r.Counts.Gaps), num(r.Counts.Missing), num(r.Counts.Orphans), num(r.Counts.Duplicates), num(r.Counts.Unreadable), num(r.Counts.Dropped))
	fmt.Fprintf(out, "speed   %s blocks/s  %s records/s  %.2f s  apply p50/p99/max %.1f/%.1f/%.0f µs  heap %s\n",
		num(uint64(r.BlocksPS)), num(uint64(r.RecordsPS)), r.WallS, r.ApplyP50, r.ApplyP99, r.ApplyMax, size(int64(r.Heap)))
	fmt.Fprintf(out, "index   %s blocks, %s distinct, %s nodes, %s  checksum %s\n", num(uint64(r.Blocks)), num(uint64(r.Distinct)), num(uint64(r.Nodes)), size(r.Memory), r.Checksum)
	if r.Decisions > 0 {
		fmt.Fprintf(out, "hits    %s of prompt tokens were predicted as cached\n", percent(r.Hit))
	}
	if len(r.Ranks) > 0 {
		fmt.Fprintln(out)
		rows := make([][]string, 0, len(r.Ranks))
		for _, k := range r.Ranks {
			note := ""
			if k.Partial {
				note = "recording began after its cache"
			}
			rows = append(rows, []string{k.Rank, num(uint64(k.Blocks)), strconv.Itoa(k.BlockSize), k.Checksum, note})
		}
		if err := tableOf(out, "table", []string{"RANK", "BLOCKS", "TOKENS A BLOCK", "CHECKSUM", ""}, rows); err != nil {
			return err
		}
	}
	if r.Verify != nil {
		return verifyTable(out, r.Verify)
	}
	return nil
}

func verifyTable(out io.Writer, v *replay.VerifyReport) error {
	fmt.Fprintf(out, "\nRESULT  %s of decisions reproduced (%s / %s)\n", percent(v.Match()), num(v.Equal), num(v.Decisions))
	state := func(n uint64) string {
		if n == 0 {
			return "ok"
		}
		return "REAL"
	}
	rows := [][]string{
		{"  decisions equal", num(v.Decisions), num(v.Equal), percent(v.Match())},
		{"    other rank, equal cost", "-", num(v.TieBreaks), map[bool]string{true: "tie-break", false: "ok"}[v.TieBreaks > 0]},
		{"    other choice, other cost", "-", num(v.Real), state(v.Real)},
		{"  other caches than recorded", "-", num(v.InputsDiffer), map[bool]string{true: "events are missing", false: "ok"}[v.InputsDiffer > 0]},
		{"  made while events arrived", "-", num(v.Raced), "equal with a state of that moment"},
		{"  caches partly unknown", "-", num(v.Unknown), "recorded figures taken"},
		{"  predicted hit rate", percent(v.RecordedHit), percent(v.ReplayedHit), ""},
	}
	if err := tableOf(out, "table", []string{"  CHECK", "RECORDED", "REPLAYED", "STATE"}, rows); err != nil {
		return err
	}
	tell := func(title string, d *replay.Divergence) {
		fmt.Fprintf(out, "  %s  line %s  t=+%s  %s  req %s\n    recorded %s    replayed %s\n", title, num(uint64(d.Line)), d.Time, d.ID, d.Request, d.Recorded, d.Replayed)
		for i, b := range d.Because {
			if i == 4 {
				fmt.Fprintf(out, "            and %d more ranks\n", len(d.Because)-i)
				break
			}
			fmt.Fprintf(out, "    because %s\n", b)
		}
	}
	if v.First != nil {
		tell("FIRST DIVERGENCE", v.First)
		fmt.Fprintf(out, "  NEXT    dynctl replay TRACE --at %d\n", v.First.Line)
	}
	if v.FirstInput != nil && (v.First == nil || v.First.Line != v.FirstInput.Line) {
		tell("FIRST OTHER INPUT (same choice)", v.FirstInput)
	}
	return nil
}

// statRows are the figures of a workload.
func statRows(s *workload.Stat) [][]string {
	lengths := func(l workload.Lengths) string {
		return fmt.Sprintf("mean %.0f  min %d  p50 %d  p90 %d  p99 %d  max %d", l.Mean, l.Min, l.P50, l.P90, l.P99, l.Max)
	}
	rows := [][]string{
		{"requests", fmt.Sprintf("%s in %s, %.2f/s", num(s.Requests), s.Span.Round(time.Millisecond), s.RPS)},
		{"input tokens", lengths(s.ISL)},
		{"output tokens", lengths(s.OSL)},
		{"blocks", fmt.Sprintf("%s of %d tokens, %s distinct, longest prompt %d", num(s.Blocks), s.BlockSize, num(s.Distinct), s.LongestPath)},
		{"reuse bound", fmt.Sprintf("%s of blocks (%s), %s of tokens: what an infinite cache saves", percent(s.ReuseRatio), num(s.Reused), percent(s.TokenReuse))},
		{"first blocks", num(uint64(s.Roots))},
		{"shared blocks", num(s.Shared)},
		{"reuse of the top 1/10/100", fmt.Sprintf("%s / %s / %s", percent(s.Hot[0]), percent(s.Hot[1]), percent(s.Hot[2]))},
		{"seconds between uses", fmt.Sprintf("p50 %.1f  p90 %.1f  p99 %.1f", s.ReuseGapP50, s.ReuseGapP90, s.ReuseGapP99)},
	}
	for i, p := range s.Top[:min(len(s.Top), 5)] {
		rows = append(rows, []string{fmt.Sprintf("prefix %d", i+1), fmt.Sprintf("%d blocks, %s requests, %d continuations", p.Blocks, num(p.Requests), p.Children)})
	}
	for _, c := range s.Cache {
		rows = append(rows, []string{fmt.Sprintf("shared cache of %s blocks", num(uint64(c.Blocks))), percent(c.HitRatio)})
	}
	return rows
}

// compareTable writes the table of policies.
func compareTable(out io.Writer, format string, results []*simulate.Result) error {
	head := []string{"POLICY", "THRESHOLD", "KV BLOCKS", "HIT", "BOUND", "OF BOUND", "TTFT P50", "P95", "P99", "ITL P50", "P99", "E2E P50", "P99", "GOOD", "GOOD/S", "IMBALANCE", "REGRET", "MISSED", "REMOTE", "FAILED"}
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
			blocks += fmt.Sprintf(" (%s evicted)", num(r.Evictions))
		}
		ms := func(v float64) string { return fmt.Sprintf("%.0f", v) }
		rows = append(rows, []string{
			name, strconv.Itoa(r.Threshold), blocks, percent(r.HitRatio), percent(r.Bound), percent(r.OfBound),
			ms(r.TTFT.P50), ms(r.TTFT.P95), ms(r.TTFT.P99), fmt.Sprintf("%.1f", r.ITL.P50), fmt.Sprintf("%.1f", r.ITL.P99), ms(r.E2E.P50), ms(r.E2E.P99),
			percent(r.Good), fmt.Sprintf("%.2f", r.Goodput), fmt.Sprintf("%.2f", r.Imbalance), fmt.Sprintf("%.1f", r.Regret), percent(r.Missed), num(r.Remote), num(r.Failed),
		})
	}
	if err := tableOf(out, format, head, rows); err != nil || format != "table" {
		return err
	}
	_, err := fmt.Fprintln(out, "times in ms; HIT and BOUND are shares of prompt tokens, REGRET is blocks by kv's cost, MISSED tokens that another rank had cached")
	return err
}
