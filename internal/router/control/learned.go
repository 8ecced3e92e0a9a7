package control

import (
	"maps"
	"slices"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/workers/kube"
)

// costsOf is what was learned of those of both paths, in the order of the models' names.
func costsOf(known map[string]cost.Known) (list []admin.ModelCosts) {
	for _, name := range slices.Sorted(maps.Keys(known)) {
		k := known[name]
		c := admin.ModelCosts{Model: name, LocalOutcomes: k.Local, PrefillOutcomes: k.Prefill, TransferOutcomes: k.Transfer}
		if k.Model != nil {
			c.Revision, c.TimesKnown, c.PathsKnown = k.Model.Revision, k.Model.Timed(), k.Model.Compares()
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

// kubernetesOf is what is made of a cluster's pods. The cluster is connected when every
// watch of it is up.
func kubernetesOf(st kube.Status) *admin.Kubernetes {
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
