package control

import (
	"github.com/dynctl/dynctl/internal/router/cache/follower"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/cause"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/kube"
)

// Facts answers what State asks of the stages.
type Facts struct {
	InForce  *effective.InForce
	Fleet    *follower.Follower
	Rests    *admission.Moves
	Slow     *watch.Slow
	Causes   *watch.Causes
	Compute  *watch.Recompute
	Learners *outcome.Collector
	Tokens   *prompt.Stage
	Bodies   *admission.Memory
	Legs     *admission.Memory
	Secure   *Secure
	Ending   *Drain
	Pods     *kube.Source       // nil unless they are looked for
	Siblings *siblings.Siblings // nil unless the router shares its load
	// Recording is the recording of this process, nil without one.
	Recording watch.Recording
}

var _ Stages = (*Facts)(nil)

// Settings is for Stages.
func (f *Facts) Settings() Configured {
	s := f.InForce.Load()
	return Configured{
		Revision: s.Revision, Policy: s.Routing.Policy, Prefill: string(s.Decisions.Prefill), Decode: string(s.Decisions.Decode),
		Threshold: s.Routing.Threshold.Tokens, Auto: s.Routing.Threshold.Auto, ThresholdOn: s.Routing.ThresholdOn, PrefillFallback: s.Routing.PrefillFallback, Tokenizer: s.Tokens.Tokenizer,
	}
}

// BlockOf is for Stages.
func (f *Facts) BlockOf(w *workers.Worker) int { return f.InForce.Load().BlockOf(w) }

// Counts is for Stages.
func (f *Facts) Counts(k *workers.Rank) (requests, failures uint64) { return f.Fleet.Counts(k) }

// Moves is for Stages.
func (f *Facts) Moves(k *workers.Rank) admin.Moves {
	away, onto := f.Fleet.Moved(k)
	return admin.Moves{Away: away, Onto: onto, Waiting: new(f.Rests.Waiting(k.Slot))}
}

// Replicas is for Stages.
func (f *Facts) Replicas() *admin.Replicas {
	if f.Siblings == nil {
		return nil
	}
	st := f.Siblings.Status()
	r := &admin.Replicas{
		Name: st.Self.Origin, Fleet: st.Self.Fleet, Live: st.Live(), Joined: st.Joined, Routers: []admin.Replica{}, Ignored: st.Ignored,
		OtherFleet: st.Foreign, SameName: st.SameOrigin, Refused: st.Refused, Repeated: st.Repeated, Earlier: st.Earlier, TooMany: st.Crowded, Failed: st.Failed,
		LastRefused: st.LastRefused, LastFailure: st.Failure,
	}
	if c := f.Fleet.Copied(); c != (follower.Copied{}) {
		r.IndexCopied = &admin.IndexCopied{Router: c.Router, Ranks: c.Ranks, Blocks: c.Blocks, Missing: c.Missing, Refused: c.Refused, Why: c.Why}
	}
	for i := range st.Origins {
		o := &st.Origins[i]
		state := "live"
		switch {
		case o.Left:
			state = "left"
		case !o.Live:
			state = "silent"
		}
		r.Routers = append(r.Routers, admin.Replica{
			Name: o.Origin, State: state, SilentMS: milliseconds(o.Silent), Version: o.Version, Started: o.Epoch, Differs: st.Differs[i], Complete: o.Complete,
			Requests: o.Load.Requests, PrefillTokens: int64(o.Load.PrefillTokens), DecodeBlocks: int64(o.Load.DecodeBlocks),
			Messages: o.Messages, Gaps: o.Gaps, UnknownRanks: o.Strange,
		})
	}
	return r
}

// Speed is for Stages.
func (f *Facts) Speed(k *workers.Rank) pace.Speed { return f.Slow.Speed(k) }

// Wrong is for Stages.
func (f *Facts) Wrong(worker string) []cause.Finding { return f.Causes.Findings(worker) }

// Certificates is for Stages.
func (f *Facts) Certificates() []Certificate { return f.Secure.Certificates() }

// Keys is for Stages.
func (f *Facts) Keys() int { return f.Secure.KeyCount() }

// Costs is for Stages.
func (f *Facts) Costs() []admin.ModelCosts {
	if !f.InForce.Load().Decisions.Priced() {
		return nil
	}
	return f.Learners.Costs()
}

// CostsRefused is for Stages.
func (f *Facts) CostsRefused() uint64 { return f.Learners.Refused() }

// Troubles is for Stages.
func (f *Facts) Troubles() []string {
	out := f.Tokens.Troubles()
	for _, label := range f.Compute.Alarms() {
		out = append(out, label+" computes remotely prefilled prompts again")
	}
	if f.Bodies.Full() {
		out = append(out, "requests are refused because the memory for bodies and streams is used up (limits.body_memory)")
	}
	if f.Legs.Full() {
		out = append(out, "requests are refused because too many requests to workers are in progress (limits.legs)")
	}
	out = append(out, f.Secure.Troubles()...)
	if f.Pods != nil {
		out = append(out, f.Pods.Troubles()...)
	}
	if rec := f.Recorder(); rec != nil && rec.Error != "" {
		out = append(out, "the recording has ended: "+rec.Error)
	}
	return out
}

// Kubernetes is for Stages.
func (f *Facts) Kubernetes() *admin.Kubernetes {
	if f.Pods == nil {
		return nil
	}
	return kubernetesOf(f.Pods.Status())
}

// Recorder is for Stages.
func (f *Facts) Recorder() *admin.Recorder {
	if f.Recording == nil {
		return nil
	}
	return f.Recording.State()
}

// TokenizerRests is for Stages.
func (f *Facts) TokenizerRests(worker string) bool { return f.Tokens.AtRest(worker) }

// Drain is for Stages.
func (f *Facts) Drain() *admin.DrainState { return f.Ending.State() }
