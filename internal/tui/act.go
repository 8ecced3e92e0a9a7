package tui

import (
	"encoding/base64"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/page"
	"github.com/dynctl/dynctl/internal/tui/theme"
)

// key handles a key press.
func (a *app) key(m tea.KeyMsg) tea.Cmd {
	if m.Type == tea.KeyCtrlC {
		return a.quit()
	}
	if a.asking != "" {
		return a.typed(m)
	}
	a.message = ""
	if g := a.guard; g != nil {
		if a.guard = nil; m.String() == "y" {
			a.say("asking the router", false)
			return g
		}
		a.say("nothing was changed", false)
		return nil
	}
	act := a.keys[m.String()].Action
	if a.overlay != nil {
		if a.overlay.off.Move(act, a.h) {
			return nil
		}
		switch act {
		case keys.Back, keys.Enter, keys.Help, keys.Warnings, keys.Describe:
			a.overlay = nil
		case keys.Quit:
			return a.quit()
		case keys.View1, keys.View2, keys.View3, keys.View4, keys.View5:
			return a.show(int(act-keys.View1), nil)
		}
		return nil
	}
	if cmd, ok := a.playKey(m.String()); ok {
		return cmd
	}
	c := a.page()
	if cmd, ok := a.common(c, act); ok {
		return cmd
	}
	if cmd, ok := a.pages[a.tab].Act(c, act); ok {
		return cmd
	}
	if act == keys.Back && a.pages[a.tab].Filter() != "" {
		return a.filter(c, "")
	}
	if act == keys.Back && a.frozen != nil {
		a.resume()
	}
	return nil
}

// common does what keys do on every page.
func (a *app) common(c *page.Ctx, act keys.Action) (tea.Cmd, bool) {
	switch act {
	case keys.Quit:
		return a.quit(), true
	case keys.Help:
		a.overlay = &overlay{title: "help, esc closes", lines: a.helpLines()}
	case keys.Warnings:
		a.overlay = &overlay{title: "all that needs attention", live: a.warningLines}
	case keys.Describe:
		a.describe("")
	case keys.View1, keys.View2, keys.View3, keys.View4, keys.View5:
		return a.show(int(act-keys.View1), nil), true
	case keys.NextView:
		return a.show((a.tab+1)%len(a.pages), nil), true
	case keys.PrevView:
		return a.show((a.tab+len(a.pages)-1)%len(a.pages), nil), true
	case keys.LastView:
		return a.show(a.before, nil), true
	case keys.NextRouter:
		a.sel = (a.sel + 1) % len(a.replicas)
		return a.show(a.tab, nil), true
	case keys.Filter:
		return a.prompt("filter", a.pages[a.tab].Filter()), true
	case keys.Command:
		return a.prompt("command", ""), true
	case keys.Save:
		return a.prompt("save", a.fileName("json")), true
	case keys.SaveText:
		a.save(a.fileName("txt"))
	case keys.Pause:
		if a.frozen != nil {
			a.resume()
		} else {
			a.freeze(0)
		}
	case keys.StepBack:
		if a.frozen == nil {
			a.freeze(0)
		}
		a.step(1)
	case keys.StepForward:
		if a.frozen != nil {
			a.step(-1)
		}
	case keys.Faster:
		a.setRate(a.rate / 2)
	case keys.Slower:
		a.setRate(a.rate * 2)
	case keys.Refresh:
		return a.pollAll(), true
	case keys.Copy, keys.CopyRow:
		name, row := a.pages[a.tab].Row(c)
		if act == keys.CopyRow {
			name = row
		}
		a.copy(name)
	case keys.Theme:
		names := theme.Names()
		a.setTheme(names[(slices.Index(names, a.th.Name)+1)%len(names)])
	case keys.Mouse:
		a.mouse = !a.mouse
		if a.mouse {
			a.say("the mouse is on: wheel scrolls, click selects; M turns it off, shift selects text", false)
			return tea.EnableMouseCellMotion, true
		}
		a.say("the mouse is off", false)
		return tea.DisableMouse, true
	case keys.Redraw:
		return tea.ClearScreen, true
	default:
		return nil, false
	}
	return nil, true
}

func (a *app) quit() tea.Cmd {
	a.finished = true
	return tea.Quit
}

func (a *app) freeze(back int) {
	if len(a.history) == 0 {
		a.say("there is nothing to stand still yet", true)
		return
	}
	a.back = min(back, len(a.history)-1)
	p := a.history[len(a.history)-1-a.back]
	a.frozen = &p
}

func (a *app) resume() { a.frozen, a.back = nil, 0 }

// step goes back (1) or forth (-1) in history.
func (a *app) step(by int) {
	if a.frozen == nil {
		return
	}
	if to := a.back + by; to < 0 {
		a.say("this is the newest one; p returns to live data", false)
	} else if to >= len(a.history) {
		a.say("there is no older one", false)
	} else {
		a.freeze(to)
	}
}

func (a *app) setRate(d time.Duration) {
	a.rate = min(max(d, minRate), maxRate)
	a.say(fmt.Sprintf("asks every %s", a.rate), false)
}

func (a *app) setTheme(name string) {
	a.th = theme.New(name, a.opts.Profile, a.opts.ASCII)
	a.say("theme "+name, false)
}

// copy sends text to the terminal's clipboard.
func (a *app) copy(text string) {
	const most = 70_000 // terminals take about 100 kB of base64
	switch {
	case text == "":
		a.say("there is nothing to copy here", true)
	case a.opts.Out == nil:
		a.say("copying needs a terminal", true)
	default:
		if len(text) > most {
			text = text[:most]
		}
		// OSC 52, understood by most terminals, also through ssh; tmux needs
		// "set -g set-clipboard on".
		if _, err := io.WriteString(a.opts.Out, "\x1b]52;c;"+base64.StdEncoding.EncodeToString([]byte(text))+"\a"); err != nil {
			a.say("copying failed: "+err.Error(), true)
			return
		}
		if len(text) > 60 {
			text = text[:57] + "..."
		}
		a.say("copied "+text, false)
	}
}

// prompt opens the input line.
func (a *app) prompt(kind, value string) tea.Cmd {
	a.asking = kind
	a.input.SetSuggestions(nil)
	if kind == "command" {
		a.input.SetSuggestions(a.suggestions())
	}
	a.input.SetValue(value)
	a.input.CursorEnd()
	return a.input.Focus()
}

// typed handles keys while the input is open.
func (a *app) typed(m tea.KeyMsg) tea.Cmd {
	switch m.Type {
	case tea.KeyEsc:
		a.asking = ""
		a.input.Blur()
		return nil
	case tea.KeyEnter:
		kind, text := a.asking, strings.TrimSpace(a.input.Value())
		a.asking = ""
		a.input.Blur()
		switch kind {
		case "filter":
			a.message = ""
			return a.filter(a.page(), text)
		case "save":
			if text != "" {
				a.save(text)
			}
			return nil
		}
		return a.command(text)
	}
	var cmd tea.Cmd
	a.input, cmd = a.input.Update(m)
	return cmd
}

// verbs are the commands.
var verbs = []string{"overview", "workers", "radix", "decisions", "events", "describe", "drain", "resume", "sort", "rate", "filter", "save", "router", "ctx", "seek", "theme", "ascii", "help", "quit"}

// command runs a command line.
func (a *app) command(text string) tea.Cmd {
	verb, rest, _ := strings.Cut(text, " ")
	rest = strings.TrimSpace(rest)
	views := map[string]int{
		"overview": 0, "o": 0, "1": 0, "workers": 1, "ranks": 1, "w": 1, "2": 1, "radix": 2, "index": 2, "x": 2, "3": 2,
		"decisions": 3, "routes": 3, "d": 3, "4": 3, "events": 4, "e": 4, "5": 4,
	}
	if tab, ok := views[verb]; ok {
		return a.show(tab, func(c *page.Ctx) tea.Cmd { return a.filter(c, rest) })
	}
	switch verb {
	case "":
	case "q", "quit", "exit":
		return a.quit()
	case "help":
		a.overlay = &overlay{title: "help, esc closes", lines: a.helpLines()}
	case "filter":
		return a.filter(a.page(), rest)
	case "sort":
		if !a.pages[a.tab].SetOrder(rest) {
			names := page.Orders()
			if a.tab == 2 {
				names = []string{"blocks", "hits", "ranks"}
			}
			if a.tab > 2 {
				a.say("this view is always newest first", true)
			} else {
				a.say(fmt.Sprintf("sort: %q is not one of %s", rest, strings.Join(names, ", ")), true)
			}
		}
		return a.pages[a.tab].Tick(a.page())
	case "rate":
		d, err := time.ParseDuration(rest)
		if err != nil {
			if n, err2 := strconv.ParseFloat(rest, 64); err2 == nil {
				d, err = time.Duration(n*float64(time.Second)), nil
			}
		}
		if err != nil || d <= 0 {
			a.say(fmt.Sprintf("rate: %q is not a duration such as 500ms or 2s", rest), true)
			return nil
		}
		a.setRate(d)
	case "save":
		if rest == "" {
			rest = a.fileName("json")
		}
		a.save(rest)
	case "drain", "resume":
		a.operate(verb, rest)
	case "describe":
		a.describe(rest)
	case "router":
		n, err := strconv.Atoi(rest)
		if err != nil || n < 1 || n > len(a.replicas) {
			a.say(fmt.Sprintf("router: give a number from 1 to %d", len(a.replicas)), true)
			return nil
		}
		a.sel = n - 1
		return a.show(a.tab, nil)
	case "ctx", "context":
		return a.context(rest)
	case "seek":
		if a.recording() == nil {
			a.say("seek is for recordings: dynctl replay FILE --tui", true)
			return nil
		}
		return a.control("seek", rest)
	case "theme":
		if !slices.Contains(theme.Names(), rest) {
			a.say(fmt.Sprintf("theme: %q is not one of %s", rest, strings.Join(theme.Names(), ", ")), true)
			return nil
		}
		a.setTheme(rest)
	case "ascii":
		a.opts.ASCII = !a.opts.ASCII
		a.th = theme.New(a.th.Name, a.opts.Profile, a.opts.ASCII)
	default:
		a.say(fmt.Sprintf("there is no command %q: %s", verb, strings.Join(verbs, ", ")), true)
	}
	return nil
}

func (a *app) fileName(ext string) string {
	return fmt.Sprintf("dynctl-top-%s-%s.%s", strings.ToLower(a.pages[a.tab].Name()), a.now.Format("20060102-150405"), ext)
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;]*m")

// save writes what is on the screen: the view model as JSON, the ranks as CSV,
// or the screen as text, by the name of the file. It does not overwrite.
func (a *app) save(name string) {
	path := name
	if !filepath.IsAbs(path) {
		path = filepath.Join(a.opts.Dir, path)
	}
	var content strings.Builder
	var err error
	switch filepath.Ext(name) {
	case ".json":
		enc := json.NewEncoder(&content)
		enc.SetIndent("", "  ")
		err = enc.Encode(a.shown())
	case ".csv":
		err = writeCSV(csv.NewWriter(&content), a.shown())
	default:
		content.WriteString(escapes.ReplaceAllString(a.draw(), ""))
		content.WriteByte('\n')
	}
	if err == nil {
		var f *os.File
		f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err == nil {
			_, err = f.WriteString(content.String())
			if e := f.Close(); err == nil {
				err = e
			}
		}
	}
	if err != nil {
		a.say("not saved: "+err.Error(), true)
		return
	}
	a.say("saved "+path, false)
}

// writeCSV writes the ranks of all routers.
func writeCSV(w *csv.Writer, v *feed.View) error {
	figure := func(n feed.Num) string {
		if !n.Known() {
			return ""
		}
		return strconv.FormatFloat(n.F(), 'f', -1, 64)
	}
	_ = w.Write([]string{
		"router", "label", "role", "status", "running_requests", "waiting_requests", "kv_usage_share", "engine_prefix_hit_share",
		"active_requests", "prefill_tokens", "decode_blocks", "index_blocks", "capacity_blocks", "feed_state", "gaps_total",
	})
	for i := range v.Routers {
		r := &v.Routers[i]
		for j := range r.Ranks {
			k := &r.Ranks[j]
			_ = w.Write([]string{
				r.Name, k.Label, k.Role, k.Status, figure(k.Running()), figure(k.Waiting()), figure(k.KVUsage()), figure(k.HitShare),
				strconv.Itoa(k.ActiveRequests), strconv.FormatInt(k.PrefillTokens, 10), strconv.FormatInt(k.DecodeBlocks, 10), strconv.FormatInt(k.IndexBlocks, 10),
				strconv.FormatInt(k.CapacityBlock, 10), k.Feed.State, strconv.FormatUint(k.Feed.Gaps, 10),
			})
		}
	}
	w.Flush()
	return w.Error()
}
