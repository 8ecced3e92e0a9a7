// Package serving answers calls. An [Engine] does so: a leg to a worker, a pair of legs, an
// engine that tries other workers until the head of an answer is good. The paths of requests
// differ in what they are composed of.
//
//	local   leg(decode)
//	remote  paired(leg(prefill), leg(decode), transfer)
//	either  retried(planner)
//
// Nothing here knows of the client's connection: a test makes a [Call] and gets an [Answer].
package serving

import (
	"context"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Engine answers calls.
type Engine interface {
	// Do returns an answer whose head is good: of a stream its first token has come. ctx is
	// for all of the answer. The caller closes it.
	Do(ctx context.Context, c *Call) (*Answer, error)
}

// Call is one request to engines. [New] makes one.
type Call struct {
	Details
	View    api.View
	Routing routing.Request

	attempts
	// scratch is the memory of the requests to engines; nil once no further one can follow.
	scratch *scratch
	// next is the call whose answer continues that of this one.
	next *Call
}

// Details is what a call is about.
type Details struct {
	ID    string // X-Request-Id
	Start time.Time
	From  rewrite.Client
	// Path is where legs go, with the query.
	Path     string
	Endpoint *api.Endpoint
	Body     *api.Body // nil for none
	Form     *api.Form // nil unless the body is one
	// Name is the model in the client's words, Model in the engines'.
	Name, Model string
	// Salted says that the view's salt is the router's.
	Salted bool
	Hops   string // the routers that it has passed, this one included
	// Owner is the tenant whose stored responses it may follow, Claim what it is worth in a
	// queue.
	Owner string
	Claim admission.Claim
	// KeyHidden says that keys of clients are for the router, and engines do not get them.
	KeyHidden bool

	// Record is that of the client's request, also in a call for the rest of its answer.
	Record *lifecycle.Record

	// Rest says that the client has a part of the answer: only a stream will do, and it must
	// not begin with a token that a prefill has computed.
	Rest bool
	// WantIDs asks the engine for the ids of its tokens, where it can report them.
	WantIDs bool
	// WantUsage requests the usage of a stream whose client did not, where the engine has
	// stream_options. The caller takes it out of the answer; see [lifecycle.Answer.UsageAdded].
	WantUsage bool
	// Keeps leaves it to the wrapper to drop the input of a stream: it keeps a part of that.
	Keeps bool
	// Idle hears of it while a stream waits: one that the client has a part of, or whose
	// engine sends comments before its first token.
	Idle Idle
	// Pacer, where it is not nil, paces the call: it enters the ranks of a plan before a leg
	// of it is sent, and leaves them when the head of an answer is good.
	Pacer Pacer
}

// Idle hears from time to time that a stream waits, and in a few words for what; its error
// ends the call.
type Idle interface {
	Idle(words string) error
	// Comment hears the comments, whole lines, that an engine sends before its first token.
	// Another attempt may follow.
	Comment(p []byte)
}

// Pacer admits calls to the ranks of a plan, a few at a time.
type Pacer interface {
	Enter(ctx context.Context, r *decide.Run) error
	Leave()
}

var calls = sync.Pool{New: func() any {
	c := new(Call)
	c.Routing.Reset()
	return c
}}

// scratch is memory of the requests of both phases, decode and prefill.
type scratch [2]rewrite.Scratch

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// New is an empty call, which the caller releases.
func New() *Call {
	c := calls.Get().(*Call)
	c.scratch = scratches.Get().(*scratch)
	return c
}

// Release gives the call back with all that it holds. Its answer must be closed.
func (c *Call) Release() {
	c.giveBack()
	c.View.Release()
	if c.Body != nil {
		c.Body.Release()
	}
	c.Routing.Release()
	c.dropScratch()
	if c.next != nil {
		c.next.Release()
	}
	c.next = nil
	c.Details, c.attempts = Details{}, attempts{}
	calls.Put(c)
}

// SetRest makes another call the one that asks for the rest of the answer: it is released
// with this one, in place of the one before it, and the request's record is of it now.
func (c *Call) SetRest(rest *Call) {
	c.Record.Routing = &rest.Routing
	if c.next != nil {
		c.next.Release()
	}
	c.next = rest
}

// DropInput gives back, once the head of a stream has come, what only another attempt would
// need: the request's body, its ids and hashes. While a prefill leg runs beside the stream,
// which may be sending the body, it does nothing; the first piece of the stream that comes
// after the end of that leg does it then.
func (c *Call) DropInput() {
	b := &c.decoding
	if b.drop = b.beside != nil && !b.beside.PrefillEnded(); b.drop {
		return
	}
	q := &c.Routing
	q.Run.Criteria.Facts.TokenIDs, q.Prompt.IDs = nil, nil
	q.ReleaseHashes()
	if c.Body == nil {
		return
	}
	c.Body.Release()
	c.Body = nil
	c.View.Forget()
	c.dropScratch()
}

// dropScratch gives back the memory of requests to engines, if the call has it.
func (c *Call) dropScratch() {
	if c.scratch == nil {
		return
	}
	for i := range c.scratch {
		c.scratch[i].Reset()
	}
	scratches.Put(c.scratch)
	c.scratch = nil
}

// Answer is an answer whose head is good. Its body is read, and then closed.
type Answer struct {
	*upstream.Head
	// Before goes to the client before the body: a first token that a prefill has computed.
	Before []byte
	// Whole is all of the body, where it was read as a whole; the body has no pieces then. Nil
	// for a body in pieces, not for an empty one.
	Whole []byte
	Body
}

// Body is the body of an answer in pieces.
type Body interface {
	// Next is the next piece, valid until another call; io.EOF is the end. Where head is set,
	// no leg in progress has sent the piece now: it is what was held of a leg's stream until
	// its head was good, which the leg has reported, or an end that the router writes.
	Next() (p []byte, head bool, err error)
	// Done says that no further piece comes.
	Done() bool
	// Close ends the answer, and gives back all that was held for it. err is why: nil after
	// its end, else what Next returned, or what came between. It returns what that is to the
	// client.
	Close(err error) error
}
