package router

import (
	"net/http"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// What requests are made of is used again by those that follow. Here it is acquired
// and released; elsewhere everything reads as if it were new. A request holds only
// what it still has a use for: ten thousand streams that wait for a token are to
// cost no more than what they are. Candidates and rankings are package decide's, ids and
// hashes package question's.

var (
	exchanges = sync.Pool{New: func() any {
		x := new(exchange)
		x.d.Reset()
		return x
	}}
	heads = sync.Pool{New: func() any { return new(sse.Head) }}
)

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
	x.d.Release()
	if x.cont != nil {
		x.cont.Release()
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
	x.d.Run.Request.Facts.TokenIDs, x.d.Prompt.IDs = nil, nil
	x.d.ReleaseHashes()
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
