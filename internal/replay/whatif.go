package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings"
)

// A Change is one setting that a what-if or a simulation sets, or one constant of the cost in time
// that a simulation does.
type Change struct {
	Key, Value string
	apply      func(c *settings.Config) // nil for a constant
	constant   func(c *cost.Constants)  // nil for a setting
}

// Constant reports whether the change is one of a constant. The models of a recording have
// constants of their own, so that it has an effect in simulations only.
func (c Change) Constant() bool { return c.constant != nil }

// wider are keys of what-ifs that change more than the one setting.
var wider = map[string]struct {
	setting string
	more    func(r *settings.Routing)
}{
	"eff_isl": {"threshold", func(r *settings.Routing) { r.ThresholdOn = string(decide.OnEffISL) }},
	"isl":     {"threshold", func(r *settings.Routing) { r.ThresholdOn = string(decide.OnISL) }},
	// One policy for both phases.
	"policy": {"policy", func(r *settings.Routing) { r.PrefillPolicy, r.DecodePolicy = "", "" }},
}

// String is the change as the settings that it makes.
func (c Change) String() string {
	key := c.Key
	if also := wider[key]; also.setting != "" {
		key = also.setting
	}
	text := key + "=" + c.Value
	if key != c.Key && key == "threshold" {
		text += ",threshold_on=" + c.Key
	}
	return text
}

// ChangeKeys lists what a what-if can change: settings, without their section,
// and thresholds of one measure.
func ChangeKeys() []string {
	keys := slices.Collect(maps.Keys(wider))
	for _, r := range settings.Rows() {
		if r.WhatIf {
			keys = append(keys, strings.TrimPrefix(r.Key, section))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// ConstantKeys lists the constants of the cost in time that a simulation can set and a router
// cannot.
func ConstantKeys() []string {
	var keys []string
	for _, c := range cost.List() {
		if settings.Lookup(section+c.Key) == nil {
			keys = append(keys, c.Key)
		}
	}
	return keys
}

const section = "routing."

// ParseChange reads "key=value".
func ParseChange(text string) (Change, error) {
	key, word, ok := strings.Cut(text, "=")
	key = strings.ReplaceAll(strings.TrimPrefix(strings.TrimSpace(key), section), "-", "_")
	word = strings.TrimSpace(word)
	also := wider[key]
	row := settings.Lookup(section + cmp.Or(also.setting, key))
	if ok && row == nil && slices.Contains(ConstantKeys(), key) {
		return parseConstant(key, word)
	}
	switch {
	case !ok:
		return Change{}, fmt.Errorf("%q: want KEY=VALUE with one of %s; a simulation also takes the constants %s", text, strings.Join(ChangeKeys(), ", "), strings.Join(ConstantKeys(), ", "))
	case row == nil || !row.WhatIf:
		return Change{}, fmt.Errorf("%q: %q cannot be changed here%s", text, key, settings.Suggest(key, append(ChangeKeys(), ConstantKeys()...)))
	}
	value, err := row.ParseChecked(word)
	switch n := value.(type) {
	case int:
		if err == nil && n < 0 {
			err = fmt.Errorf("%d is negative", n)
		}
	case decide.Threshold:
		switch {
		case err != nil:
		case n.Tokens < 0:
			err = fmt.Errorf("%d is negative", n.Tokens)
		case n.Auto:
			err = errors.New("costs are learned from what follows, which a what-if does not carry on: simulate with --routing-threshold auto")
		}
	}
	if err != nil {
		return Change{}, fmt.Errorf("%s: %w", text, err)
	}
	return Change{Key: key, Value: word, apply: func(c *settings.Config) {
		row.Set(c, value)
		if also.more != nil {
			also.more(&c.Routing)
		}
	}}, nil
}

// parseConstant reads the value of a constant.
func parseConstant(key, word string) (Change, error) {
	all := cost.List()
	c := all[slices.IndexFunc(all, func(c cost.Constant) bool { return c.Key == key })]
	value, err := strconv.ParseFloat(word, 64)
	if err != nil || !(value >= c.Least && value <= c.Most) {
		return Change{}, fmt.Errorf("%s=%s: want %s, from %g to %g", key, word, c.Unit, c.Least, c.Most)
	}
	return Change{Key: key, Value: word, constant: func(to *cost.Constants) { *c.At(to) = value }}, nil
}

// ChangedConstants are the constants of the cost in time after some changes.
func ChangedConstants(c cost.Constants, list []Change) cost.Constants {
	for _, change := range list {
		if change.constant != nil {
			change.constant(&c)
		}
	}
	return c
}

// Changed are settings of decisions after some changes; what no setting says
// stays.
func Changed(s decide.Options, list []Change) decide.Options {
	c := settings.Config{Routing: settings.Routing{Policy: string(s.Decode), PrefillPolicy: string(s.Prefill), Weights: s.Weights, Busy: s.Busy}}
	c.Routing.SetPlan(s.Rule)
	for _, change := range list {
		if change.apply != nil {
			change.apply(&c)
		}
	}
	out := c.Decisions()
	if out.Rule.Auto {
		out.Rule.StartGate = s.Rule.StartGate // no change makes a threshold auto
	}
	out.Rule.LoadCredit, out.Attempts, out.LocalWithoutParams, out.Continuations = s.Rule.LoadCredit, s.Attempts, s.LocalWithoutParams, s.Continuations
	return out
}

// Redecision compares recorded decisions with what they would be under other
// settings, everything else as it was recorded. What follows from a decision
// (caches, loads) is not carried on; that is in Simulated.
type Redecision struct {
	// Simulated says whether the changes would be better; nil when that is not known.
	Simulated *Simulated `json:"simulated,omitempty"`

	Changes   []string `json:"changes"`
	Decisions uint64   `json:"decisions"`
	// Unverifiable decisions cannot be made again and are left out.
	Unverifiable uint64 `json:"unverifiable"`
	Changed      uint64 `json:"changed"`
	// Paths count changes of path, Ranks those of a rank on the same path.
	ToLocal  uint64 `json:"to_local"`
	ToRemote uint64 `json:"to_remote"`
	Ranks    uint64 `json:"other_ranks"`
	Failed   uint64 `json:"to_errors"`
	// Hit are the shares of prompt tokens predicted as cached on the rank that
	// computes the prompt.
	RecordedHit float64 `json:"recorded_hit_ratio"`
	WhatIfHit   float64 `json:"what_if_hit_ratio"`
	// Compute and transfer tokens of the plans.
	RecordedRemote float64 `json:"recorded_remote_ratio"`
	WhatIfRemote   float64 `json:"what_if_remote_ratio"`
	// Regret is by how many blocks, by the cost function recorded, the rank that
	// the what-if chooses costs more than the recorded one, on average over the
	// changed ranks.
	Regret float64 `json:"cost_regret_blocks"`
	// Examples are the first lines that change.
	Examples []Divergence `json:"examples,omitempty"`
}

// Redecide makes every recorded decision under changed settings.
func Redecide(ctx context.Context, r *trace.Reader, list []Change) (*Redecision, error) {
	out := &Redecision{}
	for _, c := range list {
		out.Changes = append(out.Changes, c.String())
	}
	was, now := new(maker), new(maker)
	var prompt, hitWas, hitNow, remoteWas, remoteNow uint64
	var regret float64
	for rec, err := range r.All() {
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return nil, err
		}
		if rec.Kind != trace.KindDecision {
			continue
		}
		d := rec.Decision
		if d.Unverifiable != "" {
			out.Unverifiable++
			continue
		}
		was.load(d)
		now.load(d)
		s := Changed(*d.Settings, list)
		now.in.Rule, now.in.Prefill.Policy, now.in.Decode.Policy = s.Rule, s.Prefill, s.Decode
		now.in.Decode.Weights, now.in.Prefill.Weights, now.in.Decode.Busy, now.in.Prefill.Busy = s.Weights, s.Weights, s.Busy, s.Busy
		a, b := was.decide(), now.decide()
		out.Decisions++
		prompt += uint64(max(d.Input.Facts.ISL, 0))
		hitWas, hitNow = hitWas+uint64(hit(a)), hitNow+uint64(hit(b))
		if a.Path == route.Remote {
			remoteWas++
		}
		if b.Path == route.Remote {
			remoteNow++
		}
		switch {
		case a.Err == nil && b.Err != nil:
			out.Failed++
		case a.Path == route.Remote && b.Path == route.Local:
			out.ToLocal++
		case a.Path == route.Local && b.Path == route.Remote:
			out.ToRemote++
		case a.DecodeIndex != b.DecodeIndex || a.Path == route.Remote && a.PrefillIndex != b.PrefillIndex:
			out.Ranks++
			if a.DecodeIndex >= 0 && b.DecodeIndex >= 0 {
				regret += was.in.Decode.Candidates[b.DecodeIndex].Cost - was.in.Decode.Candidates[a.DecodeIndex].Cost
			}
		default:
			continue
		}
		out.Changed++
		if len(out.Examples) < 5 {
			out.Examples = append(out.Examples, Divergence{
				Line: rec.Line, Time: rec.Time, ID: d.ID, Request: d.RequestID,
				Recorded: describe(asDecided(&was.in, a)), Replayed: describe(asDecided(&now.in, b)), Because: slices.Clone(out.Changes),
			})
		}
	}
	if prompt > 0 {
		out.RecordedHit, out.WhatIfHit = float64(hitWas)/float64(prompt), float64(hitNow)/float64(prompt)
	}
	if out.Decisions > 0 {
		out.RecordedRemote, out.WhatIfRemote = float64(remoteWas)/float64(out.Decisions), float64(remoteNow)/float64(out.Decisions)
	}
	if out.Ranks > 0 {
		out.Regret = regret / float64(out.Ranks)
	}
	return out, nil
}

// hit is the predicted cached tokens of the rank that computes the prompt.
func hit(p *decide.Plan) int {
	switch {
	case p.Err != nil:
		return 0
	case p.Path == route.Remote:
		return p.PrefillCached
	}
	return p.CachedTokens
}
