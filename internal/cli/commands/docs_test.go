package commands

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
)

// TestDocsAreOfNobodysMachine: man pages and completions hold no folder of whoever
// builds them.
func TestDocsAreOfNobodysMachine(t *testing.T) {
	const home = "/home/somebody-else"
	t.Setenv("HOME", home)
	t.Setenv("XDG_CONFIG_HOME", "")
	dir := t.TempDir()
	if code, _, stderr := typed("docs", "--man", filepath.Join(dir, "man"), "--completions", filepath.Join(dir, "completions")); code != cli.ExitOK {
		t.Fatal(stderr)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil || len(files) < 20 {
		t.Fatal(err, len(files))
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte(home)) {
			t.Errorf("%s holds %s", filepath.Base(f), home)
		}
	}
}
