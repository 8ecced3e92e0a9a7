package tui

import (
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/tui/feed"
)

// big is a fleet of 256 ranks.
var big = stage{prefill: 8, decode: 24, dp: 8, troubles: true}

// BenchmarkView redraws every view at 200x60 with 256 ranks; the budget is
// 8 ms.
func BenchmarkView(b *testing.B) {
	for _, v := range views {
		b.Run(v.name, func(b *testing.B) {
			a := newStage(b, big, 200, 60, 20, Options{Profile: termenv.TrueColor})
			v.show(a, big)
			b.ReportAllocs()
			for b.Loop() {
				a.dirty = true
				if len(a.View()) < 1000 {
					b.Fatal("no frame")
				}
			}
		})
	}
}

// BenchmarkSample takes an answer of 256 ranks in.
func BenchmarkSample(b *testing.B) {
	a := newStage(b, big, 200, 60, 20, Options{Profile: termenv.TrueColor})
	samples := make([]feed.Sample, 64)
	for i := range samples {
		samples[i] = feed.Sample{Snapshot: big.snapshot(20 + i), At: start.Add(time.Duration(20+i) * time.Second)}
	}
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		s := samples[n%len(samples)]
		s.Snapshot.Status.Now = start.Add(time.Duration(20+n) * time.Second)
		s.At = s.Snapshot.Status.Now
		a.Update(sampleMsg{0, s})
		n++
	}
}

// BenchmarkKey is a key press and the frame after it.
func BenchmarkKey(b *testing.B) {
	a := newStage(b, big, 200, 60, 20, Options{Profile: termenv.TrueColor})
	down, up := tea.KeyMsg{Type: tea.KeyDown}, tea.KeyMsg{Type: tea.KeyUp}
	var worst time.Duration
	n := 0
	for b.Loop() {
		k := down
		if n%100 >= 50 {
			k = up
		}
		n++
		t := time.Now()
		a.Update(k)
		a.View()
		worst = max(worst, time.Since(t))
	}
	b.ReportMetric(float64(worst.Microseconds()), "worst-us")
}

// TestFrameIsCached checks that nothing is drawn for messages that change
// nothing.
func TestFrameIsCached(t *testing.T) {
	a := newStage(t, fleet, 120, 40, 5, plainOptions)
	a.View()
	n := a.draws
	for range 10 {
		a.Update(struct{}{})
		a.Update(pollMsg{0, -1})
		a.View()
	}
	if a.draws != n {
		t.Errorf("%d frames were drawn for nothing", a.draws-n)
	}
}

// TestBytesPerRefresh counts what a refresh writes to the terminal: bubbletea
// rewrites the lines that changed, each with a few bytes of cursor movement.
func TestBytesPerRefresh(t *testing.T) {
	for name, g := range map[string]stage{"12 ranks": {prefill: 2, decode: 4, dp: 2, troubles: true}, "64 ranks": {prefill: 4, decode: 12, dp: 4, troubles: true}, "256 ranks": big} {
		for _, size := range [][2]int{{80, 24}, {120, 40}, {200, 60}} {
			a := newStage(t, g, size[0], size[1], 15, Options{Profile: termenv.TrueColor})
			old := strings.Split(a.View(), "\n")
			bytes, refreshes := 0, 10
			for s := range refreshes {
				sendSample(a, g, 15+s)
				lines := strings.Split(a.View(), "\n")
				for i, l := range lines {
					bytes += 2
					if l != old[i] {
						bytes += len(l) + len("\x1b[K")
					}
				}
				old = lines
			}
			per := bytes / refreshes
			t.Logf("%s at %dx%d: %d bytes per refresh", name, size[0], size[1], per)
			if per > 8<<10 {
				t.Errorf("%s at %dx%d: %d bytes per refresh, more than 8 KiB", name, size[0], size[1], per)
			}
		}
	}
}

// TestFirstFrame checks that something is on the screen without waiting for a
// router.
func TestFirstFrame(t *testing.T) {
	a := newApp(t.Context(), Options{Clients: clients(t, "http://127.0.0.1:1")})
	a.Update(tea.WindowSizeMsg{Width: 120, Height: 40})
	mustContain(t, screen(a), "WAIT", "waiting for the router's first answer")
}

// TestHeapIsBounded takes in answers of 256 ranks until every ring is full,
// and as many again: from then on an hour is like a day.
func TestHeapIsBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	a := newStage(t, big, 200, 60, 1, Options{Profile: termenv.ANSI256})
	snap := big.snapshot(1)
	s := 1
	heap := func(to int) uint64 {
		for ; s < to; s++ {
			now := start.Add(time.Duration(s) * time.Second)
			snap.Status.Now = now
			for i := range snap.Events {
				snap.Events[i].Seq = uint64(4*s + i)
			}
			snap.Status.Traffic.Requests += 42
			a.Update(sampleMsg{0, feed.Sample{Snapshot: snap, At: now}})
		}
		a.View()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	full, later := heap(350), heap(700)
	t.Logf("heap %d MiB when all is full, %d MiB later", full>>20, later>>20)
	if full > 64<<20 || later > full+full/10 {
		t.Errorf("heap %d MiB, later %d MiB: not below 64 MiB and steady", full>>20, later>>20)
	}
	runtime.KeepAlive(a)
}

// BenchmarkDecisionsView is a second of the decisions view with 1,000 ranks, from the
// router's bytes to the screen: the snapshot, the list, the receipt under the cursor.
// core-% is the part of a core that it takes; the budget is 5.
func BenchmarkDecisionsView(b *testing.B) {
	g := stage{prefill: 50, decode: 200, dp: 4}
	const seconds = 8
	snapshots, lists := make([][]byte, seconds), make([][]byte, seconds)
	receipts := map[string][]byte{}
	for s := range seconds {
		snapshots[s] = encode(g.snapshot(20 + s))
		list := admin.DecisionList{Schema: admin.Schema, Total: 5000}
		for i := range decisionsShown {
			list.Decisions = append(list.Decisions, encode(g.receipt(4*(1000+s*42-i), start, false)))
		}
		lists[s] = encode(list)
		r := g.receipt(4*(1000+s*42), start, true)
		few := r.Decode.Candidates
		for len(r.Decode.Candidates) < decision.Kept {
			r.Decode.Candidates = append(r.Decode.Candidates, few...)
		}
		r.Prefill.Candidates = r.Decode.Candidates
		receipts["/admin/v1/decisions/"+r.ID] = encode(r)
	}
	at := 0
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer := receipts[q.URL.Path]
		switch q.URL.Path {
		case "/admin/v1/snapshot":
			answer = snapshots[at%seconds]
		case "/admin/v1/decisions":
			answer = lists[at%seconds]
		case "/admin/v1/index/children":
			answer = encode(g.children(""))
		}
		if _, err := w.Write(answer); err != nil {
			b.Error(err)
		}
	}))
	defer web.Close()
	a := newStage(b, g, 200, 60, 0, Options{Profile: termenv.TrueColor, Clients: clients(b, web.URL)})
	press(a, "4")
	second := func() {
		s := a.replicas[0].poller.Poll(b.Context(), 0)
		if s.Err != nil {
			b.Fatal(s.Err)
		}
		s.Snapshot.Status.Now = start.Add(time.Duration(20+at) * time.Second)
		s.At = s.Snapshot.Status.Now
		a.now = s.At
		a.Update(sampleMsg{0, s})
		c := a.page()
		todo := []tea.Cmd{c.Load.Decisions("")}
		for len(todo) > 0 {
			_, next := a.Update(todo[0]())
			todo = append(todo[1:], batched(next)...)
		}
		if len(a.View()) < 1000 {
			b.Fatal("no frame")
		}
		at++
	}
	second()
	if !strings.Contains(screen(a), "runner-up") {
		b.Fatalf("no receipt is shown:\n%s", screen(a))
	}
	b.ReportAllocs()
	for b.Loop() {
		second()
	}
	b.ReportMetric(100*b.Elapsed().Seconds()/float64(b.N), "core-%")
}
