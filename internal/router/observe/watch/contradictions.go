package watch

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/dynctl/dynctl/internal/workers"
)

// contradictedPrefixes is how many prefixes in a row an engine must not have that the index says
// it has, before the whole rank is rebuilt.
const contradictedPrefixes = 3

// Contradictions finds ranks that the index is wrong about: their engines report fewer cached
// tokens than the index says they hold, and have published no removal that explains it. An engine
// that was reset while it was idle publishes that with its next step only, or never.
type Contradictions struct {
	o     ContradictionsOptions
	mu    sync.Mutex
	ranks map[*workers.Rank]*contradicted
}

// ContradictionsOptions are what the watch needs.
type ContradictionsOptions struct {
	// Removed counts the blocks that the events of a rank removed; ok is false where the index
	// does not follow it.
	Removed func(k *workers.Rank) (blocks uint64, ok bool)
	// Distrust is called with a rank that is to be rebuilt, and why.
	Distrust func(k *workers.Rank, why string)
}

// contradicted is what is known of one rank.
type contradicted struct {
	// agreed says that its engine has reported what the index says, since the rank was rebuilt
	// last. Figures that never agree say nothing.
	agreed   bool
	prefixes []uint64
}

// Prediction is what the index said of a prompt when it was sent to a rank. The zero value is
// none.
type Prediction struct {
	rank          *workers.Rank
	tokens, block int
	prefix        uint64
	removed       uint64
}

// NewContradictions makes a watch.
func NewContradictions(o ContradictionsOptions) *Contradictions {
	return &Contradictions{o: o, ranks: map[*workers.Rank]*contradicted{}}
}

// Sent notes that a prompt is sent to a rank. The index expects that many tokens of it there,
// in blocks of that size. prefix distinguishes them from others.
func (c *Contradictions) Sent(k *workers.Rank, tokens, block int, prefix uint64) Prediction {
	removed, ok := c.o.Removed(k)
	if !ok || block <= 0 || tokens < 2*block {
		return Prediction{}
	}
	return Prediction{rank: k, tokens: tokens, block: block, prefix: prefix, removed: removed}
}

// Found takes the cached tokens that the engine reports of the prompt, -1 for none.
func (c *Contradictions) Found(p Prediction, cached int) {
	if p.rank == nil || cached < 0 {
		return
	}
	removed, ok := c.o.Removed(p.rank)
	if !ok {
		return
	}
	if why := c.judge(p, cached, removed); why != "" {
		c.o.Distrust(p.rank, why)
	}
}

// judge is why the rank is to be rebuilt; "" where it is not.
func (c *Contradictions) judge(p Prediction, cached int, removed uint64) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.ranks[p.rank]
	if s == nil {
		maps.DeleteFunc(c.ranks, func(k *workers.Rank, _ *contradicted) bool {
			_, ok := c.o.Removed(k)
			return !ok
		})
		s = new(contradicted)
		c.ranks[p.rank] = s
	}
	again := slices.Contains(s.prefixes, p.prefix) // it has been computed since
	missing := uint64(max(0, p.tokens-cached))
	switch {
	case again:
	case cached+2*p.block >= p.tokens:
		s.agreed, s.prefixes = true, nil
	case !s.agreed, 2*cached >= p.tokens, (removed-p.removed)*uint64(p.block) >= missing:
	default:
		s.prefixes = append(s.prefixes, p.prefix)
	}
	if len(s.prefixes) < contradictedPrefixes {
		return ""
	}
	*s = contradicted{}
	return fmt.Sprintf("its engine lacked %d prefixes in a row that its events report; of the last prompt it had %d tokens instead of %d", contradictedPrefixes, cached, p.tokens)
}
