package tui

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/page"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

var fleet = stage{prefill: 2, decode: 4, dp: 2}

// cursorLine is the row under the cursor.
func cursorLine(a *app) string {
	for l := range strings.Lines(screen(a)) {
		if strings.HasPrefix(l, a.th.Cursor+" ") {
			return l
		}
	}
	return ""
}

func TestSwitchViews(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 5, plainOptions)
	for _, c := range []struct{ key, tab string }{
		{"2", "[2 Workers]"}, {"5", "[5 Events]"}, {"tab", "[1 Overview]"}, {"shift+tab", "[5 Events]"}, {"`", "[1 Overview]"}, {"4", "[4 Decisions]"}, {"3", "[3 Radix]"}, {"1", "[1 Overview]"},
	} {
		press(a, c.key)
		mustContain(t, screen(a), c.tab)
	}
	press(a, "?")
	mustContain(t, screen(a), "help, esc closes", "two levels")
	press(a, "G")
	mustContain(t, screen(a), "DOWN EJECT ASLEEP")
	press(a, "esc")
	if strings.Contains(screen(a), "help, esc closes") {
		t.Error("esc does not close the help")
	}
}

func TestFilterSortAndMove(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 5, plainOptions)
	press(a, "/")
	typed(a, "role:decode dp1")
	press(a, "enter")
	got := screen(a)
	mustContain(t, got, "filter role:decode dp1", "(4 shown)", "decode-3/dp1")
	if strings.Contains(got, "  prefill-0/dp") {
		t.Error("the filter lets prefill through")
	}
	// A wrong filter says what is wrong and leaves the old one.
	press(a, "/")
	press(a, "ctrl+u")
	typed(a, "nosuch>3")
	press(a, "enter")
	mustContain(t, screen(a), `there is no field "nosuch"`, "filter role:decode dp1")
	press(a, "esc")
	if strings.Contains(screen(a), "filter role:decode") {
		t.Error("esc does not clear the filter")
	}
	// Sort by name: the first row is decode-0/dp0; reversed it is prefill-1/dp1.
	press(a, ":")
	typed(a, "sort rank")
	press(a, "enter")
	mustContain(t, cursorLine(a), "decode-0/dp0")
	press(a, "S")
	mustContain(t, cursorLine(a), "prefill-1/dp1")
	press(a, "S", "j", "j")
	mustContain(t, cursorLine(a), "decode-1/dp0")
	// The cursor stays with its rank when the order changes and data arrives.
	press(a, ":")
	typed(a, "sort kv")
	press(a, "enter")
	mustContain(t, cursorLine(a), "decode-1/dp0")
	for s := 5; s < 12; s++ {
		sendSample(a, fleet, s)
		mustContain(t, cursorLine(a), "decode-1/dp0")
	}
	press(a, "G", "j", "j")
	last := cursorLine(a)
	press(a, "g")
	if first := cursorLine(a); first == last || first == "" {
		t.Errorf("g and G show the same line %q", first)
	}
	press(a, ":")
	typed(a, "sort nosuch")
	press(a, "enter")
	mustContain(t, screen(a), `"nosuch" is not one of worst, rank, kv`)
	press(a, "F")
	mustContain(t, screen(a), "no rank fits the filter")
	press(a, "F", "z")
	mustContain(t, screen(a), "EVAGE")
}

func TestPauseAndHistory(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 10, plainOptions)
	press(a, "p")
	mustContain(t, screen(a), "PAUSED")
	body := func() string { // without the clock in the first line
		_, rest, _ := strings.Cut(screen(a), "\n")
		return rest
	}
	before := body()
	for s := 10; s < 20; s++ {
		sendSample(a, fleet, s)
	}
	if body() != before {
		t.Errorf("paused data moved:\n%s\n--- then\n%s", before, body())
	}
	mustContain(t, screen(a), "PAUSED 10s ago")
	press(a, "[")
	mustContain(t, screen(a), "PAUSED 11s ago")
	press(a, "[", "]", "]", "]")
	mustContain(t, screen(a), "PAUSED 9.0s ago")
	press(a, " ")
	if got := screen(a); strings.Contains(got, "PAUSED") {
		t.Error("space does not go on")
	}
	for range 30 {
		press(a, "[")
	}
	mustContain(t, screen(a), "there is no older one")
	press(a, "p")
	press(a, "+")
	if a.rate != 500*time.Millisecond {
		t.Errorf("rate %s", a.rate)
	}
	press(a, "-", "-")
	if a.rate != 2*time.Second {
		t.Errorf("rate %s", a.rate)
	}
	press(a, ":")
	typed(a, "rate 3")
	press(a, "enter")
	if a.rate != 3*time.Second {
		t.Errorf("rate %s", a.rate)
	}
	for range 20 {
		press(a, "-")
	}
	if a.rate != maxRate {
		t.Errorf("rate %s", a.rate)
	}
}

func TestHistoryIsBounded(t *testing.T) {
	a := newStage(t, stage{decode: 1, dp: 1}, 120, 40, 3*historyLen, plainOptions)
	if len(a.history) != historyLen {
		t.Errorf("%d views are kept", len(a.history))
	}
	if n := len(a.replicas[0].builder.Events()); n > 1000 {
		t.Errorf("%d events are kept", n)
	}
	if n := len(a.replicas[0].builder.History("decode-0/dp0").Values(feed.KV)); n != 300 {
		t.Errorf("%d samples are kept", n)
	}
}

// TestImbalanceInHeader: the header shows the busiest rank against the mean of its role.
func TestImbalanceInHeader(t *testing.T) {
	a := newStage(t, fleet, 200, 50, 3, plainOptions)
	r := a.page().R
	sum, most, n := 0, 0, 0
	for i := range r.Ranks {
		if k := &r.Ranks[i]; k.Role == "decode" {
			k.ActiveRequests = i * 3
			sum, most, n = sum+k.ActiveRequests, max(most, k.ActiveRequests), n+1
		} else {
			k.ActiveRequests = 7
		}
	}
	a.dirty = true
	mustContain(t, strings.SplitN(screen(a), "\n", 2)[0], "imbalance "+widget.Rate(float64(most*n)/float64(sum)))
	for i := range r.Ranks {
		r.Ranks[i].ActiveRequests = 0
	}
	a.dirty = true
	if strings.Contains(strings.SplitN(screen(a), "\n", 2)[0], "imbalance") {
		t.Error("an idle fleet has an imbalance")
	}
}

func TestDecisionKeys(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 20, plainOptions)
	deliver(a, press(a, "2", "enter"))
	mustContain(t, screen(a), "[4 Decisions]", "filter worker:")
	press(a, "esc")
	loadList(a, fleet, "")
	mustContain(t, screen(a), "   follow ", "30 shown of 5000 taken", "loading the receipt")
	loadReceipt(a, fleet)
	mustContain(t, screen(a), "chosen", "runner-up, +3.90", "excluded: KV usage 91% > 90%", "5 instead    local", "8 verdict")
	// Moving stops following; the cursor stays with its decision.
	press(a, "j", "j")
	row := cursorLine(a)
	mustContain(t, screen(a), "no follow")
	loadList(a, fleet, "")
	if got := cursorLine(a); got != row {
		t.Errorf("the cursor moved from %q to %q", row, got)
	}
	press(a, "f")
	mustContain(t, screen(a), "   follow ")
	press(a, "enter", "n")
	mustContain(t, screen(a), "esc list")
	press(a, "esc", "/")
	typed(a, "path:local eff<100")
	press(a, "enter")
	loadList(a, fleet, "path:local eff<100")
	got := screen(a)
	if strings.Contains(got, " remote ") {
		t.Errorf("the filter lets remote through:\n%s", got)
	}
	// A receipt that the router no longer has.
	id, _ := a.pages[3].Row(a.page())
	a.Update(page.DecisionMsg{ID: id, Err: &admin.StatusError{Status: 404, Message: "the decision is no longer kept"}})
	mustContain(t, screen(a), "the decision is no longer kept")
}

func TestOverviewOpensRank(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 5, plainOptions)
	press(a, "j", "j", "j")
	name := strings.Fields(cursorLine(a))[1]
	deliver(a, press(a, "enter"))
	mustContain(t, screen(a), "[2 Workers]", "── "+name, "ROUTER    ENGINE     DIFF")
	mustContain(t, cursorLine(a), name)
}

func TestEventDetail(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 10, plainOptions)
	press(a, "5", "/")
	typed(a, "kind:gap")
	press(a, "enter")
	deliver(a, press(a, "enter"))
	mustContain(t, screen(a), "event 9", `{"missing":17}`)
	press(a, "esc", "esc", "F")
	if strings.Contains(screen(a), " INFO ") {
		t.Error("F leaves infos")
	}
}

func TestSave(t *testing.T) {
	dir := t.TempDir()
	a := newStage(t, fleet, 120, 40, 5, Options{Dir: dir})
	save := func(name string) {
		press(a, "o", "ctrl+u")
		typed(a, name)
		press(a, "enter")
	}
	save("view.json")
	mustContain(t, screen(a), "saved "+filepath.Join(dir, "view.json"))
	raw, err := os.ReadFile(filepath.Join(dir, "view.json"))
	if err != nil {
		t.Fatal(err)
	}
	var v feed.View
	if err := json.Unmarshal(raw, &v); err != nil || len(v.Routers[0].Ranks) != 12 || v.Schema != feed.Schema {
		t.Errorf("%v: %d ranks", err, len(v.Routers[0].Ranks))
	}
	save("ranks.csv")
	f, err := os.Open(filepath.Join(dir, "ranks.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil || len(rows) != 13 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
	press(a, "ctrl+s")
	list, err := filepath.Glob(filepath.Join(dir, "dynctl-top-overview-*.txt"))
	if err != nil || len(list) != 1 {
		t.Fatalf("%v %v", list, err)
	}
	text, err := os.ReadFile(list[0])
	if err != nil {
		t.Fatal(err)
	}
	mustContain(t, string(text), "[1 Overview]")
	// Nothing is overwritten, and failures are shown.
	save("view.json")
	mustContain(t, screen(a), "! not saved")
}

func TestCopy(t *testing.T) {
	var out bytes.Buffer
	a := newStage(t, fleet, 120, 40, 5, Options{Out: &out})
	press(a, ":")
	typed(a, "sort rank")
	press(a, "enter", "y")
	if got := out.String(); got != "\x1b]52;c;ZGVjb2RlLTAvZHAw\a" { // decode-0/dp0
		t.Errorf("copied %q", got)
	}
	mustContain(t, screen(a), "copied decode-0/dp0")
	press(a, "3", "y")
	mustContain(t, screen(a), "nothing to copy")
}

func TestCommands(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 5, plainOptions)
	run := func(s string) string {
		press(a, ":")
		typed(a, s)
		press(a, "enter")
		return screen(a)
	}
	mustContain(t, run("workers role:prefill"), "[2 Workers]", "filter role:prefill")
	mustContain(t, run("events severity:warn"), "[5 Events]")
	mustContain(t, run("d"), "[4 Decisions]")
	mustContain(t, run("sort kv"), "always newest first")
	mustContain(t, run("radix"), "[3 Radix]")
	mustContain(t, run("help"), "help, esc closes")
	press(a, "esc")
	mustContain(t, run("nosuch"), `there is no command "nosuch"`)
	mustContain(t, run("rate never"), "is not a duration")
	mustContain(t, run("router 7"), "give a number from 1 to 1")
	mustContain(t, run("theme pink"), "not one of dark, light, mono")
	run("overview")
	mustContain(t, run("theme light"), "theme light")
	run("ascii")
	checkFrame(t, screen(a), 120, 40, true)
	// What is typed can be edited and given up.
	press(a, ":")
	typed(a, "quit")
	press(a, "backspace", "esc")
	if a.finished {
		t.Error("esc ran the command")
	}
	run("quit")
	if !a.finished {
		t.Error("quit does not")
	}
}

// TestResizeStorm draws every view at every size down to nothing.
func TestResizeStorm(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
	for _, v := range views {
		a := newStage(t, g, 120, 40, 5, plainOptions)
		v.show(a, g)
		for _, w := range []int{0, 1, 7, 59, 60, 61, 79, 80, 99, 100, 101, 109, 110, 119, 120, 159, 160, 200, 320} {
			for _, h := range []int{0, 1, 2, 14, 15, 16, 20, 23, 24, 29, 30, 31, 40, 60, 120} {
				a.Update(tea.WindowSizeMsg{Width: w, Height: h})
				got := screen(a)
				if w == 0 || h == 0 {
					continue
				}
				if w < minWidth || h < minHeight {
					if w >= 40 && h >= 4 {
						mustContain(t, strings.Join(strings.Fields(got), " "), "needs 60x15", "dynctl top --once")
					}
				}
				checkFrame(t, got, w, h, false)
			}
		}
	}
}

// TestEveryKey presses every key on every view, with and without data.
func TestEveryKey(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
	for _, seconds := range []int{0, 1, 5} {
		for _, v := range views {
			a := newStage(t, g, 100, 30, seconds, Options{Dir: t.TempDir()})
			if seconds > 0 {
				v.show(a, g)
			} else {
				press(a, string(rune('1'+len(v.name)%5)))
			}
			for _, e := range keys.Entries() {
				if e.Action == keys.Quit {
					continue
				}
				for _, k := range e.Binding.Keys() {
					press(a, k)
					if a.asking != "" {
						typed(a, "x y")
						press(a, "esc")
					}
					checkFrame(t, screen(a), 100, 30, false)
				}
			}
		}
	}
}

func TestKeysAreUnique(t *testing.T) {
	seen := map[string]string{}
	for _, e := range keys.Entries() {
		for _, k := range e.Binding.Keys() {
			if was, ok := seen[k]; ok {
				t.Errorf("%q is both %q and %q", k, was, e.Binding.Help().Desc)
			}
			seen[k] = e.Binding.Help().Desc
		}
	}
}

func TestMouse(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 5, plainOptions)
	press(a, ":")
	typed(a, "sort rank")
	press(a, "enter")
	line := -1
	for i, l := range strings.Split(screen(a), "\n") {
		if strings.Contains(l, "decode-2/dp1 ") {
			line = i
		}
	}
	a.Update(tea.MouseMsg{Button: tea.MouseButtonLeft, Action: tea.MouseActionPress, Y: line})
	mustContain(t, cursorLine(a), "decode-2/dp1")
	a.Update(tea.MouseMsg{Button: tea.MouseButtonWheelDown})
	mustContain(t, cursorLine(a), "decode-3/dp0")
}

// TestClickSorts: a click on a title sorts by it, a second one turns that round, and
// the title shows which way it is.
func TestClickSorts(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2}
	a := newStage(t, g, 120, 40, 5, plainOptions)
	line := func() (y, x int) {
		for y, l := range strings.Split(screen(a), "\n") {
			if i := strings.Index(l, "KV%"); strings.Contains(l, "WORKER/RANK") {
				return y, i
			}
		}
		t.Fatal("no titles")
		return 0, 0
	}
	y, x := line()
	click := func() {
		a.Update(tea.MouseMsg{X: x, Y: y, Button: tea.MouseButtonLeft, Action: tea.MouseActionPress})
	}
	mustContain(t, screen(a), "ST▼")
	click()
	mustContain(t, screen(a), "KV%▼", "sort kv")
	click()
	mustContain(t, screen(a), "KV%▲")
	x = strings.Index(strings.Split(screen(a), "\n")[y], "WORKER/RANK") + 2
	click()
	mustContain(t, screen(a), "WORKER/RANK▼", "sort rank")
}

// TestHeatOfAThousand: the strip has a cell for every rank of a large fleet, in few
// lines, and says how uneven the load is.
func TestHeatOfAThousand(t *testing.T) {
	g := stage{prefill: 50, decode: 200, dp: 4}
	a := newStage(t, g, 120, 40, 3, plainOptions)
	for _, want := range []string{"active requests of 800 ranks", "KV in use of 800 ranks", "ITL of 800 ranks", "prefix hits of 800 ranks"} {
		press(a, "x")
		got := screen(a)
		checkFrame(t, got, 120, 40, false)
		mustContain(t, got, want, "imbalance ", "prefill-0/dp0", "decode-0/dp0")
		if strings.Contains(got, "more ranks") {
			t.Errorf("not all ranks are there:\n%s", got)
		}
	}
	cells := 0
	press(a, "x", "x")
	for l := range strings.Lines(screen(a)) {
		if strings.HasPrefix(l, "  prefill-") || strings.HasPrefix(l, "  decode-") {
			cells += len([]rune(strings.ReplaceAll(strings.TrimSpace(string([]rune(l)[18:])), " ", "")))
		}
	}
	if cells != 1000 {
		t.Errorf("%d cells", cells)
	}
	// In a small window what does not fit is counted.
	small := newStage(t, g, 80, 24, 3, plainOptions)
	press(small, "x")
	checkFrame(t, screen(small), 80, 24, false)
	mustContain(t, screen(small), "more ranks")
}

// TestSmallScreenIsNotEmpty: on the smallest screen no line of a view is empty while it hides
// something: ranks, attention or the newest decisions.
func TestSmallScreenIsNotEmpty(t *testing.T) {
	for name, g := range map[string]stage{
		"small fleet": {prefill: 1, decode: 2, dp: 1},
		"healthy":     {prefill: 2, decode: 4, dp: 2},
		"trouble":     {prefill: 2, decode: 4, dp: 2, troubles: true},
		"large fleet": {prefill: 8, decode: 32, dp: 2, troubles: true},
	} {
		for _, keys := range [][]string{{}, {"x"}, {"2"}} {
			a := newStage(t, g, 80, 24, 20, plainOptions)
			press(a, keys...)
			got := screen(a)
			empty := 0
			for line := range strings.Lines(got) {
				if strings.TrimSpace(line) == "" {
					empty++
				}
			}
			hidden := regexp.MustCompile(`\d more|press !`).MatchString(got) || !strings.Contains(got, "Last decision") && len(keys) == 0
			if empty > 1 && hidden || empty > 0 && name == "small fleet" && len(keys) == 0 {
				t.Errorf("%s %v: %d lines are empty:\n%s", name, keys, empty, got)
			}
		}
	}
	mustContain(t, screen(newStage(t, stage{prefill: 1, decode: 2, dp: 1}, 80, 24, 20, plainOptions)), "Last decisions", "OUTCOME")
}

// TestCutLinesAreShownWhole: each view has a key that shows all of what its cursor is on.
func TestCutLinesAreShownWhole(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
	for name, c := range map[string]struct{ cut, key, whole string }{
		"overview":  {"its 2 ...", "!", "connect: connection refused; its 2 ranks get no requests"},
		"workers":   {"KV over …", "d", "connector nixl, models Qwen/Qwen3-32B"},
		"events":    {"every batch since the …", "enter", "every batch since the publisher's start was seen"},
		"decisions": {"running…", "enter", "eff_isl 3208 >= 2048 (0 of 3208 tokens cached on the decode rank)"},
		"radix":     {"held by 3: decode-0/dp0", "enter", "runs below 2 longest copy 36 of 36 blocks"},
		"help":      {"more lines (j scrolls)", "pgdown", "half a page down"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newStage(t, g, 80, 24, 20, plainOptions)
			views[slices.IndexFunc(views, func(v view) bool { return v.name == name })].show(a, g)
			mustContain(t, screen(a), c.cut)
			press(a, c.key)
			if name == "radix" {
				loadTree(a, g, "11")
			}
			mustContain(t, strings.Join(strings.Fields(screen(a)), " "), c.whole)
		})
	}
	// What the header leaves out stands above all that needs attention.
	a := newStage(t, g, 80, 24, 20, plainOptions)
	if strings.Contains(screen(a), "imbalance") {
		t.Errorf("the header has room for all:\n%s", screen(a))
	}
	press(a, "!")
	mustContain(t, strings.Join(strings.Fields(screen(a)), " "), "degraded, 6 workers, 12 ranks, imbalance")
}
