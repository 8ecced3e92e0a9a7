package serving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Planner decides on a call, and returns what serves the decision. The error is that there
// is no worker for it; ErrAgain requires another call of Plan.
type Planner interface {
	Plan(ctx context.Context, c *Call) (Engine, error)
}

// ErrAgain requires another decision: workers that were kept out may be used after all.
var ErrAgain = errors.New("decide again")

// Retried is an engine that has a call served by another plan after a failure, until the
// head of an answer is good. Of an answer that came before that nothing gets out.
type Retried struct {
	Planner  Planner
	Budget   *attempt.Budget
	Repeats  *attempt.Repeats
	Outliers *health.Outliers
	Failures *watch.Failures
}

// Whether the answer of an attempt has begun.
const (
	mayBegin uint32 = iota
	hasBegun
	mustNot
)

// attempts is the state of a call's attempts.
type attempts struct {
	// begun changes with the first byte from the decode leg that counts, or when the prefill
	// leg that runs beside it has failed before.
	begun atomic.Uint32
	// decided says that the next attempt's decision is made, and its rank reserved.
	decided bool
	// retry is the attempt that may follow a failed one, until a leg of it is sent.
	retry retry
	// aliveBy is by when the decode engine must have shown a sign of life: after that the
	// prefill engine may free its KV.
	aliveBy time.Time
	// refused is the newest attempt's transfer, if its decode rank had no room: another
	// decode rank may take the KV.
	refused refused
	// reserved is the decision's reservation on its decode rank, until the end of the answer.
	reserved *ledger.Reservation
	// permits are the permissions to send the legs, decode and prefill. While a prefill leg
	// runs, its own is in its hands.
	permits  [2]permit
	vigils   [2]vigil // of the legs, decode and prefill
	silence  silence
	made     made
	decoding decoding
}

// retry is an attempt that follows a failed one.
type retry struct {
	phase  route.Phase
	reason attempt.Reason // "" where none follows, and where it counts as none
	// budgeted says that it is taken out of the budget.
	budgeted bool
}

// Do is [Engine.Do].
func (r *Retried) Do(ctx context.Context, c *Call) (*Answer, error) {
	a, err := r.attempts(ctx, c)
	if err != nil {
		if c.begun.Load() != hasBegun && ctx.Err() == nil {
			r.uncountFailures(c)
		}
		return nil, err
	}
	if a.Streams() && !c.Keeps {
		c.DropInput()
	}
	return a, nil
}

func (r *Retried) attempts(ctx context.Context, c *Call) (a *Answer, err error) {
	run := &c.Routing.Run
	defer r.refundRetry(c)
	defer func() {
		if a == nil {
			c.giveBack()
		}
	}()
	var last error // of the attempts that sent a leg, if there are any
	for {
		e, err := r.Planner.Plan(ctx, c)
		switch {
		case errors.Is(err, ErrAgain):
			continue
		case err != nil:
			return nil, cmp.Or(last, err) // why the workers are banned says more
		}
		a, err := e.Do(ctx, c)
		if err == nil {
			return a, nil
		}
		if last != nil && errors.Is(err, errNoLeg) {
			return nil, last // what an engine has answered says more
		}
		if c.begun.Load() == hasBegun || ctx.Err() != nil || !r.prepareRetry(c, run.Attempt, err) {
			return nil, err
		}
		if f, ok := errors.AsType[*attempt.Error](err); last == nil || !ok || !f.Reason.Means().Unsent {
			last = err
		}
	}
}

// prepareRetry reports whether another attempt may follow one that has failed, and
// prepares it.
func (r *Retried) prepareRetry(c *Call, number int, err error) bool {
	run := &c.Routing.Run
	var f *attempt.Error
	if !errors.As(err, &f) {
		return false
	}
	f.Admission = c.permit(f.Phase).admission
	next := run.Failed(f.Failure)
	if next.Budgeted && !c.retry.budgeted {
		if c.retry.budgeted = c.silence.paid.Swap(false) || r.Budget.Take(time.Now(), c.Routing.Settings.Retry.Budget); !c.retry.budgeted {
			next = run.NoBudget()
		}
	}
	switch {
	case next.Step == attempt.GiveUp:
		if next.Why != "" {
			c.Record.Note("no retry: " + next.Why)
		}
		return false
	case next.Step == attempt.FallBack:
		c.Record.Note(fmt.Sprintf("fallback to local prefill: %v", f))
	case next.Free && f.Reason != attempt.Stale: // nothing was sent
	default:
		c.retry.phase, c.retry.reason = f.Phase, f.Reason
		c.Record.Note(fmt.Sprintf("attempt %d failed: %v", number, err))
	}
	return true
}

// sends reports a retry: a leg of it goes out.
func (c *Call) sends() {
	if p := &c.retry; p.reason != "" {
		c.Record.Retried(p.phase, p.reason)
	}
	c.retry = retry{}
	c.silence.paid.Store(false)
}

// refundRetry returns a reserved retry to the budget when no other worker was available: a
// lone worker that refuses would use up what the others need.
func (r *Retried) refundRetry(c *Call) {
	if c.silence.paid.Swap(false) || c.retry.budgeted {
		r.Budget.Return(time.Now())
	}
	c.retry = retry{}
}

// uncountFailures takes back the failures of engines that broke on a request, where it
// failed in the end and is as likely at fault itself.
func (r *Retried) uncountFailures(c *Call) {
	if c.Body == nil { // nothing says that two requests are the same
		return
	}
	uncounted := r.Repeats.Failed(c.key(), &c.Routing.Run.History, time.Now())
	if len(uncounted) == 0 {
		return
	}
	for i := range uncounted {
		r.Outliers.Uncount(uncounted[i].Admission)
		r.Failures.Uncount(uncounted[i].Name, string(uncounted[i].Reason))
	}
	c.Record.RequestFaulty(attempt.WhyUncounted(uncounted))
}

// key identifies the request, which has a body, by that and its path.
func (c *Call) key() attempt.RequestKey {
	var h maphash.Hash
	h.SetSeed(keySeed)
	path, _, _ := strings.Cut(c.Path, "?")
	_, _ = h.WriteString(path) // never fails
	_, _ = h.Write(c.Body.B)
	return attempt.RequestKey{Size: len(c.Body.B), Hash: h.Sum64()}
}

// keySeed is that of the hashes of bodies, which leave no process.
var keySeed = maphash.MakeSeed()

// giveBack gives back what the call holds for the legs of its newest plan, none of which may be
// in progress: the reservation, and the permissions to send.
func (c *Call) giveBack() {
	defer c.permits[0].giveBack()
	defer c.permits[1].giveBack()
	if k := c.reserved; k != nil {
		c.reserved = nil
		k.Release()
	}
}
