package widget

import (
	"math"
	"strings"

	"github.com/dynctl/dynctl/internal/tui/theme"
)

// Bar writes a bar of w columns, filled by a share between 0 and 1. NaN is
// drawn as dashes: not known is not empty.
func (p *Painter) Bar(st theme.Style, share float64, w int) {
	if math.IsNaN(share) {
		p.dim("-", w)
		return
	}
	share = min(max(share, 0), 1)
	exact := share * float64(w)
	full := int(exact)
	part := ""
	if full < w {
		part = p.Th.Part(exact - float64(full))
	}
	var b strings.Builder
	for range full {
		b.WriteString(p.Th.Full())
	}
	if part != "" {
		b.WriteString(part)
		full++
	}
	p.Put(st, b.String())
	p.dim(p.Th.Empty(), w-full)
}

// Spark writes the last w values as a sparkline from 0 to their maximum, the
// newest at the right. NaN leaves a gap.
func (p *Painter) Spark(st theme.Style, values []float64, w int) {
	if w <= 0 {
		return
	}
	if len(values) > w {
		values = values[len(values)-w:]
	}
	top := 0.0
	for _, v := range values {
		if v > top {
			top = v
		}
	}
	p.To(p.x + w - len(values))
	var b strings.Builder
	for _, v := range values {
		switch {
		case math.IsNaN(v) || top == 0:
			b.WriteByte(' ')
		default:
			b.WriteString(p.Th.Spark(v / top))
		}
	}
	p.Put(st, b.String())
}

// Graph appends h lines with the last values as columns between 0 and top, the
// newest at the right, and a scale of label columns at the left.
func (p *Painter) Graph(st theme.Style, values []float64, h int, top float64, scale func(float64) string, label int) {
	w := p.W - label - 1
	if w < 1 || h < 1 {
		return
	}
	if len(values) > w {
		values = values[len(values)-w:]
	}
	if top <= 0 || math.IsNaN(top) {
		top = 1
	}
	var b strings.Builder
	for row := range h {
		low := float64(h-row-1) / float64(h)
		text := ""
		if row == 0 || row == h-1 || row == h/2 && h >= 5 {
			text = scale(top * (low + 1/float64(h)))
			if row == h-1 {
				text = scale(0)
			}
		}
		p.Right(theme.Dim, text, label)
		p.Put(theme.Dim, p.Th.V)
		p.To(label + 1 + w - len(values))
		b.Reset()
		for _, v := range values {
			f := (v/top - low) * float64(h)
			switch {
			case math.IsNaN(v) || f <= 0 && row < h-1 || v <= 0:
				b.WriteByte(' ')
			case f >= 1:
				b.WriteString(p.Th.Full())
			default:
				b.WriteString(p.Th.Graph(max(f, 0.01)))
			}
		}
		p.Put(st, b.String())
		p.End()
	}
}
