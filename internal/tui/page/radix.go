package page

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
)

// radix is the view of the radix index: a path-compressed tree that loads what is opened.
type radix struct {
	cursor  cursor
	tree    *tree
	rows    []radixRow
	router  int
	sort    int
	text    string // the filter as written
	find    string
	rank    string // only what this rank holds
	depth   int    // only runs that end at or below it
	mask    bool
	expand  map[string]int // nodes to open when they are loaded, and how deep
	flat    bool           // the most used runs of the whole tree instead of its levels
	holders string         // the node whose holders are shown when they have come
}

const byHits = "hits"

var treeOrders = []string{"blocks", byHits, "ranks"}

func (x *radix) Name() string { return "Radix" }

func (x *radix) Keys() []string {
	return []string{"h/l close open", "E two levels", "enter holders", "Z u zoom", "t flat", "s sort", "w mask", "/ hash rank:", "? help"}
}

func (x *radix) Act(c *Ctx, a keys.Action) (tea.Cmd, bool) {
	var cur *radixRow
	if x.cursor.At < len(x.rows) {
		cur = &x.rows[x.cursor.At]
	}
	switch a {
	case keys.Flat:
		x.flat = !x.flat
		x.text, x.find, x.rank, x.depth = "", "", "", 0
		return x.reload(c), true
	case keys.Sort:
		if x.flat {
			return nil, true // by hits per second
		}
		x.sort = (x.sort + 1) % len(treeOrders)
		return x.reload(c), true
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
			if i, ok := findRow(x.rows, x.find, x.cursor.At+step, step); ok {
				x.cursor.Set(i, len(x.rows), x.keyAt)
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
				x.cursor.Move(keys.Down, len(x.rows), x.keyAt)
				return nil, true
			}
			return x.openNode(c, cur.k), true
		case keys.Left:
			if cur.more == 0 && cur.k.open {
				x.tree.close(cur.k)
			} else if p := cur.k.parent; cur.more == 0 && p != nil && p != x.tree.zoom {
				x.cursor.Key = p.n.ID
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
	return nil, x.cursor.Move(a, len(x.rows), x.keyAt)
}

func (x *radix) keyAt(i int) string { return x.rows[i].key() }

// refresh makes the rows again and finds the cursor's.
func (x *radix) refresh() {
	x.rows = x.tree.rows(x.rows)
	x.cursor.Sync(len(x.rows), x.keyAt)
}

func (x *radix) zoomTo(c *Ctx, k *node) tea.Cmd {
	if k == nil {
		return nil
	}
	from := x.tree.zoom
	x.tree.zoom = k
	k.open = true
	x.cursor.Top()
	if from.parent == k {
		x.cursor.Key = from.n.ID // zooming out keeps the place
	}
	x.refresh()
	if !k.loaded {
		return x.ask(c, k)
	}
	return nil
}

func (x *radix) openNode(c *Ctx, k *node) tea.Cmd {
	k.open = true
	return x.ask(c, k)
}

func (x *radix) more(c *Ctx, k *node) tea.Cmd {
	k.limit = min(maxLimit, k.limit*4)
	return x.ask(c, k)
}

// ask asks for the children of a node.
func (x *radix) ask(c *Ctx, k *node) tea.Cmd {
	if k.asking || c.Load.Children == nil || c.Frozen {
		return nil
	}
	k.asking, k.asked = true, c.Now
	limit := k.limit
	if x.flat {
		return c.Load.Children(admin.BrowseQuery{Limit: max(limit, hitsLimit), Flat: true})
	}
	if treeOrders[x.sort] == byHits {
		limit = max(limit, hitsLimit)
	}
	return c.Load.Children(admin.BrowseQuery{Node: k.n.ID, Sort: treeOrders[x.sort], Limit: limit, Rank: x.rank, MinDepth: x.depth})
}

// opened opens the next of several levels.
func (x *radix) opened(c *Ctx, k *node) tea.Cmd {
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
func (x *radix) reload(c *Ctx) tea.Cmd {
	seen := x.tree.seen
	x.tree = newTree()
	x.tree.seen = seen
	x.rows = nil
	x.cursor.Top()
	clear(x.expand)
	return x.ask(c, x.tree.root)
}

// Tick asks again for what is on the screen, a few nodes at a time.
func (x *radix) Tick(c *Ctx) tea.Cmd {
	if x.router != c.Sel {
		x.router = c.Sel
		x.tree = newTree() // ids are the router's own
		return x.reload(c)
	}
	if c.Frozen {
		return nil
	}
	from, to := x.cursor.Shown(len(x.rows))
	var cmds []tea.Cmd
	for _, k := range x.tree.due(x.rows[from:to], c.Now, 2*time.Second, 3) {
		cmds = append(cmds, x.ask(c, k))
	}
	return tea.Batch(cmds...)
}

func (x *radix) Take(c *Ctx, msg tea.Msg) tea.Cmd {
	m, ok := msg.(ChildrenMsg)
	if ok && x.flat && m.Router == x.router && m.Query.Node != "" && m.Query.Node == x.holders && m.Err == nil && m.Answer.Node != nil {
		return x.showHolders(c, &node{n: *m.Answer.Node})
	}
	if !ok || m.Router != x.router || m.Query.Flat != x.flat || !x.flat && (m.Query.Sort != treeOrders[x.sort] || m.Query.Rank != x.rank || m.Query.MinDepth != x.depth) {
		return nil
	}
	k := x.tree.nodes[m.Query.Node]
	x.tree.take(m.Query, m.Answer, m.Err)
	x.refresh()
	if x.find != "" && x.cursor.Key == "" && len(x.rows) > 0 {
		if i, ok := findRow(x.rows, x.find, 0, 1); ok {
			x.cursor.Set(i, len(x.rows), x.keyAt)
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
func (x *radix) showHolders(c *Ctx, k *node) tea.Cmd {
	x.holders = ""
	n := &k.n
	place, figures := x.about(k, max(c.R.BlockSizeTokens, 1))
	lines := []string{place, figures, fmt.Sprintf("held by %d of %d ranks", n.Ranks, len(c.R.Ranks)), ""}
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
	return func() tea.Msg { return ShowMsg{Title: "holders of run " + n.Local, Lines: lines} }
}

func (x *radix) Filter() string { return x.text }

// SetFilter takes "HASH", "rank:LABEL" and "depth>N"; the last two are
// answered by the router.
func (x *radix) SetFilter(c *Ctx, text string) (tea.Cmd, error) {
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
					return nil, fmt.Errorf("filter: %q is no head of a hash; give hex digits, rank:LABEL or depth>N", w)
				}
			}
			hash = strings.ToLower(w)
		}
	}
	again := rank != x.rank || depth != x.depth
	x.flat = x.flat && !again // they choose within levels
	x.text, x.find, x.rank, x.depth = strings.TrimSpace(text), hash, rank, depth
	x.refresh()
	if again {
		return x.reload(c), nil
	}
	if hash != "" && len(x.rows) > 0 {
		i, ok := findRow(x.rows, hash, 0, 1)
		if !ok {
			return nil, fmt.Errorf("no open run begins with %s: open more (E), or zoom in", hash)
		}
		x.cursor.Set(i, len(x.rows), x.keyAt)
	}
	return nil, nil
}

func (x *radix) Order(*Ctx) string {
	if x.flat {
		return byHits
	}
	return treeOrders[x.sort]
}

func (x *radix) SetOrder(name string) bool {
	i := slices.Index(treeOrders, name)
	if i >= 0 {
		x.sort, x.flat = i, false
		x.tree = newTree()
	}
	return i >= 0
}

func (x *radix) Focus(c *Ctx, name string) tea.Cmd {
	cmd, _ := x.SetFilter(c, name)
	return cmd
}

func (x *radix) Row(*Ctx) (string, string) {
	if x.cursor.At >= len(x.rows) || x.rows[x.cursor.At].more > 0 {
		return "", ""
	}
	n := &x.rows[x.cursor.At].k.n
	return n.Local, fmt.Sprintf("%s id=%s depth=%d length=%d subtree=%d children=%d ranks=%d hits=%d on=%s", n.Local, n.ID, n.DepthBlocks, n.LengthBlocks, n.Blocks, n.Children, n.Ranks, n.Hits, strings.Join(n.RankLabels, ","))
}

func (x *radix) Click(_ *Ctx, _, line int) { x.cursor.Click(line, len(x.rows), x.keyAt) }
