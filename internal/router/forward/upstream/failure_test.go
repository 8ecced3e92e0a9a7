package upstream

import (
	"testing"
	"time"
)

// TestStale: only a reset of a reused connection, without a byte of an answer and soon
// after the request, may be an idle close.
func TestStale(t *testing.T) {
	idle := Failure{Kind: Reset, Reused: true, Sent: true, Idle: 3 * time.Second, After: time.Millisecond}
	for name, c := range map[string]struct {
		change func(f *Failure)
		want   bool
	}{
		"at once":                        {func(*Failure) {}, true},
		"nothing was sent":               {func(f *Failure) { f.Sent = false }, true},
		"a new connection":               {func(f *Failure) { f.Reused = false }, false},
		"a part of an answer":            {func(f *Failure) { f.Started = true }, false},
		"another failure":                {func(f *Failure) { f.Kind = Timeout }, false},
		"half a second later":            {func(f *Failure) { f.After = 500 * time.Millisecond }, true},
		"a second later":                 {func(f *Failure) { f.After = time.Second }, false},
		"used shortly before":            {func(f *Failure) { f.Idle = time.Microsecond }, true},
		"later than it had been idle":    {func(f *Failure) { f.Idle, f.After = 200*time.Millisecond, 300*time.Millisecond }, false},
		"earlier than it had been idle":  {func(f *Failure) { f.Idle, f.After = 300*time.Millisecond, 200*time.Millisecond }, true},
		"within the flight of an ending": {func(f *Failure) { f.Idle, f.After = 0, flight-1 }, true},
	} {
		f := idle
		if c.change(&f); f.Stale() != c.want {
			t.Errorf("%s: stale is %v, want %v", name, f.Stale(), c.want)
		}
	}
}
