package arrivals

import (
	"container/list"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// Bound is the share of prompt tokens that one cache of this many blocks, shared by all
// requests and filled at their arrival, would have: no fleet of that size can have more but by
// luck. 0 blocks means without limit.
func Bound(src Source, blockSize, blocks int) (float64, error) {
	c := lru{limit: blocks, at: map[uint64]*list.Element{}}
	var tokens []uint32
	var locals, seqs []uint64
	hits, total := uint64(0), uint64(0)
	for q, err := range src {
		if err != nil {
			return 0, err
		}
		tokens = q.Expand(tokens[:0])
		locals = blockhash.Locals(locals[:0], tokens, blockSize, blockhash.Key{})
		seqs = blockhash.Chain(seqs[:0], locals)
		hits += uint64(selector.CachedTokens(q.ISL, c.overlap(seqs), blockSize))
		total += uint64(q.ISL)
		c.store(seqs)
	}
	if total == 0 {
		return 0, nil
	}
	return float64(hits) / float64(total), nil
}

// lru is a prefix cache; a prompt is touched tail first, so that leaves go
// before what they hang off.
type lru struct {
	limit int
	at    map[uint64]*list.Element
	order list.List // front is newest
}

func (c *lru) overlap(seqs []uint64) int {
	for i, s := range seqs {
		if _, ok := c.at[s]; !ok {
			return i
		}
	}
	return len(seqs)
}

func (c *lru) store(seqs []uint64) {
	if c.limit == 0 {
		for _, s := range seqs {
			c.at[s] = nil
		}
		return
	}
	for i := len(seqs) - 1; i >= 0; i-- {
		if e := c.at[seqs[i]]; e != nil {
			c.order.MoveToFront(e)
		} else {
			c.at[seqs[i]] = c.order.PushFront(seqs[i])
		}
	}
	for c.order.Len() > c.limit {
		last := c.order.Back()
		delete(c.at, c.order.Remove(last).(uint64))
	}
}
