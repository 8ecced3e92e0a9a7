package pace_test

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
)

// TestAnswers: the pace of an answer is that of its whole, without what came at once at its
// start, and each token is counted once.
func TestAnswers(t *testing.T) {
	type part struct {
		n, tokens int // so many times so many
		apart     time.Duration
	}
	for _, c := range []struct {
		name   string
		first  time.Duration // the time to the first token
		parts  []part
		pace   time.Duration // the median of what is measured; 0 for nothing
		rest   uint64        // tokens without a pace
		tokens int
	}{
		{"steady", 100 * time.Millisecond, []part{{1, 1, 0}, {99, 1, 10 * time.Millisecond}}, 10 * time.Millisecond, 0, 99},
		{"several in an event", 100 * time.Millisecond, []part{{1, 4, 0}, {25, 4, 40 * time.Millisecond}}, 10 * time.Millisecond, 3, 100},
		{"held back at the start, steady then", 5 * time.Second, []part{{1, 1, 0}, {400, 1, 10 * time.Microsecond}, {100, 1, 10 * time.Millisecond}}, 10 * time.Millisecond, 400, 100},
		{"all held back", 5 * time.Second, []part{{1, 300, 0}, {100, 1, 10 * time.Microsecond}}, 0, 399, 0},
		{"a fast engine", 5 * time.Millisecond, []part{{1, 1, 0}, {999, 1, time.Millisecond}}, time.Millisecond, 4, 995},
		{"a stall that is caught up with", 100 * time.Millisecond, []part{{1, 1, 0}, {100, 1, 10 * time.Millisecond}, {1, 1, 2 * time.Second}, {199, 1, 0}, {700, 1, 10 * time.Millisecond}}, 10 * time.Millisecond, 0, 1000},
		{"no second token", 100 * time.Millisecond, []part{{1, 1, 0}}, 0, 0, 0},
	} {
		var m pace.Meter
		sent := time.Minute
		now := sent + c.first
		a := pace.NewAnswer(&m, sent)
		for _, p := range c.parts {
			for range p.n {
				now += p.apart
				a.Came(now, p.tokens)
			}
		}
		a.Came(now, 0)
		var r pace.Reading
		m.Read(now, 0, &r)
		n, median := 0, time.Duration(0)
		for _, k := range r.Gaps {
			n += int(k)
		}
		seen := 0
		for i, k := range r.Gaps {
			if seen += int(k); median == 0 && n > 0 && 2*seen >= n {
				median = traffic.BucketTop(i)
			}
		}
		if n != c.tokens || r.Tokens != c.rest || float64(median) < .9*float64(c.pace) || float64(median) > 1.15*float64(c.pace) {
			t.Errorf("%s: %d tokens about %s apart, and %d without a pace; want %d, %s and %d", c.name, n, median, r.Tokens, c.tokens, c.pace, c.rest)
		}
	}
	a := pace.NewAnswer(nil, 0)
	a.Came(time.Second, 1)
}
