package attempt

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestErrorIsToldToClients: what is the request's own fault stays so; anything else is the
// worker's, which is named, and that of a prefill says so in its code.
func TestErrorIsToldToClients(t *testing.T) {
	w := &workers.Worker{State: &workers.State{}}
	w.Name = "w"
	broke := errors.New("broke")
	for _, c := range []struct {
		phase  selector.Phase
		err    error
		status int
		code   api.Code
		text   string
	}{
		{selector.Decode, broke, http.StatusBadGateway, api.CodeUpstreamError, "w: broke"},
		{selector.Prefill, broke, http.StatusBadGateway, api.CodePrefillFailed, "remote prefill on w failed: broke"},
		{selector.Decode, context.DeadlineExceeded, http.StatusGatewayTimeout, api.CodeTimeout, "w: context deadline exceeded"},
		{selector.Prefill, context.DeadlineExceeded, http.StatusGatewayTimeout, api.CodePrefillFailed, "remote prefill on w failed: context deadline exceeded"},
		{selector.Prefill, context.Canceled, api.StatusClientClosed, api.CodeClientClosed, "the client closed the connection"},
		{selector.Decode, api.BadRequest("n", "n is odd"), http.StatusBadRequest, api.CodeInvalidRequest, "n is odd"},
	} {
		e := NewError(c.phase, w, Reset, true, c.err)
		told := api.FromError(e)
		if errors.As(c.err, new(*api.Error)) { // which stands in the chain, and is taken as it is
			told = e.APIError()
		}
		if told.Status != c.status || told.Code != c.code || told.Message != c.text || !errors.Is(told, c.err) {
			t.Errorf("%s, %v: %d %s %q", c.phase, c.err, told.Status, told.Code, told.Message)
		}
		if !e.Sent || e.Worker != w.State || e.Reason != Reset {
			t.Errorf("%+v", e.Failure)
		}
	}
}
