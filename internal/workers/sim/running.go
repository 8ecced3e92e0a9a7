package sim

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

const loopback = "127.0.0.1"

// Running is a fleet that runs.
type Running struct {
	vocab   *vocab.Vocab
	client  *http.Client
	engines []*Engine
	// Both ends of engines with TLS; nil without any.
	serverTLS, clientTLS *tls.Config

	mu     sync.Mutex
	stores map[string]*promptStore
}

// Start starts every engine of a fleet. The fleet runs until Close, or until
// ctx ends and Close is called.
func Start(ctx context.Context, f Fleet) (*Running, error) {
	r := &Running{
		vocab:  vocab.New(),
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}},
		stores: make(map[string]*promptStore),
	}
	if slices.ContainsFunc(f.Groups, func(g Group) bool { return g.TLS }) {
		var err error
		if r.serverTLS, r.clientTLS, err = selfSigned(); err != nil {
			return nil, err
		}
		r.client.Transport.(*http.Transport).TLSClientConfig = r.clientTLS
	}
	counts := make(map[workers.Role]int)
	ports, err := f.ports()
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	rank := 0
	for i, g := range f.Groups {
		if err := g.Validate(); err != nil {
			return nil, errors.Join(fmt.Errorf("simulated %s engines: %w", g.Role, err), r.Close())
		}
		for n := range g.Count {
			if err := ctx.Err(); err != nil {
				return nil, errors.Join(context.Cause(ctx), r.Close())
			}
			port := ports[i]
			if port != 0 {
				port += n
			}
			e := &Engine{
				fleet: r, group: g, index: len(r.engines), firstRank: rank,
				name:   fmt.Sprintf("%s-%d", g.Role, counts[g.Role]),
				ports:  newPorts(g, port),
				faults: fault.NewSource(mixSeed(g.Seed, uint64(len(r.engines)), 0x6661756c74), g.Faults),
				calls:  make(chan call, 64),
				stop:   make(chan struct{}),
			}
			if g.LB == workers.LBHybrid || g.LB == workers.LBExternal {
				e.start = n * g.DP
			}
			counts[g.Role]++
			rank += g.DP
			p, err := e.boot(0)
			if err != nil {
				return nil, errors.Join(fmt.Errorf("simulated engine %s: %w", e.name, err), r.Close())
			}
			e.proc = p
			e.wg.Go(e.supervise)
			r.engines = append(r.engines, e)
		}
	}
	return r, nil
}

func newPorts(g Group, http int) ports {
	p := ports{http: local(http), boot: local(0), recv: local(0)}
	for range g.DP {
		p.side = append(p.side, local(0))
		p.events = append(p.events, local(0))
		p.rep = append(p.rep, local(0))
	}
	return p
}

// Close stops every engine and joins everything that Start started.
func (r *Running) Close() error {
	var wg sync.WaitGroup
	for _, e := range r.engines {
		wg.Go(e.close)
	}
	wg.Wait()
	r.client.CloseIdleConnections()
	return nil
}

// Engines are the engines, in the order of the fleet's text.
func (r *Running) Engines() []*Engine { return r.engines }

// Engine is engine number i.
func (r *Running) Engine(i int) *Engine { return r.engines[i] }

// Named is the engine with a name, nil without one.
func (r *Running) Named(name string) *Engine {
	if i := slices.IndexFunc(r.engines, func(e *Engine) bool { return e.name == name }); i >= 0 {
		return r.engines[i]
	}
	return nil
}

// ClientTLS trusts the engines with TLS; nil without any.
func (r *Running) ClientTLS() *tls.Config { return r.clientTLS }

// Vocab is the fleet's tokenizer.
func (r *Running) Vocab() *vocab.Vocab { return r.vocab }

// Workers describes the engines as the router's fleet. The values are fresh:
// State and Ranks are not set.
func (r *Running) Workers() []*workers.Worker {
	out := make([]*workers.Worker, len(r.engines))
	for i, e := range r.engines {
		out[i] = e.Worker()
	}
	return out
}

// Specs are the engines as a router learns of them: name, address, role and
// connector; the rest it learns, as of real engines.
func (r *Running) Specs(origin string) []workers.Spec {
	var specs []workers.Spec
	for _, w := range r.Workers() {
		s := workers.Spec{
			Facts: workers.Facts{
				Engine: w.Engine, Dialect: w.Dialect, Role: w.Role, Connector: w.Connector,
				Bootstrap: w.Bootstrap, LMCache: w.LMCache,
			},
			Name: w.Name, URL: w.URL, Origin: origin,
		}
		if len(w.Events) > 0 && w.Events[0].Bind {
			// The publishers dial; only the operator knows where the router listens.
			s.EventsBind, s.Topic = true, w.Events[0].Topic
			for _, e := range w.Events {
				s.Events = append(s.Events, e.Endpoint)
			}
		}
		specs = append(specs, s)
	}
	return specs
}

// store is the fleet's shared storage in a folder, or in memory for "".
func (r *Running) store(dir string) *promptStore {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.stores[dir]
	if s == nil {
		s = &promptStore{dir: dir}
		if dir != "" {
			_ = os.MkdirAll(dir, 0o700) // a folder that cannot be made keeps nothing
		}
		r.stores[dir] = s
	}
	return s
}

// Engine is one simulated engine over all its incarnations. Its methods are
// safe for concurrent use.
type Engine struct {
	fleet     *Running
	group     Group
	index     int
	firstRank int
	start     int // place of the first rank in its deployment
	name      string
	faults    *fault.Source
	calls     chan call
	stop      chan struct{} // closed by close
	wg        sync.WaitGroup
	ports     ports // written under mu, by boot

	mu     sync.Mutex
	proc   *process // nil while down
	number uint64   // incarnation
	reason string   // why it is down, or goes on refusing connections
	exits  int
	closed bool
	clear  *time.Timer // ends faults with a limit
}

// call is something for the supervisor to do, because whoever wants it cannot
// wait for it: a handler of the process itself, or a rank with its lock held.
type call struct {
	proc    *process // the incarnation that is meant
	restart bool
	died    bool
	reason  string
	again   bool // bring up again after AutoRestart
}

// Name is the engine's name in the fleet, like "prefill-0".
func (e *Engine) Name() string { return e.name }

// Group is what the engine was made from.
func (e *Engine) Group() Group { return e.group }

// URL is the base of its HTTP API.
func (e *Engine) URL() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.group.scheme() + "://" + e.ports.http
}

// Worker describes the engine as the router's fleet; State and Ranks are not set.
func (e *Engine) Worker() *workers.Worker {
	e.mu.Lock()
	defer e.mu.Unlock()
	g := &e.group
	w := &workers.Worker{
		Facts: workers.Facts{
			Engine: workers.Sim, Dialect: g.Engine,
			Role: g.Role, Connector: g.Connector, BlockSize: g.BlockSize,
			LB: g.LB, MaxModelLen: min(g.MaxModelLen, (g.Blocks-1)*g.BlockSize), KVBlocks: g.Blocks, MaxBatchedTokens: g.MaxBatchedTokens,
		},
		Name: e.name, URL: &url.URL{Scheme: g.scheme(), Host: e.ports.http}, LoRAs: g.LoRAs, DPStart: e.start, Source: "sim",
	}
	w.Models = g.Models()
	if g.Events != EventsOff {
		for i := range g.DP {
			s := workers.EventSource{DP: i, Endpoint: "tcp://" + e.ports.events[i], Topic: g.Topic}
			if !g.NoReplay {
				s.Replay = "tcp://" + e.ports.rep[i]
			}
			if k := e.firstRank + i; k < len(g.Dial) {
				s.Endpoint, s.Bind = g.Dial[k], true
			}
			w.Events = append(w.Events, s)
		}
	}
	if g.Engine == workers.SGLang && g.Role == workers.Prefill || g.Connector == workers.ConnectorMooncake && g.Role.CanPrefill() {
		w.Bootstrap = &workers.Bootstrap{Host: loopback, Port: portOf(e.ports.boot)}
	}
	if g.Connector == workers.ConnectorOffloadP2P || g.Connector == workers.ConnectorNIXLOffload {
		w.Bootstrap = &workers.Bootstrap{Host: loopback, Port: portOf(e.ports.recv) - e.start}
	}
	if g.Connector == workers.ConnectorLMCache && g.Role != workers.Prefill {
		n := portOf(e.ports.recv)
		w.LMCache = &workers.LMCacheDecoder{Host: loopback, InitPorts: []int{n}, AllocPorts: []int{n}}
	}
	return w
}

func portOf(addr string) int {
	_, port, _ := net.SplitHostPort(addr) // our own listeners' addresses
	n, _ := strconv.Atoi(port)
	return n
}

// Running reports whether the engine is up, and what is wrong with it otherwise: why
// it is down, or why it keeps refusing connections.
func (e *Engine) Running() (bool, string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.proc != nil, e.reason
}

// Exits is how often the engine has died.
func (e *Engine) Exits() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.exits
}

// Incarnation counts the starts before the present one.
func (e *Engine) Incarnation() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.number
}

// ErrDown is what is asked of an engine that does not run.
var ErrDown = errors.New("simulated engine is down")

// Kill ends the process immediately: sockets close, requests die, caches are gone.
// It returns when all of it is over.
func (e *Engine) Kill() { e.end("killed") }

func (e *Engine) end(reason string) {
	e.mu.Lock()
	p := e.proc
	e.mu.Unlock()
	if p == nil {
		return
	}
	p.kill()
	e.mu.Lock()
	if e.proc == p {
		e.proc, e.reason = nil, reason
	}
	e.mu.Unlock()
}

// Restart kills the process if it runs and starts a new one on the same ports:
// an empty cache, new block names, event sequences from 0.
func (e *Engine) Restart() error {
	e.Kill()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrDown
	}
	if e.proc != nil { // someone else was faster
		return nil
	}
	p, err := e.boot(e.number + 1)
	if err != nil {
		e.reason = err.Error()
		return fmt.Errorf("restart of %s: %w", e.name, err)
	}
	e.number++
	e.proc, e.reason = p, ""
	return nil
}

// SetFaults replaces the engine's faults.
func (e *Engine) SetFaults(set fault.Set) error {
	if err := set.Validate(); err != nil {
		return err
	}
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return ErrDown
	}
	e.faults.Replace(set)
	p := e.proc
	if e.clear != nil {
		e.clear.Stop()
		e.clear = nil
	}
	if set.For > 0 {
		var t *time.Timer
		t = time.AfterFunc(time.Duration(set.For), func() {
			e.mu.Lock()
			mine := e.clear == t
			e.mu.Unlock()
			if mine {
				_ = e.SetFaults(fault.Set{}) // the reason is kept for Running
			}
		})
		e.clear = t
	}
	e.mu.Unlock()
	if p == nil {
		return nil
	}
	err := p.web.refuse(set.Refuse)
	if err != nil {
		err = fmt.Errorf("%s keeps refusing: %w", e.name, err)
	}
	e.mu.Lock()
	if e.proc == p {
		e.reason = "" // who asked may be gone: Running returns it, too
		if err != nil {
			e.reason = err.Error()
		}
	}
	e.mu.Unlock()
	for _, r := range p.ranks {
		r.Do(func(core *engine.Rank, _ engine.Time) { core.SetSlow(set.Slow) })
	}
	return err
}

// Faults is the engine's present set of faults.
func (e *Engine) Faults() fault.Set {
	set, _ := e.faults.Set()
	return set
}

// Counters are the counters of each rank since its process started.
func (e *Engine) Counters() ([]engine.Stats, error) {
	p, err := e.up()
	if err != nil {
		return nil, err
	}
	out := make([]engine.Stats, len(p.ranks))
	for i, r := range p.ranks {
		out[i] = r.Stats()
	}
	return out, nil
}

// Cached is what the cache of a rank holds: the sequence hashes (package
// blockhash) of its blocks, each once, in no order.
func (e *Engine) Cached(rank int) ([]uint64, error) {
	p, err := e.up()
	if err != nil {
		return nil, err
	}
	if rank < 0 || rank >= len(p.ranks) {
		return nil, fmt.Errorf("%s has no rank %d", e.name, rank)
	}
	return p.ranks[rank].Seqs(), nil
}

// Publisher is the event publisher of a rank, nil without events.
func (e *Engine) Publisher(rank int) (*sockets.Publisher, error) {
	p, err := e.up()
	if err != nil {
		return nil, err
	}
	if rank < 0 || rank >= len(p.pubs) {
		return nil, nil
	}
	return p.pubs[rank], nil
}

func (e *Engine) up() (*process, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.proc == nil {
		return nil, fmt.Errorf("%w: %s: %s", ErrDown, e.name, e.reason)
	}
	return e.proc, nil
}

// command is the admin call of a handler to end its own process.
func (e *Engine) command(restart bool) {
	e.mu.Lock()
	p := e.proc
	e.mu.Unlock()
	e.post(call{proc: p, restart: restart, reason: "asked to exit"})
}

// died notifies the supervisor that the engine core of p is dead.
func (e *Engine) died(p *process, reason string) {
	e.post(call{proc: p, died: true, reason: reason, again: e.group.AutoRestart > 0})
}

// post hands a call to the supervisor. A full queue means that the process is
// asked to end many times over, so nothing is lost by dropping it.
func (e *Engine) post(c call) {
	select {
	case e.calls <- c:
	default:
	}
}

// supervise ends and restarts processes on behalf of those who cannot wait.
func (e *Engine) supervise() {
	for {
		var c call
		select {
		case c = <-e.calls:
		case <-e.stop:
			return
		}
		e.mu.Lock()
		current := e.proc == c.proc && c.proc != nil && !e.closed
		if current && c.died {
			e.exits++
		}
		e.mu.Unlock()
		if !current {
			continue
		}
		c.proc.drain()
		if c.restart {
			_ = e.Restart() // the reason is kept for Running
			continue
		}
		e.end(c.reason)
		if c.again && e.pause(e.group.AutoRestart) {
			_ = e.Restart() // the reason is kept for Running
		}
	}
}

// pause waits; false means that the engine is closed.
func (e *Engine) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-e.stop:
		return false
	}
}

// close ends the engine for good.
func (e *Engine) close() {
	e.mu.Lock()
	e.closed = true
	if e.clear != nil {
		e.clear.Stop()
		e.clear = nil
	}
	e.mu.Unlock()
	close(e.stop)
	e.wg.Wait()
	e.Kill()
}

// mixSeed makes an independent seed out of several numbers.
func mixSeed(parts ...uint64) uint64 {
	h := uint64(0x9e3779b97f4a7c15)
	for _, p := range parts {
		h ^= p
		h ^= h >> 30
		h *= 0xbf58476d1ce4e5b9
		h ^= h >> 27
		h *= 0x94d049bb133111eb
		h ^= h >> 31
	}
	return h
}

// uuid is a version 4 UUID that the seed fixes.
func uuid(seed uint64) string {
	a, b := mixSeed(seed, 1), mixSeed(seed, 2)
	return fmt.Sprintf("%08x-%04x-4%03x-%04x-%012x", a>>32, a>>16&0xffff, a&0xfff, 0x8000|b>>48&0x3fff, b&0xffffffffffff)
}
