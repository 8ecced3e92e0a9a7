package page

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// heat is a figure of ranks as a strip with one cell for each.
type heat struct {
	name string
	at   func(*feed.Rank) float64 // NaN when unknown
	show func(float64) string
	full float64 // the value of the highest cell; 0 is the greatest of the role
}

// heats are the figures of the strip, in the order of the key that turns them.
var heats = []heat{
	{"active requests", func(k *feed.Rank) float64 { return float64(k.ActiveRequests) }, widget.Count, 0},
	{"KV in use", func(k *feed.Rank) float64 { return k.KVUsage().F() }, func(v float64) string { return widget.Percent(v) + "%" }, 1},
	{"ITL", func(k *feed.Rank) float64 { return feed.Figure(k.ITL).F() }, widget.Millis, 0},
	{"prefix hits", func(k *feed.Rank) float64 { return k.HitShare.F() }, func(v float64) string { return widget.Percent(v) + "%" }, 1},
}

// heatName is the width of the names before the cells.
const heatName = 16

// drawHeat writes the strip of rows into h lines: one cell a rank, grouped by role
// and worker. A rank in trouble has its mark for a cell, so that nothing is said by
// colour alone.
func drawHeat(p *widget.Painter, hot *heat, rows []*feed.Rank, h int) {
	end := p.Len() + h
	roles := byRole(rows)
	apart := heatLines(roles, p.W) <= h // blanks between workers, where there is room
	for _, role := range []string{"prefill", "decode", "aggregated", "either"} {
		list := roles[role]
		if len(list) == 0 || p.Len() >= end {
			continue
		}
		mean, most := spread(list, hot.at)
		p.Line(theme.Title, fmt.Sprintf("  %s: %s of %d ranks, mean %s, most %s, imbalance %s", role, hot.name, len(list), hot.show(mean), hot.show(most), widget.Rate(most/mean)))
		top := hot.full
		if top == 0 {
			top = most
		}
		for i := 0; i < len(list) && p.Len() < end; {
			if p.Len() == end-1 && rest(list[i:], p.W, apart) {
				p.Line(theme.Dim, fmt.Sprintf("  %s %d more ranks", p.Th.Ellipsis, len(list)-i))
				break
			}
			p.Cell(theme.Dim, "  "+list[i].Label, heatName+1)
			p.Put(theme.Plain, " ")
			for first := i; i < len(list) && p.X() < p.W-1; i++ {
				if apart && i > first && list[i].Worker != list[i-1].Worker && len(list) > 1 {
					p.Put(theme.Plain, " ")
				}
				if p.X() >= p.W {
					break
				}
				cell(p, list[i], hot.at(list[i]), top)
			}
			p.End()
		}
	}
}

// byRole are ranks by their role, by worker and rank.
func byRole(ranks []*feed.Rank) map[string][]*feed.Rank {
	roles := map[string][]*feed.Rank{}
	for _, k := range ranks {
		roles[k.Role] = append(roles[k.Role], k)
	}
	for _, list := range roles {
		slices.SortFunc(list, func(a, b *feed.Rank) int {
			if a.Worker != b.Worker {
				return natural(a.Worker, b.Worker)
			}
			return a.DP - b.DP
		})
	}
	return roles
}

// spread is the mean and the greatest of a figure of ranks, NaN where it is unknown.
func spread(list []*feed.Rank, at func(*feed.Rank) float64) (mean, most float64) {
	most = math.NaN()
	sum, n := 0.0, 0
	for _, k := range list {
		if v := at(k); !math.IsNaN(v) {
			if n++; !(most >= v) {
				most = v
			}
			sum += v
		}
	}
	return sum / float64(n), most
}

// Imbalance is how many times the mean of its role the busiest rank carries, in
// active requests; of several roles the greatest, NaN when nothing is carried.
func Imbalance(r *feed.Router) float64 {
	roles := map[string][]*feed.Rank{}
	for i := range r.Ranks {
		k := &r.Ranks[i]
		roles[k.Role] = append(roles[k.Role], k)
	}
	worst := math.NaN()
	for _, list := range roles {
		if mean, most := spread(list, heats[0].at); mean > 0 && !(worst >= most/mean) {
			worst = most / mean
		}
	}
	return worst
}

// cell is one rank of the strip.
func cell(p *widget.Painter, k *feed.Rank, v, top float64) {
	switch {
	case k.Severity == feed.Error:
		p.Put(theme.Bad, "X")
	case k.Severity == feed.Warn:
		p.Put(theme.Warn, "!")
	case math.IsNaN(v):
		p.Put(theme.Dim, "?")
	default:
		share := 0.0
		if top > 0 {
			share = v / top
		}
		p.Put(theme.Bar, p.Th.Spark(max(share, 0.1))) // idle is no blank
	}
}

// rest reports whether ranks need more than one line.
func rest(list []*feed.Rank, w int, apart bool) bool {
	return cells(list, apart) > w-heatName-2
}

// cells is the width of ranks' cells with the blanks between workers.
func cells(list []*feed.Rank, apart bool) int {
	n := len(list)
	for i := 1; apart && i < len(list); i++ {
		if list[i].Worker != list[i-1].Worker {
			n++
		}
	}
	return n
}

// Height is how many lines the table would like to have, title and summary included.
func (t *rankTable) Height(r *feed.Router, w int) int {
	rows := t.Rows(r)
	if t.heat == 0 {
		return len(rows) + 2
	}
	n := heatLines(byRole(rows), w)
	if n >= 5 {
		n++ // the summary below it
	}
	return n
}

// heatLines is how many lines the strip has with blanks between workers, or one more.
func heatLines(roles map[string][]*feed.Rank, w int) (n int) {
	for _, list := range roles {
		n += 2 + cells(list, true)/max(1, w-heatName-2)
	}
	return n
}

// natural compares names with numbers as people do: decode-2 stands before decode-10.
func natural(a, b string) int {
	digits := "0123456789"
	x, y := strings.TrimRight(a, digits), strings.TrimRight(b, digits)
	if x != y {
		return strings.Compare(x, y)
	}
	m, n := strings.TrimLeft(a[len(x):], "0"), strings.TrimLeft(b[len(y):], "0")
	if len(m) != len(n) {
		return len(m) - len(n)
	}
	return strings.Compare(m, n)
}
