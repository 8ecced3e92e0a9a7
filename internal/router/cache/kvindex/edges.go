package kvindex

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// edges find the run that leaves another one at an offset with a local hash. Lookups take no lock; a
// table that is full is replaced, and readers of the old one are left to the garbage collector.
type edges struct {
	m      *memory
	seed   uint64
	shards [edgeShards]edgeShard
}

const edgeShards = 64

type edgeShard struct {
	tab  atomic.Pointer[[]atomic.Uint64] // tag<<32 | node; 0 = never used; node 0 = erased
	mu   sync.Mutex
	used int // entries ever used in tab, erased ones included; under mu
	live int // under mu
	_    [32]byte
}

const erased = 1 << 32

func (e *edges) key(n, off uint32, local uint64) uint64 {
	hi, lo := bits.Mul64(local^e.seed, 0x9e3779b97f4a7c15)
	hi, lo = bits.Mul64(hi^lo^(uint64(n)<<32|uint64(off)), 0xd6e8feb86659fd93)
	return hi ^ lo
}

func (e *edges) shard(key uint64) *edgeShard { return &e.shards[key>>58] }

func tagOf(key uint64) uint64 { return key >> 20 & 0xffffffff << 32 }

// find returns the run that leaves node n at offset off with local hash local, 0 if there is none. The
// caller is inside an epoch or holds the shard's lock.
func (e *edges) find(n, off uint32, local uint64) uint32 {
	k := e.key(n, off, local)
	return e.shard(k).find(e.m, k, n, off, local)
}

func (s *edgeShard) find(m *memory, k uint64, n, off uint32, local uint64) uint32 {
	p := s.tab.Load()
	if p == nil {
		return 0
	}
	t := *p
	for i := k & uint64(len(t)-1); ; i = (i + 1) & uint64(len(t)-1) {
		v := t[i].Load()
		if v == 0 {
			return 0
		}
		if c := uint32(v); c != 0 && v&^0xffffffff == tagOf(k) {
			if nd := m.node(c); nd.parent == n && nd.off == off && nd.first == local {
				return c
			}
		}
	}
}

// insert adds node c, whose parent, off and first are set, unless there is such a run already, which it
// then returns.
func (e *edges) insert(c uint32) (other uint32) {
	nd := e.m.node(c)
	k := e.key(nd.parent, nd.off, nd.first)
	s := e.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.find(e.m, k, nd.parent, nd.off, nd.first); o != 0 {
		return o
	}
	p := s.tab.Load()
	if p == nil || (s.used+1)*2 > len(*p) {
		p = s.rebuild(e, p)
	}
	s.put(*p, k, c)
	s.live++
	return 0
}

func (s *edgeShard) put(t []atomic.Uint64, k uint64, c uint32) {
	for i := k & uint64(len(t)-1); ; i = (i + 1) & uint64(len(t)-1) {
		v := t[i].Load()
		if v == 0 {
			s.used++
		}
		if uint32(v) == 0 {
			t[i].Store(tagOf(k) | uint64(c))
			return
		}
	}
}

func (s *edgeShard) rebuild(e *edges, old *[]atomic.Uint64) *[]atomic.Uint64 {
	n := 32
	for n < (s.live+1)*4 {
		n *= 2
	}
	t := make([]atomic.Uint64, n)
	s.used = 0
	if old != nil {
		for i := range *old {
			if c := uint32((*old)[i].Load()); c != 0 {
				nd := e.m.node(c)
				s.put(t, e.key(nd.parent, nd.off, nd.first), c)
			}
		}
	}
	s.tab.Store(&t)
	return &t
}

func (e *edges) remove(c uint32) {
	nd := e.m.node(c)
	k := e.key(nd.parent, nd.off, nd.first)
	s := e.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := *s.tab.Load()
	for i := k & uint64(len(t)-1); ; i = (i + 1) & uint64(len(t)-1) {
		switch v := t[i].Load(); {
		case v == 0:
			return
		case uint32(v) == c:
			t[i].Store(erased)
			s.live--
			return
		}
	}
}
