package feed

import (
	"math"
	"reflect"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// Fold is the row of a worker whose ranks are folded: of the ranks that a filter leaves,
// at least one, in the order of a view. Status and reason are those of the worst rank, KV
// use, TTFT and ITL those of the rank with the greatest, hits the mean by prompt tokens,
// and what can be counted is added up. A figure that some rank does not have is not known
// of all.
func Fold(ranks []*Rank) Rank {
	v := *ranks[0]
	v.Label, v.Folded = v.Worker, len(ranks)
	v.Feed.Endpoint, v.Feed.Replay, v.Feed.LastSeq = "", nil, nil
	v.LifeHit = Unknown // the lengths of its ranks' lives are not known
	found := hits(ranks[0])
	for _, k := range ranks[1:] {
		if k.Severity > v.Severity {
			v.Severity, v.Status, v.Reason = k.Severity, k.Status, k.Reason
		}
		if v.Slow == nil || k.Slow != nil && k.Slow.Times > v.Slow.Times {
			v.Slow = k.Slow
		}
		v.Usable = v.Usable && k.Usable
		v.SpeedKnown = v.SpeedKnown && k.SpeedKnown
		found += hits(k)
		for _, sum := range [][2]*Num{
			{&v.EngineUsed, &k.EngineUsed},
			{&v.PromptRate, &k.PromptRate},
			{&v.ExternalHit, &k.ExternalHit},
			{&v.RequestRate, &k.RequestRate},
			{&v.RecentFailures, &k.RecentFailures},
			{&v.RequestDiff, &k.RequestDiff},
			{&v.BlockDiff, &k.BlockDiff},
			{&v.EventRate, &k.EventRate},
			{&v.BlockRate, &k.BlockRate},
			{&v.RecentGaps, &k.RecentGaps},
			{&v.RecentLost, &k.RecentLost},
			{&v.RecentDropped, &k.RecentDropped},
		} {
			*sum[0] += *sum[1] // NaN stays NaN
		}
		for _, most := range [][2]*Num{{&v.LoadAge, &k.LoadAge}, {&v.FeedAge, &k.FeedAge}} {
			*most[0] = Num(math.Max(most[0].F(), most[1].F())) // NaN stays NaN
		}
		v.FeedFor = Num(math.Min(v.FeedFor.F(), k.FeedFor.F()))
		v.TTFT, v.ITL, v.OutputRate = greater(v.TTFT, k.TTFT), greater(v.ITL, k.ITL), added(v.OutputRate, k.OutputRate)
		v.Engine, v.Moves = foldEngine(v.Engine, k.Engine), foldMoves(v.Moves, k.Moves)
		v.ActiveRequests += k.ActiveRequests
		v.PrefillTokens += k.PrefillTokens
		v.DecodeBlocks += k.DecodeBlocks
		v.IndexBlocks += k.IndexBlocks
		v.IndexRoom = v.Room()
		if v.CapacityBlock > 0 && k.CapacityBlock > 0 {
			v.CapacityBlock += k.CapacityBlock
			v.IndexRoom += k.Room()
		} else {
			v.CapacityBlock, v.IndexRoom = 0, 0 // unknown
		}
		v.Requests += k.Requests
		v.Failures += k.Failures
		foldFeed(&v.Feed, &k.Feed)
	}
	switch {
	case v.PromptRate > 0:
		v.HitShare = found / v.PromptRate
	case len(ranks) > 1:
		v.HitShare = Unknown
	}
	return v
}

// foldFeed adds the feed of a rank to that of a folded row.
func foldFeed(v, k *admin.Feed) {
	if k.State != v.State {
		v.State, v.Reason = "mixed", ""
	}
	v.Trusted = v.Trusted && k.Trusted
	v.TiersReported = v.TiersReported || k.TiersReported
	v.CopiesImplausible = v.CopiesImplausible || k.CopiesImplausible
	v.HashDiffers = v.HashDiffers || k.HashDiffers
	v.Tiers.CPU, v.Tiers.Disk, v.Tiers.Remote = v.Tiers.CPU+k.Tiers.CPU, v.Tiers.Disk+k.Tiers.Disk, v.Tiers.Remote+k.Tiers.Remote
	v.Lag = greater(v.Lag, k.Lag)
	if k.Since.After(v.Since) {
		v.Since = k.Since
	}
	if k.LastAt.Before(v.LastAt) {
		v.LastAt = k.LastAt
	}
	to, from := reflect.ValueOf(v).Elem(), reflect.ValueOf(k).Elem()
	for i := range to.NumField() {
		if f := to.Field(i); f.Kind() == reflect.Uint64 { // all of them are counters
			f.SetUint(f.Uint() + from.Field(i).Uint())
		}
	}
}

// foldEngine adds the figures of a rank's engine to those of a folded row.
func foldEngine(v, k *admin.EngineLoad) *admin.EngineLoad {
	if v == nil || k == nil {
		return nil
	}
	e := &admin.EngineLoad{
		Running: added(v.Running, k.Running), Waiting: added(v.Waiting, k.Waiting), KVUsage: greater(v.KVUsage, k.KVUsage),
		PrefixQueries: added(v.PrefixQueries, k.PrefixQueries), PrefixHits: added(v.PrefixHits, k.PrefixHits), ExternalHits: added(v.ExternalHits, k.ExternalHits),
		Unused: v.Unused && k.Unused, At: v.At,
	}
	if k.At.Before(e.At) {
		e.At = k.At
	}
	return e
}

func foldMoves(v, k *admin.Moves) *admin.Moves {
	if v == nil || k == nil {
		return nil
	}
	return &admin.Moves{Away: v.Away + k.Away, Onto: v.Onto + k.Onto, Waiting: added(v.Waiting, k.Waiting)}
}

// added is the sum of two figures, greater the greater one; nil where one of them is not known.
func added[T int | float64](a, b *T) *T {
	if a == nil || b == nil {
		return nil
	}
	return new(*a + *b)
}

func greater[T int | float64](a, b *T) *T {
	if a == nil || b == nil {
		return nil
	}
	return new(max(*a, *b))
}

// hits are the prompt tokens per second that a rank finds in its cache: none where it has
// no prompts, of which no share is known.
func hits(k *Rank) Num {
	if k.PromptRate == 0 {
		return 0
	}
	return k.PromptRate * k.HitShare
}
