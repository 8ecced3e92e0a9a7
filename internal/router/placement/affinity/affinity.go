// Package affinity remembers on which ranks sessions are, for policy session.
package affinity

import (
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

const (
	// maxIdle is how long a session is known after its last decision. Engines have
	// evicted its blocks by then, unless they have nothing else to do.
	maxIdle = time.Hour
	// maxKnown bounds the sessions that are known. A session takes about 100 bytes.
	maxKnown = 1 << 17
)

// Homes are the labels of the ranks of a session, of decode and of prefill; empty where
// none is known.
type Homes [2]string

// Table has the homes of the sessions of a fleet. It forgets a session that is idle for an
// hour. With more than 65,536 sessions it may forget one sooner, of those that were used
// least recently. It is safe for concurrent use. Use New to make one.
type Table struct {
	half int

	mu sync.Mutex
	// A session that is used is in newer. When that is full it becomes older, and what
	// was in older is forgotten.
	newer, older map[uint64]session
}

type session struct {
	homes Homes
	used  time.Time
}

// New returns an empty table.
func New() *Table { return newTable(maxKnown) }

func newTable(limit int) *Table {
	return &Table{half: limit / 2, newer: map[uint64]session{}, older: map[uint64]session{}}
}

// key tells a client's sessions with several models apart: they are on different ranks.
func key(model string, id uint64) uint64 { return id ^ selector.HashSession(model) }

// Homes returns the homes of a session with a model. id is selector.HashSession of its
// name, and not 0.
func (t *Table) Homes(model string, id uint64, now time.Time) Homes {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.find(key(model, id), now)
}

func (t *Table) find(k uint64, now time.Time) Homes {
	s, ok := t.newer[k]
	if !ok {
		s = t.older[k]
	}
	if now.Sub(s.used) > maxIdle {
		return Homes{}
	}
	return s.homes
}

// Move notes that a decision which saw a session at one pair of homes has sent it to
// another; an empty label leaves the home of that phase. A home that another decision has
// changed meanwhile stays: of two first requests at the same time, both find the rank of
// the one that came first.
func (t *Table) Move(model string, id uint64, saw, to Homes, now time.Time) {
	k := key(model, id)
	t.mu.Lock()
	defer t.mu.Unlock()
	homes := t.find(k, now)
	for i := range homes {
		if to[i] != "" && homes[i] == saw[i] {
			homes[i] = to[i]
		}
	}
	if _, ok := t.newer[k]; !ok && len(t.newer) >= t.half {
		t.newer, t.older = t.older, t.newer
		clear(t.newer)
	}
	t.newer[k] = session{homes, now}
}
