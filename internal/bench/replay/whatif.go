package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/bench/replay/simulate"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/router/trace"
)

// A Change is one setting that a what-if sets.
type Change struct {
	Key, Value string
	apply      func(*Settings) error
}

// Settings are what a what-if can change of a decision.
type Settings struct {
	Plan            disagg.Config
	Decode, Prefill selector.Policy
	Weights         selector.Weights
	Busy            selector.Busy
}

// changes are the keys of what-ifs; those of the configuration, without their
// section.
var changes = map[string]func(s *Settings, v string) error{
	"threshold":    func(s *Settings, v string) error { return setInt(&s.Plan.Threshold, v) },
	"eff_isl":      func(s *Settings, v string) error { s.Plan.On = disagg.OnEffISL; return setInt(&s.Plan.Threshold, v) },
	"isl":          func(s *Settings, v string) error { s.Plan.On = disagg.OnISL; return setInt(&s.Plan.Threshold, v) },
	"prefill_gate": func(s *Settings, v string) error { return setInt(&s.Plan.PrefillGate, v) },
	"decode_gate":  func(s *Settings, v string) error { return setFloat(&s.Plan.DecodeGate, v) },
	"policy": func(s *Settings, v string) error {
		return errors.Join(setPolicy(&s.Decode, v), setPolicy(&s.Prefill, v))
	},
	"prefill_policy":     func(s *Settings, v string) error { return setPolicy(&s.Prefill, v) },
	"decode_policy":      func(s *Settings, v string) error { return setPolicy(&s.Decode, v) },
	"overlap_credit":     func(s *Settings, v string) error { return setFloat(&s.Weights.OverlapCredit, v) },
	"credit_decay":       func(s *Settings, v string) error { return setFloat(&s.Weights.CreditDecay, v) },
	"prefill_load_scale": func(s *Settings, v string) error { return setFloat(&s.Weights.PrefillLoadScale, v) },
	"queue_weight":       func(s *Settings, v string) error { return setFloat(&s.Weights.Queue, v) },
	"decode_load":        func(s *Settings, v string) error { return setFloat(&s.Weights.DecodeLoad, v) },
	"spread":             func(s *Settings, v string) error { return setFloat(&s.Weights.Spread, v) },
	"request_weight":     func(s *Settings, v string) error { return setFloat(&s.Weights.ActiveRequest, v) },
	"temperature":        func(s *Settings, v string) error { return setFloat(&s.Weights.Temperature, v) },
	"busy_decode_blocks": func(s *Settings, v string) error { return setFloat(&s.Busy.DecodeBlocksShare, v) },
	"busy_prefill_tokens": func(s *Settings, v string) error {
		return setInt(&s.Busy.PrefillTokens, v)
	},
	"busy_waiting":  func(s *Settings, v string) error { return setInt(&s.Busy.Waiting, v) },
	"busy_kv_usage": func(s *Settings, v string) error { return setFloat(&s.Busy.KVUsage, v) },
}

// ChangeKeys lists what a what-if can change.
func ChangeKeys() []string {
	keys := make([]string, 0, len(changes))
	for k := range changes {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

func setInt(dst *int, v string) error {
	n, err := strconv.Atoi(v)
	if err == nil && n < 0 {
		err = fmt.Errorf("%d is negative", n)
	}
	*dst = n
	return err
}

func setFloat(dst *float64, v string) error {
	f, err := strconv.ParseFloat(v, 64)
	if err == nil && !(f >= 0 && f <= 1e12) {
		err = fmt.Errorf("%v is not between 0 and 1e12", f)
	}
	*dst = f
	return err
}

func setPolicy(dst *selector.Policy, v string) error {
	p, err := selector.ParsePolicy(v)
	*dst = p
	return err
}

// ParseChange reads "key=value".
func ParseChange(text string) (Change, error) {
	key, value, ok := strings.Cut(text, "=")
	key = strings.ReplaceAll(strings.TrimPrefix(strings.TrimSpace(key), "routing."), "-", "_")
	set := changes[key]
	if !ok || set == nil {
		return Change{}, fmt.Errorf("what-if %q: want KEY=VALUE with one of %s", text, strings.Join(ChangeKeys(), ", "))
	}
	value = strings.TrimSpace(value)
	c := Change{Key: key, Value: value, apply: func(s *Settings) error { return set(s, value) }}
	var probe Settings
	if err := c.apply(&probe); err != nil {
		return Change{}, fmt.Errorf("what-if %s: %w", text, err)
	}
	return c, nil
}

// ApplyTo changes the settings of a simulated run.
func ApplyTo(run *simulate.Setup, list []Change) error {
	v := Settings{Plan: run.Plan, Decode: run.Policy, Prefill: run.Policy, Weights: run.Weights, Busy: run.Busy}
	for _, c := range list {
		if err := c.apply(&v); err != nil {
			return err
		}
	}
	if v.Decode != v.Prefill {
		return errors.New("a simulation has one policy for both phases")
	}
	run.Plan, run.Policy, run.Weights, run.Busy = v.Plan, v.Decode, v.Weights, v.Busy
	return nil
}

// Redecision compares recorded decisions with what they would be under other
// settings, everything else as it was recorded. What follows from a decision
// (caches, loads) is not carried on: for that, simulate.
type Redecision struct {
	Changes   []string `json:"changes"`
	Decisions uint64   `json:"decisions"`
	Changed   uint64   `json:"changed"`
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
		out.Changes = append(out.Changes, c.Key+"="+c.Value)
	}
	was, now := newMaker(), newMaker()
	var prompt, hitWas, hitNow, remoteWas, remoteNow uint64
	var regret float64
	var rec trace.Record
	for n := 0; ; n++ {
		err := r.Next(&rec)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if n&0xfff == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if rec.Kind != trace.KindDecision {
			continue
		}
		d := rec.Decision
		if err := errors.Join(was.load(d), now.load(d)); err != nil {
			return nil, &trace.LineError{Name: r.Name(), Line: rec.Line, Byte: rec.Offset, Err: err}
		}
		s := Settings{Plan: now.in.Config, Decode: now.in.Decode.Policy, Prefill: now.in.Prefill.Policy, Weights: now.in.Prefill.Weights, Busy: now.in.Decode.Busy}
		for _, c := range list {
			if err := c.apply(&s); err != nil {
				return nil, err
			}
		}
		now.in.Config, now.in.Decode.Policy, now.in.Prefill.Policy = s.Plan, s.Decode, s.Prefill
		now.in.Decode.Weights, now.in.Prefill.Weights, now.in.Decode.Busy, now.in.Prefill.Busy = s.Weights, s.Weights, s.Busy, s.Busy
		// A recording from before Settle is left without it, unless the change
		// is about what that looks at.
		if was.in.Decode.Weights != was.in.Prefill.Weights || was.in.AlwaysRemote() != now.in.AlwaysRemote() {
			now.in.Settle()
		}
		a, b := was.decide(), now.decide()
		out.Decisions++
		prompt += uint64(max(d.Facts.ISL, 0))
		hitWas, hitNow = hitWas+uint64(hit(a)), hitNow+uint64(hit(b))
		if a.Path == disagg.Remote {
			remoteWas++
		}
		if b.Path == disagg.Remote {
			remoteNow++
		}
		switch {
		case a.Err == nil && b.Err != nil:
			out.Failed++
		case a.Path == disagg.Remote && b.Path == disagg.Local:
			out.ToLocal++
		case a.Path == disagg.Local && b.Path == disagg.Remote:
			out.ToRemote++
		case a.DecodeIndex != b.DecodeIndex || a.Path == disagg.Remote && a.PrefillIndex != b.PrefillIndex:
			out.Ranks++
			if a.DecodeIndex >= 0 && b.DecodeIndex >= 0 {
				regret += a.Decode.Scores[b.DecodeIndex].Cost - a.Decode.Scores[a.DecodeIndex].Cost
			}
		default:
			continue
		}
		out.Changed++
		if len(out.Examples) < 5 {
			var x, y trace.Decision
			fillPlan(&x, &was.in, a)
			fillPlan(&y, &now.in, b)
			out.Examples = append(out.Examples, Divergence{
				Line: rec.Line, Time: rec.Time, ID: d.ID, Request: d.RequestID,
				Recorded: describe(&x, planCost(a)), Replayed: describe(&y, planCost(b)), Because: slices.Clone(out.Changes),
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
func hit(p *disagg.Plan) int {
	switch {
	case p.Err != nil:
		return 0
	case p.Path == disagg.Remote:
		return p.PrefillCached
	}
	return p.CachedTokens
}

func planCost(p *disagg.Plan) float64 {
	if p.DecodeIndex < 0 || p.DecodeIndex >= len(p.Decode.Scores) {
		return 0
	}
	return p.Decode.Scores[p.DecodeIndex].Cost
}
