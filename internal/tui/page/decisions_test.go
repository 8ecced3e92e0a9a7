package page

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// TestExplainOfSeveralAttempts: every attempt's table is that attempt's own, also
// where one of them had nobody to choose from.
func TestExplainOfSeveralAttempts(t *testing.T) {
	var c receipt.Receipt
	for n := 1; n <= 3; n++ {
		d := decision.Decision{Attempt: n, Decode: decision.Phase{Policy: "kv", Verdict: "all_excluded"}}
		if n != 2 {
			d.Decode.Candidates = []decision.Candidate{{Rank: fmt.Sprintf("of-%d/dp0", n), Excluded: "draining"}, {Rank: fmt.Sprintf("of-%d/dp1", n), Excluded: "draining"}}
		}
		c.Earlier = append(c.Earlier, d)
	}
	c.Decision, c.Earlier = c.Earlier[2], c.Earlier[:2]
	text := strings.Join(explainLines(&c, widget.NewPainter(theme.New("dark", termenv.Ascii, true), 100)), "\n")
	last := 0
	for _, want := range []string{"attempt 1", "of-1/dp0", "of-1/dp1", "attempt 2", "attempt 3, the last", "of-3/dp0", "of-3/dp1"} {
		i := strings.Index(text[last:], want)
		if i < 0 || strings.Count(text, want) != 1 {
			t.Fatalf("%q is not in its place, once:\n%s", want, text)
		}
		last += i
	}
}

// TestCostRowsAddUp: at every width the terms that a row shows are its cost.
func TestCostRowsAddUp(t *testing.T) {
	for _, unit := range []string{"", decision.Milliseconds} {
		t.Run(unit, func(t *testing.T) { costRowsAddUp(t, unit) })
	}
}

func costRowsAddUp(t *testing.T, unit string) {
	ph := &decision.Phase{Chosen: "d0/dp0", Unit: unit, Candidates: []decision.Candidate{{Rank: "d0/dp0"}}}
	c := &ph.Candidates[0]
	for i, term := range decision.EachTerm() {
		if term.Unit != unit {
			continue
		}
		v := float64(10 * (i + 1))
		*term.At(&c.Terms) = v
		if term.Credit {
			v = -v
		}
		c.Cost += v
	}
	th := theme.New("dark", termenv.Ascii, true)
	for i, w := range []int{80, 100, 120, 200, 80, 100, 120, 200} {
		c.Tiers = route.Tiers{CPU: 7 * uint32(i/4), Remote: 3 * uint32(i/4)}
		rows := candidateTable(ph, w, &th.Glyphs)
		if tiers := strings.Contains(rows[0], " CPU REMOTE "); tiers != (i >= 4) || tiers && !strings.Contains(rows[1], "      7      3") {
			t.Errorf("%d columns with %+v:\n%s\n%s", w, c.Tiers, rows[0], rows[1])
		}
		if len(rows[1]) > w {
			t.Errorf("more than %d columns:\n%s", w, rows[1])
		}
		titles, cells := strings.Fields(rows[0]), strings.Fields(rows[1])[1:]
		sum, cost := 0.0, math.NaN()
		for i, title := range titles {
			v, err := strconv.ParseFloat(cells[i], 64)
			switch {
			case title == "COST":
				cost = v
			case title == "RANK" || title == "CPU" || title == "REMOTE" || title == "OVERLAP" || title == "RUN" || title == "KV%" || title == "STATE":
			case err != nil:
				t.Fatalf("%d columns: %s is %q", w, title, cells[i])
			default:
				sum += v
			}
		}
		if math.Abs(sum-cost) > 1e-9 || cost != c.Cost {
			t.Errorf("%d columns: the terms are %v, the cost %v of %v:\n%s\n%s", w, sum, cost, c.Cost, rows[0], rows[1])
		}
	}
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;]*m")

// TestTiersOfRanks: a tier outside the device has a column in the table of ranks, at 80
// columns, too, where some rank has a block in it; the others have none.
func TestTiersOfRanks(t *testing.T) {
	r := &feed.Router{Ranks: []feed.Rank{{Rank: admin.Rank{Label: "decode-1/dp0"}}, {Rank: admin.Rank{Label: "decode-2/dp0"}}}}
	draw := func() []string {
		p := widget.NewPainter(theme.New("dark", termenv.Ascii, true), 80)
		PlainRanks(r, p)
		return strings.Split(escapes.ReplaceAllString(strings.Join(p.Lines(), "\n"), ""), "\n")
	}
	if head := draw()[0]; strings.Contains(head, "CPU") || !strings.Contains(head, "HIT%") {
		t.Errorf("without tiers: %s", head)
	}
	r.Ranks[1].Feed.Tiers, r.Ranks[1].Feed.TiersReported = route.Tiers{CPU: 4711, Disk: 12}, true
	lines := draw()
	head := strings.Join(strings.Fields(lines[0]), " ")
	if !strings.Contains(head, " KV CPU DISK HIT%") || strings.Contains(head, "REMOTE") {
		t.Errorf("with tiers: %s", lines[0])
	}
	text := strings.Join(lines, "\n")
	if !strings.Contains(text, "4711") && !strings.Contains(text, "4.7k") || !strings.Contains(text, " 12 ") {
		t.Errorf("the figures are missing:\n%s", text)
	}
	for _, l := range lines {
		if widget.Width(l) > 80 {
			t.Errorf("more than 80 columns: %q", l)
		}
	}
}
