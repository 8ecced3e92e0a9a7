package e2e

import (
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dynctl/dynctl/internal/rig/certtest"
	"github.com/dynctl/dynctl/internal/rig/external"
)

// TestKubernetesTLS: pods that speak https, in uvicorn with OpenSSL, and ask for a
// certificate. Theirs has a name and no address, as those of a fleet have.
func TestKubernetesTLS(t *testing.T) {
	c := newCluster(t, 106)
	interpreter := external.Python(t, "uvicorn")
	authority := certtest.NewAuthority(t, "of the fleet")
	cert, key := authority.Pair(t, "engines.example", time.Hour)
	own, ownKey := authority.Pair(t, "router.example", time.Hour)
	ip := c.address()
	cmd := exec.Command(interpreter, "-m", "uvicorn", "--no-proxy-headers", "--app-dir", "testdata", "--host", ip, "--port", "8443",
		"--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", authority.File(t), "--ssl-cert-reqs", "2", "tls_engine:app")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("log of uvicorn:\n%s", log.String())
		}
	})
	c.create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "engine", Labels: map[string]string{"app": "engine"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "engine"}}}})
	c.run("engine", ip, true)
	args := []string{"--kubeconfig", c.kubeconfig, "--kube-namespace", c.namespace, "--kube-selector", "app=engine", "--kube-port", "8443", "--kube-scheme", "https",
		"--engine-tls-ca-file", authority.File(t), "--engine-tls-cert-file", own, "--engine-tls-key-file", ownKey}

	// Without the name the certificate is that of another, and the reason says so.
	var reason string
	serveUntil(t, "the reason", func(r *router) bool {
		l, err := r.admin.Workers(t.Context())
		if err == nil && len(l.Workers) == 1 {
			reason = l.Workers[0].Reason
		}
		return strings.Contains(reason, "certificate")
	}, args...)
	t.Logf("without a name: %s", reason)

	r := serve(t, append(args, "--engine-tls-server-name", "engines.example")...)
	for _, stream := range []bool{false, true} {
		a := post(t, r.url, "/v1/completions", map[string]any{"model": "over-tls", "prompt": "words", "stream": stream})
		if want := map[bool]string{false: "https ", true: "https https https "}[stream]; a.status != http.StatusOK || a.text != want {
			t.Errorf("stream %v: status %d, %q: %s", stream, a.status, a.text, a.body)
		}
	}
}
