package tui

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/muesli/termenv"
	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/page"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// updating reports whether -update was given, a flag that teatest brings along:
// golden files are rewritten.
func updating() bool {
	on, ok := flag.Lookup("update").Value.(flag.Getter).Get().(bool)
	return ok && on
}

func leakMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// teatest waits for interrupts for the rest of the process.
		goleak.IgnoreTopFunction("github.com/charmbracelet/x/exp/teatest.NewTestModel.func2"),
		// bubbletea's reader of a terminal that never sends anything.
		goleak.IgnoreAnyFunction("github.com/charmbracelet/bubbletea.(*Program).readLoop"))
}

// view is one that a key brings onto the screen.
type view struct {
	name string
	show func(a *app, g stage)
}

// views brings every view onto the screen.
var views = []view{
	{"overview", func(*app, stage) {}},
	{"heat", func(a *app, _ stage) { press(a, "x", "x") }},
	{"workers", func(a *app, _ stage) { press(a, "2", "j", "j", "m") }},
	{"folded", func(a *app, _ stage) { press(a, "2", "v", "j", "l") }},
	{"radix", func(a *app, g stage) {
		press(a, "3")
		loadTree(a, g, "")
		press(a, "l")
		loadTree(a, g, "1")
		press(a, "j", "l")
		loadTree(a, g, "11")
	}},
	{"hottest", func(a *app, g stage) {
		press(a, "3", "t")
		for s := range 2 {
			hottest(a, g, s)
		}
	}},
	{"evicted", func(a *app, g stage) {
		press(a, "3")
		loadTree(a, g, "")
		press(a, "l")
		loadTree(a, g, "1")
		evicted(a, g, 4)
	}},
	{"decisions", func(a *app, g stage) {
		press(a, "4")
		loadList(a, g, "")
		loadReceipt(a, g)
	}},
	{"decision", func(a *app, g stage) {
		press(a, "4")
		loadList(a, g, "")
		loadReceipt(a, g)
		press(a, "enter")
	}},
	{"events", func(a *app, _ stage) { press(a, "5", "j") }},
	{"help", func(a *app, _ stage) { press(a, "?") }},
	{"attention", func(a *app, _ stage) { press(a, "!") }},
}

// hottest hands over the flat list of runs as it is after some seconds.
func hottest(a *app, g stage, s int) {
	answer := g.children("11")
	answer.Node = nil
	answer.Children = append(answer.Children, g.children("").Children...)
	answer.Now = answer.Now.Add(time.Duration(2*s) * time.Second)
	for i := range answer.Children {
		answer.Children[i].Hits += uint64(s * 20 * i)
	}
	a.Update(page.ChildrenMsg{Router: a.sel, Query: admin.BrowseQuery{Limit: 200, Flat: true}, Answer: answer})
}

// evicted hands over the first level of the tree as it is after some seconds: the
// second run has lost 40 blocks a second, and the third has grown.
func evicted(a *app, g stage, s int) {
	answer := g.children("")
	answer.Now = answer.Now.Add(time.Duration(s) * time.Second)
	answer.Children[1].Blocks -= 40 * s
	answer.Children[2].Blocks += 10 * s
	answer.Children[0].Blocks -= 1000 // of which a lower bound is all that is known
	a.Update(page.ChildrenMsg{Router: a.sel, Query: admin.BrowseQuery{Sort: "blocks", Limit: 50}, Answer: answer})
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "golden", name+".txt")
	if updating() {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); d != "" {
		t.Errorf("%s differs (-want +got); -update rewrites it:\n%s", path, d)
	}
}

// everySize runs test at each size, with and without characters beyond ASCII; name has
// what distinguishes the golden files.
func everySize(t *testing.T, name string, test func(t *testing.T, w, h int, o Options, name string)) {
	t.Helper()
	for _, size := range [][2]int{{120, 40}, {80, 24}, {200, 50}} {
		for _, ascii := range []bool{false, true} {
			name := fmt.Sprintf("%s-%dx%d", name, size[0], size[1])
			if ascii {
				name += "-ascii"
			}
			t.Run(name, func(t *testing.T) {
				test(t, size[0], size[1], Options{Profile: termenv.Ascii, ASCII: ascii}, name)
			})
		}
	}
}

func TestViews(t *testing.T) {
	for _, v := range views {
		everySize(t, v.name, func(t *testing.T, w, h int, o Options, name string) {
			g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
			a := newStage(t, g, w, h, 20, o)
			v.show(a, g)
			got := screen(a)
			checkFrame(t, got, w, h, o.ASCII)
			golden(t, name, got+"\n")
		})
	}
}

// TestCachesViews: cache groups and tiers of a rank are shown on the page of workers, at 80
// columns, too.
func TestCachesViews(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {120, 40}} {
		for name, want := range map[string]string{
			"groups": "cache groups (block): full_attention (16), sliding_window 128 (16), mamba (64)",
			"tiers":  "outside the device: 4711 blocks cpu, 12 disk, 0 remote",
		} {
			name := fmt.Sprintf("caches-%s-%dx%d", name, size[0], size[1])
			t.Run(name, func(t *testing.T) {
				a := newStage(t, stage{prefill: 1, decode: 3, dp: 1, caches: true}, size[0], size[1], 20, Options{Profile: termenv.Ascii})
				press(a, "2")
				got := screen(a)
				for range 3 {
					if !strings.Contains(got, want) {
						press(a, "j")
						got = screen(a)
					}
				}
				checkFrame(t, got, size[0], size[1], false)
				mustContain(t, got, want)
				golden(t, name, got+"\n")
			})
		}
	}
}

// TestMovesViews: streams that went on elsewhere are shown on the page of workers, at 80
// columns and of a folded worker, too; a router that does not report them has none of
// their figures, and one that had none has no line of them.
func TestMovesViews(t *testing.T) {
	for _, c := range []struct {
		moves, name, want string
		keys              []string
	}{
		{"some", "decode-0/dp0", "streams: moved away 0, moved here 70, wait to move 7", nil},
		{"some", "decode-0/dp1", "streams: moved away 200, moved here 0, wait to move 0", nil},
		{"some", "decode-0 (2)", "streams: moved away 200, moved here 70, wait to move 7", []string{"v"}},
		{"unknown", "decode-0/dp0", "streams: moved away -, moved here -, wait to move -", nil},
		{"unknown", "decode-0 (2)", "streams: moved away -, moved here -, wait to move -", []string{"v"}},
		{"", "decode-0/dp0", "", nil},
	} {
		name := fmt.Sprintf("moves-%s-%s", c.moves, strings.NewReplacer("/", "-", " (2)", "-folded").Replace(c.name))
		everySize(t, name, func(t *testing.T, w, h int, o Options, name string) {
			a := newStage(t, stage{decode: 2, dp: 2, moves: c.moves}, w, h, 20, o)
			press(a, append([]string{"2", "s"}, c.keys...)...)
			for range 4 {
				if !strings.Contains(screen(a), "─ "+c.name+" ─") && !strings.Contains(screen(a), "- "+c.name+" -") {
					press(a, "j")
				}
			}
			got := screen(a)
			checkFrame(t, got, w, h, o.ASCII)
			if c.moves == "" {
				if strings.Contains(strings.ToLower(got), "move") {
					t.Errorf("streams that moved where none did:\n%s", got)
				}
				return
			}
			mustContain(t, got, c.want)
			if wide := w == 200; wide != strings.Contains(got, "MOVED AWAY MOVED HERE WAIT TO MOVE") {
				t.Errorf("the columns are shown: %v", !wide)
			}
			golden(t, name, got+"\n")
		})
	}
}

// checkFrame is what holds of every frame.
func checkFrame(t *testing.T, frame string, w, h int, ascii bool) {
	t.Helper()
	lines := strings.Split(frame, "\n")
	if len(lines) != h {
		t.Errorf("the frame has %d lines, not %d", len(lines), h)
	}
	if !utf8.ValidString(frame) {
		t.Error("the frame is not UTF-8")
	}
	for i, l := range lines {
		if n := widget.Width(l); n > w {
			t.Errorf("line %d has %d columns, more than %d: %q", i+1, n, w, l)
		}
		for _, r := range l {
			if r < ' ' || r == 0x7f || ascii && r > 0x7e {
				t.Errorf("line %d holds %U: %q", i+1, r, l)
				break
			}
		}
	}
}

// TestHealthyOverview: where all is well, the rates are shown, at each size.
func TestHealthyOverview(t *testing.T) {
	everySize(t, "healthy", func(t *testing.T, w, h int, o Options, name string) {
		got := screen(newStage(t, stage{prefill: 2, decode: 4, dp: 2}, w, h, 20, o))
		checkFrame(t, got, w, h, o.ASCII)
		golden(t, name, got+"\n")
		text := strings.Join(strings.Fields(got), " ")
		mustContain(t, text, "req/s 42.0", "hit 63.1%")
		if w >= 120 {
			mustContain(t, text, "p50 188ms")
		}
	})
}

// TestUnreached: a router that was never reached has no figures, and one that came
// back without its index and went again is not "ready".
func TestUnreached(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2}
	lost := feed.Sample{Err: errors.New("no router answers at http://10.0.0.1:8001: connection refused"), At: start.Add(20 * time.Second)}
	everySize(t, "unreached", func(t *testing.T, w, h int, o Options, name string) {
		a := newStage(t, g, w, h, 0, o)
		a.Update(sampleMsg{0, lost})
		got := screen(a)
		checkFrame(t, got, w, h, o.ASCII)
		golden(t, name, got+"\n")
		if strings.Contains(got, "ready") || strings.Contains(got, "0us") {
			t.Errorf("something is known of a router that was never reached:\n%s", got)
		}
	})
	everySize(t, "restarted", func(t *testing.T, w, h int, o Options, name string) {
		a := newStage(t, g, w, h, 18, o)
		restarted := g.snapshot(19)
		restarted.Status.Started, restarted.Status.Index.Memberships = restarted.Status.Now.Add(-3*time.Second), 21_000
		a.Update(sampleMsg{0, feed.Sample{Snapshot: restarted, At: restarted.Status.Now}})
		a.Update(sampleMsg{0, lost})
		got := screen(a)
		checkFrame(t, got, w, h, o.ASCII)
		golden(t, name, got+"\n")
		mustContain(t, got, "was ready")
		press(a, "!") // the line is longer than 80 columns
		mustContain(t, strings.Join(strings.Fields(screen(a)), " "), "cold since the router's restart: it knows 21000 of 1840000 blocks, 1%")
	})
}

// TestRadixFiguresAreWhole: where a place in the prompt, or the line of the whole index, has
// no room, words are left out, and no figure is cut.
func TestRadixFiguresAreWhole(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
	for w := 80; w <= 130; w++ {
		a := newStage(t, g, w, 24, 20, plainOptions)
		views[slices.IndexFunc(views, func(v view) bool { return v.name == "radix" })].show(a, g)
		deep := g.children("11")
		for i := range deep.Children {
			deep.Children[i].DepthBlocks = 123_456
		}
		a.Update(page.ChildrenMsg{Router: a.sel, Query: admin.BrowseQuery{Node: "11", Sort: "blocks", Limit: 50}, Answer: deep})
		for l := range strings.Lines(screen(a)) {
			l = strings.TrimRight(l, " \n")
			if cutFigure.MatchString(l) {
				t.Errorf("%d columns: %s", w, l)
			}
		}
	}
}

// cutFigure is a figure with a sign that the rest is missing, or a unit without its end.
var cutFigure = regexp.MustCompile(`at [0-9.]+[kM]?…|[-+][0-9.]+$| (b|bl|blk|blk/|lookups/|lookup)$`)

// TestTroubles demands that the overview shows every trouble in plain words.
func TestTroubles(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
	a := newStage(t, g, 120, 40, 3, plainOptions)
	press(a, "!")
	text := strings.Join(strings.Fields(screen(a)), " ")
	mustContain(t, text,
		"decode-2: engine down: connect: connection refused; its 2 ranks get no requests",
		"decode-0/dp0: saturated: 91% of its KV cache is in use (median of decode ranks 60%)",
		"and 6 requests wait in the engine",
		"decode-3/dp1: stale: its KV events are cut off (no connection for 7.2s)",
		"decode-1/dp0: computes remotely prefilled prompts again",
		"decode-1/dp1: ITL 9.2 times the median of its peers", "hot prefix: ", "fell back to local", "retries in the last minute", "failed in the last minute", "prefill-1: drains",
		"tokens of Qwen/Qwen3-32B are estimated")
	for s := 3; s < 5; s++ {
		sendSample(a, g, s)
	}
	press(a, "esc", "!")
	mustContain(t, strings.Join(strings.Fields(screen(a)), " "), "decode-1/dp1: event gap: 1 in the last minute")
	// The worst ranks come first, and the marks need no colour.
	press(a, "esc")
	var first string
	for l := range strings.Lines(screen(a)) {
		if strings.HasPrefix(l, "▶ ") || strings.HasPrefix(l, "X ") {
			first = l
			break
		}
	}
	if !strings.Contains(first, "decode-2/") || !strings.Contains(first, "DOWN") {
		t.Errorf("the first rank is %q", first)
	}
}

// TestColours: no view says anything by colour alone.
func TestColours(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
	lines := func(a *app) (out []string) { // charts with a colour have blanks at the end of lines
		for l := range strings.Lines(screen(a)) {
			out = append(out, strings.TrimRight(l, " \n"))
		}
		return out
	}
	for _, c := range []struct {
		name    string
		profile termenv.Profile
		theme   string
		colours bool
	}{{"none", termenv.Ascii, "dark", false}, {"mono", termenv.TrueColor, "mono", false}, {"16", termenv.ANSI, "dark", true}, {"256", termenv.ANSI256, "light", true}} {
		t.Run(c.name, func(t *testing.T) {
			for _, v := range views {
				a := newStage(t, g, 120, 40, 20, Options{Profile: c.profile, Theme: c.theme})
				v.show(a, g)
				frame := a.View()
				got := strings.Contains(frame, "\x1b[3") || strings.Contains(frame, ";3") || strings.Contains(frame, "\x1b[9")
				if got != c.colours {
					t.Errorf("%s: colours = %v, want %v", v.name, got, c.colours)
				}
				plain := newStage(t, g, 120, 40, 20, plainOptions)
				v.show(plain, g)
				if d := cmp.Diff(lines(plain), lines(a)); d != "" {
					t.Errorf("%s: the text depends on colours:\n%s", v.name, d)
				}
			}
		})
	}
}
