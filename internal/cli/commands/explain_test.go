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
	const line = "9 learned    remote from about 510 tokens at 8 running answers (300 or more), as of now\n"
	code, stdout, stderr := typed("explain", "by-costs", "--router", router.URL)
	if code != cli.ExitOK || strings.Count(stdout, "learned    ") != 1 || !strings.Contains(stdout, line) {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
	if code, stdout, stderr = typed("explain", "by-threshold", "--router", router.URL); code != cli.ExitOK || strings.Contains(stdout, "learned    ") {
		t.Errorf("by a threshold: code %d\n%s%s", code, stdout, stderr)
	}
}

// TestExplainByHead: the head of an id is enough where one of the newest requests has it,
// with the mark by which a screen cuts it or without.
func TestExplainByHead(t *testing.T) {
	t.Parallel()
	receipts := map[string]receipt.Receipt{}
	list := admin.DecisionList{}
	for id, request := range map[string]string{"5f3a9c0100000000002a": "9c1e08987a", "5f3a9c0100000000002b": "77aa000000", "5f3a9c0100000000003c": "9c1e000000"} {
		r := receipt.Receipt{ID: id, RequestID: request}
		receipts[id] = r
		raw, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		list.Decisions = append(list.Decisions, raw)
	}
	router := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		id, of := strings.CutPrefix(q.URL.Path, "/admin/v1/decisions/")
		var answer any = list
		if of {
			r, ok := receipts[id]
			if !ok {
				w.WriteHeader(http.StatusNotFound)
				answer = admin.Problem{}
			} else {
				answer = r
			}
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(router.Close)
	for head, want := range map[string]string{"9c1e0898": "5f3a9c0100000000002a", "9c1e0898…": "5f3a9c0100000000002a", "77aa": "5f3a9c0100000000002b", "5f3a9c0100000000003": "5f3a9c0100000000003c", "chatcmpl-77aa000000": "5f3a9c0100000000002b"} {
		if code, stdout, stderr := typed("explain", head, "--router", router.URL); code != cli.ExitOK || !strings.HasPrefix(stdout, "decision "+want+" ") {
			t.Errorf("%s: code %d\n%s%s", head, code, stdout, stderr)
		}
	}
	if code, _, stderr := typed("explain", "9c1e", "--router", router.URL); code != cli.ExitUsage || !strings.Contains(stderr, "give more of it") {
		t.Errorf("the head of two ids: code %d %s", code, stderr)
	}
	for _, none := range []string{"5f3", "abcdef"} {
		if code, _, stderr := typed("explain", none, "--router", router.URL); code != cli.ExitRuntime {
			t.Errorf("%s: code %d %s", none, code, stderr)
		}
	}
}
