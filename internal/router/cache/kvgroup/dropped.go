package kvgroup

import "github.com/dynctl/dynctl/internal/kvevent"

// Traits are what must be known of an engine to read its events and is not in them.
type Traits struct {
	// IgnoreCopies says that one removal ends a block, however often it was stored.
	IgnoreCopies bool `json:"once,omitempty"`
	// Drops says that the engine recomputes the last block of every hit: vLLM
	// does it when it drafts with EAGLE, MTP or the like.
	Drops bool `json:"last_block_dropped,omitempty"`
	// Chunk is the size of a chunk of chunked attention in tokens, 0 when not known:
	// then all blocks of such a group are requested.
	Chunk int `json:"chunk_tokens,omitempty"`
	// HashAlgorithm and HashSeed are how the engine names blocks, as for
	// [blockhash.NewEngineNames]; the first is empty when that is not known.
	HashAlgorithm string `json:"hash_algorithm,omitempty"`
	HashSeed      string `json:"hash_seed,omitempty"`
}

// dropped is Usable for an engine that drops the last block of every hit. Groups
// look one block beyond the length in question, and each drops a block of its own,
// once for a length; the length that they agree on is not the largest at which all
// can go on, but what vLLM's coordinator comes to, step by step. Groups of one kind,
// window and block are looked up together, full ones first. Mamba states are made
// before the drop, and are not looked for beyond it.
func (l *look) dropped(overlap, limit, unit int, parts bool) int {
	g := l.g
	var led, seen [maxGroups]bool // led: looked up with one before it; seen: has dropped its block
	full, others, fulls := limit, 0, 0
	for _, i := range g.order {
		k := &g.groups[i]
		led[i] = !g.leads(i)
		switch {
		case k.blocks == 0:
			return 0 // it has stored nothing yet
		case led[i]:
			continue
		case k.kind != kvevent.FullAttention:
			others++
			continue
		}
		fulls++
		margin := k.blocks
		if len(g.groups) == 1 {
			margin = 0 // vLLM looks no further then
		}
		if parts {
			margin = min(margin, unit)
		}
		end := l.reach(i, overlap, min(full+margin, len(l.seq)), unit, parts)
		full = min(full, max(0, end-min(unit, k.blocks))/unit*unit)
	}
	for n := full; ; {
		was := n
		for _, i := range g.order {
			k := &g.groups[i]
			if k.kind == kvevent.FullAttention || led[i] {
				continue
			}
			to, drop := n, !seen[i]
			if drop && k.kind == kvevent.SlidingWindow {
				to = min(n+k.blocks, len(l.seq))
			}
			end := l.reusableTogether(i, to, unit, drop)
			if drop {
				seen[i] = true
			} else if end < n {
				seen = [maxGroups]bool{}
			}
			n = end
		}
		if l.left <= 0 {
			return 0
		}
		if n >= was || fulls == 1 && others == 1 {
			return min(n, was)
		}
	}
}

// reusableTogether returns the largest length, at most to, at which the groups that are
// looked up with the group i can go on, less the block that they drop.
func (l *look) reusableTogether(i, to, unit int, drop bool) int {
	k := &l.g.groups[i]
	size := k.blocks
	switch {
	case k.kind == kvevent.Mamba:
		for to = to / unit * unit; to > 0 && l.left > 0 && l.missing(i, to, to-size) > 0; {
			to -= unit
		}
		return to
	case k.kind == kvevent.ChunkedLocal:
		// vLLM has no drop for it.
		for to = to / unit * unit; to > 0 && l.left > 0; {
			gap := l.missing(i, to, l.start(k, to))
			if gap == 0 {
				break
			}
			to = (gap - 1) / unit * unit
		}
		return to
	}
	need, lost := 1<<30, 0
	if k.window > 0 {
		tokens := size * l.g.size
		need = max(1, (k.window-1+tokens-1)/tokens)
	}
	if drop {
		need, lost = need+1, 1
	}
	for end := to / size; end > 0 && l.left > 0; {
		if (end-lost)*size%unit != 0 {
			end--
			continue
		}
		if gap := l.missing(i, end*size, max(0, end-need)*size); gap > 0 {
			end = gap/size - 1
			continue
		}
		if end >= need {
			return (end - lost) * size
		}
		// All from the start, which is rounded both before and after the drop.
		end = end * size / unit * unit / size
		return max(0, end-lost) * size / unit * unit
	}
	return 0
}

// missing returns the end of the last block from start to n that one of the groups
// looked up with the group i does not hold, 0 if there is none.
func (l *look) missing(i, n, start int) (gap int) {
	for j := range l.g.groups {
		if l.g.together(i, j) {
			gap = max(gap, l.gap(j, n, start))
		}
	}
	return gap
}
