package kvindex

// Overlap finds, for every rank, how many leading blocks of a prompt it holds. The prompt is given by
// the local hashes of its full blocks: comparing them along a run costs less than computing sequence
// hashes would. The answer replaces what q held. Overlap takes no lock and allocates nothing once q
// has been used.
//
// Each run on the path is read as it was at one moment during the call. In the unlikely case that runs
// on the path are cut again and again meanwhile, the answer is empty.
func (x *Index) Overlap(locals []uint64, q *Query) {
	if q.stripe == 0 {
		q.stripe = x.stripe.Add(1)%stripes + 1
	}
	s := q.stripe - 1
	v := x.ep.enter(s)
	for range retries {
		q.reset(len(x.ranks))
		if x.look(locals, q) {
			x.ep.exit(s, v)
			x.ep.stripes[s].lookups.Add(1)
			return
		}
	}
	q.reset(len(x.ranks))
	x.ep.exit(s, v)
	x.ep.stripes[s].lookups.Add(1)
}

// look reports false when a run was cut while it was read.
func (x *Index) look(locals []uint64, q *Query) bool {
	depth := q.depth
	var last *node
	n, off, base := uint32(0), uint32(0), uint32(0)
	for int(base) < len(locals) {
		t := x.edges.find(n, off, locals[base])
		if t == 0 {
			break
		}
		nd := x.m.node(t)
		ver := nd.ver.Load()
		m := x.leading(nd, locals[base:])
		h := nd.mem.Load()
		if m == 0 || h == 0 || h == dead {
			break
		}
		a := x.m.array(h)
		cnt := int(loadWord(&a[0]))
		on := false // a rank goes on below
		members := a[1 : 1+min(cnt, len(a)-1)]
		for i := range members {
			e := loadWord(&members[i])
			r, cut := e&rankMask, min(uint32(e>>32), m)
			if cut == 0 || r >= uint64(len(depth)) || depth[r] != base {
				continue
			}
			if base == 0 {
				q.touched = append(q.touched, uint32(r))
			}
			depth[r] = base + cut
			on = on || cut == m
		}
		if nd.ver.Load() != ver {
			return false
		}
		last = nd
		if !on {
			break
		}
		n, off = t, m
		base += m
	}
	if last != nil {
		last.hits.Add(1)
	}
	return true
}

// leading returns how many blocks from the start of the run have the given local hashes.
func (x *Index) leading(nd *node, locals []uint64) uint32 {
	end := min(nd.len.Load(), uint32(len(locals)))
	if end == 0 {
		return 0
	}
	dir := x.m.dir(nd.dir.Load())
	for i := uint32(0); i < end; i += chunkLen {
		ch := x.m.locals(loadHalf(&dir[i/chunkLen]))
		// Blocks of this chunk are there to be read up to a length that was set after the chunk
		// came into the directory.
		end = min(end, nd.len.Load())
		if end-i >= chunkLen && end > i {
			p := (*[chunkLen]uint64)(locals[i : i+chunkLen])
			d := uint64(0)
			for j := 0; j < chunkLen; j += 4 {
				d |= (loadWord(&ch[j]) ^ p[j]) | (loadWord(&ch[j+1]) ^ p[j+1]) |
					(loadWord(&ch[j+2]) ^ p[j+2]) | (loadWord(&ch[j+3]) ^ p[j+3])
			}
			if d == 0 {
				continue
			}
		}
		for j := i; j < end; j++ {
			if j-i == chunkLen {
				break
			}
			if loadWord(&ch[j-i]) != locals[j] {
				return j
			}
		}
	}
	return end
}
