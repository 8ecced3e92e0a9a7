package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// TestKubernetesRights: under a service account without rights the router names the verbs
// and resources that it lacks, and the chart's Role is all that it needs.
func TestKubernetesRights(t *testing.T) {
	c := newCluster(t, 107)
	for _, tool := range []string{"helm", "kubectl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skipped: %v", err)
		}
	}
	ip := c.address()
	c.front(ip+":8000", simulate(t, "1a")["aggregated"][0])
	c.create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "engine", Labels: map[string]string{"app": "engine"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "engine"}}}})
	c.run("engine", ip, true)
	for discovery, what := range map[string][]string{"pod-ip": {"pods"}, "service-name": {"services", "endpointslices.discovery.k8s.io"}} {
		t.Run(discovery, func(t *testing.T) {
			account := "router-" + discovery
			kubectl := func(input []byte, args ...string) string {
				t.Helper()
				return string(run(t, input, "kubectl", append([]string{"--kubeconfig", c.kubeconfig, "--namespace", c.namespace}, args...)...))
			}
			kubectl(nil, "create", "serviceaccount", account)
			cfg, err := clientcmd.LoadFromFile(c.kubeconfig)
			if err != nil {
				t.Fatal(err)
			}
			for name := range cfg.AuthInfos {
				cfg.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: strings.TrimSpace(kubectl(nil, "create", "token", account))}
			}
			own := filepath.Join(t.TempDir(), "kubeconfig")
			if err := clientcmd.WriteToFile(*cfg, own); err != nil {
				t.Fatal(err)
			}
			r := serveUntil(t, "the refusals", func(r *router) bool {
				st, err := r.admin.Status(t.Context())
				if err != nil || st.Kubernetes == nil {
					return false
				}
				said := strings.Join(st.Reasons, "\n")
				for _, resource := range what {
					if !strings.Contains(said, fmt.Sprintf("a Role with the verbs list and watch on %s ", resource)) {
						return false
					}
				}
				return true
			}, "--kubeconfig", own, "--kube-namespace", c.namespace, "--kube-selector", "app=engine", "--kube-discovery", discovery)
			rights := run(t, nil, "helm", "template", account, chart, "--namespace", c.namespace, "--kube-version", "1.30.0",
				"--set", "image.repository=registry.example/dynctl", "--set", "image.tag=v1", "--set", "fullnameOverride="+account,
				"--set", "settings.kubernetes.discovery="+discovery, "--show-only", "templates/rbac.yaml")
			kubectl(rights, "apply", "-f", "-")
			r.until("the API server answers", func() bool {
				st, err := r.admin.Status(t.Context())
				return err == nil && st.Kubernetes.Connected && st.Workers.Total == map[string]int{"pod-ip": 1}[discovery]
			})
		})
	}
}
