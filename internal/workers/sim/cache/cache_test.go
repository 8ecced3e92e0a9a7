package cache

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// naive is the block pool as one would write it without caring for speed.
type naive struct {
	queue []int // free blocks, next to be handed out first
	refs  map[int]int
	seq   map[int]uint64 // names of named blocks
	order []int          // named blocks, oldest name first
	log   []Event
	c     *Cache // for names only
}

func newNaive(blocks int, c *Cache) *naive {
	n := &naive{refs: map[int]int{}, seq: map[int]uint64{}, c: c}
	for i := 1; i < blocks; i++ {
		n.queue = append(n.queue, i)
	}
	return n
}

func (n *naive) lookup(seqs []uint64) (out []int) {
	for _, s := range seqs {
		i := slices.IndexFunc(n.order, func(id int) bool { return n.seq[id] == s })
		if i < 0 {
			return out
		}
		out = append(out, n.order[i])
	}
	return out
}

func (n *naive) take(ids []int) {
	for _, id := range ids {
		if n.refs[id] == 0 {
			n.queue = slices.DeleteFunc(n.queue, func(q int) bool { return q == id })
		}
		n.refs[id]++
	}
}

func (n *naive) alloc(k int) []int {
	if k > len(n.queue) {
		return nil
	}
	out := slices.Clone(n.queue[:k])
	n.queue = n.queue[k:]
	for _, id := range out {
		n.refs[id] = 1
		if s, ok := n.seq[id]; ok {
			delete(n.seq, id)
			n.order = slices.DeleteFunc(n.order, func(q int) bool { return q == id })
			n.log = append(n.log, Event{Kind: Removed, Names: []uint64{n.c.Name(s)}})
		}
	}
	return out
}

func (n *naive) release(ids []int) {
	for i := len(ids) - 1; i >= 0; i-- {
		if n.refs[ids[i]]--; n.refs[ids[i]] == 0 {
			n.queue = append(n.queue, ids[i])
		}
	}
}

func (n *naive) commit(ids []int, seqs []uint64) {
	names := make([]uint64, len(seqs))
	for i, id := range ids {
		n.seq[id] = seqs[i]
		n.order = append(n.order, id)
		names[i] = n.c.Name(seqs[i])
	}
	n.log = append(n.log, Event{Kind: Stored, Names: names})
}

func TestCacheEqualsNaiveModel(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		blocks := rapid.IntRange(2, 12).Draw(t, "blocks")
		c, err := New(Config{Blocks: blocks, BlockSize: 4, NameSeed: 7})
		if err != nil {
			t.Fatal(err)
		}
		n := newNaive(blocks, c)
		type user struct {
			ids   []int
			named int
			seqs  []uint64
		}
		var users []user
		var got []Event
		t.Repeat(map[string]func(*rapid.T){
			"admit": func(t *rapid.T) {
				// A chain of few names, so that prefixes are shared.
				seqs := rapid.SliceOfN(rapid.Uint64Range(1, 4), 1, 6).Draw(t, "chain")
				for i := 1; i < len(seqs); i++ {
					seqs[i] += seqs[i-1] * 5
				}
				hits := c.Lookup(nil, seqs)
				if d := cmp.Diff(n.lookup(seqs), hits); d != "" {
					t.Fatalf("lookup (-naive +cache):\n%s", d)
				}
				need := len(seqs) - len(hits)
				if need+c.Idle(hits) > c.Free() {
					return
				}
				c.Take(hits)
				n.take(hits)
				fresh, ok := c.Alloc(nil, need)
				if !ok {
					t.Fatalf("no %d blocks with %d free", need, c.Free())
				}
				if d := cmp.Diff(n.alloc(need), slices.Clone(fresh)); need > 0 && d != "" {
					t.Fatalf("alloc (-naive +cache):\n%s", d)
				}
				users = append(users, user{append(hits, fresh...), len(hits), seqs})
			},
			"commit": func(t *rapid.T) {
				if len(users) == 0 {
					return
				}
				u := &users[rapid.IntRange(0, len(users)-1).Draw(t, "user")]
				if u.named == len(u.ids) {
					return
				}
				to := rapid.IntRange(u.named+1, len(u.ids)).Draw(t, "to")
				c.Commit(Run{Blocks: u.ids[u.named:to], Seqs: u.seqs[u.named:to]})
				n.commit(u.ids[u.named:to], u.seqs[u.named:to])
				u.named = to
			},
			"release": func(t *rapid.T) {
				if len(users) == 0 {
					return
				}
				i := rapid.IntRange(0, len(users)-1).Draw(t, "user")
				c.Release(users[i].ids)
				n.release(users[i].ids)
				users = slices.Delete(users, i, i+1)
			},
			"clear": func(t *rapid.T) {
				if ok := c.Clear(); ok != (len(n.queue) == blocks-1) {
					t.Fatalf("Clear = %v with %d of %d free", ok, len(n.queue), blocks-1)
				} else if ok {
					n.seq, n.order = map[int]uint64{}, nil
					n.log = append(n.log, Event{Kind: Cleared})
				}
			},
			"": func(t *rapid.T) {
				if c.Free() != len(n.queue) {
					t.Fatalf("%d free, naive %d", c.Free(), len(n.queue))
				}
				want := map[uint64]bool{}
				for _, s := range n.seq {
					want[s] = true
				}
				seqs := c.Seqs(nil)
				for _, s := range seqs {
					if !want[s] {
						t.Fatalf("%d is not in the naive cache", s)
					}
				}
				if len(seqs) != len(want) || len(c.index) != len(want) {
					t.Fatalf("%d names, naive %d", len(seqs), len(want))
				}
				for _, e := range c.Events() {
					got = append(got, Event{Kind: e.Kind, Names: e.Names})
				}
				if d := cmp.Diff(n.log, got); d != "" {
					t.Fatalf("events (-naive +cache):\n%s", d)
				}
			},
		})
	})
}

func TestNewRefusesNonsense(t *testing.T) {
	for _, cfg := range []Config{{Blocks: 1, BlockSize: 4}, {Blocks: 4}, {}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("New(%+v) is fine", cfg)
		}
	}
}

func BenchmarkAdmit(b *testing.B) {
	c, err := New(Config{Blocks: 16384, BlockSize: 16, Quiet: true})
	if err != nil {
		b.Fatal(err)
	}
	seqs := make([]uint64, 512)
	var ids []int
	b.ReportAllocs()
	n := uint64(0)
	for b.Loop() {
		n++
		for i := range seqs {
			seqs[i] = n<<32 | uint64(i)
		}
		ids, _ = c.Alloc(ids[:0], len(seqs))
		c.Commit(Run{Blocks: ids, Seqs: seqs})
		c.Release(ids)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(seqs)), "ns/block")
}
