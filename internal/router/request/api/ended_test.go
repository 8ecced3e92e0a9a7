package api

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestEnded: the error says who ended the request, unless the request itself is at
// fault, and a stream that has begun keeps the error that it ended with.
func TestEnded(t *testing.T) {
	engine := &Error{Status: http.StatusBadGateway, Code: CodeUpstreamError}
	for _, c := range []struct {
		err                  error
		left, stopped, begun bool
		status               int
	}{
		{engine, true, false, false, StatusClientClosed},
		{engine, true, false, true, http.StatusBadGateway},
		{engine, true, true, true, http.StatusServiceUnavailable},
		{engine, false, true, false, http.StatusServiceUnavailable},
		{BadRequest("n", "odd"), true, true, false, http.StatusBadRequest},
		{context.Canceled, true, false, true, StatusClientClosed},
	} {
		if e := Ended(c.err, c.left, c.stopped, c.begun); e.Status != c.status || !errors.Is(e, c.err) {
			t.Errorf("%+v: %d %v", c, e.Status, e)
		}
	}
}

// broken is a client that cannot be written to.
type broken struct{ http.ResponseWriter }

func (broken) Write([]byte) (int, error) { return 0, errors.New("gone") }

// TestEndStream: the last event stands by itself, also after the beginning of another one.
func TestEndStream(t *testing.T) {
	e := &Error{Status: http.StatusBadGateway, Code: CodeUpstreamError, Message: "broke"}
	for _, cut := range []bool{false, true} {
		w := httptest.NewRecorder()
		if !e.EndStream(w, Chat, cut) || !w.Flushed || strings.HasPrefix(w.Body.String(), "\n\n") != cut || !strings.HasSuffix(w.Body.String(), "data: [DONE]\n\n") {
			t.Errorf("cut is %v: %q", cut, w.Body)
		}
	}
	if e.EndStream(broken{httptest.NewRecorder()}, Chat, false) {
		t.Error("reported as sent to a client that is gone")
	}
}
