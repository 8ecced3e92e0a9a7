package lifecycle

import (
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Kind is the kind of an [Event].
type Kind uint8

// The kinds of events. Each comment lists the fields of [Event] that are set beside
// Kind and Request; "leg" stands for Leg. Those before Introduced also come from requests
// without a receipt and a routing request.
const (
	Arrived   Kind = iota // the router received the request
	Refused               // the router refuses it before routing: Reason
	Waited                // it waited: Reason (the stage, "queue", "move" or "held"), Took
	Tokenized             // the source of its tokens is known: Reason
	Aborted               // it ends early: Reason (who ended it)
	Ended                 // it has ended, with Request.Outcome: Err (the cause)

	Introduced    // its receipt begins in place of a decision
	Decided       // a decision is made, for each attempt
	Chosen        // the decision's plan is carried out
	Retried       // a leg of another attempt is sent: Phase, Reason
	LegSent       // a leg is about to be sent: leg, Call
	Head          // the head of a leg's answer came: leg, At, Count (the HTTP status)
	Facts         // a prefill's answer was read: leg
	Prefilled     // a prefill's answer was checked: Worker, Count (cache groups), Text (what is odd), Err (why its KV cannot move), At
	FirstToken    // a leg's first token came, for a prefill leg its answer: leg, At
	Streams       // the head of a decode leg's stream came: leg, At
	Runs          // the rest of the stream begins: leg, At
	Piece         // a piece of the stream came: leg, At, Took (the gap before it), Count (its tokens)
	Unkept        // too little is kept of the stream to continue it elsewhere: Text
	LegEnded      // a leg has ended: leg, At, Err, Reason (its outcome)
	Failed        // a worker failed a leg: Phase, Worker, Reason, Err, At
	Continued     // another engine continues the stream: Worker name in Text, Reason, Rank, Count (tokens sent), Dropped, At
	NotContinued  // no engine continues the stream: Reason, Text, At
	RequestFaulty // several engines broke on the request: Text, At
	Noted         // a note for people: Text
	Answered      // it was answered without an error, with Request.Outcome
	Finished      // the receipt closes, with Request.Outcome: Receipt
)

const numberOfKinds = int(Finished) + 1

// Event is one step of a request. It is used again, and what it points to may change, after
// the subscriber returns.
type Event struct {
	Kind    Kind
	Request *Record
	Leg     *LegRecord
	At      time.Time
	Took    time.Duration

	Count, Dropped int
	Phase          route.Phase
	Reason         string // from a closed set, fit for a label of a metric
	Text           string // for people
	Err            error
	Worker         *workers.Worker
	Rank           *workers.Rank

	// Call is the HTTP request of a leg; a subscriber may add headers.
	Call *upstream.Leg
	// Receipt is locked during Answered and Finished: Request.Live must not be used then.
	Receipt *receipt.Receipt
}

// Subscriber handles the kinds of events that it has an entry for. The two legs of a
// request may send events concurrently. Handlers must not block, must not change an event, and
// must keep neither it nor what it points to.
type Subscriber map[Kind]func(*Event)

// Stream passes the events of requests to subscribers.
type Stream struct {
	handlers [numberOfKinds][]func(*Event)
}

// NewStream returns a stream to these subscribers. Each event goes to them in this order,
// one after the other, before the call that reports it returns.
func NewStream(subscribers ...Subscriber) *Stream {
	s := &Stream{}
	for _, sub := range subscribers {
		for kind, handle := range sub {
			s.handlers[kind] = append(s.handlers[kind], handle)
		}
	}
	return s
}

// send passes an event on. A nil stream drops it.
func (s *Stream) send(e *Event) {
	if s == nil {
		return
	}
	handlers := s.handlers[e.Kind]
	if len(handlers) == 0 {
		return
	}
	shared := events.Get().(*Event)
	*shared = *e
	for _, handle := range handlers {
		handle(shared)
	}
	*shared = Event{}
	events.Put(shared)
}

// events is memory for events on their way to subscribers.
var events = sync.Pool{New: func() any { return new(Event) }}
