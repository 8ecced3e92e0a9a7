package doctor

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestTroubles: what the router sees of workers under traffic is named by its cause,
// with what to do; healthy ones are called so only after traffic.
func TestTroubles(t *testing.T) {
	served := admin.Rank{Label: "d0/dp0", Requests: 10, SpeedKnown: true}
	unknown := served
	unknown.SpeedKnown = false
	slow := served
	slow.Slow = &admin.Slow{Figure: "ITL", Times: 9, Since: time.Unix(0, 0)}
	trouble := func(cause, rank string) admin.Worker {
		return admin.Worker{Name: "d0", Ranks: []admin.Rank{served}, Troubles: []admin.Trouble{{Cause: cause, Rank: rank, Text: "text of it"}}}
	}
	for name, c := range map[string]struct {
		worker                admin.Worker
		state                 State
		check, subject, words string
	}{
		"healthy":    {admin.Worker{Ranks: []admin.Rank{served}}, OK, "behaviour", "engines", "none is slower"},
		"no peers":   {admin.Worker{Ranks: []admin.Rank{served, unknown}}, OK, "behaviour", "engines", "1 of 2 ranks have samples enough"},
		"no traffic": {admin.Worker{Ranks: []admin.Rank{{}}}, Skip, "behaviour", "engines", "no requests were sent"},
		"slow":       {admin.Worker{Ranks: []admin.Rank{slow}}, Warn, "slow", "d0/dp0", "ITL 9.0 times the median"},
		"fails":      {trouble("failing", ""), Warn, "failing", "d0", "text of it"},
		"mute":       {trouble("mute", "d0/dp0"), Warn, "mute", "d0/dp0", "text of it"},
		"small":      {trouble("small_cache", ""), Warn, "small_cache", "d0", "text of it"},
	} {
		e := &exam{r: &Report{}}
		e.troubles([]admin.Worker{c.worker})
		want := []Finding{{Check: c.check, Subject: c.subject, State: c.state}}
		if d := cmp.Diff(want, e.r.Findings, cmpopts.IgnoreFields(Finding{}, "Text", "Advice")); d != "" {
			t.Errorf("%s: the findings (-want +got):\n%s", name, d)
			continue
		}
		if f := e.r.Findings[0]; !strings.Contains(f.Text, c.words) || (c.state == Warn) != (f.Advice != "") {
			t.Errorf("%s: %q, advice %q", name, f.Text, f.Advice)
		}
	}
}
