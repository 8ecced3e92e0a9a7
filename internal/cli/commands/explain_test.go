package commands

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
)

// TestExplainShowsTheCrossing: where costs decided, explain shows from where on the router
// prefills prompts of that model remotely now; where a threshold decided it does not.
func TestExplainShowsTheCrossing(t *testing.T) {
	t.Parallel()
	router := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		var answer any
		switch q.URL.Path {
		case "/admin/v1/status":
			answer = admin.Status{ThresholdAuto: true, Costs: []admin.ModelCosts{
				{Model: "other", Crossings: []admin.Crossing{{Running: 8, Low: new(1), Tokens: new(2), High: new(3)}}},
				{Model: "sim", Crossings: []admin.Crossing{{Running: 8, Low: new(300), Tokens: new(512)}}},
			}}
		case "/admin/v1/decisions/by-costs", "/admin/v1/decisions/by-threshold":
			r := receipt.Receipt{ID: "1", Model: "sim"}
			r.Path, r.Predicted.HasRemote = "local", true
			if strings.HasSuffix(q.URL.Path, "costs") {
				r.Predicted.CostRevision = 7
			}
			answer = r
		default:
			http.NotFound(w, q)
			return
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(router.Close)
	const line = "8 learned    remote from 512 (300 to never) tokens with 8 answers on the decode rank, as of now\n"
	code, stdout, stderr := typed("explain", "by-costs", "--router", router.URL)
	if code != cli.ExitOK || strings.Count(stdout, "learned    ") != 1 || !strings.Contains(stdout, line) {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
	if code, stdout, stderr = typed("explain", "by-threshold", "--router", router.URL); code != cli.ExitOK || strings.Contains(stdout, "learned    ") {
		t.Errorf("by a threshold: code %d\n%s%s", code, stdout, stderr)
	}
}
