package workers

import (
	"sync/atomic"
	"time"
)

// lifeStep is how exactly the time of a sign of life is kept. Bytes of many streams would
// otherwise write the same memory for each token.
const lifeStep = 50 * time.Millisecond

// lifeEpoch is what a Life counts from.
var lifeEpoch = time.Now()

// Life is when a worker last showed a sign of life: it answered a probe or another page,
// sent a byte of an answer, or published a batch of KV events. The prober and legs that wait
// for an answer read it. It is safe for concurrent use; the zero value has seen no sign.
type Life struct {
	at atomic.Int64 // nanoseconds after lifeEpoch; 0 for never
}

// Sign notes a sign of life at a time. A nil Life drops it.
func (l *Life) Sign(at time.Time) {
	if l == nil {
		return
	}
	if now, old := int64(at.Sub(lifeEpoch)), l.at.Load(); old == 0 || now-old >= int64(lifeStep) {
		l.at.CompareAndSwap(old, now)
	}
}

// Last is the time of the newest sign, at most 50 ms too early; zero without a sign, and for nil.
func (l *Life) Last() time.Time {
	if l == nil {
		return time.Time{}
	}
	at := l.at.Load()
	if at == 0 {
		return time.Time{}
	}
	return lifeEpoch.Add(time.Duration(at))
}
