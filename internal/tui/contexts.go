package tui

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// Contexts are sets of routers by name. The zero value has none.
type Contexts struct {
	// Names lists them; it is called each time that a command is typed.
	Names func() ([]string, error)
	// Open makes the clients of one, at least one.
	Open func(name string) ([]*admin.Client, error)
}

func (c Contexts) names() ([]string, error) {
	if c.Names == nil {
		return nil, nil
	}
	return c.Names()
}

type (
	// openedMsg is what came of opening a context.
	openedMsg struct {
		opening int // which one it was
		name    string
		clients []*admin.Client
		err     error
	}
	// contextualMsg is a message about the routers of a context, which means nothing
	// after another one was taken.
	contextualMsg struct {
		switched int
		msg      tea.Msg
	}
)

// ofContext marks the message of a command as being about the routers of the moment.
func (a *app) ofContext(cmd tea.Cmd) tea.Cmd {
	n := a.switched
	return func() tea.Msg {
		if m := cmd(); m != nil {
			return contextualMsg{n, m}
		}
		return nil
	}
}

// suggestions complete commands.
func (a *app) suggestions() []string {
	list := slices.Clone(verbs)
	names, err := a.opts.Contexts.names()
	if err != nil {
		return list // :ctx says why
	}
	for _, n := range names {
		list = append(list, "ctx "+n)
	}
	return list
}

// context lists the contexts, or goes to one of them when a router there answers.
func (a *app) context(name string) tea.Cmd {
	names, err := a.opts.Contexts.names()
	switch {
	case err != nil:
		a.say(err.Error(), true)
		return nil
	case len(names) == 0:
		a.say("there are no contexts: name them in contexts.yaml, or by --router NAME=URL", true)
		return nil
	case name == "":
		lines := []string{}
		for _, n := range names {
			if n == a.opts.Context {
				n += " (this one)"
			}
			lines = append(lines, n)
		}
		a.overlay = &overlay{title: "contexts, :ctx NAME goes to one", lines: lines}
		return nil
	case name == a.opts.Context:
		a.say("this is context "+name, false)
		return nil
	}
	a.say("asking the routers of "+name, false)
	a.opening++
	open, n := a.opts.Contexts.Open, a.opening
	return a.bounded(func(ctx context.Context) tea.Msg {
		clients, err := open(name)
		if err == nil {
			err = anyAnswers(ctx, clients)
		}
		m := openedMsg{opening: n, name: name, clients: clients, err: err}
		if err != nil {
			m.close()
		}
		return m
	})
}

func (m *openedMsg) close() {
	for _, c := range m.clients {
		c.Close()
	}
	m.clients = nil
}

// anyAnswers is nil when one of the routers does, or else what each said.
func anyAnswers(ctx context.Context, clients []*admin.Client) error {
	errs := make([]error, len(clients))
	var wg sync.WaitGroup
	for i, c := range clients {
		wg.Go(func() { _, errs[i] = c.Status(ctx) })
	}
	wg.Wait()
	if slices.Contains(errs, nil) {
		return nil
	}
	return errors.Join(errs...)
}

// enter shows the routers of another context; one that nobody answers for leaves all as
// it was.
func (a *app) enter(m openedMsg) tea.Cmd {
	if m.opening != a.opening { // another one was asked for since
		m.close()
		return nil
	}
	if m.err != nil {
		stays := "the routers stay"
		if a.opts.Context != "" {
			stays = a.opts.Context + " stays"
		}
		a.say(fmt.Sprintf("%s; context %s: %s", stays, m.name, strings.ReplaceAll(m.err.Error(), "\n", "; ")), true)
		return nil
	}
	for _, r := range a.replicas {
		r.poller.Client.Close()
	}
	a.switched++
	a.opts.Context, a.opts.Note = m.name, ""
	a.history, a.frozen, a.back, a.overlay, a.guard = nil, nil, 0, nil, nil
	a.watch(m.clients)
	a.say("context "+m.name, false)
	return tea.Batch(a.show(a.tab, nil), a.pollAll())
}
