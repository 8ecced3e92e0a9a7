package main

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/dynctl/dynctl/"

// allowed says which packages of this module a package may import. A name that
// ends in "/..." stands for everything below it. Data flows one way: cmd → cli →
// {tui, bench, router, workers}; router → its stages → workers; the stages do
// not know each other except where stated here.
var allowed = map[string][]string{
	"cmd/dynctl":         {"internal/cli", "internal/cli/...", "internal/router/observe/admin", "internal/router/observe/trace"},
	"e2e":                {"internal/router/observe/admin", "internal/router/observe/receipt"},
	"benchmarks/kvindex": {"internal/router/cache/kvindex", "internal/router/cache/blockhash"},

	// Any package may import them.
	"internal/positive":  {},
	"internal/printable": {},
	"internal/wait":      {},

	// Whoever reports what happens to the fleet or the router.
	"internal/eventlog": {},

	// Whoever reads files that change.
	"internal/watchfile": {},

	// What commands share, and the commands.
	"internal/cli":            {"internal/certs", "internal/router/observe/admin", "internal/settings", "internal/settings/load", "internal/table", "internal/workers"},
	"internal/cli/topcmd":     {"internal/cli", "internal/loopback", "internal/router/observe/admin", "internal/settings", "internal/tui", "internal/tui/...", "internal/workers", "internal/workers/sim", "internal/workers/sim/fault"},
	"internal/cli/workerscmd": {"internal/cli", "internal/router/observe/admin", "internal/workers"},
	"internal/cli/explaincmd": {"internal/cli", "internal/router/observe/admin", "internal/router/observe/receipt"},
	"internal/cli/simcmd":     {"internal/cli", "internal/workers", "internal/workers/sim"},
	"internal/cli/keyscmd":    {"internal/cli", "internal/router/request/access", "internal/router/request/admission"},
	"internal/cli/replaycmd":  {"internal/cli", "internal/cli/topcmd", "internal/replay", "internal/replay/arrivals", "internal/replay/simulate", "internal/router", "internal/router/observe/adminserver", "internal/router/observe/trace", "internal/router/observe/trace/tracefile", "internal/router/placement/decide", "internal/router/placement/selector", "internal/router/request/admission", "internal/settings", "internal/table", "internal/workers/sim"},
	"internal/cli/recordcmd":  {"internal/eventlog", "internal/cli", "internal/router", "internal/router/cache/kvfeed", "internal/router/cache/kvindex", "internal/router/observe/admin", "internal/router/observe/trace", "internal/router/observe/trace/recorder", "internal/settings", "internal/workers"},
	"internal/cli/servecmd":   {"internal/cli", "internal/cli/recordcmd", "internal/router", "internal/router/observe/telemetry", "internal/settings", "internal/settings/load", "internal/wait", "internal/workers", "internal/workers/sim"},
	"internal/cli/configcmd":  {"internal/cli", "internal/cli/servecmd", "internal/settings"},
	"internal/cli/target":     {"internal/bench/fleet", "internal/cli", "internal/loopback", "internal/router", "internal/router/observe/admin", "internal/settings", "internal/wait", "internal/workers", "internal/workers/sim"},
	"internal/cli/benchcmd":   {"internal/bench/...", "internal/cli", "internal/cli/target", "internal/router/observe/admin", "internal/settings", "internal/wait"},
	"internal/cli/doctorcmd":  {"internal/cli", "internal/cli/target", "internal/doctor", "internal/settings"},

	// Only tests import them.
	"internal/rig/clitest":     {"internal/cli", "internal/loopback"},
	"internal/rig/certtest":    {},
	"internal/rig/fakeengine":  {"internal/eventlog", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/health"},
	"internal/rig/hostile":     {},
	"internal/rig/kvmodel":     {"internal/router/cache/blockhash", "internal/router/cache/kvevent", "internal/router/cache/kvindex"},
	"internal/rig/property":    {},
	"internal/rig/publictrace": {},
	"internal/rig/python":      {},

	"internal/workers":           {"internal/eventlog"},
	"internal/workers/discovery": {"internal/eventlog", "internal/workers", "internal/watchfile"},
	"internal/workers/health":    {"internal/eventlog", "internal/workers", "internal/workers/samples"},
	"internal/workers/kube":      {"internal/eventlog", "internal/workers"},
	"internal/workers/samples":   {},
	"internal/workers/sim":       {"internal/workers", "internal/workers/samples", "internal/workers/sim/...", "internal/router/cache/zmtp", "internal/router/cache/kvevent", "internal/router/cache/blockhash", "internal/router/request/api"},
	"internal/workers/sim/...":   {"internal/workers", "internal/workers/samples", "internal/workers/sim/...", "internal/router/cache/zmtp", "internal/router/cache/kvevent", "internal/router/cache/blockhash", "internal/router/request/api"},

	// The table of settings; how they are read.
	"internal/settings":      {"internal/router/placement/cost", "internal/router/placement/decide", "internal/router/placement/selector", "internal/workers"},
	"internal/settings/load": {"internal/settings", "internal/router/forward/disagg", "internal/workers", "internal/workers/sim"},

	"internal/router": {"internal/eventlog", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/discovery", "internal/workers/health", "internal/workers/kube"},

	"internal/router/serving":             {"internal/router/effective", "internal/router/forward/...", "internal/router/observe/account", "internal/router/observe/telemetry", "internal/router/observe/traffic", "internal/router/observe/watch", "internal/router/placement/...", "internal/router/request/admission", "internal/router/request/api", "internal/router/request/stored", "internal/workers", "internal/workers/health"},
	"internal/router/serving/resumed":     {"internal/router/forward/resume", "internal/router/forward/upstream", "internal/router/observe/telemetry", "internal/router/placement/attempt", "internal/router/placement/decide", "internal/router/placement/question", "internal/router/request/access", "internal/router/request/admission", "internal/router/request/api", "internal/router/request/prompt", "internal/router/serving", "internal/workers"},
	"internal/router/effective":           {"internal/router/forward/disagg", "internal/eventlog", "internal/router/placement/decide", "internal/router/placement/selector", "internal/settings", "internal/workers"},
	"internal/router/drain":               {"internal/router/observe/admin", "internal/eventlog", "internal/router/request/admission"},
	"internal/router/secure":              {"internal/certs", "internal/router/forward/quicksock", "internal/router/observe/admin", "internal/eventlog", "internal/router/observe/state", "internal/router/observe/telemetry", "internal/router/request/access", "internal/router/request/admission", "internal/settings"},
	"internal/router/request/access":      {"internal/router/request/admission", "internal/router/request/api", "internal/workers", "internal/eventlog", "internal/watchfile"},
	"internal/router/observe/account":     {"internal/router/forward/disagg", "internal/router/forward/sse", "internal/router/forward/upstream", "internal/eventlog", "internal/router/observe/pace", "internal/router/observe/receipt", "internal/router/observe/telemetry", "internal/router/observe/trace", "internal/router/observe/traffic", "internal/router/observe/watch", "internal/router/placement/attempt", "internal/router/placement/decide", "internal/router/placement/decision", "internal/router/placement/outcome", "internal/router/placement/question", "internal/router/placement/selector", "internal/router/request/api", "internal/workers"},
	"internal/router/observe/admin":       {"internal/router/placement/decision", "internal/eventlog"},
	"internal/router/observe/adminserver": {"internal/router/request/access", "internal/router/observe/admin", "internal/router/request/admission", "internal/router/request/api", "internal/router/placement/decision", "internal/eventlog", "internal/router/cache/kvindex", "internal/router/observe/receipt", "internal/workers"},
	"internal/router/request/admission":   {"internal/router/request/api"},
	"internal/router/request/api":         {"internal/rawjson"},
	"internal/router/request/models":      {"internal/router/request/api", "internal/workers"},
	"internal/router/request/stored":      {},
	"internal/router/cache/approx":        {"internal/router/cache/kvindex", "internal/router/cache/blockhash"},
	"internal/router/placement/attempt":   {"internal/router/placement/decision", "internal/router/placement/selector", "internal/router/request/api", "internal/workers", "internal/workers/health"},
	"internal/router/cache/blockhash":     {},
	"internal/router/observe/cause":       {},
	"internal/certs":                      {"internal/eventlog", "internal/watchfile"},
	"internal/router/placement/cost":      {},
	"internal/router/placement/decision":  {},
	"internal/router/placement/decide":    {"internal/router/request/api", "internal/router/placement/attempt", "internal/router/placement/cost", "internal/router/placement/decision", "internal/router/forward/disagg", "internal/router/placement/ledger", "internal/router/placement/selector", "internal/workers"},
	"internal/router/forward/disagg":      {"internal/router/request/api", "internal/workers"},
	"internal/router/observe/console":     {"internal/router/cache/follower", "internal/router/cache/kvindex", "internal/router/drain", "internal/router/effective", "internal/router/observe/admin", "internal/router/observe/adminserver", "internal/router/observe/cause", "internal/eventlog", "internal/router/observe/pace", "internal/router/observe/receipt", "internal/router/observe/state", "internal/router/observe/watch", "internal/router/placement/cost", "internal/router/request/admission", "internal/router/request/api", "internal/router/request/prompt", "internal/router/secure", "internal/settings", "internal/workers", "internal/workers/kube"},
	"internal/router/cache/follower":      {"internal/router/cache/approx", "internal/eventlog", "internal/router/cache/kvfeed", "internal/router/cache/kvstream", "internal/router/cache/kvgroup", "internal/router/cache/kvindex", "internal/router/placement/ledger", "internal/workers"},
	"internal/router/cache/kvevent":       {},
	"internal/router/cache/kvfeed":        {"internal/eventlog", "internal/router/cache/zmtp", "internal/router/cache/kvevent", "internal/router/cache/kvstream", "internal/router/placement/decision", "internal/router/cache/kvgroup", "internal/router/cache/kvindex", "internal/router/cache/kvtier", "internal/workers"},
	"internal/router/cache/kvstream":      {"internal/router/cache/kvevent", "internal/router/cache/blockhash", "internal/router/placement/decision", "internal/router/cache/kvgroup", "internal/router/cache/kvindex", "internal/router/cache/kvtier"},
	"internal/router/cache/kvgroup":       {"internal/router/cache/blockhash", "internal/router/cache/kvevent"},
	"internal/router/cache/kvtier":        {"internal/router/placement/decision", "internal/router/cache/kvevent"},
	"internal/router/cache/kvindex":       {"internal/router/cache/blockhash", "internal/router/cache/kvindex/..."},
	"internal/router/placement/outcome":   {"internal/eventlog", "internal/router/observe/watch", "internal/router/placement/cost", "internal/router/placement/decide", "internal/router/placement/ledger", "internal/router/placement/selector", "internal/workers"},
	"internal/router/placement/question":  {"internal/router/cache/approx", "internal/router/cache/blockhash", "internal/router/cache/kvgroup", "internal/router/cache/kvindex", "internal/router/effective", "internal/router/forward/disagg", "internal/router/placement/cost", "internal/router/placement/decide", "internal/router/placement/decision", "internal/router/placement/ledger", "internal/router/placement/selector", "internal/router/request/admission", "internal/router/request/api", "internal/router/request/prompt", "internal/router/request/stored", "internal/workers"},
	"internal/router/placement/ledger":    {"internal/workers"},
	"internal/router/observe/pace":        {"internal/router/observe/traffic"},
	"internal/router/request/prompt":      {"internal/router/request/api", "internal/router/forward/disagg", "internal/eventlog", "internal/router/request/tokenize", "internal/workers"},
	"internal/rawjson":                    {},
	"internal/router/observe/receipt":     {"internal/router/placement/decision", "internal/router/placement/selector", "internal/table"},
	"internal/router/forward/resume":      {"internal/router/request/api", "internal/rawjson", "internal/workers"},
	"internal/router/forward/pair":        {},
	"internal/router/placement/selector":  {"internal/router/placement/decision"},
	"internal/router/forward/rewrite":     {"internal/router/effective", "internal/router/forward/disagg", "internal/router/forward/upstream", "internal/router/request/api", "internal/workers"},
	"internal/router/forward/sse":         {"internal/rawjson"},
	"internal/router/observe/state":       {"internal/router/observe/admin", "internal/router/request/admission", "internal/router/cache/approx", "internal/router/observe/cause", "internal/router/cache/kvfeed", "internal/router/cache/kvgroup", "internal/router/cache/kvindex", "internal/router/placement/ledger", "internal/router/observe/pace", "internal/router/observe/traffic", "internal/workers"},
	"internal/router/observe/telemetry":   {},
	// The stand for tests, endurance runs and measurements.
	"internal/loopback":                 {"internal/router", "internal/router/observe/admin", "internal/router/observe/watch", "internal/settings", "internal/workers", "internal/workers/sim", "internal/workers/sim/port"},
	"internal/router/request/tokenize":  {"internal/rawjson", "internal/router/request/tokenize/..."},
	"internal/router/observe/trace":     {"internal/router/request/api", "internal/router/placement/attempt", "internal/router/placement/cost", "internal/router/placement/decide", "internal/router/placement/decision", "internal/router/forward/disagg", "internal/router/cache/kvevent", "internal/router/cache/kvgroup", "internal/router/observe/receipt", "internal/router/placement/selector", "internal/router/observe/trace/tracefile", "internal/workers"},
	"internal/router/observe/trace/...": {"internal/router/observe/trace", "internal/router/observe/trace/tracefile", "internal/router/observe/receipt"},
	"internal/router/forward/quicksock": {},
	"internal/router/observe/traffic":   {"internal/router/observe/admin"},
	"internal/router/observe/watch":     {"internal/router/cache/kvfeed", "internal/router/observe/admin", "internal/router/observe/cause", "internal/eventlog", "internal/router/observe/pace", "internal/workers"},
	"internal/router/forward/upstream":  {"internal/router/request/api", "internal/router/forward/quicksock"},
	"internal/router/cache/zmtp":        {},

	"internal/router/request/tokenize/...": {"internal/rawjson", "internal/router/request/tokenize/..."},
	"internal/router/cache/kvindex/...":    {},

	"internal/doctor":     {"internal/bench/fleet", "internal/bench/loadgen", "internal/bench/workload", "internal/table", "internal/router/...", "internal/workers"},
	"internal/replay":     {"internal/eventlog", "internal/bench/stats", "internal/replay/...", "internal/table", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/sim/..."},
	"internal/replay/...": {"internal/bench/stats", "internal/replay/...", "internal/table", "internal/router/...", "internal/workers", "internal/workers/sim", "internal/workers/sim/..."},

	"internal/rig/indexcheck":  {"internal/loopback"},
	"internal/rig/conformance": {"internal/workers", "internal/workers/samples", "internal/workers/sim", "internal/workers/sim/...", "internal/router/cache/...", "internal/router/request/api"},
	// The endurance run drives a whole router, and nothing but a test asks for it.
	"internal/rig/soak": {"internal/bench/...", "internal/rig/indexcheck", "internal/loopback", "internal/table", "internal/router", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/samples", "internal/workers/sim", "internal/workers/sim/..."},
	// Its virtual form ejects workers as the router does.
	"internal/rig/virtualsoak":           {"internal/eventlog", "internal/rig/virtualsoak/...", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/health", "internal/workers/sim", "internal/workers/sim/..."},
	"internal/rig/virtualsoak/voice":     {"internal/router/request/api", "internal/workers/sim/..."},
	"internal/rig/virtualsoak/reference": {"internal/workers/sim", "internal/workers/sim/..."},
	"internal/bench":                     {"internal/bench/...", "internal/table", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/samples", "internal/workers/sim", "internal/workers/sim/..."},
	"internal/bench/...":                 {"internal/bench/...", "internal/table", "internal/router/...", "internal/settings", "internal/workers", "internal/workers/samples", "internal/workers/sim", "internal/workers/sim/..."},
	"internal/table":                     {},
	"internal/tui":                       {"internal/tui/...", "internal/router/observe/admin", "internal/router/placement/decision", "internal/router/observe/receipt"},
	"internal/tui/...":                   {"internal/tui/...", "internal/router/observe/admin", "internal/router/placement/decision", "internal/router/observe/receipt"},
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
	const rig = "internal/rig/" // what only tests use
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
			if strings.HasPrefix(i, module+rig) && !strings.HasPrefix(path, rig) {
				t.Errorf("%s must not import %s: only tests may", path, i)
			}
			if i, ours := strings.CutPrefix(i, module); ours && i != path && i != "internal/positive" && i != "internal/printable" && i != "internal/rawjson" && i != "internal/wait" && !slices.ContainsFunc(rules, func(r string) bool { return matches(r, i) }) {
				t.Errorf("%s must not import %s", path, i)
			}
		}
		for i, may := range map[string][]string{
			"github.com/spf13/viper":            {"internal/settings/load"},
			"github.com/spf13/pflag":            {"internal/settings/load", "internal/cli", "internal/cli/servecmd"},
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

// TestContinuationInOnePlace: that streams may be continued elsewhere (continue.mode) is known
// to serving/resumed and forward/resume. The root package of the router names them where it
// composes what answers calls, and serving not at all.
func TestContinuationInOnePlace(t *testing.T) {
	names := regexp.MustCompile(`(?i)contin|resum`)
	for _, dir := range []string{"internal/router", "internal/router/serving"} {
		files, err := filepath.Glob(filepath.Join("..", "..", dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatal(dir, err)
		}
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.FuncDecl:
					return n.Name.Name != "newServed"
				case *ast.ImportSpec:
					if names.MatchString(n.Path.Value) && filepath.Base(path) != "setup.go" {
						t.Errorf("%s imports %s", set.Position(n.Pos()), n.Path.Value)
					}
					return false
				case *ast.Ident:
					if names.MatchString(n.Name) {
						t.Errorf("%s names %s", set.Position(n.Pos()), n.Name)
					}
				}
				return true
			})
		}
	}
}
