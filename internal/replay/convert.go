package replay

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/cache/blockhash"
	"github.com/dynctl/dynctl/internal/router/cache/kvevent"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// Conversion says what came of a Convert.
type Conversion struct {
	Records int64 `json:"records"`
	// Left counts records that the target format has no form for, by kind.
	Left map[trace.Kind]int64 `json:"left_out,omitempty"`
	// Inexact events lost something: engine blocks of a kind that the router
	// does not use, tokens that are not there.
	Inexact int64 `json:"inexact_events,omitempty"`
}

// ConvertOptions say what Convert makes.
type ConvertOptions struct {
	To trace.Format
	// BlockSize is the tokens of a request's block in the result; 0 keeps what
	// the format prescribes or the trace has.
	BlockSize int
	// Version goes into the header of an own trace.
	Version string
}

// Convert reads the whole of a trace and writes it in another format.
func Convert(open func() (*trace.Reader, error), w io.Writer, o ConvertOptions) (*Conversion, error) {
	r, err := open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	c := &converter{o: o, w: w, out: &Conversion{Left: map[trace.Kind]int64{}}, workers: map[string]uint64{}, book: trace.NewBook()}
	c.start = r.Header().Start
	if c.start.IsZero() {
		c.start = time.Unix(0, 0).UTC()
	}
	switch o.To {
	case trace.Own:
		h := r.Header()
		h.Source, h.Version, h.Start, h.Prompts = "convert", o.Version, c.start, "whole"
		if err := c.begin(h); err != nil {
			return nil, err
		}
	case trace.DynamoEvents:
	case trace.DynamoRequests, trace.Mooncake:
		return c.requests(open)
	default:
		return nil, fmt.Errorf("cannot write %s (one of dynctl, dynamo-events, dynamo-requests, mooncake)", o.To)
	}
	for rec, err := range r.All() {
		if err != nil {
			return nil, err
		}
		if err := c.record(rec); err != nil {
			return nil, &trace.LineError{Name: r.Name(), Line: rec.Line, Byte: rec.Offset, Err: err}
		}
	}
	return c.out, nil
}

type converter struct {
	o       ConvertOptions
	w       io.Writer
	out     *Conversion
	buf     []byte
	start   time.Time
	workers map[string]uint64
	dec     kvevent.Decoder
	batch   kvevent.Batch
	ids     map[string]uint64
	book    *trace.Book
	header  trace.Header
}

// begin writes a header: the first one, or that of a part whose decisions were made
// by other rules than those before.
func (c *converter) begin(h trace.Header) error {
	p, err := trace.AppendHeader(c.buf[:0], h)
	if err != nil {
		return err
	}
	c.buf, c.header, c.book = p, h, trace.NewBook()
	_, err = c.w.Write(p)
	return err
}

func (c *converter) write(p []byte, err error) error {
	if err != nil {
		return err
	}
	c.buf = p
	c.out.Records++
	_, err = c.w.Write(p)
	return err
}

func (c *converter) record(rec *trace.Record) error {
	if c.o.To == trace.Own {
		if d := rec.Decision; d != nil && d.Rules != c.header.Rules {
			h := c.header
			h.Rules = d.Rules
			if err := c.begin(h); err != nil {
				return err
			}
		}
		return c.write(c.book.AppendRecord(c.buf[:0], rec))
	}
	switch rec.Kind {
	case trace.KindEvent:
		c.number(rec.Rank)
		return c.write(trace.AppendDynamoEvent(c.buf[:0], rec, c.workers))
	case trace.KindBatch:
		return c.events(rec)
	case trace.KindClear:
		c.number(rec.Rank)
		e := trace.Record{Kind: trace.KindEvent, Time: rec.Time, Rank: rec.Rank, Event: trace.Event{ID: c.id(rec.Rank), Op: trace.Cleared, Start: -1}}
		return c.write(trace.AppendDynamoEvent(c.buf[:0], &e, c.workers))
	default:
		c.out.Left[rec.Kind]++
		return nil
	}
}

// number gives a worker whose name has none its number, in the order of the
// trace.
func (c *converter) number(rank string) {
	name, _, _ := trace.SplitRank(rank)
	if _, ok := c.workers[name]; !ok && len(c.workers) < 1<<20 {
		c.workers[name] = uint64(len(c.workers))
	}
}

// id counts the events of a rank.
func (c *converter) id(rank string) uint64 {
	if c.ids == nil {
		c.ids = map[string]uint64{}
	}
	c.ids[rank]++
	return c.ids[rank] - 1
}

// events writes a batch's events one by one, with the local hashes of the
// engine's own blocks.
func (c *converter) events(rec *trace.Record) error {
	if err := c.dec.Decode(rec.Batch.Payload, &c.batch); err != nil {
		return fmt.Errorf("batch %d: %w", rec.Batch.Seq, err)
	}
	c.number(rec.Rank)
	for i := range c.batch.Events {
		e := &c.batch.Events[i]
		v := trace.Event{ID: c.id(rec.Rank), Start: -1, Names: e.Hashes, Session: string(e.SessionID), Tier: cmp.Or(tiers[e.Medium], "external")}
		switch e.Kind {
		case kvevent.Stored:
			v.Op, v.Parent, v.HasParent = trace.Stored, e.Parent, e.HasParent
			first := 0
			if e.HasParent {
				first = 1
			}
			v.Locals = blockhash.LocalsAt(nil, e.Tokens, int(e.BlockSize), first, e.ExtraKeys, blockhash.Key{LoRA: e.LoRAName, Salt: e.Salt})
			if n := min(len(v.Locals), len(v.Names)); n != len(v.Names) || n != len(v.Locals) || e.CacheKind != kvevent.CacheAbsent && e.CacheKind != kvevent.FullAttention {
				c.out.Inexact++
				v.Names, v.Locals = v.Names[:n], v.Locals[:n]
				if n == 0 || e.CacheKind != kvevent.CacheAbsent && e.CacheKind != kvevent.FullAttention {
					continue
				}
			}
		case kvevent.Removed:
			v.Op = trace.Removed
		case kvevent.Cleared:
			v.Op, v.Names = trace.Cleared, nil
		default:
			continue
		}
		out := trace.Record{Kind: trace.KindEvent, Time: rec.Time, Rank: rec.Rank, Event: v}
		if err := c.write(trace.AppendDynamoEvent(c.buf[:0], &out, c.workers)); err != nil {
			return err
		}
	}
	return nil
}

// tiers are Dynamo's names; all others are "external".
var tiers = map[kvevent.Medium]string{kvevent.GPU: "device", kvevent.CPU: "host_pinned", kvevent.Disk: "disk"}

// requests writes the requests of a trace with prefix ids of the wanted size.
func (c *converter) requests(open func() (*trace.Reader, error)) (*Conversion, error) {
	src, err := arrivals.FromTrace(open)
	if err != nil {
		return nil, err
	}
	next, done, err := src()
	if err != nil {
		return nil, err
	}
	defer done()
	size := c.o.BlockSize
	if c.o.To == trace.Mooncake {
		if size != 0 && size != mooncakeTokens {
			return nil, fmt.Errorf("a Mooncake trace has blocks of %d tokens, not %d", mooncakeTokens, size)
		}
		size = mooncakeTokens
	}
	ids := map[uint64]uint64{}
	var q arrivals.Request
	var tokens []uint32
	for {
		err := next(&q)
		if errors.Is(err, io.EOF) {
			return c.out, nil
		}
		if err != nil {
			return nil, err
		}
		rec := trace.Record{Kind: trace.KindRequest, Time: q.At, Request: &q.Request}
		if want := cmp.Or(size, q.BlockSize, 64); q.BlockSize != want || q.IDs != trace.PrefixIDs {
			if q.BlockSize == want {
				q.Blocks = q.Prefixes(nil)
			} else {
				tokens = q.Expand(tokens[:0])
				q.Blocks = blockhash.Chain(nil, blockhash.Locals(nil, tokens, want, blockhash.Key{}))
			}
			q.BlockSize, q.IDs = want, trace.PrefixIDs
			if c.o.To == trace.Mooncake && len(q.Blocks)*want < q.ISL {
				// The last, partial block has an id too; it is nobody else's.
				q.Blocks = append(q.Blocks, arrivals.Mix(uint64(q.Number)^0x7061727469616c))
			}
		}
		if c.o.To == trace.DynamoRequests {
			// Only full blocks have a hash there.
			q.Blocks = q.Blocks[:min(len(q.Blocks), q.ISL/q.BlockSize)]
			err = c.write(trace.AppendDynamoRequest(c.buf[:0], &rec, c.start.UnixMilli()))
		} else {
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
			err = c.write(trace.AppendMooncake(c.buf[:0], &rec))
		}
		if err != nil {
			return nil, err
		}
	}
}

// mooncakeTokens is the size of a Mooncake trace's blocks.
const mooncakeTokens = 512
