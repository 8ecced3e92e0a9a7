package control

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/adminserver"
	"github.com/dynctl/dynctl/internal/router/observe/cause"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/workers"
)

// Configured are what of the configuration is part of the state.
type Configured struct {
	Revision uint64
	// Policy is the one that was set, Prefill and Decode those in force.
	Policy, Prefill, Decode      string
	Threshold                    int // tokens
	Auto                         bool
	ThresholdOn, PrefillFallback string
	Tokenizer                    string
}

// Stages report what State does not read itself. Facts are those of a router.
type Stages interface {
	// Settings are those in force.
	Settings() Configured
	// BlockOf is the block size in tokens in which a worker's blocks are named.
	BlockOf(*workers.Worker) int
	// Counts are the requests that were sent to a rank, and those that failed.
	Counts(*workers.Rank) (requests, failures uint64)
	// Moves are the streams that continued elsewhere, from a rank and on it.
	Moves(*workers.Rank) admin.Moves
	// Speed is how fast a rank answers.
	Speed(*workers.Rank) pace.Speed
	// Wrong is what is wrong with a worker although it answers.
	Wrong(worker string) []cause.Finding
	// Costs are what is known of those of both paths, by model; none where the threshold
	// is not auto.
	Costs() []admin.ModelCosts
	// CostsRefused is how often nothing was learned for want of room.
	CostsRefused() uint64
	// Troubles are further reasons not to be ready.
	Troubles() []string
	// TokenizerRests reports whether a worker is not asked for tokens, because it failed
	// to answer lately.
	TokenizerRests(worker string) bool
	// Recorder is the recording of this process, nil without one.
	Recorder() *admin.Recorder
	// Certificates are those that the router shows.
	Certificates() []Certificate
	// Keys is the number of API keys in force; below 0 where keys play no part.
	Keys() int
	// Kubernetes is what is made of a cluster's pods, nil unless they are looked for.
	Kubernetes() *admin.Kubernetes
	// Replicas are the other routers, nil unless the router shares its load.
	Replicas() *admin.Replicas
	// Drain is nil unless the router drains and takes no more requests.
	Drain() *admin.DrainState
}

// Certificate is one that the router shows.
type Certificate struct {
	// Of is whose it is: "data", "admin", "engines" or "replicas".
	Of      string
	Expires time.Time
}

// State describes a router: its condition, its fleet and its index, as the admin API shows
// them and Prometheus scrapes them. It reads what the stages keep and changes nothing; none of
// its fields may be missing.
type State struct {
	Stages
	Version   string
	Started   time.Time
	Registry  *workers.Registry
	Index     *kvindex.Index
	Predicted *approx.Index
	Feeds     *kvfeed.Manager
	Ledger    *ledger.Ledger
	Limiter   *admission.Limiter
	// RankQueue is where requests wait for a rank.
	RankQueue *admission.Queue
	Bodies    *admission.Memory
	// Legs are the requests to workers in progress.
	Legs *admission.Memory
	// Addresses bounds the connections of clients.
	Addresses *admission.Addresses
	Traffic   *traffic.Traffic
}

// Status is the router at one glance.
func (s *State) Status(now time.Time) admin.Status {
	c := s.Settings()
	snap := s.Registry.Snapshot()
	feeds := s.feedStatus()
	st := admin.Status{
		Schema: admin.Schema, Version: s.Version, Now: now, Started: s.Started,
		ConfigRevision: c.Revision, FleetRevision: snap.Revision, Models: slices.Clone(snap.Models()),
		Policy: c.Policy, PrefillPolicy: c.Prefill, DecodePolicy: c.Decode,
		ThresholdTokens: c.Threshold, ThresholdOn: c.ThresholdOn, PrefillFallback: c.PrefillFallback, ThresholdAuto: c.Auto, Costs: s.Costs(),
		Tokenizer: c.Tokenizer, Runtime: runtimeFigures(), Drain: s.Drain(), Recorder: s.Recorder(),
		Kubernetes: s.Kubernetes(), Replicas: s.Replicas(),
	}
	untrusted, verifying := 0, 0
	for _, w := range snap.Workers {
		st.Workers.Total++
		switch w.Role {
		case workers.Prefill:
			st.Workers.Prefill++
		case workers.Decode:
			st.Workers.Decode++
		case workers.Either:
			st.Workers.Either++
		default:
			st.Workers.Aggregated++
		}
		if ok, _ := w.State.Usable(); ok {
			st.Workers.Usable++
		}
		st.Workers.Ranks += len(w.Ranks)
		if st.BlockSizeTokens == 0 {
			st.BlockSizeTokens = s.BlockOf(w)
		}
		for _, k := range w.Ranks {
			if f, ok := feeds[k.Slot]; ok && !f.Trusted {
				untrusted++
				if f.State == kvfeed.Verifying {
					verifying++
				}
			}
		}
	}
	st.Traffic = s.Traffic.Figures()
	st.Traffic.Inflight, st.Traffic.Queued = s.Limiter.Inflight(), s.queued()
	st.Queues = s.queues(now)
	st.Index = s.indexTotals(untrusted)
	l := s.Ledger.Total()
	st.Ledger = admin.LedgerTotals{Requests: l.Requests, PrefillTokens: int64(l.PrefillTokens), DecodeBlocks: int64(l.DecodeBlocks), Reservations: int64(l.Requests)}
	// That an engine has had nothing to publish since its connection came back is
	// no trouble.
	st.State, st.Reasons = s.condition(snap, untrusted-verifying)
	return st
}

// queued is how many requests wait.
func (s *State) queued() int { return s.Limiter.Queue().Waiting() + s.RankQueue.Waiting() }

// queues are those in which requests wait.
func (s *State) queues(now time.Time) (list []admin.Queue) {
	for _, waiting := range []*admission.Queue{s.Limiter.Queue(), s.RankQueue} {
		for _, q := range waiting.States() {
			list = append(list, Queue(q, now))
		}
	}
	return list
}

// Queue describes a queue.
func Queue(q admission.QueueState, now time.Time) admin.Queue {
	v := admin.Queue{
		Model: q.Queue, High: q.Waiting[0], Normal: q.Waiting[1], Low: q.Waiting[2], Tenants: q.Tenants,
		OldestMS: milliseconds(now.Sub(q.Oldest)),
	}
	if q.Wait >= 0 {
		ms := milliseconds(q.Wait)
		v.WaitMS = &ms
	}
	return v
}

func milliseconds(d time.Duration) float64 { return max(0, float64(d.Microseconds())/1000) }

func (s *State) indexTotals(untrusted int) admin.IndexTotals {
	t := adminserver.IndexTotals(s.Index)
	t.UntrustedRank, t.HitShare = untrusted, s.Traffic.HitShare()
	return t
}

// condition sums the router's state up in a word, with the reasons when it is
// not "ready".
func (s *State) condition(snap *workers.Snapshot, untrusted int) (state string, reasons []string) {
	reasons = []string{}
	decode, prefill, wantPrefill := 0, 0, false
	for _, w := range snap.Workers {
		ok, why := w.State.Usable()
		if !ok {
			c := w.State.Condition()
			if c.Reason != "" && !w.State.Draining() {
				why = c.Reason
			}
			reasons = append(reasons, "worker "+w.Name+" is not usable: "+why)
		}
		wantPrefill = wantPrefill || w.Role.CanPrefill()
		if ok && w.Role.CanDecode() {
			decode++
		}
		if ok && w.Role.CanPrefill() {
			prefill++
		}
	}
	if untrusted > 0 {
		reasons = append(reasons, strconv.Itoa(untrusted)+" rank(s) are routed without cache knowledge because their KV events are not trusted now")
	}
	reasons = append(reasons, s.Troubles()...)
	switch {
	case s.Drain() != nil:
		d := s.Drain()
		why := fmt.Sprintf("the router drains: %d request(s) may finish until %s", d.Inflight, d.Until.Format(time.RFC3339))
		if time.Until(d.Closes) > 0 {
			why += ", new ones are served until " + d.Closes.Format(time.RFC3339)
		}
		return "draining", append(reasons, why)
	case decode == 0:
		if time.Since(s.Started) < 10*time.Second {
			return "starting", append(reasons, "no worker that can decode is ready yet")
		}
		return "degraded", append(reasons, "no worker that can decode is usable")
	case wantPrefill && prefill == 0:
		return "degraded", append(reasons, "no prefill worker is usable")
	case len(reasons) > 0:
		return "degraded", reasons
	}
	return "ready", reasons
}

// Ready reports whether requests can be served, and why not.
func (s *State) Ready() (bool, string) {
	if s.Drain() != nil {
		return false, "draining"
	}
	for _, w := range s.Registry.Snapshot().Workers {
		if ok, _ := w.State.Usable(); ok && w.Role.CanDecode() {
			return true, ""
		}
	}
	return false, "no worker that can decode is usable"
}

// ServeProbe answers /healthz (the process lives) and /health and /readyz (requests can
// be served).
func (s *State) ServeProbe(w http.ResponseWriter, req *http.Request) {
	if ok, why := s.Ready(); !ok && req.URL.Path != "/healthz" {
		http.Error(w, why, http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, "ok\n") // a prober that is gone is no news here
}

func (s *State) feedStatus() map[uint32]kvfeed.Status {
	out := map[uint32]kvfeed.Status{}
	for _, s := range s.Feeds.Status() {
		out[uint32(s.Rank)] = s
	}
	return out
}

// Workers describe the fleet, with its ranks.
func (s *State) Workers(now time.Time) admin.WorkerList {
	snap := s.Registry.Snapshot()
	feeds := s.feedStatus()
	out := make([]admin.Worker, 0, len(snap.Workers))
	for _, w := range snap.Workers {
		c := w.State.Condition()
		usable, why := w.State.Usable()
		a := admin.Worker{
			Name: w.Name, URL: w.URL.String(), Engine: string(w.Engine), Version: w.Version, Role: string(w.Role), Connector: string(w.Connector),
			Models: append([]string{}, w.Models...), LoRAs: w.LoRAs, Labels: w.Labels, DP: len(w.Ranks), LB: string(w.LB), DPStart: w.DPStart, CacheType: w.CacheType, KVCopies: string(w.KVCopies), KVLastBlock: string(w.LastBlock), AttentionChunk: w.AttentionChunk, KVHash: w.KVHash, KVHashSeed: w.KVHashSeed, BlockSizeTokens: w.BlockSize, MaxModelLen: w.MaxModelLen,
			KVBlocks: w.KVBlocks, Revision: w.Revision, Slice: w.Slice, From: from(w), Source: w.Source, Origin: w.Origin, Health: c.Health.String(), Reason: c.Reason, Since: c.Since,
			Draining: w.State.Draining(), Usable: usable, Conflict: w.Conflict, Ranks: make([]admin.Rank, 0, len(w.Ranks)),
		}
		for _, f := range s.Wrong(w.Name) {
			a.Troubles = append(a.Troubles, admin.Trouble{Cause: string(f.Kind), Rank: f.Rank, Text: f.Text, Since: f.Since})
		}
		for _, k := range w.Ranks {
			l := s.Ledger.Load(k)
			requests, failures := s.Counts(k)
			moves := s.Moves(k)
			rank := admin.Rank{
				Label: k.Label, Worker: w.Name, DP: k.DP, Slot: k.Slot, Role: string(w.Role), Health: a.Health, Usable: usable, Reason: why,
				ActiveRequests: l.Requests, PrefillTokens: int64(l.PrefillTokens), DecodeBlocks: int64(l.DecodeBlocks),
				Requests: requests, Failures: failures, Moves: &moves, IndexBlocks: s.resident(k), Feed: admin.Feed{State: "none"}, Engine: engineLoad(k.Load()),
			}
			speed := s.Speed(k)
			rank.SpeedKnown = speed.Judged
			rank.TTFT, rank.ITL, rank.OutputRate = milli(speed.TTFT), milli(speed.ITL), figure(speed.TokensPerSecond)
			if f := speed.Slow; f != nil {
				rank.Slow = &admin.Slow{Figure: f.Figure.String(), Times: f.Times, Since: f.Since, Always: f.Always}
			}
			if w.KVBlocks > 0 && w.BlockSize > 0 {
				rank.CapacityBlock = int64(w.KVBlocks) * int64(w.BlockSize) / int64(s.BlockOf(w))
				rank.IndexRoom = int64(w.Room()) * int64(w.BlockSize) / int64(s.BlockOf(w))
			}
			if f, ok := feeds[k.Slot]; ok {
				rank.Feed = feed(&f)
			}
			a.Ranks = append(a.Ranks, rank)
		}
		out = append(out, a)
	}
	return admin.WorkerList{Schema: admin.Schema, Now: now, Revision: snap.Revision, Workers: out}
}

// from says where the facts of a worker come from, by their names.
func from(w *workers.Worker) map[string]string {
	out := make(map[string]string, len(w.From))
	for f, where := range w.From {
		out[string(f)] = where
	}
	return out
}

// feed is the account of a rank's feed as the admin API shows it.
func feed(f *kvfeed.Status) admin.Feed {
	a := admin.Feed{
		State: string(f.State), Trusted: f.Trusted, Reason: f.Reason, Since: f.Since, Endpoint: f.Endpoint, Replay: &f.Replay, UnknownKinds: f.UnknownKinds, TiersReported: f.TiersReported, Tiers: f.Tiers, CopiesImplausible: f.CopiesImplausible, HashDiffers: f.HashDiffers,
		LastAt: f.LastEvent, Lag: figure(f.LagSeconds),
		Batches: f.Batches, Events: f.Events, Blocks: f.Stored + f.Removed, Gaps: f.Gaps, Replayed: f.ReplayedBatches, Restarts: f.Restarts,
		Errors: f.Unreadable + f.Malformed, Orphans: f.Orphans, Lost: f.Lost, Refused: f.Refused, Dropped: f.Dropped,
		ConnectErrors: f.ConnectErrors, SourceErrors: f.SourceErrors, ReplayErrors: f.ReplayErrors,
		Overrun: f.Overrun, Foreign: f.Foreign, RankDisagree: f.RankDisagree,
		Unindexed: f.Tokenless + f.Misfit + f.Mismatched + f.Crowded,
	}
	a.CacheGroups = adminserver.CacheGroups(f.CacheGroups)
	if f.LastSeq >= 0 {
		a.LastSeq = new(uint64(f.LastSeq))
	}
	return a
}

// IndexStats are the index and each rank's part in it.
func (s *State) IndexStats(now time.Time) admin.IndexStats {
	untrusted := 0
	for _, f := range s.feedStatus() {
		if !f.Trusted {
			untrusted++
		}
	}
	out := admin.IndexStats{Schema: admin.Schema, Now: now, Totals: s.indexTotals(untrusted), Ranks: []admin.IndexRank{}}
	for _, k := range s.Registry.Snapshot().Ranks {
		if x, ok := s.Index.RankStats(kvindex.Rank(k.Slot)); ok {
			out.Ranks = append(out.Ranks, adminserver.IndexRank(&x))
		}
	}
	return out
}

// resident is how many blocks the index says a rank holds.
func (s *State) resident(k *workers.Rank) int64 {
	x, _ := s.Index.RankStats(kvindex.Rank(k.Slot))
	return x.Blocks
}

// figure is nil for one that is not known.
func figure(f float64) *float64 {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return nil
	}
	return &f
}

// milli is a figure in ms of one in seconds.
func milli(seconds float64) *float64 { return figure(1000 * seconds) }

func engineLoad(l *workers.Load) *admin.EngineLoad {
	if l == nil {
		return nil
	}
	count := func(n int) *int {
		if n < 0 {
			return nil
		}
		return &n
	}
	return &admin.EngineLoad{
		Running: count(l.Running), Waiting: count(l.Waiting), KVUsage: figure(l.KVUsage),
		PrefixQueries: figure(l.PrefixQueries), PrefixHits: figure(l.PrefixHits), ExternalHits: figure(l.ExternalHits), Unused: l.Unused, At: l.At,
	}
}
