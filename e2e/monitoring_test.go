package e2e

import (
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// promtool runs Prometheus' own judge; a test without it is skipped.
func promtool(t *testing.T, stdin io.Reader, args ...string) {
	t.Helper()
	tool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skipf("skipped: promtool, of the Debian package prometheus, is not there (%v)", err)
	}
	cmd := exec.Command(tool, args...)
	cmd.Stdin = stdin
	out, err := cmd.CombinedOutput()
	t.Logf("promtool %s\n%s", strings.Join(args, " "), out)
	if err != nil {
		t.Error(err)
	}
}

// TestMonitoringRules: Prometheus takes the rules, and each alert rings for what it names
// and for nothing in a fleet that is well.
func TestMonitoringRules(t *testing.T) {
	need(t)
	files, err := filepath.Glob(filepath.Join("..", "deploy", "monitoring", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	promtool(t, nil, append([]string{"check", "rules"}, files...)...)
	promtool(t, nil, "test", "rules", filepath.Join("testdata", "alerts.yaml"))
}

// TestMetricsPageOfPrometheus: Prometheus reads the page of a router that has routed, and
// has nothing against its names and types.
func TestMetricsPageOfPrometheus(t *testing.T) {
	need(t)
	r := serve(t, "--sim", "2p2d", "--routing-threshold", "64")
	post(t, r.url, "/v1/completions", map[string]any{"model": "sim", "prompt": strings.Repeat("word ", 300), "max_tokens": 8, "stream": true}).must(t)
	res, err := http.Get(r.metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		t.Fatal(res.Status)
	}
	promtool(t, res.Body, "check", "metrics")
}
