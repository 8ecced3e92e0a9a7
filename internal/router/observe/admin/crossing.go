package admin

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/table"
)

// Crossing is from how many tokens on a prompt is cheaper on a prefill rank, if none of it
// is cached and nothing else waits.
type Crossing struct {
	// Running is the answers that run on the decode rank.
	Running int `json:"running"`
	// Tokens is what the cost models in force predict; the truth is between Low and High with a
	// confidence of about 95 %. Null is beyond all prompts (of 131,072 tokens): they are
	// cheaper on a decode rank.
	Low    *int `json:"low_tokens"`
	Tokens *int `json:"tokens"`
	High   *int `json:"high_tokens"`
}

// Unknown reports whether the interval leaves everything open.
func (c *Crossing) Unknown() bool { return c.Low != nil && *c.Low == 0 && c.High == nil }

// Sentence is the crossing with the load that it is for, and its interval: "remote from about
// 1,700 tokens at 8 running answers (1,200 to 2,400)".
func (c *Crossing) Sentence() string {
	at := fmt.Sprintf("at %d running answers", c.Running)
	switch {
	case c.Unknown():
		return "unknown " + at
	case c.Tokens == nil && c.Low == nil:
		return fmt.Sprintf("local at every length up to %s tokens %s", table.Count(cost.MaxCrossing), at)
	case c.Tokens == nil:
		return fmt.Sprintf("local at every length up to %s tokens %s (perhaps remote from %s)", table.Count(cost.MaxCrossing), at, about(*c.Low))
	case *c.Tokens == 0 && *c.High == 0:
		return "remote at every length " + at
	case *c.Tokens == 0:
		return fmt.Sprintf("remote at every length %s (perhaps local up to %s)", at, about(*c.High))
	case c.Low != nil && *c.Low == 0:
		return fmt.Sprintf("remote from about %s tokens %s (up to %s)", about(*c.Tokens), at, about(*c.High))
	case c.High == nil:
		return fmt.Sprintf("remote from about %s tokens %s (%s or more)", about(*c.Tokens), at, about(*c.Low))
	}
	return fmt.Sprintf("remote from about %s tokens %s (%s to %s)", about(*c.Tokens), at, about(*c.Low), about(*c.High))
}

// about is a number of tokens with two digits that count.
func about(n int) string {
	unit := 1
	for n >= 100*unit {
		unit *= 10
	}
	return table.Count((n + unit/2) / unit * unit)
}

// Threshold is the setting of the threshold in force, as routing.threshold takes it.
func (s *Status) Threshold() any {
	if s.ThresholdAuto {
		return fmt.Sprintf("auto:%d", s.ThresholdTokens)
	}
	return s.ThresholdTokens
}

// Rule is in words where prompts are prefilled: by the threshold in tokens of a measure. Where the
// threshold is auto, it is the crossing with answers on the decode rank, or how many models have
// one. Without any it is the threshold that decides meanwhile.
func Rule(threshold int, on string, auto bool, costs []ModelCosts) string {
	fixed := fmt.Sprintf("remote from %s %d", on, threshold)
	if threshold <= 0 {
		fixed = "remote at every length"
	}
	if !auto {
		return fixed
	}
	known, text := 0, ""
	for i := range costs {
		if c := costs[i].Crossings; len(c) > 0 && costs[i].PathsKnown {
			known++
			text = c[len(c)/2].Sentence()
		}
	}
	switch {
	case known == 0:
		return fixed + " until auto has learned"
	case len(costs) == 1:
		return text
	default:
		return fmt.Sprintf("auto has learned %d of %d models", known, len(costs))
	}
}
