package replay

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/table"
)

// Head is the head of Rows.
var Head = []string{"figure", "value"}

// Rows are the figures of the report, one to a row.
func (r *Report) Rows() [][]string {
	rows := [][]string{
		{"trace", r.Name},
		{"format", string(r.Format)},
		{"lines", table.Count(r.Lines)},
		{"span", r.Span.Round(time.Millisecond).String()},
		{"bad lines", badLines(r)},
		{"reordered records", table.Count(r.Order)},
		{"descriptions forgotten", table.Count(r.Forgotten)},
		{"cut", fmt.Sprint(r.Cut)},
		{"batches", table.Count(r.Counts.Batches)},
		{"events", table.Count(r.Counts.Events)},
		{"blocks stored", table.Count(r.Counts.Stored)},
		{"blocks removed", table.Count(r.Counts.Removed)},
		{"clears", table.Count(r.Counts.Clears)},
		{"gaps", fmt.Sprintf("%s (%s batches)", table.Count(r.Counts.Gaps), table.Count(r.Counts.Missing))},
		{"orphan blocks", table.Count(r.Counts.Orphans)},
		{"dropped while recording", table.Count(r.Counts.Dropped)},
		{"ranks", table.Count(len(r.Ranks))},
		{"blocks at end", table.Count(r.Blocks)},
		{"distinct blocks", table.Count(r.Distinct)},
		{"index checksum", r.Checksum},
		{"index memory", table.Bytes(r.Memory)},
		{"heap", table.Bytes(int64(r.Heap))},
		{"decisions", table.Count(r.Decisions)},
		{"predicted hit rate", table.Percent(r.Hit)},
		{"apply p50/p99/max", fmt.Sprintf("%.1f/%.1f/%.0f µs", r.ApplyP50, r.ApplyP99, r.ApplyMax)},
		{"records/s", table.Count(uint64(r.RecordsPS))},
		{"blocks/s", table.Count(uint64(r.BlocksPS))},
	}
	if v := r.Verify; v != nil {
		rows = append(rows,
			[]string{"decisions proven equal", fmt.Sprintf("%s of %s (%s)%s", table.Count(v.Proven), table.Count(v.Decisions), table.Percent(v.Match()), upToTheCut[r.Cut])},
			[]string{"equal, taken on trust", table.Count(v.Unproven)},
			[]string{"unverifiable", table.Count(v.Unverifiable)},
			[]string{"divergent", table.Count(v.Divergent())},
			[]string{"other rank, equal cost", table.Count(v.TieBreaks)},
			[]string{"other rules", table.Count(v.OtherRules)},
			[]string{"other choice", table.Count(v.Real)},
			[]string{"other inputs", table.Count(v.InputsDiffer)},
			[]string{"caches before the recording", table.Count(v.Unknown)},
			[]string{"found by the engine's names", table.Count(v.ByNames)},
		)
	}
	return rows
}

// upToTheCut follows a share that is of the beginning of a trace only.
var upToTheCut = map[bool]string{true: " up to the cut"}

func badLines(r *Report) string {
	if r.Bad == 0 {
		return "0"
	}
	return fmt.Sprintf("%s (first is line %d)", table.Count(r.Bad), r.FirstBad)
}

// Text writes the report for people.
func (r *Report) Text(out io.Writer) error {
	printable.Fprintf(out, "trace   %s  %s  %s lines  %s  span %s  ranks %d\n", r.Name, r.Format, table.Count(r.Lines), table.Bytes(r.Bytes), r.Span.Round(time.Millisecond), len(r.Ranks))
	printable.Fprintf(out, "        batches %s  stored %s  removed %s  clears %s  decisions %s  bad lines %s  reordered %s%s\n",
		table.Count(r.Counts.Batches), table.Count(r.Counts.Stored), table.Count(r.Counts.Removed), table.Count(r.Counts.Clears), table.Count(r.Decisions), badLines(r), table.Count(r.Order), map[bool]string{true: "  CUT (read up to the cut)"}[r.Cut])
	printable.Fprintf(out, "        gaps %s (%s batches)  orphans %s  duplicates %s  unreadable %s  dropped while recording %s\n",
		table.Count(r.Counts.Gaps), table.Count(r.Counts.Missing), table.Count(r.Counts.Orphans), table.Count(r.Counts.Duplicates), table.Count(r.Counts.Unreadable), table.Count(r.Counts.Dropped))
	if r.Forgotten > 0 {
		printable.Fprintf(out, "        the trace describes more settings and workers than are kept: the oldest were forgotten %s times\n", table.Count(r.Forgotten))
	}
	printable.Fprintf(out, "speed   %s blocks/s  %s records/s  %.2f s  apply p50/p99/max %.1f/%.1f/%.0f µs  heap %s\n",
		table.Count(uint64(r.BlocksPS)), table.Count(uint64(r.RecordsPS)), r.WallS, r.ApplyP50, r.ApplyP99, r.ApplyMax, table.Bytes(int64(r.Heap)))
	printable.Fprintf(out, "index   %s blocks, %s distinct, %s nodes, %s  checksum %s\n", table.Count(r.Blocks), table.Count(r.Distinct), table.Count(r.Nodes), table.Bytes(r.Memory), r.Checksum)
	if r.Decisions > 0 {
		printable.Fprintf(out, "hits    %s of prompt tokens were predicted as cached\n", table.Percent(r.Hit))
	}
	if len(r.Ranks) > 0 {
		fmt.Fprintln(out)
		rows := make([][]string, 0, len(r.Ranks))
		for _, k := range r.Ranks {
			note := ""
			if k.Partial {
				note = "recording began after its cache"
			}
			rows = append(rows, []string{k.Rank, table.Count(k.Blocks), strconv.Itoa(k.BlockSize), k.Checksum, note})
		}
		if err := table.Write(out, "table", []string{"RANK", "BLOCKS", "TOKENS A BLOCK", "CHECKSUM", ""}, rows); err != nil {
			return err
		}
	}
	if r.Verify != nil {
		return r.Verify.Text(out)
	}
	return nil
}

// Text writes the comparison for people.
func (v *VerifyReport) Text(out io.Writer) error {
	if v.Decisions == 0 {
		printable.Fprintf(out, "\nRESULT  nothing to verify: the recording%s has no decisions\n", upToTheCut[v.Cut])
		return nil
	}
	verdict := ""
	trusted := v.Unproven > 0 && v.Divergent() == 0 && v.Unverifiable == 0
	if trusted {
		verdict = "no decision differs: "
	}
	printable.Fprintf(out, "\nRESULT  %s%s of decisions%s proven (%s / %s), %s taken on trust, %s unverifiable, %s divergent\n", verdict, table.Percent(v.Match()), upToTheCut[v.Cut], table.Count(v.Proven), table.Count(v.Decisions), table.Count(v.Unproven), table.Count(v.Unverifiable), table.Count(v.Divergent()))
	state := func(n uint64, some string) string {
		if n == 0 {
			return "ok"
		}
		return some
	}
	if trusted {
		_ = table.List(out, "        ", 120, [][]string{{"The trusted ones were made again with recorded figures, because the recording lacks what they depend on: most often it began on a router that already had cached prompts. The first one and the reasons are below."}})
	}
	rows := [][]string{
		{"  decisions equal", table.Count(v.Decisions), table.Count(v.Equal), ""},
		{"    proven", "-", table.Count(v.Proven), table.Percent(v.Match())},
		{"    taken on trust", "-", table.Count(v.Unproven), state(v.Unproven, "trusted: with recorded figures")},
		{"    other rank, equal cost", "-", table.Count(v.TieBreaks), state(v.TieBreaks, "tie-break")},
		{"    the router had other rules", "-", table.Count(v.OtherRules), state(v.OtherRules, "another version")},
		{"    other choice, other cost", "-", table.Count(v.Real), state(v.Real, "REAL")},
		{"  cannot be made again", "-", table.Count(v.Unverifiable), state(v.Unverifiable, "the recording lacks something")},
		{"  other caches than recorded", "-", table.Count(v.InputsDiffer), state(v.InputsDiffer, "the replay has others")},
		{"  made while events arrived", "-", table.Count(v.Raced), "equal with a state of that moment"},
		{"  caches before the recording", "-", table.Count(v.Unknown), "recorded figures taken"},
		{"  found by the engine's names", "-", table.Count(v.ByNames), "recorded overlaps taken"},
		{"  predicted hit rate", table.Percent(v.RecordedHit), table.Percent(v.ReplayedHit), ""},
	}
	if err := table.Write(out, "table", []string{"  CHECK", "RECORDED", "REPLAYED", "STATE"}, rows); err != nil {
		return err
	}
	if v.FirstLack != "" {
		printable.Fprintf(out, "  FIRST THAT CANNOT BE MADE AGAIN  %s\n", v.FirstLack)
	}
	write := func(title string, d *Divergence) {
		printable.Fprintf(out, "  %s  line %s  t=+%s  %s  req %s\n    recorded %s    replayed %s\n", title, table.Count(d.Line), d.Time, d.ID, d.Request, d.Recorded, d.Replayed)
		for i, b := range d.Because {
			if i == 4 {
				printable.Fprintf(out, "            and %d more ranks\n", len(d.Because)-i)
				break
			}
			printable.Fprintf(out, "    because %s\n", b)
		}
	}
	if v.First != nil {
		write("FIRST DIVERGENCE", v.First)
		printable.Fprintf(out, "  NEXT    dynctl replay TRACE --at %d\n", v.First.Line)
	}
	if v.FirstInput != nil && (v.First == nil || v.First.Line != v.FirstInput.Line) {
		write("FIRST OTHER INPUT (same choice)", v.FirstInput)
	}
	if v.FirstTaken != nil {
		write("FIRST WITH RECORDED FIGURES", v.FirstTaken)
	}
	return nil
}

// RedecisionHead is the head of the rows of a Redecision.
var RedecisionHead = []string{"", "recorded", "what if", "note"}

// Rows are the figures of the comparison, one to a row.
func (d *Redecision) Rows() [][]string {
	rows := [][]string{
		{"settings", "recorded", strings.Join(d.Changes, " "), ""},
		{"decisions", table.Count(d.Decisions), table.Count(d.Decisions), ""},
		{"cannot be made again", table.Count(d.Unverifiable), "", "left out"},
		{"changed", "", table.Count(d.Changed), table.Percent(float64(d.Changed) / float64(d.Decisions))},
		{"  to local", "", table.Count(d.ToLocal), ""},
		{"  to remote", "", table.Count(d.ToRemote), ""},
		{"  other rank", "", table.Count(d.Ranks), fmt.Sprintf("%.2f blocks dearer by the recorded cost", d.Regret)},
		{"  to an error", "", table.Count(d.Failed), ""},
		{"remote", table.Percent(d.RecordedRemote), table.Percent(d.WhatIfRemote), ""},
		{"predicted hit rate", table.Percent(d.RecordedHit), table.Percent(d.WhatIfHit), ""},
	}
	if s := d.Simulated; s != nil {
		rows = append(rows, s.rows()...)
	}
	return rows
}

// Text writes the comparison for people.
func (d *Redecision) Text(out io.Writer) error {
	if s := d.Simulated; s != nil {
		note := fmt.Sprintf("These are the %s requests of the recording on simulated engines, --fleet %s. Compare the times with each other, not with those of real engines.", table.Count(s.Recorded.Requests), s.Fleet)
		if s.Recorded.Requests < 100 {
			note += " Of so few requests p99 is the slowest one."
		}
		if d.Changed == 0 && s.Verdict != "the same" {
			note += " No recorded decision would change: the simulated fleet decides some requests otherwise than yours did."
		}
		if err := table.List(out, "", 120, [][]string{{"RESULT", s.Sentence()}, {"", note}}); err != nil {
			return err
		}
		fmt.Fprintln(out)
	}
	if err := table.Write(out, "table", []string{"", "RECORDED", "WHAT IF", ""}, d.Rows()); err != nil {
		return err
	}
	for _, e := range d.Examples {
		printable.Fprintf(out, "  line %d  t=%s  %s\n    recorded %s\n    what if  %s\n", e.Line, e.Time, e.ID, e.Recorded, e.Replayed)
	}
	return nil
}
