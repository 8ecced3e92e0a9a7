package routing

import (
	"sync"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
)

// The memory of routing requests is reused by later ones. Candidates and rankings are
// package decide's.

var (
	prompts = sync.Pool{New: func() any { return new(hashed) }}
	answers = sync.Pool{New: func() any { return new(holders) }}
)

// maxKeep bounds the memory that is kept for later requests, in ids and hashes.
const maxKeep = 1 << 18

// Reset makes the request empty. It must hold no memory.
func (q *Request) Reset() {
	q.Run.Begin(decide.Criteria{})
	q.Details = Details{}
}

// Release gives all memory back.
func (q *Request) Release() {
	q.Run.Release()
	q.ReleaseHashes()
	q.Reset()
}

// hashed is the memory of a prompt's ids and hashes. A request has it until no
// further attempt can follow.
type hashed struct {
	ids   []uint32
	views []hashes
	text  kvgroup.Text
}

// AcquireHashes gets memory for ids and hashes, unless the request has it.
func (q *Request) AcquireHashes() {
	if q.hashed == nil {
		q.hashed = prompts.Get().(*hashed)
		q.IDs, q.views, q.used = q.hashed.ids[:0], q.hashed.views, 0
	}
}

// ReleaseHashes gives that memory back, if the request has it.
func (q *Request) ReleaseHashes() {
	m := q.hashed
	if m == nil {
		return
	}
	m.ids, m.views = q.IDs, q.views
	if cap(m.ids) > maxKeep {
		m.ids = nil
	}
	for i := range m.views {
		if h := &m.views[i]; cap(h.locals) > maxKeep/4 {
			h.locals, h.seq, h.extra, h.whole = nil, nil, nil, nil
		}
	}
	m.text.Forget(maxKeep / 4)
	q.hashed, q.IDs, q.views, q.used = nil, nil, nil, 0
	m.poison()
	prompts.Put(m)
}

// holders is the memory of who holds a prompt's blocks, by view. A request has it
// while a decision is made.
type holders struct{ views []overlaps }

// acquireHolders gets memory for the answers about all views.
func (q *Request) acquireHolders() {
	q.holders = answers.Get().(*holders)
	for len(q.holders.views) < q.used {
		q.holders.views = append(q.holders.views, overlaps{})
	}
}

func (q *Request) releaseHolders() {
	answers.Put(q.holders)
	q.holders = nil
}
