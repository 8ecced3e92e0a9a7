package admin

import (
	"github.com/dynctl/dynctl/internal/eventlog"
)

// ModelCosts is what is known of the costs of both paths for one model.
type ModelCosts struct {
	Model string `json:"model"`
	// Revision is that of the cost models in force; 0 while too little is known.
	Revision uint64 `json:"revision"`
	// TimesKnown says that policy kv compares times, not blocks, PathsKnown that costs decide
	// instead of a threshold that is auto.
	TimesKnown bool `json:"times_known"`
	PathsKnown bool `json:"paths_known"`
	// Of how many outcomes the cost models are made, older ones counting less: prompts computed
	// on decode and on prefill ranks, and KV that moved.
	LocalOutcomes    float64 `json:"local_outcomes"`
	PrefillOutcomes  float64 `json:"prefill_outcomes"`
	TransferOutcomes float64 `json:"transfer_outcomes"`
	// Crossings are where the cost models change the path, by load; none while too little is
	// known. Unlearned says what is not known, and why.
	Crossings []Crossing  `json:"crossings,omitempty"`
	Unlearned []Unlearned `json:"unlearned,omitempty"`
}

// Unlearned is something of a model's costs that is not known.
type Unlearned struct {
	// Of is OfTimes or OfPaths, Reason one of the reasons below.
	Of     string `json:"of"`
	Reason string `json:"reason"`
	// Overdue says that the settings use it, and that there were enough requests to know it.
	Overdue bool `json:"overdue"`
	// Text says why it is not known, Advice what to do.
	Text   string `json:"text"`
	Advice string `json:"advice"`
}

// Effect is what is not known, and what decides meanwhile.
func (u *Unlearned) Effect() string {
	switch {
	case u.Reason == UnlearnedUnstable:
		return "what both paths cost keeps changing, and the threshold and blocks decide"
	case u.Reason == UnlearnedStale:
		return "what both paths cost now is not known"
	case u.Of == OfTimes:
		return "policy kv compares blocks until it knows how long prompts and answers take"
	}
	return "what both paths cost is not known"
}

// Severity is how much it matters that it is overdue: what only ages, or what no worker can do,
// is no trouble.
func (u *Unlearned) Severity() eventlog.Severity {
	if u.Reason == UnlearnedStale || u.Reason == UnlearnedOnePath {
		return eventlog.Info
	}
	return eventlog.Warn
}

// What is not learned: the times by which policy kv ranks, and the costs of both paths.
const (
	OfTimes = "times"
	OfPaths = "paths"
)

// The reasons.
const (
	UnlearnedUnstable  = "unstable"         // outcomes keep drifting
	UnlearnedSteps     = "no_steps"         // no answer shows how long a token takes
	UnlearnedStretches = "few_steps"        // few answers do
	UnlearnedStreams   = "not_streamed"     // no answer shows its first token
	UnlearnedNever     = "never_taken"      // one path has no outcome
	UnlearnedFew       = "few_samples"      // there are few outcomes
	UnlearnedStale     = "stale"            // the newest outcome of a path is old
	UnlearnedOnePath   = "one_path"         // the fleet has only one path
	UnlearnedFixed     = "threshold_is_set" // a threshold that is not auto keeps requests from one path
)
