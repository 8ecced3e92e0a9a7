package page

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// overview is the first view: traffic, routing, ranks, attention, decisions.
type overview struct{ rankPage }

func (o *overview) Name() string { return "Overview" }

func (o *overview) Keys() []string {
	return []string{"1-5 view", "j/k move", "enter rank", "/ filter", "s sort", "! warnings", "p pause", "? help", "q quit"}
}

func (o *overview) Act(c *Ctx, a keys.Action) (tea.Cmd, bool) {
	if a == keys.Enter {
		if k := o.table.Current(c.R); k != nil {
			return open(1, k.Label), true
		}
		return nil, true
	}
	return nil, o.table.Act(c.R, a)
}

func (o *overview) Focus(c *Ctx, name string) tea.Cmd {
	o.table.cursor.Key, o.table.dirty = name, true
	o.table.Rows(c.R)
	return nil
}

func (o *overview) Draw(c *Ctx, p *widget.Painter) {
	if len(c.View.Routers) > 1 {
		drawFleet(c, p)
	}
	if c.W >= 100 && c.H >= 24 {
		l, r := p.Sub((c.W+1)/2), p.Sub(c.W/2)
		trafficBox(c, l)
		routingBox(c, r)
		p.Beside(l, r)
	} else {
		trafficLines(c, p)
	}
	left := c.H - p.Len()
	table := o.table.Height(c.R, c.W)
	most := left/4 + 1
	if left < 21 { // what the ranks leave free on a small screen is for Attention first
		most = max(most, left-1-max(table, 4)-1)
	}
	attention := attentionLines(c.R, c.W, most)
	ask := 1 + len(attention)
	decisions := 0
	free := left - ask - max(table, 4)
	switch {
	case len(c.R.Decisions) == 0:
	case left >= 21:
		decisions = 2 + max(3, min(left-ask-table-2, min(len(c.R.Decisions), 12)))
	case free >= 2: // its rule and a row, with titles where there is room
		decisions = min(free, 2+min(len(c.R.Decisions), 12))
	}
	space := left - ask - decisions
	h := min(space, max(table, 4))
	summary := h >= 6 || h == table && o.table.heat == 0 // whose height has a line for it
	if summary {
		h--
	}
	before := p.Len()
	o.table.Draw(c.R, p, h)
	p.Fill(before + h)
	if summary {
		p.Line(theme.Dim, "  "+rankSummary(c.R, len(o.table.Rows(c.R)), c.W < 110))
	}
	p.Rule(fmt.Sprintf("Attention (%d)", len(c.R.Attention)))
	for _, l := range attention {
		if l.head > 0 {
			p.Put(severityStyle(l.sev), l.text[:l.head])
			p.Put(theme.Plain, l.text[l.head:])
			p.End()
		} else {
			p.Line(theme.Plain, l.text)
		}
	}
	if decisions > 0 {
		title := "Last decisions"
		if decisions == 2 {
			title = "Last decision"
		}
		p.Rule(title)
		newest := make([]*feed.Decision, len(c.R.Decisions))
		for i := range newest {
			newest[i] = &c.R.Decisions[i]
		}
		drawDecisions(p, newest, c.H-p.Len(), -1)
	}
}

// drawFleet lists the replicas when there are several.
func drawFleet(c *Ctx, p *widget.Painter) {
	const name = 24
	p.Cell(theme.Title, fmt.Sprintf("  ROUTER (%d of %d up)", c.View.Fleet.RoutersUp, c.View.Fleet.Routers), name+2)
	for _, h := range []struct {
		t string
		w int
	}{{"LINK", 6}, {"STATE", 9}} {
		p.Put(theme.Title, " ")
		p.Cell(theme.Title, h.t, h.w)
	}
	for _, t := range []string{"REQ/s", "IN t/s", "ACTIVE", "QUEUE", "HIT%", "TTFT99", "ITL99", "ALERTS"} {
		p.Put(theme.Title, " ")
		p.Right(theme.Title, t, 6)
	}
	p.End()
	first := max(0, min(c.Sel-2, len(c.View.Routers)-6))
	for i := first; i < min(first+6, len(c.View.Routers)); i++ {
		r := &c.View.Routers[i]
		sev := feed.OK
		alerts := 0
		for _, a := range r.Attention {
			sev = max(sev, a.Severity)
			if a.Severity >= feed.Warn {
				alerts++
			}
		}
		p.Select(i == c.Sel)
		mark(p, i == c.Sel, sev)
		title := cmp.Or(r.Name, r.URL)
		p.Cell(theme.Plain, title, name)
		p.Put(theme.Plain, " ")
		p.Cell(LinkStyle(r.Link), string(r.Link), 6)
		p.Put(theme.Plain, " ")
		p.Cell(theme.Plain, r.Condition(), 9)
		t := &r.Derived
		for _, s := range []string{
			widget.Rate(t.RequestRate.F()), widget.Count(promptRate(t)), widget.Count(inflight(r)), widget.Count(queued(r)),
			widget.Percent(hitShare(t)), widget.Millis(feed.Quantiles(r.Traffic.TTFT).P99), widget.Millis(feed.Quantiles(r.Traffic.ITL).P99), strconv.Itoa(alerts),
		} {
			p.Put(theme.Plain, " ")
			p.Right(theme.Plain, s, 6)
		}
		p.End()
	}
	fleetTotal(c, p, name-1)
}

// fleetTotal is the line that adds the replicas up.
func fleetTotal(c *Ctx, p *widget.Painter, name int) {
	f := &c.View.Fleet
	p.Put(theme.Bold, "  ")
	p.Cell(theme.Bold, "all together", name+18)
	for _, s := range []string{widget.Rate(f.Requests.F()), widget.Count(f.PromptTokensPerSecond.F()), widget.Count(f.Inflight.F()), widget.Count(f.Queued.F())} {
		p.Put(theme.Plain, " ")
		p.Right(theme.Bold, s, 6)
	}
	p.Put(theme.Dim, fmt.Sprintf("   %d workers, %d ranks", f.Workers, f.Ranks))
	p.End()
}

// LinkStyle is the style of a link's word.
func LinkStyle(l feed.Link) theme.Style {
	switch l {
	case feed.Live:
		return theme.Good
	case feed.Down:
		return theme.Bad
	}
	return theme.Warn
}

func trafficBox(c *Ctx, p *widget.Painter) {
	t := &c.R.Derived
	in := p.Sub(p.W - 4)
	in.Put(theme.Bold, fmt.Sprintf("req/s   %-7s", widget.Rate(t.RequestRate.F())))
	in.Put(theme.Plain, " ")
	in.Spark(theme.Bar, c.Series("", feed.Flow), in.W-in.X()-1)
	in.End()
	in.Line(theme.Plain, fmt.Sprintf("tokens  in %s/s  out %s/s  active %s  queued %s", widget.Count(promptRate(t)), widget.Count(t.CompletionRate.F()), widget.Count(inflight(c.R)), widget.Count(queued(c.R))))
	ttft, itl := feed.Quantiles(c.R.Traffic.TTFT), feed.Quantiles(c.R.Traffic.ITL)
	in.Line(theme.Plain, fmt.Sprintf("TTFT    p50 %-7s p90 %-7s p99 %s", widget.Millis(ttft.P50), widget.Millis(ttft.P90), widget.Millis(ttft.P99)))
	in.Line(theme.Plain, fmt.Sprintf("ITL     p50 %-7s p90 %-7s p99 %s", widget.Millis(itl.P50), widget.Millis(itl.P90), widget.Millis(itl.P99)))
	in.Line(theme.Plain, fmt.Sprintf("failed  %s/s refused %s/s left %s/s retries %s/min", widget.Rate(t.FailedRate.F()), widget.Rate(t.RejectedRate.F()), widget.Rate(t.CancelledRate.F()), widget.Count(perMinute(c.R, t.RecentRetries))))
	p.Box("Traffic, last "+window(c.R.RateWindow), in)
}

// perMinute scales a count of the trouble window.
func perMinute(r *feed.Router, n feed.Num) float64 {
	if !r.TroubleWindow.Known() || r.TroubleWindow <= 0 {
		return math.NaN()
	}
	return n.F() * math.Min(1, 60/r.TroubleWindow.F())
}

func window(n feed.Num) string {
	if !n.Known() {
		return "-"
	}
	return strconv.Itoa(int(math.Round(n.F()))) + "s"
}

func routingBox(c *Ctx, p *widget.Painter) {
	t, x, r := &c.R.Derived, &c.R.Index, c.R
	in := p.Sub(p.W - 4)
	in.Put(theme.Bold, fmt.Sprintf("prefix hit %5s%% of prompt tokens  ", widget.Percent(hitShare(t))))
	in.Bar(theme.Bar, hitShare(t), in.W-in.X())
	in.End()
	in.Line(theme.Plain, fmt.Sprintf("prefill    local %s%%  remote %s%%  fell back %s%%", widget.Percent(t.LocalShare.F()), widget.Percent(t.RemoteShare.F()), widget.Percent(t.FallbackShare.F())))
	in.Line(theme.Plain, fmt.Sprintf("rule       %s, %s", cmp.Or(r.Policy, "-"), cmp.Or(r.Rule(), "remote from -")))
	in.Line(theme.Plain, fmt.Sprintf("index      %s blocks  %s runs  +%s -%s blk/s", widget.Count(feed.Reported(r, x.Blocks).F()), widget.Count(feed.Reported(r, x.Nodes).F()), widget.Rate(t.StoredRate.F()), widget.Rate(t.RemovedRate.F())))
	in.Line(theme.Plain, fmt.Sprintf("events     %s/s gaps %s untrusted %s decide p99 %s", widget.Rate(t.EventRate.F()), widget.Count(t.RecentGaps.F()), widget.Count(feed.Reported(r, x.UntrustedRank).F()), widget.Millis(feed.Quantiles(r.Traffic.Overhead).P99/1000)))
	p.Box("Routing, last "+window(c.R.RateWindow), in)
}

// hitShare is what the engines' answers say; clients that do not ask for usage
// leave that open, and the engines' own counters say it then.
func hitShare(t *feed.Derived) float64 {
	if t.HitShare.Known() {
		return t.HitShare.F()
	}
	return t.EngineHitShare.F()
}

func promptRate(t *feed.Derived) float64 {
	if t.PromptRate > 0 {
		return t.PromptRate.F()
	}
	return t.EnginePromptRate.F()
}

func inflight(r *feed.Router) float64 { return feed.Reported(r, r.Traffic.Inflight).F() }

func queued(r *feed.Router) float64 { return feed.Reported(r, r.Traffic.Queued).F() }

// trafficLines is the short form of both boxes.
func trafficLines(c *Ctx, p *widget.Painter) {
	t := &c.R.Derived
	p.Put(theme.Bold, " req/s "+widget.Rate(t.RequestRate.F()))
	p.Words(theme.Plain, fmt.Sprintf("  in %s out %s t/s  TTFT99 %s  ITL99 %s  fail %s/s", widget.Count(promptRate(t)), widget.Count(t.CompletionRate.F()), widget.Millis(feed.Quantiles(c.R.Traffic.TTFT).P99), widget.Millis(feed.Quantiles(c.R.Traffic.ITL).P99), widget.Rate(t.FailedRate.F())))
	p.End()
	p.Put(theme.Bold, " hit "+widget.Percent(hitShare(t))+"%")
	p.Words(theme.Plain, fmt.Sprintf("  local %s / remote %s  thr %s  gaps %s  active %s  queued %s", percent0(t.LocalShare), percent0(t.RemoteShare), c.R.Threshold(), widget.Count(t.RecentGaps.F()), widget.Count(inflight(c.R)), widget.Count(queued(c.R))))
	p.End()
}

func percent0(n feed.Num) string {
	if !n.Known() {
		return widget.Unknown
	}
	return strconv.Itoa(int(math.Round(100 * n.F())))
}

// rankSummary compares the ranks of each role.
func rankSummary(r *feed.Router, shown int, short bool) string {
	s := ""
	for _, role := range []string{"decode", "prefill", "aggregated", "either"} {
		var n, waiting int
		usage, most := 0.0, math.NaN()
		seen := 0
		for i := range r.Ranks {
			k := &r.Ranks[i]
			if k.Role != role {
				continue
			}
			n++
			if k.Waiting().Known() {
				waiting += int(k.Waiting())
			}
			if k.KVUsage().Known() {
				usage += k.KVUsage().F()
				seen++
				if !(most >= k.KVUsage().F()) {
					most = k.KVUsage().F()
				}
			}
		}
		switch {
		case n > 0 && short:
			s += fmt.Sprintf("%s %d: kv mean %s%% max %s%% wait %d   ", strings.ToUpper(role[:1]), n, widget.Percent(usage/float64(seen)), widget.Percent(most), waiting)
		case n > 0:
			s += fmt.Sprintf("%s: %d ranks, kv mean %s%% max %s%%, waiting %d   ", role, n, widget.Percent(usage/float64(seen)), widget.Percent(most), waiting)
		}
	}
	if shown < len(r.Ranks) {
		s += fmt.Sprintf("(%d shown)", shown)
	}
	return strings.TrimRight(s, " ")
}

// attentionLine is one line of the attention block: the first head bytes are
// in the style of the severity.
type attentionLine struct {
	sev  feed.Severity
	head int
	text string
}

// attentionLines fits the most important lines into limit lines.
func attentionLines(r *feed.Router, w, limit int) []attentionLine {
	limit = max(limit, 1)
	if len(r.Attention) == 0 {
		if r.Link == feed.Waiting {
			return []attentionLine{{text: "  waiting for the first answer"}}
		}
		return []attentionLine{{text: "  nothing needs attention"}}
	}
	var out []attentionLine
	for i, a := range r.Attention {
		rest := len(r.Attention) - i
		head := fmt.Sprintf("  %-5s %s ", severityWord(a.Severity), a.Since.Local().Format(time.TimeOnly))
		lines := Wrap(a.Subject+": "+a.Text, w-len(head)-1, "")
		// Every further trouble gets at least one line, if there is room.
		room := limit - len(out)
		if room > 1 {
			room = max(1, min(room, room-(rest-1)))
		}
		if room <= 0 || room == 1 && rest > 1 && len(out) == limit-1 {
			out = append(out, attentionLine{text: fmt.Sprintf("  and %d more: press !", rest)})
			break
		}
		for j, l := range lines {
			if j == room {
				// What does not fit is cut at the end, visibly.
				last := &out[len(out)-1]
				if widget.Width(last.text) > w-5 {
					last.text = last.text[:strings.LastIndexByte(last.text, ' ')]
				}
				last.text += " ..."
				break
			}
			if j == 0 {
				out = append(out, attentionLine{a.Severity, len("  ERROR"), head + l})
			} else {
				out = append(out, attentionLine{text: strings.Repeat(" ", len(head)) + l})
			}
		}
	}
	return out
}
