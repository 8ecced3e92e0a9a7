package repository

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

// The rules of imports, which ARCHITECTURE.md explains. Tests are exempt.
//
//  1. Commands import anything but the rig.
//  2. A group of the router imports itself and the groups below it. Settings stand beside
//     placement. The router knows no simulated engines.
//  3. Workers import nothing of the router but its vocabulary.
//  4. What examines, measures, replays and shows a router reaches it through what is reached.
//  5. Only tests and the rig itself import the rig, which imports anything.
//  6. Tools import only tools.

// entries are commands, and the stand that demos and measurements start.
var entries = []string{"cmd", "internal/cli", "internal/loopback", "benchmarks", "e2e"}

// routerGroups are those of the router, from the top down.
var routerGroups = []string{"door", "control", "serving", "observe", "placement", "replicas", "forward", "cache", "request", "route"}

// outside are those who work with routers and recordings from outside.
var outside = []string{"internal/bench", "internal/doctor", "internal/replay", "internal/tui"}

// reached is what they may import of the router: its admin API (also served of a recording),
// receipts, recordings, and the pure stages with their data.
var reached = []string{
	"observe/admin", "observe/adminserver", "observe/pace", "observe/receipt", "observe/trace", "observe/traffic",
	"placement/affinity", "placement/attempt", "placement/cost", "placement/decide", "placement/decision", "placement/ledger", "placement/outputs", "placement/selector",
	"forward/disagg", "forward/sse",
	"cache/kvgroup", "cache/kvindex", "cache/kvstream", "cache/kvtier",
	"request/admission", "request/api",
	"route",
}

// tools know nothing of routing: formats, files, time, text.
var tools = []string{
	"internal/blockhash", "internal/certs", "internal/eventlog", "internal/kvevent", "internal/printable",
	"internal/quicksock", "internal/rawjson", "internal/table", "internal/wait", "internal/watchfile", "internal/zmtp",
}

// strict has packages that keep out more than their layer does, with all that they import
// of this module: what is computed from a body or from figures needs no fleet and no socket.
var strict = map[string][]string{
	"internal/router/request/api":        {"internal/rawjson", "internal/router/route"},
	"internal/router/request/admission":  {"internal/router/request/api"},
	"internal/router/placement/decision": {"internal/router/route"},
	"internal/router/placement/selector": {"internal/router/placement/cost", "internal/router/placement/decision", "internal/router/route"},
	"internal/router/placement/affinity": {"internal/router/placement/selector"},
	"internal/router/placement/cost":     {"internal/router/placement/decision"},
	"internal/router/forward/pair":       {},
	"internal/router/observe/cause":      {},
	"internal/router/observe/pace":       {"internal/router/observe/traffic"},
	"internal/router/replicas":           {},
	"internal/router/replicas/natsbus":   {"internal/router/replicas"},
	"internal/router/route":              {},
}

const (
	routerDir   = "internal/router"
	rigDir      = "internal/rig"
	settingsDir = "internal/settings"
	workersDir  = "internal/workers"
	simDir      = "internal/workers/sim"
)

// within reports whether a package is one of the folders or below one.
func within(path string, dirs ...string) bool {
	return slices.ContainsFunc(dirs, func(d string) bool { return path == d || strings.HasPrefix(path, d+"/") })
}

// groupOf is the number of a package's group in routerGroups. The router's root is above them,
// -1, and settings are beside placement. It reports false for a package of neither.
func groupOf(path string) (n int, ok bool) {
	switch {
	case path == routerDir:
		return -1, true
	case within(path, settingsDir):
		return slices.Index(routerGroups, "placement"), true
	}
	n = slices.IndexFunc(routerGroups, func(g string) bool { return within(path, routerDir+"/"+g) })
	return n, n >= 0
}

// broken is the rule that an import breaks, empty for none. A package of no layer breaks
// one with every import.
func broken(from, to string) string {
	below := func() bool {
		a, _ := groupOf(from)
		b, ok := groupOf(to)
		return ok && a <= b
	}
	may, rule := false, "it has no layer: add it to one, here and in ARCHITECTURE.md"
	if only, ok := strict[from]; ok && from != to && !slices.Contains(only, to) {
		return "it imports nothing but " + strings.Join(only, ", ")
	}
	switch _, grouped := groupOf(from); {
	case within(from, rigDir):
		may = true
	case within(from, entries...):
		may, rule = !within(to, rigDir), "rule 5: only tests import the rig"
	case within(from, outside...):
		may, rule = within(to, workersDir, settingsDir) || within(to, outside...) || within(to, tools...) || within(strings.TrimPrefix(to, routerDir+"/"), reached...),
			"rule 4: it reaches a router through its admin API and the pure stages"
	case within(from, settingsDir):
		may, rule = below() || within(to, workersDir) || within(to, tools...), "rule 2: settings stand beside placement"
	case grouped:
		may, rule = below() || within(to, workersDir) && !within(to, simDir) || within(to, tools...), "rule 2: groups of the router import downward"
	case within(from, workersDir):
		may, rule = within(to, workersDir) && (within(from, simDir) || !within(to, simDir)) || to == routerDir+"/route" || within(to, tools...),
			"rule 3: workers know nothing of the router but its vocabulary"
	case within(from, tools...):
		may, rule = within(to, tools...), "rule 6: tools import only tools"
	}
	if may {
		return ""
	}
	return rule
}

// TestImportDirections keeps the layers of ARCHITECTURE.md true.
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
		for _, i := range append(p.Imports, p.ImportPath) { // itself, which shows that it has a layer
			if i, ours := strings.CutPrefix(i, module); ours {
				if rule := broken(path, i); rule != "" {
					t.Errorf("%s must not import %s: %s", path, i, rule)
				}
			}
		}
		for i, may := range map[string][]string{
			"github.com/spf13/viper":            {"internal/settings/load"},
			"github.com/spf13/pflag":            {"internal/settings/load", "internal/cli", "internal/cli/commands"},
			"github.com/olekukonko/tablewriter": {"internal/table"},
			"github.com/nats-io/nats.go":        {"internal/router/replicas/natsbus"},
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

// TestRules: each of the rules finds what breaks it, and a package of no layer is found.
func TestRules(t *testing.T) {
	for _, c := range []struct{ from, to, rule string }{
		{"internal/cli/commands", "internal/rig/soak", "rule 5"},
		{"internal/router/placement/decide", "internal/router/observe/receipt", "rule 2"},
		{"internal/router/forward/rewrite", "internal/settings", "rule 2"},
		{"internal/router/serving", "internal/workers/sim", "rule 2"},
		{"internal/router/cache/kvindex", "internal/router", "rule 2"},
		{"internal/settings", "internal/router/observe/admin", "rule 2"},
		{"internal/workers/sim/front", "internal/router/request/api", "rule 3"},
		{"internal/workers/health", "internal/workers/sim", "rule 3"},
		{"internal/tui/feed", "internal/router/cache/kvfeed", "rule 4"},
		{"internal/bench/live", "internal/router", "rule 4"},
		{"internal/eventlog", "internal/workers", "rule 6"},
		{"internal/router/request/api", "internal/workers", "nothing but"},
		{"internal/router/new", "internal/eventlog", "no layer"},
		{"internal/new", "internal/eventlog", "no layer"},

		{"internal/cli/commands", "internal/router", ""},
		{"internal/router", "internal/router/serving/resumed", ""},
		{"internal/router/placement/routing", "internal/settings/effective", ""},
		{"internal/settings", "internal/router/placement/selector", ""},
		{"internal/workers", "internal/router/route", ""},
		{"internal/workers/sim", "internal/zmtp", ""},
		{"internal/replay", "internal/router/cache/kvstream", ""},
		{"internal/rig/soak", "internal/router", ""},
	} {
		if got := broken(c.from, c.to); (got == "") != (c.rule == "") || !strings.Contains(got, c.rule) {
			t.Errorf("%s imports %s: %q, want %q", c.from, c.to, got, c.rule)
		}
	}
}

// TestContinuationInOnePlace: that streams may be continued elsewhere (continue.mode) is known
// to serving/resumed and forward/resume. The root package of the router names them where it
// composes what answers calls, and serving not at all.
func TestContinuationInOnePlace(t *testing.T) {
	names := regexp.MustCompile(`(?i)contin|resum`)
	for _, dir := range []string{"internal/router", "internal/router/serving"} {
		files, err := filepath.Glob(filepath.Join(repository, dir, "*.go"))
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
