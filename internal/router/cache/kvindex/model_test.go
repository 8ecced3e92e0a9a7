package kvindex

import "github.com/dynctl/dynctl/internal/blockhash"

// model is the index as its documentation says it: maps only, one thread, nothing shared.
type model struct {
	max   int64
	total int64
	ranks map[Rank]*modelRank
}

type modelRank struct {
	name  string
	names map[uint64]uint64 // engine name to sequence hash
	held  map[uint64]uint64 // sequence hash to engine name
	lost  bool
}

func newModel(limit int64) *model { return &model{max: limit, ranks: map[Rank]*modelRank{}} }

func (m *model) add(r Rank, name string) {
	m.ranks[r] = &modelRank{name: name, names: map[uint64]uint64{}, held: map[uint64]uint64{}}
}

func (m *model) remove(r Rank) {
	m.total -= int64(len(m.ranks[r].held))
	delete(m.ranks, r)
}

func (m *model) apply(r Rank, b *Batch) (res Result) {
	k := m.ranks[r]
	if k == nil {
		return refuse(b)
	}
	for i := range b.ops {
		o := &b.ops[i]
		names := b.names[o.from : o.from+o.n]
		switch o.kind {
		case opStore:
			bad := res.Orphaned + res.Refused + res.Renamed
			res.Refused += int(o.short)
			m.store(k, o, names, b.locals[o.lfrom:o.lfrom+o.n], &res)
			if res.Orphaned+res.Refused+res.Renamed > bad {
				res.Lost, k.lost = true, true
			}
		case opRemove:
			for _, n := range names {
				if s, ok := k.names[n]; ok {
					m.drop(k, n, s)
					res.Removed++
				} else {
					res.Unknown++
				}
			}
		case opClear:
			res.Cleared += len(k.held)
			m.total -= int64(len(k.held))
			clear(k.held)
			clear(k.names)
			res.Lost, k.lost = false, false
		}
	}
	return res
}

func (m *model) drop(k *modelRank, name, s uint64) {
	delete(k.names, name)
	delete(k.held, s)
	m.total--
}

func (m *model) store(k *modelRank, o *op, names, locals []uint64, res *Result) {
	s, root := uint64(0), true
	if o.hasParent {
		var ok bool
		if s, ok = k.names[o.parent]; !ok {
			res.Orphaned += len(names)
			return
		}
		root = false
	}
	type fresh struct{ name, s uint64 }
	var news []fresh
	for i, n := range names {
		if root {
			s, root = locals[i], false
		} else {
			s = blockhash.Next(s, locals[i])
		}
		if _, ok := k.held[s]; ok {
			res.Duplicate++
			continue
		}
		if m.total >= m.max {
			res.Refused += len(names) - i
			break
		}
		m.total++
		k.held[s] = n
		news = append(news, fresh{n, s})
	}
	for _, f := range news {
		res.Stored++
		if was, ok := k.names[f.name]; ok {
			m.drop(k, f.name, was)
			res.Renamed++
		}
		k.names[f.name] = f.s
	}
}

func (m *model) overlap(locals []uint64) map[Rank]int {
	out := map[Rank]int{}
	seq := blockhash.Chain(nil, locals)
	for r, k := range m.ranks {
		d := 0
		for d < len(seq) {
			if _, ok := k.held[seq[d]]; !ok {
				break
			}
			d++
		}
		if d > 0 {
			out[r] = d
		}
	}
	return out
}
