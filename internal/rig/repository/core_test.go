package repository

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A step of a decision is taken by one function, for everybody who decides: router,
// dry run, replay, simulation, virtual soak. A second one would have to name one of
// the marks: a type whose value it makes ("T{}") or a function.
type step struct {
	does, by string
	marks    []string
	// may lists who else names a mark, a function, a file or a package, and why
	// that is no second copy.
	may map[string]string
}

const (
	decidePkg  = "internal/router/placement/decide"
	attemptPkg = "internal/router/placement/attempt"
)

var steps = []step{
	{
		does: "lists the candidates of a phase", by: decidePkg + ".lister.add",
		marks: []string{"internal/router/placement/decision.Candidate{}"},
		may: map[string]string{
			"internal/router/observe/trace": "reads those of a recording",
			decidePkg + "/race_on.go":       "overwrites memory that was given back",
			"internal/replay/effect.go":     "ranks made-up candidates, to see whether a setting has an effect",
		},
	},
	{
		does: "makes the input of a plan", by: decidePkg + ".Run.NextPlan",
		marks: []string{"internal/router/placement/selector.Input{}", decidePkg + ".Input{}"},
		may: map[string]string{
			decidePkg + "/memory.go":        "empties it for another request",
			"internal/router/observe/trace": "reads the input of a recorded plan",
			"internal/replay/effect.go":     "ranks made-up candidates, to see whether a setting has an effect",
		},
	},
	{
		does: "makes the plan", by: decidePkg + ".MakePlan",
		marks: []string{"internal/router/placement/selector.Pick", decidePkg + ".Plan{}"},
		may: map[string]string{
			decidePkg + "/plan.go":      "is MakePlan with its parts",
			decidePkg + "/memory.go":    "empties it for another request",
			decidePkg + ".Run.Judge":    "measures a plan that was made",
			"internal/replay/effect.go": "ranks made-up candidates, to see whether a setting has an effect",
			"internal/replay/blind.go":  "ranks again what was recorded, with the work that other routers had given",
		},
	},
	{
		does: "asks for the plan", by: decidePkg + ".Run.NextPlan",
		marks: []string{decidePkg + ".MakePlan"},
		may:   map[string]string{"internal/replay": "makes recorded plans again"},
	},
	{
		does: "says what a plan takes of the ledger", by: decidePkg + ".Run.Claims",
		marks: []string{"internal/router/placement/ledger.Claim{}"},
	},
	{
		does: "decides about another attempt", by: decidePkg + ".Run.Failed",
		marks: []string{attemptPkg + ".AfterFailure", attemptPkg + ".AfterNoBudget", attemptPkg + ".AfterNoChoice", attemptPkg + ".Next{}"},
		may: map[string]string{
			attemptPkg:                             "is the policy",
			decidePkg + ".Run.NoBudget":            "goes on from Failed",
			decidePkg + ".Run.NoChoice":            "decides after a plan with an error",
			"internal/rig/virtualsoak.stage.after": "plants bugs in what the policy says",
		},
	},
}

// TestOneDecision: every step of a decision is taken in one place, and the lists
// above name nobody who is gone.
func TestOneDecision(t *testing.T) {
	const root = repository
	named := map[string]bool{}
	files := 0
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if base := d.Name(); base == "testdata" || base == "bin" || base != ".." && strings.HasPrefix(base, ".") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		files++
		place, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		found, err := copies(filepath.ToSlash(place), nil, name, named)
		for _, f := range found {
			t.Error(f)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 100 {
		t.Fatalf("saw only %d files", files)
	}
	for _, s := range steps {
		for _, who := range append(slices.Sorted(maps.Keys(s.may)), s.by) {
			if !named[s.does+who] {
				t.Errorf("%s is listed under %q and has nothing of it any more: take it off", who, s.does)
			}
		}
	}
}

// TestCopiesAreFound: in whatever way a second copy is written.
func TestCopiesAreFound(t *testing.T) {
	const imports = `import (
		"` + module + `internal/router/placement/attempt"
		"` + module + `internal/router/placement/decide"
		"` + module + `internal/router/placement/decision"
		seen "` + module + `internal/router/placement/decision"
		"` + module + `internal/router/placement/ledger"
		"` + module + `internal/router/placement/selector"
	)
	`
	for code, want := range map[string]string{
		`func f() any { return decision.Candidate{Rank: "d0"} }`:                     "lists the candidates",
		`func f() any { return &seen.Candidate{} }`:                                  "lists the candidates",
		`func f() any { return []decision.Candidate{{Rank: "d0"}} }`:                 "lists the candidates",
		`func f() any { return map[int]*decision.Candidate{0: {}} }`:                 "lists the candidates",
		`func f() any { return new(decision.Candidate) }`:                            "lists the candidates",
		`func f() any { var c decision.Candidate; c.Rank = ""; return c }`:           "lists the candidates",
		`func f() (c decision.Candidate) { c.Rank = ""; return c }`:                  "lists the candidates",
		`func f(n int) any { return make([]decision.Candidate, n) }`:                 "lists the candidates",
		`func f() any { var list [4]decision.Candidate; return list }`:               "lists the candidates",
		`func f() any { return new([4]decision.Candidate) }`:                         "lists the candidates",
		`type own decision.Candidate`:                                                "lists the candidates",
		`type own = selector.Input`:                                                  "makes the input",
		`func f() func() attempt.Next { return func() (n attempt.Next) { return } }`: "another attempt",
		`type t struct{}; func (*t) f() { g(selector.Input{}) }`:                     "makes the input",
		`var in = decide.Input{}`:                                                    "makes the input",
		`func f() { selector.Pick(nil, nil) }`:                                       "makes the plan",
		`func f() { pick := selector.Pick; pick(nil, nil) }`:                         "makes the plan",
		`func f() any { return decide.Plan{Path: "local"} }`:                         "makes the plan",
		`func f() { decide.MakePlan(nil, nil) }`:                                     "asks for the plan",
		`func f() any { return ledger.Claim{} }`:                                     "takes of the ledger",
		`func f() { attempt.AfterFailure(nil, attempt.Allowance{}, nil) }`:           "another attempt",
		`func f() any { return attempt.Next{Step: attempt.GiveUp} }`:                 "another attempt",
		// What only reads is no copy.
		`func f(list []decision.Candidate) *selector.Input { var c *decision.Candidate = &list[0]; _ = c.Rank; return nil }`: "",
		`func f(n int) (list []decision.Candidate, in *selector.Input) { return make([]decision.Candidate, 0, n), nil }`:     "",
		`type run struct { decide decide.Run; plan *decide.Plan; in decide.Input }`:                                          "",
	} {
		found, err := copies("internal/new/copy.go", []byte("package copy\n"+imports+code), "copy.go", map[string]bool{})
		switch {
		case err != nil:
			t.Errorf("%s: %v", code, err)
		case want == "" && len(found) > 0, want != "" && (len(found) != 1 || !strings.Contains(found[0], want)):
			t.Errorf("%s: %q, want one that %q", code, found, want)
		}
	}
	for _, c := range []struct{ place, code, want string }{
		{decidePkg + "/other.go", `func (r *Run) again() { MakePlan(&r.In, &r.Plan) }`, "asks for the plan"},
		{decidePkg + "/other.go", `func (r *Run) fresh() { r.In = Input{} }`, "makes the input"},
		{decidePkg + "/run.go", `func (r *Run) NextPlan() { r.In = Input{}; MakePlan(&r.In, &r.Plan) }`, ""},
		{"internal/new/copy.go", `import . "` + module + `internal/router/placement/decision"`, "imports"},
	} {
		found, err := copies(c.place, []byte("package x\n"+c.code), c.place, map[string]bool{})
		if err != nil || (c.want == "") != (len(found) == 0) || !strings.Contains(strings.Join(found, ""), c.want) {
			t.Errorf("%s: %s: %q, %v, want one that %q", c.place, c.code, found, err, c.want)
		}
	}
}

// copies finds in a file the marks of steps that are not taken there, and records in
// named who has one of which step. place is the file's path in the module, src its text
// or nil for that of the file name.
func copies(place string, src any, name string, named map[string]bool) (found []string, err error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	pkg := path.Dir(place)
	packages := map[string]string{} // by the name that the file has for them
	for _, i := range f.Imports {
		full, _ := strconv.Unquote(i.Path.Value)
		to, ours := strings.CutPrefix(full, module)
		if !ours {
			continue
		}
		as := path.Base(to)
		if i.Name != nil {
			as = i.Name.Name
		}
		if as == "." {
			found = append(found, fmt.Sprintf("%s: imports the names of %s; this test could not see them", fset.Position(i.Pos()), to))
		}
		packages[as] = to
	}
	// full is the whole name of a type or function, "" for what is neither.
	full := func(e ast.Expr) string {
		switch e := e.(type) {
		case *ast.Ident:
			return pkg + "." + e.Name
		case *ast.SelectorExpr:
			if x, ok := e.X.(*ast.Ident); ok && packages[x.Name] != "" {
				return packages[x.Name] + "." + e.Sel.Name
			}
		}
		return ""
	}
	// value is the type of the values that a variable of type e has in it.
	value := func(e ast.Expr) string {
		for {
			a, ok := e.(*ast.ArrayType)
			if !ok || a.Len == nil {
				return full(e) + "{}"
			}
			e = a.Elt
		}
	}
	for _, decl := range f.Decls {
		who := pkg + "."
		if fn, ok := decl.(*ast.FuncDecl); ok {
			if fn.Recv != nil && len(fn.Recv.List) == 1 {
				t := fn.Recv.List[0].Type
				if p, ok := t.(*ast.StarExpr); ok {
					t = p.X
				}
				if id, ok := t.(*ast.Ident); ok {
					who += id.Name + "."
				}
			}
			who += fn.Name.Name
		}
		mark := func(n ast.Node, what string) {
			for _, s := range steps {
				if !slices.Contains(s.marks, what) {
					continue
				}
				taken := who == s.by
				named[s.does+who] = true
				for _, by := range [...]string{who, place, pkg} {
					if s.may[by] != "" {
						named[s.does+by], taken = true, true
					}
				}
				if !taken {
					found = append(found, fmt.Sprintf("%s: %s has %s. One function %s, %s: call it, or, if this is none of that, list it in core_test.go with the reason", fset.Position(n.Pos()), who, what, s.does, s.by))
				}
			}
		}
		ast.Inspect(decl, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CompositeLit:
				mark(n, full(n.Type)+"{}")
				elem := ast.Expr(nil)
				switch t := n.Type.(type) {
				case *ast.ArrayType:
					elem = t.Elt
				case *ast.MapType:
					elem = t.Value
				}
				if p, ok := elem.(*ast.StarExpr); ok {
					elem = p.X
				}
				for _, e := range n.Elts {
					if kv, ok := e.(*ast.KeyValueExpr); ok {
						e = kv.Value
					}
					if lit, ok := e.(*ast.CompositeLit); ok && lit.Type == nil && elem != nil {
						mark(lit, full(elem)+"{}")
					}
				}
			case *ast.ValueSpec:
				if n.Type != nil && len(n.Values) == 0 {
					mark(n, value(n.Type))
				}
			case *ast.TypeSpec: // another name of it
				mark(n, value(n.Type))
			case *ast.FuncType:
				if n.Results == nil {
					break
				}
				for _, r := range n.Results.List {
					if len(r.Names) > 0 { // it is a variable
						mark(r, value(r.Type))
					}
				}
			case *ast.CallExpr:
				switch id, ok := n.Fun.(*ast.Ident); {
				case !ok:
				case id.Name == "new" && len(n.Args) == 1:
					mark(n, value(n.Args[0]))
				case id.Name == "make" && len(n.Args) > 1:
					list, slice := n.Args[0].(*ast.ArrayType)
					if zero, ok := n.Args[1].(*ast.BasicLit); slice && !(ok && zero.Value == "0") {
						mark(n, value(list.Elt))
					}
				default:
					mark(n, full(id))
				}
			case *ast.SelectorExpr:
				mark(n, full(n))
			}
			return true
		})
	}
	return found, nil
}
