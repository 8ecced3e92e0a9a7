// Package page says what a view of the screen is, and holds the five views. A page keeps
// what belongs to the person in front of it (cursor, filter, order, what is open) and draws
// the newest view model; it never talks to a router itself.
package page

import (
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// Ctx is what a page needs to draw and to act.
type Ctx struct {
	Th   *theme.Theme
	View *feed.View
	R    *feed.Router // the router that is looked at; never nil
	Sel  int          // its place in View.Routers
	// Series is the history of a rank's figures up to the view; "" is the
	// router.
	Series func(label string, m feed.Metric) []float64
	Events []admin.Event
	W, H   int // of the page
	Now    time.Time
	// Frozen says that the data stands still: nothing may be loaded for it.
	Frozen bool
	Load   Loader
}

// Loader makes the questions that pages need answered. The answers come back
// as ChildrenMsg, DecisionsMsg and DecisionMsg.
type Loader struct {
	Children  func(q admin.BrowseQuery) tea.Cmd
	Decisions func(filter string) tea.Cmd
	Decision  func(id string) tea.Cmd
}

// ChildrenMsg answers a question for the children of a node.
type ChildrenMsg struct {
	Router int
	Query  admin.BrowseQuery
	Answer *admin.IndexChildren
	Err    error
}

// DecisionsMsg answers a question for the list of decisions.
type DecisionsMsg struct {
	Router int
	Filter string
	List   []feed.Decision
	Total  uint64
	Err    error
}

// DecisionMsg answers a question for a whole receipt.
type DecisionMsg struct {
	Router int
	ID     string
	Raw    []byte
	Err    error
}

// OpenMsg asks for another view with the cursor on something.
type OpenMsg struct {
	View  int // from 0
	Focus string
}

func open(view int, focus string) tea.Cmd {
	return func() tea.Msg { return OpenMsg{view, focus} }
}

// ShowMsg asks for a text over the page.
type ShowMsg struct {
	Title string
	Lines []string
}

// Page is one of the views.
type Page interface {
	// Name is the short title in the tab.
	Name() string
	// Keys are the hints of the last line, as "key word".
	Keys() []string
	// Act does what a key asks for; ok is false when the page does not know it.
	Act(c *Ctx, a keys.Action) (cmd tea.Cmd, ok bool)
	// Tick follows every new sample while the page is on the screen.
	Tick(c *Ctx) tea.Cmd
	// Take hands over an answer.
	Take(c *Ctx, msg tea.Msg) tea.Cmd
	Draw(c *Ctx, p *widget.Painter)
	Filter() string
	SetFilter(c *Ctx, text string) (tea.Cmd, error)
	// Order is the present order in a word, with a sign when it is reversed.
	Order(c *Ctx) string
	SetOrder(name string) bool
	// Focus puts the cursor on something by its name.
	Focus(c *Ctx, name string) tea.Cmd
	// Row is the thing under the cursor: its name and itself as text.
	Row(c *Ctx) (name, row string)
	// Click acts on a column of a line of the page: it moves the cursor there, or
	// sorts by a title.
	Click(c *Ctx, x, line int)
}

// All makes the views, in the order of their tabs.
func All() []Page {
	ranks := &rankTable{}
	return []Page{
		&overview{rankPage{table: ranks}}, &workers{rankPage: rankPage{table: ranks}}, &radix{tree: newTree(), mask: true, expand: map[string]int{}},
		newDecisions(0), &events{},
	}
}

// still is a page that asks the router nothing.
type still struct{}

func (still) Tick(*Ctx) tea.Cmd { return nil }

func (still) Take(*Ctx, tea.Msg) tea.Cmd { return nil }

// Wrap breaks text into lines of at most w columns; the lines after the first
// one begin with indent.
func Wrap(text string, w int, indent string) []string {
	if w < 8 {
		return []string{text}
	}
	var lines []string
	line, used := "", 0
	for _, word := range strings.Fields(text) {
		n := widget.Width(word)
		if used > 0 && used+1+n > w {
			lines = append(lines, line)
			line, used = "", 0
		}
		if used == 0 {
			if len(lines) > 0 {
				line, used = indent, widget.Width(indent)
			}
			for used+n > w { // a word longer than a line
				cut, x := 0, used
				for i, r := range word {
					if x += widget.Width(string(r)); x > w {
						cut = i
						break
					}
				}
				if cut == 0 {
					break
				}
				lines = append(lines, line+word[:cut])
				word, line, used = word[cut:], indent, widget.Width(indent)
				n = widget.Width(word)
			}
			line += word
			used += n
			continue
		}
		line += " " + word
		used += 1 + n
	}
	return append(lines, line)
}

func severityStyle(s feed.Severity) theme.Style {
	switch s {
	case feed.Error:
		return theme.Bad
	case feed.Warn:
		return theme.Warn
	case feed.OK:
		return theme.Good
	}
	return theme.Plain
}

// severityWord is the word in a column of five.
func severityWord(s feed.Severity) string {
	return [...]string{"ok", "INFO", "WARN", "ERROR"}[min(max(int(s), 0), 3)]
}

// mark is the sign at the left of a row.
func mark(p *widget.Painter, selected bool, s feed.Severity) {
	switch {
	case selected:
		p.Put(theme.Accent, p.Th.Cursor)
	case s == feed.Error:
		p.Put(theme.Bad, "X")
	case s == feed.Warn:
		p.Put(theme.Warn, "!")
	default:
		p.Put(theme.Plain, " ")
	}
	p.Put(theme.Plain, " ")
}
