package front

import (
	"context"
	"errors"
	"net/http"

	"github.com/dynctl/dynctl/internal/workers/sim/front/httpjson"
)

// events is the answer to a request as a stream.
type events struct {
	*httpjson.Events
	// prelude adds what comes before an error that is the stream's first
	// event; nil for nothing.
	prelude func()
	// failed adds an error event in another API's form; nil for OpenAI's.
	failed func(message string)
}

func newEvents(w http.ResponseWriter) *events { return &events{Events: httpjson.NewEvents(w)} }

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
	if a, ok := errors.AsType[*httpjson.Error](err); ok {
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
