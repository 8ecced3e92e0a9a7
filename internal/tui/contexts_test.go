package tui

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
)

func named(t testing.TB, urls map[string]string) Contexts {
	return Contexts{
		Names: func() ([]string, error) { return []string{"prod", "lab", "gone"}, nil },
		Open: func(name string) ([]*admin.Client, error) {
			if urls[name] == "" {
				return nil, errors.New("token file: it is not there")
			}
			return clients(t, urls[name]), nil
		},
	}
}

// TestContextViews: the list of contexts, a command that is completed, and what is said
// of a context whose router does not answer.
func TestContextViews(t *testing.T) {
	for name, show := range map[string]func(a *app){
		"list":  func(a *app) { press(a, ":", "c", "t", "x", "enter") },
		"typed": func(a *app) { press(a, ":", "c", "t", "x", " ", "l") },
		"gone": func(a *app) {
			a.Update(openedMsg{name: "gone", err: errors.New("no router answers at http://10.0.9.9:8001: dial tcp 10.0.9.9:8001: connect: connection refused")})
		},
	} {
		everySize(t, "ctx-"+name, func(t *testing.T, w, h int, o Options, name string) {
			o.Context, o.Contexts = "prod", named(t, nil)
			a := newStage(t, stage{prefill: 2, decode: 4, dp: 2}, w, h, 20, o)
			show(a)
			got := screen(a)
			checkFrame(t, got, w, h, o.ASCII)
			golden(t, name, got+"\n")
		})
	}
}

// TestContexts: a command with a completed name goes to the routers of that context when
// one of them answers, and what comes of the old ones later is not shown; a context of
// which none answers, or which cannot be opened, leaves all as it was and says why.
func TestContexts(t *testing.T) {
	lab := newRouter(t, stage{prefill: 1, decode: 1, dp: 1})
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	g := stage{prefill: 2, decode: 4, dp: 2}
	prod := newRouter(t, g)
	a := newStage(t, g, 120, 40, 20, Options{Profile: termenv.Ascii, Clients: clients(t, prod.URL), Context: "prod", Contexts: named(t, map[string]string{"lab": lab.URL, "lab2": lab.URL, "prod": prod.URL, "gone": gone.URL})})
	old := a.replicas[0]
	run := func(cmd tea.Cmd) tea.Cmd {
		t.Helper()
		if cmd == nil {
			t.Fatal("no question: " + a.message)
		}
		_, next := a.Update(cmd())
		return next
	}
	for name, why := range map[string]string{"gone": "no router answers at " + gone.URL, "moon": "token file: it is not there"} {
		run(a.command("ctx " + name))
		if !a.fault || !strings.HasPrefix(a.message, "prod stays") || !strings.Contains(a.message, "context "+name+": ") || !strings.Contains(a.message, why) {
			t.Errorf("%s: said %q, a fault %v", name, a.message, a.fault)
		}
		if a.replicas[0] != old || a.opts.Context != "prod" {
			t.Errorf("%s: now on %s, the same routers %v", name, a.opts.Context, a.replicas[0] == old)
		}
	}
	if cmd := a.command("ctx prod"); cmd != nil || a.message != "this is context prod" {
		t.Errorf("the present context: %q", a.message)
	}
	late := a.poll(0) // on its way while the context changes
	press(a, ":", "c", "t", "x", " ", "l", "tab")
	if a.input.Value() != "ctx lab" {
		t.Fatalf("completed to %q", a.input.Value())
	}
	run(a.typed(tea.KeyMsg{Type: tea.KeyEnter}))
	if a.opts.Context != "lab" || a.replicas[0] == old || a.replicas[0].poller.Client.URL() != lab.URL || a.fault {
		t.Fatalf("on %s, %q", a.opts.Context, a.message)
	}
	if got := a.page().R; got.Link != feed.Waiting || len(got.Ranks) > 0 {
		t.Errorf("figures of another context: %s, %d ranks", got.Link, len(got.Ranks))
	}
	a.Update(late())
	if got := a.page().R.Link; got != feed.Waiting {
		t.Errorf("an answer of the old router is shown: %s", got)
	}
	a.replicas[0].polling = false
	run(a.poll(0))
	if got := a.page().R; got.Link != feed.Live || len(got.Ranks) != 2 {
		t.Errorf("of the new one: %s, %d ranks", got.Link, len(got.Ranks))
	}
	// Two are asked for before either has answered: the last one counts, whichever answers
	// first, and nothing stays open of the other.
	for _, first := range []int{0, 1} {
		cmds := []tea.Cmd{a.command("ctx lab2"), a.command("ctx prod")}
		messages := []tea.Msg{cmds[0](), cmds[1]()}
		a.Update(messages[first])
		a.Update(messages[1-first])
		if a.opts.Context != "prod" || a.replicas[0].poller.Client.URL() != prod.URL {
			t.Fatalf("prod was asked for last, and it is %s: %q", a.opts.Context, a.message)
		}
		run(a.command("ctx lab"))
	}
	a.opts.Contexts = Contexts{}
	if a.command("ctx lab"); !strings.Contains(a.message, "there are no contexts") {
		t.Errorf("without contexts: %q", a.message)
	}
}
