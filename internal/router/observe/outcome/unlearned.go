package outcome

import (
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/table"
	"github.com/dynctl/dynctl/internal/workers"
)

// overdue is in how many requests what the settings use is learned, where nothing is in the way.
const overdue = 200

// unlearned lists what is not known of a model, and why: the times by which policy kv ranks, and
// the costs by which a threshold that is auto takes a path.
func unlearned(k *cost.Known, s *decide.Options, list []*workers.Worker) (out []admin.Unlearned) {
	add := func(of, reason string, since uint64, text, advice string) {
		out = append(out, admin.Unlearned{Of: of, Reason: reason, Overdue: since >= overdue, Text: text, Advice: advice})
	}
	if k.Calm > 0 {
		add(admin.OfPaths, admin.UnlearnedUnstable, overdue, fmt.Sprintf("prompts or transfers keep taking other times; %d more without a drift are needed", k.Calm),
			"look for what changes: a slow worker, other work on the engines' machines, a shared network")
		return out
	}
	if s.Timed() && !k.Model.Timed() {
		switch {
		case k.Stretches < 1:
			add(admin.OfTimes, admin.UnlearnedSteps, k.Requests, fmt.Sprintf("no answer to %s requests showed how long a token takes", table.Count(k.Requests)),
				"stream answers of more than 16 tokens: the router measures no others")
		case k.Stretches < k.Wanted:
			add(admin.OfTimes, admin.UnlearnedStretches, k.Requests, fmt.Sprintf("%d of %.0f stretches of 16 streamed tokens were measured", int(k.Stretches), k.Wanted),
				"stream more answers of more than 16 tokens: the router measures no others")
		default:
			add(admin.OfTimes, admin.UnlearnedFew, k.Requests, fmt.Sprintf("%d of %d prompts on decode ranks were measured, and %d of %d transfers", int(k.Local), cost.EnoughComputed, int(k.Transfer), cost.EnoughMoved),
				"stream more answers: others do not show their first token")
		}
	}
	local, remote := decide.PathsOf(&s.Rule, list)
	if !local && !remote {
		return out // no worker answers
	}
	const fixed = "nothing, if the threshold is meant; routing.threshold auto learns both paths"
	few := func(n float64) bool { return n < cost.EnoughMoved }
	switch auto, tokens := s.Rule.Auto, s.Rule.Threshold; {
	case local != remote:
		if !auto {
			return out
		}
		text, advice := "no usable prefill worker can send KV to a decode worker: every prompt is computed where it is answered", "nothing, if that is meant; else add prefill workers, and a connector to both kinds"
		if remote {
			text, advice = "every decode worker needs a prefill worker: there is no local path to compare with", "nothing: a threshold has no effect here"
		}
		add(admin.OfPaths, admin.UnlearnedOnePath, k.Requests, text, advice)
	case k.Local+k.Transfer < 1 && k.Requests > 0:
		add(admin.OfPaths, admin.UnlearnedStreams, k.Requests, fmt.Sprintf("no answer to %s requests showed its first token", table.Count(k.Requests)),
			"only streamed answers show it: nothing is learned from others")
	case !auto && tokens <= 0 && few(k.Local):
		add(admin.OfPaths, admin.UnlearnedFixed, 0, "routing.threshold is 0: no prompt is computed on a decode rank", fixed)
	case !auto && few(k.Transfer):
		add(admin.OfPaths, admin.UnlearnedFixed, 0, fmt.Sprintf("routing.threshold is %s: %.0f prompts were prefilled remotely", table.Count(tokens), k.Transfer), fixed)
	case !auto:
	case few(k.Local):
		out = append(out, untaken(k, "local", "computed on a decode rank", k.Local, cost.LocalLeg))
	case few(k.Transfer):
		out = append(out, untaken(k, "remote", "prefilled remotely", k.Transfer, cost.TransferLeg))
	case k.Lacks.Has(cost.LocalLeg):
		out = append(out, untaken(k, "local", "computed on a decode rank", k.Local, cost.LocalLeg))
	case k.Lacks.Has(cost.TransferLeg):
		out = append(out, untaken(k, "remote", "prefilled remotely", k.Transfer, cost.TransferLeg))
	}
	return out
}

// untaken is why the costs of a path are not known, or are old, though a threshold that is auto
// has one request in a number take it.
func untaken(k *cost.Known, path, done string, seen float64, leg cost.LegKind) admin.Unlearned {
	u := admin.Unlearned{Of: admin.OfPaths, Reason: admin.UnlearnedFew, Overdue: k.Since[leg] >= overdue}
	kept := fmt.Sprintf("one request in %.0f takes it to learn, unless more prompts wait there or it costs over twice as much", cost.Tuned.TeachEvery)
	u.Advice = fmt.Sprintf("see with dynctl explain what keeps requests from the %s path: a gate, a header, waiting prompts", path)
	switch {
	case seen < 1:
		u.Reason = admin.UnlearnedNever
		u.Text = fmt.Sprintf("none of %s prompts was %s; %s", table.Count(k.Requests), done, kept)
	case seen < cost.EnoughMoved:
		u.Text = fmt.Sprintf("%d of %d prompts were %s; %s", int(seen), cost.EnoughMoved, done, kept)
	default:
		u.Reason = admin.UnlearnedStale
		u.Text = fmt.Sprintf("no prompt was %s for %.0f s and %s requests: what that costs is known from then; %s", done, k.Age[leg].Round(time.Second).Seconds(), table.Count(k.Since[leg]), kept)
		u.Advice = "nothing, if the other path is far cheaper or few requests come"
	}
	return u
}
