package page

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

func (x *radix) Draw(c *Ctx, p *widget.Painter) {
	r, ix := c.R, &c.R.Index
	block := max(r.BlockSizeTokens, 1)
	p.Put(theme.Bold, "  "+x.crumbs())
	whole := fmt.Sprintf("index %s blocks in %s runs, %s, %s lookups/s, +%s -%s blk/s", widget.Count(feed.Reported(r, ix.Blocks).F()), widget.Count(feed.Reported(r, ix.Nodes).F()), widget.Bytes(feed.Reported(r, ix.Bytes).F()),
		widget.Rate(r.LookupRate.F()), widget.Rate(r.StoredRate.F()), widget.Rate(r.RemovedRate.F()))
	if p.X()+3+widget.Width(whole) > c.W { // a line of its own
		p.End()
		whole = "  " + whole
	} else {
		whole = "   " + whole
	}
	p.Line(theme.Dim, whole)
	name := min(46, max(24, c.W-84-len(c.R.Ranks)))
	columns := x.columns(c, c.W-2-name)
	p.Put(theme.Title, "  ")
	p.Cell(theme.Title, "PREFIX", name)
	for _, col := range columns {
		p.Put(theme.Title, " ")
		if col.draw != nil {
			p.Cell(theme.Title, col.title, col.w)
		} else {
			p.Right(theme.Title, col.title, col.w)
		}
	}
	p.End()

	detail := 0
	if c.H >= 16 && len(x.rows) > 0 {
		detail = 5
	}
	h := c.H - p.Len() - detail
	from, to := x.cursor.Window(len(x.rows), p.Len(), h)
	for i := from; i < to; i++ {
		x.drawRow(p, i, name, block, columns)
	}
	if len(x.rows) == 0 {
		text := "loading"
		switch z := x.tree.zoom; {
		case z.err != "":
			text = z.err
		case z.loaded && x.rank+strconv.Itoa(x.depth) != "0":
			text = "nothing in the index fits the filter (esc clears it)"
		case z.loaded:
			text = "the index is empty here: no KV events, or nothing was cached yet"
		case c.Frozen:
			text = "data stands still: the tree is loaded from the live index only"
		}
		p.Line(theme.Dim, "  "+text)
		return
	}
	p.Fill(c.H - detail)
	if detail > 0 {
		x.drawDetail(c, p, block)
		p.Fill(c.H)
	}
}

// crumbs is the way from the root to the zoom.
func (x *radix) crumbs() string {
	if x.flat {
		return "most used runs"
	}
	s := "root"
	path := x.tree.zoom.path()
	if len(path) > 5 {
		s += " > .."
		path = path[len(path)-5:]
	}
	for _, k := range path {
		s += " > " + k.label()
	}
	return s
}

// treeColumn is a column behind the prefix.
type treeColumn struct {
	title string
	w     int
	cell  func(r *radixRow) string             // aligned right
	draw  func(p *widget.Painter, r *radixRow) // in the place of cell
}

// columns are those that there is room for: tokens, subtree, share, hits and ranks always.
func (x *radix) columns(c *Ctx, room int) []treeColumn {
	room -= 1 + 7 + 1 + 7 + 1 + 5 + 1 + 7 + 1 + 3
	fits := func(w int) bool {
		if room < w+1 {
			return false
		}
		room -= w + 1
		return true
	}
	ranks, block, all := maskOrder(c.R), max(c.R.BlockSizeTokens, 1), c.R.Index.Blocks
	bar := fits(10)
	mask := x.mask && len(ranks) > 0 && len(ranks) <= 64 && fits(len(ranks))
	list := []treeColumn{
		{title: "TOKENS", w: 7, cell: func(r *radixRow) string { return widget.Count(float64(r.k.n.LengthBlocks * block)) }},
		{title: "SUBTREE", w: 7, cell: func(r *radixRow) string { return atLeast(widget.Count(float64(r.k.n.Blocks)), r.k.n.Exact) }},
	}
	if bar {
		list = append(list, treeColumn{w: 10, draw: func(p *widget.Painter, r *radixRow) { p.Bar(theme.Bar, r.part(all), 10) }})
	}
	list = append(list,
		treeColumn{title: "%PAR", w: 5, cell: func(r *radixRow) string { return widget.Percent(r.part(all)) }},
		treeColumn{title: "HITS/s", w: 7, cell: func(r *radixRow) string { return atLeast(widget.Rate(r.k.rate), r.k.n.HitsExact) }},
		treeColumn{title: "RK", w: 3, cell: func(r *radixRow) string { return strconv.Itoa(r.k.n.Ranks) }},
	)
	if fits(6) {
		list = append(list, treeColumn{title: "RUNS", w: 6, cell: func(r *radixRow) string {
			return atLeast(widget.Count(float64(r.k.n.Children)), r.k.n.Exact || r.k.n.Children == 0)
		}})
	}
	if fits(8) {
		list = append(list, treeColumn{title: "HIT t/s", w: 8, cell: func(r *radixRow) string {
			return atLeast(widget.Count(r.k.rate*float64(r.k.n.LengthBlocks*block)), r.k.n.HitsExact)
		}})
	}
	if fits(6) {
		list = append(list, treeColumn{title: "AGE", w: 6, cell: func(r *radixRow) string { return r.k.age() }})
		if fits(8) {
			list = append(list, treeColumn{title: "EVICT/s", w: 8, cell: func(r *radixRow) string { return atLeast(widget.Rate(r.k.lost), false) }})
		}
	}
	if mask {
		list = append(list, treeColumn{title: maskTitle(ranks), w: len(ranks), draw: func(p *widget.Painter, r *radixRow) {
			for _, label := range ranks {
				if slices.Contains(r.k.n.RankLabels, label) {
					p.Put(theme.Plain, p.Th.Held)
				} else {
					p.Put(theme.Plain, p.Th.NotHeld)
				}
			}
		}})
	}
	return list
}

// part is the share of the run's subtree in that of its parent, or in the whole index.
func (r *radixRow) part(all int64) float64 {
	whole := float64(all)
	if r.k.parent != nil && r.k.parent.parent != nil {
		whole = float64(r.k.parent.n.Blocks)
	}
	if whole <= 0 {
		return math.NaN()
	}
	return math.Min(1, float64(r.k.n.Blocks)/whole)
}

func (x *radix) drawRow(p *widget.Painter, i, name, block int, columns []treeColumn) {
	r := x.rows[i]
	g := &p.Th.Glyphs
	p.Select(i == x.cursor.At)
	mark(p, i == x.cursor.At, feed.OK)
	end := p.X() + name
	p.Put(theme.Dim, strings.Repeat(g.Pipe, min(r.depth, name/4)))
	if r.more > 0 {
		text := fmt.Sprintf("%s %s more (enter loads them)", g.Ellipsis, widget.Count(float64(r.more)))
		if r.k.limit >= maxLimit {
			text = fmt.Sprintf("%s %s more: narrow with rank: or depth>", g.Ellipsis, widget.Count(float64(r.more)))
		}
		p.Put(theme.Dim, text)
		p.End()
		return
	}
	n := &r.k.n
	sign := g.Leaf
	switch {
	case r.k.open:
		sign = g.Open
	case n.Children > 0 && !x.flat:
		sign = g.Closed
	}
	p.Put(theme.Accent, sign+" ")
	p.Put(theme.Plain, p.Cut(r.k.label()+"..", max(end-p.X(), 0)))
	var more []string
	if n.DepthBlocks > 0 {
		more = append(more, "at "+widget.Count(float64(n.DepthBlocks*block)))
	}
	if r.k.asking && !r.k.loaded {
		more = append(more, "loading")
	}
	if r.k.err != "" {
		more = append(more, r.k.err)
	}
	if room := end - p.X() - 1; len(more) > 0 && room > widget.Width(g.Ellipsis) {
		p.Put(theme.Plain, " ")
		p.Put(theme.Plain, p.FitWords(strings.Join(more, " "), room))
	}
	p.To(end)
	for _, col := range columns {
		p.Put(theme.Plain, " ")
		if col.draw != nil {
			col.draw(p, &r)
		} else {
			p.Right(theme.Plain, col.cell(&r), col.w)
		}
	}
	p.End()
}

// atLeast marks a figure that is a lower bound; of none at all nothing is known.
func atLeast(figure string, exact bool) string {
	switch {
	case exact || figure == widget.Unknown:
		return figure
	case figure == "0":
		return widget.Unknown
	}
	return ">" + figure
}

// maskOrder lists all ranks, prefill first, then by name.
func maskOrder(r *feed.Router) []string {
	type item struct{ role, label string }
	list := make([]item, 0, len(r.Ranks))
	for i := range r.Ranks {
		list = append(list, item{r.Ranks[i].Role, r.Ranks[i].Label})
	}
	slices.SortFunc(list, func(a, b item) int {
		if a.role != b.role {
			return strings.Compare(b.role, a.role) // prefill before decode before aggregated
		}
		return strings.Compare(a.label, b.label)
	})
	out := make([]string, len(list))
	for i := range list {
		out[i] = list[i].label
	}
	return out
}

// maskTitle marks the first rank of every worker with the worker's initial.
func maskTitle(ranks []string) string {
	var b strings.Builder
	last := ""
	for _, label := range ranks {
		w, _, _ := strings.Cut(label, "/")
		if w != last {
			last = w
			head := w[:min(1, len(w))]
			b.WriteString(strings.ToUpper(head))
			continue
		}
		b.WriteByte(' ')
	}
	return b.String()
}

// drawDetail shows all of the run under the cursor.
func (x *radix) drawDetail(c *Ctx, p *widget.Painter, block int) {
	r := x.rows[x.cursor.At]
	if r.more > 0 {
		p.Rule("not loaded")
		p.Line(theme.Plain, fmt.Sprintf("  %d of %d children are loaded, those with most %s", len(r.k.kids), r.k.total, x.Order(c)))
		return
	}
	n := &r.k.n
	p.Rule("run " + n.Local)
	place, figures := x.about(r.k, block)
	p.Line(theme.Plain, "  "+place)
	p.Line(theme.Plain, "  "+figures)
	held := fmt.Sprintf("  held by %d: %s", n.Ranks, strings.Join(n.RankLabels, " "))
	if n.Ranks > len(n.RankLabels) {
		held += fmt.Sprintf(" and %d more", n.Ranks-len(n.RankLabels))
	}
	if n.Ranks == 1 {
		held += fmt.Sprintf("   only copy: losing it costs %s tokens of prefill", widget.Count(float64((n.DepthBlocks+n.LengthBlocks)*block)))
	}
	p.Line(theme.Plain, held)
}

// about is where a run stands, and its figures.
func (x *radix) about(k *node, block int) (place, figures string) {
	n := &k.n
	if !x.flat {
		var path []string
		for _, k := range k.path() {
			path = append(path, k.label())
		}
		place = "path " + strings.Join(path, " > ") + "   "
	}
	end := n.DepthBlocks + n.LengthBlocks
	place += fmt.Sprintf("blocks %d to %d, %s tokens from the start", n.DepthBlocks, end, widget.Count(float64(end*block)))
	return place, fmt.Sprintf("hits %s   runs below %s   longest copy %d of %d blocks   seen for %s   id %s",
		atLeast(strconv.FormatUint(n.Hits, 10), n.HitsExact), atLeast(strconv.Itoa(n.Children), n.Exact), n.Longest, n.LengthBlocks, k.age(), n.ID)
}
