package tui

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
)

// playing shows a recording of ten minutes as it stands.
func playing(a *app, g stage, s int, r admin.Replay) {
	snap := g.snapshot(s)
	snap.Status.Replay, snap.Status.Traffic.ITL, snap.Status.Traffic.Overhead = &r, nil, nil
	a.Update(sampleMsg{0, feed.Sample{Snapshot: snap, At: start.Add(20 * time.Second)}})
}

// TestRecordingViews: a recording has a bar, with where it stands and how long it is,
// on every page; before its length is known there is none.
func TestRecordingViews(t *testing.T) {
	total := (10 * time.Minute).Microseconds()
	for _, c := range []struct {
		name string
		r    admin.Replay
		keys []string
		want []string
	}{
		{"playing", admin.Replay{Records: 41208, AtUS: (3*time.Minute + 20*time.Second).Microseconds(), TotalUS: &total, Speed: 4}, nil, []string{"PLAYING", "3m20s of 10m0s", "4x", "REPLAY"}},
		{"paused", admin.Replay{Records: 12, AtUS: 1_500_000, TotalUS: &total, Speed: 1, Paused: true}, []string{"4"}, []string{"PAUSED", "1.5s of 10m0s"}},
		{"seeking", admin.Replay{Records: 99, AtUS: 61_000_000, Speed: 0, Seeking: true}, []string{"2"}, []string{"SEEKING", "1m1s of -", "as fast as it goes"}},
		{"ended", admin.Replay{Records: 99999, AtUS: total, TotalUS: &total, Speed: 1, Ended: true}, []string{"?"}, []string{"AT END", "RECORDING"}},
	} {
		everySize(t, "replay-"+c.name, func(t *testing.T, w, h int, o Options, name string) {
			g := stage{prefill: 2, decode: 4, dp: 2}
			a := newStage(t, g, w, h, 19, o)
			playing(a, g, 20, c.r)
			press(a, c.keys...)
			got := screen(a)
			checkFrame(t, got, w, h, o.ASCII)
			mustContain(t, got, c.want...)
			golden(t, name, got+"\n")
		})
	}
}

// TestKeysOfARecording: while a recording is watched, the keys of time and the bar act
// on it, a refusal is shown, and going back forgets what comes later; on a running router
// the same keys do what they always do.
func TestKeysOfARecording(t *testing.T) {
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Method != http.MethodPost || q.URL.Path != "/admin/v1/replay" {
			t.Errorf("%s %s", q.Method, q.URL)
		}
		v := q.URL.Query()
		asked = append(asked, strings.TrimSpace(v.Get("do")+" "+v.Get("to")))
		if v.Get("to") == "moon" {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = w.Write([]byte(`{"error":{"code":"invalid_request","message":"\"moon\" is not a time"}}`))
			return
		}
		_, _ = w.Write([]byte(`{"records":1}`))
	}))
	defer server.Close()
	g := stage{prefill: 2, decode: 4, dp: 2}
	a := newStage(t, g, 120, 40, 20, Options{Profile: termenv.Ascii, Clients: clients(t, server.URL)})
	press(a, "home", "+")
	if len(asked) > 0 || a.rate != 500*time.Millisecond {
		t.Fatalf("a running router was asked %v, rate %s", asked, a.rate)
	}
	a.message = ""
	total := (10 * time.Minute).Microseconds()
	playing(a, g, 20, admin.Replay{AtUS: 200_000_000, TotalUS: &total, Speed: 1})
	run := func(cmd tea.Cmd) {
		t.Helper()
		if cmd == nil {
			t.Error("no question")
			return
		}
		a.Update(cmd())
	}
	for _, k := range []string{"p", "[", "]", "+", "-", "left", "right", "shift+left", "shift+right", "home", "end"} {
		cmd, ok := a.playKey(k)
		if !ok {
			t.Errorf("%s is no key of a recording", k)
			continue
		}
		run(cmd)
	}
	screen(a)
	run(a.click(tea.MouseMsg{Button: tea.MouseButtonLeft, Action: tea.MouseActionPress, X: (a.bar[0] + a.bar[1]) / 2, Y: 38}))
	run(a.command("seek 1m30s"))
	if a.message != "" {
		t.Errorf("said %q", a.message)
	}
	run(a.command("seek moon"))
	if !a.fault || !strings.Contains(a.message, "moon") {
		t.Errorf("said %q", a.message)
	}
	want := []string{"toggle", "back", "step", "faster", "slower", "seek -10s", "seek +10s", "seek -1m", "seek +1m", "seek 0s", "seek end", "seek 50.", "seek 1m30s", "seek moon"}
	if !slices.EqualFunc(asked, want, strings.HasPrefix) {
		t.Errorf("asked %q, want %q", asked, want)
	}
	if len(a.replicas[0].builder.Events()) < 10 {
		t.Fatal("few events to forget")
	}
	playing(a, g, 5, admin.Replay{AtUS: 5_000_000, TotalUS: &total, Speed: 1})
	if e := a.replicas[0].builder.Events(); e[len(e)-1].Seq > 5 {
		t.Errorf("event %d is known at 5", e[len(e)-1].Seq)
	}
	if c := a.click(tea.MouseMsg{Button: tea.MouseButtonLeft, Action: tea.MouseActionPress, X: 119, Y: 38}); c != nil {
		t.Error("a click beside the bar goes somewhere")
	}
}
