package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"
)

// cluster is a real API server in which nothing runs: a pod exists when the test has
// written its status, and its engine is what listens at its address.
type cluster struct {
	t          *testing.T
	kubeconfig string
	namespace  string
	client     *rest.RESTClient
	bed        string // of the namespace's addresses: 127.0.bed.x
	addresses  int
}

// newCluster makes a namespace of its own in the API server that DYNCTL_KUBECONFIG
// points to.
func newCluster(t *testing.T, bed int) *cluster {
	t.Helper()
	need(t)
	path := os.Getenv("DYNCTL_KUBECONFIG")
	if path == "" {
		t.Skip("skipped: DYNCTL_KUBECONFIG names no API server whose namespaces a test may fill; make kube starts one")
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	cfg.APIPath, cfg.GroupVersion, cfg.QPS = "/api", &corev1.SchemeGroupVersion, -1
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c := &cluster{t: t, kubeconfig: path, bed: fmt.Sprintf("127.0.%d.", bed)}
	if c.client, err = rest.RESTClientFor(cfg); err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "dynctl-e2e-"}}
	if err := c.client.Post().Resource("namespaces").Body(ns).Do(t.Context()).Into(ns); err != nil {
		t.Fatal(err)
	}
	c.namespace = ns.Name
	t.Cleanup(func() {
		zero := int64(0)
		err := c.client.Delete().Namespace(c.namespace).Resource("pods").Body(&metav1.DeleteOptions{GracePeriodSeconds: &zero}).Do(context.Background()).Error()
		if err != nil {
			t.Logf("the pods of namespace %s are left: %v", c.namespace, err)
		}
	})
	return c
}

// create makes a pod that runs somewhere, without an address.
func (c *cluster) create(pod *corev1.Pod) {
	c.t.Helper()
	pod.Namespace, pod.Spec.NodeName = c.namespace, "node"
	if err := c.client.Post().Namespace(c.namespace).Resource("pods").Body(pod).Do(c.t.Context()).Error(); err != nil {
		c.t.Fatal(err)
	}
}

// run gives a pod an address and makes it Ready, or not.
func (c *cluster) run(name, ip string, ready bool) {
	c.t.Helper()
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	patch, err := json.Marshal(map[string]any{"status": corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}},
	}})
	if err != nil {
		c.t.Fatal(err)
	}
	if err := c.client.Patch("application/merge-patch+json").Namespace(c.namespace).Resource("pods").Name(name).SubResource("status").Body(patch).Do(c.t.Context()).Error(); err != nil {
		c.t.Fatal(err)
	}
}

// remove deletes a pod with so many seconds of grace.
func (c *cluster) remove(name string, grace int64) {
	c.t.Helper()
	if err := c.client.Delete().Namespace(c.namespace).Resource("pods").Name(name).Body(&metav1.DeleteOptions{GracePeriodSeconds: &grace}).Do(c.t.Context()).Error(); err != nil {
		c.t.Fatal(err)
	}
}

// address is the next one of the namespace's pods.
func (c *cluster) address() string {
	c.addresses++
	return c.bed + fmt.Sprint(c.addresses)
}

// front carries connections to a pod's address on to an engine.
func (c *cluster) front(addr, engine string) {
	c.t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		c.t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", engine)
			if err != nil {
				in.Close()
				continue
			}
			for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
				conns.Go(func() {
					_, _ = io.Copy(way[0], way[1])
					in.Close()
					out.Close()
				})
			}
		}
	})
	c.t.Cleanup(func() { l.Close() })
}

// simulate starts simulated engines and returns their addresses by role.
func simulate(t *testing.T, fleet string) map[string][]string {
	t.Helper()
	bin := built(t)
	cmd := exec.Command(bin, "sim", fleet, "-o", "json")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	})
	var list []struct{ Role, URL string }
	if err := json.NewDecoder(out).Decode(&list); err != nil {
		t.Fatalf("dynctl sim %s: %v\n%s", fleet, err, stderr.String())
	}
	engines := map[string][]string{}
	for _, e := range list {
		engines[e.Role] = append(engines[e.Role], strings.TrimPrefix(e.URL, "http://"))
	}
	return engines
}

// TestKubernetesDialects: the pods of every project in testdata are found as they
// are.
func TestKubernetesDialects(t *testing.T) {
	c := newCluster(t, 101)
	engines := simulate(t, "1a")["aggregated"]
	files, err := filepath.Glob("testdata/kubernetes/*.yaml")
	if err != nil || len(files) != 8 {
		t.Fatalf("%v, %v", files, err)
	}
	pods := 0
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for text := range strings.SplitSeq(string(raw), "\n---\n") {
			pod := &corev1.Pod{}
			if err := yaml.UnmarshalStrict([]byte(text), pod); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			c.create(pod)
			ip := c.address()
			for _, port := range []string{"8000", "8001", "8003", "8200"} {
				c.front(ip+":"+port, engines[0])
			}
			c.run(pod.Name, ip, true)
			pods++
		}
	}
	r := serve(t, "--kubeconfig", c.kubeconfig, "--kube-namespace", c.namespace, "--kube-selector", "!nobody-has-this",
		"--prefill-model-labels", "sim-prefill", "--decode-model-labels", "sim-decode")
	l, err := r.admin.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range l.Workers {
		got = append(got, fmt.Sprintf("%s %s %s", w.Name, w.Role, w.URL[strings.LastIndex(w.URL, ":")+1:]))
		if w.Source != "kubernetes" || w.From["role"] == "" || w.From["url"] == "" {
			t.Errorf("worker %s comes from %s, its facts from %v", w.Name, w.Source, w.From)
		}
	}
	want := []string{
		"big-0 aggregated 8000", "dynamo-decode-0 decode 8000", "dynamo-prefill-0 prefill 8000", "llm-d-both-0 either 8000",
		"llm-d-decode-0 decode 8200", "llm-d-prefill-0 prefill 8000", "llm-d-prefill-decode-0 either 8000", "llm-d-ranks-0:8001 decode 8001", "llm-d-ranks-0:8003 decode 8003",
		"pair-5d1c-decode-0 decode 8000", "pair-5d1c-prefill-0 prefill 8000", "pair-9f3a-decode-0 decode 8000", "pair-9f3a-prefill-0 prefill 8000",
		"pool-0 aggregated 8000", "pool-1 aggregated 8000", "ps-decode-0 decode 8000", "ps-prefill-0 prefill 8000",
		"sglang-decode-0 aggregated 8000", "sglang-prefill-0 aggregated 8000", "smg-0:8000 aggregated 8000", "smg-0:8001 aggregated 8001",
		"vllm-router-decode-0 aggregated 8000", "vllm-router-prefill-0 aggregated 8000",
	}
	if !slices.Equal(got, want) {
		t.Errorf("workers\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	st, err := r.admin.Status(t.Context())
	if err != nil || st.Kubernetes == nil || st.Kubernetes.Pods != pods || st.Kubernetes.LeftOutCount != 3 {
		t.Errorf("status %+v, %v", st.Kubernetes, err)
	}
}

// load keeps asking until it is stopped, and notes what went wrong.
type load struct {
	requests, remote atomic.Int64
	mu               sync.Mutex
	failed           []string
	stop             context.CancelFunc
	done             sync.WaitGroup
}

func startLoad(t *testing.T, url, model string, clients int) *load {
	ctx, stop := context.WithCancel(t.Context())
	l := &load{stop: stop}
	for client := range clients {
		l.done.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if err := l.ask(url, model, client, n); err != nil {
					l.mu.Lock()
					l.failed = append(l.failed, err.Error())
					l.mu.Unlock()
				}
			}
		})
	}
	t.Cleanup(func() { stop(); l.done.Wait() })
	return l
}

// ask sends one request, to its end also when the load is stopped.
func (l *load) ask(url, model string, client, n int) error {
	body := fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":24,"messages":[{"role":"user","content":"%d %d %s"}]}`, model, client, n, strings.Repeat("some words of a prompt ", 40))
	req, err := http.NewRequest(http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	l.requests.Add(1)
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK || !bytes.Contains(raw, []byte("[DONE]")):
		return fmt.Errorf("status %d: %.300s", resp.StatusCode, raw)
	}
	prefill, decode := resp.Header.Get("X-Dynctl-Prefill-Worker"), resp.Header.Get("X-Dynctl-Worker")
	if prefill == "" {
		return nil
	}
	l.remote.Add(1)
	if strings.Split(prefill, "-")[1] != strings.Split(decode, "-")[1] {
		return errors.New("a pair across revisions: " + prefill + " and " + decode)
	}
	return nil
}

// TestKubernetesUnderLoad: a rolling update, a scale-down and an API server that is
// killed and comes back lose no request and make no pair across revisions.
func TestKubernetesUnderLoad(t *testing.T) {
	c := newCluster(t, 102)
	down, up := os.Getenv("DYNCTL_KUBE_DOWN"), os.Getenv("DYNCTL_KUBE_UP")
	if down == "" || up == "" {
		t.Skip("skipped: DYNCTL_KUBE_DOWN and DYNCTL_KUBE_UP are the commands that kill the API server and start it again")
	}
	engines := simulate(t, "4p4d")
	// add makes the nth pair of a revision.
	add := func(revision string, n, engine int) {
		for _, role := range []string{"prefill", "decode"} {
			name, ip := fmt.Sprintf("pair-%s-%s-%d", revision, role, n), c.address()
			c.create(&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
					"disaggregatedset.x-k8s.io/name": "pair", "disaggregatedset.x-k8s.io/role": role,
					"disaggregatedset.x-k8s.io/revision": revision, "disaggregatedset.x-k8s.io/slice": fmt.Sprint(n),
				}},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "engine"}}},
			})
			c.front(ip+":8000", engines[role][engine])
			c.run(name, ip, true)
		}
	}
	add("old", 0, 0)
	add("old", 1, 1)
	r := serve(t, "--kubeconfig", c.kubeconfig, "--kube-namespace", c.namespace, "--kube-selector", "disaggregatedset.x-k8s.io/name=pair")
	st, err := r.admin.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l := startLoad(t, r.url, st.Models[0], 8)
	more := func(what string) {
		t.Helper()
		from := l.requests.Load()
		r.until("requests go on "+what, func() bool { return l.requests.Load() >= from+100 })
	}
	usable := func(n int) {
		t.Helper()
		r.until(fmt.Sprintf("%d workers are usable", n), func() bool {
			st, err := r.admin.Status(t.Context())
			return err == nil && st.Workers.Usable == n
		})
	}
	// leave deletes a pod as a kubelet does: it is gone when its engine is idle.
	leave := func(name string) {
		t.Helper()
		c.remove(name, 60)
		r.until(name+" is idle", func() bool {
			list, err := r.admin.Workers(t.Context())
			if err != nil {
				return false
			}
			for _, w := range list.Workers {
				if w.Name == name {
					return w.Draining && w.Ranks[0].ActiveRequests == 0
				}
			}
			return false
		})
		c.remove(name, 0)
	}
	usable(4)
	more("before anything")

	add("new", 0, 2)
	add("new", 1, 3)
	usable(8)
	more("with two revisions")
	for n := range 2 {
		leave(fmt.Sprintf("pair-old-decode-%d", n))
		leave(fmt.Sprintf("pair-old-prefill-%d", n))
	}
	usable(4)
	more("after the rolling update")

	leave("pair-new-prefill-1")
	leave("pair-new-decode-1")
	usable(2)
	more("after the scale-down")

	shell := func(command string) {
		t.Helper()
		cmd := exec.Command("bash", "-c", command)
		if err := cmd.Run(); err != nil {
			t.Fatalf("%s: %v", command, err)
		}
	}
	shell(down)
	r.until("the status says that the API server is lost", func() bool {
		st, err := r.admin.Status(t.Context())
		return err == nil && st.State == "degraded" && !st.Kubernetes.Connected && st.Workers.Usable == 2
	})
	more("without an API server")
	shell(up)
	r.until("the API server is found again", func() bool {
		st, err := r.admin.Status(t.Context())
		return err == nil && st.State == "ready" && st.Kubernetes.Connected
	})
	add("new", 2, 0)
	usable(4)
	more("after the API server's return")

	l.stop()
	l.done.Wait()
	if len(l.failed) > 0 {
		t.Errorf("%d of %d requests failed, the first: %s", len(l.failed), l.requests.Load(), l.failed[0])
	}
	if l.remote.Load() == 0 {
		t.Error("no request went to a pair")
	}
	t.Logf("%d requests, %d of them to pairs", l.requests.Load(), l.remote.Load())
}

// thousandfold makes one simulated engine answer at every address of 127.0.0.0/8, at
// the port that it returns. Pages that are read each second are kept, so that the
// engines of a thousand pods take less of the machine than the router does.
func thousandfold(t *testing.T, engine string) (port int) {
	t.Helper()
	to := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: engine})
	var pages sync.Map
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			to.ServeHTTP(w, r)
			return
		}
		page, ok := pages.Load(r.RequestURI)
		if !ok {
			rec := httptest.NewRecorder()
			to.ServeHTTP(rec, r)
			page, _ = pages.LoadOrStore(r.RequestURI, rec)
		}
		rec := page.(*httptest.ResponseRecorder)
		w.Header().Set("Content-Type", rec.Header().Get("Content-Type"))
		w.WriteHeader(rec.Code)
		_, _ = w.Write(rec.Body.Bytes())
	})}
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() { s.Close(); serving.Wait() })
	return l.Addr().(*net.TCPAddr).Port
}

// TestKubernetesThousandPods: how soon a large fleet of engines that answer and one
// more pod can be used, and what the watch takes: the difference to a router that has
// the same workers from a file.
func TestKubernetesThousandPods(t *testing.T) {
	c := newCluster(t, 103)
	port := thousandfold(t, simulate(t, "1a")["aggregated"][0])
	var urls bytes.Buffer
	pod := func(n int) string {
		name, ip := fmt.Sprintf("engine-%d", n), fmt.Sprintf("127.1.%d.%d", n/250, n%250+1)
		c.create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "engine"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "engine"}}}})
		c.run(name, ip, true)
		fmt.Fprintf(&urls, "  - {name: %s, url: \"http://%s:%d\"}\n", name, ip, port)
		return name
	}
	for n := range 1000 {
		pod(n)
	}
	if _, err := build(); err != nil { // not within the time that is taken
		t.Fatal(err)
	}
	fleet := filepath.Join(t.TempDir(), "workers.yaml")
	if err := os.WriteFile(fleet, append([]byte("workers:\n"), urls.Bytes()...), 0o600); err != nil {
		t.Fatal(err)
	}
	usable := func(r *router, n int) func() bool {
		return func() bool {
			st, err := r.admin.Status(t.Context())
			return err == nil && st.Workers.Total == n && st.Workers.Usable == n
		}
	}
	// start waits until all workers are usable, then takes the CPU time of the start
	// and of the ten seconds after it, and the memory.
	type taken struct {
		listed, usable     time.Duration
		start, idle, bytes float64
	}
	start := func(t *testing.T, args ...string) (r *router, k taken) {
		began := time.Now()
		r = serveUntil(t, "1,000 workers are known", func(r *router) bool {
			st, err := r.admin.Status(t.Context())
			return err == nil && st.Workers.Total == 1000
		}, args...)
		k.listed = time.Since(began)
		r.until("1,000 workers are usable", usable(r, 1000))
		k.usable = time.Since(began)
		k.start = counter(t, r.metrics, "process_cpu_seconds_total")
		end := time.Now().Add(10 * time.Second)
		r.until("ten seconds are over", func() bool { return time.Now().After(end) })
		k.idle = counter(t, r.metrics, "process_cpu_seconds_total") - k.start
		k.bytes = counter(t, r.metrics, "process_resident_memory_bytes")
		t.Logf("1,000 workers known after %s, usable after %s; CPU: %.2f s to there, %.2f s in the ten seconds after; memory %.0f MB",
			k.listed, k.usable, k.start, k.idle, k.bytes/1e6)
		return r, k
	}
	// Again with the same workers from a file: the difference is what the watch takes.
	t.Run("file", func(t *testing.T) { start(t, "--workers-file", fleet) })

	r, k := start(t, "--kubeconfig", c.kubeconfig, "--kube-namespace", c.namespace, "--kube-selector", "app=engine", "--kube-port", fmt.Sprint(port))
	before := counter(t, r.metrics, "process_cpu_seconds_total")
	began := time.Now()
	for n := range 1000 { // as a controller does that keeps notes on pods
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"note":"%d"}}}`, n)
		if err := c.client.Patch("application/merge-patch+json").Namespace(c.namespace).Resource("pods").Name(fmt.Sprintf("engine-%d", n)).Body(patch).Do(t.Context()).Error(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("1,000 changes of pods in %s: CPU %.2f s", time.Since(began), counter(t, r.metrics, "process_cpu_seconds_total")-before)

	// Events say when the new one is healthy. The count of usable workers would not do:
	// others may become unhealthy meanwhile.
	events, err := r.admin.Events(t.Context(), 0, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	seen, fell := events.Newest, 0
	var took []time.Duration
	for n := range 100 {
		began := time.Now()
		name := pod(1000 + n)
		r.until(name+" is usable", func() bool {
			l, err := r.admin.Events(t.Context(), seen, 1000, time.Second)
			if err != nil {
				return false
			}
			there := false
			for _, e := range l.Events {
				seen = e.Seq
				if e.Kind != "health_changed" {
					continue
				}
				there = there || e.Worker == name && e.Fields["to"] == "healthy"
				if e.Fields["to"] == "unhealthy" {
					fell++
				}
			}
			return there
		})
		took = append(took, time.Since(began))
	}
	r.until("all are usable", usable(r, 1100))
	st, err := r.admin.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var l load
	for n := range 50 {
		if err := l.ask(r.url, st.Models[0], 0, n); err != nil {
			t.Error(err)
		}
	}
	slices.Sort(took)
	t.Logf("one more pod is usable after %s (median), %s (99th percentile); workers fell out %d times meanwhile", took[50], took[98], fell)
	if k.listed > 5*time.Second || k.usable > 15*time.Second || took[98] > time.Second {
		t.Error("slower than 5 s until 1,000 pods are known, 15 s until they are usable, or 1 s for one more")
	}
}
