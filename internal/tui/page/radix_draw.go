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
	p.Words(theme.Dim, fmt.Sprintf("   index %s blocks in %s runs, %s, %s lookups/s, +%s -%s blk/s", widget.Count(feed.Reported(r, ix.Blocks).F()), widget.Count(feed.Reported(r, ix.Nodes).F()), widget.Bytes(feed.Reported(r, ix.Bytes).F()),
		widget.Rate(r.LookupRate.F()), widget.Rate(r.StoredRate.F()), widget.Rate(r.RemovedRate.F())))
	p.End()
	ranks := maskOrder(c.R)
	mask := len(ranks)
	name := min(46, max(24, c.W-84-mask))
	// Prefix, tokens, subtree, bar, share, hits, ranks always; the rest with room.
	fixed := 2 + name + 1 + 7 + 1 + 7 + 1 + 5 + 1 + 7 + 1 + 3
	room := c.W - fixed
	bar := 0
	if room >= 11 {
		bar = 10
		room -= 11
	}
	showMask := x.mask && mask > 0 && mask <= 64 && room >= mask+1
	if showMask {
		room -= mask + 1
	}
	showKids := room >= 7
	if showKids {
		room -= 7
	}
	show := columnsOf{kids: showKids, mask: showMask, saved: room >= 9}
	if show.saved {
		room -= 9
	}
	if show.age = room >= 7; show.age {
		room -= 7
	}
	show.lost = show.age && room >= 9

	p.Put(theme.Title, "  ")
	p.Cell(theme.Title, "PREFIX", name)
	p.Put(theme.Title, " ")
	p.Right(theme.Title, "TOKENS", 7)
	p.Put(theme.Title, " ")
	p.Right(theme.Title, "SUBTREE", 7)
	if bar > 0 {
		p.Put(theme.Title, " ")
		p.Cell(theme.Title, "", bar)
	}
	p.Put(theme.Title, " ")
	p.Right(theme.Title, "%PAR", 5)
	p.Put(theme.Title, " ")
	p.Right(theme.Title, "HITS/s", 7)
	p.Put(theme.Title, " ")
	p.Right(theme.Title, "RK", 3)
	if showKids {
		p.Put(theme.Title, " ")
		p.Right(theme.Title, "RUNS", 6)
	}
	if show.saved {
		p.Put(theme.Title, " ")
		p.Right(theme.Title, "HIT t/s", 8)
	}
	if show.age {
		p.Put(theme.Title, " ")
		p.Right(theme.Title, "AGE", 6)
	}
	if show.lost {
		p.Put(theme.Title, " ")
		p.Right(theme.Title, "EVICT/s", 8)
	}
	if showMask {
		p.Put(theme.Title, " ")
		p.Cell(theme.Title, maskTitle(ranks), mask)
	}
	p.End()

	detail := 0
	if c.H >= 16 && len(x.rows) > 0 {
		detail = 5
	}
	h := c.H - p.Len() - detail
	from, to := x.cursor.Window(len(x.rows), p.Len(), h)
	for i := from; i < to; i++ {
		x.drawRow(p, i, name, bar, block, show, ranks, ix.Blocks)
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

// columnsOf says which columns there is room for.
type columnsOf struct {
	kids, saved, age, lost, mask bool
}

func (x *radix) drawRow(p *widget.Painter, i, name, bar, block int, show columnsOf, ranks []string, all int64) {
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
	p.Put(theme.Plain, " ")
	p.Right(theme.Plain, widget.Count(float64(n.LengthBlocks*block)), 7)
	p.Put(theme.Plain, " ")
	p.Right(theme.Plain, atLeast(widget.Count(float64(n.Blocks)), n.Exact), 7)
	whole := float64(all)
	if r.k.parent != nil && r.k.parent.parent != nil {
		whole = float64(r.k.parent.n.Blocks)
	}
	part := math.NaN()
	if whole > 0 {
		part = math.Min(1, float64(n.Blocks)/whole)
	}
	if bar > 0 {
		p.Put(theme.Plain, " ")
		p.Bar(theme.Bar, part, bar)
	}
	p.Put(theme.Plain, " ")
	p.Right(theme.Plain, widget.Percent(part), 5)
	p.Put(theme.Plain, " ")
	p.Right(theme.Plain, atLeast(widget.Rate(r.k.rate), n.HitsExact), 7)
	p.Put(theme.Plain, " ")
	p.Right(theme.Plain, strconv.Itoa(n.Ranks), 3)
	if show.kids {
		p.Put(theme.Plain, " ")
		p.Right(theme.Plain, atLeast(widget.Count(float64(n.Children)), n.Exact || n.Children == 0), 6)
	}
	if show.saved {
		p.Put(theme.Plain, " ")
		p.Right(theme.Plain, atLeast(widget.Count(r.k.rate*float64(n.LengthBlocks*block)), n.HitsExact), 8)
	}
	if show.age {
		p.Put(theme.Plain, " ")
		p.Right(theme.Plain, r.k.age(), 6)
	}
	if show.lost {
		p.Put(theme.Plain, " ")
		p.Right(theme.Plain, atLeast(widget.Rate(r.k.lost), false), 8)
	}
	if show.mask {
		p.Put(theme.Plain, " ")
		var b strings.Builder
		for _, label := range ranks {
			if slices.Contains(n.RankLabels, label) {
				b.WriteString(g.Held)
			} else {
				b.WriteString(g.NotHeld)
			}
		}
		p.Put(theme.Plain, b.String())
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
	var path []string
	for _, k := range r.k.path() {
		path = append(path, k.label())
	}
	end := n.DepthBlocks + n.LengthBlocks
	way := ""
	if !x.flat {
		way = "path " + strings.Join(path, " > ") + "   "
	}
	p.Line(theme.Plain, fmt.Sprintf("  %sblocks %d to %d, %s tokens from the start", way, n.DepthBlocks, end, widget.Count(float64(end*block))))
	about := fmt.Sprintf("  hits %s   runs below %s   longest copy %d of %d blocks   seen for %s", atLeast(strconv.FormatUint(n.Hits, 10), n.HitsExact), atLeast(strconv.Itoa(n.Children), n.Exact), n.Longest, n.LengthBlocks, r.k.age())
	if id := "   id " + n.ID; widget.Width(about+id) < c.W {
		about += id
	}
	p.Line(theme.Plain, about)
	held := fmt.Sprintf("  held by %d: %s", n.Ranks, strings.Join(n.RankLabels, " "))
	if n.Ranks > len(n.RankLabels) {
		held += fmt.Sprintf(" and %d more", n.Ranks-len(n.RankLabels))
	}
	if n.Ranks == 1 {
		held += fmt.Sprintf("   only copy: losing it costs %s tokens of prefill", widget.Count(float64(end*block)))
	}
	p.Line(theme.Plain, p.Cut(held, c.W))
}
