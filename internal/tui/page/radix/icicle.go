package radix

import (
	"strings"

	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// icicle draws the loaded part below the zoom as bars, one line per level.
func (x *Page) icicle(p *widget.Painter, h int) {
	w := p.W - 2
	text := make([][]rune, h)
	style := make([][]theme.Style, h)
	for i := range text {
		text[i] = []rune(strings.Repeat(" ", w))
		style[i] = make([]theme.Style, w)
	}
	onPath := map[*node]bool{}
	if cur := x.rows[x.cursor.At]; cur.more == 0 {
		for k := cur.k; k != nil; k = k.parent {
			onPath[k] = true
		}
	}
	var draw func(k *node, level, from, to int)
	draw = func(k *node, level, from, to int) {
		if level >= h {
			return
		}
		sum := 0
		for _, c := range k.kids {
			sum += c.n.Blocks
		}
		whole := max(k.n.Blocks, sum)
		if k.parent == nil {
			whole = sum
		}
		if whole == 0 {
			return
		}
		at := from
		for _, c := range k.kids {
			width := c.n.Blocks * (to - from) / whole
			if width < 3 {
				break // the rest, sorted by size or not, is too thin to name
			}
			last := min(at+width, to)
			for i := at; i < last-1; i++ {
				text[level][i] = ' '
				style[level][i] = theme.Bar
				if onPath[c] {
					style[level][i] = theme.Accent
				}
			}
			label := []rune(c.label())
			count := []rune(widget.Count(float64(c.n.Blocks)))
			inner := last - at - 2
			if len(label) > inner {
				label = label[:max(inner, 0)]
			}
			open, shut := '|', '|'
			if onPath[c] {
				open, shut = '[', ']'
			}
			text[level][at] = open
			copy(text[level][at+1:], label)
			if inner >= len(label)+len(count)+2 {
				copy(text[level][last-1-len(count):], count)
			}
			text[level][last-1] = shut
			if c.open {
				draw(c, level+1, at, last)
			}
			at = last
		}
		for i := at; i < to; i++ {
			text[level][i] = '.'
			style[level][i] = theme.Dim
		}
	}
	draw(x.tree.zoom, 0, 0, w)
	for i := range text {
		p.Put(theme.Plain, "  ")
		for a := 0; a < w; {
			b := a
			for b < w && style[i][b] == style[i][a] {
				b++
			}
			p.Put(style[i][a], string(text[i][a:b]))
			a = b
		}
		p.End()
	}
}
