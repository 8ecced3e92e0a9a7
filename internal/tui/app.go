// Package tui is the screen of dynctl top: it polls the admin APIs of one or
// several routers and draws their state, and it writes the same view model as
// text or JSON for programs. Only a command that is confirmed changes a router.
package tui

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/bubbles/textinput"
	tea "github.com/charmbracelet/bubbletea"
	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/keys"
	"github.com/dynctl/dynctl/internal/tui/page"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
	"github.com/dynctl/dynctl/internal/wait"
)

// The smallest terminal that the screen fits in.
const (
	minWidth  = 60
	minHeight = 15
)

// The limits of the poll interval.
const (
	minRate = 100 * time.Millisecond
	maxRate = time.Minute
	maxWait = 5 * time.Second // between two questions to a router that is down
)

// Options set the screen up.
type Options struct {
	// Clients are the routers, at least one.
	Clients []*admin.Client
	// Context is the name of the context that they come from; may be empty. Contexts
	// are those that :ctx switches between.
	Context  string
	Contexts Contexts
	// Rate is the time between two questions; default 1 s.
	Rate time.Duration
	// Timeout of one question; default 2 s.
	Timeout time.Duration
	// ASCII keeps everything else off the screen; Profile says which colours
	// the terminal has, Theme is one of theme.Names.
	ASCII   bool
	Profile termenv.Profile
	Theme   string
	// View is the first view, from 0; Filter its filter.
	View   int
	Filter string
	// Dir is where views are saved.
	Dir string
	// Out is the terminal, for what is not drawn (copying).
	Out io.Writer
	// Note is shown in the first line, such as "demo".
	Note string
}

// historyLen is how many views can be stepped back through.
const historyLen = 120

// app is the bubbletea model.
type app struct {
	opts     Options
	ctx      context.Context
	th       *theme.Theme
	keys     keys.Map
	playKeys keys.Map // while a recording is watched, before keys
	w, h     int
	now      time.Time
	rate     time.Duration
	replicas []*replica
	sel      int
	view     feed.View

	pages  []page.Page
	tab    int
	before int

	history []past
	frozen  *past // what is shown while the data stands still
	back    int   // steps back in history, 0 is the newest

	input   textinput.Model
	asking  string // "", "filter", "command" or "save"
	overlay *overlay
	guard   tea.Cmd // changes a router, and waits for a yes; nil for nothing
	message string
	fault   bool
	mouse   bool
	bar     [2]int // columns of a recording's bar, from and to

	frame    string
	dirty    bool
	draws    uint64
	finished bool
	switched int // how often another context was taken
	opening  int // how often one was asked for
}

// past is a view of before, and how many answers each router had given.
type past struct {
	view    feed.View
	answers []int
}

// replica is one router with what was learned of it.
type replica struct {
	poller  *feed.Poller
	builder *feed.Builder
	view    *feed.Router
	failed  int // questions in a row
	polling bool
	wanted  bool // asked for by a key while polling
	answers int  // that came, for histories that stand still
	gen     int  // of the waiting timer

	decisions feed.Decisions
}

// overlay is a text over the page.
type overlay struct {
	title string
	lines []string
	live  func() []string // makes the lines of every frame; may be nil
	off   page.Scroll
}

type (
	sampleMsg struct {
		replica int
		sample  feed.Sample
	}
	pollMsg struct{ replica, gen int }
	tickMsg time.Time
	// controlledMsg is where a recording stands after what a key asked of it.
	controlledMsg struct {
		replica int
		err     error
	}
	saidMsg struct {
		text  string
		fault bool
	}
)

// newApp makes the model; ctx bounds its questions.
func newApp(ctx context.Context, o Options) *app {
	o.Rate = cmp.Or(max(o.Rate, 0), time.Second)
	if o.Theme == "" {
		o.Theme = theme.Names()[0]
	}
	a := &app{
		opts: o, ctx: ctx, th: theme.New(o.Theme, o.Profile, o.ASCII), keys: keys.NewMap(keys.Entries()), playKeys: keys.NewMap(keys.Recording()), now: time.Now(),
		rate: min(max(o.Rate, minRate), maxRate), tab: min(max(o.View, 0), 4), dirty: true,
	}
	a.input = textinput.New()
	a.input.CharLimit = 500
	a.input.ShowSuggestions = true
	a.watch(o.Clients)
	return a
}

// watch starts over with other routers.
func (a *app) watch(clients []*admin.Client) {
	a.pages = page.All()
	a.replicas, a.sel = nil, 0
	for _, c := range clients {
		b := feed.NewBuilder(c.URL())
		r := &replica{poller: &feed.Poller{Client: c, Timeout: a.opts.Timeout}, builder: b}
		r.view = b.Tick(a.now, a.rate)
		a.replicas = append(a.replicas, r)
	}
	a.sum()
}

// Init implements tea.Model.
func (a *app) Init() tea.Cmd {
	cmds := []tea.Cmd{a.tick(), tea.SetWindowTitle("dynctl top"), a.pollAll()}
	if a.opts.Filter != "" {
		if cmd, err := a.pages[a.tab].SetFilter(a.page(), a.opts.Filter); err != nil {
			a.say(err.Error(), true)
		} else {
			cmds = append(cmds, cmd)
		}
	}
	return tea.Batch(cmds...)
}

// tick moves the ages on the screen.
func (a *app) tick() tea.Cmd {
	return a.after(time.Second, func(t time.Time) tea.Msg { return tickMsg(t) })
}

// after is tea.Tick that ends with the program.
func (a *app) after(d time.Duration, f func(time.Time) tea.Msg) tea.Cmd {
	ctx := a.ctx
	return func() tea.Msg {
		if !wait.For(ctx, d) {
			return nil
		}
		return f(time.Now())
	}
}

// poll asks one router, unless a question to it is on its way.
func (a *app) poll(i int) tea.Cmd {
	r := a.replicas[i]
	if r.polling {
		r.wanted = true
		return nil
	}
	r.polling, r.wanted = true, false
	r.gen++
	ctx, after := a.ctx, r.builder.LastEvent()
	return a.ofContext(func() tea.Msg { return sampleMsg{i, r.poller.Poll(ctx, after)} })
}

func (a *app) pollAll() tea.Cmd {
	var cmds []tea.Cmd
	for i := range a.replicas {
		cmds = append(cmds, a.poll(i))
	}
	return tea.Batch(cmds...)
}

// again waits for the next question: longer each time that none is answered.
func (a *app) again(i int) tea.Cmd {
	r := a.replicas[i]
	wait := a.rate
	if r.failed > 0 {
		wait = max(a.rate, min(500*time.Millisecond<<min(r.failed-1, 8), maxWait))
	}
	gen := r.gen
	return a.ofContext(a.after(wait, func(time.Time) tea.Msg { return pollMsg{i, gen} }))
}

// sum makes the view of the newest answers.
func (a *app) sum() { a.view = sumOf(a.replicas, a.now) }

func sumOf(replicas []*replica, at time.Time) feed.View {
	routers := make([]feed.Router, len(replicas))
	for i, r := range replicas {
		routers[i] = *r.view
	}
	return feed.Sum(at, routers)
}

// shown is the view on the screen: the newest, or one that stands still.
func (a *app) shown() *feed.View {
	if a.frozen != nil {
		return &a.frozen.view
	}
	return &a.view
}

// series is the history of a rank's figures up to what is shown.
func (a *app) series(label string, m feed.Metric) []float64 {
	r := a.replicas[a.sel]
	values := r.builder.History(label).Values(m)
	if a.frozen != nil {
		later := r.answers - a.frozen.answers[a.sel]
		values = values[:max(0, len(values)-later)]
	}
	return values
}

// page is what the pages get.
func (a *app) page() *page.Ctx {
	v := a.shown()
	r := a.replicas[a.sel]
	i := a.sel
	chrome := 3 // lines of header, tabs and footer
	if a.recording() != nil {
		chrome++
	}
	c := &page.Ctx{
		Th: a.th, View: v, R: &v.Routers[a.sel], Sel: a.sel, Series: a.series, Events: r.builder.Events(),
		W: a.w, H: max(0, a.h-chrome), Now: a.now, Frozen: a.frozen != nil,
	}
	client := r.poller.Client
	c.Load = page.Loader{
		Children: func(q admin.BrowseQuery) tea.Cmd {
			return a.ask(func(ctx context.Context) tea.Msg {
				answer, err := client.IndexChildren(ctx, q)
				return page.ChildrenMsg{Router: i, Query: q, Answer: answer, Err: err}
			})
		},
		Decisions: func(filter string) tea.Cmd {
			return a.ask(func(ctx context.Context) tea.Msg { return loadDecisions(ctx, client, &r.decisions, i, filter) })
		},
		Decision: func(id string) tea.Cmd {
			return a.ask(func(ctx context.Context) tea.Msg {
				raw, err := client.Decision(ctx, id)
				return page.DecisionMsg{Router: i, ID: id, Raw: raw, Err: err}
			})
		},
	}
	return c
}

// ask bounds a question of a page.
func (a *app) ask(f func(ctx context.Context) tea.Msg) tea.Cmd { return a.ofContext(a.bounded(f)) }

// bounded gives a question its time.
func (a *app) bounded(f func(ctx context.Context) tea.Msg) tea.Cmd {
	timeout := cmp.Or(max(a.opts.Timeout, 0), 2*time.Second)
	parent := a.ctx
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(parent, timeout)
		defer cancel()
		return f(ctx)
	}
}

// decisionsShown is how many decisions the list holds, searched how many the
// filter is tried on.
const (
	decisionsShown = 200
	searched       = 1000
)

// loadDecisions lists decisions that a filter picks. The filter is applied
// here, so that it means the same with every router.
func loadDecisions(ctx context.Context, client *admin.Client, known *feed.Decisions, router int, filter string) tea.Msg {
	m := page.DecisionsMsg{Router: router, Filter: filter}
	f, err := feed.DecisionFilter.Parse(filter)
	if err != nil {
		m.Err = err
		return m
	}
	limit := decisionsShown
	if !f.Empty() {
		limit = searched
	}
	list, err := client.DecisionsBrief(ctx, limit, "", "")
	if err != nil {
		m.Err = err
		return m
	}
	m.Total = list.Total
	m.List = make([]feed.Decision, 0, min(len(list.Decisions), decisionsShown))
	for _, d := range known.Parse(list.Decisions) {
		if f.Match(&d) && len(m.List) < decisionsShown {
			m.List = append(m.List, d)
		}
	}
	return m
}

// Update implements tea.Model.
func (a *app) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch m := msg.(type) {
	case tea.WindowSizeMsg:
		a.w, a.h, a.dirty = m.Width, m.Height, true
		a.input.Width = max(10, a.w-20)
		return a, nil
	case tickMsg:
		a.now = time.Time(m)
		for _, r := range a.replicas {
			r.view = r.builder.Tick(a.now, a.rate)
		}
		a.sum()
		a.dirty = true
		return a, a.tick()
	case pollMsg:
		if a.replicas[m.replica].gen != m.gen {
			return a, nil
		}
		return a, a.poll(m.replica)
	case sampleMsg:
		return a, a.sample(m)
	case contextualMsg:
		if m.switched != a.switched {
			return a, nil // of routers that are watched no more
		}
		return a.Update(m.msg)
	case openedMsg:
		return a, a.enter(m)
	case controlledMsg:
		return a, a.controlled(m)
	case page.ChildrenMsg, page.DecisionsMsg, page.DecisionMsg:
		a.dirty = true
		var cmds []tea.Cmd
		for _, p := range a.pages {
			cmds = append(cmds, p.Take(a.page(), msg))
		}
		return a, tea.Batch(cmds...)
	case page.OpenMsg:
		return a, a.show(m.View, func(c *page.Ctx) tea.Cmd { return a.pages[m.View].Focus(c, m.Focus) })
	case page.FilterMsg:
		return a, a.show(m.View, func(c *page.Ctx) tea.Cmd { return a.filter(c, m.Filter) })
	case page.ShowMsg:
		a.overlay, a.dirty = &overlay{title: m.Title, lines: m.Lines}, true
		return a, nil
	case saidMsg:
		a.say(m.text, m.fault)
		return a, nil
	case tea.MouseMsg:
		return a, a.click(m)
	case tea.KeyMsg:
		a.dirty = true
		return a, a.key(m)
	}
	if a.asking != "" {
		// The input's own messages: its blinking cursor.
		var cmd tea.Cmd
		a.input, cmd = a.input.Update(msg)
		a.dirty = true
		return a, cmd
	}
	return a, nil
}

// sample takes an answer in and plans the next question.
func (a *app) sample(m sampleMsg) tea.Cmd {
	r := a.replicas[m.replica]
	r.polling = false
	a.now = m.sample.At
	r.view = r.builder.Add(m.sample, a.rate)
	if m.sample.Err != nil {
		r.failed++
	} else {
		r.failed = 0
		r.answers++
	}
	a.sum()
	answers := make([]int, len(a.replicas))
	for i, r := range a.replicas {
		answers[i] = r.answers
	}
	a.history = append(a.history, past{a.view, answers})
	if len(a.history) > historyLen {
		a.history = slices.Delete(a.history, 0, 1)
	}
	if a.frozen != nil {
		a.back = min(a.back+1, len(a.history)-1) // what stands still is one step further away
	}
	a.dirty = true
	var next tea.Cmd
	if r.wanted {
		next = a.poll(m.replica)
	} else {
		next = a.again(m.replica)
	}
	if m.replica == a.sel && m.sample.Err == nil {
		return tea.Batch(next, a.pages[a.tab].Tick(a.page()))
	}
	return next
}

// show switches to a view and lets focus find something on it.
func (a *app) show(tab int, focus func(*page.Ctx) tea.Cmd) tea.Cmd {
	if tab != a.tab {
		a.before, a.tab = a.tab, tab
	}
	a.overlay, a.dirty = nil, true
	c := a.page()
	cmds := []tea.Cmd{a.pages[tab].Tick(c)}
	if focus != nil {
		cmds = append(cmds, focus(c))
	}
	return tea.Batch(cmds...)
}

func (a *app) filter(c *page.Ctx, text string) tea.Cmd {
	cmd, err := a.pages[a.tab].SetFilter(c, text)
	if err != nil {
		a.say(err.Error(), true)
	}
	return cmd
}

// say shows a message in the last line until the next key.
func (a *app) say(text string, fault bool) { a.message, a.fault, a.dirty = text, fault, true }

// click handles the mouse, when it is on.
func (a *app) click(m tea.MouseMsg) tea.Cmd {
	a.dirty = true
	c := a.page()
	switch {
	case m.Button == tea.MouseButtonWheelDown:
		cmd, _ := a.pages[a.tab].Act(c, keys.Down)
		return cmd
	case m.Button == tea.MouseButtonWheelUp:
		cmd, _ := a.pages[a.tab].Act(c, keys.Up)
		return cmd
	case m.Button == tea.MouseButtonLeft && m.Action == tea.MouseActionPress && a.recording() != nil && m.Y == a.h-2:
		return a.seekAt(m.X)
	case m.Button == tea.MouseButtonLeft && m.Action == tea.MouseActionPress && m.Y >= 2 && m.Y < a.h-1:
		a.pages[a.tab].Click(c, m.X, m.Y-2)
	}
	return nil
}

// View implements tea.Model. The frame is drawn again only when something
// changed.
func (a *app) View() string {
	if a.finished {
		return ""
	}
	if a.dirty {
		a.frame = a.draw()
		a.dirty = false
		a.draws++
	}
	return a.frame
}

// tooSmall says what the screen needs.
func (a *app) tooSmall() string {
	return fmt.Sprintf("dynctl top needs %dx%d columns and lines, this terminal has %dx%d.\nMake it larger, or run: dynctl top --once    (q quits)", minWidth, minHeight, a.w, a.h)
}

func (a *app) draw() string {
	if a.w == 0 || a.h == 0 {
		return ""
	}
	if a.w < minWidth || a.h < minHeight {
		p := widget.NewPainter(a.th, a.w)
		for line := range strings.Lines(a.tooSmall()) {
			for _, l := range page.Wrap(strings.TrimSpace(line), a.w, "") {
				p.Line(theme.Plain, l)
			}
		}
		p.Fill(max(1, a.h))
		return strings.Join(p.Lines(), "\n")
	}
	p := widget.NewPainter(a.th, a.w)
	c := a.page()
	a.drawHeader(c, p)
	a.drawTabs(c, p)
	body := p.Sub(a.w)
	if a.overlay != nil {
		a.drawOverlay(body, c.H)
	} else {
		a.pages[a.tab].Draw(c, body)
	}
	body.Fill(c.H)
	p.Append(body)
	a.drawRecording(p)
	a.drawFooter(p)
	p.Fill(a.h)
	return strings.Join(p.Lines(), "\n")
}
