//go:build linux

package benchcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dynctl/dynctl/internal/bench/report"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/rig/clitest"
)

func TestRunControl(t *testing.T) {
	interrupted, interrupt := context.WithCancel(t.Context())
	var mu sync.Mutex // guards said
	var said []string
	run, c, end := newRunControl(interrupted, io.Discard)
	defer end()
	c.speak(func(format string, a ...any) {
		mu.Lock()
		defer mu.Unlock()
		said = append(said, fmt.Sprintf(format, a...))
	})
	cell, done := c.enter(run)
	c.press('x')
	c.press('p')
	if !strings.HasPrefix(c.hint(), "pausing after") || cell.Err() != nil {
		t.Errorf("%q, %v", c.hint(), cell.Err())
	}
	c.press('s')
	if cell.Err() == nil || run.Err() != nil || c.hint() != "skipping this cell" {
		t.Errorf("skip: cell %v, run %v, %q", cell.Err(), run.Err(), c.hint())
	}
	done()
	c.press('s') // nothing is under way
	if !strings.HasPrefix(c.hint(), "PAUSED") {
		t.Errorf("%q", c.hint())
	}
	c.press('p')
	if cell, _ = c.enter(run); cell.Err() != nil {
		t.Error(cell.Err())
	}
	// An interrupt ends a pause too, and is the same as q.
	c.press('p')
	interrupt()
	<-c.ending
	if !c.stopped() || run.Err() != nil {
		t.Errorf("stopped %v, run %v", c.stopped(), run.Err())
	}
	c.press('p') // too late
	c.press('q')
	if run.Err() == nil {
		t.Error("the second q does not end the run at once")
	}
	mu.Lock()
	defer mu.Unlock()
	if len(said) < 4 || !slices.Contains(said, "skip    nothing: no cell is under way") { // pausing, going on, pausing again
		t.Errorf("%q", said)
	}
}

// TestPause: a paused run begins no cell until it is resumed.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		run, c, end := newRunControl(t.Context(), io.Discard)
		defer end()
		c.press('p')
		entered := make(chan context.Context, 1)
		go func() {
			cell, _ := c.enter(run)
			entered <- cell
		}()
		synctest.Wait()
		select {
		case <-entered:
			t.Fatal("a paused run began a cell")
		default:
		}
		c.press('p')
		if cell := <-entered; cell.Err() != nil {
			t.Error(cell.Err())
		}
	})
}

// pty is a terminal: what a program writes to it, and its settings.
type pty struct {
	keys, tty *os.File
	was       unix.Termios

	mu   sync.Mutex // guards text
	text strings.Builder
	more chan struct{}
}

func (s *pty) settings(t *testing.T) unix.Termios {
	t.Helper()
	now, err := unix.IoctlGetTermios(int(s.tty.Fd()), termiosGet)
	if err != nil {
		t.Fatal(err)
	}
	return *now
}

// wait waits until the screen has shown a text since a place in what was
// written, and gives the place after it.
func (s *pty) wait(t *testing.T, from int, want string) int {
	t.Helper()
	return s.waitWith(t, from, want, func(string) {})
}

// waitWith is wait that calls missing with all that was written whenever the text is not there yet.
func (s *pty) waitWith(t *testing.T, from int, want string, missing func(all string)) int {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		s.mu.Lock()
		all := s.text.String()
		s.mu.Unlock()
		if i := strings.Index(all[from:], want); i >= 0 {
			return from + i + len(want)
		}
		missing(all)
		select {
		case <-s.more:
		case <-deadline:
			t.Fatalf("no %q on the screen after %q", want, all[max(0, len(all)-1500):])
		}
	}
}

// pressUntil presses a key until the screen shows a text: a key can come between two cells,
// or when its cell has just ended. It presses again when the screen has shown the key's hint
// since, or that the key had nothing to do.
func (s *pty) pressUntil(t *testing.T, key, hint string, from int, want string) int {
	t.Helper()
	pressed := -1
	return s.waitWith(t, from, want, func(all string) {
		if max(strings.LastIndex(all, hint), strings.LastIndex(all, "nothing: ")) >= pressed {
			pressed = len(all)
			s.press(t, key)
		}
	})
}

func (s *pty) press(t *testing.T, keys string) {
	t.Helper()
	if _, err := s.keys.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

// TestKeysOfARun steers a run on a terminal.
func TestKeysOfARun(t *testing.T) {
	s := newPTY(t)
	t.Setenv("TERM", "xterm")
	dir := filepath.Join(t.TempDir(), "run")
	args := []string{"bench", "--sim", "1p1d:profile=cpu,speed=4", "--isl", "64,256", "--osl", "4", "--concurrency", "1", "--repeat", "20", "--requests", "6", "--no-refine", "--out", dir}
	code := make(chan int, 1)
	var out strings.Builder
	go func() { code <- cli.Main(cli.Root(New()), args, s.tty, &out, s.tty) }()
	at := s.wait(t, 0, "warm-up over")
	at = s.wait(t, at, "p pause")
	if s.settings(t).Lflag&(unix.ICANON|unix.ECHO) != 0 {
		t.Error("keys are echoed or wait for enter")
	}
	s.press(t, "p")
	at = s.wait(t, at, "pause   ")
	at = s.wait(t, at, "PAUSED")
	s.press(t, "p")
	at = s.wait(t, at, "continue")
	at = s.wait(t, at, "p pause")
	at = s.pressUntil(t, "s", "s skip this cell", at, ": void, skipped by hand")
	s.press(t, "q")
	s.wait(t, at, "end     after")
	if c := <-code; c != cli.ExitInterrupted {
		t.Errorf("code %d", c)
	}
	if now := s.settings(t); now != s.was {
		t.Errorf("the terminal was left as %+v, was %+v", now, s.was)
	}
	r, err := report.ReadResult(dir)
	if err != nil || r.Partial == "" || r.Recommend != nil || !strings.Contains(out.String(), "PARTIAL") {
		t.Errorf("%v: partial %q\n%s", err, r.Partial, out.String())
	}
	if r.Skipped > 0 && !strings.Contains(out.String(), "skipped by hand") { // else it was a cell of the warm-up
		t.Errorf("%d skipped, not said:\n%s", r.Skipped, out.String())
	}
}

// TestTerminalIsRestored: whatever happens while keys are read.
func TestTerminalIsRestored(t *testing.T) {
	s := newPTY(t)
	seen := make(chan byte, 8)
	stop, err := readKeys(s.tty, func(b byte) { seen <- b })
	if err != nil {
		t.Fatal(err)
	}
	s.press(t, "p")
	if b := <-seen; b != 'p' {
		t.Errorf("got %q", b)
	}
	s.press(t, "sq") // since the last look
	if a, b := <-seen, <-seen; a != 's' || b != 'q' {
		t.Errorf("got %q and %q", a, b)
	}
	// A shell that had the terminal in between leaves its own settings.
	if err := unix.IoctlSetTermios(int(s.tty.Fd()), termiosSet, &s.was); err != nil {
		t.Fatal(err)
	}
	clitest.Until(t, "the end of line editing", func() error {
		if s.settings(t).Lflag&unix.ICANON != 0 {
			return errors.New("it stays on")
		}
		return nil
	})
	stop()
	stop()
	if s.settings(t) != s.was {
		t.Error("not restored by stop")
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was lost")
			}
		}()
		p := newBenchProgress(s.tty, "region")
		defer p.close()
		_, c, end := newRunControl(t.Context(), io.Discard)
		defer end()
		if err := p.listen(s.tty, c); err != nil {
			t.Error(err)
		}
		if s.settings(t).Lflag&unix.ICANON != 0 {
			t.Error("line editing is on")
		}
		panic("in the middle of a run")
	}()
	if s.settings(t) != s.was {
		t.Error("not restored after a panic")
	}
	// Input that is no terminal, and a run without a live region, are left alone.
	for _, mode := range []string{"lines", "none", "jsonl"} {
		p := newBenchProgress(s.tty, mode)
		if err := p.listen(s.tty, nil); err != nil || p.control != nil {
			t.Errorf("%s: %v, keys are read", mode, err)
		}
		p.close()
	}
	p := newBenchProgress(s.tty, "region")
	if err := p.listen(strings.NewReader("q"), nil); err != nil || p.control != nil {
		t.Errorf("%v: keys are read from what is no terminal", err)
	}
	p.close()
}
