package kvstream

import (
	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvtier"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Tiers returns how many of the engine's blocks the rank holds outside its device.
func (s *Stream) Tiers() (d route.Tiers) {
	if s.tiers != nil {
		d = s.tiers.Blocks()
	}
	return d
}

// TiersReported reports whether an event has reported a tier outside the device, maybe before a
// restart of the router, and its blocks are followed: only then does a count of 0 mean that it
// holds no block there.
func (s *Stream) TiersReported() bool {
	return (s.app.Counters.Tiered > 0 || s.tiers != nil) && s.countsTiers()
}

// countsTiers reports whether tiers count for the rank: of a hybrid model it is not known
// which groups continue from another tier.
func (s *Stream) countsTiers() bool { return s.app.groups == nil && len(s.app.unknown) == 0 }

// noteTiers accounts for what a batch says about tiers other than the device. The index
// stands where it stood before the batch: blocks that the batch removes from the device
// are still known there, so that those that move to another tier keep their place.
func (s *Stream) noteTiers(b *kvevent.Batch) {
	if !s.countsTiers() {
		s.clearTiers()
		for i := range b.Events {
			if e := &b.Events[i]; e.Medium != kvevent.GPU || e.Locality == kvevent.Remote {
				s.app.Counters.OtherTier++
			}
		}
		return
	}
	if s.tiers == nil {
		s.tiers = kvtier.New()
	}
	// The index is asked once for the whole batch: it hashes all that a prompt has
	// before a block. Readers, which answer requests, wait for none of that.
	a := s.app
	a.names = a.names[:0]
	for i := range b.Events {
		if e := &b.Events[i]; s.ofTier(e) && e.Kind == kvevent.Stored {
			a.names = append(a.names, e.Hashes...)
			if e.HasParent {
				a.names = append(a.names, e.Parent)
			}
		}
	}
	if len(a.names) > 0 {
		a.seqs = s.index.Sequences(s.rank, a.names, a.seqs[:0])
	}
	seqs := a.seqs
	for i := range b.Events {
		e := &b.Events[i]
		tier, _ := kvtier.Of(e)
		switch {
		case e.Medium == kvevent.GPU && e.Locality != kvevent.Remote:
			if e.Kind == kvevent.Cleared && e.MediumName == "" {
				s.clearTiers()
			}
		case !s.ofTier(e):
			a.Counters.OtherTier++
		case e.Kind == kvevent.Stored:
			own := seqs[:len(e.Hashes)]
			seqs = seqs[len(e.Hashes):]
			parent := uint64(0)
			if e.HasParent {
				parent, seqs = seqs[0], seqs[1:]
			}
			s.storeTier(tier, e, own, parent)
		case e.Kind == kvevent.Removed:
			s.tiers.Lock()
			for _, name := range e.Hashes {
				s.tiers.Remove(tier, name)
			}
			s.tiers.Unlock()
		case e.Kind == kvevent.Cleared:
			s.tiers.Lock()
			s.tiers.ClearTier(tier)
			s.tiers.Unlock()
		}
	}
}

// ofTier reports whether an event is about blocks in a tier that is followed.
func (s *Stream) ofTier(e *kvevent.Event) bool {
	_, known := kvtier.Of(e)
	return known && !s.ofOther(e)
}

// ofOther reports whether an event is about another cache group than that in the index.
func (s *Stream) ofOther(e *kvevent.Event) bool {
	return e.CacheKind > kvevent.FullAttention || e.Group >= 0 && s.app.group >= 0 && e.Group != s.app.group
}

// storeTier adds an event's blocks to a tier. A block has its place by its name, or
// else by its tokens and the place of its parent. seqs and parent are the places that
// the index has for their names, 0 for none.
func (s *Stream) storeTier(tier kvtier.Tier, e *kvevent.Event, seqs []uint64, parent uint64) {
	a, n := s.app, len(e.Hashes)
	width, bs := max(a.parts, 1), int(e.BlockSize)
	if bs == 0 && n > 0 {
		bs = len(e.Tokens) / n
	}
	if bs > 0 {
		if bs%a.size != 0 {
			a.Counters.Mismatched += uint64(n)
			return
		}
		width = bs / a.size
	}
	a.locals = a.locals[:0]
	seq, known := uint64(0), n > 0 && bs > 0 && len(e.Tokens) == n*bs && !e.Bigram
	if known {
		a.locals = a.hash(e, n, bs)
		if e.HasParent {
			if seq = parent; seq == 0 {
				seq = s.tiers.Seq(e.Parent)
			}
			known = seq != 0
		}
	}
	if known {
		for i := range e.Hashes {
			for _, l := range a.locals[i*width : (i+1)*width] {
				if seq != 0 {
					l = blockhash.Next(seq, l)
				}
				seq = l
			}
			if seqs[i] == 0 {
				seqs[i] = seq
			}
		}
	}
	s.tiers.Lock()
	defer s.tiers.Unlock()
	for i, name := range e.Hashes {
		if !s.tiers.Store(tier, name, seqs[i], width) {
			a.Counters.Crowded++
		}
	}
}

// joinTiers gives their place to blocks whose prefix the batch has shown only now.
func (s *Stream) joinTiers(b *kvevent.Batch) {
	if !s.tiers.AnyUnresolved() {
		return
	}
	a := s.app
	a.names = a.names[:0]
	for i := range b.Events {
		if e := &b.Events[i]; e.Kind == kvevent.Stored {
			for _, name := range e.Hashes {
				if s.tiers.Unresolved(name) {
					a.names = append(a.names, name)
				}
			}
		}
	}
	if len(a.names) == 0 {
		return
	}
	a.seqs = s.index.Sequences(s.rank, a.names, a.seqs[:0])
	s.tiers.Lock()
	defer s.tiers.Unlock()
	for i, name := range a.names {
		s.tiers.Learn(name, a.seqs[i])
	}
}

// clearTiers forgets what other tiers hold.
func (s *Stream) clearTiers() {
	if s.tiers != nil {
		s.tiers.Lock()
		s.tiers.Clear()
		s.tiers.Unlock()
	}
}
