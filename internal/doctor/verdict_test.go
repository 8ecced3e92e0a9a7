package doctor

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestVerdict: the sentence names the cause that explains most, and counts the rest.
func TestVerdict(t *testing.T) {
	down := Finding{Check: "engine", Subject: "decode-1", State: Fail, Text: "down: connection refused"}
	drains := Finding{Check: "engine", Subject: "decode-1", State: Warn, Text: "draining: it gets no new requests, 0 are in progress"}
	size := Finding{Check: "block size", Subject: "decode-0", State: Fail, Text: "16 here, 32 there"}
	events := Finding{Check: "events", Subject: "engines", State: Warn, Text: "fragile"}
	other, third, none := drains, size, Finding{Check: "engines", Subject: "router", State: Fail, Text: "no usable worker decodes model m"}
	drains.Advice = "dynctl workers resume decode-1 ends the drain"
	other.Subject, third.Subject = "decode-2", "decode-3"
	others := []Finding{down, down, down}
	others[1].Subject, others[2].Subject, others[2].Text = "decode-2", "prefill-0", "down: timeout"
	for want, list := range map[string][]Finding{
		"decode-1, decode-2 and 1 more are down; 1 more check failed":                                                                       append(others, none),
		"decode-1 is draining, so no usable worker decodes model m; dynctl workers resume decode-1 ends the drain":                          {drains, none},
		"decode-1 and decode-2 are draining, so no usable worker decodes model m; dynctl workers resume decode-1 ends the drain; 1 warning": {drains, other, events, none},
		"block size of decode-0 and decode-3: 16 here, 32 there; 1 warning":                                                                 {size, third, events},
		"nothing is wrong": {{State: OK}},
		"nothing is wrong in what could be examined; 1 check could not be made":                            {{State: OK}, {State: Skip}},
		"decode-1 is down: connection refused":                                                             {down},
		"decode-1 is down: connection refused; 1 more check failed; 1 warning":                             {size, down, events},
		"block size of decode-0: 16 here, 32 there":                                                        {size},
		"nothing failed; decode-1 is draining: it gets no new requests, 0 are in progress":                 {drains},
		"nothing failed; events: fragile":                                                                  {events},
		"nothing failed; decode-1 is draining: it gets no new requests, 0 are in progress; 1 more warning": {events, drains},
	} {
		if got := verdict(&Report{Findings: list}); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestOneDeadEngineIsOneFinding: neither its feed nor the router's state repeats it, while
// what else is wrong with the router stays.
func TestOneDeadEngineIsOneFinding(t *testing.T) {
	gone := httptest.NewServer(http.NotFoundHandler())
	url := gone.URL
	gone.Close()
	there := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(there.Close)
	ws := []admin.Worker{
		{Name: "d0", URL: url, Role: "decode", Health: "unhealthy", Reason: "GET /health: connection refused", Ranks: []admin.Rank{{Label: "d0/dp0", Feed: admin.Feed{State: "connecting"}}}, DP: 1},
		{Name: "d1", URL: there.URL, Role: "decode", Health: "healthy", Draining: true, Ranks: []admin.Rank{{Label: "d1/dp0", ActiveRequests: 3, Feed: admin.Feed{State: "live", Trusted: true, Replay: new("tcp://d1:1")}}}, DP: 1},
	}
	e := &exam{o: Options{Step: func(string) {}, Target: &fleet.Target{URL: there.URL}}, r: &Report{}, http: http.DefaultClient, down: map[string]bool{}}
	e.router(t.Context(), &admin.Status{State: "degraded", Reasons: []string{
		"worker d0 is not usable: GET /health: connection refused", "worker d1 is not usable: draining", "1 rank(s) are routed without cache knowledge because their KV events are not trusted now",
	}}, ws)
	e.reach(context.WithoutCancel(t.Context()), ws)
	e.feeds(ws)
	bad := slices.DeleteFunc(e.r.Findings, func(f Finding) bool { return f.State == OK })
	if len(bad) != 2 || bad[0].Subject != "d0" || bad[0].State != Fail || !strings.HasPrefix(bad[0].Text, "down: ") ||
		bad[1].Subject != "d1" || bad[1].State != Warn || !strings.Contains(bad[1].Text, "3 are in progress") || bad[1].Advice != "dynctl workers resume d1 ends the drain" {
		t.Errorf("%+v", bad)
	}
	e.r.Findings = nil
	e.router(t.Context(), &admin.Status{State: "degraded", Reasons: []string{"worker d0 is not usable: gone", "no worker that can decode is usable"}}, ws)
	if f := e.r.Findings[0]; f.State != Warn || f.Text != "degraded: no worker that can decode is usable" {
		t.Errorf("%+v", f)
	}
}
