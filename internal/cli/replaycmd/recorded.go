package replaycmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/replay/simulate"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/workers"
)

// recorded is the fleet of a recording and the settings that it ended with.
type recorded struct {
	fleet    string // as --fleet takes it
	settings decide.Options
}

// errNoDecisions is a trace that does not say what fleet it is of.
var errNoDecisions = errors.New("the trace has no decisions")

// readRecorded finds the fleet that a recording's decisions chose from: the most ranks that
// one decision had before it. It is an error when the recording has no decisions, or when
// its fleet cannot be simulated as one.
func readRecorded(ctx context.Context, open func() (*trace.Reader, error)) (*recorded, error) {
	r, err := open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var out *recorded
	largest := map[string]choice{} // by model
	for rec, err := range r.All() {
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return nil, err
		}
		if rec.Kind != trace.KindDecision || rec.Decision.Settings == nil {
			continue
		}
		d := rec.Decision
		if out == nil {
			out = &recorded{}
		}
		s := d.Settings
		out.settings = decide.Options{Decode: s.Decode, Prefill: s.Prefill, Weights: s.Weights, Busy: s.Busy, Rule: s.Rule}
		if c := choiceOf(d); len(c) > len(largest[d.Model]) {
			largest[d.Model] = c
		}
	}
	if out == nil {
		return nil, errNoDecisions
	}
	var most choice
	for _, c := range largest {
		if len(c) > len(most) {
			most = c
		}
	}
	for model, c := range largest { // aliases and adapters are served by the same workers
		for rank := range c {
			if most[rank] == nil {
				return nil, fmt.Errorf("rank %s of model %s does not serve the other models, and a simulation has one pool", rank, model)
			}
		}
	}
	out.fleet, err = fleetOf(most)
	return out, err
}

// choice is the ranks that a decision had before it, by label, with their workers.
type choice map[string]*workers.Worker

func choiceOf(d *trace.Decision) choice {
	c := choice{}
	for _, phase := range []struct {
		candidates []decision.Candidate
		peers      []workers.Peer
	}{{d.Input.Prefill.Candidates, d.Input.PrefillPeers}, {d.Input.Decode.Candidates, d.Input.DecodePeers}} {
		for i := range phase.candidates {
			c[phase.candidates[i].Rank] = phase.peers[i].Worker
		}
	}
	return c
}

// fleetOf writes the workers of some ranks as --fleet takes them.
func fleetOf(c choice) (string, error) {
	ranks := map[string]int{} // by worker
	known := map[string]*workers.Worker{}
	for _, w := range c {
		ranks[w.Name]++
		known[w.Name] = w
	}
	letters := map[workers.Role]string{workers.Prefill: "p", workers.Decode: "d", workers.Aggregated: "a"}
	count := map[string]map[string]int{} // options to letters to engines
	blocks := map[int]bool{}
	for name, w := range known {
		letter := letters[w.Role]
		if letter == "" {
			return "", fmt.Errorf("worker %s of the recording has role %s, which a simulation does not have", name, w.Role)
		}
		blocks[w.BlockSize] = true
		var options []string
		for _, o := range []struct {
			key   string
			value int
		}{{"dp", ranks[name]}, {"block", w.BlockSize}, {"kv_blocks", w.KVBlocks}} {
			if o.value > 1 { // one rank is the default, and 0 is unknown
				options = append(options, fmt.Sprintf("%s=%d", o.key, o.value))
			}
		}
		key := strings.Join(options, ",")
		if count[key] == nil {
			count[key] = map[string]int{}
		}
		count[key][letter]++
	}
	if len(blocks) > 1 {
		return "", errors.New("the recording's workers have blocks of several sizes, and a simulation has one")
	}
	var parts []string
	for options, engines := range count {
		text := ""
		for _, letter := range []string{"p", "d", "a"} {
			if n := engines[letter]; n > 0 {
				text += fmt.Sprintf("%d%s", n, letter)
			}
		}
		parts = append(parts, strings.TrimSuffix(text+":"+options, ":"))
	}
	slices.Sort(parts)
	if len(parts) == 0 {
		return "", errors.New("the recording names no workers")
	}
	return strings.Join(parts, "+"), nil
}

// likeRecorded has a simulation without --fleet take the fleet of the recording, with its
// policy and threshold where no flag names others, and says what is simulated.
func (f *replayFlags) likeRecorded(ctx context.Context, errs io.Writer, changed func(string) bool, files *traceFiles) error {
	if changed("fleet") {
		return nil
	}
	c := &f.compare
	rec, err := readRecorded(ctx, files.open)
	why := ""
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, errNoDecisions):
	case err != nil:
		why = fmt.Sprintf(" (not the recording's: %v)", err)
	default:
		c.fleet, c.others = rec.fleet, rec.settings.Weights.Others
		rule := rec.settings.Rule
		if !changed("routing-threshold") {
			c.thresholds = []string{decide.Threshold{Tokens: rule.Threshold, Auto: rule.Auto}.String()}
		}
		if !changed("routing-threshold-on") {
			c.on = string(rule.On)
		}
		if !changed("policy") && rec.settings.Decode == rec.settings.Prefill {
			c.policies = []string{string(rec.settings.Decode)}
		}
		if !f.trace.quiet {
			printable.Fprintf(errs, "note: simulates the fleet of the recording, --fleet %s --routing-threshold %s\n", c.fleet, strings.Join(c.thresholds, ","))
		}
		return nil
	}
	if !f.trace.quiet {
		printable.Fprintf(errs, "note: simulates --fleet %s%s; name another one with --fleet\n", c.fleet, why)
	}
	return nil
}

// simulated runs the requests of a recording on its own fleet, once with the settings that
// it ended with and once with changes. The reason is why that cannot be; empty if it can.
func (f *replayFlags) simulated(ctx context.Context, files *traceFiles, changes []replay.Change) (out *replay.Simulated, reason string, err error) {
	if files.again() != nil {
		return nil, "the trace comes from stdin and is read once", nil
	}
	rec, err := readRecorded(ctx, files.open)
	if err != nil {
		return nil, err.Error(), ctx.Err()
	}
	src, err := arrivals.FromTrace(files.open)
	if err != nil {
		return nil, "", err
	}
	c := &f.compare
	c.fleet = rec.fleet
	fleet, err := c.parseFleet()
	if err != nil {
		return nil, err.Error(), nil
	}
	out = &replay.Simulated{Fleet: rec.fleet}
	for _, one := range []struct {
		settings decide.Options
		into     *replay.Outcome
	}{{rec.settings, &out.Recorded}, {replay.Changed(rec.settings, changes), &out.WhatIf}} {
		res, err := simulate.Run(ctx, src, simulate.Setup{
			Fleet: fleet, Options: one.settings, Seed: c.seed, Scrape: c.scrape, From: f.from, To: f.to, TTFT: c.ttft, ITL: c.itl, Limits: c.limits, SlowFactor: c.slowFactor,
		})
		if err != nil {
			return nil, err.Error(), ctx.Err()
		}
		*one.into = replay.Outcome{
			Requests: res.Requests, Failed: res.Failed, TTFTP50: res.TTFT.P50, TTFTP99: res.TTFT.P99, ITLP50: res.ITL.P50, ITLP99: res.ITL.P99, Hit: res.HitRatio,
		}
	}
	out.Judge()
	return out, "", nil
}
