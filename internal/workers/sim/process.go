package sim

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/front"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
)

// process is one incarnation of an engine: everything that dies with it.
type process struct {
	e       *Engine
	started time.Time
	ctx     context.Context // ends when the process is killed
	cancel  context.CancelFunc
	dead    context.Context // ends earlier, when the engine core dies
	die     context.CancelCauseFunc

	ranks []*front.Rank
	ids   []string // engine id of each rank
	pubs  []*sockets.Publisher
	side  []*sockets.Server
	links sockets.Links
	boot  *web
	recv  *sockets.Server // LMCache receiver
	store engine.Store
	web   *web
	wg    sync.WaitGroup
	once  sync.Once
}

// ports are the sockets of an engine, kept over restarts.
type ports struct {
	http, boot, recv  string
	side, events, rep []string
}

// boot starts an incarnation. number is 0 for the first one.
func (e *Engine) boot(number uint64) (*process, error) {
	g := &e.group
	p := &process{e: e, started: time.Now(), links: sockets.Links{Patience: g.Patience}}
	if g.Connector.Reported() == workers.ConnectorNIXL {
		p.links.Version = cmp.Or(g.Version, front.Version[g.Engine])
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.dead, p.die = context.WithCancelCause(p.ctx)
	ok := false
	defer func() {
		if !ok {
			p.kill()
		}
	}()
	// Everything random in this incarnation comes from this.
	seed := mixSeed(g.Seed, uint64(e.index), number)
	switch g.Connector {
	case workers.ConnectorSharedStorage:
		p.store = e.fleet.store(g.Store)
	case workers.ConnectorLMCache:
		p.store = newBlockStore()
	case workers.ConnectorNone, workers.ConnectorNIXL, workers.ConnectorNIXLPush, workers.ConnectorOffloadP2P, workers.ConnectorNIXLOffload, workers.ConnectorMooncake, workers.ConnectorSGLang:
	}
	if err := p.publishers(number == 0); err != nil {
		return nil, err
	}
	for i := range g.DP {
		id := uuid(mixSeed(seed, 0x656e67696e65, uint64(i)))
		if g.DP > 1 {
			id += "_dp" + strconv.Itoa(i)
		}
		p.ids = append(p.ids, id)
		started := time.Now()
		cfg, err := g.RankConfig(e.fleet.vocab, e.index, i, number)
		if err != nil {
			return nil, err
		}
		cfg.Exit = func(_ engine.Time, reason string) { p.exitSoon(reason) }
		if len(p.pubs) > i {
			pub := p.pubs[i]
			cfg.Publish = func(now engine.Time, events []cache.Event) {
				pub.Publish(float64(started.Add(now).UnixMicro())/1e6, events)
			}
		}
		switch g.Connector {
		case workers.ConnectorNIXL, workers.ConnectorNIXLPush, workers.ConnectorOffloadP2P, workers.ConnectorNIXLOffload, workers.ConnectorMooncake, workers.ConnectorSGLang:
			cfg.Network = &network{p: p, rank: i}
		case workers.ConnectorSharedStorage:
			cfg.Store, cfg.LoadStore, cfg.SaveStore = p.store, true, true
		case workers.ConnectorLMCache:
			cfg.Store, cfg.LoadStore = p.store, true
		case workers.ConnectorNone:
		}
		core, err := engine.New(cfg)
		if err != nil {
			return nil, err
		}
		set, _ := e.faults.Set()
		core.SetSlow(set.Slow)
		p.ranks = append(p.ranks, front.NewRank(core))
		switch g.Connector {
		case workers.ConnectorNIXL, workers.ConnectorNIXLPush, workers.ConnectorNIXLOffload, workers.ConnectorMooncake:
			err = p.sideChannel(i)
		case workers.ConnectorNone, workers.ConnectorOffloadP2P, workers.ConnectorSGLang, workers.ConnectorLMCache, workers.ConnectorSharedStorage:
		}
		if err == nil && (g.Connector == workers.ConnectorOffloadP2P || g.Connector == workers.ConnectorNIXLOffload) {
			err = p.offers()
		}
		if err != nil {
			return nil, err
		}
	}
	rooms, err := p.bootstrap()
	if err != nil {
		return nil, err
	}
	if err := p.receiver(); err != nil {
		return nil, err
	}
	srv := front.New(p.frontConfig(seed, rooms))
	var conf *tls.Config
	if g.TLS {
		conf = e.fleet.serverTLS
	}
	p.web = newWeb(p.ctx, srv, e.faults, conf)
	set, _ := e.faults.Set()
	if err := p.web.listen(e.ports.http); err != nil {
		return nil, err
	}
	e.ports.http = p.web.addr
	if set.Refuse {
		_ = p.web.refuse(true) // only giving back can fail
	}
	for _, r := range p.ranks {
		p.wg.Go(func() { r.Run(p.ctx) })
	}
	ok = true
	return p, nil
}

func (p *process) frontConfig(seed uint64, rooms *front.Rooms) front.Config {
	e, g := p.e, &p.e.group
	cfg := front.Config{
		Dialect: g.Engine, Version: g.Version, Role: g.Role, Models: append([]string{g.Model}, g.Aliases...), LoRAs: g.LoRAs,
		BlockSize: g.BlockSize, Blocks: g.Blocks, MaxSeqs: g.MaxSeqs, MaxBatchedTokens: g.MaxBatchedTokens,
		MaxModelLen: min(g.MaxModelLen, (g.Blocks-1)*g.BlockSize), Connector: g.Connector, Vocab: e.fleet.vocab,
		FirstRank: e.start, Ranks: p.ranks, Faults: e.faults, Rooms: rooms, Dead: p.dead, Seed: seed, Started: p.started,
		SetFaults: e.SetFaults,
		Restart:   func() { e.command(true) },
		Exit:      func() { e.command(false) },
		Die:       p.exitSoon,
	}
	for i := range p.pubs {
		cfg.Sources = append(cfg.Sources, front.Source{Endpoint: p.pubs[i].Endpoint(), Replay: p.pubs[i].Replay(), Topic: g.Topic, Steps: g.Steps})
	}
	for i, s := range p.side {
		cfg.Links = append(cfg.Links, front.Link{EngineID: p.ids[i], Host: s.Addr().IP.String(), Port: s.Addr().Port})
	}
	if rooms != nil {
		cfg.Links = append(cfg.Links, front.Link{Host: loopback, Port: portOf(e.ports.boot)})
	}
	if g.Connector == workers.ConnectorLMCache {
		cfg.Push = p.push
	}
	return cfg
}

// publishers opens the publishers of all ranks. Engines count the ports of events
// and replay up with the rank, and SGLang reports that of rank 0 only: the ports after
// a free one must be free, too. At the first start others are tried until they are;
// later they are waited for, for a moment.
func (p *process) publishers(first bool) error {
	g := &p.e.group
	if g.Events == EventsOff {
		return nil
	}
	was := p.e.ports
	open := func() error {
		err := p.openPublishers()
		if err != nil {
			for _, pub := range p.pubs {
				pub.Close()
			}
			p.pubs, p.e.ports.events, p.e.ports.rep = nil, was.events, was.rep
		}
		return err
	}
	if !first {
		return sockets.BindAgain(p.ctx, open)
	}
	return sockets.FreePorts(2*g.DP, func(base int) error { // events, then replay
		p.e.ports.events, p.e.ports.rep = slices.Clone(was.events), slices.Clone(was.rep)
		if base != 0 {
			p.e.ports.events[0], p.e.ports.rep[0] = local(base), local(base+g.DP)
		}
		return open()
	})
}

// local is the address of a port, 0 for any.
func local(port int) string { return net.JoinHostPort(loopback, strconv.Itoa(port)) }

func (p *process) openPublishers() error {
	g, ports := &p.e.group, &p.e.ports
	form := map[EventForm]kvevent.Form{EventsMap: kvevent.VLLMMap, EventsArray: kvevent.VLLMArray}[g.Events]
	if g.Engine == workers.SGLang {
		form = map[EventForm]kvevent.Form{EventsMap: kvevent.SGLangMap, EventsArray: kvevent.SGLangArray}[g.Events]
	}
	ports.events, ports.rep = slices.Clone(ports.events), slices.Clone(ports.rep) // the caller may try again
	for i := range g.DP {
		cfg := sockets.PublisherConfig{
			Endpoint: "tcp://" + after(ports.events, i), Topic: g.Topic, Rank: p.e.start + i, BlockSize: g.BlockSize, Steps: g.Steps,
			Encoding: kvevent.Encoding{Form: form, BinHash: g.BinHash}, Faults: p.e.faults,
		}
		if len(g.Dial) > 0 {
			k := p.e.firstRank + i
			if k >= len(g.Dial) {
				return fmt.Errorf("%d endpoints to dial are not enough for rank %d of the fleet", len(g.Dial), k)
			}
			cfg.Endpoint, cfg.Dial = g.Dial[k], true
		}
		if !g.NoReplay {
			cfg.Replay = "tcp://" + after(ports.rep, i)
		}
		pub, err := sockets.OpenPublisher(p.ctx, cfg)
		if err != nil {
			return err
		}
		p.pubs = append(p.pubs, pub)
		if !cfg.Dial {
			ports.events[i] = pub.Endpoint()[len("tcp://"):]
		}
		if !g.NoReplay {
			ports.rep[i] = pub.Replay()[len("tcp://"):]
		}
	}
	return nil
}

// after is the address of rank i: i ports after that of rank 0.
func after(addrs []string, i int) string {
	host, port, err := net.SplitHostPort(addrs[0])
	n, perr := strconv.Atoi(port)
	if i == 0 || err != nil || perr != nil {
		return addrs[i]
	}
	return net.JoinHostPort(host, strconv.Itoa(n+i))
}

// sideChannel serves the blocks of rank i to other engines.
func (p *process) sideChannel(i int) error {
	r := p.ranks[i]
	s, err := sockets.Serve(p.ctx, p.e.ports.side[i], func(q sockets.Request) (a sockets.Response) {
		r.Do(func(core *engine.Rank, now engine.Time) {
			switch q.Op {
			case sockets.OpHello:
				a.EngineID, a.TPSize, a.Version = p.ids[i], 1, p.links.Version
			case sockets.OpRead:
				contents, err := core.Read(now, q.Blocks)
				if err != nil {
					a.Error = err.Error()
					return
				}
				a.Contents = contents
				core.Noted(now, q.RequestID, engine.NoteDone)
			case sockets.OpBeat:
				core.Noted(now, q.RequestID, engine.NoteBeat)
			case sockets.OpDone:
				core.Noted(now, q.RequestID, engine.NoteDone)
			case sockets.OpWrite:
				var err error
				if q.Problem != "" {
					err = errors.New(q.Problem)
				}
				core.PullDone(now, q.RequestID, q.Contents, err)
			case sockets.OpRegister:
				if q.From == nil || q.Want < 0 {
					a.Error = "a registration says who wants how many blocks"
					return
				}
				write := func(contents []cache.Content, err error) {
					p.write(*q.From, q.RequestID, contents, err)
				}
				var err error
				if q.Transfer != "" {
					err = core.Ask(now, q.Transfer, q.Want, write)
				} else {
					err = core.Register(now, q.RequestID, q.Want, func(contents []cache.Content) { write(contents, nil) })
				}
				if err != nil {
					a.Error = err.Error()
				}
			default:
				a.Error = "unknown operation " + q.Op
			}
		})
		return a
	})
	if err != nil {
		return err
	}
	p.side = append(p.side, s)
	p.e.ports.side[i] = s.Addr().String()
	return nil
}

// offers serves the host's memory of the only rank to other engines.
func (p *process) offers() error {
	return p.receive(tierID, sockets.OpTake, func(q sockets.Request, a *sockets.Response) {
		p.ranks[0].Do(func(core *engine.Rank, now engine.Time) {
			var err error
			if a.Contents, err = core.TakeOffer(now, q.RequestID, q.Seqs); err != nil {
				a.Error = err.Error()
			}
		})
	})
}

// receive opens the port on which other engines reach this one's memory by an operation.
func (p *process) receive(id, op string, do func(q sockets.Request, a *sockets.Response)) error {
	s, err := sockets.Serve(p.ctx, p.e.ports.recv, func(q sockets.Request) (a sockets.Response) {
		switch q.Op {
		case sockets.OpHello:
			a.EngineID, a.TPSize = id, 1
		case op:
			do(q, &a)
		default:
			a.Error = "unknown operation " + q.Op
		}
		return a
	})
	if err != nil {
		return err
	}
	p.recv = s
	p.e.ports.recv = s.Addr().String()
	return nil
}

// mooncakeRank is what Mooncake's bootstrap server has of a rank: where its workers listen, by
// their place in tensor and pipeline parallelism.
type mooncakeRank struct {
	EngineID string                       `json:"engine_id"`
	Workers  map[string]map[string]string `json:"worker_addr"`
}

// mooncakeServer is the bootstrap server of vLLM's MooncakeConnector, where all ranks of the
// process are registered.
func (p *process) mooncakeServer() http.Handler {
	ranks := map[string]mooncakeRank{}
	for i, s := range p.side {
		ranks[strconv.Itoa(i)] = mooncakeRank{p.ids[i], map[string]map[string]string{"0": {"0": "tcp://" + s.Addr().String()}}}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /query", func(w http.ResponseWriter, _ *http.Request) { front.WriteJSON(w, http.StatusOK, ranks) })
	return mux
}

// bootstrap starts the rendezvous server of an SGLang prefill, or Mooncake's.
func (p *process) bootstrap() (*front.Rooms, error) {
	g := &p.e.group
	var rooms *front.Rooms
	var h http.Handler
	switch {
	case g.Engine == workers.SGLang && g.Role == workers.Prefill:
		rooms = &front.Rooms{Claim: g.BootstrapWait, Wait: g.BootstrapWait}
		h = rooms.Handler(g.DP, g.BlockSize)
	case g.Connector == workers.ConnectorMooncake && g.Role.CanPrefill():
		h = p.mooncakeServer()
	default:
		return nil, nil
	}
	p.boot = newWeb(p.ctx, h, nil, nil)
	if err := p.boot.listen(p.e.ports.boot); err != nil {
		return nil, fmt.Errorf("bootstrap server: %w", err)
	}
	p.e.ports.boot = p.boot.addr
	return rooms, nil
}

// exitSoon lets the engine die of itself: whoever waits for an answer gets the
// error, then the process is gone. It is called with a rank's lock held.
func (p *process) exitSoon(reason string) {
	p.die(front.ErrDead)
	p.e.died(p, reason)
}

// drain waits, for a moment only, until the answers that the death of the
// engine core has ended are out.
func (p *process) drain() {
	t := time.NewTimer(500 * time.Millisecond)
	defer t.Stop()
	select {
	case <-p.web.idle():
	case <-t.C:
	}
}

// kill closes every socket and joins every goroutine of the process. Later
// callers wait for the first one.
func (p *process) kill() { p.once.Do(p.teardown) }

func (p *process) teardown() {
	p.cancel()
	p.die(errors.New("engine was killed"))
	if p.web != nil {
		p.web.close()
	}
	if p.boot != nil {
		p.boot.close()
	}
	for _, s := range p.side {
		_ = s.Close()
	}
	if p.recv != nil {
		_ = p.recv.Close()
	}
	for _, pub := range p.pubs {
		pub.Close()
	}
	p.links.Close()
	p.wg.Wait()
}
