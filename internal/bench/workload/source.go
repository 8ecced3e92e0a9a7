package workload

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/bench/loadgen"
)

// Cell is the source of a threshold cell: prompts of one length that share
// nothing but, when asked for, one prefix.
type Cell struct {
	Pool   Pool
	Model  string
	Header string
	// Name is part of the request ids and, with Salt, of the seed of every prompt.
	Name, Salt string
	Prefix     []uint32
	Fresh, OSL int
	Ramp, N    int

	mu     sync.Mutex
	next   int
	prompt []uint32
}

// Fill makes the next request.
func (c *Cell) Fill(_ int, q *loadgen.Request) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next >= c.Ramp+c.N {
		return false
	}
	n := c.next
	c.next++
	rng := rand.New(rand.NewPCG(Seed(c.Salt, c.Name), uint64(n)))
	c.prompt = c.Pool.Tokens(append(c.prompt[:0], c.Prefix...), rng, c.Fresh)
	q.ID = RequestID(c.Salt, c.Name, n)
	q.Header, q.Warm = c.Header, n < c.Ramp
	q.ISL, q.OSL = len(c.prompt), c.OSL
	q.Body = Body(q.Body, c.Model, c.prompt, c.OSL)
	return true
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
	Pool       Pool
	Model      string
	Header     string
	Name, Salt string
	ISL, OSL   Dist
	// Groups of prompts share PrefixTokens; 0 groups share nothing.
	Groups, PrefixTokens int
	// Turns of a conversation; at most MaxLen tokens of prompt and answer.
	Turns, MaxLen int
	Ramp, N       int

	mu     sync.Mutex
	next   int
	slots  map[int]*talk
	prompt []uint32
}

type talk struct {
	history []uint32
	turn    int
	id      int
}

// Fill makes the next request of a slot.
func (m *Mixed) Fill(slot int, q *loadgen.Request) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.next >= m.Ramp+m.N {
		return false
	}
	n := m.next
	m.next++
	rng := rand.New(rand.NewPCG(Seed(m.Salt, m.Name), uint64(n)))
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
	m.prompt = prompt
	q.ID, q.Header, q.Warm = RequestID(m.Salt, m.Name, n), m.Header, n < m.Ramp
	if m.Turns > 1 {
		q.Header += "X-Session-ID: " + RequestID(m.Salt, m.Name+"/talk", t.id) + "\r\n"
		t.history = m.Pool.Tokens(append(t.history[:0], prompt...), rng, osl)
	}
	t.turn++
	q.ISL, q.OSL = len(prompt), osl
	q.Body = Body(q.Body, m.Model, prompt, osl)
	return true
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
	Pool       Pool
	Model      string
	Header     string
	Name, Salt string
	Items      []Item

	mu     sync.Mutex
	next   int
	prompt []uint32
}

// Fill makes the next request.
func (t *Trace) Fill(_ int, q *loadgen.Request) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.next >= len(t.Items) {
		return false
	}
	n := t.next
	t.next++
	it := &t.Items[n]
	p := t.prompt[:0]
	for _, id := range it.Blocks {
		if left := it.ISL - len(p); left > 0 {
			p = t.Pool.Block(p, t.Salt, id, it.Block)
			p = p[:min(len(p), it.ISL)]
		}
	}
	rng := rand.New(rand.NewPCG(Seed(t.Salt, t.Name), uint64(n)))
	p = t.Pool.Tokens(p, rng, it.ISL-len(p))
	t.prompt = p
	q.ID, q.Header = RequestID(t.Salt, t.Name, n), t.Header
	q.ISL, q.OSL, q.At = len(p), it.OSL, it.At
	q.Body = Body(q.Body, t.Model, p, it.OSL)
	return true
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
