package httpjson

import (
	"bytes"
	"encoding/json"
	"net/http"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Events writes a stream of server-sent events. What was added is written by Send.
type Events struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	buf  bytes.Buffer
	json *json.Encoder // into buf
	head bool          // the response head is out
}

// NewEvents returns the stream that answers a request.
func NewEvents(w http.ResponseWriter) *Events {
	e := &Events{w: w, rc: http.NewResponseController(w)}
	e.json = json.NewEncoder(&e.buf)
	e.json.SetEscapeHTML(false)
	return e
}

// Send writes what was added since the last call, in one flush.
func (e *Events) Send() error {
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
func (e *Events) Add(kind string, v any) error {
	if kind != "" {
		e.buf.WriteString("event: " + kind + "\n")
	}
	e.buf.WriteString("data: ")
	err := e.json.Encode(v)
	e.buf.WriteByte('\n')
	return err
}

// Begun reports whether anything was written.
func (e *Events) Begun() bool { return e.head }

// AddDone adds the end of a stream of OpenAI's API.
func (e *Events) AddDone() { e.buf.WriteString("data: [DONE]\n\n") }

// AddError adds vLLM's error event and the end of the stream.
func (e *Events) AddError(message string) {
	e.buf.WriteString(`data: {"error": {"message": ` + string(rawjson.AppendString(nil, message)) + `, "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n")
	e.AddDone()
}
