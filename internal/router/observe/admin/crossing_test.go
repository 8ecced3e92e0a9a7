package admin

import "testing"

// TestSentences: a crossing is said as what it is: a length with its interval, one path at every
// length, or unknown.
func TestSentences(t *testing.T) {
	for _, c := range []struct {
		low, tokens, high int // below 0 for none
		want              string
	}{
		{1234, 1689, 2449, "remote from about 1,700 tokens at 8 running answers (1,200 to 2,400)"},
		{95, 99, 100, "remote from about 99 tokens at 8 running answers (95 to 100)"},
		{994, 996, 131072, "remote from about 1,000 tokens at 8 running answers (990 to 130,000)"},
		{1234, 1689, -1, "remote from about 1,700 tokens at 8 running answers (1,200 or more)"},
		{0, 1689, 2449, "remote from about 1,700 tokens at 8 running answers (up to 2,400)"},
		{-1, -1, -1, "local at every length up to 131,072 tokens at 8 running answers"},
		{90001, -1, -1, "local at every length up to 131,072 tokens at 8 running answers (perhaps remote from 90,000)"},
		{0, 0, 0, "remote at every length at 8 running answers"},
		{0, 0, 417, "remote at every length at 8 running answers (perhaps local up to 420)"},
		{0, 0, -1, "unknown at 8 running answers"}, {0, 500, -1, "unknown at 8 running answers"}, {0, -1, -1, "unknown at 8 running answers"},
	} {
		of := func(n int) *int {
			if n < 0 {
				return nil
			}
			return &n
		}
		x := Crossing{Running: 8, Low: of(c.low), Tokens: of(c.tokens), High: of(c.high)}
		if got := x.Sentence(); got != c.want {
			t.Errorf("%d to %d to %d: %q, want %q", c.low, c.tokens, c.high, got, c.want)
		}
	}
}

// TestRule: the rule in force is one phrase, whatever the threshold is.
func TestRule(t *testing.T) {
	known := ModelCosts{PathsKnown: true, Crossings: []Crossing{{}, {Running: 8, Low: new(300), Tokens: new(512), High: new(900)}, {}}}
	for _, c := range []struct {
		threshold int
		auto      bool
		costs     []ModelCosts
		want      string
	}{
		{0, false, []ModelCosts{known}, "remote at every length"}, {2048, false, nil, "remote from eff_isl 2048"},
		{2048, true, nil, "remote from eff_isl 2048 until auto has learned"}, {2048, true, []ModelCosts{{}}, "remote from eff_isl 2048 until auto has learned"},
		{2048, true, []ModelCosts{known}, "remote from about 510 tokens at 8 running answers (300 to 900)"}, {2048, true, []ModelCosts{known, {}}, "auto has learned 1 of 2 models"},
	} {
		if got := Rule(c.threshold, "eff_isl", c.auto, c.costs); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}
