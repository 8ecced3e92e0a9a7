// Package keys says which keys do what, and is the one source of the help
// screen and of the hints in the last line.
package keys

import (
	"strings"

	"github.com/charmbracelet/bubbles/key"
)

// Action is what a key does.
type Action int

// The actions.
const (
	Quit Action = iota + 1 // 0 is none
	Help
	Warnings
	Describe
	View1
	View2
	View3
	View4
	View5
	NextView
	PrevView
	LastView
	Up
	Down
	Top
	Bottom
	HalfUp
	HalfDown
	Left
	Right
	Enter
	Back
	Filter
	Command
	FindNext
	FindPrev
	Sort
	Reverse
	Wide
	Faults
	Idle
	Heat
	FoldAll
	Pause
	StepBack
	StepForward
	Faster
	Slower
	Refresh
	Expand
	Flat
	ZoomIn
	ZoomUp
	RankMask
	Metric
	Copy
	CopyRow
	Save
	SaveText
	Theme
	Mouse
	Redraw
	NextRouter
	Follow
)

// Entry is one action with its keys.
type Entry struct {
	Action  Action
	Group   string
	Binding key.Binding
	// Do and To are what a key asks of a recording that is watched, see admin.Client.Replay.
	Do, To string
}

func bind(a Action, group, help string, keys ...string) Entry {
	shown := strings.ReplaceAll(strings.Join(keys, " "), "  ", " space") // the key " " by its name
	return Entry{Action: a, Group: group, Binding: key.NewBinding(key.WithKeys(keys...), key.WithHelp(shown, help))}
}

// Entries lists every key, in the order of the help screen.
func Entries() []Entry {
	return []Entry{
		bind(View1, "VIEWS", "overview", "1"),
		bind(View2, "VIEWS", "workers and ranks", "2"),
		bind(View3, "VIEWS", "radix index", "3"),
		bind(View4, "VIEWS", "decisions", "4"),
		bind(View5, "VIEWS", "events", "5"),
		bind(NextView, "VIEWS", "next view", "tab"),
		bind(PrevView, "VIEWS", "view before", "shift+tab"),
		bind(LastView, "VIEWS", "view that was shown last", "`", "backspace"),
		bind(NextRouter, "VIEWS", "next router of several", "R"),
		bind(Down, "MOVE", "down", "j", "down"),
		bind(Up, "MOVE", "up", "k", "up"),
		bind(Left, "MOVE", "left, close", "h", "left"),
		bind(Right, "MOVE", "right, open", "l", "right"),
		bind(Top, "MOVE", "first", "g", "home"),
		bind(Bottom, "MOVE", "last", "G", "end"),
		bind(HalfDown, "MOVE", "half a page down", "ctrl+d", "pgdown"),
		bind(HalfUp, "MOVE", "half a page up", "ctrl+u", "pgup"),
		bind(Enter, "MOVE", "open; all holders of a run", "enter"),
		bind(Back, "MOVE", "back, clear", "esc"),
		bind(Filter, "FIND", "filter: word !not key:value key>n re:x", "/"),
		bind(FindNext, "FIND", "next finding", "n"),
		bind(FindPrev, "FIND", "finding before", "N"),
		bind(Describe, "FIND", "describe the worker of this rank", "d"),
		bind(Command, "FIND", "command, such as :radix 7f3a", ":"),
		bind(Warnings, "FIND", "all that needs attention", "!"),
		bind(Sort, "TABLE", "sort by the next column", "s"),
		bind(Reverse, "TABLE", "turn the order round", "S"),
		bind(Wide, "TABLE", "more or fewer columns", "z"),
		bind(Faults, "TABLE", "only what is not ok", "F"),
		bind(Heat, "TABLE", "strip of heat: active, KV, ITL, hits, off", "x"),
		bind(FoldAll, "TABLE", "fold all workers or none; h l one of them", "v"),
		bind(Idle, "TABLE", "hide what is idle", "H"),
		bind(Pause, "TIME", "pause: data stands still, keys work", "p", " "),
		bind(StepBack, "TIME", "one step back in history", "["),
		bind(StepForward, "TIME", "one step forward", "]"),
		bind(Faster, "TIME", "ask twice as often", "+", "="),
		bind(Slower, "TIME", "ask half as often", "-", "_"),
		bind(Refresh, "TIME", "ask now", "r"),
		bind(Follow, "TIME", "follow the newest", "f"),
		bind(Expand, "TREE", "open two levels", "E"),
		bind(Flat, "TREE", "flat table of the most used runs", "t"),
		bind(ZoomIn, "TREE", "zoom in", "Z"),
		bind(ZoomUp, "TREE", "zoom out", "u"),
		bind(RankMask, "TREE", "which ranks hold it", "w"),
		bind(Metric, "TREE", "metric of the graph", "m"),
		bind(Copy, "OUT", "copy the name (OSC 52)", "y"),
		bind(CopyRow, "OUT", "copy the row", "Y"),
		bind(Save, "OUT", "save this view: .json .csv .txt", "o"),
		bind(SaveText, "OUT", "save the screen as text", "ctrl+s"),
		bind(Help, "APP", "this help", "?"),
		bind(Theme, "APP", "colours", "T"),
		bind(Mouse, "APP", "mouse on or off", "M"),
		bind(Redraw, "APP", "redraw", "ctrl+l"),
		bind(Quit, "APP", "quit", "q", "ctrl+c"),
	}
}

// Recording lists the keys that do something else while a recording is watched.
func Recording() []Entry {
	ask := func(do, to, help string, keys ...string) Entry {
		e := bind(0, "RECORDING", help, keys...)
		e.Do, e.To = do, to
		return e
	}
	return []Entry{
		ask("toggle", "", "pause or play", "p", " "),
		ask("seek", "-10s", "10 s back", "left"),
		ask("seek", "+10s", "10 s on", "right"),
		ask("seek", "-1m", "a minute back", "shift+left"),
		ask("seek", "+1m", "a minute on", "shift+right"),
		ask("seek", "0s", "to the beginning", "home"),
		ask("seek", "end", "to the end", "end"),
		ask("faster", "", "twice as fast", "+", "="),
		ask("slower", "", "half as fast", "-", "_"),
		ask("back", "", "one record back", "["),
		ask("step", "", "one record on", "]"),
	}
}

// Map finds the entry of a key.
type Map map[string]Entry

// NewMap is the map of entries.
func NewMap(entries []Entry) Map {
	m := Map{}
	for _, e := range entries {
		for _, k := range e.Binding.Keys() {
			m[k] = e
		}
	}
	return m
}
