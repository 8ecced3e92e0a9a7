package tui

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/page"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// drawHeader says which router this is and how fresh its figures are.
func (a *app) drawHeader(c *page.Ctx, p *widget.Painter) {
	r := c.R
	link, style := string(r.Link), page.LinkStyle(r.Link)
	if r.AgeSeconds.Known() {
		link += " " + widget.Seconds(r.AgeSeconds.F())
	}
	if a.frozen != nil {
		link, style = "PAUSED", theme.Warn
		if d := a.now.Sub(a.frozen.view.At); d >= time.Second {
			link += " " + widget.Age(d) + " ago"
		}
	}
	right := "every " + strings.TrimSuffix(a.rate.String(), "0ms") + "  "
	if a.rate >= time.Second || a.rate%(100*time.Millisecond) == 0 {
		right = fmt.Sprintf("every %gs  ", a.rate.Seconds())
	}
	if a.w < 100 {
		right = fmt.Sprintf("%gs  ", a.rate.Seconds())
	}
	p.Put(theme.Bold, " dynctl top")
	if a.opts.Note != "" {
		p.Put(theme.Warn, "  "+a.opts.Note)
	}
	if a.recording() != nil {
		p.Put(theme.Warn, "  REPLAY")
	}
	if a.opts.Context != "" {
		p.Put(theme.Plain, "  ctx "+a.opts.Context)
	}
	name := cmp.Or(r.Name, r.URL)
	if n := len(c.View.Routers); n > 1 {
		name = fmt.Sprintf("%s (%d of %d, R next)", name, a.sel+1, n)
	}
	room := a.w - widget.Width(right) - widget.Width(link) - 2
	put := func(st theme.Style, s string) { // what has no room stands above all that needs attention
		if p.X()+widget.Width(s) <= room {
			p.Put(st, s)
		}
	}
	put(theme.Plain, "  ")
	put(theme.Accent, p.Cut(name, max(10, room-p.X())))
	if s := r.Condition(); s != "" {
		st := theme.Warn
		if s == "ready" {
			st = theme.Good
		}
		put(st, "  "+s)
	}
	if r.Workers.Total > 0 {
		w := r.Workers
		parts := ""
		for _, x := range []struct {
			n int
			s string
		}{{w.Prefill, "P"}, {w.Decode, "D"}, {w.Aggregated, "A"}, {w.Either, "E"}} {
			if x.n > 0 {
				parts += fmt.Sprintf(" %d%s", x.n, x.s)
			}
		}
		put(theme.Plain, fmt.Sprintf("  workers %d (%s)  ranks %d", w.Total, strings.TrimSpace(parts), w.Ranks))
	}
	if v := page.Imbalance(r); !math.IsNaN(v) {
		put(theme.Plain, "  imbalance "+widget.Rate(v))
	}
	if r.Version != "" {
		put(theme.Dim, "  "+r.Version)
	}
	if r.UptimeSeconds.Known() {
		put(theme.Dim, "  up "+widget.Seconds(r.UptimeSeconds.F()))
	}
	p.To(a.w - widget.Width(right) - widget.Width(link) - 1)
	p.Put(theme.Dim, right)
	p.Put(style, link)
	p.End()
}

// drawTabs lists the views, and the state of the present one.
func (a *app) drawTabs(c *page.Ctx, p *widget.Painter) {
	p.Put(theme.Plain, " ")
	for i, pg := range a.pages {
		name := fmt.Sprintf("%d %s", i+1, pg.Name())
		if a.w < 80 {
			name = fmt.Sprintf("%d %s", i+1, [...]string{"Over", "Work", "Tree", "Dec", "Evt"}[i])
		}
		if i == a.tab {
			p.Put(theme.Accent, "["+name+"]")
		} else {
			p.Put(theme.Plain, " "+name+" ")
		}
		if a.w >= 100 {
			p.Put(theme.Plain, " ")
		}
	}
	errors, warnings, infos := 0, 0, 0
	for _, x := range c.R.Attention {
		switch x.Severity {
		case feed.Error:
			errors++
		case feed.Warn:
			warnings++
		default:
			infos++
		}
	}
	alert, style := "", theme.Good
	switch {
	case errors > 0:
		alert, style = fmt.Sprintf("%d ERR", errors), theme.Bad
		if a.w >= 100 {
			alert += fmt.Sprintf(" %d warn", warnings)
		}
	case warnings > 0:
		alert, style = fmt.Sprintf("%d warn", warnings), theme.Warn
	case infos > 0:
		alert, style = fmt.Sprintf("%d info", infos), theme.Plain
	case c.R.Link == feed.Live:
		alert = "all well"
	}
	state := a.pages[a.tab].Order(c)
	if a.w >= 100 && a.tab < 3 {
		state = "sort " + state
	}
	if f := a.pages[a.tab].Filter(); f != "" {
		state += "  filter " + f
	}
	room := a.w - p.X() - widget.Width(alert) - 4
	state = p.Cut(state, max(room, 0))
	p.To(a.w - widget.Width(state) - widget.Width(alert) - 3)
	p.Put(theme.Dim, state)
	p.Put(theme.Plain, "  ")
	p.Put(style, alert)
	p.End()
}

// drawFooter holds the input, a message or the hints.
func (a *app) drawFooter(p *widget.Painter) {
	switch {
	case a.asking != "":
		sign := map[string]string{"filter": "/", "command": ":", "save": "save as "}[a.asking]
		p.Put(theme.Accent, " "+sign)
		value := a.input.Value()
		at := min(a.input.Position(), len([]rune(value)))
		runes := []rune(value)
		// Keep the end in sight when the text is longer than the line.
		if over := widget.Width(value) + p.X() + 2 - a.w; over > 0 && over < len(runes) {
			runes = runes[over:]
			at = max(0, at-over)
		}
		p.Put(theme.Plain, string(runes[:at]))
		if at < len(runes) {
			p.Put(theme.Selected, string(runes[at:at+1]))
			p.Put(theme.Plain, string(runes[at+1:]))
		} else {
			rest := []rune(a.input.CurrentSuggestion())
			if n := len([]rune(value)); n > 0 && n < len(rest) {
				p.Put(theme.Selected, string(rest[n:n+1]))
				p.Put(theme.Dim, string(rest[n+1:])+"  (tab completes)")
			} else {
				p.Put(theme.Selected, " ")
			}
		}
		if value == "" {
			p.Put(theme.Dim, "  "+a.hint())
		}
	case a.message != "":
		st := theme.Good
		sign := " "
		if a.fault {
			st, sign = theme.Warn, " ! "
		}
		p.Put(st, p.Cut(sign+a.message, a.w))
	default:
		list := a.pages[a.tab].Keys()
		if a.overlay != nil {
			list = []string{"j/k scroll", "esc back", "q quit"}
		} else if a.recording() != nil {
			list = append([]string{"space pause", "left/right 10s", "+/- speed", ":seek TIME"}, list...)
		} else if a.frozen != nil {
			list = append([]string{"p live", "[ ] history"}, list...)
		}
		const last = "? help q quit" // always in sight
		list = slices.DeleteFunc(slices.Clone(list), func(k string) bool { return strings.Contains(last, k) })
		list = append(list[:min(len(list), 7)], "? help", "q quit")
		for i, k := range list {
			key, word, _ := strings.Cut(k, " ")
			if i < len(list)-2 && p.X()+widget.Width(k)+1 > a.w-len(last)-2 {
				continue
			}
			p.Put(theme.Plain, " ")
			p.Put(theme.Accent, key)
			p.Put(theme.Dim, " "+word)
		}
	}
	p.End()
}

// hint shows what can be typed.
func (a *app) hint() string {
	switch a.asking {
	case "filter":
		switch a.tab {
		case 2:
			return "head of a hash, rank:LABEL, depth>N"
		case 3:
			return "word !not path:remote worker:decode-0 isl>4000 status>=500 re:..."
		case 4:
			return "word severity:error kind:feed rank:decode-0/dp1"
		}
		return "word !not role:decode kv>80 wait>=1 st:stale re:..."
	case "command":
		return "view [filter], describe, drain or resume WORKER, sort NAME, rate 2s, save FILE, router N, ctx NAME, theme NAME, ascii, quit"
	}
	return "FILE.json, FILE.csv or FILE.txt"
}

func (a *app) drawOverlay(p *widget.Painter, h int) {
	o := a.overlay
	p.Rule(o.title)
	if o.live != nil {
		o.lines = o.live()
	}
	var lines []string
	for _, l := range o.lines {
		lines = append(lines, page.Wrap(l, a.w-4, "    ")...)
	}
	if strings.HasPrefix(o.title, "help") {
		lines = o.lines
	}
	room := h - 2
	from := o.off.From(len(lines), room)
	for i := from; i < len(lines) && i < from+room; i++ {
		p.Line(theme.Plain, "  "+lines[i])
	}
	p.Fill(h - 1)
	if rest := len(lines) - from - room; rest > 0 {
		p.Line(theme.Dim, fmt.Sprintf("  %d more lines (j scrolls)", rest))
	}
}

// helpLines is the help screen, in two columns when there is room.
func (a *app) helpLines() []string {
	var cells []string
	group := ""
	entries := keys.Entries()
	if a.recording() != nil {
		entries = append(keys.Recording(), entries...)
	}
	for _, e := range entries {
		if e.Group != group {
			if group != "" {
				cells = append(cells, "")
			}
			group = e.Group
			cells = append(cells, group)
		}
		h := e.Binding.Help()
		cells = append(cells, fmt.Sprintf("  %-14s %s", h.Key, h.Desc))
	}
	tail := []string{
		"", "Only :drain and :resume change a router, and they ask first.",
		"LIVE fresh figures, LAG late ones, STALE older than 10 s, DOWN no answer, PAUSED they stand still.",
		"Marks: X broken, ! worth a look. ST: ok SLOW FAILS SMALL FULL QUEUE (load) MUTE CONN GAP RESYNC VERIFY REBLD COLD STALE LOST (events)",
		"DOWN EJECT ASLEEP DRAIN NEW HELD (health) BLIND (no load figures).",
	}
	out := slices.Concat(a.inColumns(cells), []string{""}, a.inColumns(page.LegendLines()))
	for _, t := range tail {
		out = append(out, page.Wrap(t, a.w-4, "")...)
	}
	return out
}

// inColumns puts lines into two columns where there is room.
func (a *app) inColumns(cells []string) (out []string) {
	cols := 1
	if a.w >= 100 {
		cols = 2
	}
	per := (len(cells) + cols - 1) / cols
	for i := range per {
		l := fmt.Sprintf("%-*s", a.w/cols-2, cells[i])
		if cols == 2 && i+per < len(cells) {
			l += cells[i+per]
		}
		out = append(out, strings.TrimRight(l, " "))
	}
	return out
}

// routerLine is all that the header shows of a router where there is room.
func routerLine(r *feed.Router) string {
	words := []string{strings.TrimSpace(r.Name + " " + r.URL), r.Condition()}
	if w := r.Workers; w.Total > 0 {
		words = append(words, fmt.Sprintf("%d workers, %d ranks", w.Total, w.Ranks))
	}
	if v := page.Imbalance(r); !math.IsNaN(v) {
		words = append(words, "imbalance "+widget.Rate(v))
	}
	if r.Version != "" {
		words = append(words, "version "+r.Version)
	}
	if r.UptimeSeconds.Known() {
		words = append(words, "up "+widget.Seconds(r.UptimeSeconds.F()))
	}
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return w == "" }), ", ")
}

// warningLines is the whole list of what needs attention, below each router's own line.
func (a *app) warningLines() []string {
	v := a.shown()
	var out []string
	for i := range v.Routers {
		r := &v.Routers[i]
		out = append(out, routerLine(r), "")
		for _, x := range r.Attention {
			out = append(out, fmt.Sprintf("%-5s %s %s: %s", strings.ToUpper(x.Severity.String()), x.Since.Local().Format(time.TimeOnly), x.Subject, x.Text), "")
		}
		if len(r.Attention) == 0 {
			out = append(out, "nothing needs attention")
		}
	}
	return out
}
