package replay

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/table"
)

// Show writes a record in words, with the state that it left.
func Show(w io.Writer, rec *trace.Record, p *Player) error {
	var b strings.Builder
	printable.Fprintf(&b, "line %d  t=%s  %s", rec.Line, rec.Time, rec.Kind)
	if rec.Rank != "" {
		printable.Fprintf(&b, "  %s", rec.Rank)
	}
	switch rec.Kind {
	case trace.KindBatch:
		printable.Fprintf(&b, "  batch %d", rec.Batch.Seq)
		var dec kvevent.Decoder
		var batch kvevent.Batch
		if err := dec.Decode(rec.Batch.Payload, &batch); err != nil {
			printable.Fprintf(&b, ": %v", err)
			break
		}
		for i := range batch.Events {
			e := &batch.Events[i]
			printable.Fprintf(&b, "\n    %s %d", e.Kind, len(e.Hashes))
			if e.HasParent {
				printable.Fprintf(&b, " after %016x", e.Parent)
			}
			for _, h := range e.Hashes[:min(4, len(e.Hashes))] {
				printable.Fprintf(&b, " %016x", h)
			}
			if len(e.Hashes) > 4 {
				b.WriteString(" …")
			}
		}
	case trace.KindEvent:
		printable.Fprintf(&b, "  %s %d blocks", rec.Event.Op, len(rec.Event.Names))
	case trace.KindClear:
		printable.Fprintf(&b, "  entries dropped: %s", rec.Clear.Reason)
	case trace.KindFeed:
		printable.Fprintf(&b, "  trusted: %v", rec.Trusted)
	case trace.KindRequest:
		q := rec.Request
		printable.Fprintf(&b, "  %s isl %d osl %d, %d blocks of %d", q.ID, q.ISL, q.OSL, len(q.Blocks), q.BlockSize)
	case trace.KindOutcome:
		o := &rec.Outcome.Result
		printable.Fprintf(&b, "  %s status %d, ttft %.1f ms, %d tokens", rec.Outcome.ID, o.Status, o.TTFTMS, o.CompletionTokens)
	case trace.KindDropped:
		printable.Fprintf(&b, "  %d records were lost here", rec.Dropped)
	case trace.KindDecision:
		showDecision(&b, rec.Decision, p)
	default:
	}
	s := p.index.Stats()
	printable.Fprintf(&b, "\n    index: %d blocks on %d ranks, %d distinct\n", s.Memberships, len(p.list), s.Blocks)
	_, err := io.WriteString(w, b.String())
	return err
}

func showDecision(b *strings.Builder, d *trace.Decision, p *Player) {
	printable.Fprintf(b, "  %s isl %d: %s (%s)\n    %s", d.ID, d.Input.Facts.ISL, d.Path, d.Reason, describe(d))
	if d.Unverifiable != "" {
		printable.Fprintf(b, "\n    cannot be made again: %s", d.Unverifiable)
	}
	var q kvindex.Query
	p.Overlap(d.Locals, &q)
	asked := promptOf(d)
	for _, ph := range []*selector.Input{&d.Input.Decode, &d.Input.Prefill} {
		if len(ph.Candidates) == 0 {
			continue
		}
		printable.Fprintf(b, "\n    %s by %s", ph.Phase, ph.Policy)
		list := slices.Clone(ph.Candidates)
		slices.SortStableFunc(list, func(x, y decision.Candidate) int {
			return cmp.Or(cmp.Compare(x.Cost, y.Cost), strings.Compare(x.Rank, y.Rank))
		})
		var rows [][]string
		for i := range list[:min(len(list), 16)] {
			c := &list[i]
			now := "-"
			if r := p.ranks[c.Rank]; r != nil && r.fed {
				n, beyond := r.usable(&q, asked)
				now = prefix{n / max(ph.BlockSize, 1), beyond.Scale(1, max(ph.BlockSize, 1))}.String()
			}
			rows = append(rows, []string{"    " + c.Rank, fmt.Sprintf("%.4g", c.Cost), prefixOf(c).String(), now, fmt.Sprint(c.ActiveRequests), fmt.Sprint(c.PrefillTokens), fmt.Sprint(c.DecodeBlocks), c.KeptOut})
		}
		var t strings.Builder
		_ = table.Figures(&t, []string{"    RANK", "COST", "OVERLAP", "HERE", "REQUESTS", "PREFILL tok", "DECODE blk", "KEPT OUT"}, rows, 0, 7) // a strings.Builder takes everything
		b.WriteString("\n" + strings.TrimSuffix(t.String(), "\n"))
		if len(list) > 16 {
			printable.Fprintf(b, "\n      … %d more", len(list)-16)
		}
	}
}
