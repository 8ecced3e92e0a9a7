package router

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// costs is what was learned of the costs of both paths, for a threshold that is auto.
type costs struct {
	learners *cost.Learners
	began    time.Time
}

func newCosts(o cost.Objective) costs {
	return costs{learners: cost.NewLearners(o), began: time.Now()}
}

// slow tells which ranks take longer than their peers.
func (c *costs) slow(found []watch.SlowRank) {
	var slow []cost.Slow
	for _, f := range found {
		slow = append(slow, cost.Slow{Slot: f.Rank.Slot, Times: f.Times})
	}
	slices.SortFunc(slow, func(a, b cost.Slow) int { return cmp.Compare(a.Slot, b.Slot) })
	c.learners.Slow(slow)
}

// legs are what an outcome is about, in words.
var legs = map[cost.Leg]string{
	cost.LocalLeg: "prompts on decode ranks", cost.PrefillLeg: "prompts on prefill ranks", cost.TransferLeg: "transfers",
}

// legTook tells of a leg of the newest plan that was sent at a time and had its first
// token at another, where the threshold is auto.
func (x *exchange) legTook(phase selector.Phase, sent, first time.Time) {
	if !x.d.Settings.Decisions.Rule.Auto {
		return
	}
	p := &x.d.Run.Plan
	leg, w := cost.LocalLeg, &p.Asked.Local
	switch {
	case phase == selector.Prefill:
		leg, w = cost.PrefillLeg, &p.Asked.Prefill
		x.prefilled.Store(first.UnixNano())
	case p.Path == decide.Remote:
		leg, w = cost.TransferLeg, &p.Asked.Transfer
		// Where both legs are sent at once, the KV comes when the prefill has ended.
		done := x.prefilled.Load()
		if done == 0 {
			return
		}
		if at := time.Unix(0, done); at.After(sent) {
			sent = at
		}
	}
	if w.Tokens <= 0 || first.Before(sent) {
		return
	}
	r := x.r
	l := r.costs.learners.Of(x.model)
	if l == nil {
		return
	}
	switch l.Took(leg, w, first.Sub(sent), first.Sub(r.costs.began)) {
	case cost.Learned:
		r.event(eventlog.Event{
			Severity: eventlog.Info, Kind: "costs_known", Request: x.decision,
			Text: fmt.Sprintf("model %s: enough is known of the costs of both paths; from now on they decide instead of the threshold", x.model),
		})
	case cost.Drifted:
		r.event(eventlog.Event{
			Severity: eventlog.Warn, Kind: "costs_drifted", Request: x.decision,
			Text: fmt.Sprintf("model %s: %s no longer take the time that they took; that is learned anew, and costs go on to decide", x.model, legs[leg]),
		})
	case cost.Doubted:
		r.event(eventlog.Event{
			Severity: eventlog.Warn, Kind: "costs_doubted", Request: x.decision,
			Text: fmt.Sprintf("model %s: %s take other times again and again; the threshold decides until their costs are known", x.model, legs[leg]),
		})
	}
}

// running begins to tell of an answer that has so many tokens now, and gives who hears
// of the others; nil where the threshold is not auto.
func (x *exchange) running(tokens int, now time.Time) *cost.Learner {
	x.ran = cost.Running{}
	if !x.d.Settings.Decisions.Rule.Auto {
		return nil
	}
	l := x.r.costs.learners.Of(x.model)
	if l != nil {
		l.Ran(&x.ran, tokens, now.Sub(x.r.costs.began))
	}
	return l
}

// ended tells that the answer has all its tokens, if there were several.
func (x *exchange) ended() {
	a := &x.book.Answer
	if !x.d.Settings.Decisions.Rule.Auto || a.Gaps.Count() == 0 {
		return
	}
	if l := x.r.costs.learners.Of(x.model); l != nil {
		l.Ended(&x.ran, a.FirstToken.Sub(x.start))
	}
}
