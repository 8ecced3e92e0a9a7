// Package attempt decides what follows when an attempt at a request has failed, and
// which workers are excluded from what follows. Before the client got a byte, it is
// a retry elsewhere, one without remote prefill, or the end. In the middle of a
// stream, another engine continues it, or it ends.
//
// That is pure: the same history gives the same answer, no clock is read and
// nothing is changed. The caller carries the answer out, with all its effects on
// the [Budget] of retries, metrics, events and the health of workers.
package attempt

import (
	"slices"

	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Allowance is what the operator allows.
type Allowance struct {
	// Attempts is how many there may be of one request.
	Attempts int
	// LocalPrefill says that a decode rank prefills alone when no prefill worker does; there is
	// one that can.
	LocalPrefill bool
	// LocalWithoutParams says that it does so, too, when a prefill gave no
	// transfer parameters.
	LocalWithoutParams bool
	// Continuations is how often the rest of one stream may come from another
	// engine; 0 for never.
	Continuations int
}

// Failure is a leg that failed.
type Failure struct {
	// Worker is the one that the leg was sent to. The state names the process:
	// it is the same through all descriptions of a worker, and another one
	// when a worker of the same name comes in its place.
	Worker *workers.State
	// Name is the worker's, for people: it may have left the fleet since.
	Name   string
	Phase  route.Phase
	Reason Reason
	// Sent says that the engine may have read something of the request.
	Sent bool
	// Begun says that the client has a part of the leg's answer.
	Begun bool
	// Admission is the leave with which the leg was sent.
	Admission health.Admission
	// Other is the worker of the other leg where that had a part in this one.
	Other *workers.State
	// Alive says of a stale connection that the worker has shown a sign of life since.
	Alive bool
	// OtherLost says that the other worker, which had the request at the same time, gives
	// no sign of life either.
	OtherLost bool
}

// broke reports whether the engine broke while it worked on the request.
func (f *Failure) broke() bool { return f.Sent && f.Reason.Means().Broke }

// MayHaveDied reports whether the engine may have died of the request, or hang.
func (f *Failure) MayHaveDied() bool { return f.Sent && f.Reason.Means().Lost }

// suspect is the worker of the other leg when either of the two may be at fault.
func (f *Failure) suspect() *workers.State {
	if f.Reason.Means().Mutual {
		return f.Other
	}
	return nil
}

// Ban keeps a worker out of the further attempts of one request.
type Ban struct {
	Worker *workers.State
	// Phase is the work that it is not given, "" for any.
	Phase route.Phase
	// Why is for people.
	Why string
	// Suspect says that the fault may have been another worker's, or that this request had no
	// fault. Suspects come back when their phase has no other worker.
	Suspect bool
}

// History is what is known of the attempts of one request.
type History struct {
	// Attempts counts those that failed after they were begun: neither a worker
	// that was sent nothing or had closed the connection nor workers that come
	// back use one up.
	Attempts int
	// Continued counts how often the rest of the stream came from another engine.
	// Attempts and Failures start over each time.
	Continued int
	// Local says that remote prefill was given up.
	Local bool
	// Failures are the failed legs, oldest first.
	Failures []Failure
	// Bans are in force.
	Bans []Ban
	// Stays keep the next attempt on workers, at most one for each phase.
	Stays []Stay
	// Lost are the engines that may have died of the request, or hang, each once. They
	// are counted over all continuations of a stream.
	Lost []Loss
}

// Stay names the one worker that the next attempt of a phase may use.
type Stay struct {
	Worker *workers.State
	Phase  route.Phase
	// Computed says that the worker has the prompt's KV: it has nothing to prefill.
	Computed bool
	// Why is for people.
	Why string
}

// Loss is an engine that may have died of the request, or hangs.
type Loss struct {
	Worker *workers.State
	// Sure is false if a reused connection broke immediately, which may have been closed as
	// idle. The engine counts as lost until it answers this request.
	Sure bool
}

// Add puts a failure, which ended an attempt, into the history.
func (h *History) Add(f Failure) {
	switch {
	case f.MayHaveDied():
		h.lose(Loss{f.Worker, true})
	case f.Reason == Stale && !f.Alive:
		h.lose(Loss{f.Worker, false})
	case f.Sent && f.Reason != Canceled:
		h.Answered(f.Worker)
	}
	if f.OtherLost {
		h.lose(Loss{f.Other, true})
	}
	h.Failures = append(h.Failures, f)
	if f.Reason != Ejected && f.Reason != Stale {
		h.Attempts++
	}
}

// Answered reports that a worker is alive after it got the request: what broke a reused
// connection was no more than its end.
func (h *History) Answered(w *workers.State) {
	h.Lost = slices.DeleteFunc(h.Lost, func(l Loss) bool { return l.Worker == w && !l.Sure })
}

func (h *History) lose(l Loss) {
	i := slices.IndexFunc(h.Lost, func(old Loss) bool { return old.Worker == l.Worker })
	if i < 0 {
		h.Lost = append(h.Lost, l)
		return
	}
	h.Lost[i].Sure = h.Lost[i].Sure || l.Sure
}

// MayBeStale reports whether a connection that breaks immediately may be called
// stale: once in a phase, since an engine that breaks on the request itself looks
// the same.
func (h *History) MayBeStale(p route.Phase) bool {
	return !slices.ContainsFunc(h.Failures, func(f Failure) bool { return f.Reason == Stale && f.Phase == p })
}

// Reset empties the history and keeps its memory.
func (h *History) Reset() {
	clear(h.Failures)
	clear(h.Bans)
	clear(h.Stays)
	clear(h.Lost)
	*h = History{Failures: h.Failures[:0], Bans: h.Bans[:0], Stays: h.Stays[:0], Lost: h.Lost[:0]}
}

// Banned says why a worker is kept out of a phase; ok is false when it is not.
func (h *History) Banned(w *workers.State, p route.Phase) (why string, ok bool) {
	return banned(h.Bans, w, p)
}

// Stay returns the worker that the next attempt of a phase stays on; ok is false if it may
// be any.
func (h *History) Stay(p route.Phase) (s Stay, ok bool) {
	for i := range h.Stays {
		if h.Stays[i].Phase == p {
			return h.Stays[i], true
		}
	}
	return Stay{}, false
}

// Elsewhere returns why a phase must use another worker than w, or "".
func (h *History) Elsewhere(w *workers.State, p route.Phase) string {
	for i := range h.Stays { // a phase has one at most
		if s := &h.Stays[i]; s.Phase == p && s.Worker != w {
			return s.Why
		}
	}
	return ""
}

// without returns stays but for that of a phase.
func without(stays []Stay, p route.Phase) []Stay {
	return slices.DeleteFunc(slices.Clone(stays), func(s Stay) bool { return s.Phase == p })
}

func banned(bans []Ban, w *workers.State, p route.Phase) (why string, ok bool) {
	for i := range bans {
		if b := &bans[i]; b.Worker == w && (b.Phase == "" || b.Phase == p) {
			why, ok = b.Why, true // the newest reason counts
		}
	}
	return why, ok
}

// Step is what follows.
type Step uint8

// MaxLost is how many engines one request may break: after that it is not tried again,
// whatever the number of attempts, nor is its stream continued.
const MaxLost = 2

// The steps.
const (
	// GiveUp: the client gets the error.
	GiveUp Step = iota
	// Retry: decide again, with the new bans.
	Retry
	// FallBack: decide again, without remote prefill.
	FallBack
	// LiftBans: decide again, with workers whose bans are lifted.
	LiftBans
	// Continue: decide again, for the prompt with what the client has of the answer.
	Continue
)

var stepNames = [...]string{"give up", "retry", "fall back to local prefill", "bring workers back", "continue elsewhere", "invalid"}

// String is the step in words.
func (s Step) String() string { return stepNames[min(int(s), len(stepNames)-1)] }

// Next is the answer.
type Next struct {
	Step Step
	// Bans and Stays replace those of the history.
	Bans  []Ban
	Stays []Stay
	// Free reports that what failed was no attempt: nothing was sent to an engine.
	Free bool
	// Budgeted says that the step is taken out of the budget for retries; if that
	// has no room, AfterNoBudget follows.
	Budgeted bool
	// Why says why there is no further attempt where the failure itself does
	// not: NoBudget, NoAttempts, NoMoreTry, or "".
	Why string
}

// Why a request is given up although another worker might do better.
const (
	NoBudget   = "the budget for retries is used up"
	NoAttempts = "the attempts are used up"
	NoMoreTry  = "two engines had broken while they worked on the request, and so did the next one"
	NoMoreLost = "two engines died or hung while they worked on the request: it may be the cause"
	NoMoreMove = "the stream has moved as often as it may (continue.moves)"
)

// broken reports whether two engines of a phase had broken on the request, and so
// has the one more try that it had then. Those that have broken are kept out of
// that try, as of any other, while there are others.
func broken(failures []Failure, phase route.Phase) (over bool) {
	var first *workers.State
	two := false
	for i := range failures {
		switch f := &failures[i]; {
		case !f.broke() || f.Phase != phase:
		case two:
			over = true
		case first == nil:
			first = f.Worker
		default:
			two = f.Worker != first
		}
	}
	return over
}

// AfterFailure says what follows the newest failure of a history. prefills are
// the workers that could prefill but for their bans.
func AfterFailure(h *History, s Allowance, prefills []*workers.State) Next {
	f := &h.Failures[len(h.Failures)-1]
	if f.Reason.Means().Final {
		return Next{Bans: h.Bans}
	}
	if f.Begun {
		return afterCut(h, s, f)
	}
	// What failed in one phase changes nothing of where the other one stays.
	stays := without(h.Stays, f.Phase)
	switch f.Reason {
	case Ended:
		return Next{Step: FallBack, Bans: h.Bans, Stays: stays}
	case Stale:
		if len(h.Lost) >= MaxLost {
			return Next{Bans: h.Bans, Why: NoMoreLost}
		}
		// To the same worker: if the request has ended the connection, another engine
		// would be the next to die.
		return Next{Step: Retry, Free: true, Bans: h.Bans, Stays: append(stays, Stay{
			Worker: f.Worker, Phase: f.Phase, Why: "the request is sent again to " + f.Name + ", which had closed an idle connection",
		})}
	case Ejected:
		// Once: who is ejected again and again would make a request go round.
		again := slices.ContainsFunc(h.Failures[:len(h.Failures)-1], func(was Failure) bool { return was.Reason == Ejected && was.Worker == f.Worker })
		return Next{Step: Retry, Free: true, Bans: append(slices.Clone(h.Bans), Ban{Worker: f.Worker, Phase: f.Phase, Why: string(Ejected), Suspect: !again}), Stays: stays}
	}
	bans := ban(h.Bans, f)
	over := broken(h.Failures, f.Phase)
	alone := noneLeft(prefills, bans)
	if alone {
		if lifted := withoutSuspects(bans, route.Prefill); len(lifted) < len(bans) {
			bans, alone = lifted, noneLeft(prefills, lifted)
		}
	}
	mayFallBack := f.Phase == route.Prefill && s.LocalPrefill && !h.Local
	if alone && !mayFallBack {
		var ok bool
		bans, ok = withoutOldest(h, bans, route.Prefill)
		alone = !ok
	}
	switch {
	case len(h.Lost) >= MaxLost:
		return Next{Bans: bans, Why: NoMoreLost}
	case over && !mayFallBack:
		return Next{Bans: bans, Why: NoMoreTry}
	case f.Reason == MissingParams && s.LocalWithoutParams:
		return Next{Step: FallBack, Bans: bans, Stays: stays}
	case f.Reason == MissingParams:
		return Next{Bans: bans}
	case f.Phase == route.Prefill && alone, h.Attempts >= s.Attempts, over:
		if mayFallBack {
			return Next{Step: FallBack, Bans: bans, Stays: stays}
		}
		why := NoAttempts
		if h.Attempts < s.Attempts {
			why = ""
		}
		return Next{Bans: bans, Why: why}
	}
	// A router that refused a loop and an engine without the model have done no work: another
	// try adds no load.
	free := f.Reason == Loop || f.Reason == UnknownModel
	if (f.Reason == Overloaded || f.Reason == UnknownModel) && f.Phase == route.Decode && f.Other != nil {
		// The KV of the prompt is computed, and the engine has not taken it.
		stays = append(without(stays, route.Prefill), Stay{Worker: f.Other, Phase: route.Prefill, Computed: true, Why: "another worker has the prompt's KV already"})
	}
	return Next{Step: Retry, Bans: bans, Stays: stays, Budgeted: !free}
}

// afterCut says what follows a stream's leg of which the client has a part. The worker
// that broke off may have the rest if no other one can.
func afterCut(h *History, s Allowance, f *Failure) Next {
	switch {
	case s.Continuations == 0:
		return Next{Bans: h.Bans}
	case len(h.Lost) >= MaxLost:
		return Next{Bans: h.Bans, Why: NoMoreLost}
	case h.Continued >= s.Continuations:
		return Next{Bans: h.Bans, Why: NoMoreMove}
	}
	const why = "broke off in the middle of this stream"
	return Next{Step: Continue, Bans: []Ban{
		{Worker: f.Worker, Phase: route.Decode, Why: why, Suspect: true}, {Worker: f.Worker, Phase: route.Prefill, Why: why, Suspect: true},
	}}
}

// AfterNoBudget says what follows when there is no room in the budget for a retry
// that is taken out of it.
func AfterNoBudget(h *History) Next { return Next{Bans: h.Bans, Why: NoBudget} }

// AfterNoChoice says what follows a decision that found no worker for a phase.
func AfterNoChoice(h *History, p route.Phase) Next {
	if _, ok := h.Stay(p); ok {
		return Next{Step: LiftBans, Bans: h.Bans, Stays: without(h.Stays, p)}
	}
	bans := withoutSuspects(h.Bans, p)
	ok := len(bans) < len(h.Bans)
	if !ok {
		bans, ok = withoutOldest(h, bans, p)
	}
	if ok {
		return Next{Step: LiftBans, Bans: bans, Stays: h.Stays}
	}
	return Next{Bans: h.Bans}
}

// withoutOldest is bans without those of one worker that has failed in a phase, for when
// no other is left: of two or more the one that failed longest ago, which is
// the likeliest to be well by now. One that has failed alone is not used again.
func withoutOldest(h *History, bans []Ban, p route.Phase) (rest []Ban, ok bool) {
	var failed []*workers.State // by their last failure, newest first
	for _, f := range slices.Backward(h.Failures) {
		if f.Phase == p && f.Reason != Ejected && !slices.Contains(failed, f.Worker) {
			failed = append(failed, f.Worker)
		}
	}
	if len(failed) < 2 {
		return bans, false
	}
	for _, w := range slices.Backward(failed) {
		rest = slices.DeleteFunc(slices.Clone(bans), func(b Ban) bool { return b.Worker == w && b.Phase == p })
		if len(rest) < len(bans) {
			return rest, true
		}
	}
	return bans, false
}

// ban adds those of a failure: of its worker, and when either leg may be at
// fault of the other leg's, both as suspects.
func ban(bans []Ban, f *Failure) []Ban {
	bans = slices.Clone(bans)
	b := Ban{Worker: f.Worker, Phase: f.Phase, Why: "failed in this request"}
	if x := f.suspect(); x != nil {
		b.Suspect, b.Why = true, "failed in this request, or the other leg's worker did"
		other := b
		other.Worker, other.Phase = x, route.Prefill
		if f.Phase == route.Prefill {
			other.Phase = route.Decode
		}
		bans = append(bans, other)
	}
	return append(bans, b)
}

// withoutSuspects is bans without the suspects of a phase.
func withoutSuspects(bans []Ban, p route.Phase) []Ban {
	return slices.DeleteFunc(slices.Clone(bans), func(b Ban) bool { return b.Suspect && b.Phase == p })
}

// noneLeft reports whether all prefill workers are banned.
func noneLeft(prefills []*workers.State, bans []Ban) bool {
	return !slices.ContainsFunc(prefills, func(w *workers.State) bool {
		_, out := banned(bans, w, route.Prefill)
		return !out
	})
}
