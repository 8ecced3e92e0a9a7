package report

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/table"
)

// Colours: a blue and an orange that stay apart without colour vision, and are
// distinguished by dashes and words as well.
const (
	blue   = "#1f5fa8"
	orange = "#c4600c"
	grey   = "#6b7280"
	light  = "#e5e7eb"
)

// svg is a drawing under way.
type svg struct{ b strings.Builder }

func newSVG(w, h float64, title string) *svg {
	s := &svg{}
	fmt.Fprintf(&s.b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" role="img" aria-label="%s" font-family="system-ui,sans-serif" font-size="12">`, w, h, html.EscapeString(title))
	fmt.Fprintf(&s.b, `<title>%s</title>`, html.EscapeString(title))
	return s
}

func (s *svg) end() string { s.b.WriteString("</svg>"); return s.b.String() }

func (s *svg) line(x1, y1, x2, y2 float64, stroke string, width float64, dash string) {
	fmt.Fprintf(&s.b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="%g"`, x1, y1, x2, y2, stroke, width)
	if dash != "" {
		fmt.Fprintf(&s.b, ` stroke-dasharray="%s"`, dash)
	}
	s.b.WriteString("/>")
}

func (s *svg) text(x, y float64, anchor, fill, t string) {
	fmt.Fprintf(&s.b, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s">%s</text>`, x, y, anchor, fill, html.EscapeString(t))
}

func (s *svg) rect(x, y, w, h float64, fill, title string) {
	fmt.Fprintf(&s.b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s">`, x, y, max(w, 0), max(h, 0), fill)
	if title != "" {
		fmt.Fprintf(&s.b, `<title>%s</title>`, html.EscapeString(title))
	}
	s.b.WriteString("</rect>")
}

func (s *svg) poly(tag string, xs, ys []float64, attrs string) {
	fmt.Fprintf(&s.b, `<%s points="`, tag)
	for i := range xs {
		fmt.Fprintf(&s.b, "%.1f,%.1f ", xs[i], ys[i])
	}
	fmt.Fprintf(&s.b, `" %s/>`, attrs)
}

// scale maps values to pixels, by logarithm if log is set.
type scale struct {
	lo, hi, from, to float64
	log              bool
}

func (c scale) at(v float64) float64 {
	lo, hi := c.lo, c.hi
	if c.log {
		v, lo, hi = math.Log2(math.Max(v, 1e-9)), math.Log2(lo), math.Log2(hi)
	}
	if hi == lo {
		return (c.from + c.to) / 2
	}
	return c.from + (v-lo)/(hi-lo)*(c.to-c.from)
}

// ticks are round values over a range.
func ticks(lo, hi float64, n int) []float64 {
	if !(hi > lo) {
		return []float64{lo}
	}
	raw := (hi - lo) / float64(n)
	mag := math.Pow(10, math.Floor(math.Log10(raw)))
	step := mag * 10
	for _, k := range []float64{1, 2, 5} {
		if k*mag >= raw {
			step = k * mag
			break
		}
	}
	var out []float64
	for v := math.Ceil(lo/step) * step; v <= hi+step*1e-9; v += step {
		out = append(out, v)
	}
	return out
}

func powers(lo, hi float64) []float64 {
	var out []float64
	for v := math.Exp2(math.Ceil(math.Log2(lo) - 1e-9)); v <= hi*1.0001; v *= 2 {
		out = append(out, v)
	}
	return out
}

// decades are 1, 2 and 5 times powers of ten over the scale, or round values where these
// are too few to read a value by.
func (c scale) decades() []float64 {
	var out []float64
	for mag := math.Pow(10, math.Floor(math.Log10(c.lo))); mag <= c.hi; mag *= 10 {
		for _, k := range []float64{1, 2, 5} {
			if v := k * mag; v >= c.lo && v <= c.hi {
				out = append(out, v)
			}
		}
	}
	if len(out) < 3 {
		return ticks(c.lo, c.hi, 5)
	}
	return out
}

// curves draws two lines with bands over eff_isl.
func curves(g *experiment.GroupResult, title, unit string, band bool, of func(*experiment.ArmPoint) float64, limit float64) string {
	s := newSVG(760, 330, title)
	var lo, hi, top, bottom float64 = math.Inf(1), 0, 0, math.Inf(1)
	for i := range g.Points {
		p := &g.Points[i]
		lo, hi = math.Min(lo, float64(p.EffISL)), math.Max(hi, float64(p.EffISL))
		for _, a := range []*experiment.ArmPoint{&p.Local, &p.Remote} {
			v := of(a)
			if v > 0 {
				top, bottom = math.Max(top, v), math.Min(bottom, v)
			}
			if band && a.High > 0 {
				top, bottom = math.Max(top, a.High), math.Min(bottom, a.Low)
			}
		}
	}
	if top == 0 || len(g.Points) < 2 {
		s.text(380, 160, "middle", grey, "nothing to draw")
		return s.end()
	}
	if limit > 0 {
		top = math.Max(top, limit*1.05)
	}
	x := scale{lo, hi, 60, 730, true}
	y := scale{bottom / 1.1, top * 1.1, 285, 30, true}
	xs := powers(lo, hi)
	if len(xs) < 2 {
		xs = []float64{lo, hi}
	}
	for _, v := range xs {
		s.line(x.at(v), 30, x.at(v), 285, light, 1, "")
		s.text(x.at(v), 303, "middle", grey, fmt.Sprintf("%.0f", v))
	}
	for _, v := range y.decades() {
		s.line(60, y.at(v), 730, y.at(v), light, 1, "")
		s.text(54, y.at(v)+4, "end", grey, table.Figure(v))
	}
	s.text(395, 322, "middle", grey, "effective input tokens (uncached)")
	s.text(14, 20, "start", grey, unit)
	if c := g.Crossing("ttft"); band && c != nil && c.At.Value != nil && c.At.Low != nil && c.At.High != nil {
		a, b := math.Max(*c.At.Low, lo), math.Min(*c.At.High, hi)
		s.rect(x.at(a), 30, x.at(b)-x.at(a), 255, "#9ca3af44", fmt.Sprintf("crossing %.0f, interval %.0f to %.0f", *c.At.Value, *c.At.Low, *c.At.High))
		s.line(x.at(*c.At.Value), 30, x.at(*c.At.Value), 285, grey, 1.5, "4 3")
		s.text(64, 42, "start", grey, fmt.Sprintf("crossing %.0f tokens [%.0f, %.0f]", *c.At.Value, *c.At.Low, *c.At.High))
	}
	for k, arm := range []struct {
		name, colour, dash string
		pick               func(*experiment.PointResult) *experiment.ArmPoint
	}{
		{"local", blue, "", func(p *experiment.PointResult) *experiment.ArmPoint { return &p.Local }},
		{"remote", orange, "6 3", func(p *experiment.PointResult) *experiment.ArmPoint { return &p.Remote }},
	} {
		var xs, ys, bx, by []float64
		for i := range g.Points {
			p := &g.Points[i]
			a := arm.pick(p)
			if v := of(a); v > 0 {
				xs, ys = append(xs, x.at(float64(p.EffISL))), append(ys, y.at(v))
				bx, by = append(bx, x.at(float64(p.EffISL))), append(by, y.at(math.Max(a.High, v)))
			}
		}
		if band {
			for i := len(g.Points) - 1; i >= 0; i-- {
				a := arm.pick(&g.Points[i])
				if v := of(a); v > 0 {
					bx, by = append(bx, x.at(float64(g.Points[i].EffISL))), append(by, y.at(math.Min(a.Low, v)))
				}
			}
			s.poly("polygon", bx, by, fmt.Sprintf(`fill="%s" fill-opacity="0.18"`, arm.colour))
		}
		s.poly("polyline", xs, ys, fmt.Sprintf(`fill="none" stroke="%s" stroke-width="2" stroke-dasharray="%s"`, arm.colour, arm.dash))
		for i := range xs {
			fmt.Fprintf(&s.b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, xs[i], ys[i], arm.colour)
		}
		// Above the plot, where no curve runs through it.
		s.line(540+100*float64(k), 16, 570+100*float64(k), 16, arm.colour, 2, arm.dash)
		s.text(576+100*float64(k), 20, "start", arm.colour, arm.name)
	}
	if limit > 0 {
		s.line(60, y.at(limit), 730, y.at(limit), "#b91c1c", 1.5, "2 3")
		s.text(64, y.at(limit)-4, "start", "#b91c1c", "target "+table.Figure(limit)+" ms")
	}
	return s.end()
}

// forestSVG draws each point's difference with its interval.
func forestSVG(g *experiment.GroupResult) string {
	rows := len(g.Points)
	h := 60 + 22*float64(rows)
	s := newSVG(760, h, "Difference in time to first token, remote against local, "+g.Group.String())
	most := 0.05
	for i := range g.Points {
		if d := g.Points[i].Diff; d.Low != nil && d.High != nil {
			most = math.Max(most, math.Max(math.Abs(*d.Low), math.Abs(*d.High)))
		}
	}
	most = math.Min(most, 1.5)
	x := scale{-most, most, 120, 640, false}
	for _, v := range ticks(-most, most, 6) {
		s.line(x.at(v), 22, x.at(v), h-30, light, 1, "")
		s.text(x.at(v), h-14, "middle", grey, fmt.Sprintf("%+.0f%%", v*100))
	}
	s.line(x.at(0), 16, x.at(0), h-30, grey, 1.5, "")
	s.text(x.at(-most), 14, "start", orange, "remote is faster")
	s.text(x.at(most), 14, "end", blue, "local is faster")
	for i := range g.Points {
		p := &g.Points[i]
		y := 36 + 22*float64(i)
		s.text(108, y+4, "end", grey, fmt.Sprint(p.EffISL))
		if p.Diff.Value == nil {
			continue
		}
		clamp := func(v *float64, d float64) float64 {
			if v == nil {
				return d
			}
			return math.Max(-most, math.Min(most, *v))
		}
		colour := map[string]string{"local": blue, "remote": orange, "tie": grey}[p.Verdict]
		s.line(x.at(clamp(p.Diff.Low, -most)), y, x.at(clamp(p.Diff.High, most)), y, colour, 3, "")
		fmt.Fprintf(&s.b, `<circle cx="%.1f" cy="%.1f" r="4.5" fill="%s"/>`, x.at(clamp(p.Diff.Value, 0)), y, colour)
		s.text(652, y+4, "start", colour, fmt.Sprintf("%+.0f%% %s", *p.Diff.Value*100, p.Verdict))
	}
	return s.end()
}

// stagesSVG stacks the stages of the remote arm beside the local one.
func stagesSVG(g *experiment.GroupResult) string {
	names := []string{"router", "prefill queue", "prefill", "transfer", "first decode"}
	fills := []string{"#111827", "#9ca3af", "#4b83c3", "#c4600c", "#e7b45a"}
	h := 70 + 34*float64(len(g.Points))
	s := newSVG(760, h, "Where the time to the first token goes, "+g.Group.String())
	most := 0.0
	parts := func(a *experiment.ArmPoint) []float64 {
		var out []float64
		for _, p := range []*float64{a.Stages.Router, a.Stages.PrefillQueue, a.Stages.Prefill, a.Stages.Transfer, a.Stages.FirstDecode} {
			v := 0.0
			if p != nil {
				v = math.Max(*p, 0)
			}
			out = append(out, v)
		}
		return out
	}
	for i := range g.Points {
		for _, a := range []*experiment.ArmPoint{&g.Points[i].Local, &g.Points[i].Remote} {
			sum := 0.0
			for _, v := range parts(a) {
				sum += v
			}
			most = math.Max(most, sum)
		}
	}
	if most == 0 {
		s.text(380, 40, "middle", grey, "no receipts")
		return s.end()
	}
	x := scale{0, most, 150, 735, false}
	for i, n := range names {
		s.rect(150+float64(i)*115, 8, 11, 11, fills[i], "")
		s.text(165+float64(i)*115, 18, "start", grey, n)
	}
	for i := range g.Points {
		for k, a := range []*experiment.ArmPoint{&g.Points[i].Local, &g.Points[i].Remote} {
			y := 34 + 34*float64(i) + 14*float64(k)
			label := "local"
			if k == 1 {
				label = "remote"
			}
			if k == 0 {
				s.text(70, y+16, "end", grey, fmt.Sprint(g.Points[i].EffISL))
			}
			s.text(142, y+10, "end", grey, label)
			sum := 0.0
			for j, v := range parts(a) {
				s.rect(x.at(sum), y, x.at(sum+v)-x.at(sum), 12, fills[j], fmt.Sprintf("%s %s ms", names[j], table.Figure(v)))
				sum += v
			}
		}
	}
	for _, v := range ticks(0, most, 6) {
		s.text(x.at(v), h-10, "middle", grey, table.Figure(v))
	}
	s.text(120, h-10, "end", grey, "ms")
	return s.end()
}

// heatSVG shows the log ratio by length and load, with the crossings.
func heatSVG(r *experiment.Result, cached float64) string {
	gs := loads(r, cached)
	var xs []int
	for _, g := range gs {
		for i := range g.Points {
			xs = append(xs, g.Points[i].EffISL)
		}
	}
	if len(xs) == 0 {
		return ""
	}
	slices.Sort(xs)
	xs = slices.Compact(xs)
	h := 60 + 36*float64(len(gs))
	s := newSVG(760, h, "Who wins by length and load")
	w := 600 / float64(len(xs))
	for i, g := range gs {
		y := 16 + 36*float64(i)
		s.text(122, y+22, "end", grey, g.Group.Load.String())
		for j := range g.Points {
			p := &g.Points[j]
			if p.LogRatio.Value == nil {
				continue
			}
			k := slices.Index(xs, p.EffISL)
			v := *p.LogRatio.Value
			s.rect(130+w*float64(k), y, w-2, 34, heat(v), fmt.Sprintf("eff_isl %d, %s: remote %+.0f%%", p.EffISL, g.Group, math.Expm1(-v)*100))
			if w > 34 {
				s.text(130+w*(float64(k)+0.5)-1, y+22, "middle", "#111827", fmt.Sprintf("%+.0f", math.Expm1(-v)*100))
			}
		}
		if c := g.Crossing("ttft"); c != nil && c.At.Value != nil {
			// Between the columns, by the logarithm.
			at := *c.At.Value
			k := 0
			for k < len(xs)-1 && float64(xs[k+1]) < at {
				k++
			}
			f := 0.5
			if k+1 < len(xs) {
				f = 0.5 + math.Log(at/float64(xs[k]))/math.Log(float64(xs[k+1])/float64(xs[k]))
			}
			x := 130 + w*(float64(k)+f)
			s.line(x, y-3, x, y+37, "#111827", 3, "")
		}
	}
	for k, v := range xs {
		if w > 34 || k%2 == 0 {
			s.text(130+w*(float64(k)+0.5), h-28, "middle", grey, fmt.Sprint(v))
		}
	}
	s.text(430, h-8, "middle", grey, "effective input tokens; difference of remote in %, blue: local wins, orange: remote wins, bar: crossing")
	return s.end()
}

// heat is a colour from blue (local wins) over white to orange (remote wins).
func heat(v float64) string {
	t := math.Max(-1, math.Min(1, v/0.5))
	mix := func(a, b float64, t float64) int { return int(a + (b-a)*t) }
	if t < 0 {
		return fmt.Sprintf("#%02x%02x%02x", mix(250, 120, -t), mix(250, 165, -t), mix(250, 215, -t))
	}
	return fmt.Sprintf("#%02x%02x%02x", mix(250, 236, t), mix(250, 158, t), mix(250, 84, t))
}
