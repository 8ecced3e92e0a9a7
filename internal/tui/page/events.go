package page

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// events is the view of the router's event log, newest first.
type events struct {
	still
	cursor cursor
	filter feed.Filter[*admin.Event]
	faults bool
	rows   []*admin.Event
}

func (e *events) Name() string { return "Events" }

func (e *events) Keys() []string {
	return []string{"j/k move", "enter all of it", "/ filter", "F faults only", "f follow", "y copy", "p pause", "? help", "q quit"}
}

// Rows are the events that the filter leaves, newest first.
func (e *events) Rows(c *Ctx) []*admin.Event {
	list := c.Events
	if c.Frozen {
		list = c.R.Events
	}
	e.rows = e.rows[:0]
	for i := len(list) - 1; i >= 0; i-- {
		x := &list[i]
		if e.faults && x.Severity == "info" || !e.filter.Match(x) {
			continue
		}
		e.rows = append(e.rows, x)
	}
	e.cursor.Sync(len(e.rows), e.keyAt)
	return e.rows
}

func (e *events) keyAt(i int) string { return fmt.Sprint(e.rows[i].Seq) }

func (e *events) Act(c *Ctx, a keys.Action) (tea.Cmd, bool) {
	rows := e.Rows(c)
	switch a {
	case keys.Faults:
		e.faults = !e.faults
	case keys.Follow:
		e.cursor.Top()
	case keys.Enter:
		if e.cursor.At < len(rows) {
			x := rows[e.cursor.At]
			if x.Request != "" {
				return open(3, x.Request), true
			}
			return func() tea.Msg { return ShowMsg{"event " + fmt.Sprint(x.Seq), eventText(x)} }, true
		}
	default:
		return nil, e.cursor.Move(a, len(rows), e.keyAt)
	}
	return nil, true
}

func eventText(x *admin.Event) []string {
	out := []string{
		"time      " + x.At.UTC().Format("2006-01-02 15:04:05.000 UTC"), "kind      " + x.Kind, "severity  " + string(x.Severity),
		"worker    " + cmp.Or(x.Worker, "-"), "rank      " + cmp.Or(x.Rank, "-"), "text      " + x.Text,
	}
	if len(x.Fields) > 0 {
		raw, err := json.Marshal(x.Fields)
		if err == nil {
			out = append(out, "fields    "+string(raw))
		}
	}
	return out
}

func (e *events) Filter() string { return e.filter.Text }

func (e *events) SetFilter(_ *Ctx, text string) (tea.Cmd, error) {
	f, err := feed.EventFilter.Parse(text)
	if err == nil {
		e.filter = f
	}
	return nil, err
}

func (e *events) Order(*Ctx) string {
	s := "no follow"
	if e.cursor.Key == "" {
		s = "follow"
	}
	if e.faults {
		s += ", faults"
	}
	return s
}

func (e *events) SetOrder(string) bool { return false }

func (e *events) Focus(*Ctx, string) tea.Cmd { return nil }

func (e *events) Row(c *Ctx) (string, string) {
	rows := e.Rows(c)
	if e.cursor.At >= len(rows) {
		return "", ""
	}
	x := rows[e.cursor.At]
	return x.Kind, strings.Join([]string{x.At.UTC().Format(time.RFC3339Nano), string(x.Severity), cmp.Or(x.Rank+x.Worker, "-"), x.Kind, x.Text}, " ")
}

func (e *events) Click(c *Ctx, _, line int) { e.cursor.Click(line, len(e.Rows(c)), e.keyAt) }

func (e *events) Draw(c *Ctx, p *widget.Painter) {
	rows := e.Rows(c)
	who := 18
	if c.W < 100 {
		who = 14
	}
	kind := 22
	if c.W < 100 {
		kind = 16
	}
	p.Put(theme.Title, "  ")
	p.Cell(theme.Title, "TIME", 13)
	p.Cell(theme.Title, "LEVEL", 6)
	p.Cell(theme.Title, "WHO", who)
	p.Cell(theme.Title, "KIND", kind)
	p.Put(theme.Title, "WHAT")
	p.End()
	// The event under the cursor is shown in full below.
	var detail []string
	if e.cursor.At < len(rows) && c.H >= 12 {
		detail = Wrap(rows[e.cursor.At].Text, c.W-4, "")
		if most := max(4, c.H/2); len(detail) > most {
			detail = append(detail[:most-1], fmt.Sprintf("%s %d more lines: o saves the events", c.Th.Ellipsis, len(detail)-most+1))
		}
	}
	h := c.H - 2
	if len(detail) > 0 {
		h -= len(detail) + 1
	}
	from, to := e.cursor.Window(len(rows), p.Len(), h)
	for i := from; i < to; i++ {
		x := rows[i]
		sev := feed.ParseSeverity(string(x.Severity))
		p.Select(i == e.cursor.At)
		mark(p, i == e.cursor.At, sev)
		p.Cell(theme.Dim, x.At.Local().Format("15:04:05.000"), 13)
		p.Cell(severityStyle(sev), severityWord(sev), 6)
		name := cmp.Or(x.Rank, x.Worker)
		name = cmp.Or(name, "router")
		p.Cell(theme.Plain, p.Cut(name, who-1), who)
		p.Cell(theme.Plain, p.Cut(x.Kind, kind-1), kind)
		p.Words(theme.Plain, strings.TrimPrefix(x.Text, name+": "))
		p.End()
	}
	if len(rows) == 0 {
		text := "no events yet"
		if len(c.Events) > 0 {
			text = "no event fits the filter (esc clears it)"
		}
		p.Line(theme.Dim, "  "+text)
	}
	if len(detail) > 0 {
		p.Fill(h + 1)
		p.Rule("event " + fmt.Sprint(rows[e.cursor.At].Seq))
		for _, l := range detail {
			p.Line(theme.Plain, "  "+l)
		}
	}
	counts := map[string]int{}
	for i := range c.Events {
		counts[string(c.Events[i].Severity)]++
	}
	p.Fill(c.H - 1)
	words := make([]string, 0, len(counts))
	for k, n := range counts {
		words = append(words, fmt.Sprintf("%s %d", k, n))
	}
	slices.Sort(words)
	p.Line(theme.Dim, fmt.Sprintf("  %d of %d events shown   %s", len(rows), len(c.Events), strings.Join(words, "  ")))
}
