package kvfeed

import (
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// An engine that computes and publishes nothing, although its connection stands, may also
// have evicted blocks. Silence alone does not show that: only those who know what the
// engine was asked can notice.

// Mute reports that the engine of rank id has answered prompts, as why says, and has
// published nothing of them since heard, the rank's Status.Heard. Its entries are not used
// until a batch comes, live or by a replay, which the router requests. They are kept if that
// batch follows the last one and was published before Mute was called: it was late, and
// its number says that none is missing. Otherwise the engine has not published what it did
// meanwhile, and they are dropped. A rank that has been heard from since stays as it is.
func (m *Manager) Mute(id kvindex.Rank, heard time.Time, why string) {
	m.mu.Lock()
	r := m.ranks[id]
	m.mu.Unlock()
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != Live || !r.heard.Equal(heard) {
		return
	}
	_, had := r.stream.Last()
	r.mute = muteState{at: m.now(), why: why, had: had, tryReplay: true}
	r.set(Mute, r.want, why)
	r.emit(eventlog.Warn, "feed_mute", "%s: %s", r.label, why)
	r.until = r.mute.at
	r.poke()
}

// muteState is the silence of an engine that computes.
type muteState struct {
	at        time.Time // when it was found
	why       string    // "" while there is none
	had       bool      // there was a batch before it
	tryReplay bool      // whether a replay has what the connection did not bring
}

// endSilence handles the first batch applied after Mute. The caller holds r.mu.
func (r *rank) endSilence(seq uint64) {
	m := r.mute
	r.mute = muteState{}
	// By this clock, the batch was published no later than its time plus the
	// lag known.
	published := r.stream.Published()
	late := published > 0 && published+r.lag <= float64(m.at.UnixNano())/1e9
	was := fmt.Sprintf("its events come again: batch %d had been published in time, and follows the last one", seq)
	if m.had && !late {
		was = "its events come again, and its engine has published nothing of what it computed meanwhile"
		r.stream.Drop()
		r.dropped(was, false)
	}
	if r.state != Mute {
		return // it is being brought up to date
	}
	reason := r.liveReason()
	if m.had && !late {
		reason = "rebuilding: " + was
	}
	r.set(Live, r.want, reason)
	r.emit(eventlog.Info, "feed_live", "%s: live: %s", r.label, was)
}
