package health

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// Outcome is how a request that was sent to a worker ended.
type Outcome uint8

// The outcomes. Only ConnectError, ServerError and Timeout count against a
// worker: what a client did wrong, or that it left, says nothing of the worker.
// Refused is backpressure: the worker is well and has no room for the request.
const (
	Success Outcome = iota
	ConnectError
	ServerError
	Timeout
	ClientError
	Canceled
	Refused
)

var outcomeNames = [...]string{"success", "connect error", "server error", "timeout", "client error", "canceled", "refusal", "invalid"}

// String is the outcome in words.
func (o Outcome) String() string { return outcomeNames[min(int(o), len(outcomeNames)-1)] }

// Failure reports whether the outcome counts against a worker.
func (o Outcome) Failure() bool { return o == ConnectError || o == ServerError || o == Timeout }

// OutlierOptions are the settings of Outliers. Zero values stand for the
// defaults.
type OutlierOptions struct {
	Consecutive int           // failures in a row that eject: 5
	Connects    int           // connect errors in a row that eject: 2
	Share       float64       // share of failures in a window that ejects: 0.5
	MinRequests int           // requests that a window must have for Share: 20
	Window      time.Duration // 10 s
	Penalty     time.Duration // of the first ejection, doubled each time: 5 s
	MaxPenalty  time.Duration // 5 min
	Forget      time.Duration // good time after which the penalty starts small again: 5 min
	Trial       time.Duration // after which an unreported trial request counts for none: 30 s
	// Answering reports whether a worker is in the middle of answers; nil for never.
	Answering func(w *workers.Worker) bool
	// Hinted reports whether another router has ejected a worker, whose next failure here then
	// counts double; nil for never.
	Hinted func(w *workers.Worker) bool
	// Now is the clock: time.Now. Run is for that one; under another, its owner calls Step.
	Now func() time.Time
}

func (o *OutlierOptions) defaults() {
	o.Consecutive = cmp.Or(max(o.Consecutive, 0), 5)
	o.Connects = cmp.Or(max(o.Connects, 0), 2)
	o.MinRequests = cmp.Or(max(o.MinRequests, 0), 20)
	if o.Share <= 0 || o.Share > 1 {
		o.Share = 0.5
	}
	o.Window = cmp.Or(max(o.Window, 0), 10*time.Second)
	o.Penalty = cmp.Or(max(o.Penalty, 0), 5*time.Second)
	o.MaxPenalty = cmp.Or(max(o.MaxPenalty, 0), 5*time.Minute)
	o.Forget = cmp.Or(max(o.Forget, 0), 5*time.Minute)
	o.Trial = cmp.Or(max(o.Trial, 0), 30*time.Second)
	if o.Answering == nil {
		o.Answering = func(*workers.Worker) bool { return false }
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// Outliers ejects workers that answer probes but fail requests, and differ in that
// from their peers, the workers that do the same work for the same model: where all
// fail alike, the requests are at fault (see [tallies]). An ejected
// worker gets one trial request after its penalty: success brings it back,
// failure doubles the penalty. The last usable worker for a role and model is
// never ejected: a bad worker is better than none.
type Outliers struct {
	reg  *workers.Registry
	opts OutlierOptions
	sink eventlog.Sink
	wake chan struct{}

	mu      sync.Mutex
	last    uint64 // number given out last: to an ejection, a trial or a generation
	records map[*workers.State]*record
	peers   map[peerKey]*tallies
}

// record is what is known of one worker's requests.
type record struct {
	worker *workers.Worker
	counts
	windowStart time.Time
	cause       counts // what ejected it; none when a trial did
	causeOf     uint64 // the admissions, or the trial, that cause counts
	ejected     uint64 // number of the ejection; its trials have greater ones
	ejections   int    // since the last good time
	returned    time.Time
	trial       uint64    // number of the latest trial
	trialSince  time.Time // zero without a trial
	noted       bool      // reported that it was not ejected
	silent      time.Time // since when it was silent as a request last tried it
	refused     int       // requests refused since the last one that it took
	refusedFrom time.Time // when the first of these was refused
	key         peerKey   // that own and before are counted with
	own         tallies   // of its requests, ejections notwithstanding
	before      tally     // of its peers, when its failures or refusals in a row began
}

// counts are those by which a worker is judged.
type counts struct {
	failures int    // in a row
	connects int    // in a row
	streak   uint64 // number of the failures in a row
	windows  [2]window
}

type window struct{ total, failed int }

// NewOutliers makes a detector for the workers of a registry. Run must run for
// penalties to end.
func NewOutliers(reg *workers.Registry, opts OutlierOptions, sink eventlog.Sink) *Outliers {
	opts.defaults()
	return &Outliers{reg: reg, opts: opts, sink: sink, wake: make(chan struct{}, 1), records: map[*workers.State]*record{}, peers: map[peerKey]*tallies{}}
}

// Admission is the permission to send a request to a worker. It goes back with the
// report of how the request ended, and so distinguishes the request of a trial from
// those that were sent before.
type Admission struct {
	worker *workers.Worker
	number uint64 // of the worker's generation, or of the trial
	streak uint64 // of failures that its report has added to
}

// Admit asks whether a request may be sent to the worker; it is called after the choice and
// right before the dispatch. It is false for an ejected worker, and for all but one of the
// requests that want to try it. A caller that got true must Report.
func (o *Outliers) Admit(w *workers.Worker) (a Admission, ok bool) {
	// Read before the ejection: an ejection that ends in between makes this
	// admission one of the past, never the other way round.
	generation := w.State.Generation()
	e := w.State.Ejection()
	if e == nil {
		if w.State.Silent() {
			o.tries(w)
		}
		return Admission{worker: w, number: generation}, true
	}
	if e.Outlived(w.State.Probed()) {
		o.end(w, e, "probes have seen it go down and come up again")
		return Admission{worker: w, number: w.State.Generation()}, true
	}
	if !e.TakeTrial() {
		return Admission{}, false
	}
	o.mu.Lock()
	if w.State.Ejection() != e { // it has ended, and its trial with it
		o.mu.Unlock()
		return o.Admit(w)
	}
	r := o.record(w)
	r.trial, r.trialSince = o.number(), o.opts.Now()
	a = Admission{worker: w, number: r.trial}
	o.mu.Unlock()
	wait.Poke(o.wake) // Run gives the trial back if no report comes
	return a, true
}

// tries reports, once for each time of silence, that a request tries a silent worker.
func (o *Outliers) tries(w *workers.Worker) {
	c := w.State.Probed()
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.record(w)
	if r.silent.Equal(c.Since) {
		return
	}
	r.silent = c.Since
	o.sink.Emit(eventlog.Event{
		At: o.opts.Now(), Severity: eventlog.Warn, Kind: "silent_worker_used", Worker: w.Name,
		Text:   fmt.Sprintf("requests try worker %s although it answers no probe: no other worker is left for its role and models", w.Name),
		Fields: map[string]any{"reason": c.Reason},
	})
}

// number is greater than all before it. The caller holds mu.
func (o *Outliers) number() uint64 {
	o.last++
	return o.last
}

// Last brings an ejected worker back because a request has no other worker: the others went
// down after it was ejected, and a bad worker is better than none.
func (o *Outliers) Last(w *workers.Worker) {
	if e := w.State.Ejection(); e != nil {
		o.end(w, e, "no other worker is left for its role and models")
	}
}

// end ends ejection e of a worker, once.
func (o *Outliers) end(w *workers.Worker, e *workers.Ejection, why string) {
	now := o.opts.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	if w.State.Ejection() == e {
		o.reinstate(o.record(w), e, o.number(), now, why)
	}
}

// Report takes how an admitted request ended. For a stream, its first byte is
// the success. What was sent before the worker was ejected counts neither during
// the ejection nor after it; a trial is decided by the requests that were
// admitted to try the worker since it was ejected. What is returned is the
// admission to pass to Uncount.
func (o *Outliers) Report(a Admission, out Outcome) Admission {
	if a.worker == nil { // nothing was admitted
		return a
	}
	now := o.opts.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.record(a.worker)
	if e := a.worker.State.Ejection(); e != nil {
		o.judgeTrial(r, e, a, out, now)
		return a
	}
	if a.number != a.worker.State.Generation() {
		return a
	}
	o.count(r, out, now)
	if out == Refused {
		if reason := o.judgeRefusals(r, now); reason != "" {
			o.eject(r, a.number, reason, now)
			if a.worker.State.Ejection() != nil {
				r.ejections-- // it lengthens no later penalty
			}
		}
		return a
	}
	if !out.Failure() {
		return a
	}
	a.streak = r.streak
	counts := r.counts
	if o.opts.Hinted != nil && o.opts.Hinted(r.worker) {
		counts.failures++
		if out == ConnectError {
			counts.connects++
		}
	}
	if reason := o.judge(&counts, out); reason != "" && (counts.connects >= o.opts.Connects || o.differs(r, now)) {
		o.eject(r, a.number, reason, now)
	}
	return a
}

// judge says why a worker with these counts is ejected after an outcome, or "".
func (o *Outliers) judge(c *counts, out Outcome) string {
	a, b := c.windows[0], c.windows[1]
	total, failed := a.total+b.total, a.failed+b.failed
	switch {
	case c.connects > 0 && c.connects >= o.opts.Connects:
		return fmt.Sprintf("%d connect errors in a row", c.connects)
	case c.failures >= o.opts.Consecutive:
		return fmt.Sprintf("%d failures in a row, the last a %s", c.failures, out)
	case total >= o.opts.MinRequests && float64(failed) >= o.opts.Share*float64(total):
		return fmt.Sprintf("%d of %d requests failed within %s", failed, total, o.opts.Window)
	}
	return ""
}

// Uncount takes back one report of a failure, a server error or a timeout: it was
// the request's fault. An ejection that would not have come without it ends; a
// trial that it has failed is given again. Where its failure no longer counts,
// because of a success or an ejection since, there is nothing to take back.
func (o *Outliers) Uncount(a Admission) {
	if a.worker == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	state := a.worker.State
	r := o.records[state]
	if r == nil {
		return
	}
	e := state.Ejection()
	switch {
	case e == nil:
		if a.number == state.Generation() {
			r.uncount(a.streak)
			o.untally(r)
		}
	case a.number != r.causeOf:
	case r.cause == (counts{}): // a trial's failure ejected it
		r.ejections = max(0, r.ejections-1)
		e.OfferTrial()
	default:
		o.untally(r)
		r.cause.uncount(a.streak)
		if o.judge(&r.cause, ServerError) == "" {
			r.ejections--
			kept := r.cause
			// As if it had not been: what was sent before counts.
			o.reinstate(r, e, r.causeOf, o.opts.Now(), "requests that other engines broke on, too, do not count")
			r.counts = kept
		}
	}
}

// uncount takes a failure out of the counts; of those in a row only if it is one
// of them still.
func (c *counts) uncount(streak uint64) {
	if c.streak == streak {
		c.failures = max(0, c.failures-1)
	}
	for i := range c.windows {
		if w := &c.windows[i]; w.failed > 0 {
			w.failed, w.total = w.failed-1, w.total-1
			return
		}
	}
}

func (o *Outliers) record(w *workers.Worker) *record {
	r := o.records[w.State]
	if r == nil {
		r = &record{}
		o.records[w.State] = r
	}
	r.worker = w
	return r
}

// count adds an outcome to the streaks and to the sliding window, which is two
// halves of which the older one falls away.
func (o *Outliers) count(r *record, out Outcome, now time.Time) {
	half := o.opts.Window / 2
	switch age := now.Sub(r.windowStart); {
	case age >= 2*half:
		r.windows, r.windowStart = [2]window{}, now
	case age >= half:
		r.windows[0], r.windows[1] = window{}, r.windows[0]
		r.windowStart = r.windowStart.Add(half)
	}
	o.tally(r, out, now)
	switch {
	case out == Success:
		r.failures, r.connects, r.noted, r.refused = 0, 0, false, 0
		r.windows[0].total++
	case out == Refused:
		if r.refused == 0 {
			r.refusedFrom = now
		}
		r.refused++
	case out.Failure():
		if r.failures == 0 {
			r.streak = o.number()
		}
		r.failures++
		if out == ConnectError {
			r.connects++
		} else {
			r.connects = 0
		}
		r.windows[0].total++
		r.windows[0].failed++
	}
}

// eject takes the worker out unless no other worker could do its work. The failures
// that do it are those of the admissions of a number.
func (o *Outliers) eject(r *record, of uint64, reason string, now time.Time) {
	w := r.worker
	if !o.replaceable(w) {
		if !r.noted {
			r.noted = true
			o.sink.Emit(eventlog.Event{
				At: now, Severity: eventlog.Warn, Kind: "outlier_not_ejected", Worker: w.Name,
				Text:   fmt.Sprintf("worker %s is not ejected although it had %s: it is the last usable one for its role and models", w.Name, reason),
				Fields: map[string]any{"reason": reason, "role": string(w.Role)},
			})
		}
		return
	}
	if !r.returned.IsZero() && now.Sub(r.returned) >= o.opts.Forget {
		r.ejections = 0
	}
	r.ejections++
	penalty := o.penalty(r.ejections)
	w.State.SetEjection(&workers.Ejection{Since: now, Until: now.Add(penalty), Reason: reason})
	r.cause, r.causeOf, r.counts, r.trialSince, r.refused = r.counts, of, counts{}, time.Time{}, 0
	r.ejected = o.number()
	o.sink.Emit(eventlog.Event{
		At: now, Severity: eventlog.Error, Kind: "outlier_ejected", Worker: w.Name,
		Text:   fmt.Sprintf("worker %s is ejected for %s: %s", w.Name, penalty, reason),
		Fields: map[string]any{"reason": reason, "penalty_ms": penalty.Milliseconds(), "ejections": r.ejections},
	})
	wait.Poke(o.wake)
}

func (o *Outliers) penalty(n int) time.Duration {
	d := o.opts.Penalty
	for ; n > 1 && d < o.opts.MaxPenalty; n-- {
		d *= 2
	}
	return min(d, o.opts.MaxPenalty)
}

// judgeTrial draws the consequences of a request to an ejected worker. One that
// was sent before the ejection changes nothing. Of its trials each may decide,
// one that took longer than Trial allows for, too.
func (o *Outliers) judgeTrial(r *record, e *workers.Ejection, a Admission, out Outcome, now time.Time) {
	if a.number <= r.ejected {
		return
	}
	switch {
	case out == Success:
		o.reinstate(r, e, o.number(), now, "its trial request succeeded")
	case out == Refused: // it is not known yet whether it is well
		r.trialSince = time.Time{}
		r.worker.State.SetEjection(&workers.Ejection{Since: e.Since, Until: now.Add(o.penalty(r.ejections)), Reason: e.Reason})
		wait.Poke(o.wake)
	case out.Failure() && out != ConnectError && o.peersFail(r, now):
		o.reinstate(r, e, o.number(), now, "its trial request failed, and its peers fail as often")
	case out.Failure():
		o.eject(r, a.number, "the trial request ended with a "+out.String(), now)
		if r.worker.State.Ejection() == e { // kept: the others went down meanwhile
			o.reinstate(r, e, o.number(), now, "no other worker is left for its role and models")
		}
	case a.number == r.trial:
		r.trialSince = time.Time{}
		e.ReturnTrial()
	}
}

// reinstate ends ejection e; who is admitted from now on has the generation.
func (o *Outliers) reinstate(r *record, e *workers.Ejection, generation uint64, now time.Time, why string) {
	r.worker.State.SetGeneration(generation) // before anybody is admitted to it
	r.worker.State.SetEjection(nil)
	r.returned, r.trialSince, r.failures, r.connects, r.noted, r.refused = now, time.Time{}, 0, 0, false, 0
	o.sink.Emit(eventlog.Event{
		At: now, Kind: "outlier_reinstated", Worker: r.worker.Name,
		Text:   fmt.Sprintf("worker %s is back after %s: %s", r.worker.Name, now.Sub(e.Since).Round(time.Millisecond), why),
		Fields: map[string]any{"ejected_ms": now.Sub(e.Since).Milliseconds()},
	})
}

// replaceable reports whether each of the worker's models keeps another worker
// that does the same work, usable and not on trial.
func (o *Outliers) replaceable(w *workers.Worker) bool {
	snap := o.reg.Snapshot()
	models := w.Models
	if len(models) == 0 {
		models = []string{""}
	}
	for _, model := range models {
		if !slices.ContainsFunc(snap.Model(model), func(other *workers.Worker) bool {
			if other.State == w.State || other.Role.CanDecode() != w.Role.CanDecode() {
				return false
			}
			ok, _ := other.State.Usable()
			return ok && other.State.Ejection() == nil
		}) {
			return false
		}
	}
	return true
}

// Run steps until ctx ends.
func (o *Outliers) Run(ctx context.Context) error {
	changed, cancel := o.reg.Subscribe()
	defer cancel()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-o.wake:
		case <-timer.C:
		}
		if next, ok := o.Step(); ok {
			timer.Reset(max(0, next.Sub(o.opts.Now())))
		} else {
			timer.Stop()
		}
	}
}

// Step ends the penalties that are over, by the names of their workers, and forgets
// workers that left the fleet. It returns when it must be called next, and must be
// after an Admit, Report or Uncount, too.
func (o *Outliers) Step() (next time.Time, ok bool) {
	live, groups := map[*workers.State]bool{}, map[peerKey]bool{}
	for _, w := range o.reg.Snapshot().Workers {
		live[w.State], groups[keyOf(w)] = true, true
	}
	now := o.opts.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	maps.DeleteFunc(o.records, func(s *workers.State, _ *record) bool { return !live[s] })
	maps.DeleteFunc(o.peers, func(k peerKey, _ *tallies) bool { return !groups[k] })
	for _, r := range slices.SortedFunc(maps.Values(o.records), func(a, b *record) int { return strings.Compare(a.worker.Name, b.worker.Name) }) {
		e := r.worker.State.Ejection()
		if e == nil {
			continue
		}
		due := e.Until
		if e.Outlived(r.worker.State.Probed()) {
			o.reinstate(r, e, o.number(), now, "probes have seen it go down and come up again")
			continue
		}
		switch {
		case !e.OnTrial() && !now.Before(e.Until):
			e.OfferTrial()
			o.sink.Emit(eventlog.Event{
				At: now, Kind: "outlier_trial", Worker: r.worker.Name,
				Text: fmt.Sprintf("worker %s gets one trial request", r.worker.Name),
			})
			continue
		case !e.OnTrial():
		case r.trialSince.IsZero():
			continue
		default:
			if due = r.trialSince.Add(o.opts.Trial); !now.Before(due) {
				r.trialSince = time.Time{}
				e.ReturnTrial()
				continue
			}
		}
		if !ok || due.Before(next) {
			next, ok = due, true
		}
	}
	return next, ok
}
