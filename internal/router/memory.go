package router

import (
	"net/http"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// The memory of a request is used again by those that follow. Here it is acquired and
// released; elsewhere everything reads as if it were new. A request holds only what it
// still needs, as there may be ten thousand streams that wait for a token. Candidates and
// rankings are package decide's, ids and hashes package question's, the pieces of a leg
// package rewrite's, heads of streams package sse's.

var exchanges = sync.Pool{New: func() any {
	x := new(exchange)
	x.d.Reset()
	return x
}}

// acquire makes a request's exchange.
func (r *Router) acquire(w http.ResponseWriter, req *http.Request) *exchange {
	x := exchanges.Get().(*exchange)
	x.r, x.w, x.req, x.start, x.path = r, w, req, time.Now(), "none"
	return x
}

// release gives the exchange back, with all that it holds. It must not be used then.
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
		x.legs[i].Reset()
	}
	x.perRequest = perRequest{}
	exchanges.Put(x)
}

// releaseInput gives back, once the head of a stream is sent, what only another attempt
// would need: the request's body, its ids and hashes. No leg may run beside the stream.
func (x *exchange) releaseInput() {
	x.d.Run.Request.Facts.TokenIDs, x.d.Prompt.IDs = nil, nil
	x.d.ReleaseHashes()
	if x.body != nil {
		x.body.Release()
		x.body = nil
		x.view.Forget()
		for i := range x.legs {
			x.legs[i].Reset()
		}
	}
}

// scratch is the memory of a phase's request; the legs of one phase follow
// each other.
func (x *exchange) scratch(p selector.Phase) *rewrite.Scratch {
	if p == selector.Prefill {
		return &x.legs[1]
	}
	return &x.legs[0]
}
