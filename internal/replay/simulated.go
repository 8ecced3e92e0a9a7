package replay

import (
	"fmt"
	"math"
	"strings"

	"github.com/dynctl/dynctl/internal/table"
)

// Outcome is what simulated requests came to. Times are in milliseconds, 0 when no request
// has one.
type Outcome struct {
	Requests uint64  `json:"requests"`
	Failed   uint64  `json:"failed"`
	TTFTP50  float64 `json:"ttft_p50_ms"`
	TTFTP99  float64 `json:"ttft_p99_ms"`
	ITLP50   float64 `json:"itl_p50_ms"`
	ITLP99   float64 `json:"itl_p99_ms"`
	// Hit is the share of prompt tokens that engines took from their caches.
	Hit float64 `json:"hit_ratio"`
}

// Simulated compares the requests of a recording under its settings with the same requests
// under others, both on simulated engines.
type Simulated struct {
	// Fleet is the recording's, as --fleet takes it.
	Fleet    string  `json:"fleet"`
	Recorded Outcome `json:"recorded"`
	WhatIf   Outcome `json:"what_if"`
	// Verdict is "better", "worse", "mixed" or "the same".
	Verdict string `json:"verdict"`
}

// Differences that count: of a time, relative to the recorded one, and of the share of hits.
const (
	otherTime = 0.02
	otherHit  = 0.005
)

// figure is one figure of a comparison; good is 1 when the what-if is better, -1 when it is
// worse, 0 when it is about equal.
type figure struct {
	name, was, now, change string
	good                   int
}

func (s *Simulated) figures() []figure {
	var out []figure
	for _, t := range []struct {
		name     string
		was, now float64
	}{
		{"ttft p50", s.Recorded.TTFTP50, s.WhatIf.TTFTP50}, {"ttft p99", s.Recorded.TTFTP99, s.WhatIf.TTFTP99},
		{"itl p50", s.Recorded.ITLP50, s.WhatIf.ITLP50}, {"itl p99", s.Recorded.ITLP99, s.WhatIf.ITLP99},
	} {
		f := figure{name: t.name, was: millis(t.was), now: millis(t.now)}
		if t.was > 0 && t.now > 0 {
			d := t.now/t.was - 1
			f.change = fmt.Sprintf("%+.0f%%", d*100)
			if math.Abs(d) > otherTime {
				f.good = -sign(d)
			}
		}
		out = append(out, f)
	}
	d := s.WhatIf.Hit - s.Recorded.Hit
	hits := figure{name: "hits", was: table.Percent(s.Recorded.Hit), now: table.Percent(s.WhatIf.Hit), change: fmt.Sprintf("%+.1f points", d*100)}
	if math.Abs(d) > otherHit {
		hits.good = sign(d)
	}
	failed := figure{name: "failed", was: table.Count(s.Recorded.Failed), now: table.Count(s.WhatIf.Failed), good: sign(float64(s.Recorded.Failed) - float64(s.WhatIf.Failed))}
	return append(out, hits, failed)
}

func sign(v float64) int {
	switch {
	case v > 0:
		return 1
	case v < 0:
		return -1
	}
	return 0
}

func millis(v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f ms", v)
}

// Judge sets the verdict.
func (s *Simulated) Judge() {
	better, worse := false, false
	for _, f := range s.figures() {
		better, worse = better || f.good > 0, worse || f.good < 0
	}
	switch {
	case better && worse:
		s.Verdict = "mixed"
	case better:
		s.Verdict = "better"
	case worse:
		s.Verdict = "worse"
	default:
		s.Verdict = "the same"
	}
}

// Sentence says whether the change would be better, and by which figures.
func (s *Simulated) Sentence() string {
	var parts []string
	for _, f := range s.figures() {
		if f.good != 0 {
			word := map[int]string{1: "better", -1: "worse"}[f.good]
			parts = append(parts, fmt.Sprintf("%s %s -> %s (%s)", f.name, f.was, f.now, word))
		}
	}
	text := "it would be " + s.Verdict
	if len(parts) > 0 {
		text += ": " + strings.Join(parts, ", ")
	}
	return text
}

// rows are the figures for the table of a [Redecision].
func (s *Simulated) rows() [][]string {
	var out [][]string
	for _, f := range s.figures() {
		out = append(out, []string{"simulated " + f.name, f.was, f.now, f.change})
	}
	return out
}
