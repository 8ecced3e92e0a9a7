package trace

import (
	"encoding/json"
	"errors"
	"slices"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// This file reads version 1 of the format, which is not written any more. Each of
// its decisions has the settings and what is recorded of the workers.

// rulesV1 are the rules of every recording of version 1.
const rulesV1 = 1

func termsV1() []string {
	return []string{"prefill", "overlap_credit", "queue", "decode", "spread", "request"}
}

// v1 is what its decisions share.
type v1 struct {
	settings map[decide.Settings]*settingsV1
	workers  map[workerV1]*workers.Worker
}

type settingsV1 struct {
	decide.Settings
	revision uint64
}

type workerV1 struct {
	name, engine, connector string
	block                   int
	prefill                 bool
}

type decisionV1 struct {
	ID          string `json:"id"`
	RequestID   string `json:"request_id"`
	Attempt     int    `json:"attempt"`
	Model       string `json:"model"`
	BeganUS     int64  `json:"began_us"`
	BlockSize   int    `json:"block_size_tokens"`
	Locals      Hashes `json:"locals"`
	Approximate bool   `json:"approximate"`
	Tokens      Tokens `json:"tokens"`
	Config      struct {
		Threshold   int     `json:"threshold_tokens"`
		On          string  `json:"threshold_on"`
		Fallback    string  `json:"fallback"`
		PrefillGate int     `json:"prefill_gate_tokens"`
		DecodeGate  float64 `json:"decode_gate_ratio"`
		Connector   string  `json:"connector"`
	} `json:"config"`
	Facts struct {
		Kind           string `json:"kind"`
		Splittable     bool   `json:"splittable"`
		ISL            int    `json:"isl_tokens"`
		Source         string `json:"isl_source"`
		N              int    `json:"n"`
		Prompts        int    `json:"prompts"`
		Multimodal     bool   `json:"multimodal"`
		PromptLogprobs bool   `json:"prompt_logprobs"`
		MaxTokens      int64  `json:"max_tokens"`
	} `json:"facts"`
	Force       string  `json:"force"`
	Decode      phaseV1 `json:"decode"`
	Prefill     phaseV1 `json:"prefill"`
	Path        string  `json:"path"`
	Reason      string  `json:"reason"`
	Error       string  `json:"error"`
	EffISL      int     `json:"eff_isl_tokens"`
	Cached      int     `json:"cached_tokens"`
	DecodeRank  string  `json:"decode_rank"`
	PrefillRank string  `json:"prefill_rank"`
}

type phaseV1 struct {
	Policy  string           `json:"policy"`
	Weights selector.Weights `json:"weights"` // by the same names
	Busy    struct {
		DecodeBlocksShare float64 `json:"decode_blocks_share"`
		PrefillTokens     int     `json:"prefill_tokens"`
		Waiting           int     `json:"waiting_requests"`
		KVUsage           float64 `json:"kv_usage_ratio"`
	} `json:"busy"`
	ISL        int           `json:"isl_tokens"`
	BlockSize  int           `json:"block_size_tokens"`
	SessionKey uint64        `json:"session_key"`
	Draw       uint64        `json:"draw"`
	Turn       uint64        `json:"turn"`
	Candidates []candidateV1 `json:"candidates"`
}

type candidateV1 struct {
	Rank        string  `json:"rank"`
	Slot        uint32  `json:"slot"`
	Engine      string  `json:"engine"`
	Connector   string  `json:"connector"`
	EngineBlock int     `json:"engine_block_tokens"`
	Overlap     int     `json:"overlap_blocks"`
	Requests    int     `json:"active_requests"`
	Prefill     int     `json:"prefill_tokens"`
	Decode      int     `json:"decode_blocks"`
	Fresh       int     `json:"fresh_tokens"`
	LastTurn    uint64  `json:"last_turn"`
	Resident    int     `json:"resident_blocks"`
	KVBlocks    int     `json:"kv_blocks"`
	HasLoad     bool    `json:"has_load"`
	Running     int     `json:"running"`
	Waiting     int     `json:"waiting"`
	KVUsage     float64 `json:"kv_usage_ratio"`
	Excluded    string  `json:"excluded"`
	Tried       bool    `json:"tried"`
	Cost        float64 `json:"cost"`
}

// outcomeV1 reads an outcome, which had the receipt without its candidates.
func (r *Reader) outcomeV1(p []byte) (*Outcome, error) {
	var x struct {
		ID      string           `json:"id"`
		Receipt *receipt.Receipt `json:"receipt"`
	}
	if err := json.Unmarshal(p, &x); err != nil {
		return nil, err
	}
	c := x.Receipt
	if c == nil {
		return nil, errors.New("an outcome without receipt")
	}
	nameWorkers(c.Legs)
	return &Outcome{
		ID: x.ID, ReceivedUS: c.Time.Sub(r.header.Start).Microseconds(), Stream: c.Stream,
		Result: c.Outcome, Legs: c.Legs, LegsOmitted: c.LegsOmitted, Notes: c.Notes,
	}, nil
}

// decisionV1 reads a decision.
func (r *Reader) decisionV1(p []byte) (*Decision, error) {
	var v decisionV1
	if err := json.Unmarshal(p, &v); err != nil {
		return nil, err
	}
	d := &Decision{
		ID: v.ID, RequestID: v.RequestID, Attempt: v.Attempt, Model: v.Model, BeganUS: v.BeganUS,
		BlockSize: v.BlockSize, Locals: v.Locals, Approximate: v.Approximate, Tokens: v.Tokens,
		Path: v.Path, Reason: v.Reason, Error: v.Error, EffISL: v.EffISL, Cached: v.Cached,
		DecodeRank: v.DecodeRank, PrefillRank: v.PrefillRank, Rules: rulesV1,
	}
	kind, ok := kinds[v.Facts.Kind]
	if !ok {
		d.lacks("endpoint %q is not known to this dynctl", v.Facts.Kind)
	}
	s := r.v1.intern(&v)
	d.Revision, d.Settings = s.revision, &s.Settings
	f := &v.Facts
	in := &decide.Input{
		Rule: s.Rule, Force: disagg.Force(v.Force),
		Facts: disagg.Facts{
			Kind: kind, Splittable: f.Splittable, ISL: f.ISL, Source: disagg.Source(f.Source), N: f.N, Prompts: f.Prompts,
			Multimodal: f.Multimodal, PromptLogprobs: f.PromptLogprobs, MaxTokens: f.MaxTokens,
		},
	}
	switch decision.Reason(v.Reason) {
	case decision.ReasonEnded:
		in.GaveUp = string(attempt.Ended)
	case decision.ReasonFallback:
		in.GaveUp = "why was not recorded"
	}
	d.Input = in
	for _, list := range [...][]candidateV1{v.Decode.Candidates, v.Prefill.Candidates} {
		if slices.ContainsFunc(list, func(c candidateV1) bool { return c.Rank == "" }) {
			return nil, errNoRank
		}
	}
	in.DecodePeers = r.v1.phase(&in.Decode, &v.Decode, selector.Decode)
	in.PrefillPeers = r.v1.phase(&in.Prefill, &v.Prefill, selector.Prefill)
	for _, p := range []*selector.Input{&in.Decode, &in.Prefill} {
		p.Weights, p.Busy = s.Weights, s.Busy
	}
	d.lacksV1()
	return d, nil
}

// intern finds the settings of a decision. Its decode weights have the credit of a
// cached block as it was used: where the rule always went remote, the share of the
// ordinary one.
func (x *v1) intern(v *decisionV1) *settingsV1 {
	c, b := &v.Config, &v.Decode.Busy
	key := decide.Settings{
		Decode: selector.Policy(v.Decode.Policy), Prefill: selector.Policy(v.Prefill.Policy), Weights: v.Decode.Weights,
		Busy: selector.Busy{DecodeBlocksShare: b.DecodeBlocksShare, PrefillTokens: b.PrefillTokens, Waiting: b.Waiting, KVUsage: b.KVUsage},
		Rule: decide.Rule{
			Threshold: c.Threshold, On: decide.Measure(c.On), Fallback: decide.Fallback(c.Fallback),
			PrefillGate: c.PrefillGate, DecodeGate: c.DecodeGate, Connector: workers.Connector(c.Connector), LoadCredit: decide.LoadCredit,
		},
	}
	if full := v.Prefill.Weights.OverlapCredit; full != 0 && c.Threshold <= 0 && len(v.Prefill.Candidates) > 0 {
		key.Rule.LoadCredit, key.Weights = v.Decode.Weights.OverlapCredit/full, v.Prefill.Weights
	}
	s := x.settings[key]
	if s == nil {
		if x.settings == nil || len(x.settings) >= maxDescriptions {
			x.settings = map[decide.Settings]*settingsV1{}
		}
		s = &settingsV1{Settings: key, revision: uint64(len(x.settings)) + 1}
		x.settings[key] = s
	}
	return s
}

func (x *v1) phase(in *selector.Input, p *phaseV1, phase selector.Phase) []disagg.Peer {
	*in = selector.Input{
		Phase: phase, Policy: selector.Policy(p.Policy), ISL: p.ISL, BlockSize: p.BlockSize,
		SessionKey: p.SessionKey, Draw: p.Draw, Turn: p.Turn, Candidates: make([]decision.Candidate, len(p.Candidates)),
	}
	peers := make([]disagg.Peer, len(p.Candidates))
	for i := range p.Candidates {
		c := &p.Candidates[i]
		in.Candidates[i] = decision.Candidate{
			Rank: c.Rank, Slot: c.Slot, OverlapBlocks: c.Overlap, Cost: c.Cost, ActiveRequests: c.Requests, PrefillTokens: c.Prefill,
			DecodeBlocks: c.Decode, FreshTokens: c.Fresh, LastTurn: c.LastTurn, ResidentBlocks: c.Resident, KVBlocks: c.KVBlocks,
			HasLoad: c.HasLoad, Running: c.Running, Waiting: c.Waiting, KVUsage: c.KVUsage, KeptOut: c.Excluded, Tried: c.Tried,
		}
		peers[i].Worker = x.worker(c, phase)
	}
	return peers
}

// worker is the worker of a candidate. Ranks of one worker share it.
func (x *v1) worker(c *candidateV1, phase selector.Phase) *workers.Worker {
	name, _, _ := SplitRank(c.Rank)
	key := workerV1{name, c.Engine, c.Connector, c.EngineBlock, phase == selector.Prefill}
	w := x.workers[key]
	if w == nil {
		if x.workers == nil || len(x.workers) >= maxDescriptions {
			x.workers = map[workerV1]*workers.Worker{}
		}
		w = &workers.Worker{Name: name, Engine: workers.Engine(c.Engine), Connector: workers.Connector(c.Connector), BlockSize: c.EngineBlock}
		if key.prefill {
			w.Role = workers.Prefill // the role of others is not recorded
		}
		x.workers[key] = w
	}
	return w
}

// lacksV1 notes what a decision of version 1 depends on and does not contain.
func (d *Decision) lacksV1() {
	in := d.Input
	for i := range in.DecodePeers {
		if in.DecodePeers[i].Worker.Engine == workers.SGLang {
			d.lacks("version 1 does not say whether SGLang's worker %s can prefill by itself", in.DecodePeers[i].Worker.Name)
			return
		}
	}
	first := ""
	several := false
	for i := range in.PrefillPeers {
		name := in.PrefillPeers[i].Worker.Name
		several = several || i > 0 && name != first
		first = name
	}
	switch k := in.Facts.Kind.String(); {
	case (k == "messages" || k == "responses") && (len(in.PrefillPeers) > 0 || in.Rule.Fallback == decide.FallbackError):
		d.lacks("version 1 does not say what of a request on %s keeps it whole, nor the engines' versions", k)
	case several && in.Facts.Kind.IsChat():
		d.lacks("version 1 does not say whether engines make the same tokens of a chat")
	}
}
