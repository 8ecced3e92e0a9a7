package page

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// decisions is the view of routing decisions: a live list, and the full
// explanation of the one under the cursor.
type decisions struct {
	cursor cursor
	filter feed.Filter[*feed.Decision]
	follow bool
	full   bool // the explanation has the page for itself
	scroll Scroll
	shift  int

	router int
	all    []feed.Decision // newest first; nil until the router answered
	total  uint64
	err    error
	rows   []*feed.Decision

	receipts map[string]*receipt.Receipt
	asked    []string // ids in receipts, oldest first
	asking   string
	missing  string // why the receipt of asking is not there
}

const maxReceipts = 64

// newDecisions is the view of a router's decisions.
func newDecisions(router int) *decisions {
	return &decisions{follow: true, router: router, receipts: map[string]*receipt.Receipt{}}
}

func (d *decisions) Name() string { return "Decisions" }

func (d *decisions) Keys() []string {
	if d.full {
		return []string{"esc list", "j/k scroll", "h/l sideways", "n/N other decision", "y copy id", "? help", "q quit"}
	}
	return []string{"j/k move", "enter explain", "f follow", "/ filter", "y copy id", "p pause", "[ ] history", "? help", "q quit"}
}

func (d *decisions) Act(c *Ctx, a keys.Action) (tea.Cmd, bool) {
	rows := d.Rows(c)
	if d.full {
		if d.scroll.Move(a, c.H) {
			return nil, true
		}
		switch a {
		case keys.Enter, keys.Back:
			d.full, d.scroll, d.shift = false, 0, 0
			return nil, true
		case keys.FindNext:
			a = keys.Down
		case keys.FindPrev:
			a = keys.Up
		}
	}
	switch a {
	case keys.Enter:
		d.full = len(rows) > 0
	case keys.Right:
		d.shift = min(d.shift+10, 400)
	case keys.Left:
		d.shift = max(0, d.shift-10)
	case keys.Follow:
		d.follow = !d.follow
		if d.follow {
			d.cursor.Top()
		}
	default:
		if !d.cursor.Move(a, len(rows), d.keyAt) {
			return nil, false
		}
		d.follow = d.cursor.Key == ""
		d.scroll = 0
	}
	return d.ask(c), true
}

func (d *decisions) keyAt(i int) string { return d.rows[i].ID }

// Tick asks for the newest decisions.
func (d *decisions) Tick(c *Ctx) tea.Cmd {
	if d.router != c.Sel {
		filter := d.filter
		*d = *newDecisions(c.Sel)
		d.filter = filter
	}
	if c.Frozen || c.Load.Decisions == nil {
		return nil
	}
	return tea.Batch(c.Load.Decisions(d.filter.Text), d.ask(c))
}

// ask asks for the receipt under the cursor, if it is not there or not final.
func (d *decisions) ask(c *Ctx) tea.Cmd {
	rows := d.Rows(c)
	if d.cursor.At >= len(rows) || c.Load.Decision == nil {
		return nil
	}
	row := rows[d.cursor.At]
	r := d.receipts[row.ID]
	if d.asking == row.ID || r != nil && (!r.Live || r.Live == row.Live && c.Frozen) {
		return nil
	}
	d.asking, d.missing = row.ID, ""
	return c.Load.Decision(row.ID)
}

func (d *decisions) Take(c *Ctx, msg tea.Msg) tea.Cmd {
	switch m := msg.(type) {
	case DecisionsMsg:
		if m.Router != d.router || m.Filter != d.filter.Text {
			return nil
		}
		d.err = m.Err
		if m.Err == nil {
			d.all, d.total = m.List, m.Total
		}
		return d.ask(c)
	case DecisionMsg:
		if m.Router != d.router {
			return nil
		}
		if d.asking == m.ID {
			d.asking = ""
		}
		var r receipt.Receipt
		err := m.Err
		if err == nil {
			err = json.Unmarshal(m.Raw, &r)
		}
		if err != nil {
			d.missing = err.Error()
			return nil
		}
		if d.receipts[m.ID] == nil {
			d.asked = append(d.asked, m.ID)
			if len(d.asked) > maxReceipts {
				delete(d.receipts, d.asked[0])
				d.asked = slices.Delete(d.asked, 0, 1)
			}
		}
		d.receipts[m.ID] = &r
		return d.ask(c) // the cursor may have moved on
	}
	return nil
}

// Rows are the decisions that the filter leaves, newest first.
func (d *decisions) Rows(c *Ctx) []*feed.Decision {
	all := d.all
	if all == nil || c.Frozen || d.router != c.Sel {
		all = c.R.Decisions
	}
	d.rows = d.rows[:0]
	for i := range all {
		if d.filter.Match(&all[i]) {
			d.rows = append(d.rows, &all[i])
		}
	}
	d.cursor.Sync(len(d.rows), d.keyAt)
	return d.rows
}

func (d *decisions) Filter() string { return d.filter.Text }

func (d *decisions) SetFilter(c *Ctx, text string) (tea.Cmd, error) {
	f, err := feed.DecisionFilter.Parse(text)
	if err != nil {
		return nil, err
	}
	d.filter, d.all = f, nil
	d.cursor.Top()
	if c.Load.Decisions == nil || c.Frozen {
		return nil, nil
	}
	return c.Load.Decisions(f.Text), nil
}

func (d *decisions) Order(*Ctx) string {
	if d.follow {
		return "follow"
	}
	return "no follow"
}

func (d *decisions) SetOrder(string) bool { return false }

func (d *decisions) Focus(c *Ctx, name string) tea.Cmd {
	if name == "" {
		return nil
	}
	d.cursor.Key, d.follow = name, false
	d.Rows(c)
	return d.ask(c)
}

func (d *decisions) Row(c *Ctx) (string, string) {
	rows := d.Rows(c)
	if d.cursor.At >= len(rows) {
		return "", ""
	}
	x := rows[d.cursor.At]
	return x.ID, fmt.Sprintf("%s %s request=%s path=%s (%s) isl=%d eff_isl=%d cached=%d decode=%s prefill=%s status=%d", x.Time.UTC().Format("2006-01-02T15:04:05.000Z"), x.ID,
		x.RequestID, x.Path, x.ReasonText, x.Inputs.ISL, x.EffISL, x.Predicted.CachedTokens, x.Decode.Chosen, x.PrefillRank(), x.Outcome.Status)
}

func (d *decisions) Click(c *Ctx, _, line int) {
	if !d.full {
		d.cursor.Click(line, len(d.Rows(c)), d.keyAt)
		d.follow = false
	}
}

func (d *decisions) Draw(c *Ctx, p *widget.Painter) {
	rows := d.Rows(c)
	if !d.full {
		before := p.Len()
		h := max(4, c.H*2/5) - 1
		from, to := d.cursor.Window(len(rows), before+1, h-1)
		drawDecisions(p, rows[from:to], h, d.cursor.At-from)
		if len(rows) == 0 {
			text := "no decision fits the filter (esc clears it)"
			switch {
			case d.err != nil:
				text = d.err.Error()
			case d.filter.Empty():
				text = "no decisions yet: nothing was routed"
			}
			p.Line(theme.Dim, "  "+text)
		}
		p.Fill(before + h)
		shown := fmt.Sprintf("%d shown", len(rows))
		if d.total > 0 && !c.Frozen {
			shown += fmt.Sprintf(" of %d taken", d.total)
		}
		if d.err != nil {
			shown += "; " + d.err.Error()
		}
		p.Line(theme.Dim, "  "+shown)
	}
	if d.cursor.At >= len(rows) {
		return
	}
	row := rows[d.cursor.At]
	p.Rule("dynctl explain " + row.ID)
	d.explain(c, p, row)
}

// drawDecisions writes titles and rows into h lines; one line is a row without titles.
func drawDecisions(p *widget.Painter, rows []*feed.Decision, h, selected int) {
	wide := p.W >= 110
	rows = rows[:min(len(rows), max(h-1, 1))]
	// The names of ranks get what they need, within reason.
	rank := 8
	for _, d := range rows {
		rank = max(rank, 1+widget.Width(d.Decode.Chosen), 1+widget.Width(d.PrefillRank()))
	}
	rank = min(rank, max(14, p.W/6))
	clock, layout, request := 9, "15:04:05", 0
	if wide {
		clock, layout, request = 13, "15:04:05.000", 10
	}
	if p.W >= 150 {
		request = 20
	}
	if h > 1 {
		p.Put(theme.Title, "  ")
		p.Cell(theme.Title, "TIME", clock)
		p.Cell(theme.Title, "REQUEST"[:min(7, request)], request)
		p.Right(theme.Title, "ISL", 6)
		p.Right(theme.Title, "CACHED", 7)
		p.Right(theme.Title, "EFF", 6)
		p.Put(theme.Title, "  ")
		p.Cell(theme.Title, "PATH", 7)
		p.Cell(theme.Title, "DECODE", rank)
		p.Cell(theme.Title, "PREFILL", rank)
		if wide {
			p.Right(theme.Title, "MARGIN", 6)
			p.Right(theme.Title, "TTFT", 6)
		}
		p.Put(theme.Title, " ")
		title := "OUTCOME / WHY"
		if p.W-p.X() < len(title) {
			title = "OUTCOME"
		}
		p.Put(theme.Title, title)
		p.End()
	}
	for i, d := range rows {
		st, word := outcome(d)
		sev := map[theme.Style]feed.Severity{theme.Bad: feed.Error, theme.Warn: feed.Warn}[st]
		p.Select(i == selected)
		mark(p, i == selected, sev)
		p.Cell(theme.Dim, d.Time.Local().Format(layout), clock)
		if wide {
			id := cmp.Or(d.RequestID, d.ID)
			p.Cell(theme.Plain, p.Cut(id, request-1), request)
		}
		p.Right(theme.Plain, strconv.Itoa(d.Inputs.ISL), 6)
		p.Right(theme.Plain, strconv.Itoa(d.Predicted.CachedTokens), 7)
		p.Right(theme.Plain, strconv.Itoa(d.EffISL), 6)
		p.Put(theme.Plain, "  ")
		p.Cell(theme.Plain, cmp.Or(d.Path, "-"), 7)
		p.Cell(theme.Plain, p.Cut(cmp.Or(d.Decode.Chosen, "-"), rank-1), rank)
		p.Cell(theme.Plain, p.Cut(cmp.Or(d.PrefillRank(), "-"), rank-1), rank)
		if wide {
			p.Right(theme.Plain, widget.Rate(d.Margin().F()), 6)
			p.Right(theme.Plain, widget.Millis(d.TTFT().F()), 6)
		}
		p.Put(theme.Plain, " ")
		p.Put(st, word)
		p.Words(theme.Dim, " "+d.ReasonText)
		p.End()
	}
}

// outcome is how a request ended, in a word or two.
func outcome(d *feed.Decision) (theme.Style, string) {
	switch {
	case d.Outcome.SilentRecompute:
		return theme.Bad, "RECOMPUTED"
	case d.Live:
		return theme.Plain, "running"
	case d.Outcome.Cancelled:
		return theme.Plain, "client left"
	case d.Outcome.Status >= 500:
		return theme.Bad, "HTTP " + strconv.Itoa(d.Outcome.Status)
	case d.Outcome.Status >= 400:
		return theme.Warn, "HTTP " + strconv.Itoa(d.Outcome.Status)
	case d.Outcome.Error != "":
		return theme.Bad, "cut"
	}
	return theme.Good, "ok"
}

// explain draws the receipt of a row, or says why there is none yet.
func (d *decisions) explain(c *Ctx, p *widget.Painter, row *feed.Decision) {
	r := d.receipts[row.ID]
	if r == nil {
		text := "  loading the receipt"
		switch {
		case d.missing != "":
			text = "  " + d.missing
		case c.Frozen:
			text = "  the receipt was not loaded before the pause; go back to live data to load it"
		}
		p.Line(theme.Dim, text)
		return
	}
	lines := explainLines(r, p)
	h := c.H - p.Len()
	from := d.scroll.From(len(lines), h)
	more := len(lines) - from - h
	for i := from; i < len(lines) && i < from+h; i++ {
		if i == from+h-1 && more > 0 {
			text := "  %d more lines: enter gives the explanation the whole page"
			if d.full {
				text = "  %d more lines (j scrolls)"
			}
			p.Line(theme.Dim, fmt.Sprintf(text, more+1))
			break
		}
		l := lines[i]
		st := theme.Plain
		switch {
		case strings.HasPrefix(strings.TrimSpace(l), "> "):
			st = theme.Bold
		case strings.Contains(l, "excluded: "):
			st = theme.Dim
		case strings.Contains(l, "RANK") && strings.Contains(l, "COST"):
			st = theme.Title
		}
		if d.shift > 0 {
			l = cutLeft(l, d.shift)
		}
		p.Words(st, l)
		p.End()
	}
}

func cutLeft(s string, n int) string {
	for i := range s {
		if n == 0 {
			return s[i:]
		}
		n--
	}
	return ""
}

// explainLines is the text of dynctl explain with tables of its own, which fit narrow
// screens and have the load of the ranks where there is room.
func explainLines(r *receipt.Receipt, p *widget.Painter) []string {
	// Its own tables are not shown: they need no rows but those that reasons name.
	few := *r
	few.Decode.Candidates, few.Prefill.Candidates = named(&r.Decode), named(&r.Prefill)
	var b strings.Builder
	_ = few.Explain(&b) // a Builder takes everything
	var out []string
	type shown struct {
		*decision.Phase
		rows int // in the text
	}
	var phases []shown
	for i := range r.Earlier {
		e := &r.Earlier[i]
		phases = append(phases, shown{&e.Decode, len(e.Decode.Candidates)}, shown{&e.Prefill, len(e.Prefill.Candidates)})
	}
	phases = append(phases, shown{&r.Decode, len(few.Decode.Candidates)}, shown{&r.Prefill, len(few.Prefill.Candidates)})
	skip := 0
	for l := range strings.Lines(b.String()) {
		l = strings.TrimRight(l, "\n ")
		if skip > 0 {
			skip--
			continue
		}
		if strings.Contains(l, "RANK") && strings.Contains(l, "OVERLAP") && strings.Contains(l, "COST") {
			for len(phases) > 0 && phases[0].rows == 0 {
				phases = phases[1:]
			}
			if len(phases) > 0 {
				skip = phases[0].rows
				out = append(out, candidateTable(phases[0].Phase, p.W, &p.Th.Glyphs)...)
				phases = phases[1:]
				continue
			}
		}
		if l == "" && len(out) > 1 {
			continue
		}
		out = append(out, wrapHeaded(l, p.W-1)...)
	}
	return out
}

// named are the candidates that a phase's reason is made of, and one at least of any.
func named(p *decision.Phase) []decision.Candidate {
	var out []decision.Candidate
	for i := range p.Candidates {
		if c := &p.Candidates[i]; c.Rank == p.Chosen || c.Rank == p.RunnerUp {
			out = append(out, *c)
		}
	}
	if len(out) == 0 {
		return p.Candidates[:min(1, len(p.Candidates))]
	}
	return out
}

// wrapHeaded wraps a line that may begin with a title of 13 columns, which is kept.
func wrapHeaded(l string, w int) []string {
	if widget.Width(l) <= w || w < 30 || len(l) < 13 {
		return []string{l}
	}
	head, rest := l[:13], l[13:]
	var out []string
	for i, part := range Wrap(rest, w-13, "") {
		if i == 0 {
			out = append(out, head+part)
		} else {
			out = append(out, strings.Repeat(" ", 13)+part)
		}
	}
	return out
}

// narrowTerms is how many terms of a cost a narrow screen has room for; the others
// stand there as their sum, so that the row adds up.
const narrowTerms = 3

// candidateTable lists the candidates of a phase with the terms of their cost.
func candidateTable(ph *decision.Phase, w int, g *theme.Glyphs) []string {
	rank := 4
	for i := range ph.Candidates {
		rank = max(rank, widget.Width(ph.Candidates[i].Rank))
	}
	rank = min(rank, 28)
	terms := ph.ShownTerms()
	width := func(i int) int { return min(7, len(terms[i].Title)+2) }
	tiers := ph.Tiers()
	need := rank + 39 + 7*len(tiers.Titles()) // the other columns, and a short state
	for i := range terms {
		need += 1 + width(i)
	}
	wide := w >= need
	var others []decision.Term
	if !wide {
		n := max(1, narrowTerms-len(tiers.Titles()))
		terms, others = terms[:n], terms[n:]
	}
	value := func(term *decision.Term, c *decision.Candidate) float64 {
		v := *term.At(&c.Terms)
		if term.Credit {
			return 0 - v
		}
		return v
	}
	head := fmt.Sprintf("  %-*s %7s", rank, "RANK", "OVERLAP")
	for _, title := range tiers.Titles() {
		head += fmt.Sprintf(" %6s", title)
	}
	for i := range terms {
		head += fmt.Sprintf(" %*s", width(i), terms[i].Title)
	}
	if wide {
		head += fmt.Sprintf(" %5s %5s", "RUN", "KV%")
	} else {
		head += fmt.Sprintf(" %7s", "OTHERS")
	}
	head += fmt.Sprintf(" %7s  STATE", "COST")
	out := []string{head}
	for i := range ph.Candidates {
		c := &ph.Candidates[i]
		sign, state := " ", ""
		switch {
		case c.Rank == ph.Chosen:
			sign, state = ">", "chosen"
		case c.Excluded != "":
			state = "excluded: " + c.Excluded
		case c.Rank == ph.RunnerUp:
			state = fmt.Sprintf("runner-up, +%.2f", ph.MarginBlocks)
		}
		name := c.Rank
		if widget.Width(name) > rank {
			name = name[:rank-1] + g.Ellipsis
		}
		overlap := strconv.Itoa(c.OverlapBlocks)
		if c.CacheUnknown {
			overlap = "?" // it may hold some: its KV events are not trusted now
		}
		l := fmt.Sprintf("%s %-*s %7s", sign, rank, name, overlap)
		for _, n := range tiers.Cells(c.Tiers) {
			l += fmt.Sprintf(" %6s", n)
		}
		for k := range terms {
			l += fmt.Sprintf(" %*.1f", width(k), value(&terms[k], c))
		}
		if wide {
			kv := "-"
			if c.HasLoad && c.KVUsage >= 0 {
				kv = fmt.Sprintf("%.0f", 100*c.KVUsage)
			}
			l += fmt.Sprintf(" %5d %5s", c.ActiveRequests, kv)
		} else {
			sum := 0.0
			for k := range others {
				sum += value(&others[k], c)
			}
			l += fmt.Sprintf(" %7.1f", sum)
		}
		out = append(out, l+fmt.Sprintf(" %7.2f  %s", c.Cost, state))
	}
	return out
}
