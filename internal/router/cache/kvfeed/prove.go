package kvfeed

import (
	"fmt"
	"math"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
)

// How a rank without a replay socket keeps its entries over a lost connection.
//
// That the next batch has the number after the last is no proof: an engine that
// was restarted counts from 0 and may have come to that very number. That its
// blocks have the same names is none either, where names are made from a fixed
// seed. A batch and the engine's process are dated by the same clock, however: a
// process that was started before the last batch was published, and that answers
// after the connection came back, was there all the while. It must be the one
// that answered before, too, should that clock have been set meanwhile. Engines
// end with the process that answers for them, so the publisher is the same, it
// has numbered every batch, and one that follows the last directly says that
// none was missed.

const (
	// clockSlack is for start times that are computed from the ticks since boot.
	clockSlack = 1.0 // seconds
	// provePause is the pause between looks at the engine's latest answer.
	provePause = 100 * time.Millisecond
	// proveWithin bounds the wait of a batch for the engine's answer.
	proveWithin = 10 * time.Second
)

// provable reports whether there can be a proof: the last batch has a date, and
// the start of the engine's process was known when it came. A publisher that dials
// in proves nothing: it may not be that process. The caller holds r.mu.
func (r *rank) provable() bool {
	if r.m.o.Process == nil || r.src.Bind || math.IsNaN(r.process) {
		return false
	}
	// A date of the far future is one in other units.
	at := r.stream.Published()
	return r.process+clockSlack < at && at < float64(r.m.now().Add(time.Hour).Unix())
}

// prove looks for the proof and keeps the entries, drops them, or leaves them as
// they are. It returns how long it is until the next look. The caller holds r.mu.
func (r *rank) prove(now time.Time) time.Duration {
	started, queried := r.m.o.Process(r.key.Worker, r.key.DP)
	answered := queried.After(r.began)
	next := r.stream.Next()
	switch {
	case answered && started != r.process: // NaN included
		r.disproved("the process of its engine is not the one that published the last batch known")
	case len(r.held) > 0 && r.held[0].seq != next:
		r.disproved(fmt.Sprintf("batch %d came instead of %d", r.held[0].seq, next))
	case answered && len(r.held) > 0:
		r.emit(eventlog.Info, "feed_kept", "%s: connected again with the same process of its engine, and batch %d follows the last: its entries are kept", r.label, next)
		if !r.drain() { // a gap among those that waited
			for _, b := range r.held {
				r.force(b, "there is no replay socket")
			}
			r.release()
		}
		r.goLive()
	case len(r.held) > 0 && now.After(r.until):
		r.disproved("its engine does not report when its process started")
	case answered:
		return r.m.o.VerifyEvery // until a batch comes
	default:
		return provePause
	}
	return 0
}

// disproved drops the entries and goes on with the batches that waited. The
// caller holds r.mu.
func (r *rank) disproved(why string) {
	r.startOver(r.want, lostWithoutReplay+" ("+why+")")
	for _, b := range r.held {
		r.force(b, why)
	}
	r.release()
	r.goLive()
}
