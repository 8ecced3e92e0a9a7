package kube

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dynctl/dynctl/internal/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestDialects: what the pods of each project come to, from a real API server's
// list as JSON and as protobuf.
func TestDialects(t *testing.T) {
	want := []string{
		"big-0 aggregated vllm 127.0.1.1:8000 tcp://127.0.1.1:5557",
		"dynamo-decode-0 decode vllm 127.0.1.3:8000 rev=default-graph tcp://127.0.1.3:5557",
		"dynamo-prefill-0 prefill vllm 127.0.1.5:8000 rev=default-graph tcp://127.0.1.5:5557",
		"llm-d-both-0 either vllm 127.0.1.6:8000 tcp://127.0.1.6:5557",
		"llm-d-decode-0 decode vllm 127.0.1.7:8200 tcp://127.0.1.7:5557",
		"llm-d-prefill-0 prefill vllm 127.0.1.9:8000 tcp://127.0.1.9:5557",
		"llm-d-prefill-decode-0 either vllm 127.0.1.10:8000 tcp://127.0.1.10:5557",
		"llm-d-ranks-0:8001 decode vllm 127.0.1.11:8001 tcp://127.0.1.11:5558",
		"llm-d-ranks-0:8003 decode vllm 127.0.1.11:8003 tcp://127.0.1.11:5560",
		"pair-5d1c-decode-0 decode vllm 127.0.1.12:8000 rev=pair/5d1c slice=0 tcp://127.0.1.12:5557",
		"pair-5d1c-prefill-0 prefill vllm 127.0.1.13:8000 rev=pair/5d1c slice=0 tcp://127.0.1.13:5557",
		"pair-9f3a-decode-0 decode vllm 127.0.1.14:8000 rev=pair/9f3a slice=0 tcp://127.0.1.14:5557",
		"pair-9f3a-prefill-0 prefill vllm 127.0.1.15:8000 rev=pair/9f3a slice=0 tcp://127.0.1.15:5557",
		"pool-0 aggregated vllm 127.0.1.16:8000 tcp://127.0.1.16:5557",
		"pool-1 aggregated vllm 127.0.1.17:8000 tcp://127.0.1.17:5557",
		"ps-decode-0 decode vllm 127.0.1.18:8000 tcp://127.0.1.18:5557",
		"ps-prefill-0 prefill vllm 127.0.1.19:8000 tcp://127.0.1.19:5557",
		"sglang-decode-0 aggregated vllm 127.0.1.20:8000 tcp://127.0.1.20:5557",
		"sglang-prefill-0 aggregated vllm 127.0.1.21:8000 bootstrap=127.0.1.21:8998 tcp://127.0.1.21:5557",
		"smg-0:8000 aggregated vllm 127.0.1.22:8000 tcp://127.0.1.22:5557",
		"smg-0:8001 aggregated vllm 127.0.1.22:8001 tcp://127.0.1.22:5558",
		"vllm-router-decode-0 aggregated vllm 127.0.1.23:8000 tcp://127.0.1.23:5557",
		"vllm-router-prefill-0 aggregated vllm 127.0.1.24:8000 bootstrap=127.0.1.24:8998 tcp://127.0.1.24:5557",
	}
	for _, file := range []struct{ name, kind string }{{"dialects.json.gz", "application/json"}, {"dialects.pb.gz", "application/vnd.kubernetes.protobuf"}} {
		t.Run(file.name, func(t *testing.T) {
			a := newAPIServer(t)
			a.list, a.kind = recorded(t, file.name), file.kind
			s := start(t, a, workers.Kubernetes{Worker: "events=tcp://*:5557"})
			s.labelRoles(t)
			s.wait(t, want...)
			s.event(t, "discovery_kubernetes_left_out")
			left := []LeftOut{
				{"rec/big-0-1", "label leaderworkerset.sigs.k8s.io/worker-index=1 (LeaderWorkerSet) says that it is not the leader of its group, which answers for it"},
				{"rec/dynamo-frontend-0", "label nvidia.com/dynamo-component-type=frontend (Dynamo) says that it is no worker"},
				{"rec/llm-d-encode-0", "label llm-d.ai/role=encode (llm-d) says that it neither prefills nor decodes"},
			}
			if diff := cmp.Diff(left, s.leftOut(t, "rec/big-0-1", "rec/dynamo-frontend-0", "rec/llm-d-encode-0")); diff != "" {
				t.Errorf("left out (-want +got):\n%s", diff)
			}
		})
	}
}

// TestTopics: engines that dial the router's listener are distinguished by topics with what
// their pods have; several servers of one pod by their ports.
func TestTopics(t *testing.T) {
	a := newAPIServer(t)
	a.list = recorded(t, "dialects.json.gz")
	s := start(t, a, workers.Kubernetes{Worker: "events=bind:tcp://*:5557,topic=kv@{ip}:{port}@{namespace}/{name}"})
	s.event(t, "discovery_kubernetes_left_out")
	got := map[string]string{}
	for _, w := range s.reg.Snapshot().Workers {
		got[w.Name] = fmt.Sprintf("%v %s %s", w.Events[0].Bind, w.Events[0].Endpoint, w.Events[0].Topic)
	}
	for name, want := range map[string]string{
		"smg-0:8000":     "true tcp://*:5557 kv@127.0.1.22:8000@rec/smg-0",
		"smg-0:8001":     "true tcp://*:5557 kv@127.0.1.22:8001@rec/smg-0",
		"llm-d-decode-0": "true tcp://*:5557 kv@127.0.1.7:8200@rec/llm-d-decode-0",
	} {
		if got[name] != want {
			t.Errorf("%s: %q, want %q", name, got[name], want)
		}
	}
	_, err := New(workers.NewRegistry(nil), workers.Kubernetes{Kubeconfig: a.kubeconfig(), Selector: "app", Worker: "topic=kv@{host}"}, Options{}, nil)
	if err == nil || !strings.Contains(err.Error(), "topic=kv@{host}: only {ip}, {port}, {name}, {namespace} stand for what a pod has") {
		t.Errorf("an unknown word: %v", err)
	}
}

// TestLifeOfAPod follows a pod from its making to its successor with another
// address, as a real API server reported it.
func TestLifeOfAPod(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(string(recorded(t, "life.jsonl"))), "\n")
	if len(lines) != 10 {
		t.Fatalf("%d lines are recorded", len(lines))
	}
	a := newAPIServer(t)
	s := start(t, a, workers.Kubernetes{})
	feed := func(n int) {
		for range n {
			a.lines <- lines[0]
			lines = lines[1:]
		}
	}
	feed(2) // made, and given an address
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000: its pod is not Ready (ContainersNotReady: containers with unready status: [vllm])")
	first := s.reg.Snapshot().Workers[0]
	feed(1)
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
	s.event(t, "worker_ready")
	feed(1) // all containers are ready, and a readiness gate is not
	s.wait(t, `engine-0 decode vllm 127.0.2.1:8000: its pod is not Ready (ReadinessGatesNotReady: the status of pod readiness gate "example.com/gate" is not "True", but False)`)
	feed(1)
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
	feed(2) // deleted with grace
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000: draining")
	if e := s.event(t, "worker_draining"); e.Worker != "engine-0" || !strings.Contains(e.Text, "its pod is being deleted") {
		t.Errorf("event %+v", e)
	}
	if w := s.reg.Snapshot().Workers[0]; w.State != first.State || !w.State.Leaving() {
		t.Error("the worker became another one on its way, or does not leave")
	}
	first.State.SetDraining(false)
	if !first.State.Draining() {
		t.Error("an operator took back that a pod is being deleted")
	}
	feed(1)
	s.wait(t)
	feed(2)
	s.wait(t, "engine-0 decode vllm 127.0.2.2:8000")
	if s.reg.Snapshot().Workers[0].State == first.State {
		t.Error("a pod with another address is taken for the old worker")
	}
}

// TestPodChanges: what changes of a pod that stays the same pod. Its own lines, with the
// words that are other ones replaced.
func TestPodChanges(t *testing.T) {
	ready := strings.Split(string(recorded(t, "life.jsonl")), "\n")[2]
	change := func(words ...string) string { return strings.NewReplacer(words...).Replace(ready) }
	a := newAPIServer(t)
	s := start(t, a, workers.Kubernetes{})
	a.lines <- ready
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
	first := s.reg.Snapshot().Workers[0]
	a.lines <- change(`"llm-d.ai/role":"decode"`, `"llm-d.ai/role":"prefill"`)
	s.wait(t, "engine-0 prefill vllm 127.0.2.1:8000")
	if s.reg.Snapshot().Workers[0].State != first.State {
		t.Error("a pod that gets another role becomes another worker: it is the same engine with the same caches")
	}
	a.lines <- change("127.0.2.1", "127.0.2.9") // its sandbox was made again
	s.wait(t, "engine-0 decode vllm 127.0.2.9:8000")
	if s.reg.Snapshot().Workers[0].State == first.State {
		t.Error("a pod that gets another address is taken for the old worker")
	}
	// Its label goes: it is left out, and with it back it is a worker again.
	a.lines <- change(`"llm-d.ai/role":"decode"`, `"llm-d.ai/role":"encode"`)
	s.wait(t)
	a.lines <- ready
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
	// Its address is another pod's by now, whose name comes later, while it is still being
	// deleted: the one that stays has it.
	a.lines <- change(`"creationTimestamp"`, `"deletionTimestamp":"2026-11-22T18:23:40Z","creationTimestamp"`)
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000: draining")
	var line struct{ Object corev1.Pod }
	if err := json.Unmarshal([]byte(ready), &line); err != nil {
		t.Fatal(err)
	}
	a.lines <- change(`"MODIFIED"`, `"ADDED"`, `"engine-0"`, `"engine-1"`, string(line.Object.UID), "another")
	s.wait(t, "engine-1 decode vllm 127.0.2.1:8000")
	s.leftOut(t, "life/engine-0")
}

// TestOwnLabels: a pod states settings of its worker in labels and annotations of
// dynctl's own, before those of all pods and before other projects' words; one with a
// key or a value that cannot be taken is left out and the problem named.
func TestOwnLabels(t *testing.T) {
	ready := strings.Split(string(recorded(t, "life.jsonl")), "\n")[2]
	var line struct {
		Type   string     `json:"type"`
		Object corev1.Pod `json:"object"`
	}
	if err := json.Unmarshal([]byte(ready), &line); err != nil {
		t.Fatal(err)
	}
	own := func(labels, annotations map[string]string) string {
		next := line
		next.Object = *line.Object.DeepCopy()
		next.Object.Annotations = annotations
		maps.Copy(next.Object.Labels, labels)
		text, err := json.Marshal(next)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	a := newAPIServer(t)
	s := start(t, a, workers.Kubernetes{Worker: "connector=nixl,kv_copies=single,block_size=32", RevisionLabel: "app"})
	a.lines <- own(map[string]string{
		"dynctl.io/role": "prefill", "dynctl.io/connector": "nixl-push", "dynctl.io/lb": "hybrid", "dynctl.io/dp-start": "2", "dynctl.io/dp": "2",
		"dynctl.io/kv-last-block": "dropped", "dynctl.io/attention-chunk": "8192", "dynctl.io/kv-hash": "xxhash", "dynctl.io/revision": "b7",
	}, map[string]string{"dynctl.io/bootstrap": "10.0.0.9:8998", "dynctl.io/kv-hash-seed": "7", "dynctl.io/role": "decode"})
	s.wait(t, "engine-0 prefill vllm 127.0.2.1:8000 rev=b7 bootstrap=10.0.0.9:8998")
	w := s.reg.Snapshot().Workers[0]
	type stated struct {
		Connector                             workers.Connector
		LB                                    workers.LB
		LastBlock                             workers.LastBlock
		Hash, Seed                            string
		Copies                                workers.KVCopies
		DPStart, Ranks, AttentionChunk, Block int
	}
	want := stated{workers.ConnectorNIXLPush, workers.LBHybrid, workers.LastBlockDropped, "xxhash", "7", workers.CopiesSingle, 2, 2, 8192, 32}
	if d := cmp.Diff(want, stated{w.Connector, w.LB, w.LastBlock, w.KVHash, w.KVHashSeed, w.KVCopies, w.DPStart, len(w.Ranks), w.AttentionChunk, w.BlockSize}); d != "" {
		t.Errorf("the worker (-want +got):\n%s", d)
	}
	for field, from := range map[workers.Field]string{
		workers.FieldRole: "label dynctl.io/role=prefill", workers.FieldConnector: "label dynctl.io/connector=nixl-push",
		workers.FieldBootstrap: "annotation dynctl.io/bootstrap=10.0.0.9:8998", workers.FieldRevision: "label dynctl.io/revision=b7",
	} {
		if w.From[field] != from {
			t.Errorf("%s is from %q, want %q", field, w.From[field], from)
		}
	}
	a.lines <- own(map[string]string{"dynctl.io/connector": "nixl-psh", "dynctl.io/kv-last-blok": "kept"}, map[string]string{"dynctl.io/dp": "two"})
	s.wait(t)
	why := s.leftOut(t, "life/engine-0")[0].Why
	for _, part := range []string{`label dynctl.io/connector=nixl-psh`, `is not one of nixl, nixl-push`, `"dynctl.io/kv-last-blok" (did you mean "dynctl.io/kv-last-block"?)`, `annotation dynctl.io/dp=two`} {
		if !strings.Contains(why, part) {
			t.Errorf("left out for %q, which does not say %q", why, part)
		}
	}
	a.lines <- ready
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000 rev=engine")
	// Each by itself can be taken, together they cannot.
	a.lines <- own(map[string]string{"dynctl.io/lb": "external", "dynctl.io/dp": "2"}, nil)
	s.wait(t)
	if why := s.leftOut(t, "life/engine-0")[0].Why; !strings.Contains(why, "lb=external has one rank") {
		t.Errorf("left out for %q", why)
	}
}

// TestWatchRefused: lists that are answered do not say that changes are seen. A service
// account that may only list is reported once, and not again when lists are answered.
func TestWatchRefused(t *testing.T) {
	a := newAPIServer(t)
	a.refuseWatch = []byte(strings.ReplaceAll(string(recorded(t, "forbidden.json")), "list", "watch"))
	s := start(t, a, workers.Kubernetes{})
	if e := s.event(t, "discovery_kubernetes_lost"); !strings.Contains(e.Text, "refuses to watch pods") {
		t.Errorf("%s", e.Text)
	}
	deadline := time.After(patience)
	for lists := 0; lists < 3; { // of which the second is there after the refusal
		select {
		case q := <-a.asked:
			if strings.HasPrefix(q, "list ") {
				lists++
			}
		case <-deadline:
			t.Fatal("the pods are not listed again")
		}
	}
	for len(s.events) > 0 {
		if e := <-s.events; strings.HasPrefix(e.Kind, "discovery_kubernetes_") {
			t.Errorf("reported again: %s %s", e.Kind, e.Text)
		}
	}
	if len(s.Troubles()) != 1 {
		t.Errorf("troubles %q", s.Troubles())
	}
	a.set(func() { a.refuseWatch = nil })
	s.event(t, "discovery_kubernetes_back")
}

// TestExplainAlike: one trouble has one text, whatever port the router asked from, since
// each other text is reported again.
func TestExplainAlike(t *testing.T) {
	w := &watch{}
	texts := map[string]bool{}
	for port := range 3 {
		texts[w.explain("list", &url.Error{Op: "Get", URL: "https://10.96.0.1/api/v1/pods", Err: &net.OpError{
			Op: "read", Net: "tcp", Err: syscall.ECONNRESET,
			Source: &net.TCPAddr{IP: net.IPv4(10, 1, 2, 3), Port: 40000 + port}, Addr: &net.TCPAddr{IP: net.IPv4(10, 96, 0, 1), Port: 443},
		}})] = true
	}
	if want := "the API server cannot be reached: read tcp 10.96.0.1:443: connection reset by peer"; len(texts) != 1 || !texts[want] {
		t.Errorf("%v, want %s", texts, want)
	}
}

// TestRefusal: a service account without rights learns which verb it lacks on
// what, and the fleet comes when it has it.
func TestRefusal(t *testing.T) {
	a := newAPIServer(t)
	a.refuse = recorded(t, "forbidden.json")
	s := start(t, a, workers.Kubernetes{})
	e := s.event(t, "discovery_kubernetes_lost")
	for _, part := range []string{`"app" in namespace life`, "verbs list and watch on pods", "system:serviceaccount:rb:router", "a Role with"} {
		if !strings.Contains(e.Text, part) {
			t.Errorf("the event does not say %q: %s", part, e.Text)
		}
	}
	if len(s.Troubles()) != 1 || s.Status().Watches[0].Failures == 0 {
		t.Errorf("troubles %q, status %+v", s.Troubles(), s.Status())
	}
	a.set(func() { a.refuse = nil })
	s.event(t, "discovery_kubernetes_back")
	if got := s.Troubles(); len(got) != 0 {
		t.Errorf("troubles %q after the answer", got)
	}
}

// TestLostServer: without an API server the fleet stays as it was, visibly; a new
// one that knows no old versions is listed again.
func TestLostServer(t *testing.T) {
	lines := strings.Split(string(recorded(t, "life.jsonl")), "\n")
	a := newAPIServer(t)
	s := start(t, a, workers.Kubernetes{})
	for _, l := range lines[:3] {
		a.lines <- l
	}
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
	before := s.reg.Snapshot().Workers[0]
	a.set(func() { a.down = true; close(a.cut) })
	s.event(t, "discovery_kubernetes_lost")
	if got := s.Troubles(); len(got) != 1 || !strings.Contains(got[0], "the workers are as they were at") {
		t.Errorf("troubles %q", got)
	}
	if got := s.reg.Snapshot().Workers; len(got) != 1 || got[0] != before {
		t.Error("the fleet changed while the API server was away")
	}
	// Back, without the pod, and with the answer that real servers give to versions
	// from before their start.
	a.lines <- `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version: 249 (1026)","reason":"Expired","code":410}}`
	a.set(func() { a.down, a.cut = false, make(chan struct{}) })
	s.event(t, "discovery_kubernetes_back")
	s.wait(t)
}

// TestKeyFile: a key that cannot be read again does not take the workers away.
func TestKeyFile(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("first\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	a := newAPIServer(t)
	s := startWith(t, a, workers.Kubernetes{Worker: "api_key_file=" + key}, Options{Refresh: time.Millisecond})
	for _, l := range strings.Split(string(recorded(t, "life.jsonl")), "\n")[:3] {
		a.lines <- l
	}
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	s.event(t, "discovery_kubernetes_key_unread")
	if w := s.reg.Snapshot().Workers; len(w) != 1 || w[0].APIKey != "first" || len(s.Troubles()) != 1 {
		t.Errorf("workers %v, troubles %q", w, s.Troubles())
	}
	if err := os.WriteFile(key+".new", []byte("second\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(key+".new", key); err != nil {
		t.Fatal(err)
	}
	changed, cancel := s.reg.Subscribe()
	defer cancel()
	for s.reg.Snapshot().Workers[0].APIKey != "second" {
		select {
		case <-changed:
		case <-time.After(patience):
			t.Fatal("the new key is not taken over")
		}
	}
}

// TestScheme: the engines of pods are asked over TLS where that is set, and not by
// themselves.
func TestScheme(t *testing.T) {
	for scheme, want := range map[string]string{"": "http://127.0.2.1:8000", "https": "https://127.0.2.1:8000"} {
		a := newAPIServer(t)
		s := start(t, a, workers.Kubernetes{Scheme: scheme})
		for _, l := range strings.Split(string(recorded(t, "life.jsonl")), "\n")[:3] {
			a.lines <- l
		}
		s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
		if got := s.reg.Snapshot().Workers[0].URL.String(); got != want {
			t.Errorf("scheme %q: the engine is asked at %s, want %s", scheme, got, want)
		}
	}
}

func TestNewNamesWhatIsWrong(t *testing.T) {
	a := newAPIServer(t)
	for _, tt := range []struct {
		k    workers.Kubernetes
		want string
	}{
		{workers.Kubernetes{Selector: "a in b"}, `kubernetes.selector: "a in b" is no label selector`},
		{workers.Kubernetes{PrefillSelector: "=x"}, "kubernetes.prefill_selector"},
		{workers.Kubernetes{Selector: "a", Worker: "roel=x"}, `kubernetes.worker: unknown key "roel" (did you mean "role"?)`},
		{workers.Kubernetes{Selector: "a", Worker: "role=decode"}, "use the role selectors"},
		{workers.Kubernetes{Selector: "a", Worker: "name=x"}, "names of their pods"},
		{workers.Kubernetes{Selector: "a", Worker: "labels=a:b"}, "those of the pods"},
		{workers.Kubernetes{Selector: "a", Worker: "api_key_file=/nowhere"}, "api_key_file"},
		{workers.Kubernetes{Pool: "engines", Namespaces: []string{workers.AllNamespaces}}, "kubernetes.pool: a pool is in a namespace"},
		{workers.Kubernetes{Selector: "a", Kubeconfig: "/nowhere/kubeconfig"}, "/nowhere/kubeconfig"},
		{workers.Kubernetes{}, "no selector and no pool is set"},
	} {
		if tt.k.Kubeconfig == "" {
			tt.k.Kubeconfig = a.kubeconfig()
		}
		if _, err := New(workers.NewRegistry(nil), tt.k, Options{}, nil); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: error %v, want %s", tt.k, err, tt.want)
		}
	}
	select {
	case q := <-a.asked:
		t.Errorf("New asked the API server: %s", q)
	default:
	}
}

// TestNamespaces: each selector is asked of each namespace, and names
// distinguish them.
func TestNamespaces(t *testing.T) {
	a := newAPIServer(t)
	s := start(t, a, workers.Kubernetes{PrefillSelector: "app=p", DecodeSelector: "app=d", Namespaces: []string{"life", "other"}})
	want := map[string]bool{}
	for _, n := range []string{"life", "other"} {
		for _, l := range []string{"app=p", "app=d"} {
			want["list /api/v1/namespaces/"+n+"/pods "+l] = true
		}
	}
	for len(want) > 0 {
		select {
		case q := <-a.asked:
			delete(want, q)
		case <-time.After(patience):
			t.Fatalf("not asked: %v", want)
		}
	}
	a.lines <- strings.Split(string(recorded(t, "life.jsonl")), "\n")[2]
	changed, cancel := s.reg.Subscribe()
	defer cancel()
	for len(s.reg.Snapshot().Workers) == 0 {
		<-changed
	}
	if w := s.reg.Snapshot().Workers[0]; w.Name != "life.engine-0" || w.Role == workers.Aggregated || w.From[workers.FieldRole] == "" {
		t.Errorf("worker %s %s from %v", w.Name, w.Role, w.From)
	}
}

// TestNamespaceTwice: one that is named twice is one, and its pods have their own names.
func TestNamespaceTwice(t *testing.T) {
	a := newAPIServer(t)
	s := start(t, a, workers.Kubernetes{Namespaces: []string{"life", "life"}})
	a.lines <- strings.Split(string(recorded(t, "life.jsonl")), "\n")[2]
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
	if st := s.Status(); len(st.Watches) != 1 || len(st.Namespaces) != 1 {
		t.Errorf("status %+v", st)
	}
}

// TestUserAgent: the router names itself to the API server, whatever it asks for.
func TestUserAgent(t *testing.T) {
	for _, k := range []workers.Kubernetes{{Pool: "engines"}, {Selector: "app"}, {Discovery: workers.ByServiceName}} {
		a := newAPIServer(t)
		a.pool = make(chan string)
		startWith(t, a, k, Options{UserAgent: "dynctl/1.2.3"})
		want := []string{"pods"}
		switch {
		case k.Pool != "":
			want = []string{"inferencepools"}
		case k.Discovery != "":
			want = []string{"services", "endpointslices"}
		}
		deadline := time.After(patience)
		for _, resource := range want {
			for {
				a.mu.Lock()
				agent, asked := a.agents[resource]
				a.mu.Unlock()
				if asked {
					if agent != "dynctl/1.2.3" {
						t.Errorf("who asks for %s calls itself %q", resource, agent)
					}
					break
				}
				select {
				case <-a.asked:
				case <-time.After(time.Millisecond):
				case <-deadline:
					t.Fatalf("%s are not asked for", resource)
				}
			}
		}
	}
}

// TestManyNamespaces: a router that follows many namespaces asks for all of them at once;
// it is the API server that says when it is too much.
func TestManyNamespaces(t *testing.T) {
	a := newAPIServer(t)
	var namespaces []string
	want := map[string]bool{}
	for i := range 40 {
		n := fmt.Sprintf("n%d", i)
		namespaces = append(namespaces, n)
		want["watch /api/v1/namespaces/"+n+"/pods app"] = true
	}
	start(t, a, workers.Kubernetes{Namespaces: namespaces})
	deadline := time.After(patience / 4)
	for len(want) > 0 {
		select {
		case q := <-a.asked:
			delete(want, q)
		case <-deadline:
			t.Fatalf("%d of %d namespaces are not followed yet", len(want), len(namespaces))
		}
	}
}

// TestSidecarPort: the port of the engine behind a sidecar is read from the sidecar's
// command and arguments, in one word or two.
func TestSidecarPort(t *testing.T) {
	const standard = "llm-d's port of an engine behind container routing-proxy"
	for _, c := range []struct {
		command, args string
		port          string
		from          string // empty for the flag with two hyphens
	}{
		{"", "--port=8000 --vllm-port=18100", "18100", "--vllm-port"},
		{"", "--port 8000 --vllm-port 18100", "18100", "--vllm-port"},
		{"", "-decoder-port 18100 --port 8000", "18100", "--decoder-port"},
		{"", "-decoder-port=18100", "18100", "--decoder-port"},
		{"/app/pd-sidecar --vllm-port 18100", "", "18100", "--vllm-port"},
		{"tini -- /app/pd-sidecar --vllm-port", "18100 --port=8000", "18100", "--vllm-port"},
		{"", "--vllm-port 18100 --vllm-port=18200", "18200", "--vllm-port"}, // flags of Go: the last one counts
		{"", "--vllm-port --port 8000", "8200", ""},
		{"", "--vllm-port", "8200", ""},
		{"", "--vllm-port=", "8200", ""},
		{"", "--vllm-port 0", "8200", ""},
		{"", "--vllm-port $(PORT)", "8200", ""},
		{"", "--vllm-ports 18100 vllm-port 18100", "8200", ""},
		{"", "--other --vllm-port=18100", "18100", "--vllm-port"},
		{"", "", "8200", ""},
	} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "engine-0"},
			Spec:       corev1.PodSpec{InitContainers: []corev1.Container{{Name: "routing-proxy", Command: strings.Fields(c.command), Args: strings.Fields(c.args)}}},
			Status:     corev1.PodStatus{PodIP: "10.0.0.1"},
		}
		r := rules{port: 8000, scheme: "http"}
		got := r.read(pod, chosen{any: true})
		if len(got.specs) != 1 {
			t.Errorf("%q %q: no worker: %s", c.command, c.args, got.why)
			continue
		}
		from := standard
		if c.from != "" {
			from = "argument " + c.from + "=" + c.port + " of container routing-proxy"
		}
		if s := got.specs[0]; s.URL.Port() != c.port || !strings.HasSuffix(s.From[workers.FieldURL], "; "+from) {
			t.Errorf("%q %q: %s from %s", c.command, c.args, s.URL, s.From[workers.FieldURL])
		}
	}
}

// FuzzPod: whatever a pod says, what is read of it is applicable or refused with a
// reason.
func FuzzPod(f *testing.F) {
	f.Add("engine-0", "10.0.0.1", "llm-d.ai/role", "both", "llm-d.ai/active-ports", "8000,8001", "routing-proxy", "--vllm-port=8200", true)
	f.Add("engine-0", "fe80::1", "leaderworkerset.sigs.k8s.io/worker-index", "1", "sglang.ai/bootstrap-port", "8998", "engine", "", false)
	f.Add("", "", "model", "", "smg.ai/worker-ports", "65535,1,,", "pd-sidecar", "--vllm-port 0", true)
	f.Add("engine-0", "10.0.0.1", "", "", "", "", "pd-sidecar", "-decoder-port 8200 --vllm-port", false)
	f.Add("a/b", "not an address", "disaggregatedset.x-k8s.io/revision", "x", "vllm.ai/bootstrap-port", "-1", "", "", true)
	f.Fuzz(func(t *testing.T, name, ip, key, value, noteKey, note, container, arg string, deleted bool) {
		spec, err := template("events=tcp://*:5557,replay=tcp://*:5657")
		if err != nil {
			t.Fatal(err)
		}
		r := rules{template: spec, port: 8000, scheme: "http", host: "router"}
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: "u", Labels: map[string]string{key: value}, Annotations: map[string]string{noteKey: note}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: container, Args: strings.Split(arg, " ")}}},
			Status:     corev1.PodStatus{PodIP: ip},
		}
		if deleted {
			pod.DeletionTimestamp = &metav1.Time{}
		}
		got := r.read(pod, chosen{any: true})
		if (len(got.specs) == 0) != (got.why != "") {
			t.Fatalf("%d workers and the reason %q", len(got.specs), got.why)
		}
		reg := workers.NewRegistry(nil)
		_, refused, err := reg.ApplyEach(workers.SourceKube, got.specs)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(reg.Snapshot().Workers); n+len(refused) != len(got.specs) {
			t.Fatalf("%d workers and %d refusals of %d", n, len(refused), len(got.specs))
		}
		for _, w := range reg.Snapshot().Workers {
			if w.State.Leaving() != deleted {
				t.Fatalf("worker %s leaves: %t", w.Name, w.State.Leaving())
			}
		}
	})
}
