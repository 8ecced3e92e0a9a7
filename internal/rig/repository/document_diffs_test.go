package repository

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestDocumentDiffs: the diffs of additions.md fit the code: each line that one keeps or takes
// away is in a Go file that this diff's section names, in the order of the diff.
func TestDocumentDiffs(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(repository, "docs/additions.md"))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`[\w/]*\w\.go\b`)
	var files []string
	eachFile(t, ".go", func(path string) { files = append(files, path) })
	diffs := 0
	for section := range strings.SplitSeq(string(raw), "\n## ") {
		title, _, _ := strings.Cut(section, "\n")
		var sources []string // of the files whose paths end as the section has them
		names := named.FindAllString(section, -1)
		slices.Sort(names)
		for _, name := range slices.Compact(names) {
			for _, path := range files {
				if path == name || strings.HasSuffix(path, "/"+strings.TrimPrefix(name, "/")) {
					raw, err := os.ReadFile(filepath.Join(repository, path))
					if err != nil {
						t.Fatal(err)
					}
					sources = append(sources, string(raw))
				}
			}
		}
		for _, m := range regexp.MustCompile("(?s)```diff\n(.*?)```").FindAllStringSubmatch(section, -1) {
			diffs++
			missing := "all"
			for _, source := range sources {
				if missing = misses(source, m[1]); missing == "" {
					break
				}
			}
			if missing != "" {
				t.Errorf("%s: a diff fits none of the files that are named there; one lacks %q:\n%s", title, missing, m[1])
			}
		}
	}
	if diffs < 10 {
		t.Errorf("saw only %d diffs", diffs)
	}
}

// misses is the first line of a diff, of those that it keeps or takes away, that a source
// lacks behind those before it. "[…]" stands for anything within a line.
func misses(source, diff string) string {
	for line := range strings.Lines(diff) {
		line = strings.TrimSuffix(line, "\n")
		if line == "" || line[0] == '+' || strings.TrimSpace(line) == "[…]" {
			continue
		}
		want := strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(line[1:])), `\[…\]`, `.*`)
		// gofmt aligns what stands in columns.
		at := regexp.MustCompile(`(?m)^\s*` + regexp.MustCompile(` +`).ReplaceAllString(want, ` +`) + `\s*$`).FindStringIndex(source)
		if at == nil {
			return line
		}
		source = source[at[1]:]
	}
	return ""
}
