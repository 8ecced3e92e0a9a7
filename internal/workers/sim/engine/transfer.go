package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// Pull is a remote prefill to take the prompt's KV from: NIXL's
// kv_transfer_params on the decode side, or SGLang's bootstrap triple.
type Pull struct {
	// EngineID names the prefill rank, RequestID the request there.
	EngineID, RequestID string
	// Host and Port are its side channel, or the bootstrap server.
	Host string
	Port int
	// Blocks are the remote blocks, by number. Broken says that the list was
	// not one list of numbers, which vLLM finds out too late.
	Blocks []int
	Broken bool
	// TPSize is the remote tensor parallel size, 0 if it was not given.
	TPSize int
	// Incomplete says that a field is missing whose absence makes vLLM 0.32
	// wait for ever.
	Incomplete bool
	// Bootstrap says that this is SGLang's rendezvous in room Room; the blocks
	// are then those of the room's prefill. Fake is the health probe's room,
	// which has no prefill: the decode computes nothing and uses what is there.
	Bootstrap bool
	Room      uint64
	Fake      bool
	// Push says that the prefill rank writes the KV here when it has the prompt
	// (vLLM's NixlPushConnector); the blocks are the prompt's last ones.
	Push bool
	// Server is the URL of Mooncake's bootstrap server, which knows the address of EngineID;
	// RequestID is then the name of the transfer. Push is set with it: the prefill rank
	// writes.
	Server string
	// Offer says that RequestID is the name of full blocks in the host's memory of the
	// prefill rank (vLLM's peer-to-peer tier): the rest of the prompt is computed, and all
	// of it when they do not come.
	Offer bool
}

// PullRequest asks the network for remote blocks.
type PullRequest struct {
	// Request is the local request's id, to be named in PullDone.
	Request string
	// Blocks are the remote blocks to read, in order. In a bootstrap and of a push it
	// is nil, and the last Want blocks of the prompt come.
	Blocks []int
	Want   int
	// Seqs are the sequence hashes of the blocks of an offer.
	Seqs []uint64
	Pull Pull
}

// Note is a message to a prefill rank about one of its pinned requests.
type Note uint8

// The notes. NoteBeat extends the lease, NoteDone ends it.
const (
	NoteBeat Note = iota
	NoteDone
)

// Network reaches other ranks. Its methods return immediately; the answer to Pull
// comes by Rank.PullDone, never from within Pull.
type Network interface {
	Pull(now Time, q PullRequest)
	Note(now Time, p Pull, n Note)
}

// Store is a storage connector: contents of blocks by sequence hash, shared by
// several engines.
type Store interface {
	// Load returns the contents of as many leading blocks of the chain as the
	// store can give, from block number from on; nil if none.
	Load(seqs []uint64, from int) []cache.Content
	// Save keeps the contents of the whole chain.
	Save(seqs []uint64, contents []cache.Content)
}

// ErrPull is a failed KV load.
var ErrPull = errors.New("KV load failed")

// admitPull allocates the blocks of a prompt whose KV comes from elsewhere
// and asks for them.
func (r *Rank) admitPull(p *request, hits []int) (admitted, wait bool) {
	bs := r.cfg.BlockSize
	need := blocksFor(len(p.tokens), bs) - len(hits)
	if need+r.cache.Idle(hits) > r.cache.Free() {
		return false, true
	}
	r.cache.Take(hits)
	p.blocks, _ = r.cache.Alloc(hits, need)
	p.named = len(hits)
	p.cached = len(hits) * bs
	last := len(p.tokens)
	if p.Pull.Offer {
		last = (last - 1) / bs * bs
	}
	p.external = last - p.cached
	p.state = pulling
	r.waiting = r.waiting[1:]
	r.countPrompt(p)

	q := PullRequest{Request: p.ID, Want: need, Pull: *p.Pull}
	switch {
	case p.Pull.Fake:
		p.admitted = r.now
		r.after(0, func() { r.pulledAll(p) })
		return false, false
	case p.Pull.Incomplete && p.Pull.Push:
		// vLLM 0.32 looks a member up that is not there; the whole engine goes down.
		r.exit(fmt.Sprintf("kv_transfer_params of request %s do not say who pushes", p.ID))
		return false, false
	case p.Pull.Incomplete:
		p.hung = true
		return false, false
	case p.Pull.Bootstrap, p.Pull.Push:
	case p.Pull.Offer:
		q.Seqs = p.seqs[len(hits) : last/bs]
		q.Want = len(q.Seqs)
	case p.Pull.Broken, len(p.Pull.Blocks) < need:
		// vLLM 0.32 asserts in the worker; the whole engine goes down with it.
		r.exit(fmt.Sprintf("kv_transfer_params of request %s name %d blocks where %d are needed", p.ID, len(p.Pull.Blocks), need))
		return false, false
	default:
		// With more blocks than needed, the connector takes the last ones: the
		// others are supposed to be the local prefix.
		q.Blocks = p.Pull.Blocks[len(p.Pull.Blocks)-need:]
	}
	p.admitted = r.now
	if r.cfg.Network == nil {
		r.after(0, func() { r.pullFailed(p, errors.New("no KV connector")) })
		return false, false
	}
	r.cfg.Network.Pull(r.now, q)
	return false, false
}

// PullDone is the network's answer: the contents of the blocks asked for, or
// an error.
func (r *Rank) PullDone(now Time, id string, contents []cache.Content, err error) {
	r.Advance(now)
	p := r.reqs[id]
	if p == nil || p.state != pulling || p.hung || r.dead {
		return
	}
	need := len(p.blocks) - p.named
	if p.Pull.Offer {
		need = p.external / r.cfg.BlockSize
	}
	if err == nil && len(contents) < need {
		err = fmt.Errorf("%d remote blocks where %d are needed", len(contents), need)
	}
	if err != nil {
		r.pullFailed(p, err)
		r.start()
		return
	}
	for i, id := range p.blocks[p.named : p.named+need] {
		r.cache.SetContent(id, contents[i])
	}
	tokens := p.external
	if p.Pull.Push { // the prefill rank counts what it writes
		r.after(r.scaled(r.cfg.Timing.Transfer(tokens)), func() { r.pulledAll(p) })
		return
	}
	took := r.scaled(r.cfg.Timing.Transfer(tokens))
	// The wire's own time counts too: the transfer has begun at admission.
	wait := max(p.admitted+took-r.now, 0)
	r.stats.Transfers++
	r.stats.TransferBytes += float64(tokens * kvBytesPerToken)
	r.stats.TransferSeconds += (r.now + wait - p.admitted).Seconds()
	r.stats.Descriptors += uint64(need)
	r.after(wait, func() { r.pulledAll(p) })
}

// pulledAll lets a request whose blocks have come go on with its last token.
func (r *Rank) pulledAll(p *request) {
	if r.reqs[p.ID] != p {
		return // aborted meanwhile
	}
	if p.ending != Running {
		r.finish(p, p.ending, nil)
		return
	}
	bs := r.cfg.BlockSize
	p.pulled = true
	p.computed = min(p.cached+p.external, len(p.tokens)-1)
	if p.Pull.Fake {
		// Nothing was transferred: the blocks are what the model would have
		// computed, so that a probe of a lone engine gets a sane answer.
		p.computed = p.named * bs
		r.fold(p, p.named)
		r.compute(p, len(p.tokens)-1)
		p.computed = len(p.tokens) - 1
	} else {
		r.name(p, p.computed/bs)
	}
	r.fold(p, p.computed/bs)
	if p.Pull.Offer {
		r.stats.Local += uint64(len(p.tokens) - p.computed)
	}
	r.requeue(p)
	r.stats.External += uint64(p.external)
}

func (r *Rank) pullFailed(p *request, err error) {
	r.stats.FailedTransfers++
	if p.ending != Running {
		r.finish(p, p.ending, nil)
		return
	}
	p.external = 0
	if !r.cfg.Recompute && !p.Pull.Offer {
		r.finish(p, FinishError, fmt.Errorf("%w: %w", ErrPull, err))
		return
	}
	p.pulled = true
	p.computed = p.named * r.cfg.BlockSize
	r.fold(p, p.named)
	r.stats.Local += uint64(len(p.tokens) - p.computed)
	r.requeue(p)
}

// requeue puts a request that has its blocks at the head of the queue.
func (r *Rank) requeue(p *request) {
	p.state = waiting
	r.waiting = append([]*request{p}, r.waiting...)
}

// beat keeps the remote lease of a request alive until its blocks have come.
func (r *Rank) beat(p *request) {
	if p.Pull.Bootstrap || p.Pull.Push || p.Pull.Offer || p.Pull.Incomplete || r.cfg.Network == nil {
		return
	}
	r.after(r.cfg.Lease/6, func() {
		if r.reqs[p.ID] == p && !p.pulled && p.ending == Running {
			r.cfg.Network.Note(r.now, *p.Pull, NoteBeat)
			r.beat(p)
		}
	})
}

// pin keeps p's blocks for a remote decode until it has pulled them or the
// lease ends.
func (r *Rank) pin(p *request) {
	n := &pin{blocks: p.blocks, until: r.now + r.cfg.Lease, name: p.Transfer}
	if n.name != "" {
		n.until = r.now + SendTime
	}
	r.pinned[p.ID] = n
	r.lease(p.ID, n)
	r.push(baseID(p.ID))
	if n.name != "" {
		r.send()
	}
}

// offerTime is how long offered blocks wait for a decode (vLLM's
// unbound_store_timeout_s), maxOffers how many prompts wait at most; vLLM is bounded by
// the size of the host's memory.
const (
	offerTime = 60 * time.Second
	maxOffers = 1 << 12
)

// offer is the KV of a prompt's full blocks, by their sequence hashes.
type offer struct{ blocks map[uint64]cache.Content }

// Offer keeps the full blocks of a prompt under a name for a decode to take. id is the
// request that has just ended, with its blocks pinned, and seqs are its sequence hashes.
func (r *Rank) Offer(now Time, name, id string, seqs []uint64) {
	r.Advance(now)
	n := r.pinned[id]
	if n == nil || len(r.offers) >= maxOffers {
		return
	}
	o := &offer{make(map[uint64]cache.Content, len(seqs))}
	for i, seq := range seqs[:min(len(seqs), len(n.blocks))] {
		o.blocks[seq] = r.cache.Content(n.blocks[i])
	}
	r.offers[name] = o
	r.after(offerTime, func() {
		if r.offers[name] == o {
			delete(r.offers, name)
		}
	})
}

// ErrNoOffer says that nothing is offered under a name, yet or any more.
var ErrNoOffer = errors.New("nothing is offered under this name")

// ErrOtherBlocks says that what is offered under a name are blocks of another prompt.
var ErrOtherBlocks = errors.New("blocks of another prompt are offered under this name")

// TakeOffer hands offered blocks to a decode, once.
func (r *Rank) TakeOffer(now Time, name string, seqs []uint64) ([]cache.Content, error) {
	r.Advance(now)
	o, ok := r.offers[name]
	if !ok {
		return nil, ErrNoOffer
	}
	delete(r.offers, name)
	out := make([]cache.Content, len(seqs))
	for i, seq := range seqs {
		if out[i], ok = o.blocks[seq]; !ok {
			return nil, ErrOtherBlocks
		}
	}
	return out, nil
}

// registration is a decode that has made room for the KV of a request.
type registration struct {
	want    int
	deliver func([]cache.Content)
}

// maxRegistrations bounds those that wait for their prefill. vLLM has no bound.
const maxRegistrations = 1 << 16

// Register notes that a decode has room for the last want blocks of a request of
// this rank. id is the decode's own; that of the prefill differs from it in the
// last part, which each engine draws. deliver gets the blocks when the request has
// ended, immediately if it has. It must neither block nor call the rank, and is never
// called if no such request ends well, or one with fewer blocks: as in vLLM 0.32,
// the decode waits then until its client leaves.
func (r *Rank) Register(now Time, id string, want int, deliver func([]cache.Content)) error {
	r.Advance(now)
	if len(r.registered) >= maxRegistrations {
		return fmt.Errorf("%d decodes wait for prefills already", len(r.registered))
	}
	r.registered[baseID(id)] = registration{want, deliver}
	r.push(baseID(id))
	return nil
}

// push delivers the blocks of a request that has ended to the decode that waits for
// them, if both are there. Of several with one name it may be any.
func (r *Rank) push(base string) {
	to, ok := r.registered[base]
	if !ok {
		return
	}
	for id, n := range r.pinned {
		if baseID(id) != base {
			continue
		}
		delete(r.registered, base)
		if len(n.blocks) < to.want {
			return
		}
		contents := make([]cache.Content, to.want)
		for i, block := range n.blocks[len(n.blocks)-to.want:] {
			contents[i] = r.cache.Content(block)
		}
		r.stats.Transfers++
		r.stats.TransferBytes += float64(to.want * r.cfg.BlockSize * kvBytesPerToken)
		r.stats.Descriptors += uint64(to.want)
		delete(r.pinned, id)
		r.cache.Release(n.blocks)
		to.deliver(contents)
		return
	}
}

// baseID is a request's id without the part that vLLM draws: a hyphen and eight
// hexadecimal digits at its end.
func baseID(id string) string {
	cut := len(id) - 9
	if cut < 0 || id[cut] != '-' {
		return id
	}
	for _, c := range []byte(id[cut+1:]) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return id
		}
	}
	return id[:cut]
}

func (r *Rank) lease(id string, n *pin) {
	r.after(n.until-r.now, func() {
		switch {
		case r.pinned[id] != n:
		case n.until > r.now: // extended meanwhile
			r.lease(id, n)
		default:
			delete(r.pinned, id)
			r.cache.Release(n.blocks)
			r.stats.Expired++
		}
	})
}

// Read returns the contents of blocks for a remote decode, whatever request has them by now:
// like NIXL it asks for no proof. Only numbers outside the cache are an error.
func (r *Rank) Read(now Time, ids []int) ([]cache.Content, error) {
	r.Advance(now)
	out := make([]cache.Content, len(ids))
	for i, id := range ids {
		if id != 0 && !r.cache.Valid(id) {
			return nil, fmt.Errorf("block %d is not in the cache of %d blocks", id, r.cache.Capacity()+1)
		}
		out[i] = r.cache.Content(id)
	}
	return out, nil
}

// Noted is a decode's message about a pinned request.
func (r *Rank) Noted(now Time, id string, n Note) {
	r.Advance(now)
	p := r.pinned[id]
	switch {
	case n == NoteBeat && p != nil:
		p.until = max(p.until, r.now+r.cfg.Lease*2/3)
	case n == NoteDone && p != nil:
		delete(r.pinned, id)
		r.cache.Release(p.blocks)
		r.start()
	case n == NoteDone:
		r.stats.LateNotes++
	}
}

// loadStore takes further leading blocks of a prompt from the store.
func (r *Rank) loadStore(p *request) {
	if !r.cfg.LoadStore || p.loaded || p.admitted != 0 {
		return
	}
	p.loaded = true
	bs := r.cfg.BlockSize
	last := (len(p.tokens) - 1) / bs
	if last <= p.named {
		return
	}
	contents := r.cfg.Store.Load(p.seqs[:last], p.named)
	if len(contents) == 0 || !r.grow(p, (p.named+len(contents))*bs) {
		return
	}
	for i, c := range contents {
		r.cache.SetContent(p.blocks[p.named+i], c)
	}
	p.external = len(contents) * bs
	p.computed += p.external
	r.fold(p, p.computed/bs)
	r.name(p, p.computed/bs)
}

// saveStore writes the prompt's whole blocks to the store when p has ended.
func (r *Rank) saveStore(p *request) {
	if !r.cfg.SaveStore || p.computed < len(p.Tokens) || p.ending != Running {
		return
	}
	n := (len(p.Tokens) - 1) / r.cfg.BlockSize
	if n == 0 || n > len(p.blocks) {
		return
	}
	contents := make([]cache.Content, n)
	for i, id := range p.blocks[:n] {
		contents[i] = r.cache.Content(id)
	}
	r.cfg.Store.Save(p.seqs[:n], contents)
}
