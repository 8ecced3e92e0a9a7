package feed

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// The codes of attention lines, a closed set.
const (
	CodeRouterDown   = "router_down"
	CodeRouterStalls = "router_stalls"
	CodeSchema       = "schema_mismatch"
	CodeDraining     = "draining"
	CodeNoWorker     = "no_worker"
	CodeWorkerDown   = "worker_down"
	CodeNotReady     = "worker_not_ready"
	CodeFeed         = "events_untrusted"
	CodeGap          = "event_gap"
	CodeSaturated    = "rank_saturated"
	CodeBlind        = "no_load_figures"
	CodeForeign      = "foreign_load"
	CodeHotPrefix    = "hot_prefix"
	CodeRecompute    = "silent_recompute"
	CodeFallback     = "fallbacks"
	CodeRetries      = "retry_storm"
	CodeFailures     = "failures"
	CodeRejected     = "rejections"
	CodeQueue        = "admission_queue"
	CodeTokenizer    = "tokenizer_degraded"
	CodeMispredicted = "overlap_mispredicted"
	CodeIndexFull    = "index_full"
	CodeRecorder     = "recorder"
	CodeSlow         = "rank_slow"
	CodeFailing      = "failing"
	CodeMute         = "mute"
	CodeSmallCache   = "small_cache"
	CodeRestarted    = "restarted"
	CodeCold         = "index_cold"
	CodeUnlearned    = "costs_unlearned"
	CodeReason       = "router_reason"
)

// The limits of attention.
const (
	saturatedKV    = 0.90
	saturatedQueue = 4
	blindAfter     = 10 // seconds without load figures
	hotShare       = 0.5
	troubleShare   = 0.05
	maxGroup       = 4 // ranks with the same trouble before one line is for all
	maxAttention   = 100
)

// troubleWords are the words of ranks for what is wrong with their workers.
var troubleWords = map[string]string{CodeFailing: "FAILS", CodeMute: "MUTE", CodeSmallCache: "SMALL"}

// judgeRanks gives every rank its word and severity.
func judgeRanks(ranks []Rank, workers []admin.Worker, lost *coldWatch) {
	byName := make(map[string]*admin.Worker, len(workers))
	for i := range workers {
		byName[workers[i].Name] = &workers[i]
	}
	for i := range ranks {
		k := &ranks[i]
		k.Status, k.Severity = "ok", OK
		w := byName[k.Worker]
		switch {
		case k.Health == "unhealthy":
			k.Status, k.Severity = "DOWN", Error
		case k.Health == "ejected":
			k.Status, k.Severity = "EJECT", Error
		case k.Health == "asleep":
			k.Status, k.Severity = "ASLEEP", Warn
		case w != nil && w.Draining:
			k.Status, k.Severity = "DRAIN", Info
		case k.Health == "unknown":
			k.Status, k.Severity = "NEW", Info
		case !k.Usable:
			k.Status, k.Severity = "HELD", Warn
		case k.Feed.State == "gap":
			k.Status, k.Severity = "GAP", Warn
		case k.Feed.State == "replaying":
			k.Status, k.Severity = "RESYNC", Warn
		case k.Feed.State == "verifying":
			k.Status, k.Severity = "VERIFY", Info
		case k.Feed.State == "stale":
			k.Status, k.Severity = "STALE", Warn
		case k.Feed.State == "mute":
			k.Status, k.Severity = troubleWords[CodeMute], Warn
		case k.Feed.State == "unknown":
			k.Status, k.Severity = "LOST", Warn
		case k.Feed.State == "connecting":
			k.Status, k.Severity = "CONN", Warn
		case k.RecentLost >= 1 || k.RecentDropped >= 1:
			k.Status, k.Severity = "REBLD", Warn // its entries were dropped
		case k.KVUsage() >= saturatedKV:
			k.Status, k.Severity = "FULL", Warn
		case k.Waiting() >= saturatedQueue:
			k.Status, k.Severity = "QUEUE", Warn
		case k.SlowAt() != "":
			k.Status, k.Severity = "SLOW", Warn
		case w != nil && trouble(w, k.Label) != nil:
			k.Status, k.Severity = troubleWords[trouble(w, k.Label).Cause], Warn
		case k.LoadAge > blindAfter || !k.Running().Known() && !k.KVUsage().Known():
			k.Status, k.Severity = "BLIND", Info
		case lost.isCold(k.Label):
			k.Status, k.Severity = "COLD", Warn // most of its entries went, and are not back
		}
		if k.KVUsage().Known() {
			k.Pressure += 100 * k.KVUsage().F()
		}
		if k.Waiting().Known() {
			k.Pressure += 5 * k.Waiting().F()
		}
		k.Pressure += 0.5*float64(k.ActiveRequests) + float64(k.PrefillTokens)/1000
	}
}

// collector gathers attention lines and groups those that say the same of
// many ranks.
type collector struct{ lines []Attention }

func (c *collector) add(sev Severity, code, subject, format string, a ...any) {
	c.lines = append(c.lines, Attention{Severity: sev, Code: code, Subject: subject, Text: fmt.Sprintf(format, a...)})
}

func (c *collector) rank(sev Severity, code string, k *Rank, format string, a ...any) {
	c.add(sev, code, k.Label, format, a...)
	l := &c.lines[len(c.lines)-1]
	l.Rank, l.Worker = k.Label, k.Worker
}

// attention lists what somebody should know, worst first, newest first.
func (b *Builder) attention(r *Router, now time.Time) []Attention {
	c := &collector{}
	switch r.Link {
	case Down:
		known := "the figures below are the last ones known"
		if r.Schema == "" {
			known = "it has not answered yet, so nothing is known of it"
		}
		c.add(Error, CodeRouterDown, "router", "%s; %s, dynctl keeps asking", r.Error, known)
	case Stale, Lag:
		c.add(Warn, CodeRouterStalls, "router", "no answer for %.0f s: the router, or the way to it, stalls", r.AgeSeconds.F())
	}
	if r.Name == "" && r.Schema == "" {
		return b.stamp(c.lines, now)
	}
	if r.Schema != admin.Schema {
		c.add(Warn, CodeSchema, "router", "speaks %q, this dynctl knows %q: figures may be missing; use the same version on both sides", r.Schema, admin.Schema)
	}
	b.attendRouter(c, r)
	attendWorkers(c, r)
	b.attendRanks(c, r)
	b.cold.attend(c, r)
	b.hot.attend(c, r)
	return b.stamp(group(c.lines), now)
}

// attendRouter looks at the traffic as a whole.
func (b *Builder) attendRouter(c *collector, r *Router) {
	t := &r.Derived
	if r.State == "draining" {
		c.add(Warn, CodeDraining, "router", "drains: load balancers leave it out, %.0f running requests may finish", Reported(r, r.Traffic.Inflight).F())
	}
	over := func(n Num, limit float64) bool { return n.Known() && n.F() > limit }
	pct := func(n Num) float64 { return 100 * n.F() }
	if over(t.RecentRecomputes, 0) {
		c.add(Error, CodeRecompute, "traffic", "%.0f request(s) in the last minute were prefilled remotely but the KV did not arrive: the decode engine silently computed the prompt again; check the KV connector on both sides", t.RecentRecomputes.F())
	}
	if over(t.FallbackShare, troubleShare) && t.RecentFallbacks >= 3 {
		c.add(Warn, CodeFallback, "traffic", "%.0f%% of the requests meant for remote prefill fell back to local (%.0f in the last minute): prefill workers fail or are missing", pct(t.FallbackShare), t.RecentFallbacks.F())
	}
	if over(t.RetryShare, 2*troubleShare) && t.RecentRetries >= 5 {
		c.add(Warn, CodeRetries, "traffic", "%.0f retries in the last minute, one for every %.1f requests: workers refuse or break legs", t.RecentRetries.F(), 1/t.RetryShare.F())
	}
	if over(t.RecentFailed, 0) {
		sev := Warn
		if requests := t.RequestRate.F() * 60; !(t.RecentFailed.F() < requests*troubleShare) {
			sev = Error
		}
		c.add(sev, CodeFailures, "traffic", "%.0f request(s) failed in the last minute (5xx or a cut stream); see decisions with the filter status>=500", t.RecentFailed.F())
	}
	if over(t.RejectedRate, 0) && t.RejectedRate.F() > troubleShare*t.RequestRate.F() {
		c.add(Warn, CodeRejected, "traffic", "%.2f requests/s are refused as bad input or over a limit (4xx)", t.RejectedRate.F())
	}
	for i := range r.Queues {
		c.add(Warn, CodeQueue, cmp.Or(r.Queues[i].Model, "traffic"), "%s", r.Queues[i].Text())
	}
	if d := t.PredictedShare - t.HitShare; over(d, 0.10) && t.RequestRate >= 1 {
		c.add(Warn, CodeMispredicted, "index", "the index promised %.0f%% cached prompt tokens, the engines found %.0f%%: caches turn over faster than events arrive, or hashes differ", pct(t.PredictedShare), pct(t.HitShare))
	}
	x := &r.Index
	if over(t.RecentRefused, 0) {
		c.add(Warn, CodeIndexFull, "index", "%.0f blocks did not fit into the index in the last minute: raise index.max_blocks", t.RecentRefused.F())
	} else if full := float64(x.Memberships) / float64(x.MaxBlocks); x.MaxBlocks > 0 && full > 0.95 {
		c.add(Warn, CodeIndexFull, "index", "%.0f%% full (%d of %d entries): raise index.max_blocks", 100*full, x.Memberships, x.MaxBlocks)
	}
	for i := range r.Costs {
		m := &r.Costs[i]
		for k := range m.Unlearned {
			u, sev := &m.Unlearned[k], Warn
			if !u.Overdue {
				continue
			}
			if u.Severity() == eventlog.Info {
				sev = Info
			}
			c.add(sev, CodeUnlearned, m.Model, "%s: %s. To do: %s", u.Effect(), u.Text, u.Advice)
		}
	}
	for _, reason := range r.Reasons {
		switch {
		case strings.HasPrefix(reason, "worker ") || strings.Contains(reason, "rank(s) are routed") || strings.Contains(reason, "the router drains"):
			// Listed with the worker or the rank, below and above.
		case strings.Contains(reason, "computes remotely prefilled prompts again"):
			label, _, _ := strings.Cut(reason, " ")
			c.add(Error, CodeRecompute, label, "computes remotely prefilled prompts again: the KV that was computed for it is not used; check the KV connector on both sides")
			c.lines[len(c.lines)-1].Rank = label
		case strings.HasPrefix(reason, "no worker") || strings.HasPrefix(reason, "no prefill"):
			c.add(Error, CodeNoWorker, "fleet", "%s", reason)
		case strings.Contains(reason, "token"):
			c.add(Warn, CodeTokenizer, "tokenizer", "%s", reason)
		case strings.Contains(reason, "record"):
			c.add(Warn, CodeRecorder, "recorder", "%s", reason)
		default:
			c.add(Warn, CodeReason, "router", "%s", reason)
		}
	}
}

func attendWorkers(c *collector, r *Router) {
	for i := range r.WorkerList {
		w := &r.WorkerList[i]
		ranks := "its rank gets"
		if w.DP > 1 {
			ranks = fmt.Sprintf("its %d ranks get", w.DP)
		}
		because := cmp.Or(w.Reason, "no reason given")
		n := len(c.lines)
		switch {
		case w.Health == "unhealthy":
			c.add(Error, CodeWorkerDown, w.Name, "engine down: %s; %s no requests", because, ranks)
		case w.Health == "ejected":
			c.add(Error, CodeWorkerDown, w.Name, "taken out because too many of its requests failed: %s; %s no requests until its penalty ends", because, ranks)
		case w.Health == "asleep":
			c.add(Warn, CodeNotReady, w.Name, "asleep: %s; %s no requests", because, ranks)
		case w.Draining:
			c.add(Info, CodeDraining, w.Name, "drains: %s no new requests, running ones finish", ranks)
		case w.Conflict != "":
			c.add(Warn, CodeNotReady, w.Name, "held back: %s", w.Conflict)
		case w.Health == "unknown":
			c.add(Info, CodeNotReady, w.Name, "not ready yet: %s", because)
		case !w.Usable:
			c.add(Warn, CodeNotReady, w.Name, "held back: %s", because)
		}
		for _, t := range w.Troubles {
			c.add(Warn, t.Cause, cmp.Or(t.Rank, w.Name), "%s", t.Text)
			c.lines[len(c.lines)-1].Rank = t.Rank
		}
		for j := n; j < len(c.lines); j++ {
			c.lines[j].Worker = w.Name
		}
	}
}

func (b *Builder) attendRanks(c *collector, r *Router) {
	medians := map[string]float64{}
	for _, role := range []string{"prefill", "decode", "aggregated", "either"} {
		medians[role] = median(r.Ranks, role)
	}
	failing := map[string]bool{} // workers that are listed already
	for i := range r.WorkerList {
		w := &r.WorkerList[i]
		failing[w.Name] = slices.ContainsFunc(w.Troubles, func(t admin.Trouble) bool { return t.Cause == CodeFailing })
	}
	for i := range r.Ranks {
		k := &r.Ranks[i]
		if k.Status == "DOWN" || k.Status == "EJECT" || k.Status == "ASLEEP" || k.Status == "NEW" || k.Status == "HELD" {
			continue // listed with the worker
		}
		because := cmp.Or(k.Feed.Reason, "no reason given")
		switch k.Feed.State {
		case "stale":
			c.rank(Warn, CodeFeed, k, "stale: its KV events are cut off (%s); its blocks count as unknown and it is routed by load alone", because)
		case "mute": // listed with the worker: attendWorkers
		case "unknown":
			c.rank(Warn, CodeFeed, k, "unknown cache: %s; its blocks count as unknown and it is routed by load alone", because)
		case "connecting":
			c.rank(Warn, CodeFeed, k, "its KV events are not connected yet (%s); routed by load alone", because)
		case "verifying":
			c.rank(Info, CodeFeed, k, "its KV events are connected again, and nothing is known to be missing (%s); routed by load alone until its next batch", because)
		case "gap", "replaying":
			c.rank(Warn, CodeGap, k, "event gap: batches are missing (%s); it is being brought up to date and routed by load alone meanwhile", because)
		default:
			switch {
			case k.RecentLost >= 1:
				c.rank(Warn, CodeGap, k, "event gap: %.0f in the last minute, and %.0f batches that no replay brought back: its entries were dropped and are rebuilt from new events, until then hits are missed%s", k.RecentGaps.F(), k.RecentLost.F(), b.cold.holds(k.Label))
			case k.RecentDropped >= 1:
				fragile := ""
				if k.Feed.Replay != nil && *k.Feed.Replay == "" {
					fragile = "; its engine has no replay endpoint: a lost batch costs all of them, and so does a lost connection unless its metrics and its next batch prove that nothing was missed"
				}
				c.rank(Warn, CodeFeed, k, "its entries were dropped in the last minute (%s) and are rebuilt from new events, until then hits are missed%s%s", because, b.cold.holds(k.Label), fragile)
			case k.RecentGaps >= 1:
				c.rank(Info, CodeGap, k, "event gap: %.0f in the last minute; %d batches were replayed and %d lost since the start; its view is whole again", k.RecentGaps.F(), k.Feed.Replayed, k.Feed.Lost)
			}
		}
		if k.SlowAt() != "" {
			of := ""
			if k.SlowAt() == "TTFT" {
				of = " for its prompts' lengths"
			}
			past := "and it was faster before"
			if k.Slow.Always {
				past = "and it was hardly faster before"
			}
			c.rank(Warn, CodeSlow, k, "%s%s %s times the median of its peers, %s (ITL %s ms, TTFT %s ms now)", k.SlowAt(), of, tenth(Num(k.Slow.Times)), past, tenth(Figure(k.ITL)), tenth(Figure(k.TTFT)))
		}
		full, queue := k.KVUsage() >= saturatedKV, k.Waiting() >= saturatedQueue
		if full || queue {
			what := "saturated: "
			if full {
				what += fmt.Sprintf("%.0f%% of its KV cache is in use", 100*k.KVUsage().F())
				if m := medians[k.Role]; !math.IsNaN(m) {
					what += fmt.Sprintf(" (median of %s ranks %.0f%%)", k.Role, 100*m)
				}
			}
			if queue {
				if full {
					what += " and "
				}
				what += fmt.Sprintf("%.0f requests wait in the engine", k.Waiting().F())
			}
			if full {
				what += "; it will preempt or queue what comes next"
			} else {
				what += ": it gets more than it can run"
			}
			c.rank(Warn, CodeSaturated, k, "%s", what)
		}
		switch {
		case !k.Running().Known() && !k.KVUsage().Known():
			c.rank(Info, CodeBlind, k, "its engine reports no load figures: routed by the router's own account")
		case k.LoadAge > blindAfter:
			c.rank(Warn, CodeBlind, k, "its load figures are %.0f s old: routed by the router's own account", k.LoadAge.F())
		}
		if k.RequestDiff.Known() && k.RequestDiff.F() >= 8 && k.RequestDiff.F() >= float64(k.ActiveRequests) && k.LoadAge < 5 {
			c.rank(Info, CodeForeign, k, "runs %.0f requests more than this router sent: other routers or clients use it", k.RequestDiff.F())
		}
		if k.RecentFailures.Known() && k.RecentFailures >= 3 && !failing[k.Worker] {
			c.rank(Warn, CodeFailures, k, "%.0f legs failed here in the last minute", k.RecentFailures.F())
		}
	}
}

// tenth is a figure with one digit after the point where that says something.
func tenth(n Num) string {
	switch {
	case !n.Known():
		return "-"
	case n < 9.95:
		return fmt.Sprintf("%.1f", n.F())
	}
	return fmt.Sprintf("%.0f", n.F())
}

// median is that of the KV usage of the ranks of a role.
func median(ranks []Rank, role string) float64 {
	var v []float64
	for i := range ranks {
		if ranks[i].Role == role && ranks[i].KVUsage().Known() {
			v = append(v, ranks[i].KVUsage().F())
		}
	}
	if len(v) == 0 {
		return math.NaN()
	}
	slices.Sort(v)
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// group makes one line of many that say the same of different ranks.
func group(lines []Attention) []Attention {
	count := map[string]int{}
	key := func(a *Attention) string { return fmt.Sprint(a.Code, a.Severity) }
	for i := range lines {
		if lines[i].Rank != "" {
			count[key(&lines[i])]++
		}
	}
	var out []Attention
	done := map[string]bool{}
	for i := range lines {
		k := key(&lines[i])
		if lines[i].Rank == "" || count[k] <= maxGroup {
			out = append(out, lines[i])
			continue
		}
		if !done[k] {
			done[k] = true
			a := lines[i]
			a.Text = fmt.Sprintf("and %d more: %s", count[k]-1, a.Text)
			out = append(out, a)
		}
	}
	return out
}

// stamp sorts the lines and says since when each is there.
func (b *Builder) stamp(lines []Attention, now time.Time) []Attention {
	live := make(map[string]bool, len(lines))
	for i := range lines {
		k := lines[i].Code + " " + lines[i].Subject
		live[k] = true
		if b.seen[k].IsZero() {
			b.seen[k] = now
		}
		lines[i].Since = b.seen[k]
	}
	maps.DeleteFunc(b.seen, func(k string, _ time.Time) bool { return !live[k] })
	slices.SortStableFunc(lines, func(x, y Attention) int {
		if x.Severity != y.Severity {
			return int(y.Severity - x.Severity)
		}
		if d := weight(x.Code) - weight(y.Code); d != 0 {
			return d
		}
		if d := y.Since.Compare(x.Since); d != 0 {
			return d
		}
		return strings.Compare(x.Code+x.Subject, y.Code+y.Subject)
	})
	if len(lines) > maxAttention {
		lines = lines[:maxAttention]
	}
	if lines == nil {
		lines = []Attention{}
	}
	return lines
}

// weight orders what is equally severe: first what is the cause of much else.
func weight(code string) int {
	for i, c := range [...]string{CodeRouterDown, CodeRouterStalls, CodeNoWorker, CodeWorkerDown, CodeRecompute, CodeFailing, CodeMute, CodeSlow, CodeSmallCache, CodeSaturated, CodeFeed, CodeGap, CodeHotPrefix, CodeFallback, CodeRetries, CodeFailures} {
		if c == code {
			return i
		}
	}
	return 100
}

// hotWatch finds prefixes that take a large part of the lookups.
type hotWatch struct {
	points []hotPoint
	best   admin.IndexNode
	part   Num
	rate   float64
}

type hotPoint struct {
	at    time.Time
	nodes []admin.IndexNode
}

const prefixLimit = 8

func (h *hotWatch) add(nodes []admin.IndexNode, at time.Time) {
	if n := len(h.points); n > 0 && !at.After(h.points[n-1].at) {
		return
	}
	h.points = append(h.points, hotPoint{at, nodes})
	for len(h.points) > 2 && at.Sub(h.points[1].at) >= rateWindow || len(h.points) > maxSamples {
		h.points = slices.Delete(h.points, 0, 1)
	}
	h.part = Unknown
	if len(h.points) < 2 {
		return
	}
	was := &h.points[0]
	before := make(map[string]uint64, len(was.nodes))
	floor := uint64(0) // a node that was not among them had no more hits than that
	if len(was.nodes) >= prefixLimit {
		floor = was.nodes[len(was.nodes)-1].Hits
	}
	for i := range was.nodes {
		before[was.nodes[i].ID] = was.nodes[i].Hits
	}
	total, most := uint64(0), uint64(0)
	for i := range nodes {
		from, ok := before[nodes[i].ID]
		if !ok {
			from = min(floor, nodes[i].Hits)
		}
		if nodes[i].Hits < from {
			continue // the run was replaced
		}
		d := nodes[i].Hits - from
		total += d
		if d > most {
			most = d
			h.best = nodes[i]
		}
	}
	if most == 0 {
		return
	}
	h.rate = float64(most) / at.Sub(was.at).Seconds()
	h.part = Num(float64(most) / float64(total))
}

func (h *hotWatch) share() Num {
	if len(h.points) < 2 {
		return Unknown
	}
	return h.part
}

func (h *hotWatch) name() string {
	if len(h.points) < 2 || !h.part.Known() {
		return ""
	}
	return Short(h.best.Local)
}

// Short is the head of a hash that the screen shows.
func Short(hash string) string {
	if len(hash) > 8 {
		return hash[:8]
	}
	return hash
}

func (h *hotWatch) attend(c *collector, r *Router) {
	if len(h.points) < 2 || !h.part.Known() || h.rate < 1 {
		return
	}
	part := h.part.F()
	// Only a part of all lookups find anything; what counts is the part of
	// all of them.
	if l := r.LookupRate; l.Known() && l.F() > 0 {
		part = math.Min(part, h.rate/l.F())
	}
	if part < hotShare {
		return
	}
	n := &h.best
	sev, where := Info, fmt.Sprintf("held by %d of %d ranks", n.Ranks, len(r.Ranks))
	for i := range r.Ranks {
		k := &r.Ranks[i]
		if n.Ranks*4 <= len(r.Ranks) && slices.Contains(n.RankLabels, k.Label) && (k.KVUsage() > 0.8 || k.Waiting() >= 1) {
			sev = Warn
			where += fmt.Sprintf(", and %s is loaded (kv %.0f%%, %.0f waiting)", k.Label, 100*max(k.KVUsage().F(), 0), max(k.Waiting().F(), 0))
			break
		}
	}
	// The index knows in which run a lookup ended, not how far it came in it.
	c.add(sev, CodeHotPrefix, Short(n.Local), "hot prefix: %.0f%% of lookups (%.1f/s) share a prefix of up to %d tokens; %s",
		100*part, h.rate, n.LengthBlocks*max(r.BlockSizeTokens, 1), where)
}
