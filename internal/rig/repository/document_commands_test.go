package repository

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli/commands"
)

var (
	fence     = regexp.MustCompile("(?ms)^( *)```[a-z]*\n(.*?)^ *```$|^(?: {4}[^\n]*\n)+")
	continued = regexp.MustCompile(`\\\n\s*`)
	command   = regexp.MustCompile(`(?:^|[;&|(]|\$ )\s*(?:[A-Z_]+=\S+ )*(?:go run ./cmd/|bin/|\./)?(dynctl [^;&|>\x60\n]*|make [a-z-]+(?: [A-Z_]+=\S+)*\s*$)`)
	comment   = regexp.MustCompile(`(?:^|\s)#\s.*$`)
	inside    = regexp.MustCompile("`([^`\n]+)`")
	pathed    = regexp.MustCompile(`^(?:\./)?(?:\.ci|\.github|benchmarks|cmd|deploy|docs|e2e|internal|scripts|testdata)/[\w./-]+$`)
	gofile    = regexp.MustCompile(`^[\w-]+(?:/[\w-]+)*\.go$`)
	numbered  = regexp.MustCompile(`\w+\.go:\d+`)
	tested    = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	testname  = regexp.MustCompile(`(?:^|[^\w/])((?:Test|Fuzz|Benchmark)[A-Z]\w*)(…?)`)
	words     = regexp.MustCompile(`'[^']*'|"[^"]*"|\S+`)
)

// notOurs are folders that are made, or hold other people's files.
var notOurs = []string{".git", "bin", "dist", "dist-extra", "shared"}

// eachDocument calls see with every document of the repository, by its path in it. The
// history of releases is left out: it names what was.
func eachDocument(t *testing.T, see func(path, text string)) {
	t.Helper()
	seen := 0
	eachFile(t, ".md", func(rel string) {
		if rel == "CHANGELOG.md" {
			return
		}
		raw, err := os.ReadFile(filepath.Join(repository, rel))
		if err != nil {
			t.Fatal(err)
		}
		see(rel, string(raw))
		seen++
	})
	if seen < 20 {
		t.Fatalf("only %d documents", seen)
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
	root := commands.Root()
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

// TestDocumentPaths: each path of the repository that a document names is there, and so is
// each Go file that it names by the end of its path. No line of one has a number, which the
// next change would make wrong.
func TestDocumentPaths(t *testing.T) {
	ends := map[string]bool{}
	eachFile(t, ".go", func(path string) {
		for end := path; ; {
			ends[end] = true
			_, rest, more := strings.Cut(end, "/")
			if !more {
				return
			}
			end = rest
		}
	})
	seen, files := 0, 0
	eachDocument(t, func(path, text string) {
		if n := numbered.FindString(text); n != "" {
			t.Errorf("%s names a line by its number: %s", path, n)
		}
		for _, m := range inside.FindAllStringSubmatch(text, -1) {
			for _, word := range strings.Fields(m[1]) {
				word, _, _ = strings.Cut(strings.TrimSuffix(word, "/..."), ":")
				if pathed.MatchString(word) {
					seen++
					if _, err := os.Stat(filepath.Join(repository, word)); err != nil {
						t.Errorf("%s names %s, which does not exist", path, word)
					}
				}
				if word = strings.TrimPrefix(strings.TrimRight(word, ".,;)"), "…/"); gofile.MatchString(word) {
					files++
					if !ends[word] {
						t.Errorf("%s names %s, and no file ends so", path, word)
					}
				}
			}
		}
	})
	if seen < 100 || files < 60 {
		t.Errorf("saw only %d paths and %d Go files", seen, files)
	}
}

// TestDocumentTests: each test that a document names is there.
func TestDocumentTests(t *testing.T) {
	var all []string
	eachFile(t, "_test.go", func(path string) {
		raw, err := os.ReadFile(filepath.Join(repository, path))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range tested.FindAllStringSubmatch(string(raw), -1) {
			all = append(all, m[1])
		}
	})
	seen := 0
	eachDocument(t, func(path, text string) {
		for _, m := range inside.FindAllStringSubmatch(text, -1) {
			for _, name := range testname.FindAllStringSubmatch(m[1], -1) {
				seen++
				begins := name[2] != "" || strings.HasPrefix(m[1], "go test ")
				if !slices.ContainsFunc(all, func(is string) bool { return is == name[1] || begins && strings.HasPrefix(is, name[1]) }) {
					t.Errorf("%s names %s, and there is no such test", path, name[0])
				}
			}
		}
	})
	if seen < 100 {
		t.Errorf("saw only %d names of tests", seen)
	}
}

// eachFile calls see with the path of each file of the repository that ends so.
func eachFile(t *testing.T, end string, see func(path string)) {
	t.Helper()
	err := filepath.WalkDir(repository, func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(repository, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains(notOurs, rel):
			return filepath.SkipDir
		case strings.HasSuffix(path, end):
			see(filepath.ToSlash(rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
