package question

import (
	"sync"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
)

// What questions are made of is used again by those that follow. Candidates and rankings
// are package decide's.

var (
	prompts = sync.Pool{New: func() any { return new(hashed) }}
	answers = sync.Pool{New: func() any { return new(holders) }}
)

// maxKeep bounds the memory that is kept for later requests, in ids and hashes.
const maxKeep = 1 << 18

// Reset makes the question empty. It must hold no memory.
func (d *Question) Reset() {
	d.Run.Begin(decide.Request{})
	d.Asked = Asked{}
}

// Release gives all memory back.
func (d *Question) Release() {
	d.Run.Release()
	d.ReleaseHashes()
	d.Reset()
}

// hashed is the memory of a prompt's ids and hashes. A request has it until no
// further attempt can follow.
type hashed struct {
	ids   []uint32
	views []hashes
	text  kvgroup.Text
}

// AcquireHashes gets memory for ids and hashes, unless the question has it.
func (d *Question) AcquireHashes() {
	if d.hashed == nil {
		d.hashed = prompts.Get().(*hashed)
		d.IDs, d.views, d.used = d.hashed.ids[:0], d.hashed.views, 0
	}
}

// ReleaseHashes gives that memory back, if the question has it.
func (d *Question) ReleaseHashes() {
	m := d.hashed
	if m == nil {
		return
	}
	m.ids, m.views = d.IDs, d.views
	if cap(m.ids) > maxKeep {
		m.ids = nil
	}
	for i := range m.views {
		if h := &m.views[i]; cap(h.locals) > maxKeep/4 {
			h.locals, h.seq = nil, nil
		}
	}
	m.text.Forget(maxKeep / 4)
	d.hashed, d.IDs, d.views, d.used = nil, nil, nil, 0
	m.poison()
	prompts.Put(m)
}

// holders is the memory of who holds a prompt's blocks, by view. A request has it
// while a decision is made.
type holders struct{ views []overlaps }

// acquireHolders gets memory for the answers about all views.
func (d *Question) acquireHolders() {
	d.holders = answers.Get().(*holders)
	for len(d.holders.views) < d.used {
		d.holders.views = append(d.holders.views, overlaps{})
	}
}

func (d *Question) releaseHolders() {
	answers.Put(d.holders)
	d.holders = nil
}
