package doctor

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestLearned: what was learned of a model is one finding, and each reason for which something is
// not known another, a warning once it is overdue.
func TestLearned(t *testing.T) {
	t.Parallel()
	e := &exam{r: &Report{}}
	unknown := admin.Crossing{Low: new(0)}
	e.learned(&admin.Status{ThresholdTokens: 2048, Costs: []admin.ModelCosts{
		{Model: "c", Crossings: []admin.Crossing{unknown, {Running: 8, Low: new(0)}}}, // no finding: nothing was learned
		{Model: "a", Crossings: []admin.Crossing{{Low: new(900), Tokens: new(1000), High: new(1100)}, {Running: 8}, unknown}},
		{Model: "b", Unlearned: []admin.Unlearned{
			{Of: admin.OfTimes, Reason: admin.UnlearnedSteps, Overdue: true, Text: "no answer showed it", Advice: "stream"},
			{Of: admin.OfPaths, Reason: admin.UnlearnedOnePath, Overdue: true, Text: "one path", Advice: "nothing"}, {Of: admin.OfPaths, Reason: admin.UnlearnedNever, Text: "too soon", Advice: "wait"},
		}},
	}})
	want := []Finding{
		{"crossing", "a", OK, "remote from about 1,000 tokens at 0 running answers (900 to 1,100); local at every length up to 131,072 tokens at 8 running answers; routing.threshold is 2048 and decides", ""},
		{"learning", "b", Warn, "policy kv compares blocks until it knows how long prompts and answers take: no answer showed it", "stream"},
		{"learning", "b", Skip, "what both paths cost is not known: one path", "nothing"}, {"learning", "b", Skip, "what both paths cost is not known: too soon", "wait"},
	}
	if d := cmp.Diff(want, e.r.Findings); d != "" || e.r.Warned != 1 {
		t.Errorf("%d warnings, findings (-want +got):\n%s", e.r.Warned, d)
	}
}
