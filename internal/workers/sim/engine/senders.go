package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// Of vLLM's MooncakeConnector: senders is how many decodes a prefill rank serves at a time
// (num_workers 10, two tasks each), SendTime how long one of them waits for a prefill, and a
// prefill's blocks for a decode (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT).
const (
	senders  = 20
	SendTime = 480 * time.Second
)

// ask is a decode that wants the blocks of a transfer. While it waits it has a sender, which
// nothing but the blocks or the time's end frees: the decode's leaving does not.
type ask struct {
	name    string
	want    int
	has     bool // a sender
	deliver func([]cache.Content, error)
}

// maxAsks bounds those that wait, with a sender or without, maxNamed the transfers that are
// remembered. vLLM has no bound.
const (
	maxAsks  = 1 << 16
	maxNamed = 1 << 16
)

var (
	errTransferUsed = errors.New("the transfer_id was used before")
	errNoPrefill    = errors.New("timeout waiting for P side ready")
)

// begin notes the name of a prefill's transfer, which no other request may have.
func (r *Rank) begin(name string) error {
	if _, ok := r.named[name]; ok {
		return fmt.Errorf("%w: %q", errTransferUsed, name)
	}
	if r.named == nil || len(r.named) >= maxNamed {
		r.named = map[string]struct{}{}
	}
	r.named[name] = struct{}{}
	return nil
}

// Ask wants the last want blocks of the transfer of a name. deliver gets them when its
// prefill has ended by length, immediately if it has, or an error after SendTime. It must neither
// block nor call the rank.
func (r *Rank) Ask(now Time, name string, want int, deliver func([]cache.Content, error)) error {
	r.Advance(now)
	if len(r.asks) >= maxAsks {
		return fmt.Errorf("%d decodes wait for prefills already", len(r.asks))
	}
	r.asks = append(r.asks, &ask{name: name, want: want, deliver: deliver})
	r.send()
	return nil
}

// send serves the decodes that have a sender, and gives free ones to those that wait.
func (r *Rank) send() {
	for i := 0; i < min(len(r.asks), senders); i++ {
		a := r.asks[i]
		if !a.has {
			a.has = true
			r.after(SendTime, func() { r.leave(a, nil, errNoPrefill) })
		}
		for id, n := range r.pinned {
			if n.name != a.name {
				continue
			}
			if len(n.blocks) < a.want {
				r.leave(a, nil, fmt.Errorf("%d remote blocks where %d are needed", len(n.blocks), a.want))
				return
			}
			contents := make([]cache.Content, a.want)
			for k, block := range n.blocks[len(n.blocks)-a.want:] {
				contents[k] = r.cache.Content(block)
			}
			r.stats.Transfers++
			r.stats.TransferBytes += float64(a.want * r.cfg.BlockSize * kvBytesPerToken)
			delete(r.pinned, id)
			r.cache.Release(n.blocks)
			r.leave(a, contents, nil)
			return
		}
	}
}

// leave frees the sender of a decode, if it has not left before, and serves the next ones.
func (r *Rank) leave(a *ask, contents []cache.Content, err error) {
	for i := range r.asks {
		if r.asks[i] == a {
			r.asks = append(r.asks[:i], r.asks[i+1:]...)
			a.deliver(contents, err)
			r.send()
			return
		}
	}
}
