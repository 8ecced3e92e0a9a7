package repository

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDocumentDecisions: the pages of docs/adr are numbered without a gap, and begin with
// number, title and status in one form.
func TestDocumentDecisions(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob(filepath.Join(repository, "docs/adr/*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("%d pages: %v", len(pages), err)
	}
	status := regexp.MustCompile(`^Status: (accepted|superseded by ADR [0-9]+), 20[0-9]{2}-[0-9]{2}-[0-9]{2}\.$`)
	for i, path := range pages {
		name := filepath.Base(path)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("%04d-", i+1); !strings.HasPrefix(name, want) {
			t.Errorf("docs/adr/%s: the name begins with another number than %s", name, want)
		}
		lines := strings.SplitN(string(text), "\n", 4)
		if want := fmt.Sprintf("# %d. ", i+1); !strings.HasPrefix(lines[0], want) {
			t.Errorf("docs/adr/%s begins with %q, not with %q and a title", name, lines[0], want)
		}
		if len(lines) < 4 || lines[1] != "" || !status.MatchString(lines[2]) {
			t.Errorf("docs/adr/%s: the third line is not of the form %s", name, status)
		}
	}
}
