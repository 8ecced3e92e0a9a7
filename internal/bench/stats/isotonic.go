package stats

// isoBlock is a run of points that isotonic regression gave one value.
type isoBlock struct {
	x, y, w float64 // weighted mean of x, value, weight
	first   int     // index of its first point
}

// fitter is isotonic regression with its memory kept between fits.
type fitter struct{ blocks []isoBlock }

// fit is the weighted least-squares non-decreasing fit of y over x (ascending),
// by pooling adjacent violators. The blocks are valid until the next call.
func (f *fitter) fit(x, y, w []float64) []isoBlock {
	b := f.blocks[:0]
	for i := range x {
		b = append(b, isoBlock{x[i], y[i], w[i], i})
		for len(b) > 1 && b[len(b)-2].y > b[len(b)-1].y {
			l, r := &b[len(b)-2], b[len(b)-1]
			s := l.w + r.w
			l.x, l.y, l.w = (l.x*l.w+r.x*r.w)/s, (l.y*l.w+r.y*r.w)/s, s
			b = b[:len(b)-1]
		}
	}
	f.blocks = b
	return b
}

// values are those of a fit's n points, one for each.
func values(blocks []isoBlock, n int) []float64 {
	out := make([]float64, n)
	for i, b := range blocks {
		end := n
		if i+1 < len(blocks) {
			end = blocks[i+1].first
		}
		for j := b.first; j < end; j++ {
			out[j] = b.y
		}
	}
	return out
}

// zero is where the fit crosses 0, linear between the centres of its blocks.
// side is -1 when all of it is below 0, +1 when all is above, else 0.
func zero(blocks []isoBlock) (x float64, side int) {
	if blocks[len(blocks)-1].y < 0 {
		return 0, -1
	}
	if blocks[0].y > 0 {
		return 0, 1
	}
	for i := range blocks {
		if blocks[i].y == 0 {
			return blocks[i].x, 0
		}
		if blocks[i].y > 0 {
			a, b := blocks[i-1], blocks[i]
			return a.x + (b.x-a.x)*(-a.y)/(b.y-a.y), 0
		}
	}
	return blocks[len(blocks)-1].x, 0
}
