package tui

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestDrainAsksFirst: a worker is drained by a command and a yes, and by nothing
// else.
func TestDrainAsksFirst(t *testing.T) {
	g := stage{prefill: 1, decode: 2, dp: 1}
	f := newRouter(t, g)
	var asked []string
	f.replace(func(w http.ResponseWriter, q *http.Request) {
		if q.Method == http.MethodPost {
			asked = append(asked, q.URL.Path)
			if strings.Contains(q.URL.Path, "decode-1") {
				http.Error(w, `{"error":{"message":"not now"}}`, http.StatusConflict)
				return
			}
			_ = json.NewEncoder(w).Encode(admin.Worker{Name: "decode-0", Draining: true})
			return
		}
		f.serve(w, q)
	})
	a := newStage(t, g, 120, 40, 5, Options{Clients: clients(t, f.URL)})
	command := func(text string) {
		press(a, ":")
		typed(a, text)
		press(a, "enter")
	}
	answer := func(key string) {
		for _, cmd := range press(a, key) {
			if cmd != nil {
				a.Update(cmd())
			}
		}
	}
	command("drain decode-0")
	mustContain(t, screen(a), "drain decode-0? y does it")
	answer("n")
	mustContain(t, screen(a), "nothing was changed")
	if answer("y"); len(asked) != 0 {
		t.Fatalf("without a yes to the question: %q", asked)
	}
	command("drain decode-0")
	answer("y")
	mustContain(t, screen(a), "decode-0 gets no new requests")
	if len(asked) != 1 || !strings.HasSuffix(asked[0], "/workers/decode-0/drain") {
		t.Errorf("asked %q", asked)
	}
	command("resume decode-1")
	answer("y")
	mustContain(t, screen(a), "resume decode-1: ")
	if len(asked) != 2 || !strings.HasSuffix(asked[1], "/workers/decode-1/resume") {
		t.Errorf("asked %q", asked)
	}
	command("drain prefill-0")
	mustContain(t, screen(a), "prefill-0 is the last usable prefill worker")
	answer("n")
	command("drain nobody")
	mustContain(t, screen(a), `the router has no worker "nobody"`)
	press(a, "p")
	command("drain decode-0")
	mustContain(t, screen(a), "the data stands still")
}

// TestDescribe: d shows all of the worker under the cursor.
func TestDescribe(t *testing.T) {
	g := stage{prefill: 2, decode: 4, dp: 2, troubles: true}
	everySize(t, "describe", func(t *testing.T, w, h int, o Options, name string) {
		a := newStage(t, g, w, h, 20, o)
		press(a, "/")
		typed(a, "decode-1/dp1")
		press(a, "enter", "d")
		got := screen(a)
		checkFrame(t, got, w, h, o.ASCII)
		golden(t, name, got+"\n")
		mustContain(t, got, "describe decode-1", "decode-1/dp1 SLOW", "TTFT 210ms, ITL 131ms, 92 output tokens/s")
		if h < 30 {
			mustContain(t, got, "more lines (j scrolls)")
			press(a, "G")
		}
		mustContain(t, screen(a), "decode-1/dp0")
		if press(a, "esc"); strings.Contains(screen(a), "describe decode-1") {
			t.Error("esc does not close it")
		}
	})
	everySize(t, "drain", func(t *testing.T, w, h int, o Options, name string) {
		a := newStage(t, g, w, h, 20, o)
		press(a, ":")
		typed(a, "drain prefill-0")
		press(a, "enter")
		got := screen(a)
		checkFrame(t, got, w, h, o.ASCII)
		golden(t, name, got+"\n")
		mustContain(t, got, "prefill-0 is the last usable prefill worker")
	})
}
