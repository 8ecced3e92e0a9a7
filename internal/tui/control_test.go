package tui

import (
	"context"
	"errors"
	"slices"
	"testing"
)

// TestControlTakesTheKeysOfTime: over a recording that is played, pause and
// steps move the recording, not the screen, and a refusal is told.
func TestControlTakesTheKeysOfTime(t *testing.T) {
	var done []string
	a := &app{ctx: t.Context(), opts: Options{Control: func(_ context.Context, do string) error {
		done = append(done, do)
		if do == "back" {
			return errors.New("at the beginning")
		}
		return nil
	}}}
	for _, do := range []string{"toggle", "step", "back"} {
		if cmd := a.control(do); cmd == nil {
			t.Fatal("no command")
		}
	}
	if len(done) != 0 {
		t.Fatal("the screen waited for the recording")
	}
	run := func(do string) any { return a.controlNow(do) }
	if m := run("toggle"); m != nil {
		t.Errorf("toggle said %v", m)
	}
	if m, ok := run("back").(saidMsg); !ok || !m.fault || m.text != "at the beginning" {
		t.Errorf("back said %v", m)
	}
	if !slices.Equal(done, []string{"toggle", "back"}) {
		t.Errorf("done %v", done)
	}
}
