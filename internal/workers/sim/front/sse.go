package front

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/dynctl/dynctl/internal/router/api"
)

// events writes a stream of server-sent events, one flush a write.
type events struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	buf  []byte
	head bool // the response head is out
	// prelude writes what comes before an error that is the stream's first
	// event; nil for nothing.
	prelude func()
	// failed writes an error event in another API's form; nil for OpenAI's.
	failed func(message string)
}

func newEvents(w http.ResponseWriter) *events {
	return &events{w: w, rc: http.NewResponseController(w)}
}

// send writes what is in buf.
func (e *events) send() error {
	if !e.head {
		e.head = true
		e.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		e.w.WriteHeader(http.StatusOK)
	}
	if _, err := e.w.Write(e.buf); err != nil {
		return err
	}
	e.buf = e.buf[:0]
	return e.rc.Flush()
}

func (e *events) str(s string)  { e.buf = append(e.buf, s...) }
func (e *events) json(s string) { e.buf = api.AppendString(e.buf, s) }
func (e *events) num(n int)     { e.buf = strconv.AppendInt(e.buf, int64(n), 10) }

// value appends the JSON of v.
func (e *events) value(v any) error {
	b, err := json.Marshal(v)
	e.buf = append(e.buf, b...)
	return err
}

// event appends an event with the JSON of v; it may have no kind.
func (e *events) event(kind string, v any) error {
	if kind != "" {
		e.str("event: " + kind + "\n")
	}
	e.str("data: ")
	err := e.value(v)
	e.str("\n\n")
	return err
}

func (e *events) ids(ids []uint32) {
	e.buf = append(e.buf, '[')
	for i, id := range ids {
		if i > 0 {
			e.buf = append(e.buf, ',')
		}
		e.buf = strconv.AppendUint(e.buf, uint64(id), 10)
	}
	e.buf = append(e.buf, ']')
}

func (e *events) usage(u usage) {
	e.str(`{"prompt_tokens":`)
	e.num(u.PromptTokens)
	e.str(`,"total_tokens":`)
	e.num(u.TotalTokens)
	e.str(`,"completion_tokens":`)
	e.num(u.CompletionTokens)
	if d := u.PromptTokensDetails; d != nil {
		e.str(`,"prompt_tokens_details":{"cached_tokens":`)
		e.num(d.CachedTokens)
		e.str(`}`)
	}
	e.str(`}`)
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
	var a *apiError
	if errors.As(err, &a) {
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
	e.str(`data: {"error": {"message": `)
	e.json(message)
	e.str(`, "type": "InternalServerError", "param": null, "code": 500}}` + "\n\ndata: [DONE]\n\n")
	_ = e.send() // the client may be gone
}
