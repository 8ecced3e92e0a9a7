package sse

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// wholeEvents is what a client has of a stream by the rules of the HTML
// standard (9.2.6): the data of the events that an empty line has ended, and
// whether the end of text, after which an empty line would add an event, lies
// within one.
func wholeEvents(text string) (events []string, within bool) {
	text = strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\r", "\n")
	lines := strings.Split(text, "\n")
	last := lines[len(lines)-1]
	data, some := "", false
	for _, l := range lines[:len(lines)-1] {
		switch {
		case l == "":
			if some {
				events = append(events, strings.TrimSuffix(data, "\n"))
			}
			data, some = "", false
		case strings.HasPrefix(l, "data:"):
			data, some = data+strings.TrimPrefix(l[5:], " ")+"\n", true
		}
	}
	return events, some || last != ""
}

// checkGate feeds text in pieces of the sizes given and looks at what a client
// has whenever the stream could break off.
func checkGate(t rapid.TB, text string, sizes []int) {
	all, _ := wholeEvents(text)
	var g Gate
	out := ""
	for i, rest := 0, text; rest != ""; i++ {
		n := len(rest)
		n = min(n, sizes[i%len(sizes)])
		held, ready := g.Pass([]byte(rest[:n]))
		out, rest = out+string(held)+string(ready), rest[n:]
		fed := text[:len(text)-len(rest)]
		if !strings.HasPrefix(fed, out) {
			t.Fatalf("%q in, %q out", fed, out)
		}
		have, within := wholeEvents(out)
		if within != g.Open() {
			t.Fatalf("%.200q: within an event %v, Open %v", out, within, g.Open())
		}
		if had, _ := wholeEvents(strings.TrimSuffix(fed, "\r")); len(have) != len(had) {
			t.Fatalf("of %.200q only %.200q goes on", fed, out)
		}
		if len(have) > len(all) {
			t.Fatalf("%q makes events of its own", out)
		}
	}
	if out += string(g.Rest()); out != text {
		t.Fatalf("%.200q became %.200q", text, out)
	}
}

// TestGateLetsWholeEventsThrough: wherever a stream breaks off, a client has
// all events that had come in whole and the beginning of none, and nothing is
// changed.
func TestGateLetsWholeEventsThrough(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		end := rapid.SampledFrom([]string{"\n", "\r\n"}).Draw(t, "end of line")
		parts := rapid.SliceOfN(rapid.SampledFrom([]string{
			"data: {\"a\":1}~~", "data:x~data: y~~", "event: error~data: z~~", ": ping~~", ": ping~", ":~", "~", "id: 7~~", "data~~",
			"data: " + strings.Repeat("l", maxHeld) + "~~", "data: " + strings.Repeat("m", maxHeld/2) + "~data: " + strings.Repeat("n", maxHeld) + "~~",
		}), 1, 12).Draw(t, "parts")
		text := strings.ReplaceAll(strings.Join(parts, ""), "~", end)
		sizes := []int{1, 2, 3, 5, 9, 40}
		if len(text) > maxHeld/2 {
			sizes = []int{5000, maxHeld, 2 * maxHeld}
		}
		checkGate(t, text, rapid.SliceOfN(rapid.SampledFrom(sizes), 1, 8).Draw(t, "sizes"))
	})
}

func FuzzGate(f *testing.F) {
	f.Add("data: a\n\ndata: b\r\n\r\n: c\n", []byte{1, 2, 9})
	f.Fuzz(func(t *testing.T, text string, sizes []byte) {
		var g Gate
		out := ""
		for i, rest := 0, text; rest != ""; i++ {
			n := len(rest)
			if len(sizes) > 0 {
				n = min(n, 1+int(sizes[i%len(sizes)]))
			}
			held, ready := g.Pass([]byte(rest[:n]))
			out, rest = out+string(held)+string(ready), rest[n:]
			if !strings.HasPrefix(text, out) || len(g.held) > 2*maxHeld {
				t.Fatalf("%q became %q, %d held", text, out, len(g.held))
			}
		}
		if out += string(g.Rest()); out != text {
			t.Fatalf("%q became %q", text, out)
		}
	})
}
