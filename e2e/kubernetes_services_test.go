package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// apply makes or replaces an object at a path of the API server, written as JSON.
func (c *cluster) apply(path, name, object string) {
	c.t.Helper()
	for _, verb := range []string{"PUT", "POST"} {
		at := path
		if verb == "PUT" {
			at += "/" + name
		}
		err := c.client.Verb(verb).AbsPath(fmt.Sprintf(at, c.namespace)).SetHeader("Content-Type", "application/json").Body([]byte(object)).Do(c.t.Context()).Error()
		if err == nil {
			return
		}
		if verb == "POST" {
			c.t.Fatalf("%s %s: %v", path, name, err)
		}
	}
}

// withHosts is how to run a command that has a file as its /etc/hosts: the names of a test's own
// network, for its routers alone.
func withHosts(t *testing.T, file string) []string {
	t.Helper()
	if out, err := exec.Command("unshare", "-m", "true").CombinedOutput(); err != nil {
		t.Skipf("skipped: a router's own /etc/hosts needs unshare -m, which says %v %s", err, out)
	}
	return []string{"unshare", "-m", "sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, file}
}

// TestKubernetesServices: engines that are asked by the names of their Services. One
// becomes Ready, one has a successor, one goes; requests go to those that can be used.
func TestKubernetesServices(t *testing.T) {
	c := newCluster(t, 104)
	file := filepath.Join(t.TempDir(), "hosts")
	under := withHosts(t, file)
	engines := simulate(t, "2a")["aggregated"]
	known, err := os.ReadFile("/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	hosts := string(known)
	const slices = "/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices"
	// service makes one; behind says which pods are behind it.
	service := func(name, engine, ports string) {
		ip := c.address()
		c.front(ip+":8000", engine)
		hosts += fmt.Sprintf("%s %s.%s.svc\n", ip, name, c.namespace)
		c.apply("/api/v1/namespaces/%s/services", name, fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":%q,"labels":{"app":"engine"}},
			"spec":{"selector":{"engine":%q},%s}}`, name, name, ports))
	}
	type pod struct {
		uid           string
		ready, ending bool
	}
	behind := func(name string, pods ...pod) {
		t.Helper()
		list := []map[string]any{}
		for i, p := range pods {
			list = append(list, map[string]any{
				"addresses": []string{fmt.Sprintf("10.1.%d.1", i)}, "conditions": map[string]bool{"ready": p.ready, "terminating": p.ending},
				"targetRef": map[string]string{"kind": "Pod", "name": p.uid, "uid": p.uid, "namespace": c.namespace},
			})
		}
		raw, err := json.Marshal(map[string]any{
			"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": list, "ports": []map[string]any{{"name": "", "port": 8000}},
			"metadata": metav1.ObjectMeta{Name: name + "-x", Labels: map[string]string{"app": "engine", "kubernetes.io/service-name": name}},
		})
		if err != nil {
			t.Fatal(err)
		}
		c.apply(slices, name+"-x", string(raw))
	}
	service("engine-a", engines[0], `"ports":[{"port":8000}]`)
	// Headless: its name is the pod's, where the port is that of the slice.
	service("engine-b", engines[1], `"clusterIP":"None","ports":[{"port":80,"targetPort":8000}]`)
	behind("engine-a", pod{uid: "a1", ready: true})
	behind("engine-b", pod{uid: "b1"})
	if err := os.WriteFile(file, []byte(hosts), 0o600); err != nil {
		t.Fatal(err)
	}

	r := serveBy(t, under, "both are known, one of them usable", func(r *router) bool {
		st, err := r.admin.Status(t.Context())
		return err == nil && st.Workers.Total == 2 && st.Workers.Usable == 1
	}, "--kubeconfig", c.kubeconfig, "--kube-namespace", c.namespace, "--kube-selector", "app=engine", "--kube-discovery", "service-name")
	st, err := r.admin.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(engine string) {
		t.Helper()
		a := post(t, r.url, "/v1/completions", map[string]any{"model": st.Models[0], "max_tokens": 4, "prompt": "words"}).must(t)
		if got, _, _ := strings.Cut(a.header.Get("X-Dynctl-Worker"), "/"); got != engine {
			t.Errorf("%s answered, want %s", got, engine)
		}
	}
	ask("engine-a")
	state := func(what string, usable, total int) {
		t.Helper()
		r.until(what, func() bool {
			st, err := r.admin.Status(t.Context())
			return err == nil && st.Workers.Usable == usable && st.Workers.Total == total
		})
	}
	behind("engine-b", pod{uid: "b1", ready: true})
	state("the other is Ready", 2, 2)
	behind("engine-a", pod{uid: "a1", ready: true}, pod{uid: "a2", ready: true})
	state("two pods are behind one name", 1, 2)
	ask("engine-b")
	behind("engine-a", pod{uid: "a1", ending: true}, pod{uid: "a2", ready: true})
	state("the new one is alone", 2, 2)
	behind("engine-b", pod{uid: "b1", ending: true})
	state("the other is being deleted", 1, 2)
	ask("engine-a")
	behind("engine-b")
	state("it is gone", 1, 1)
}
