package topcmd

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
)

// TestNamedRouters: NAME=URL makes contexts in their order, which hide those of the file;
// URLs with a sign of their own are none.
func TestNamedRouters(t *testing.T) {
	path := filepath.Join(t.TempDir(), "contexts.yaml")
	t.Setenv("DYNCTL_CONTEXTS", path)
	if err := os.WriteFile(path, []byte("contexts:\n  - name: lab\n    routers: [http://file:1]\n  - name: far\n    routers: [http://far:1]\n    token_file: /far\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := namedRouters([]string{"prod=http://a:1", "lab=b:1", "prod=http://c:1"})
	if err != nil || len(list) != 2 || list[0].Name != "prod" || !slices.Equal(list[0].Routers, []string{"http://a:1", "http://c:1"}) {
		t.Fatalf("%+v, %v", list, err)
	}
	all, err := allContexts(list)
	if err != nil || !slices.Equal(all.names(), []string{"prod", "lab", "far"}) {
		t.Errorf("%v, %v", all, err)
	}
	if x, err := all.find("lab", path); err != nil || x.Routers[0] != "b:1" {
		t.Errorf("lab: %+v, %v", x, err)
	}
	x, err := all.find("far", path)
	if err != nil || x.access(cli.AccessFlags{}).TokenFile != "/far" || x.access(cli.AccessFlags{TokenFile: "/mine"}).TokenFile != "/mine" {
		t.Errorf("far: %+v, %v", x, err)
	}
	for _, none := range [][]string{nil, {"http://a:1/?x=1"}, {"a:1"}} {
		if list, err := namedRouters(none); err != nil || list != nil {
			t.Errorf("%q: %+v, %v", none, list, err)
		}
	}
	for _, bad := range [][]string{{"prod="}, {"=http://a:1"}, {"prod=http://a:1", "http://b:1"}} {
		if _, err := namedRouters(bad); err == nil || !strings.Contains(err.Error(), "--router") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
