package replay

import (
	"fmt"
	"io"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// ConvertOptions say what Convert makes.
type ConvertOptions struct {
	To trace.Format
	// Version goes into the header of an own trace.
	Version string
}

// Convert reads the whole of a trace and writes it as an own trace, or its requests as
// a Mooncake trace. It returns how many records were written.
func Convert(open func() (*trace.Reader, error), w io.Writer, o ConvertOptions) (int64, error) {
	r, err := open()
	if err != nil {
		return 0, err
	}
	defer r.Close()
	c := &converter{w: w, references: trace.NewReferences()}
	switch o.To {
	case trace.Own:
		h := r.Header()
		if h.Source, h.Version, h.Prompts = "convert", o.Version, "whole"; h.Start.IsZero() {
			h.Start = time.Unix(0, 0).UTC()
		}
		if err := c.begin(h); err != nil {
			return 0, err
		}
	case trace.Mooncake:
		return c.requests(open)
	default:
		return 0, fmt.Errorf("cannot write %s (one of dynctl, mooncake)", o.To)
	}
	for rec, err := range r.All() {
		if err != nil {
			return 0, err
		}
		if err := c.record(rec); err != nil {
			return 0, &trace.LineError{Name: r.Name(), Line: rec.Line, Byte: rec.Offset, Err: err}
		}
	}
	return c.records, nil
}

type converter struct {
	w          io.Writer
	records    int64
	buf        []byte
	references *trace.References
	header     trace.Header
}

// begin writes a header: the first one, or that of a part whose decisions were made
// by other rules than those before.
func (c *converter) begin(h trace.Header) error {
	p, err := trace.AppendHeader(c.buf[:0], h)
	if err != nil {
		return err
	}
	c.buf, c.header, c.references = p, h, trace.NewReferences()
	_, err = c.w.Write(p)
	return err
}

func (c *converter) write(p []byte, err error) error {
	if err != nil {
		return err
	}
	c.buf = p
	c.records++
	_, err = c.w.Write(p)
	return err
}

func (c *converter) record(rec *trace.Record) error {
	if d := rec.Decision; d != nil && d.Rules != c.header.Rules {
		h := c.header
		h.Rules = d.Rules
		if err := c.begin(h); err != nil {
			return err
		}
	}
	return c.write(c.references.AppendRecord(c.buf[:0], rec))
}

// requests writes the requests of a trace with prefix ids of Mooncake's blocks.
func (c *converter) requests(open func() (*trace.Reader, error)) (int64, error) {
	src, err := arrivals.FromTrace(open)
	if err != nil {
		return 0, err
	}
	ids := map[uint64]uint64{}
	var tokens []uint32
	for q, err := range src {
		if err != nil {
			return 0, err
		}
		rec := trace.Record{Kind: trace.KindRequest, Time: q.At, Request: &q.Request}
		if q.BlockSize != mooncakeTokens || q.IDs != trace.PrefixIDs {
			if q.BlockSize == mooncakeTokens {
				q.Blocks = q.Prefixes(nil)
			} else {
				tokens = q.Expand(tokens[:0])
				q.Blocks = blockhash.Chain(nil, blockhash.Locals(nil, tokens, mooncakeTokens, blockhash.Key{}))
			}
			q.BlockSize, q.IDs = mooncakeTokens, trace.PrefixIDs
			if len(q.Blocks)*mooncakeTokens < q.ISL {
				// The last, partial block has an id too; it is nobody else's.
				q.Blocks = append(q.Blocks, arrivals.Mix(uint64(q.Number)^0x7061727469616c))
			}
		}
		// Mooncake's ids are small numbers.
		small := make(trace.Hashes, len(q.Blocks))
		for i, h := range q.Blocks {
			id, ok := ids[h]
			if !ok {
				id = uint64(len(ids))
				ids[h] = id
			}
			small[i] = id
		}
		q.Blocks = small
		if err := c.write(trace.AppendMooncake(c.buf[:0], &rec)); err != nil {
			return 0, err
		}
	}
	return c.records, nil
}

// mooncakeTokens is the size of a Mooncake trace's blocks.
const mooncakeTokens = 512
