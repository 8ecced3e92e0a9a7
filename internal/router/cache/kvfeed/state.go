package kvfeed

import "time"

// State is what is known of a rank's entries in the index.
type State string

// The states of a rank. Only in Live are its entries those of the engine as of
// the newest batch that arrived.
const (
	// Connecting: no connection to the publisher.
	Connecting State = "connecting"
	// Live: every batch since the last reset of the rank was applied.
	Live State = "live"
	// InGap: batches are missing and not asked for yet.
	InGap State = "gap"
	// Replaying: missing batches are being fetched.
	Replaying State = "replaying"
	// Verifying: connected again without a replay socket; nothing is known to be
	// missing, and the entries wait for the proof, see prove. An engine that is
	// idle may leave the rank in it for as long.
	Verifying State = "verifying"
	// Stale: no connection for longer than Options.StaleAfter.
	Stale State = "stale"
	// Mute: connected, and nothing has come although the engine computes (see
	// Manager.Mute). Its entries are kept, unused, until its next batch shows whether that
	// was only late.
	Mute State = "mute"
	// Unknown: the rank's blocks cannot be known; its entries were dropped.
	Unknown State = "unknown"
)

// want is what a rank's feed waits for. State is what the rank's entries are worth
// meanwhile.
//
//	            wantConnection ◄────── the connection ends, in any want
//	                  │
//	                  │ attach        (a second publisher: wantOne, until one leaves)
//	    ┌─────────────┼─────────────────┬─────────────────┐
//	    │ replay,     │ replay,         │ no replay,      │ no replay,
//	    │ entries     │ no entries      │ entries that    │ entries dropped,
//	    ▼             ▼                 ▼ can be proven   │ or none
//	wantSame ──► wantMissed         wantProof             │
//	                ▲ │                 │                 │
//	   gap, restart,│ │ fetched,        │ proven,         │
//	   orphan       │ │ or given up     │ or dropped      │
//	                │ ▼                 ▼                 │
//	             wantNext ◄───────────────────────────────┘
//	              ▲ │  ▲ │
//	     no more, │ │  │ │ a block that does not fit
//	     or no    │ │  │ ▼
//	     answer   │ │  wantFit (as wantNext otherwise)
//	              │ ▼
//	            wantMore ──► wantMissed, where the replay reaches further back
//
// Without a replay socket a gap or a restart empties the rank, which stays in wantNext.
type want uint8

const (
	// wantConnection: a connection. The state is Connecting, from standing.until on Stale,
	// and Unknown after one that has brought batches of another rank.
	wantConnection want = iota
	// wantOne: one of two publishers must leave. The state is Unknown.
	wantOne
	// wantSame: the batch applied last, from the replay: only the same life of the publisher
	// has it. The state is Replaying. Live batches wait.
	wantSame
	// wantMissed: the batches that are missing, from the replay. The state is Replaying, and
	// before the replay is asked InGap, Unknown, Mute or still Live.
	// Live batches wait.
	wantMissed
	// wantMore: older batches than those that the entries come from, if the replay has
	// them. The state stays as it was. Live batches wait.
	wantMore
	// wantProof: the proof that nothing was missed, see prove; once a batch has come, until
	// standing.until. The state is Verifying. Live batches wait.
	wantProof
	// wantNext: the next batch; at standing.until the replay is queried whether it has one.
	// The state is Live or Mute, and Unknown while such a replay shows a gap.
	wantNext
	// wantFit: blocks that the index can hold. The state is Unknown.
	wantFit
	// wantEnd: nothing any more; the feed has ended.
	wantEnd
)

// fetches reports whether a replay is to bring it.
func (w want) fetches() bool { return w == wantSame || w == wantMissed || w == wantMore }

// holds reports whether live batches wait for it.
func (w want) holds() bool { return w.fetches() || w == wantProof }

// standing is how a rank stands. Only set changes it, but for until: goLive, Mute, the end
// of a replay and each look at the replay move it, too.
type standing struct {
	state  State
	want   want
	reason string    // why, in plain words
	since  time.Time // when the state began
	until  time.Time // when the feed does not wait any longer, see want
}

// set moves the rank to a state, with what it waits for. The caller holds r.mu.
func (r *rank) set(s State, w want, reason string) {
	now := r.m.now()
	if r.state != s {
		r.since = now
		if s == Live {
			r.heard = now
		}
	}
	if r.want != w {
		switch w {
		case wantConnection:
			r.until = now.Add(r.m.o.StaleAfter)
		case wantProof:
			r.until = now.Add(proveWithin)
		default: // wantNext and wantFit: see goLive
		}
	}
	r.state, r.want, r.reason = s, w, reason
	r.publish()
}

// await changes only what the rank waits for, explain only the reason. The caller holds
// r.mu.
func (r *rank) await(w want)          { r.set(r.state, w, r.reason) }
func (r *rank) explain(reason string) { r.set(r.state, r.want, reason) }

// link is the connection in use, and what has happened on it. Every attach begins
// another, so that nothing of the last one is left.
type link struct {
	conn     uint64 // number of the connection, 0 when it has ended
	attached uint64 // number of the attachment; one connection may be attached again
	peer     string
	home     bool      // the peer is on the worker's host
	began    time.Time // when it was attached
	resynced bool      // the rank was started over because of orphans
	gaveUp   bool      // a replay has failed: where nothing was applied, any first batch is taken
	refetch  bool      // wantMore is next, when the budget of replays allows
}

// edge is a fact whose beginning is an event.
type edge bool

// rises sets the fact and reports whether it begins.
func (e *edge) rises(is bool) bool {
	was := bool(*e)
	*e = edge(is)
	return is && !was
}
