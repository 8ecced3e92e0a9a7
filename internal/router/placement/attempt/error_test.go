package attempt

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestErrorForClients: what is the request's own fault stays so; anything else is the
// worker's, which is named, and that of a prefill says so in its code.
func TestErrorForClients(t *testing.T) {
	w := &workers.Worker{State: &workers.State{}}
	w.Name = "w"
	broke := errors.New("broke")
	for _, c := range []struct {
		phase  route.Phase
		err    error
		status int
		code   api.Code
		text   string
	}{
		{route.Decode, broke, http.StatusBadGateway, api.CodeUpstreamError, "w: broke"},
		{route.Prefill, broke, http.StatusBadGateway, api.CodePrefillFailed, "remote prefill on w failed: broke"},
		{route.Decode, context.DeadlineExceeded, http.StatusGatewayTimeout, api.CodeTimeout, "w: context deadline exceeded"},
		{route.Prefill, context.DeadlineExceeded, http.StatusGatewayTimeout, api.CodePrefillFailed, "remote prefill on w failed: context deadline exceeded"},
		{route.Prefill, context.Canceled, api.StatusClientClosed, api.CodeClientClosed, "the client closed the connection"},
		{route.Decode, api.BadRequest("n", "n is odd"), http.StatusBadRequest, api.CodeInvalidRequest, "n is odd"},
	} {
		e := NewError(c.phase, w, Reset, true, c.err)
		got := api.FromError(e)
		if errors.As(c.err, new(*api.Error)) { // which stands in the chain, and is taken as it is
			got = e.APIError()
		}
		if got.Status != c.status || got.Code != c.code || got.Message != c.text || !errors.Is(got, c.err) {
			t.Errorf("%s, %v: %d %s %q", c.phase, c.err, got.Status, got.Code, got.Message)
		}
		if !e.Sent || e.Worker != w.State || e.Reason != Reset {
			t.Errorf("%+v", e.Failure)
		}
	}
}

// TestOfStatus: only what the request itself is to blame for is final; a refused key is the
// client's only where the client showed it.
func TestOfStatus(t *testing.T) {
	const (
		sglang = `{"object":"error","message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","param":null,"code":503}`
		vllm   = `{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}`
	)
	const anthropic = `{"type":"error","error":{"type":"overloaded_error","message":"the queue is full"}}` // vLLM 0.33
	for _, c := range []struct {
		phase      route.Phase
		status     int
		retryAfter string
		body       string
		want       Reason
	}{
		{route.Decode, 500, "", "", Status5xx},
		{route.Decode, 500, "", `{"error":"bad grammar"}`, Status5xx},
		{route.Decode, 500, "2", "", Status5xx},
		{route.Decode, 500, "", vllm, EngineDead},
		{route.Prefill, 500, "", vllm, EngineDead},
		{route.Decode, 500, "", `{"error":{"message":"no grammar: EngineCore encountered an issue"}}`, Status5xx},
		{route.Decode, 503, "", `{"error":"Model is overloaded","error_type":"overloaded"}`, Overloaded},
		{route.Decode, 503, "", `{"error":{"message":null}}`, Status5xx},
		{route.Decode, 502, "2", "", Status5xx},
		{route.Prefill, 503, "", "", Status5xx},
		{route.Prefill, 503, "2", "", Overloaded},
		{route.Decode, 503, "Wed, 21 Oct 2026 07:28:00 GMT", "", Overloaded},
		{route.Decode, 503, "", sglang, Overloaded},
		{route.Decode, 503, "", anthropic, Overloaded},
		{route.Prefill, 503, "", anthropic, Overloaded},
		{route.Decode, 500, "", `{"type":"error","error":{"type":"api_error","message":"overloaded_error"}}`, Status5xx},
		{route.Decode, 400, "", `{"type":"error","error":{"type":"invalid_request_error","message":"no"}}`, Status4xx},
		{route.Decode, 503, "", "no healthy upstream", Status5xx},
		{route.Decode, 529, "", "", Overloaded},
		{route.Prefill, 529, "", "", Overloaded},
		{route.Decode, 429, "", "", Overloaded},
		{route.Decode, 400, "", sglang, Status4xx}, // a client's own words
		{route.Prefill, 404, "", "", Status4xx},
		{route.Prefill, 302, "", "", Status3xx},
		{route.Decode, 302, "", "", Status4xx},
		{route.Decode, 508, "", "", Loop},
		{route.Prefill, 508, "", "", Loop},
	} {
		for _, keyed := range []bool{false, true} {
			if got := OfStatus(c.phase, c.status, c.retryAfter, []byte(c.body), keyed); got != c.want {
				t.Errorf("%s %d, Retry-After %q, a key %v, %.80q: %s, want %s", c.phase, c.status, c.retryAfter, keyed, c.body, got, c.want)
			}
		}
	}
	for _, status := range []int{401, 403} {
		if ours, theirs := OfStatus(route.Decode, status, "", nil, true), OfStatus(route.Decode, status, "", nil, false); ours != Unauthorized || theirs != Status4xx {
			t.Errorf("%d: %s for the router's key, %s for the client's", status, ours, theirs)
		}
	}
	if m := Unauthorized.Means(); m.Final || m.Broke || !m.Outcome.Failure() {
		t.Errorf("%+v", m)
	}
	for event, want := range map[string]Reason{sglang: Overloaded, anthropic: Overloaded, vllm: EngineDead, `{"error":{"message":"out of memory"}}`: StreamError} {
		if got := OfEvent(event); got != want {
			t.Errorf("a stream that begins with %s: %s, want %s", event, got, want)
		}
	}
}

// TestCut: a stream that broke off is a failure of the decode leg of which the client has
// a part.
func TestCut(t *testing.T) {
	w := &workers.Worker{State: new(workers.State)}
	w.Name = "a"
	want := Failure{Worker: w.State, Name: "a", Phase: route.Decode, Reason: Reset, Sent: true, Begun: true}
	if got := *Cut(w, Reset); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
