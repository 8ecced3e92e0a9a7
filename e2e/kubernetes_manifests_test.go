package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// definitions are the custom resources that manifests here use, each from the module of
// its project.
var definitions = []struct{ module, path string }{
	{"github.com/prometheus-operator/prometheus-operator@v0.85.0", "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml"},
	{"github.com/prometheus-operator/prometheus-operator@v0.85.0", "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml"},
	{"github.com/kedacore/keda/v2@v2.21.0", "config/crd/bases/keda.sh_scaledobjects.yaml"},
	{"sigs.k8s.io/gateway-api-inference-extension@v1.0.0", "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"},
}

// chart is the folder of the Helm chart.
const chart = "../deploy/helm/dynctl"

// run is a program's output, with what it is given.
func run(t *testing.T, input []byte, name string, args ...string) []byte {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stdin = bytes.NewReader(input)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%.2000s", name, strings.Join(args, " "), err, stderr.String(), out)
	}
	return out
}

// define makes the API server know the custom resources.
func (c *cluster) define() {
	c.t.Helper()
	for _, d := range definitions {
		var m struct{ Dir string }
		if err := json.Unmarshal(run(c.t, nil, "go", "mod", "download", "-json", d.module), &m); err != nil {
			c.t.Fatal(err)
		}
		run(c.t, nil, "kubectl", "--kubeconfig", c.kubeconfig, "apply", "--server-side", "--force-conflicts", "-f", filepath.Join(m.Dir, d.path))
	}
	run(c.t, nil, "kubectl", "--kubeconfig", c.kubeconfig, "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
}

// TestKubernetesManifests: the API server would take what Helm makes of the chart and
// what the kustomizations come to, and knows every field.
func TestKubernetesManifests(t *testing.T) {
	c := newCluster(t, 104)
	for _, tool := range []string{"helm", "kubectl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skipped: %v", err)
		}
	}
	c.define()
	// Other namespaces of engines, which the values of a chart may name.
	for _, name := range []string{"ns", "team-a"} {
		if err := exec.Command("kubectl", "--kubeconfig", c.kubeconfig, "get", "namespace", name).Run(); err != nil {
			run(t, nil, "kubectl", "--kubeconfig", c.kubeconfig, "create", "namespace", name)
		}
	}
	taken := func(t *testing.T, manifests []byte, least int) {
		t.Helper()
		out := run(t, manifests, "kubectl", "--kubeconfig", c.kubeconfig, "apply", "--dry-run=server", "--validate=strict", "-f", "-")
		if n := strings.Count(string(out), "(server dry run)"); n < least {
			t.Errorf("%d manifests, want at least %d: %s", n, least, out)
		}
	}
	values, err := filepath.Glob(chart + "/ci/*-values.yaml")
	if err != nil || len(values) < 3 {
		t.Fatalf("%v, %v", values, err)
	}
	for _, file := range values {
		t.Run(filepath.Base(file), func(t *testing.T) {
			run(t, nil, "helm", "lint", "--strict", chart, "--kube-version", "1.30.0", "--values", file)
			taken(t, run(t, nil, "helm", "template", "dynctl", chart, "--namespace", "ns", "--kube-version", "1.30.0", "--values", file), 6)
		})
	}
	dirs, err := filepath.Glob("../deploy/kubernetes/*/kustomization.yaml")
	if err != nil || len(dirs) < 2 {
		t.Fatalf("%v, %v", dirs, err)
	}
	for _, file := range dirs {
		t.Run(filepath.Base(filepath.Dir(file)), func(t *testing.T) {
			taken(t, run(t, nil, "kubectl", "kustomize", filepath.Dir(file)), 6)
		})
	}
	for _, file := range []string{"hpa.yaml", "keda.yaml"} {
		t.Run(file, func(t *testing.T) {
			raw, err := os.ReadFile("../deploy/kubernetes/autoscaling/" + file)
			if err != nil {
				t.Fatal(err)
			}
			taken(t, raw, 2)
		})
	}
}

// TestKubernetesChart: Helm installs the chart with nothing but an image, an upgrade keeps
// the admin token, and a token that was made by hand is used and stays.
func TestKubernetesChart(t *testing.T) {
	c := newCluster(t, 108)
	for _, tool := range []string{"helm", "kubectl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skipped: %v", err)
		}
	}
	in := func(tool string, args ...string) string {
		t.Helper()
		return string(run(t, nil, tool, append([]string{"--kubeconfig", c.kubeconfig, "--namespace", c.namespace}, args...)...))
	}
	put := func(verb string, args ...string) string {
		t.Helper()
		return in("helm", append([]string{verb, "dynctl", chart, "--set", "image.repository=registry.example/dynctl", "--set", "image.tag=v1"}, args...)...)
	}
	token := func() string {
		t.Helper()
		return in("kubectl", "get", "secret", "dynctl-admin", "--output", "jsonpath={.data.token}")
	}
	t.Log(put("install"))
	made := token()
	if len(made) < 48 {
		t.Errorf("the chart made the token %q", made)
	}
	put("upgrade", "--set", "replicas=3", "--set", "settings.timeouts.drain=2m")
	if got := in("kubectl", "get", "deployment", "dynctl", "--output", "jsonpath={.spec.replicas} {.spec.template.spec.terminationGracePeriodSeconds}"); got != "3 140" {
		t.Errorf("replicas and grace after the upgrade: %s", got)
	}
	if got := token(); got != made {
		t.Errorf("the upgrade changed the token from %q to %q", made, got)
	}
	in("helm", "uninstall", "dynctl")
	if left := in("kubectl", "get", "secrets,deployments,services,configmaps,roles,serviceaccounts", "--selector", "app.kubernetes.io/name=dynctl", "--output", "name"); left != "" {
		t.Errorf("left behind: %s", left)
	}
	in("kubectl", "create", "secret", "generic", "dynctl-admin", "--from-literal=token=a-token-made-by-hand")
	byHand := token()
	put("install")
	put("upgrade")
	in("helm", "uninstall", "dynctl")
	if got := token(); got != byHand {
		t.Errorf("the token made by hand was %q and is %q", byHand, got)
	}
}

// TestKubernetesPool: the pods that an InferencePool names are found at its port, and
// those that it names later.
func TestKubernetesPool(t *testing.T) {
	c := newCluster(t, 105)
	if _, err := exec.LookPath("kubectl"); err != nil {
		t.Skipf("skipped: %v", err)
	}
	c.define()
	engine := simulate(t, "1a")["aggregated"][0]
	for _, name := range []string{"first", "second"} {
		ip := c.address()
		c.create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "engine"}}}})
		c.front(ip+":8123", engine)
		c.run(name, ip, true)
	}
	choose := func(app string) {
		t.Helper()
		run(t, fmt.Appendf(nil, `{"apiVersion":"inference.networking.k8s.io/v1","kind":"InferencePool","metadata":{"name":"engines"},
"spec":{"selector":{"matchLabels":{"app":%q}},"targetPorts":[{"number":8123}],"endpointPickerRef":{"name":"none","port":{"number":9002}}}}`, app),
			"kubectl", "--kubeconfig", c.kubeconfig, "--namespace", c.namespace, "apply", "--server-side", "-f", "-")
	}
	choose("first")
	r := serve(t, "--kubeconfig", c.kubeconfig, "--kube-namespace", c.namespace, "--kube-pool", "engines")
	only := func(name string) func() bool {
		return func() bool {
			l, err := r.admin.Workers(t.Context())
			return err == nil && len(l.Workers) == 1 && l.Workers[0].Name == name && strings.HasSuffix(l.Workers[0].URL, ":8123")
		}
	}
	r.until("the pool's pod is the worker", only("first"))
	choose("second")
	r.until("the pod of the new selector is the worker", only("second"))
}
