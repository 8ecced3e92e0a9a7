package recorder

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// Copy is a recording that comes from elsewhere, as from the stream of another
// process's Tap, on its way to a File.
type Copy struct {
	sub *Subscription
	// late are settings and workers for which there was no room yet. When they are as many
	// as may be, the rest is dropped like other lines.
	late [][]byte
}

// NewCopy makes a Copy with that many bytes that may wait for the disk (0 means
// DefaultBuffer).
func NewCopy(buffer int) *Copy {
	buffer = cmp.Or(max(buffer, 0), DefaultBuffer)
	return &Copy{sub: &Subscription{max: buffer, batch: 1, wake: make(chan struct{}, 1), leave: func() {}}}
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
			var h trace.Header
			if err := json.Unmarshal(p, &h); err != nil || h.Schema != trace.Schema {
				return fmt.Errorf("%w: the stream begins with %.80q, not with a header of %s: record it with the router's own version of dynctl", trace.ErrSchema, p, trace.Schema)
			}
			c.sub.add(p)
			continue
		}
		c.line(p)
	}
}

// line passes a line on. Settings and workers that the disk is too slow for wait
// until there is room; a decision that could refer to them is dropped.
func (c *Copy) line(p []byte) {
	for len(c.late) > 0 && c.sub.add(c.late[0]) {
		c.late = c.late[1:]
	}
	switch kindOf(p) {
	case trace.KindSettings, trace.KindWorker, trace.KindCosts:
		switch {
		case len(c.late) == 0 && c.sub.add(p):
		case len(c.late) < maxKept:
			c.late = append(c.late, bytes.Clone(p))
		default:
			c.sub.drop()
		}
	case trace.KindDecision:
		if len(c.late) > 0 {
			c.sub.drop()
			return
		}
		c.sub.add(p)
	default:
		c.sub.add(p)
	}
}
