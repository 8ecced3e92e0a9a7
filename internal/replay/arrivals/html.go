package arrivals

import (
	"encoding/json"
	"fmt"
	"html"
	"io"
	"slices"
	"strings"
	"time"
)

// WriteHTML writes a report of a trace's requests as one HTML page with inline
// SVG; it loads nothing from anywhere. The figures are in it as JSON, too.
func WriteHTML(w io.Writer, name string, s *Stat) error {
	raw, err := json.Marshal(s) // "<" comes out escaped, so it cannot end the script
	if err != nil {
		return err
	}
	var b strings.Builder
	title := html.EscapeString(name)
	fmt.Fprintf(&b, `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>%s: prefixes and load</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #ddd}
td.n,th.n{text-align:right}svg{max-width:100%%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#444}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}td,th{border-color:#333}svg text{fill:#aaa}}
</style></head><body>
<h1>%s</h1>
<p>%d requests in %s (%.2f a second). An infinite cache would save <b>%.2f%%</b> of the prompt tokens and %.2f%% of the blocks.</p>
`, title, title, s.Requests, s.Span.Round(time.Second), s.RPS, 100*s.TokenReuse, 100*s.ReuseRatio)
	b.WriteString("<table><tr><th></th><th class=n>mean</th><th class=n>p50</th><th class=n>p90</th><th class=n>p99</th><th class=n>max</th></tr>\n")
	for _, l := range []struct {
		name string
		l    Lengths
	}{{"input tokens", s.ISL}, {"output tokens", s.OSL}} {
		fmt.Fprintf(&b, "<tr><td>%s</td><td class=n>%.0f</td><td class=n>%d</td><td class=n>%d</td><td class=n>%d</td><td class=n>%d</td></tr>\n", l.name, l.l.Mean, l.l.P50, l.l.P90, l.l.P99, l.l.Max)
	}
	b.WriteString("</table>\n<h2>Load</h2>\n")
	bucket := "requests per " + s.RateBucket.String()
	area(&b, bucket, s.Rate, "#2f6fb0")
	area(&b, "prompt tokens per "+s.RateBucket.String(), s.TokenRate, "#c0721a")
	b.WriteString("<h2>Lengths</h2>\n")
	bars(&b, "input tokens (requests by powers of two)", s.ISL.Buckets, "#2f6fb0", 1)
	bars(&b, "output tokens (requests by powers of two)", s.OSL.Buckets, "#c0721a", 1)
	if s.Blocks > 0 {
		fmt.Fprintf(&b, "<h2>Prefixes</h2>\n<p>%d blocks of %d tokens, %d distinct, %d of them in more than one request; %d different first blocks. The most shared block, 10 and 100 blocks carry %.1f%%, %.1f%% and %.1f%% of all reuse. Half of the reuses come within %.1f s, 90%% within %.1f s.</p>\n",
			s.Blocks, s.BlockSize, s.Distinct, s.Shared, s.Roots, 100*s.Hot[0], 100*s.Hot[1], 100*s.Hot[2], s.ReuseGapP50, s.ReuseGapP90)
		bars(&b, "blocks that a request finds in an infinite cache (requests by powers of two)", s.Depths, "#2f6fb0", 1)
		icicle(&b, s)
		if len(s.Cache) > 0 {
			curve(&b, s)
		}
		b.WriteString("<table><tr><th>prefix</th><th class=n>blocks</th><th class=n>requests</th><th class=n>continuations</th></tr>\n")
		for _, p := range s.Top {
			fmt.Fprintf(&b, "<tr><td><code>%x</code></td><td class=n>%d</td><td class=n>%d</td><td class=n>%d</td></tr>\n", p.ID, p.Blocks, p.Requests, p.Children)
		}
		b.WriteString("</table>\n")
	}
	fmt.Fprintf(&b, "<script type=\"application/json\" id=\"data\">%s</script>\n</body></html>\n", raw)
	_, err = io.WriteString(w, b.String())
	return err
}

const width, height = 800.0, 160.0

func open(b *strings.Builder, label string) {
	fmt.Fprintf(b, `<svg viewBox="0 0 %g %g" role="img" aria-label="%s"><text x="0" y="12">%s</text>`, width, height+40, html.EscapeString(label), html.EscapeString(label))
}

func top(v []uint64) float64 {
	return float64(slices.Max(append([]uint64{1}, v...)))
}

// area draws a curve over time.
func area(b *strings.Builder, label string, v []uint64, color string) {
	open(b, label)
	m := top(v)
	step := width / float64(max(len(v), 1))
	fmt.Fprintf(b, `<path fill="%s" fill-opacity=".25" stroke="%s" d="M0 %g`, color, color, height+20)
	for i, n := range v {
		fmt.Fprintf(b, " L%.1f %.1f", (float64(i)+.5)*step, height+20-float64(n)/m*height)
	}
	fmt.Fprintf(b, ` L%g %g Z"/><text x="%g" y="32" text-anchor="end">max %.0f</text></svg>`+"\n", width, height+20, width, m)
}

// bars draws a histogram by powers of two from first.
func bars(b *strings.Builder, label string, v []uint64, color string, first int) {
	open(b, label)
	m := top(v)
	step := width / float64(max(len(v), 1))
	for i, n := range v {
		h := float64(n) / m * (height - 16)
		x := float64(i) * step
		low := "0"
		if i > 0 {
			low = short(first << (i - 1))
		}
		fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"><title>from %s: %d</title></rect><text x="%.1f" y="%g">%s</text>`,
			x+1, height+20-h, step-2, h, color, low, n, x+2, height+34, low)
	}
	b.WriteString("</svg>\n")
}

func short(n int) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%dM", n>>20)
	case n >= 1<<10:
		return fmt.Sprintf("%dk", n>>10)
	}
	return fmt.Sprint(n)
}

// icicle draws the most shared prefixes: as long as they are deep, as thick as
// they are used.
func icicle(b *strings.Builder, s *Stat) {
	if len(s.Top) == 0 {
		return
	}
	open(b, "most shared prefixes: length in blocks, thickness by requests")
	deepest, used := 1, uint64(1)
	for _, p := range s.Top {
		deepest, used = max(deepest, p.Blocks), max(used, p.Requests)
	}
	room := (height + 10) / float64(len(s.Top))
	for i, p := range s.Top {
		thick := max(1, (room-1)*float64(p.Requests)/float64(used))
		fmt.Fprintf(b, `<rect x="0" y="%.1f" width="%.1f" height="%.1f" fill="#2f6fb0" fill-opacity=".7"><title>%d blocks, %d requests</title></rect>`,
			20+float64(i)*room, width*float64(p.Blocks)/float64(deepest), thick, p.Blocks, p.Requests)
	}
	fmt.Fprintf(b, `<text x="%g" y="%g" text-anchor="end">%d blocks</text></svg>`+"\n", width, height+36, deepest)
}

// curve draws the hit rate over the size of one shared cache.
func curve(b *strings.Builder, s *Stat) {
	open(b, fmt.Sprintf("hit rate of one shared cache over its size in blocks of %d tokens", s.BlockSize))
	most := 0.01
	for _, c := range s.Cache {
		most = max(most, c.HitRatio)
	}
	n := float64(max(len(s.Cache)-1, 1))
	b.WriteString(`<polyline fill="none" stroke="#2f6fb0" stroke-width="2" points="`)
	at := func(i int, c CacheReuse) (x, y float64) {
		return 20 + float64(i)/n*(width-80), height + 20 - c.HitRatio/most*(height-30)
	}
	for i, c := range s.Cache {
		x, y := at(i, c)
		fmt.Fprintf(b, "%.1f,%.1f ", x, y)
	}
	b.WriteString(`"/>`)
	for i, c := range s.Cache {
		x, y := at(i, c)
		fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="#2f6fb0"/><text x="%.1f" y="%.1f">%.1f%%</text><text x="%.1f" y="%g">%s</text>`, x, y, x+4, y-6, 100*c.HitRatio, x-8, height+34, short(c.Blocks))
	}
	b.WriteString("</svg>\n")
}
