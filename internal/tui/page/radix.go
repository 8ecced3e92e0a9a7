package page

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// Radix is the view of the radix index: a path-compressed tree that loads what
// is opened, and an icicle strip of its shape.
type Radix struct {
	cursor
	tree    *tree
	rows    []row
	router  int
	sort    int
	text    string // the filter as written
	find    string
	rank    string // only what this rank holds
	depth   int    // only runs that end at or below it
	noStrip bool
	mask    bool
	expand  map[string]int // nodes to open when they are loaded, and how deep
	flat    bool           // the most used runs of the whole tree instead of its levels
	holders string         // the node whose holders are shown when they have come
	words   bool           // what runs begin with is asked for and shown
	refused string         // why it is not shown although it was asked for
	begins  string         // only runs that have this among these words
}

const byHits = "hits"

var treeOrders = []string{"blocks", byHits, "ranks"}

// NewRadix is the view of the radix index.
func NewRadix() *Radix {
	return &Radix{tree: newTree(), mask: true, expand: map[string]int{}}
}

// Name implements Page.
func (x *Radix) Name() string { return "Radix" }

// Keys implements Page.
func (x *Radix) Keys() []string {
	return []string{"h/l close open", "E two levels", "enter holders", "Z u zoom", "t flat", "s sort", "w mask", "W words", "i icicle", "/ hash rank:", "? help"}
}

// Act implements Page.
func (x *Radix) Act(c *Ctx, a keys.Action) (tea.Cmd, bool) {
	var cur *row
	if x.at < len(x.rows) {
		cur = &x.rows[x.at]
	}
	switch a {
	case keys.Flat:
		x.flat = !x.flat
		x.text, x.find, x.rank, x.depth, x.begins = "", "", "", 0, ""
		return x.reload(c), true
	case keys.Words:
		x.words, x.refused = !x.words, ""
		if !x.words && x.begins != "" {
			x.text, x.find, x.rank, x.depth, x.begins = "", "", "", 0, ""
		}
		return x.reload(c), true
	case keys.Sort:
		if x.flat {
			return nil, true // by hits per second
		}
		x.sort = (x.sort + 1) % len(treeOrders)
		return x.reload(c), true
	case keys.Icicle:
		x.noStrip = !x.noStrip
		return nil, true
	case keys.RankMask:
		x.mask = !x.mask
		return nil, true
	case keys.ZoomUp:
		return x.zoomTo(c, x.tree.zoom.parent), true
	case keys.FindNext, keys.FindPrev:
		if x.find != "" && len(x.rows) > 0 {
			step := 1
			if a == keys.FindPrev {
				step = -1
			}
			if i, ok := find(x.rows, x.find, x.at+step, step); ok {
				x.set(i, len(x.rows), x.keyAt)
			}
		}
		return nil, true
	case keys.Back:
		if x.tree.zoom != x.tree.root {
			return x.zoomTo(c, x.tree.zoom.parent), true
		}
		return nil, false
	}
	if cur != nil && x.flat {
		switch a {
		case keys.Enter:
			if cur.more > 0 {
				return x.more(c, cur.k), true
			}
			if c.Load.Children == nil || c.Frozen {
				return x.showHolders(c, cur.k), true
			}
			x.holders = cur.k.n.ID
			return c.Load.Children(admin.BrowseQuery{Node: x.holders, Limit: 1}), true
		case keys.ZoomIn, keys.Right, keys.Left, keys.Expand:
			return nil, true // runs stand alone here
		}
	}
	if cur != nil {
		switch a {
		case keys.Enter:
			if cur.more > 0 {
				return x.more(c, cur.k), true
			}
			x.holders = cur.k.n.ID
			if cmd := x.ask(c, cur.k); cmd != nil || cur.k.asking {
				return cmd, true
			}
			return x.showHolders(c, cur.k), true // data stands still: what is known of it
		case keys.ZoomIn:
			if cur.more > 0 || cur.k.n.Children == 0 {
				return nil, true
			}
			return x.zoomTo(c, cur.k), true
		case keys.Right:
			if cur.more > 0 {
				return x.more(c, cur.k), true
			}
			if cur.k.open || cur.k.n.Children == 0 {
				x.act(keys.Down, len(x.rows), x.keyAt)
				return nil, true
			}
			return x.openNode(c, cur.k), true
		case keys.Left:
			if cur.more == 0 && cur.k.open {
				x.tree.close(cur.k)
			} else if p := cur.k.parent; cur.more == 0 && p != nil && p != x.tree.zoom {
				x.key = p.n.ID
			}
			x.refresh()
			return nil, true
		case keys.Expand:
			if cur.more == 0 && cur.k.n.Children > 0 {
				x.expand[cur.k.n.ID] = 2
				if cur.k.open {
					return x.opened(c, cur.k), true
				}
				return x.openNode(c, cur.k), true
			}
			return nil, true
		}
	}
	return nil, x.act(a, len(x.rows), x.keyAt)
}

func (x *Radix) keyAt(i int) string { return x.rows[i].key() }

// refresh makes the rows again and finds the cursor's.
func (x *Radix) refresh() {
	x.rows = x.tree.rows(x.rows)
	if x.begins != "" {
		x.rows = slices.DeleteFunc(x.rows, func(r row) bool {
			return r.more == 0 && !strings.Contains(strings.ToLower(r.k.n.Preview), x.begins)
		})
	}
	x.sync(len(x.rows), x.keyAt)
}

func (x *Radix) zoomTo(c *Ctx, k *node) tea.Cmd {
	if k == nil {
		return nil
	}
	from := x.tree.zoom
	x.tree.zoom = k
	k.open = true
	x.at, x.off, x.key = 0, 0, ""
	if from.parent == k {
		x.key = from.n.ID // zooming out keeps the place
	}
	x.refresh()
	if !k.loaded {
		return x.ask(c, k)
	}
	return nil
}

func (x *Radix) openNode(c *Ctx, k *node) tea.Cmd {
	k.open = true
	return x.ask(c, k)
}

func (x *Radix) more(c *Ctx, k *node) tea.Cmd {
	k.limit = min(maxLimit, k.limit*4)
	return x.ask(c, k)
}

// ask asks for the children of a node.
func (x *Radix) ask(c *Ctx, k *node) tea.Cmd {
	if k.asking || c.Load.Children == nil || c.Frozen {
		return nil
	}
	k.asking, k.asked = true, c.Now
	limit := k.limit
	if x.flat {
		return c.Load.Children(admin.BrowseQuery{Limit: max(limit, hitsLimit), Flat: true, Preview: x.words})
	}
	if treeOrders[x.sort] == byHits {
		limit = max(limit, hitsLimit)
	}
	return c.Load.Children(admin.BrowseQuery{Node: k.n.ID, Sort: treeOrders[x.sort], Limit: limit, Rank: x.rank, MinDepth: x.depth, Preview: x.words})
}

// opened goes on with opening several levels.
func (x *Radix) opened(c *Ctx, k *node) tea.Cmd {
	levels := x.expand[k.n.ID]
	delete(x.expand, k.n.ID)
	if levels < 2 {
		return nil
	}
	var cmds []tea.Cmd
	for i, kid := range k.kids {
		if i == 10 {
			break // more would be a download of the tree
		}
		if kid.n.Children > 0 && !kid.open {
			x.expand[kid.n.ID] = levels - 1
			cmds = append(cmds, x.openNode(c, kid))
		}
	}
	return tea.Batch(cmds...)
}

// reload forgets all and asks for the root again.
func (x *Radix) reload(c *Ctx) tea.Cmd {
	seen := x.tree.seen
	x.tree = newTree()
	x.tree.seen = seen
	x.rows, x.at, x.key = nil, 0, ""
	clear(x.expand)
	return x.ask(c, x.tree.root)
}

// Tick asks again for what is on the screen, a few nodes at a time.
func (x *Radix) Tick(c *Ctx) tea.Cmd {
	if x.router != c.Sel {
		x.router = c.Sel
		x.tree = newTree() // ids are the router's own
		return x.reload(c)
	}
	if c.Frozen {
		return nil
	}
	to := min(len(x.rows), x.off+max(x.cursor.rows, 1))
	var cmds []tea.Cmd
	for _, k := range x.tree.due(x.rows[min(x.off, to):to], c.Now, 2*time.Second, 3) {
		cmds = append(cmds, x.ask(c, k))
	}
	return tea.Batch(cmds...)
}

// Take implements Page.
func (x *Radix) Take(c *Ctx, msg tea.Msg) tea.Cmd {
	m, ok := msg.(ChildrenMsg)
	if ok && x.flat && m.Router == x.router && m.Query.Node != "" && m.Query.Node == x.holders && m.Err == nil && m.Answer.Node != nil {
		return x.showHolders(c, &node{n: *m.Answer.Node})
	}
	if !ok || m.Router != x.router || m.Query.Preview != x.words || m.Query.Flat != x.flat || !x.flat && (m.Query.Sort != treeOrders[x.sort] || m.Query.Rank != x.rank || m.Query.MinDepth != x.depth) {
		return nil
	}
	if status := (*admin.StatusError)(nil); m.Query.Preview && errors.As(m.Err, &status) && (status.Status == http.StatusForbidden || status.Status == http.StatusConflict) {
		x.words, x.refused = false, m.Err.Error()
		return x.reload(c)
	}
	k := x.tree.nodes[m.Query.Node]
	x.tree.take(m.Query, m.Answer, m.Err)
	x.refresh()
	if x.find != "" && x.key == "" && len(x.rows) > 0 {
		if i, ok := find(x.rows, x.find, 0, 1); ok {
			x.set(i, len(x.rows), x.keyAt)
		}
	}
	if k == nil || m.Err != nil {
		return nil
	}
	if k.n.ID != "" && k.n.ID == x.holders {
		return tea.Batch(x.showHolders(c, k), x.opened(c, k))
	}
	return x.opened(c, k)
}

// showHolders asks for a text with every rank that holds a run, by worker.
func (x *Radix) showHolders(c *Ctx, k *node) tea.Cmd {
	x.holders = ""
	n := &k.n
	end := n.DepthBlocks + n.LengthBlocks
	lines := []string{fmt.Sprintf("%s tokens from the start, held by %d of %d ranks", widget.Count(float64(end*max(c.R.BlockSize, 1))), n.Ranks, len(c.R.Ranks)), ""}
	labels := slices.Clone(n.RankLabels)
	slices.SortFunc(labels, func(a, b string) int {
		w, i, _ := strings.Cut(a, "/")
		v, j, _ := strings.Cut(b, "/")
		if w != v {
			return natural(w, v)
		}
		return natural(i, j)
	})
	last := ""
	for _, label := range labels {
		w, i, _ := strings.Cut(label, "/")
		if w != last {
			last = w
			lines = append(lines, w+":")
		}
		lines[len(lines)-1] += " " + i
	}
	if more := n.Ranks - len(labels); more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return func() tea.Msg { return ShowMsg{"holders of run " + n.Local, lines} }
}

// Filter implements Page.
func (x *Radix) Filter() string { return x.text }

// SetFilter takes "HASH", "rank:LABEL" and "depth>N"; the last two are
// answered by the router.
func (x *Radix) SetFilter(c *Ctx, text string) (tea.Cmd, error) {
	whole := strings.TrimSpace(text)
	text, begins, worded := strings.Cut(text, "words:")
	if begins = strings.ToLower(strings.TrimSpace(begins)); worded && begins == "" {
		return nil, errors.New("filter: words: needs what a run begins with, such as words:support bot")
	}
	hash, rank, depth := "", "", 0
	for _, w := range strings.Fields(text) {
		switch {
		case strings.HasPrefix(w, "rank:"):
			rank = w[len("rank:"):]
			if !slices.ContainsFunc(c.R.Ranks, func(k feed.Rank) bool { return k.Label == rank }) {
				return nil, fmt.Errorf("filter: there is no rank %q; ranks are called WORKER/dpN", rank)
			}
		case strings.HasPrefix(w, "depth>"):
			n, err := strconv.Atoi(w[len("depth>"):])
			if err != nil || n < 0 {
				return nil, fmt.Errorf("filter: %q needs a number of blocks", w)
			}
			depth = n
		default:
			for _, r := range strings.ToLower(w) {
				if !strings.ContainsRune("0123456789abcdef", r) {
					return nil, fmt.Errorf("filter: %q is no head of a hash; give hex digits, rank:LABEL, depth>N or words:TEXT", w)
				}
			}
			hash = strings.ToLower(w)
		}
	}
	again := rank != x.rank || depth != x.depth
	x.flat = x.flat && !again // they choose within levels
	x.text, x.find, x.rank, x.depth, x.begins = whole, hash, rank, depth, begins
	if begins != "" && !x.words {
		x.words, x.refused, again = true, "", true
	}
	x.refresh()
	if again {
		return x.reload(c), nil
	}
	if hash != "" && len(x.rows) > 0 {
		i, ok := find(x.rows, hash, 0, 1)
		if !ok {
			return nil, fmt.Errorf("no open run begins with %s: open more (E), or zoom in", hash)
		}
		x.set(i, len(x.rows), x.keyAt)
	}
	return nil, nil
}

// Order implements Page.
func (x *Radix) Order() string {
	if x.flat {
		return byHits
	}
	return treeOrders[x.sort]
}

// SetOrder implements Page.
func (x *Radix) SetOrder(name string) bool {
	i := slices.Index(treeOrders, name)
	if i >= 0 {
		x.sort, x.flat = i, false
		x.tree = newTree()
	}
	return i >= 0
}

// Focus implements Page.
func (x *Radix) Focus(c *Ctx, name string) tea.Cmd {
	cmd, _ := x.SetFilter(c, name)
	return cmd
}

// Row implements Page.
func (x *Radix) Row(*Ctx) (string, string) {
	if x.at >= len(x.rows) || x.rows[x.at].more > 0 {
		return "", ""
	}
	n := &x.rows[x.at].k.n
	return n.Local, fmt.Sprintf("%s id=%s depth=%d length=%d subtree=%d children=%d ranks=%d hits=%d on=%s", n.Local, n.ID, n.DepthBlocks, n.LengthBlocks, n.Blocks, n.Children, n.Ranks, n.Hits, strings.Join(n.RankLabels, ","))
}

// Click implements Page.
func (x *Radix) Click(_ *Ctx, _, line int) { x.click(line, len(x.rows), x.keyAt) }

// Draw implements Page.
func (x *Radix) Draw(c *Ctx, p *widget.Painter) {
	ix := &c.R.Index
	block := max(c.R.BlockSize, 1)
	p.Put(theme.Bold, "  "+x.crumbs())
	if x.refused != "" {
		p.Words(theme.Warn, "   no words: "+x.refused)
	}
	p.Words(theme.Dim, fmt.Sprintf("   index %s blocks in %s runs, %s, %s lookups/s, +%s -%s blk/s", widget.Count(ix.Blocks.F()), widget.Count(ix.Nodes.F()), widget.Bytes(ix.Bytes.F()),
		widget.Rate(ix.LookupRate.F()), widget.Rate(ix.StoredRate.F()), widget.Rate(ix.RemovedRate.F())))
	p.End()
	ranks := maskOrder(c.R)
	mask := len(ranks)
	name := min(46, max(24, c.W-84-mask))
	// Prefix, tokens, subtree, bar, share, hits, ranks always; the rest with room.
	fixed := 2 + name + 1 + 7 + 1 + 7 + 1 + 5 + 1 + 7 + 1 + 3
	room := c.W - fixed
	bar, keep := 0, 0
	if x.words {
		keep = room // where there is little, the words come first
		if room > 62 {
			keep = 62
		}
	}
	room -= keep
	if room >= 11 && !x.words {
		bar = 10
		room -= 11
	}
	showMask := x.mask && !x.words && mask > 0 && mask <= 64 && room >= mask+1
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
	if show.lost = show.age && room >= 9; show.lost {
		room -= 9
	}
	if x.words {
		show.words = keep + room - 1
	}

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
	if show.words > 0 {
		p.Put(theme.Title, " ")
		p.Cell(theme.Title, "BEGINS WITH", show.words)
	}
	if showMask {
		p.Put(theme.Title, " ")
		p.Cell(theme.Title, maskTitle(ranks), mask)
	}
	p.End()

	strip := 0
	if !x.noStrip && !x.flat && c.W >= 100 && c.H >= 22 && len(x.rows) > 0 {
		strip = 6
	}
	detail := 0
	if c.H >= 16 && len(x.rows) > 0 {
		detail = 5
	}
	h := c.H - p.Len() - strip - detail
	from, to := x.window(len(x.rows), h)
	x.first = p.Len()
	for i := from; i < to; i++ {
		x.drawRow(p, i, name, bar, block, show, ranks, int64(ix.Blocks))
	}
	if len(x.rows) == 0 {
		text := "loading"
		switch z := x.tree.zoom; {
		case z.err != "":
			text = z.err
		case z.loaded && x.begins != "":
			text = "no loaded run begins with these words (esc clears the filter)"
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
	p.Fill(c.H - strip - detail)
	if detail > 0 {
		x.drawDetail(c, p, block)
		p.Fill(c.H - strip)
	}
	if strip > 0 {
		p.Rule("icicle (key i): width = blocks, one line per level")
		x.icicle(p, strip-1)
	}
}

// crumbs is the way from the root to the zoom.
func (x *Radix) crumbs() string {
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
	words                        int // how wide
}

func (x *Radix) drawRow(p *widget.Painter, i, name, bar, block int, show columnsOf, ranks []string, all int64) {
	r := x.rows[i]
	g := &p.Th.Glyphs
	p.Select(i == x.at)
	mark(p, i == x.at, feed.OK)
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
	if show.words > 0 {
		p.Put(theme.Plain, " ")
		p.Put(theme.Plain, p.FitWords(begin(n), show.words))
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

// begin is what a run begins with.
func begin(n *admin.IndexNode) string {
	if n.Preview == "" {
		return widget.Unknown // not kept any more, or nobody could tell its words
	}
	return n.Preview
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

// drawDetail tells all of the run under the cursor.
func (x *Radix) drawDetail(c *Ctx, p *widget.Painter, block int) {
	r := x.rows[x.at]
	if r.more > 0 {
		p.Rule("not loaded")
		p.Line(theme.Plain, fmt.Sprintf("  %d of %d children are loaded, those with most %s", len(r.k.kids), r.k.total, x.Order()))
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
	if x.words {
		p.Line(theme.Plain, p.FitWords("  begins with: "+begin(n), c.W))
	}
}
