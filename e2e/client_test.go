package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestOpenAIClient runs the OpenAI Python library, unmodified and as its
// registry has it, through the router in front of simulated engines: chat,
// streaming, tools, completions, embeddings, responses, models, errors.
func TestOpenAIClient(t *testing.T) {
	need(t)
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skipf("skipped: no python3 (%v)", err)
	}
	dir := os.Getenv("DYNCTL_E2E_VENV")
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Skipf("skipped: no folder for a Python environment (%v)", err)
		}
		dir = filepath.Join(cache, "dynctl-e2e-openai")
	}
	inside := filepath.Join(dir, "bin", "python")
	if exec.Command(inside, "-c", "import openai").Run() != nil {
		if out, err := exec.Command(python, "-m", "venv", dir).CombinedOutput(); err != nil {
			t.Skipf("skipped: no Python environment can be made: %v\n%s", err, out)
		}
		if out, err := exec.Command(inside, "-m", "pip", "install", "-q", "openai>=1.60").CombinedOutput(); err != nil {
			t.Skipf("skipped: the OpenAI library cannot be installed: %v\n%s", err, out)
		}
	}
	r := serve(t, "--sim", "2p2d", "--routing-threshold", "64")
	cmd := exec.Command(inside, "testdata/openai_client.py", r.url+"/v1")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("the client failed: %v", err)
	}
	s, err := r.admin.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.Traffic.Failed != 0 || s.Traffic.Remote == 0 || s.Traffic.Local == 0 {
		t.Errorf("traffic %+v: want no failure, and both paths", s.Traffic)
	}
}
