package replay

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/wait"
)

// Options say how a trace is played.
type Options struct {
	Player PlayerOptions
	// Speed is how many times faster than recorded; 0 is as fast as it goes.
	Speed float64
	// From and To are times since the trace's start; what lies before From is
	// played at full speed and not counted as decisions, what lies after To not
	// at all. To 0 is the end.
	From, To time.Duration
	// At stops after the record of this line; 0 does not.
	At int64
	// Verify makes recorded decisions again.
	Verify bool
	// Each is called after each record that was played; an error ends the
	// session, ErrStop without being one. It may be nil.
	Each func(*trace.Record, *Player) error
	// Progress is called now and then, from the goroutine that plays; may be nil.
	Progress func(Progress)
}

// ErrStop ends a session early.
var ErrStop = errors.New("stop")

// Progress is how far a session is.
type Progress struct {
	Records, Blocks uint64
	// Consumed bytes of the file as it is stored.
	Consumed int64
	// Time in the trace, and since the session began.
	Trace, Wall time.Duration
}

// Report is what a session found.
type Report struct {
	Name   string       `json:"trace"`
	Format trace.Format `json:"format"`
	Lines  int64        `json:"lines"`
	Bytes  int64        `json:"bytes"`
	// Span is from the first record to the last.
	Span time.Duration `json:"span_ns"`

	Records  map[trace.Kind]uint64 `json:"records"`
	Bad      int64                 `json:"bad_lines"`
	FirstBad int64                 `json:"first_bad_line,omitempty"`
	Unknown  int64                 `json:"unknown_records,omitempty"`
	Skipped  int64                 `json:"skipped_records,omitempty"`
	// Forgotten is how often settings and workers were too many to be kept.
	Forgotten int64  `json:"forgotten_descriptions,omitempty"`
	Order     int64  `json:"reordered_records"`
	Cut       bool   `json:"cut"`
	Counts    Counts `json:"events"`

	Ranks    []RankState `json:"ranks"`
	Blocks   int64       `json:"blocks_at_end"`
	Distinct int64       `json:"distinct_blocks_at_end"`
	Nodes    int64       `json:"nodes_at_end"`
	Memory   int64       `json:"index_bytes"`
	Heap     uint64      `json:"heap_bytes"`
	Checksum string      `json:"index_checksum"`

	// Decisions and the share of their prompts that was predicted as cached.
	Decisions uint64  `json:"decisions"`
	Hit       float64 `json:"predicted_hit_ratio"`
	// Apply is the time that one batch took, in microseconds.
	ApplyP50 float64 `json:"apply_p50_us"`
	ApplyP99 float64 `json:"apply_p99_us"`
	ApplyMax float64 `json:"apply_max_us"`

	WallS     float64 `json:"wall_s"`
	RecordsPS float64 `json:"records_per_s"`
	BlocksPS  float64 `json:"blocks_per_s"`

	Verify *VerifyReport `json:"verify,omitempty"`
}

// Play plays a trace to its end.
func Play(ctx context.Context, r *trace.Reader, o Options) (*Report, error) {
	if o.Player.BlockSize == 0 {
		o.Player.BlockSize = r.Header().BlockSize
	}
	p := NewPlayer(o.Player)
	defer p.Close()
	s := &session{
		o: o, p: p, r: r, apply: hdrhistogram.New(1, 1e11, 3), began: time.Now(),
		report: &Report{Records: map[trace.Kind]uint64{}},
	}
	if o.Verify {
		s.v = NewVerifier(p)
	}
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	return s.finish()
}

type session struct {
	o      Options
	p      *Player
	v      *Verifier
	r      *trace.Reader
	report *Report
	apply  *hdrhistogram.Histogram // ns
	began  time.Time

	first, last time.Duration
	records     uint64
	prompt, hit uint64
	paced       time.Time     // the wall time of
	pacedAt     time.Duration // this time of the trace
}

func (s *session) run(ctx context.Context) error {
	for rec, err := range s.r.All() {
		if err != nil {
			return err
		}
		if s.o.To > 0 && rec.Time >= s.o.To {
			return nil
		}
		if s.records == 0 {
			s.first, s.last = rec.Time, rec.Time
		}
		if err := s.pace(ctx, rec.Time); err != nil {
			return err
		}
		if err := s.play(rec); err != nil {
			if errors.Is(err, ErrStop) {
				return nil
			}
			return err
		}
		if s.o.At > 0 && rec.Line >= s.o.At {
			return nil
		}
		if s.records&0x3ff == 0 {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.progress()
		}
	}
	return nil
}

func (s *session) progress() {
	if s.o.Progress != nil {
		c := s.p.Counts()
		s.o.Progress(Progress{Records: s.records, Blocks: c.Stored + c.Removed, Consumed: s.r.Consumed(), Trace: s.last - s.first, Wall: time.Since(s.began)})
	}
}

// pace waits until a time of the trace has come.
func (s *session) pace(ctx context.Context, at time.Duration) error {
	if s.o.Speed <= 0 || at < s.o.From {
		return nil
	}
	if s.paced.IsZero() {
		s.paced, s.pacedAt = time.Now(), at
		return nil
	}
	left := time.Until(s.paced.Add(time.Duration(float64(at-s.pacedAt) / s.o.Speed)))
	if left < time.Millisecond {
		return nil
	}
	s.progress()
	if !wait.For(ctx, left) {
		return ctx.Err()
	}
	return nil
}

func (s *session) play(rec *trace.Record) error {
	s.records++
	s.report.Records[rec.Kind]++
	s.last = max(s.last, rec.Time)
	if d := rec.Decision; d != nil && rec.Time >= s.o.From {
		s.report.Decisions++
		s.prompt += uint64(max(d.Input.Facts.ISL, 0))
		s.hit += uint64(max(d.Cached, 0))
	}
	switch {
	case s.v != nil && (rec.Decision == nil || rec.Time >= s.o.From):
		if err := s.v.Play(rec); err != nil {
			return err
		}
	case rec.Kind == trace.KindBatch || rec.Kind == trace.KindEvent:
		start := time.Now()
		err := s.p.Play(rec)
		_ = s.apply.RecordValue(min(int64(time.Since(start)), 1e11))
		if err != nil {
			return err
		}
	default:
		if err := s.p.Play(rec); err != nil {
			return err
		}
	}
	if s.o.Each != nil && rec.Time >= s.o.From {
		return s.o.Each(rec, s.p)
	}
	return nil
}

func (s *session) finish() (*Report, error) {
	rep := s.report
	if s.v != nil {
		v, err := s.v.Finish()
		if err != nil {
			return nil, err
		}
		rep.Verify = v
	}
	wall := time.Since(s.began)
	st := s.r.Stats()
	rep.Name, rep.Format, rep.Lines, rep.Bytes = s.r.Name(), s.r.Format(), st.Lines, st.Bytes
	rep.Bad, rep.FirstBad, rep.Unknown, rep.Skipped, rep.Forgotten, rep.Order, rep.Cut = st.Bad, st.FirstBad, st.Unknown, st.Skipped, st.Forgotten, st.Reordered, st.Cut
	if rep.Verify != nil {
		rep.Verify.Cut = rep.Cut
	}
	rep.Span, rep.Counts, rep.Ranks = s.last-s.first, s.p.Counts(), s.p.Ranks()
	ix := s.p.index.Stats()
	rep.Blocks, rep.Distinct, rep.Nodes, rep.Memory = ix.Memberships, ix.Blocks, ix.Nodes, ix.Bytes
	rep.Checksum = fmt.Sprintf("%016x", s.p.index.Checksum())
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	rep.Heap = m.HeapAlloc
	if s.prompt > 0 {
		rep.Hit = float64(s.hit) / float64(s.prompt)
	}
	us := func(q float64) float64 { return float64(s.apply.ValueAtQuantile(q)) / 1000 }
	if s.apply.TotalCount() > 0 {
		rep.ApplyP50, rep.ApplyP99, rep.ApplyMax = us(50), us(99), float64(s.apply.Max())/1000
	}
	rep.WallS = wall.Seconds()
	if rep.WallS > 0 {
		rep.RecordsPS = float64(s.records) / rep.WallS
		rep.BlocksPS = float64(rep.Counts.Stored+rep.Counts.Removed) / rep.WallS
	}
	s.progress()
	return rep, nil
}
