package main

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/dynctl/dynctl/"

// allowed says which packages of this module a package may import. A name that
// ends in "/..." stands for everything below it. Data flows one way: cmd →
// {tui, bench, router, workers}; router → its stages → workers; the stages do
// not know each other except where stated here.
var allowed = map[string][]string{
	"cmd/dynctl":       {"internal/..."},
	"e2e":              {"internal/router/admin", "internal/router/receipt"},
	"cmd/kvindexbench": {"internal/router/kvindex", "internal/router/blockhash"},

	// Any package may import them.
	"internal/positive": {},
	"internal/wait":     {},

	// Whoever reads files that change.
	"internal/watchfile": {},

	// Only tests import them.
	"internal/router/certs/certtest": {},
	"internal/property":              {},
	"internal/publictrace":           {},
	"internal/python":                {},

	"internal/workers":           {},
	"internal/workers/discovery": {"internal/workers", "internal/watchfile"},
	"internal/workers/health":    {"internal/workers", "internal/workers/samples"},
	"internal/workers/kube":      {"internal/workers"},
	"internal/workers/samples":   {},
	"internal/workers/sim":       {"internal/workers", "internal/workers/samples", "internal/workers/sim/...", "internal/router/zmtp", "internal/router/kvevent", "internal/router/blockhash", "internal/router/api"},
	"internal/workers/sim/...":   {"internal/workers", "internal/workers/samples", "internal/workers/sim/...", "internal/router/zmtp", "internal/router/kvevent", "internal/router/blockhash", "internal/router/api"},

	// The table of settings; how they are read.
	"internal/settings":      {"internal/router/cost", "internal/router/decide", "internal/router/selector", "internal/workers"},
	"internal/settings/load": {"internal/settings", "internal/router/disagg", "internal/workers", "internal/workers/sim"},

	"internal/router": {"internal/router/...", "internal/settings", "internal/workers", "internal/workers/discovery", "internal/workers/health", "internal/workers/kube"},

	"internal/router/access":      {"internal/router/admission", "internal/router/eventlog", "internal/watchfile"},
	"internal/router/admin":       {"internal/router/decision", "internal/router/eventlog"},
	"internal/router/adminserver": {"internal/router/access", "internal/router/admin", "internal/router/admission", "internal/router/api", "internal/router/decision", "internal/router/eventlog", "internal/router/kvindex", "internal/router/receipt", "internal/workers"},
	"internal/router/admission":   {},
	"internal/router/api":         {"internal/router/rawjson"},
	"internal/router/approx":      {"internal/router/kvindex", "internal/router/blockhash"},
	"internal/router/attempt":     {"internal/router/decision", "internal/router/selector", "internal/workers", "internal/workers/health"},
	"internal/router/blockhash":   {},
	"internal/router/cause":       {},
	"internal/router/certs":       {"internal/router/eventlog", "internal/watchfile"},
	"internal/router/cost":        {},
	"internal/router/decision":    {},
	"internal/router/decide":      {"internal/router/api", "internal/router/attempt", "internal/router/cost", "internal/router/decision", "internal/router/disagg", "internal/router/ledger", "internal/router/selector", "internal/workers"},
	"internal/router/disagg":      {"internal/router/api", "internal/workers"},
	"internal/router/eventlog":    {},
	"internal/router/follower":    {"internal/router/approx", "internal/router/eventlog", "internal/router/kvfeed", "internal/router/kvgroup", "internal/router/kvindex", "internal/router/ledger", "internal/workers"},
	"internal/router/kvevent":     {},
	"internal/router/kvfeed":      {"internal/router/zmtp", "internal/router/kvevent", "internal/router/blockhash", "internal/router/decision", "internal/router/kvgroup", "internal/router/kvindex", "internal/router/kvtier", "internal/workers"},
	"internal/router/kvgroup":     {"internal/router/blockhash", "internal/router/kvevent"},
	"internal/router/kvtier":      {"internal/router/decision", "internal/router/kvevent"},
	"internal/router/kvindex":     {"internal/router/blockhash", "internal/router/kvindex/..."},
	"internal/router/ledger":      {"internal/workers"},
	"internal/router/pace":        {"internal/router/traffic"},
	"internal/router/prompt":      {"internal/router/api", "internal/router/disagg", "internal/router/eventlog", "internal/router/tokenize", "internal/workers"},
	"internal/router/rawjson":     {},
	"internal/router/receipt":     {"internal/router/decision", "internal/router/selector", "internal/table"},
	"internal/router/resume":      {"internal/router/api", "internal/router/rawjson"},
	"internal/router/selector":    {"internal/router/decision"},
	"internal/router/sse":         {"internal/router/rawjson"},
	"internal/router/state":       {"internal/router/admin", "internal/router/admission", "internal/router/approx", "internal/router/cause", "internal/router/kvfeed", "internal/router/kvgroup", "internal/router/kvindex", "internal/router/ledger", "internal/router/pace", "internal/router/traffic", "internal/workers"},
	"internal/router/telemetry":   {},
	// The stand for tests, endurance runs and measurements.
	"internal/router/routertest": {"internal/router", "internal/router/admin", "internal/settings", "internal/workers", "internal/workers/sim", "internal/workers/sim/port"},
	"internal/router/tokenize":   {"internal/router/rawjson", "internal/router/tokenize/..."},
	"internal/router/trace":      {"internal/router/api", "internal/router/attempt", "internal/router/cost", "internal/router/decide", "internal/router/decision", "internal/router/disagg", "internal/router/kvevent", "internal/router/kvgroup", "internal/router/receipt", "internal/router/selector", "internal/workers"},
	"internal/router/trace/...":  {"internal/router/trace", "internal/router/receipt"},
	"internal/router/quicksock":  {},
	"internal/router/traffic":    {"internal/router/admin"},
	"internal/router/watch":      {"internal/router/cause", "internal/router/eventlog", "internal/router/pace", "internal/workers"},
	"internal/router/upstream":   {"internal/router/api", "internal/router/quicksock"},
	"internal/router/zmtp":       {},

	"internal/router/tokenize/...": {"internal/router/rawjson", "internal/router/tokenize/..."},
	"internal/router/kvindex/...":  {},

	// The endurance run drives a whole router, and nothing but a test asks for it.
	"internal/bench/soak": {"internal/bench/...", "internal/table", "internal/router", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/samples", "internal/workers/sim", "internal/workers/sim/..."},
	// Its virtual form ejects workers as the router does.
	"internal/bench/soak/play": {"internal/router/...", "internal/workers", "internal/workers/health", "internal/workers/sim", "internal/workers/sim/..."},
	"internal/bench":           {"internal/bench/...", "internal/table", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/samples", "internal/workers/sim", "internal/workers/sim/..."},
	"internal/bench/...":       {"internal/bench/...", "internal/table", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/samples", "internal/workers/sim", "internal/workers/sim/..."},
	"internal/table":           {},
	"internal/tui":             {"internal/tui/...", "internal/router/admin", "internal/router/decision", "internal/router/receipt"},
	"internal/tui/...":         {"internal/tui/...", "internal/router/admin", "internal/router/decision", "internal/router/receipt"},
}

// TestImportDirections keeps the picture of ARCHITECTURE.md true: a package
// that is not listed above, or an import that is not allowed, fails here.
func TestImportDirections(t *testing.T) {
	if testing.Short() {
		t.Skip("runs the go tool; .ci/run calls it by name")
	}
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", module+"...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	type pkg struct {
		ImportPath string
		Imports    []string
	}
	seen := 0
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var p pkg
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		path, ok := strings.CutPrefix(p.ImportPath, module)
		if !ok {
			continue
		}
		seen++
		rules, ok := rulesOf(path)
		if !ok {
			t.Errorf("%s has no import rule: add it to the table above and to ARCHITECTURE.md", path)
			continue
		}
		for _, i := range p.Imports {
			if i, ours := strings.CutPrefix(i, module); ours && i != path && i != "internal/positive" && i != "internal/wait" && !slices.ContainsFunc(rules, func(r string) bool { return matches(r, i) }) {
				t.Errorf("%s must not import %s", path, i)
			}
		}
		for i, may := range map[string][]string{
			"github.com/spf13/viper":            {"internal/settings/load"},
			"github.com/spf13/pflag":            {"internal/settings/load", "cmd/dynctl"},
			"github.com/olekukonko/tablewriter": {"internal/table"},
			"text/tabwriter":                    nil, // a second way to write tables
		} {
			if slices.Contains(p.Imports, i) && !slices.Contains(may, path) {
				t.Errorf("%s imports %s; only %v may", path, i, may)
			}
		}
	}
	if seen < 10 {
		t.Fatalf("saw only %d packages", seen)
	}
}

func rulesOf(path string) ([]string, bool) {
	if r, ok := allowed[path]; ok {
		return r, true
	}
	for dir := path; ; {
		i := strings.LastIndexByte(dir, '/')
		if i < 0 {
			return nil, false
		}
		dir = dir[:i]
		if r, ok := allowed[dir+"/..."]; ok {
			return r, true
		}
	}
}

func matches(rule, path string) bool {
	if base, ok := strings.CutSuffix(rule, "/..."); ok {
		return strings.HasPrefix(path, base+"/")
	}
	return rule == path
}
