package feed

import "math"

// Fold is the row of a worker whose ranks are folded: of the ranks that a filter leaves,
// at least one, in the order of a view. Status and reason are those of the worst rank, KV
// use, TTFT and ITL those of the rank with the greatest, hits the mean by prompt tokens,
// and what can be counted is added up. A figure that some rank does not have is not known
// of all.
func Fold(ranks []*Rank) Rank {
	v := *ranks[0]
	v.Label, v.Folded = v.Worker, len(ranks)
	v.SlowAt, v.SlowTimes, v.slowAlways = "", Unknown, false
	v.Feed.Endpoint, v.Feed.Replay, v.Feed.LastSeq = "", nil, nil
	v.LifeHit = Unknown // the lengths of its ranks' lives are not known
	found := hits(ranks[0])
	slow := func(k *Rank) {
		if k.SlowAt != "" && !(k.SlowTimes <= v.SlowTimes) {
			v.SlowAt, v.SlowTimes, v.slowAlways = k.SlowAt, k.SlowTimes, k.slowAlways
		}
	}
	slow(ranks[0])
	for _, k := range ranks[1:] {
		slow(k)
		if k.Severity > v.Severity {
			v.Severity, v.Status, v.Reason = k.Severity, k.Status, k.Reason
		}
		v.Usable = v.Usable && k.Usable
		v.SpeedJudged = v.SpeedJudged && k.SpeedJudged
		found += hits(k)
		for _, sum := range [][2]*Num{
			{&v.Running, &k.Running},
			{&v.Waiting, &k.Waiting},
			{&v.EngineUsed, &k.EngineUsed},
			{&v.PromptRate, &k.PromptRate},
			{&v.ExternalHit, &k.ExternalHit},
			{&v.RequestRate, &k.RequestRate},
			{&v.Failures, &k.Failures},
			{&v.OutputRate, &k.OutputRate},
			{&v.Moves.Away, &k.Moves.Away},
			{&v.Moves.Onto, &k.Moves.Onto},
			{&v.Moves.Waiting, &k.Moves.Waiting},
			{&v.RequestDiff, &k.RequestDiff},
			{&v.BlockDiff, &k.BlockDiff},
			{&v.Feed.EventRate, &k.Feed.EventRate},
			{&v.Feed.BlockRate, &k.Feed.BlockRate},
			{&v.Feed.RecentGaps, &k.Feed.RecentGaps},
			{&v.Feed.RecentLost, &k.Feed.RecentLost},
			{&v.Feed.RecentDropped, &k.Feed.RecentDropped},
		} {
			*sum[0] += *sum[1] // NaN stays NaN
		}
		for _, most := range [][2]*Num{
			{&v.KVUsage, &k.KVUsage},
			{&v.TTFT, &k.TTFT},
			{&v.ITL, &k.ITL},
			{&v.LoadAge, &k.LoadAge},
			{&v.Feed.AgeSeconds, &k.Feed.AgeSeconds},
		} {
			*most[0] = Num(math.Max(most[0].F(), most[1].F())) // NaN stays NaN
		}
		v.Feed.SinceSeconds = Num(math.Min(v.Feed.SinceSeconds.F(), k.Feed.SinceSeconds.F()))
		v.Active += k.Active
		v.PrefillTokens += k.PrefillTokens
		v.DecodeBlocks += k.DecodeBlocks
		v.IndexBlocks += k.IndexBlocks
		if v.Capacity > 0 && k.Capacity > 0 {
			v.Capacity += k.Capacity
			v.IndexRoom += k.IndexRoom
		} else {
			v.Capacity, v.IndexRoom = 0, 0 // unknown
		}
		if k.Feed.State != v.Feed.State {
			v.Feed.State, v.Feed.Reason = "mixed", ""
		}
		v.Feed.Trusted = v.Feed.Trusted && k.Feed.Trusted
		v.Feed.Gaps += k.Feed.Gaps
		v.Feed.Replayed += k.Feed.Replayed
		v.Feed.Lost += k.Feed.Lost
		v.Feed.Dropped += k.Feed.Dropped
		v.Feed.Restarts += k.Feed.Restarts
		v.Feed.Errors += k.Feed.Errors
		v.Feed.Orphans += k.Feed.Orphans
		t, u := &v.Feed.Tiers, k.Feed.Tiers
		v.Feed.TiersReported = v.Feed.TiersReported || k.Feed.TiersReported
		v.Feed.CopiesDisbelieved = v.Feed.CopiesDisbelieved || k.Feed.CopiesDisbelieved
		v.Feed.HashDiffers = v.Feed.HashDiffers || k.Feed.HashDiffers
		t.CPU, t.Disk, t.Remote = t.CPU+u.CPU, t.Disk+u.Disk, t.Remote+u.Remote
	}
	switch {
	case v.PromptRate > 0:
		v.HitShare = found / v.PromptRate
	case len(ranks) > 1:
		v.HitShare = Unknown
	}
	return v
}

// hits are the prompt tokens per second that a rank finds in its cache: none where it has
// no prompts, of which no share is known.
func hits(k *Rank) Num {
	if k.PromptRate == 0 {
		return 0
	}
	return k.PromptRate * k.HitShare
}
