package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/wait"
)

// Bounds of a Stage.
const (
	stageReceipts = 2000
	stageEvents   = 2000
	stageRunning  = 1 << 16 // decisions whose outcome is waited for
	stagePause    = 50 * time.Millisecond
	stagePiece    = 5000 // records between two questions
	minSpeed      = 1. / 16
	maxSpeed      = 1024 // the next is as fast as it goes
	halfMinute    = 30 * time.Second
)

// Stage shows a recorded run as a router's admin API would have shown it: it
// plays a trace in time and can be paused, stepped and taken to any place of it, faster
// or slower. Handler serves it; Run plays.
type Stage struct {
	open func() (*trace.Reader, error)
	o    PlayerOptions
	wake chan struct{}

	mu     sync.Mutex // guards the fields below
	r      *trace.Reader
	p      *Player
	m      *maker
	err    error
	ended  bool
	paused bool
	speed  float64
	played int64         // records
	now    time.Duration // of the trace
	start  time.Time
	// pending was read and is played next; nil when nothing was read ahead.
	pending *trace.Record
	// target is where the stage is on its way to while seeking.
	seeking bool
	target  time.Duration
	total   *time.Duration // of the trace; nil until it was read through

	traffic  admin.Traffic
	times    *traffic.Traffic // its windows are those of the recorded outcomes
	turned   time.Duration    // when the windows were turned
	block    int              // tokens of the router's blocks, as far as the records say
	outcomes bool             // some were recorded
	prefill  selector.Policy
	decode   selector.Policy
	thresh   int
	auto     bool // the threshold is auto
	on       string
	receipts *receipt.Ring
	running  map[string]receipt.Live // by the id that was recorded
	events   *eventlog.Log
	ranks    map[string]*stageRank
}

// stageRank is what decisions and records say of a rank.
type stageRank struct {
	role      string
	engine    string
	connector string
	block     int
	c         decision.Candidate
	requests  uint64
	batches   uint64
	lastSeq   uint64
	lastAt    time.Duration
	clears    uint64
	away      uint64 // streams that went on elsewhere
	onto      uint64 // rests that it was asked for
	reason    string
}

// NewStage opens a trace to be shown; speed 0 is as fast as it goes.
func NewStage(open func() (*trace.Reader, error), o PlayerOptions, speed float64) (*Stage, error) {
	s := &Stage{open: open, o: o, speed: speed, wake: make(chan struct{}, 1)}
	return s, s.rewind()
}

// rewind starts over. The caller holds mu, or is the only one.
func (s *Stage) rewind() error {
	r, err := s.open()
	if err != nil {
		return err
	}
	s.closeLocked()
	if s.events != nil {
		s.events.Close()
	}
	o := s.o
	if o.BlockSize == 0 {
		o.BlockSize = r.Header().BlockSize
	}
	s.r, s.p, s.m = r, NewPlayer(o), new(maker)
	if s.start = r.Header().Start; s.start.IsZero() {
		s.start = time.Unix(0, 0).UTC()
	}
	s.ended, s.err, s.played, s.now, s.pending, s.traffic = false, nil, 0, 0, nil, admin.Traffic{}
	s.times, s.turned, s.outcomes = new(traffic.Traffic), 0, false
	s.block, s.prefill, s.decode, s.thresh, s.auto, s.on = o.BlockSize, "", "", 0, false, ""
	// Of one epoch, so that a cursor means the same after going back.
	s.receipts, s.running = receipt.NewRing(receipt.Options{Capacity: stageReceipts, Epoch: 1}), map[string]receipt.Live{}
	s.events, s.ranks = eventlog.New(stageEvents, nil), map[string]*stageRank{}
	return nil
}

func (s *Stage) closeLocked() {
	if s.r != nil {
		s.r.Close()
		s.p.Close()
		s.r, s.p = nil, nil
	}
}

// Close frees the stage. Run and the handler must have ended.
func (s *Stage) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeLocked()
}

// Run plays until ctx ends; at the end of the trace it stays there. Beside, the trace
// is read through once for its length.
func (s *Stage) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	var measuring sync.WaitGroup
	measuring.Go(func() { s.measure(ctx) })
	defer measuring.Wait()
	defer stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var wallAt time.Time // when the trace was at traceAt; zero to start over
	var traceAt time.Duration
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.wake:
			wallAt = time.Time{}
		case <-timer.C:
		}
		pause := stagePause
		s.mu.Lock()
		switch {
		case s.seeking:
			wallAt = time.Time{}
			if s.seeking = !s.playTo(s.target); s.seeking {
				pause = 0
			}
		case s.paused || s.ended:
			wallAt = time.Time{}
		default:
			if wallAt.IsZero() {
				wallAt, traceAt = time.Now(), s.now
			}
			if s.speed > 0 {
				s.playTo(traceAt + time.Duration(float64(time.Since(wallAt))*s.speed))
			} else {
				for n := 0; n < stagePiece && !s.ended; n++ {
					s.next()
				}
			}
		}
		err := s.err
		s.mu.Unlock()
		if err != nil {
			return err
		}
		timer.Reset(pause)
	}
}

// measure finds the length of the trace. What cannot be read ends it, as it ends
// playing.
func (s *Stage) measure(ctx context.Context) {
	r, err := s.open()
	if err != nil {
		return // it opened before: its length stays unknown
	}
	defer r.Close()
	total := time.Duration(0)
	for ctx.Err() == nil {
		var rec trace.Record
		if err := r.Next(&rec); err != nil {
			s.mu.Lock()
			s.total = &total
			s.mu.Unlock()
			return
		}
		total = max(total, rec.Time)
	}
}

// playTo plays a bounded piece of what was recorded up to a time, so that questions are
// answered in between, and reports whether the stage is there. The caller holds mu.
func (s *Stage) playTo(t time.Duration) bool {
	for range stagePiece {
		rec := s.ahead()
		if rec == nil {
			return true
		}
		if rec.Time > t {
			s.now = max(s.now, t)
			return true
		}
		s.next()
	}
	return false
}

// Control does "pause", "play", "toggle", "step", "back", "faster" or "slower"; step
// and back go n records, with a pause.
func (s *Stage) Control(do string, n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n = max(n, 1)
	switch do {
	case "pause":
		s.paused = true
	case "play":
		s.paused = false
	case "toggle":
		s.paused = !s.paused
	case "step":
		s.paused, s.seeking = true, false
		for range n {
			s.next()
		}
	case "back":
		s.paused, s.seeking = true, false
		target := max(s.played-int64(n), 0)
		if err := s.rewind(); err != nil {
			return err
		}
		for s.played < target && !s.ended {
			s.next()
		}
	case "faster":
		if s.speed *= 2; s.speed > maxSpeed {
			s.speed = 0
		}
	case "slower":
		if s.speed /= 2; s.speed == 0 {
			s.speed = maxSpeed
		}
		s.speed = max(s.speed, minSpeed)
	default:
		return fmt.Errorf("%q is not one of pause, play, toggle, step, back, faster, slower, seek", do)
	}
	wait.Poke(s.wake)
	return s.err
}

// Seek begins to go to a place of the trace: a time such as "90s", one from here such
// as "+10s" or "-1m", a share of its length such as "50%", or "end". Run goes there, all
// up to it being played as fast as it can; a pause stays a pause.
func (s *Stage) Seek(to string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := s.now
	if s.seeking {
		from = s.target
	}
	var target time.Duration
	if to == "end" {
		target = math.MaxInt64
		if s.total != nil {
			target = *s.total
		}
	} else if text, ok := strings.CutSuffix(to, "%"); ok {
		share, err := strconv.ParseFloat(text, 64)
		switch {
		case err != nil || !(share >= 0 && share <= 100):
			return fmt.Errorf("%q is not a share from 0%% to 100%%", to)
		case s.total == nil:
			return errors.New("the length of the recording is not known yet: it is being read")
		}
		target = time.Duration(share / 100 * float64(*s.total))
	} else {
		d, err := time.ParseDuration(to)
		if err != nil {
			return fmt.Errorf("%q is not a time such as 90s, +10s or -1m, a share such as 50%%, or end", to)
		}
		target = d
		if to[0] == '+' || to[0] == '-' {
			if target = from + d; d > 0 && target < from {
				target = math.MaxInt64
			}
		}
	}
	if s.total != nil {
		target = min(target, *s.total)
	}
	target = max(target, 0)
	if target < s.now {
		if err := s.rewind(); err != nil {
			return err
		}
	}
	s.seeking, s.target = true, target
	wait.Poke(s.wake)
	return nil
}

// ahead is the record that is played next, nil at the end. The caller holds mu.
func (s *Stage) ahead() *trace.Record {
	if s.pending != nil || s.ended {
		return s.pending
	}
	rec := new(trace.Record)
	if err := s.r.Next(rec); err != nil {
		s.ended = true
		if !errors.Is(err, io.EOF) {
			s.err = err
		}
		return nil
	}
	s.pending = rec
	return rec
}

// next plays one record. The caller holds mu.
func (s *Stage) next() {
	rec := s.ahead()
	if rec == nil {
		return
	}
	s.pending = nil
	s.played++
	s.now = max(s.now, rec.Time)
	for n := 0; s.now-s.turned >= halfMinute; n++ {
		s.turned += halfMinute
		if n < 2 { // both halves are new then
			s.times.Rotate()
		}
	}
	if err := s.p.Play(rec); err != nil {
		s.err, s.ended = err, true
		return
	}
	at := s.start.Add(rec.Time)
	switch rec.Kind {
	case trace.KindRank:
		k := s.rank(rec.Rank)
		if rec.RankInfo.New || rec.RankInfo.Kept {
			s.event(at, "feed_began", eventlog.Info, rec.Rank, rec.Rank+": the feed of KV events began")
		}
		k.block = rec.RankInfo.BlockSize
		s.block = cmp.Or(s.block, k.block)
	case trace.KindBatch:
		k := s.rank(rec.Rank)
		k.batches, k.lastSeq, k.lastAt = k.batches+1, rec.Batch.Seq, rec.Time
	case trace.KindClear:
		k := s.rank(rec.Rank)
		k.clears, k.reason = k.clears+1, rec.Clear.Reason
		s.event(at, "feed_unknown", eventlog.Warn, rec.Rank, rec.Rank+": entries dropped and rebuilt: "+rec.Clear.Reason)
	case trace.KindFeed:
		if rec.Trusted {
			s.event(at, "feed_trusted", eventlog.Info, rec.Rank, rec.Rank+": entries are trusted")
		} else {
			s.event(at, "feed_untrusted", eventlog.Warn, rec.Rank, rec.Rank+": entries are not trusted")
		}
	case trace.KindDropped:
		s.event(at, "records_dropped", eventlog.Warn, "", fmt.Sprintf("%d records were lost while recording", rec.Dropped))
	case trace.KindDecision:
		s.decision(rec, at)
	case trace.KindOutcome:
		s.outcome(rec.Outcome)
	default:
	}
}

func (s *Stage) rank(label string) *stageRank {
	k := s.ranks[label]
	if k == nil {
		k = &stageRank{role: "aggregated", engine: "vllm"}
		s.ranks[label] = k
	}
	return k
}

func (s *Stage) event(at time.Time, kind string, severity eventlog.Severity, rank, text string) {
	worker, _, _ := trace.SplitRank(rank)
	s.events.Add(eventlog.Event{At: at, Kind: kind, Severity: severity, Worker: worker, Rank: rank, Text: text})
}

func (s *Stage) decision(rec *trace.Record, at time.Time) {
	d := rec.Decision
	r := s.m.Receipt(d, at)
	in := d.Input
	rule := &d.Settings.Rule
	s.prefill, s.decode, s.thresh, s.auto, s.on = d.Settings.Prefill, d.Settings.Decode, rule.Threshold, rule.Auto, string(rule.On)
	s.block = cmp.Or(in.Decode.BlockSize, s.block)
	for _, p := range []*selector.Input{&in.Decode, &in.Prefill} {
		peers, role := in.DecodePeers, "aggregated"
		if p == &in.Prefill {
			peers, role = in.PrefillPeers, "prefill"
		} else if len(in.PrefillPeers) > 0 {
			role = "decode"
		}
		for i := range p.Candidates {
			k, w := s.rank(p.Candidates[i].Rank), peers[i].Worker
			k.c = p.Candidates[i]
			k.engine, k.connector, k.role = string(w.Engine), string(w.Connector), cmp.Or(string(w.Role), role)
		}
	}
	for _, label := range []string{d.DecodeRank, d.PrefillRank} {
		if label != "" {
			s.rank(label).requests++
		}
	}
	if d.Attempt <= 1 {
		s.traffic.Requests++
		s.traffic.PredictedTokens += uint64(max(d.Cached, 0))
	} else {
		s.traffic.Retries++
	}
	switch d.Path {
	case "local":
		s.traffic.Local++
	case "remote":
		s.traffic.Remote++
	}
	l, ok := s.running[d.ID]
	if !ok {
		l = s.receipts.Begin(at)
		if len(s.running) < stageRunning {
			s.running[d.ID] = l
		}
	}
	l.Update(func(was *receipt.Receipt) {
		was.Begin(d.Attempt)
		r.Earlier, r.EarlierOmitted = was.Earlier, was.EarlierOmitted
		*was = *r
	})
}

func (s *Stage) outcome(o *trace.Outcome) {
	s.running[o.ID].Finish(func(r *receipt.Receipt) {
		r.Time = s.start.Add(time.Duration(o.ReceivedUS) * time.Microsecond)
		r.Stream, r.Outcome, r.Legs, r.LegsOmitted, r.Continued = o.Stream, o.Result, o.Legs, o.LegsOmitted, o.Continued
		r.Notes = append(r.Notes, o.Notes...)
	})
	delete(s.running, o.ID)
	s.outcomes = true
	s.moves(o)
	t, out := &s.traffic, &o.Result
	switch {
	case out.Cancelled:
		t.Cancelled++
	case out.Status >= 500:
		t.Failed++
	case out.Status >= 400:
		t.Rejected++
	default:
		t.Completed++
	}
	t.PromptTokens += uint64(max(out.PromptTokens, 0))
	t.CachedTokens += uint64(max(out.CachedTokens, 0))
	t.CompletionTokens += uint64(max(out.CompletionTokens, 0))
	if out.SilentRecompute {
		t.Recomputes++
	}
	if out.TTFTMS >= 0 {
		s.times.TTFT.Add(time.Duration(out.TTFTMS * float64(time.Millisecond)))
	}
	if out.E2EMS >= 0 {
		s.times.E2E.Add(time.Duration(out.E2EMS * float64(time.Millisecond)))
	}
}

// moves counts where a stream went on elsewhere, by the rank whose leg broke off and those
// that were asked for the rest.
func (s *Stage) moves(o *trace.Outcome) {
	if len(o.Continued) == 0 {
		return
	}
	for _, c := range o.Continued {
		var from *stageRank
		for i := range o.Legs {
			if l := &o.Legs[i]; l.Kind == string(route.Decode) && l.Worker == c.From && l.DispatchMS <= c.AtMS {
				from = s.ranks[l.Rank]
			}
		}
		if from != nil {
			from.away++
		}
	}
	for i := range o.Legs {
		if l := &o.Legs[i]; l.Kind == string(route.Decode) && l.DispatchMS >= o.Continued[0].AtMS && s.ranks[l.Rank] != nil {
			s.ranks[l.Rank].onto++
		}
	}
}
