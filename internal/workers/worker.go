// Package workers is the fleet as the router sees it: which engine processes
// exist, what each one is, how many data-parallel ranks it has, how it feels
// and what it says of its own load.
//
// A Worker is an immutable description; everything that changes with time
// (health, drain, load) lives in the State and Rank values that a Worker
// points to and that survive a change of its description. Readers take a
// Snapshot, which never changes under them.
package workers

import (
	"cmp"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unique"
)

// Engine is the serving program behind a worker.
type Engine string

// The engines that dynctl knows. Sim is dynctl's own simulated engine; it
// speaks the wire of one of the others, which its Dialect names.
const (
	VLLM   Engine = "vllm"
	SGLang Engine = "sglang"
	TRTLLM Engine = "trtllm"
	Sim    Engine = "sim"
)

// Role says which phase of a request a worker may run.
type Role string

// The roles of a worker.
const (
	Prefill    Role = "prefill"
	Decode     Role = "decode"
	Aggregated Role = "aggregated"
	// Either is for a worker that takes part in transfers on both sides: it can
	// prefill for another one, and decode what another one has prefilled.
	Either Role = "either"
)

// Roles lists every role, in the order of the documentation.
func Roles() []Role { return []Role{Prefill, Decode, Aggregated, Either} }

// CanPrefill reports whether the role may run a remote prefill leg. An
// aggregated worker prefills only what it decodes itself.
func (r Role) CanPrefill() bool { return r == Prefill || r == Either }

// CanDecode reports whether the role may answer a client.
func (r Role) CanDecode() bool { return r == Decode || r == Aggregated || r == Either }

// Connector is the way in which KV blocks move from a prefill to a decode
// worker.
type Connector string

// The connectors that a worker can be set to. ConnectorNone stands for a
// worker that takes no part in a transfer.
const (
	ConnectorNone       Connector = ""
	ConnectorNIXL       Connector = "nixl"
	ConnectorNIXLPush   Connector = "nixl-push"
	ConnectorOffloadP2P Connector = "offload-p2p"
	// ConnectorNIXLOffload is vLLM's MultiConnector with NIXL before an offloading
	// connector that has a peer-to-peer tier.
	ConnectorNIXLOffload Connector = "nixl-offload-p2p"
	// ConnectorMooncake is vLLM's MooncakeConnector, alone or in a MultiConnector before stores.
	ConnectorMooncake      Connector = "mooncake"
	ConnectorSGLang        Connector = "sglang"
	ConnectorLMCache       Connector = "lmcache"
	ConnectorSharedStorage Connector = "shared-storage"
)

// Connectors lists every connector, in the order of the documentation.
func Connectors() []Connector {
	return []Connector{ConnectorNIXL, ConnectorNIXLPush, ConnectorOffloadP2P, ConnectorNIXLOffload, ConnectorMooncake, ConnectorSGLang, ConnectorLMCache, ConnectorSharedStorage}
}

// Reported is the connector by which engines with c report their transfers: NIXL for all that
// transfer over it, none where no series shows it.
func (c Connector) Reported() Connector {
	switch c {
	case ConnectorNIXL, ConnectorNIXLPush, ConnectorNIXLOffload:
		return ConnectorNIXL
	case ConnectorMooncake:
		return ConnectorMooncake
	default:
		return ConnectorNone
	}
}

// nixlVersions are NIXL_CONNECTOR_VERSION of vLLM's releases.
var nixlVersions = map[string]int{"0.32": 14, "0.33": 15}

// HandshakeDiffers is why the handshake of NIXL between two vLLM engines fails, "" where
// nothing that they report is known to make it fail. The engines compare a hash of the whole
// version, the connector's version, the model and the type of the cache
// (compute_nixl_compatibility_hash, vLLM 0.33), unless enforce_handshake_compat is off.
func HandshakeDiffers(a, b *Worker) string {
	switch {
	case a.WireEngine() != VLLM || b.WireEngine() != VLLM:
		return ""
	case a.Version != "" && b.Version != "" && a.Version != b.Version:
		text := "vLLM " + a.Version + " and " + b.Version
		if x, y := a.nixlVersion(), b.nixlVersion(); x != y && x > 0 && y > 0 {
			text += fmt.Sprintf(" (connector versions %d and %d)", x, y)
		}
		return text
	case a.CacheType != "" && b.CacheType != "" && a.CacheType != b.CacheType:
		return "cache_dtype " + a.CacheType + " and " + b.CacheType
	}
	return ""
}

// nixlVersion is that of the worker's release, 0 when not known.
func (w *Worker) nixlVersion() int {
	first, rest, _ := strings.Cut(strings.TrimPrefix(w.Version, "v"), ".")
	second, _, _ := strings.Cut(rest, ".")
	return nixlVersions[first+"."+second]
}

// KVHashes are the algorithms by which an engine may name blocks, in the words of vLLM's
// --prefix-caching-hash-algo. The xxhash ones need a seed: vLLM draws one without
// PYTHONHASHSEED.
func KVHashes() []string { return []string{"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"} }

// HybridDefect says what is known to go wrong where a model with several cache groups
// moves them over NIXL.
const HybridDefect = "vLLM has an open defect there: corrupted tokens with HTTP 200 (vllm-project/vllm#52234)"

// KVCopies says how often a block counts that a worker's events store again.
type KVCopies string

// How copies count.
const (
	// CopiesCounted counts every store as a copy, whose removal is an event of its own.
	// It is the default.
	CopiesCounted KVCopies = "counted"
	// CopiesSingle takes the first removal for the end: for engines whose requests
	// ask for hits to be reported as stores.
	CopiesSingle KVCopies = "single"
)

// LastBlock says what an engine does with the last block of a prefix that it has
// cached.
type LastBlock string

// What becomes of the last block. It is recomputed where the engine drafts with
// EAGLE, MTP or the like, which need what the model makes of it.
const (
	LastBlockKept    LastBlock = "kept"
	LastBlockDropped LastBlock = "dropped"
)

// LB says who shares the requests among the data-parallel ranks of a deployment, and
// so which of them answer behind one port.
type LB string

// The layouts, by vLLM's words. In all of them an engine counts the ranks behind its
// port from 0 in requests, and all else (events, metrics, side channels) by their
// place in the deployment.
const (
	// LBInternal: all ranks behind one port.
	LBInternal LB = "internal"
	// LBHybrid: a port for each node, for the ranks there.
	LBHybrid LB = "hybrid"
	// LBExternal: a port for each rank.
	LBExternal LB = "external"
)

// TransferCheck says what happens to a prefill worker's transfer parameters that have an
// unexpected part.
type TransferCheck string

// The checks. TransferReport lets pass, and reports, what does no harm to the
// decode engines that are known; what would make one exit, hang or mix texts is
// refused by both.
const (
	TransferStrict TransferCheck = "strict"
	TransferReport TransferCheck = "report"
)

// EventSource is where the KV-cache events of one rank come from.
type EventSource struct {
	// DP is the data-parallel rank that publishes here.
	DP int
	// Endpoint is the ZeroMQ endpoint of the PUB socket, as the router
	// reaches it ("tcp://10.0.0.1:5557"), or, when Bind is set, the one on
	// which the router listens for publishers.
	Endpoint string
	// Replay is the ROUTER endpoint that replays old batches; empty if none.
	Replay string
	// Topic is the subscription prefix; empty for everything.
	Topic string
	// Bind says that the publisher dials and the router listens.
	Bind bool
}

// Bootstrap is where decode engines meet a prefill worker: the rendezvous server of an
// SGLang engine, or the first rank's port of a vLLM's peer-to-peer tier.
type Bootstrap struct {
	Host string
	Port int
}

// LMCacheDecoder is the receiver of one decode worker in LMCache's
// prefill/decode mode ("disagg_spec"): lists hold one entry per TP rank.
type LMCacheDecoder struct {
	Host       string
	InitPorts  []int
	AllocPorts []int
}

// Worker describes one engine process with one base URL. It is immutable: a
// change of anything here makes a new Worker that shares State and Ranks with
// the one before.
type Worker struct {
	// What every decision reads of every worker stands together, in as few lines of
	// the processor's cache as can be: these three, and what Facts begins with.

	State *State
	Ranks []*Rank
	kind  unique.Handle[string] // of [Worker.Like]
	Facts

	// LoRAs are those of Models that are adapters (folded into block hashes).
	LoRAs []string
	// Name is unique in the fleet and appears in headers, metrics and logs.
	Name string
	// URL is the base of the engine's HTTP API, without a trailing slash.
	URL *url.URL
	// DPStart is the place of this worker's first rank in the deployment; 0 when not
	// known.
	DPStart int
	// Several says that the other Models are not known to be names of one model. Then
	// nothing says which one a request without a model means.
	Several bool
	// Labels are free words of the operator ("model=prefill").
	Labels map[string]string
	Events []EventSource
	// APIKey is sent to the engine as bearer token in the place of the
	// client's Authorization header, and with probes; empty to pass the
	// client's header on.
	APIKey string
	// Source says who put the worker here: "flag", "file", "admin", "sim",
	// "kubernetes".
	Source string
	// Origin is the place in the source, such as "workers.yaml:12"; may be empty.
	Origin string
	// Conflict says which stated facts the engine contradicts; empty if none.
	// A worker in conflict is unhealthy for that reason.
	Conflict string
}

// Classify finds out which workers this one is like. It is called again after facts have changed.
func (w *Worker) Classify() {
	f := w.Facts
	// What engines that are set up alike differ in, and what no decision compares.
	f.KVBlocks, f.PoolBlocks, f.Bootstrap, f.LMCache, f.From = 0, 0, nil, nil, nil
	w.kind = unique.Make(fmt.Sprintf("%#v %q", f, w.LoRAs))
}

// Like reports whether another worker is known to differ in no fact by which decisions tell workers
// apart: what holds for a request there, or for KV that moves from or to it, holds for both. It is
// false for nil, and for workers that were not classified.
func (w *Worker) Like(other *Worker) bool {
	return w == other || other != nil && w.kind == other.kind && w.kind != (unique.Handle[string]{})
}

// String is the worker's name.
func (w *Worker) String() string { return w.Name }

// WireEngine is the engine whose wire this worker speaks.
func (w *Worker) WireEngine() Engine {
	if w.Engine == Sim {
		if w.Dialect == "" {
			return VLLM
		}
		return w.Dialect
	}
	return w.Engine
}

// VersionAtLeast reports whether the engine says of itself that it is of this
// version or a later one ("0.32.1.dev3+g…" is of 0.32). An engine that does not
// report its version is of none.
func (w *Worker) VersionAtLeast(major, minor int) bool {
	first, rest, _ := strings.Cut(strings.TrimPrefix(w.Version, "v"), ".")
	second, _, _ := strings.Cut(rest, ".")
	a, errA := strconv.Atoi(first)
	b, errB := strconv.Atoi(second)
	return errA == nil && errB == nil && (a > major || a == major && b >= minor)
}

// ChatDiffers reports whether two workers are known to make other tokens of the
// same chat.
func (w *Worker) ChatDiffers(other *Worker) bool {
	return w.ChatTokens != "" && other.ChatTokens != "" && w.ChatTokens != other.ChatTokens
}

// Serves reports whether the worker answers to a model name. A worker that has
// not reported its models yet serves nothing by name, but everything for "".
func (w *Worker) Serves(model string) bool {
	return model == "" || slices.Contains(w.Models, model)
}

// Rank is the pair (worker, data-parallel rank): the unit of index, load and
// choice. A Rank lives as long as its worker is in the fleet, across changes
// of the worker's description.
type Rank struct {
	// Slot is a small dense number, unique among the ranks of the fleet at any
	// time and reused after the worker has gone.
	Slot uint32
	// Number grows from rank to rank in the order in which they joined: of two
	// that had one slot, the one with the larger number has it now.
	Number uint64
	// Label is "name/dpN", by WorkerName and DP.
	Label string
	DP    int

	load  atomic.Pointer[Load]
	times atomic.Uint64 // bits of a float64

	// What no decision reads stands last, as in a Worker.

	WorkerName string
	push       atomic.Pointer[KVAddress]
	senders    Senders
}

// Times is how many times as long as its peers the rank takes, by what its requests show; 1
// for one that is not slow, as far as is known.
func (r *Rank) Times() float64 { return max(math.Float64frombits(r.times.Load()), 1) }

// SetTimes sets Times.
func (r *Rank) SetTimes(v float64) { r.times.Store(math.Float64bits(v)) }

// KVAddress is where decode engines meet a prefill rank before that has answered: with
// connector nixl-push where it takes their registrations, as an answer of the rank gave it,
// with mooncake its bootstrap server.
type KVAddress struct {
	// EngineID is new with each start of the engine unless it is configured.
	EngineID, Host string
	Port           int
	// TP, PP and DCP are its parallel sizes; 0 with mooncake.
	TP, PP, DCP int
	// Life is when the engine that has EngineID was last seen. It belongs to this address: what
	// an older one had is forgotten with it. It is nil where no transfer needs it.
	Life *Life
}

// KVAddress is the address by which the last transfer went well; nil when none is known.
// It must not be changed.
func (r *Rank) KVAddress() *KVAddress { return r.push.Load() }

// SetKVAddress keeps an address, or forgets it with nil.
func (r *Rank) SetKVAddress(a *KVAddress) { r.push.Store(a) }

// Senders are those of the prefill rank that decode engines may be taking.
func (r *Rank) Senders() *Senders { return &r.senders }

// Senders bounds how many of a prefill engine's senders wait for KV that may never come. vLLM's
// Mooncake connector has twenty, and each waits 480 s for a prefill that failed or was aborted
// after the decode engine had requested its blocks. The zero value has none taken. It is
// safe for concurrent use.
type Senders struct {
	mu    sync.Mutex
	taken int
	until time.Time // a sender is lost before then
}

// Take takes a sender, which [Senders.Free] or [Senders.Lose] gives back. It reports false
// where limit are taken, or one is lost.
func (s *Senders) Take(now time.Time, limit int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken >= limit || now.Before(s.until) {
		return false
	}
	s.taken++
	return true
}

// Free gives a sender back whose KV has come, or that no decode engine takes.
func (s *Senders) Free() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken--
}

// Lose gives a sender back that waits until a time for KV that does not come.
func (s *Senders) Lose(until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken--
	if until.After(s.until) {
		s.until = until
	}
}

// Load is what an engine says of one of its ranks.
type Load struct {
	// Running and Waiting count requests; -1 when not reported. An engine that
	// reports neither these nor KVUsage has no Load at all.
	Running, Waiting int
	// KVUsage is the used share of the KV cache, 0 to 1; NaN when not reported.
	KVUsage float64
	// PrefixQueries and PrefixHits count tokens looked up and found in the
	// prefix cache since the engine's start; NaN when not reported.
	PrefixQueries, PrefixHits float64
	// ExternalHits counts tokens that came over a KV connector; NaN when not reported. Engines
	// that do not count those that came count those that were to come.
	ExternalHits float64
	// Unused says on what ground the rank counts as idle: its engine exports no
	// load series of it yet, and its counters say that it has looked up no
	// prompt since its start. vLLM makes these series with the first request
	// when it has several ranks.
	Unused bool
	// At is when the engine's answer was read.
	At time.Time
	// Asked is when the engine was queried for its counters: they are not older.
	Asked time.Time
	// Process is when the process that counts was started, in Unix seconds; NaN
	// when not reported (vLLM with several ranks). Counters of two processes cannot be compared.
	Process float64
}

// Load is the newest load that the engine reported, or nil when it never did.
func (r *Rank) Load() *Load { return r.load.Load() }

// SetLoad keeps l as the rank's newest load; nil forgets it.
func (r *Rank) SetLoad(l *Load) { r.load.Store(l) }

// UnknownLoad is a Load in which nothing is known.
func UnknownLoad(at time.Time) Load {
	nan := math.NaN()
	return Load{Running: -1, Waiting: -1, KVUsage: nan, PrefixQueries: nan, PrefixHits: nan, ExternalHits: nan, At: at, Process: nan}
}

// Known reports whether the load says anything that a choice can use.
func (l *Load) Known() bool { return l.Running >= 0 || l.Waiting >= 0 || !math.IsNaN(l.KVUsage) }

// Health is what probes and traffic say of a worker.
type Health uint32

// The health states. A worker starts as Unknown and takes traffic only once it
// is Healthy. Ejected is the state of a worker that answers probes but failed
// too many requests; it comes back after a penalty.
const (
	Unknown Health = iota
	Healthy
	Unhealthy
	Ejected
	Asleep
)

var healthNames = [...]string{"unknown", "healthy", "unhealthy", "ejected", "asleep"}

// String is the lower-case name of the state, as in metrics and JSON.
func (h Health) String() string {
	if int(h) < len(healthNames) {
		return healthNames[h]
	}
	return "invalid"
}

// Condition is a worker's health with the reason for it in plain words.
type Condition struct {
	Health Health
	Reason string
	Since  time.Time
	// Silent says that an Unhealthy worker's port takes connections, and that nothing has
	// come from the worker for two probes in a row. Its next sign of life makes it usable.
	Silent bool
}

// State is the part of a worker that changes with time. It is safe for
// concurrent use and shared by successive descriptions of the same worker.
//
// Three parties write it, each its own part: the prober the condition, the
// registry the conflict, the outlier detector the ejection. Condition folds
// them into one.
type State struct {
	condition atomic.Pointer[Condition]
	conflict  atomic.Pointer[Condition]
	ejection  atomic.Pointer[Ejection]
	// generation numbers the times between ejections.
	generation atomic.Uint64
	drains     atomic.Uint32 // who keeps new requests away
	answered   atomic.Pointer[time.Time]
	life       Life
}

// Condition is the worker's present health: a conflict comes before what the
// probes say, and an ejection matters only while the probes are content.
func (s *State) Condition() Condition {
	c, e := s.present()
	if e != nil {
		return Condition{Health: Ejected, Reason: e.Reason, Since: e.Since}
	}
	return *c
}

// present is the worker's condition, and the ejection in force in its place if
// there is one. It copies nothing, because every decision asks it of every worker.
func (s *State) present() (*Condition, *Ejection) {
	if c := s.conflict.Load(); c != nil {
		return c, nil
	}
	c := s.probed()
	if c.Silent && s.ejection.Load() == nil {
		// Until the prober has noticed the sign.
		if last := s.life.Last(); last.After(c.Since) {
			return &Condition{Health: Healthy, Since: last}, nil
		}
	}
	if e := s.ejection.Load(); e != nil && c.Health == Healthy && !e.Outlived(*c) {
		return c, e
	}
	return c, nil
}

// Probed is what the probes alone say of the worker.
func (s *State) Probed() Condition { return *s.probed() }

var unprobed = Condition{Health: Unknown, Reason: "not probed yet"}

func (s *State) probed() *Condition { return cmp.Or(s.condition.Load(), &unprobed) }

// SetCondition replaces what the probes say of the worker.
func (s *State) SetCondition(c Condition) { s.condition.Store(&c) }

// setConflict makes the worker unhealthy for a reason that probes cannot heal,
// such as a contradiction or a source that calls it not ready; an empty reason
// takes that back.
func (s *State) setConflict(reason string, now time.Time) {
	old := s.conflict.Load()
	switch {
	case reason == "":
		s.conflict.Store(nil)
	case old == nil || old.Reason != reason:
		s.conflict.Store(&Condition{Health: Unhealthy, Reason: reason, Since: now})
	}
}

// Ejection is the worker's present ejection, or nil.
func (s *State) Ejection() *Ejection { return s.ejection.Load() }

// SetEjection ejects the worker; nil takes it back.
func (s *State) SetEjection(e *Ejection) { s.ejection.Store(e) }

// Generation numbers the times in which the worker is not ejected: how a
// request of an earlier one ends says nothing of the worker as it is now.
func (s *State) Generation() uint64 { return s.generation.Load() }

// SetGeneration begins such a time.
func (s *State) SetGeneration(n uint64) { s.generation.Store(n) }

// SetAnswered says that the worker has answered a probe that was sent at a time.
func (s *State) SetAnswered(sent time.Time) { s.answered.Store(&sent) }

// AnsweredSince reports whether the worker has answered a probe that was sent
// after a time: it has come to what was sent to it before, too.
func (s *State) AnsweredSince(t time.Time) bool {
	sent := s.answered.Load()
	return sent != nil && sent.After(t)
}

// Life is where the worker's signs of life are noted.
func (s *State) Life() *Life { return &s.life }

// Silent reports whether nothing but its silence keeps new requests from the worker: its
// port takes connections, so a request may try it when no other worker is left.
func (s *State) Silent() bool {
	return !s.Draining() && s.conflict.Load() == nil && s.ejection.Load() == nil && s.probed().Silent && !s.life.Last().After(s.probed().Since)
}

// Draining reports whether the worker takes no new requests while it finishes
// the running ones.
func (s *State) Draining() bool { return s.drains.Load() != 0 }

// Leaving reports whether the worker drains because its source has it leave: no
// operator can take that back.
func (s *State) Leaving() bool { return s.drains.Load()&leaving != 0 }

// Moving reports whether the worker's streams are to continue elsewhere, those that can.
func (s *State) Moving() bool { return s.drains.Load()&moving != 0 }

// SetDraining starts or ends an operator's drain.
func (s *State) SetDraining(on bool) {
	s.setDrain(drained, on)
	if !on {
		s.setDrain(moving, false)
	}
}

// SetMoving starts an operator's drain that has streams continue elsewhere.
func (s *State) SetMoving() { s.setDrain(drained|moving, true) }

// Those who drain a worker.
const (
	drained uint32 = 1 << iota
	leaving
	// moving is no one besides drained, but says what becomes of the streams.
	moving
)

func (s *State) setDrain(who uint32, on bool) {
	if on {
		s.drains.Or(who)
	} else {
		s.drains.And(^who)
	}
}

// Usable reports whether new requests may go to the worker, and if not, why.
// An ejected worker whose penalty is over is usable for one trial request.
func (s *State) Usable() (ok bool, reason string) {
	if s.Draining() {
		return false, "draining"
	}
	switch c, e := s.present(); {
	case e != nil && e.trial.Load() != trialOpen:
		return false, "ejected"
	case e != nil || c.Health == Healthy:
		return true, ""
	default:
		return false, c.Health.String()
	}
}

// Ejection is the penalty of a worker that failed too many requests: closed
// until its penalty is over, then open for one trial request at a time.
type Ejection struct {
	// Since and Until bound the penalty.
	Since, Until time.Time
	// Reason says what the worker did.
	Reason string

	trial atomic.Uint32
}

const (
	trialClosed uint32 = iota
	trialOpen
	trialRunning
)

// Outlived reports whether probes have found the worker down and up again since
// it was ejected: what it did before says nothing of what runs now.
func (e *Ejection) Outlived(probed Condition) bool {
	return probed.Health == Healthy && probed.Since.After(e.Since)
}

// OfferTrial ends the penalty: one request may try the worker.
func (e *Ejection) OfferTrial() { e.trial.CompareAndSwap(trialClosed, trialOpen) }

// TakeTrial claims the trial; at most one caller gets it.
func (e *Ejection) TakeTrial() bool { return e.trial.CompareAndSwap(trialOpen, trialRunning) }

// ReturnTrial gives an unused trial back, for another request to take.
func (e *Ejection) ReturnTrial() { e.trial.CompareAndSwap(trialRunning, trialOpen) }

// OnTrial reports whether the penalty is over, the trial open or running.
func (e *Ejection) OnTrial() bool { return e.trial.Load() != trialClosed }

// Room is the most engine blocks that one cache group of a rank can have, 0 when unknown:
// with several groups one of them may fill the pool that they share.
func (w *Worker) Room() int { return max(w.KVBlocks, w.PoolBlocks) }
