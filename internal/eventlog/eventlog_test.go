package eventlog

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

func TestLogKeepsTheNewestAndCountsTheLost(t *testing.T) {
	l := New(4, func() time.Time { return time.Unix(7, 0) })
	for i := 1; i <= 10; i++ {
		if e := l.Add(Event{Kind: "k", Text: fmt.Sprint(i)}); e.Seq != uint64(i) || !e.At.Equal(time.Unix(7, 0)) {
			t.Fatalf("event %d stored as %+v", i, e)
		}
	}
	got, newest, lost := l.Since(2, 100)
	if newest != 10 || lost != 4 {
		t.Fatalf("Since(2): newest %d, want 10; %d lost, want 4", newest, lost)
	}
	if len(got) != 4 || got[0].Seq != 7 || got[3].Text != "10" {
		t.Fatalf("Since(2) = %v, want those from 7 to 10", got)
	}
	if got, _, lost := l.Since(8, 1); len(got) != 1 || got[0].Seq != 9 || lost != 0 {
		t.Fatalf("Since(8, 1) = %v lost %d", got, lost)
	}
	if got, _, _ := l.Since(10, 5); len(got) != 0 {
		t.Fatalf("Since(newest) = %v", got)
	}
	if got := l.Last(2); len(got) != 2 || got[0].Seq != 9 {
		t.Fatalf("Last(2) = %v", got)
	}
}

func TestLogWakesWaiters(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	l := New(4, nil)
	l.Tap(func(e Event) { mu.Lock(); seen = append(seen, e.Kind); mu.Unlock() })
	w := l.Wait()
	select {
	case <-w:
		t.Fatal("woken before an event")
	default:
	}
	l.Add(Event{Kind: "a"})
	<-w
	mu.Lock()
	defer mu.Unlock()
	if len(seen) != 1 || seen[0] != "a" {
		t.Fatalf("hook saw %v", seen)
	}
}

// TestProblems: each line of an error is a problem, and what counts them is none.
func TestProblems(t *testing.T) {
	for text, want := range map[string][]string{
		"2 problems in the configuration:\n  a.yaml:1: unknown key\n  a.yaml:2: not a number": {"a.yaml:1: unknown key", "a.yaml:2: not a number"},
		"one\ntwo\n": {"one", "two"},
		"alone:":     {"alone:"},
		"":           {""},
	} {
		if got := Problems(errors.New(text)); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
