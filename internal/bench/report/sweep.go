package report

import (
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"

	"github.com/dynctl/dynctl/internal/bench/sweep"
)

var sweepPage = template.Must(template.New("sweep").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{{.Title}}</title>
<style>
` + style + `</style></head><body>
<p class="dim">dynctl bench: a fleet by load · {{.R.Name}} · {{.When}}</p>
<h1>{{if not .R.Valid}}<span class="bad">Not valid.</span> {{end}}{{.R.Workload}}</h1>
{{if .R.Partial}}<p class="bad">This sweep is partial: {{.R.Partial}}.</p>{{end}}
{{with .R.Stopped}}<p><b>Stopped:</b> {{.}}.</p>{{end}}
{{with .Best}}<p><b>Best:</b> {{.}}.</p>{{end}}
{{if .R.Client.Name}}<h2>Load generator</h2><p>{{.R.Client.Text}}.</p>{{with .R.Client.Next}}<p>What to do: {{.}}.</p>{{end}}{{end}}
{{range .Figures}}<h2>{{.Title}}</h2>{{.SVG}}{{end}}
<h2>Figures</h2>
<div class="scroll"><table><tr>{{range .Head}}<th>{{.}}</th>{{end}}</tr>
{{range .Rows}}<tr>{{range .}}<td>{{.}}</td>{{end}}</tr>{{end}}</table></div>
<p class="dim">Means of the repeats with half the width of their interval; times in ms; a tail is p99, or the largest of a small cell.</p>
<p class="dim">{{.Facts}}</p>
</body></html>
`))

// SweepHTML writes a sweep as one file with everything in it: no script runs, nothing is
// loaded from elsewhere.
func SweepHTML(w io.Writer, r *sweep.Result) error {
	v := struct {
		Title, When, Best, Facts string
		R                        *sweep.Result
		Head                     []string
		Rows                     [][]string
		Figures                  []figure
	}{Title: "dynctl bench " + r.Name, When: r.Created.UTC().Format("2006-01-02 15:04 UTC"), Best: r.Best(), R: r}
	v.Head, v.Rows = r.Table()
	for _, f := range []struct {
		title, unit string
		of          []line
	}{
		{"Time to first token by load", "ttft, ms", []line{
			{"p50", blue, "", func(r *sweep.Row) float64 { return r.TTFTP50.Value }},
			{"tail", orange, "6 3", func(r *sweep.Row) float64 { return r.TTFTP99.Value }},
		}},
		{"Output tokens by load", "tokens a second", []line{{"tokens", blue, "", func(r *sweep.Row) float64 { return r.Tokens.Value }}}},
	} {
		v.Figures = append(v.Figures, figure{f.title, template.HTML(byLoad(r.Rows, f.title, f.unit, f.of))}) //nolint:gosec // drawn here, every text in it is escaped
	}
	facts := append([]string{}, r.Simulated...)
	if t := r.Target; t != nil {
		facts = append(facts, fmt.Sprintf("model %s, block %d, engines: %s", t.Model, t.Block, strings.Join(t.Engines, ", ")))
	}
	v.Facts = strings.Join(append(facts, "dynctl "+r.Version), " · ")
	return sweepPage.Execute(w, v)
}

// line is one line of a drawing of rows.
type line struct {
	name, colour, dash string
	of                 func(*sweep.Row) float64
}

// byLoad draws lines over the rows, which stand at equal distances.
func byLoad(rows []sweep.Row, title, unit string, lines []line) string {
	s := newSVG(760, 330, title)
	top := 0.0
	for i := range rows {
		for _, l := range lines {
			top = math.Max(top, l.of(&rows[i]))
		}
	}
	if top == 0 {
		s.text(380, 160, "middle", grey, "nothing to draw")
		return s.end()
	}
	x := scale{0, float64(len(rows) - 1), 90, 700, false}
	y := scale{0, top * 1.1, 285, 30, false}
	for _, v := range ticks(0, top*1.1, 5) {
		s.line(60, y.at(v), 730, y.at(v), light, 1, "")
		s.text(54, y.at(v)+4, "end", grey, fmt.Sprintf("%g", v))
	}
	every := 1 + len(rows)/8 // labels that do not overlap
	for i := 0; i < len(rows); i += every {
		s.text(x.at(float64(i)), 303, "middle", grey, rows[i].Name())
	}
	s.text(14, 20, "start", grey, unit)
	for k, l := range lines {
		var xs, ys []float64
		for i := range rows {
			xs, ys = append(xs, x.at(float64(i))), append(ys, y.at(l.of(&rows[i])))
			fmt.Fprintf(&s.b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, xs[i], ys[i], l.colour)
		}
		s.poly("polyline", xs, ys, fmt.Sprintf(`fill="none" stroke="%s" stroke-width="2" stroke-dasharray="%s"`, l.colour, l.dash))
		s.line(540+100*float64(k), 16, 570+100*float64(k), 16, l.colour, 2, l.dash)
		s.text(576+100*float64(k), 20, "start", l.colour, l.name)
	}
	return s.end()
}
