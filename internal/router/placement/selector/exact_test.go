package selector

import (
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// TestProductsAreRounded: a product of rank.go, exp.go or of the costs of paths is converted, divided or
// compared at once. Go may round x*y and the sum that it goes into at once, through
// variables and members too; an assignment does not keep it from that, a
// conversion does. What this finds shows on arm64 only.
func TestProductsAreRounded(t *testing.T) {
	products := 0
	for _, name := range []string{"rank.go", "exp.go", "../cost/cost.go"} {
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		var above []ast.Node
		ast.Inspect(file, func(n ast.Node) bool {
			if n == nil {
				above = above[:len(above)-1]
				return false
			}
			switch n := n.(type) {
			case *ast.BinaryExpr:
				if n.Op == token.MUL {
					products++
					if !rounded(above) {
						t.Errorf("%s: a product that is not rounded: write float64(…) around it", set.Position(n.Pos()))
					}
				}
			case *ast.AssignStmt:
				if n.Tok == token.MUL_ASSIGN {
					t.Errorf("%s: a product that is not rounded: write x = float64(x * …)", set.Position(n.Pos()))
				}
			}
			above = append(above, n)
			return true
		})
	}
	if products < 10 {
		t.Errorf("only %d products were seen", products)
	}
}

// rounded reports whether nothing but a factor can be done to a product below
// these nodes before it is rounded.
func rounded(above []ast.Node) bool {
	for i := len(above) - 1; i >= 0; i-- {
		switch n := above[i].(type) {
		case *ast.ParenExpr:
		case *ast.CallExpr:
			f, ok := n.Fun.(*ast.Ident)
			return ok && f.Name == "float64"
		case *ast.BinaryExpr:
			switch n.Op {
			case token.MUL:
			case token.QUO, token.LSS, token.GTR, token.LEQ, token.GEQ, token.EQL, token.NEQ:
				return true
			default:
				return false
			}
		default:
			return false
		}
	}
	return false
}

// TestExp: exp is math.Exp but for two units of its last bit, and exact at 0.
func TestExp(t *testing.T) {
	for x, want := range map[float64]float64{0: 1, math.Inf(-1): 0, -1e300: 0, -709: 0} {
		if got := exp(x); got != want {
			t.Errorf("exp(%v) = %v, want %v", x, got, want)
		}
	}
	property.Check(t, func(t *rapid.T) {
		x := -rapid.Float64Range(0, 707).Draw(t, "x")
		if got, want := exp(x), math.Exp(x); math.Abs(got-want) > 2*(math.Nextafter(want, 2)-want) {
			t.Fatalf("exp(%v) = %v, want %v", x, got, want)
		}
	})
}
