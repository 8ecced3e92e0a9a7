package front

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/dynctl/dynctl/internal/router/api"
)

// done ends a stream of OpenAI's API.
const done = "data: [DONE]\n\n"

// events writes a stream of server-sent events, one flush a write.
type events struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	buf  bytes.Buffer
	json *json.Encoder // into buf
	head bool          // the response head is out
	// prelude writes what comes before an error that is the stream's first
	// event; nil for nothing.
	prelude func()
	// failed writes an error event in another API's form; nil for OpenAI's.
	failed func(message string)
}

func newEvents(w http.ResponseWriter) *events {
	e := &events{w: w, rc: http.NewResponseController(w)}
	e.json = json.NewEncoder(&e.buf)
	e.json.SetEscapeHTML(false)
	return e
}

// send writes what is in buf.
func (e *events) send() error {
	if !e.head {
		e.head = true
		e.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		e.w.WriteHeader(http.StatusOK)
	}
	if _, err := e.buf.WriteTo(e.w); err != nil {
		return err
	}
	return e.rc.Flush()
}

// event appends an event with the JSON of v; it may have no kind.
func (e *events) event(kind string, v any) error {
	if kind != "" {
		e.buf.WriteString("event: " + kind + "\n")
	}
	e.buf.WriteString("data: ")
	err := e.json.Encode(v)
	e.buf.WriteByte('\n')
	return err
}

// failure ends a stream after an error, as vLLM does: an error event, then
// [DONE]. A cut or abandoned connection is dropped without a word.
func (e *events) failure(r *http.Request, err error) {
	if errors.Is(err, errDie) || r.Context().Err() != nil && !errors.Is(err, ErrDead) || errors.Is(err, context.Canceled) {
		panic(http.ErrAbortHandler)
	}
	message := "Internal server error"
	if errors.Is(err, ErrDead) {
		message = ErrDead.Error()
	}
	if a, ok := errors.AsType[*apiError](err); ok {
		message = a.message
	}
	if !e.head && e.prelude != nil {
		e.prelude()
	}
	if e.failed != nil {
		e.failed(message)
		_ = e.send() // the client may be gone
		return
	}
	e.buf.WriteString(`data: {"error": {"message": ` + string(api.AppendString(nil, message)) + `, "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n" + done)
	_ = e.send() // the client may be gone
}
