package workload

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// TraceOptions say which part of a trace is sent and how fast.
type TraceOptions struct {
	// Scale multiplies the gaps: 0.5 sends twice as fast; 0 means 1.
	Scale float64
	// Limit is the most requests; 0 means DefaultTraceLimit.
	Limit int
	// MaxLen is the longest prompt with its answer in tokens; longer requests
	// are left out and counted. 0 is no bound.
	MaxLen int
}

// DefaultTraceLimit bounds what is read of a trace.
const DefaultTraceLimit = 1 << 20

// TraceInfo says what was read.
type TraceInfo struct {
	Format           string
	TooLong          int
	MeanISL, MeanOSL float64
	Span             time.Duration
}

// ReadTrace reads the requests of a trace in any format that package trace
// knows: the project's own, Mooncake's, Dynamo's request traces.
func ReadTrace(path string, stdin io.Reader, o TraceOptions) ([]Item, TraceInfo, error) {
	var info TraceInfo
	r, err := trace.Open(path, stdin, trace.Options{})
	if err != nil {
		return nil, info, err
	}
	defer r.Close()
	o.Scale = cmp.Or(max(o.Scale, 0), 1)
	o.Limit = cmp.Or(max(o.Limit, 0), DefaultTraceLimit)
	info.Format = string(r.Format())
	var items []Item
	for rec, err := range r.All() {
		if err != nil {
			return nil, info, err
		}
		if rec.Kind != trace.KindRequest || rec.Request == nil || rec.Request.ISL < 1 {
			continue
		}
		q := rec.Request
		it := Item{At: rec.Time, ISL: q.ISL, OSL: max(q.OSL, 1), Block: q.BlockSize, Blocks: slices.Clone([]uint64(q.Blocks))}
		if o.MaxLen > 0 && it.ISL+it.OSL > o.MaxLen {
			info.TooLong++
			continue
		}
		if items = append(items, it); len(items) >= o.Limit {
			break
		}
	}
	if len(items) == 0 {
		if info.TooLong > 0 {
			return nil, info, fmt.Errorf("%s: %w: all %d are longer than the model's %d tokens", path, ErrEmpty, info.TooLong, o.MaxLen)
		}
		return nil, info, fmt.Errorf("%s: %w", path, ErrEmpty)
	}
	slices.SortStableFunc(items, func(a, b Item) int { return cmp.Compare(a.At, b.At) })
	first := items[0].At
	for i := range items {
		items[i].At = time.Duration(float64(items[i].At-first) * o.Scale)
		info.MeanISL += float64(items[i].ISL) / float64(len(items))
		info.MeanOSL += float64(items[i].OSL) / float64(len(items))
	}
	info.Span = items[len(items)-1].At
	return items, info, nil
}
