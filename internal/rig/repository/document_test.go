package repository

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli/commands"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
)

var update = flag.Bool("update", false, "write generated documents and golden files")

const configurationDoc = repository + "/docs/configuration.md"

// TestDocumentSettings keeps the table of settings in the documentation equal
// to the settings.
func TestDocumentSettings(t *testing.T) {
	var b strings.Builder
	b.WriteString("\n| key | flag | default | meaning |\n|---|---|---|---|\n")
	defaults := settings.Default()
	for _, r := range settings.Rows() {
		if r.Flag == "" {
			continue
		}
		meaning := strings.ReplaceAll(strings.ReplaceAll(r.Help, "`", ""), "|", ", ")
		if r.Fixed {
			meaning += "; *restart to change*"
		}
		fmt.Fprintf(&b, "| `%s` | `--%s` | `%s` | %s |\n", r.Key, r.Flag, commands.YAML(r.Get(&defaults)), meaning)
	}
	b.WriteString("\n")
	Document(t, configurationDoc, "settings", b.String(), writes, *update)
}

// TestDocumentSessions keeps the list of session ids equal to the source's.
func TestDocumentSessions(t *testing.T) {
	var b strings.Builder
	b.WriteString("\n| order | where | sent by |\n|---|---|---|\n| 1 | header of `routing.session_header` (`X-Session-ID`) | |\n")
	n := 2
	row := regexp.MustCompile(`\{(Header|Field): "([^"]+)", Clients: "([^"]+)"\}`)
	for _, m := range row.FindAllStringSubmatch(source(t, "placement/routing/session.go"), -1) {
		where := map[string]string{"Header": "header", "Field": "body field"}[m[1]]
		fmt.Fprintf(&b, "| %d | %s `%s` | %s |\n", n, where, m[2], m[3])
		n++
	}
	fmt.Fprintf(&b, "| %d | body field of `routing.session_field` (`user`) | |\n\n", n)
	Document(t, configurationDoc, "sessions", b.String(), writes, *update)
}

// TestDocumentMetrics keeps the table of metrics equal to what the source
// registers.
func TestDocumentMetrics(t *testing.T) {
	declared := regexp.MustCompile(`(counter|histogram|desc)\("([a-z_]+)", "([^"]+)"([^)\n]*)\)`)
	label := regexp.MustCompile(`"([a-z_]+)"`)
	var b strings.Builder
	b.WriteString("\n| metric | labels | meaning |\n|---|---|---|\n")
	rows := []string{"| `dynctl_build_info` | `version`, `revision`, `go` | The version that runs; the value is 1. |\n"}
	for _, file := range []string{"observe/telemetry/metrics.go", "control/collector.go"} {
		for _, m := range declared.FindAllStringSubmatch(source(t, file), -1) {
			var labels []string
			for _, l := range label.FindAllString(m[4], -1) {
				labels = append(labels, "`"+strings.Trim(l, `"`)+"`")
			}
			if strings.Contains(m[4], "rankLabels") {
				labels = []string{"`worker`", "`dp_rank`"}
			}
			rows = append(rows, fmt.Sprintf("| `dynctl_%s` | %s | %s |\n", m[2], strings.Join(labels, ", "), m[3]))
		}
	}
	if len(rows) < 40 {
		t.Fatalf("found only %d metrics in the source", len(rows))
	}
	slices.Sort(rows)
	b.WriteString(strings.Join(slices.Compact(rows), "") + "\n")
	Document(t, configurationDoc, "metrics", b.String(), writes, *update)
}

// TestDocumentNames compares names in the documentation with those in the
// source, both ways: admin paths, kinds of events, error codes, headers, policies.
func TestDocumentNames(t *testing.T) {
	raw, err := os.ReadFile(configurationDoc)
	if err != nil {
		t.Fatal(err)
	}
	doc := string(raw)
	section := func(title string) string {
		_, rest, ok := strings.Cut(doc, "\n## "+title+"\n")
		if !ok {
			t.Fatalf("no section %q", title)
		}
		text, _, _ := strings.Cut(rest, "\n## ")
		return text
	}
	find := func(text, pattern string) (found []string) {
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			found = append(found, m[1])
		}
		slices.Sort(found)
		return slices.Compact(found)
	}
	compare := func(what string, doc, code []string) {
		if len(code) == 0 {
			t.Errorf("%s: found none in the source", what)
		}
		for _, c := range code {
			if !slices.Contains(doc, c) {
				t.Errorf("%s %q is not in the documentation", what, c)
			}
		}
		for _, d := range doc {
			if !slices.Contains(code, d) {
				t.Errorf("%s %q is documented and does not exist", what, d)
			}
		}
	}

	compare("admin request", find(section("Admin API"), "`((?:GET|POST|DELETE) /admin/v1/[^`]+)`"),
		find(source(t, "observe/adminserver")+source(t, "control"), `"((?:GET|POST|DELETE) /admin/v1/[^"]+)"`))

	var kinds []string
	for _, dir := range []string{".", "request/access", "control", "../settings/effective", "observe/adminserver", "../certs", "cache/follower", "cache/kvfeed", "request/prompt", "placement/siblings", "observe/lifecycle", "observe/watch", "observe/outcome", "../workers", "../workers/health", "../workers/discovery", "../workers/kube"} {
		text := source(t, dir)
		kinds = append(kinds, find(text, `(?:Event\{|\t|, )Kind: "([a-z_.]*[a-z])"`)...)
		kinds = append(kinds, find(text, `\.Kind, [a-z]+\.Text = "([a-z_.]+)"`)...)
		kinds = append(kinds, find(text, `\.Severity, [a-z]+\.Kind, [a-z]+\.Text = [a-zA-Z.]+, "([a-z_.]+)"`)...)
		kinds = append(kinds, find(text, `emit\([a-zA-Z.]+, "([a-z_.]+)"`)...)
		for _, change := range find(text, `ChangeKind = "([a-z]+)"`) {
			kinds = append(kinds, "worker_"+change)
		}
	}
	var listed []string
	for line := range strings.Lines(section("Events")) {
		if cells := strings.Split(line, "|"); len(cells) > 2 {
			listed = append(listed, find(cells[1], "`([a-z_]+)`")...)
		}
	}
	compare("event", listed, kinds)

	var codes []string
	for line := range strings.Lines(section("Data plane")) {
		if cells := strings.Split(line, "|"); len(cells) > 3 {
			codes = append(codes, find(cells[2], "`([a-z_]+)`")...)
		}
	}
	compare("error code", codes, find(source(t, "request/api"), `\n\tCode[A-Za-z]+ +Code += "([a-z_]+)"`))
	front, err := os.ReadFile(filepath.Join(repository, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(front), "\n- Policies ")
	list, _, _ = strings.Cut(list, ", for both phases")
	var policies []string
	for _, p := range selector.Policies() {
		policies = append(policies, string(p))
	}
	compare("policy", find(list, "`([a-z_]+)`"), policies)
	compare("header", find(doc, `(X-Dynctl-[A-Za-z-]+)`), find(source(t, ".")+source(t, "request/api")+source(t, "request/admission")+source(t, "placement/routing")+source(t, "observe/lifecycle"), `"(X-Dynctl-[A-Za-z-]+)"`))
}

// source is the Go source of a file, or of the files of a folder, of the
// router; tests are left out.
func source(t *testing.T, name string) string {
	t.Helper()
	pattern := filepath.Join(repository, "internal/router", name)
	if !strings.HasSuffix(name, ".go") {
		pattern = filepath.Join(pattern, "*.go")
	}
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: no source (%v)", pattern, err)
	}
	var all strings.Builder
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(raw)
	}
	return all.String()
}

// writes is the command that writes the generated parts.
const writes = "go test ./internal/rig/repository -run Document -update"
