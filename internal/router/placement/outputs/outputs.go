// Package outputs learns how many tokens answers have, by model and tenant.
package outputs

import (
	"math"
	"strings"
	"sync"
)

const (
	// recent is over how many answers a mean is taken: older ones fade.
	recent = 50
	// enough is from how many answers on a tenant's mean counts instead of its model's.
	enough = 8
	// maxMeans bounds the means of one generation. Full, it replaces the one before, whose
	// means are forgotten if no answer has come for them since.
	maxMeans = 1024
)

// Lengths are mean lengths of recent answers. It is safe for concurrent use. A nil Lengths
// knows nothing.
type Lengths struct {
	mu             sync.RWMutex // guards the fields below
	newest, before map[of]mean
}

// of is whose answers a mean is of; with an empty tenant those of all.
type of struct{ model, tenant string }

// mean is a mean of tokens over that many answers, at most recent.
type mean struct {
	tokens  float64
	answers int
}

// New makes an empty table.
func New() *Lengths { return &Lengths{newest: map[of]mean{}} }

// Expect returns the mean length in tokens of the tenant's recent answers by the model, or of
// all recent answers by it where too few of the tenant are known; 0 where none is.
func (l *Lengths) Expect(model, tenant string) int {
	if l == nil {
		return 0
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	if m := l.find(of{model, tenant}); tenant != "" && m.answers >= enough {
		return int(math.Round(m.tokens))
	}
	return int(math.Round(l.find(of{model, ""}).tokens))
}

// find returns a mean, zero for one that is not known. The caller holds mu.
func (l *Lengths) find(k of) mean {
	if m, ok := l.newest[k]; ok {
		return m
	}
	return l.before[k]
}

// Learn learns that an answer to the tenant by the model had that many tokens.
func (l *Lengths) Learn(model, tenant string, tokens int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(of{model, ""}, tokens)
	if tenant != "" {
		l.add(of{model, tenant}, tokens)
	}
}

// add takes an answer into a mean. The caller holds mu.
func (l *Lengths) add(k of, tokens int) {
	m, ok := l.newest[k]
	if !ok {
		if len(l.newest) >= maxMeans {
			l.before, l.newest = l.newest, map[of]mean{}
		}
		m = l.before[k]
		k.model, k.tenant = strings.Clone(k.model), strings.Clone(k.tenant) // may be parts of a body
	}
	m.answers = min(m.answers+1, recent)
	m.tokens += (float64(tokens) - m.tokens) / float64(m.answers)
	l.newest[k] = m
}
