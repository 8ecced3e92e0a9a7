package doctor

import (
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestFragileFeeds: a feed that loses everything with its connection is not
// called fine, and one that has is reported.
func TestFragileFeeds(t *testing.T) {
	replay, none := new("tcp://d0:5657"), new("")
	for name, c := range map[string]struct {
		feed  admin.Feed
		state State
		words string
	}{
		"whole":               {admin.Feed{State: "live", Trusted: true, Replay: replay}, OK, "1 feed live"},
		"fragile":             {admin.Feed{State: "live", Trusted: true, Replay: none}, Warn, "and so does a lost connection unless"},
		"waits for its proof": {admin.Feed{State: "verifying", Reason: "connected again"}, Warn, "nothing is known to be missing"},
		"fragile, and lost":   {admin.Feed{State: "live", Trusted: true, Dropped: 3, Replay: none, Reason: "rebuilding: the connection was lost"}, Warn, "dropped 3 times since the start (now: rebuilding: the connection was lost)"},
		"dropped, brought up": {admin.Feed{State: "live", Trusted: true, Dropped: 3, Replay: replay}, OK, "1 feed live"},
		"of a recording":      {admin.Feed{State: "live", Trusted: true, Dropped: 3}, Warn, "replay endpoint is unknown"},
		"still replaying":     {admin.Feed{State: "replaying", Since: time.Now(), Reason: "batches 3 to 9"}, Skip, "still being brought up to date: batches 3 to 9"},
		"replays for ever":    {admin.Feed{State: "replaying", Since: time.Now().Add(-time.Hour)}, Fail, "does not trust"},
		"other names":         {admin.Feed{State: "live", Trusted: true, Replay: replay, HashDiffers: true}, Fail, "names its blocks otherwise"},
		"not trusted":         {admin.Feed{State: "connecting"}, Fail, "does not trust"},
	} {
		e := &exam{r: &Report{}}
		e.feeds([]admin.Worker{{Name: "d0", Role: "decode", Usable: true, Ranks: []admin.Rank{{Label: "d0/dp0", Feed: c.feed}}}})
		if f := e.r.Findings; len(f) != 1 || f[0].State != c.state || !strings.Contains(f[0].Text, c.words) || (c.state == Warn && c.feed.Replay != nil || c.feed.State == "verifying") != strings.Contains(f[0].Advice, "replay_endpoint") {
			t.Errorf("%s: %+v", name, f)
		}
	}
}
