// Package repository tests what no package can test for itself: that documents, examples
// for deployment and the imports of all packages are what the code says, and that each
// step of a decision has one place.
package repository

import (
	"os"
	"strings"
	"testing"
)

// Document fails t where a part of a document is not want, or with update writes it. The marks
// around the part name the command that writes it.
func Document(t testing.TB, path, part, want, command string, update bool) {
	t.Helper()
	begin, end := "<!-- "+part+": written by "+command+" -->\n", "<!-- end of "+part+" -->"
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(raw), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the %s", path, part)
	}
	File(t, path, head+begin+want+end+tail, command, update)
}

// File fails t where a file is not want, or with update writes it, as command does.
func File(t testing.TB, path, want, command string, update bool) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err == nil && string(raw) == want {
		return
	}
	if !update {
		if err != nil {
			t.Error(err)
		}
		t.Errorf("%s is out of date; run %s", path, command)
	} else if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}
