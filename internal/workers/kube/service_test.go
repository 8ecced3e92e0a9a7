package kube

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/json"

	"github.com/dynctl/dynctl/internal/workers"
)

// TestServices: Services of one engine each, as a real API server reported them, are asked
// by their names; labels, their own or those that they find pods by, state roles.
func TestServices(t *testing.T) {
	a := newAPIServer(t)
	a.list, a.slices = recorded(t, "services.json"), recorded(t, "endpointslices.json")
	a.sliceLines = make(chan string, 8)
	s := start(t, a, workers.Kubernetes{Discovery: workers.ByServiceName, Worker: "events=tcp://*:5557"})
	s.labelRoles(t)
	const (
		crowd   = "crowd decode vllm crowd.rec17.svc:8000 tcp://crowd.rec17.svc:5557: 2 pods take the requests of its service, and which one a request reaches is not known: give each engine a service of its own, or find engines by pod IP (kubernetes.discovery)"
		decode  = "decode-0 decode vllm decode-0.rec17.svc:8000 tcp://decode-0.rec17.svc:5557"
		prefill = "prefill-0 prefill vllm prefill-0.rec17.svc:8000 bootstrap=prefill-0.rec17.svc:8998 tcp://prefill-0.rec17.svc:5557"
	)
	s.wait(t, crowd, decode+": the pod behind its service is not Ready", prefill)
	left := []LeftOut{
		{"rec17/dynctl", "label app.kubernetes.io/name=dynctl (dynctl) says that it is a router"},
		{"rec17/outside", "it stands for a name outside of the cluster (ExternalName): name that worker with --worker"},
		{"rec17/ports", "none of its 2 ports is 8000 (kubernetes.port)"},
	}
	if diff := cmp.Diff(left, s.leftOut(t, "rec17/dynctl", "rec17/outside", "rec17/ports")); diff != "" {
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
	named := start(t, own, workers.Kubernetes{Discovery: workers.ByServiceName, Worker: "events=bind:tcp://*:5557,topic=kv@{ip}@m"})
	named.event(t, "discovery_kubernetes_left_out")
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

// service is a Service of one engine, headless, at the port 80 whose target is 8000.
func service(change func(*corev1.Service)) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "engine", Namespace: "ns", UID: "service"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: corev1.ClusterIPNone,
			IPFamilies: []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: "http", Port: 80}},
		},
	}
	if change != nil {
		change(svc)
	}
	return svc
}

// part is an EndpointSlice in which the port http is 8000.
func part(name string, family discoveryv1.AddressType, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns"}, AddressType: family, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{{Name: new("events"), Port: new(int32(5557))}, {Name: new("http"), Port: new(int32(8000))}},
	}
}

// endpoint is one with an address and what words say: "uid=", "hostname=" and "node=",
// and a condition by its name, with a "!" for false.
func endpoint(address string, words ...string) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{address}}
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "uid":
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: "pod-" + value, UID: types.UID(value)}
		case "hostname":
			e.Hostname = &value
		case "node":
			e.NodeName = &value
		case "ready", "!ready":
			e.Conditions.Ready = new(w == "ready")
		case "serving", "!serving":
			e.Conditions.Serving = new(w == "serving")
		case "terminating":
			e.Conditions.Terminating = new(true)
		default:
			panic(w)
		}
	}
	return e
}

// readAlike reads a Service as it is kept, with its slices in every order of two, and
// fails unless all say the same.
func readAlike(t *testing.T, r *rules, svc *corev1.Service, parts ...*discoveryv1.EndpointSlice) reading {
	t.Helper()
	kept, err := keepService(svc)
	if err != nil {
		t.Fatal(err)
	}
	var small []*discoveryv1.EndpointSlice
	for _, p := range parts {
		one, err := keepSlice(p)
		if err != nil {
			t.Fatal(err)
		}
		small = append(small, one.(*discoveryv1.EndpointSlice))
	}
	first := r.readService(kept.(*corev1.Service), small, chosen{any: true})
	slices.Reverse(small)
	if diff := cmp.Diff(first, r.readService(kept.(*corev1.Service), small, chosen{any: true}), cmp.AllowUnexported(reading{})); diff != "" {
		t.Errorf("another order of the slices, another worker (-first +second):\n%s", diff)
	}
	return first
}

// TestWhoIsBehindAService: pods with addresses of two families are counted once, whether
// slices say who they are or not, and conditions count as their documentation says.
func TestWhoIsBehindAService(t *testing.T) {
	const (
		crowd    = "2 pods take the requests of its service"
		notReady = "the pod behind its service is not Ready"
		ending   = "the pod behind its service is being deleted"
	)
	for _, tt := range []struct {
		name    string
		v6, v4  []discoveryv1.Endpoint
		process string
		why     string // the beginning of what keeps requests away
	}{
		{"a pod of two families", []discoveryv1.Endpoint{endpoint("fd00::1", "uid=a")}, []discoveryv1.Endpoint{endpoint("10.0.0.1", "uid=a")}, "a", ""},
		{"two pods", []discoveryv1.Endpoint{endpoint("fd00::1", "uid=a")}, []discoveryv1.Endpoint{endpoint("10.0.0.2", "uid=b")}, "a", crowd},
		{"a server that has a host name", []discoveryv1.Endpoint{endpoint("fd00::1", "hostname=gpu-0")}, []discoveryv1.Endpoint{endpoint("10.0.0.1", "hostname=gpu-0")}, "fd00::1", ""},
		{"two that have", []discoveryv1.Endpoint{endpoint("fd00::1", "hostname=gpu-0")}, []discoveryv1.Endpoint{endpoint("10.0.0.1", "hostname=gpu-1")}, "10.0.0.1", crowd},
		{"a server that has a node", []discoveryv1.Endpoint{endpoint("fd00::1", "node=n0")}, []discoveryv1.Endpoint{endpoint("10.0.0.1", "node=n0")}, "fd00::1", ""},
		{"two that have", []discoveryv1.Endpoint{endpoint("fd00::1", "node=n0")}, []discoveryv1.Endpoint{endpoint("10.0.0.1", "node=n1")}, "10.0.0.1", crowd},
		{"nobody says who", []discoveryv1.Endpoint{endpoint("fd00::1")}, []discoveryv1.Endpoint{endpoint("10.0.0.1")}, "fd00::1", ""},
		{"one says who", []discoveryv1.Endpoint{endpoint("fd00::1")}, []discoveryv1.Endpoint{endpoint("10.0.0.1", "uid=a")}, "a", ""},
		{"two of one family", []discoveryv1.Endpoint{endpoint("fd00::1"), endpoint("fd00::2")}, nil, "fd00::1", crowd},
		{"two of one family on one node", nil, []discoveryv1.Endpoint{endpoint("10.0.0.1", "node=n0"), endpoint("10.0.0.2", "node=n0")}, "10.0.0.1", crowd},
		{"an address in two slices", []discoveryv1.Endpoint{endpoint("fd00::1"), endpoint("fd00::1")}, nil, "fd00::1", ""},
		{"not Ready", []discoveryv1.Endpoint{endpoint("fd00::1", "uid=a", "!ready")}, nil, "a", notReady},
		{"one slice is newer", []discoveryv1.Endpoint{endpoint("fd00::1", "uid=a", "!ready", "serving", "terminating")}, []discoveryv1.Endpoint{endpoint("10.0.0.1", "uid=a", "ready", "serving")}, "a", ending},
		{"asked although not Ready (publishNotReadyAddresses)", []discoveryv1.Endpoint{endpoint("fd00::1", "uid=a", "ready", "!serving")}, nil, "a", notReady},
		{"asked although it ends", []discoveryv1.Endpoint{endpoint("fd00::1", "uid=a", "ready", "serving", "terminating")}, nil, "a", ending},
		{"the old one is asked, too", []discoveryv1.Endpoint{endpoint("fd00::1", "uid=a", "ready", "serving", "terminating"), endpoint("fd00::2", "uid=b", "ready", "serving")}, nil, "b", crowd},
		{"the old one is asked no more", []discoveryv1.Endpoint{endpoint("fd00::1", "uid=a", "!ready", "serving", "terminating"), endpoint("fd00::2", "uid=b", "ready", "serving")}, nil, "b", ""},
	} {
		r := rules{port: 80, scheme: "http"}
		got := readAlike(t, &r, service(nil), part("y", discoveryv1.AddressTypeIPv6, tt.v6...), part("x", discoveryv1.AddressTypeIPv4, tt.v4...))
		if len(got.specs) != 1 {
			t.Errorf("%s: %+v", tt.name, got)
			continue
		}
		s := got.specs[0]
		if why := s.NotReady + s.Leaving; s.Process != tt.process || !strings.HasPrefix(why, tt.why) || (why == "") != (tt.why == "") {
			t.Errorf("%s: process %s, %q; want %s, %q", tt.name, s.Process, why, tt.process, tt.why)
		}
	}
}

// TestTopicOfAService: a topic has the address of the family that the Service puts first,
// and the port that the engine itself has.
func TestTopicOfAService(t *testing.T) {
	spec, err := template("events=bind:tcp://*:5557,topic=kv@{ip}:{port}")
	if err != nil {
		t.Fatal(err)
	}
	r := rules{template: spec, port: 80, scheme: "http"}
	v6, v4 := part("y", discoveryv1.AddressTypeIPv6, endpoint("fd00::1", "uid=a")), part("x", discoveryv1.AddressTypeIPv4, endpoint("10.0.0.1", "uid=a"))
	for want, change := range map[string]func(*corev1.Service){
		"kv@fd00::1:8000":  nil,
		"kv@10.0.0.1:8000": func(s *corev1.Service) { slices.Reverse(s.Spec.IPFamilies) },
	} {
		if got := readAlike(t, &r, service(change), v6, v4).specs[0].Topic; got != want {
			t.Errorf("topic %q, want %q", got, want)
		}
	}
}

// TestPortOfAService: nothing stands before the pod of a headless Service that would turn
// the Service's port into the pod's.
func TestPortOfAService(t *testing.T) {
	one := func(ports ...discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
		p := part("x", discoveryv1.AddressTypeIPv4, endpoint("10.0.0.1", "uid=a"))
		if ports != nil {
			p.Ports = ports
		}
		return p
	}
	for _, tt := range []struct {
		name   string
		change func(*corev1.Service)
		slice  *discoveryv1.EndpointSlice
		want   string // host of the URL, or why there is none
	}{
		{"headless", nil, one(), "engine.ns.svc:8000"},
		{"with an address", func(s *corev1.Service) { s.Spec.ClusterIP = "10.9.0.1" }, one(), "engine.ns.svc:80"},
		{"headless without ports", func(s *corev1.Service) { s.Spec.Ports = nil }, one(), "engine.ns.svc:80"},
		{"slices without ports", nil, one([]discoveryv1.EndpointPort{}...), "engine.ns.svc:80"},
		{"a port of every number", nil, one(discoveryv1.EndpointPort{Name: new("http")}), "engine.ns.svc:80"},
		{"a port of two protocols", func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{{Name: "quic", Port: 80, Protocol: corev1.ProtocolUDP}, {Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}
		}, one(discoveryv1.EndpointPort{Name: new("quic"), Port: new(int32(8443))}, discoveryv1.EndpointPort{Name: new("http"), Port: new(int32(8000))}), "engine.ns.svc:8000"},
		{"no such port", nil, one(discoveryv1.EndpointPort{Name: new("web"), Port: new(int32(8000))}), `the pod behind it has no port "http", which is the service's 80`},
		{"no number", nil, one(discoveryv1.EndpointPort{Name: new("http"), Port: new(int32(-1))}), `port "http" of the pod behind it: "-1" is no port (1 to 65535)`},
	} {
		r := rules{port: 80, scheme: "http"}
		got := readAlike(t, &r, service(tt.change), tt.slice)
		host := got.why
		if len(got.specs) == 1 {
			host = got.specs[0].URL.Host
		}
		if host != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, host, tt.want)
		}
	}
}

// TestServicesRefused: what is missing is named, of slices as of Services.
func TestServicesRefused(t *testing.T) {
	a := newAPIServer(t)
	a.refuse = recorded(t, "forbidden-endpointslices.json")
	s := start(t, a, workers.Kubernetes{Discovery: workers.ByServiceName})
	named := map[string]bool{}
	for len(named) < 2 {
		e := s.event(t, "discovery_kubernetes_lost")
		for _, what := range []string{"the verbs list and watch on services", "the verbs list and watch on endpointslices.discovery.k8s.io"} {
			if strings.Contains(e.Text, what) {
				named[what] = true
			}
		}
	}
	if _, err := New(workers.NewRegistry(nil), workers.Kubernetes{Kubeconfig: a.kubeconfig(), Discovery: workers.ByServiceName, Pool: "engines"}, Options{}, nil); err == nil || !strings.Contains(err.Error(), "a pool names pods") {
		t.Errorf("a pool of Services: %v", err)
	}
}

// FuzzService: whatever a Service and its slices say, there is a worker or a reason, the
// same in every order.
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
		small, err := keepSlice(&part)
		if err != nil {
			t.Fatal(err)
		}
		// The same endpoints once more: no order of the slices makes another worker.
		other := *small.(*discoveryv1.EndpointSlice)
		other.Name, other.AddressType = other.Name+"-", discoveryv1.AddressTypeIPv6
		readAlike(t, &r, &svc, &part, &other)
		got := r.readService(&svc, []*discoveryv1.EndpointSlice{small.(*discoveryv1.EndpointSlice)}, chosen{any: true})
		if n := len(got.specs); n > 1 || n == 0 && got.why == "" {
			t.Errorf("%d workers and no reason: %+v", n, got)
		}
		for _, s := range got.specs {
			if s.Process == "" {
				t.Errorf("no process: %+v", s)
			}
		}
	})
}
