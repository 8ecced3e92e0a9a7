package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Decision is everything that a routing decision was made from, and what it was.
type Decision struct {
	ID, RequestID, Model string
	Attempt              int
	// BeganUS is when the index was about to be queried. The caches that the decision
	// saw are those of a moment between it and the record's time.
	BeganUS int64
	// BlockSize is the tokens of a block of Locals, which are the local hashes
	// of the prompt's full blocks. Approximate says that they are text chunks.
	BlockSize   int
	Locals      Hashes
	Approximate bool
	Tokens      Tokens

	// Revision numbers the Settings.
	Revision uint64
	Settings *decide.Options
	// Input is what the plan was made from; its candidates have the costs that
	// they got. Policies, weights, limits and the rule are those of Settings.
	Input *decide.Input

	// What was decided. PrefillRank is set if the path is remote.
	Path, Reason, Error     string
	EffISL, Cached          int
	DecodeRank, PrefillRank string
	// Costs are those of both paths, where they decided.
	Costs cost.Costs

	// Explore says that a router had drawn the request to take the path that costs more, where
	// that cost little more, to learn of it. None does so any more.
	Explore bool
	// Rules is the version of the rules that decided: decide.Rules of then.
	Rules int
	// Unverifiable says why the decision cannot be made again: the recording
	// holds something that this reader does not know, or lacks something that
	// the decision depends on. Empty if it can.
	Unverifiable string
}

// SetPlan says what was decided.
func (d *Decision) SetPlan(in *decide.Input, p *decide.Plan) {
	d.Path, d.Reason, d.EffISL, d.Cached = string(p.Path), string(p.Reason), p.EffISL, p.CachedTokens
	d.Error, d.DecodeRank, d.PrefillRank, d.Costs = "", "", "", p.Costs
	if p.Err != nil {
		d.Error = p.Err.Error()
	}
	if p.DecodeIndex >= 0 {
		d.DecodeRank = in.Decode.Candidates[p.DecodeIndex].Rank
	}
	if p.PrefillIndex >= 0 && p.Path == route.Remote {
		d.PrefillRank = in.Prefill.Candidates[p.PrefillIndex].Rank
	}
}

// lacks notes why the decision cannot be made again; the first reason stays.
func (d *Decision) lacks(format string, args ...any) {
	if d.Unverifiable == "" {
		d.Unverifiable = fmt.Sprintf(format, args...)
	}
}

// terms are the names of the terms of a cost.
var terms = func() (names []string) {
	for _, f := range reflect.VisibleFields(reflect.TypeFor[decision.Terms]()) {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" {
			names = append(names, strings.TrimSuffix(strings.TrimSuffix(name, "_blocks"), "_ms"))
		}
	}
	return names
}()

// The lines of a decision and of what it refers to, for encoding/json. The names
// are those of receipts and of the settings. Members that are zero are left out.

type decisionLine struct {
	Kind         Kind      `json:"kind"`
	Time         int64     `json:"t_us"`
	ID           string    `json:"id"`
	RequestID    string    `json:"request_id"`
	Attempt      int       `json:"attempt"`
	Model        string    `json:"model"`
	Began        int64     `json:"began_us"`
	Settings     uint64    `json:"settings"`
	Costs        uint64    `json:"costs"`
	BlockSize    int       `json:"block_size_tokens"`
	HashedBlock  int       `json:"hashed_block_tokens"`
	Locals       Hashes    `json:"locals"`
	Approximate  bool      `json:"approximate"`
	Tokens       Tokens    `json:"tokens"`
	Facts        factsLine `json:"facts"`
	Force        string    `json:"force"`
	GaveUp       string    `json:"gave_up"`
	Explore      bool      `json:"explore"`
	Session      uint64    `json:"session_key_hash,string"`
	Decode       phaseLine `json:"decode"`
	Prefill      phaseLine `json:"prefill"`
	Path         string    `json:"path"`
	Reason       string    `json:"reason"`
	Error        string    `json:"error"`
	EffISL       int       `json:"eff_isl_tokens"`
	Cached       int       `json:"cached_tokens"`
	Local        float64   `json:"local_cost_ms"`
	Remote       float64   `json:"remote_cost_ms"`
	Unverifiable string    `json:"unverifiable"`
}

type factsLine struct {
	Endpoint       string       `json:"endpoint"`
	Splittable     bool         `json:"splittable"`
	ISL            int          `json:"isl_tokens"`
	Source         route.Source `json:"isl_source"`
	N              int          `json:"n"`
	Prompts        int          `json:"prompts"`
	Multimodal     bool         `json:"multimodal"`
	Opaque         bool         `json:"opaque"`
	Continues      bool         `json:"continues"`
	ServerTools    bool         `json:"server_tools"`
	PromptLogprobs bool         `json:"prompt_logprobs"`
	RoutedExperts  bool         `json:"routed_experts"`
	MaxTokens      int64        `json:"max_tokens"`
	Output         int          `json:"expected_output_tokens"`
}

type phaseLine struct {
	Draw       uint64          `json:"draw,string"`
	Turn       uint64          `json:"turn"`
	Home       string          `json:"session_home"`
	Siblings   *siblingsLine   `json:"siblings"`
	Chosen     string          `json:"chosen"`
	Candidates []candidateLine `json:"candidates"`
}

// siblingsLine is a selector.Siblings.
type siblingsLine struct {
	Router uint64  `json:"router,string"`
	Unseen float64 `json:"unseen_decisions"`
	Tokens float64 `json:"unseen_tokens"`
}

// candidateLine is a candidate by the names of receipts, with the number of its
// worker and why it was kept out, which receipts name as one of several reasons.
type candidateLine struct {
	decision.Candidate
	N uint64 `json:"n"`
	// KVBlocks is there where it does not follow from the worker's.
	KVBlocks *int   `json:"kv_blocks"`
	KeptOut  string `json:"kept_out"`
	Tried    bool   `json:"tried"`
}

type settingsLine struct {
	Revision    uint64            `json:"revision"`
	Decode      selector.Policy   `json:"decode_policy"`
	Prefill     selector.Policy   `json:"prefill_policy"`
	Threshold   int               `json:"threshold_tokens"`
	Auto        bool              `json:"threshold_auto,omitempty"`
	On          decide.Measure    `json:"threshold_on,omitempty"`
	Fallback    decide.Fallback   `json:"prefill_fallback,omitempty"`
	PrefillGate int               `json:"prefill_gate_tokens,omitempty"`
	StartGate   int               `json:"start_gate_tokens,omitempty"`
	DecodeGate  float64           `json:"decode_gate_ratio,omitempty"`
	Connector   workers.Connector `json:"connector,omitempty"`
	LoadCredit  float64           `json:"load_credit"`
	Weights     selector.Weights  `json:"weights"`
	Busy        selector.Busy     `json:"busy"`
}

// costsLine is a revision of cost.Model, by its members.
type costsLine struct {
	Revision uint64        `json:"revision"`
	Local    cost.LegModel `json:"local"`
	Prefill  cost.LegModel `json:"prefill"`
	Transfer cost.LegModel `json:"transfer"`
	Stall    float64       `json:"stall"`
	Limit    float64       `json:"limit_ms"`
	Beyond   float64       `json:"beyond"`
	Lost     float64       `json:"lost_ms,omitempty"`
	// Spare is of routers that explored: it is read, and means nothing any more.
	Spare float64 `json:"spare_ms,omitempty"`
	// Slow is of rules before 5, which had the slow ranks here: it is read, and means nothing
	// any more.
	Slow json.RawMessage `json:"slow,omitempty"`
	// These are a cost.Prices.
	Step      cost.StepModel  `json:"step,omitzero"`
	Others    float64         `json:"others,omitempty"`
	Answer    float64         `json:"answer,omitempty"`
	Loss      float64         `json:"loss_ms,omitempty"`
	GapLimit  float64         `json:"gap_limit_ms,omitempty"`
	LateOnce  bool            `json:"late_once,omitempty"`
	Rooms     bool            `json:"rooms,omitempty"`
	Length    float64         `json:"answer_tokens,omitempty"`
	Stalled   float64         `json:"stalled_ms,omitempty"`
	Fresh     float64         `json:"fresh_ratio,omitempty"`
	Error     float64         `json:"error_ratio,omitempty"`
	NoRemote  bool            `json:"no_remote,omitempty"`
	Lacks     cost.Legs       `json:"lacks,omitempty"`
	Constants *cost.Constants `json:"constants,omitempty"`
}

// pricesOf and prices are the same from and to a cost.Prices.
func (l *costsLine) pricesOf(p *cost.Prices) {
	l.Step, l.Others, l.Answer, l.Loss, l.GapLimit, l.LateOnce, l.Rooms, l.Length = p.Step, p.Others, p.Answer, p.Loss, p.GapLimit, p.LateOnce, p.Rooms, p.Length
	l.Stalled, l.Fresh, l.Error, l.NoRemote, l.Lacks, l.Constants = p.Stalled, p.Fresh, p.Error, p.NoRemote, p.Lacks, &p.Constants
}

func (l *costsLine) prices() cost.Prices {
	p := cost.Prices{
		Step: l.Step, Others: l.Others, Answer: l.Answer, Loss: l.Loss, GapLimit: l.GapLimit, LateOnce: l.LateOnce, Rooms: l.Rooms, Length: l.Length,
		Stalled: l.Stalled, Fresh: l.Fresh, Error: l.Error, NoRemote: l.NoRemote, Lacks: l.Lacks,
	}
	if l.Constants != nil {
		p.Constants = *l.Constants
	}
	return p
}

type workerLine struct {
	N          uint64            `json:"n"`
	Worker     string            `json:"worker"`
	Role       workers.Role      `json:"role"`
	Engine     workers.Engine    `json:"engine"`
	Version    string            `json:"version"`
	Connector  workers.Connector `json:"connector"`
	CacheType  string            `json:"cache_dtype"`
	BlockSize  int               `json:"block_size_tokens"`
	KVBlocks   int               `json:"kv_blocks"`
	ChatTokens string            `json:"chat_tokens"`
	Revision   string            `json:"revision"`
	Slice      string            `json:"slice"`
	Models     []string          `json:"models"`
}

// kinds are the endpoints by their names.
var kinds = func() map[string]api.Kind {
	m := map[string]api.Kind{}
	for k := api.Kind(0); k.String() != "invalid"; k++ {
		m[k.String()] = k
	}
	return m
}()

// AppendDecision appends the line of a decision. refs are the numbers of its
// candidates' workers, as a Book gives them.
func AppendDecision(dst []byte, atUS int64, d *Decision, refs []uint64) []byte {
	o := begin(dst, KindDecision, atUS)
	in := d.Input
	o.str("id", d.ID)
	o.str("request_id", d.RequestID)
	o.some("attempt", d.Attempt)
	o.str("model", d.Model)
	o.some("began_us", int(d.BeganUS))
	o.someUint("settings", d.Revision)
	if in.Costs != nil {
		o.uint("costs", in.Costs.Revision)
	}
	o.some("block_size_tokens", in.Decode.BlockSize)
	if d.BlockSize != in.Decode.BlockSize {
		o.int("hashed_block_tokens", d.BlockSize)
	}
	if len(d.Locals) > 0 {
		o.key("locals")
		o.p = appendHashes(o.p, d.Locals)
	}
	o.yes("approximate", d.Approximate)
	if len(d.Tokens) > 0 {
		o.key("tokens")
		o.p = appendTokens(o.p, d.Tokens)
	}
	f := &in.Facts
	o.key("facts")
	o.open()
	o.str("endpoint", f.Kind.String())
	o.yes("splittable", f.Splittable)
	o.some("isl_tokens", f.ISL)
	o.str("isl_source", string(f.Source))
	o.some("n", f.N)
	o.some("prompts", f.Prompts)
	o.yes("multimodal", f.Multimodal)
	o.yes("opaque", f.Opaque)
	o.yes("continues", f.Continues)
	o.yes("server_tools", f.ServerTools)
	o.yes("prompt_logprobs", f.PromptLogprobs)
	o.yes("routed_experts", f.RoutedExperts)
	o.some("max_tokens", int(f.MaxTokens))
	o.some("expected_output_tokens", f.Output)
	o.close()
	o.str("force", string(in.Force))
	o.str("gave_up", in.GaveUp)
	o.yes("explore", d.Explore)
	if in.Decode.SessionKey != 0 {
		o.quoted("session_key_hash", in.Decode.SessionKey)
	}
	n := len(in.Decode.Candidates)
	o.phase("decode", &in.Decode, in.DecodePeers, d.DecodeRank, refs[:n])
	o.phase("prefill", &in.Prefill, in.PrefillPeers, d.PrefillRank, refs[n:])
	o.str("path", d.Path)
	o.str("reason", d.Reason)
	o.str("error", d.Error)
	o.some("eff_isl_tokens", d.EffISL)
	o.some("cached_tokens", d.Cached)
	if d.Costs != (cost.Costs{}) {
		o.num("local_cost_ms", d.Costs.Local)
		o.num("remote_cost_ms", d.Costs.Remote)
	}
	o.str("unverifiable", d.Unverifiable)
	return append(o.p, '}', '\n')
}

func (o *object) phase(name string, in *selector.Input, peers []workers.Peer, chosen string, refs []uint64) {
	o.key(name)
	o.open()
	if in.Draw != 0 {
		o.quoted("draw", in.Draw)
	}
	o.someUint("turn", in.Turn)
	o.str("session_home", in.Home)
	if s := in.Siblings; s != nil {
		o.key("siblings")
		o.open()
		o.quoted("router", s.Router)
		o.num("unseen_decisions", s.Unseen)
		o.num("unseen_tokens", s.Tokens)
		o.close()
	}
	o.str("chosen", chosen)
	if len(in.Candidates) > 0 {
		o.key("candidates")
		for i := range in.Candidates {
			o.p = append(o.p, "[,"[min(i, 1)])
			o.candidate(&in.Candidates[i], peers[i].Worker, in.BlockSize, refs[i])
		}
		o.p = append(o.p, ']')
	}
	o.close()
}

func (o *object) candidate(c *decision.Candidate, w *workers.Worker, unit int, n uint64) {
	o.open()
	o.str("rank", c.Rank)
	o.someUint("n", n)
	o.some("slot", int(c.Slot))
	o.some("overlap_blocks", c.OverlapBlocks)
	o.some("cpu_blocks", int(c.CPU))
	o.some("disk_blocks", int(c.Disk))
	o.some("remote_blocks", int(c.Remote))
	if c.Cost != 0 {
		o.num("cost_blocks", c.Cost)
	}
	o.some("active_requests", c.ActiveRequests)
	o.some("answering_requests", c.Answering)
	o.some("active_prefill_tokens", c.PrefillTokens)
	o.some("active_decode_blocks", c.DecodeBlocks)
	o.some("active_cached_blocks", c.CachedBlocks)
	o.some("fresh_tokens", c.FreshTokens)
	o.someUint("last_turn", c.LastTurn)
	o.some("sibling_requests", int(c.SiblingRequests))
	o.some("sibling_prefill_tokens", int(c.SiblingPrefillTokens))
	o.some("sibling_decode_blocks", int(c.SiblingDecodeBlocks))
	o.some("sibling_fresh_tokens", int(c.SiblingFreshTokens))
	o.some("sibling_age_ms", int(c.SiblingAgeMS))
	o.some("held_for_siblings", int(c.SiblingHeld))
	o.some("resident_blocks", c.ResidentBlocks)
	if c.KVBlocks != decide.Capacity(w, unit) {
		o.int("kv_blocks", c.KVBlocks)
	}
	if c.HasLoad { // else there are none of these
		o.yes("has_load", true)
		o.some("running_requests", c.Running)
		o.some("waiting_requests", c.Waiting)
		if c.KVUsage != 0 {
			o.num("kv_usage_ratio", c.KVUsage)
		}
	}
	if c.Times != 0 {
		o.num("slow_times", c.Times)
	}
	o.str("kept_out", c.KeptOut)
	o.yes("tried", c.Tried)
	o.close()
}

// strict reads a line and returns the name of a member that is not known here, as
// the error of encoding/json has it; the others are read all the same.
func strict(p []byte, v any) (unknown string, err error) {
	dec := json.NewDecoder(bytes.NewReader(p))
	dec.DisallowUnknownFields()
	err = dec.Decode(v)
	if err != nil {
		if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
			return name, nil
		}
	}
	return "", err
}

// described is a description that decisions refer to.
type described[T any] struct {
	value T
	// lacks is why decisions that depend on it cannot be made again.
	lacks string
}

// descriptions are those of the part of a recording that is read: the newest, and
// those before, which go when the newest are as many as may be.
type descriptions struct {
	newest, before generation
	limit, bytes   int // of one generation
}

type generation struct {
	settings map[uint64]described[*decide.Options]
	workers  map[uint64]described[*workers.Worker]
	costs    map[uint64]described[*cost.Model]
	bytes    int
}

func newDescriptions() descriptions {
	return descriptions{newest: newGeneration(), limit: 2 * maxDescriptions, bytes: 2 * maxDescribed}
}

func newGeneration() generation {
	return generation{settings: map[uint64]described[*decide.Options]{}, workers: map[uint64]described[*workers.Worker]{}, costs: map[uint64]described[*cost.Model]{}}
}

// len is how many there are.
func (g *generation) len() int { return len(g.settings) + len(g.workers) + len(g.costs) }

// room makes room for one more description of n bytes.
func (r *Reader) room(n int) {
	k := &r.known
	if g := &k.newest; g.len() >= k.limit || g.bytes+n > k.bytes {
		if k.before.len() > 0 {
			r.stats.Forgotten++
		}
		k.before, k.newest = k.newest, newGeneration()
	}
	k.newest.bytes += n
}

// find looks a description up.
func find[T any](newest, before map[uint64]described[T], n uint64) (described[T], bool) {
	d, ok := newest[n]
	if !ok {
		d, ok = before[n]
	}
	return d, ok
}

// oneOf reports whether a word is among those that this reader knows.
func oneOf[T comparable](v T, list ...T) bool { return slices.Contains(list, v) }

func knownConnector(c workers.Connector) bool {
	return c == workers.ConnectorNone || slices.Contains(workers.Connectors(), c)
}

// timedRules is from which version of the rules on policy kv compares times. Before it was what
// kv_blocks is now.
const timedRules = 5

// parseSettings reads a settings line.
func (r *Reader) parseSettings(p []byte) error {
	var l struct {
		Kind Kind  `json:"kind"`
		Time int64 `json:"t_us"`
		settingsLine
	}
	unknown, err := strict(p, &l)
	if err != nil {
		return err
	}
	e := described[*decide.Options]{value: &decide.Options{
		Decode: l.Decode, Prefill: l.Prefill, Weights: l.Weights, Busy: l.Busy,
		Rule: decide.Rule{
			Threshold: l.Threshold, Auto: l.Auto, On: l.On, Fallback: l.Fallback, PrefillGate: l.PrefillGate, StartGate: l.StartGate, DecodeGate: l.DecodeGate,
			Connector: l.Connector, LoadCredit: l.LoadCredit,
		},
	}}
	switch {
	case unknown != "":
		e.lacks = "the settings have " + unknown + ", which this dynctl does not know"
	case !slices.Contains(selector.Policies(), l.Decode):
		e.lacks = fmt.Sprintf("policy %q is not known to this dynctl", l.Decode)
	case !slices.Contains(selector.Policies(), l.Prefill):
		e.lacks = fmt.Sprintf("policy %q is not known to this dynctl", l.Prefill)
	case !oneOf(l.On, "", decide.OnEffISL, decide.OnISL):
		e.lacks = fmt.Sprintf("a threshold on %q is not known to this dynctl", l.On)
	case !oneOf(l.Fallback, "", decide.FallbackLocal, decide.FallbackError):
		e.lacks = fmt.Sprintf("prefill fallback %q is not known to this dynctl", l.Fallback)
	case !knownConnector(l.Connector):
		e.lacks = fmt.Sprintf("connector %q is not known to this dynctl", l.Connector)
	}
	if r.header.Rules < timedRules {
		for _, p := range [...]*selector.Policy{&e.value.Decode, &e.value.Prefill} {
			if *p == selector.KV {
				*p = selector.KVBlocks
			}
		}
	}
	r.room(len(p))
	r.known.newest.settings[l.Revision] = e
	return nil
}

// parseCosts reads a costs line.
func (r *Reader) parseCosts(p []byte) error {
	var l struct {
		Kind Kind  `json:"kind"`
		Time int64 `json:"t_us"`
		costsLine
	}
	unknown, err := strict(p, &l)
	if err != nil {
		return err
	}
	e := described[*cost.Model]{value: &cost.Model{
		Revision: l.Revision, Local: l.Local, Prefill: l.Prefill, Transfer: l.Transfer, Stall: l.Stall, Limit: l.Limit, Beyond: l.Beyond, Lost: l.Lost, Prices: l.prices(),
	}}
	if unknown != "" {
		e.lacks = "the costs have " + unknown + ", which this dynctl does not know"
	}
	r.room(len(p))
	r.known.newest.costs[l.Revision] = e
	return nil
}

// parseWorker reads a worker line.
func (r *Reader) parseWorker(p []byte) error {
	var l struct {
		Kind Kind  `json:"kind"`
		Time int64 `json:"t_us"`
		workerLine
	}
	unknown, err := strict(p, &l)
	if err != nil {
		return err
	}
	e := described[*workers.Worker]{value: &workers.Worker{
		Facts: workers.Facts{
			Role: l.Role, Engine: l.Engine, Version: l.Version, Connector: l.Connector, CacheType: l.CacheType,
			BlockSize: l.BlockSize, KVBlocks: l.KVBlocks, ChatTokens: l.ChatTokens, Revision: l.Revision, Slice: l.Slice, Models: l.Models,
		},
		Name: l.Worker,
	}}
	switch {
	case unknown != "":
		e.lacks = fmt.Sprintf("worker %s has %s, which this dynctl does not know", l.Worker, unknown)
	case !oneOf(l.Engine, "", workers.VLLM, workers.SGLang, workers.TRTLLM):
		e.lacks = fmt.Sprintf("worker %s: engine %q is not known to this dynctl", l.Worker, l.Engine)
	case l.Role != "" && !slices.Contains(workers.Roles(), l.Role):
		e.lacks = fmt.Sprintf("worker %s: role %q is not known to this dynctl", l.Worker, l.Role)
	case !knownConnector(l.Connector):
		e.lacks = fmt.Sprintf("worker %s: connector %q is not known to this dynctl", l.Worker, l.Connector)
	}
	r.room(len(p))
	r.known.newest.workers[l.N] = e
	return nil
}

// parseDecision reads a decision with what it refers to.
func (r *Reader) parseDecision(p []byte) (*Decision, error) {
	var l decisionLine
	unknown, err := strict(p, &l)
	if err != nil {
		return nil, err
	}
	d := &Decision{
		ID: l.ID, RequestID: l.RequestID, Attempt: l.Attempt, Model: l.Model, BeganUS: l.Began,
		BlockSize: l.BlockSize, Locals: l.Locals, Approximate: l.Approximate, Tokens: l.Tokens, Revision: l.Settings,
		Path: l.Path, Reason: l.Reason, Error: l.Error, EffISL: l.EffISL, Cached: l.Cached, Costs: cost.Costs{Local: l.Local, Remote: l.Remote},
		DecodeRank: l.Decode.Chosen, PrefillRank: l.Prefill.Chosen, Explore: l.Explore, Rules: r.header.Rules, Unverifiable: l.Unverifiable,
	}
	if l.HashedBlock != 0 {
		d.BlockSize = l.HashedBlock
	}
	if unknown != "" {
		d.lacks("the decision has %s, which this dynctl does not know", unknown)
	}
	for _, t := range r.header.Terms {
		if !slices.Contains(terms, t) {
			d.lacks("costs have the term %q, which this dynctl does not know", t)
		}
	}
	s, ok := find(r.known.newest.settings, r.known.before.settings, l.Settings)
	if !ok {
		s.value = new(decide.Options)
		d.lacks("settings revision %d is not in the recording", l.Settings)
	} else if s.lacks != "" {
		d.lacks("%s", s.lacks)
	}
	d.Settings = s.value
	f := &l.Facts
	kind, ok := kinds[f.Endpoint]
	if !ok {
		d.lacks("endpoint %q is not known to this dynctl", f.Endpoint)
	}
	if !oneOf(f.Source, "", route.FromIDs, route.FromEngine, route.FromLocal, route.FromEstimate, route.FromNothing) {
		d.lacks("a length from %q is not known to this dynctl", f.Source)
	}
	if !oneOf(route.Force(l.Force), "", route.ForceAuto, route.ForceLocal, route.ForceRemote) {
		d.lacks("path %q is not known to this dynctl", l.Force)
	}
	in := &decide.Input{
		Rule: s.value.Rule, Model: l.Model, Force: route.Force(l.Force), GaveUp: l.GaveUp,
		Facts: api.Facts{
			Kind: kind, Splittable: f.Splittable, ISL: f.ISL, Source: f.Source, N: f.N, Prompts: f.Prompts, Multimodal: f.Multimodal, Opaque: f.Opaque,
			Continues: f.Continues, ServerTools: f.ServerTools, PromptLogprobs: f.PromptLogprobs, RoutedExperts: f.RoutedExperts, MaxTokens: f.MaxTokens, Output: f.Output,
		},
	}
	if l.Costs != 0 {
		m, ok := find(r.known.newest.costs, r.known.before.costs, l.Costs)
		switch {
		case !ok:
			d.lacks("costs revision %d is not in the recording", l.Costs)
		case m.lacks != "":
			d.lacks("%s", m.lacks)
		}
		in.Costs = m.value
	}
	d.Input = in
	if err := r.phase(d, &l, &l.Decode, &in.Decode, &in.DecodePeers); err != nil {
		return nil, err
	}
	if err := r.phase(d, &l, &l.Prefill, &in.Prefill, &in.PrefillPeers); err != nil {
		return nil, err
	}
	in.Decode.Phase, in.Decode.Policy = route.Decode, d.Settings.Decode
	in.Prefill.Phase, in.Prefill.Policy = route.Prefill, d.Settings.Prefill
	return d, nil
}

// errNoRank: a decision cannot be read without the names of its candidates.
var errNoRank = errors.New(`a candidate without "rank"`)

func (r *Reader) phase(d *Decision, l *decisionLine, p *phaseLine, in *selector.Input, peers *[]workers.Peer) error {
	*in = selector.Input{
		Weights: d.Settings.Weights, Busy: d.Settings.Busy, ISL: l.Facts.ISL, BlockSize: l.BlockSize,
		SessionKey: l.Session, Home: p.Home, Draw: p.Draw, Turn: p.Turn, Siblings: (*selector.Siblings)(p.Siblings), Candidates: make([]decision.Candidate, len(p.Candidates)),
	}
	*peers = make([]workers.Peer, len(p.Candidates))
	for i := range p.Candidates {
		c := &p.Candidates[i]
		if c.Rank == "" {
			return errNoRank
		}
		w, ok := find(r.known.newest.workers, r.known.before.workers, c.N)
		if !ok {
			name, _, _ := SplitRank(c.Rank)
			w.value = &workers.Worker{Name: name}
			d.lacks("description %d of worker %s is not in the recording", c.N, name)
		} else if w.lacks != "" {
			d.lacks("%s", w.lacks)
		}
		k := &in.Candidates[i]
		*k = c.Candidate
		k.KeptOut, k.Tried, k.KVBlocks = c.KeptOut, c.Tried, decide.Capacity(w.value, l.BlockSize)
		if c.KVBlocks != nil {
			k.KVBlocks = *c.KVBlocks
		}
		k.Terms, k.Excluded, k.ExcludedCode = decision.Terms{}, "", "" // they follow
		if !k.HasLoad {
			k.Running, k.Waiting, k.KVUsage = 0, 0, -1
		}
		(*peers)[i].Worker = w.value
	}
	return nil
}
