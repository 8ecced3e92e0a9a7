package control

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers/kube"
)

// TestKubernetes: a cluster is connected when every watch is in step and none fails.
func TestKubernetes(t *testing.T) {
	up, behind, down := kube.WatchStatus{Namespace: "a", Synced: true, Failures: 2}, kube.WatchStatus{Selector: "app=b"}, kube.WatchStatus{Synced: true, Err: "refused", Failures: 3}
	for _, c := range []struct {
		watches   []kube.WatchStatus
		connected bool
		failures  uint64
	}{{nil, true, 0}, {[]kube.WatchStatus{up}, true, 2}, {[]kube.WatchStatus{up, behind}, false, 2}, {[]kube.WatchStatus{down, up}, false, 5}} {
		k := kubernetesOf(kube.Status{Server: "s", Pods: 3, Workers: 1, Waiting: 1, LeftOutCount: 1, LeftOut: []kube.LeftOut{{Pod: "p", Why: "no port"}}, Watches: c.watches})
		if k.Connected != c.connected || k.Failures != c.failures || len(k.Watches) != len(c.watches) {
			t.Errorf("%+v: %+v", c, k)
		}
		want := *k
		want.Server, want.Pods, want.Workers, want.Waiting, want.LeftOutCount, want.LeftOut = "s", 3, 1, 1, 1, []admin.LeftOutPod{{Pod: "p", Reason: "no port"}}
		if d := cmp.Diff(want, *k); d != "" {
			t.Errorf("what the cluster has (-want +got):\n%s", d)
		}
	}
}
