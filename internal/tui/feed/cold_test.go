package feed

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// linesOf are the lines of a code.
func linesOf(r *Router, code string) (out []string) {
	for _, a := range r.Attention {
		if a.Code == code {
			out = append(out, a.Severity.String()+" "+a.Subject+": "+a.Text)
		}
	}
	return out
}

func oneLine(t *testing.T, r *Router, code, want string) {
	t.Helper()
	got := linesOf(r, code)
	if len(got) != 1 || !strings.Contains(got[0], want) {
		t.Errorf("%s: %q, want one line with %q", code, got, want)
	}
}

// TestRouterRestart: a router that lost its index with its process says so until
// the index is rebuilt, and that it is, for a minute.
func TestRouterRestart(t *testing.T) {
	b := NewBuilder("r")
	at := func(s int, started time.Time, blocks int64) *Router {
		return b.Add(snap(4, s, func(a *admin.Snapshot) {
			a.Status.Started, a.Status.Index.Memberships, a.Status.Index.MaxBlocks = started, blocks, 1e6
		}), time.Second)
	}
	first := t0.Add(-time.Hour)
	if r := at(0, first, 26_000); len(r.Attention) != 0 {
		t.Fatalf("healthy: %+v", r.Attention)
	}
	at(1, first, 26_000)
	second := t0.Add(3 * time.Second)
	r := at(5, second, 1_700)
	oneLine(t, r, CodeRestarted, "info router: was restarted 2 s ago")
	oneLine(t, r, CodeCold, "warn index: cold since the router's restart: it knows 1700 of 26000 blocks, 7%")
	r = at(100, second, 9_000)
	oneLine(t, r, CodeCold, "9000 of 26000 blocks, 35%")
	if got := linesOf(r, CodeRestarted); got != nil {
		t.Errorf("an old start is listed: %q", got)
	}
	r = at(120, second, 21_000)
	oneLine(t, r, CodeCold, "info index: rebuilt after the router's restart in 117 s")
	if r = at(200, second, 21_000); len(r.Attention) != 0 {
		t.Errorf("an hour-old recovery: %+v", r.Attention)
	}
	// Another start at once after it, before it is rebuilt, still knows what was.
	at(210, t0.Add(205*time.Second), 300)
	r = at(222, t0.Add(220*time.Second), 200)
	oneLine(t, r, CodeCold, "200 of 21000 blocks")
	// One that begins with its index was never cold.
	b = NewBuilder("r")
	at(0, first, 26_000)
	if r := at(5, second, 25_900); len(linesOf(r, CodeCold)) != 0 {
		t.Errorf("a warm start: %+v", r.Attention)
	}
}

// TestColdRank: an engine that starts over with an empty cache is listed until it
// holds most of what it held, and by how much.
func TestColdRank(t *testing.T) {
	b := NewBuilder("r")
	at := func(s int, blocks int64, restarts uint64) *Router {
		return b.Add(snap(4, s, func(a *admin.Snapshot) {
			for i := range a.Workers {
				a.Workers[i].Ranks[0].IndexBlocks = 1000 - 20*int64(s%3) // what is held moves
			}
			k := &a.Workers[1].Ranks[0]
			k.IndexBlocks, k.Feed.Restarts = blocks, restarts
		}), time.Second)
	}
	status := func(r *Router) string {
		for i := range r.Ranks {
			if r.Ranks[i].Label == "d1/dp0" {
				return r.Ranks[i].Status
			}
		}
		return ""
	}
	at(0, 1000, 0)
	if r := at(1, 900, 0); len(r.Attention) != 0 || status(r) != "ok" {
		t.Fatalf("healthy: %+v", r.Attention)
	}
	r := at(2, 40, 1)
	oneLine(t, r, CodeCold, "warn d1/dp0: cold cache: its engine started over, and it holds 40 of 1000 blocks, 4%")
	if status(r) != "COLD" {
		t.Errorf("its status is %s", status(r))
	}
	oneLine(t, at(90, 500, 1), CodeCold, "500 of 1000")
	r = at(95, 810, 1)
	oneLine(t, r, CodeCold, "info d1/dp0: warm again after 93 s (its engine started over)")
	if status(r) != "ok" {
		t.Errorf("its status is %s", status(r))
	}
	oneLine(t, at(96, 1200, 1), CodeCold, "it holds 1200 blocks, all of what it held before")
	if r = at(160, 810, 1); len(r.Attention) != 0 {
		t.Errorf("long after: %+v", r.Attention)
	}
	// A cache that was cleared without a restart is cold by itself, and one that
	// stays small is taken as it is in the end.
	oneLine(t, at(161, 3, 1), CodeCold, "its cache was cleared")
	if r = at(800, 3, 1); len(r.Attention) != 0 {
		t.Errorf("after ten minutes: %+v", r.Attention)
	}
}

// TestNeverReached: a router that has not answered has no figures, not zeros, and
// one that stopped answering is not "ready".
func TestNeverReached(t *testing.T) {
	b := NewBuilder("http://r")
	r := b.Add(Sample{Err: errNotRouter, At: t0}, time.Second)
	view := Sum(t0, []Router{*r})
	raw, err := json.Marshal(&view)
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Fleet   map[string]any
		Routers []struct{ Status, Derived map[string]any }
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	if st := doc.Routers[0].Status; st != nil {
		t.Errorf("a router that was never reached has a status: %v", st)
	}
	if len(doc.Routers[0].Derived) == 0 {
		t.Error("the derived figures are missing")
	}
	for k, v := range doc.Routers[0].Derived {
		if v != nil {
			t.Errorf("%s is %v of a router that was never reached", k, v)
		}
	}
	for _, k := range []string{"requests_per_second", "inflight_requests", "queued_requests"} {
		if v := doc.Fleet[k]; v != nil {
			t.Errorf("the fleet's %s is %v", k, v)
		}
	}
	oneLine(t, r, CodeRouterDown, "it has not answered yet, so nothing is known of it")
	if r.Condition() != "" {
		t.Errorf("its condition is %q", r.Condition())
	}
	if r = b.Add(snap(1, 1, nil), time.Second); r.Condition() != "ready" {
		t.Errorf("after an answer it is %q", r.Condition())
	}
	r = b.Add(Sample{Err: errNotRouter, At: t0.Add(2 * time.Second)}, time.Second)
	oneLine(t, r, CodeRouterDown, "the figures below are the last ones known")
	if r.Condition() != "was ready" {
		t.Errorf("while it is down it is %q", r.Condition())
	}
}
