package adminserver

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
)

// TestEventPages: without "after" the newest events are listed, with it those
// that follow, however many the log has forgotten.
func TestEventPages(t *testing.T) {
	for _, c := range []struct {
		events int // of a log of 16
		query  string
		want   string // sequence numbers
		lost   float64
	}{
		{0, "limit=2", "[]", 0},
		{1, "limit=2", "[1]", 0},
		{5, "limit=2", "[4 5]", 0},
		{5, "limit=10000", "[1 2 3 4 5]", 0},
		{5, "", "[1 2 3 4 5]", 0},
		{5, "limit=2&wait=1s", "[4 5]", 0},
		{5, "after=0&limit=2", "[1 2]", 0},
		{5, "after=2&limit=2", "[3 4]", 0},
		{5, "after=5&limit=2", "[]", 0},
		{20, "limit=2", "[19 20]", 0},
		{20, "limit=18", "[5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20]", 0},
		{20, "after=0&limit=2", "[5 6]", 4},
		// The log has been started again since.
		{5, "after=6&limit=2", "[1 2]", 0},
		{0, "after=6&limit=2", "[]", 0},
	} {
		s := newStand(16)
		for range c.events {
			s.events.Add(eventlog.Event{Kind: "k"})
		}
		status, v := ask(t, New(anybody(time.Second), s, nil, nil), "/admin/v1/events?"+c.query)
		got := []any{}
		list, ok := v["events"].([]any)
		for _, e := range list {
			got = append(got, e.(map[string]any)["seq"])
		}
		if status != 200 || !ok {
			t.Fatalf("%d events, %q: %d %v", c.events, c.query, status, v)
		}
		type facts struct {
			Events       string
			Lost, Newest any
		}
		if d := cmp.Diff(facts{c.want, c.lost, float64(c.events)}, facts{fmt.Sprint(got), v["lost"], v["newest_seq"]}); d != "" {
			t.Errorf("%d events, %q (-want +got):\n%s", c.events, c.query, d)
		}
	}
}

// TestEventsOfAnotherLog: who waits for an event when the log is closed, because
// another one takes its place, is answered from that one.
func TestEventsOfAnotherLog(t *testing.T) {
	old := newStand(4)
	for range 2 {
		old.events.Add(eventlog.Event{Kind: "old"})
	}
	s := &takenBack{stand: old, asked: make(chan struct{}), now: eventlog.New(4, nil)}
	h := New(anybody(time.Second), s, nil, nil)
	type answer struct {
		status int
		v      map[string]any
	}
	got := make(chan answer)
	go func() {
		status, v := ask(t, h, "/admin/v1/events?after=2&wait=20s")
		got <- answer{status, v}
	}()
	<-s.asked // the first look, at the old log
	s.now.Add(eventlog.Event{Kind: "new"})
	old.events.Close()
	a := <-got
	list, _ := a.v["events"].([]any)
	if len(list) != 1 || list[0].(map[string]any)["kind"] != "new" || a.v["newest_seq"] != 1.0 {
		t.Errorf("%d %v", a.status, a.v)
	}
}

// takenBack has another log from the second question on.
type takenBack struct {
	*stand
	asked chan struct{}
	now   *eventlog.Log
	looks int
}

func (s *takenBack) Events() *eventlog.Log {
	if s.looks++; s.looks > 1 {
		return s.now
	}
	close(s.asked)
	return s.events
}
