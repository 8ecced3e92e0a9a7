package replay

import "testing"

// TestVerdicts: small differences are none, and a setting that helps one figure and hurts
// another is not called better.
func TestVerdicts(t *testing.T) {
	was := Outcome{Requests: 10, TTFTP50: 100, TTFTP99: 200, ITLP50: 10, ITLP99: 20, Hit: 0.5}
	for _, c := range []struct {
		change func(*Outcome)
		want   string
	}{
		{func(*Outcome) {}, "it would be the same"},
		{func(o *Outcome) { o.TTFTP50, o.Hit = 101, 0.504 }, "it would be the same"},
		{func(o *Outcome) { o.TTFTP50 = 80 }, "it would be better: ttft p50 100.0 ms -> 80.0 ms (better)"},
		{func(o *Outcome) { o.Hit = 0.3 }, "it would be worse: hits 50.00% -> 30.00% (worse)"},
		{func(o *Outcome) { o.Failed = 3 }, "it would be worse: failed 0 -> 3 (worse)"},
		{func(o *Outcome) { o.TTFTP99, o.ITLP99 = 100, 40 }, "it would be mixed: ttft p99 200.0 ms -> 100.0 ms (better), itl p99 20.0 ms -> 40.0 ms (worse)"},
		{func(o *Outcome) { o.ITLP50, o.ITLP99 = 0, 0 }, "it would be the same"}, // unknown
	} {
		s := &Simulated{Recorded: was, WhatIf: was}
		c.change(&s.WhatIf)
		s.Judge()
		if got := s.Sentence(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
