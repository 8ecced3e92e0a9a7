package engine

import (
	"math/bits"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// start begins a step when the rank is idle and has work.
func (r *Rank) start() {
	for !r.busy && !r.dead && !r.asleep {
		b, ok := r.schedule()
		if !ok {
			// vLLM publishes after a step without tokens, too: what a pull has
			// evicted is published while its blocks are on their way. Without a request
			// it takes no step, and what is to be published waits for the next one.
			if !r.dead && len(r.reqs) > 0 {
				r.publish()
			}
			return
		}
		r.busy = true
		r.stepEnd = r.now + r.scaled(r.cfg.Timing.Step(b))
	}
}

// schedule fills the batch of the next step and reports what is in it.
func (r *Rank) schedule() (Batch, bool) {
	r.batch = r.batch[:0]
	budget := r.cfg.MaxBatchedTokens
	preempted := false
	for i := 0; i < len(r.running) && budget > 0; i++ {
		p := r.running[i]
		n := min(len(p.tokens)-p.computed, budget)
		for !r.grow(p, p.computed+n) {
			victim := r.running[len(r.running)-1]
			r.preempt(victim)
			preempted = true
			if victim == p {
				break
			}
		}
		if p.state != running {
			break // p was the last one, and gave way itself
		}
		p.step = n
		r.batch = append(r.batch, p)
		budget -= n
	}
	// After a preemption nobody new is admitted, unless the preempted one was
	// alone: the step must not stay empty while someone could run. Whoever has
	// pulled its blocks goes first then, or the preempted one would take the
	// same few blocks again, for ever.
	if preempted {
		r.advanceHolder()
	}
	for (!preempted || len(r.batch) == 0) && len(r.waiting) > 0 && budget > 0 && len(r.running) < r.cfg.MaxSeqs && !r.dead {
		p := r.waiting[0]
		admitted, wait := r.admit(p, budget)
		if wait {
			// A request further back that has pulled its blocks already holds
			// what this one waits for, so it must go first.
			if !r.advanceHolder() {
				break
			}
			continue
		}
		if admitted {
			budget -= p.step
		}
	}
	if len(r.batch) == 0 || r.dead {
		return Batch{}, false
	}
	b := Batch{KVUsage: r.cache.Usage()}
	for _, p := range r.batch {
		if p.step == 1 {
			b.DecodeRequests++
			b.DecodeTokens += p.computed + 1
		} else {
			b.PrefillTokens += p.step
			from, to := float64(p.computed), float64(p.computed+p.step)
			b.PrefillSquares += to*to - from*from
		}
		r.compute(p, p.computed+p.step)
	}
	r.stats.Steps++
	return b, true
}

// advanceHolder brings the first waiting request that owns blocks to the head
// of the queue. Its admission needs no more blocks, so it cannot wait.
func (r *Rank) advanceHolder() bool {
	for i, p := range r.waiting {
		if len(p.blocks) > 0 {
			copy(r.waiting[1:i+1], r.waiting[:i])
			r.waiting[0] = p
			return true
		}
	}
	return false
}

// admit takes the first waiting request into the batch, or sends it off to
// fetch its KV. wait says that it must stay where it is for lack of blocks.
func (r *Rank) admit(p *request, budget int) (admitted, wait bool) {
	bs := r.cfg.BlockSize
	if p.computed == 0 && len(p.blocks) == 0 {
		hits := r.cache.Lookup(nil, p.seqs[:min((len(p.tokens)-1)/bs, len(p.seqs))])
		if p.Pull != nil && p.Pull.Offer && len(hits) == (len(p.tokens)-1)/bs {
			p.pulled = true // every full block is here
		}
		if p.Pull != nil && !p.pulled {
			return r.admitPull(p, hits)
		}
		n := min(len(p.tokens)-len(hits)*bs, budget)
		need := blocksFor(len(hits)*bs+n, bs) - len(hits)
		if need+r.cache.Idle(hits) > r.cache.Free() {
			return false, true
		}
		r.cache.Take(hits)
		p.blocks, p.computed, p.named = hits, len(hits)*bs, len(hits)
		r.fold(p, len(hits))
		if p.admitted == 0 {
			p.cached = p.computed
		}
		r.loadStore(p)
		if r.loadOffloaded(p) {
			return false, false
		}
	}
	n := min(len(p.tokens)-p.computed, budget)
	if !r.grow(p, p.computed+n) {
		// Only after a look-up: a request that has pulled owns all its blocks.
		r.cache.Release(p.blocks)
		p.blocks, p.computed, p.named, p.ctx, p.loaded, p.external = nil, 0, 0, 0, false, 0
		return false, true
	}
	r.waiting = r.waiting[1:]
	p.state = running
	p.step = n
	r.running = append(r.running, p)
	r.batch = append(r.batch, p)
	if p.admitted == 0 {
		p.admitted = r.now
		r.countPrompt(p)
	}
	return true, false
}

// grow makes sure that p has blocks for that many tokens.
func (r *Rank) grow(p *request, tokens int) bool {
	need := blocksFor(tokens, r.cfg.BlockSize) - len(p.blocks)
	if need <= 0 {
		return true
	}
	var ok bool
	p.blocks, ok = r.cache.Alloc(p.blocks, need)
	return ok
}

// preempt takes a running request's blocks and sends it back to the head of
// the queue; it will compute everything again that is not cached by then.
func (r *Rank) preempt(p *request) {
	r.running = without(r.running, p)
	r.batch = without(r.batch, p)
	r.cache.Release(p.blocks)
	p.blocks, p.computed, p.named, p.step, p.ctx = nil, 0, 0, 0, 0
	p.state = waiting
	p.pulled = p.Pull != nil // a second pull of the same blocks is not tried
	r.waiting = append([]*request{p}, r.waiting...)
	r.stats.Preemptions++
}

// compute writes the KV of p's tokens up to position to, and names the blocks
// that became full.
func (r *Rank) compute(p *request, to int) {
	bs := r.cfg.BlockSize
	if p.computed == 0 {
		p.ctx = r.root(p)
	}
	for pos := p.computed; pos < to; {
		id := p.blocks[pos/bs]
		c := r.cache.Content(id)
		off := pos % bs
		if off == 0 {
			c = cache.Content{}
		}
		end := min(bs, off+to-pos)
		for ; off < end; off++ {
			at := pos - pos%bs + off
			if off < c.Fill && at < len(p.Tokens) {
				continue // a pulled block: this slot holds what was pulled
			}
			c.Digest += slot(p.ctx, off, p.tokens[at])
			c.Fill = max(c.Fill, off+1)
		}
		pos += end - pos%bs
		r.cache.SetContent(id, c)
		if end == bs {
			p.ctx = mix(p.ctx, c.Digest)
		}
	}
	r.name(p, to/bs)
}

// name commits p's blocks up to number full.
func (r *Rank) name(p *request, full int) {
	if full <= p.named {
		return
	}
	bs := r.cfg.BlockSize
	for i := len(p.seqs); i < full; i++ {
		local := blockhash.Local(p.tokens[i*bs:(i+1)*bs], 0, p.Key.Seed(i))
		if i == 0 {
			p.seqs = append(p.seqs, local)
		} else {
			p.seqs = append(p.seqs, blockhash.Next(p.seqs[i-1], local))
		}
	}
	run := cache.Run{
		Blocks: p.blocks[p.named:full], Seqs: p.seqs[p.named:full],
		Tokens: p.tokens[p.named*bs : full*bs], LoRA: p.Key.LoRA, Salt: p.Key.Salt,
	}
	if p.named > 0 {
		run.Parent, run.HasParent = p.seqs[p.named-1], true
	}
	r.cache.Commit(run)
	p.named = full
}

// fold sets p's context to the contents of its first n blocks.
func (r *Rank) fold(p *request, n int) { p.ctx = r.context(p, n) }

// context is the digest of p's first n blocks as they are now.
func (r *Rank) context(p *request, n int) uint64 {
	ctx := r.root(p)
	for _, id := range p.blocks[:n] {
		ctx = mix(ctx, r.cache.Content(id).Digest)
	}
	return ctx
}

// finishStep ends the step in progress.
func (r *Rank) finishStep() {
	r.busy = false
	for _, p := range r.batch {
		p.computed += p.step
		p.step = 0
		r.offload(p)
		if p.ending != Running {
			r.remove(p)
			r.finish(p, p.ending, nil)
			continue
		}
		if p.computed < len(p.tokens) {
			continue
		}
		if p.Embed {
			r.remove(p)
			r.finish(p, FinishStop, nil)
			continue
		}
		r.sample(p)
	}
	r.batch = r.batch[:0]
	r.publish()
}

func (r *Rank) publish() {
	if r.cfg.Publish == nil {
		return
	}
	e := r.cache.Events()
	if r.off != nil {
		e = append(e, r.off.Events()...)
	}
	if len(e) > 0 {
		r.cfg.Publish(r.now, e)
	}
}

// draw is what the model makes of p's first n tokens, none of which is to come; ctx is
// the context of the full blocks among them.
func (r *Rank) draw(p *request, ctx uint64, n int) uint64 {
	d, bs := ctx, r.cfg.BlockSize
	if off := n % bs; off != 0 {
		digest := r.cache.Content(p.blocks[n/bs]).Digest
		for at := n; at < min(p.computed, n-off+bs); at++ { // slots add up: those behind n come off
			digest -= slot(ctx, at%bs, p.tokens[at])
		}
		d = mix(d, digest)
	}
	if p.Choice != 0 {
		d = mix(d, uint64(p.Choice))
	}
	return mix(d, 0x746f6b656e)
}

// leastAnswer is how many tokens of its own the model says before it may end.
const leastAnswer = 4

// mayEnd reports whether the last tokens before the next one are the model's own words,
// whoever asked for them: an answer does not end at once, and the rest of one that
// another engine began ends where that engine would have ended it. A prefill leg of one
// token so practically always ends by length, as it does on a real engine.
func (r *Rank) mayEnd(p *request) bool {
	n := len(p.tokens)
	for at := n - leastAnswer; at < n; at++ {
		if at < 1 || r.cfg.Next(p.tokens[:at], r.draw(p, r.context(p, at/r.cfg.BlockSize), at)) != p.tokens[at] {
			return false
		}
	}
	return true
}

// sample gives p its next token.
func (r *Rank) sample(p *request) {
	made := len(p.tokens) - len(p.Tokens) + 1
	d := r.draw(p, p.ctx, p.computed)
	token := r.cfg.Next(p.tokens, d)
	finish := Running
	if !p.IgnoreEOS && made > p.MinTokens && (d>>40)%uint64(r.cfg.OSL) == 0 && r.mayEnd(p) {
		token, finish = r.cfg.EOS, FinishStop
	}
	p.tokens = append(p.tokens, token)
	if finish == Running && made >= p.MaxTokens {
		finish = FinishLength
	}
	r.countToken(p, made)
	out := Output{At: r.now, Token: token, HasToken: true, Finish: finish, Cached: p.cached, External: p.external}
	if finish == Running {
		if p.Sink != nil {
			p.Sink(out)
		}
		return
	}
	r.remove(p)
	r.end(p, out)
}

// finish ends p without a token.
func (r *Rank) finish(p *request, why Finish, err error) {
	r.end(p, Output{At: r.now, Finish: why, Err: err, Cached: p.cached, External: p.external})
}

// end frees what p holds and delivers its last output. p is in no queue.
func (r *Rank) end(p *request, out Output) {
	p.state = done
	delete(r.reqs, p.ID)
	if p.Pin && (out.Finish == FinishLength || out.Finish == FinishStop && out.HasToken) {
		r.pin(p)
		out.Pinned = append([]int(nil), p.blocks...)
	} else {
		r.cache.Release(p.blocks)
	}
	r.saveStore(p)
	if r.off != nil {
		r.off.Used(p.seqs[:p.offloaded])
	}
	p.blocks = nil
	r.countEnd(p, out)
	if p.Sink != nil {
		p.Sink(out)
		p.Sink = nil
	}
}

func blocksFor(tokens, blockSize int) int { return (tokens + blockSize - 1) / blockSize }

// root is the digest before the first block: the model and its adapter.
func (r *Rank) root(p *request) uint64 {
	d := r.cfg.Seed
	for _, s := range [...]string{r.cfg.Model, p.Key.LoRA} {
		d = mix(d, uint64(len(s)))
		for i := range len(s) {
			d = mix(d, uint64(s[i]))
		}
	}
	return d
}

// slot is the digest of one token at an offset of a block.
func slot(ctx uint64, off int, token uint32) uint64 {
	return mix(ctx^uint64(off)<<32, uint64(token)+1)
}

// mix is one round of wyhash: a product of 128 bits folded to 64.
func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^0x9e3779b97f4a7c15, b^0xe7037ed1a0b428db)
	return hi ^ lo
}
