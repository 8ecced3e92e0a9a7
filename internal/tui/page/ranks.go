package page

import (
	"fmt"
	"math"
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// rankPage is what the views with the table of ranks have in common.
type rankPage struct {
	still
	table *rankTable
}

func (o *rankPage) Filter() string { return o.table.filter.Text }

func (o *rankPage) SetFilter(_ *Ctx, text string) (tea.Cmd, error) {
	f, err := feed.RankFilter.Parse(text)
	if err == nil {
		o.table.filter, o.table.dirty = f, true
	}
	return nil, err
}

func (o *rankPage) Order(c *Ctx) string {
	t := o.table
	s := orders[t.order].name
	if t.reverse {
		s += " " + c.Th.Up
	}
	if t.faults {
		s += " faults"
	}
	if t.noIdle {
		s += " busy"
	}
	return s
}

func (o *rankPage) SetOrder(name string) bool { return o.table.sortBy(name) }

func (o *rankPage) Row(c *Ctx) (string, string) {
	k := o.table.Current(c.R)
	if k == nil {
		return "", ""
	}
	return k.Label, fmt.Sprintf("%s %s %s run=%s wait=%s kv=%s%% hit=%s%% active=%d index=%d events=%s", k.Label, k.Role, k.Status,
		widget.Count(k.Running().F()), widget.Count(k.Waiting().F()), widget.Percent(k.KVUsage().F()), widget.Percent(k.HitShare.F()), k.ActiveRequests, k.IndexBlocks, k.Feed.State)
}

func (o *rankPage) Click(c *Ctx, x, line int) { o.table.clickAt(c.R, x, line) }

// rankTable is the table of ranks that the overview and the workers page
// share: one cursor, one filter, one order.
type rankTable struct {
	cursor  cursor
	filter  feed.Filter[*feed.Rank]
	order   int // in orders
	reverse bool
	faults  bool
	noIdle  bool
	wide    bool
	plain   bool // without cursor
	heat    int  // which of heats stands for the rows, from 1; 0 for none

	heads []headAt // where the titles stand, for clicks

	// folds says whether workers are folded, and unlike which of them are not so.
	folds  bool
	unlike map[string]bool

	from  *feed.Router // what rows were made of
	ranks []*feed.Rank // those that the filter leaves, none folded
	rows  []*feed.Rank
	dirty bool
}

// headAt is a title's place in its line, and the order that it stands for.
type headAt struct {
	from, to int
	order    string
}

// clickAt moves to a row, or sorts by the title that was clicked; a second click
// turns the order round.
func (t *rankTable) clickAt(r *feed.Router, x, line int) {
	if line != t.cursor.first-1 {
		t.cursor.Click(line, len(t.Rows(r)), t.keyAt)
		return
	}
	for _, h := range t.heads {
		if x < h.from || x >= h.to || h.order == "" {
			continue
		}
		if orders[t.order].name == h.order {
			t.reverse, t.dirty = !t.reverse, true
		} else {
			t.sortBy(h.order)
		}
	}
}

// column is a column of the rank table.
type column struct {
	title string
	help  string // what it shows
	order string // of orders, to sort by it; empty where there is none
	w     int
	left  bool
	wide  bool // only shown in the wide form or with room
	brief bool // not shown in the wide form without room
	// has reports whether a rank has any of what the column shows; one that none has is
	// left out, where this is not nil.
	has  func(k *feed.Rank) bool
	cell func(p *widget.Painter, k *feed.Rank, w int)
}

func figure(f func(k *feed.Rank) string) func(*widget.Painter, *feed.Rank, int) {
	return func(p *widget.Painter, k *feed.Rank, w int) { p.Right(theme.Plain, f(k), w) }
}

// speed is a figure that a rank can be slow at.
func speed(name string, of func(k *feed.Rank) feed.Num) func(*widget.Painter, *feed.Rank, int) {
	return func(p *widget.Painter, k *feed.Rank, w int) {
		st := theme.Plain
		if k.SlowAt() == name {
			st = theme.Warn
		}
		p.Right(st, widget.Millis(of(k).F()), w)
	}
}

// tierColumn is the column of a rank's blocks in a tier outside the device.
func tierColumn(title, help string, of func(t *route.Tiers) uint32) column {
	return column{title: title, help: help, w: 6, has: func(k *feed.Rank) bool { return of(&k.Feed.Tiers) > 0 }, cell: figure(func(k *feed.Rank) string {
		if !k.Feed.TiersReported {
			return widget.Unknown
		}
		return widget.Count(float64(of(&k.Feed.Tiers)))
	})}
}

// moveColumn is the column of streams that continued elsewhere.
func moveColumn(title, help string, of func(m *feed.Moves) feed.Num) column {
	return column{
		title: title, help: help, w: len(title), wide: true, has: func(k *feed.Rank) bool { m := k.Streams(); return !m.None() },
		cell: figure(func(k *feed.Rank) string { m := k.Streams(); return widget.Count(of(&m).F()) }),
	}
}

// Moved says in one line which streams of a rank continued elsewhere, "" for none.
func Moved(k *feed.Rank) string {
	m := k.Streams()
	if m.None() {
		return ""
	}
	return fmt.Sprintf("streams: moved away %s, moved here %s, wait to move %s", widget.Count(m.Away.F()), widget.Count(m.Onto.F()), widget.Count(m.Waiting.F()))
}

// columns in the order of their importance; the name comes before them all.
var columns = []column{
	{title: "ST", help: "state, with the words below", order: "worst", w: 6, left: true, cell: func(p *widget.Painter, k *feed.Rank, w int) { p.Cell(severityStyle(k.Severity), k.Status, w) }},
	{title: "RUN", help: "requests running in the engine", order: "run", w: 4, cell: figure(func(k *feed.Rank) string { return widget.Count(k.Running().F()) })},
	{title: "WAIT", help: "requests waiting in the engine", order: "wait", w: 4, cell: func(p *widget.Painter, k *feed.Rank, w int) {
		st := theme.Plain
		if k.Waiting() >= 1 {
			st = theme.Warn
		}
		p.Right(st, widget.Count(k.Waiting().F()), w)
	}},
	{title: "KV%", help: "share of its KV cache in use", order: "kv", w: 5, cell: func(p *widget.Painter, k *feed.Rank, w int) { p.Right(kvStyle(k), widget.Percent(k.KVUsage().F()), w) }},
	{title: "KV", help: "the same as a bar", w: 10, left: true, brief: true, cell: func(p *widget.Painter, k *feed.Rank, w int) {
		st := theme.Bar
		if k.KVUsage() >= 0.9 {
			st = theme.Warn
		}
		p.Bar(st, k.KVUsage().F(), w)
	}},
	tierColumn("CPU", "blocks in the host's memory", func(t *route.Tiers) uint32 { return t.CPU }),
	tierColumn("DISK", "blocks on its disk", func(t *route.Tiers) uint32 { return t.Disk }),
	tierColumn("REMOTE", "blocks in a remote store", func(t *route.Tiers) uint32 { return t.Remote }),
	{title: "HIT%", help: "prompt tokens found in its cache", order: "hit", w: 5, cell: figure(func(k *feed.Rank) string { return widget.Percent(k.HitShare.F()) })},
	{title: "TTFT", help: "median time to the first token", order: "ttft", w: 6, cell: speed("TTFT", func(k *feed.Rank) feed.Num { return feed.Figure(k.TTFT) })},
	{title: "ITL", help: "median time between tokens", order: "itl", w: 6, cell: speed("ITL", func(k *feed.Rank) feed.Num { return feed.Figure(k.ITL) })},
	{title: "OUT t/s", help: "tokens out a second, by the router", order: "out", w: 7, cell: figure(func(k *feed.Rank) string { return widget.Count(feed.Figure(k.OutputRate).F()) })},
	{title: "IN t/s", help: "prompt tokens in a second", order: "in", w: 6, cell: figure(func(k *feed.Rank) string { return widget.Count(k.PromptRate.F()) })},
	{title: "REQ/s", help: "requests a second", order: "req", w: 6, cell: figure(func(k *feed.Rank) string { return widget.Rate(k.RequestRate.F()) })},
	{title: "ACT", help: "requests that the router has there", order: "act", w: 4, cell: figure(func(k *feed.Rank) string { return widget.Count(float64(k.ActiveRequests)) })},
	{title: "PREFILL", help: "prompt tokens queued or computing", order: "prefill", w: 7, brief: true, cell: figure(func(k *feed.Rank) string { return widget.Count(float64(k.PrefillTokens)) })},
	{title: "INDEX", help: "its blocks in the router's index", order: "index", w: 6, cell: figure(func(k *feed.Rank) string { return widget.Count(float64(k.IndexBlocks)) })},
	{title: "EV/s", help: "KV events a second", order: "events", w: 6, cell: figure(func(k *feed.Rank) string { return widget.Rate(k.EventRate.F()) })},
	{title: "EVENTS", help: "state of its KV events", w: 10, left: true, brief: true, cell: func(p *widget.Painter, k *feed.Rank, w int) {
		st := theme.Plain
		if k.Feed.State != "none" && !k.Feed.Trusted {
			st = theme.Warn
		}
		p.Cell(st, k.Feed.State, w)
	}},
	moveColumn("MOVED AWAY", "streams that continued elsewhere", func(m *feed.Moves) feed.Num { return m.Away }),
	moveColumn("MOVED HERE", "streams continued here", func(m *feed.Moves) feed.Num { return m.Onto }),
	moveColumn("WAIT TO MOVE", "streams that wait to move here", func(m *feed.Moves) feed.Num { return m.Waiting }),
	{title: "EVAGE", help: "time since its last KV event", w: 6, wide: true, cell: figure(func(k *feed.Rank) string { return widget.Seconds(k.FeedAge.F()) })},
	{title: "DECBLK", help: "blocks of answers in progress", w: 6, wide: true, cell: figure(func(k *feed.Rank) string { return widget.Count(float64(k.DecodeBlocks)) })},
	{title: "CAPACITY", help: "blocks of its KV cache", w: 8, wide: true, cell: figure(func(k *feed.Rank) string { return widget.Known(k.CapacityBlock) })},
	{title: "XFER t/s", help: "tokens a second moved to it", w: 8, wide: true, cell: figure(func(k *feed.Rank) string { return widget.Count(k.ExternalHit.F()) })},
	{title: "GAPS", help: "gaps in its KV events", w: 5, wide: true, cell: figure(func(k *feed.Rank) string { return widget.Count(float64(k.Feed.Gaps)) })},
	{title: "LOST", help: "event batches lost for good", w: 5, wide: true, cell: figure(func(k *feed.Rank) string { return widget.Count(float64(k.Feed.Lost)) })},
	{title: "LIFE%", help: "prefix hits since the engine's start", w: 5, wide: true, cell: figure(func(k *feed.Rank) string { return widget.Percent(k.LifeHit.F()) })},
	{title: "DIFF", help: "engine's requests less the router's", w: 5, wide: true, cell: figure(func(k *feed.Rank) string { return signed(k.RequestDiff) })},
	{title: "MODEL", help: "first model that it serves", w: 20, left: true, wide: true, cell: func(p *widget.Painter, k *feed.Rank, w int) { p.Cell(theme.Plain, k.Model, w) }},
}

func kvStyle(k *feed.Rank) theme.Style {
	if k.KVUsage() >= 0.9 {
		return theme.Warn
	}
	return theme.Plain
}

func signed(n feed.Num) string {
	if n > 0 {
		return "+" + widget.Count(n.F())
	}
	return widget.Count(n.F())
}

type order struct {
	name  string
	value func(*feed.Rank) float64 // greatest first; nil orders by name
}

var orders = []order{
	{"worst", func(*feed.Rank) float64 { return 0 }},
	{"rank", nil},
	{"kv", func(k *feed.Rank) float64 { return k.KVUsage().F() }},
	{"wait", func(k *feed.Rank) float64 { return k.Waiting().F() }},
	{"run", func(k *feed.Rank) float64 { return k.Running().F() }},
	{"hit", func(k *feed.Rank) float64 { return k.HitShare.F() }},
	{"in", func(k *feed.Rank) float64 { return k.PromptRate.F() }},
	{"out", func(k *feed.Rank) float64 { return feed.Figure(k.OutputRate).F() }},
	{"ttft", func(k *feed.Rank) float64 { return feed.Figure(k.TTFT).F() }},
	{"itl", func(k *feed.Rank) float64 { return feed.Figure(k.ITL).F() }},
	{"req", func(k *feed.Rank) float64 { return k.RequestRate.F() }},
	{"act", func(k *feed.Rank) float64 { return float64(k.ActiveRequests) }},
	{"prefill", func(k *feed.Rank) float64 { return float64(k.PrefillTokens) }},
	{"index", func(k *feed.Rank) float64 { return float64(k.IndexBlocks) }},
	{"events", func(k *feed.Rank) float64 { return k.EventRate.F() }},
}

// Orders lists the names of the orders of ranks.
func Orders() []string {
	out := make([]string, len(orders))
	for i := range orders {
		out[i] = orders[i].name
	}
	return out
}

// orderOf is the place of a name in orders, -1 for none.
func orderOf(name string) int {
	return slices.IndexFunc(orders, func(o order) bool { return o.name == name })
}

// SortRanks orders ranks by a name of Orders, "worst" leaving them as they
// are. It reports whether there is such an order.
func SortRanks(ranks []*feed.Rank, name string, reverse bool) bool {
	i := orderOf(name)
	if i < 0 {
		return false
	}
	if o := orders[i]; i > 0 {
		slices.SortStableFunc(ranks, func(a, b *feed.Rank) int {
			if o.value == nil {
				return strings.Compare(a.Label, b.Label)
			}
			x, y := o.value(a), o.value(b)
			switch {
			case math.IsNaN(x) && math.IsNaN(y) || x == y:
				return strings.Compare(a.Label, b.Label)
			case math.IsNaN(x):
				return 1
			case math.IsNaN(y) || x > y:
				return -1
			}
			return 1
		})
	}
	if reverse {
		slices.Reverse(ranks)
	}
	return true
}

// Rows are the ranks that the filter leaves, or a worker for those that are folded, in
// order.
func (t *rankTable) Rows(r *feed.Router) []*feed.Rank {
	if t.from == r && !t.dirty {
		return t.rows
	}
	t.from, t.dirty = r, false
	t.ranks = t.ranks[:0]
	for i := range r.Ranks {
		k := &r.Ranks[i]
		if t.faults && k.Severity == feed.OK || t.noIdle && k.ActiveRequests == 0 && !(k.Running() > 0) && !(k.RequestRate > 0) || !t.filter.Match(k) {
			continue
		}
		t.ranks = append(t.ranks, k)
	}
	t.rows = t.fold(r)
	SortRanks(t.rows, orders[t.order].name, t.reverse)
	t.cursor.Sync(len(t.rows), t.keyAt)
	return t.rows
}

// folded reports whether a worker's ranks are one row.
func (t *rankTable) folded(worker string) bool { return t.folds != t.unlike[worker] }

// fold puts one row in the place of a folded worker's first rank. A worker of one rank
// is that rank.
func (t *rankTable) fold(r *feed.Router) []*feed.Rank {
	rows := t.rows[:0]
	if !t.folds && len(t.unlike) == 0 {
		return append(rows, t.ranks...)
	}
	dp := map[string]int{}
	for i := range r.Ranks {
		dp[r.Ranks[i].Worker]++
	}
	of := map[string][]*feed.Rank{}
	for _, k := range t.ranks {
		of[k.Worker] = append(of[k.Worker], k)
	}
	for _, k := range t.ranks {
		switch {
		case dp[k.Worker] < 2 || !t.folded(k.Worker):
			rows = append(rows, k)
		case of[k.Worker][0] == k:
			v := feed.Fold(of[k.Worker])
			v.Of = dp[k.Worker]
			rows = append(rows, &v)
		}
	}
	return rows
}

// setFold folds or unfolds the worker under the cursor, which stays with it.
func (t *rankTable) setFold(r *feed.Router, on bool) {
	k := t.Current(r)
	if k == nil || t.folded(k.Worker) == on {
		return
	}
	t.toggle(k.Worker)
	t.keep(r, k)
}

// toggle folds a worker, or unfolds it.
func (t *rankTable) toggle(worker string) {
	if t.unlike[worker] {
		delete(t.unlike, worker)
		return
	}
	if t.unlike == nil {
		t.unlike = map[string]bool{}
	}
	t.unlike[worker] = true
}

// foldAll folds every worker, or where all are folded none.
func (t *rankTable) foldAll(r *feed.Router) {
	k := t.Current(r)
	t.folds, t.unlike = !t.folds || len(t.unlike) > 0, nil
	t.keep(r, k)
}

// keep leaves the cursor with a row's worker after it was folded or unfolded.
func (t *rankTable) keep(r *feed.Router, k *feed.Rank) {
	t.dirty = true
	if k == nil || t.cursor.Key == "" {
		return
	}
	t.cursor.Key = ""
	for i, row := range t.Rows(r) {
		if row.Worker == k.Worker {
			t.cursor.At, t.cursor.Key = i, row.Label
			return
		}
	}
}

// reveal puts the cursor on a rank, whose worker is unfolded.
func (t *rankTable) reveal(r *feed.Router, label string) {
	i := slices.IndexFunc(r.Ranks, func(k feed.Rank) bool { return k.Label == label })
	if t.cursor.Key, t.dirty = label, true; i >= 0 {
		if w := r.Ranks[i].Worker; t.folded(w) {
			t.toggle(w)
		}
	}
	t.Rows(r)
}

// name is what stands for a row in its first column.
func name(k *feed.Rank) string {
	switch {
	case k.Folded == 0:
		return k.Label
	case k.Folded < k.Of:
		return fmt.Sprintf("%s (%d of %d)", k.Label, k.Folded, k.Of)
	}
	return fmt.Sprintf("%s (%d)", k.Label, k.Folded)
}

func (t *rankTable) keyAt(i int) string { return t.rows[i].Label }

// Current is the rank under the cursor; nil when there is none.
func (t *rankTable) Current(r *feed.Router) *feed.Rank {
	rows := t.Rows(r)
	if t.cursor.At >= len(rows) {
		return nil
	}
	return rows[t.cursor.At]
}

// Act does what a key asks for, and reports whether it knew it.
func (t *rankTable) Act(r *feed.Router, a keys.Action) bool {
	rows := t.Rows(r)
	switch a {
	case keys.Sort:
		t.order = (t.order + 1) % len(orders)
		t.reverse = false
	case keys.Reverse:
		t.reverse = !t.reverse
	case keys.Faults:
		t.faults = !t.faults
	case keys.Idle:
		t.noIdle = !t.noIdle
	case keys.Heat:
		t.heat = (t.heat + 1) % (len(heats) + 1)
	case keys.Wide:
		t.wide = !t.wide
	case keys.Left, keys.Right:
		t.setFold(r, a == keys.Left)
	case keys.FoldAll:
		t.foldAll(r)
	default:
		return t.cursor.Move(a, len(rows), t.keyAt)
	}
	t.dirty = true
	return true
}

// PlainRanks draws all ranks, in the order that they have, without a cursor.
func PlainRanks(r *feed.Router, p *widget.Painter) {
	t := rankTable{plain: true}
	t.Draw(r, p, len(r.Ranks)+1)
}

// sortBy takes an order of Orders over, and reports whether there is such an order.
func (t *rankTable) sortBy(name string) bool {
	i := orderOf(name)
	if i >= 0 {
		t.order, t.reverse, t.dirty = i, false, true
	}
	return i >= 0
}

// Draw writes the header and the visible rows into h lines.
func (t *rankTable) Draw(r *feed.Router, p *widget.Painter, h int) {
	rows := t.Rows(r)
	if t.heat > 0 && len(rows) > 0 {
		t.heads, t.cursor.first, t.cursor.rows = t.heads[:0], 0, 0 // nothing to click
		drawHeat(p, &heats[t.heat-1], slices.Clone(t.ranks), h)
		return
	}
	width := 11
	for _, k := range rows {
		width = max(width, widget.Width(name(k)))
	}
	width = min(width, max(14, p.W/4))
	role := 1
	if p.W >= 100 {
		role = 10
	}
	room := p.W - 2 - width - 1 - role
	show := make([]*column, 0, len(columns))
	for i := range columns {
		c := &columns[i]
		if t.wide && c.brief && p.W < 160 {
			continue // it gives way to more figures
		}
		if c.has != nil && !slices.ContainsFunc(rows, c.has) {
			continue
		}
		if room < c.w+1 || c.wide && !t.wide && p.W < 160 {
			break
		}
		room -= c.w + 1
		show = append(show, c)
	}
	// What is left makes the bar longer.
	extra := max(0, min(room, 10))

	t.heads = t.heads[:0]
	head := func(title, order string, w int, left bool) {
		t.heads = append(t.heads, headAt{p.X(), p.X() + w, order})
		if order != "" && orders[t.order].name == order {
			sign := p.Th.Down
			if t.reverse {
				sign = p.Th.Up
			}
			if widget.Width(title) >= w {
				title = title[:w-1]
			}
			title += sign
		}
		if left {
			p.Cell(theme.Title, title, w)
		} else {
			p.Right(theme.Title, title, w)
		}
	}
	p.Put(theme.Title, "  ")
	head("WORKER/RANK", "rank", width, true)
	p.Put(theme.Title, " ")
	p.Cell(theme.Title, "ROLE"[:min(4, max(role, 1))], role)
	for _, c := range show {
		w := c.w
		if c.title == "KV" {
			w += extra
		}
		p.Put(theme.Title, " ")
		head(c.title, c.order, w, c.left)
	}
	p.End()
	from, to := t.cursor.Window(len(rows), p.Len(), h-1)
	for i := from; i < to; i++ {
		k := rows[i]
		selected := i == t.cursor.At && !t.plain
		p.Select(selected)
		mark(p, selected, k.Severity)
		p.Cell(theme.Plain, name(k), width)
		p.Put(theme.Plain, " ")
		text := k.Role
		if role == 1 && text != "" {
			text = strings.ToUpper(text[:1])
		}
		p.Cell(theme.Dim, text, role)
		for _, c := range show {
			w := c.w
			if c.title == "KV" {
				w += extra
			}
			p.Put(theme.Plain, " ")
			c.cell(p, k, w)
		}
		p.End()
	}
	if len(rows) == 0 {
		why := "no ranks: the router has no workers yet"
		switch {
		case len(r.Ranks) > 0:
			why = "no rank fits the filter (esc clears it)"
		case r.Link == feed.Waiting:
			why = "waiting for the router's first answer"
		case r.Link == feed.Down:
			why = "the router does not answer"
		}
		p.Line(theme.Dim, "  "+why)
	}
}
