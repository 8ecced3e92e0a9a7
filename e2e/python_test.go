package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// environment is a Python environment with what its registry has under these names
// and versions.
type environment struct {
	name string
	pins []string
}

// What clients are tried with. Their newest versions cannot be installed together:
// LiteLLM keeps the OpenAI library back.
var (
	openAI    = environment{"openai", []string{"openai==3.54.0"}}
	libraries = environment{"clients", []string{"anthropic==0.125.0", "langchain-anthropic==1.7.7", "langchain-openai==1.7.3", "litellm==1.106.2", "mcp==2.3.0"}}
	guide     = environment{"guide", []string{"guidellm==0.8.1"}}
)

// installed asks a Python whether it has all of the pins.
const installed = "import importlib.metadata as m, sys; sys.exit(any(m.version(p) != v for p, v in (a.split('==') for a in sys.argv[1:])))"

// python is the environment's Python, made on first use in a folder of
// DYNCTL_E2E_VENVS or the user's cache. A test without it is skipped, and says why.
func (e environment) python(t *testing.T) string {
	t.Helper()
	need(t)
	base := os.Getenv("DYNCTL_E2E_VENVS")
	if base == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Skipf("skipped: no folder for a Python environment (%v)", err)
		}
		base = filepath.Join(cache, "dynctl-e2e")
	}
	dir := filepath.Join(base, e.name)
	inside := filepath.Join(dir, "bin", "python")
	if exec.Command(inside, append([]string{"-c", installed}, e.pins...)...).Run() == nil {
		return inside
	}
	create, install := []string{"python3", "-m", "venv", dir}, []string{inside, "-m", "pip", "install", "-q"}
	if uv, err := exec.LookPath("uv"); err == nil { // much faster
		create, install = []string{uv, "venv", "-q", "--allow-existing", dir}, []string{uv, "pip", "install", "-q", "--python", inside}
	}
	if _, err := os.Stat(inside); err != nil {
		if out, err := exec.Command(create[0], create[1:]...).CombinedOutput(); err != nil {
			t.Skipf("skipped: no Python environment can be made: %v\n%s", err, out)
		}
	}
	if out, err := exec.Command(install[0], append(install[1:], e.pins...)...).CombinedOutput(); err != nil {
		t.Skipf("skipped: %q cannot be installed: %v\n%s", e.pins, err, out)
	}
	return inside
}
