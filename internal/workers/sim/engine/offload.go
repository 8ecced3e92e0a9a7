package engine

import "github.com/dynctl/dynctl/internal/workers/sim/cache"

// Found returns how many leading blocks of a chain the rank would take from its device, and
// how many behind these from outside it.
func (r *Rank) Found(seqs []uint64) (device, beyond int) {
	device = len(r.cache.Lookup(nil, seqs))
	if r.off != nil {
		beyond = r.off.Lookup(seqs[device:])
	}
	return device, beyond
}

// loadOffloaded sends a request off to fetch the blocks behind those of the device from
// where they were offloaded to. false says that there are none, or no room for them.
func (r *Rank) loadOffloaded(p *request) bool {
	bs := r.cfg.BlockSize
	last := (len(p.tokens) - 1) / bs
	if r.off == nil || p.admitted != 0 || last <= p.named {
		return false
	}
	chain := p.seqs[p.named:last]
	n := r.off.Lookup(chain)
	// What is held now may stay held while this waits.
	if n == 0 || !r.grow(p, (p.named+n)*bs) {
		return false
	}
	promoted, have := r.off.Promote(chain[:n])
	if have == 0 {
		return false
	}
	r.waiting = r.waiting[1:]
	p.state = pulling
	chain = chain[:have]
	contents := r.off.Pin(chain)
	ready := r.scaled(r.cfg.Timing.Transfer(len(promoted) * bs))
	if len(promoted) == 0 {
		ready = 0
	}
	r.after(ready, func() { r.off.Done(promoted) })
	r.after(ready+r.scaled(r.cfg.Timing.Transfer(have*bs)), func() {
		r.off.Unpin(chain)
		if p.ending != Running {
			r.finish(p, p.ending, nil)
			return
		}
		for i, c := range contents {
			r.cache.SetContent(p.blocks[p.named+i], c)
		}
		p.external = have * bs
		p.computed += p.external
		r.fold(p, p.computed/bs)
		r.name(p, p.computed/bs)
		r.requeue(p)
	})
	return true
}

// offload copies what a step has computed of a prompt out of the device.
func (r *Rank) offload(p *request) {
	full := min(p.named, len(p.Tokens)/r.cfg.BlockSize)
	if r.off == nil || full <= p.offloaded {
		return
	}
	from := p.offloaded
	p.offloaded = full
	fresh := r.off.Prepare(p.seqs[from:full], func(i int) cache.Content { return r.cache.Content(p.blocks[from+i]) })
	if len(fresh) == 0 {
		return
	}
	took := r.scaled(r.cfg.Timing.Transfer(len(fresh) * r.cfg.BlockSize))
	r.after(took, func() {
		r.off.Done(fresh)
		if !r.off.HasStorage() {
			return
		}
		r.off.Pin(fresh)
		r.after(took, func() {
			r.off.Store(fresh)
			r.off.Unpin(fresh)
		})
	})
}
