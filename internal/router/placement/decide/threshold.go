package decide

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Threshold is a threshold as it is set.
type Threshold struct {
	// Tokens are Rule.Threshold, Auto is Rule.Auto.
	Tokens int
	Auto   bool
}

// Apply puts the threshold into a rule, with what keeps its start within bounds.
func (t Threshold) Apply(r *Rule) {
	r.Threshold, r.Auto, r.StartGate = t.Tokens, t.Auto, 0
	if t.Auto {
		r.StartGate = startGate
	}
}

// startGate is Rule.StartGate. It was chosen by generated bursts on two prefill ranks: with
// 24,576 to 65,536 no prompt of the first second waits for seconds there.
const startGate = 32768

// autoThreshold in tokens decides while costs are not known, unless another one was
// requested.
const autoThreshold = 2048

// ParseThreshold reads a threshold: a number of tokens, "auto", or "auto:TOKENS" for
// one that decides while too little is known of the costs.
func ParseThreshold(text string) (t Threshold, err error) {
	word, number, both := strings.Cut(text, ":")
	if word != "auto" {
		if t.Tokens, err = strconv.Atoi(text); err != nil {
			return Threshold{}, fmt.Errorf("%q is not a whole number of tokens, nor auto", text)
		}
		return t, nil
	}
	if !both {
		return Threshold{Tokens: autoThreshold, Auto: true}, nil
	}
	t.Auto = true
	if t.Tokens, err = strconv.Atoi(number); err == nil && t.Tokens < 1 {
		err = errors.New("too small")
	}
	if err != nil {
		return Threshold{}, fmt.Errorf("%q: after auto: comes what decides while too little is known, a number of tokens of at least 1", text)
	}
	return t, nil
}

// String is what ParseThreshold reads.
func (t Threshold) String() string {
	switch {
	case !t.Auto:
		return strconv.Itoa(t.Tokens)
	case t.Tokens == autoThreshold:
		return "auto"
	}
	return "auto:" + strconv.Itoa(t.Tokens)
}

// MarshalJSON gives a number of tokens where there is no more to it.
func (t Threshold) MarshalJSON() ([]byte, error) {
	if t.Auto {
		return strconv.AppendQuote(nil, t.String()), nil
	}
	return strconv.AppendInt(nil, int64(t.Tokens), 10), nil
}
