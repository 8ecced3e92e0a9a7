package repository

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// avoided are the words that texts of dynctl do without, each with what to write instead.
// They are those whose meaning needs no reader; "says" and "told" of people are fine.
var avoided = []struct {
	word    *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`(?i)\b(nobody|somebody|whoever|no one)\b`), "no worker, the client, another replica"},
	{regexp.MustCompile(`(?i)\bmend(s|ed|ing)?\b`), "fix"},
	{regexp.MustCompile(`(?i)\b(besides|anew|of late)\b`), "also, again, recently"},
	{regexp.MustCompile(`(?i)\bat once\b`), "immediately, or at a time"},
	{regexp.MustCompile(`(?i)\bby (itself|themselves)\b`), "automatically, or alone"},
	{regexp.MustCompile(`(?i)\b(of|for) wh(ich|om)\b`), "a new sentence"},
	{regexp.MustCompile(`(?i)\b((may|can|could) be|is) had\b`), "is available"},
	{regexp.MustCompile(`(?i)\bwhat (comes|came|became|becomes) of\b`), "outcome, result"},
	{regexp.MustCompile(`(?i)\bas (it|they) stands?\b`), "the value"},
	{regexp.MustCompile(`(?i)\bso (many|much)\b`), "the value, or how many"},
	{regexp.MustCompile(`(?i)\b(go|goes|gone|going|went) on\b`), "continue"},
	{regexp.MustCompile(`(?i)\b(is|are|was|were|be|been) (told|asked)\b|\btells\b`), "reports, publishes; requests, queries"},
	{regexp.MustCompile(`(?i)\b(there (is|are|was|were) none|none of them|(is|are) none of)\b`), "no X, X is missing"},
	{regexp.MustCompile(`(?i)\b(teacher|witness|acquit|excuse)(s|ed|es|ted)?\b`), "training sample, reference client, what it does"},
}

// mostWords is the greatest length of a sentence.
const mostWords = 35

var (
	hidden   = regexp.MustCompile(`(?s)<!--.*?-->`)
	indented = regexp.MustCompile(`(?m)^(?: {4,}|\t)[^\n]*$`)
	target   = regexp.MustCompile(`\]\([^)]*\)`)
	parts    = regexp.MustCompile(`\n\s*\n|\n\s*(?:[-*] |\d+\. |\||#)|\|`)
	ends     = regexp.MustCompile(`[.!?:]["')*]*\s+`)
	row      = regexp.MustCompile(`(?m)^\s*\|.*$`)
	aside    = regexp.MustCompile(`\([^()]*\)`)
	inHelp   = regexp.MustCompile("\n {2,}|```")
	counted  = regexp.MustCompile(`[\pL\d][\pL\d'’.,/_-]*`)
)

// findings are the avoided words and the long sentences of a text in Markdown, or of a
// comment. What stands in code, and paragraphs with the mark "<!-- words: REASON -->", count
// for nothing. A note in brackets is no part of the sentence around it, and a semicolon ends
// one in a table.
func findings(text string) (found []string) {
	text = code.ReplaceAllString(indented.ReplaceAllString(fences.ReplaceAllString(text, ""), ""), "")
	text = row.ReplaceAllStringFunc(text, func(line string) string { return strings.ReplaceAll(line, "; ", ". ") })
	for _, part := range parts.Split(text, -1) {
		if strings.Contains(part, "<!-- words: ") {
			continue
		}
		part = strings.Join(strings.Fields(target.ReplaceAllString(hidden.ReplaceAllString(part, ""), "]")), " ")
		for _, a := range avoided {
			if w := a.word.FindString(part); w != "" {
				found = append(found, fmt.Sprintf("%q, instead: %s: %s", w, a.instead, part))
			}
		}
		for _, sentence := range ends.Split(aside.ReplaceAllString(part, ""), -1) {
			if n := len(counted.FindAllString(sentence, -1)); n > mostWords {
				found = append(found, fmt.Sprintf("a sentence of %d words: %s", n, sentence))
			}
		}
	}
	return found
}

// TestDocumentWords: documents, the help of all commands, the texts of metrics, and the
// comments of what packages export are in plain words and short sentences. What was measured
// and decided, in docs/lab and docs/adr, is left as it was written.
func TestDocumentWords(t *testing.T) {
	t.Parallel()
	found := map[string][]string{}
	see := func(name, text string) {
		if list := findings(text); len(list) > 0 {
			found[name] = append(found[name], list...)
		}
	}
	eachDocument(t, func(path, text string) {
		if strings.HasPrefix(path, "docs/lab/") || strings.HasPrefix(path, "docs/adr/") || strings.Contains(path, "testdata/") {
			return
		}
		if strings.HasPrefix(path, "docs/commands/") { // help, which stands in code
			text = inHelp.ReplaceAllString(strings.ReplaceAll(text, "; ", ". "), "\n\n")
		}
		see(path, text)
	})
	eachFile(t, ".go", func(path string) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(repository, path), nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range exportedComments(f) {
			see(filepath.ToSlash(filepath.Dir(path)), text)
		}
	})
	for _, name := range slices.Sorted(maps.Keys(found)) {
		slices.Sort(found[name])
		t.Errorf("%s:\n%s", name, strings.Join(found[name], "\n"))
	}
}

// generated is a part of a document that a test writes.
var generated = regexp.MustCompile(`(?s)<!-- [\w ]+: written by .*?<!-- end of `)

// TestDocumentLengths: what people have to read stays short. What was measured and decided
// (docs/lab, docs/adr), generated parts and blocks of code do not count.
func TestDocumentLengths(t *testing.T) {
	t.Parallel()
	total := 0
	eachDocument(t, func(path, text string) {
		lines := strings.Split(text, "\n")
		switch path {
		case "README.md":
			first := strings.Join(lines[:min(len(lines), 25)], "\n")
			for _, command := range []string{"\ngo run ./cmd/dynctl serve --sim 2p2d\n", "\ngo test ./...\n"} {
				if !strings.Contains(first, command) {
					t.Errorf("the first 25 lines of %s lack %q", path, command)
				}
			}
		case "CONTRIBUTING.md":
			if len(lines) > 200 {
				t.Errorf("%s has %d lines, more than 200", path, len(lines))
			}
		}
		if !regexp.MustCompile(`^docs/(lab|adr|commands)/|testdata/`).MatchString(path) {
			total += len(strings.Fields(fences.ReplaceAllString(generated.ReplaceAllString(text, ""), "")))
		}
	})
	if total > 55_000 {
		t.Errorf("the documents have %d words, more than 55,000", total)
	}
	t.Log(total, "words")
}

// oldWords are those that no public name has any more: of what programs report, ask, blame or
// believe. The constants teach_every and teach_within are of recordings.
var oldWords = regexp.MustCompile(`(^|[_.-])(told|tells|said|says|ask|asks|asked|blame|blamed|excuse|excused|acquit|acquitted|nobody|whoever|mend|besides|teacher|teaches|witness|voice|laws|odd|doubt|doubted|disbelieved|spared|stray|rests|seam|onto|judged|solved|at_once|on_trust|silent_tried|worker_held|worker_released)([_.-]|$)`)

// TestPublicNames: no name that programs may depend on has an old word: members of JSON and
// YAML, settings, flags, metrics, events, error codes and reasons. Those of the APIs of others
// are theirs.
func TestPublicNames(t *testing.T) {
	t.Parallel()
	named := regexp.MustCompile("(?:json|yaml):\"([a-z0-9_.]+)|\"([a-z]+(?:[_.-][a-z0-9]+)+)\"")
	seen := 0
	eachFile(t, ".go", func(path string) {
		if !strings.HasPrefix(path, "internal/") || strings.HasPrefix(path, "internal/rig/") || strings.HasSuffix(path, "_test.go") {
			return
		}
		raw, err := os.ReadFile(filepath.Join(repository, path))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllStringSubmatch(string(raw), -1) {
			seen++
			if name := m[1] + m[2]; oldWords.MatchString(name) {
				t.Errorf("%s: the name %s has an old word", path, name)
			}
		}
	})
	if seen < 1000 {
		t.Errorf("saw only %d names", seen)
	}
}

// exportedComments are the comments of a file's package and of what it exports.
func exportedComments(f *ast.File) (out []string) {
	add := func(name string, docs ...*ast.CommentGroup) {
		for _, d := range docs {
			if ast.IsExported(name) && d != nil {
				out = append(out, d.Text())
			}
		}
	}
	add("Package", f.Doc)
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil || ast.IsExported(receiver(d.Recv.List[0].Type)) {
				add(d.Name.Name, d.Doc)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					add(s.Name.Name, d.Doc, s.Doc)
					if st, ok := s.Type.(*ast.StructType); ok && ast.IsExported(s.Name.Name) {
						for _, field := range st.Fields.List {
							for _, n := range field.Names {
								add(n.Name, field.Doc, field.Comment)
							}
						}
					}
				case *ast.ValueSpec:
					for _, n := range s.Names {
						add(n.Name, s.Doc, s.Comment)
					}
				}
			}
		}
	}
	return out
}
