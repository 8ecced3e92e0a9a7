package report

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/rig/hostile"
)

// TestReportsArePrintable: results are read from files, and name models of engines.
func TestReportsArePrintable(t *testing.T) {
	var r experiment.Result
	hostile.Fill(&r)
	var text, compared strings.Builder
	if err := Text(&text, &r, TextOptions{Folder: hostile.Text, Live: 1}); err != nil {
		t.Fatal(err)
	}
	hostile.Check(t, "report", text.String())
	if err := CompareText(&compared, &r, &r, Compare(&r, &r)); err != nil {
		t.Fatal(err)
	}
	hostile.Check(t, "compare", compared.String())
}
