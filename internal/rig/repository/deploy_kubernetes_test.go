package repository

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	kubeyaml "sigs.k8s.io/yaml"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/cli/commands"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

const kubeBase = repository + "/deploy/kubernetes/base"

// at walks a decoded document: words are keys, numbers are places in lists.
func at[T any](t *testing.T, doc any, path ...any) T {
	t.Helper()
	for i, p := range path {
		ok := false
		switch p := p.(type) {
		case string:
			var m map[string]any
			if m, ok = doc.(map[string]any); ok {
				doc, ok = m[p]
			}
		case int:
			var l []any
			if l, ok = doc.([]any); ok && p < len(l) {
				doc = l[p]
			}
		}
		if !ok {
			t.Fatalf("there is no %v", path[:i+1])
		}
	}
	v, ok := doc.(T)
	if !ok {
		t.Fatalf("%v is %T", path, doc)
	}
	return v
}

// documents are those of the base by kind and name.
func documents(t *testing.T) map[string]any {
	t.Helper()
	out := map[string]any{}
	for _, file := range at[[]any](t, readYAML(t, filepath.Join(kubeBase, "kustomization.yaml"))[0], "resources") {
		for _, doc := range readYAML(t, filepath.Join(kubeBase, file.(string))) {
			out[at[string](t, doc, "kind")+"/"+at[string](t, doc, "metadata", "name")] = doc
		}
	}
	return out
}

func readYAML(t *testing.T, path string) (docs []any) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for dec := yaml.NewDecoder(bytes.NewReader(raw)); ; {
		var doc any
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return docs
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		docs = append(docs, doc)
	}
}

// serveArgs reads a container's arguments as serve would; file is what --config finds
// in the container, if it names one.
func serveArgs(t *testing.T, args []any, file string) *settings.Config {
	t.Helper()
	var words []string
	path := ""
	for _, a := range args {
		if strings.HasPrefix(a.(string), "--config=") {
			path = filepath.Join(t.TempDir(), "dynctl.yaml")
			if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
				t.Fatal(err)
			}
			continue
		}
		words = append(words, a.(string))
	}
	cmd := serveCmd()
	if words[0] != "serve" {
		t.Fatalf("the command is %s", words[0])
	}
	if err := cmd.ParseFlags(words[1:]); err != nil {
		t.Fatal(err)
	}
	l, err := cli.LoadConfig(path, cmd.Flags())
	if err != nil {
		t.Fatal(err)
	}
	return &l.Config
}

// TestKubernetesBase holds the manifests to what the binary needs and does.
func TestKubernetesBase(t *testing.T) {
	docs := documents(t)
	// Kustomize puts them on everything.
	labels := at[map[string]any](t, readYAML(t, filepath.Join(kubeBase, "kustomization.yaml"))[0], "labels", 0, "pairs")
	checkFields(t, docs)
	checkRouter(t, docs, labels, serveArgs(t, at[[]any](t, docs["Deployment/dynctl"], "spec", "template", "spec", "containers", 0, "args"), ""))
}

// checkRouter holds the manifests of routers, whose pods have these labels and which
// run with this configuration, to what the binary needs and does.
func checkRouter(t *testing.T, docs, podLabels map[string]any, c *settings.Config) {
	t.Helper()
	pod := at[map[string]any](t, docs["Deployment/dynctl"], "spec", "template", "spec")
	container := at[map[string]any](t, pod, "containers", 0)
	if !c.Kubernetes.On() {
		t.Error("no pods are looked for")
	}

	ports := map[string]string{}
	for _, p := range at[[]any](t, container, "ports") {
		ports[at[string](t, p, "name")] = yamlText(t, at[any](t, p, "containerPort"))
	}
	for name, addr := range map[string]string{"http": c.Listen, "admin": c.AdminListen} {
		if !strings.HasSuffix(addr, ":"+ports[name]) || !strings.HasPrefix(addr, "0.0.0.0:") {
			t.Errorf("port %s is %s, but the router listens on %s", name, ports[name], addr)
		}
	}
	// Every file that the router reads is in a mount, and every mount in a volume.
	mounted := map[string]string{}
	for _, m := range at[[]any](t, container, "volumeMounts") {
		mounted[at[string](t, m, "mountPath")] = at[string](t, m, "name")
	}
	files := []string{c.AdminTokenFile, c.TLS.CertFile, c.TLS.KeyFile, c.AdminTLS.CertFile, c.AdminTLS.KeyFile, c.Keys.File, c.EngineTLS.CAFile, c.EngineTLS.CertFile, c.EngineTLS.KeyFile}
	if _, key, ok := strings.Cut(c.Kubernetes.Worker, "api_key_file="); ok {
		files = append(files, key)
	}
	for _, file := range files {
		if file != "" && mounted[filepath.Dir(file)] == "" {
			t.Errorf("%s is read, which is in no mount", file)
		}
	}
	if c.AdminTokenFile == "" {
		t.Error("the admin API asks for no token")
	}
	for path, volume := range mounted {
		if !slices.ContainsFunc(at[[]any](t, pod, "volumes"), func(v any) bool { return at[string](t, v, "name") == volume }) {
			t.Errorf("there is no volume %s for %s", volume, path)
		}
	}

	// Only /readyz knows of a drain and of a fleet that cannot serve; a probe of the
	// process must not ask for engines.
	for probe, path := range map[string]string{"readinessProbe": "/readyz", "livenessProbe": "/healthz", "startupProbe": "/healthz"} {
		if got := at[string](t, container, probe, "httpGet", "path"); got != path {
			t.Errorf("%s asks %s, want %s", probe, got, path)
		}
		if port := at[string](t, container, probe, "httpGet", "port"); port != "http" {
			t.Errorf("%s asks port %s", probe, port)
		}
		scheme, _ := at[map[string]any](t, container, probe, "httpGet")["scheme"].(string)
		if (scheme == "HTTPS") != (c.TLS.CertFile != "") {
			t.Errorf("%s asks with scheme %q, the data plane's certificate is %q", probe, scheme, c.TLS.CertFile)
		}
	}

	// The order of an end: left out of Services, nothing new, streams finish, last
	// bytes; and only then killed.
	grace := time.Duration(at[int](t, pod, "terminationGracePeriodSeconds")) * time.Second
	if leave := c.Timeouts.Leave; leave < 5*time.Second || leave+c.Timeouts.Drain+commands.CutGrace > grace {
		t.Errorf("%s before the drain, %s for it and %s after it, in %s", leave, c.Timeouts.Drain, commands.CutGrace, grace)
	}
	if n := at[int](t, docs["Deployment/dynctl"], "spec", "strategy", "rollingUpdate", "maxUnavailable"); n != 0 {
		t.Errorf("a rolling update stops %d routers before there are new ones", n)
	}

	// The least rights that the watch needs, and no more.
	want := []any{map[string]any{"apiGroups": []any{""}, "resources": []any{"pods"}, "verbs": []any{"list", "watch"}}}
	if c.Kubernetes.Discovery == workers.ByServiceName {
		want = []any{
			map[string]any{"apiGroups": []any{""}, "resources": []any{"services"}, "verbs": []any{"list", "watch"}},
			map[string]any{"apiGroups": []any{"discovery.k8s.io"}, "resources": []any{"endpointslices"}, "verbs": []any{"list", "watch"}},
		}
	}
	if c.Kubernetes.Pool != "" { // and this one object
		want = append(want, map[string]any{"apiGroups": []any{"inference.networking.k8s.io"}, "resources": []any{"inferencepools"}, "resourceNames": []any{c.Kubernetes.Pool}, "verbs": []any{"list", "watch"}})
	}
	if d := cmp.Diff(want, at[[]any](t, docs["Role/dynctl"], "rules")); d != "" {
		t.Errorf("rules of the Role (-want +got):\n%s", d)
	}
	if at[string](t, pod, "serviceAccountName") != at[string](t, docs["RoleBinding/dynctl"], "subjects", 0, "name") || docs["ServiceAccount/dynctl"] == nil {
		t.Error("the Role is not bound to the pod's service account")
	}

	// Routers are not found as engines, whatever the selector.
	labels := map[string]string{}
	for k, v := range podLabels {
		labels[k] = v.(string)
	}
	if workers.NoEngine(labels) == "" {
		t.Errorf("pods with the labels %v are taken for engines", labels)
	}

	for _, path := range []struct {
		doc  string
		keys []any
	}{{"NetworkPolicy/dynctl", []any{"spec", "podSelector", "matchLabels"}}, {"PodDisruptionBudget/dynctl", []any{"spec", "selector", "matchLabels"}}} {
		chosen := at[map[string]any](t, docs[path.doc], path.keys...)
		if chosen["app.kubernetes.io/name"] == nil {
			t.Errorf("%s is about the pods with %v, which may be engines", path.doc, chosen)
		}
		for k, v := range chosen {
			if labels[k] != v {
				t.Errorf("%s is about the pods with %v, the router's have %v", path.doc, chosen, labels)
			}
		}
	}

	spread, _ := pod["topologySpreadConstraints"].([]any)
	for _, c := range spread {
		for k, v := range at[map[string]any](t, c, "labelSelector", "matchLabels") {
			if labels[k] != v {
				t.Errorf("a spread counts pods with %s=%v, the router's have %v", k, v, labels)
			}
		}
	}

	// A policy on what the router may ask would have to name every engine's ports.
	policy := at[[]any](t, docs["NetworkPolicy/dynctl"], "spec", "policyTypes")
	if !slices.Equal(policy, []any{"Ingress"}) {
		t.Errorf("the network policy is about %v", policy)
	}
	security := at[map[string]any](t, pod, "securityContext")
	if security["runAsNonRoot"] != true || at[bool](t, container, "securityContext", "readOnlyRootFilesystem") != true {
		t.Error("the container runs as root, or may write to its image")
	}
}

// kinds are the types of objects that Kubernetes itself knows.
var kinds = map[string]func() any{
	"ClusterRole":             func() any { return new(rbacv1.ClusterRole) },
	"ClusterRoleBinding":      func() any { return new(rbacv1.ClusterRoleBinding) },
	"ConfigMap":               func() any { return new(corev1.ConfigMap) },
	"Deployment":              func() any { return new(appsv1.Deployment) },
	"HorizontalPodAutoscaler": func() any { return new(autoscalingv2.HorizontalPodAutoscaler) },
	"NetworkPolicy":           func() any { return new(networkingv1.NetworkPolicy) },
	"PodDisruptionBudget":     func() any { return new(policyv1.PodDisruptionBudget) },
	"Role":                    func() any { return new(rbacv1.Role) },
	"RoleBinding":             func() any { return new(rbacv1.RoleBinding) },
	"Secret":                  func() any { return new(corev1.Secret) },
	"Service":                 func() any { return new(corev1.Service) },
	"ServiceAccount":          func() any { return new(corev1.ServiceAccount) },
}

// checkFields: Kubernetes knows every field of the objects. It drops those that it does not
// know, without an error unless strict checks are on.
func checkFields(t *testing.T, docs map[string]any) {
	t.Helper()
	for name, doc := range docs {
		kind := at[string](t, doc, "kind")
		if kind == "ServiceMonitor" || kind == "PrometheusRule" {
			continue // make kube checks these
		}
		made, ok := kinds[kind]
		if !ok {
			t.Errorf("%s: a kind that the test does not know", name)
			continue
		}
		if err := kubeyaml.UnmarshalStrict([]byte(yamlText(t, doc)), made()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func yamlText(t *testing.T, v any) string {
	t.Helper()
	b, err := yaml.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// TestKubernetesOverlays: the arguments of every overlay are those of serve.
func TestKubernetesOverlays(t *testing.T) {
	files, err := filepath.Glob(repository + "/deploy/kubernetes/*/kustomization.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range files {
		doc, _ := readYAML(t, file)[0].(map[string]any)
		patches, _ := doc["patches"].([]any)
		for _, p := range patches {
			var ops []map[string]any
			if err := yaml.Unmarshal([]byte(at[string](t, p, "patch")), &ops); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			for _, op := range ops {
				if strings.HasSuffix(op["path"].(string), "/args") {
					if c := serveArgs(t, op["value"].([]any), ""); !c.Kubernetes.On() {
						t.Errorf("%s: no pods are looked for", file)
					}
				}
			}
		}
	}
}
