package repository

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/cli/commands"
)

const (
	repository   = "../../.."
	commandPages = repository + "/docs/commands"
)

// TestDocumentCommands keeps a page for each command equal to its help.
func TestDocumentCommands(t *testing.T) {
	root := commands.Root()
	pages := map[string]string{}
	var index strings.Builder
	index.WriteString("# Commands\n\nA page for each command: its `--help`. Exit codes of all: 0 done, 1 failed, 2 usage, 3 invalid\nresult, 4 target unreachable, 5 condition missed, 130 interrupted.\n")
	listed := func(c *cobra.Command) {
		fmt.Fprintf(&index, "- [`%s`](%s.md): %s\n", c.Name(), c.Name(), c.Short)
		pages[c.Name()+".md"] = commandPage(t, c)
	}
	for _, g := range commands.Groups() {
		fmt.Fprintf(&index, "\n## %s\n\n", strings.TrimSuffix(g.Title, ":"))
		for _, name := range g.Commands {
			listed(cli.Child(root, name))
		}
	}
	index.WriteString("\n## Also\n\n")
	listed(cli.Child(root, "environment"))
	pages["README.md"] = index.String()
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() && c.Name() != "help" && pages[c.Name()+".md"] == "" {
			t.Errorf("%s is in no group of the help", c.CommandPath())
		}
	}
	if *update {
		if err := os.MkdirAll(commandPages, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range pages {
		File(t, filepath.Join(commandPages, name), want, writes, *update)
	}
	files, err := os.ReadDir(commandPages)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if pages[f.Name()] != "" {
			continue
		}
		path := filepath.Join(commandPages, f.Name())
		if !*update {
			t.Errorf("%s is a page of no command", path)
		} else if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// commandPage is the help of a command and of those below it.
func commandPage(t *testing.T, c *cobra.Command) string {
	t.Helper()
	var b strings.Builder
	var write func(c *cobra.Command, level string)
	write = func(c *cobra.Command, level string) {
		var help bytes.Buffer
		c.SetOut(&help)
		if err := c.Help(); err != nil {
			t.Fatal(err)
		}
		title := c.CommandPath()
		if c.IsAdditionalHelpTopicCommand() {
			title = c.Short
		}
		fmt.Fprintf(&b, "%s %s\n\n```text\n", level, title)
		for line := range strings.Lines(help.String()) {
			b.WriteString(strings.TrimRight(line, " \n") + "\n")
		}
		b.WriteString("```\n")
		for _, s := range c.Commands() {
			if s.IsAvailableCommand() && s.Name() != "help" {
				b.WriteByte('\n')
				write(s, "##")
			}
		}
	}
	write(c, "#")
	b.WriteString("\nAll commands: [README.md](README.md). Every document: [../README.md](../README.md).\n")
	return b.String()
}

var (
	fences  = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	code    = regexp.MustCompile("`[^`\n]+`")
	links   = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#{1,6} +(.+)$`)
	unnamed = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are the names that GitHub gives the headings of a document.
func anchors(doc string) map[string]bool {
	names := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fences.ReplaceAllString(doc, ""), -1) {
		text := links.ReplaceAllString(m[1], "]")
		base := strings.ReplaceAll(unnamed.ReplaceAllString(strings.ToLower(text), ""), " ", "-")
		name := base
		for i := 1; names[name]; i++ {
			name = fmt.Sprintf("%s-%d", base, i)
		}
		names[name] = true
	}
	return names
}

// markdown is the text of the repository's Markdown files, by path.
func markdown(t *testing.T) map[string]string {
	t.Helper()
	docs := map[string]string{}
	eachFile(t, ".md", func(rel string) {
		path := filepath.Join(repository, rel)
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		docs[path] = string(raw)
	})
	if len(docs) < 20 {
		t.Fatalf("found only %d documents", len(docs))
	}
	return docs
}

// TestDocumentTables: every row of a table has the cells of its head; of what is more,
// readers see nothing.
func TestDocumentTables(t *testing.T) {
	tables := 0
	for path, doc := range markdown(t) {
		cells := 0 // of the table that the line before is in
		for line := range strings.Lines(fences.ReplaceAllString(doc, "")) {
			line = strings.TrimSpace(line)
			if !strings.HasPrefix(line, "|") {
				cells = 0
				continue
			}
			n := strings.Count(strings.ReplaceAll(line, `\|`, ""), "|")
			if cells == 0 {
				cells = n
				tables++
			}
			if n != cells {
				t.Errorf("%s: a row of %d cells in a table of %d: %s", path, n-1, cells-1, line)
			}
		}
	}
	if tables < 100 {
		t.Errorf("found only %d tables", tables)
	}
}

// TestDocumentLinks finds what every link of every document points to, and every
// document in the list of them, which README.md links to.
func TestDocumentLinks(t *testing.T) {
	docs := markdown(t)
	linked := map[string]map[string]bool{}
	for path, doc := range docs {
		linked[path] = map[string]bool{}
		for _, m := range links.FindAllStringSubmatch(code.ReplaceAllString(fences.ReplaceAllString(doc, ""), ""), -1) {
			if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
				continue // other people's pages come and go; tests ask nobody
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			linked[path][target] = true
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s, which does not exist", path, m[1])
			} else if anchor != "" && strings.HasSuffix(target, ".md") && !anchors(docs[target])[anchor] {
				t.Errorf("%s links to %s, and %s has no such heading", path, m[1], target)
			}
		}
	}
	index := filepath.Join(repository, "docs/README.md")
	for path := range docs {
		rel, err := filepath.Rel(repository, path)
		if err != nil {
			t.Fatal(err)
		}
		list := map[string]bool{"docs": true, "docs/adr": true, ".": true}
		if !list[filepath.Dir(rel)] && rel != "docs/commands/README.md" || rel == "docs/README.md" {
			continue
		}
		if !linked[index][path] {
			t.Errorf("docs/README.md does not list %s", rel)
		}
	}
	if !linked[filepath.Join(repository, "README.md")][index] {
		t.Error("README.md does not link to docs/README.md")
	}
}
