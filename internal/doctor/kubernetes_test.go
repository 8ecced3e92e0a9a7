package doctor

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestKubernetes: what the status says of a cluster's pods is reported, a lost API
// server as a failure, pods that are found and are no workers by name.
func TestKubernetes(t *testing.T) {
	at := time.Date(2026, 11, 22, 18, 0, 0, 0, time.UTC)
	for _, tt := range []struct {
		name   string
		k      *admin.Kubernetes
		failed int
		want   []string
	}{
		{"none are looked for", nil, 0, nil},
		{"followed", &admin.Kubernetes{Server: "https://k", Pods: 5, Workers: 3, Waiting: 1, LeftOutCount: 3, LeftOut: []admin.LeftOutPod{{Pod: "ns/a", Reason: "it is a router"}},
			Watches: []admin.KubernetesWatch{{Namespace: "ns", Selector: "app", Synced: true}}}, 0, []string{
			"ok https://k: 5 pods are followed: 3 workers, 1 without an address yet",
			"warn ns/a: a selector finds it, and it is no worker: it is a router",
			"warn https://k: 2 more pods are found and are no workers",
		}},
		{"refused", &admin.Kubernetes{Watches: []admin.KubernetesWatch{{Namespace: "ns", Selector: "app", Error: "the API server refuses to watch pods", Since: at}, {Namespace: "*", Selector: "b"}}}, 1, []string{
			"fail ns app: the pods are not followed since 2026-11-22T18:00:00Z: the API server refuses to watch pods",
			"warn * b: the pods were not listed yet",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := &exam{r: &Report{}}
			e.kubernetes(tt.k)
			var got []string
			for _, f := range e.r.Findings {
				got = append(got, fmt.Sprintf("%s %s: %s", f.State, f.Subject, f.Text))
			}
			if strings.Join(got, "\n") != strings.Join(tt.want, "\n") || e.r.Failed != tt.failed {
				t.Errorf("%d failed:\n%s\nwant %d:\n%s", e.r.Failed, strings.Join(got, "\n"), tt.failed, strings.Join(tt.want, "\n"))
			}
		})
	}
}

// TestFactsOfPods: doctor says which label states role and revision of a pod.
func TestFactsOfPods(t *testing.T) {
	w := &admin.Worker{Engine: "vllm", Role: "either", Revision: "pair/5d1c", DP: 1, Source: workers.SourceKube, From: map[string]string{"role": "label a=both", "revision": "label b=5d1c of pair"}}
	if got, want := engineText(w), "vllm, either (label a=both), revision pair/5d1c (label b=5d1c of pair), dp 1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	w.Source = workers.SourceFlag
	if got, want := engineText(w), "vllm, either, revision pair/5d1c, dp 1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
