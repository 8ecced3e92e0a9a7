package router

import (
	"net/http"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// What requests are made of is used again by those that follow. Here it is acquired
// and released; elsewhere everything reads as if it were new. A request holds only
// what it still has a use for: ten thousand streams that wait for a token are to
// cost no more than what they are. Candidates and rankings are package decide's.

var (
	exchanges = sync.Pool{New: func() any {
		x := new(exchange)
		x.d.reset()
		return x
	}}
	heads   = sync.Pool{New: func() any { return new(sse.Head) }}
	prompts = sync.Pool{New: func() any { return new(hashed) }}
	answers = sync.Pool{New: func() any { return new(holders) }}
)

// maxKeep bounds the memory that is kept for later requests, in ids and hashes.
const maxKeep = 1 << 18

// acquire makes a request's exchange.
func (r *Router) acquire(w http.ResponseWriter, req *http.Request) *exchange {
	x := exchanges.Get().(*exchange)
	x.r, x.w, x.req, x.start, x.path = r, w, req, time.Now(), "none"
	return x
}

// release gives the exchange back, with all that it holds. Nobody may have it then.
func (x *exchange) release() {
	x.view.Release()
	if x.body != nil {
		x.body.Release()
	}
	x.d.release()
	if x.cont != nil {
		x.r.bodies.Give(x.cont.taken)
	}
	for i := range x.legs {
		x.legs[i].reset()
	}
	x.errand = errand{}
	exchanges.Put(x)
}

// slim gives back, once the head of a stream is sent, what can only be of use
// for another attempt: the request's body, its ids and hashes. No leg may run
// beside the stream.
func (x *exchange) slim() {
	x.d.run.Request.Facts.TokenIDs, x.d.prompt.IDs = nil, nil
	x.d.releaseHashes()
	if x.body != nil {
		x.body.Release()
		x.body = nil
		x.view.Forget()
		for i := range x.legs {
			x.legs[i].reset()
		}
	}
}

// legScratch is what one request to an engine is made of.
type legScratch struct {
	edits []api.Edit
	body  [][]byte
	set   []upstream.HeaderField
	leg   upstream.Leg
}

// scratch is the memory of a phase's request; the legs of one phase follow
// each other.
func (x *exchange) scratch(p selector.Phase) *legScratch {
	if p == selector.Prefill {
		return &x.legs[1]
	}
	return &x.legs[0]
}

func (s *legScratch) reset() {
	clear(s.edits)
	clear(s.body)
	clear(s.set)
	*s = legScratch{edits: s.edits[:0], body: s.body[:0], set: s.set[:0]}
	s.poison()
}

// acquireHead gets memory for the head of a stream.
func acquireHead() *sse.Head { return heads.Get().(*sse.Head) }

// releaseHead gives it back, with what was held in it.
func releaseHead(h *sse.Head) {
	poisonHead(h)
	h.Reset()
	heads.Put(h)
}

// reset makes the question empty. It must hold no memory.
func (d *question) reset() {
	d.run.Begin(decide.Request{})
	d.asking = asking{}
}

// release gives all memory back.
func (d *question) release() {
	d.run.Release()
	d.releaseHashes()
	d.reset()
}

// hashed is the memory of a prompt's ids and hashes. A request has it until no
// further attempt can follow.
type hashed struct {
	ids   []uint32
	views []hashes
	text  kvgroup.Text
}

// acquireHashes gets memory for ids and hashes, unless the question has it.
func (d *question) acquireHashes() {
	if d.hashed == nil {
		d.hashed = prompts.Get().(*hashed)
		d.ids, d.views, d.used = d.hashed.ids[:0], d.hashed.views, 0
	}
}

func (d *question) releaseHashes() {
	m := d.hashed
	if m == nil {
		return
	}
	m.ids, m.views = d.ids, d.views
	if cap(m.ids) > maxKeep {
		m.ids = nil
	}
	for i := range m.views {
		if h := &m.views[i]; cap(h.locals) > maxKeep/4 {
			h.locals, h.seq = nil, nil
		}
	}
	m.text.Forget(maxKeep / 4)
	d.hashed, d.ids, d.views, d.used = nil, nil, nil, 0
	m.poison()
	prompts.Put(m)
}

// holders is the memory of who holds a prompt's blocks, by view. A request has it
// while a decision is made.
type holders struct{ views []overlaps }

// acquireHolders gets memory for the answers about all views.
func (d *question) acquireHolders() {
	d.holders = answers.Get().(*holders)
	for len(d.holders.views) < d.used {
		d.holders.views = append(d.holders.views, overlaps{})
	}
}

func (d *question) releaseHolders() {
	answers.Put(d.holders)
	d.holders = nil
}
