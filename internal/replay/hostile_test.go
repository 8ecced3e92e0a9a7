package replay

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rig/hostile"
)

// TestReportsArePrintable: a trace may come from anywhere.
func TestReportsArePrintable(t *testing.T) {
	var r Report
	var d Redecision
	hostile.Fill(&r)
	hostile.Fill(&d)
	r.Verify.Decisions = 1
	r.Verify.First.Line = 1 // another line than that of the first other input
	var report, redecision strings.Builder
	if err := r.Text(&report); err != nil {
		t.Fatal(err)
	}
	hostile.Check(t, "replay", report.String())
	if !strings.Contains(report.String(), "FIRST DIVERGENCE") || !strings.Contains(report.String(), "FIRST OTHER INPUT") {
		t.Errorf("the report lacks its divergences:\n%s", report.String())
	}
	if err := d.Text(&redecision); err != nil {
		t.Fatal(err)
	}
	hostile.Check(t, "replay --what-if", redecision.String())
}
