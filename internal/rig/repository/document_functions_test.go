package repository

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDocumentFunctions: each function, method and type that life-of-a-request.md names is
// there, in the package or of the type that it is named with.
func TestDocumentFunctions(t *testing.T) {
	declared := map[string]bool{} // name, package.name, Type.method, package.Type.method
	declare := func(names ...string) {
		for i := range names {
			declared[strings.Join(names[i:], ".")] = true
		}
	}
	eachFile(t, ".go", func(path string) {
		if !strings.HasPrefix(path, "internal/") || strings.HasSuffix(path, "_test.go") {
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(repository, path), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil {
					declare(f.Name.Name, d.Name.Name)
				} else if of := receiver(d.Recv.List[0].Type); of != "" {
					declare(f.Name.Name, of, d.Name.Name)
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.TypeSpec:
						declare(f.Name.Name, s.Name.Name)
						if st, ok := s.Type.(*ast.StructType); ok {
							for _, field := range st.Fields.List {
								for _, n := range field.Names {
									declare(f.Name.Name, s.Name.Name, n.Name)
								}
							}
						}
					case *ast.ValueSpec:
						for _, n := range s.Names {
							declare(f.Name.Name, n.Name)
						}
					}
				}
			}
		}
	})
	raw, err := os.ReadFile(filepath.Join(repository, "docs/life-of-a-request.md"))
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, m := range regexp.MustCompile("`([A-Za-z]+(?:\\.[A-Za-z]+)*)`").FindAllStringSubmatch(string(raw), -1) {
		name := m[1]
		if name == strings.ToLower(name) && !strings.HasPrefix(name, "exchange.") { // a package, a setting, or a word
			continue
		}
		if seen++; !declared[name] {
			t.Errorf("docs/life-of-a-request.md names %s, and nothing of that name is declared under internal", name)
		}
	}
	if seen < 80 {
		t.Errorf("saw only %d names", seen)
	}
}

// receiver is the type's name of a method.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}
