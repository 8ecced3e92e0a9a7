package workers

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// RoleLabels are the values of a worker's label "model" that stand for a role,
// as in production-stack.
type RoleLabels struct{ Prefill, Decode []string }

func (l RoleLabels) clone() RoleLabels {
	return RoleLabels{Prefill: slices.Clone(l.Prefill), Decode: slices.Clone(l.Decode)}
}

// dialect is what one label or annotation of a worker states, as a project that
// deploys engines sets it.
type dialect struct {
	world, key string
	annotation bool
	states     Field
	// means says what a value stands for; nil: for itself. A value that is not
	// there states nothing.
	means map[string]string
	// within is a label within whose value this one is unique.
	within string
	// others says that a worker with any other value is no engine that answers
	// requests, and what it is.
	others string
}

// FieldPorts are the ports at which a pod serves, FieldMember is whether it serves
// by itself at all.
const (
	FieldPorts  Field = "ports"
	FieldMember Field = "member"
)

// dialects are read in this order: of several that state a fact the first counts.
// None of them states the model: a label cannot hold most names, so engines do.
var dialects = []dialect{
	{world: "llm-d", key: "llm-d.ai/role", states: FieldRole, means: map[string]string{
		"prefill": string(Prefill), "decode": string(Decode), "both": string(Either), "prefill-decode": string(Either),
		"encode-prefill": string(Prefill), "encode-decode": string(Decode), "encode-prefill-decode": string(Either),
	}},
	{world: "DisaggregatedSet", key: "disaggregatedset.x-k8s.io/role", states: FieldRole, means: map[string]string{"prefill": string(Prefill), "decode": string(Decode)}},
	{world: "Dynamo", key: "nvidia.com/dynamo-sub-component-type", states: FieldRole, means: map[string]string{"prefill": string(Prefill), "decode": string(Decode)}},
	{world: "Dynamo", key: "nvidia.com/dynamo-component-type", states: FieldRole, means: map[string]string{"prefill": string(Prefill), "decode": string(Decode)}},

	{world: "llm-d", key: "llm-d.ai/role", states: FieldMember, means: map[string]string{
		"prefill": "", "decode": "", "both": "", "prefill-decode": "", "encode-prefill": "", "encode-decode": "", "encode-prefill-decode": "",
	}, others: "neither prefills nor decodes"},
	{world: "Dynamo", key: "nvidia.com/dynamo-component-type", states: FieldMember, means: map[string]string{"worker": "", "prefill": "", "decode": ""}, others: "is no worker"},
	{world: "LeaderWorkerSet", key: "leaderworkerset.sigs.k8s.io/worker-index", states: FieldMember, means: map[string]string{"0": ""}, others: "is not the leader of its group, which answers for it"},
	{world: "dynctl", key: "app.kubernetes.io/name", states: FieldMember, others: "is a router"},

	{world: "llm-d", key: "llm-d.ai/engine-type", states: FieldEngine, means: map[string]string{"vllm": string(VLLM), "sglang": string(SGLang)}},

	{world: "DisaggregatedSet", key: "disaggregatedset.x-k8s.io/revision", within: "disaggregatedset.x-k8s.io/name", states: FieldRevision},
	{world: "Dynamo", key: "nvidia.com/dynamo-namespace", states: FieldRevision},
	{world: "SGLang", key: "sglang.ai/transfer-group", states: FieldRevision},
	{world: "DisaggregatedSet", key: "disaggregatedset.x-k8s.io/slice", states: FieldSlice},

	{world: "llm-d", key: "llm-d.ai/active-ports", annotation: true, states: FieldPorts},
	{world: "llm-d", key: "inference.networking.k8s.io/active-ports", annotation: true, states: FieldPorts},
	{world: "SMG", key: "smg.ai/worker-ports", annotation: true, states: FieldPorts},
	{world: "SGLang", key: "sglang.ai/bootstrap-port", annotation: true, states: FieldBootstrap},
	{world: "vllm-router", key: "vllm.ai/bootstrap-port", annotation: true, states: FieldBootstrap},
}

// routerName is the value of the label app.kubernetes.io/name of dynctl's own pods.
const routerName = "dynctl"

// LabelFact is a fact that a label or an annotation states.
type LabelFact struct {
	// Means is the fact in dynctl's words, From the label that states it.
	Means, From string
}

// FromLabels looks for a fact in the labels and annotations of a worker.
func FromLabels(f Field, labels, annotations map[string]string) (LabelFact, bool) {
	for i := range dialects {
		d := &dialects[i]
		if d.states != f {
			continue
		}
		in, kind := labels, "label "
		if d.annotation {
			in, kind = annotations, "annotation "
		}
		value, ok := in[d.key]
		if !ok || value == "" {
			continue
		}
		t := LabelFact{Means: value, From: kind + d.key + "=" + value}
		if d.means != nil {
			if t.Means, ok = d.means[value]; !ok {
				continue
			}
		}
		if scope := in[d.within]; d.within != "" && scope != "" {
			t.Means = scope + "/" + t.Means
			t.From += " of " + scope
		}
		return t, true
	}
	return LabelFact{}, false
}

// NoEngine says why labels are those of something that does not answer requests; empty when
// they do not say so.
func NoEngine(labels map[string]string) string {
	for i := range dialects {
		d := &dialects[i]
		value, ok := labels[d.key]
		if d.states != FieldMember || !ok || value == "" {
			continue
		}
		_, engine := d.means[value]
		if d.means == nil {
			engine = value != routerName
		}
		if !engine {
			return "label " + d.key + "=" + value + " (" + d.world + ") says that it " + d.others
		}
	}
	return ""
}

// ownDomain is that of the labels and annotations that state a setting of their
// worker in dynctl's own words.
const ownDomain = "dynctl.io/"

// ownKeys are the settings that can be stated so, by the keys of Spec.Set and two
// that flags and files state by other means. Not among them are names and addresses,
// which a source of workers knows better, and files of the router's machine.
var ownKeys = []string{
	"attention_chunk", "block_size", "bootstrap", "connector", "dp", "dp_start", "engine", "kv_blocks", "kv_copies", "kv_hash", "kv_hash_seed", "kv_last_block",
	"lb", "max_batched_tokens", "max_model_len", "revision", "role", "slice", "transfer_check",
}

// own are the keys as they are in a label: dynctl.io/kv-last-block.
func own(key string) string { return ownDomain + strings.ReplaceAll(key, "_", "-") }

// StateOwn sets what labels and annotations of the domain dynctl.io state of the
// worker, a label before an annotation. What s states already stays, unless over
// says that it is less particular. The error names every key that is none and every
// value that cannot be taken.
func (s *Spec) StateOwn(labels, annotations map[string]string, over bool) error {
	stated := s.stated()
	var errs []error
	for _, in := range []struct {
		what  string
		pairs map[string]string
	}{{"label", labels}, {"annotation", annotations}} {
		for _, key := range slices.Sorted(maps.Keys(in.pairs)) {
			if !strings.HasPrefix(key, ownDomain) {
				continue
			}
			value := in.pairs[key]
			from := in.what + " " + key + "=" + value
			i := slices.IndexFunc(ownKeys, func(k string) bool { return own(k) == key })
			if i < 0 {
				var valid []string
				for _, k := range ownKeys {
					valid = append(valid, own(k))
				}
				errs = append(errs, fmt.Errorf("%s: %w", in.what, UnknownKeyError(key, valid)))
				continue
			}
			field := Field(ownKeys[i])
			var one Spec // a value that cannot be taken is named although another one counts
			if err := one.setOwn(ownKeys[i], value); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", from, err))
				continue
			}
			if _, twice := labels[key]; in.what == "annotation" && twice || !over && slices.Contains(stated, field) {
				continue
			}
			_ = s.setOwn(ownKeys[i], value) // it was taken above
			s.setFrom(field, from)
		}
	}
	return errors.Join(errs...)
}

func (s *Spec) setOwn(key, value string) error {
	switch key {
	case string(FieldRevision):
		s.Revision = value
	case string(FieldSlice):
		s.Slice = value
	default:
		return s.Set(key, value)
	}
	if value == "" {
		return fmt.Errorf("%s is empty", key)
	}
	return nil
}

// apply completes what is stated of a worker by what its labels state, wherever it
// was stated: what it states itself has precedence.
func (l RoleLabels) apply(s *Spec) {
	fill := func(f Field, value *string) {
		if *value != "" {
			return
		}
		if t, ok := FromLabels(f, s.Labels, nil); ok {
			*value = t.Means
			s.setFrom(f, t.From)
		}
	}
	if model, ok := s.Labels["model"]; ok && s.Role == "" {
		switch {
		case slices.Contains(l.Prefill, model):
			s.Role = Prefill
		case slices.Contains(l.Decode, model):
			s.Role = Decode
		}
		if s.Role != "" {
			s.setFrom(FieldRole, "label model="+model)
		}
	}
	fill(FieldRole, (*string)(&s.Role))
	fill(FieldEngine, (*string)(&s.Engine))
	fill(FieldRevision, &s.Revision)
	fill(FieldSlice, &s.Slice)
}

// setFrom says where a fact comes from, without a change to a map that others have.
func (s *Spec) setFrom(f Field, from string) {
	s.From = maps.Clone(s.From)
	if s.From == nil {
		s.From = map[Field]string{}
	}
	s.From[f] = from
}
