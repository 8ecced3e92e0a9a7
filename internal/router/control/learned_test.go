package control

import (
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/workers/kube"
)

// TestCosts: models stand in the order of their names, and where no prompt is long enough
// for the other path nothing is said.
func TestCosts(t *testing.T) {
	list := costsOf(map[string]cost.Known{
		"b": {Local: 3, Prefill: 2, Transfer: 1, Model: &cost.Model{Revision: 7}, Crossings: []cost.Crossing{{Running: 4, Low: 100, Tokens: 200, High: cost.Never}}},
		"a": {Local: 5},
	})
	if len(list) != 2 || list[0].Model != "a" || list[0].LocalOutcomes != 5 || list[0].Revision != 0 || list[0].Crossings != nil {
		t.Fatalf("%+v", list)
	}
	b := &list[1]
	if b.Model != "b" || b.LocalOutcomes != 3 || b.PrefillOutcomes != 2 || b.TransferOutcomes != 1 || b.Revision != 7 || len(b.Crossings) != 1 {
		t.Fatalf("%+v", b)
	}
	if x := b.Crossings[0]; x.Running != 4 || *x.Low != 100 || *x.Tokens != 200 || x.High != nil {
		t.Errorf("%+v", x)
	}
	if costsOf(nil) != nil {
		t.Error("nothing is known of no model")
	}
}

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
		if k.Server != "s" || k.Pods != 3 || k.Workers != 1 || k.Waiting != 1 || k.LeftOutCount != 1 || len(k.LeftOut) != 1 || k.LeftOut[0].Pod != "p" || k.LeftOut[0].Reason != "no port" {
			t.Errorf("%+v", k)
		}
	}
}
