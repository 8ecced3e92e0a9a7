package recorder

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/trace"
)

// Copy is a recording that comes from elsewhere, as from the stream of another
// process's Tap, on its way to a File. It remembers the header and the ranks, so
// that every part of the File can be read alone.
type Copy struct {
	sub    *Subscription
	header trace.Header

	mu    sync.Mutex // guards the fields below
	ranks map[string][2][]byte
	order []string
	last  time.Duration
}

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
				return fmt.Errorf("%w: the stream begins with %.80q", trace.ErrSchema, p)
			}
		} else {
			c.note(p)
		}
		c.sub.add(p)
	}
}

// note remembers what every part must tell again.
func (c *Copy) note(p []byte) {
	var which int
	switch {
	case bytes.HasPrefix(p, []byte(`{"kind":"rank",`)):
		which = 0
	case bytes.HasPrefix(p, []byte(`{"kind":"feed",`)):
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
	for _, name := range c.order {
		p = append(append(p, c.ranks[name][0]...), c.ranks[name][1]...)
	}
	return p
}
