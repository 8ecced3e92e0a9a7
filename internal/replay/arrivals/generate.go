package arrivals

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// Shapes are the kinds of requests that Generate makes.
func Shapes() []string {
	names := make([]string, len(shapes))
	for i, s := range shapes {
		names[i] = s.name
	}
	return names
}

var shapes = []struct {
	name string
	make func(*generator)
}{
	{"agents", (*generator).agents},
	{"chats", (*generator).chats},
	{"documents", (*generator).documents},
	{"bursts", (*generator).bursts},
}

// generated is the tokens of a block of a generated request.
const generated = 64

// maxGenerated bounds how many requests are made.
const maxGenerated = 1 << 20

// Generate makes n requests of a shape, in the order of their arrival; the same
// arguments give the same requests. All shapes have about as many new prompt tokens a
// second, 20,000 to 30,000.
//
//   - agents: loops of 8 to 40 steps that share one of six long heads (6,000 to 16,000
//     tokens) and grow by what tools return;
//   - chats: 4 to 25 turns with time to read between them, under one short head;
//   - documents: long prompts that share nothing, with short answers;
//   - bursts: a quiet stream of chats, and every 20 s some forty prompts within a
//     second.
func Generate(shape string, n int, seed uint64) ([]Request, error) {
	if n < 1 || n > maxGenerated {
		return nil, fmt.Errorf("%d requests: want 1 to %d", n, maxGenerated)
	}
	for _, s := range shapes {
		if s.name != shape {
			continue
		}
		g := &generator{rng: rand.New(rand.NewPCG(seed, 0xd1c7)), want: n}
		s.make(g)
		slices.SortStableFunc(g.out, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
		g.out = g.out[:n]
		for i := range g.out {
			g.out[i].Number = i
		}
		return g.out, nil
	}
	return nil, fmt.Errorf("%q is not one of %v", shape, Shapes())
}

type generator struct {
	rng  *rand.Rand
	want int
	out  []Request
	next uint64 // the next block that nobody has
}

// between is a number of a range, both ends included.
func (g *generator) between(least, most int) int { return least + g.rng.IntN(most-least+1) }

// around is a log-normal number with a median, within a factor of 8 of it.
func (g *generator) around(median int, spread float64) int {
	f := math.Exp(g.rng.NormFloat64() * spread)
	return max(1, int(float64(median)*min(max(f, 1.0/8), 8)))
}

// wait is an exponential time.
func (g *generator) wait(mean time.Duration) time.Duration {
	return time.Duration(g.rng.ExpFloat64() * float64(mean))
}

// text is a prompt in the making: blocks that are whole, and the tokens behind them.
type text struct {
	blocks []uint64
	rest   int
}

// add appends tokens that nobody else has.
func (g *generator) add(t *text, tokens int) {
	for t.rest += tokens; t.rest >= generated; t.rest -= generated {
		g.next++
		t.blocks = append(t.blocks, g.next)
	}
}

// ask makes a request of a prompt.
func (g *generator) ask(at time.Duration, t *text, answer int) {
	q := Request{At: at}
	q.ISL, q.OSL, q.BlockSize, q.IDs = len(t.blocks)*generated+t.rest, answer, generated, trace.LocalIDs
	q.Blocks = slices.Clone(t.blocks)
	if t.rest > 0 {
		g.next++
		q.Blocks = append(q.Blocks, g.next)
	}
	g.out = append(g.out, q)
}

func (g *generator) agents() {
	heads := make([]text, 6)
	for i := range heads {
		g.add(&heads[i], 6000+2000*i)
	}
	// One loop begins every 1.2 s and takes some 24 steps.
	for at := time.Duration(0); len(g.out) < 2*g.want+200; at += g.wait(1200 * time.Millisecond) {
		head := &heads[g.rng.IntN(len(heads))]
		t := text{blocks: slices.Clone(head.blocks), rest: head.rest}
		g.add(&t, g.around(600, .6))
		now := at
		for range g.between(8, 40) {
			answer := g.around(120, .7)
			g.ask(now, &t, answer)
			g.add(&t, answer+g.around(500, 1.1))
			now += g.wait(3*time.Second) + time.Duration(answer)*10*time.Millisecond
		}
	}
}

func (g *generator) chats() {
	g.chat(250*time.Millisecond, func() bool { return len(g.out) < 3*g.want+500 })
}

// chat begins conversations as long as they are wanted.
func (g *generator) chat(every time.Duration, more func() bool) {
	var head text
	g.add(&head, 600)
	for at := time.Duration(0); more(); at += g.wait(every) {
		t := text{blocks: slices.Clone(head.blocks), rest: head.rest}
		g.add(&t, g.around(1200, .9))
		now := at
		for range g.between(4, 25) {
			answer := g.around(250, .6)
			g.ask(now, &t, answer)
			g.add(&t, answer+g.around(700, 1))
			now += g.wait(20*time.Second) + time.Duration(answer)*10*time.Millisecond
		}
	}
}

func (g *generator) documents() {
	for at := time.Duration(0); len(g.out) < g.want; at += g.wait(800 * time.Millisecond) {
		var t text
		g.add(&t, g.around(16000, .7))
		g.ask(at, &t, g.around(150, .6))
	}
}

func (g *generator) bursts() {
	end := time.Duration(g.want) * 150 * time.Millisecond
	last := time.Duration(0)
	g.chat(2*time.Second, func() bool {
		last += 2 * time.Second
		return last < end
	})
	var head text
	g.add(&head, 2000)
	for at := 5 * time.Second; at < end || len(g.out) < g.want; at += 15*time.Second + g.wait(5*time.Second) {
		for range g.between(30, 50) {
			t := text{blocks: slices.Clone(head.blocks), rest: head.rest}
			g.add(&t, g.around(7000, .7))
			g.ask(at+time.Duration(g.rng.IntN(int(time.Second))), &t, g.around(200, .6))
		}
	}
}
