package page

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// workers is the view of workers and their ranks: history graphs, and the
// router's view beside the engine's own.
type workers struct {
	rankPage
	metric feed.Metric
}

func (w *workers) Name() string { return "Workers" }

func (w *workers) Keys() []string {
	return []string{"j/k rank", "h/l fold", "d describe", "m metric", "enter its decisions", "/ filter", "s sort", "z wide", "[ ] history", "? help", "q quit"}
}

func (w *workers) Act(c *Ctx, a keys.Action) (tea.Cmd, bool) {
	switch a {
	case keys.Metric:
		w.metric = (w.metric + 1) % feed.Metrics
		return nil, true
	case keys.Enter:
		if k := w.table.Current(c.R); k != nil {
			label := k.Label
			return func() tea.Msg { return FilterMsg{View: 3, Filter: "worker:" + label} }, true
		}
		return nil, true
	}
	return nil, w.table.Act(c.R, a)
}

// FilterMsg asks for another view with a filter.
type FilterMsg struct {
	View   int
	Filter string
}

func (w *workers) Focus(c *Ctx, name string) tea.Cmd {
	if name != "" {
		w.table.reveal(c.R, name)
	}
	return nil
}

func (w *workers) Draw(c *Ctx, p *widget.Painter) {
	rows := len(w.table.Rows(c.R)) + 1
	detail := 17
	if c.H < 30 {
		detail = 13
	}
	for _, has := range []func(k feed.Rank) bool{
		func(k feed.Rank) bool { return k.Caches() != "" },
		func(k feed.Rank) bool { m := k.Streams(); return !m.None() },
	} {
		if slices.ContainsFunc(c.R.Ranks, has) {
			detail++
		}
	}
	h := max(min(rows, 5), min(rows, c.H-detail))
	w.table.Draw(c.R, p, h)
	p.Fill(h)
	k := w.table.Current(c.R)
	if k == nil {
		return
	}
	p.Rule(name(k))
	w.describe(c, p, k)
	compare := compareLines(k, c.W >= 110, c.H >= 24)
	graph := max(3, min(c.H-p.Len()-len(compare)-3, 12))
	values := func(m feed.Metric) []float64 { return c.Series(k.Label, m) }
	if k.Folded > 0 {
		p.Line(theme.Dim, "  the graphs are of one rank: l unfolds the worker")
	} else if c.W >= 110 {
		l, r := p.Sub((c.W+1)/2), p.Sub(c.W/2)
		graphOf(l, values(w.metric), w.metric, graph)
		next := (w.metric + 1) % feed.Metrics
		graphOf(r, values(next), next, graph)
		p.Beside(l, r)
	} else {
		graphOf(p, values(w.metric), w.metric, graph)
	}
	p.Rule("Router's view against the engine's own")
	for i, l := range compare {
		if i == 0 {
			p.Line(theme.Title, l)
		} else {
			p.Line(theme.Plain, l)
		}
	}
}

// describe draws the worker's facts in two lines, and if there are any, in one line each
// what caches the rank has beside that of its device, and its streams that continued elsewhere.
func (w *workers) describe(c *Ctx, p *widget.Painter, k *feed.Rank) {
	for i := range c.R.WorkerList {
		o := &c.R.WorkerList[i]
		if o.Name != k.Worker {
			continue
		}
		version := strings.TrimSpace(o.Engine + " " + o.Version)
		connector := ""
		if o.Connector != "" {
			connector = "  KV over " + o.Connector
		}
		p.Line(theme.Plain, fmt.Sprintf("  %s  engine %s  dp %d  block %d  %s blocks%s  model %s  from %s", strings.TrimPrefix(o.URL, "http://"), version, o.DP, o.BlockSizeTokens,
			widget.Known(o.KVBlocks), connector, strings.Join(o.Models, ","), o.Source))
	}
	p.Put(theme.Plain, "  ")
	p.Put(severityStyle(k.Severity), k.Status)
	because := cmp.Or(k.Reason, k.Feed.Reason)
	if because != "" && k.Severity > feed.OK {
		p.Put(theme.Plain, ": "+because)
	}
	seq := "-"
	if k.Feed.LastSeq != nil {
		seq = strconv.FormatUint(*k.Feed.LastSeq, 10)
	}
	p.Words(theme.Plain, fmt.Sprintf("  events %s for %s, %s/s, gaps %d, replayed %d, lost %d, seq %s", cmp.Or(k.Feed.State, "-"), widget.Seconds(k.FeedFor.F()),
		widget.Rate(k.EventRate.F()), k.Feed.Gaps, k.Feed.Replayed, k.Feed.Lost, seq))
	p.End()
	for _, line := range []string{k.Caches(), Moved(k)} {
		if line != "" {
			p.Line(theme.Plain, "  "+line)
		}
	}
}

// graphOf draws the history of a metric with its title.
func graphOf(p *widget.Painter, values []float64, m feed.Metric, h int) {
	top := 0.0
	now := math.NaN()
	for _, v := range values {
		if v > top {
			top = v
		}
		now = v
	}
	scale := func(v float64) string {
		if v > 0 && v < 10 {
			return strconv.FormatFloat(math.Round(10*v)/10, 'f', -1, 64)
		}
		return widget.Count(v)
	}
	unit := ""
	switch m {
	case feed.KV, feed.Hit:
		top = 1
		scale = func(v float64) string { return strconv.FormatFloat(math.Round(1000*v)/10, 'f', -1, 64) }
		unit = "%"
		now *= 100
	default:
		top = nice(top)
	}
	text := widget.Rate(now)
	p.Put(theme.Title, fmt.Sprintf(" %s%s now %s", m, unit, text))
	p.Put(theme.Dim, fmt.Sprintf("  last %d samples", len(values)))
	p.End()
	p.Graph(theme.Bar, values, h, top, scale, 5)
}

// nice is the next of 1, 2, 5, 10, 20, … that is not below v, at least 4.
func nice(v float64) float64 {
	if !(v > 4) {
		return 4
	}
	e := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5, 10} {
		if m*e >= v {
			return m * e
		}
	}
	return v
}

// compareLines is the table of both views of a rank; wide says it in longer
// words, tall in one more line.
func compareLines(k *feed.Rank, wide, tall bool) []string {
	words2 := func(long, short string) string {
		if wide {
			return long
		}
		return short
	}
	row := func(what, router, engine, diff, words string) string {
		return strings.TrimRight(fmt.Sprintf("  %-18s %9s %9s %8s  %s", what, router, engine, diff, words), " ")
	}
	requests := "-"
	if k.Running().Known() && k.Waiting().Known() {
		requests = widget.Count(k.Running().F() + k.Waiting().F())
	}
	words := "the same"
	switch d := k.RequestDiff; {
	case !d.Known():
		words = "the engine does not say"
	case d > 0:
		words = words2("more in the engine: in between, or others use it", "more in the engine")
	case d < 0:
		words = words2("more in the router: on the way, or prefilling elsewhere", "more in the router")
	}
	out := []string{
		row("", "ROUTER", "ENGINE", "DIFF", ""),
		row("requests", strconv.Itoa(k.ActiveRequests), requests, signed(k.RequestDiff), words),
		row("blocks in use", widget.Count(float64(k.DecodeBlocks)), widget.Count(k.EngineUsed.F()), signed(k.BlockDiff), "of "+widget.Known(k.CapacityBlock)+words2(" blocks of room; the router knows its own requests only", " blocks of room")),
	}
	room, index := words2("the index never holds more than the engine has room for", "of the room"), float64(k.IndexBlocks)
	free := "-"
	if k.Room() > 0 {
		free = widget.Percent(index/float64(k.Room())) + "%"
		if k.IndexBlocks > k.Room() {
			room = words2("MORE than there is room for: the index overcounts", "MORE than the room")
		}
	}
	trust := "trusted"
	if !k.Feed.Trusted {
		trust = "not trusted now"
	}
	if k.Feed.State == "none" {
		trust = "no events: guessed from what was sent"
	}
	out = append(out,
		row("blocks indexed", widget.Count(index), widget.Known(k.Room()), free, room),
		row("prefix hit now/life", widget.Percent(k.HitShare.F())+"%", widget.Percent(k.LifeHit.F())+"%", "", fmt.Sprintf("engine's counters, %s old", widget.Seconds(k.LoadAge.F()))))
	if tall {
		out = append(out, row("cache view", trust, "", "", ""))
	}
	return out
}
