package admin

import (
	"fmt"
	"strconv"
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

// Text is the crossing with its interval, as in "1200 (900 to 1700)".
func (c *Crossing) Text() string {
	text := func(n *int) string {
		if n == nil {
			return "never"
		}
		return strconv.Itoa(*n)
	}
	return fmt.Sprintf("%s (%s to %s)", text(c.Tokens), text(c.Low), text(c.High))
}

// Sentence is the crossing with its interval and the load that it is for.
func (c *Crossing) Sentence() string {
	return fmt.Sprintf("%s tokens with %d answers on the decode rank", c.Text(), c.Running)
}

// Threshold is the setting of the threshold in force, as routing.threshold takes it.
func (s *Status) Threshold() any {
	if s.ThresholdAuto {
		return fmt.Sprintf("auto:%d", s.ThresholdTokens)
	}
	return s.ThresholdTokens
}

// Rule is in words from where on prompts are prefilled remotely: the threshold in tokens
// of a measure, or where it is auto the crossing on a decode rank without answers, or
// how many models have one; without any the threshold that decides meanwhile.
func Rule(threshold int, on string, auto bool, costs []ModelCosts) string {
	fixed := fmt.Sprintf("%s %d", on, threshold)
	if !auto {
		return fixed
	}
	known, text := 0, ""
	for i := range costs {
		if c := costs[i].Crossings; len(c) > 0 {
			known++
			text = c[0].Text()
		}
	}
	switch {
	case known == 0:
		return fixed + ", auto learns"
	case len(costs) == 1:
		return "auto " + text
	default:
		return fmt.Sprintf("auto, %d of %d models learned", known, len(costs))
	}
}
