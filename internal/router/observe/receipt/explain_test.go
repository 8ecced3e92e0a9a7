package receipt

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// explained is the text of a receipt.
func explained(t *testing.T, r *Receipt) string {
	t.Helper()
	var b strings.Builder
	if err := r.Explain(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// decided is a receipt of a decision between two ranks.
func decided(path string) *Receipt {
	r := &Receipt{ID: "5f3a9c0100000000002a"}
	r.Path, r.ReasonText = path, "eff_isl 800 >= 512"
	r.Decode.Verdict, r.Decode.Policy, r.Decode.Chosen, r.Decode.RunnerUp, r.Decode.Eligible = "chosen", "kv", "d0/dp0", "d1/dp0", 2
	r.Decode.Candidates = []decision.Candidate{{Rank: "d0/dp0"}, {Rank: "d1/dp0"}}
	r.Prefill.Verdict, r.Prefill.Policy, r.Prefill.Chosen = "chosen", "kv", "p0/dp0"
	r.Predicted.HasRemote = true
	r.Predicted.Local, r.Predicted.Remote = decision.Work{Compute: 800, Queued: 120}, decision.Work{Compute: 800, Transfer: 1000}
	r.Outcome = Outcome{Status: 200, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1}
	return r
}

// TestDryRunSaysWhatWouldHappen: first what the router would do and why; what was not
// sent has no outcome.
func TestDryRunSaysWhatWouldHappen(t *testing.T) {
	for path, want := range map[string]string{
		"remote": "dry run: p0/dp0 would prefill this prompt, d0/dp0 would decode: eff_isl 800 >= 512\n",
		"local":  "dry run: d0/dp0 would prefill this prompt and decode: eff_isl 800 >= 512\n",
		"":       "dry run: the router would refuse this request now: eff_isl 800 >= 512\n",
	} {
		r := decided(path)
		r.ID, r.Outcome.Status = DryRun, 0
		text := explained(t, r)
		if !strings.HasPrefix(text, want) || strings.Contains(text, "HTTP") || strings.Contains(text, "verdict") || !strings.Contains(text, "7 outcome    none: a dry run sends nothing\n") {
			t.Errorf("path %q:\n%s", path, text)
		}
	}
}

// TestExplainComparesThePaths: the line of the other path and of the one that was taken
// name ranks and work in words.
func TestExplainComparesThePaths(t *testing.T) {
	const local = "local prefill: d0/dp0 computes 800 prompt tokens, after 120 that are queued there\n"
	const remote = "remote prefill: p0/dp0 computes 800 prompt tokens, with none queued there, and moves 1000\n"
	for path, want := range map[string]string{
		"remote": "5 instead    " + local + "  taken      " + remote,
		"local":  "5 instead    " + remote + "  taken      " + local,
	} {
		if text := explained(t, decided(path)); !strings.Contains(text, want) {
			t.Errorf("%s:\n%s", path, text)
		}
	}
}

// TestExplainSaysAFailureOnce: the error of a request repeats neither its code, nor the reason
// of its path, nor the error of a leg; a client that left is no error.
func TestExplainSaysAFailureOnce(t *testing.T) {
	const cause = "POST /v1/completions: 500 out of memory"
	for _, c := range []struct {
		code, text string
		cancelled  bool
		want       string
	}{
		{"worker_failed", "worker_failed: d0 failed: " + cause, false, "             error worker_failed: d0 failed\n"},
		{"no_decode_worker", "no_decode_worker: no worker can take it: eff_isl 800 >= 512", false, "             error no_decode_worker: no worker can take it\n"},
		{"client_closed", "client_closed: the client closed the connection: " + cause, true, "             the client left before the end\n"},
	} {
		r := decided("remote")
		r.Legs = []LegEntry{{Kind: "decode", Rank: "d0/dp0", Status: 500, Error: cause, RetryReason: "500"}}
		r.Outcome.Status, r.Outcome.ErrorCode, r.Outcome.Error, r.Outcome.Cancelled = 502, c.code, c.text, c.cancelled
		text := explained(t, r)
		if !strings.Contains(text, c.want) || strings.Count(text, cause) != 1 || strings.Count(text, "eff_isl 800") != 1 || strings.Contains(text, "given up") || c.cancelled && strings.Contains(text, "error ") {
			t.Errorf("%s:\n%s", c.code, text)
		}
	}
}

// TestExplainVerdict: predicted and found tokens are compared once.
func TestExplainVerdict(t *testing.T) {
	for found, want := range map[int]string{
		1000: "8 verdict    as predicted: 1000 prompt tokens",
		900:  "8 verdict    fewer than predicted: 900 of 1000 tokens were ",
		1100: "8 verdict    more than predicted: 1100 tokens, not 1000, were ",
		-1:   "8 verdict    unknown:",
	} {
		r := decided("remote")
		r.Predicted.CachedTokens, r.Predicted.RemoteTokens, r.Outcome.CachedTokens = 200, 800, found
		if text := explained(t, r); strings.Count(text, "verdict") != 1 || !strings.Contains(text, want) {
			t.Errorf("%d tokens:\n%s", found, text)
		}
	}
	// The usage of a disaggregated answer has the prefill engine's count.
	r := decided("remote")
	r.Legs = []LegEntry{{Kind: "prefill", CachedTokens: 320}, {Kind: "decode", CachedTokens: -1}}
	r.Predicted.PrefillCachedTokens, r.Predicted.RemoteTokens, r.Outcome.CachedTokens = 320, 1000, 320
	if text := explained(t, r); !strings.Contains(text, "8 verdict    as predicted: 320 prompt tokens were in the cache of p0/dp0\n") {
		t.Errorf("counted by the prefill engine:\n%s", text)
	}
	r = decided("remote")
	r.Outcome.Status = 502
	if text := explained(t, r); strings.Contains(text, "verdict") {
		t.Errorf("a request that failed has a verdict on its cache:\n%s", text)
	}
}

// TestExplainsTimes: where policy kv compared times, the receipt has them by term, own and caused,
// and says in words what decided.
func TestExplainsTimes(t *testing.T) {
	r := decided("local")
	r.Decode.Unit, r.Decode.MarginBlocks = decision.Milliseconds, 310
	fast, slow := &r.Decode.Candidates[0], &r.Decode.Candidates[1]
	fast.Wait, fast.Compute, fast.Answer, fast.Slower, fast.Cost = 20, 80, 1500, 100, 1700
	slow.Wait, slow.Compute, slow.Answer, slow.Slower, slow.Cost = 20, 40, 1600, 350, 2010
	text := explained(t, r)
	for _, want := range []string{
		"d0/dp0 by kv: expected to cost 1700 ms, 1600 of its own time and 100 of others', 310 less than d1/dp0: it slows answers there less",
		"WAIT", "COMPUTE", "ANSWER", "+SLOWER", "1500.0", "ms that answers there take longer, together",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "CREDIT") || strings.Contains(text, "blocks decoding") {
		t.Errorf("blocks among times:\n%s", text)
	}
	// A risk is no time.
	fast.Late = 40
	if text, want := explained(t, r), "1600 of its own time, 40 for its risk to miss the SLO and 100 of others'"; !strings.Contains(text, want) {
		t.Errorf("no %q in\n%s", want, text)
	}
	fast.Late = 0
	// A small difference keeps its digits.
	r.Decode.MarginBlocks = 0.004
	if text := explained(t, r); !strings.Contains(text, ", 0.004 less than d1/dp0") {
		t.Errorf("a small difference:\n%s", text)
	}
	// As near as that they are equal, and a tie is broken.
	r.Decode.MarginBlocks, r.Decode.Tied, r.Decode.TieBreak, slow.Cost = -3, 2, "overlap", 1697
	if text, want := explained(t, r), "as good as d1/dp0 (1697 ms); tie of 2 ranks, more of the prompt in its cache"; !strings.Contains(text, want) {
		t.Errorf("no %q in\n%s", want, text)
	}
}

// TestLegendHasEveryColumn: each column of the tables is explained, within a narrow screen.
func TestLegendHasEveryColumn(t *testing.T) {
	titles := []string{"OVERLAP", "COST"}
	for _, term := range decision.EachTerm() {
		titles = append(titles, term.Title)
	}
	r := decided("remote")
	r.Prefill.Candidates = []decision.Candidate{{Rank: "p0/dp0"}}
	for _, term := range decision.EachTerm() {
		*term.At(&r.Decode.Candidates[0].Terms) = 1 // rare terms, too
		*term.At(&r.Prefill.Candidates[0].Terms) = 1
	}
	r.Prefill.Unit = decision.Milliseconds // and those of times
	_, legend, ok := strings.Cut(explained(t, r), "  columns    ")
	for _, title := range titles {
		if !ok || meanings[title] == "" || !strings.Contains(legend, title+" ") {
			t.Errorf("%s is not explained in\n%s", title, legend)
		}
	}
	for line := range strings.Lines(legend) {
		if len(line) > legendWidth+1 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	r.Decode.Candidates, r.Prefill.Candidates = nil, nil
	if text := explained(t, r); strings.Contains(text, "columns") {
		t.Errorf("a legend without a table:\n%s", text)
	}
}
