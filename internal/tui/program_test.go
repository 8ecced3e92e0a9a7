package tui

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/x/exp/teatest"
)

// TestProgram runs the whole program against a router: keys come from a
// terminal and answers from a socket.
func TestProgram(t *testing.T) {
	f := newRouter(t, stage{prefill: 2, decode: 4, dp: 2, troubles: true})
	a := newApp(t.Context(), Options{Clients: clients(t, f.URL), Rate: 100 * time.Millisecond})
	tm := teatest.NewTestModel(t, a, teatest.WithInitialTermSize(120, 40))
	see := func(words ...string) {
		t.Helper()
		var all strings.Builder
		teatest.WaitFor(t, tm.Output(), func(b []byte) bool {
			all.Write(b)
			for _, w := range words {
				if !strings.Contains(all.String(), w) {
					return false
				}
			}
			return true
		}, teatest.WithDuration(10*time.Second), teatest.WithCheckInterval(5*time.Millisecond))
	}
	see("decode-3/dp1", "LIVE", "Attention (")
	tm.Type("3")
	see("7f3a19c2")
	tm.Type("l")
	see("91c2aa55")
	tm.Type("4")
	see("explain 0badcafe", "excluded: draining")
	tm.Type("5")
	see("feed_gap")
	f.CloseClientConnections()
	f.Listener.Close()
	see("DOWN")
	tm.Type("q")
	tm.WaitFinished(t, teatest.WithFinalTimeout(5*time.Second))
}

// tape records what a program writes to its terminal.
type tape struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (p *tape) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all.Write(b)
}

func (p *tape) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all.String()
}

// TestSignalsEndTheScreen sends the process a signal, as kill does, and expects
// the terminal back at once.
func TestSignalsEndTheScreen(t *testing.T) {
	f := newRouter(t, fleet)
	for range 10 {
		ctx, stop := signal.NotifyContext(t.Context(), syscall.SIGTERM)
		in, keyboard := io.Pipe()
		var out tape
		done := make(chan error, 1)
		go func() {
			done <- runProgram(ctx, Options{Clients: clients(t, f.URL)}, tea.WithInput(in), tea.WithOutput(&out))
		}()
		for !strings.Contains(out.String(), "\x1b[?1049h") {
			runtime.Gosched()
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("err = %v", err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the screen does not end")
		}
		if !strings.Contains(out.String(), "\x1b[?1049l") {
			t.Error("the terminal is not restored")
		}
		keyboard.Close()
		stop()
	}
}

// panicky is a model that breaks when a key is pressed.
type panicky struct{ *app }

func (p panicky) Update(m tea.Msg) (tea.Model, tea.Cmd) {
	if k, ok := m.(tea.KeyMsg); ok && k.String() == "x" {
		panic("broken on purpose")
	}
	_, cmd := p.app.Update(m)
	return p, cmd
}

func TestPanicRestoresTheTerminal(t *testing.T) {
	f := newRouter(t, fleet)
	in, keyboard := io.Pipe()
	defer keyboard.Close()
	var out tape
	p := tea.NewProgram(panicky{newApp(t.Context(), Options{Clients: clients(t, f.URL)})}, tea.WithInput(in), tea.WithOutput(&out), tea.WithAltScreen(), tea.WithoutSignalHandler())
	done := make(chan error, 1)
	go func() { _, err := p.Run(); done <- err }()
	p.Send(tea.WindowSizeMsg{Width: 100, Height: 30})
	if _, err := io.WriteString(keyboard, "x"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil {
		t.Error("the panic is not reported")
	}
	entered, left := strings.LastIndex(out.String(), "\x1b[?1049h"), strings.LastIndex(out.String(), "\x1b[?1049l")
	if entered < 0 || left < entered || !strings.Contains(out.String()[left:], "\x1b[?25h") && strings.LastIndex(out.String(), "\x1b[?25h") < strings.LastIndex(out.String(), "\x1b[?25l") {
		t.Errorf("the terminal is not restored: %q", out.String())
	}
}
