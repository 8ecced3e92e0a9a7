package workload

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/bench/loadgen"
)

// Series is what all sources have. Its requests are numbered, and the number
// makes their prompts.
type Series struct {
	Pool   Pool
	Model  string
	Header string
	// Name is part of the request ids and, with Salt, of the seed of every prompt.
	Name, Salt string
	// Ramp requests warm up before N others.
	Ramp, N int

	mu     sync.Mutex
	next   int
	prompt []uint32
}

// fill makes the next of so many requests, whose prompt and length of the answer
// draw gives.
func (s *Series) fill(q *loadgen.Request, all int, draw func(n int, rng *rand.Rand) (prompt []uint32, osl int)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.next
	if n >= all {
		return false
	}
	s.next++
	q.ID, q.Header, q.Warm = RequestID(s.Salt, s.Name, n), s.Header, n < s.Ramp
	s.prompt, q.OSL = draw(n, rand.New(rand.NewPCG(Seed(s.Salt, s.Name), uint64(n))))
	q.ISL = len(s.prompt)
	q.Body = Body(q.Body, s.Model, s.prompt, q.OSL)
	return true
}

// Cell is the source of a threshold cell: prompts of one length that share
// nothing but, when asked for, one prefix.
type Cell struct {
	Series
	Prefix     []uint32
	Fresh, OSL int
}

// Fill makes the next request.
func (c *Cell) Fill(_ int, q *loadgen.Request) bool {
	return c.fill(q, c.Ramp+c.N, func(_ int, rng *rand.Rand) ([]uint32, int) {
		return c.Pool.Tokens(append(c.prompt[:0], c.Prefix...), rng, c.Fresh), c.OSL
	})
}

// RequestID names a request of a cell.
func RequestID(salt, name string, n int) string {
	return "bench-" + strconv.FormatUint(Seed("id", salt, name)>>16, 16) + "-" + strconv.Itoa(n)
}

// Mixed is the source of a load sweep: lengths from distributions, prompts in
// groups that share a prefix, and conversations of several turns.
//
// A turn's prompt is the whole conversation so far: the prompt before it, OSL
// tokens in the place of the answer, and fresh ones. Turns of a conversation
// follow each other in one slot, so a closed loop is needed for more than one.
type Mixed struct {
	Series
	ISL, OSL Dist
	// Groups of prompts share PrefixTokens; 0 groups share nothing.
	Groups, PrefixTokens int
	// Turns of a conversation; at most MaxLen tokens of prompt and answer.
	Turns, MaxLen int

	slots map[int]*talk
}

type talk struct {
	history []uint32
	turn    int
	id      int
}

// Fill makes the next request of a slot.
func (m *Mixed) Fill(slot int, q *loadgen.Request) bool {
	return m.fill(q, m.Ramp+m.N, func(n int, rng *rand.Rand) ([]uint32, int) { return m.turn(slot, q, n, rng) })
}

func (m *Mixed) turn(slot int, q *loadgen.Request, n int, rng *rand.Rand) ([]uint32, int) {
	isl, osl := m.ISL.Draw(rng), m.OSL.Draw(rng)
	if m.slots == nil {
		m.slots = make(map[int]*talk)
	}
	t := m.slots[slot]
	if t == nil || t.turn >= max(m.Turns, 1) || m.MaxLen > 0 && len(t.history)+isl+osl > m.MaxLen {
		if t == nil {
			t = &talk{}
			m.slots[slot] = t
		}
		t.history, t.turn, t.id = t.history[:0], 0, n
	}
	prompt := append(m.prompt[:0], t.history...)
	if t.turn == 0 && m.Groups > 0 && m.PrefixTokens > 0 {
		prefix := min(m.PrefixTokens, max(isl-1, 0))
		prompt = m.Pool.Block(prompt, m.Salt, uint64(rng.IntN(m.Groups)), m.PrefixTokens)[:len(prompt)+prefix]
		isl -= prefix
	}
	prompt = m.Pool.Tokens(prompt, rng, isl)
	if m.MaxLen > 0 && len(prompt)+osl > m.MaxLen {
		osl = min(osl, m.MaxLen-1)
		prompt = prompt[:max(1, m.MaxLen-osl)]
	}
	if m.Turns > 1 {
		q.Header += "X-Session-ID: " + RequestID(m.Salt, m.Name+"/talk", t.id) + "\r\n"
		t.history = m.Pool.Tokens(append(t.history[:0], prompt...), rng, osl)
	}
	t.turn++
	return prompt, osl
}

// Item is one request of a trace.
type Item struct {
	At       time.Duration
	ISL, OSL int
	Block    int
	Blocks   []uint64
}

// Trace is the source of a trace-driven load: the prompts that the trace's
// block ids stand for, at its times.
type Trace struct {
	Series
	Items []Item
}

// Fill makes the next request.
func (t *Trace) Fill(_ int, q *loadgen.Request) bool {
	return t.fill(q, len(t.Items), func(n int, rng *rand.Rand) ([]uint32, int) {
		it, p := &t.Items[n], t.prompt[:0]
		for _, id := range it.Blocks {
			if left := it.ISL - len(p); left > 0 {
				p = t.Pool.Block(p, t.Salt, id, it.Block)
				p = p[:min(len(p), it.ISL)]
			}
		}
		q.At = it.At
		return t.Pool.Tokens(p, rng, it.ISL-len(p)), it.OSL
	})
}

// Describe says in one line what a mixed load is.
func (m *Mixed) Describe() string {
	s := fmt.Sprintf("isl %s, osl %s", m.ISL, m.OSL)
	if m.Groups > 0 {
		s += fmt.Sprintf(", %d groups share %d tokens", m.Groups, m.PrefixTokens)
	}
	if m.Turns > 1 {
		s += fmt.Sprintf(", %d turns", m.Turns)
	}
	return s
}
