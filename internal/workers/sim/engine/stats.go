package engine

import (
	"maps"
	"slices"
	"time"
)

// Histogram counts values in fixed buckets, as Prometheus does.
type Histogram struct {
	// Bounds are the upper bounds of all buckets but the last.
	Bounds []float64
	// Counts has one more element than Bounds; not cumulative.
	Counts []uint64
	Sum    float64
}

func histogram(bounds ...float64) Histogram {
	return Histogram{Bounds: bounds, Counts: make([]uint64, len(bounds)+1)}
}

// Observe counts v.
func (h *Histogram) Observe(v float64) {
	i, _ := slices.BinarySearch(h.Bounds, v)
	h.Counts[i]++
	h.Sum += v
}

// Stats is what a rank has counted since its start. Tokens unless said.
type Stats struct {
	// Running, Waiting and Deferred are requests at the moment; Deferred ones
	// wait for remote KV and are among Waiting.
	Running, Waiting, Deferred int
	// KVUsage is the share of blocks in use, 0 to 1; UsedBlocks their number.
	KVUsage    float64
	UsedBlocks int
	Pinned     int
	// Senders are those of Mooncake's connector that are taken.
	Senders int

	PrefixQueries, PrefixHits     uint64
	ExternalQueries, ExternalHits uint64
	Prompt, Generated             uint64
	// Local, Cached and External split the prompt tokens by source.
	Local, Cached, External uint64
	Preemptions             uint64
	Finished                map[Finish]uint64
	Steps                   uint64

	Transfers, FailedTransfers, Descriptors uint64
	TransferBytes, TransferSeconds          float64
	Expired, LateNotes                      uint64

	TTFT, ITL, E2E, Queue, Prefill, Decode Histogram
	PromptLen, AnswerLen                   Histogram
}

func newStats() Stats {
	seconds := []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	tokens := []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}
	return Stats{
		Finished:  make(map[Finish]uint64),
		TTFT:      histogram(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
		ITL:       histogram(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
		E2E:       histogram(seconds...),
		Queue:     histogram(seconds...),
		Prefill:   histogram(seconds...),
		Decode:    histogram(seconds...),
		PromptLen: histogram(tokens...),
		AnswerLen: histogram(tokens...),
	}
}

// Stats is a copy of the rank's counters at now.
func (r *Rank) Stats(now Time) Stats {
	r.Advance(now)
	s := r.stats
	s.Finished = maps.Clone(r.stats.Finished)
	for _, h := range []*Histogram{&s.TTFT, &s.ITL, &s.E2E, &s.Queue, &s.Prefill, &s.Decode, &s.PromptLen, &s.AnswerLen} {
		h.Counts = slices.Clone(h.Counts)
	}
	for _, p := range r.reqs {
		switch p.state {
		case running:
			s.Running++
		case pulling:
			s.Deferred++
			s.Waiting++
		case waiting:
			s.Waiting++
		case done:
		}
	}
	s.KVUsage = r.cache.Usage()
	s.UsedBlocks = r.cache.Capacity() - r.cache.Free()
	s.Pinned, s.Senders = len(r.pinned), min(len(r.asks), senders)
	return s
}

// Load is the number of running and waiting requests and the share of used
// blocks, cheaper than Stats.
func (r *Rank) Load() (runs, waits int, usage float64) {
	return len(r.running), len(r.reqs) - len(r.running), r.cache.Usage()
}

// countPrompt counts where a prompt's tokens come from, once.
func (r *Rank) countPrompt(p *request) {
	if p.counted {
		return
	}
	p.counted = true
	n := uint64(len(p.Tokens))
	s := &r.stats
	s.PrefixQueries += n
	s.PrefixHits += uint64(p.cached)
	s.Cached += uint64(p.cached)
	if r.cfg.Connector {
		s.ExternalQueries += n - uint64(p.cached)
		s.ExternalHits += uint64(p.external)
	}
	if p.Pull == nil {
		s.Local += n - uint64(p.cached) - uint64(p.external)
		s.External += uint64(p.external)
	}
}

func (r *Rank) countToken(p *request, made int) {
	r.stats.Generated++
	if made == 1 {
		p.first = r.now
		r.stats.Prompt += uint64(len(p.Tokens))
		r.stats.TTFT.Observe((r.now - p.arrived).Seconds())
	} else {
		r.stats.ITL.Observe((r.now - p.last).Seconds())
	}
	p.last = r.now
}

func (r *Rank) countEnd(p *request, out Output) {
	s := &r.stats
	s.Finished[out.Finish]++
	if out.Finish != FinishLength && out.Finish != FinishStop {
		return
	}
	since := func(from, to Time) float64 { return max(to-from, time.Duration(0)).Seconds() }
	s.E2E.Observe(since(p.arrived, r.now))
	s.Queue.Observe(since(p.arrived, p.admitted))
	s.PromptLen.Observe(float64(len(p.Tokens)))
	s.AnswerLen.Observe(float64(len(p.tokens) - len(p.Tokens)))
	if p.Embed {
		s.Prompt += uint64(len(p.Tokens))
	} else {
		s.Prefill.Observe(since(p.admitted, p.first))
		s.Decode.Observe(since(p.first, r.now))
	}
}
