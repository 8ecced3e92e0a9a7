// Package arrivals is the requests of a trace: their lengths, their shared
// prefixes, and how much of them a cache can save.
package arrivals

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// Request is a request of a trace, ready to be simulated.
type Request struct {
	// At is its arrival since the trace's start.
	At time.Duration
	trace.Request
	// Number counts the requests of the trace from 0.
	Number int
	// SessionKey is selector.HashSession of the request's session, which a recorded
	// decision has alone; 0 for none.
	SessionKey uint64
}

// Source gives the requests of a trace in the order of their arrival; an error ends
// it. It can be read again and again, so that a trace need not fit into memory.
type Source = iter.Seq2[*Request, error]

// FromSlice is a Source of requests in memory.
func FromSlice(all []Request) Source {
	return func(yield func(*Request, error) bool) {
		for _, q := range all {
			if !yield(&q, nil) {
				return
			}
		}
	}
}

// Moved are the same requests at slightly other times: each gap between two arrivals is longer or
// shorter by a random share of up to a tenth. The same seed gives the same times. Thinking times
// stay.
func Moved(all []Request, seed uint64) []Request {
	rng := rand.New(rand.NewPCG(seed, 0x9a95))
	out := slices.Clone(all)
	for i := 1; i < len(out); i++ {
		gap := float64(all[i].At - all[i-1].At)
		out[i].At = out[i-1].At + time.Duration(gap*(0.9+float64(0.2*rng.Float64())))
	}
	return out
}

// maxKept bounds the requests of a trace that are kept in memory.
const maxKept = 4 << 20

// Keep reads all requests of a source into memory, at most 4,194,304.
func Keep(src Source) ([]Request, error) {
	var all []Request
	for q, err := range src {
		if err != nil {
			return nil, err
		}
		if len(all) == maxKept {
			return nil, fmt.Errorf("more than %d requests: this keeps them all in memory, so split the trace", maxKept)
		}
		all = append(all, *q)
	}
	return all, nil
}

// FromTrace is a Source that reads a trace of requests afresh each time. A trace
// of decisions is read once and kept: its requests are known in the order of
// their ends.
func FromTrace(open func() (*trace.Reader, error)) (Source, error) {
	r, err := open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for rec, err := range r.All() {
		if err != nil {
			return nil, err
		}
		switch rec.Kind {
		case trace.KindRequest:
			return stream(open), nil
		case trace.KindDecision:
			all, err := joined(open)
			return FromSlice(all), err
		default:
		}
	}
	return nil, fmt.Errorf("%s: no requests and no decisions in the trace", r.Name())
}

func stream(open func() (*trace.Reader, error)) Source {
	return func(yield func(*Request, error) bool) {
		r, err := open()
		if err != nil {
			yield(nil, err)
			return
		}
		defer r.Close()
		for n := 0; ; {
			var rec trace.Record
			err := r.Next(&rec)
			switch {
			case errors.Is(err, io.EOF):
				return
			case err != nil:
				yield(nil, err)
				return
			case rec.Kind == trace.KindRequest:
				q := Request{At: rec.Time, Request: *rec.Request, Number: n, SessionKey: selector.HashSession(rec.Request.Session)}
				n++
				if !yield(&q, nil) {
					return
				}
			}
		}
	}
}

// joined makes requests of first decisions and their outcomes. A request
// without an outcome, or that failed, has the length of answer that was asked
// for, or none.
func joined(open func() (*trace.Reader, error)) ([]Request, error) {
	r, err := open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var all []Request
	at := map[string]int{}
	for rec, err := range r.All() {
		if err != nil {
			return nil, err
		}
		switch rec.Kind {
		case trace.KindDecision:
			d := rec.Decision
			if d.Attempt > 1 || d.Input.Facts.ISL <= 0 {
				continue
			}
			if len(all) >= maxKept {
				return nil, fmt.Errorf("%s: more than %d decisions: cut the recording with --from and --to", r.Name(), maxKept)
			}
			q := Request{At: time.Duration(d.BeganUS) * time.Microsecond, SessionKey: d.Input.Decode.SessionKey}
			q.ID, q.Model, q.ISL, q.OSL = d.ID, d.Model, d.Input.Facts.ISL, int(max(d.Input.Facts.MaxTokens, 0))
			if !d.Approximate && d.BlockSize > 0 && len(d.Locals) <= (q.ISL+d.BlockSize-1)/d.BlockSize {
				q.BlockSize, q.IDs, q.Blocks = d.BlockSize, trace.LocalIDs, d.Locals
			}
			if len(d.Tokens) == q.ISL {
				q.Tokens = d.Tokens
			}
			at[d.ID] = len(all)
			all = append(all, q)
		case trace.KindOutcome:
			if i, ok := at[rec.Outcome.ID]; ok {
				if n := rec.Outcome.Result.CompletionTokens; n >= 0 {
					all[i].OSL = n
				}
				delete(at, rec.Outcome.ID)
			}
		default:
		}
	}
	slices.SortStableFunc(all, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	for i := range all {
		all[i].Number = i
	}
	return all, nil
}

// Expand appends the token ids of a request's prompt to dst: the recorded ones,
// or ids made from its blocks, so that equal blocks give equal ids and all else
// differs. What no block names is unlike any other prompt.
func (q *Request) Expand(dst []uint32) []uint32 {
	if len(q.Tokens) == q.ISL {
		return append(dst, q.Tokens...)
	}
	n := q.ISL
	dst = slices.Grow(dst, n)
	for _, id := range q.Blocks {
		dst = synthesize(dst, id, min(n, q.BlockSize))
		if n -= q.BlockSize; n <= 0 {
			return dst
		}
	}
	return synthesize(dst, Mix(uint64(q.Number)^0x7461696c00000000), n)
}

// synthesize appends n token ids that follow from a seed.
func synthesize(dst []uint32, seed uint64, n int) []uint32 {
	x := Mix(seed)
	for ; n >= 2; n -= 2 {
		x += 0x9e3779b97f4a7c15
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		z ^= z >> 27
		dst = append(dst, uint32(z)&0x7fffffff, uint32(z>>32)&0x7fffffff)
	}
	if n == 1 {
		dst = append(dst, uint32(Mix(x))&0x7fffffff)
	}
	return dst
}

// Mix spreads the bits of x over the whole word (the finaliser of splitmix64).
func Mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Prefixes appends names of the prompt's blocks with all before them, for
// blocks of the request's own size.
func (q *Request) Prefixes(dst []uint64) []uint64 {
	if q.IDs == trace.PrefixIDs {
		return append(dst, q.Blocks...)
	}
	return blockhash.Chain(dst, q.Blocks)
}
