package tui

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
)

// TestBadRouters checks that every way in which a router can misbehave is
// shown in plain words, and leaves a whole frame.
func TestBadRouters(t *testing.T) {
	nonsense := map[string]http.HandlerFunc{
		"html":   func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "<html>hello</html>") },
		"empty":  func(http.ResponseWriter, *http.Request) {},
		"object": func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "{}") },
		"array":  func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "[1,2]") },
		"types":  func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"schema":7}`) },
		"cut": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "900")
			io.WriteString(w, "{")
		},
		"error 500": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "boom", 500) },
		"wrong token": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(401)
			io.WriteString(w, `{"error":{"message":"the admin API needs the bearer token of --admin-token-file","code":"unauthorized"}}`)
		},
		"escapes": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(503)
			io.WriteString(w, `{"error":{"message":"\u001b]0;owned\u0007\u001b[2J\u009b31mred\u202e"}}`)
		},
	}
	words := map[string]string{"html": "does not answer like a dynctl router", "object": "not like a dynctl router", "wrong token": "--token-file", "error 500": "500", "escapes": "owned"}
	for name, h := range nonsense {
		t.Run(name, func(t *testing.T) {
			f := newRouter(t, stage{prefill: 1, decode: 2, dp: 1})
			a := newApp(t.Context(), Options{Clients: clients(t, f.URL), Timeout: 20 * time.Second})
			a.w, a.h = 120, 40
			poll := func() { a.Update(a.poll(0)()) }
			f.replace(h)
			poll()
			if a.replicas[0].view.Link != feed.Down {
				t.Errorf("link %s", a.replicas[0].view.Link)
			}
			got := screen(a)
			checkFrame(t, got, 120, 40, false)
			mustContain(t, got, "DOWN", words[name])
			// It comes back, stays on the screen when it is lost again, and recovers.
			f.replace(nil)
			poll()
			mustContain(t, screen(a), "LIVE", "decode-1/dp0")
			f.replace(h)
			poll()
			got = screen(a)
			mustContain(t, got, "DOWN", "decode-1/dp0")
			mustContain(t, strings.Join(strings.Fields(got), " "), "the figures below are the last ones known")
			checkFrame(t, got, 120, 40, false)
			f.replace(nil)
			poll()
			if got := screen(a); strings.Contains(got, "DOWN") {
				t.Errorf("it did not recover:\n%s", got)
			}
		})
	}
}

func TestUnreachableRouter(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	s.Close()
	a := newApp(t.Context(), Options{Clients: clients(t, s.URL), Timeout: 20 * time.Second})
	a.w, a.h = 80, 24
	a.Update(a.poll(0)())
	mustContain(t, screen(a), "DOWN", "no router answers at")
	v := collect(t, s.URL)
	var unreachable *admin.UnreachableError
	if !errors.As(v.Routers[0].Cause, &unreachable) || v.Fleet.RoutersUp != 0 {
		t.Errorf("cause %v, %d up", v.Routers[0].Cause, v.Fleet.RoutersUp)
	}
}

func TestStallingRouter(t *testing.T) {
	f := newRouter(t, stage{decode: 1, dp: 1})
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	a := newApp(t.Context(), Options{Clients: clients(t, f.URL), Timeout: 50 * time.Millisecond})
	a.w, a.h = 100, 30
	a.Update(a.poll(0)())
	f.replace(func(_ http.ResponseWriter, q *http.Request) {
		select {
		case <-release:
		case <-q.Context().Done():
		}
	})
	a.Update(a.poll(0)())
	mustContain(t, screen(a), "DOWN", "does not answer within 50ms")
	// While an answer is only late, the screen says how late.
	b := newStage(t, stage{decode: 1, dp: 1}, 100, 30, 3, plainOptions)
	for _, c := range []struct {
		after time.Duration
		word  string
	}{{time.Second, "LIVE 1.0s"}, {5 * time.Second, "LAG 5.0s"}, {20 * time.Second, "STALE 20s"}} {
		b.Update(tickMsg(start.Add(2*time.Second + c.after)))
		mustContain(t, screen(b), c.word)
	}
	mustContain(t, screen(b), "no answer for 20 s")
}

// TestNewerRouter: of a router that speaks a newer schema all that is known is shown, and
// that some may be missing.
func TestNewerRouter(t *testing.T) {
	g := stage{prefill: 1, decode: 2, dp: 2}
	f := newRouter(t, g)
	f.replace(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/admin/v1/snapshot" {
			f.serve(w, q)
			return
		}
		s := g.snapshot(int(f.asked.Add(1)))
		s.Schema, s.Status.Schema = "dynctl.admin/v9", "dynctl.admin/v9"
		var m map[string]any
		if err := json.Unmarshal(encode(s), &m); err != nil {
			t.Error(err)
		}
		m["brand_new"] = map[string]any{"x": []int{1}}
		_ = json.NewEncoder(w).Encode(m)
	})
	v := collect(t, f.URL)
	found := false
	for _, x := range v.Routers[0].Attention {
		found = found || x.Code == feed.CodeSchema && strings.Contains(x.Text, "dynctl.admin/v9")
	}
	if v.Routers[0].Link != feed.Live || !found {
		t.Errorf("new router: %s %v", v.Routers[0].Link, v.Routers[0].Attention)
	}
}

// TestHostileTexts puts control characters and wide signs into every text that
// a router sends.
func TestHostileTexts(t *testing.T) {
	const evil = "\x1b[31m\x1b]52;c;AAAA\x07日本\u0301語\u202e\x00\r\n\t\x9b2J\xff\xfe👩‍👩‍👧end"
	g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
	for _, ascii := range []bool{false, true} {
		for tab := range 5 {
			a := newStage(t, g, 100, 30, 2, Options{ASCII: ascii, View: tab})
			s := g.snapshot(3)
			s.Status.Name, s.Status.Version, s.Status.State, s.Status.Policy = evil, evil, evil, evil
			s.Status.Reasons = []string{evil}
			for i := range s.Workers {
				w := &s.Workers[i]
				w.URL, w.Reason, w.Models = evil, evil, []string{evil}
				for j := range w.Ranks {
					w.Ranks[j].Label, w.Ranks[j].Feed.State, w.Ranks[j].Feed.Reason = fmt.Sprint(evil, i, j), evil, evil
				}
			}
			for i := range s.Events {
				s.Events[i].Seq += 100
				s.Events[i].Text, s.Events[i].Kind, s.Events[i].Rank = evil, evil, evil
			}
			r := g.receipt(5, start, false)
			r.RequestID, r.ReasonText, r.Decode.Chosen, r.Path = evil, evil, evil, evil
			s.Decisions = []json.RawMessage{encode(r)}
			a.Update(sampleMsg{0, feed.Sample{Snapshot: s, At: start.Add(3 * time.Second)}})
			if strings.ContainsAny(a.View(), "\x07\x00\r\u009b\t") || strings.Contains(a.View(), "\x1b]") {
				t.Errorf("view %d lets control characters through: %q", tab+1, a.View())
			}
			checkFrame(t, screen(a), 100, 30, ascii)
		}
	}
}

// TestRestartedRouter checks that counters that start over give no wild rates.
func TestRestartedRouter(t *testing.T) {
	g := stage{decode: 2, dp: 1}
	a := newStage(t, g, 100, 30, 5, plainOptions)
	s := g.snapshot(1)
	s.Status.Started, s.Status.Now = start.Add(4*time.Second), start.Add(5*time.Second)
	s.Status.Traffic = admin.Traffic{Requests: 3}
	a.Update(sampleMsg{0, feed.Sample{Snapshot: s, At: start.Add(5 * time.Second)}})
	if r := a.replicas[0].view.RequestRate; r.Known() {
		t.Errorf("%v requests/s after one answer of a new process", r)
	}
	s = g.snapshot(1)
	s.Status.Started, s.Status.Now = start.Add(4*time.Second), start.Add(6*time.Second)
	s.Status.Traffic = admin.Traffic{Requests: 13}
	a.Update(sampleMsg{0, feed.Sample{Snapshot: s, At: start.Add(6 * time.Second)}})
	if r := a.replicas[0].view.RequestRate; r != 10 {
		t.Errorf("%v requests/s, want 10", r)
	}
}

func TestFleet(t *testing.T) {
	up1, up2 := newRouter(t, stage{prefill: 1, decode: 2, dp: 1}), newRouter(t, stage{decode: 4, dp: 2, troubles: true})
	down := httptest.NewServer(http.NotFoundHandler())
	down.Close()
	a := newApp(t.Context(), Options{Clients: clients(t, up1.URL, up2.URL, down.URL)})
	a.w, a.h = 120, 40
	for range 2 {
		for i := range 3 {
			a.Update(a.poll(i)())
		}
	}
	got := screen(a)
	checkFrame(t, got, 120, 40, false)
	mustContain(t, got, "ROUTER (2 of 3 up)", "DOWN", "all together", "84.0", "1 of 3")
	if a.view.Fleet.Requests != 84 || a.view.Fleet.RoutersUp != 2 {
		t.Errorf("fleet %+v", a.view.Fleet)
	}
	press(a, "R")
	mustContain(t, screen(a), "2 of 3", "decode-3/dp1")
	press(a, "R")
	mustContain(t, screen(a), "3 of 3", "no router answers")
	press(a, ":")
	typed(a, "router 1")
	press(a, "enter")
	mustContain(t, screen(a), "1 of 3")
}

func TestNotATerminal(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, c := range []struct {
		in  io.Reader
		out io.Writer
	}{{strings.NewReader(""), io.Discard}, {f, f}} {
		if err := Run(t.Context(), Options{Clients: clients(t, "127.0.0.1:1")}, c.in, c.out); !errors.Is(err, ErrNoTerminal) {
			t.Errorf("err = %v", err)
		}
	}
}
