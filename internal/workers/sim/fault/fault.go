// Package fault is what can go wrong with a simulated engine on purpose.
package fault

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// Duration is a time.Duration that JSON writes as text ("1.5s") and reads as
// text or as a number of seconds.
type Duration time.Duration

// MarshalJSON writes the duration as text.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON reads text or a number of seconds.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	switch v := v.(type) {
	case nil:
		return nil
	case float64:
		*d = Duration(v * float64(time.Second))
		return nil
	case string:
		x, err := time.ParseDuration(v)
		*d = Duration(x)
		return err
	}
	return fmt.Errorf("duration %s is neither text nor a number of seconds", b)
}

// Set is the faults of one engine. The zero Set is a healthy engine. Rates are
// shares from 0 to 1, drawn from the engine's seeded source.
type Set struct {
	// Refuse closes the HTTP listener: connections are refused.
	Refuse bool `json:"refuse,omitempty"`
	// Hang leaves every request unanswered, as a stopped process does.
	Hang bool `json:"hang,omitempty"`
	// Delay holds every answer back, by up to Jitter more.
	Delay  Duration `json:"delay,omitempty"`
	Jitter Duration `json:"delay_jitter,omitempty"`
	// ErrorRate of the requests get ErrorStatus (500 if 0) immediately.
	ErrorRate   float64 `json:"error_rate,omitempty"`
	ErrorStatus int     `json:"error_status,omitempty"`
	// Poison and Deadly are texts, "" for none. A generation request whose body contains
	// Poison gets ErrorStatus, from every engine with the same text; of one that contains
	// Deadly the engine dies.
	Poison string `json:"poison,omitempty"`
	Deadly string `json:"deadly,omitempty"`
	// HangRate of the requests are never answered.
	HangRate float64 `json:"hang_rate,omitempty"`
	// DieRate of the answers are cut off after DieAfter tokens: the
	// connection is reset.
	DieRate  float64 `json:"die_rate,omitempty"`
	DieAfter int     `json:"die_after_tokens,omitempty"`
	// EndRate of the prefills for a remote decode end with their first token
	// for the reason EndReason ("stop" if empty) and give no transfer
	// parameters: so does an engine whose first token ends the answer, and,
	// with "length", one without a KV connector.
	EndRate   float64 `json:"end_rate,omitempty"`
	EndReason string  `json:"end_reason,omitempty"`
	// LateRate of the generation answers are followed immediately by the idle 408
	// of a server that lost its patience, which answers no request.
	LateRate float64 `json:"late_rate,omitempty"`
	// CloseIdle closes connections that were without a request for so long; 0 is
	// what engines do.
	CloseIdle Duration `json:"close_idle,omitempty"`
	// All extends delay, error and hang rates from generation requests to every path.
	All bool `json:"all_paths,omitempty"`
	// Slow multiplies the times of all steps and transfers; 0 and 1 do nothing.
	Slow float64 `json:"slow,omitempty"`
	// DropEvents, ReorderEvents and CorruptEvents are shares of the event batches,
	// which the replay has whole; LoseEvents of those that fail to be published,
	// which it has not: their numbers are used up.
	DropEvents    float64 `json:"drop_events,omitempty"`
	ReorderEvents float64 `json:"reorder_events,omitempty"`
	CorruptEvents float64 `json:"corrupt_events,omitempty"`
	LoseEvents    float64 `json:"lose_events,omitempty"`
	// DropReplay is the share of a replay's messages that get lost, its end
	// marker among them: a ROUTER drops what finds a full queue.
	DropReplay float64 `json:"drop_replay,omitempty"`
	// For clears the faults after a time; 0 keeps them.
	For Duration `json:"for,omitempty"`
}

// Validate reports every value that makes no sense.
func (s Set) Validate() error {
	var errs []error
	for _, r := range []struct {
		key string
		v   float64
	}{
		{"error_rate", s.ErrorRate},
		{"hang_rate", s.HangRate},
		{"die_rate", s.DieRate},
		{"end_rate", s.EndRate},
		{"late_rate", s.LateRate},
		{"drop_events", s.DropEvents},
		{"reorder_events", s.ReorderEvents},
		{"corrupt_events", s.CorruptEvents},
		{"lose_events", s.LoseEvents},
		{"drop_replay", s.DropReplay},
	} {
		if math.IsNaN(r.v) || r.v < 0 || r.v > 1 {
			errs = append(errs, fmt.Errorf("%s: %v is not a share from 0 to 1", r.key, r.v))
		}
	}
	if math.IsNaN(s.Slow) || s.Slow < 0 || s.Slow > 1e6 {
		errs = append(errs, fmt.Errorf("slow: %v is not between 0 and 1e6", s.Slow))
	}
	if s.ErrorStatus != 0 && (s.ErrorStatus < 400 || s.ErrorStatus > 599) {
		errs = append(errs, fmt.Errorf("error_status: %d is not between 400 and 599", s.ErrorStatus))
	}
	if s.DieAfter < 0 {
		errs = append(errs, fmt.Errorf("die_after_tokens: %d is negative", s.DieAfter))
	}
	switch s.EndReason {
	case "", "stop", "repetition", "length":
	default:
		errs = append(errs, fmt.Errorf("end_reason: %q is none of stop, repetition, length", s.EndReason))
	}
	for _, d := range []struct {
		key string
		v   Duration
	}{{"delay", s.Delay}, {"delay_jitter", s.Jitter}, {"close_idle", s.CloseIdle}, {"for", s.For}} {
		if d.v < 0 {
			errs = append(errs, fmt.Errorf("%s: %v is negative", d.key, time.Duration(d.v)))
		}
	}
	return errors.Join(errs...)
}

// Source draws from rates. It is safe for concurrent use and deterministic in
// its seed and the order of the draws.
type Source struct {
	mu  sync.Mutex
	set Set
	rnd *rand.Rand
	// change is closed and replaced when the set changes.
	change chan struct{}
}

// NewSource returns a Source of a set.
func NewSource(seed uint64, set Set) *Source {
	return &Source{set: set, rnd: rand.New(rand.NewPCG(seed, 0x6661756c74)), change: make(chan struct{})}
}

// Set is the present set, and a channel that is closed when it changes.
func (s *Source) Set() (Set, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.set, s.change
}

// Replace changes the set.
func (s *Source) Replace(set Set) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set = set
	close(s.change)
	s.change = make(chan struct{})
}

// Hit draws whether something with a rate happens.
func (s *Source) Hit(rate float64) bool {
	if rate <= 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rnd.Float64() < rate
}

// Delay draws the present delay.
func (s *Source) Delay() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := time.Duration(s.set.Delay)
	if s.set.Jitter > 0 {
		d += time.Duration(s.rnd.Int64N(int64(s.set.Jitter)))
	}
	return d
}

// IntN draws a number below n.
func (s *Source) IntN(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rnd.IntN(n)
}
