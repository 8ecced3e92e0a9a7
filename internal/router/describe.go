package router

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/cause"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/state"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// facts are a router as its state asks for it.
type facts struct{ *Router }

func (r facts) Settings() state.Settings {
	s := r.settings.Load()
	return state.Settings{
		Revision: s.Revision, Policy: s.Routing.Policy, Prefill: string(s.Decisions.Prefill), Decode: string(s.Decisions.Decode),
		Threshold: s.Routing.Threshold.Tokens, Auto: s.Routing.Threshold.Auto, ThresholdOn: s.Routing.ThresholdOn, PrefillFallback: s.Routing.PrefillFallback, Tokenizer: s.Tokens.Tokenizer,
	}
}

func (r facts) BlockOf(w *workers.Worker) int { return r.settings.Load().BlockOf(w) }

func (r facts) Counts(k *workers.Rank) (requests, failures uint64) { return r.fleet.Counts(k) }

func (r facts) Moves(k *workers.Rank) admin.Moves {
	away, onto := r.fleet.Moved(k)
	return admin.Moves{Away: away, Onto: onto, Waiting: new(r.moves.Waiting(k.Slot))}
}

func (r facts) Speed(k *workers.Rank) pace.Speed { return r.slow.Speed(k) }

func (r facts) Wrong(worker string) []cause.Finding { return r.causes.Findings(worker) }

// heard is what the watch on causes must know of the feeds, by slot.
func (r *Router) heard() map[uint32]watch.Feed {
	list := r.feeds.Status()
	out := make(map[uint32]watch.Feed, len(list))
	for i := range list {
		s := &list[i]
		out[uint32(s.Rank)] = watch.Feed{
			Live: s.State == kvfeed.Live, Muted: s.State == kvfeed.Mute, Heard: s.Heard,
			Plain: len(s.CacheGroups) == 0 && s.Parts <= 1, Removed: s.Removed,
		}
	}
	return out
}

func (r facts) Certificates() []state.Certificate { return r.secure.Certificates() }

func (r facts) Keys() int { return r.secure.KeyCount() }

func (r facts) Costs() []admin.ModelCosts {
	if !r.settings.Load().Routing.Threshold.Auto {
		return nil
	}
	known := r.costs.learners.Known()
	var list []admin.ModelCosts
	for _, name := range slices.Sorted(maps.Keys(known)) {
		k := known[name]
		c := admin.ModelCosts{Model: name, LocalOutcomes: k.Local, PrefillOutcomes: k.Prefill, TransferOutcomes: k.Transfer}
		if k.Model != nil {
			c.Revision = k.Model.Revision
		}
		for _, x := range k.Crossings {
			c.Crossings = append(c.Crossings, admin.Crossing{Running: x.Running, Low: reaches(x.Low), Tokens: reaches(x.Tokens), High: reaches(x.High)})
		}
		list = append(list, c)
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

func (r facts) Troubles() []string {
	out := r.tokens.Troubles()
	for _, label := range r.compute.Alarms() {
		out = append(out, label+" computes remotely prefilled prompts again")
	}
	if r.bodies.Full() {
		out = append(out, "requests are refused because the memory for bodies and streams is used up (limits.body_memory)")
	}
	out = append(out, r.secure.Troubles()...)
	if r.kube != nil {
		out = append(out, r.kube.Troubles()...)
	}
	if rec := r.Recorder(); rec != nil && rec.Error != "" {
		out = append(out, "the recording has ended: "+rec.Error)
	}
	return out
}

func (r facts) Kubernetes() *admin.Kubernetes {
	if r.kube == nil {
		return nil
	}
	st := r.kube.Status()
	k := &admin.Kubernetes{
		Server: st.Server, Namespaces: st.Namespaces, Connected: true, Pods: st.Pods, Workers: st.Workers, Waiting: st.Waiting, LeftOutCount: st.LeftOutCount,
	}
	for _, p := range st.LeftOut {
		k.LeftOut = append(k.LeftOut, admin.LeftOutPod{Pod: p.Pod, Reason: p.Why})
	}
	for _, w := range st.Watches {
		k.Watches = append(k.Watches, admin.KubernetesWatch{Namespace: w.Namespace, Selector: w.Selector, Synced: w.Synced, Error: w.Err, Since: w.Since, Failures: w.Failures})
		k.Connected = k.Connected && w.Synced && w.Err == ""
		k.Failures += w.Failures
	}
	return k
}

func (r facts) Recorder() *admin.Recorder {
	if r.opts.Recording == nil {
		return nil
	}
	return r.opts.Recording.State()
}

func (r facts) TokenizerRests(worker string) bool { return r.tokens.AtRest(worker) }

func (r facts) Drain() *admin.DrainState { return r.drain.State() }

// dryRun runs the deciding stages for a request.
func (r *Router) dryRun(ctx context.Context, in admin.RouteRequest) (*receipt.Receipt, error) {
	if in.Body == nil {
		if models := r.registry.Snapshot().Models(); in.Model == "" && len(models) == 1 {
			in.Model = models[0]
		}
		var prompt any = in.Prompt
		if in.Tokens != nil {
			prompt = in.Tokens
		}
		raw, err := json.Marshal(map[string]any{"model": in.Model, "prompt": prompt})
		if err != nil {
			return nil, err
		}
		in.Body = raw
	}
	ep, err := api.Lookup(http.MethodPost, in.Endpoint)
	if err != nil {
		return nil, err
	}
	if ep.Body != api.JSONBody {
		return nil, api.BadRequest("endpoint", "%s takes no JSON body", in.Endpoint)
	}
	x := r.acquire(nil, nil)
	defer x.release()
	x.ctx, x.ep, x.d.Dry = ctx, ep, true
	x.d.Settings = r.settings.Load()
	if err := x.view.Parse(in.Body, ep.Kind, api.Limits{}); err != nil {
		return nil, err
	}
	x.asked = x.view.Model
	if err := x.findModel(); err != nil {
		return nil, err
	}
	q := &x.d.Run.Request
	if q.Force, err = disagg.ParseForce(in.Path); err != nil {
		return nil, api.BadRequest("path", "%v", err)
	}
	x.d.FindSession(in.Session, &x.view)
	if err := x.follows(); err != nil {
		return nil, err
	}
	x.findPrompt()
	r.asker.Decide(&x.d)
	c := &receipt.Receipt{
		Schema: receipt.Schema, ID: "dry-run", Time: x.start, Endpoint: ep.Kind.String(), Model: x.model, Stream: x.view.Stream, ConfigRevision: x.d.Settings.Revision,
		Legs: []receipt.Leg{}, Outcome: receipt.Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
	}
	if x.d.Prompt.Note != "" {
		c.Note(x.d.Prompt.Note)
	}
	r.hearers.Fill(c, &x.d)
	if _, busy := x.d.Run.Busy(); busy {
		text := fmt.Sprintf("the request would wait in the queue of %s, or be refused", x.model)
		for _, q := range r.ranks.States() {
			if q.Queue == x.model {
				v := state.Queue(q, time.Now())
				text += "; there " + v.Text()
			}
		}
		c.Note(text)
	}
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
