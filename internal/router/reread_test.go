package router

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/dynctl/dynctl/internal/settings"
)

// TestRereadWorkers: an operator who replaces the key of an engine need not touch the file of
// workers that names it, nor wait.
func TestRereadWorkers(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) (path string) {
		t.Helper()
		path = filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	c := settings.Default()
	c.WorkersFile = write("workers.yaml", "workers:\n- {url: 'http://127.0.0.1:1', name: w, api_key_file: '"+filepath.Join(dir, "key")+"'}\n")
	r := idle(t, c)
	for _, key := range []string{"one", "two"} {
		write("key", key)
		r.RereadWorkers()
		if list := r.registry.Snapshot().Workers; len(list) != 1 || list[0].APIKey != key {
			t.Errorf("%d workers, want one with the key %s", len(list), key)
		}
	}
}
