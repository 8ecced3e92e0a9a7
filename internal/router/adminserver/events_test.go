package adminserver

import (
	"fmt"
	"testing"

	"github.com/dynctl/dynctl/internal/router/eventlog"
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
		{20, "limit=18", "[5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20]", 2},
		{20, "after=0&limit=2", "[5 6]", 4},
	} {
		o := stand(t)
		o.Events = eventlog.New(16, nil, nil)
		for range c.events {
			o.Events.Add(eventlog.Event{Kind: "k"})
		}
		h, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		status, v := ask(t, h, "GET", "/admin/v1/events?"+c.query, "")
		got := []any{}
		list, _ := v["events"].([]any)
		for _, e := range list {
			got = append(got, e.(map[string]any)["seq"])
		}
		if status != 200 || fmt.Sprint(got) != c.want || v["lost"] != c.lost || v["newest_seq"] != float64(c.events) {
			t.Errorf("%d events, %q: %d, %v, lost %v, newest %v; want %s, lost %v", c.events, c.query, status, got, v["lost"], v["newest_seq"], c.want, c.lost)
		}
	}
}
