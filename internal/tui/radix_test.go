package tui

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/page"
)

func TestRadixKeys(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 3, plainOptions)
	press(a, "3")
	mustContain(t, screen(a), "loading")
	loadTree(a, fleet, "")
	mustContain(t, cursorLine(a), "7f3a19c2", "602k", "85.8")
	press(a, "l")
	loadTree(a, fleet, "1")
	press(a, "j", "l")
	loadTree(a, fleet, "11")
	mustContain(t, screen(a), "02ab0000", "37 more (enter loads them)")
	press(a, "Z")
	mustContain(t, screen(a), "root > 7f3a19c2 > 91c2aa55")
	mustContain(t, cursorLine(a), "02ab0000")
	press(a, "u")
	mustContain(t, cursorLine(a), "91c2aa55")
	press(a, "esc")
	mustContain(t, cursorLine(a), "7f3a19c2")
	press(a, "h")
	if got := screen(a); strings.Contains(got, "91c2aa55") {
		t.Errorf("h does not close:\n%s", got)
	}
	press(a, "/")
	typed(a, "aa01")
	press(a, "enter")
	mustContain(t, cursorLine(a), "aa01b27f")
	press(a, "/", "ctrl+u")
	typed(a, "zz")
	press(a, "enter")
	mustContain(t, screen(a), "no head of a hash")
	press(a, "/", "ctrl+u")
	typed(a, "rank:decode-0/dp0")
	press(a, "enter")
	mustContain(t, screen(a), "loading")
	// An answer to an older question is not taken for a newer one.
	loadTree(a, fleet, "")
	mustContain(t, screen(a), "loading")
	a.Update(page.ChildrenMsg{Query: admin.BrowseQuery{Sort: "blocks", Limit: 50, Rank: "decode-0/dp0"}, Answer: fleet.children("")})
	mustContain(t, screen(a), "7f3a19c2")
}

// TestOverlapThatNobodyKnows: what a rank whose KV events are not trusted has cached is shown
// as unknown and not as nothing.
func TestOverlapThatNobodyKnows(t *testing.T) {
	a := newStage(t, fleet, 160, 50, 3, plainOptions)
	press(a, "4")
	loadList(a, fleet, "")
	r := fleet.receipt(newest, start.Add(listed*time.Second), true)
	r.Decode.Candidates[1].OverlapBlocks, r.Decode.Candidates[1].CacheUnknown = 0, true
	a.Update(page.DecisionMsg{Router: a.sel, ID: r.ID, Raw: encode(r)})
	press(a, "enter")
	overlap := regexp.MustCompile(`(?m)^\W*decode-1/dp0 +(\S+) `).FindStringSubmatch(screen(a))
	if overlap == nil || overlap[1] != "?" {
		t.Errorf("the unknown overlap is %q:\n%s", overlap, screen(a))
	}
}

// TestRadixByRate: what is hit now stands above what was hit more in all its life.
func TestRadixByRate(t *testing.T) {
	a := newStage(t, fleet, 200, 50, 3, plainOptions)
	press(a, "3", "s")
	mustContain(t, screen(a), "sort hits")
	answer := func(s int, hits ...uint64) {
		r := fleet.children("")
		r.Now = r.Now.Add(time.Duration(s) * time.Second)
		for i := range r.Children {
			r.Children[i].Hits, r.Children[i].HitsExact = hits[i], true
		}
		a.Update(page.ChildrenMsg{Query: admin.BrowseQuery{Sort: "hits", Limit: 200}, Answer: r})
	}
	answer(0, 31200, 2510, 10)
	mustContain(t, cursorLine(a), "7f3a19c2")
	answer(2, 31200, 2530, 70)
	press(a, "g")
	got := screen(a)
	mustContain(t, cursorLine(a), "bb771200", "30.0", "15.4k")
	if first, last := strings.Index(got, "aa01b27f"), strings.Index(got, "7f3a19c2"); first < 0 || first > last {
		t.Errorf("the idle run does not stand last:\n%s", got)
	}
}

// TestHottestRuns: the flat table stands by hits per second, names all holders, and
// gives way to the levels.
func TestHottestRuns(t *testing.T) {
	a := newStage(t, fleet, 200, 50, 3, plainOptions)
	press(a, "3", "t")
	hottest(a, fleet, 0)
	hottest(a, fleet, 1)
	press(a, "g")
	mustContain(t, screen(a), "most used runs", "sort hits")
	mustContain(t, cursorLine(a), "bb771200", "40.0", "20.5k")
	// An answer for the levels is not taken for the flat table.
	loadTree(a, fleet, "")
	mustContain(t, cursorLine(a), "bb771200", "40.0")
	press(a, "enter")
	answer := fleet.children("1")
	answer.Node.ID, answer.Node.Ranks, answer.Node.RankLabels = "3", 2, []string{"decode-10/dp0", "decode-9/dp1"}
	_, cmd := a.Update(page.ChildrenMsg{Query: admin.BrowseQuery{Node: "3", Limit: 1}, Answer: answer})
	deliver(a, batched(cmd))
	mustContain(t, screen(a), "held by 2 of", "decode-9: dp1", "decode-10: dp0")
	press(a, "esc", "t")
	loadTree(a, fleet, "")
	mustContain(t, screen(a), "root", "37 more (enter loads them)")
}

// TestRadixAge: a run that came while the screen looked has its age, one that was there
// before is older than that; turning the order does not forget it.
func TestRadixAge(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 3, plainOptions)
	press(a, "3")
	answer := func(sort string, s, runs int) {
		r := fleet.children("")
		r.Now, r.Children, r.Total = r.Now.Add(time.Duration(s)*time.Second), r.Children[:runs], runs
		limit := 50
		if sort == "hits" {
			limit = 200
		}
		a.Update(page.ChildrenMsg{Query: admin.BrowseQuery{Sort: sort, Limit: limit}, Answer: r})
	}
	answer("blocks", 0, 2)
	answer("blocks", 30, 3)
	answer("blocks", 75, 3)
	press(a, "g")
	mustContain(t, screen(a), "seen for >1m15s")
	press(a, "G")
	mustContain(t, screen(a), "run bb77120000000000", "seen for 45s")
	press(a, "s")
	answer("hits", 90, 3)
	press(a, "G")
	mustContain(t, screen(a), "run bb77120000000000", "seen for 1m00s")
}

// TestRadixHolders: enter names every rank that holds a run, also of a thousand.
func TestRadixHolders(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 3, plainOptions)
	press(a, "3")
	loadTree(a, fleet, "")
	press(a, "enter")
	answer := fleet.children("1")
	answer.Node.Ranks, answer.Node.RankLabels = 1000, nil
	for w := range 250 {
		for dp := range 4 {
			answer.Node.RankLabels = append(answer.Node.RankLabels, fmt.Sprintf("decode-%d/dp%d", w, dp))
		}
	}
	_, cmd := a.Update(page.ChildrenMsg{Query: admin.BrowseQuery{Node: "1", Sort: "blocks", Limit: 50}, Answer: answer})
	deliver(a, batched(cmd))
	mustContain(t, screen(a), "holders of run 7f3a19c2e5d04b66", "held by 1000 of", "decode-0: dp0 dp1 dp2 dp3", "decode-2: dp0")
	press(a, "G")
	mustContain(t, screen(a), "decode-249: dp0 dp1 dp2 dp3")
}

// batched are the commands of a batch.
func batched(cmd tea.Cmd) []tea.Cmd {
	if cmd == nil {
		return nil
	}
	all, ok := cmd().(tea.BatchMsg)
	if !ok {
		return []tea.Cmd{cmd}
	}
	var out []tea.Cmd
	for _, c := range all {
		out = append(out, batched(c)...)
	}
	return out
}

// TestRadixForgets checks that a run that is gone leaves the tree.
func TestRadixForgets(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 3, plainOptions)
	press(a, "3")
	loadTree(a, fleet, "")
	press(a, "Z")
	loadTree(a, fleet, "1")
	mustContain(t, screen(a), "root > 7f3a19c2")
	answer := fleet.children("")
	answer.Children = answer.Children[1:]
	a.Update(page.ChildrenMsg{Query: admin.BrowseQuery{Sort: "blocks", Limit: 50}, Answer: answer})
	got := screen(a)
	mustContain(t, got, "aa01b27f")
	if strings.Contains(got, "7f3a19c2") {
		t.Errorf("the run is still there:\n%s", got)
	}
}
