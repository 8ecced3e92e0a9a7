package arrivals

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Lengths is a distribution of lengths in tokens.
type Lengths struct {
	Mean float64 `json:"mean"`
	Min  int64   `json:"min"`
	P50  int64   `json:"p50"`
	P90  int64   `json:"p90"`
	P99  int64   `json:"p99"`
	Max  int64   `json:"max"`
	// Buckets count by powers of two: Buckets[i] is lengths in [2^i, 2^(i+1)).
	Buckets []uint64 `json:"buckets_log2"`
}

// Prefix is one much used beginning of prompts.
type Prefix struct {
	// ID is the name of its last block as in the trace, in hexadecimal in JSON
	// readers' eyes a number; Blocks its length.
	ID       uint64 `json:"id"`
	Blocks   int    `json:"blocks"`
	Requests uint64 `json:"requests"`
	Children int    `json:"continuations"`
}

// Stat describes the requests of a trace.
type Stat struct {
	Requests uint64 `json:"requests"`
	// Sessions is the number of distinct sessions that requests name.
	Sessions int           `json:"sessions"`
	Span     time.Duration `json:"span_ns"`
	RPS      float64       `json:"requests_per_s"`
	ISL      Lengths       `json:"isl_tokens"`
	OSL      Lengths       `json:"osl_tokens"`
	// BlockSize is that of the trace, 0 if it has no blocks or several sizes.
	BlockSize int    `json:"block_size_tokens"`
	Blocks    uint64 `json:"blocks"`
	Distinct  uint64 `json:"distinct_blocks"`
	// Reused blocks were in a prompt before, with all blocks before them: what
	// an infinite cache saves.
	Reused      uint64  `json:"reused_blocks"`
	ReuseRatio  float64 `json:"reuse_ratio"`
	TokenReuse  float64 `json:"reuse_of_tokens_ratio"`
	LongestPath int     `json:"longest_prompt_blocks"`
	// Roots are the distinct first blocks.
	Roots int `json:"distinct_first_blocks"`
	// Shared counts blocks of two requests and more.
	Shared uint64 `json:"shared_blocks"`
	// Top are the most shared prefixes where prompts part.
	Top []Prefix `json:"top_prefixes"`
	// Hot is how many of all reuses the most shared 1, 10 and 100 blocks make.
	Hot [3]float64 `json:"reuse_of_top_1_10_100_ratio"`
	// ReuseGap is the time between two uses of a block, in seconds.
	ReuseGapP50, ReuseGapP90, ReuseGapP99 float64
	// Rate is requests and TokenRate prompt tokens per bucket of time.
	RateBucket time.Duration `json:"rate_bucket_ns"`
	Rate       []uint64      `json:"requests_per_bucket"`
	TokenRate  []uint64      `json:"prompt_tokens_per_bucket"`
	// Depths[i] counts requests that found i blocks, by powers of two of i.
	Depths []uint64 `json:"reused_depth_log2"`
	// Cache is the reuse that a shared LRU cache of this many blocks keeps.
	Cache []CacheReuse `json:"cache_reuse,omitempty"`
}

// CacheReuse is the hit ratio of one shared cache.
type CacheReuse struct {
	Blocks   int     `json:"blocks"`
	HitRatio float64 `json:"hit_ratio"`
}

type statBlock struct {
	uses     uint64
	depth    int
	children int
	last     time.Duration
}

// maxBuckets bounds the points of a rate curve.
const maxBuckets = 240

// Describe reads all requests of a source.
func Describe(src Source) (*Stat, error) {
	s := &Stat{RateBucket: time.Second}
	isl, osl, gaps := hdrhistogram.New(1, 1<<28, 3), hdrhistogram.New(1, 1<<28, 3), hdrhistogram.New(1, 1e10, 3)
	blocks, sessions := map[uint64]*statBlock{}, map[uint64]struct{}{}
	mixed := false
	var path []uint64
	var first, last time.Duration
	var tokens, saved uint64
	for q, err := range src {
		if err != nil {
			return nil, err
		}
		if s.Requests == 0 {
			first = q.At
		}
		last = max(last, q.At)
		s.Requests++
		if q.SessionKey != 0 {
			sessions[q.SessionKey] = struct{}{}
		}
		s.rate(q.At-first, uint64(q.ISL))
		length(isl, &s.ISL, q.ISL)
		length(osl, &s.OSL, q.OSL)
		tokens += uint64(q.ISL)
		if len(q.Blocks) == 0 {
			continue
		}
		if s.BlockSize == 0 && !mixed {
			s.BlockSize = q.BlockSize
		} else if s.BlockSize != q.BlockSize {
			s.BlockSize, mixed = 0, true
		}
		path = q.Prefixes(path[:0])
		s.Blocks += uint64(len(path))
		s.LongestPath = max(s.LongestPath, len(path))
		reused, known := 0, true
		for i, id := range path {
			b := blocks[id]
			if b == nil {
				known = false
				b = &statBlock{depth: i + 1}
				if i > 0 {
					blocks[path[i-1]].children++
				} else {
					s.Roots++
				}
				blocks[id] = b
			} else {
				if known {
					reused++
				}
				_ = gaps.RecordValue(min(max((q.At-b.last).Milliseconds(), 1), 1e10))
			}
			b.uses++
			b.last = q.At
		}
		s.Reused += uint64(reused)
		saved += uint64(min(reused*q.BlockSize, q.ISL))
		s.Depths = bump(s.Depths, log2(reused))
	}
	s.Span, s.Sessions = last-first, len(sessions)
	if s.Span > 0 {
		s.RPS = float64(s.Requests) / s.Span.Seconds()
	}
	fill(isl, &s.ISL)
	fill(osl, &s.OSL)
	s.Distinct = uint64(len(blocks))
	if s.Blocks > 0 {
		s.ReuseRatio = float64(s.Reused) / float64(s.Blocks)
	}
	if tokens > 0 {
		s.TokenReuse = float64(saved) / float64(tokens)
	}
	sec := func(q float64) float64 { return float64(gaps.ValueAtQuantile(q)) / 1000 }
	if gaps.TotalCount() > 0 {
		s.ReuseGapP50, s.ReuseGapP90, s.ReuseGapP99 = sec(50), sec(90), sec(99)
	}
	s.structure(blocks)
	return s, nil
}

// structure finds where prompts part and how much the hottest blocks carry.
func (s *Stat) structure(blocks map[uint64]*statBlock) {
	uses := make([]uint64, 0, len(blocks))
	var extra uint64
	for id, b := range blocks {
		if b.uses > 1 {
			s.Shared++
			uses = append(uses, b.uses-1)
			extra += b.uses - 1
		}
		if b.uses > 1 && b.children != 1 {
			s.Top = append(s.Top, Prefix{ID: id, Blocks: b.depth, Requests: b.uses, Children: b.children})
		}
	}
	slices.SortFunc(s.Top, func(a, b Prefix) int {
		return cmp.Or(cmp.Compare(b.Requests*uint64(b.Blocks), a.Requests*uint64(a.Blocks)), cmp.Compare(a.ID, b.ID))
	})
	s.Top = s.Top[:min(len(s.Top), 20)]
	slices.SortFunc(uses, func(a, b uint64) int { return cmp.Compare(b, a) })
	for i, n := range []int{1, 10, 100} {
		var sum uint64
		for _, u := range uses[:min(n, len(uses))] {
			sum += u
		}
		if extra > 0 {
			s.Hot[i] = float64(sum) / float64(extra)
		}
	}
}

// AddCaches fills Cache with shared caches of several sizes, in blocks of the
// trace's own size.
func (s *Stat) AddCaches(src Source) error {
	if s.BlockSize == 0 || s.Distinct == 0 {
		return nil
	}
	for n := 1 << 10; ; n *= 4 {
		if uint64(n) >= s.Distinct {
			s.Cache = append(s.Cache, CacheReuse{Blocks: int(s.Distinct), HitRatio: s.TokenReuse})
			return nil
		}
		h, err := Bound(src, s.BlockSize, n)
		if err != nil {
			return err
		}
		s.Cache = append(s.Cache, CacheReuse{Blocks: n, HitRatio: h})
	}
}

func length(h *hdrhistogram.Histogram, l *Lengths, n int) {
	_ = h.RecordValue(int64(min(max(n, 0), 1<<27)))
	l.Buckets = bump(l.Buckets, log2(n))
}

func fill(h *hdrhistogram.Histogram, l *Lengths) {
	if h.TotalCount() == 0 {
		return
	}
	l.Mean, l.Min, l.Max = h.Mean(), h.Min(), h.Max()
	l.P50, l.P90, l.P99 = h.ValueAtQuantile(50), h.ValueAtQuantile(90), h.ValueAtQuantile(99)
}

// rate counts a request in its bucket of time, joining buckets when there are
// too many.
func (s *Stat) rate(at time.Duration, tokens uint64) {
	i := int(max(at, 0) / s.RateBucket)
	for i >= maxBuckets {
		for _, p := range []*[]uint64{&s.Rate, &s.TokenRate} {
			half := make([]uint64, (len(*p)+1)/2)
			for j, v := range *p {
				half[j/2] += v
			}
			*p = half
		}
		s.RateBucket *= 2
		i = int(max(at, 0) / s.RateBucket)
	}
	for len(s.Rate) <= i {
		s.Rate, s.TokenRate = append(s.Rate, 0), append(s.TokenRate, 0)
	}
	s.Rate[i]++
	s.TokenRate[i] += tokens
}

func log2(n int) int {
	if n < 1 {
		return 0
	}
	return int(math.Log2(float64(n))) + 1
}

func bump(h []uint64, i int) []uint64 {
	for len(h) <= i {
		h = append(h, 0)
	}
	h[i]++
	return h
}
