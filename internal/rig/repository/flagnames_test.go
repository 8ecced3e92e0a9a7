package repository

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/cli/commands"
)

// engineFlags are flags of engines and of other routers that texts may name.
var engineFlags = []string{
	"block-size", "disaggregation-bootstrap-port", "disaggregation-mode", "enable-metrics", "enable-prompt-tokens-details", "enable-scale-out",
	"chat-template", "router-conditional-disagg-config", "routing-logic", "kv-events-config", "kv-transfer-config", "served-model-name", "max-num-batched-tokens", "page-size", "prefix-caching-hash-algo",
	"vllm-port", "decoder-port", // of llm-d's routing sidecar
}

// TestNamedFlagsExist: whatever flag a text of the program names (findings,
// events, errors, help), some command has it, or an engine does.
func TestNamedFlagsExist(t *testing.T) {
	known := map[string]bool{}
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		c.InitDefaultHelpFlag()
		for _, set := range []*pflag.FlagSet{c.LocalFlags(), c.PersistentFlags(), c.InheritedFlags()} {
			set.VisitAll(func(f *pflag.Flag) { known[f.Name] = true })
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(commands.Root())
	if len(known) < 50 || !known["tokenizer-path"] {
		t.Fatalf("%d flags are known", len(known))
	}
	named := regexp.MustCompile(`(?:^|[\s(,:"'/])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)`)
	texts := 0
	for _, root := range []string{filepath.Join(repository, "cmd"), filepath.Join(repository, "internal")} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			files := token.NewFileSet()
			file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				lit, ok := n.(*ast.BasicLit)
				if !ok || lit.Kind != token.STRING {
					return true
				}
				text, err := strconv.Unquote(lit.Value)
				if err != nil {
					t.Errorf("%s: %v", files.Position(lit.Pos()), err)
					return true
				}
				for _, m := range named.FindAllStringSubmatch(text, -1) {
					if texts++; !known[m[1]] && !slices.Contains(engineFlags, m[1]) {
						t.Errorf("%s names --%s, which no command has, no engine and no other router: %.80q", files.Position(lit.Pos()), m[1], text)
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if texts < 50 {
		t.Errorf("only %d flags are named in texts", texts)
	}
}
