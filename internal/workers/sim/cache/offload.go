package cache

import (
	"container/list"
	"slices"
)

// Tier is where the blocks of an Event are.
type Tier uint8

// The tiers: the device, the host's memory, and a store behind that.
const (
	Device Tier = iota
	Host
	Storage
)

// Offload is what one rank has of its blocks outside its device, as vLLM's offloading
// connector keeps it (0.32): the host's memory with room for that many blocks, from which
// those go that were used longest ago, and if there is a store, all that the memory has
// had, up to maxStorage.
//
// A block is there for others once it has been copied, and is published then; until then it
// cannot go either, nor while it is copied elsewhere. Its removal is published immediately.
type Offload struct {
	name   func(seq uint64) uint64
	quiet  bool
	room   int
	host   map[uint64]*list.Element // of *copied
	order  *list.List               // the one that goes next first
	stored map[uint64]Content       // nil without a store
	events []Event
}

// maxStorage bounds the blocks of a store; a full one takes no more, as a full disk does.
const maxStorage = 1 << 18

type copied struct {
	seq     uint64
	content Content
	ready   bool
	pins    int
}

// NewOffload makes the host memory of a cache: its room is in blocks, and storage puts
// a store behind it.
func NewOffload(c *Cache, room int, storage bool) *Offload {
	o := &Offload{name: c.Name, quiet: c.cfg.Quiet, room: room, host: map[uint64]*list.Element{}, order: list.New()}
	if storage {
		o.stored = map[uint64]Content{}
	}
	return o
}

func (o *Offload) publish(e Event) {
	if !o.quiet {
		o.events = append(o.events, e)
	}
}

// Lookup returns how many leading blocks of the chain are there, in memory or store.
func (o *Offload) Lookup(seqs []uint64) int {
	for i, s := range seqs {
		if e, ok := o.host[s]; ok && e.Value.(*copied).ready {
			continue
		}
		if _, ok := o.stored[s]; !ok {
			return i
		}
	}
	return len(seqs)
}

// Prepare makes room in memory for those blocks of the chain that are not there, whose
// content the function gives, and returns them; none if there is no room for all of them.
// Done says when they are copied.
func (o *Offload) Prepare(seqs []uint64, content func(i int) Content) []uint64 {
	protected, fresh := make(map[uint64]bool, len(seqs)), []int(nil)
	for i, s := range seqs {
		if _, ok := o.host[s]; !ok && !protected[s] {
			fresh = append(fresh, i)
		}
		protected[s] = true
	}
	var gone []*list.Element
	need := len(o.host) + len(fresh) - o.room
	for e := o.order.Front(); e != nil && len(gone) < need; e = e.Next() {
		if c := e.Value.(*copied); c.ready && c.pins == 0 && !protected[c.seq] {
			gone = append(gone, e)
		}
	}
	if len(gone) < need {
		return nil
	}
	removed := Event{Kind: Removed, Tier: Host}
	for _, e := range gone {
		c := o.order.Remove(e).(*copied)
		delete(o.host, c.seq)
		removed.Names = append(removed.Names, o.name(c.seq))
	}
	if len(gone) > 0 {
		o.publish(removed)
	}
	var out []uint64
	for _, i := range fresh {
		o.host[seqs[i]] = o.order.PushBack(&copied{seq: seqs[i], content: content(i)})
		out = append(out, seqs[i])
	}
	return out
}

// Done notes that blocks which Prepare returned are copied.
func (o *Offload) Done(seqs []uint64) {
	for _, s := range seqs {
		o.host[s].Value.(*copied).ready = true
		o.publish(Event{Kind: Stored, Tier: Host, Names: []uint64{o.name(s)}})
	}
}

// Promote copies those of the chain's blocks into memory that only the store has. It
// returns them and how many leading blocks of the chain are in memory then: fewer than all
// where there is no room.
func (o *Offload) Promote(seqs []uint64) (promoted []uint64, n int) {
	promoted = o.Prepare(seqs, func(i int) Content { return o.stored[seqs[i]] })
	for n < len(seqs) && o.host[seqs[n]] != nil {
		n++
	}
	return promoted, n
}

// Pin keeps blocks that are in memory until Unpin, and returns their contents.
func (o *Offload) Pin(seqs []uint64) []Content {
	out := make([]Content, len(seqs))
	for i, s := range seqs {
		c := o.host[s].Value.(*copied)
		c.pins++
		out[i] = c.content
	}
	return out
}

// Unpin ends Pin.
func (o *Offload) Unpin(seqs []uint64) {
	for _, s := range seqs {
		o.host[s].Value.(*copied).pins--
	}
}

// Store puts blocks that are in memory and pinned into the store, if there is one, and
// publishes those that were not there.
func (o *Offload) Store(seqs []uint64) {
	for _, s := range seqs {
		if _, ok := o.stored[s]; ok || len(o.stored) >= maxStorage {
			continue
		}
		o.stored[s] = o.host[s].Value.(*copied).content
		o.publish(Event{Kind: Stored, Tier: Storage, Names: []uint64{o.name(s)}})
	}
}

// HasStorage reports whether there is a store.
func (o *Offload) HasStorage() bool { return o.stored != nil }

// Used marks the chain as used by a request that has ended: its first block goes last.
func (o *Offload) Used(seqs []uint64) {
	for _, s := range slices.Backward(seqs) {
		if e, ok := o.host[s]; ok {
			o.order.MoveToBack(e)
		}
	}
}

// Events returns the events since the last call, in order.
func (o *Offload) Events() []Event {
	e := o.events
	o.events = nil
	return e
}
