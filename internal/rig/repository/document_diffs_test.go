package repository

import (
	"fmt"
	"go/format"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// walks are documents that show how to change the repository. Each diff names its file in the
// first line, "+++ PATH".
var walks = []string{"docs/additions.md", "docs/releases.md"}

var diffBlock = regexp.MustCompile("(?s)```diff\n\\+\\+\\+ (\\S+)\n(.*?)```")

// sections are the parts of a document, by their titles of two "#".
func sections(t *testing.T, path string) []string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(repository, path))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(raw), "\n## ")
}

// change applies the diffs of a section to the files below a folder. write gets each result.
func change(section, folder string, write func(path, text string) error) (diffs int, err error) {
	changed := map[string]string{}
	for _, m := range diffBlock.FindAllStringSubmatch(section, -1) {
		path := m[1]
		source, ok := changed[path]
		if !ok {
			raw, err := os.ReadFile(filepath.Join(folder, path))
			if err != nil {
				return diffs, err
			}
			source = string(raw)
		}
		if source, err = patched(source, m[2]); err == nil && strings.HasSuffix(path, ".go") {
			var formatted []byte
			formatted, err = format.Source([]byte(source))
			source = string(formatted)
		}
		if err != nil {
			return diffs, fmt.Errorf("%s: %w\n%s", path, err, m[2])
		}
		changed[path] = source
		diffs++
	}
	for path, text := range changed {
		if err := write(path, text); err != nil {
			return diffs, err
		}
	}
	return diffs, nil
}

// patched is a source after a diff, whose lines are found by their text, each behind the one
// before. A line "[…]" stands for any lines, and "[…]" within one for anything: a new line gets
// what it stood for in the last line that was taken away. New lines come directly behind the
// line before them. Behind a line "[…]" they come directly before the next line of the diff, or
// before the end of the list or function. A diff of new lines only goes to the end.
func patched(source, diff string) (string, error) {
	lines := strings.SplitAfter(source, "\n")
	var out, added []string
	at, kept, floats := 0, false, false
	var stood []string // what "[…]" stood for
	for line := range strings.Lines(diff) {
		text := strings.TrimSuffix(line, "\n")
		switch {
		case text == "":
		case strings.TrimSpace(text) == "[…]":
			floats = true
		case text[0] == '+':
			for _, s := range stood {
				text = strings.Replace(text, "[…]", s, 1)
			}
			if added = append(added, text[1:]+"\n"); kept && !floats {
				out, added = append(out, added...), nil
			}
		default:
			i, parts := find(lines[at:], text[1:])
			if i < 0 {
				return "", fmt.Errorf("no line %q", text[1:])
			}
			out = append(append(out, lines[at:at+i]...), added...)
			added, kept, floats = nil, true, false
			if at += i + 1; text[0] == '-' {
				stood = parts
			} else {
				out = append(out, lines[at-1])
			}
		}
	}
	if len(added) > 0 {
		i := 0
		for at+i < len(lines) && (!kept || lines[at+i] != ")\n" && lines[at+i] != "}\n") {
			i++
		}
		out = append(append(out, lines[at:at+i]...), added...)
		at += i
	}
	return strings.Join(append(out, lines[at:]...), ""), nil
}

// find is the index of a line, and what each "[…]" of it stands for. gofmt aligns what stands in
// columns, so that blanks may be more.
func find(lines []string, text string) (int, []string) {
	want := strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(text)), `\[…\]`, `(.*)`)
	pattern := regexp.MustCompile(`^\s*` + regexp.MustCompile(` +`).ReplaceAllString(want, ` +`) + `\s*$`)
	for i, line := range lines {
		if m := pattern.FindStringSubmatch(line); m != nil {
			return i, m[1:]
		}
	}
	return -1, nil
}

// TestDocumentDiffs: the diffs of documents fit the files that they name, and what they make of
// Go is Go.
func TestDocumentDiffs(t *testing.T) {
	t.Parallel()
	diffs := 0
	for _, path := range walks {
		for _, section := range sections(t, path) {
			title, _, _ := strings.Cut(section, "\n")
			n, err := change(section, repository, func(string, string) error { return nil })
			if diffs += n; err != nil {
				t.Errorf("%s: %s: %v", path, title, err)
			}
			if all := strings.Count(section, "```diff"); n != all && err == nil {
				t.Errorf("%s: %s: %d of %d diffs name their file", path, title, n, all)
			}
		}
	}
	if diffs < 10 {
		t.Errorf("saw only %d diffs", diffs)
	}
}

// TestDocumentWalks follows the documents that show how to change the repository. In a copy of it
// each section with command lines gets its diffs, then runs the command lines, and what they print
// is compared with what the document shows, but for figures and times. It takes minutes.
func TestDocumentWalks(t *testing.T) {
	if os.Getenv("DYNCTL_WALKS") == "" {
		t.Skip("minutes of compiling: DYNCTL_WALKS=1")
	}
	folder := t.TempDir()
	copyTo(t, folder)
	run := func(line string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", line)
		cmd.Dir = folder
		// Without the paths of the copy, packages that a walk does not change stay compiled; the
		// version of a binary comes from git. A walk is no part of another one.
		cmd.Env = append(os.Environ(), "GOFLAGS=-trimpath", "DYNCTL_WALKS=", "GIT_CONFIG_COUNT=2",
			"GIT_CONFIG_KEY_0=user.name", "GIT_CONFIG_VALUE_0=walk", "GIT_CONFIG_KEY_1=user.email", "GIT_CONFIG_VALUE_1=walk@example.com")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := run("git init --quiet --initial-branch main . && git add --all && git commit --quiet --message 'what is there'"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	shown := 0
	for _, path := range walks {
		for _, section := range sections(t, path) {
			list := transcripts(strings.Split(section, "\n"))
			if len(list) == 0 {
				continue
			}
			shown += len(list)
			title, _, _ := strings.Cut(section, "\n")
			t.Run(title, func(t *testing.T) {
				if _, err := change(section, folder, func(path, text string) error {
					return os.WriteFile(filepath.Join(folder, path), []byte(text), 0o644)
				}); err != nil {
					t.Fatal(err)
				}
				for _, x := range list {
					out, err := run(x.typed)
					if err != nil {
						t.Fatalf("$ %s: %v\n%s", x.typed, err, out)
					}
					if d := cmp.Diff(plainLines(x.shown), plainLines(cut(strings.Split(strings.TrimSpace(out), "\n"), x.shown))); d != "" {
						t.Errorf("$ %s (-document +printed):\n%s", x.typed, d)
					}
				}
			})
		}
	}
	if shown < 8 {
		t.Errorf("saw only %d command lines", shown)
	}
}

// plainLines are the lines of an output without what differs from run to run.
func plainLines(lines []string) (out []string) {
	for _, l := range lines {
		if l = strings.ReplaceAll(strings.Join(strings.Fields(l), " "), "(cached)", "1.0s"); l != "" {
			out = append(out, differs(l, false))
		}
	}
	return out
}

// copyTo copies the repository to a folder, without what is made there.
func copyTo(t *testing.T, folder string) {
	t.Helper()
	eachFile(t, "", func(path string) {
		if path == ".git" { // of a worktree: a file that names its repository
			return
		}
		from, to := filepath.Join(repository, path), filepath.Join(folder, path)
		info, err := os.Lstat(from)
		if err == nil && info.Mode()&fs.ModeType == 0 {
			var raw []byte
			if raw, err = os.ReadFile(from); err == nil {
				if err = os.MkdirAll(filepath.Dir(to), 0o755); err == nil {
					err = os.WriteFile(to, raw, info.Mode().Perm())
				}
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	})
}
