package control

import (
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers/kube"
)

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
