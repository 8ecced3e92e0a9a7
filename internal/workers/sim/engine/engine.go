// Package engine is the simulated engine as a pure discrete-event model: one
// Rank is one data-parallel rank with its cache and its scheduler.
//
// A Rank never looks at a clock, opens no socket and starts no goroutine.
// Its owner passes the time with every call, asks it with Next when
// something will happen, and calls Advance then. The same Rank
// therefore runs on real sockets in real time and, thousands of times faster,
// under a virtual clock. It is not safe for concurrent use.
//
// Scheduling follows vLLM 0.32 (v1 core): a step first continues what is
// running, each request with as many tokens as the step's budget leaves, then
// admits waiting requests in order of arrival (chunked prefill). When blocks
// run out the youngest running request is preempted: it loses its blocks and
// waits at the head of the queue. A prompt is looked up in the prefix cache
// when it is admitted, all but its last token, which is always computed.
//
// # Output
//
// The model is a digest. Every slot of a block holds a digest of its token and of everything
// before the block. An output token is a digest of all blocks that its request used, as they are
// at that time. Two engines with the same model and seed thus give the same answer to the same
// tokens, and an engine that uses one wrong block gives another.
package engine

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// Time is a point on the owner's clock, counted from any start. It never goes
// back.
type Time = time.Duration

// Config is what a Rank is made of.
type Config struct {
	// BlockSize is the number of tokens of a KV block, Blocks their number
	// (the null block included).
	BlockSize, Blocks int
	// MaxSeqs is the number of running requests, MaxBatchedTokens the number of
	// tokens of one step.
	MaxSeqs, MaxBatchedTokens int
	// MaxModelLen is the longest sequence in tokens.
	MaxModelLen int
	// Model and Seed make the output: equal on equal ranks.
	Model string
	Seed  uint64
	// NameSeed makes the block names of this incarnation its own; NoiseSeed
	// seeds the noise of the timing.
	NameSeed, NoiseSeed uint64
	// Timing is the length of steps; Noise their relative standard deviation
	// (0.05 for 5 %); Speed divides all times, 0 means 1.
	Timing Timing
	Noise  float64
	Speed  float64
	// Next is the id that the model continues with after before, the prompt and what
	// it has said; draw is what it makes of all of it. EOS is the one that ends an
	// answer, OSL the mean length of an answer that nothing else ends.
	Next func(before []uint32, draw uint64) uint32
	EOS  uint32
	OSL  int
	// Recompute makes a failed KV load fall back to local prefill
	// (kv_load_failure_policy "recompute"); otherwise it fails the request.
	Recompute bool
	// Lease is how long blocks wait for a remote decode.
	Lease time.Duration

	// Publish gets the cache events of a step when it ends; nil drops them.
	Publish func(now Time, events []cache.Event)
	// Network moves KV between ranks; nil makes every pull fail.
	Network Network
	// Store is the storage connector, nil for none. LoadStore and SaveStore
	// say which directions are used.
	Store                Store
	LoadStore, SaveStore bool
	// HostBlocks are how many blocks the host's memory holds in addition to those on the device, 0 for
	// none; Storage says that there is a store behind that.
	HostBlocks int
	Storage    bool
	// Connector says that the engine has a KV connector, so that it counts
	// external cache queries.
	Connector bool
	// Unique keeps one block of each content, as SGLang does; see cache.Config.
	Unique bool
	// Exit is called when the engine process would have died.
	Exit func(now Time, reason string)
}

// Finish is why a request ended.
type Finish string

// The reasons of an end, in vLLM's words.
const (
	Running      Finish = ""
	FinishStop   Finish = "stop"
	FinishLength Finish = "length"
	FinishAbort  Finish = "abort"
	FinishError  Finish = "error"
)

// Output is one thing that happened to a request.
type Output struct {
	// At is when it happened on the rank's clock.
	At Time
	// Token is a new output token, if HasToken.
	Token    uint32
	HasToken bool
	// Finish is not Running on the last Output of a request.
	Finish Finish
	// Err says why, when Finish is FinishError.
	Err error
	// Cached and External are the prompt tokens found in the prefix cache and
	// brought by a connector.
	Cached, External int
	// Pinned are the blocks that wait for a remote decode, set with the last
	// Output of a request that asked for it.
	Pinned []int
}

// Request is one sequence to complete.
type Request struct {
	// ID names the request on its rank; it must not be in use.
	ID string
	// Tokens is the prompt; read only, at least one token.
	Tokens []uint32
	// MaxTokens and MinTokens bound the answer; MaxTokens 0 means up to the
	// model's length.
	MaxTokens, MinTokens int
	// IgnoreEOS lets nothing but a length end the answer.
	IgnoreEOS bool
	// Key separates the cache entries of equal tokens.
	Key blockhash.Key
	// Choice makes a different answer out of the same prompt; 0 is the greedy one.
	Choice int
	// Embed ends the request when the prompt is computed, without any token.
	Embed bool
	// Pin keeps the blocks for a remote decode when the request has ended by length.
	Pin bool
	// Transfer is the name under which a decode may ask for the pinned blocks (Mooncake's
	// transfer_id); "" for none.
	Transfer string
	// Pull fetches the prompt's KV from a remote prefill; nil computes it.
	Pull *Pull
	// Sink gets the outputs in order, from within Submit, Advance, Abort or
	// PullDone. It must not block nor call the rank.
	Sink func(Output)
}

type state uint8

const (
	waiting state = iota
	pulling
	running
	done
)

type request struct {
	Request
	state    state
	tokens   []uint32 // prompt and answer
	seqs     []uint64 // sequence hashes of the full blocks of tokens
	blocks   []int
	named    int    // leading blocks that are committed
	computed int    // tokens whose KV is in blocks
	step     int    // tokens computed by the step in progress
	ctx      uint64 // digest of the blocks that are full and computed
	cached   int
	external int
	pulled   bool // the remote blocks are here, or were given up
	loaded   bool // the store was asked
	// offloaded are the leading blocks that were offered to what is outside the device.
	offloaded int
	ending    Finish // set when it ends as soon as a step or a pull lets go of its blocks
	hung      bool   // its pull never ends
	arrived   Time
	admitted  Time
	first     Time
	last      Time
	counted   bool // the prompt was counted in the metrics
}

// Rank is one simulated rank.
type Rank struct {
	cfg     Config
	cache   *cache.Cache
	off     *cache.Offload // nil without
	noise   *rand.Rand
	now     Time
	slow    float64
	reqs    map[string]*request
	waiting []*request
	running []*request
	batch   []*request
	busy    bool // a step is in progress until stepEnd
	stepEnd Time
	agenda  Agenda
	pinned  map[string]*pin
	offers  map[string]*offer
	// registered are decodes that wait for a prefill of this rank, by base id.
	registered map[string]registration
	// asks are decodes that want a transfer, in the order in which they get a sender; named
	// are the transfers of prefills.
	asks   []*ask
	named  map[string]struct{}
	asleep bool
	dead   bool
	stats  Stats
}

type pin struct {
	blocks []int
	until  Time
	name   string // of the transfer
}

// ErrTooLong is a prompt that does not fit the model or the cache.
var ErrTooLong = errors.New("prompt is too long")

// New returns an idle rank.
func New(cfg Config) (*Rank, error) {
	if cfg.MaxSeqs < 1 || cfg.MaxBatchedTokens < 1 {
		return nil, fmt.Errorf("engine: max_num_seqs %d and max_num_batched_tokens %d must be at least 1", cfg.MaxSeqs, cfg.MaxBatchedTokens)
	}
	if cfg.Timing == nil {
		cfg.Timing = Mocker{}
	}
	cfg.Speed = cmp.Or(max(cfg.Speed, 0), 1)
	cfg.Lease = cmp.Or(max(cfg.Lease, 0), 30*time.Second)
	if cfg.Next == nil {
		cfg.Next = func([]uint32, uint64) uint32 { return 3 }
	}
	cfg.OSL = cmp.Or(max(cfg.OSL, 0), 128)
	c, err := cache.New(cache.Config{Blocks: cfg.Blocks, BlockSize: cfg.BlockSize, NameSeed: cfg.NameSeed, Quiet: cfg.Publish == nil, Unique: cfg.Unique})
	if err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	// Like an engine that fits its length to the cache: a longer request could
	// never run.
	if room := c.Capacity() * cfg.BlockSize; cfg.MaxModelLen <= 0 || cfg.MaxModelLen > room {
		cfg.MaxModelLen = room
	}
	var off *cache.Offload
	if cfg.HostBlocks > 0 {
		off = cache.NewOffload(c, cfg.HostBlocks, cfg.Storage)
	}
	return &Rank{
		cfg:    cfg,
		off:    off,
		cache:  c,
		noise:  rand.New(rand.NewPCG(cfg.NoiseSeed, 0x6e6f697365)),
		slow:   1,
		reqs:   make(map[string]*request),
		pinned: make(map[string]*pin), registered: make(map[string]registration), offers: make(map[string]*offer),
		stats: newStats(),
	}, nil
}

// Cache is the rank's KV cache, for tests and statistics; it must not be changed.
func (r *Rank) Cache() *cache.Cache { return r.cache }

// SetSlow multiplies all times from the next step on; 1 is normal.
func (r *Rank) SetSlow(factor float64) {
	if factor <= 0 || math.IsNaN(factor) {
		factor = 1
	}
	r.slow = factor
}

// Next is when something will happen, and false if nothing will.
func (r *Rank) Next() (Time, bool) {
	at, ok := r.stepEnd, r.busy
	if timer, due := r.agenda.Next(); due && (!ok || timer < at) {
		at, ok = timer, true
	}
	return at, ok && !r.dead
}

// Advance lets everything happen that is due until now, each at its own time.
func (r *Rank) Advance(now Time) {
	for {
		at, ok := r.Next()
		if !ok || at > now {
			break
		}
		r.now = max(r.now, at)
		if timer, due := r.agenda.Next(); due && timer <= at {
			r.agenda.Do()
		} else {
			r.finishStep()
		}
		r.start()
	}
	r.now = max(r.now, now)
}

// Submit adds a request.
func (r *Rank) Submit(now Time, q Request) error {
	r.Advance(now)
	if len(q.Tokens) == 0 {
		return errors.New("prompt is empty")
	}
	if len(q.Tokens) > r.cfg.MaxModelLen {
		return fmt.Errorf("%w: %d tokens, at most %d", ErrTooLong, len(q.Tokens), r.cfg.MaxModelLen)
	}
	if _, ok := r.reqs[q.ID]; ok {
		return fmt.Errorf("request id %q is in use", q.ID)
	}
	if _, ok := r.pinned[q.ID]; ok {
		return fmt.Errorf("request id %q is in use", q.ID)
	}
	if q.Transfer != "" {
		if err := r.begin(q.Transfer); err != nil {
			return err
		}
	}
	if q.MaxTokens <= 0 || q.MaxTokens > r.cfg.MaxModelLen-len(q.Tokens) {
		q.MaxTokens = r.cfg.MaxModelLen - len(q.Tokens)
	}
	p := &request{Request: q, tokens: q.Tokens[:len(q.Tokens):len(q.Tokens)], arrived: r.now}
	locals := blockhash.Locals(make([]uint64, 0, len(q.Tokens)/r.cfg.BlockSize), q.Tokens, r.cfg.BlockSize, q.Key)
	p.seqs = blockhash.Chain(make([]uint64, 0, len(locals)), locals)
	r.reqs[q.ID] = p
	r.waiting = append(r.waiting, p)
	if p.Pull != nil {
		r.beat(p)
	}
	r.start()
	return nil
}

// Abort ends a request that the client gave up. It is not an error without one.
func (r *Rank) Abort(now Time, id string) {
	r.Advance(now)
	p := r.reqs[id]
	if p == nil || p.ending != Running {
		return
	}
	switch {
	case p.hung:
		// vLLM 0.32 dies here: the scheduler frees a request that the
		// connector still waits for.
		r.exit("client left a request whose remote KV parameters were incomplete")
	case p.state == pulling && p.Pull != nil && p.Pull.Bootstrap:
		// SGLang gives the memory of an aborted transfer back at once; nothing
		// writes into it before PullDone, which does not find the request then.
		r.finish(p, FinishAbort, nil)
		r.start()
	case p.state == pulling, p.state == running && p.step > 0:
		p.ending = FinishAbort
		if p.Sink != nil {
			p.Sink(Output{At: r.now, Finish: FinishAbort})
			p.Sink = nil
		}
	default:
		if p.Pull != nil && !p.pulled && !p.Pull.Bootstrap && !p.Pull.Push && !p.Pull.Offer && r.cfg.Network != nil {
			r.cfg.Network.Note(r.now, *p.Pull, NoteDone)
		}
		r.remove(p)
		r.finish(p, FinishAbort, nil)
		r.start()
	}
}

// Finish ends a running request as complete, as when the text hit a stop
// string: the answer so far stands.
func (r *Rank) Finish(now Time, id string) {
	r.Advance(now)
	p := r.reqs[id]
	if p == nil || p.ending != Running {
		return
	}
	p.Sink = nil
	if p.step > 0 || p.state == pulling {
		p.ending = FinishStop
		return
	}
	r.remove(p)
	r.finish(p, FinishStop, nil)
	r.start()
}

// ClearCache forgets the prefix cache, unless a block is in use. As with vLLM, the
// next step publishes it.
func (r *Rank) ClearCache(now Time) bool {
	r.Advance(now)
	return r.cache.Clear()
}

// Sleep stops the rank from starting steps, or lets it continue.
func (r *Rank) Sleep(now Time, on bool) {
	r.Advance(now)
	r.asleep = on
	r.start()
}

// exit ends the simulated process: nothing happens on the rank any more.
func (r *Rank) exit(reason string) {
	if r.dead {
		return
	}
	r.dead = true
	if r.cfg.Exit != nil {
		r.cfg.Exit(r.now, reason)
	}
}

// remove takes a request out of the queues.
func (r *Rank) remove(p *request) {
	r.waiting = without(r.waiting, p)
	r.running = without(r.running, p)
}

func without(s []*request, p *request) []*request {
	if i := slices.Index(s, p); i >= 0 {
		return append(s[:i], s[i+1:]...)
	}
	return s
}

func (r *Rank) after(d time.Duration, do func()) {
	r.agenda.Add(r.now+max(d, 0), do)
}

// scaled applies speed, slow factor and noise to a time of the model.
func (r *Rank) scaled(d time.Duration) time.Duration {
	f := r.slow / r.cfg.Speed
	if r.cfg.Noise > 0 {
		f *= min(max(1+r.cfg.Noise*r.noise.NormFloat64(), 0.1), 10)
	}
	return time.Duration(float64(d) * f)
}
