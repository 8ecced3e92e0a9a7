package sse

import (
	"bytes"
	"cmp"
	"sync"
	"time"
)

// Verdict says what is to be done with a stream whose head is held.
type Verdict uint8

// The verdicts.
const (
	// Hold: neither content nor an error has come yet; read on.
	Hold Verdict = iota
	// Forward: content has come, or as much was held as is allowed; send what
	// is held and forward the rest as it arrives.
	Forward
	// Failed: an error event came before any content. Nothing was sent, so
	// that the request can still be tried in another way.
	Failed
)

// DefaultHeadBytes is how many bytes a Head holds unless it says otherwise.
const DefaultHeadBytes = 64 << 10

// headTime is how long a Head holds anything, from the first byte that is held. It is looked
// at when bytes arrive: a role chunk that waits for the first token is not sent alone.
const headTime = 10 * time.Second

// Head holds back the first bytes of a stream until its first token or error
// event: an engine that could not load a prompt's KV blocks answers 200, sends
// the chunk with the role, and only then the error (vLLM 0.32).
type Head struct {
	// Scanner reads along, also after the head.
	Scanner Scanner
	// Gate is for what is sent on of the stream, the head included.
	Gate Gate
	// Usage is in Gate's place where the stream has usage that the client did not request.
	Usage UsageGate
	// MaxBytes bounds what is held; 0 means DefaultHeadBytes.
	MaxBytes int

	held     []byte
	comments []byte // that the last Feed has taken out of held
	at       int    // where the event under way begins in held
	since    time.Time
	out      Verdict
}

var heads = sync.Pool{New: func() any { return new(Head) }}

// AcquireHead is a head for a stream; its owner releases it.
func AcquireHead() *Head { return heads.Get().(*Head) }

// Release gives the head back, with what was held in it.
func (h *Head) Release() {
	h.poison()
	h.Reset()
	heads.Put(h)
}

// Reset makes the head ready for another stream and keeps its memory.
func (h *Head) Reset() {
	h.Scanner.Reset()
	h.Gate.Reset()
	if cap(h.held) > 16<<10 {
		h.held = nil
	}
	h.held, h.comments, h.at, h.since, h.out = h.held[:0], h.comments[:0], 0, time.Time{}, Hold
}

// Held are the bytes that were held back. They are valid until Reset.
func (h *Head) Held() []byte { return h.held }

// Comments are the engine's comments between events that came with the last piece, if the
// verdict on it was Hold: they say that the engine lives, and need not wait for a token. They
// are no longer held, and valid until the next Feed.
func (h *Head) Comments() []byte { return h.comments }

// Feed takes the next piece, which arrived at now, copies it to what is held,
// and decides. It must not be called after another verdict than Hold.
func (h *Head) Feed(p []byte, now time.Time) Verdict {
	maxBytes := cmp.Or(h.MaxBytes, DefaultHeadBytes)
	h.Scanner.Feed(p)
	h.held, h.comments = append(h.held, p...), h.comments[:0]
	switch {
	case h.Scanner.sum.ErrorFirst:
		h.out = Failed
	case h.Scanner.Started(), len(h.held) >= maxBytes:
		h.out = Forward
	default:
		h.takeComments()
		if h.since.IsZero() && len(h.held) > 0 {
			h.since = now
		}
		if len(h.held) > 0 && now.Sub(h.since) >= headTime {
			h.out = Forward
		}
	}
	return h.out
}

// takeComments moves comments between events from what is held to comments.
func (h *Head) takeComments() {
	for {
		next := h.held[h.at:]
		n := comments(next)
		if n == 0 {
			if n = eventEnd(next); n == 0 {
				return
			}
			h.at += n
			continue
		}
		n += blank(next[n:])
		h.comments = append(h.comments, next[:n]...)
		h.held = append(h.held[:h.at], next[n:]...)
	}
}

// blank is the size of the empty line that p begins with.
func blank(p []byte) int {
	switch {
	case bytes.HasPrefix(p, []byte("\n")):
		return 1
	case bytes.HasPrefix(p, []byte("\r\n")):
		return 2
	}
	return 0
}

// eventEnd is the index after the first empty line of p; 0 for none.
func eventEnd(p []byte) (n int) {
	for n < len(p) {
		if k := blank(p[n:]); k > 0 {
			return n + k
		}
		k := bytes.IndexByte(p[n:], '\n')
		if k < 0 {
			return 0
		}
		n += k + 1
	}
	return 0
}

// End is the verdict on a stream that ended while its head was held: nothing
// more will come, so that what is held is all there is. A stream that broke
// off is the caller's to judge.
func (h *Head) End() Verdict {
	h.Scanner.Finish()
	if h.Scanner.sum.ErrorFirst {
		h.out = Failed
	} else {
		h.out = Forward
	}
	return h.out
}
