package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// load is what the clients of one measurement send: Clients requests at a time, the next
// one when one ends, until each client has sent Rounds.
type load struct {
	Clients, ISL, OSL int
	// Shortest is the shortest length as a share of the nominal one: lengths are drawn
	// evenly between it and the nominal length.
	Shortest float64
	Rounds   int
	// Last counts the request of the last client only, while all others run already.
	Last bool
	// Cached is how many tokens of each prompt the engine holds before. Such a load has one
	// client and one request.
	Cached int
}

// times are the means over the requests of a measurement, in milliseconds, as the source has
// them: its TTFT grows with the clients as a mean does that holds the first requests of all
// clients, which are sent at the same moment and queue behind each other.
type times struct{ TTFT, TPOT float64 }

// budget is the most tokens of a simulated step, the default of the engines that were measured.
const budget = 8192

// block is in tokens. It is large because the times do not depend on it.
const block = 64

// rig is a fleet under the virtual clock: prefill engines and decode engines, or only the
// latter, which then compute their prompts.
type rig struct {
	world           *virtual.World
	prefill, decode []*virtual.Rank
	next            int // numbers of requests
}

// newRig adds the engines. longest is the longest sequence in tokens, seqs the most at a time.
func newRig(prefill, decode engine.Timing, prefills, decodes, longest, seqs int) (*rig, error) {
	g := &rig{world: virtual.NewWorld()}
	add := func(t engine.Timing, n int) (out []*virtual.Rank, err error) {
		for range n {
			r, err := g.world.Add(engine.Config{
				BlockSize: block, Blocks: (2*seqs+2)*(longest/block+2) + 1, MaxSeqs: seqs, MaxBatchedTokens: budget, MaxModelLen: longest + 1,
				Model: "m", Timing: t, EOS: 2, OSL: 1, Connector: true, Lease: time.Hour,
				Next: func(_ []uint32, draw uint64) uint32 { return uint32(300 + draw%500) },
			})
			if err != nil {
				return nil, err
			}
			out = append(out, r)
		}
		return out, nil
	}
	var err error
	if g.decode, err = add(decode, decodes); err != nil {
		return nil, err
	}
	g.prefill, err = add(prefill, prefills)
	return g, err
}

// prompt makes a prompt that no other request shares a block with.
func (g *rig) prompt(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(g.next*7919 + i)
	}
	return out
}

// send computes a prompt and an answer of osl tokens. done gets the times of the tokens,
// after the send.
func (g *rig) send(tokens []uint32, osl int, done func(at []virtual.Time, err error)) {
	id, n, began := strconv.Itoa(g.next), g.next, g.world.Now()
	g.next++
	var at []virtual.Time
	q := engine.Request{ID: id, Tokens: tokens, MaxTokens: osl, IgnoreEOS: true, Sink: func(o engine.Output) {
		if o.HasToken {
			at = append(at, o.At-began)
		}
		if o.Finish != engine.Running {
			g.world.At(g.world.Now(), func() { done(at, o.Err) })
		}
	}}
	submit := func(r *virtual.Rank, q engine.Request) {
		if err := r.Submit(q); err != nil {
			done(nil, err)
		}
	}
	d := g.decode[n%len(g.decode)]
	if len(g.prefill) == 0 {
		submit(d, q)
		return
	}
	p := g.prefill[n%len(g.prefill)]
	submit(p, engine.Request{ID: id, Tokens: tokens, MaxTokens: 1, IgnoreEOS: true, Pin: true, Sink: func(o engine.Output) {
		g.world.At(g.world.Now(), func() {
			if o.Err != nil {
				done(nil, o.Err)
				return
			}
			q.Pull = p.Pull(id, o.Pinned)
			submit(d, q)
		})
	}})
}

// fill puts the first n tokens of a prompt into the engines' caches.
func (g *rig) fill(tokens []uint32, n int) error {
	var failed error
	g.send(tokens[:n], 1, func(_ []virtual.Time, err error) { failed = err })
	return errors.Join(g.world.Drain(1<<20), failed)
}

// run measures a load. The clients send their first requests at the same moment.
func (g *rig) run(l load) (times, error) {
	random := rand.New(rand.NewPCG(1, 2))
	draw := func(n int) int { return n - random.IntN(n-int(math.Ceil(float64(n)*l.Shortest))+1) }
	var ttft, tpot []float64
	var failed error
	var client func(number, round int)
	client = func(number, round int) {
		if round == l.Rounds || failed != nil {
			return
		}
		osl := draw(l.OSL)
		g.send(g.prompt(draw(l.ISL)), osl, func(at []virtual.Time, err error) {
			if err != nil || len(at) != osl {
				failed = fmt.Errorf("an answer of %d tokens instead of %d: %w", len(at), osl, errors.Join(err))
				return
			}
			if l.Last && number < l.Clients-1 {
				return
			}
			ttft = append(ttft, at[0].Seconds()*1000)
			if osl > 1 {
				tpot = append(tpot, (at[osl-1]-at[0]).Seconds()*1000/float64(osl-1))
			}
			client(number, round+1)
		})
	}
	if l.Cached > 0 {
		tokens := g.prompt(l.ISL)
		if err := g.fill(tokens, l.Cached); err != nil {
			return times{}, err
		}
		g.send(tokens, l.OSL, func(at []virtual.Time, err error) {
			if failed = err; err == nil {
				ttft = append(ttft, at[0].Seconds()*1000)
			}
		})
	} else {
		for number := range l.Clients {
			client(number, 0)
		}
	}
	if err := g.world.Drain(1 << 30); err != nil {
		return times{}, err
	}
	return times{TTFT: mean(ttft), TPOT: mean(tpot)}, failed
}

// aggregated measures a load on one engine that does both.
func aggregated(t engine.Timing, l load) (times, error) {
	g, err := newRig(nil, t, 0, 1, l.ISL+l.OSL, l.Clients)
	if err != nil {
		return times{}, err
	}
	return g.run(l)
}

// mean is 0 for no values.
func mean(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	return stats.Mean(v)
}
