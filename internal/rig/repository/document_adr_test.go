package repository

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestDocumentDecisions: the pages of docs/adr are numbered without a gap, begin with
// number, title and status in one form, and are one page each: context, decision,
// consequences. What was tried and measured goes to docs/lab.
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
		var sections []string
		for _, m := range regexp.MustCompile(`(?m)^#{2,} (.*)$`).FindAllStringSubmatch(string(text), -1) {
			sections = append(sections, m[1])
		}
		if want := []string{"Context", "Decision", "Consequences"}; !slices.Equal(sections, want) {
			t.Errorf("docs/adr/%s has the sections %q, want %q", name, sections, want)
		}
		if n := len(strings.Fields(string(text))); n > 600 {
			t.Errorf("docs/adr/%s has %d words, more than a page of 600; move what was tried to docs/lab and link it", name, n)
		}
	}
}
