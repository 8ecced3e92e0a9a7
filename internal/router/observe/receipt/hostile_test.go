package receipt

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rig/hostile"
)

// TestExplainIsPrintable: clients choose the request id and the model, engines the texts of
// their errors, and whoever records a trace all of it.
func TestExplainIsPrintable(t *testing.T) {
	for _, verdict := range []string{"chosen", "no_candidates", "all_busy", "all_excluded", hostile.Text} {
		for _, path := range []string{"", "local", "remote", hostile.Text} {
			var r Receipt
			hostile.Fill(&r)
			r.Path, r.Decode.Verdict, r.Prefill.Verdict = path, verdict, verdict
			r.QueuedMS, r.Predicted.HasRemote, r.Predicted.CostRevision, r.Decode.Tied = 1, true, 1, 2
			for _, excluded := range []string{"", hostile.Text} {
				for i := range r.Decode.Candidates {
					r.Decode.Candidates[i].Excluded = excluded
				}
				var b strings.Builder
				if err := r.Explain(&b); err != nil {
					t.Fatal(err)
				}
				hostile.Check(t, "explain "+verdict+" "+path, b.String())
			}
		}
	}
}
