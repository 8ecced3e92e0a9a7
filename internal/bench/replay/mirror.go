package replay

import (
	"fmt"
	"net/url"
	"strings"

	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/decide"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/router/trace"
	"github.com/dynctl/dynctl/internal/workers"
)

// FillDecision copies what a plan was made from, and the plan, into a trace's
// decision, reusing the memory of its candidates. What the input does not tell
// (ids, model, hashes) is left to the caller.
func FillDecision(d *trace.Decision, in *decide.Input, p *decide.Plan) {
	c, f := &in.Rule, &in.Facts
	d.Config = trace.Config{
		Threshold: c.Threshold, On: string(c.On), Fallback: string(c.Fallback),
		PrefillGate: c.PrefillGate, DecodeGate: c.DecodeGate, Connector: string(c.Connector),
	}
	d.Facts = trace.Facts{
		Kind: f.Kind.String(), Splittable: f.Splittable, ISL: f.ISL, Source: string(f.Source), N: f.N, Prompts: f.Prompts,
		Multimodal: f.Multimodal, PromptLogprobs: f.PromptLogprobs, MaxTokens: f.MaxTokens,
	}
	d.Force = string(in.Force)
	decode := in.DecodePhase() // this format has its credit, and no name for the rule's
	fillPhase(&d.Decode, &decode, in.DecodePeers)
	fillPhase(&d.Prefill, &in.Prefill, in.PrefillPeers)
	fillPlan(d, in, p)
}

// fillPlan copies the plan alone.
func fillPlan(d *trace.Decision, in *decide.Input, p *decide.Plan) {
	d.Path, d.Reason, d.EffISL, d.Cached = string(p.Path), string(p.Reason), p.EffISL, p.CachedTokens
	d.Error, d.DecodeRank, d.PrefillRank = "", "", ""
	if p.Err != nil {
		d.Error = p.Err.Error()
	}
	if p.DecodeIndex >= 0 {
		d.DecodeRank = in.Decode.Candidates[p.DecodeIndex].Rank
	}
	if p.PrefillIndex >= 0 && p.Path == decide.Remote {
		d.PrefillRank = in.Prefill.Candidates[p.PrefillIndex].Rank
	}
}

func fillPhase(out *trace.Phase, in *selector.Input, peers []disagg.Peer) {
	*out = trace.Phase{
		Phase: string(in.Phase), Policy: string(in.Policy), Weights: trace.Weights(in.Weights), Busy: trace.Busy(in.Busy),
		ISL: in.ISL, BlockSize: in.BlockSize, SessionKey: in.SessionKey, Draw: in.Draw, Turn: in.Turn,
		Candidates: out.Candidates[:0],
	}
	for i := range in.Candidates {
		t := trace.Candidate{Candidate: in.Candidates[i]}
		if i < len(peers) && peers[i].Worker != nil {
			k := peers[i].Worker
			t.Engine, t.Connector, t.EngineBlock = string(k.WireEngine()), string(k.Connector), k.BlockSize
		}
		out.Candidates = append(out.Candidates, t)
	}
}

// maker makes decisions again. Its memory is reused.
type maker struct {
	in      decide.Input
	plan    decide.Plan
	workers map[string]*workers.Worker
	kinds   map[string]api.Kind
}

func newMaker() *maker {
	m := &maker{workers: map[string]*workers.Worker{}, kinds: map[string]api.Kind{}}
	for k := api.Kind(0); k.String() != "invalid"; k++ {
		m.kinds[k.String()] = k
	}
	return m
}

// load makes the input of a recorded decision.
func (m *maker) load(d *trace.Decision) error {
	kind, ok := m.kinds[d.Facts.Kind]
	if !ok {
		return fmt.Errorf("decision %s: unknown endpoint kind %q", d.ID, d.Facts.Kind)
	}
	c, f := &d.Config, &d.Facts
	m.in.Rule = decide.Rule{
		Threshold: c.Threshold, On: decide.Measure(c.On), Fallback: decide.Fallback(c.Fallback),
		PrefillGate: c.PrefillGate, DecodeGate: c.DecodeGate, Connector: workers.Connector(c.Connector),
	}
	m.in.Facts = disagg.Facts{
		Kind: kind, Splittable: f.Splittable, ISL: f.ISL, Source: disagg.Source(f.Source), N: f.N, Prompts: f.Prompts,
		Multimodal: f.Multimodal, PromptLogprobs: f.PromptLogprobs, MaxTokens: f.MaxTokens,
	}
	m.in.Force = disagg.Force(d.Force)
	m.in.DecodePeers = m.phase(&m.in.Decode, m.in.DecodePeers[:0], &d.Decode, workers.Decode)
	m.in.PrefillPeers = m.phase(&m.in.Prefill, m.in.PrefillPeers[:0], &d.Prefill, workers.Prefill)
	if had := d.Prefill.Weights.OverlapCredit; len(d.Prefill.Candidates) > 0 && had != 0 {
		m.in.Rule.LoadCredit = d.Decode.Weights.OverlapCredit / had
		m.in.Decode.Weights.OverlapCredit = had
	}
	return nil
}

func (m *maker) phase(in *selector.Input, peers []disagg.Peer, p *trace.Phase, role workers.Role) []disagg.Peer {
	*in = selector.Input{
		Phase: selector.Phase(p.Phase), Policy: selector.Policy(p.Policy), Weights: selector.Weights(p.Weights), Busy: selector.Busy(p.Busy),
		ISL: p.ISL, BlockSize: p.BlockSize, SessionKey: p.SessionKey, Draw: p.Draw, Turn: p.Turn,
		Candidates: in.Candidates[:0],
	}
	for i := range p.Candidates {
		in.Candidates = append(in.Candidates, p.Candidates[i].Candidate)
		peers = append(peers, disagg.Peer{Worker: m.worker(&p.Candidates[i], role), Rank: nil})
	}
	return peers
}

// worker is the worker of a candidate. Ranks of one worker share it, and one
// that changed its description gets a new one.
func (m *maker) worker(c *trace.Candidate, role workers.Role) *workers.Worker {
	name, _, _ := trace.SplitRank(c.Rank)
	key := strings.Join([]string{name, c.Engine, c.Connector, string(role)}, "\x00")
	w := m.workers[key]
	if w == nil || w.BlockSize != c.EngineBlock {
		if len(m.workers) > 1<<16 {
			clear(m.workers)
		}
		w = &workers.Worker{
			Name: name, URL: &url.URL{Scheme: "http", Host: name}, Engine: workers.Engine(c.Engine), Role: role,
			Connector: workers.Connector(c.Connector), BlockSize: c.EngineBlock,
		}
		m.workers[key] = w
	}
	return w
}

// decide makes the plan for the loaded input.
func (m *maker) decide() *decide.Plan {
	decide.Choose(&m.in, &m.plan)
	return &m.plan
}
