package router

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/adminserver"
	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/router/state"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// facts are a router as its state asks for it.
type facts struct{ *Router }

func (r facts) Settings() state.Settings {
	s := r.settings.Load()
	return state.Settings{
		Revision: s.revision, Policy: s.Routing.Policy, Prefill: string(s.routing.prefill), Decode: string(s.routing.decode),
		Threshold: s.Routing.Threshold, ThresholdOn: s.Routing.ThresholdOn, PrefillFallback: s.Routing.PrefillFallback, Tokenizer: s.Tokens.Tokenizer,
	}
}

func (r facts) BlockOf(w *workers.Worker) int { return r.settings.Load().blockOf(w) }

func (r facts) Counts(k *workers.Rank) (requests, failures uint64) { return r.fleet.Counts(k) }

func (r facts) Troubles() []string {
	out := r.tokens.Troubles()
	for _, label := range r.compute.Alarms() {
		out = append(out, label+" computes remotely prefilled prompts again")
	}
	if r.bodies.Full() {
		out = append(out, "requests are refused because the memory for bodies is used up (limits.body_memory)")
	}
	return out
}

func (r facts) TokenizerRests(worker string) bool { return r.tokens.AtRest(worker) }

func (r facts) Drain() *admin.DrainState {
	p := r.draining.Load()
	if p == nil {
		return nil
	}
	return &admin.DrainState{Since: p.since, Until: p.until, Inflight: r.gate.Present()}
}

// AdminOptions set up the admin API.
type AdminOptions struct {
	// TokenFile holds the bearer token; empty asks for none.
	TokenFile string
	// Name of this replica in status; the data plane's address.
	Name string
	// Sim controls the simulated engines of this process, under /sim/v1/; nil
	// without them.
	Sim http.Handler
	// Settings lists the effective configuration; nil for none.
	Settings func(c *settings.Config) []admin.ConfigValue
	// Patch makes the configuration with some settings changed; nil refuses
	// changes.
	Patch func(c settings.Config, changes map[string]any) (settings.Config, error)
	// Stream answers GET /admin/v1/stream with a recording; nil for none.
	Stream http.Handler
	// Recorder tells of the recording of this process, nil while there is
	// none; may be nil itself.
	Recorder func() *admin.Recorder
}

// AdminHandler is the admin API, the metrics page and the probes.
func (r *Router) AdminHandler(o AdminOptions) (http.Handler, error) {
	return adminserver.New(adminserver.Options{
		TokenFile: o.TokenFile, Name: o.Name, Sim: o.Sim, Stream: o.Stream, Recorder: o.Recorder,
		State: r.state, Registry: r.registry, Receipts: r.receipts, Events: r.events, Index: r.index, Metrics: r.metrics.Handler(), Probe: r.probe,
		Hosts:     func() []string { return r.settings.Load().AdminHosts },
		BodyTime:  func() time.Duration { return r.settings.Load().Timeouts.Body },
		WriteTime: func() time.Duration { return r.settings.Load().Timeouts.Write },
		Config:    func() admin.ConfigView { return r.configView(o.Settings) },
		Patch:     func(changes map[string]any) error { return r.patch(o.Patch, changes) },
		Route:     r.dryRun,
		Drain: func(timeout time.Duration) admin.DrainState { // serve waits
			r.beginDrain(timeout)
			return *facts{r}.Drain()
		},
		Draining: r.drain,
	})
}

func (r *Router) configView(list func(c *settings.Config) []admin.ConfigValue) admin.ConfigView {
	s := r.settings.Load()
	v := admin.ConfigView{Schema: admin.Schema, Revision: s.revision, Settings: []admin.ConfigValue{}}
	if list != nil {
		v.Settings = list(&s.Config)
		for i := range v.Settings {
			v.Settings[i].Origin = s.origin[v.Settings[i].Key]
		}
	}
	return v
}

// patch changes settings of the configuration.
func (r *Router) patch(apply func(settings.Config, map[string]any) (settings.Config, error), changes map[string]any) error {
	if apply == nil {
		return errors.New("this router takes no changes")
	}
	return r.Change(func(c settings.Config, origin map[string]string) (settings.Config, map[string]string, error) {
		c, err := apply(c, changes)
		origin = maps.Clone(origin)
		if origin == nil {
			origin = map[string]string{}
		}
		for k := range changes {
			origin[k] = "admin API"
		}
		return c, origin, err
	})
}

// dryRun runs the deciding stages for a request.
func (r *Router) dryRun(ctx context.Context, in admin.RouteRequest) (*receipt.Receipt, error) {
	ep, err := api.Lookup(http.MethodPost, in.Endpoint)
	if err != nil {
		return nil, err
	}
	if ep.Body != api.JSONBody {
		return nil, api.BadRequest("endpoint", "%s takes no JSON body", in.Endpoint)
	}
	x := &exchange{r: r, ctx: ctx, start: time.Now(), ep: ep, dry: true}
	x.d.reset()
	defer x.d.release()
	x.d.dry = true
	x.d.settings = r.settings.Load()
	if err := x.view.Parse(in.Body, ep.Kind, api.Limits{}); err != nil {
		return nil, err
	}
	x.asked = x.view.Model
	if err := x.findModel(); err != nil {
		return nil, err
	}
	if x.force, err = disagg.ParseForce(in.Path); err != nil {
		return nil, api.BadRequest("path", "%v", err)
	}
	x.session = selector.HashSession(in.Session)
	x.findSession()
	x.findPrompt()
	r.decide(&x.d, x.facts, x.force, x.session)
	c := &receipt.Receipt{
		Schema: receipt.Schema, ID: "dry-run", Time: x.start, Endpoint: ep.Kind.String(), Model: x.model, Stream: x.view.Stream, ConfigRevision: x.d.settings.revision,
		Legs: []receipt.Leg{}, Outcome: receipt.Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
	}
	if x.d.prompt.Note != "" {
		c.Note(x.d.prompt.Note)
	}
	fillPlan(c, &x.d, x.d.plan.Reason)
	c.Inputs.SessionKey, c.Inputs.Force = x.session, string(x.force)
	return c, nil
}

// IndexedBlocks are the sequence hashes of the blocks that the index holds of
// the rank with a label, in no order: what an audit compares with the engine's
// own cache. ok is false for a rank that has no place in the index.
func (r *Router) IndexedBlocks(label string) (seqs []uint64, ok bool) {
	for _, k := range r.registry.Snapshot().Ranks {
		if k.Label != label {
			continue
		}
		err := r.index.RankBlocks(kvindex.Rank(k.Slot), func(seq, _ uint64) bool {
			seqs = append(seqs, seq)
			return true
		})
		return seqs, err == nil
	}
	return nil, false
}
