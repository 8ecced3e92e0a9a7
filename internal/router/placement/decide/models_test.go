package decide

import (
	"fmt"
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// twoModels are prefill and decode workers of the models a and b, each with an adapter "x"
// of its own; the last letter of a worker's name is its model.
func twoModels() []*workers.Worker {
	var list []*workers.Worker
	for _, name := range []string{"p-a", "q-a", "d-a", "e-a", "p-b", "d-b", "e-b"} {
		role := workers.Decode
		if name[0] == 'p' || name[0] == 'q' {
			role = workers.Prefill
		}
		w := well(name, role)
		w.Models, w.LoRAs = []string{name[2:], "x"}, []string{"x"}
		list = append(list, w)
	}
	for i, w := range list {
		w.Ranks[0].Slot = uint32(i)
	}
	return list
}

// TestOneModel: whatever a request leaves out, and whoever has left, no decode worker goes
// on from the KV of another model, in any policy.
func TestOneModel(t *testing.T) {
	for _, policy := range selector.Policies() {
		for _, who := range []string{"all", "b's prefill worker drains", "b's prefill worker is away", "a's decode workers drain", "b's decode workers are away"} {
			list := twoModels()
			for _, w := range slices.Clone(list) {
				switch {
				case who == "b's prefill worker drains" && w.Name == "p-b", who == "a's decode workers drain" && w.Role == workers.Decode && w.Models[0] == "a":
					w.State.SetDraining(true)
				case who == "b's prefill worker is away" && w.Name == "p-b", who == "b's decode workers are away" && w.Role == workers.Decode && w.Models[0] == "b":
					list = slices.DeleteFunc(list, func(o *workers.Worker) bool { return o == w })
				}
			}
			for _, model := range []string{"", "x"} {
				remote := 0
				for i := range uint64(60) {
					q := prompt(1000)
					q.Model, q.Session = model, i%5
					q.Chances = [2]Chance{{Turn: i, Draw: i * 0x9e3779b97f4a7c15}, {Turn: i / 2, Draw: i * 0xbf58476d1ce4e5b9}}
					if i%3 == 0 {
						q.Force = route.ForceRemote
					}
					s := usual()
					s.Decode, s.Prefill = policy, policy
					if i%7 == 6 {
						s.Rule.Fallback = FallbackError
					}
					var r Run
					r.Begin(q)
					r.NextPlan(s, list, 16, nothing{})
					decode, prefill := chosen(&r)
					if prefill == "-" {
						continue
					}
					remote++
					if decode[2:] != prefill[2:] {
						t.Errorf("%s, %s, model %q: %s decodes what %s prefilled", policy, who, model, decode, prefill)
					}
				}
				if remote == 0 {
					t.Errorf("%s, %s, model %q: nothing is prefilled remotely", policy, who, model)
				}
			}
		}
	}
}

// TestNoPairOfTwoModels: with workers of two models only, a prompt stays local, or is refused
// where the operator wants that, and the plan says why.
func TestNoPairOfTwoModels(t *testing.T) {
	in := pair(0)
	in.PrefillPeers[0].Worker.Models, in.DecodePeers[0].Worker.Models = []string{"a"}, []string{"b"}
	var p Plan
	if MakePlan(in, &p); p.Path != route.Local || p.Err != nil || fmt.Sprint(p.prefillVeto) != "[does not serve the decode worker's model]" {
		t.Errorf("%s because %s, %v, %q", p.Path, p.Reason, p.Err, p.prefillVeto)
	}
	in.Rule.Fallback = FallbackError
	if MakePlan(in, &p); p.Err == nil {
		t.Errorf("%s because %s", p.Path, p.Reason)
	}
}
