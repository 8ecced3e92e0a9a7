package page

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// node is a run of the radix tree that was loaded. Only what was opened is
// ever loaded, and no more than maxNodes are kept.
type node struct {
	n      admin.IndexNode
	parent *node
	kids   []*node
	total  int // children that the router has; kids may be fewer
	limit  int // children to ask for
	open   bool
	loaded bool
	asking bool
	err    string
	asked  time.Time

	hits uint64 // at the time of
	at   time.Time
	rate float64 // NaN before the second answer
	// lost is by how many blocks a second the subtree became smaller since at: what was
	// evicted less what was stored. NaN where that is not known, or it grew.
	lost   float64
	blocks int // at the time of at, -1 where they were a lower bound

	sight
}

// sight is when a run was first seen. One that was there already when its level was
// looked at for the first time is older than that.
type sight struct {
	since time.Time
	older bool
}

const (
	firstLimit = 50
	hitsLimit  = 200  // by hits, where what is hit now may stand below what was hit once
	maxLimit   = 1000 // the router's own
	maxNodes   = 4000
)

// tree is the loaded part of the radix tree.
type tree struct {
	root  *node
	zoom  *node
	nodes map[string]*node
	seen  map[string]sight // by the id, what was closed included
}

func newTree() *tree {
	r := &node{limit: firstLimit, open: true, rate: math.NaN(), lost: math.NaN()}
	return &tree{root: r, zoom: r, nodes: map[string]*node{"": r}, seen: map[string]sight{}}
}

// take merges an answer into the tree. Nodes keep their state by their id.
func (t *tree) take(q admin.BrowseQuery, a *admin.IndexChildren, err error) {
	p := t.nodes[q.Node]
	if p == nil {
		return // closed and forgotten meanwhile
	}
	p.asking = false
	if err != nil {
		p.err = err.Error()
		if p != t.root {
			// The run is gone: so is what hung below it.
			p.kids, p.loaded, p.open = nil, false, false
		}
		return
	}
	first := !p.loaded
	p.err, p.loaded, p.total = "", true, a.Total
	if a.Node != nil && a.Node.ID == p.n.ID {
		p.count(*a.Node, a.Now)
	}
	old := map[string]*node{}
	for _, k := range p.kids {
		old[k.n.ID] = k
	}
	p.kids = p.kids[:0:0]
	for i := range a.Children {
		n := a.Children[i]
		k := old[n.ID]
		if k == nil || k.n.Local != n.Local {
			if len(t.nodes) >= maxNodes {
				break
			}
			k = &node{parent: p, limit: firstLimit, rate: math.NaN(), lost: math.NaN()}
			// An answer that was full may have left it out until now.
			k.sight = t.sight(n.ID, sight{a.Now, first || a.Total > len(a.Children)})
			t.nodes[n.ID] = k
		}
		delete(old, n.ID)
		k.count(n, a.Now)
		p.kids = append(p.kids, k)
	}
	for _, k := range old {
		t.forget(k)
	}
	if q.Sort == byHits || q.Flat {
		// What the router hands over was hit most in all its life.
		slices.SortStableFunc(p.kids, func(a, b *node) int {
			return cmp.Or(cmp.Compare(b.rate, a.rate), cmp.Compare(b.n.Hits, a.n.Hits)) // unknown comes last
		})
	}
	if _, ok := t.nodes[t.zoom.n.ID]; !ok {
		t.zoom = t.root
	}
}

// sight is when a run was first seen, which is now if it was not.
func (t *tree) sight(id string, now sight) sight {
	if s, ok := t.seen[id]; ok {
		return s
	}
	if len(t.seen) >= 2*maxNodes {
		clear(t.seen) // what is on the screen keeps its own
		for id, k := range t.nodes {
			t.seen[id] = k.sight
		}
	}
	t.seen[id] = now
	return now
}

// age is for how long a run has been there, as far as is known.
func (k *node) age() string {
	d := k.at.Sub(k.since)
	if d < time.Second {
		return widget.Unknown // it was just seen for the first time
	}
	s := widget.Age(d)
	if k.older {
		return ">" + s
	}
	return s
}

// count takes over the figures of a node and the rates of its hits and losses.
func (k *node) count(n admin.IndexNode, now time.Time) {
	if !k.at.IsZero() && now.After(k.at) && n.Hits >= k.hits {
		k.rate = float64(n.Hits-k.hits) / now.Sub(k.at).Seconds()
	}
	blocks := n.Blocks
	if !n.Exact {
		blocks = -1
	}
	if !k.at.IsZero() && now.After(k.at) {
		k.lost = math.NaN()
		if blocks >= 0 && blocks < k.blocks {
			k.lost = float64(k.blocks-blocks) / now.Sub(k.at).Seconds()
		}
	}
	if k.at.IsZero() || now.Sub(k.at) >= time.Second {
		k.hits, k.blocks, k.at = n.Hits, blocks, now
	}
	k.n = n
}

func (t *tree) forget(k *node) {
	for _, c := range k.kids {
		t.forget(c)
	}
	if t.nodes[k.n.ID] == k {
		delete(t.nodes, k.n.ID)
	}
	if t.zoom == k {
		t.zoom = t.root
	}
}

// close drops what is below a node.
func (t *tree) close(k *node) {
	for _, c := range k.kids {
		t.forget(c)
	}
	k.kids, k.open, k.loaded, k.err = nil, false, false, ""
}

// radixRow is one line of the tree: a node, or what its parent has not loaded.
type radixRow struct {
	k     *node
	depth int
	more  int // children that are not loaded; k is the parent then
}

func (r radixRow) key() string {
	if r.more > 0 {
		return "more " + r.k.n.ID
	}
	return r.k.n.ID
}

// rows flattens what is open below the zoom.
func (t *tree) rows(out []radixRow) []radixRow {
	out = out[:0]
	var walk func(k *node, depth int)
	walk = func(k *node, depth int) {
		for _, c := range k.kids {
			out = append(out, radixRow{k: c, depth: depth})
			if c.open {
				walk(c, depth+1)
			}
		}
		if rest := k.total - len(k.kids); k.loaded && rest > 0 {
			out = append(out, radixRow{k: k, depth: depth, more: rest})
		}
	}
	walk(t.zoom, 0)
	return out
}

// path is the way from the root to a node, without the root.
func (k *node) path() []*node {
	var out []*node
	for ; k.parent != nil; k = k.parent {
		out = append(out, k)
	}
	slices.Reverse(out)
	return out
}

// label is the head of the hash of a node's first block.
func (k *node) label() string {
	if k.parent == nil {
		return "root"
	}
	return feed.Short(k.n.Local)
}

// due lists open nodes on the screen whose figures are older than age, the longest unasked
// first: up to n, or four times as many while what is below them has no rates.
func (t *tree) due(visible []radixRow, now time.Time, age time.Duration, n int) []*node {
	var fresh, out []*node
	seen := map[*node]bool{}
	add := func(k *node) {
		if k == nil || !k.open || k.asking || seen[k] || now.Sub(k.asked) < age {
			return
		}
		seen[k] = true
		if slices.ContainsFunc(k.kids, func(c *node) bool { return math.IsNaN(c.rate) }) {
			fresh = append(fresh, k)
		} else {
			out = append(out, k)
		}
	}
	add(t.zoom)
	for _, r := range visible {
		add(r.k)
		add(r.k.parent)
	}
	oldest := func(a, b *node) int { return a.asked.Compare(b.asked) }
	slices.SortStableFunc(fresh, oldest)
	slices.SortStableFunc(out, oldest)
	fresh = fresh[:min(len(fresh), 4*n)]
	return append(fresh, out[:min(len(out), max(0, n-len(fresh)))]...)
}

// findRow is the first row from a place on whose hash begins with text.
func findRow(rows []radixRow, text string, from, step int) (int, bool) {
	text = strings.ToLower(text)
	for i := range rows {
		j := ((from+i*step)%len(rows) + len(rows)) % len(rows)
		if rows[j].more == 0 && strings.HasPrefix(rows[j].k.n.Local, text) {
			return j, true
		}
	}
	return 0, false
}
