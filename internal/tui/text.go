package tui

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/page"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// TextOptions say how a view is written.
type TextOptions struct {
	// Format is "table", "json" or "jsonl".
	Format string
	// Width of the table in columns; 0 does not limit it.
	Width int
	// ASCII keeps everything else out of the table.
	ASCII bool
	// Filter and Sort apply to ranks, in every format.
	Filter, Sort string
	Reverse      bool
}

// Check finds mistakes in the options before anything is requested.
func (o TextOptions) Check() error {
	if _, err := feed.RankFilter.Parse(o.Filter); err != nil {
		return err
	}
	if o.Sort != "" && !page.SortRanks(nil, o.Sort, false) {
		return fmt.Errorf("--sort %s: not one of %s", o.Sort, strings.Join(page.Orders(), ", "))
	}
	return nil
}

// Write writes a view.
func Write(w io.Writer, v *feed.View, o TextOptions) error {
	f, err := feed.RankFilter.Parse(o.Filter)
	if err != nil {
		return err
	}
	picked := *v
	picked.Routers = append([]feed.Router(nil), v.Routers...)
	for i := range picked.Routers {
		pickRanks(&picked.Routers[i], &f, o)
	}
	switch o.Format {
	case "json", "jsonl":
		enc := json.NewEncoder(printable.JSON(w))
		enc.SetEscapeHTML(false)
		if o.Format == "json" {
			enc.SetIndent("", "  ")
		}
		return enc.Encode(&picked)
	}
	return writeTable(w, &picked, o)
}

func pickRanks(r *feed.Router, f *feed.Filter[*feed.Rank], o TextOptions) {
	var rows []*feed.Rank
	for i := range r.Ranks {
		if f.Match(&r.Ranks[i]) {
			rows = append(rows, &r.Ranks[i])
		}
	}
	if o.Sort != "" {
		page.SortRanks(rows, o.Sort, o.Reverse)
	}
	ranks := make([]feed.Rank, len(rows))
	for i, k := range rows {
		ranks[i] = *k
	}
	r.Ranks = ranks
	// null is no list: a reader should not have to check.
	if r.WorkerList == nil {
		r.WorkerList = []admin.Worker{}
	}
	if r.Decisions == nil {
		r.Decisions = []feed.Decision{}
	}
	if r.Events == nil {
		r.Events = []admin.Event{}
	}
}

// writeTable writes the view as plain text: facts, ranks, attention.
func writeTable(w io.Writer, v *feed.View, o TextOptions) error {
	width := cmp.Or(max(o.Width, 0), 200)
	th := theme.New("mono", termenv.Ascii, o.ASCII)
	var b strings.Builder
	for i := range v.Routers {
		r := &v.Routers[i]
		if i > 0 {
			b.WriteByte('\n')
		}
		name := cmp.Or(r.Name, r.URL)
		printable.Fprintf(&b, "router    %s  %s  %s  %s\n", name, r.Link, cmp.Or(r.Condition(), "never reached"), r.Version)
		if r.Error != "" {
			printable.Fprintf(&b, "error     %s\n", r.Error)
		}
		if r.Answered() {
			t, x := &r.Derived, &r.Index
			ttft, itl := feed.Quantiles(r.Traffic.TTFT), feed.Quantiles(r.Traffic.ITL)
			printable.Fprintf(&b, "workers   %d (%d prefill, %d decode, %d aggregated, %d either), %d usable, %d ranks\n", r.Workers.Total, r.Workers.Prefill, r.Workers.Decode, r.Workers.Aggregated, r.Workers.Either, r.Workers.Usable, r.Workers.Ranks)
			printable.Fprintf(&b, "traffic   %s req/s, in %s tok/s (last %s s), out %s tok/s (mean of recent seconds), active %s, queued %s\n", widget.Rate(t.RequestRate.F()), widget.Count(t.PromptRate.F()), widget.Rate(r.RateWindow.F()), widget.Count(t.CompletionRate.F()), widget.Count(float64(r.Traffic.Inflight)), widget.Count(float64(r.Traffic.Queued)))
			for i := range r.Queues {
				printable.Fprintf(&b, "queue     %s\n", r.Queues[i].Text())
			}
			printable.Fprintf(&b, "latency   TTFT p50 %s p99 %s, ITL p50 %s p99 %s, router's decision p99 %s\n", widget.Millis(ttft.P50), widget.Millis(ttft.P99), widget.Millis(itl.P50), widget.Millis(itl.P99), widget.Millis(feed.Quantiles(r.Traffic.Overhead).P99/1000))
			printable.Fprintf(&b, "routing   hit %s%%, local %s%%, remote %s%%, %s\n", widget.Percent(t.HitShare.F()), widget.Percent(t.LocalShare.F()), widget.Percent(t.RemoteShare.F()), cmp.Or(r.Rule(), "remote from -"))
			costs := r.Costs
			if !r.ThresholdAuto { // no crossing decides
				costs = nil
			}
			for i := range costs {
				m := &costs[i]
				if len(m.Crossings) == 0 {
					printable.Fprintf(&b, "crossing  %s: unknown yet, %.0f prompts computed locally, %.0f remotely, %.0f transfers\n", m.Model, m.LocalOutcomes, m.PrefillOutcomes, m.TransferOutcomes)
				}
				for k := range m.Unlearned {
					u := &m.Unlearned[k]
					printable.Fprintf(&b, "learning  %s: %s: %s\n", m.Model, u.Effect(), u.Text)
				}
				for k := range m.Crossings {
					c := &m.Crossings[k]
					printable.Fprintf(&b, "crossing  %s: %s\n", m.Model, c.Sentence())
				}
			}
			printable.Fprintf(&b, "index     %s blocks, %s entries, %s events/s, gaps %s, untrusted ranks %s\n\n", widget.Whole(float64(x.Blocks)), widget.Whole(float64(x.Memberships)), widget.Rate(t.EventRate.F()), widget.Count(t.RecentGaps.F()), widget.Count(float64(x.UntrustedRank)))
			p := widget.NewPainter(th, width)
			page.PlainRanks(r, p)
			for _, l := range p.Lines() {
				b.WriteString(stripStyles(l))
				b.WriteByte('\n')
			}
		}
		b.WriteByte('\n')
		for _, a := range r.Attention {
			if a.Code == feed.CodeRouterDown {
				continue // the second line has it
			}
			printable.Fprintf(&b, "%-5s %s: %s\n", strings.ToUpper(a.Severity.String()), a.Subject, a.Text)
		}
		if len(r.Attention) == 0 {
			b.WriteString("nothing needs attention\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func stripStyles(s string) string { return strings.TrimRight(escapes.ReplaceAllString(s, ""), " ") }
