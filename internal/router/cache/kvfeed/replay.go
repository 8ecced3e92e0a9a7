package kvfeed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// maintain does for a rank what takes time: replays, checks for silent loss, and
// noticing that a rank has gone stale.
func (r *rank) maintain(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-timer.C:
		}
		r.mu.Lock()
		attached := r.attached
		replay, next := r.due(r.m.now())
		r.mu.Unlock()
		if replay != nil {
			replay(ctx, attached)
			next = 0
		}
		timer.Reset(next)
	}
}

// due does what the rank needs now, as far as that takes no time. It returns the replay
// to make, nil for none, and how long it is until due must be called again. The caller
// holds r.mu.
func (r *rank) due(now time.Time) (replay func(ctx context.Context, attached uint64), next time.Duration) {
	switch r.want {
	case wantConnection:
		if left := r.until.Sub(now); left > 0 {
			return nil, left
		}
		if r.state != Stale {
			r.set(Stale, wantConnection, fmt.Sprintf("no connection for %v: %s", r.m.o.StaleAfter, r.reason))
			r.emit(eventlog.Error, "feed_stale", "%s: %s", r.label, r.reason)
		}
	case wantSame, wantMissed, wantMore:
		return r.catchUp, 0
	case wantProof:
		return nil, r.prove(now)
	case wantNext, wantFit:
		if r.src.Replay != "" {
			return r.look(now)
		}
	case wantOne, wantEnd:
	}
	return nil, r.m.o.VerifyEvery
}

// look is due for a rank that has a replay socket and misses nothing that it knows of. The
// caller holds r.mu.
func (r *rank) look(now time.Time) (replay func(ctx context.Context, attached uint64), next time.Duration) {
	// Rebuilt from what follows, the rank misses what it held until that is stored
	// again; a replay that reaches further back has it at once. What the index
	// refused comes in no other way: the engine does not store again what it has.
	full := r.stream.Short() && !now.Before(r.nextFull) && r.m.o.Index.HasRoom()
	if r.refetch || full {
		if left := r.untilReplay(now); left > 0 {
			return nil, left
		}
		if r.refetch {
			r.refetch = false
		} else {
			r.nextFull = now.Add(r.m.o.VerifyEvery)
		}
		r.await(wantMore)
		return r.catchUp, 0
	}
	if quiet := r.lastEvent.Add(r.m.o.VerifyEvery); !r.mute.tryReplay && r.until.Before(quiet) && r.lastEvent.After(r.until.Add(-r.m.o.VerifyAfter)) {
		r.until = quiet
	}
	if left := r.until.Sub(now); left > 0 {
		return nil, left
	}
	r.mute.tryReplay, r.until = false, now.Add(r.m.o.VerifyEvery)
	if !r.allow(now) {
		return nil, r.m.o.VerifyEvery
	}
	return r.verify, 0
}

// untilReplay is how long the budget of replays forbids another one. The caller
// holds r.mu.
func (r *rank) untilReplay(now time.Time) time.Duration {
	r.tokens = min(float64(r.m.o.ReplayBurst), r.tokens+now.Sub(r.refilled).Seconds()/r.m.o.ReplayEvery.Seconds())
	r.refilled = now
	if r.tokens >= 1 {
		return 0
	}
	return time.Duration((1-r.tokens)*float64(r.m.o.ReplayEvery)) + time.Millisecond
}

// allow takes from the budget of replays. The caller holds r.mu.
func (r *rank) allow(now time.Time) bool {
	if r.untilReplay(now) > 0 {
		return false
	}
	r.tokens--
	return true
}

// catchUpAttempts bounds the replays in a row; each but one must bring news.
const catchUpAttempts = 16

// catchUp fetches what is missing, applies the live batches that waited and
// goes live. What cannot be fetched is given up.
func (r *rank) catchUp(ctx context.Context, attached uint64) {
	why := ""
	idle := 0       // attempts that brought nothing
	broken := false // the replay socket does not work
	for attempt := range catchUpAttempts {
		r.mu.Lock()
		if !r.current(attached) || !r.want.fetches() {
			r.mu.Unlock()
			return
		}
		if !r.allow(r.m.now()) {
			why = "too many replays in a short time"
			r.mu.Unlock()
			break
		}
		before := r.stream.Next()
		if r.want != wantMore {
			r.set(Replaying, r.want, fmt.Sprintf("asking %s for batches from %d on (attempt %d)", r.src.Replay, before, attempt+1))
		}
		r.n.Replays++
		r.mu.Unlock()

		p, err := r.replay(ctx, attached)

		r.mu.Lock()
		if !r.current(attached) || ctx.Err() != nil {
			r.mu.Unlock()
			return
		}
		if err != nil {
			r.n.ReplayErrors++
			why = err.Error()
		}
		if r.want == wantMore { // it had no more, or did not answer
			if err == nil {
				r.stream.EndShort()
			}
			done := r.drain()
			if done {
				r.endMore()
			} else {
				r.await(wantMissed)
			}
			r.mu.Unlock()
			if done {
				return
			}
			continue
		}
		broken = err != nil
		if p.restarted {
			r.mu.Unlock()
			continue
		}
		if (err == nil || p.joined) && r.drain() {
			r.goLive()
			r.mu.Unlock()
			return
		}
		stuck := r.stream.Next() == before
		r.mu.Unlock()
		if !stuck {
			continue
		}
		if err == nil {
			why = "the replay does not have them"
		}
		if idle++; err != nil || idle > 1 {
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.current(attached) {
		return
	}
	why = cmp.Or(why, "replays do not come to an end")
	if _, had := r.stream.Last(); had && (r.want == wantSame || len(r.held) == 0) {
		// With batches that wait, force says more exactly what is lost.
		r.startOver(r.want, "what was missed cannot be fetched: "+why)
	}
	r.gaveUp = true
	// What was given up for lack of budget can be fetched later; from a socket
	// that does not answer it cannot, and the rank is rebuilt without it.
	r.refetch = !broken
	for _, b := range r.held {
		r.force(b, why)
	}
	r.release()
	r.goLive()
	if r.state == Live && !r.stream.Complete() {
		r.explain("rebuilding, what was missed could not be fetched: " + why)
	}
}

// endMore ends wantMore in the state of before, unless the batches that waited have changed
// whether the rank's blocks fit. The caller holds r.mu.
func (r *rank) endMore() {
	r.until = r.m.now().Add(r.m.o.VerifyAfter)
	switch why := r.stream.Mismatch(); {
	case why != "":
		r.set(Unknown, wantFit, why)
	case r.state == Unknown:
		r.set(Live, wantNext, reasonFits)
	case r.state == Live && r.reason == reasonFull && !r.stream.Short():
		r.set(Live, wantNext, reasonRefused)
	default:
		r.await(wantNext)
	}
}

// drain applies the live batches that waited. It returns false when one does
// not follow; that and the later ones keep waiting. The caller holds r.mu.
func (r *rank) drain() bool {
	for i, b := range r.held {
		v := kvstream.Verdict{Kind: kvstream.Duplicate}
		if !r.stream.Forgotten(b.seq) {
			v = r.stream.Offer(b.seq, b.payload)
		}
		switch v.Kind {
		case kvstream.Apply:
			r.applied(b.seq, b.payload, b.at, false)
			continue
		case kvstream.Duplicate:
			r.n.Duplicates++
			continue
		case kvstream.Restart:
			r.restarted(r.want, fmt.Sprintf("batch %d came again with another content", b.seq))
		case kvstream.Gap:
		}
		for _, done := range r.held[:i] {
			r.heldBytes -= done.size()
			r.m.held.Add(-done.size())
		}
		r.held = r.held[i:]
		return false
	}
	r.release()
	return true
}

// playback is one replay in progress. Its fields are guarded by the rank's mu
// while it runs.
type playback struct {
	from      uint64
	short     bool // as far back is enough: some of the rank's blocks were refused
	batches   int
	bytes     int64
	joined    bool // it reached the live batches that wait
	restarted bool // it showed another life of the publisher
}

var (
	errReplayIdle  = errors.New("the replay socket does not answer in time")
	errReplayTotal = errors.New("the replay takes too long")
	errReplayLimit = errors.New("the replay is larger than the limit")
	errReplayOrder = errors.New("the replay sends older batches than the router requested")
)

// replay asks the replay socket for the newest batch applied and all after it,
// and applies what comes. That first batch proves that the publisher is in the
// same life. In wantMore it asks for all batches there are, and applies them to an
// emptied rank if they begin before those that the rank's entries come from, in
// wantMissed from then on; else nothing has changed at the end. A nil error means that
// the replay ended as it should, or that p says why it was left.
func (r *rank) replay(ctx context.Context, attached uint64) (*playback, error) {
	r.mu.Lock()
	p := &playback{short: r.stream.Short()}
	if last, had := r.stream.Last(); had && r.want != wantMore {
		p.from = last
	}
	src := r.src
	ctx, cancel := context.WithCancelCause(ctx)
	r.cancelReplay = func() { cancel(context.Canceled) }
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.cancelReplay = nil
		r.mu.Unlock()
		cancel(nil)
	}()
	total := time.AfterFunc(r.m.o.ReplayTotal, func() { cancel(errReplayTotal) })
	defer total.Stop()
	idle := time.AfterFunc(r.m.o.ReplayIdle, func() { cancel(errReplayIdle) })
	defer idle.Stop()

	o := r.m.o.Socket
	o.Heartbeat = 0 // the idle limit is the stricter watch
	c, err := zmtp.DialDealer(ctx, src.Replay, o)
	if err != nil {
		return p, fmt.Errorf("replay: %w", err)
	}
	defer c.Close()
	if err := c.Send(kvevent.ReplayRequest(p.from)...); err != nil {
		return p, fmt.Errorf("replay: %w", err)
	}
	var msg zmtp.Message
	for {
		if err := c.Recv(&msg); err != nil {
			return p, fmt.Errorf("replay: %w", err)
		}
		idle.Reset(r.m.o.ReplayIdle)
		seq, payload, end, err := kvevent.ParseReplay(msg.Frames())
		if err != nil {
			return p, fmt.Errorf("replay: %w", err)
		}
		r.mu.Lock()
		done := true
		switch {
		case !r.current(attached):
			err = context.Canceled
		case end:
			if r.want == wantSame {
				// It does not have the batch that it sent before: another life, or
				// one that moved on too far.
				p.restarted = true
				r.restarted(wantMissed, fmt.Sprintf("its replay does not know batch %d", p.from))
			}
		default:
			p.batches++
			p.bytes += int64(msg.Size())
			if p.batches > r.m.o.ReplayBatches || p.bytes > replayBytes {
				err = errReplayLimit
				break
			}
			done, err = r.replayed(p, seq, payload)
		}
		r.mu.Unlock()
		if err != nil || done {
			return p, err
		}
	}
}

// replayed takes one batch of a replay. It returns true when no more is needed.
// The caller holds r.mu.
func (r *rank) replayed(p *playback, seq uint64, payload []byte) (done bool, err error) {
	if r.want == wantMore {
		if base := r.stream.Base(); seq > base || seq == base && !p.short {
			return true, nil
		}
		r.startOver(wantMissed, "fetching again what came damaged, was given up or found no room")
		r.set(Replaying, wantMissed, fmt.Sprintf("%s has the batches from %d on", r.src.Replay, seq))
	}
	if seq < p.from {
		if p.batches > kvstream.Remembered {
			return false, errReplayOrder
		}
		return false, nil // more than asked for
	}
	if r.want == wantSame {
		switch {
		case seq == p.from && r.stream.Holds(seq, payload):
			r.await(wantMissed)
			return r.joins(p), nil
		case seq == p.from:
			p.restarted = true
			r.restarted(wantMissed, fmt.Sprintf("its batch %d is another one", seq))
			return true, nil
		}
		// Kept too few batches to prove anything.
		r.lose(seq, fmt.Sprintf("the replay begins at batch %d", seq))
		r.await(wantMissed)
	}
	if r.stream.Forgotten(seq) {
		return r.joins(p), nil
	}
	v := r.stream.Offer(seq, payload)
	if v.Kind == kvstream.Gap {
		r.lose(seq, fmt.Sprintf("the replay continues with batch %d", seq))
		v = r.stream.Offer(seq, payload)
	}
	switch v.Kind {
	case kvstream.Apply:
		r.n.ReplayedBatches++
		r.applied(seq, payload, r.m.now(), true)
	case kvstream.Restart:
		p.restarted = true
		r.restarted(wantMissed, fmt.Sprintf("its batch %d is another one", seq))
		return true, nil
	case kvstream.Duplicate, kvstream.Gap:
	}
	return r.joins(p), nil
}

// joins reports whether the replay has reached the live batches that wait. The
// caller holds r.mu.
func (r *rank) joins(p *playback) bool {
	p.joined = len(r.held) > 0 && r.stream.Next() >= r.heldFrom
	return p.joined
}

// verify asks the replay of a quiet publisher whether a batch was missed. It
// changes nothing unless there is news.
func (r *rank) verify(ctx context.Context, attached uint64) {
	r.mu.Lock()
	if !r.current(attached) || r.want.holds() {
		r.mu.Unlock()
		return
	}
	r.n.Replays++
	state := r.state
	r.mu.Unlock()
	_, err := r.replay(ctx, attached)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.current(attached) || ctx.Err() != nil {
		return
	}
	if err != nil {
		r.n.ReplayErrors++
	}
	if !r.want.holds() && r.state == Unknown && state != Unknown {
		// A hole in the replay emptied the rank; what followed is in it again.
		r.goLive()
	}
}
