package doctor

import (
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// noReplay is the advice for a rank whose engine has no replay endpoint, as
// vLLM's have none unless they are given one.
const noReplay = `give vLLM a replay_endpoint in --kv-events-config, "replay_endpoint":"tcp://*:5657" say, or state it with replay=tcp://…`

// catchesUp is for how long a feed may fetch what it missed, as after a router's
// start, before that is a failure.
const catchesUp = time.Minute

// feeds looks at every rank's KV event feed.
func (e *exam) feeds(ws []admin.Worker) {
	followed, fine := 0, 0
	for _, w := range ws {
		if e.down[w.Name] || w.Role == "prefill" && !w.Usable {
			continue
		}
		some := false
		for _, r := range w.Ranks {
			some = some || r.Feed.State != "none"
		}
		for _, r := range w.Ranks {
			f := r.Feed
			switch {
			case f.State == "none" && some:
				e.add("events", r.Label, Fail, "no event feed, though other ranks of the worker have one", "each rank publishes on a port of its own: give events=… for every rank")
				continue
			case f.State == "none":
				e.add("events", r.Label, Warn, "no KV events: the router predicts what this rank holds", "start the engine with --kv-events-config, or give events=tcp://…")
				continue
			}
			followed++
			switch {
			case f.State == "verifying":
				e.add("events", r.Label, Warn, "nothing is known to be missing, and the index does not use its entries until that is proven: "+orNone(f.Reason), noReplay)
			case (f.State == "replaying" || f.State == "gap") && time.Since(f.Since) < catchesUp:
				e.add("events", r.Label, Skip, "it is still being brought up to date: "+orNone(f.Reason), "run doctor again in a moment")
			case f.State == "mute": // reported by troubles
			case f.HashDiffers:
				e.add("events", r.Label, Fail, "the engine names its blocks otherwise than the worker states: only what its events say counts", "state the engine's --prefix-caching-hash-algo as kv_hash, its PYTHONHASHSEED as kv_hash_seed, and its smallest block as block_size")
			case !f.Trusted:
				e.add("events", r.Label, Fail, fmt.Sprintf("the index does not trust the feed: %s (%s)", f.State, orNone(f.Reason)), "")
			case f.RankDisagree > 0:
				e.add("layout", r.Label, Fail, fmt.Sprintf("%d batches of its events claim to be of another rank of the deployment than %d", f.RankDisagree, w.DPStart+r.DP), "state dp_start=N, the place of the engine's first rank in its deployment, and the events of its own ports: what is known of the rank's cache may be another one's")
			case f.Gaps > 0 && f.Lost > 0:
				e.add("events", r.Label, Warn, fmt.Sprintf("%d gaps, %d batches lost for good, %d replayed", f.Gaps, f.Lost, f.Replayed), "raise the engine's buffer_steps, or give it a replay endpoint")
			case f.Errors > 0:
				e.add("events", r.Label, Warn, fmt.Sprintf("%d messages could not be read", f.Errors), "is the engine's version one that dynctl knows?")
			case f.Orphans > 0:
				e.add("events", r.Label, Warn, fmt.Sprintf("%d blocks came without their parent", f.Orphans), "events were lost before the router began to follow; a replay endpoint brings them back")
			case f.Replay == nil:
				e.add("events", r.Label, Warn, "live, but whether its engine has a replay endpoint is unknown: a recording does not say", "examine the router itself to learn whether a lost batch can be fetched again")
			case f.Dropped > 0 && *f.Replay == "":
				e.add("events", r.Label, Warn, fmt.Sprintf("its entries were dropped %d times since the start (now: %s), and no replay brings them back", f.Dropped, orNone(f.Reason)), noReplay)
			case *f.Replay == "":
				e.add("events", r.Label, Warn, "fragile: live, but its engine has no replay endpoint: a lost batch costs all that is known of its cache, and so does a lost connection unless the engine's metrics and its next batch prove that nothing was missed", noReplay)
			default:
				fine++
			}
		}
	}
	if followed > 0 && fine == followed {
		e.add("events", "engines", OK, count(followed, "feed")+" live and trusted, no gap", "")
	}
}
