package doctor

import (
	"cmp"
	"fmt"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// advice is what to do about what is wrong with a worker, by its cause.
var advice = map[string]string{
	"failing":     "its log says why; requests are tried again elsewhere where that is possible; dynctl top lists them in decisions",
	"mute":        "restart the engine, or repair the path to its --kv-events-config endpoint; until its events come again it counts as holding nothing and is routed by load alone",
	"small_cache": "compare its share of the memory of its GPU, and what else uses that, with its peers; state hardware that differs in a worker's label hardware",
}

// troubles names the workers that answer and with which something is wrong, as the
// router sees it under its traffic.
func (e *exam) troubles(ws []admin.Worker) {
	bad, served, judged := false, 0, 0
	for _, w := range ws {
		for _, t := range w.Troubles {
			bad = true
			e.add(t.Cause, cmp.Or(t.Rank, w.Name), Warn, t.Text, advice[t.Cause])
		}
		for _, k := range w.Ranks {
			if k.Requests > 0 {
				served++
			}
			if k.SpeedKnown {
				judged++
			}
			if s := k.Slow; s != nil {
				bad = true
				e.add("slow", k.Label, Warn, fmt.Sprintf("%s %.1f times the median of its peers, since %s", s.Figure, s.Times, s.Since.Format("15:04:05")), "compare its GPU's clocks, temperature and neighbours with its peers'")
			}
		}
	}
	switch {
	case bad:
	case served == 0:
		e.add("behaviour", "engines", Skip, "no requests were sent to them yet: whether one is slower, fails more, or publishes less than its peers is seen under traffic", "")
	case judged == served:
		e.add("behaviour", "engines", OK, "under this router's traffic none is slower, fails more, publishes less or holds less than its peers", "")
	default:
		e.add("behaviour", "engines", OK, fmt.Sprintf("under this router's traffic none fails more, publishes less or holds less than its peers; %d of %d ranks have samples enough to see whether they are slow (20, and 20 of peers like them)", judged, served), "")
	}
}
