package main

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	fence     = regexp.MustCompile("(?ms)^( *)```[a-z]*\n(.*?)^ *```$|^(?: {4}[^\n]*\n)+")
	continued = regexp.MustCompile(`\\\n\s*`)
	command   = regexp.MustCompile(`(?:^|[;&|(]|\$ )\s*(?:[A-Z_]+=\S+ )*(?:go run ./cmd/|bin/|\./)?(dynctl [^;&|>\x60\n]*|make [a-z-]+(?: [A-Z_]+=\S+)*\s*$)`)
	comment   = regexp.MustCompile(`(?:^|\s)#\s.*$`)
	inside    = regexp.MustCompile("`([^`\n]+)`")
	pathed    = regexp.MustCompile(`^(?:\./)?(?:\.ci|\.github|benchmarks|cmd|deploy|docs|e2e|internal|scripts|testdata)/[\w./-]+$`)
	words     = regexp.MustCompile(`'[^']*'|"[^"]*"|\S+`)
)

// eachDocument calls see with every document of the repository, by its path in it. The
// history of releases is left out: it names what was.
func eachDocument(t *testing.T, see func(path, text string)) {
	t.Helper()
	seen := 0
	err := filepath.WalkDir(repository, func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(repository, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{".git", "bin", "dist", "dist-extra", "shared"}, rel):
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".md") || rel == "CHANGELOG.md":
			return nil
		}
		raw, err := os.ReadFile(path)
		see(rel, string(raw))
		seen++
		return err
	})
	if err != nil || seen < 20 {
		t.Fatalf("%d documents: %v", seen, err)
	}
}

// TestDocumentCommandLines: each command line of dynctl in the documents names a command
// and flags that there are, each line of make a target.
func TestDocumentCommandLines(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(repository, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	ran, made := 0, 0
	eachDocument(t, func(path, text string) {
		var lines []string
		for _, block := range fence.FindAllString(text, -1) {
			lines = append(lines, strings.Split(continued.ReplaceAllString(block, ""), "\n")...)
		}
		for _, m := range inside.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
			lines = append(lines, m[1])
		}
		for _, line := range lines {
			for _, m := range command.FindAllStringSubmatch(comment.ReplaceAllString(line, ""), -1) {
				args := words.FindAllString(m[1], -1)
				if args[0] == "make" {
					made++
					if target := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(args[1]) + `:`); !target.Match(makefile) {
						t.Errorf("%s: %q: the Makefile has no such target", path, line)
					}
					continue
				}
				ran++
				if err := parses(args[1:]); err != nil {
					t.Errorf("%s: %q: %v", path, line, err)
				}
			}
		}
	})
	if ran < 150 || made < 10 {
		t.Errorf("saw only %d command lines of dynctl and %d of make", ran, made)
	}
}

// parses says what is wrong with a command line, without running it. What stands for
// something (…, FILE, [FLAG], a word of prose) is not judged.
func parses(args []string) error {
	for i, a := range args {
		a = strings.Trim(a, `'",.:`)
		if strings.HasPrefix(a, "…") || strings.HasPrefix(a, "...") || strings.HasPrefix(a, "[") || strings.HasPrefix(a, "<") {
			args = args[:i]
			break
		}
		args[i] = a
	}
	root := newRoot()
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	cmd, rest, err := root.Find(args)
	if err != nil {
		return err
	}
	cmd.InitDefaultHelpFlag()
	cmd.InitDefaultVersionFlag()
	// A flag at the end whose value the text leaves out is named all the same.
	if err := cmd.ParseFlags(rest); err != nil && !strings.Contains(err.Error(), "needs an argument") {
		return err
	}
	return nil
}

// TestDocumentPaths: each path of the repository that a document names is there.
func TestDocumentPaths(t *testing.T) {
	seen := 0
	eachDocument(t, func(path, text string) {
		for _, m := range inside.FindAllStringSubmatch(text, -1) {
			for _, word := range strings.Fields(m[1]) {
				word, _, _ = strings.Cut(strings.TrimSuffix(word, "/..."), ":")
				if !pathed.MatchString(word) {
					continue
				}
				seen++
				if _, err := os.Stat(filepath.Join(repository, word)); err != nil {
					t.Errorf("%s names %s, which does not exist", path, word)
				}
			}
		}
	})
	if seen < 100 {
		t.Errorf("saw only %d paths", seen)
	}
}
