// Package outcome reports to the learners of what both paths cost ([cost.Learners])
// what the legs and answers of requests took, for policy kv and a threshold that is auto.
package outcome

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// renewed is how often what was learned is put in force.
const renewed = time.Second

// forgotten is how long a model that no worker serves is remembered, and fullEvery how often
// it is an event at most that there is no room for another.
const forgotten, fullEvery = 10 * time.Minute, 5 * time.Minute

// Options are what a collector needs.
type Options struct {
	// Objective is what paths are chosen for at first.
	Objective cost.Objective
	// Event hears when costs begin to decide, when they do so no longer, and of models that
	// there is no room for.
	Event func(eventlog.Event)
	// Ledger is what ranks do now.
	Ledger *ledger.Ledger
	// Siblings are the other routers whose answers run there, too; nil for none.
	Siblings *siblings.Siblings
	// Fleet is the fleet of now: a model that it serves is not forgotten.
	Fleet func() *workers.Snapshot
	// Decisions are the settings in force.
	Decisions func() *decide.Options
}

// Collector passes training samples to the learners of a router. It is safe for concurrent
// use.
type Collector struct {
	*cost.Learners
	o     Options
	began time.Time
	full  atomic.Int64 // since began, when it was last told that there is no room; 0 for never
}

// New makes a collector and its learners.
func New(o Options) *Collector {
	c := &Collector{Learners: cost.NewLearners(o.Objective), o: o, began: time.Now()}
	c.Full = c.noRoom
	return c
}

// Known is how much is known of each model now.
func (c *Collector) Known() map[string]cost.Known { return c.Learners.Known(time.Since(c.began)) }

// Costs describes what is known of each model, in the order of their names.
func (c *Collector) Costs() (list []admin.ModelCosts) {
	known, all := c.Known(), c.All()
	fleet, decisions := c.o.Fleet(), c.o.Decisions()
	for _, name := range slices.Sorted(maps.Keys(known)) {
		k := known[name]
		m := admin.ModelCosts{Model: name, LocalOutcomes: k.Local, PrefillOutcomes: k.Prefill, TransferOutcomes: k.Transfer}
		if k.Model != nil {
			m.Revision, m.TimesKnown, m.PathsKnown = k.Model.Revision, k.Model.Timed(), k.Model.Compares()
		}
		if l := all[name]; l != nil {
			m.Crossings = crossings(l, decisions)
		}
		m.Unlearned = unlearned(&k, decisions, fleet.Model(name))
		list = append(list, m)
	}
	return list
}

// crossings are those of a model, as they are shown.
func crossings(l *cost.Learner, s *decide.Options) (list []admin.Crossing) {
	for _, x := range l.Crossings(s.Weights.Others) {
		list = append(list, admin.Crossing{Running: x.Running, Low: reaches(x.Low), Tokens: reaches(x.Tokens), High: reaches(x.High)})
	}
	return list
}

// reaches is a crossing as the admin API has it: nil where no prompt is so long.
func reaches(tokens int) *int {
	if tokens == cost.Never {
		return nil
	}
	return &tokens
}

// noRoom reports that nothing is learned of a model.
func (c *Collector) noRoom(model string) {
	now, last := max(1, int64(time.Since(c.began))), c.full.Load()
	if last > 0 && now-last < int64(fullEvery) || !c.full.CompareAndSwap(last, now) {
		return
	}
	c.o.Event(eventlog.Event{Kind: "costs_full", Severity: eventlog.Warn, Text: fmt.Sprintf(
		"model %s: costs are learned of %d models, and there is no room for another; the threshold and blocks decide until no worker has served one of them for %.0f minutes", model, cost.MaxModels, forgotten.Minutes())})
}

// Run puts what was learned in force until ctx ends, forgets models that have left, and reports
// what should be known of one and is not.
func (c *Collector) Run(ctx context.Context) error {
	reported := map[string][]string{} // by model, of what is overdue
	for range wait.Every(ctx, renewed) {
		fleet, now := c.o.Fleet(), time.Since(c.began)
		c.Forget(func(model string) bool { return len(fleet.Model(model)) > 0 }, now, now-forgotten)
		all, decisions := c.All(), c.o.Decisions()
		for model, l := range all {
			c.changed(l, l.Renew(now), 0, &LegSample{Model: model})
			k := l.Known(now)
			reported[model] = c.missing(model, unlearned(&k, decisions, fleet.Model(model)), reported[model])
		}
		maps.DeleteFunc(reported, func(model string, _ []string) bool { return all[model] == nil })
	}
	return nil
}

// missing reports what of a model is overdue and was not before. It returns what is.
func (c *Collector) missing(model string, list []admin.Unlearned, before []string) (overdue []string) {
	for i := range list {
		u := &list[i]
		if !u.Overdue || u.Reason == admin.UnlearnedUnstable { // which is an event of its own
			continue
		}
		why := u.Of + " " + u.Reason
		overdue = append(overdue, why)
		// That something comes after nothing is no news.
		few := u.Reason == admin.UnlearnedFew || u.Reason == admin.UnlearnedStretches
		if slices.ContainsFunc(before, func(was string) bool { return was == why || few && strings.HasPrefix(was, u.Of) }) {
			continue
		}
		c.o.Event(eventlog.Event{
			Kind: "costs_unlearned", Severity: u.Severity(), Text: fmt.Sprintf("model %s: %s: %s. To do: %s", model, u.Effect(), u.Text, u.Advice),
			Fields: map[string]any{"model": model, "of": u.Of, "reason": u.Reason},
		})
	}
	return overdue
}

// RequestSamples is what a collector keeps of one request. The zero value is ready; of its
// methods both legs may call PrefillBegins and [Collector.Took] concurrently.
type RequestSamples struct {
	// prefilled is when the prefill of the newest attempt has ended, in ns of the Unix
	// epoch; 0 for not yet.
	prefilled atomic.Int64
	learner   *cost.Learner // of the answer that is running; nil for none
	running   cost.Running
	c         *Collector // nil before the plan of an attempt is carried out
	block     int        // tokens of a block in its plan
}

// Begins reports that the plan of a request for a model is carried out, whose blocks have that
// many tokens.
func (c *Collector) Begins(q *RequestSamples, model string, blockSize int) {
	q.c, q.block = c, blockSize
	if l := c.Of(model); l != nil {
		l.Requested(time.Since(c.began))
	}
}

// Begun reports whether a plan is carried out.
func (q *RequestSamples) Begun() bool { return q.c != nil }

// PrefillBegins reports that the prefill leg of another attempt goes out.
func (q *RequestSamples) PrefillBegins() { q.prefilled.Store(0) }

// LegSample is a leg that had its first token.
type LegSample struct {
	Model, Decision string // of its request
	Phase           route.Phase
	Sent, First     time.Time
}

// Took reports what a leg of a plan took.
func (c *Collector) Took(q *RequestSamples, p *decide.Plan, l LegSample) {
	leg, w := cost.LocalLeg, &p.Paths.Local
	switch {
	case l.Phase == route.Prefill:
		leg, w = cost.PrefillLeg, &p.Paths.Prefill
		q.prefilled.Store(l.First.UnixNano())
	case p.Path == route.Remote:
		leg, w = cost.TransferLeg, &p.Paths.Transfer
		// Where both legs are sent at once, the KV comes when the prefill has ended.
		done := q.prefilled.Load()
		if done == 0 {
			return
		}
		if at := time.Unix(0, done); at.After(l.Sent) {
			l.Sent = at
		}
	}
	if w.Tokens <= 0 || l.First.Before(l.Sent) {
		return
	}
	learner := c.Of(l.Model)
	if learner == nil {
		return
	}
	c.changed(learner, learner.Took(leg, w, l.First.Sub(l.Sent), l.First.Sub(c.began)), leg, &l)
}

// words are what legs are about.
var words = map[cost.LegKind]string{
	cost.LocalLeg: "prompts on decode ranks", cost.PrefillLeg: "prompts on prefill ranks", cost.TransferLeg: "transfers",
}

// changed reports changes in what is known.
func (c *Collector) changed(of *cost.Learner, changes cost.Change, leg cost.LegKind, l *LegSample) {
	emit := func(change cost.Change, kind string, severity eventlog.Severity, format string, a ...any) {
		if changes.Has(change) {
			c.o.Event(eventlog.Event{Kind: kind, Severity: severity, Request: l.Decision, Text: fmt.Sprintf("model %s: ", l.Model) + fmt.Sprintf(format, a...)})
		}
	}
	emit(cost.Drifted, "costs_drifted", eventlog.Warn, "%s take other times than before; the router learns them again, and costs still decide", words[leg])
	emit(cost.Doubted, "costs_suspended", eventlog.Warn, "%s keep taking other times; the threshold and blocks decide until their costs are known again", words[leg])
	emit(cost.Timed, "times_known", eventlog.Info, "the times of prompts and answers are known; policy kv now compares times, not blocks")
	if changes.Has(cost.Learned) {
		where := ""
		if x := crossings(of, c.o.Decisions()); len(x) > 0 {
			where = ": " + x[len(x)/2].Sentence()
		}
		emit(cost.Learned, "costs_known", eventlog.Info, "the costs of both paths are known; they now choose the path (threshold auto)%s", where)
	}
}

// Runs begins to report an answer of a model on a rank that has that many tokens now.
func (c *Collector) Runs(q *RequestSamples, model string, rank *workers.Rank, tokens int, now time.Time) {
	q.learner, q.running = c.Of(model), cost.Running{}
	q.Ran(rank, tokens, now)
}

// Ran reports that the answer, which runs on a rank, has that many tokens now.
func (q *RequestSamples) Ran(rank *workers.Rank, tokens int, now time.Time) {
	if q.learner == nil {
		return
	}
	var on cost.Decoding
	if q.running.Due(tokens) {
		on = decide.DecodingOn(q.c.o.Ledger, rank, q.block)
		q.c.o.Siblings.Decoding(&on, rank, q.block, now)
	}
	q.learner.Ran(&q.running, tokens, now.Sub(q.c.began), on)
}

// Ended reports that the answer has all its tokens.
func (q *RequestSamples) Ended() {
	if q.learner != nil {
		q.learner.Ended(&q.running)
	}
}
