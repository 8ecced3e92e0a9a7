package arrivals

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
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
	make func(*generator) error
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

// maxHead and maxSessions bound the common head of agents, and how many run at a time.
const (
	maxHead     = 1 << 20
	maxSessions = 1 << 16
)

// Options are what Generate makes.
type Options struct {
	// Shape is one of Shapes.
	Shape string
	// Requests is how many to make, at most 1,048,576.
	Requests int
	Seed     uint64
	// Head is the length in tokens of the head that all agents share; it is common in
	// whole blocks of 64 tokens. 0 means they share nothing.
	Head int
	// Sessions is how many agents run at a time, at most 65,536.
	Sessions int
}

// Generate makes requests of a shape, in the order of their arrival; the same
// options give the same requests. The turns of an agent or a chat have the name of
// their session, and all but its first one have the thinking time before them. Arrivals
// assume that an answer takes 10 ms for each token. Head and Sessions are for agents;
// other shapes ignore them.
//
//   - agents: sessions of 20 to 40 turns, 4 to 12 s apart. All share one head; each
//     turn is 400 to 1,000 tokens longer than the one before, with an answer of 150.
//     A session that ends makes room for the next;
//   - chats: 4 to 25 turns with time to read between them, under one short head;
//   - documents: long prompts that share nothing, with short answers;
//   - bursts: a quiet stream of chats, and every 20 s some forty prompts within a
//     second.
//
// Chats, documents and bursts have 20,000 to 30,000 new prompt tokens a second, as
// have some 300 agents at a time.
func Generate(o Options) ([]Request, error) {
	if o.Requests < 1 || o.Requests > maxGenerated {
		return nil, fmt.Errorf("%d requests: want 1 to %d", o.Requests, maxGenerated)
	}
	for _, s := range shapes {
		if s.name != o.Shape {
			continue
		}
		g := &generator{Options: o, rng: rand.New(rand.NewPCG(o.Seed, 0xd1c7))}
		if err := s.make(g); err != nil {
			return nil, err
		}
		slices.SortStableFunc(g.out, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
		g.out = g.out[:o.Requests]
		for i := range g.out {
			g.out[i].Number = i
		}
		return g.out, nil
	}
	return nil, fmt.Errorf("%q is not one of %v", o.Shape, Shapes())
}

type generator struct {
	Options
	rng   *rand.Rand
	out   []Request
	next  uint64 // the next block that nobody has
	begun int    // so many sessions
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

// copy is a text that begins as t does.
func (t *text) copy() text { return text{blocks: slices.Clone(t.blocks), rest: t.rest} }

// add appends tokens that nobody else has.
func (g *generator) add(t *text, tokens int) {
	for t.rest += tokens; t.rest >= generated; t.rest -= generated {
		g.next++
		t.blocks = append(t.blocks, g.next)
	}
}

// session is the name of a new session.
func (g *generator) session(kind string) string {
	g.begun++
	return fmt.Sprintf("%s-%d", kind, g.begun)
}

// answerTime is how long arrivals assume that an answer of so many tokens takes.
func answerTime(tokens int) time.Duration { return time.Duration(tokens) * 10 * time.Millisecond }

// opening is the thinking time of a request that no answer precedes.
const opening time.Duration = -1

// ask makes a request of a prompt, in a session unless its name is empty. think is its
// thinking time, or opening.
func (g *generator) ask(session string, at, think time.Duration, t *text, answer int) {
	q := Request{At: at, SessionKey: selector.HashSession(session)}
	q.Session = session
	if think != opening {
		us := think.Microseconds()
		q.ThinkUS = &us
	}
	q.ISL, q.OSL, q.BlockSize, q.IDs = len(t.blocks)*generated+t.rest, answer, generated, trace.LocalIDs
	q.Blocks = slices.Clone(t.blocks)
	if t.rest > 0 {
		g.next++
		q.Blocks = append(q.Blocks, g.next)
	}
	g.out = append(g.out, q)
}

func (g *generator) agents() error {
	if g.Head < 0 || g.Head > maxHead {
		return fmt.Errorf("a head of %d tokens: want 0 to %d", g.Head, maxHead)
	}
	if g.Sessions < 1 || g.Sessions > maxSessions {
		return fmt.Errorf("%d sessions at a time: want 1 to %d", g.Sessions, maxSessions)
	}
	const least, most, answer = 4 * time.Second, 12 * time.Second, 150
	var head text
	g.add(&head, g.Head)
	// By the end every one of the sessions at a time has had its share of the requests.
	end := most * time.Duration(g.Requests/g.Sessions+2)
	for range g.Sessions {
		for now := time.Duration(g.rng.Int64N(int64(most - least))); now < end; {
			name := g.session("agent")
			t, think := head.copy(), opening
			for range g.between(20, 40) {
				g.add(&t, g.between(400, 1000))
				if now < end {
					g.ask(name, now, think, &t, answer)
				}
				gap := least + time.Duration(g.rng.Int64N(int64(most-least)))
				now, think = now+gap, gap-answerTime(answer)
			}
		}
	}
	return nil
}

func (g *generator) chats() error {
	g.chat(250*time.Millisecond, func() bool { return len(g.out) < 3*g.Requests+500 })
	return nil
}

// chat begins conversations as long as they are wanted.
func (g *generator) chat(every time.Duration, more func() bool) {
	var head text
	g.add(&head, 600)
	for at := time.Duration(0); more(); at += g.wait(every) {
		t := head.copy()
		g.add(&t, g.around(1200, .9))
		name, now, think := g.session("chat"), at, opening
		for range g.between(4, 25) {
			answer := g.around(250, .6)
			g.ask(name, now, think, &t, answer)
			g.add(&t, answer+g.around(700, 1))
			think = g.wait(20 * time.Second)
			now += think + answerTime(answer)
		}
	}
}

func (g *generator) documents() error {
	for at := time.Duration(0); len(g.out) < g.Requests; at += g.wait(800 * time.Millisecond) {
		var t text
		g.add(&t, g.around(16000, .7))
		g.ask("", at, opening, &t, g.around(150, .6))
	}
	return nil
}

func (g *generator) bursts() error {
	end := time.Duration(g.Requests) * 150 * time.Millisecond
	last := time.Duration(0)
	g.chat(2*time.Second, func() bool {
		last += 2 * time.Second
		return last < end
	})
	var head text
	g.add(&head, 2000)
	for at := 5 * time.Second; at < end || len(g.out) < g.Requests; at += 15*time.Second + g.wait(5*time.Second) {
		for range g.between(30, 50) {
			t := head.copy()
			g.add(&t, g.around(7000, .7))
			g.ask("", at+time.Duration(g.rng.IntN(int(time.Second))), opening, &t, g.around(200, .6))
		}
	}
	return nil
}
