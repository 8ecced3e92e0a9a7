package kube

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/json"

	"github.com/dynctl/dynctl/internal/workers"
)

// TestServices: Services of one engine each, as a real API server told of them, are asked
// by their names; labels, their own or those that they find pods by, tell roles.
func TestServices(t *testing.T) {
	a := newAPIServer(t)
	a.list, a.slices = recorded(t, "services.json"), recorded(t, "endpointslices.json")
	a.sliceLines = make(chan string, 8)
	s := start(t, a, Options{Discovery: ByServiceName, Worker: "events=tcp://*:5557"})
	s.reg.SetRoleLabels(workers.RoleLabels{Prefill: []string{"sim-prefill"}, Decode: []string{"sim-decode"}})
	const (
		crowd   = "crowd decode vllm crowd.rec17.svc:8000 tcp://crowd.rec17.svc:5557: 2 Ready pods are behind its service, and nobody knows which one a request reaches: give each engine a service of its own, or find engines by pod IP (kubernetes.discovery)"
		decode  = "decode-0 decode vllm decode-0.rec17.svc:80 tcp://decode-0.rec17.svc:5557"
		prefill = "prefill-0 prefill vllm prefill-0.rec17.svc:8000 bootstrap=prefill-0.rec17.svc:8998 tcp://prefill-0.rec17.svc:5557"
	)
	s.wait(t, crowd, decode+": the pod behind its service is not Ready", prefill)
	left := []LeftOut{
		{"rec17/dynctl", "label app.kubernetes.io/name=dynctl (dynctl) says that it is a router"},
		{"rec17/outside", "it stands for a name outside of the cluster (ExternalName): name that worker with --worker"},
		{"rec17/ports", "none of its 2 ports is 8000 (kubernetes.port)"},
	}
	if diff := cmp.Diff(left, s.Status().LeftOut); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
	if st := s.Status(); st.Pods != 7 || st.Waiting != 1 || len(st.Watches) != 2 {
		t.Errorf("status %+v", st)
	}
	for _, w := range s.reg.Snapshot().Workers {
		if !strings.HasPrefix(w.From["url"], "name of the service, port from ") || w.From["role"] == "" {
			t.Errorf("worker %s: from %v", w.Name, w.From)
		}
	}

	own := newAPIServer(t)
	own.list, own.slices = a.list, a.slices
	named := start(t, own, Options{Discovery: ByServiceName, Worker: "events=bind:tcp://*:5557,topic=kv@{ip}@m"})
	named.event(t, "discovery.kubernetes.left_out")
	if topic := named.reg.Snapshot().Workers[1].Events[0].Topic; topic != "kv@10.1.3.2@m" {
		t.Errorf("the topic of the pod behind decode-0 is %q", topic)
	}

	// The pod behind one becomes Ready, is deleted, has a successor beside it, and that
	// is gone, too.
	lines := strings.Split(strings.TrimSpace(string(recorded(t, "endpointslices.jsonl"))), "\n")
	next := func(want string) *workers.Worker {
		t.Helper()
		a.sliceLines <- lines[0]
		lines = lines[1:]
		s.wait(t, crowd, want, prefill)
		return s.reg.Snapshot().Workers[1]
	}
	first := next(decode)
	if next(decode+": draining") != nil && s.reg.Snapshot().Workers[1].State != first.State {
		t.Error("a pod that is being deleted is another worker")
	}
	second := next(decode)
	if second.State == first.State {
		t.Error("another pod behind the same name is taken for the old worker")
	}
	if next(decode).State != second.State {
		t.Error("the old pod's end makes another worker of the new one")
	}
	a.sliceLines <- lines[0]
	s.wait(t, crowd, prefill)
}

// TestServicesRefused: what is missing is named, of slices as of Services.
func TestServicesRefused(t *testing.T) {
	a := newAPIServer(t)
	a.refuse = recorded(t, "forbidden-endpointslices.json")
	s := start(t, a, Options{Discovery: ByServiceName})
	named := map[string]bool{}
	for len(named) < 2 {
		e := s.event(t, "discovery.kubernetes.lost")
		for _, what := range []string{"the verbs list and watch on services", "the verbs list and watch on endpointslices.discovery.k8s.io"} {
			if strings.Contains(e.Text, what) {
				named[what] = true
			}
		}
	}
	if _, err := New(workers.NewRegistry(nil), Options{Kubeconfig: a.kubeconfig(), Discovery: ByServiceName, Pool: "engines"}, nil); err == nil || !strings.Contains(err.Error(), "a pool names pods") {
		t.Errorf("a pool of Services: %v", err)
	}
}

// FuzzService: whatever a Service and its slice say, there is a worker or a reason.
func FuzzService(f *testing.F) {
	var all struct{ Items []map[string]any }
	for _, name := range []string{"services.json", "endpointslices.json"} {
		if err := json.Unmarshal(recorded(f, name), &all); err != nil {
			f.Fatal(err)
		}
		for _, item := range all.Items {
			raw, err := json.Marshal(item)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(raw, raw)
		}
	}
	r := rules{port: 8000, scheme: "http"}
	f.Fuzz(func(t *testing.T, service, slice []byte) {
		var svc corev1.Service
		var part discoveryv1.EndpointSlice
		if json.Unmarshal(service, &svc) != nil || json.Unmarshal(slice, &part) != nil {
			return
		}
		small, err := slimSlice(&part)
		if err != nil {
			t.Fatal(err)
		}
		got := r.readService(&svc, []*discoveryv1.EndpointSlice{small.(*discoveryv1.EndpointSlice)}, chosen{any: true})
		if len(got.specs) == 0 && got.why == "" || len(got.specs) > 1 || len(got.specs) == 1 && got.specs[0].Process == "" {
			t.Errorf("%+v", got)
		}
	})
}
