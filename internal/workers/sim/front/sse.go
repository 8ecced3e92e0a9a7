package front

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// events is the answer to a request as a stream of server-sent events. What was added is
// written by Send.
type events struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	buf  bytes.Buffer
	json *json.Encoder // into buf
	head bool          // the response head is out
	// prelude adds what comes before an error that is the stream's first
	// event; nil for nothing.
	prelude func()
	// params are the transfer parameters of a piece; nil for none.
	params func(*choice) json.RawMessage
	// failed adds an error event in another API's form; nil for OpenAI's.
	failed func(message string)
}

// newEvents returns the stream that answers a request.
func newEvents(w http.ResponseWriter) *events {
	e := &events{w: w, rc: http.NewResponseController(w)}
	e.json = json.NewEncoder(&e.buf)
	e.json.SetEscapeHTML(false)
	return e
}

// Send writes what was added since the last call, in one flush.
func (e *events) Send() error {
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

// Add adds an event with the JSON of v; it may have no kind.
func (e *events) Add(kind string, v any) error {
	if kind != "" {
		e.buf.WriteString("event: " + kind + "\n")
	}
	e.buf.WriteString("data: ")
	err := e.json.Encode(v)
	e.buf.WriteByte('\n')
	return err
}

// Begun reports whether anything was written.
func (e *events) Begun() bool { return e.head }

// AddDone adds the end of a stream of OpenAI's API.
func (e *events) AddDone() { e.buf.WriteString("data: [DONE]\n\n") }

// AddError adds vLLM's error event and the end of the stream.
func (e *events) AddError(message string) {
	e.buf.WriteString(`data: {"error": {"message": ` + string(rawjson.AppendString(nil, message)) + `, "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n")
	e.AddDone()
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
	if a, ok := errors.AsType[*Error](err); ok {
		message = a.Message
	}
	if !e.Begun() && e.prelude != nil {
		e.prelude()
	}
	if e.failed != nil {
		e.failed(message)
	} else {
		e.AddError(message)
	}
	_ = e.Send() // the client may be gone
}
