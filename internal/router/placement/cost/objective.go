package cost

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// Aim names what paths are chosen for.
type Aim string

// The aims.
const (
	// ForTTFT is the time to first token of the request alone, ForITL first of all
	// the time between the tokens of others, ForE2E the time that all of them take.
	ForTTFT Aim = "ttft"
	ForITL  Aim = "itl"
	ForE2E  Aim = "e2e"
	// ForGoodput is that as many requests as can be keep the limits.
	ForGoodput Aim = "goodput"
)

// Aims lists them.
func Aims() []string {
	return []string{string(ForTTFT), string(ForITL), string(ForE2E), string(ForGoodput)}
}

// Objective is what paths are chosen for.
type Objective struct {
	For Aim
	// TTFT and ITL are the limits of a good request: to its first token, and between
	// its tokens on average. Without both ForGoodput is as ForE2E.
	TTFT, ITL time.Duration
}

// sound is the objective as it can be aimed at: without limits no request is told to be good,
// and what is left is the time that all of them take.
func (o Objective) sound() Objective {
	if o.For == ForGoodput && (o.TTFT <= 0 || o.ITL <= 0) {
		o.For = ForE2E
	}
	return o
}

// ParseSLO reads "ttft=2s,itl=25ms".
func ParseSLO(text string) (ttft, itl time.Duration, err error) {
	for part := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		d, bad := time.ParseDuration(value)
		if bad != nil || d <= 0 || d > time.Hour {
			return 0, 0, fmt.Errorf("%q: want a limit such as ttft=2s or itl=25ms", part)
		}
		switch name {
		case "ttft":
			ttft = d
		case "itl":
			itl = d
		default:
			return 0, 0, fmt.Errorf("%q: there are the limits ttft and itl", part)
		}
	}
	if ttft == 0 || itl == 0 {
		return 0, 0, fmt.Errorf("%q: want both limits, as in ttft=2s,itl=25ms", text)
	}
	return ttft, itl, nil
}

// What the weights of ForGoodput are made of. They were chosen by comparison with fixed
// thresholds in simulation. They are constants: whatever the load is, a stall costs what the
// objective says, and a first token is late after the whole limit.
const (
	// beyond is what more of a wait costs that is beyond the limit already.
	beyond = 0.05
	// scatter is how far the mean times between tokens of answers lie around what is
	// measured now, as a share of the limit: their standard deviation.
	scatter = 0.3
	// worth is for how many requests that are late an answer counts that is lost by a
	// stall: tokens were made for it.
	worth = 2
)

// price sets what prices are made of, beside what outcomes say.
func (o *Objective) price(m *Model) {
	m.Others, m.Answer, m.Rooms = 1, 1, true
	switch o.For {
	case ForTTFT:
		m.Others, m.Answer = 0, 0
	case ForITL:
		m.Others = calm
	case ForGoodput:
		m.Limit, m.GapLimit = float64(o.TTFT)/float64(time.Millisecond), float64(o.ITL)/float64(time.Millisecond)
		m.Loss, m.LateOnce = m.Lose(), true
	}
}

// Lose is what a late request costs by a model's constants, in ms. It grows with what a good one
// may take, as the times do that it is weighed against: a pause of all answers on a rank is long
// beside a short limit to the first token.
func (m *Model) Lose() float64 {
	return m.Constants.Loss * (m.Limit + float64(m.GapLimit*m.Length))
}

// model is a model without those of legs, for answers of that many tokens with so many ms between
// them.
func (o *Objective) model(tokens, gap float64) *Model {
	switch o.For {
	case ForTTFT:
		return &Model{Beyond: 1}
	case ForE2E:
		return &Model{Stall: 1, Beyond: 1}
	case ForITL:
		return &Model{Stall: calm, Beyond: 1}
	}
	// A request that is late is lost, as if it had waited for its whole limit. A stall
	// adds to the mean time between the tokens of an answer by as many tokens as the
	// answer has, and loses those that pass the limit by that: by the density of a normal
	// distribution around the time that is measured now. Where that is beyond the limit
	// the density at the limit stays: fewer stalls can bring it back.
	limit := float64(o.ITL) / float64(time.Millisecond)
	first := float64(o.TTFT) / float64(time.Millisecond)
	z := max(1-gap/limit, 0) / scatter
	density := math.Exp(-z*z/2) / math.Sqrt(2*math.Pi) / (scatter * limit)
	return &Model{Stall: worth * first * density / max(tokens, 1), Limit: first, Beyond: beyond, Lost: first}
}
