package report

import (
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"strings"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/table"
)

// style is that of all reports. Pictures take the width of the page.
const style = `:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;color:#111827;background:#fff;max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.35rem;line-height:1.35;margin:.2rem 0 1rem}h2{font-size:1.05rem;margin:2rem 0 .4rem}
table{border-collapse:collapse;font-size:13px;width:100%}th,td{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #e5e7eb;white-space:nowrap}
th:first-child,td:first-child{text-align:left}td.t{text-align:left;white-space:normal}
.bad{color:#b91c1c;font-weight:600}.ok{color:#15803d;font-weight:600}.dim{color:#6b7280}
pre{background:#f3f4f6;padding:.6rem .8rem;overflow-x:auto;font-size:13px}
.scroll{overflow-x:auto}svg{width:100%;height:auto;max-width:900px}
details summary{cursor:pointer}
`

var page = template.Must(template.New("report").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{{.Title}}</title>
<style>
` + style + `</style></head><body>
<p class="dim">dynctl bench: per-request routing on a fixed pool, local against remote prefill · {{.R.Name}} · {{.When}}</p>
<h1>{{if not .R.Valid}}<span class="bad">No recommendation.</span> {{end}}{{.R.Sentence}}</h1>
{{if .R.Partial}}<p class="bad">This run is partial: {{.R.Partial}}.</p>{{end}}
{{with .R.Recommend}}<h2>Recommended threshold: eff_isl {{.EffISL}}</h2><p>{{.Because}}; at {{.Group}}, objective {{.Objective}}.</p>
{{range .Configs}}<p><b>{{.System}}</b>{{with .Note}} <span class="dim">({{.}})</span>{{end}}</p><pre>{{.Text}}</pre>{{end}}{{end}}
{{range .R.Cautions}}<p><b>Caution:</b> {{.}}</p>{{end}}
<h2>Gates</h2>
<table><tr><th>gate</th><th style="text-align:left">state</th><th style="text-align:left">what was found</th></tr>
{{range .Gates}}<tr><td>{{.Name}}</td><td class="t {{.Class}}">{{.State}}</td><td class="t">{{.Text}}{{with .Cells}}<br><span class="dim">{{.}}</span>{{end}}{{with .Next}}<br>What to do: {{.}}{{end}}</td></tr>{{end}}</table>
<p class="dim">{{.Facts}}</p>
{{range .Groups}}
<h2>{{.Title}}</h2>
{{range .Crossings}}<p><b>{{.Objective}}:</b> {{.Sentence}}</p>{{end}}
{{range .Figures}}<h3 class="dim" style="font-size:.95rem;margin:.8rem 0 0">{{.Title}}</h3>{{.SVG}}{{end}}
<div class="scroll"><table><tr><th>eff_isl</th><th>repeats</th><th>local ttft p50</th><th>tail</th><th>remote ttft p50</th><th>tail</th><th>difference</th><th>itl tail L / R</th><th>tok/s L / R</th>{{if $.SLO}}<th>good % L / R</th>{{end}}<th>verdict</th></tr>
{{range .Rows}}<tr>{{range .}}<td>{{.}}</td>{{end}}</tr>{{end}}</table></div>
{{end}}
{{range .Heat}}<h2>{{.Title}}</h2>{{.SVG}}{{end}}
<h2>Method</h2>
<p>{{.Method}}</p>
<details><summary>Plan</summary><pre>{{.Plan}}</pre></details>
<script type="application/json" id="result">{{.Data}}</script>
</body></html>
`))

type figure struct {
	Title string
	SVG   template.HTML
}

// HTML writes one file with everything in it: no script runs, nothing is
// loaded from elsewhere.
func HTML(w io.Writer, r *experiment.Result) error {
	type gateRow struct{ Name, State, Class, Text, Cells, Next string }
	type groupPart struct {
		Title     string
		Crossings []experiment.Crossing
		Figures   []figure
		Rows      [][]string
	}
	plan, err := json.MarshalIndent(r.Spec, "", "  ")
	if err != nil {
		return err
	}
	v := struct {
		Title, When, Facts, Method, Plan string
		R                                *experiment.Result
		Gates                            []gateRow
		Groups                           []groupPart
		Heat                             []figure
		SLO                              bool
		// html/template writes a value in a script of type application/json as
		// JSON, escaped for where it stands.
		Data any
	}{
		Title: "dynctl bench " + r.Name, When: r.Created.UTC().Format("2006-01-02 15:04 UTC"), R: r, SLO: r.Spec.SLO.Any(), Plan: string(plan), Data: r,
	}
	var facts []string
	if t := r.Target; t != nil {
		facts = append(facts, fmt.Sprintf("model %s, block %d, %d prefill and %d decode workers (%d ranks), engines: %s", t.Model, t.Block, t.Prefill, t.Decode+t.Aggregated, t.DecodeRanks, strings.Join(t.Engines, ", ")))
	}
	facts = append(facts, r.Simulated...)
	if r.Hardware != "" {
		facts = append(facts, r.Hardware)
	}
	facts = append(facts, fmt.Sprintf("%d cells in %.0f s, %d redone, warm-up of %d cells", len(r.Cells), r.Seconds, r.Voided, r.Warmup.Cells), "dynctl "+r.Version)
	v.Facts = strings.Join(facts, " · ")
	v.Method = fmt.Sprintf("Every point was measured with both paths forced, back to back and in ABBA order, %d times or more; prompts were never repeated. The difference is the mean of the log ratios of paired cells with a Student interval; the crossing is the zero of their isotonic regression over the logarithm of the length, its interval (%.0f%%) a bootstrap over repeats and points. TTFT counts from the send in a closed loop and from the planned time in an open one.", r.Spec.Repeats, r.Spec.Level*100)
	for _, g := range r.Gates {
		row := gateRow{Name: g.Name, State: "not known", Class: "dim", Text: g.Text, Next: g.Next}
		if g.Passed != nil {
			row.State, row.Class = "passed", "ok"
			if !*g.Passed {
				row.State, row.Class, row.Cells = "FAILED", "bad", strings.Join(g.Cells, " ")
			}
		}
		v.Gates = append(v.Gates, row)
	}
	for i := range r.Groups {
		g := &r.Groups[i]
		title := g.Group.String()
		part := groupPart{Title: strings.ToUpper(title[:1]) + title[1:], Crossings: g.Crossings}
		add := func(title, svg string) {
			part.Figures = append(part.Figures, figure{title, template.HTML(svg)}) //nolint:gosec // drawn here, every text in it is escaped
		}
		add("Difference in ttft p50, remote against local", forestSVG(g))
		add("ttft p50 with the interval of its mean, and the crossing", curves(g, "Time to first token by effective input length", "ttft p50, ms (log)", true, func(a *experiment.ArmPoint) float64 { return a.TTFTP50 }, float64(r.Spec.SLO.TTFT)/1e6))
		add("itl tail (p99, or the largest of a small cell)", curves(g, "Gap between tokens by effective input length", "itl tail, ms (log)", false, func(a *experiment.ArmPoint) float64 { return a.ITLP99 }, float64(r.Spec.SLO.ITL)/1e6))
		add("Where the time to the first token goes", stagesSVG(g))
		for j := range g.Points {
			p := &g.Points[j]
			diff := "-"
			if p.Diff.Value != nil {
				diff = fmt.Sprintf("%+.1f%% [%s, %s]", *p.Diff.Value*100, percent(p.Diff.Low), percent(p.Diff.High))
			}
			row := []string{
				fmt.Sprint(p.EffISL), fmt.Sprint(p.Repeats), table.Figure(p.Local.TTFTP50), table.Figure(p.Local.TTFTP99), table.Figure(p.Remote.TTFTP50), table.Figure(p.Remote.TTFTP99), diff,
				table.Figure(p.Local.ITLP99) + " / " + table.Figure(p.Remote.ITLP99), fmt.Sprintf("%.0f / %.0f", p.Local.Tokens, p.Remote.Tokens),
			}
			if v.SLO {
				row = append(row, fmt.Sprintf("%.0f / %.0f", p.Local.GoodPct, p.Remote.GoodPct))
			}
			part.Rows = append(part.Rows, append(row, p.Verdict))
		}
		v.Groups = append(v.Groups, part)
	}
	for _, k := range r.Spec.Cached {
		if svg := heatSVG(r, k); svg != "" && len(loads(r, k)) > 1 {
			title := "By length and load"
			if k > 0 {
				title += fmt.Sprintf(", %g%% cached", k*100)
			}
			v.Heat = append(v.Heat, figure{title, template.HTML(svg)}) //nolint:gosec // drawn here, every text in it is escaped
		}
	}
	return page.Execute(w, v)
}

// plot writes the forest plot of the headline as a drawing of its own.
func plot(w io.Writer, r *experiment.Result) error {
	g := r.Headline()
	if g == nil {
		s := newSVG(400, 60, "nothing was measured")
		s.text(200, 34, "middle", grey, "nothing was measured")
		_, err := io.WriteString(w, s.end())
		return err
	}
	_, err := io.WriteString(w, forestSVG(g))
	return err
}
