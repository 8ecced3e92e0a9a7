package recorder

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/trace"
)

// Copy is a recording that comes from elsewhere, as from the stream of another
// process's Tap, on its way to a File. It remembers the header, the ranks, and the
// settings and workers that decisions refer to, so that every part of the File can be
// read alone.
type Copy struct {
	sub    *Subscription
	header trace.Header

	mu    sync.Mutex // guards the fields below
	ranks map[string][2][]byte
	order []string
	last  time.Duration
	// told are lines of settings and workers. When they are as many as may be, the
	// older half goes: the Tap they come from has begun anew long before.
	told  [][]byte
	bytes int
}

const maxTold, maxToldBytes = 1 << 16, 128 << 20

// NewCopy makes a Copy with so many bytes that may wait for the disk (0 means
// DefaultBuffer).
func NewCopy(buffer int) *Copy {
	if buffer <= 0 {
		buffer = DefaultBuffer
	}
	c := &Copy{ranks: map[string][2][]byte{}}
	c.sub = &Subscription{max: buffer, batch: 1, wake: make(chan struct{}, 1), preamble: c.preamble, leave: func() {}, now: func() time.Duration {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.last
	}}
	return c
}

// Subscription is where a File takes the lines from.
func (c *Copy) Subscription() *Subscription { return c.sub }

// From takes the lines of a stream until it ends, then closes the
// subscription. Lines that the disk is too slow for are dropped and counted, as
// a Tap does. A stream that does not begin with a header is an error.
func (c *Copy) From(r io.Reader) error {
	defer c.sub.Close()
	br := bufio.NewReaderSize(r, 1<<20)
	var long []byte
	for n := 0; ; {
		p, err := br.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			if long = append(long, p...); len(long) > trace.DefaultMaxLine {
				return fmt.Errorf("line %d of the stream is longer than %d bytes", n+1, trace.DefaultMaxLine)
			}
			continue
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil // what is left of a line is no record
			}
			return err
		}
		if len(long) > 0 {
			p = append(long, p...)
			long = nil
		}
		if n++; n == 1 {
			if err := json.Unmarshal(p, &c.header); err != nil || c.header.Schema != trace.Schema {
				return fmt.Errorf("%w: the stream begins with %.80q, not with a header of %s: record it with the router's own version of dynctl", trace.ErrSchema, p, trace.Schema)
			}
			c.sub.add(p)
			continue
		}
		switch kind := kindOf(p); kind {
		case trace.KindSettings, trace.KindWorker:
			c.describe(p)
			c.tell()
		case trace.KindDecision:
			if !c.tell() {
				c.sub.drop() // nobody could tell what it was made from
				continue
			}
			c.sub.add(p)
		default:
			c.note(p, kind)
			c.sub.add(p)
		}
	}
}

// kindOf is the kind of a line as AppendRecord writes it.
func kindOf(p []byte) trace.Kind {
	rest, ok := bytes.CutPrefix(p, []byte(`{"kind":"`))
	kind, _, end := bytes.Cut(rest, []byte(`"`))
	if !ok || !end {
		return ""
	}
	return trace.Kind(kind)
}

// describe remembers a line of settings or of a worker.
func (c *Copy) describe(p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told, c.bytes = append(c.told, bytes.Clone(p)), c.bytes+len(p)
	if len(c.told) > maxTold || c.bytes > maxToldBytes {
		n := 0
		for ; n < len(c.told)/2 || c.bytes > maxToldBytes/2; n++ {
			c.bytes -= len(c.told[n])
		}
		c.told, c.sub.told = slices.Clone(c.told[n:]), max(c.sub.told-n, 0)
	}
}

// tell passes on those that are not yet, and reports whether there was room.
func (c *Copy) tell() bool {
	for ; c.sub.told < len(c.told); c.sub.told++ {
		if !c.sub.add(c.told[c.sub.told]) {
			return false
		}
	}
	return true
}

// note remembers what every part must tell again of a rank.
func (c *Copy) note(p []byte, kind trace.Kind) {
	which := 0
	switch kind {
	case trace.KindRank:
	case trace.KindFeed:
		which = 1
	default:
		return
	}
	var l struct {
		Time int64  `json:"t_us"`
		Rank string `json:"rank"`
	}
	if json.Unmarshal(p, &l) != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = max(c.last, time.Duration(l.Time)*time.Microsecond)
	k, known := c.ranks[l.Rank]
	if !known {
		if len(c.ranks) >= maxRanks {
			return
		}
		c.order = append(c.order, l.Rank)
	}
	// In a later part the rank is in the middle of its life.
	k[which] = bytes.Clone(bytes.Replace(p, []byte(`,"new":true`), nil, 1))
	c.ranks[l.Rank] = k
}

func (c *Copy) preamble(part int) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.header
	h.Part = part
	p, err := trace.AppendHeader(nil, h)
	if err != nil {
		return nil // it was read, so it can be written
	}
	for _, l := range c.told {
		p = append(p, l...)
	}
	for _, name := range c.order {
		p = append(append(p, c.ranks[name][0]...), c.ranks[name][1]...)
	}
	return p
}
